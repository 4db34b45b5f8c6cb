"""Checks views and claims, and returns findings, for example that two views use a byte which they must not share.

An audit works for any engine, because it sees only views and claims. Every view is checked against its storage and
against itself. Claims state what else must hold, for example where a scale belongs. An audit reads no data. The work
of an audit does not grow with the number of blocks (``kvviz.audit.byte_sets``).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from kvviz.audit import blocks, numbers
from kvviz.audit.budget import TooMuchWorkError, limited, spend
from kvviz.audit.claims import (
    Addressed,
    Aligned,
    BelongsAt,
    Claim,
    Covers,
    Declared,
    Disjoint,
    Follows,
    Maps,
    Overlay,
    SameBytes,
    StepAlike,
    names_in,
)
from kvviz.audit.findings import Audit, Finding, counted
from kvviz.audit.overlap import collisions, note_on_reader, out_of_bounds, self_overlap
from kvviz.audit.placement import OwnerLookup, misplaced
from kvviz.audit.rightful import RightfulPlaces, rightful_places, view_named
from kvviz.audit.view import View

MOST_ROLES = 4
"""If the checked views have more roles than this, the audit prints the number of views, but no number per role."""

CLAIM_COST = 200
"""Work of looking at one view of a claim, in units of the work limit."""


def audit_views(views: Sequence[View], claims: Sequence[Claim] = (), *, witnesses: bool = True) -> Audit:
    """Check every view against its storage and against itself. Then check every claim.

    If a claim is given twice, it is checked once.

    If a check would take too much work (``kvviz.audit.budget``), the check stops. The audit keeps the findings of this
    check, and adds a finding without counts. The added finding has ``judged`` False.

    Args:
        witnesses: if False, findings have counts only. Then they have no examples, and do not say whose bytes a
            misplaced element uses.

    Raises:
        ValueError: two views have the same name, or a claim names an unknown view or does not fit its views.
    """
    with limited():
        return _audited(views, claims, witnesses)


def _audited(views: Sequence[View], claims: Sequence[Claim], witnesses: bool) -> Audit:
    """Do the work of :func:`audit_views`. The caller sets the work limit."""
    named = _by_name(views)
    places = rightful_places(views, claims)
    ground = OwnerLookup(places, witnesses)
    findings: list[Finding] = []
    notes: list[str] = []
    checked = [] if views else [_Statement("no views were given")]
    for view in views:
        outside = list(out_of_bounds(view))
        overlapping = _found(self_overlap(view, ground), "self_overlap", 0, (view,))
        checked.append(
            _Statement(
                "1 view {lies|does not lie} within its storage", "views {lie|do not lie} within their storages"
            ).after(outside)
        )
        findings += outside
        if view.read_only and overlapping:  # example: a broadcast tensor. Nobody writes it, so sharing does no harm
            notes += map(note_on_reader, overlapping)
            continue
        findings += overlapping
        alone = _Statement("1 view {does not overlap|overlaps} itself", "views {do not overlap|overlap} themselves")
        checked.append(alone.after(overlapping))
    for claim in dict.fromkeys(claims):
        check = _CHECKS[type(claim)]
        of_claim = views_of_claim(claim, named)
        found = _found(check.run(claim, named, ground), check.kind, CLAIM_COST * len(of_claim), of_claim)
        findings += found
        checked.append(check.statement(claim, named).after(found))
        if isinstance(claim, Overlay) and len(claim.views) > 1:
            notes.append(_overlay_note(claim))
        if isinstance(claim, Aligned) and claim.boundary_bytes > 1:
            storage = named[claim.view].storage
            known = storage.address_modulo(claim.boundary_bytes) is not None
            notes += [] if known or found else [f"{claim.view}: {numbers.offsets_only(storage, claim.boundary_bytes)}"]
    notes += _note_on_scales(views, claims, places)
    return Audit(tuple(dict.fromkeys(findings)), tuple(_counted_up(checked)), tuple(dict.fromkeys(notes)))


def audit_scales(owners: Sequence[View], writers: Sequence[View], *, witnesses: bool = True) -> Audit:
    """Audit the scale views of a cache. No two of all these views may share a byte.

    Args:
        owners: data views, and scale views at the places where scales belong.
        writers: the scale views through which a backend writes. A writer belongs where the owner with its name lies.
        witnesses: see :func:`audit_views`.
    """
    owner_of = _by_name(owners)
    written = {view.name for view in writers}
    views = [view for view in owners if view.name not in written] + list(writers)
    placed = [BelongsAt(view.name, view_named(owner_of, view.name)) for view in writers]
    return audit_views(views, [Disjoint(tuple(view.name for view in views)), *placed], witnesses=witnesses)


def _by_name(views: Sequence[View]) -> dict[str, View]:
    double = [name for name, count in Counter(view.name for view in views).items() if count > 1]
    if double:
        raise ValueError(f"view names must differ: {', '.join(double)} given more than once")
    return {view.name: view for view in views}


def _all_named(named: dict[str, View], names: Sequence[str]) -> list[View]:
    return [view_named(named, name) for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class _Statement:
    """A sentence that an audit prints about a check, for example ``1 view lies within its storage``.

    Each sentence has two wordings in braces: ``1 view {lies|does not lie} within its storage``. The audit prints the
    second wording if the check failed. If several checks have the same statement, the audit prints their number and
    ``plural``. If ``plural`` is empty, the audit prints ``singular`` once.
    """

    singular: str
    plural: str = ""
    outcome: str = ""

    def after(self, findings: Sequence[Finding]) -> "_Statement":
        """Return the statement with the outcome of its check. Then a failed check is not printed as true."""
        if not findings:
            return self
        if all(not finding.judged for finding in findings):
            outcome = "not judged: "
        elif all(finding.severity == "warning" for finding in findings):
            outcome = "warning: "
        else:
            outcome = "failed: "
        return _Statement(self.singular, self.plural, outcome)

    def after_times(self, times: int, other: bool) -> str:
        """Return the sentence about this number of checks.

        Args:
            other: True if the same check failed for other views.
        """
        text = f"{times:,} {self.plural}" if times > 1 and self.plural else self.singular
        text = re.sub(r"^([\d,]+) ", r"\1 other ", text) if other else text
        choice = 2 if self.outcome in ("failed: ", "warning: ") else 1
        return self.outcome + re.sub(r"{([^|{}]*)\|([^|{}]*)}", rf"\{choice}", text)


def _counted_up(checked: Iterable[_Statement]) -> Iterator[str]:
    """Yield one sentence for each different statement, with the number of checks that have this statement."""
    counts = Counter(checked)
    failed = {(one.singular, one.plural) for one in counts if one.outcome == "failed: "}
    for statement, times in counts.items():
        yield statement.after_times(times, not statement.outcome and (statement.singular, statement.plural) in failed)


@dataclass(frozen=True)
class _Check:
    """How the audit checks the claims of one class.

    Attributes:
        kind: if a claim takes too much work, the audit returns a finding of this kind, without counts.
        run: the check.
        statement: the statement that is true if the check finds nothing.
    """

    kind: str
    run: Callable[[Claim, dict[str, View], OwnerLookup], Iterator[Finding]]
    statement: Callable[[Claim, dict[str, View]], _Statement]


def _of_views(views: Sequence[View], singular: str, plural: str) -> _Statement:
    """Return one statement about several views, for example ``6 views (4 data, 2 scale) are disjoint``."""
    roles = Counter(view.role for view in views)
    if len(roles) == 1:
        subject = counted(len(views), f"{next(iter(roles))} view")
    else:
        each = ", ".join(f"{count} {role}" for role, count in roles.items())
        subject = counted(len(views), "view") + (f" ({each})" if 0 < len(roles) <= MOST_ROLES else "")
    return _Statement(f"{subject} {singular if len(views) == 1 else plural}")


def _of_one(singular: str, plural: str) -> Callable[[Claim, dict[str, View]], _Statement]:
    """Return a function that makes the same statement for every claim."""
    return lambda claim, named: _Statement(singular, plural)


def _disjoint_statement(views: Sequence[View]) -> _Statement:
    readers = sum(view.read_only for view in views)
    apart = f", apart from {readers} views that are only read" if readers > 1 else ""
    return _of_views(views, "is {|not }disjoint", "are {|not }disjoint" + apart)


def _aligned_statement(claim: Aligned, view: View) -> _Statement:
    known = view.storage.address_modulo(claim.boundary_bytes) is not None
    ends = f"all rows at multiples of {claim.boundary_bytes} bytes{'' if known else ' (only offsets were judged)'}"
    return _Statement(f"1 view {{has|does not have}} {ends}", f"views {{have|do not have}} {ends}")


_EXTENT = "(what a transfer, registration or clear takes)"
"""What an extent is, for people who read the result of a check."""

_CHECKS: dict[type, _Check] = {
    Disjoint: _Check(
        "collision",
        lambda c, named, ground: collisions(_all_named(named, c.views), ground.witnesses),
        lambda c, named: _disjoint_statement(_all_named(named, c.views)),
    ),
    Overlay: _Check(
        "collision",
        lambda c, named, _: blocks.overlaid(_all_named(named, c.views), c.blocks_per_id),
        lambda c, named: _of_views(
            _all_named(named, c.views),
            "{shares|does not share} bytes of equal block ids only",
            "{share|do not share} bytes of equal block ids only",
        ),
    ),
    BelongsAt: _Check(
        "misplaced",
        lambda c, _, ground: misplaced(*ground.placed[c], ground),
        lambda c, named: _Statement(
            f"1 {named[c.view].role} view {{lies|does not lie}} at its rightful place",
            f"{named[c.view].role} views {{lie|do not lie}} at their rightful places",
        ),
    ),
    Follows: _Check(
        "misplaced",
        lambda c, _, ground: misplaced(*ground.placed[c], ground),
        _of_one("1 scale view {follows|does not follow} its data", "scale views {follow|do not follow} their data"),
    ),
    Covers: _Check(
        "truncated",
        lambda c, named, ground: blocks.covers(
            _all_named(named, names_in(c.extent)),
            _all_named(named, c.content),
            _all_named(named, c.neighbours or c.content),
            c.extents_per_block,
            c.blocks_per_extent,
            ground.parts,
        ),
        _of_one(
            f"1 extent {_EXTENT} {{covers|does not cover}} exactly its blocks",
            f"extents {_EXTENT} {{cover|do not cover}} exactly their blocks",
        ),
    ),
    StepAlike: _Check(
        "truncated",
        lambda c, named, _: numbers.step_alike(view_named(named, c.source), view_named(named, c.target)),
        _of_one(
            "1 copy {has|does not have} equal steps on both sides",
            "copies {have|do not have} equal steps on both sides",
        ),
    ),
    SameBytes: _Check(
        "truncated",
        lambda c, named, _: blocks.same_bytes(
            _all_named(named, names_in(c.part)), _all_named(named, names_in(c.whole))
        ),
        _of_one(
            "1 part {covers|does not cover} exactly the bytes of its whole",
            "parts {cover|do not cover} exactly the bytes of their wholes",
        ),
    ),
    Maps: _Check(
        "index_space",
        lambda c, named, _: numbers.ids_in_range(c, view_named(named, c.view)),
        _of_one(
            "1 index space {lies|does not lie} within its view", "index spaces {lie|do not lie} within their views"
        ),
    ),
    Addressed: _Check(
        "index_space",
        lambda c, named, _: numbers.addressable(c, view_named(named, c.view)),
        lambda c, _: _Statement(
            f"1 view is {{|not }}addressable in {c.address_type}", f"views are {{|not }}addressable in {c.address_type}"
        ),
    ),
    Aligned: _Check(
        "unaligned",
        lambda c, named, _: numbers.aligned(c, view_named(named, c.view)),
        lambda c, named: _aligned_statement(c, named[c.view]),
    ),
    Declared: _Check(
        "ambiguous",
        lambda c, named, _: numbers.declared(c, view_named(named, c.view), _all_named(named, c.readings)),
        _of_one("1 reading is {|not }declared", "readings are {|not }declared"),
    ),
}
"""The check for each class of claims. To add a class of claims, add its check here."""


def _note_on_scales(views: Sequence[View], claims: Sequence[Claim], places: RightfulPlaces) -> Iterator[str]:
    """Yield a note if a claim says which bytes views may share, but no claim says where the scale views belong."""
    if not any(isinstance(claim, Disjoint | Overlay) for claim in claims):
        return
    maps = {claim.rightful for claim in claims if isinstance(claim, BelongsAt) and isinstance(claim.rightful, str)}
    scales = {view.name for view in views if view.role == "scale"} - maps
    unplaced = scales - places.moved.keys()
    if not scales:
        yield "no scale view was given: if this cache has scales, nothing was checked about them"
    elif unplaced:
        belong, they = ("scale views belong", "they") if len(scales) > 1 else ("scale view belongs", "it")
        yield (
            f'no claim "belongs_at" or "follows" says where {len(unplaced)} of {len(scales)} {belong}: {they} may be '
            f"misplaced"
        )


def _overlay_note(claim: Overlay) -> str:
    others = len(claim.views) - 1
    return (
        f"a claim allows {claim.views[0]} and {others} other view{'s' * (others > 1)} to share bytes of equal block "
        f"ids: a new owner of a block could read old bytes, so it must clear or write the block first"
    )


_NO_VIEWS = ("name", "address_type", "base", "unit")
"""Fields of claims. Their words are not names of views."""


def _found(check: Iterable[Finding], kind: str, cost: int, views: Sequence[View]) -> list[Finding]:
    """Return the findings of a check. If the check takes too much work, add a finding that says so.

    Args:
        kind: the kind of the added finding.
        cost: the least work of the check.
        views: the views that the check is about.
    """
    found: list[Finding] = []
    try:
        spend(cost)
        for finding in check:  # findings before an error stay
            found.append(finding)
    except TooMuchWorkError as error:
        names, storage = tuple(view.name for view in views), views[0].storage.name
        found.append(Finding(kind, names, storage, None, None, text=f"not judged: {error}", judged=False))
    return found


def views_of_claim(claim: Claim, named: Mapping[str, View]) -> list[View]:
    """Return the views that a claim names, each once."""
    given = [getattr(claim, part.name) for part in fields(claim) if part.name not in _NO_VIEWS]
    names = [name for value in given for name in (value if isinstance(value, tuple) else (value,))]
    return [named[name] for name in dict.fromkeys(names) if isinstance(name, str) and name in named]
