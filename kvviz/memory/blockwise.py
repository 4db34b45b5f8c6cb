"""Checks block by block: overlays of one pool, and extents that must cover their block's content and nothing else.

A view's first axis is its block. With equal block strides, what a view holds in one block's stride is cut into
*layers* by how many strides it lies behind the block's start; two claimants of a byte are of the same block exactly
when they are in the same layer. With unequal strides the blocks are taken one by one, up to a limit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvviz.memory.disputes import by_storage, place_of_byte
from kvviz.memory.extents import Lane, Pattern, Region, Sweep, TooMuchWorkError, byte_lanes
from kvviz.memory.finding import Finding
from kvviz.memory.view import View

MAX_BLOCKS = 4096
"""Blocks of all views together that are taken one by one where block strides differ."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Bytes of a view that lie in one block, or in one layer of every block (``block`` then counts layers)."""

    view: View
    block: int
    lanes: list[Lane]
    role: str = ""


def overlaid(views: Sequence[View]) -> Iterator[Finding]:
    """Bytes that views share between different block ids, one finding for each set of views."""
    for group in by_storage(views):
        parts = _parts(group)
        sweep = Sweep([part.lanes for part in parts], [part.view.itemsize for part in parts])
        found: dict[tuple[str, ...], list[Region]] = {}
        for region in sweep.regions():
            members = [parts[m] for m in region.members]
            if len({part.block for part in members}) > 1:
                names = tuple(dict.fromkeys(part.view.name for part in members))
                found.setdefault(names, []).append(region)
        for names, regions in found.items():
            yield _shared(names, regions, group)


def _shared(names: tuple[str, ...], regions: Sequence[Region], views: Sequence[View]) -> Finding:
    cells, bytes_ = sum(sum(r.elements) for r in regions), sum(r.bytes for r in regions)
    first = min(region.first for region in regions)
    example = tuple(p for view in views if view.name in names for p in place_of_byte(view, first))
    text = "different block ids share these bytes"
    return Finding("collision", names, views[0].storage.name, cells, bytes_, example, text=text)


def covers(extent: View, content: Sequence[View], neighbours: Sequence[View]) -> Iterator[Finding]:
    """What each block's extent lacks of its content, and what it takes of other blocks."""
    strangers = [view.name for view in (*content, *neighbours) if view.storage != extent.storage]
    if strangers:
        raise ValueError(f"{extent.name} lies in {extent.storage.name}, and {', '.join(strangers)} elsewhere")
    blocks = extent.shape[0] if extent.shape else 1
    owed = [_reshaped(v, (min(v.shape[0], blocks), *v.shape[1:]), v.offset) for v in content if v.shape]
    parts = [
        *(replace(part, role="extent") for part in _parts([extent], [*owed, *neighbours])),
        *(replace(part, role="content") for part in _parts(owed, [extent, *neighbours])),
        *(replace(part, role="neighbour") for part in _parts(neighbours, [extent, *owed])),
    ]
    sweep = Sweep([part.lanes for part in parts], [part.view.itemsize for part in parts])
    missing, foreign = [], []
    for region in sweep.regions(1):
        blocks_of = {role: {parts[m].block for m in region.members if parts[m].role == role} for role in _ROLES}
        if blocks_of["content"] - blocks_of["extent"]:
            missing.append(region)
        if any(taken != owned for taken in blocks_of["extent"] for owned in blocks_of["neighbour"]):
            foreign.append(region)
    yield from _extent_finding("truncated", extent, content, missing, "bytes of the content are not covered")
    yield from _extent_finding("oversized", extent, neighbours, foreign, "bytes of other blocks are covered")


def _extent_finding(
    kind: str, extent: View, others: Sequence[View], regions: Sequence[Region], text: str
) -> Iterator[Finding]:
    if not regions:
        return
    first = min(region.first for region in regions)
    bytes_ = sum(region.bytes for region in regions)
    hit = [view for view in others if view.name != extent.name and place_of_byte(view, first)]
    example = tuple(p for view in (extent, *hit) for p in place_of_byte(view, first))
    names = tuple(dict.fromkeys((extent.name, *(view.name for view in others))))
    yield Finding(kind, names, extent.storage.name, bytes_, bytes_, example, text=f"{bytes_} {text}")


_ROLES = ("extent", "content", "neighbour")


def _parts(views: Sequence[View], others: Sequence[View] = ()) -> list[_Part]:
    """Views cut by block, in the same manner as ``others`` that they will meet.

    Raises:
        ValueError: a view without a block axis.
        TooMuchWorkError: unequal block strides and more than :data:`MAX_BLOCKS` blocks.
    """
    everybody = [view for view in (*views, *others) if view.num_elements or not view.shape]
    for view in everybody:
        if not view.shape:
            raise ValueError(f"{view.name} has no axis: its first axis must be the block")
    views = [view for view in views if view.num_elements]
    strides = {view.stride[0] * view.itemsize for view in everybody if view.shape[0] > 1}
    if len(strides) == 1 and min(strides) > 0:
        return [part for view in views for part in _layers(view, min(strides))]
    if sum(view.shape[0] for view in everybody) > MAX_BLOCKS:
        raise TooMuchWorkError(
            f"the block strides {sorted(strides)} differ, and {sum(v.shape[0] for v in everybody)} blocks are more "
            f"than the {MAX_BLOCKS} that are taken one by one"
        )
    return [_Part(view, block, byte_lanes(_block(view, block))) for view in views for block in range(view.shape[0])]


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
