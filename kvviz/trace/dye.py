"""Follows bytes through a mover: each cell is filled with its own coordinates, and read where it arrives.

Example::

    dyed = Dye({"prefill": source_tensors, "decode": target_tensors})
    print(dyed.carry(lambda number: send(), "decode", [Move("prefill", blocks={3: 7})]))

A checksum says that bytes arrived intact. A dye also says whose bytes they are.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvviz.audit.arguments import one_of
from kvviz.audit.findings import counted
from kvviz.audit.view import View
from kvviz.show.byte_map import MAX_WINDOW_BYTES
from kvviz.show.live_map import MapView
from kvviz.trace.memory import Memory, memory_of, where
from kvviz.trace.palette import NOBODY, Palette, Swatch
from kvviz.trace.watch import frames_map

KINDS = {
    "permuted": "bytes of this transfer, at the place of other bytes",
    "truncated": "only the first bytes of the cell arrived",
    "duplicated": "bytes that also arrived elsewhere",
    "foreign": "bytes that do not belong to this transfer, or that show no cell",
    "stale": "the bytes from before the transfer",
}
"""What can be wrong with a cell after a transfer, with the meaning."""
MOST_GROUPS = 12
"""The most groups in the text of an arrival."""


@dataclass(frozen=True)
class Move:
    """What a mover must do: copy blocks of one process.

    Attributes:
        source: name of the process from which the bytes come.
        blocks: for each block id of the source, the block id of the target.
        heads: for each head of the source, the head of the target. Default: all heads stay.
        views: for each view of the source, the view of the target. Default: all views that both have.
    """

    source: str
    blocks: Mapping[int, int]
    heads: Mapping[int, int] | None = None
    views: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Group:
    """Wrong cells of one block, with equal kind, and from one block of one process.

    Attributes:
        kind: a key of :data:`KINDS`.
        views: names of the views of the receiver that have these cells.
        target, source: the first wrong cell, and the cell whose bytes it has. Both with the name of the process.
        wanted: the cell whose bytes should be there.
        cells, nbytes: number of wrong cells, and of wrong bytes.
    """

    kind: str
    views: tuple[str, ...]
    target: str
    source: str
    wanted: str
    cells: int
    nbytes: int

    def __str__(self) -> str:
        what = f"{self.kind}: {counted(self.cells, 'cell')} of {counted(len(self.views), 'view')}, {self.nbytes} bytes"
        return f"{what}. First: {self.target} has {self.source}, and should have {self.wanted}"


@dataclass(frozen=True, eq=False)
class Arrival:
    """What arrived at a process.

    Attributes:
        process: name of the process.
        groups: everything that is wrong, by kind and block.
        num_marks, mark_bytes, passes: marks that were read, bytes of a mark, and passes.
        moved_bytes: bytes that had to arrive.
        seconds: time of all passes, with dyeing and reading.
        views: the views through which the bytes were read.
        wrong: for each storage, the first byte of each wrong mark, and the number of its kind (1 is ``permuted``).
    """

    process: str
    groups: tuple[Group, ...]
    num_marks: int
    mark_bytes: int
    passes: int
    moved_bytes: int
    seconds: float
    views: tuple[View, ...]
    wrong: dict[str, tuple[np.ndarray, np.ndarray]]

    @property
    def clean(self) -> bool:
        """Return True if each cell has the bytes that it should have."""
        return not self.groups

    def __str__(self) -> str:
        read = f"{self.num_marks * self.mark_bytes} bytes of {self.process} were read in {self.passes} passes"
        if self.clean:
            return f"clean: {read}, and {self.moved_bytes} bytes arrived where they belong"
        lines = [f"{counted(sum(one.cells for one in self.groups), 'cell')} wrong: {read}"]
        lines += [f"  {one}" for one in self.groups[:MOST_GROUPS]]
        more = len(self.groups) - MOST_GROUPS
        return "\n".join([*lines, *([f"  {more} more groups"] if more > 0 else [])])

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        names = ("process", "num_marks", "mark_bytes", "passes", "moved_bytes", "seconds")
        return {name: getattr(self, name) for name in names} | {"groups": [vars(one) for one in self.groups]}

    def map(self, storage: str | None = None, window: tuple[int, int] | None = None, row_bytes: int = 64) -> MapView:
        """Return a live map of the target with one frame per kind. A wrong byte is 255 in the frame of its kind."""
        name = storage or next(iter(self.wrong), self.views[0].storage.name)
        size = next(view.storage.nbytes for view in self.views if view.storage.name == name)
        start, stop = window or (0, min(size, MAX_WINDOW_BYTES))
        starts, kinds = self.wrong.get(name, (np.zeros(0, np.int64),) * 2)
        frames = []
        for number, kind in enumerate(KINDS, 1):
            at = (starts[kinds == number][:, None] + np.arange(self.mark_bytes)).ravel() - start
            plane = np.zeros(stop - start, np.uint8)
            plane[at[(at >= 0) & (at < len(plane))]] = 255
            frames.append((kind, plane.tobytes()))
        return frames_map(self.views, name, (start, stop), np.zeros(stop - start, np.uint8), frames, row_bytes)


class Dye:
    """Dyes the caches of several processes, and checks what a mover does with the bytes.

    Args:
        processes: for each name of a process, its tensors by name, or a Memory. If the cache is in another process,
            give only its views. That process makes the same :class:`~kvviz.trace.palette.Palette`, and paints.
        mark_bytes: bytes of a mark, see Palette.

    Raises:
        ValueError: the memory cannot be dyed. For example, it is read-only, or two views of a process share a byte.
    """

    def __init__(self, processes: Mapping[str, Any], mark_bytes: int | None = None) -> None:
        here = {name: given for name, given in processes.items() if isinstance(given, Mapping | Memory)}
        self.memories = {name: memory_of(given) for name, given in here.items()}
        for memory in self.memories.values():
            memory.check_writable()
        views = {name: self.memories[name].views if name in here else tuple(given) for name, given in processes.items()}
        for view in (view for mine in views.values() for view in mine):
            if "block" not in view.axes:
                raise ValueError(f"{view.name} has the axes {view.axes}: one of them must have the name 'block'")
        self.palette = Palette(views, mark_bytes)

    def carry(
        self,
        mover: Callable[[int], object],
        to: str,
        moves: Sequence[Move],
        *,
        limit_s: float | None = 600.0,
        through: Sequence[View] | None = None,
    ) -> Arrival:
        """Dye all caches of this process, call the mover, and say what arrived. Then restore all bytes.

        Args:
            mover: a function with one argument, the number of the pass. In each pass, it must move the same bytes.
            to: the name of the process that receives.
            moves: what the mover must do. All other cells must stay.
            limit_s: the most seconds for one call of the mover, which then runs in a thread. None: no limit, no thread.
            through: views of the receiver, with names and shapes of its views. Default: the dyed views.

        Raises:
            ValueError: a move names an unknown process, view, block or head.
            TimeoutError: the mover did not return. The bytes are restored, but the mover may still write.
        """
        memory = self.memories[one_of("to", to, self.memories)]
        mine = list(self.palette.swatches[to].values())
        read = _read_through(self.palette, mine, through)
        wanted = self._wanted(to, moves)
        begin, parts = time.perf_counter(), [[] for _ in mine]
        saved = {name: one.copy() for name, one in self.memories.items()}
        try:
            for number in range(self.palette.passes):
                for name, one in self.memories.items():
                    self.palette.paint(name, one, number)
                _call(mover, number, self.palette.passes, limit_s)
                memory.synchronise()
                for one, found in zip(read, parts, strict=True):
                    found.append(self.palette.read(one, memory).copy())
        finally:
            for name, one in self.memories.items():
                one.restore(saved[name])
        found = np.concatenate([self.palette.numbers(bytes_) for bytes_ in parts])
        return self._judge(to, read, found, wanted, time.perf_counter() - begin)

    def _wanted(self, to: str, moves: Sequence[Move]) -> np.ndarray:
        """Return for each mark of the receiver the number that it must show after the transfer."""
        mine = self.palette.swatches[to]
        first = next(iter(mine.values())).first
        wanted = np.arange(first, first + sum(one.count for one in mine.values()))
        for move in moves:
            theirs = self.palette.swatches[one_of("the source of a move", move.source, self.palette.swatches)]
            pairs = move.views or {name: name for name in theirs if name in mine}
            if not pairs:
                raise ValueError(f"{move.source} and {to} have no view of the same name: give Move(views=...)")
            for source, target in pairs.items():
                a = theirs[one_of(f"view of {move.source}", source, theirs)]
                b = mine[one_of(f"view of {to}", target, mine)]
                rows, columns = _axes_of(move, a, b)
                numbers = np.arange(a.first, a.first + a.count).reshape(a.shape)[np.ix_(*rows)]
                wanted[b.first - first : b.first - first + b.count].reshape(b.shape)[np.ix_(*columns)] = numbers
        return wanted

    def _judge(self, to: str, read: Sequence[Swatch], found: np.ndarray, wanted: np.ndarray, seconds: float) -> Arrival:
        own = np.arange(read[0].first, read[0].first + len(found))
        bad = np.flatnonzero(found != wanted)
        kinds = np.zeros(len(found), np.int8)
        number = {kind: at for at, kind in enumerate(KINDS, 1)}
        if len(bad):
            known = np.isin(found[bad], wanted)
            times = np.unique(found[found >= 0], return_counts=True)
            often = np.isin(found[bad], times[0][times[1] > 1])
            kinds[bad] = np.where(known, np.where(often, number["duplicated"], number["permuted"]), number["foreign"])
            kinds[bad[found[bad] == own[bad]]] = number["stale"]
            self._mark_truncated(read, kinds, number)
        groups = self._groups(read, found, wanted, kinds)
        wrong = {}
        for name in {one.view.storage.name for one in read}:
            places = [
                (one, np.flatnonzero(kinds[self._span(one, own[0])])) for one in read if one.view.storage.name == name
            ]
            starts = np.concatenate([_starts(one)[at] for one, at in places])
            if len(starts):
                wrong[name] = starts, np.concatenate([kinds[self._span(one, own[0])][at] for one, at in places])
        size = self.palette.mark_bytes
        moved = int((wanted != own).sum()) * size
        views = tuple(one.view for one in read)
        return Arrival(to, groups, len(found), size, self.palette.passes, moved, seconds, views, wrong)

    def _span(self, one: Swatch, first: int) -> slice:
        return slice(one.first - first, one.first - first + one.count)

    def _mark_truncated(self, read: Sequence[Swatch], kinds: np.ndarray, number: Mapping[str, int]) -> None:
        """Change ``stale`` to ``truncated`` in cells whose first marks are right and whose last marks are stale."""
        for one in read:
            mine = kinds[self._span(one, read[0].first)].reshape(-1, one.per_cell)
            stale = mine == number["stale"]
            tail = (stale[:, 1:] >= stale[:, :-1]).all(1) & (stale | (mine == 0)).all(1)
            cut = tail & stale.any(1) & ~stale.all(1)
            mine[cut[:, None] & stale] = number["truncated"]

    def _groups(
        self, read: Sequence[Swatch], found: np.ndarray, wanted: np.ndarray, kinds: np.ndarray
    ) -> tuple[Group, ...]:
        """Group the wrong marks by kind, by target block, and by process and block of their origin.

        Marks are in different groups if their origins are different numbers of views away.
        """
        bad = np.flatnonzero(kinds)
        if not len(bad):
            return ()
        view, block, _ = self._origin(bad + read[0].first)
        source, source_block, process = self._origin(found[bad])
        columns = (kinds[bad], block, process, source_block, source - view)
        _, firsts, of = np.unique(np.stack(columns, 1), axis=0, return_index=True, return_inverse=True)
        cell = np.concatenate([np.arange(one.count) // one.per_cell + one.first for one in read])[bad]
        groups = []
        for group in np.argsort(firsts):
            first, members = bad[firsts[group]], of.ravel() == group
            places = tuple(map(self.name_of, (first + read[0].first, found[first], wanted[first])))
            names = tuple(self.palette.all[at].view.name for at in np.unique(view[members]))
            nbytes = int(members.sum()) * self.palette.mark_bytes
            groups.append(Group(list(KINDS)[kinds[first] - 1], names, *places, len(np.unique(cell[members])), nbytes))
        return tuple(groups)

    def _origin(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each number its view and its process, as numbers, and its index along the axis ``block``."""
        which, blocks = self.palette.swatch_of(numbers), np.full(len(numbers), -1)
        processes, process = list(self.palette.swatches), np.full(len(numbers), -1)
        for at in np.unique(which[which >= 0]):
            one, here = self.palette.all[at], which == at
            blocks[here] = np.unravel_index(numbers[here] - one.first, one.shape)[one.view.axes.index("block")]
            process[here] = processes.index(one.process)
        return which, blocks, process

    def name_of(self, number: int) -> str:
        """Return the process, the view, the cell and the mark of a number."""
        if number == NOBODY:
            return "bytes that show no cell"
        one = self.palette.all[int(self.palette.swatch_of(np.array([number]))[0])]
        cell, mark = divmod(int(number) - one.first, one.per_cell)
        text = f"{one.process}: {where(one.view, cell)}"
        return text + (f", mark {mark}" if mark else "")


def _read_through(palette: Palette, mine: Sequence[Swatch], through: Sequence[View] | None) -> list[Swatch]:
    views = {view.name: view for view in through or ()}
    if unknown := views.keys() - {one.view.name for one in mine}:
        raise ValueError(f"through has the view {min(unknown)!r}, but no dyed view of the receiver has this name")
    read = []
    for one in mine:
        view = views.get(one.view.name, one.view)
        read.append(palette.swatch(one.process, view, one.first))
        if read[-1].shape != one.shape:
            raise ValueError(
                f"{view.name} is read with shape {view.shape}, but dyed with {one.view.shape}: give equal shapes"
            )
    return read


def _axes_of(move: Move, a: Swatch, b: Swatch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return for each axis the indices of the source, and the indices of the target to which they go."""
    rows, columns = [], []
    if len(a.shape) != len(b.shape):
        raise ValueError(
            f"{a.view.name} has shape {a.view.shape}, but {b.view.name} has {b.view.shape}: they need equal axes"
        )
    for axis, (size, there) in enumerate(zip(a.shape, b.shape, strict=True)):
        name = a.view.axes[axis] if axis < len(a.view.axes) else ""
        moved = {"block": move.blocks, "head": move.heads}.get(name)
        if moved is None and size != there:
            raise ValueError(
                f"axis {axis} ({name or 'no name'}) has {size} marks in {a.view.name} of {a.process}, but {there} in "
                f"{b.view.name} of {b.process}: say in Move(heads=...) which heads go where"
            )
        pairs = list(moved.items()) if moved is not None else [(i, i) for i in range(size)]
        for i, j in pairs:
            if not (0 <= i < size and 0 <= j < there):
                raise ValueError(f"a move takes {name} {i} to {name} {j}, but there are {size} and {there}")
        rows.append(np.array([i for i, _ in pairs], int))
        columns.append(np.array([j for _, j in pairs], int))
    return rows, columns


def _starts(one: Swatch) -> np.ndarray:
    """Return the first byte of each mark."""
    starts = np.full(1, one.view.offset * one.view.itemsize)
    for size, step in zip(one.shape, one.steps, strict=True):
        starts = (starts[:, None] + np.arange(size) * step).ravel()
    return starts


def _call(mover: Callable[[int], object], number: int, passes: int, limit_s: float | None) -> None:
    """Call the mover in a thread, and wait at most ``limit_s`` seconds."""
    if limit_s is None:
        mover(number)
        return
    failed: list[BaseException] = []

    def work() -> None:
        try:
            mover(number)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True, name="mover")
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(
            f"the mover did not return within {limit_s:g} s, in pass {number + 1} of {passes}. The bytes were restored "
            "then, but the mover still runs and may write into them: end this process before you use the cache"
        )
    if failed:
        failed[0].add_note(f"kvviz: the mover failed in pass {number + 1} of {passes}. All dyed bytes were restored.")
        raise failed[0]
