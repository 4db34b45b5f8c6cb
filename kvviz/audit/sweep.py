"""Counts which owners share which bytes. A *sweep* cuts a storage wherever a byte range begins or ends.

Between two cuts lies an *interval*. Example: K owns [0, 8) and V owns [4, 12). The cuts give three intervals: [0, 4)
belongs to K, [4, 8) belongs to K and V, and [8, 12) belongs to V.

More words of this file:

- owner: anything with bytes: a view, a part of a view, or the storage itself.
- weight of an owner: the number of views that the owner stands for, if several views have equal geometry.
- combination: the byte sets that together cover an interval.
- period: a part of the storage, as long as the least common multiple of all steps. A cache repeats the same intervals
  block by block. So many periods have equal intervals. Only one of these periods is cut, and its counts are multiplied.
- complete period: a period that has all copies of all patterns. Any other period misses some byte ranges.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.byte_sets import BUDGET, PATTERN_COST, ByteSet, Pattern, byte_range

WORD_BITS = 62
"""Byte sets per word of a bit mask. A word is an int64, and 62 bits keep it positive."""

FEW_RANGES = 1 << 14
"""If all byte sets together have at most this many byte ranges, the whole storage is taken as one period."""

FEW_SET_RANGES = 64
"""If a byte set has at most this many byte ranges, each range becomes a pattern. A single range fits any period."""

VISIT_COST = 64
"""Work of looking at one byte set in one period, in byte ranges."""

MEMBER_COST = 4
"""Work of one byte set of a combination, in byte ranges."""

COMBINATION_COST = 32
"""Work of one combination, in addition to its byte sets, in byte ranges."""


@dataclass(frozen=True)
class Region:
    """All bytes that belong to exactly the same owners.

    Attributes:
        members: numbers of the owners, ascending.
        bytes: number of bytes.
        first: the lowest byte.
        elements: for each member, how many of its elements have at least one of these bytes.
    """

    members: tuple[int, ...]
    bytes: int
    first: int
    elements: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Intervals:
    """The intervals of one period, in ascending order. The same byte sets cover all bytes of an interval.

    Attributes:
        periods: number of equal periods that these intervals stand for.
        starts, sizes: first byte and number of bytes of each interval: int64, shape (intervals,).
        combinations: all different combinations. Each is a tuple with the numbers of its byte sets, ascending.
        combination: for each interval, the position of its combination in ``combinations``: int64, shape (intervals,).
    """

    periods: int
    starts: np.ndarray
    sizes: np.ndarray
    combinations: list[tuple[int, ...]]
    combination: np.ndarray

    def at(self, selection: np.ndarray | slice) -> "Intervals":
        """Return the selected intervals."""
        selected = (self.starts[selection], self.sizes[selection])
        return Intervals(self.periods, *selected, self.combinations, self.combination[selection])

    def covered_by(self, combinations: Iterable[int]) -> "Intervals":
        """Return the intervals whose combination has one of the given positions."""
        wanted = np.zeros(len(self.combinations), bool)
        wanted[list(combinations)] = True
        return self.at(wanted[self.combination])


class Sweep:
    """Owners of bytes in one storage, and the intervals and regions that they share.

    Args:
        owners: the byte sets of each owner, as :func:`kvviz.audit.byte_sets.byte_sets` returns them.
        itemsizes: bytes per element of each owner. Elements start at multiples of this number. Default: 1.
        weights: the weight of each owner. Default: 1.
        budget: work limit of this sweep, in byte ranges. It limits the memory. The audit has its own work limit.

    Attributes:
        owner_of: the number of the owner of each byte set. Byte sets are numbered owner by owner.
        period: length of a period in bytes.
        work: work done until now, in byte ranges.

    Raises:
        TooMuchWorkError: by :meth:`intervals` and :meth:`regions`, if they need more work than ``budget``, or more
            than the audit has left.
    """

    def __init__(
        self,
        owners: Sequence[Sequence[ByteSet]],
        itemsizes: Sequence[int] | None = None,
        weights: Sequence[int] | None = None,
        budget: int = BUDGET,
    ) -> None:
        self.owner_of = [number for number, sets in enumerate(owners) for _ in sets]
        self.work = 0
        spend(2 * PATTERN_COST * sum(_num_listed(byte_set) for sets in owners for byte_set in sets))
        self._sets = [_list_ranges(byte_set) for sets in owners for byte_set in sets]
        self._patterns = [pattern for byte_set in self._sets for pattern in byte_set]
        self._low = np.array([min((p.base for p in byte_set), default=0) for byte_set in self._sets], np.int64)
        self._high = np.array([max((p.stop for p in byte_set), default=0) for byte_set in self._sets], np.int64)
        self._itemsizes = list(itemsizes) if itemsizes is not None else [1] * len(owners)
        self._weights = list(weights) if weights is not None else [1] * len(owners)
        self._set_weights = np.asarray([self._weights[owner] for owner in self.owner_of], np.int64)
        self._budget = budget
        self.period = self._choose_period(lcm(*self._itemsizes))

    def regions(self, least: int = 2) -> list[Region]:
        """Return the regions whose owners together weigh at least ``least``, ordered by their lowest byte."""
        found: dict[tuple[int, ...], Region] = {}
        for table in self.intervals(least):
            for new in self._regions_of(table, least):
                old = found.get(new.members)
                found[new.members] = new if old is None else _joined(old, new)
        return sorted(found.values(), key=lambda region: (region.first, region.members))

    def intervals(self, least: int = 1) -> Iterator[Intervals]:
        """Yield the intervals of each group of equal periods. The owners of an interval weigh at least ``least``."""
        periods = self._distinct_periods()
        complete = next((period for period in periods if period[0] == self._complete), None)
        known = None
        if complete is not None:  # take the complete period first: its intervals show which periods can be left out
            periods.remove(complete)
            known = self._intervals_of(*complete, least)
            yield from [known] if known is not None else []
        for start, times in periods:
            if complete is not None and not self._may_meet(known, self._sets_in(start), least):
                continue
            table = self._intervals_of(start, times, least)
            yield from [table] if table is not None else []

    def _may_meet(self, known: Intervals | None, here: np.ndarray, least: int) -> bool:
        """Return False if the owners of no interval of a period can weigh ``least``. The period is not complete.

        The period has only some of the bytes of a complete period, at the same places. So each of its combinations is
        a combination of the complete period, without the byte sets that are not in ``here``.
        """
        if known is None:
            return False
        weights = np.zeros(len(self._sets), np.int64)
        weights[here] = self._set_weights[here]
        members = np.concatenate([np.array(members) for members in known.combinations])
        bounds = np.cumsum([0, *map(len, known.combinations)])[:-1]
        self._spend(len(members) + VISIT_COST)
        return bool(np.add.reduceat(weights[members], bounds).max() >= least)

    def count_elements(self, table: Intervals, owner: int, combinations: Iterable[int]) -> int:
        """Count the elements of one owner that touch intervals of ``table``, in one period.

        Args:
            combinations: positions of combinations. Intervals with other combinations are not counted.
        """
        positions: dict[int, list[int]] = {}  # of the combinations in which each byte set of the owner occurs
        self._spend(sum(len(table.combinations[position]) for position in combinations))
        for position in combinations:
            for number in table.combinations[position]:
                if self.owner_of[number] == owner:
                    positions.setdefault(number, []).append(position)
        self._spend((len(table.starts) + VISIT_COST) * len(positions))
        one_group = np.zeros(1, np.int64)
        count = 0
        for here in map(table.covered_by, positions.values()):
            count += touched_elements(here.starts, here.sizes, self._itemsizes[owner], one_group)[0]
        return count

    def _choose_period(self, align: int) -> int:
        """Return the length of a period in bytes: the least common multiple of all steps.

        If all patterns together are shorter than this, or have few byte ranges, one period holds all patterns. A period
        is a multiple of ``align``, so that no element lies in two periods.
        """
        low, high = (min((p.base for p in self._patterns), default=0), max((p.stop for p in self._patterns), default=1))
        everything = -(-(high - low) // align) * align
        if sum(p.num_ranges for p in self._patterns) <= FEW_RANGES:
            return everything
        period = align
        for pattern in sorted(self._patterns, key=lambda p: -p.count):
            if pattern.count > 1:
                period = lcm(period, pattern.step)
            if period > high - low:
                return everything
        return period

    def _distinct_periods(self) -> list[tuple[int, int]]:
        """Join neighbouring periods that look the same. Return the first byte and the number of periods of each group.

        Periods without bytes are left out.
        """
        edges = set()
        complete, end = None, None  # the first complete period, and the stop of the complete periods
        for p in self._patterns:
            low, high = p.base // self.period, (p.stop - 1) // self.period + 1  # periods with bytes of the pattern
            # For this pattern, periods from first up to stop look the same. The other periods are taken one by one.
            if p.count == 1 and len(p.starts) == 1:  # one byte range: periods that this range fills
                first, stop = -(-p.base // self.period), p.stop // self.period
            else:  # several copies: periods in which every possible copy of the pattern is present
                first = -(-(p.base + p.span - p.step) // self.period)
                stop = (p.base + p.count * p.step) // self.period if self.period % p.step == 0 else first
            complete = first if complete is None else max(complete, first)
            end = stop if end is None else min(end, stop)
            first, stop = (max(first, low), min(stop, high)) if first < stop else (high, high)
            self._spend(first - low + high - stop)
            edges.update((low, first, stop, high, *range(low, first), *range(stop, high)))
        self._complete = complete * self.period if complete is not None and complete < end else None
        ordered = sorted(edges)
        periods = ((a * self.period, b - a) for a, b in zip(ordered[:-1], ordered[1:], strict=True))
        return [(start, times) for start, times in periods if len(self._sets_in(start))]

    def _sets_in(self, start: int) -> np.ndarray:
        """Return the numbers of the byte sets that may have bytes in the period that begins at ``start``."""
        self._spend(VISIT_COST + len(self._low) // WORD_BITS)
        here = np.flatnonzero((self._low < start + self.period) & (self._high > start))
        self._spend(len(here))
        return here

    def _spend(self, ranges: int) -> None:
        """Count work before it is done. If it would exceed a limit, raise TooMuchWorkError and count nothing."""
        if self.work + ranges > self._budget:
            raise TooMuchWorkError(
                f"counting these bytes needs more than {self._budget} byte ranges, which is the work limit; "
                f"audit fewer views or fewer blocks at once"
            )
        spend(ranges)
        self.work += ranges

    def _copies(self, byte_set: ByteSet, start: int) -> list[tuple[Pattern, int, int]]:
        """Return ``(pattern, first copy, stop copy)`` for each pattern with bytes in a period."""
        stop, found = start + self.period, []
        for p in byte_set:
            low, high = max(-(-(start - p.base - p.span + 1) // p.step), 0), min(-(-(stop - p.base) // p.step), p.count)
            if low < high:
                found.append((p, low, high))
        return found

    def _ranges(self, copies: list[tuple[Pattern, int, int]], start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts and stops of all byte ranges in ``copies``. Parts outside the period are cut off."""
        starts, stops = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for p, low, high in copies:
            begin = ((p.base + np.arange(low, high, dtype=np.int64) * p.step)[:, None] + p.starts).ravel()
            first, stop = np.maximum(begin, start), np.minimum(begin + p.width, start + self.period)
            starts.append(first[first < stop])
            stops.append(stop[first < stop])
        return np.concatenate(starts), np.concatenate(stops)

    def _intervals_of(self, start: int, periods: int, least: int) -> Intervals | None:
        """Cut the period that begins at ``start`` into intervals. Keep intervals whose owners weigh at least ``least``.

        If there is no such interval, return None.
        """
        here = self._sets_in(start)
        self._spend(len(here) * VISIT_COST)
        copies = [self._copies(self._sets[number], start) for number in here]
        self._spend(sum((high - low) * len(p.starts) for found in copies for p, low, high in found))
        ranges = [self._ranges(found, start) for found in copies]
        lengths = [len(starts) for starts, _ in ranges]
        del copies
        # List the starts of all byte sets, and after them all stops. Then sort this list by address.
        cuts = np.concatenate([starts for starts, _ in ranges] + [stops for _, stops in ranges])
        del ranges  # the arrays below are large
        order = np.argsort(cuts, kind="stable")
        cuts, weights = cuts[order], self._set_weights[here]
        # A running sum gives the weight of all owners after each cut: a start adds a weight, and a stop subtracts it.
        claimants = np.repeat(np.concatenate((weights, -weights)), lengths * 2)[order]
        np.cumsum(claimants, out=claimants)
        sizes = np.diff(cuts, append=cuts[-1:])
        picked = np.flatnonzero((claimants >= least) & (sizes > 0))
        del claimants
        if not len(picked):
            return None
        words = len(here) // WORD_BITS
        self._spend(len(picked) * words + len(cuts) * words // 8)
        set_of_cut = np.repeat(np.arange(len(here) * 2) % len(here), lengths * 2)[order]
        masks, combination = distinct_rows(covering_masks(set_of_cut, len(here), picked))
        self._spend(int(np.bitwise_count(masks).sum()) * MEMBER_COST + len(masks) * COMBINATION_COST)
        combinations = [tuple(here[list(set_bits(mask))].tolist()) for mask in masks]
        return Intervals(periods, cuts[picked], sizes[picked], combinations, combination)

    def _regions_of(self, table: Intervals, least: int) -> Iterator[Region]:
        """Yield one region for each group of owners. An owner may cover an interval with any of its byte sets."""
        positions: dict[tuple[int, ...], list[int]] = {}  # owners -> the combinations that belong to them
        for position, sets in enumerate(table.combinations):
            owners = tuple(sorted({self.owner_of[number] for number in sets}))
            positions.setdefault(owners, []).append(position)
        group_of = np.zeros(len(table.combinations), np.int64)
        for group, of_group in enumerate(positions.values()):
            group_of[of_group] = group
        groups = group_of[table.combination]
        order = np.argsort(groups, kind="stable")
        table = table.at(order)  # group by group, and by address in each group
        bounds = np.searchsorted(groups[order], np.arange(len(positions) + 1))
        totals = np.add.reduceat(table.sizes, bounds[:-1]).tolist()
        itemsizes = set(self._itemsizes)
        self._spend((len(table.starts) + VISIT_COST) * (len(itemsizes) - 1))
        touched = {n: touched_elements(table.starts, table.sizes, n, bounds[:-1]) for n in itemsizes}
        for group, (owners, of_group) in enumerate(positions.items()):
            if sum(self._weights[owner] for owner in owners) < least:
                continue
            mine = table.at(slice(bounds[group], bounds[group + 1]))
            if len(of_group) == 1:  # one combination: all its byte sets touch the same number of elements
                sets = Counter(self.owner_of[number] for number in table.combinations[of_group[0]])
                elements = tuple(touched[self._itemsizes[owner]][group] * sets[owner] for owner in owners)
            else:
                elements = tuple(self.count_elements(mine, owner, of_group) for owner in owners)
            elements = tuple(count * table.periods for count in elements)
            yield Region(owners, totals[group] * table.periods, int(mine.starts[0]), elements)


def _joined(a: Region, b: Region) -> Region:
    """Join two regions with the same members."""
    elements = tuple(n + m for n, m in zip(a.elements, b.elements, strict=True))
    return Region(a.members, a.bytes + b.bytes, min(a.first, b.first), elements)


def _num_listed(byte_set: ByteSet) -> int:
    """Return the number of patterns that :func:`_list_ranges` returns."""
    ranges = sum(p.num_ranges for p in byte_set)
    return len(byte_set) if ranges > FEW_SET_RANGES else ranges


def _list_ranges(byte_set: ByteSet) -> ByteSet:
    """If a byte set has few ranges, return one pattern per range. Otherwise return the byte set unchanged."""
    if _num_listed(byte_set) == len(byte_set):
        return byte_set
    ranges = (
        (p.base + copy * p.step + start, p.width)
        for p in byte_set
        for copy in range(p.count)
        for start in p.starts.tolist()
    )
    return [pattern for first, width in ranges for pattern in byte_range(first, first + width)]


def touched_elements(starts: np.ndarray, sizes: np.ndarray, itemsize: int, groups: np.ndarray) -> list[int]:
    """Count the elements of ``itemsize`` bytes that the intervals of each group touch.

    An interval touches the element of its first byte, the element of its last byte, and all elements between the two.
    If the previous interval of the group ends in the same element, this element is not counted again.

    Args:
        starts, sizes: intervals, ascending in each group: int64, shape (intervals,).
        groups: position of the first interval of each group.
    """
    first, last = starts // itemsize, (starts + sizes - 1) // itemsize
    count = last - first + 1
    count[1:] -= first[1:] == last[:-1]
    count[groups[1:]] += first[groups[1:]] == last[groups[1:] - 1]  # the previous interval is in another group
    return np.add.reduceat(count, groups).tolist()


def covering_masks(set_of_cut: np.ndarray, count: int, picked: np.ndarray) -> np.ndarray:
    """Return a bit mask for each picked interval: bit n is 1 if byte set n covers the interval.

    At each cut, one byte set begins or ends, so its bit changes. The exclusive or of all changes up to a cut gives the
    mask of the interval after the cut. Example: cuts of the sets 0, 1, 0, 1 give the masks 01, 11, 10, 00.

    Args:
        set_of_cut: number of the byte set that begins or ends at each cut: int64, shape (cuts,).
        count: number of byte sets.
        picked: positions of the cuts at which the wanted intervals begin.

    Returns:
        int64, shape (intervals, words), with :data:`WORD_BITS` byte sets per word.
    """
    words = []
    for first in range(0, count, WORD_BITS):
        bits = np.zeros(count, np.int64)
        bits[first : first + WORD_BITS] = np.int64(1) << np.arange(min(WORD_BITS, count - first))
        words.append(np.bitwise_xor.accumulate(bits[set_of_cut])[picked])
    return np.stack(words, axis=1)


def distinct_rows(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different rows of a table of integers, and for each row of the table its position among these rows.

    The function gives numbers to the rows, and improves these numbers column by column. After each column, two rows
    have equal numbers only if they are equal in all columns up to here.
    """
    number = None
    for column in words.T:
        values, codes = np.unique(column, return_inverse=True)
        if number is not None:
            _, codes = np.unique(number * len(values) + codes, return_inverse=True)
        number = codes
    _, first = np.unique(number, return_index=True)
    return words[first], number


def set_bits(words: np.ndarray) -> tuple[int, ...]:
    """Return the numbers of the bits that are 1 in a row of words, ascending."""
    found = []
    for position, word in enumerate(words.tolist()):
        while word:
            lowest_bit = word & -word
            found.append(position * WORD_BITS + lowest_bit.bit_length() - 1)
            word ^= lowest_bit
    return tuple(found)
