"""Checks block by block: may views share bytes only in equal blocks, and does a transfer take exactly its block?

Example: a transfer copies 2048 bytes per block, but blocks are only 1024 bytes apart. It takes the bytes of the next
block as well: that is a finding. The first axis of a view is its block.

Blocks are not listed if all views have the same block stride S. The storage is divided into stretches of S bytes. If a
byte of block 0 lies in stretch k, the same byte of block b lies in stretch b + k. This k is the *block step* of the
byte. In one stretch, two bytes are of the same block exactly if their block steps are equal. So each view is divided
into one part per block step.

If the block strides differ, each block of each view is a part. If these are too many, only the first blocks are
judged. What is found there is reported without counts, and finding nothing there is reported as "not judged".
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvviz.audit.byte_sets import ByteSet, Pattern, TooMuchWorkError, byte_sets
from kvviz.audit.elements import locate, place
from kvviz.audit.findings import Finding, Place, counted
from kvviz.audit.overlap import by_storage
from kvviz.audit.sweep import Intervals, Sweep
from kvviz.audit.view import MAX_ADDRESS, View

MAX_BLOCKS = 4096
"""Largest number of blocks, over all views of a claim, that are judged one by one if block strides differ."""

FEW_BLOCKS = 1024
"""Number of blocks, over all views of a claim, that are judged if there are more than :data:`MAX_BLOCKS`."""

MOST_NAMES = 6
"""A text gives the number of elements for at most this many views. The other views are only counted."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Some bytes of a view. Two parts have bytes of the same block exactly if their labels are equal.

    Attributes:
        label: the block step of all bytes of the part, or the block if blocks are taken one by one.
        sets: the bytes, as byte sets.
        role: extent, content or neighbour, see :func:`covers`.
    """

    view: View
    label: int
    sets: list[ByteSet]
    role: str = ""


_Verdicts = Iterator[tuple[Hashable, tuple[int, ...]]]
"""The faults of some bytes: for each fault its key, and the numbers of the parts that the fault affects."""


@dataclass
class _Fault:
    """All bytes that have the same fault.

    Attributes:
        bytes: number of bytes.
        first: the lowest byte.
        elements: for each view, how many of its elements have a byte with this fault.
        members: numbers of all parts that have the lowest byte.
        affected: numbers of those members that the fault affects.
    """

    bytes: int = 0
    first: int = MAX_ADDRESS
    elements: Counter[str] = field(default_factory=Counter)
    members: tuple[int, ...] = ()
    affected: tuple[int, ...] = ()


def overlaid(views: Sequence[View]) -> Iterator[Finding]:
    """Find bytes that different blocks share: one finding for each set of views.

    Raises:
        ValueError: a view has no axis, so it has no blocks.
        TooMuchWorkError: block strides differ, so only the first blocks were checked. They have no fault, but later
        blocks may have one.
    """
    for given in by_storage(views):
        limit = _block_limit(given)
        group = [_first_blocks(view, limit) for view in given]
        stride = _block_stride(group)
        parts = _parts(group, stride)

        def different_blocks(members: tuple[int, ...], parts: Sequence[_Part] = parts) -> _Verdicts:
            """Yield a fault if the parts that share some bytes are not all of one block."""
            if len({parts[m].label for m in members}) > 1:
                yield tuple(dict.fromkeys(parts[m].view.name for m in members)), members

        faults = _find_faults(parts, different_blocks)
        _check_judged(faults, limit, given)
        for names, fault in sorted(faults.items(), key=lambda item: (item[1].first, item[0])):
            example = _colliding_places(parts, fault, stride)
            storage, text = group[0].storage.name, "different block ids share these bytes"
            finding = Finding("collision", names, storage, fault.elements.total(), fault.bytes, example, text=text)
            yield _without_counts(finding, limit)


def covers(
    extent: View, content: Sequence[View], neighbours: Sequence[View], cache: dict | None = None
) -> Iterator[Finding]:
    """Find content that an extent does not cover, and bytes of other blocks that it does cover.

    Elements are counted: those of the content that are not covered completely, and those of neighbours with a
    covered byte.

    Args:
        extent: the bytes that a transfer takes of each block.
        content: the views that the extent must cover. An extent of fewer blocks owes only the first blocks.
        neighbours: the views that the extent may not take from other blocks.
        cache: keeps the parts of neighbours for other extents of the same audit.

    Raises:
        ValueError: the views lie in several storages, or a view has no axis, so it has no blocks.
        TooMuchWorkError: block strides differ, so only the first blocks were checked. They have no fault, but later
        blocks may have one.
    """
    others = dict.fromkeys(view.name for view in (*content, *neighbours) if view.storage != extent.storage)
    if others:
        raise ValueError(
            f"{extent.name} lies in storage {extent.storage.name}, and {', '.join(others)} in another one: "
            f"an extent and its views must lie in one storage"
        )
    blocks = extent.shape[0] if extent.shape else 1
    owed = [_first_blocks(view, blocks) for view in content]
    limit = _block_limit([extent, *owed, *neighbours])
    taken, due, near = ([_first_blocks(v, limit) for v in views] for views in ([extent], owed, neighbours))
    stride = _block_stride([*taken, *due, *near])
    parts = [replace(part, role="extent") for part in _parts(taken, stride)]
    touched = []
    if parts and any(view.num_elements for view in near):
        candidates = _neighbour_parts(near, stride, limit, {} if cache is None else cache)
        touched = _parts_near(parts, candidates, stride)
    parts += [replace(part, role="content") for part in _parts(due, stride)]
    parts += [replace(part, role="neighbour") for part in touched]

    def judge(members: tuple[int, ...]) -> _Verdicts:
        """Yield ``truncated`` if the extent of a block does not cover its content, and ``oversized`` if it covers
        another block."""
        labels = {parts[m].label for m in members if parts[m].role == "extent"}
        missing = tuple(m for m in members if parts[m].role == "content" and parts[m].label not in labels)
        foreign = tuple(m for m in members if parts[m].role == "neighbour" and labels - {parts[m].label})
        yield from (item for item in (("truncated", missing), ("oversized", foreign)) if item[1])

    faults = _find_faults(parts, judge)
    _check_judged(faults, limit, [extent, *owed, *neighbours])
    for kind, views in (("truncated", content), ("oversized", neighbours)):
        if kind in faults:
            example = _extent_places(kind, parts, faults[kind], stride)
            yield _without_counts(_extent_finding(kind, extent, views, faults[kind], example), limit)


def _colliding_places(parts: Sequence[_Part], fault: _Fault, stride: int | None) -> tuple[Place, ...]:
    """Return elements that share a collision's lowest byte: two of different blocks, then one of each other view."""
    blocks = [(part.view, _block_at(part, fault.first, stride)) for part in (parts[m] for m in fault.members)]
    lowest: dict[str, tuple[View, int]] = {}
    for view, block in blocks:
        lowest[view.name] = min(lowest.get(view.name, (view, block)), (view, block), key=lambda pair: pair[1])
    first, *rest = lowest.values()
    others = [pair for pair in (*rest, *blocks) if pair[1] != first[1]]
    second = min(others, key=lambda pair: pair[0].name == first[0].name)  # better a block of another view
    shown = [first, second, *(pair for pair in rest if pair[0].name != second[0].name)]
    return tuple(p for view, block in shown for p in _place_in_block(view, block, fault.first))


def _extent_places(kind: str, parts: Sequence[_Part], fault: _Fault, stride: int | None) -> tuple[Place, ...]:
    """Return elements at the lowest byte of an extent's fault.

    ``oversized``: the element of the extent, and the elements of other blocks that it covers. ``truncated``: the
    elements of the content. The extent of their block does not have this byte.
    """
    hit: dict[str, tuple[View, int]] = {}
    for part in (parts[m] for m in fault.affected):
        pair = part.view, _block_at(part, fault.first, stride)
        hit[part.view.name] = min(hit.get(part.view.name, pair), pair, key=lambda pair: pair[1])
    shown = list(hit.values())
    if kind == "oversized":
        taken = [part for part in (parts[m] for m in fault.members) if part.role == "extent"]
        blocks = [_block_at(part, fault.first, stride) for part in taken]
        foreign = [block for block in blocks if all(block != other for _, other in shown)]
        # If several blocks of the extent take this byte, some views may be hit in one of these blocks.
        block = min(foreign or [block for block in blocks if block != shown[0][1]])
        shown = [(taken[0].view, block), *(pair for pair in shown if pair[1] != block)]
    return tuple(p for view, block in shown for p in _place_in_block(view, block, fault.first))


def _block_at(part: _Part, byte: int, stride: int | None) -> int:
    """Return the block to which a byte of a part belongs."""
    return byte // stride - part.label if stride else part.label


def _place_in_block(view: View, block: int, byte: int) -> tuple[Place, ...]:
    """Find an element of one block that covers ``byte``. Return ``(place,)``, or ``()`` if the search is too long."""
    index = locate(_block(view, block), byte)
    return () if index is None else (place(view, (block, *index[1:])),)


def _extent_finding(
    kind: str, extent: View, views: Sequence[View], fault: _Fault, example: tuple[Place, ...]
) -> Finding:
    """Return the finding of one fault of an extent, with the views that it affects."""
    hit = [view for view in views if fault.elements[view.name]]
    names = tuple(dict.fromkeys((extent.name, *(view.name for view in hit))))
    of_views = dict.fromkeys(view.name for view in hit)
    counts = [f"{counted(fault.elements[name], 'element')} of {name}" for name in of_views]
    if len(counts) > MOST_NAMES:
        counts[MOST_NAMES:] = [f"and {counted(len(counts) - MOST_NAMES, 'more view')}"]
    of_what = {"truncated": ("of the content", "not covered"), "oversized": ("of other blocks", "covered")}[kind]
    verb = "is" if fault.bytes == 1 else "are"
    text = f"{counted(fault.bytes, 'byte')} {of_what[0]} {verb} {of_what[1]}: {', '.join(counts)}"
    return Finding(kind, names, extent.storage.name, fault.elements.total(), fault.bytes, example, text=text)


def _find_faults(parts: Sequence[_Part], judge: Callable[[tuple[int, ...]], _Verdicts]) -> dict[Hashable, _Fault]:
    """Return one sum for each fault: all bytes that have this fault.

    Bytes are grouped by fault and not by owner. So an element with several faulty bytes counts once, even if different
    parts share these bytes.

    Args:
        judge: a function. It gets the index of each part that covers the same bytes, and returns the faults of these
            bytes.
    """
    faults: dict[Hashable, _Fault] = {}
    sweep = Sweep([part.sets for part in parts], [part.view.itemsize for part in parts])
    for table in sweep.intervals():
        for key, affected in _judge_combinations(sweep, table, judge).items():
            bad = table.covered_by({position for positions in affected.values() for position in positions})
            fault = faults.setdefault(key, _Fault())
            fault.bytes += int(bad.sizes.sum()) * table.periods
            if int(bad.starts[0]) < fault.first:
                position = int(bad.combination[0])
                members = sorted({sweep.owner_of[number] for number in table.combinations[position]})
                fault.first, fault.members = int(bad.starts[0]), tuple(members)
                fault.affected = tuple(part for part in members if position in affected.get(part, ()))
            for part, positions in affected.items():
                count = sweep.count_elements(bad, part, positions)
                fault.elements[parts[part].view.name] += count * table.periods
    return faults


def _judge_combinations(
    sweep: Sweep, table: Intervals, judge: Callable[[tuple[int, ...]], _Verdicts]
) -> dict[Hashable, dict[int, list[int]]]:
    """Return the positions of the combinations that have a fault, by fault and by affected part."""
    affected: dict[Hashable, dict[int, list[int]]] = {}
    for position, sets in enumerate(table.combinations):
        members = tuple(sorted({sweep.owner_of[number] for number in sets}))
        for key, parts in judge(members):
            for part in parts:
                affected.setdefault(key, {}).setdefault(part, []).append(position)
    return affected


def _block_stride(views: Sequence[View]) -> int | None:
    """Return the block stride in bytes that all views have, or None if they differ.

    Raises:
        ValueError: a view has no axis, so it has no blocks.
    """
    relevant = [view for view in views if view.num_elements or not view.shape]
    for view in relevant:
        if not view.shape:
            raise ValueError(f"{view.name} has no axis: its first axis must be the block")
    return _common_stride(relevant)


def _common_stride(views: Sequence[View]) -> int | None:
    """Return the block stride in bytes that all views have, or None. It must be a multiple of each element's size."""
    strides = {view.stride[0] * view.itemsize for view in views if view.shape[0] > 1}
    one = len(strides) == 1 and min(strides) > 0 and not any(min(strides) % view.itemsize for view in views)
    return min(strides) if one else None


def _parts(views: Sequence[View], stride: int | None) -> list[_Part]:
    """Divide views by block step, or by block if there is no common stride."""
    views = [view for view in views if view.num_elements]
    if stride:
        return [part for view in views for part in _parts_by_step(view, stride)]
    return [_Part(view, block, byte_sets(_block(view, block))) for view in views for block in range(view.shape[0])]


def _parts_by_step(view: View, stride: int) -> Iterator[_Part]:
    """Divide a view with a block stride into one part per block step.

    The byte ranges of block 0 are cut at multiples of the stride. A range in stretch k of the storage has block step k.
    The next blocks repeat it, one stride apart.
    """
    sets_of: dict[int, list[ByteSet]] = {}
    for byte_set in byte_sets(_block(view, 0)):
        patterns_of: dict[int, list[Pattern]] = {}
        for start, width in _list_ranges(byte_set):
            while width:
                step = start // stride
                size = min(width, (step + 1) * stride - start)
                pattern = Pattern(start, stride, view.shape[0], np.zeros(1, np.int64), size)
                patterns_of.setdefault(step, []).append(pattern)
                start, width = start + size, width - size
        for step, patterns in patterns_of.items():
            sets_of.setdefault(step, []).append(_join_patterns(patterns))
    for step, sets in sorted(sets_of.items()):
        yield _Part(view, step, sets)


def _list_ranges(byte_set: ByteSet) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the width of each byte range."""
    for p in byte_set:
        for copy in range(p.count):
            for start in p.starts.tolist():
                yield p.base + copy * p.step + start, p.width


def _join_patterns(patterns: Sequence[Pattern]) -> ByteSet:
    """Join patterns of one byte range each, all of one step and count: one pattern per width."""
    joined = []
    for width in sorted({p.width for p in patterns}):
        bases = sorted(p.base for p in patterns if p.width == width)
        starts = np.asarray(bases, np.int64) - bases[0]
        joined.append(Pattern(bases[0], patterns[0].step, patterns[0].count, starts, width))
    return joined


@dataclass(frozen=True, eq=False)
class _NeighbourParts:
    """Parts of neighbours, and arrays to find quickly the parts that an extent may touch.

    Attributes:
        starts, stops, part: byte ranges, see :func:`_search_ranges`, and the part of each one: int64, shape (ranges,).
        lows, highs: lowest byte and end of each part: int64, shape (parts,).
    """

    parts: list[_Part]
    starts: np.ndarray
    stops: np.ndarray
    part: np.ndarray
    lows: np.ndarray
    highs: np.ndarray


def _neighbour_parts(views: Sequence[View], stride: int | None, limit: int | None, cache: dict) -> _NeighbourParts:
    """Return the parts of neighbours, from the cache if they are there."""
    key = (stride, limit, *(view.name for view in views))
    if key not in cache:
        parts = _parts(views, stride)
        ranges = [_search_ranges([part], stride) for part in parts]
        part_of = np.repeat(np.arange(len(parts)), [len(starts) for starts, _ in ranges])
        starts, stops = (np.concatenate([np.zeros(0, np.int64), *found]) for found in zip(*ranges, strict=True))
        lows, highs = np.array([_span([part]) for part in parts], np.int64).T
        cache[key] = _NeighbourParts(parts, starts, stops, part_of, lows, highs)
    return cache[key]


def _parts_near(extent: Sequence[_Part], others: _NeighbourParts, stride: int | None) -> list[_Part]:
    """Return the parts that the extent may touch. It cannot touch the others, so they need not be counted."""
    low, high = _span(extent)
    starts, stops = _search_ranges(extent, stride)
    order = np.argsort(starts, kind="stable")
    # highest_stop[n] is the largest stop among the first n + 1 ranges of the extent. A neighbour's range [a, b)
    # overlaps the extent exactly if the largest stop of all ranges that start before b is greater than a.
    starts, highest_stop = starts[order], np.maximum.accumulate(stops[order])
    num_before = np.searchsorted(starts, others.stops)
    touch = (num_before > 0) & (highest_stop[np.maximum(num_before, 1) - 1] > others.starts)
    close = (others.lows < high) & (others.highs > low)
    return [others.parts[number] for number in np.unique(others.part[touch]).tolist() if close[number]]


def _search_ranges(parts: Sequence[_Part], stride: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops of ranges that overlap if parts share a byte.

    With a common stride, each byte range counts from the start of its stretch. Otherwise a range spans a pattern.
    """
    patterns = [(part.label, p) for part in parts for byte_set in part.sets for p in byte_set]
    if stride:
        ranges = [(p.base - step * stride + p.starts, p.width) for step, p in patterns]
    else:
        ranges = [(np.array([p.base]), p.stop - p.base) for _, p in patterns]
    return np.concatenate([starts for starts, _ in ranges]), np.concatenate(
        [starts + width for starts, width in ranges]
    )


def _span(parts: Sequence[_Part]) -> tuple[int, int]:
    """Return the lowest byte of parts and the end of their highest byte."""
    patterns = [p for part in parts for byte_set in part.sets for p in byte_set]
    return min(p.base for p in patterns), max(p.stop for p in patterns)


def _block_limit(views: Sequence[View]) -> int | None:
    """Return how many blocks of each view are judged, or None if all are.

    There is a limit only if the block strides differ and the views have more than :data:`MAX_BLOCKS` blocks in total.
    """
    relevant = [view for view in views if view.shape and view.num_elements]
    if sum(view.shape[0] for view in relevant) <= MAX_BLOCKS or _common_stride(relevant):
        return None
    return max(FEW_BLOCKS // len(relevant), 1)


def _first_blocks(view: View, limit: int | None) -> View:
    """Return the first ``limit`` blocks of a view, or all of them if ``limit`` is None."""
    if limit is None or not view.shape or view.shape[0] <= limit:
        return view
    return replace(view, shape=(limit, *view.shape[1:]))


def _block(view: View, block: int) -> View:
    """Return one block of a view, as a view of one block."""
    return replace(view, shape=(1, *view.shape[1:]), offset=view.offset + block * view.stride[0])


def _without_counts(finding: Finding, limit: int | None) -> Finding:
    """Return a finding as it is, or without counts if only the first blocks were judged."""
    if limit is None:
        return finding
    where = "first block" if limit == 1 else f"first {limit} blocks"
    text = f"{finding.text} (counted in the {where} of each view only: the block strides differ)"
    return replace(finding, elements=None, bytes=None, text=text)


def _check_judged(faults: dict, limit: int | None, views: Sequence[View]) -> None:
    """Raise TooMuchWorkError if only the first blocks were judged and nothing was found in them."""
    if limit is not None and not faults:
        names = ", ".join(dict.fromkeys(view.name for view in views))
        where = "first block" if limit == 1 else f"first {limit} blocks"
        raise TooMuchWorkError(
            f"the block strides of {names} differ; nothing was found in their {where}, and all blocks together are "
            f"more than the {MAX_BLOCKS} that can be judged one by one; audit views of fewer blocks"
        )
