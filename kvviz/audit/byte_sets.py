"""Describes all bytes of a view by a few patterns, so that an audit never lists a cache block by block.

Example: each of 1,000,000 blocks, 2048 bytes apart, holds the byte ranges [0, 4) and [132, 136). One
:class:`Pattern` describes all these bytes: ranges of 4 bytes that start at 0 and at 132, copied 1,000,000 times,
2048 bytes apart. The work of an audit depends on the number of patterns and ranges, not on the number of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.view import View

BUDGET = 4_000_000
"""Work limit of one count, in byte ranges. A count that needs more raises :class:`TooMuchWorkError`.

Sorting 4 million byte ranges and finding what they share takes about half a second on one core of an AMD EPYC server.
"""

FEW_RANGES = 1 << 14
"""A copy of a pattern should have at most this many byte ranges, so that listing a copy is cheap."""

MAX_SETS = 4096
"""Largest number of byte sets into which one view is split. A view that needs more raises TooMuchWorkError."""

PATTERN_COST = 40
"""Work of making one pattern, in byte ranges. A pattern takes as much memory as 40 byte ranges."""

Dims = list[tuple[int, int]]
"""``(step in bytes, size)`` of each axis of a view, sorted by step. Axes of size 1 and axes of stride 0 are left out.

In this file, a *dim* is one such pair. An *inner* dim has a smaller step than an *outer* dim.
"""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Byte ranges that repeat: copy ``k`` holds ``[base + k * step + s, base + k * step + s + width)`` for each ``s``.

    Attributes:
        base: first byte of the first copy.
        step: bytes from one copy to the next.
        count: number of copies.
        starts: distance ``s`` from the start of a copy to each of its ranges, ascending, the first distance is 0:
            int64, shape (ranges,).
        width: bytes of each range.
    """

    base: int
    step: int
    count: int
    starts: np.ndarray
    width: int

    @property
    def span(self) -> int:
        """Bytes from the first byte of a copy to the end of its last range."""
        return int(self.starts[-1]) + self.width

    @property
    def stop(self) -> int:
        """End of the last copy: one more than its last byte."""
        return self.base + (self.count - 1) * self.step + self.span

    @property
    def num_ranges(self) -> int:
        """Number of byte ranges, over all copies of the pattern."""
        return self.count * len(self.starts)

    def moved(self, distance: int) -> "Pattern":
        """Return this pattern, moved up by ``distance`` bytes."""
        return Pattern(self.base + distance, self.step, self.count, self.starts, self.width)


ByteSet = list[Pattern]
"""A set of bytes, as a list of patterns. No byte occurs twice in all these patterns."""


def byte_range(start: int, stop: int) -> ByteSet:
    """Return the bytes of ``[start, stop)`` as a byte set."""
    size = stop - start
    return [Pattern(start, size, 1, np.zeros(1, np.int64), size)] if size > 0 else []


def byte_sets(view: View) -> list[ByteSet]:
    """Return the bytes of all elements as one byte set. If elements overlap, return several byte sets.

    Raises:
        TooMuchWorkError: the view needs more than :data:`MAX_SETS` byte sets, or too many patterns and ranges.
    """
    return _split(view, view.itemsize, {})


def start_sets(view: View) -> list[ByteSet]:
    """Return the first byte of each element as one byte set. If two elements share it, return several byte sets.

    Raises:
        TooMuchWorkError: the view needs more than :data:`MAX_SETS` byte sets, or too many patterns and ranges.
    """
    return _split(view, 1, {})


def byte_sets_of_all(views: Sequence[View]) -> list[list[ByteSet]]:
    """Return the byte sets of each view. If views differ only in their offset, they are computed once."""
    known: dict[tuple, list[ByteSet]] = {}
    return [_split(view, view.itemsize, known) for view in views]


def normal_dims(view: View) -> tuple[int, Dims]:
    """Return the lowest byte of a view, and its axes as :data:`Dims` with positive steps.

    An axis with a negative stride is counted from its other end. Its bytes stay the same.
    """
    start, dims = view.offset * view.itemsize, []
    for step, size in zip(view.stride, view.shape, strict=True):
        if size > 1 and step:
            start += min(step, 0) * (size - 1) * view.itemsize
            dims.append((abs(step) * view.itemsize, size))
    return start, sorted(dims)


def geometry(view: View) -> tuple:
    """Return a key. If two views have equal keys, their elements cover exactly the same bytes."""
    start, dims = normal_dims(view)
    return start, tuple(dims), view.itemsize, view.num_elements


def _split(view: View, width: int, known: dict[tuple, list[ByteSet]]) -> list[ByteSet]:
    """Return the byte sets of a view as if each element had ``width`` bytes.

    Args:
        known: results of earlier calls, moved so that they start at byte 0. This call may add a result.
    """
    if view.num_elements == 0:
        return []
    start, dims = normal_dims(view)
    repeats = prod(size for step, size in zip(view.stride, view.shape, strict=True) if step == 0)
    key = (tuple(dims), width, repeats)
    if key not in known:
        known[key] = _split_dims(dims, width, repeats, view.name)
    spend(PATTERN_COST * sum(map(len, known[key])))
    return [[pattern.moved(start) for pattern in byte_set] for byte_set in known[key]]


def _split_dims(dims: Dims, width: int, repeats: int, name: str) -> list[ByteSet]:
    """Return the byte sets of a view whose lowest byte is 0. Stride 0 repeats each element ``repeats`` times."""
    if repeats > MAX_SETS:
        raise TooMuchWorkError(
            f"{name} repeats each element {repeats} times (stride 0), and at most {MAX_SETS} repeats are counted; "
            f"leave out the axis of stride 0"
        )
    parts = nested_parts(dims, width, name, MAX_SETS // repeats)
    return [_patterns(start, nested, width, name) for start, nested in parts] * repeats


def nested_parts(dims: Dims, width: int, name: str, most: int = MAX_SETS) -> list[tuple[int, Dims]]:
    """Split dims into parts in which no two elements of ``width`` bytes overlap.

    Example: rows of 4 bytes that start 2 bytes apart, ``[(1, 4), (2, 3)]``: rows 0 and 2 do not overlap, and row 1
    is a part of its own. The result is ``[(0, [(1, 4), (4, 2)]), (2, [(1, 4)])]``.

    Returns:
        The first byte and the dims of each part.

    Raises:
        TooMuchWorkError: the dims need more than ``most`` parts.
    """
    parts: list[tuple[int, Dims]] = [(0, [])]
    for dim in dims:
        inner_parts, parts = parts, []
        for start, inner in inner_parts:
            count = _num_parts(inner, dim, width)
            if len(parts) + count > most:
                raise TooMuchWorkError(
                    f"{name}: too many overlapping elements to count exactly (the view would be split into more than "
                    f"{most} parts); audit a smaller part of the view"
                )
            spend(PATTERN_COST * count)
            parts += _add_dim(start, inner, dim, count)
    return parts


def _num_parts(inner: Dims, dim: tuple[int, int], width: int) -> int:
    """Return the number of parts into which an outer dim must be split. In each part, no two elements overlap."""
    step, size = dim
    inner_bytes = sum((n - 1) * s for s, n in inner) + width
    return min(-(-inner_bytes // step), size)


def _add_dim(start: int, inner: Dims, dim: tuple[int, int], num_parts: int) -> list[tuple[int, Dims]]:
    """Split an outer dim into ``num_parts`` parts, and add each part to the inner dims.

    Part p has the indices p, p + num_parts, p + 2 * num_parts and so on.
    """
    step, size = dim
    sizes = [-(-(size - first) // num_parts) for first in range(num_parts)]
    return [
        (start + first * step, [*inner, (num_parts * step, n)] if n > 1 else inner) for first, n in enumerate(sizes)
    ]


def merge_dims(dims: Dims) -> Dims:
    """Join an inner dim and the next outer dim if the inner dim exactly fills one step of the outer dim.

    Example: ``[(4, 8), (32, 10)]`` is ``[(4, 80)]``, because 8 steps of 4 bytes are 32 bytes.
    """
    merged: Dims = []
    for step, size in dims:
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((step, size))
    return merged


def _patterns(start: int, dims: Dims, width: int, name: str) -> ByteSet:
    """Return a byte set of elements that do not overlap.

    One dim is chosen. Its step and size become ``step`` and ``count`` of the patterns. The inner dims become the ranges
    of one copy. Each combination of indices of the outer dims becomes a pattern. The choice is the outermost dim that
    leaves at most :data:`FEW_RANGES` ranges in all patterns. If there is no such dim, it is the dim with the largest
    size.
    """
    (_, width), *rest = merge_dims([(1, width), *dims])  # elements without gaps between them become one wider range
    if not rest:
        return byte_range(start, start + width)
    total = prod(size for _, size in rest)
    cheap = [i for i, (_, size) in enumerate(rest) if total // size <= FEW_RANGES]
    chosen = cheap[-1] if cheap else max(range(len(rest)), key=lambda i: rest[i][1])
    step, count = rest[chosen]
    inner, outer = rest[:chosen], rest[chosen + 1 :]
    listed, made = (prod(size for _, size in part) for part in (inner, outer))
    if listed * made > BUDGET or made * PATTERN_COST > BUDGET:
        raise TooMuchWorkError(
            f"{name} has more than {BUDGET} byte ranges that do not repeat, which is the work limit; "
            f"audit a smaller part of the view"
        )
    spend(listed + made * PATTERN_COST)
    starts = _sums(inner)
    return [Pattern(start + shift, step, count, starts, width) for shift in _sums(outer).tolist()]


def _sums(dims: Dims) -> np.ndarray:
    """Return ``sum(step * index)`` for all indices of the dims, ascending."""
    total = np.zeros(1, np.int64)
    for step, size in dims:
        total = (total[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return np.sort(total)
