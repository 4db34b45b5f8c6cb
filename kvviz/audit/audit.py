"""The audit: given views and what is claimed of them, which bytes are in dispute.

It knows none of our layouts, so it can judge anybody's. Every view is checked against its storage and against
itself; claims say what else must hold. Nothing is read and nothing is listed block by block: the work depends on
the patterns of the views, not on the number of blocks (``kvviz.audit.byte_sets``).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from kvviz.audit import blocks, numbers
from kvviz.audit.byte_sets import TooMuchWorkError
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
)
from kvviz.audit.findings import Audit, Finding
from kvviz.audit.overlap import collisions, out_of_bounds, same_bytes, self_overlap
from kvviz.audit.placement import Ground, misplaced
from kvviz.audit.view import View

MOST_ROLES = 4
"""Roles of views that a line about what was checked tells apart."""


def audit_views(views: Sequence[View], claims: Sequence[Claim] = (), *, witnesses: bool = True) -> Audit:
    """Check every view against its storage and itself, then every claim; a claim given twice is judged once.

    A claim that is too much work is an error of its kind without counts, whose text begins with "not judged".

    Args:
        witnesses: False counts only: no example of a collision or a misplaced element, and not what it hits.

    Raises:
        ValueError: two views have one name, or a claim names a view that is not given or does not fit.
    """
    named = _by_name(views)
    checked = [f"{len(views)} views within their storages, none on itself"] if views else ["no views were given"]
    notes: list[str] = []
    placed = {claim: _placed(claim, named) for claim in claims if _places(claim)}
    ground = Ground(_homes(views, claims, placed), placed, witnesses)
    findings = [finding for view in views for finding in (*out_of_bounds(view), *self_overlap(view, ground))]
    for claim in dict.fromkeys(claims):
        kind, check, said = _CHECKS[type(claim)]
        try:
            findings += list(check(claim, named, ground))
        except TooMuchWorkError as error:
            findings.append(not_judged(kind, claim, named, error))
            continue
        checked.append(said(claim, named))
        if isinstance(claim, Overlay) and len(claim.views) > 1:
            notes.append(_overlay_note(claim))
        if isinstance(claim, Covers):
            notes += blocks_left(named[claim.extent], _all(named, claim.content))
    notes += _silence(views, claims)
    return Audit(tuple(_together(findings)), tuple(_counted(checked)), tuple(dict.fromkeys(notes)))


def audit_scales(owners: Sequence[View], claims: Sequence[View], *, witnesses: bool = True) -> Audit:
    """The audit of this kit's story: ``claims`` (scale views as carved) against ``owners`` (who owns what).

    Data and claimed scales must be disjoint, and each claimed view belongs where the owner of its name is.
    """
    homes = _by_name(owners)
    taken = {view.name for view in claims}
    views = [view for view in owners if view.name not in taken] + list(claims)
    placed = [BelongsAt(view.name, _named(homes, view.name)) for view in claims]
    return audit_views(views, [Disjoint(tuple(view.name for view in views)), *placed], witnesses=witnesses)


def _by_name(views: Sequence[View]) -> dict[str, View]:
    double = [name for name, count in Counter(view.name for view in views).items() if count > 1]
    if double:
        raise ValueError(f"view names must differ: {', '.join(double)} given more than once")
    return {view.name: view for view in views}


def _named(named: dict[str, View], name: str) -> View:
    if name not in named:
        raise ValueError(f"a claim names the view {name!r}, which is not among the {len(named)} views given")
    return named[name]


def _all(named: dict[str, View], names: Sequence[str]) -> list[View]:
    return [_named(named, name) for name in dict.fromkeys(names)]


def rightful_place(claim: BelongsAt | Follows, named: dict[str, View]) -> View:
    """The map that a claim calls rightful, as a view of the claimed view's name and role."""
    if isinstance(claim, BelongsAt):
        given = claim.rightful if isinstance(claim.rightful, View) else _named(named, claim.rightful)
        return replace(given, name=claim.view)
    scale, data = _named(named, claim.scale), _named(named, claim.data)
    if data.shape[:-1] != scale.shape:
        raise ValueError(
            f"{scale.name} of shape {scale.shape} cannot follow {data.name} of shape {data.shape}: a scale a cell, "
            f"and a cell is everything but the data's last axis"
        )
    numbers = [*(step * data.itemsize for step in data.stride[:-1]), data.offset * data.itemsize + claim.at_bytes]
    unit = 1 if any(number % scale.itemsize for number in numbers) else scale.itemsize
    *stride, offset = (number // unit for number in numbers)
    return View(scale.name, data.storage, scale.shape, tuple(stride), offset, unit, scale.axes, scale.role)


def _placed(claim: BelongsAt | Follows, named: dict[str, View]) -> tuple[View, View]:
    """The view that a claim is about, and its rightful map."""
    return _named(named, claim.view if isinstance(claim, BelongsAt) else claim.scale), rightful_place(claim, named)


def _homes(views: Sequence[View], claims: Sequence[Claim], placed: dict[Claim, tuple[View, View]]) -> list[View]:
    """Who rightly owns what: the rightful maps, and the views that nothing is claimed to displace."""
    moved = {view.name: rightful for view, rightful in placed.values()}
    extents = {claim.extent for claim in claims if isinstance(claim, Covers)}
    referred = {claim.rightful for claim in claims if isinstance(claim, BelongsAt) and isinstance(claim.rightful, str)}
    return [*(v for v in views if v.name not in moved and v.name not in extents | referred), *moved.values()]


_Check = Callable[[Claim, dict[str, View], Ground], Iterator[Finding]]
# By the claim's class: the kind of finding that it looks for first, how, and what is said when it was judged.
_CHECKS: dict[type, tuple[str, _Check, Callable[[Claim, dict[str, View]], str]]] = {
    Disjoint: (
        "collision",
        lambda c, named, ground: collisions(_all(named, c.views), ground.witnesses),
        lambda c, named: f"{_roles(_all(named, c.views))} disjoint",
    ),
    Overlay: (
        "collision",
        lambda c, named, _: blocks.overlaid(_all(named, c.views)),
        lambda c, named: f"{_roles(_all(named, c.views))} share bytes of equal block ids only",
    ),
    BelongsAt: (
        "misplaced",
        lambda c, _, ground: misplaced(*ground.placed[c], ground),
        lambda c, named: f"{_roles([named[c.view]])} at their rightful places",
    ),
    Follows: (
        "misplaced",
        lambda c, _, ground: misplaced(*ground.placed[c], ground),
        lambda c, _: "1 scales behind their data",
    ),
    Covers: (
        "truncated",
        lambda c, named, ground: blocks.covers(
            _named(named, c.extent), _all(named, c.content), _all(named, c.neighbours or c.content), ground.parts
        ),
        lambda c, _: "1 extents cover their blocks",
    ),
    StepAlike: (
        "truncated",
        lambda c, named, _: numbers.step_alike(_named(named, c.source), _named(named, c.target)),
        lambda c, _: "1 copies step alike on both sides",
    ),
    SameBytes: (
        "truncated",
        lambda c, named, _: same_bytes(_named(named, c.part), _named(named, c.whole)),
        lambda c, _: "1 parts equal to their bytes",
    ),
    Maps: (
        "index_space",
        lambda c, named, _: numbers.ids_in_range(c, _named(named, c.view)),
        lambda c, _: "1 index spaces within their tables",
    ),
    Addressed: (
        "index_space",
        lambda c, named, _: numbers.addressable(_named(named, c.view), c.address_type),
        lambda c, _: f"1 views addressable in {c.address_type}",
    ),
    Aligned: (
        "unaligned",
        lambda c, named, _: numbers.aligned(c, _named(named, c.view)),
        lambda c, _: f"1 views with rows at multiples of {c.boundary_bytes} bytes",
    ),
    Declared: (
        "ambiguous",
        lambda c, named, _: numbers.declared(c, _named(named, c.view), _all(named, c.readings)),
        lambda c, _: "1 readings declared",
    ),
}


def _roles(views: Sequence[View]) -> str:
    """``4 data views``, or ``6 views (4 data, 2 scale)``."""
    roles = Counter(view.role for view in views)
    if len(roles) == 1:
        return f"{len(views)} {next(iter(roles))} views"
    told = ", ".join(f"{count} {role}" for role, count in roles.items())
    return f"{len(views)} views" + (f" ({told})" if 0 < len(roles) <= MOST_ROLES else "")


def _silence(views: Sequence[View], claims: Sequence[Claim]) -> Iterator[str]:
    """What a set of claims that some views share nothing leaves open about scales."""
    if not any(isinstance(claim, Disjoint | Overlay) for claim in claims):
        return
    maps = {claim.rightful for claim in claims if isinstance(claim, BelongsAt) and isinstance(claim.rightful, str)}
    scales = {view.name for view in views if view.role == "scale"} - maps
    placed = {claim.view if isinstance(claim, BelongsAt) else claim.scale for claim in claims if _places(claim)}
    if not scales:
        yield "no scale view was given: if this cache keeps scales, nothing was checked about them"
    elif scales - placed:
        yield (
            f"no claim (belongs_at, follows) says where {len(scales - placed)} of {len(scales)} scale views belong: "
            f"they may be misplaced"
        )


def _places(claim: Claim) -> bool:
    return isinstance(claim, BelongsAt | Follows)


def _overlay_note(claim: Overlay) -> str:
    return (
        f"{claim.views[0]} and {len(claim.views) - 1} more share bytes of one block id by declaration: after a block "
        f"changes hands its old bytes are read as the new owner's, so it must be cleared or written first"
    )


def _together(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Findings in order, the same one said twice only once."""
    return list(dict.fromkeys(findings))


def _counted(checked: Sequence[str]) -> Iterator[str]:
    """``1 views ...`` said n times becomes ``n views ...``."""
    for said, times in Counter(checked).items():
        yield f"{times}{said[1:]}" if said.startswith("1 ") and times > 1 else said


def not_judged(kind: str, claim: Claim, named: Mapping[str, View], error: TooMuchWorkError) -> Finding:
    """Stands in for what a claim was too much work to say: an error without counts, so that it never passes for clean.

    Args:
        kind: what the claim would have found.
        named: the views of the audit by name.
    """
    given = [getattr(claim, part.name) for part in fields(claim) if part.name not in ("name", "address_type")]
    names = [name for value in given for name in (value if isinstance(value, tuple) else (value,))]
    views = tuple(name for name in dict.fromkeys(names) if isinstance(name, str) and name in named)
    storage = named[views[0]].storage.name
    return Finding(kind, views, storage, None, None, text=f"not judged: {error}")


def blocks_left(extent: View, content: Sequence[View]) -> Iterator[str]:
    """The blocks that content has beyond an extent's: nobody says that they should be covered."""
    blocks = extent.shape[0] if extent.shape else 1
    for view in content:
        if view.shape and view.num_elements and view.shape[0] > blocks:
            left = f"block {blocks}" if view.shape[0] == blocks + 1 else f"blocks {blocks} to {view.shape[0] - 1}"
            are = "was" if view.shape[0] == blocks + 1 else "were"
            yield f"{left} of {view.name} {are} not judged: {extent.name} ends at its {blocks} blocks"
