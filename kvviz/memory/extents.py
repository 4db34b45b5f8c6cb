"""Exact arithmetic on strided byte sets, without listing addresses block by block.

A view's bytes repeat: one block's pattern of runs, shifted by the block stride. So several views over one storage
are cut into *periods* (the least common multiple of their block strides); where the same views are fully active,
every period looks the same, and one sweep over one period, times the number of periods, counts them all. The work
depends on the runs of a few periods, not on the number of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm, prod

import numpy as np

from kvviz.memory.view import View

BUDGET = 4_000_000
"""Runs that a set of views may expand to before :class:`TooMuchWorkError` is raised."""


class TooMuchWorkError(ValueError):
    """The strides drift so that counting would exceed the stated budget of work."""


def normal_dims(view: View) -> tuple[int, list[tuple[int, int]]]:
    """Start in bytes and ``(stride_bytes, size)`` of a view's dims with positive strides, innermost first.

    Dims of size 1 and of stride 0 are dropped, negative strides flipped, the itemsize added as a dim of stride 1,
    and dims that continue each other merged. The bytes are the same, repeated ones apart.
    """
    start, dims = view.offset * view.itemsize, [(1, view.itemsize)]
    for step, size in zip(view.stride, view.shape, strict=True):
        if size > 1 and step:
            if step < 0:
                start += (size - 1) * step * view.itemsize
            dims.append((abs(step) * view.itemsize, size))
    merged: list[tuple[int, int]] = []
    for step, size in sorted(dims):
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((step, size))
    return start, merged


@dataclass(frozen=True, eq=False)
class Pattern:
    """``count`` copies, ``step`` bytes apart from ``base`` on, of runs ``[starts, starts + width)``.

    ``starts`` is sorted and begins at 0; the runs of one copy do not touch each other.
    """

    base: int
    step: int
    count: int
    starts: np.ndarray
    width: int

    @property
    def span(self) -> int:
        """Bytes from a copy's first to its last."""
        return int(self.starts[-1]) + self.width

    @property
    def stop(self) -> int:
        """One past the last byte of the last copy."""
        return self.base + (self.count - 1) * self.step + self.span


def patterns(view: View) -> list[Pattern]:
    """A view as patterns: its longest dim repeats, what lies outside it is unrolled, what lies inside becomes runs.

    Raises:
        TooMuchWorkError: more than :data:`BUDGET` runs.
    """
    if view.num_elements == 0:
        return []
    start, dims = normal_dims(view)
    (_, width), rest = dims[0], dims[1:]
    if not rest:
        return [Pattern(start, width, 1, np.zeros(1, np.int64), width)]
    longest = max(range(len(rest)), key=lambda i: rest[i][1])
    step, count = rest[longest]
    inner, outer = rest[:longest], rest[longest + 1 :]
    if prod(size for _, size in (*inner, *outer)) > BUDGET:
        raise TooMuchWorkError(f"{view.name}: its dims {rest} give more than {BUDGET} runs a period")
    starts, width = _union(_sums(inner), width)
    return [Pattern(start + shift, step, count, starts, width) for shift in _sums(outer).tolist()]


def _sums(dims: Sequence[tuple[int, int]]) -> np.ndarray:
    """All sums of one multiple of each stride, sorted."""
    total = np.zeros(1, np.int64)
    for step, size in dims:
        total = (total[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return np.sort(total)


def _union(starts: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """Runs of one width that do not overlap and cover the same bytes; overlapping ones fall apart into their gcd."""
    gaps = np.diff(starts)
    if not len(gaps) or int(gaps.min()) >= width:
        return starts, width
    grain = gcd(width, int(np.gcd.reduce(gaps)))
    if len(starts) * (width // grain) > BUDGET:
        raise TooMuchWorkError(f"{len(starts)} overlapping runs of {width} bytes give too many pieces of {grain}")
    return np.unique((starts[:, None] + np.arange(0, width, grain)).ravel()), grain


@dataclass(frozen=True)
class Region:
    """Bytes that exactly the sets numbered ``members`` share.

    ``bytes`` of them in all, the lowest at ``first``; ``elements`` says for each member how many of its elements
    (by place, of its set's itemsize) touch them.
    """

    members: tuple[int, ...]
    bytes: int
    first: int
    elements: tuple[int, ...]


class Sweep:
    """Sets of bytes over one storage, and the regions that several of them share.

    Args:
        sets: for each set its patterns.
        itemsizes: for each set the bytes of an element; elements start at multiples of it.
        weights: how many equal claimants each set stands for (default 1).
        budget: runs that may be expanded in all.

    Raises:
        TooMuchWorkError: by :meth:`regions`, when the budget is spent.
    """

    def __init__(
        self,
        sets: Sequence[Sequence[Pattern]],
        itemsizes: Sequence[int] | None = None,
        weights: Sequence[int] | None = None,
        budget: int = BUDGET,
    ) -> None:
        self._sets = [list(patterns) for patterns in sets]
        self._pieces = [pattern for patterns in self._sets for pattern in patterns]
        self._itemsizes = list(itemsizes) if itemsizes is not None else [1] * len(sets)
        self._weights = np.asarray(weights if weights is not None else [1] * len(sets), np.int64)
        self._budget = budget
        self.period = self._choose_period(lcm(*self._itemsizes))
        self.work = 0

    def _choose_period(self, align: int) -> int:
        """The least common multiple of the steps, or, where that is longer than everything, everything."""
        period, longest = align, max((p.stop for p in self._pieces), default=1)
        for pattern in sorted(self._pieces, key=lambda p: -p.count):
            if pattern.count > 1 and period % pattern.step:
                period = lcm(period, pattern.step)
            if period > longest:
                return -(-longest // align) * align
        return period

    def regions(self, least: int = 2) -> list[Region]:
        """Regions held by at least ``least`` claimants, ordered by lowest byte."""
        found: dict[tuple[int, ...], Region] = {}
        for start, times in self._cells():
            for new in self._sweep(start, least):
                old = found.get(new.members)
                size, elements = new.bytes * times, tuple(n * times for n in new.elements)
                if old is not None:
                    size, elements = old.bytes + size, tuple(a + b for a, b in zip(old.elements, elements, strict=True))
                first = new.first if old is None else min(old.first, new.first)
                found[new.members] = Region(new.members, size, first, elements)
        return sorted(found.values(), key=lambda region: (region.first, region.members))

    def _cells(self) -> list[tuple[int, int]]:
        """Periods in which something lies, as (start in bytes, how many equal ones follow each other)."""
        edges = set()
        for p in self._pieces:
            low, high = p.base // self.period, (p.stop - 1) // self.period + 1
            first = -(-(p.base + p.span - p.step) // self.period)  # from here on all copies that reach in exist
            stop = (p.base + p.count * p.step) // self.period
            first, stop = (max(first, low), min(stop, high)) if first < stop else (high, high)
            self._spend(first - low + high - stop)
            edges.update((low, first, stop, high, *range(low, first), *range(stop, high)))
        ordered = sorted(edges)
        cells = ((a * self.period, b - a) for a, b in zip(ordered[:-1], ordered[1:], strict=True))
        return [(start, times) for start, times in cells if self._touched(start)]

    def _touched(self, start: int) -> bool:
        return any(p.base < start + self.period and p.stop > start for p in self._pieces)

    def _spend(self, runs: int) -> None:
        self.work += runs
        if self.work > self._budget:
            raise TooMuchWorkError(f"counting needs more than the budget of {self._budget} runs")

    def _runs(self, patterns: Sequence[Pattern], start: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and stops of one set's runs in a period, clipped to it and free of overlap."""
        starts, stops = [], []
        for p in patterns:
            low = max(-(-(start - p.base - p.span + 1) // p.step), 0)
            high = min(-(-(start + self.period - p.base) // p.step), p.count)
            if high <= low:
                continue
            self._spend((high - low) * len(p.starts))
            run = ((p.base + np.arange(low, high, dtype=np.int64) * p.step)[:, None] + p.starts).ravel()
            first, last = np.maximum(run, start), np.minimum(run + p.width, start + self.period)
            starts.append(first[first < last])
            stops.append(last[first < last])
        if not starts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        first, last = np.concatenate(starts), np.concatenate(stops)
        tangled = len(patterns) > 1 or patterns[0].span > patterns[0].step
        return _merged(first, last) if tangled else (first, last)

    def _sweep(self, start: int, least: int) -> list[Region]:
        """Regions inside one period."""
        runs = [self._runs(patterns, start) for patterns in self._sets]
        numbers = np.repeat(np.arange(len(runs)), [len(first) for first, _ in runs])
        points = np.concatenate([first for first, _ in runs] + [last for _, last in runs])
        order = np.argsort(points, kind="stable")
        numbers, points = np.concatenate((numbers, numbers))[order], points[order]
        opening = order < len(order) // 2
        depth = np.where(opening, self._weights[numbers], -self._weights[numbers]).cumsum()
        sizes = np.diff(points, append=points[-1:])
        picked = np.flatnonzero((depth >= least) & (sizes > 0))
        if not len(picked):
            return []
        open_sets = self._open_sets(numbers)[picked]
        kinds, which = np.unique(open_sets, axis=0, return_inverse=True)
        return [
            self._region(_members(kind), points[picked[which.ravel() == k]], sizes[picked[which.ravel() == k]])
            for k, kind in enumerate(kinds)
        ]

    def _open_sets(self, numbers: np.ndarray) -> np.ndarray:
        """Which sets are open after each event, as bits in words: each event flips the bit of its set."""
        words = np.zeros((len(numbers), -(-len(self._sets) // 62)), np.int64)
        words[np.arange(len(numbers)), numbers // 62] = np.int64(1) << (numbers % 62)
        return np.bitwise_xor.accumulate(words, axis=0)

    def _region(self, members: tuple[int, ...], points: np.ndarray, sizes: np.ndarray) -> Region:
        elements = []
        for member in members:
            size = self._itemsizes[member]
            first, last = points // size, (points + sizes - 1) // size
            elements.append(int((last - first + 1).sum() - (first[1:] == last[:-1]).sum()))
        return Region(members, int(sizes.sum()), int(points[0]), tuple(elements))


def _members(words: np.ndarray) -> tuple[int, ...]:
    return tuple(w * 62 + bit for w, word in enumerate(words.tolist()) for bit in range(62) if word >> bit & 1)


def _merged(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The union of intervals, as intervals that do not overlap."""
    order = np.argsort(first, kind="stable")
    first, reach = first[order], np.maximum.accumulate(last[order])
    begins = np.concatenate(([True], first[1:] > reach[:-1]))
    return first[begins], reach[np.concatenate((begins[1:], [True]))]


def drifting_bytes(a: Pattern, b: Pattern, budget: int = BUDGET) -> int:
    """Bytes that two patterns share, whatever their steps: closed form over pairs of runs.

    Two runs at a distance meet as often as ``a.step * x - b.step * y`` takes that value in the box of counts.

    Raises:
        TooMuchWorkError: more than ``budget`` pairs of runs and distances.
    """
    grain = gcd(a.step, b.step)
    if lcm(a.step, b.step) >= 1 << 62 or a.step * b.step >= 1 << 62:
        raise TooMuchWorkError(f"steps of {a.step} and {b.step} bytes are too long to be counted")
    distances = (a.base + a.starts)[:, None] - (b.base + b.starts)
    reach = -(-(a.width + b.width - 1) // grain)
    if distances.size * reach > budget:
        raise TooMuchWorkError(f"{distances.size} pairs of runs at {reach} distances exceed the budget of {budget}")
    lowest = -a.width + 1 + (distances + a.width - 1) % grain
    meet = lowest[..., None] + np.arange(reach, dtype=np.int64) * grain
    shared = np.maximum(np.minimum(meet + a.width, b.width) - np.maximum(meet, 0), 0)
    return int((shared * _solutions(meet - distances[..., None], a, b, grain)).sum())


def _solutions(target: np.ndarray, a: Pattern, b: Pattern, grain: int) -> np.ndarray:
    """How often ``a.step * x - b.step * y == target`` for x, y within the counts; target is a multiple of grain."""
    step_a, step_b = a.step // grain, b.step // grain
    x = (target // grain) % step_b * pow(step_a, -1, step_b) % step_b if step_b > 1 else np.zeros_like(target)
    y = (x * step_a - target // grain) // step_b
    lower = np.maximum(0, -(y // step_a))
    upper = np.minimum((a.count - 1 - x) // step_b, (b.count - 1 - y) // step_a)
    return np.maximum(upper - lower + 1, 0)
