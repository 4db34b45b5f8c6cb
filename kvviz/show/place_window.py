"""Chooses the few bytes that show one mistake: where an element lies, and where it belongs.

Example: a scale lies at byte 128 and belongs at byte 33,920. The window has two rows of 32 bytes: one row around byte
128, and one row around byte 33,920. A row says for each byte which view owns it, and which view uses it.

:func:`place_window` makes the window as a record. :mod:`kvviz.show.place_picture` draws the window.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvviz.audit.causes import Diagnosis
from kvviz.audit.claims import Claim, Covers, Overlay, names_in
from kvviz.audit.diagnosis_text import first_finding
from kvviz.audit.elements import first_wrong, place
from kvviz.audit.findings import ARROW, Finding, Place
from kvviz.audit.view import Storage, View
from kvviz.show.byte_map import ByteMap, ByteRange, Part, byte_map
from kvviz.show.nearby import MOST_ELEMENTS, map_of_window

ROW_BYTES, BEFORE, GRID = 32, 12, 8
"""Bytes of a row; bytes that a row shows before its place; the first byte of a row is a multiple of the last number."""

NEAR_BYTES = 40
"""If this many bytes are enough to show two places, one row shows both."""

OUTSIDE = "outside"
"""State of bytes before the start of a storage or after its end."""


@dataclass(frozen=True)
class Span:
    """Bytes ``[start, stop)`` of a row that the same views own or use.

    Attributes:
        names: the names of these views; empty if there are none. A name of an extent also has the block.
        role: the role of the first of these views.
        state: one of :data:`kvviz.show.states.STATES`, or :data:`OUTSIDE`.
    """

    start: int
    stop: int
    names: tuple[str, ...]
    state: str
    role: str = "data"


@dataclass(frozen=True)
class Mark:
    """A place in a row, and what happens there: ``lies here``."""

    start: int
    stop: int
    text: str


@dataclass(frozen=True)
class Row:
    """Bytes ``[start, stop)`` of one storage.

    Attributes:
        owners: the views that own the bytes. It is empty if no claim and no repair says which views do.
        users: the views that read or write the bytes.
        marks: the places that the picture is about.
    """

    storage: Storage
    start: int
    stop: int
    owners: tuple[Span, ...]
    users: tuple[Span, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class PlaceWindow:
    """One or two rows of bytes, in the order of their addresses.

    Attributes:
        finding: the finding whose first place the window shows.
        used: the label of the users of a row: ``used by`` or ``taken by``.
        arrow: True if the marks are two places of one element: where it belongs, and where it lies.
    """

    finding: Finding
    rows: tuple[Row, ...]
    used: str
    arrow: bool

    @property
    def left_out(self) -> int:
        """Return the number of bytes between two rows of one storage. In any other case, return 0."""
        first, *others = self.rows
        return sum(row.start - first.stop for row in others if row.storage == first.storage)


def place_window(
    diagnosis: Diagnosis, views: Sequence[View], claims: Sequence[Claim], repaired: Mapping[str, View]
) -> PlaceWindow | None:
    """Return the smallest window that shows the first place of a diagnosis. If no finding has a place, return None.

    Args:
        views, claims: the views and claims of the audit.
        repaired: the repaired views of all diagnoses, by name.

    Raises:
        ValueError: too many elements reach into the window.
    """
    finding = first_finding(diagnosis.findings)
    if finding is None:
        return None
    named = {view.name: view for view in views}
    first = finding.views[0]
    covers = [claim for claim in claims if isinstance(claim, Covers) and first in names_in(claim.extent)]
    if finding.kind in ("truncated", "oversized") and covers:
        return _extent_window(finding, named, covers[0])
    places = _places(finding, named, repaired)
    rows = [
        _row(storage, start, stop, marks, [finding, *diagnosis.findings], views, claims, repaired)
        for storage, start, stop, marks in _cut(places)
    ]
    return PlaceWindow(finding, tuple(rows), "used by", len(places) > 1)


def _places(finding: Finding, named: Mapping[str, View], repaired: Mapping[str, View]) -> list[tuple[Storage, Mark]]:
    """Return storages and marks: where an element lies, and where it belongs if a claim or a repair says so."""
    lies = finding.example[0]
    storage = named[lies.view].storage if lies.view in named else _storage(finding, named)
    if finding.drawing == ARROW and len(finding.example) > 1:
        rightful = finding.example[1]
        home = named[rightful.view].storage if rightful.view in named else storage
        return [(storage, _mark(lies, "lies here")), (home, _mark(rightful, "belongs here"))]
    for name in (lies.view, *finding.views):
        better = repaired.get(name)
        if name in named and better is not None and better.shape == named[name].shape:
            index = first_wrong(named[name], better)
            if index is not None:
                here, there = place(named[name], index), place(better, index)
                return [(named[name].storage, _mark(here, "lies here")), (better.storage, _mark(there, "belongs here"))]
    text = {"collision": "shared", "out_of_bounds": "outside the storage"}.get(finding.kind, "here")
    return [(storage, _mark(max(finding.example, key=lambda one: one.start_bytes), text))]


def _storage(finding: Finding, named: Mapping[str, View]) -> Storage:
    return next(view.storage for view in named.values() if view.storage.name == finding.storage)


def _mark(place: Place, text: str) -> Mark:
    return Mark(place.start_bytes, place.stop_bytes, text)


def _cut(places: Sequence[tuple[Storage, Mark]]) -> list[tuple[Storage, int, int, list[Mark]]]:
    """Return the rows that show the marks. For each row: storage, first byte, stop byte, and marks."""
    ordered = sorted(places, key=lambda one: (one[0].name, one[1].start))
    marks = [mark for _, mark in ordered]
    ends = [min(mark.stop, mark.start + ROW_BYTES - BEFORE - GRID) for mark in marks]
    if len({storage.name for storage, _ in ordered}) == 1 and max(ends) - marks[0].start <= NEAR_BYTES:
        start = _row_start(marks[0].start)
        stop = max(start + ROW_BYTES, -(-max(ends) // GRID) * GRID)
        return [(ordered[0][0], start, stop, marks)]
    return [(storage, _row_start(mark.start), _row_start(mark.start) + ROW_BYTES, [mark]) for storage, mark in ordered]


def _row_start(byte: int) -> int:
    start = (byte - BEFORE) // GRID * GRID
    return start if byte < 0 else max(start, 0)


def _row(
    storage: Storage,
    start: int,
    stop: int,
    marks: Sequence[Mark],
    findings: Sequence[Finding],
    views: Sequence[View],
    claims: Sequence[Claim],
    repaired: Mapping[str, View],
) -> Row:
    """Return one row of a window that shows the first of ``findings``. Bytes outside the storage have no names."""
    known = bool(repaired) or findings[0].drawing == ARROW
    first, last = max(start, 0), min(stop, storage.nbytes)
    owners, users = [], []
    if first < last:
        maps = map_of_window(storage, first, last, findings, views, claims, repaired, readers=True)
        owners, users = _lanes(*maps, _overlay(findings[0], claims))
    owners, users = (_with_outside(spans, storage, start, stop) for spans in (owners, users))
    return Row(storage, start, stop, owners if known else (), users, tuple(marks))


def _with_outside(spans: Sequence[Span], storage: Storage, start: int, stop: int) -> tuple[Span, ...]:
    """Add spans of the state :data:`OUTSIDE` for bytes before the start of the storage and after its end."""
    before = [Span(start, min(stop, 0), (), OUTSIDE)] if start < 0 else []
    behind = [Span(max(start, storage.nbytes), stop, (), OUTSIDE)] if stop > storage.nbytes else []
    return (*before, *spans, *behind)


def _overlay(finding: Finding, claims: Sequence[Claim]) -> dict[str, int]:
    """Return ``{view: blocks per id}`` of the claim Overlay about the views of a finding. Without such a claim: {}."""
    for claim in claims:
        if isinstance(claim, Overlay) and {*finding.views} <= {*claim.views}:
            return dict(zip(claim.views, claim.blocks_per_id or [1] * len(claim.views), strict=True))
    return {}


def _lanes(record: ByteMap, below: ByteMap, overlay: Mapping[str, int]) -> tuple[list[Span], list[Span]]:
    """Return the owners and the users of a map as spans.

    Args:
        below: a map of other views. It fills bytes that ``record`` leaves empty.
        overlay: views that may share bytes of blocks with equal ids: ``{view: blocks per id}``.
    """
    owners, users = [], []
    for one in record.ranges:
        owners += [_span(one, (one.owner,), "right")] if one.owner else _beneath(one, below, "unowned")
        if one.state == "unreached":
            users += _beneath(one, below, "unreached")
        else:
            shared = one.writers if all(part.view in overlay and part.index for part in one.writers) else ()
            legal = len({part.index[0] // overlay[part.view] for part in shared}) == 1
            users.append(_span(one, one.writers, "right" if legal else one.state))
    return _merged(owners), _merged(users)


def _beneath(stretch: ByteRange, below: ByteMap, state: str) -> Iterator[Span]:
    """Yield spans for a range that no view of the findings uses. If another view uses bytes, its span has its name.

    Args:
        state: the state of bytes that no view uses.
    """
    for one in below.ranges:
        start, stop = max(one.start, stretch.start), min(one.stop, stretch.stop)
        if start < stop:
            span = _span(one, one.writers[:1], "right" if one.writers else state)
            yield replace(span, start=start, stop=stop)


def _span(stretch: ByteRange, parts: Sequence[Part], state: str) -> Span:
    role = parts[0].role if parts else "data"
    return Span(stretch.start, stretch.stop, tuple(part.view for part in parts), state, role)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Join neighbouring spans of the same views in the same state."""
    found: list[Span] = []
    for span in spans:
        if found and replace(span, start=found[-1].start) == replace(found[-1], stop=span.stop):
            found[-1] = replace(found[-1], stop=span.stop)
        else:
            found.append(span)
    return found


def _extent_window(finding: Finding, named: Mapping[str, View], claim: Covers) -> PlaceWindow:
    """Return a row around the first byte that an extent leaves out, or that it takes of another block.

    The row shows only the bytes that the extents take of one block.
    """
    extents, left_out = [named[name] for name in names_in(claim.extent)], finding.kind == "truncated"
    takers = {extent.name for extent in extents}
    first = min(finding.example, key=lambda one: (one.view in takers) == left_out)
    mark = _mark(first, "not taken" if left_out else "of another block")
    ((storage, start, stop, _),) = _cut([(named[first.view].storage, mark)])
    block = None
    if first.index:
        per_block = claim.extents_per_block if first.view in takers else claim.blocks_per_extent
        block = first.index[0] // per_block
    taking = [_entry(extent, block, claim.extents_per_block) for extent in extents]
    others = [named[name] for name in (*claim.content, *claim.neighbours) if name in named]
    window = {"window": (max(start, 0), min(stop, storage.nbytes)), "storage": storage, "most_elements": MOST_ELEMENTS}
    owned, taken = (byte_map(group, **window, readers=True).ranges for group in (others, taking))
    owners = _merged(replace(_alone(one), names=tuple(map(_with_block, one.writers[:1]))) for one in owned)
    users = _merged(_alone(one) for one in taken)
    end = next((one.stop for one in (users if left_out else owners) if one.start <= mark.start < one.stop), mark.stop)
    users = _marked(users, mark.start, end, "unreached" if left_out else "misplaced")
    lanes = (_with_outside(spans, storage, start, stop) for spans in (owners, users))
    return PlaceWindow(finding, (Row(storage, start, stop, *lanes, (mark,)),), "taken by", False)


def _entry(extent: View, block: int | None, per_block: int) -> View:
    """Return the part of an extent for one block, with the numbers of its entries in the name.

    If ``block`` is None, return the whole extent.
    """
    if block is None or not extent.shape:
        return extent
    first, axis = block * per_block, extent.axes[0] if extent.axes else "entry"
    number = f"{first}" if per_block == 1 else f"{first} to {first + per_block - 1}"
    count = max(min(per_block, extent.shape[0] - first), 0)
    offset = extent.offset + first * extent.stride[0] if count else extent.offset
    return replace(extent, name=f"{extent.name}, {axis} {number}", shape=(count, *extent.shape[1:]), offset=offset)


def _alone(stretch: ByteRange) -> Span:
    """Return a span of the first view that uses a range."""
    return _span(stretch, stretch.writers[:1], "right" if stretch.writers else "unowned")


def _with_block(part: Part) -> str:
    return f"{part.view}, {part.axes[0]} {part.index[0]}" if part.index else part.view


def _marked(spans: Sequence[Span], start: int, stop: int, state: str) -> list[Span]:
    """Cut spans at ``start`` and ``stop``, and give a new state to the parts between these bytes."""
    found = []
    for span in spans:
        cuts = [span.start, *(cut for cut in (start, stop) if span.start < cut < span.stop), span.stop]
        for a, b in zip(cuts, cuts[1:], strict=False):
            found.append(replace(span, start=a, stop=b, state=state if start <= a < stop else span.state))
    return found
