"""The audit: takes views and claims, and returns findings: which bytes are used by views that must not use them.

An audit works for any engine, because it sees views and claims only. Every view is checked against its storage and
against itself. Claims state what else must hold, for example where the rightful place of a scale is. An audit reads
no data. Its work depends on the patterns of the views, not on the number of blocks (``kvviz.audit.byte_sets``).
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
"""Roles that a sentence about checked views counts one by one. A longer list would hide the number of views."""

CLAIM_COST = 200
"""Work of looking at one view of a claim, in units of the work limit."""


def audit_views(views: Sequence[View], claims: Sequence[Claim] = (), *, witnesses: bool = True) -> Audit:
    """Check every view against its storage and itself, then check every claim. A repeated claim is checked once.

    Work is counted (``kvviz.audit.budget``). If a claim would take too much work, the audit returns what it found
    until then, and one more finding. This finding has the claim's kind, no counts, and ``judged`` is False.

    Args:
        witnesses: False returns counts only: no examples, and no owners on which misplaced elements lie.

    Raises:
        ValueError: two views have the same name, or a claim names an unknown view or does not fit its views.
    """
    with limited():
        return _audited(views, claims, witnesses)


def _audited(views: Sequence[View], claims: Sequence[Claim], witnesses: bool) -> Audit:
    """Return the audit, within the limit of work that holds."""
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
        if view.read_only and overlapping:  # a broadcast or a tile: elements that share bytes do no harm
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
    """Audit the scale views of a cache. No two data views and scale views may share a byte.

    Args:
        owners: the views that own the bytes: data views, and scale views at their rightful places.
        writers: the scale views through which a backend writes. Each belongs where the owner of the same name lies.
        witnesses: as in :func:`audit_views`.
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
    """What is printed about checks: a sentence for one check, or a number with ``plural`` (``2`` + ``views lie ...``).

    Without ``plural``, the sentence is printed once, however often the check was made. Each sentence has two wordings
    in braces: ``1 view {lies|does not lie} within its storage``. The second one is printed if the check failed.
    """

    singular: str
    plural: str = ""
    outcome: str = ""

    def after(self, findings: Sequence[Finding]) -> "_Statement":
        """Return the statement with the outcome of its check, so that a failed check is not printed as true."""
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
    """Yield each different statement once, with the number of its checks."""
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
        statement: what the check has shown if it returns no findings.
    """

    kind: str
    run: Callable[[Claim, dict[str, View], OwnerLookup], Iterator[Finding]]
    statement: Callable[[Claim, dict[str, View]], _Statement]


def _of_views(views: Sequence[View], singular: str, plural: str) -> _Statement:
    """Return a statement about several views together: ``6 views (4 data, 2 scale) are disjoint``."""
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
    """Yield a note if views are claimed to share no bytes, but no claim says where the scale views belong."""
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
            f"no claim (belongs_at, follows) says where {len(unplaced)} of {len(scales)} {belong}: {they} may be "
            f"misplaced"
        )


def _overlay_note(claim: Overlay) -> str:
    others = len(claim.views) - 1
    return (
        f"{claim.views[0]} and {others} other{'s' * (others > 1)} share bytes of equal block ids by declaration: after "
        f"a block gets a new owner, the new owner reads its old bytes, so the block must be cleared or written first"
    )


_NO_VIEWS = ("name", "address_type", "base", "unit")
"""Fields of claims with words that are not names of views."""


def _found(check: Iterable[Finding], kind: str, cost: int, views: Sequence[View]) -> list[Finding]:
    """Return what a check finds. If it takes too much work, return what it found until then and a finding that says so.

    Args:
        kind: the kind of finding that the check looks for.
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
