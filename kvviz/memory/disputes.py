"""Checks on byte sets and index maps: bounds, self-overlap, collisions, misplaced elements, equal sets."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from kvviz.memory.extents import (
    BUDGET,
    Lane,
    Region,
    Sweep,
    TooMuchWorkError,
    byte_lanes,
    drifting_bytes,
    interval,
    normal_dims,
    start_lanes,
)
from kvviz.memory.finding import Finding, Place
from kvviz.memory.maps import first_wrong, locate, same_places
from kvviz.memory.view import View

OUTSIDE, PADDING = "outside the storage", "padding"
NOT_COUNTED = "they overlap; the strides drift so that the bytes were not counted within the budget"
LISTED = 1 << 20
"""Elements of a view that meets itself which are listed one by one."""

PAIR_BUDGET = 20_000_000
"""Pairs of runs and distances that one audit may solve where strides drift."""


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
    sweep = Sweep([byte_lanes(view), [interval(0, size)]], [view.itemsize, 1])
    outside = next(region for region in sweep.regions(1) if region.members == (0,))
    yield Finding(
        "out_of_bounds",
        (view.name,),
        view.storage.name,
        outside.elements[0],
        outside.bytes,
        place_of_byte(view, outside.first),
        text=f"reaches bytes [{low}, {high}) of a storage of {size}",
    )


def self_overlap(view: View) -> Iterator[Finding]:
    """Indices of one view that meet on a byte."""
    if view.nested or view.num_elements == 0:
        return
    try:
        lanes = byte_lanes(view)
        regions = Sweep([[lane] for lane in lanes], [view.itemsize] * len(lanes)).regions()
    except TooMuchWorkError as error:
        yield Finding("self_overlap", (view.name,), view.storage.name, None, None, text=f"may meet itself: {error}")
        return
    if regions:
        cells, bytes_ = sum(sum(r.elements) for r in regions), sum(r.bytes for r in regions)
        example = place_of_byte(view, regions[0].first)
        yield Finding("self_overlap", (view.name,), view.storage.name, cells, bytes_, example)


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
    """One finding for each set of claimants that share bytes."""
    solved: dict[tuple, list[Region]] = {}  # storages of one geometry are swept once
    for group in by_storage(views):
        kinds = classes(group)
        key = (group[0].storage.nbytes, *((_bytes_key(kind[0]), len(kind)) for kind in kinds))
        try:
            regions = solved[key] if key in solved else _shared_regions(kinds, group[0].storage.nbytes)
            solved[key] = regions
        except TooMuchWorkError:
            yield from _pairwise(kinds)
            continue
        order = {view.name: number for number, view in enumerate(group)}
        for region in regions:
            yield _collision(region, kinds, order, witnesses)


def _shared_regions(kinds: Sequence[Sequence[View]], nbytes: int) -> list[Region]:
    """Regions of the storage that at least two views share. Bytes outside it are another finding's."""
    owners = [byte_lanes(kind[0]) for kind in kinds]
    itemsizes, weights, least = [kind[0].itemsize for kind in kinds], [len(kind) for kind in kinds], 2
    if all(kind[0].span_bytes[0] >= 0 and kind[0].span_bytes[1] <= nbytes for kind in kinds):
        return Sweep(owners, itemsizes, weights).regions(least)
    heavy = sum(weights)
    regions = Sweep([*owners, [interval(0, nbytes)]], [*itemsizes, 1], [*weights, heavy]).regions(heavy + least)
    return [replace(region, members=region.members[:-1], elements=region.elements[:-1]) for region in regions]


def _collision(region: Region, kinds: Sequence[Sequence[View]], order: dict[str, int], witnesses: bool) -> Finding:
    members = sorted((view for m in region.members for view in kinds[m]), key=lambda view: order[view.name])
    cells = sum(count * len(kinds[m]) for m, count in zip(region.members, region.elements, strict=True))
    example = tuple(p for view in members for p in place_of_byte(view, region.first)) if witnesses else ()
    names = tuple(view.name for view in members)
    return Finding("collision", names, members[0].storage.name, cells, region.bytes, example)


def _pairwise(kinds: Sequence[Sequence[View]]) -> Iterator[Finding]:
    """Where strides drift: each pair of classes by itself, in closed form, or only yes or no past the budget."""
    left = PAIR_BUDGET
    for kind in kinds:
        if len(kind) > 1:
            yield Finding("collision", tuple(v.name for v in kind), kind[0].storage.name, None, _own_bytes(kind[0]))
    for one, other in combinations(kinds, 2):
        a, b = one[0], other[0]
        if a.span_bytes[1] <= b.span_bytes[0] or b.span_bytes[1] <= a.span_bytes[0] or not _meet(a, b):
            continue
        names, bytes_ = tuple(v.name for v in (*one, *other)), None
        if left > 0:
            bytes_, spent = _pair_bytes(a, b)
            left -= spent
        yield Finding("collision", names, a.storage.name, None, bytes_, text="" if bytes_ is not None else NOT_COUNTED)


def _own_bytes(view: View) -> int | None:
    return view.num_elements * view.itemsize if view.nested else None


def _pair_bytes(a: View, b: View) -> tuple[int | None, int]:
    """Bytes that two views share and the work that it took; None past the budget or where a view meets itself."""
    if not (a.nested and b.nested):
        return None, 0
    try:
        pairs = [(p, q) for p in byte_lanes(a)[0] for q in byte_lanes(b)[0]]
        return sum(drifting_bytes(p, q) for p, q in pairs), sum(len(p.starts) * len(q.starts) for p, q in pairs)
    except TooMuchWorkError:
        return None, BUDGET


class _Ghost:
    """An array that exists by its address alone; nobody reads it."""

    def __init__(self, view: View) -> None:
        strides = tuple(step * view.itemsize for step in view.stride)
        base = (1 << 40) + view.offset * view.itemsize
        self.__array_interface__ = {
            "version": 3, "shape": view.shape, "typestr": f"|V{view.itemsize}", "strides": strides, "data": (base, True)
        }  # fmt: skip


def _meet(a: View, b: View) -> bool:
    """Whether two views share any byte; True as well where numpy cannot tell within its budget."""
    try:
        return bool(np.shares_memory(np.asarray(_Ghost(a)), np.asarray(_Ghost(b)), max_work=1 << 20))
    except (np.exceptions.TooHardError, ValueError, OverflowError):
        return True


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


class Hits:
    """Looks up what lies under the first bytes of a view's elements: whose data, whose scale, padding, outside.

    Where several owners share a byte, data go before anything else, and then the owner named last.
    """

    def __init__(self, homes: Sequence[View]) -> None:
        self._homes = sorted((home for home in homes if home.num_elements), key=lambda view: view.role == "data")
        self._found: dict[tuple, Counter] = {}
        self._places: dict[tuple[int, str], tuple[Place, ...]] = {}
        self._keys: dict[str, tuple] = {}
        self._lanes: dict[tuple, list[list[Lane]]] = {}

    def of(self, view: View, rightful: View, right: int) -> tuple[tuple[str, int], ...]:
        """Counts by owner of what the elements of ``view`` hit, the ``right`` ones that are in place left out."""
        counts = Counter(self._all(view))
        if right:
            counts -= self._in_place(view, rightful, right)
        named = {f"{w}, at another index" if w == rightful.name else w: n for w, n in counts.items() if n}
        return tuple(sorted(named.items(), key=lambda item: (-item[1], item[0])))

    def place(self, byte: int, storage: str) -> tuple[Place, ...]:
        """The owner's element under a byte, or nothing."""
        if (byte, storage) not in self._places:
            there = (home for home in reversed(self._homes) if home.storage.name == storage)
            self._places[byte, storage] = next((found for home in there if (found := place_of_byte(home, byte))), ())
        return self._places[byte, storage]

    def _in_place(self, view: View, rightful: View, right: int) -> Counter:
        """What lies under the elements that are right: their owner, or who goes before it."""
        under = self._all(rightful)
        if len(under) == 1:
            return Counter({next(iter(under)): right})
        if view.num_elements > LISTED:
            raise TooMuchWorkError(f"{rightful.name} itself lies under {len(under)} owners")
        places = view.starts.ravel()[view.starts.ravel() == rightful.starts.ravel()]
        return Counter(self._name(int(byte), view) for byte in places)

    def _name(self, byte: int, view: View) -> str:
        if not 0 <= byte < view.storage.nbytes:
            return OUTSIDE
        found = self.place(byte, view.storage.name)
        return found[0].view if found else PADDING

    def _all(self, view: View) -> Counter:
        """Elements by the name of what their first byte hits."""
        homes = [home for home in self._homes if home.storage.name == view.storage.name]
        if view.storage.name not in self._keys:
            self._keys[view.storage.name] = tuple(map(_bytes_key, homes))
        key = (view.storage.nbytes, self._keys[view.storage.name], _bytes_key(view))
        if key not in self._found:
            self._found[key] = self._count(view, homes)
        names = [OUTSIDE, PADDING, *(home.name for home in homes)]
        counts: Counter = Counter()
        for under, count in self._found[key].items():
            counts[names[under]] += count
        return counts

    def _count(self, view: View, homes: Sequence[View]) -> Counter:
        """Elements by the number of what they hit: 0 outside, 1 padding, then the homes.

        The storage itself is an owner too, so that outside shows. Storages of one geometry are counted once.
        """
        key = (view.storage.nbytes, self._keys[view.storage.name])
        if key not in self._lanes:
            self._lanes[key] = [[interval(0, view.storage.nbytes)], *map(byte_lanes, homes)]
        owners = [*self._lanes[key], start_lanes(view)]
        heavy = len(owners)
        counts: Counter = Counter()
        for region in Sweep(owners, weights=[1] * (heavy - 1) + [heavy]).regions(heavy):
            inside, under = region.members[0] == 0, region.members[-2] if len(region.members) > 1 else 0
            counts[1 + under if inside else 0] += region.elements[-1]
        return counts


def misplaced(view: View, rightful: View, hits: Hits | None) -> Iterator[Finding]:
    """Elements that are not where ``rightful`` has them, and what they hit instead."""
    if view.shape != rightful.shape:
        raise ValueError(
            f"{view.name} has shape {view.shape} and its rightful map {rightful.shape}: they must be equal"
        )
    elsewhere = view.storage != rightful.storage
    right = 0 if elsewhere else same_places(view, rightful)
    if right == view.num_elements:
        return
    kind = "misplaced" if elsewhere or not _same_set(view, rightful) else "permuted"
    cells = view.num_elements - right
    found, text, example = (), f"belongs in {rightful.storage.name}" if elsewhere else "", ()
    if hits is not None:
        lowest = view.lowest if elsewhere else _first_wrong(view, rightful)
        landed, meant = place(view, lowest), place(rightful, lowest)
        example = (landed, meant, *hits.place(landed.start_bytes, view.storage.name))
        try:
            found = hits.of(view, rightful, right)
        except TooMuchWorkError as error:
            text = f"what lies there was not counted: {error}"
    bytes_ = _wrong_bytes(view, rightful, cells)
    yield Finding(kind, (view.name,), view.storage.name, cells, bytes_, example, found, text=text)


def _first_wrong(view: View, rightful: View) -> tuple[int, ...]:
    if view.nested or view.num_elements > LISTED:
        return first_wrong(view, rightful)
    starts = view.starts.ravel()
    wrong = np.flatnonzero(starts != rightful.starts.ravel())
    return view.index(int(wrong[np.argmin(starts[wrong])]))


def _wrong_bytes(view: View, rightful: View, cells: int) -> int | None:
    """Distinct bytes of the misplaced elements; None for a large view that meets itself."""
    if view.nested:
        return cells * view.itemsize
    if view.num_elements > LISTED:
        return None
    wrong = view.starts.ravel() != rightful.starts.ravel() if view.storage == rightful.storage else slice(None)
    return len(np.unique(view.bytes_of(view.starts.ravel()[wrong])))


def _same_set(view: View, rightful: View) -> bool:
    """Whether both start their elements at the same set of places."""
    low, high = view.span_bytes
    if (low, high - view.itemsize) != (rightful.span_bytes[0], rightful.span_bytes[1] - rightful.itemsize):
        return False
    if normal_dims(view) == normal_dims(rightful):
        return True
    try:
        return all(len(region.members) == 2 for region in Sweep([start_lanes(view), start_lanes(rightful)]).regions(1))
    except TooMuchWorkError:
        return False
