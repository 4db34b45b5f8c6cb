"""The audit: given views and what is claimed of them, which bytes are in dispute.

It knows none of our layouts, so it can judge anybody's. Every view is checked against its storage and
against itself; claims say what else must hold. Answers are :class:`Finding` records with exact counts.
Addresses are listed one by one here, which is right for notebook-sized buffers.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvviz.memory.view import Storage, View

OUTSIDE, PADDING = "outside the storage", "padding"


@dataclass(frozen=True)
class Disjoint:
    """Claim: no two of these views (by name) share a byte."""

    views: tuple[str, ...]


@dataclass(frozen=True)
class BelongsAt:
    """Claim: each element of ``view`` (a name) starts where the same element of ``rightful`` starts."""

    view: str
    rightful: View


Claim = Disjoint | BelongsAt


@dataclass(frozen=True)
class Place:
    """One element of one view, and its byte range ``[start_bytes, stop_bytes)`` in the storage."""

    view: str
    index: tuple[int, ...]
    text: str
    start_bytes: int
    stop_bytes: int


@dataclass(frozen=True)
class Finding:
    """One disagreement.

    Attributes:
        kind: ``collision``, ``misplaced``, ``permuted``, ``out_of_bounds`` or ``self_overlap``.
        views: the names involved, in the order in which they were given.
        storage: the storage's name.
        cells: index tuples concerned, over all the views involved.
        bytes: distinct bytes concerned.
        example: the first place in the storage; every claimant of it (collision), or where the element is
            and where it belongs (misplaced, permuted).
        hits: for misplaced elements, what lies under their lowest byte instead, with counts.
    """

    kind: str
    views: tuple[str, ...]
    storage: str
    cells: int
    bytes: int
    example: tuple[Place, ...]
    hits: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        names = (
            self.views if len(self.views) <= 4 else (*self.views[:2], f"... {len(self.views) - 3} more", self.views[-1])
        )
        lines = [f"{self.kind}: {', '.join(names)}: {self.cells} cells, {self.bytes} bytes of {self.storage}"]
        lines += [f"  first: {p.text} at bytes [{p.start_bytes}, {p.stop_bytes})" for p in self.example[:4]]
        lines += [f"  lands on {what}: {count}" for what, count in self.hits]
        return "\n".join(lines)


@dataclass(frozen=True)
class Audit:
    """All findings, and in words what was checked."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(f for f in self.findings if f.kind == kind)

    def __str__(self) -> str:
        checked = "checked: " + "; ".join(self.checked)
        if self.clean:
            return f"clean: the layout holds, look at ordering\n{checked}"
        return "\n".join([*map(str, self.findings), checked])


def audit(views: Sequence[View], claims: Sequence[Claim] = ()) -> Audit:
    """Check every view against its storage and itself, then every claim.

    Raises:
        ValueError: two views have one name, or a claim names a view that is not given or of another shape.
    """
    named = {view.name: view for view in views}
    if len(named) != len(views):
        double = [name for name, count in Counter(v.name for v in views).items() if count > 1]
        raise ValueError(f"view names must differ: {', '.join(double)} given more than once")
    findings, checked = [], [f"{len(views)} views within their storages, none on itself"]
    for view in views:
        findings += [*_out_of_bounds(view), *_self_overlap(view)]
    for claim in claims:
        if isinstance(claim, Disjoint):
            findings += _collisions([_named(named, name) for name in claim.views])
            checked.append(f"{len(claim.views)} views disjoint")
    placed = [claim for claim in claims if isinstance(claim, BelongsAt)]
    if placed:
        atlas = _Atlas([*_at_home(views, placed), *(claim.rightful for claim in placed)])
        for claim in placed:
            findings += _misplaced(_named(named, claim.view), claim.rightful, atlas)
        checked.append(f"{len(placed)} views at their rightful places")
    return Audit(tuple(findings), tuple(checked))


def audit_scales(owners: Sequence[View], claims: Sequence[View]) -> Audit:
    """The audit of this kit's story: ``claims`` (scale views as carved) against ``owners`` (who owns what).

    Data and claimed scales must be disjoint, and each claimed view belongs where the owner of its name is.
    """
    homes = {view.name: view for view in owners}
    taken = {view.name for view in claims}
    views = [view for view in owners if view.name not in taken] + list(claims)
    return audit(
        views, [Disjoint(tuple(v.name for v in views)), *(BelongsAt(v.name, _named(homes, v.name)) for v in claims)]
    )


def _named(named: dict[str, View], name: str) -> View:
    if name not in named:
        raise ValueError(f"a claim names the view {name!r}, which is not among the {len(named)} views given")
    return named[name]


def _at_home(views: Sequence[View], placed: Sequence[BelongsAt]) -> list[View]:
    claimed = {claim.view for claim in placed}
    return [view for view in views if view.name not in claimed]


def _place(view: View, element: int) -> Place:
    index, start = view.index(element), int(view.starts.flat[element])
    return Place(view.name, index, view.where(index), start, start + view.itemsize)


def _out_of_bounds(view: View) -> Iterator[Finding]:
    starts = view.starts.ravel()
    outside = (starts < 0) | (starts + view.itemsize > view.storage.nbytes)
    if outside.any():
        reached = view.bytes_of(starts[outside])
        reached = np.unique(reached[(reached < 0) | (reached >= view.storage.nbytes)])
        first = _place(view, int(np.flatnonzero(outside)[np.argmin(starts[outside])]))
        yield Finding("out_of_bounds", (view.name,), view.storage.name, int(outside.sum()), len(reached), (first,))


def _nested(view: View) -> bool:
    """True when each stride steps over everything inside it, so that no two elements can meet."""
    reach = 1
    for step, size in sorted((abs(step), size) for step, size in zip(view.stride, view.shape, strict=True) if size > 1):
        if step < reach:
            return False
        reach = step * (size - 1) + reach
    return True


def _self_overlap(view: View) -> Iterator[Finding]:
    if _nested(view):
        return
    found, first, counts = np.unique(view.all_bytes, return_index=True, return_counts=True)
    shared = counts > 1
    if shared.any():
        touching = np.isin(view.bytes_of(view.starts.ravel()), found[shared]).any(axis=1)
        example = _place(view, int(first[shared][0]) // view.itemsize)
        yield Finding(
            "self_overlap", (view.name,), view.storage.name, int(touching.sum()), int(shared.sum()), (example,)
        )


def _collisions(views: Sequence[View]) -> Iterator[Finding]:
    by_storage: dict[str, list[View]] = {}
    for view in views:
        by_storage.setdefault(view.storage.name, []).append(view)
    for group in by_storage.values():
        yield from _collisions_in_storage(group)


def _collisions_in_storage(views: list[View]) -> Iterator[Finding]:
    """One finding for each set of claimants that share bytes."""
    size = max(view.storage.nbytes for view in views)
    claimed = [_within(view.all_bytes, size) for view in views]
    claimants = np.zeros(size, np.int32)
    for bytes_ in claimed:
        claimants[bytes_] += 1  # once a view, even where a view meets itself
    shared = np.flatnonzero(claimants > 1)
    if not len(shared):
        return
    who = np.stack([_member(size, bytes_)[shared] for bytes_ in claimed])
    sets, which = np.unique(who, axis=1, return_inverse=True)
    which = which.ravel()  # numpy 2.0 gives it another axis
    for number in sorted(range(sets.shape[1]), key=lambda n: int(shared[which == n][0])):
        disputed = shared[which == number]
        members = [view for view, inside in zip(views, sets[:, number], strict=True) if inside]
        cells = [np.isin(v.bytes_of(v.starts.ravel()), disputed, kind="table").any(axis=1) for v in members]
        example = tuple(_claimant(v, int(disputed[0])) for v in members)
        names = tuple(v.name for v in members)
        total = int(sum(hit.sum() for hit in cells))
        yield Finding("collision", names, members[0].storage.name, total, len(disputed), example)


def _within(bytes_: np.ndarray, size: int) -> np.ndarray:
    return bytes_[(bytes_ >= 0) & (bytes_ < size)]


def _member(size: int, bytes_: np.ndarray) -> np.ndarray:
    member = np.zeros(size, bool)
    member[bytes_] = True
    return member


def _claimant(view: View, byte: int) -> Place:
    starts = view.starts.ravel()
    return _place(view, int(np.flatnonzero((starts <= byte) & (byte < starts + view.itemsize))[0]))


class _Atlas:
    """Looks up which element of which view, if any, owns a byte of a storage."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views
        self._owners: dict[str, np.ndarray] = {}

    def _owner(self, storage: Storage) -> np.ndarray:
        """The number of the owning view for each byte of a storage, -1 for nobody; data goes before scales."""
        if storage.name not in self._owners:
            owner = np.full(storage.nbytes, -1, np.int32)
            mine = [(number, v) for number, v in enumerate(self._views) if v.storage.name == storage.name]
            for number, view in sorted(mine, key=lambda pair: pair[1].role == "data"):
                inside = view.all_bytes
                owner[inside[(inside >= 0) & (inside < storage.nbytes)]] = number
            self._owners[storage.name] = owner
        return self._owners[storage.name]

    def what(self, view: View, starts: np.ndarray) -> tuple[tuple[str, int], ...]:
        """What ``starts`` (bytes in the view's storage) hit: counts by kind of place, most frequent first."""
        owner = self._owner(view.storage)
        inside = (starts >= 0) & (starts < len(owner))
        hits = Counter({OUTSIDE: int((~inside).sum())})
        numbers, counts = np.unique(owner[starts[inside]], return_counts=True)
        for number, count in zip(numbers, counts, strict=True):
            hits[self._describe(view, int(number))] += int(count)
        return tuple((what, count) for what, count in hits.most_common() if count)

    def _describe(self, view: View, number: int) -> str:
        if number < 0:
            return PADDING
        owner = self._views[number]
        return f"{owner.name}, at another index" if owner.name == view.name else owner.name


def _misplaced(view: View, rightful: View, atlas: _Atlas) -> Iterator[Finding]:
    if view.shape != rightful.shape:
        raise ValueError(
            f"{view.name} has shape {view.shape} and its rightful map {rightful.shape}: they must be equal"
        )
    starts, meant = view.starts.ravel(), rightful.starts.ravel()
    wrong = starts != meant
    if view.storage != rightful.storage:
        wrong[:] = True
    if not wrong.any():
        return
    first = int(np.flatnonzero(wrong)[np.argmin(starts[wrong])])
    same_set = view.storage == rightful.storage and np.array_equal(np.sort(starts), np.sort(meant))
    yield Finding(
        "permuted" if same_set else "misplaced",
        (view.name,),
        view.storage.name,
        int(wrong.sum()),
        len(np.unique(view.bytes_of(starts[wrong]))),
        (_place(view, first), _place(rightful, first)),
        atlas.what(view, starts[wrong]),
    )
