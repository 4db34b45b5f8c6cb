"""From many findings to the mistakes behind them, each with a repair that was audited.

One mistake often gives many findings. Example: the scale views of 80 layers were computed from the shape. The audit
finds 2 collisions and 160 misplaced views. :func:`diagnose` groups the findings by mistake, and names each mistake
with the numbers that prove it. It repairs the views or the claim, and audits the repaired set. A repair is called
proved only if this audit has no error about the repaired views.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from kvviz.audit.audit import audit_views, views_of_claim
from kvviz.audit.budget import TooMuchWorkError, limited, spend
from kvviz.audit.cause_rules import explain_place
from kvviz.audit.cause_words import CAUSES, Cause, tell, tell_of_others
from kvviz.audit.claims import (
    Addressed,
    Aligned,
    BelongsAt,
    Claim,
    Covers,
    Declared,
    Follows,
    Maps,
    Overlay,
    SameBytes,
    StepAlike,
    names_in,
)
from kvviz.audit.collision_rules import explain_overlap
from kvviz.audit.extent_rules import explain_extent
from kvviz.audit.findings import Audit, Finding
from kvviz.audit.guesses import Guess, Surroundings, natural, steps_of
from kvviz.audit.repair_words import counted, effect_words, repair_words
from kvviz.audit.rightful import rightful_place, starts_map
from kvviz.audit.view import View

__all__ = ["CAUSES", "UNKNOWN", "Cause", "Diagnosis", "diagnose"]

UNKNOWN = "unknown"
"""Cause of a diagnosis that holds the findings which no known mistake explains."""

VIEW_COST = 200
"""Work of looking at one view for one guess, in units of the work limit."""

NUMBER_COST = 20
"""Work of one finding in one diagnosis, in units of the work limit."""


@dataclass(frozen=True)
class Diagnosis:
    """One mistake that explains some findings of an audit.

    Attributes:
        cause: the name of the mistake, a name from :data:`CAUSES` or :data:`UNKNOWN`.
        text: the mistake in a few sentences, with the numbers that prove it.
        effect: what the mistake does, with numbers of elements and bytes.
        views: the names of all views that have the mistake, naturally sorted.
        findings: the findings of the audit that the mistake explains.
        repair: the repaired numbers in words, or the reason why nothing is repaired.
        repaired: the repaired views. If a claim or the code must change instead of a view, it is empty.
        proved: True if the same claims hold for these views after the repairs of all diagnoses.
        others: other causes that fit the same numbers, each with the fact that would tell them apart.
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
    """The views and claims with the repairs so far."""

    views: dict[str, View]
    claims: list[Claim]

    def audit(self, views: dict[str, View] | None = None) -> Audit:
        """Return the audit of ``views``.

        By default, these are the views of this object. Raise TooMuchWorkError if the work limit is reached.
        """
        views = self.views if views is None else views
        spend(VIEW_COST * len(views))
        return audit_views(list(views.values()), self.claims, witnesses=False)

    def repair(self, guesses: Sequence[Guess]) -> None:
        """Replace the views and claims of the guesses with the repaired ones."""
        self.views |= {guess.view: guess.repaired for guess in guesses if guess.repaired is not None}
        changed = dict(guess.facts["claim"] for guess in guesses if "claim" in guess.facts)
        self.claims = [changed.get(claim, claim) for claim in self.claims]

    @property
    def places(self) -> dict[str, View]:
        """Return the rightful place of each view that has a claim about its place.

        If the elements of a view do not start at multiples of their size, its rightful place is a view of single bytes.
        """
        claims = [claim for claim in self.claims if isinstance(claim, BelongsAt | Follows)]
        named = [(claim.view if isinstance(claim, BelongsAt) else claim.scale, claim) for claim in claims]
        return {name: rightful_place(claim, self.views) for name, claim in named}

    @property
    def starts(self) -> dict[str, View]:
        """Return the same places as :attr:`places`, each as a view of the same shape as the view that belongs there."""
        return {name: starts_map(self.views[name], place) for name, place in self.places.items()}


_Members = dict[tuple, list[tuple[Guess, list[Guess]]]]
"""Guesses by cause and key: the best guess for each view, and the other guesses that fit."""


def diagnose(views: Sequence[View], claims: Sequence[Claim], result: Audit | None = None) -> tuple[Diagnosis, ...]:
    """Return one diagnosis per mistake. The one that explains most findings is first. A clean audit has none.

    Findings that no known mistake explains are in one last diagnosis with the cause :data:`UNKNOWN`. What was not
    judged is not diagnosed. If the work limit is reached, no repair is proved, and the findings that are left are
    unexplained.

    Args:
        result: the audit of these views and claims, if the caller has it already.

    Raises:
        ValueError: the same errors as in ``audit_views``.
        TooMuchWorkError: the diagnoses together would be too large.
    """
    result = audit_views(views, claims) if result is None else result
    if not result.judged:
        return ()
    result, named = replace(result, findings=result.judged), {view.name: view for view in views}
    with limited():
        groups, left = _explained(named, claims, result)
    with limited():
        return _ordered(result, groups, left, named)


def _explained(named: dict[str, View], claims: Sequence[Claim], result: Audit) -> tuple["_Members", Audit | None]:
    """Return the guesses at causes, and the audit after all repairs. If the work limit was reached, it returns None
    instead of this audit."""
    state, groups, left = _State(dict(named), list(claims)), {}, None
    try:
        for stage in (_misplaced, _extents_of_sound_content, _parts, _numbers, _overlaps, _extents):
            found = list(stage(state, result))
            spend(VIEW_COST * len(found))
            for best, *others in found:
                groups.setdefault((best.cause, best.key), []).append((best, others))
            state.repair([best for best, *_ in found])
            if found and state.audit().clean:
                break
        left = state.audit()
    except TooMuchWorkError:
        pass  # nothing is proved then
    return groups, left


def _misplaced(state: _State, result: Audit) -> Iterator[list[Guess]]:
    """Yield guesses for views that are not where a claim states that they belong."""
    places, starts = state.places, state.starts
    wrong = {f.views[0] for f in result.findings if f.kind in ("misplaced", "permuted") and f.views}
    around = Surroundings(state.views, starts)
    for name in places:
        if name not in wrong:
            continue
        spend(VIEW_COST + len(around.family(name)))
        if guesses := explain_place(state.views[name], starts[name], around):
            bytewise = places[name].shape != starts[name].shape
            repaired = replace(places[name], read_only=state.views[name].read_only)
            yield [replace(guess, repaired=repaired) for guess in guesses] if bytewise else guesses


def _extents_of_sound_content(state: _State, result: Audit) -> Iterator[list[Guess]]:
    """Yield guesses for extents whose content shares no byte with other views. Other content may be wrong itself."""
    doubtful = {name for f in state.audit().findings if f.kind in ("collision", "out_of_bounds") for name in f.views}
    return _extents(state, result, doubtful - state.places.keys())


def _extents(state: _State, result: Audit, doubtful: Collection[str] = ()) -> Iterator[list[Guess]]:
    """Yield guesses for extents that lack bytes of their block, or take bytes of another block.

    Args:
        doubtful: names of content that may be wrong itself. Extents of such content are left out.
    """
    wrong = {f.views[0] for f in state.audit().findings if f.kind in ("truncated", "oversized") and f.views}
    around = Surroundings(dict(state.views), state.starts)
    for claim in state.claims:
        if not isinstance(claim, Covers) or claim.extents_per_block > 1:
            continue  # the rules compare one entry of the extent with one block, or with several blocks
        if not set(names_in(claim.content)).isdisjoint(doubtful):
            continue
        extents, content = ([state.views[name] for name in names_in(given)] for given in (claim.extent, claim.content))
        if extents[0].name in wrong and (
            guess := _left_out(extents, content) or _counts(claim, extents, content, state)
        ):
            yield [guess]
            continue
        if claim.blocks_per_extent > 1:
            content = _grouped(content, claim.blocks_per_extent)
            around = Surroundings({**state.views, **{view.name: view for view in content}})
        spend(VIEW_COST * len(content))
        for extent in extents:
            alone = sum(other.storage == extent.storage for other in extents) == 1
            mine = [view for view in content if view.storage == extent.storage]
            spend(VIEW_COST + len(around.family(extent.name)) + len(extents))
            if alone and extent.name in wrong and (guesses := explain_extent(extent, mine, around)):
                yield guesses


def _left_out(extents: Sequence[View], content: Sequence[View]) -> Guess | None:
    """Return a guess if content lies in a storage in which no extent lies."""
    there = {extent.storage for extent in extents}
    left = [view for view in content if view.storage not in there and view.num_elements]
    if not left:
        return None
    scales = all(view.role == "scale" for view in left)
    what, cause = ("the scales", "width_without_scales") if scales else ("this content", "storage_left_out")
    facts = {"storage": left[0].storage.name, "content": left[0].name,
             "advice": f"Add an extent that takes {what} from {'their' if scales else 'its'} storage."}  # fmt: skip
    return Guess(cause, extents[0].name, None, facts, ("storage",))


def _counts(claim: Covers, extents: Sequence[View], content: Sequence[View], state: _State) -> Guess | None:
    """Return a guess if extents and content count blocks of different sizes, and the claim holds with their ratio."""
    sizes = {view.shape[:1] for view in extents}, {view.shape[:1] for view in content}
    if any(len(one) != 1 or not all(size for size in next(iter(one), ())) or () in one for one in sizes):
        return None
    ((entries,),), ((blocks,),) = sizes
    if entries == blocks or max(entries, blocks) % min(entries, blocks) or claim.blocks_per_extent > 1:
        return None
    field = "extents_per_block" if entries > blocks else "blocks_per_extent"
    better = replace(claim, **{field: max(entries, blocks) // min(entries, blocks)})
    if not audit_views(views_of_claim(better, state.views), [better], witnesses=False).clean:
        return None
    facts = {"entries": entries, "blocks": blocks, "claim": (claim, better)}
    return Guess("block_unit", extents[0].name, None, facts, (field, entries, blocks))


def _grouped(content: Sequence[View], blocks: int) -> list[View]:
    """Return views whose first axis counts groups of blocks. A last group of fewer blocks is left out."""
    return [
        replace(view, shape=(view.shape[0] // blocks, blocks, *view.shape[1:]),
                stride=(view.stride[0] * blocks, *view.stride), axes=())
        for view in content
        if view.shape and view.shape[0] >= blocks
    ]  # fmt: skip


def _parts(state: _State, result: Audit) -> Iterator[list[Guess]]:
    """Yield guesses for parts that are not the bytes of their whole, and for copies with two different sides."""
    findings = state.audit().findings
    wrong = {frozenset(f.views) for f in findings if len(f.views) == 2}
    unlike = [f for f in findings if f.kind in ("truncated", "oversized")]
    for claim in state.claims:
        sides = (names_in(claim.part), names_in(claim.whole)) if isinstance(claim, SameBytes) else ()
        if [len(names) for names in sides] == [1, 1] and {*sides[0], *sides[1]} in wrong:
            part, whole = (state.views[name] for (name,) in sides)
            size, owed = (view.num_elements * view.itemsize for view in (part, whole))
            repaired = replace(whole, name=part.name, role=part.role, read_only=part.read_only)
            if size == owed:
                yield [Guess("sections", part.name, repaired, {"part": size, "whole": owed})]
            elif owed and size % owed == 0:
                facts = {"width": size, "owed": owed, "ratio": size // owed}
                yield [Guess("block_unit", part.name, repaired, facts, (size // owed,))]
        elif isinstance(claim, SameBytes) and any({*sides[0], *sides[1]} == set(f.views) for f in unlike):
            yield from _pieces(claim, state)
        if isinstance(claim, StepAlike) and {claim.source, claim.target} in wrong:
            source, target = state.views[claim.source], state.views[claim.target]
            facts = {"step": (*steps_of(target), 0)[0], "belongs": (*steps_of(source), 0)[0], "source": source.name}
            yield [Guess("copy_steps", target.name, None, facts)]


def _pieces(claim: SameBytes, state: _State) -> Iterator[list[Guess]]:
    """Yield guesses for a part or a whole of several views."""
    part, whole = ([state.views[name] for name in names_in(given)] for given in (claim.part, claim.whole))
    size, owed = (sum(view.num_elements * view.itemsize for view in views) for views in (part, whole))
    if len(part) == 1 and size == owed:
        joined = _one_view(whole)
        repaired = joined and replace(joined, name=part[0].name, role=part[0].role, read_only=part[0].read_only)
        yield [Guess("sections", part[0].name, repaired, {"part": size, "pieces": len(whole)}, ("pieces",))]
    elif len(part) > 1:
        for piece in part:
            given = replace(claim, part=piece.name)
            if audit_views([piece, *whole], [given], witnesses=False).of_kind("oversized"):
                yield [Guess("table_entry", piece.name, None, {}, ("outside", claim.whole))]


def _one_view(views: Sequence[View]) -> View | None:
    """If views are equal and have equal distances, return one view with all their elements. Otherwise return None."""
    first, starts = views[0], [view.offset for view in views]
    distances = {b - a for a, b in zip(starts, starts[1:], strict=False)}
    if len(distances) != 1 or len({(v.shape, v.stride, v.itemsize, v.storage) for v in views}) != 1:
        return None
    return replace(first, shape=(len(views), *first.shape), stride=(*distances, *first.stride), axes=())


def _numbers(state: _State, result: Audit) -> Iterator[list[Guess]]:
    """Yield guesses for ids, addresses, rows and shapes that do not fit."""
    wrong = {(f.kind, name) for f in state.audit().findings if len(f.views) < 8 for name in f.views}
    for claim in state.claims:
        if not isinstance(claim, Maps | Addressed | Aligned | Declared):
            continue
        own = _findings_of(claim, state.views)
        if not own:
            continue  # the view has a finding, but of another claim
        if isinstance(claim, Maps) and ("index_space", claim.view) in wrong:
            guess = _ids(claim, state.views[claim.view])
            if guess.facts["count"] > guess.facts["held"] or guess.facts["step"] not in (0, guess.facts["belongs"]):
                yield [_with(guess, own)]
        elif isinstance(claim, Addressed) and ("index_space", claim.view) in wrong:
            facts = {"type": claim.address_type, "claim": (claim, replace(claim, address_type="int64"))}
            yield [_with(Guess("address_width", claim.view, None, facts), own)]
        elif isinstance(claim, Aligned) and ("unaligned", claim.view) in wrong:
            yield [_with(_rows(claim, state.views[claim.view]), own)]
        elif isinstance(claim, Declared) and ("ambiguous", claim.view) in wrong:
            yield [_with(Guess("undeclared", claim.view, None, {"readings": claim.readings}), own)]


def _findings_of(claim: Claim, views: dict[str, View]) -> set[tuple]:
    """Return the marks (see :func:`_mark`) of the findings that only this claim leads to."""
    names = [view.name for view in views_of_claim(claim, views)]
    check = audit_views([views[name] for name in names], [claim], witnesses=False)
    return {_mark(finding) for finding in check.findings if finding.kind in ("index_space", "unaligned", "ambiguous")}


def _mark(finding: Finding) -> tuple:
    """Return the parts of a finding that are the same with and without examples."""
    return finding.kind, finding.views, finding.elements, finding.text


def _with(guess: Guess, own: set[tuple]) -> Guess:
    """Return a guess that explains only the findings of these marks."""
    return replace(guess, facts={**guess.facts, "own": own})


def _ids(claim: Maps, view: View) -> Guess:
    blocks = view.shape[0] if view.shape else 1
    held, step = blocks // claim.ratio, view.stride[0] * view.itemsize * claim.ratio if view.shape else 0
    count = max(claim.table) + 1 if claim.table else claim.count
    better = replace(claim, stride_bytes=None if claim.stride_bytes is None else step)
    better = better if claim.table else replace(better, count=min(count, held))
    facts = {"count": count, "held": held, "blocks": blocks, "ratio": claim.ratio,
             "step": claim.stride_bytes or 0, "belongs": step, "claim": (claim, better),
             "table": bool(claim.table)}  # fmt: skip
    smaller, larger = sorted((step, claim.stride_bytes or step))
    ratio = larger // smaller if smaller > 0 else 0
    return Guess("block_unit", claim.view, None, facts, (ratio if ratio > 1 else claim.name,))


def _rows(claim: Aligned, view: View) -> Guess:
    steps = [abs(step) for step in steps_of(view)[:-1] if step]
    facts = {"boundary": claim.boundary_bytes, "step": min(steps, default=0), "start": view.offset * view.itemsize,
             "address": view.storage.address_modulo(claim.boundary_bytes)}  # fmt: skip
    return Guess("unaligned_rows", view.name, _padded_rows(view, claim.boundary_bytes), facts, (claim.boundary_bytes,))


def _padded_rows(view: View, boundary: int) -> View | None:
    """Return the view with rows at multiples of the boundary. If elements cannot lie at such multiples, return None."""
    address = view.storage.address_modulo(boundary) or 0
    start = view.offset * view.itemsize
    start += -(address + start) % boundary
    if not view.shape or start % view.itemsize or boundary % view.itemsize:
        return None
    stride, reach = list(view.stride), (view.shape[-1] - 1) * abs(view.stride[-1]) + 1
    unit = boundary // view.itemsize
    for axis in sorted(range(len(view.shape) - 1), key=lambda axis: abs(view.stride[axis])):
        stride[axis] = max(-(-stride[axis] // unit) * unit, -(-reach // unit) * unit)
        reach = (view.shape[axis] - 1) * stride[axis] + reach
    made = replace(view, stride=tuple(stride), offset=start // view.itemsize)
    size = max(view.storage.nbytes, -(-made.span_bytes[1] // boundary) * boundary)
    return replace(made, storage=replace(view.storage, nbytes=size))


def _overlaps(state: _State, result: Audit) -> Iterator[list[Guess]]:
    """Yield guesses for views that overlap or leave their storage, although no claim states where they belong."""
    pools = list(_pools(state, with_repair=True))
    yield from pools
    done = {name for (guess,) in pools for name in guess.facts["claim"][0].views}
    findings = [
        f
        for f in state.audit().findings
        if f.kind in ("collision", "out_of_bounds", "self_overlap") and not done.intersection(f.views)
    ]
    yield from explain_overlap(state.views, findings, state.audit)
    yield from _pools(state, with_repair=False)


_ONE_LENGTH = "No repair is proposed. An id must stand for as many bytes in each view of the pool (blocks_per_id)."


def _pools(state: _State, with_repair: bool) -> Iterator[list[Guess]]:
    """Yield guesses for views of one pool whose block strides are multiples of each other."""
    wrong = [set(finding.views) for finding in state.audit().findings if finding.kind == "collision"]
    for claim in state.claims:
        if not isinstance(claim, Overlay) or claim.blocks_per_id or not any(one <= set(claim.views) for one in wrong):
            continue
        views = [state.views[name] for name in claim.views]
        steps = [abs(view.stride[0]) * view.itemsize if view.shape else 0 for view in views]
        if len(set(steps)) == 1 or not min(steps) or any(max(steps) % step for step in steps):
            continue
        better = replace(claim, blocks_per_id=tuple(max(steps) // step for step in steps))
        holds = audit_views(views, [better], witnesses=False).clean
        for view, step in zip(views, steps, strict=True):
            if step < max(steps) and holds == with_repair:
                facts = {"step": step, "pool": max(steps), "advice": _ONE_LENGTH}
                facts |= {"claim": (claim, better)} if holds else {}
                yield [Guess("block_unit", view.name, None, facts, ("pool", step))]


_ERRORS, _ALL = ("error",), ("error", "warning")
"""A repair must leave no finding of these severities. Warnings count only if the mistake gave warnings only."""


def _ordered(result: Audit, groups: _Members, left: Audit | None, views: dict[str, View]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses of the groups, and one more for findings that no group explains."""
    dirty = {
        severity: {name for finding in left.findings if finding.severity in severity for name in finding.views}
        if left is not None
        else set(views)
        for severity in (_ERRORS, _ALL)
    }
    blamed = {guess.view for members in groups.values() for guess, _ in members}
    numbers_of: dict[str, list[int]] = {}
    for number, finding in enumerate(result.findings):
        extent_alone = finding.kind in ("truncated", "oversized") and finding.views[0] in blamed
        spend(len(finding.views))
        for name in finding.views[:1] if extent_alone else finding.views:
            numbers_of.setdefault(name, []).append(number)
    marked = {mark for members in groups.values() for guess, _ in members for mark in guess.facts.get("own", ())}
    marks = [_mark(finding) if marked else None for finding in result.findings]
    made, explained = [], set()
    for (cause, _), members in groups.items():
        numbers = sorted(
            {
                number
                for guess, _ in members
                for number in numbers_of.get(guess.view, ())
                if (marks[number] in guess.facts["own"] if "own" in guess.facts else marks[number] not in marked)
            }
        )
        spend(NUMBER_COST * len(numbers))
        explained.update(numbers)
        made.append(_diagnosis(cause, members, [result.findings[number] for number in numbers], dirty, views, blamed))
    made.sort(key=lambda one: -len(one.findings))
    rest = tuple(finding for number, finding in enumerate(result.findings) if number not in explained)
    if rest:
        names = tuple(sorted({name for finding in rest for name in finding.views}, key=natural))
        text = f"No known mistake explains {counted(len(rest), 'finding')}."
        made.append(Diagnosis(UNKNOWN, text, effect_words(rest, views), names, rest, "No repair is proposed."))
    return tuple(made)


def _diagnosis(
    cause: str, members: list, findings: list[Finding], dirty: dict, views: dict[str, View], blamed: set[str]
) -> Diagnosis:
    guesses = sorted((guess for guess, _ in members), key=lambda guess: natural(guess.view))
    names = tuple(dict.fromkeys(guess.view for guess in guesses))
    repaired = tuple(guess.repaired for guess in guesses if guess.repaired is not None)
    claims = [guess.facts["claim"] for guess in guesses if "claim" in guess.facts]
    severity = _ERRORS if any(finding.severity == "error" for finding in findings) else _ALL
    proved = bool(repaired or claims) and not dirty[severity] & set(names)
    repair = repair_words(repaired, claims, views)
    if not repair:
        repair = (
            guesses[0].facts.get("advice")
            or CAUSES[cause].advice
            or "No repair is proposed: the numbers do not show which repair is meant."
        )
    elif not proved:
        repair = f"Not repaired. {repair} was tried, and the same claims do not all hold with it."
    others = dict.fromkeys(CAUSES[other.cause].apart for _, rest in members for other in rest if other.cause != cause)
    wrong = [views[name] for name in names]
    text = tell(cause, guesses, wrong)
    if proved and len(repaired) == len(wrong):
        fine = [view for name, view in views.items() if name not in blamed]
        spend(VIEW_COST * len(fine))
        text += tell_of_others(wrong, {view.name: view for view in repaired}, fine)
    return Diagnosis(cause, text, effect_words(findings, views), names, tuple(findings), repair,
                     repaired if proved else (), proved, tuple(filter(None, others)))  # fmt: skip
