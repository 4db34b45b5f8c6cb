"""Which byte sets cover each byte of a storage, and how many bytes each combination of them shares."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvviz.audit.byte_sets import BUDGET, FEW_RUNS, Lane, Pattern, TooMuchWorkError, interval

WORD = 62
"""Lanes whose openness one number tells."""


def touched_elements(points: np.ndarray, sizes: np.ndarray, itemsize: int, groups: np.ndarray) -> list[int]:
    """Elements of ``itemsize`` bytes that the intervals of each group touch; groups begin at the given positions."""
    first, last = points // itemsize, (points + sizes - 1) // itemsize
    count = last - first + 1
    count[1:] -= first[1:] == last[:-1]
    count[groups[1:]] += first[groups[1:]] == last[groups[1:] - 1]
    return np.add.reduceat(count, groups).tolist()


def distinct_rows(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of a table of integers, and the number of each row's."""
    number = None
    for column in words.T:
        values, codes = np.unique(column, return_inverse=True)
        if number is not None:
            _, codes = np.unique(number * len(values) + codes, return_inverse=True)
        number = codes
    _, first = np.unique(number, return_index=True)
    return words[first], number


def open_lanes(flips: np.ndarray, count: int, picked: np.ndarray) -> np.ndarray:
    """Which of ``count`` lanes are open after each picked event, as bits in words: each event flips its lane's bit."""
    words = []
    for first in range(0, count, WORD):
        bits = np.zeros(count, np.int64)
        bits[first : first + WORD] = np.int64(1) << np.arange(min(WORD, count - first))
        words.append(np.bitwise_xor.accumulate(bits[flips])[picked])
    return np.stack(words, axis=1)


def set_bits(words: np.ndarray) -> tuple[int, ...]:
    """The numbers of the lanes that a row of words calls open."""
    found = []
    for number, word in enumerate(words.tolist()):
        while word:
            found.append(number * WORD + (word & -word).bit_length() - 1)
            word &= word - 1
    return tuple(found)


FEW_INTERVALS = 64
"""Runs of a lane that are taken one by one."""


VISIT = 64
"""Runs that looking at one lane in one period counts for, however few it has there."""


MEMBER = 4
"""Runs that a lane which is open in a region counts for."""


@dataclass(frozen=True)
class Region:
    """Bytes that exactly the owners numbered ``members`` share.

    ``bytes`` of them in all, the lowest at ``first``; ``elements`` says for each member how many of its elements
    touch them.
    """

    members: tuple[int, ...]
    bytes: int
    first: int
    elements: tuple[int, ...]


class Sweep:
    """Owners of bytes in one storage, and the regions that several of them share.

    Args:
        owners: for each owner its lanes, as :func:`byte_lanes` gives them.
        itemsizes: for each owner the bytes of an element; elements start at multiples of it.
        weights: how many equal claimants each owner stands for (default 1).
        budget: runs that may be expanded in all.

    Raises:
        TooMuchWorkError: by :meth:`regions`, when the budget is spent.
    """

    def __init__(
        self,
        owners: Sequence[Sequence[Lane]],
        itemsizes: Sequence[int] | None = None,
        weights: Sequence[int] | None = None,
        budget: int = BUDGET,
    ) -> None:
        self._lanes = [_as_intervals(lane) for lanes in owners for lane in lanes]
        self._owner = [number for number, lanes in enumerate(owners) for _ in lanes]
        self._pieces = [pattern for lane in self._lanes for pattern in lane]
        self._low = np.array([min((p.base for p in lane), default=0) for lane in self._lanes], np.int64)
        self._high = np.array([max((p.stop for p in lane), default=0) for lane in self._lanes], np.int64)
        self._itemsizes = list(itemsizes) if itemsizes is not None else [1] * len(owners)
        self._weights = list(weights) if weights is not None else [1] * len(owners)
        self._lane_weights = np.asarray([self._weights[number] for number in self._owner], np.int64)
        self._budget = budget
        self.period = self._choose_period(lcm(*self._itemsizes))
        self.work = 0

    def _choose_period(self, align: int) -> int:
        """The least common multiple of the steps, or, where that is longer than everything, everything."""
        low, high = (min((p.base for p in self._pieces), default=0), max((p.stop for p in self._pieces), default=1))
        period, longest = align, high - low
        if sum(p.count * len(p.starts) for p in self._pieces) <= FEW_RUNS:
            return -(-longest // align) * align
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
            if p.count == 1 and len(p.starts) == 1:  # a run looks the same wherever it fills a period
                first, stop = -(-p.base // self.period), p.stop // self.period
            else:  # and copies wherever all of them that reach in exist
                first = -(-(p.base + p.span - p.step) // self.period)
                stop = (p.base + p.count * p.step) // self.period if self.period % p.step == 0 else first
            first, stop = (max(first, low), min(stop, high)) if first < stop else (high, high)
            self._spend(first - low + high - stop)
            edges.update((low, first, stop, high, *range(low, first), *range(stop, high)))
        ordered = sorted(edges)
        cells = ((a * self.period, b - a) for a, b in zip(ordered[:-1], ordered[1:], strict=True))
        return [(start, times) for start, times in cells if len(self._lanes_in(start))]

    def _lanes_in(self, start: int) -> np.ndarray:
        """Numbers of the lanes that may reach into a period."""
        here = np.flatnonzero((self._low < start + self.period) & (self._high > start))
        self._spend(len(here))
        return here

    def _spend(self, runs: int) -> None:
        """Charge work before it is done; what is refused is not charged."""
        if self.work + runs > self._budget:
            raise TooMuchWorkError(f"counting needs more than the budget of {self._budget} runs")
        self.work += runs

    def _copies(self, lane: Lane, start: int) -> list[tuple[Pattern, int, int]]:
        """A lane's patterns that reach into a period, each with the range of its copies that do."""
        stop, found = start + self.period, []
        for p in lane:
            low, high = max(-(-(start - p.base - p.span + 1) // p.step), 0), min(-(-(stop - p.base) // p.step), p.count)
            if low < high:
                found.append((p, low, high))
        return found

    def _runs(self, copies: list[tuple[Pattern, int, int]], start: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and stops of a lane's runs in a period, clipped to it."""
        starts, stops = [], []
        for p, low, high in copies:
            run = ((p.base + np.arange(low, high, dtype=np.int64) * p.step)[:, None] + p.starts).ravel()
            first, last = np.maximum(run, start), np.minimum(run + p.width, start + self.period)
            starts.append(first[first < last])
            stops.append(last[first < last])
        if not starts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate(starts), np.concatenate(stops)

    def _sweep(self, start: int, least: int) -> list[Region]:
        """Regions inside one period."""
        here = self._lanes_in(start)
        self._spend(len(here) * VISIT)
        copies = [self._copies(self._lanes[lane], start) for lane in here]
        self._spend(sum((high - low) * len(p.starts) for found in copies for p, low, high in found))
        runs = [self._runs(found, start) for found in copies]
        lengths = [len(first) for first, _ in runs]
        points = np.concatenate([first for first, _ in runs] + [last for _, last in runs])
        order = np.argsort(points, kind="stable")  # merges the lanes, each sorted already
        points, weights = points[order], self._lane_weights[here]
        depth = np.repeat(np.concatenate((weights, -weights)), lengths * 2)[order].cumsum()
        sizes = np.diff(points, append=points[-1:])
        picked = np.flatnonzero((depth >= least) & (sizes > 0))
        if not len(picked):
            return []
        self._spend(len(picked) * (len(here) // WORD))
        flips = np.repeat(np.arange(len(here) * 2) % len(here), lengths * 2)[order]
        kinds, which = distinct_rows(open_lanes(flips, len(here), picked))
        self._spend(int(np.bitwise_count(kinds).sum()) * MEMBER)
        lanes_of = [tuple(here[list(set_bits(kind))].tolist()) for kind in kinds]
        return self._regions(lanes_of, which, points[picked], sizes[picked], least)

    def _regions(self, lanes_of, which, points: np.ndarray, sizes: np.ndarray, least: int) -> list[Region]:
        """Intervals with the same owners, taken together; ``which`` of ``lanes_of`` (sets of open lanes) each has."""
        owners_of = [tuple(sorted({self._owner[lane] for lane in lanes})) for lanes in lanes_of]
        groups = {owners: number for number, owners in enumerate(dict.fromkeys(owners_of))}
        group_of = [groups[owners] for owners in owners_of]
        group = np.asarray(group_of)[which]
        order = np.argsort(group, kind="stable")
        which, points, sizes = which[order], points[order], sizes[order]
        bounds = np.searchsorted(group[order], np.arange(len(groups) + 1))
        totals = np.add.reduceat(sizes, bounds[:-1]).tolist()
        touched = {size: touched_elements(points, sizes, size, bounds[:-1]) for size in set(self._itemsizes)}
        alone = Counter(group_of)
        made = []
        for owners, number in groups.items():
            if sum(self._weights[owner] for owner in owners) < least:
                continue
            mine = slice(bounds[number], bounds[number + 1])
            if alone[number] == 1:  # one set of lanes, so that each owner's elements are those of one lane
                elements = tuple(touched[self._itemsizes[owner]][number] for owner in owners)
                lanes = lanes_of[group_of.index(number)]
                if len(lanes) > len(owners):
                    elements = tuple(
                        n * sum(self._owner[lane] == owner for lane in lanes)
                        for n, owner in zip(elements, owners, strict=True)
                    )
            else:
                members = {k: lanes for k, lanes in enumerate(lanes_of) if group_of[k] == number}
                elements = self._elements(owners, members, which[mine], points[mine], sizes[mine])
            made.append(Region(owners, totals[number], int(points[mine][0]), elements))
        return made

    def _elements(self, owners, lanes_of: dict[int, tuple[int, ...]], which, points, sizes) -> tuple[int, ...]:
        """For each owner how many of its elements touch the intervals, over all its lanes."""
        counts = dict.fromkeys(owners, 0)
        for lane in {lane for lanes in lanes_of.values() for lane in lanes}:
            open_in = [number for number, lanes in lanes_of.items() if lane in lanes]
            here = slice(None) if len(open_in) == len(lanes_of) else np.isin(which, open_in)
            size = self._itemsizes[self._owner[lane]]
            counts[self._owner[lane]] += touched_elements(points[here], sizes[here], size, np.zeros(1, np.int64))[0]
        return tuple(counts.values())


def _as_intervals(lane: Lane) -> Lane:
    """A lane of a few runs as single runs, which fit any period."""
    if sum(p.count * len(p.starts) for p in lane) > FEW_INTERVALS:
        return lane
    runs = (
        (p.base + copy * p.step + start, p.width)
        for p in lane
        for copy in range(p.count)
        for start in p.starts.tolist()
    )
    return [pattern for begin, width in runs for pattern in interval(begin, begin + width)]
