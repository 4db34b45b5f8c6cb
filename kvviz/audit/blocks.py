"""Checks block by block: overlays of one pool, and extents that must cover their block's content and nothing else.

A view's first axis is its block. With equal block strides, what a view holds in one block's stride is cut into
*layers* by how many strides it lies behind the block's start; two claimants of a byte are of the same block exactly
when they are in the same layer. With unequal strides the blocks are taken one by one; where they are too many, the
first are judged, and what is found there holds and is not counted.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvviz.audit.byte_sets import Lane, Pattern, TooMuchWorkError, byte_lanes
from kvviz.audit.findings import Finding
from kvviz.audit.overlap import by_storage, place_of_byte
from kvviz.audit.sweep import Sweep
from kvviz.audit.view import MAX_ADDRESS, View

MAX_BLOCKS = 4096
"""Blocks of all views together that are taken one by one where block strides differ."""

FEW_BLOCKS = 1024
"""Blocks of all views together that are judged where there are more than that."""

MOST_NAMES = 6
"""Views whose elements a text counts one by one."""

WRONG = {"truncated": "bytes of the content are not covered", "oversized": "bytes of other blocks are covered"}


@dataclass(frozen=True, eq=False)
class _Part:
    """Bytes of a view that lie in one block, or in one layer of every block (``block`` then counts layers)."""

    view: View
    block: int
    lanes: list[Lane]
    role: str = ""


_Verdicts = Iterator[tuple[Hashable, tuple[int, ...]]]
"""What is wrong with bytes that some parts share, and which of these parts it concerns."""


@dataclass
class _Bad:
    """Bytes with one verdict: how many, the lowest, and for each view how many of its elements they concern."""

    bytes: int = 0
    first: int = MAX_ADDRESS
    cells: Counter[str] = field(default_factory=Counter)


def overlaid(views: Sequence[View]) -> Iterator[Finding]:
    """Bytes that views share between different block ids, one finding for each set of views."""
    for given in by_storage(views):
        few = _few_blocks(given)
        group = [_first(view, few) for view in given]
        parts = _parts(group, _block_stride(group))

        def shared(members: tuple[int, ...], parts: Sequence[_Part] = parts) -> _Verdicts:
            if len({parts[m].block for m in members}) > 1:
                yield tuple(dict.fromkeys(parts[m].view.name for m in members)), members

        found = _Judge(parts, shared).verdicts()
        _check_found(found, few, given)
        for names, bad in sorted(found.items(), key=lambda item: (item[1].first, item[0])):
            example = tuple(p for view in group if view.name in names for p in place_of_byte(view, bad.first))
            storage, text = group[0].storage.name, "different block ids share these bytes"
            finding = Finding("collision", names, storage, bad.cells.total(), bad.bytes, example, text=text)
            yield _in_part(finding, few)


def covers(
    extent: View, content: Sequence[View], neighbours: Sequence[View], cache: dict | None = None
) -> Iterator[Finding]:
    """What each block's extent lacks of its content, and what it takes of other blocks.

    Cells are elements of the content that are not wholly covered, or elements of neighbours that are touched.

    Args:
        cache: keeps the parts of neighbours, by name, for other extents of one audit over the same ones.

    Raises:
        ValueError: the views lie in several storages, or one has no block axis.
        TooMuchWorkError: block strides differ, and nothing was found in the first blocks.
    """
    strangers = dict.fromkeys(view.name for view in (*content, *neighbours) if view.storage != extent.storage)
    if strangers:
        raise ValueError(f"{extent.name} lies in {extent.storage.name}, and {', '.join(strangers)} elsewhere")
    blocks = extent.shape[0] if extent.shape else 1
    owed = [_reshaped(v, (min(v.shape[0], blocks), *v.shape[1:]), v.offset) if v.shape else v for v in content]
    few = _few_blocks([extent, *owed, *neighbours])
    sent, own, others = ([_first(view, few) for view in views] for views in ([extent], owed, neighbours))
    stride = _block_stride([*sent, *own, *others])
    parts = [replace(part, role="extent") for part in _parts(sent, stride)]
    near = []
    if parts and any(view.num_elements for view in others):
        near = _near(parts, _cached_parts(others, stride, few, {} if cache is None else cache), stride)
    parts += [replace(part, role="content") for part in _parts(own, stride)]
    parts += [replace(part, role="neighbour") for part in near]

    def judged(members: tuple[int, ...]) -> _Verdicts:
        taken = {parts[m].block for m in members if parts[m].role == "extent"}
        missing = tuple(m for m in members if parts[m].role == "content" and parts[m].block not in taken)
        foreign = tuple(m for m in members if parts[m].role == "neighbour" and taken - {parts[m].block})
        yield from (item for item in (("truncated", missing), ("oversized", foreign)) if item[1])

    found = _Judge(parts, judged).verdicts()
    _check_found(found, few, [extent, *owed, *neighbours])
    for kind, others in (("truncated", content), ("oversized", neighbours)):
        if kind in found:
            yield _in_part(_extent_finding(kind, extent, others, found[kind]), few)


def _extent_finding(kind: str, extent: View, others: Sequence[View], bad: _Bad) -> Finding:
    hit = [view for view in others if bad.cells[view.name]]
    example = tuple(p for view in (extent, *hit) for p in place_of_byte(view, bad.first))
    names = tuple(dict.fromkeys((extent.name, *(view.name for view in hit))))
    counts = [f"{bad.cells[name]} cells of {name}" for name in dict.fromkeys(view.name for view in hit)]
    more = f" and {len(counts) - MOST_NAMES} views more" if len(counts) > MOST_NAMES else ""
    text = f"{bad.bytes} {WRONG[kind]}: {', '.join(counts[:MOST_NAMES])}{more}"
    return Finding(kind, names, extent.storage.name, bad.cells.total(), bad.bytes, example, text=text)


class _Judge(Sweep):
    """A sweep that takes bytes together by verdict, so that an element whose bytes differ in owners counts once."""

    def __init__(self, parts: Sequence[_Part], verdict: Callable[[tuple[int, ...]], _Verdicts]) -> None:
        super().__init__([part.lanes for part in parts], [part.view.itemsize for part in parts])
        self._parts, self._verdict = parts, verdict

    def verdicts(self) -> dict[Hashable, _Bad]:
        """What is wrong with the bytes of all parts."""
        found: dict[Hashable, _Bad] = {}
        for start, times in self._cells():
            for key, new in self._sweep(start, 1):
                bad = found.setdefault(key, _Bad())
                bad.bytes, bad.first = bad.bytes + new.bytes * times, min(bad.first, new.first)
                bad.cells.update({view: count * times for view, count in new.cells.items()})
        return found

    def _regions(self, lanes_of, which, points: np.ndarray, sizes: np.ndarray, least: int) -> list:
        """Within one period: (verdict, what it concerns) of the intervals; ``which`` of ``lanes_of`` each one has."""
        concerned: dict[Hashable, dict[int, dict[int, tuple[int, ...]]]] = {}
        for number, lanes in enumerate(lanes_of):
            for key, parts in self._verdict(tuple(sorted({self._owner[lane] for lane in lanes}))):
                for part in parts:
                    mine = tuple(lane for lane in lanes if self._owner[lane] == part)
                    concerned.setdefault(key, {}).setdefault(part, {})[number] = mine
        made = []
        for key, by_part in concerned.items():
            here = np.isin(which, list({number for numbers in by_part.values() for number in numbers}))
            bad = _Bad(int(sizes[here].sum()), int(points[here][0]))
            for part, own in by_part.items():
                mine = np.isin(which, list(own))
                (count,) = self._elements((part,), own, which[mine], points[mine], sizes[mine])
                bad.cells[self._parts[part].view.name] += count
            made.append((key, bad))
        return made


def _block_stride(views: Sequence[View]) -> int | None:
    """The one distance from block to block of views that meet, in bytes, or None: blocks are then taken one by one.

    Raises:
        ValueError: a view without a block axis.
    """
    everybody = [view for view in views if view.num_elements or not view.shape]
    for view in everybody:
        if not view.shape:
            raise ValueError(f"{view.name} has no axis: its first axis must be the block")
    return _common_stride(everybody)


def _parts(views: Sequence[View], stride: int | None) -> list[_Part]:
    """Views cut by block: into layers of the one stride, or block by block where there is none."""
    views = [view for view in views if view.num_elements]
    if stride:
        return [part for view in views for part in _layers(view, stride)]
    return [_Part(view, block, byte_lanes(_block(view, block))) for view in views for block in range(view.shape[0])]


@dataclass(frozen=True, eq=False)
class _Held:
    """Parts, and of the runs that :func:`_hulls` gives them the starts, the stops and the part's number."""

    parts: list[_Part]
    starts: np.ndarray
    stops: np.ndarray
    number: np.ndarray
    lows: np.ndarray
    highs: np.ndarray


def _cached_parts(views: Sequence[View], stride: int | None, few: int | None, cache: dict) -> _Held:
    """Parts of views with what they hold."""
    key = (stride, few, *(view.name for view in views))
    if key not in cache:
        parts = _parts(views, stride)
        hulls = [_hulls([part], stride) for part in parts]
        number = np.repeat(np.arange(len(parts)), [len(starts) for starts, _ in hulls])
        starts, stops = (np.concatenate([np.zeros(0, np.int64), *found]) for found in zip(*hulls, strict=True))
        lows, highs = np.array([_span([part]) for part in parts], np.int64).T
        cache[key] = _Held(parts, starts, stops, number, lows, highs)
    return cache[key]


def _near(extent: Sequence[_Part], others: _Held, stride: int | None) -> list[_Part]:
    """Those of the others that may touch the extent; the rest cannot be taken by it."""
    low, high = _span(extent)
    starts, stops = _hulls(extent, stride)
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    before = np.searchsorted(starts, others.stops)  # runs of the extent that begin before each stop
    touch = (before > 0) & (stops[np.maximum(before, 1) - 1] > others.starts)
    close = (others.lows < high) & (others.highs > low)
    return [others.parts[number] for number in np.unique(others.number[touch]).tolist() if close[number]]


def _span(parts: Sequence[_Part]) -> tuple[int, int]:
    patterns = [p for part in parts for lane in part.lanes for p in lane]
    return min(p.base for p in patterns), max(p.stop for p in patterns)


def _hulls(parts: Sequence[_Part], stride: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of runs: behind the start of their block's layer, or, block by block, of whole patterns."""
    patterns = [(part.block, p) for part in parts for lane in part.lanes for p in lane]
    if stride:
        runs = [(p.base - block * stride + p.starts, p.width) for block, p in patterns]
    else:
        runs = [(np.array([p.base]), p.stop - p.base) for _, p in patterns]
    return np.concatenate([begins for begins, _ in runs]), np.concatenate([begins + width for begins, width in runs])


def _common_stride(views: Sequence[View]) -> int | None:
    """The one distance of bytes from block to block, in which no element is cut; None where there is none."""
    strides = {view.stride[0] * view.itemsize for view in views if view.shape[0] > 1}
    one = len(strides) == 1 and min(strides) > 0 and not any(min(strides) % view.itemsize for view in views)
    return min(strides) if one else None


def _few_blocks(views: Sequence[View]) -> int | None:
    """How many blocks of each view are judged where all of them are too many to be taken one by one; else None."""
    there = [view for view in views if view.shape and view.num_elements]
    if sum(view.shape[0] for view in there) <= MAX_BLOCKS or _common_stride(there):
        return None
    return max(FEW_BLOCKS // len(there), 1)


def _first(view: View, few: int | None) -> View:
    return (
        view
        if few is None or not view.shape
        else _reshaped(view, (min(view.shape[0], few), *view.shape[1:]), view.offset)
    )


def _in_part(finding: Finding, few: int | None) -> Finding:
    """A finding on the first blocks holds, and its counts do not."""
    if few is None:
        return finding
    text = f"{finding.text} (counted in the first {few} blocks of each view only: the block strides differ)"
    return replace(finding, elements=None, bytes=None, text=text)


def _check_found(found: dict, few: int | None, views: Sequence[View]) -> None:
    """Raise TooMuchWorkError where a part of the blocks was judged and nothing was found in it."""
    if few is not None and not found:
        names = ", ".join(dict.fromkeys(view.name for view in views))
        raise TooMuchWorkError(
            f"the block strides of {names} differ; nothing was found in their first {few} blocks, and all are more "
            f"than the {MAX_BLOCKS} that are taken one by one"
        )


def _block(view: View, block: int) -> View:
    return _reshaped(view, (1, *view.shape[1:]), view.offset + block * view.stride[0])


def _reshaped(view: View, shape: tuple[int, ...], offset: int) -> View:
    return View(view.name, view.storage, shape, view.stride, offset, view.itemsize, view.axes, view.role)


def _layers(view: View, stride: int) -> Iterator[_Part]:
    """A view over equally strided blocks, cut at multiples of the stride; the number says how far behind its block."""
    pieces: dict[int, list[Lane]] = {}
    for lane in byte_lanes(_block(view, 0)):
        cut: dict[int, list[Pattern]] = {}
        for first, width in _runs(lane):
            while width:
                layer = first // stride
                size = min(width, (layer + 1) * stride - first)
                cut.setdefault(layer, []).append(Pattern(first, stride, view.shape[0], np.zeros(1, np.int64), size))
                first, width = first + size, width - size
        for layer, patterns in cut.items():
            pieces.setdefault(layer, []).append(_gathered(patterns))
    for layer, lanes in sorted(pieces.items()):
        yield _Part(view, layer, lanes)


def _runs(lane: Lane) -> Iterator[tuple[int, int]]:
    for p in lane:
        for copy in range(p.count):
            for start in p.starts.tolist():
                yield p.base + copy * p.step + start, p.width


def _gathered(patterns: Sequence[Pattern]) -> Lane:
    """Patterns of one step and count, with runs of one width taken together."""
    made = []
    for width in sorted({p.width for p in patterns}):
        bases = sorted(p.base for p in patterns if p.width == width)
        starts = np.asarray(bases, np.int64) - bases[0]
        made.append(Pattern(bases[0], patterns[0].step, patterns[0].count, starts, width))
    return made
