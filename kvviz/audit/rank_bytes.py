"""Says what each byte of a rank's blocks means, for example "K of token 5, head 2". A rank is one process.

``compare.py`` uses this file for both sides of a transfer. Words of this file:

- unit: the largest number of bytes that divides every start, step and length. Offsets and addresses count units.
- content: what a unit stands for in the whole model. Equal contents have the same number, the *code*, on every rank.
- offset: where a unit lies in block 0, counted from the start of the storage.
- place: the number of a unit among all units of one block, counted from 0.
- group: the views of one storage that have the same block stride.
- run axis: an axis whose elements are neighbours in memory and have neighbouring codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, prod

import numpy as np

from kvviz.audit.arguments import plain
from kvviz.audit.budget import TooMuchWorkError
from kvviz.audit.view import View

MAX_LISTED = 1 << 20
"""Largest number of blocks that a rank may list in any way. A rank with more blocks must list them in few ranges."""

MAX_RANGES = 1 << 10
"""Largest number of ranges for a rank with more than MAX_LISTED blocks."""


Key = tuple[str, int, int]
"""Name of a view, bytes of its elements, and number of tokens per element."""


@dataclass(frozen=True)
class Rank:
    """One process: its views, the part of the model that it holds, and its blocks.

    Every view needs an axis named ``block``. An axis named ``token`` counts the tokens of a block.

    Args:
        views: the views of the process.
        holds: for each axis, the numbers in the whole model. Example: ``{"head": (4, 5)}`` means that heads 0 and 1 of
            the rank are heads 4 and 5 of the model. An axis without an entry holds 0, 1, 2 and so on.
        blocks: ids of the blocks, in the order of the tokens. None means all blocks in order.
        world, place, interleave: decode context parallelism: ``world`` ranks share the tokens. Token i lies on the rank
            with ``place == i // interleave % world`` (vLLM 0.32.0).
    """

    views: tuple[View, ...]
    holds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    blocks: tuple[range, ...] | None = None
    world: int = 1
    place: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", {axis: plain(tuple(numbers)) for axis, numbers in self.holds.items()})
        for name in ("views", "blocks", "world", "place", "interleave"):
            object.__setattr__(self, name, plain(getattr(self, name)))


def tokens_of(size: int, world: int = 1, place: int = 0, interleave: int = 1) -> np.ndarray:
    """Return the tokens that the first block of a rank holds, in slot order: int64, shape (size,).

    The next block of the rank holds these numbers plus ``size * world``.

    Raises:
        ValueError: ``interleave`` does not divide ``size``, or ``place`` is not less than ``world``.
    """
    if interleave < 1 or size % interleave:
        raise ValueError(f"the interleave must divide the block size {size}, but it is {interleave}")
    if not 0 <= place < world:
        raise ValueError(f"place must be at least 0 and less than world {world}, but it is {place}")
    slots = np.arange(size)
    return slots // interleave * interleave * world + place * interleave + slots % interleave


def blocks_of(view: View) -> int:
    """Return the number of blocks of a view."""
    return _length(view, "block")


def _length(view: View, axis: str) -> int:
    return view.shape[view.axes.index(axis)] if axis in view.axes else 1


@dataclass(frozen=True)
class Content:
    """The contents of all views that have one name and one element size. Their bytes have the codes from ``first`` on.

    ``sizes`` are the sizes of ``axes`` in the whole model. The last axis changes fastest.
    """

    name: str
    itemsize: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    first: int


class RankBytes:
    """The bytes of one rank. Call :meth:`number_bytes` once, before the methods that come after it.

    Args:
        side: ``sender`` or ``receiver``.
        number: number of the rank on its side, counted from 0.

    Raises:
        ValueError: the rank has no views, a view has no axis ``block``, a listed block does not exist, a block is
            listed twice, or the numbers in ``holds`` do not fit a view.
    """

    def __init__(self, rank: Rank, side: str, number: int) -> None:
        self.rank, self.label = rank, f"{side} {number}"
        self.views = {view.name: view for view in rank.views}
        if not rank.views:
            raise ValueError(f"{self.label} has no views; give at least one")
        for view in rank.views:
            if "block" not in view.axes or len(set(view.axes)) < len(view.axes):
                raise ValueError(
                    f'{self.label}: {view.name} has the axes {view.axes}; one axis must have the name "block", and '
                    f"all names must be different"
                )
            if 0 in view.shape:
                raise ValueError(f"{self.label}: {view.name} of shape {view.shape} has no elements; leave it out")
        self.block_size = max(_length(view, "token") for view in rank.views)
        self.slots = tokens_of(self.block_size, rank.world, rank.place, rank.interleave)
        self.span = self.block_size * rank.world
        """Tokens from the first token of a block to the first token of the next block of this rank."""
        self.capacity = min(map(blocks_of, rank.views))
        given = (range(self.capacity),) if rank.blocks is None else rank.blocks
        self.blocks = tuple(ids for ids in given if ids)
        self.count = sum(map(len, self.blocks))
        self._check()

    def _check(self) -> None:
        axes = {axis for view in self.rank.views for axis in view.axes} - {"block", "token"}
        if unknown := sorted(self.rank.holds.keys() - axes):
            raise ValueError(
                f"{self.label} holds numbers of {unknown[0]!r}, but its views have no such axis; only the axes "
                f"{', '.join(sorted(axes))} can be held (blocks and tokens have fields of their own)"
            )
        for ids in self.blocks:
            low, high = sorted((ids[0], ids[-1]))
            if low < 0 or high >= self.capacity:
                raise ValueError(f"{self.label} lists blocks {low} to {high}, but it has {self.capacity} blocks")
        if self.count <= MAX_LISTED:
            self._ids = np.concatenate([np.arange(r.start, r.stop, r.step) for r in self.blocks] or [np.arange(0)])
            self._order = np.argsort(self._ids, kind="stable")
            self._sorted = self._ids[self._order]
            twice = np.flatnonzero(np.diff(self._sorted) == 0)
            if twice.size:
                raise ValueError(
                    f"{self.label} lists block {self._sorted[twice[0]]} twice; a block holds one part of the tokens"
                )
        elif len(self.blocks) > MAX_RANGES:
            raise TooMuchWorkError(
                f"{self.label} lists {self.count} blocks in {len(self.blocks)} ranges. Use at most {MAX_RANGES} ranges."
            )
        else:
            hulls = sorted(sorted((ids[0], ids[-1])) for ids in self.blocks)
            if any(one[1] >= two[0] for one, two in zip(hulls, hulls[1:], strict=False)):
                raise TooMuchWorkError(
                    f"{self.label} lists ranges of blocks that overlap; give ranges that do not overlap"
                )
        for view in self.rank.views:
            if self.block_size % _length(view, "token"):
                raise ValueError(
                    f"{self.label}: {view.name} has {_length(view, 'token')} tokens per block, "
                    f"which does not divide the block size {self.block_size}"
                )
            for axis, numbers in self.rank.holds.items():
                if axis in view.axes and _length(view, axis) != len(numbers):
                    raise ValueError(
                        f"{self.label} holds {len(numbers)} numbers of axis {axis}, "
                        f"but {view.name} has {_length(view, axis)}"
                    )

    def key(self, view: View) -> "Key":
        """Return what says whether two views hold the same content: name, element size, tokens per element.

        A scale for 32 tokens is not the scale of 16 tokens, also if both are float32. If an element stands for several
        tokens, the tokens that share a block must be the same too.
        """
        tokens = self.block_size // _length(view, "token")
        return view.name, view.itemsize, tokens if tokens == 1 else tokens * self.rank.world

    def held(self, view: View, axis: str) -> np.ndarray:
        """Return the numbers of one axis in the whole model. For tokens, return the numbers of the first block."""
        size = _length(view, axis)
        if axis == "token":
            return self.slots[:: self.block_size // size]
        return np.array(self.rank.holds.get(axis, range(size)), np.int64)

    def run_axis(self, view: View, content: Content) -> str | None:
        """Return the name of the run axis, or None if the view has no run axis."""
        axis = content.axes[-1] if content.axes else "token"
        plain = axis not in ("token", "block") and axis not in self.rank.holds
        return axis if plain and view.stride[view.axes.index(axis)] == 1 else None

    def lengths(self, contents: Mapping[Key, Content]) -> list[int]:
        """Return every start, step and length in bytes. The size of a unit must divide all of them."""
        found = []
        for view in self.rank.views:
            content = contents[self.key(view)]
            run = self.run_axis(view, content)
            steps = [s for a, n, s in zip(view.axes, view.shape, view.stride, strict=True) if n > 1 and a != run]
            found += [view.itemsize * number for number in (view.offset, *steps)] + [view.storage.nbytes]
            found += [view.itemsize * n for n in (_length(view, run), content.sizes[-1])] if run else [view.itemsize]
        return found

    def number_bytes(self, contents: Mapping[Key, Content], period: int, unit: int) -> None:
        """Make arrays about the units of one block. In each group, the units are sorted by offset.

        ``offset`` and ``code`` are those of the first block. In the next block of this rank, the code is larger by
        ``per_block``. ``view`` is the index of the view. ``groups`` says which places belong to a group.
        """
        self.unit = unit
        parts: dict[tuple[str, int], list[tuple[np.ndarray, ...]]] = {}
        for number, view in enumerate(self.rank.views):
            content = contents[self.key(view)]
            run = self.run_axis(view, content)
            sizes = dict(zip(content.axes, content.sizes, strict=True)) | {"token": period}
            per_number, code = {}, 1
            for axis in reversed(("token", *content.axes)):
                per_number[axis], code = code, code * sizes[axis]
            shape, offset, code = [], np.int64(view.offset * view.itemsize), np.int64(content.first)
            for axis, size, step in zip(view.axes, view.shape, view.stride, strict=True):
                if axis in ("block", run):
                    continue
                along = np.arange(size).reshape(-1, *[1] * len(shape))
                held = self.held(view, axis).reshape(along.shape)
                offset = offset + along * (step * view.itemsize)
                code = code + held * (per_number[axis] * view.itemsize)
                shape.insert(0, size)
            inner = np.arange(view.itemsize * (_length(view, run) if run else 1) // unit)
            shape = (*shape, inner.size)
            columns = [np.broadcast_to(np.asarray(x)[..., None] // unit + inner, shape).ravel() for x in (offset, code)]
            many, count = columns[0].size, self.step(view)
            columns += [np.full(many, self.span * per_number["token"] * view.itemsize // unit), np.full(many, number)]
            parts.setdefault((view.storage.name, count), []).append(tuple(columns))
        self.groups: dict[tuple[str, int], slice] = {}
        sorted_parts, start = [], 0
        for key, found in parts.items():
            columns = [np.concatenate(column) for column in zip(*found, strict=True)]
            order = np.argsort(columns[0], kind="stable")
            columns = [column[order] for column in columns]
            if shared := np.flatnonzero(np.diff(columns[0]) == 0).tolist():
                name = self.rank.views[columns[3][shared[0]]].name
                raise ValueError(f"{self.label}: two elements of {name} share a byte, so this byte has no one meaning")
            sorted_parts.append(columns)
            self.groups[key] = slice(start, start := start + order.size)
        self.offset, self.code, self.per_block, self.view = map(np.concatenate, zip(*sorted_parts, strict=True))
        self._residues: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}

    def step(self, view: View) -> int:
        """Return the block stride of a view in units. If the view has only one block, return a very large number."""
        if blocks_of(view) < 2:
            return 1 << 50
        return view.stride[view.axes.index("block")] * view.itemsize // self.unit

    def group(self, view: View) -> tuple[str, int]:
        """Return the key of the view's group: storage and block stride."""
        return view.storage.name, self.step(view)

    def start(self, view: View) -> int:
        """Return the offset of the view's first element."""
        return view.offset * view.itemsize // self.unit

    def own(self, group: tuple[str, int], offsets: np.ndarray) -> np.ndarray:
        """Return the place of the unit at each offset. If there is no unit, the place is -1."""
        part = self.groups[group]
        known = self.offset[part]
        place = np.minimum(np.searchsorted(known, offsets), known.size - 1)
        return np.where(known[place] == offsets, place + part.start, -1)

    def away(self, group: tuple[str, int], offsets: np.ndarray) -> int:
        """Return the largest distance from an offset to the nearest unit of its own block, in blocks."""
        known = self.offset[self.groups[group]]
        place = np.searchsorted(known, offsets)
        near = [np.abs(offsets - known[np.clip(place + n, 0, known.size - 1)]) for n in (-1, 0)]
        return int(np.minimum(*near).max(initial=0)) // abs(group[1]) + 1

    def at(self, storage: str, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the place and the block of each address of a storage. If no view has this byte, the place is -1."""
        found, block = np.full(addresses.shape, -1), np.full(addresses.shape, -1)
        for key, part in self.groups.items():
            if key[0] != storage:
                continue
            if key not in self._residues:
                residues = self.offset[part] % key[1]
                order = np.argsort(residues, kind="stable")
                self._residues[key] = residues[order], order + part.start
            residues, order = self._residues[key]
            first, last = (np.searchsorted(residues, addresses % key[1], side) for side in ("left", "right"))
            for n in range(int((last - first).max(initial=0))):
                place = order[np.minimum(first + n, order.size - 1)]
                candidate = (addresses - self.offset[place]) // key[1]
                limit = np.array([blocks_of(view) for view in self.rank.views])[self.view[place]]
                fits = (first + n < last) & (candidate >= 0) & (candidate < limit)
                found, block = np.where(fits, place, found), np.where(fits, candidate, block)
        return found, block

    def position(self, ids: np.ndarray) -> np.ndarray:
        """Return the position of each block id in the list of the rank's blocks. If it is not listed, return -1."""
        if self.count <= MAX_LISTED:
            if not self.count:
                return np.full(ids.shape, -1)
            near = np.minimum(np.searchsorted(self._sorted, ids), self.count - 1)
            return np.where(self._sorted[near] == ids, self._order[near], -1)
        found, before = np.full(ids.shape, -1), 0
        for listed in self.blocks:
            place, rest = np.divmod(ids - listed.start, listed.step)
            found = np.where((rest == 0) & (place >= 0) & (place < len(listed)), place + before, found)
            before += len(listed)
        return found

    def block_at(self, position: int) -> int:
        """Return the block id at a position of the list of the rank's blocks."""
        if self.count <= MAX_LISTED:
            return int(self._ids[position])
        for ids in self.blocks:
            if position < len(ids):
                return ids[position]
            position -= len(ids)
        raise IndexError(position)

    def text(self, place: int, block: int, contents: Mapping[Key, Content]) -> str:
        """Return a unit as text, for example ``sender 0 K [block 3, token 5, head 2 (head 6 of the model)]``."""
        view = self.rank.views[self.view[place]]
        run = self.run_axis(view, contents[self.key(view)])
        address = int(self.offset[place]) * self.unit - view.offset * view.itemsize
        index = []
        for axis, size, step in zip(view.axes, view.shape, view.stride, strict=True):
            index.append((axis, size, step * view.itemsize))
        chosen = dict.fromkeys(view.axes, 0)
        flat = self._flat(place, run, view)
        for axis, size, _ in reversed([entry for entry in index if entry[0] not in ("block", run)]):
            flat, chosen[axis] = divmod(flat, size)
        within = address - sum(chosen[axis] * step for axis, _, step in index if axis != "block")
        if run:
            chosen[run], within = divmod(within, view.itemsize)
        chosen["block"] = block
        words = []
        for axis in view.axes:
            held = self.rank.holds.get(axis)
            model = (
                f" ({axis} {held[chosen[axis]]} of the model)" if held and held[chosen[axis]] != chosen[axis] else ""
            )
            words.append(f"{axis} {chosen[axis]}{model}")
        return f"{self.label} {view.name} [{', '.join(words)}]" + (f" byte {within}" if within else "")

    def _flat(self, place: int, run: str | None, view: View) -> int:
        """Return the flat number of the element that holds a unit, over all axes but ``block`` and ``run``."""
        axes = [(n, s) for a, n, s in zip(view.axes, view.shape, view.stride, strict=True) if a not in ("block", run)]
        offsets = np.int64(0)
        for size, step in axes:
            offsets = np.add.outer(offsets, np.arange(size) * (step * view.itemsize))
        length = view.itemsize * (_length(view, run) if run else 1)
        wanted = int(self.offset[place]) * self.unit - view.offset * view.itemsize
        flat = offsets.ravel()
        return int(np.flatnonzero((flat <= wanted) & (wanted < flat + length))[0])


def contents_of(ranks: list[RankBytes], period: int) -> dict[Key, Content]:
    """Give a code to each content of a comparison. ``period`` is the number of tokens of one period.

    Raises:
        ValueError: views of one name have different axes.
    """
    found: dict[Key, Content] = {}
    first = 0
    for key in dict.fromkeys(rank.key(view) for rank in ranks for view in rank.rank.views):
        views = [(rank, view) for rank in ranks for view in rank.rank.views if rank.key(view) == key]
        axes = views[0][1].axes
        for rank, view in views:
            if set(view.axes) != set(axes):
                raise ValueError(
                    f"{key[0]} has the axes {axes} at {views[0][0].label} and {view.axes} at {rank.label}; "
                    "give the axes of both the same names"
                )
        inner = tuple(axis for axis in axes if axis not in ("block", "token"))
        sizes = tuple(max(int(rank.held(view, axis).max(initial=0)) + 1 for rank, view in views) for axis in inner)
        found[key] = Content(*key[:2], inner, sizes, first)
        first += period * prod(sizes) * key[1]
    return found


def common_unit(ranks: list[RankBytes], contents: Mapping[Key, Content], more: list[int]) -> int:
    """Return the largest number of bytes that divides every start, step and length, and all numbers in ``more``."""
    return (
        gcd(*more, *(n for rank in ranks for n in rank.lengths(contents)), *(c.first for c in contents.values())) or 1
    )
