"""Makes a byte map of a few rows around the place of a finding. The storage may have any size."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvviz.audit.claims import BelongsAt, Claim, Disjoint
from kvviz.audit.findings import NO_MAP, Finding, Place
from kvviz.audit.rightful import rightful_places
from kvviz.audit.view import Storage, View
from kvviz.show.byte_map import ByteMap, ByteRange, byte_map, claimed_bytes

ROW_BYTES, ROWS = 64, 4
"""Bytes per row, and number of rows, of a map around a finding."""

MAX_SHOWN = 48
"""Limit of the views that one map shows. Views that the finding names come first."""


def map_around(finding: Finding, views: Sequence[View], claims: Sequence[Claim] = (), end: int = 0) -> ByteMap | None:
    """Return a map of a few rows around a place in the example of a finding.

    Return None if the example has no place ``end``, if the storage is unknown, or if this kind of finding has no map.

    Args:
        views, claims: what was audited.
        end: number of the place in the example. 0 is the first place. For a misplaced element, 1 is the place where the
            element belongs.
    """
    if len(finding.example) <= end or finding.drawing == NO_MAP:
        return None
    owners, writers = _shown(finding, views, claims)
    shown, name = (owners, finding.views[0]) if end else (writers, finding.example[0].view)
    window = _window(finding.example[end], next((view.storage for view in shown if view.name == name), None))
    if window is None:
        return None
    storage, start, stop = window
    record = byte_map(owners, writers, window=(start, stop), storage=storage)
    for view in _other_owners(views, claims, [*owners, *writers]):
        if any(bytes_.state == "unowned" for bytes_ in record.ranges) and len(record.beneath) < MAX_SHOWN:
            record = _with_owner(record, view)
    return record


def _other_owners(views: Sequence[View], claims: Sequence[Claim], shown: Sequence[View]) -> Iterator[View]:
    """Yield the views that own bytes and are not shown yet. Without them, the map would draw their bytes as padding."""
    places = rightful_places(views, claims)
    names = {view.name for view in shown} | places.references | places.extents
    yield from (view for view in views if view.name not in names)


def _with_owner(record: ByteMap, view: View) -> ByteMap:
    """Return the map with one more view. If a byte of the view had no owner and no writer, the view becomes both."""
    if view.storage != record.storage or not claimed_bytes(view, record.start, record.stop).any():
        return record
    below = byte_map([view], window=(record.start, record.stop), storage=record.storage)
    ranges: list[ByteRange] = []
    for above in record.ranges:
        if above.state != "unowned":
            ranges.append(above)
            continue
        under = [one for one in below.ranges if one.start < above.stop and above.start < one.stop]
        ranges += [replace(one, start=max(one.start, above.start), stop=min(one.stop, above.stop)) for one in under]
    if not any(bytes_.owner and bytes_.owner.view == view.name for bytes_ in ranges):
        return record
    return replace(record, ranges=tuple(ranges), beneath=(*record.beneath, view))


def _window(place: Place, storage: Storage | None) -> tuple[Storage, int, int] | None:
    """Return the storage and the window ``[start, stop)`` of the rows around a place. The window ends with the storage.

    If the place lies outside the storage, the window holds the nearest rows.
    """
    if storage is None or not storage.nbytes:
        return None
    row = min(max(place.start_bytes, 0), storage.nbytes - 1) // ROW_BYTES
    start = max(row - ROWS // 2 + 1, 0) * ROW_BYTES
    return storage, start, min(start + ROWS * ROW_BYTES, storage.nbytes)


def _shown(finding: Finding, views: Sequence[View], claims: Sequence[Claim]) -> tuple[list[View], list[View]]:
    """Return the owners and the writers to show.

    These are the views that the finding names, and the views that must be disjoint from them.
    """
    named = {view.name: view for view in views}
    names = [*finding.views, *(place.view for place in finding.example), *(owner for owner, _ in finding.hits)]
    # The owner at a rightful place has the name of the view that belongs there. So this view must be shown too.
    names += [claim.view for claim in claims if isinstance(claim, BelongsAt) and claim.rightful in names]
    companions = [claim.views for claim in claims if isinstance(claim, Disjoint) and set(claim.views) & {*names}]
    names += [name for others in companions for name in others]
    places = rightful_places(views, claims)
    hidden = places.references | (places.extents - {*finding.views})
    shown = [name for name in dict.fromkeys(names) if name in named and name not in hidden][:MAX_SHOWN]
    return [places.moved.get(name, named[name]) for name in shown], [named[name] for name in shown]
