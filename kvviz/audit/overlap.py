"""Checks on byte sets and index maps: bounds, self-overlap, collisions, misplaced elements, equal sets."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import gcd

import numpy as np

from kvviz.audit.byte_sets import BUDGET, Pattern, TooMuchWorkError, all_byte_lanes, byte_lanes, interval, normal_dims
from kvviz.audit.counting import locate, pair_solutions
from kvviz.audit.findings import Finding, Place
from kvviz.audit.sweep import VISIT, Region, Sweep
from kvviz.audit.view import View

MAX_PLACES = 10_000
"""Views that claim different bytes whose places a check of collisions tells in all."""


def place(view: View, index: tuple[int, ...]) -> Place:
    """The record of one element."""
    start = view.start_of(index)
    return Place(view.name, index, view.where(index), start, start + view.itemsize)


def place_of_byte(view: View, byte: int) -> tuple[Place, ...]:
    """The place of an element that covers ``byte``, or nothing if none was found."""
    index = locate(view, byte)
    return () if index is None else (place(view, index),)


def out_of_bounds(view: View) -> Iterator[Finding]:
    """Elements that reach past the storage, and the bytes outside."""
    low, high = view.span_bytes
    if view.num_elements == 0 or (low >= 0 and high <= view.storage.nbytes):
        return
    size = view.storage.nbytes
    cells, bytes_, example, text = None, None, (), f"reaches bytes [{low}, {high}) of a storage of {size}"
    try:
        sweep = Sweep([byte_lanes(view), [interval(0, size)]], [view.itemsize, 1])
        outside = next(region for region in sweep.regions(1) if region.members == (0,))
        cells, bytes_, example = outside.elements[0], outside.bytes, place_of_byte(view, outside.first)
    except TooMuchWorkError as error:
        text += f"; how many was not counted: {error}"
    yield Finding("out_of_bounds", (view.name,), view.storage.name, cells, bytes_, example, text=text)


def self_overlap(view: View, ground) -> Iterator[Finding]:
    """Indices of one view that meet on a byte."""
    if view.nested or view.num_elements == 0:
        return
    names, storage = (view.name,), view.storage.name
    try:
        cells, bytes_, first = ground.meetings(view)
    except TooMuchWorkError as error:
        yield Finding("self_overlap", names, storage, None, None, text=f"may meet itself: {error}")
        return
    if bytes_:
        start, _ = view.span_bytes
        yield Finding("self_overlap", names, storage, cells, bytes_, place_of_byte(view, start + first))


def classes(views: Sequence[View]) -> list[list[View]]:
    """Views of one storage that claim the very same bytes in the same elements, together."""
    found: dict[tuple, list[View]] = {}
    for view in views:
        found.setdefault(_bytes_key(view), []).append(view)
    return list(found.values())


def _bytes_key(view: View) -> tuple:
    start, dims = normal_dims(view)
    return start, tuple(dims), view.itemsize, view.num_elements


def by_storage(views: Sequence[View]) -> list[list[View]]:
    """Views grouped by the storage they lie in; empty views are left out."""
    groups: dict[str, list[View]] = {}
    for view in views:
        groups.setdefault(view.storage.name, []).extend([view] if view.num_elements else [])
    return [group for group in groups.values() if group]


def collisions(views: Sequence[View], witnesses: bool = True) -> Iterator[Finding]:
    """One finding for each set of claimants that share bytes; the first of them with :data:`MAX_PLACES` examples."""
    left = MAX_PLACES if witnesses else 0
    solved: dict[tuple, list[Region]] = {}  # storages of one geometry are swept once
    for group in by_storage(views):
        kinds = classes(group)
        key = (group[0].storage.nbytes, *((_bytes_key(kind[0]), len(kind)) for kind in kinds))
        try:
            regions = solved[key] if key in solved else _shared_regions(kinds, group[0].storage.nbytes)
            solved[key] = regions
        except TooMuchWorkError:
            yield from drifting_collisions(kinds)
            continue
        order = {view.name: number for number, view in enumerate(group)}
        for region in regions:
            yield _collision(region, kinds, order, left > 0)
            left -= len(region.members)


def _shared_regions(kinds: Sequence[Sequence[View]], nbytes: int) -> list[Region]:
    """Regions of the storage that at least two views share. Bytes outside it are another finding's."""
    owners = all_byte_lanes([kind[0] for kind in kinds])
    itemsizes, weights, least = [kind[0].itemsize for kind in kinds], [len(kind) for kind in kinds], 2
    if all(kind[0].span_bytes[0] >= 0 and kind[0].span_bytes[1] <= nbytes for kind in kinds):
        return Sweep(owners, itemsizes, weights).regions(least)
    heavy = sum(weights)
    regions = Sweep([*owners, [interval(0, nbytes)]], [*itemsizes, 1], [*weights, heavy]).regions(heavy + least)
    return [replace(region, members=region.members[:-1], elements=region.elements[:-1]) for region in regions]


def _collision(region: Region, kinds: Sequence[Sequence[View]], order: dict[str, int], witnesses: bool) -> Finding:
    members = sorted((view for m in region.members for view in kinds[m]), key=lambda view: order[view.name])
    cells = sum(count * len(kinds[m]) for m, count in zip(region.members, region.elements, strict=True))
    ends = {view.name: view for m in region.members for view in (kinds[m][0], kinds[m][-1])} if witnesses else {}
    shown = sorted(ends.values(), key=lambda view: order[view.name])
    example = tuple(p for view in shown for p in place_of_byte(view, region.first))
    names = tuple(view.name for view in members)
    return Finding("collision", names, members[0].storage.name, cells, region.bytes, example)


def same_bytes(part: View, whole: View) -> Iterator[Finding]:
    """What ``part`` lacks of ``whole``, and what it has beside it.

    Raises:
        ValueError: they lie in different storages.
    """
    if part.storage != whole.storage:
        raise ValueError(f"{part.name} lies in {part.storage.name} and {whole.name} in {whole.storage.name}")
    sweep = Sweep([byte_lanes(part), byte_lanes(whole)], [part.itemsize, whole.itemsize])
    for region in sweep.regions(1):
        if region.members == (0,):
            text = f"{region.bytes} bytes of {part.name} are none of {whole.name}'s"
            example = place_of_byte(part, region.first)
            yield Finding("oversized", (part.name, whole.name), part.storage.name, *_sizes(region), example, text=text)
        elif region.members == (1,):
            text = f"{region.bytes} bytes of {whole.name} are missing from {part.name}"
            example = place_of_byte(whole, region.first)
            yield Finding("truncated", (part.name, whole.name), part.storage.name, *_sizes(region), example, text=text)


def _sizes(region: Region) -> tuple[int, int]:
    return region.elements[0], region.bytes


NOT_COUNTED = "they overlap; the strides drift so that the bytes were not counted within the budget"
NOT_DECIDED = "they may overlap; the strides drift so that neither that nor the bytes were settled within the budget"
PAIR_BUDGET = 20_000_000
"""Pairs of runs and distances that one claim may solve where strides drift."""

PAIR_COST = 5_000
"""Pairs of runs that looking at a pair of views counts for."""

MAX_PAIRS = 8_192
"""Pairs of views that one claim takes one by one."""

NOT_TAKEN = f"not judged: the strides drift, the first {MAX_PAIRS} pairs of views were taken one by one"

EASY, HARD, HARD_PAIRS = 1 << 6, 1 << 14, 64
"""Candidates that numpy tries to settle whether two views meet, and for how many pairs it may try the more."""


def drifting_bytes(a: Pattern, b: Pattern, budget: int = BUDGET) -> int:
    """Bytes that two patterns share, whatever their steps: closed form over pairs of runs.

    Two runs at a distance meet as often as ``a.step * x - b.step * y`` takes that value in the box of counts.

    Raises:
        TooMuchWorkError: more than ``budget`` pairs of runs and distances.
    """
    if a.stop <= b.base or b.stop <= a.base:
        return 0
    grain = gcd(a.step, b.step)
    pairs, reach = len(a.starts) * len(b.starts), -(-(a.width + b.width - 1) // grain)
    if pairs * reach > budget:
        raise TooMuchWorkError(f"{pairs} pairs of runs at {reach} distances exceed the budget of {budget}")
    distances = (a.base + a.starts)[:, None] - (b.base + b.starts)
    lowest = -a.width + 1 + (distances + a.width - 1) % grain
    meet = lowest[..., None] + np.arange(reach, dtype=np.int64) * grain
    shared = np.maximum(np.minimum(meet + a.width, b.width) - np.maximum(meet, 0), 0)
    target = meet - distances[..., None]
    return int((shared * pair_solutions(target, (a.step, a.count), (b.step, b.count))).sum())


def drifting_collisions(kinds: Sequence[Sequence[View]]) -> Iterator[Finding]:
    """Where strides drift: each pair of classes by itself, in closed form, or only yes or no past the budget.

    Views beyond :data:`MAX_PAIRS` pairs are told in one finding.
    """
    left, hard = PAIR_BUDGET, HARD_PAIRS
    for kind in kinds:
        if len(kind) > 1:
            yield Finding("collision", tuple(v.name for v in kind), kind[0].storage.name, None, _own_bytes(kind[0]))
    pairs, rest = _close_pairs([kind[0] for kind in kinds])
    ghosts = {number: np.asarray(_Ghost(kinds[number][0])) for number in sorted(set(chain(*pairs)))}
    for one, other in pairs:
        meet = _meet(ghosts[one], ghosts[other], EASY)
        if meet is None and hard:
            meet, hard = _meet(ghosts[one], ghosts[other], HARD), hard - 1
        if meet is False:
            continue
        bytes_, spent = _pair_bytes(kinds[one][0], kinds[other][0], left)
        left -= spent
        if meet and bytes_ == 0:  # numpy and the count contradict each other: say so rather than nothing
            bytes_ = None
        if bytes_ != 0:
            text = "" if bytes_ is not None else NOT_COUNTED if meet else NOT_DECIDED
            views = (*kinds[one], *kinds[other])
            yield Finding("collision", tuple(v.name for v in views), views[0].storage.name, None, bytes_, text=text)
    if rest:
        views = [view for number in rest for view in kinds[number]]
        text = f"{NOT_TAKEN}, and not these"
        yield Finding("collision", tuple(v.name for v in views), views[0].storage.name, None, None, text=text)


def _close_pairs(views: Sequence[View]) -> tuple[list[tuple[int, int]], list[int]]:
    """Numbers of views whose spans overlap, pair by pair, and the numbers of those left where they are too many."""
    order = sorted(range(len(views)), key=lambda number: views[number].span_bytes[0])
    lows = np.array([views[number].span_bytes[0] for number in order], np.int64)
    stops = np.searchsorted(lows, [views[number].span_bytes[1] for number in order])
    pairs: list[tuple[int, int]] = []
    rest: set[int] = set()
    for place, (number, stop) in enumerate(zip(order, stops.tolist(), strict=True)):
        others = order[place + 1 : stop]
        if len(pairs) + len(others) <= MAX_PAIRS and not rest:
            pairs += [(min(number, other), max(number, other)) for other in others]
        elif others:
            rest.update(order[place:])
            break
    return sorted(pairs), sorted(rest)


def _own_bytes(view: View) -> int | None:
    return view.num_elements * view.itemsize if view.nested else None


def _pair_bytes(a: View, b: View, budget: int) -> tuple[int | None, int]:
    """Bytes that two views share and the work that it took; None past the budget or where a view meets itself."""
    if not (a.nested and b.nested) or budget <= 0:
        return None, 0
    try:
        ours, theirs = byte_lanes(a)[0], byte_lanes(b)[0]
        runs = sum(len(p.starts) for p in ours) * sum(len(q.starts) for q in theirs)
        work = PAIR_COST + runs + len(ours) * len(theirs) * VISIT
        if work > budget:
            return None, PAIR_COST
        return sum(drifting_bytes(p, q) for p in ours for q in theirs), work
    except TooMuchWorkError:
        return None, PAIR_COST


class _Ghost:
    """An array that exists by its address alone; nobody reads it."""

    def __init__(self, view: View) -> None:
        strides = tuple(step * view.itemsize for step in view.stride)
        base = (1 << 40) + view.offset * view.itemsize
        self.__array_interface__ = {
            "version": 3, "shape": view.shape, "typestr": f"|V{view.itemsize}", "strides": strides, "data": (base, True)
        }  # fmt: skip


def _meet(a: np.ndarray, b: np.ndarray, work: int) -> bool | None:
    """Whether two ghosts share a byte, by numpy's bounded search; None where ``work`` candidates did not settle it."""
    try:
        return bool(np.shares_memory(a, b, max_work=work))
    except (np.exceptions.TooHardError, ValueError, OverflowError):
        return None
