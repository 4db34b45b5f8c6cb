"""Makes a byte map of a few rows around the place of a finding. The storage may have any size."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from kvviz.audit.claims import BelongsAt, Claim, Disjoint
from kvviz.audit.findings import NO_MAP, Finding, Place
from kvviz.audit.rightful import rightful_places
from kvviz.audit.view import Storage, View
from kvviz.show.byte_map import ByteMap, ByteRange, byte_map

ROW_BYTES, ROWS = 64, 4
"""Bytes per row, and number of rows, of a map around a finding."""

MOST_ELEMENTS = 1 << 18
"""Work limit of such a map: elements that have bytes in the window. 262,144 elements take some milliseconds."""


def map_around(finding: Finding, views: Sequence[View], claims: Sequence[Claim] = (), end: int = 0) -> ByteMap | None:
    """Return a map of a few rows around a place in the example of a finding.

    Return None if the example has no place ``end``, if the storage is unknown, or if this kind of finding has no map.

    Args:
        views, claims: what was audited.
        end: number of the place in the example. 0 is the first place. For a misplaced element, 1 is the place where the
            element belongs.

    Raises:
        ValueError: more than :data:`MOST_ELEMENTS` elements have bytes in the window.
    """
    if len(finding.example) <= end or finding.drawing == NO_MAP:
        return None
    owners, writers = _shown([finding], views, claims, {})
    shown, name = (owners, finding.views[0]) if end else (writers, finding.example[0].view)
    window = _window(finding.example[end], next((view.storage for view in shown if view.name == name), None))
    if window is None:
        return None
    return map_of_window(*window, [finding], views, claims)[0]


def map_of_window(
    storage: Storage,
    start: int,
    stop: int,
    findings: Sequence[Finding],
    views: Sequence[View],
    claims: Sequence[Claim],
    repaired: Mapping[str, View] = MappingProxyType({}),
    readers: bool = False,
) -> tuple[ByteMap, ByteMap]:
    """Map bytes ``[start, stop)``. Return a map of the views of some findings, and a map of all other views alone.

    The first map shows the other views too, on bytes that no view of the findings owns or writes. So it does not draw
    these bytes as padding.

    Args:
        repaired: rightful places that are known from a repair, by the name of the view that belongs there.
        readers: True to show views that are only read among the writers.

    Raises:
        ValueError: more than :data:`MOST_ELEMENTS` elements have bytes in the window.
    """
    owners, writers = _shown(findings, views, claims, repaired)
    window = {"window": (start, stop), "storage": storage, "most_elements": MOST_ELEMENTS}
    record = byte_map(owners, writers, **window, readers=readers)
    places = rightful_places(views, claims)
    hidden = {view.name for view in (*owners, *writers)} | places.references | places.extents
    others = [view for view in views if view.name not in hidden]
    below = byte_map(others, **window)
    return _with_owners_beneath(record, below), below


def _with_owners_beneath(record: ByteMap, below: ByteMap) -> ByteMap:
    """Return the map with the views of ``below`` as owners and writers of bytes that nobody owns or writes.

    If several views cover such a byte, the first one counts.
    """
    ranges: list[ByteRange] = []
    for above in record.ranges:
        under = [one for one in below.ranges if one.start < above.stop and above.start < one.stop]
        for part in [_cut(above, one) for one in under] if above.state == "unowned" else [above]:
            if ranges and ranges[-1] == replace(part, start=ranges[-1].start, stop=part.start):
                ranges[-1] = replace(ranges[-1], stop=part.stop)
            else:
                ranges.append(part)
    seen = {part.owner.view for part in ranges if part.owner}
    return replace(record, ranges=tuple(ranges), beneath=tuple(view for view in below.owners if view.name in seen))


def _cut(above: ByteRange, below: ByteRange) -> ByteRange:
    """Return the part of an unowned range that lies in the range below, with the owner of that range."""
    start, stop = max(above.start, below.start), min(above.stop, below.stop)
    if not below.writers:
        return replace(above, start=start, stop=stop)
    return ByteRange(start, stop, below.writers[0], below.writers[:1], "right")


def _window(place: Place, storage: Storage | None) -> tuple[Storage, int, int] | None:
    """Return the storage and the window ``[start, stop)`` of the rows around a place. The window ends with the storage.

    If the place lies outside the storage, the window holds the nearest rows.
    """
    if storage is None or not storage.nbytes:
        return None
    row = min(max(place.start_bytes, 0), storage.nbytes - 1) // ROW_BYTES
    start = max(row - ROWS // 2 + 1, 0) * ROW_BYTES
    return storage, start, min(start + ROWS * ROW_BYTES, storage.nbytes)


def _shown(
    findings: Sequence[Finding], views: Sequence[View], claims: Sequence[Claim], repaired: Mapping[str, View]
) -> tuple[list[View], list[View]]:
    """Return the owners and the writers to show.

    These are the views that the findings name, and the views that must be disjoint from them. Extents are shown only
    if the first finding names them.
    """
    names = {name for finding in findings for name in finding.views}
    names |= {place.view for finding in findings for place in finding.example}
    names |= {owner for finding in findings for owner, _ in finding.hits}
    # The owner at a rightful place has the name of the view that belongs there. So this view must be shown too.
    names |= {claim.view for claim in claims if isinstance(claim, BelongsAt) and claim.rightful in names}
    companions = [claim.views for claim in claims if isinstance(claim, Disjoint) and names & {*claim.views}]
    names.update(name for others in companions for name in others)
    places = rightful_places(views, claims)
    hidden = places.references | (places.extents - {*findings[0].views})
    rightful = places.moved | repaired
    shown = [view for view in views if view.name in names - hidden]
    return [rightful.get(view.name, view) for view in shown], shown
