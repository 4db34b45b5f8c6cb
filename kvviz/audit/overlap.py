"""Counts exactly the bytes that views share, for views of any strides.

Example: a K scale view has bytes [8, 12) of every block, and K data has bytes [0, 12). The two views share 4 bytes per
block. If a claim says that they are disjoint, this is a collision. This file also finds elements outside their storage,
and elements of one view that overlap.

The *common period* of views is the least common multiple of their strides in bytes. If it is short, a
:class:`~kvviz.audit.sweep.Sweep` counts all views together. Otherwise each pair of views is counted alone, by solving
equations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import gcd

import numpy as np

from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.byte_sets import BUDGET, Pattern, byte_range, byte_sets, byte_sets_of_all, geometry, normal_dims
from kvviz.audit.counting import CHUNK, pair_solutions
from kvviz.audit.elements import place_of_byte
from kvviz.audit.findings import Finding, cost_of_names, counted
from kvviz.audit.sweep import VISIT_COST, Region, Sweep
from kvviz.audit.view import View

MOST_NAMES = 6
"""A text about views that are only read gives at most this many names."""

MAX_PLACES = 10_000
"""One claim looks up example places for at most this many views. Later findings have counts, but no example."""

PAIR_BUDGET = 20_000_000
"""Work limit of one claim that counts pairs of views, in equations. If it is reached, further pairs get no counts."""

PAIR_COST = 5_000
"""Work of one pair of views, in addition to its equations. The unit is one equation."""

MAX_PAIRS = 8_192
"""Largest number of pairs of views that one claim compares. One finding names the views that were not compared."""

EASY_WORK, HARD_WORK = 1 << 6, 1 << 14
"""Numbers of candidates that numpy may try to decide if two views overlap: first attempt, and second attempt."""

MAX_HARD_PAIRS = 64
"""Largest number of second attempts of one claim. For further pairs, the finding says that views may overlap."""

NOT_COUNTED = (
    "these views overlap, but the shared bytes were not counted: their strides have no short common period, and the "
    "work limit is reached; claim fewer views at once"
)
MAY_OVERLAP = (
    "not judged: these views may overlap; their strides have no short common period, and the work limit is reached; "
    "claim fewer views at once"
)
PAIRS_LEFT = (
    "not judged: the strides have no short common period, and the limit of {} compared pairs of views was reached "
    "before these views; claim fewer views at once"
)


def out_of_bounds(view: View) -> Iterator[Finding]:
    """Find elements that reach outside the storage, and count their bytes there."""
    low, high = view.span_bytes
    size = view.storage.nbytes
    if view.num_elements == 0 or (low >= 0 and high <= size):
        return
    elements, bytes_, example = None, None, ()
    text = f"reaches bytes [{low}, {high}) of a storage of {counted(size, 'byte')}"
    try:
        sweep = Sweep([byte_sets(view), [byte_range(0, size)]], [view.itemsize, 1])
        outside = next(region for region in sweep.regions(1) if region.members == (0,))
        elements, bytes_, example = outside.elements[0], outside.bytes, place_of_byte(view, outside.first)
    except TooMuchWorkError as error:
        text += f"; the number of bytes outside was not counted: {error}"
    yield Finding("out_of_bounds", (view.name,), view.storage.name, elements, bytes_, example, text=text)


class SelfOverlaps:
    """Counts bytes that two elements of one view share. If views differ only in their offset, they are counted once."""

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[int, int, int]] = {}  # by geometry without the offset

    def count(self, view: View) -> tuple[int, int, int]:
        """Return the number of overlapping elements, the number of shared bytes, and the first shared byte.

        The first shared byte counts from the lowest byte of the view.

        Raises:
            TooMuchWorkError: a work limit is reached.
        """
        start, dims = normal_dims(view)
        key = (tuple(dims), view.itemsize, view.num_elements)
        if key not in self._known:
            sets = byte_sets(view)
            regions = Sweep([[one] for one in sets], [view.itemsize] * len(sets)).regions()
            first = min((region.first for region in regions), default=start) - start
            self._known[key] = (sum(sum(r.elements) for r in regions), sum(r.bytes for r in regions), first)
        return self._known[key]


def self_overlap(view: View, lookup) -> Iterator[Finding]:
    """Find elements of one view that share bytes.

    Args:
        lookup: the :class:`~kvviz.audit.placement.OwnerLookup` of the audit.
    """
    if view.nested or view.num_elements == 0:
        return
    names, storage = (view.name,), view.storage.name
    try:
        elements, bytes_, first = lookup.self_overlaps.count(view)
    except TooMuchWorkError as error:
        text = f"not judged: elements of this view may overlap; {error}"
        yield Finding("self_overlap", names, storage, None, None, text=text, judged=False)
        return
    if bytes_:
        start, _ = view.span_bytes
        yield Finding("self_overlap", names, storage, elements, bytes_, place_of_byte(view, start + first))


def note_on_reader(finding: Finding) -> str:
    """Return the note about a view that overlaps itself and is only read. This is no error."""
    (name,) = finding.views
    if finding.bytes is None:
        return f"{name} is only read. {finding.text[0].upper()}{finding.text[1:]}"
    shared = counted(finding.bytes, "byte")
    return f"{name} is only read, and {finding.elements} of its elements share {shared}: this is no error"


def readers_text(readers: Sequence[str], total: int) -> str:
    """Return a text that says which of ``total`` colliding views are only read. If ``readers`` is empty, return ""."""
    if not readers:
        return ""
    writers = total - len(readers)
    names = ", ".join(readers[:MOST_NAMES])
    more = f" and {len(readers) - MOST_NAMES} more" if len(readers) > MOST_NAMES else ""
    return f"{counted(writers, 'view')} {'writes' if writers == 1 else 'write'} here; only read: {names}{more}"


def by_storage(views: Sequence[View]) -> list[list[View]]:
    """Group views by their storage. Empty views are left out."""
    groups: dict[str, list[View]] = {}
    for view in views:
        groups.setdefault(view.storage.name, []).extend([view] if view.num_elements else [])
    return [group for group in groups.values() if group]


def by_geometry(views: Sequence[View]) -> list[list[View]]:
    """Group views of one storage. The elements of all views of a group cover exactly the same bytes.

    A group has either views that are only read, or views that write.
    """
    groups: dict[tuple, list[View]] = {}
    for view in views:
        groups.setdefault((geometry(view), view.read_only), []).append(view)
    return list(groups.values())


def collisions(views: Sequence[View], witnesses: bool = True) -> Iterator[Finding]:
    """Find bytes that several views share, if at least one of these views writes.

    Each combination of views with such bytes gives one finding.

    Args:
        witnesses: if True, look up examples, for at most :data:`MAX_PLACES` views.
    """
    places_left = MAX_PLACES if witnesses else 0
    known: dict[tuple, list[Region]] = {}  # storages whose views have equal geometry are counted once
    for in_storage in by_storage(views):
        groups = by_geometry(in_storage)
        key = (in_storage[0].storage.nbytes, *((geometry(group[0]), len(group)) for group in groups))
        only_read = {number for number, group in enumerate(groups) if group[0].read_only}
        try:
            if key not in known:
                known[key] = _shared_regions(groups, in_storage[0].storage.nbytes)
        except TooMuchWorkError:
            yield from _collisions_by_pair(groups)
            continue
        order = {view.name: number for number, view in enumerate(in_storage)}
        for region in known[key]:
            if only_read.issuperset(region.members):
                continue
            yield _collision(region, groups, order, places_left > 0)
            places_left -= len(region.members)


def _shared_regions(groups: Sequence[Sequence[View]], nbytes: int) -> list[Region]:
    """Return the regions of a storage of ``nbytes`` bytes that at least two views share.

    Bytes outside the storage are left out, because ``out_of_bounds`` reports them. If a view reaches outside, the
    storage becomes one more owner in the sweep. Its weight is the number of all views. A region with a weight of at
    least this number plus 2 lies inside the storage, and at least two views share it.
    """
    owners = byte_sets_of_all([group[0] for group in groups])
    itemsizes, weights, least = [group[0].itemsize for group in groups], [len(group) for group in groups], 2
    if all(group[0].span_bytes[0] >= 0 and group[0].span_bytes[1] <= nbytes for group in groups):
        return Sweep(owners, itemsizes, weights).regions(least)
    all_views = sum(weights)
    sweep = Sweep([*owners, [byte_range(0, nbytes)]], [*itemsizes, 1], [*weights, all_views])
    regions = sweep.regions(all_views + least)
    return [replace(region, members=region.members[:-1], elements=region.elements[:-1]) for region in regions]


def _collision(region: Region, groups: Sequence[Sequence[View]], order: dict[str, int], witnesses: bool) -> Finding:
    """Return the finding of one region. The example has elements of the first view and the last view of each group."""
    members = sorted((view for m in region.members for view in groups[m]), key=lambda view: order[view.name])
    elements = sum(count * len(groups[m]) for m, count in zip(region.members, region.elements, strict=True))
    ends = {view.name: view for m in region.members for view in (groups[m][0], groups[m][-1])} if witnesses else {}
    shown = sorted(ends.values(), key=lambda view: order[view.name])
    example = tuple(p for view in shown for p in place_of_byte(view, region.first))
    return _of_writers_and_readers(members, elements, region.bytes, example)


def _of_writers_and_readers(
    members: Sequence[View],
    elements: int | None,
    bytes_: int | None,
    example: tuple = (),
    text: str = "",
    judged: bool = True,
) -> Finding:
    """Return the finding of a collision. It also names those of its views that are only read."""
    names, storage = tuple(view.name for view in members), members[0].storage.name
    spend(cost_of_names(names))
    readers = tuple(view.name for view in members if view.read_only)
    said = "; ".join(filter(None, (text, readers_text(readers, len(members)))))
    return Finding("collision", names, storage, elements, bytes_, example, text=said, readers=readers, judged=judged)


def shared_bytes(a: Pattern, b: Pattern, budget: int = BUDGET) -> int:
    """Count the bytes that two patterns share. Their steps need no short common period.

    Take one byte range of ``a`` and one byte range of ``b``. They start at s and t in the first copies. In copy x of
    ``a`` and copy y of ``b``, the range of ``a`` starts ``distance = (s + a.step * x) - (t + b.step * y)`` bytes after
    the range of ``b``. The ranges share bytes only if the distance lies between ``-a.width`` and ``b.width``. For each
    such distance, :func:`~kvviz.audit.counting.pair_solutions` counts the pairs (x, y) that have this distance.

    Example: steps 6 and 4, s = t = 0, both widths 2. Distances are multiples of gcd(6, 4) = 2, so the ranges share
    bytes only at distance 0. Each solution of ``6 * x - 4 * y == 0`` gives 2 shared bytes.

    Raises:
        TooMuchWorkError: there are more than ``budget`` equations.
    """
    if a.stop <= b.base or b.stop <= a.base:
        return 0
    divisor = gcd(a.step, b.step)
    # The possible distances of two ranges differ by multiples of the divisor. At num_distances of these distances the
    # ranges share bytes.
    pairs, num_distances = len(a.starts) * len(b.starts), -(-(a.width + b.width - 1) // divisor)
    if pairs * num_distances > budget:
        raise TooMuchWorkError(
            f"{pairs} pairs of byte ranges with {num_distances} distances each exceed the work limit of {budget}"
        )
    spend(pairs * num_distances)
    count = 0
    for first in range(0, pairs * num_distances, CHUNK):
        pair, number = np.divmod(np.arange(first, min(first + CHUNK, pairs * num_distances)), num_distances)
        s, t = np.divmod(pair, len(b.starts))
        first_copies = (a.base + a.starts)[s] - (b.base + b.starts)[t]
        distances = 1 - a.width + (first_copies + a.width - 1) % divisor + number * divisor
        shared = np.minimum(distances + a.width, b.width) - np.maximum(distances, 0)
        near = shared > 0
        target = (distances - first_copies)[near]
        count += int((shared[near] * pair_solutions(target, (a.step, a.count), (b.step, b.count))).sum())
    return count


def _collisions_by_pair(groups: Sequence[Sequence[View]]) -> Iterator[Finding]:
    """Find shared bytes pair by pair, for views without a short common period.

    First, numpy decides if the two views of a pair overlap. If they overlap, or if numpy cannot decide it, their shared
    bytes are counted within :data:`PAIR_BUDGET`. After :data:`MAX_PAIRS` pairs, one finding names the views that are
    left.
    """
    work_left, hard_left = PAIR_BUDGET, MAX_HARD_PAIRS
    for group in groups:
        if len(group) > 1 and not group[0].read_only:
            bytes_ = group[0].num_elements * group[0].itemsize if group[0].nested else None
            yield Finding("collision", tuple(v.name for v in group), group[0].storage.name, None, bytes_)
    pairs, left = _close_pairs([group[0] for group in groups])
    pairs = [pair for pair in pairs if not all(groups[number][0].read_only for number in pair)]
    arrays = {number: np.asarray(_AddressesOnly(groups[number][0])) for number in sorted(set(chain(*pairs)))}
    for one, other in pairs:
        overlap = _overlap(arrays[one], arrays[other], EASY_WORK)
        if overlap is None and hard_left:
            overlap, hard_left = _overlap(arrays[one], arrays[other], HARD_WORK), hard_left - 1
        if overlap is False:
            continue
        bytes_, work = _count_pair(groups[one][0], groups[other][0], work_left)
        work_left -= work
        if overlap and bytes_ == 0:  # numpy and the count contradict each other: report the pair without a count
            bytes_ = None
        if bytes_ != 0:
            text = "" if bytes_ is not None else NOT_COUNTED if overlap else MAY_OVERLAP
            views = (*groups[one], *groups[other])
            yield _of_writers_and_readers(views, None, bytes_, text=text, judged=bool(overlap or bytes_))
    if left:
        views = [view for number in left for view in groups[number]]
        text = PAIRS_LEFT.format(MAX_PAIRS)
        names = tuple(v.name for v in views)
        yield Finding("collision", names, views[0].storage.name, None, None, text=text, judged=False)


def _close_pairs(views: Sequence[View]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return pairs of indices of views whose spans overlap, and the indices of views that were left out.

    Views are left out only if there are more than :data:`MAX_PAIRS` pairs.
    """
    order = sorted(range(len(views)), key=lambda number: views[number].span_bytes[0])
    lows = np.array([views[number].span_bytes[0] for number in order], np.int64)
    stops = np.searchsorted(lows, [views[number].span_bytes[1] for number in order])
    pairs: list[tuple[int, int]] = []
    left: list[int] = []
    for position, (number, stop) in enumerate(zip(order, stops.tolist(), strict=True)):
        others = order[position + 1 : stop]
        if len(pairs) + len(others) > MAX_PAIRS:
            left = order[position:]
            break
        pairs += [(min(number, other), max(number, other)) for other in others]
    return sorted(pairs), sorted(left)


def _count_pair(a: View, b: View, budget: int) -> tuple[int | None, int]:
    """Return the number of bytes that two views share, and the work of this count.

    The number is None if the work would exceed ``budget``, or if elements of one view overlap.
    """
    if not (a.nested and b.nested) or budget <= 0:
        return None, 0
    try:
        (ours,), (theirs,) = byte_sets(a), byte_sets(b)
        pairs = sum(len(p.starts) for p in ours) * sum(len(q.starts) for q in theirs)
        work = PAIR_COST + pairs + len(ours) * len(theirs) * VISIT_COST
        if work > budget:
            return None, PAIR_COST
        return sum(shared_bytes(p, q) for p in ours for q in theirs), work
    except TooMuchWorkError:
        return None, PAIR_COST


class _AddressesOnly:
    """An array with the addresses of a view and without memory. numpy compares the addresses and reads nothing."""

    def __init__(self, view: View) -> None:
        strides = tuple(step * view.itemsize for step in view.stride)
        base = (1 << 40) + view.offset * view.itemsize  # far from 0, so that an address below the storage is positive
        self.__array_interface__ = {
            "version": 3, "shape": view.shape, "typestr": f"|V{view.itemsize}", "strides": strides, "data": (base, True)
        }  # fmt: skip


def _overlap(a: np.ndarray, b: np.ndarray, work: int) -> bool | None:
    """Return True if two arrays share a byte. Return None if numpy cannot decide this with ``work`` candidates."""
    spend(VISIT_COST + work)
    try:
        return bool(np.shares_memory(a, b, max_work=work))
    except (np.exceptions.TooHardError, ValueError, OverflowError):
        return None
