"""Finds elements that do not lie where they belong, and the owners of the bytes that these elements use.

Example: the K scale of token 0 belongs at bytes [128, 132), directly after its data, but lies at bytes [8, 12). This
element is misplaced. It overwrites 4 bytes that K data owns. A *rightful map* is a view that says where each element
belongs. A view is *displaced* if it has a misplaced element. A *hit* is a misplaced element, counted for the owner of
its first byte.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.byte_sets import BUDGET, ByteSet, byte_range, byte_sets_of_all, geometry, normal_dims, start_sets
from kvviz.audit.elements import first_wrong, place, place_of_byte, same_places
from kvviz.audit.findings import Finding, Place, cost_of_names
from kvviz.audit.overlap import SelfOverlaps
from kvviz.audit.rightful import RightfulPlaces
from kvviz.audit.sweep import VISIT_COST, Sweep
from kvviz.audit.view import Storage, View

OUTSIDE, PADDING = "outside the storage", "padding"
"""Names for bytes without an owner: bytes outside the storage, and bytes inside the storage."""

MAX_LISTED = 1 << 20
"""If elements of a view overlap, at most this many are listed. A larger view gets no byte count and no hits."""


class OwnerLookup:
    """Finds the owner of a byte, and counts the hits of a displaced view. An audit makes one lookup.

    The lookup keeps its answers, so that equal geometries are counted once. If several views own a byte, the lookup
    takes a data view. If several data views own a byte, the lookup takes the last one.

    Args:
        places: where the claims say that views belong, and which views own bytes.
        witnesses: True if findings should have examples and hits.

    Attributes:
        placed: for each claim about places, the view and its rightful map.
        witnesses: the argument ``witnesses``.
        parts: results that :mod:`kvviz.audit.blocks` keeps for one audit.
        self_overlaps: counts elements of one view that overlap.
    """

    def __init__(self, places: RightfulPlaces, witnesses: bool) -> None:
        self.placed, self.witnesses = places.placed, witnesses
        self._own_names, self._bytewise = places.own_names, places.bytewise
        self.parts: dict = {}
        self.self_overlaps = SelfOverlaps()
        self._work_left = BUDGET  # limits the hits of single views, so that work is left for later claims
        self._owners: dict[str, list[View]] = {}  # by storage; data last, because the last owner of a byte is taken
        for owner in sorted(
            (owner for owner in places.owners if owner.num_elements), key=lambda view: view.role == "data"
        ):
            self._owners.setdefault(owner.storage.name, []).append(owner)
        self._owner_sets: dict[str, list[list[ByteSet]]] = {}
        self._owner_spans: dict[str, np.ndarray] = {}
        # Storages of equal size, with owners of equal geometry, get the same number and share their counts.
        self._storage_number: dict[str, int] = {}
        self._number_of_geometry: dict[tuple, int] = {}
        self._num_right: dict[tuple[View, View], int] = {}
        self._same_starts: dict[tuple, bool] = {}
        self._hit_counts: dict[tuple, Counter] = {}
        self._places: dict[tuple[int, str], tuple[Place, ...]] = {}

    def num_right(self, view: View, rightful: View) -> int:
        """Return the number of elements of a view that lie in their rightful places."""
        if (view, rightful) not in self._num_right:
            right = 0 if view.storage != rightful.storage else same_places(view, rightful)
            self._num_right[view, rightful] = right
        return self._num_right[view, rightful]

    def same_starts(self, view: View, rightful: View) -> bool:
        """Return True if the elements of both views start at the same set of bytes, in any order."""
        low, high = view.span_bytes
        if (low, high - view.itemsize) != (rightful.span_bytes[0], rightful.span_bytes[1] - rightful.itemsize):
            return False
        dims, rightful_dims = normal_dims(view)[1], normal_dims(rightful)[1]
        if dims == rightful_dims:
            return True
        key = (tuple(dims), tuple(rightful_dims), view.num_elements)
        if key not in self._same_starts:
            self._same_starts[key] = _compare_starts(view, rightful)
        return self._same_starts[key]

    def place(self, byte: int, storage: str) -> tuple[Place, ...]:
        """Return the owner's element at a byte, as a tuple of one place. If no view owns the byte, return ()."""
        if (byte, storage) not in self._places:
            self._places[byte, storage] = self._place(byte, storage)
        return self._places[byte, storage]

    def _place(self, byte: int, storage: str) -> tuple[Place, ...]:
        """Do the work of :meth:`place`, and do not keep the answer."""
        owners = self._owners.get(storage, ())
        spend(VISIT_COST + len(owners) // 8)
        if storage not in self._owner_spans:
            spans = np.array([owner.span_bytes for owner in owners], np.int64).reshape(-1, 2)
            self._owner_spans[storage] = spans
        low, high = self._owner_spans[storage].T
        near = (owners[number] for number in np.flatnonzero((low <= byte) & (byte < high))[::-1].tolist())
        return next((found for owner in near if (found := self._element(owner, byte))), ())

    def _element(self, owner: View, byte: int) -> tuple[Place, ...]:
        """Return the owner's element at a byte. If the owner is a view of single bytes, return the whole element."""
        found = place_of_byte(owner, byte)
        if not found or owner not in self._bytewise:
            return found
        whole, (*index, number) = self._bytewise[owner], found[0].index
        start, text = found[0].start_bytes - number, replace(whole, name=owner.name).where(tuple(index))
        return (Place(owner.name, tuple(index), text, start, start + whole.itemsize),)

    def hits(self, view: View, rightful: View) -> tuple[tuple[str, int], ...]:
        """Count the misplaced elements of ``view`` by the owner of their first byte, the largest count first.

        Raises:
            TooMuchWorkError: a work limit is reached.
        """
        counts, right = Counter(self._hits_of_all(view)), self.num_right(view, rightful)
        if right:
            counts -= self._hits_of_right(view, rightful, right)
        own = self._own_names[view.name]
        named = {f"{w}, at another index" if w == own else w: n for w, n in counts.items() if n}
        spend(cost_of_names(named))
        return tuple(sorted(named.items(), key=lambda item: (-item[1], item[0])))

    def _hits_of_right(self, view: View, rightful: View, right: int) -> Counter:
        """Count the elements that lie in their rightful places, by the owner of their first byte.

        This owner is not always the view itself: the lookup may take another owner of the same byte.
        """
        owners = self._hits_of_all(rightful)
        if len(owners) == 1:
            return Counter({next(iter(owners)): right})
        if view.num_elements > MAX_LISTED:
            raise TooMuchWorkError(
                f"the rightful place of {rightful.name} has {len(owners)} owners, and its {view.num_elements} elements "
                f"are too many to list (at most {MAX_LISTED})"
            )
        spend(2 * view.num_elements)
        starts = view.list_starts().ravel()
        bytes_, times = np.unique(starts[starts == rightful.list_starts().ravel()], return_counts=True)
        owner_of: Counter = Counter()
        for byte, count in zip(bytes_.tolist(), times.tolist(), strict=True):
            owner_of[self._owner_name(byte, view)] += count
        return owner_of

    def _owner_name(self, byte: int, view: View) -> str:
        """Return the name of the owner of a byte in the storage of ``view``."""
        if not 0 <= byte < view.storage.nbytes:
            return OUTSIDE
        found = self._place(byte, view.storage.name)
        return found[0].view if found else PADDING

    def _hits_of_all(self, view: View) -> dict[str, int]:
        """Count all elements of a view by the owner of their first byte."""
        storage, owners = view.storage, self._owners.get(view.storage.name, [])
        if storage.name not in self._storage_number:
            key = (storage.nbytes, *map(geometry, owners))
            self._storage_number[storage.name] = self._number_of_geometry.setdefault(key, len(self._number_of_geometry))
            # One sweep counts all displaced views of the storage. If these views have no short common period, each
            # view is counted alone, as soon as its hits are needed.
            with suppress(TooMuchWorkError):
                self._count_hits(storage, self._displaced(storage), together=True)
        key = self._hit_key(view)
        if key not in self._hit_counts:
            if self._work_left <= 0:
                raise TooMuchWorkError(
                    f"the work limit of {BUDGET:,} byte ranges for owners was reached before this view; check the "
                    f"place of this view alone"
                )
            self._count_hits(storage, {key: view})
        counts = Counter()
        for number, count in self._hit_counts[key].items():
            counts[owners[number - 2].name if number > 1 else (OUTSIDE, PADDING)[number]] += count
        return counts

    def _hit_key(self, view: View) -> tuple:
        """Return a key. Views with equal keys have equal counts: their storages and elements have equal geometry."""
        return self._storage_number[view.storage.name], geometry(view)

    def _displaced(self, storage: Storage) -> dict[tuple, View]:
        """Return the displaced views of a storage that are not counted yet, one per geometry.

        If some elements of a view lie in their rightful places, also return its rightful map: :meth:`hits` needs it.
        """
        wanted = {}
        for view, rightful in self.placed.values():
            right = self.num_right(view, rightful)
            for candidate in (view, rightful) if right else (view,):
                if right < view.num_elements and candidate.storage == storage:
                    key = self._hit_key(candidate)
                    if key not in self._hit_counts:
                        wanted.setdefault(key, candidate)
        return wanted

    def _count_hits(self, storage: Storage, views: dict[tuple, View], together: bool = False) -> None:
        """Count the elements of views by the owner of their first byte, and keep the counts.

        In a count, 0 stands for bytes outside the storage, 1 for padding, 2 for the first owner, and so on. In the
        sweep, 0 is the storage, 1 is the first owner, and so on. The views come after the owners. The weight of a view
        is larger than the weight of the storage and all owners together. So the sweep returns only regions of views.

        Args:
            together: True if ``views`` are all displaced views of the storage. They have a work limit of their own.
        """
        if not views:
            return
        owners = self._owners.get(storage.name, [])
        if storage.name not in self._owner_sets:
            self._owner_sets[storage.name] = [[byte_range(0, storage.nbytes)], *byte_sets_of_all(owners)]
        sets = [*self._owner_sets[storage.name], *map(start_sets, views.values())]
        first_view = len(owners) + 1
        weights = [1] * first_view + [first_view + 1] * len(views)
        counts = [Counter() for _ in views]
        sweep = Sweep(sets, weights=weights, budget=BUDGET if together else self._work_left)
        try:
            regions = sweep.regions(first_view + 1)
        finally:
            self._work_left -= 0 if together else sweep.work + len(sets) * VISIT_COST
        for region in regions:
            owner = max((m for m in region.members if m < first_view), default=-1) + 1  # the last owner
            inside = region.members[0] == 0
            for member, count in zip(region.members, region.elements, strict=True):
                if member >= first_view:
                    counts[member - first_view][owner if inside else 0] += count
        self._hit_counts.update(zip(views, counts, strict=True))


def misplaced(view: View, rightful: View, lookup: OwnerLookup) -> Iterator[Finding]:
    """Find elements that do not lie where ``rightful`` says, and the owners of the bytes that these elements use.

    Raises:
        ValueError: the shapes differ.
    """
    if view.shape != rightful.shape:
        raise ValueError(
            f"{view.name} has shape {view.shape} and its rightful map has shape {rightful.shape}: they must be equal"
        )
    elsewhere = view.storage != rightful.storage
    wrong = view.num_elements - lookup.num_right(view, rightful)
    if not wrong:
        return
    kind = "misplaced" if elsewhere or not lookup.same_starts(view, rightful) else "permuted"
    hits, text, example = (), f"belongs in {rightful.storage.name}" if elsewhere else "", ()
    if lookup.witnesses:
        index = view.lowest if elsewhere else _first_wrong(view, rightful)
        found, meant = place(view, index), place(rightful, index)
        meant = replace(meant, stop_bytes=meant.start_bytes + view.itemsize)
        example = (found, meant, *lookup.place(found.start_bytes, view.storage.name))
        try:
            hits = lookup.hits(view, rightful)
        except TooMuchWorkError as error:
            text = f"the owners of the bytes where these elements lie were not counted: {error}"
    bytes_ = _wrong_bytes(view, rightful, wrong)
    yield Finding(kind, (view.name,), view.storage.name, wrong, bytes_, example, hits, text=text)


def _first_wrong(view: View, rightful: View) -> tuple[int, ...]:
    """Return the index of the lowest misplaced element."""
    if view.nested or view.num_elements > MAX_LISTED:
        return first_wrong(view, rightful)
    spend(2 * view.num_elements)
    starts = view.list_starts().ravel()
    wrong = np.flatnonzero(starts != rightful.list_starts().ravel())
    return view.index(int(wrong[np.argmin(starts[wrong])]))


def _wrong_bytes(view: View, rightful: View, wrong: int) -> int | None:
    """Count the distinct bytes of misplaced elements. Return None for a large view whose elements overlap."""
    if view.nested:
        return wrong * view.itemsize
    if view.num_elements > MAX_LISTED:
        return None
    spend(2 * view.num_elements)
    starts = view.list_starts().ravel()
    if view.storage == rightful.storage:
        starts = starts[starts != rightful.list_starts().ravel()]
    # All elements have one size. In ascending order, each element adds its bytes up to the start of the next element.
    starts = np.unique(starts)
    return int(np.minimum(np.diff(starts), view.itemsize).sum()) + view.itemsize


def _compare_starts(view: View, rightful: View) -> bool:
    """Return True if the elements of both views start at the same bytes. If it is too much work, return False."""
    try:
        sweep = Sweep([start_sets(view), start_sets(rightful)])
        return all(len(region.members) == 2 for region in sweep.regions(1))
    except TooMuchWorkError:
        return False
