"""Whether each element of a view is where it belongs, and whose bytes it hits if it is not."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from kvviz.audit.byte_sets import (
    BUDGET,
    Lane,
    TooMuchWorkError,
    all_byte_lanes,
    byte_lanes,
    interval,
    normal_dims,
    start_lanes,
)
from kvviz.audit.claims import BelongsAt, Follows
from kvviz.audit.counting import first_wrong, same_places
from kvviz.audit.findings import Finding, Place
from kvviz.audit.overlap import _bytes_key, place, place_of_byte
from kvviz.audit.sweep import VISIT, Sweep
from kvviz.audit.view import Storage, View

OUTSIDE, PADDING = "outside the storage", "padding"


ALONE, REFUSED = 1 << 9, 1 << 18
"""Runs that a lane of a view which meets itself counts for, and a view with too many lanes to be begun."""


LISTED = 1 << 20
"""Elements of a view that meets itself which are listed one by one."""


class Ground:
    """What one audit works out about its views once: who rightfully lies where, and what displaced views hit there.

    Where several owners share a byte, data go before anything else, and then the owner named last.

    Args:
        homes: who rightfully owns what.
        placed: for each claim on a view's place the view and its rightful map.
        witnesses: whether examples and hits are wanted.
    """

    def __init__(
        self, homes: Sequence[View], placed: Mapping[BelongsAt | Follows, tuple[View, View]], witnesses: bool
    ) -> None:
        self.placed, self.witnesses = placed, witnesses
        self.parts: dict = {}  # what ``kvviz.audit.blocks`` cuts views into, by what they are cut for
        self._homes: dict[str, list[View]] = {}
        for home in sorted((home for home in homes if home.num_elements), key=lambda view: view.role == "data"):
            self._homes.setdefault(home.storage.name, []).append(home)
        self._right: dict[tuple[View, View], int] = {}
        self._same: dict[tuple, bool] = {}
        self._found: dict[tuple, Counter] = {}
        self._meetings: dict[tuple, tuple[int, int, int]] = {}
        self._home_lanes: dict[str, list[list[Lane]]] = {}
        self._left = self._left_alone = BUDGET
        self._places: dict[tuple[int, str], tuple[Place, ...]] = {}
        self._spans: dict[str, np.ndarray] = {}
        self._geometries: dict[tuple, int] = {}
        self._keys: dict[str, int] = {}  # which of the geometries a storage has

    def right(self, view: View, rightful: View) -> int:
        """How many elements of a view are where its rightful map has them."""
        if (view, rightful) not in self._right:
            right = 0 if view.storage != rightful.storage else same_places(view, rightful)
            self._right[view, rightful] = right
        return self._right[view, rightful]

    def same_set(self, view: View, rightful: View) -> bool:
        """Whether both start their elements at the same set of places."""
        low, high = view.span_bytes
        if (low, high - view.itemsize) != (rightful.span_bytes[0], rightful.span_bytes[1] - rightful.itemsize):
            return False
        dims, theirs = normal_dims(view)[1], normal_dims(rightful)[1]
        if dims == theirs:
            return True
        key = (tuple(dims), tuple(theirs), view.num_elements)
        if key not in self._same:
            self._same[key] = _same_starts(view, rightful)
        return self._same[key]

    def meetings(self, view: View) -> tuple[int, int, int]:
        """Cells and bytes at which a view meets itself, and the first such byte behind the view's lowest.

        Raises:
            TooMuchWorkError: the budget that all views of the audit share for this is spent.
        """
        start, dims = normal_dims(view)
        key = (tuple(dims), view.itemsize, view.num_elements)
        if key not in self._meetings:
            if self._left_alone <= 0:
                raise TooMuchWorkError(f"the budget of {BUDGET} runs that an audit has for this is spent")
            work = REFUSED
            try:
                lanes = byte_lanes(view)
                sweep = Sweep([[lane] for lane in lanes], [view.itemsize] * len(lanes), budget=self._left_alone)
                work = len(lanes) * ALONE
                regions = sweep.regions()
                work += sweep.work
            finally:
                self._left_alone -= work
            first = min((region.first for region in regions), default=start) - start
            self._meetings[key] = (sum(sum(r.elements) for r in regions), sum(r.bytes for r in regions), first)
        return self._meetings[key]

    def hits(self, view: View, rightful: View) -> tuple[tuple[str, int], ...]:
        """Counts by owner of what the elements of ``view`` that are not in place hit."""
        counts, right = Counter(self._under(view)), self.right(view, rightful)
        if right:
            counts -= self._in_place(view, rightful, right)
        named = {f"{w}, at another index" if w == rightful.name else w: n for w, n in counts.items() if n}
        return tuple(sorted(named.items(), key=lambda item: (-item[1], item[0])))

    def place(self, byte: int, storage: str) -> tuple[Place, ...]:
        """The owner's element under a byte, or nothing."""
        if (byte, storage) not in self._places:
            homes = self._homes.get(storage, ())
            if storage not in self._spans:
                self._spans[storage] = np.array([home.span_bytes for home in homes], np.int64).reshape(-1, 2)
            low, high = self._spans[storage].T
            there = (homes[number] for number in np.flatnonzero((low <= byte) & (byte < high))[::-1].tolist())
            self._places[byte, storage] = next((found for home in there if (found := place_of_byte(home, byte))), ())
        return self._places[byte, storage]

    def _in_place(self, view: View, rightful: View, right: int) -> Counter:
        """What lies under the elements that are right: their owner, or who goes before it."""
        under = self._under(rightful)
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

    def _under(self, view: View) -> dict[str, int]:
        """Elements by the name of what their first byte hits. Storages of one geometry are counted once."""
        storage, homes = view.storage, self._homes.get(view.storage.name, [])
        if storage.name not in self._keys:
            geometry = (storage.nbytes, *map(_bytes_key, homes))
            self._keys[storage.name] = self._geometries.setdefault(geometry, len(self._geometries))
            with suppress(TooMuchWorkError):  # together they may drift; then one by one
                self._count(storage, homes, self._displaced(storage), together=True)
        key = (self._keys[storage.name], _bytes_key(view))
        if key not in self._found:
            if self._left <= 0:
                raise TooMuchWorkError(f"the budget of {BUDGET} runs that an audit has for this is spent")
            self._count(storage, homes, {key: view})
        names = (OUTSIDE, PADDING)
        return {names[k] if k < 2 else homes[k - 2].name: n for k, n in self._found[key].items()}

    def _displaced(self, storage: Storage) -> dict[tuple, View]:
        """Views of a storage, one of each form, about whose elements it will be asked what they hit."""
        wanted = {}
        for view, rightful in self.placed.values():
            right = self.right(view, rightful)
            for asked in (view, rightful) if right else (view,):
                key = (self._keys[storage.name], _bytes_key(asked))
                if right < view.num_elements and asked.storage == storage and key not in self._found:
                    wanted.setdefault(key, asked)
        return wanted

    def _count(self, storage: Storage, homes: Sequence[View], views: dict[tuple, View], together: bool = False) -> None:
        """Elements of each view by the number of what they hit: 0 outside, 1 padding, then the homes.

        The storage itself is an owner too, so that outside shows. What is counted one by one shares a budget.
        """
        if not views:
            return
        if storage.name not in self._home_lanes:
            self._home_lanes[storage.name] = [[interval(0, storage.nbytes)], *all_byte_lanes(homes)]
        owners = [*self._home_lanes[storage.name], *map(start_lanes, views.values())]
        light = len(homes) + 1
        found = [Counter() for _ in views]
        sweep = Sweep(owners, weights=[1] * light + [light + 1] * len(views), budget=BUDGET if together else self._left)
        try:
            regions = sweep.regions(light + 1)
        finally:
            self._left -= 0 if together else sweep.work + len(owners) * VISIT
        for region in regions:
            under = max((m for m in region.members if m < light), default=-1) + 1
            for member, count in zip(region.members, region.elements, strict=True):
                if member >= light:
                    found[member - light][under if region.members[0] == 0 else 0] += count
        self._found.update(zip(views, found, strict=True))


def misplaced(view: View, rightful: View, ground: Ground) -> Iterator[Finding]:
    """Elements that are not where ``rightful`` has them, and what they hit instead."""
    if view.shape != rightful.shape:
        raise ValueError(
            f"{view.name} has shape {view.shape} and its rightful map {rightful.shape}: they must be equal"
        )
    elsewhere = view.storage != rightful.storage
    cells = view.num_elements - ground.right(view, rightful)
    if not cells:
        return
    kind = "misplaced" if elsewhere or not ground.same_set(view, rightful) else "permuted"
    found, text, example = (), f"belongs in {rightful.storage.name}" if elsewhere else "", ()
    if ground.witnesses:
        lowest = view.lowest if elsewhere else _first_wrong(view, rightful)
        landed, meant = place(view, lowest), place(rightful, lowest)
        example = (landed, meant, *ground.place(landed.start_bytes, view.storage.name))
        try:
            found = ground.hits(view, rightful)
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


def _same_starts(view: View, rightful: View) -> bool:
    try:
        return all(len(region.members) == 2 for region in Sweep([start_lanes(view), start_lanes(rightful)]).regions(1))
    except TooMuchWorkError:
        return False
