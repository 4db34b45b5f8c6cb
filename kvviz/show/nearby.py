"""A byte map of the few bytes around a finding's place, made from the views concerned, however large they are."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvviz.audit.audit import rightful_place
from kvviz.audit.claims import BelongsAt, Claim, Covers, Disjoint, Follows
from kvviz.audit.findings import Finding, Place
from kvviz.audit.view import Storage, View
from kvviz.show.byte_map import ByteMap, ByteRange, byte_map, claimed_bytes

ROW_BYTES, ROWS = 64, 4
MAX_SHOWN = 48
"""Views that one map shows: first those that the finding names."""


def map_around(finding: Finding, views: Sequence[View], claims: Sequence[Claim] = (), end: int = 0) -> ByteMap | None:
    """Some rows of bytes around a place of the finding's example, or None where it has no place in its storage.

    A view that meets itself has no map: one writer a byte is all that a map can show of one view.

    Args:
        views, claims: what was audited.
        end: which place of the example: 0 the first, 1 where a misplaced element belongs.
    """
    if len(finding.example) <= end or finding.kind == "self_overlap":
        return None
    owners, writers = _concerned(finding, views, claims)
    of, name = (owners, finding.views[0]) if end else (writers, finding.example[0].view)
    window = _window(finding.example[end], next((view.storage for view in of if view.name == name), None))
    if window is None:
        return None
    storage, start, stop = window
    record = byte_map(owners, writers, window=(start, stop), storage=storage)
    for view in _bystanders(views, claims, [*owners, *writers]):
        if any(run.state == "unowned" for run in record.ranges) and len(record.beneath) < MAX_SHOWN:
            record = _beneath(record, view)
    return record


def _bystanders(views: Sequence[View], claims: Sequence[Claim], shown: Sequence[View]) -> Iterator[View]:
    """Views that are not shown and no mere maps or extents: what is theirs is no padding."""
    names = {view.name for view in shown} | _rightful(claims, {view.name: view for view in views})[1]
    names |= {claim.extent for claim in claims if isinstance(claim, Covers)}
    yield from (view for view in views if view.name not in names)


def _beneath(record: ByteMap, view: View) -> ByteMap:
    """The map with a view as owner and writer of those bytes that nobody owned or wrote."""
    if view.storage != record.storage or not claimed_bytes(view, record.start, record.stop).any():
        return record
    below = byte_map([view], window=(record.start, record.stop), storage=record.storage)
    runs: list[ByteRange] = []
    for run in record.ranges:
        under = [one for one in below.ranges if one.start < run.stop and run.start < one.stop]
        cut = [replace(one, start=max(one.start, run.start), stop=min(one.stop, run.stop)) for one in under]
        runs += cut if run.state == "unowned" else [run]
    if not any(run.owner and run.owner.view == view.name for run in runs):
        return record
    return replace(record, ranges=tuple(runs), beneath=(*record.beneath, view))


def _window(place: Place, storage: Storage | None) -> tuple[Storage, int, int] | None:
    """Rows around a place, cut to the storage; its last rows where the place lies behind it."""
    if storage is None or not storage.nbytes:
        return None
    row = min(max(place.start_bytes, 0), storage.nbytes - 1) // ROW_BYTES
    start = max(row - ROWS // 2 + 1, 0) * ROW_BYTES
    return storage, start, min(start + ROWS * ROW_BYTES, storage.nbytes)


def _concerned(finding: Finding, views: Sequence[View], claims: Sequence[Claim]) -> tuple[list[View], list[View]]:
    """Owners and writers to show: the views that the finding names, and those that must be disjoint from them."""
    named = {view.name: view for view in views}
    names = [*finding.views, *(place.view for place in finding.example), *(what for what, _ in finding.hits)]
    companions = [claim.views for claim in claims if isinstance(claim, Disjoint) and set(claim.views) & {*names}]
    names += [name for others in companions for name in others]
    homes, maps = _rightful(claims, named)
    extents = {claim.extent for claim in claims if isinstance(claim, Covers)} - {*finding.views}
    shown = [n for n in dict.fromkeys(names) if n in named and n not in maps | extents][:MAX_SHOWN]
    return [homes.get(name, named[name]) for name in shown], [named[name] for name in shown]


def _rightful(claims: Sequence[Claim], named: dict[str, View]) -> tuple[dict[str, View], set[str]]:
    """Where claimed views belong, by their names; and the names of views that are nothing but such maps."""
    homes, maps = {}, set()
    for claim in claims:
        if isinstance(claim, BelongsAt | Follows):
            name = claim.view if isinstance(claim, BelongsAt) else claim.scale
            homes[name] = replace(rightful_place(claim, named), name=name)
        if isinstance(claim, BelongsAt) and isinstance(claim.rightful, str):
            maps.add(claim.rightful)
    return homes, maps - homes.keys()
