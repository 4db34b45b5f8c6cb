"""From many findings to the mistakes behind them, each with a repair that was audited.

One mistake often gives many findings: scale views that were made from the shape give one collision and many misplaced
views per layer. :func:`diagnose` groups the findings of an audit by mistake, names each mistake with the numbers that
prove it, repairs the views (or the claim) and audits the repaired set. A repair that does not make the set clean is
never called proved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvviz.audit.audit import audit_views
from kvviz.audit.cause_rules import Guess, Surroundings, explain_extent, explain_place, natural, steps_of
from kvviz.audit.cause_words import CAUSES, Cause, tell
from kvviz.audit.claims import (
    Addressed,
    Aligned,
    BelongsAt,
    Claim,
    Covers,
    Declared,
    Follows,
    Maps,
    SameBytes,
    StepAlike,
)
from kvviz.audit.collision_rules import explain_overlap
from kvviz.audit.findings import Audit, Finding
from kvviz.audit.rightful import rightful_place
from kvviz.audit.view import View

__all__ = ["CAUSES", "Cause", "Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """One mistake that explains some findings of an audit.

    Attributes:
        cause: the name of the mistake, one of :data:`CAUSES`.
        text: the mistake in one or two sentences, with the numbers that prove it.
        effect: what the mistake does, with the number of elements and bytes.
        views: the names of all views that have the mistake, naturally sorted.
        findings: the findings of the audit that the mistake explains.
        repair: the repaired numbers in words, or what could not be repaired.
        repaired: the repaired views; empty if the claim or the code must change and not a view.
        proved: True if the same claims are clean with the repairs of all diagnoses, as far as these views are concerned.
        others: other causes that fit the same numbers, each with what would tell them apart.
    """

    cause: str
    text: str
    effect: str
    views: tuple[str, ...]
    findings: tuple[Finding, ...]
    repair: str
    repaired: tuple[View, ...] = ()
    proved: bool = False
    others: tuple[str, ...] = ()


@dataclass
class _State:
    """The views and claims, with the repairs so far."""

    views: dict[str, View]
    claims: list[Claim]

    def audit(self) -> Audit:
        return audit_views(list(self.views.values()), self.claims, witnesses=False)


def diagnose(views: Sequence[View], claims: Sequence[Claim], result: Audit | None = None) -> tuple[Diagnosis, ...]:
    """Return one diagnosis per mistake, the one that explains most findings first; none for a clean audit.

    Args:
        result: the audit of these views and claims, if the caller has it already.

    Raises:
        ValueError: as ``audit_views``.
    """
    result = audit_views(views, claims) if result is None else result
    if not result.findings:
        return ()
    state = _State({view.name: view for view in views}, list(claims))
    groups: dict[tuple, list[tuple[Guess, list[Guess], View | None]]] = {}
    for stage in (_misplaced, _extents, _parts, _numbers, _overlaps):
        found = list(stage(state, result))
        for guesses, place in found:
            best = guesses[0]
            groups.setdefault((best.cause, best.key), []).append((best, guesses[1:], place))
        _apply(state, [guesses[0] for guesses, _ in found])
        if found and state.audit().clean:
            break
    left = state.audit()
    return _ordered(result, groups, left, {view.name: view for view in views})


def _apply(state: _State, guesses: Sequence[Guess]) -> None:
    for guess in guesses:
        if guess.repaired is not None:
            state.views[guess.view] = guess.repaired
        if "claim" in guess.facts:
            old, new = guess.facts["claim"]
            state.claims = [new if claim == old else claim for claim in state.claims]


_Found = Iterator[tuple[list[Guess], View | None]]


def _misplaced(state: _State, result: Audit) -> _Found:
    """Views that are not where a claim says they belong."""
    places = _places(state)
    wrong = {f.views[0] for f in result.findings if f.kind in ("misplaced", "permuted") and f.views}
    around = Surroundings(state.views, places)
    for name in places:
        if name in wrong:
            guesses = explain_place(state.views[name], places[name], around)
            if guesses:
                yield guesses, places[name]


def _places(state: _State) -> dict[str, View]:
    return {
        (claim.view if isinstance(claim, BelongsAt) else claim.scale): rightful_place(claim, state.views)
        for claim in state.claims
        if isinstance(claim, BelongsAt | Follows)
    }


def _extents(state: _State, result: Audit) -> _Found:
    """Extents that lack bytes of their block, or take bytes of another block."""
    wrong = {f.views[0] for f in state.audit().findings if f.kind in ("truncated", "oversized") and f.views}
    around = Surroundings(state.views, _places(state))
    for claim in state.claims:
        if isinstance(claim, Covers) and claim.extent in wrong:
            content = [state.views[name] for name in claim.content]
            guesses = explain_extent(state.views[claim.extent], content, around)
            if guesses:
                yield guesses, None


def _parts(state: _State, result: Audit) -> _Found:
    """Parts that are not the bytes of their whole, and copies whose sides differ."""
    findings = state.audit().findings
    for claim in state.claims:
        pair = (
            (claim.part, claim.whole) if isinstance(claim, SameBytes) else
            (claim.target, claim.source) if isinstance(claim, StepAlike) else None
        )  # fmt: skip
        if pair is None or not any(set(pair) <= set(f.views) for f in findings):
            continue
        part, whole = (state.views[name] for name in pair)
        if isinstance(claim, SameBytes):
            facts = {"part": part.num_elements * part.itemsize, "whole": whole.num_elements * whole.itemsize}
            repaired = replace(whole, name=part.name, role=part.role)
            yield [Guess("sections", part.name, repaired, facts)], whole
        else:
            facts = {"step": steps_of(part)[0], "belongs": steps_of(whole)[0]}
            yield [Guess("copy_steps", part.name, None, facts)], None


def _numbers(state: _State, result: Audit) -> _Found:
    """Ids, addresses and boundaries that do not fit."""
    wrong = {(f.kind, name) for f in state.audit().findings for name in f.views}
    for claim in state.claims:
        guess = None
        if isinstance(claim, Maps) and ("index_space", claim.view) in wrong:
            guess = _ids(claim, state.views[claim.view])
        elif isinstance(claim, Addressed) and ("index_space", claim.view) in wrong:
            better = replace(claim, address_type="int64")
            guess = Guess("address_width", claim.view, None, {"type": claim.address_type, "claim": (claim, better)})
        elif isinstance(claim, Aligned) and ("unaligned", claim.view) in wrong:
            view, boundary = state.views[claim.view], claim.boundary_bytes
            guess = Guess(
                "unaligned_rows", view.name, _padded_rows(view, boundary), {"boundary": boundary}, (boundary,)
            )
        elif isinstance(claim, Declared) and ("ambiguous", claim.view) in wrong:
            guess = Guess("undeclared", claim.view, None, {"readings": ", ".join(claim.readings)})
        if guess:
            yield [guess], None


def _ids(claim: Maps, view: View) -> Guess | None:
    blocks = view.shape[0] if view.shape else 1
    held = blocks // claim.ratio
    step = view.stride[0] * view.itemsize * claim.ratio if view.shape else 0
    better = replace(claim, count=min(claim.count, held), stride_bytes=None if claim.stride_bytes is None else step)
    facts = {"count": claim.count, "held": held, "blocks": blocks, "ratio": claim.ratio,
             "step": claim.stride_bytes or 0, "belongs": step, "claim": (claim, better)}  # fmt: skip
    ratio = max(step, claim.stride_bytes or 0) // min(step, claim.stride_bytes or step) if step else 0
    return Guess("block_unit", claim.view, None, facts, (ratio if ratio > 1 else claim.name,))


def _padded_rows(view: View, boundary: int) -> View | None:
    """Return the view with rows at multiples of the boundary; None if its start cannot move."""
    if view.offset * view.itemsize % boundary or boundary % view.itemsize:
        return None
    order = sorted(range(len(view.shape) - 1), key=lambda axis: abs(view.stride[axis]))
    stride, reach = list(view.stride), (view.shape[-1] - 1) * abs(view.stride[-1]) + 1 if view.shape else 1
    unit = boundary // view.itemsize
    for axis in order:
        stride[axis] = max(-(-stride[axis] // unit) * unit, -(-reach // unit) * unit)
        reach = (view.shape[axis] - 1) * stride[axis] + reach
    made = replace(view, stride=tuple(stride))
    size = max(view.storage.nbytes, -(-made.span_bytes[1] // boundary) * boundary)
    return replace(made, storage=replace(view.storage, nbytes=size))


def _overlaps(state: _State, result: Audit) -> _Found:
    """Views that overlap or leave their storage, although no claim says where they belong."""
    findings = [f for f in state.audit().findings if f.kind in ("collision", "out_of_bounds", "self_overlap")]
    for guesses in explain_overlap(state.views, findings, lambda views: _State(views, state.claims).audit()):
        yield guesses, None


def _ordered(result: Audit, groups: dict, left: Audit, views: dict[str, View]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses of the groups, and one more for findings that no group explains."""
    blamed = [{guess.view for guess, _, _ in members} for members in groups.values()]
    made, explained = [], set()
    for (key, members), names in zip(groups.items(), blamed, strict=True):
        mine = [f for f in result.findings if names & set(f.views)]
        explained |= set(mine)
        made.append(_diagnosis(key[0], members, mine, left, views))
    rest = [f for f in result.findings if f not in explained and f.severity == "error"]
    made.sort(key=lambda one: -len(one.findings))
    if rest:
        names = tuple(sorted({name for f in rest for name in f.views}, key=natural))
        text = f"No known mistake explains {_count(len(rest), 'finding')}. The findings below give the places."
        made.append(Diagnosis("unknown", text, "", names, tuple(rest), "No repair is proposed."))
    return tuple(made)


def _diagnosis(cause: str, members: list, mine: list[Finding], left: Audit, views: dict[str, View]) -> Diagnosis:
    names = tuple(sorted({guess.view for guess, _, _ in members}, key=natural))
    repaired = tuple(guess.repaired for guess, _, _ in members if guess.repaired is not None)
    claims = any("claim" in guess.facts for guess, _, _ in members)
    dirty = any(set(f.views) & set(names) for f in left.findings if f.severity == "error")
    proved = (bool(repaired) or claims) and not dirty
    others = dict.fromkeys(
        CAUSES[other.cause].apart for _, rest, _ in members for other in rest if other.cause != cause
    )
    told = tell(cause, [guess for guess, _, _ in members], [views[name] for name in names if name in views])
    bytes_ = sum(f.bytes or 0 for f in mine if f.kind != "collision") or sum(f.bytes or 0 for f in mine)
    effect = f"{_count(len(mine), 'finding')} ({_kinds(mine)}), {_count(bytes_, 'byte')}."
    repair = told.repair if repaired or claims else "No repair is proposed: the numbers do not say which one is meant."
    if (repaired or claims) and not proved:
        repair = f"Not repaired: with {told.repair} the same claims are still not clean."
    return Diagnosis(cause, told.text, effect, names, tuple(mine), repair, repaired if proved else (), proved,
                     tuple(text for text in others if text))  # fmt: skip


def _kinds(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f.kind for f in findings))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
