"""The byte map: for each byte of a window of a storage, who owns it, who writes it, and what is in it.

A record, made from views and optionally from the live buffer. Text and figures are renderings of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvviz.memory.view import Storage, View

MAX_WINDOW_BYTES = 1 << 20
"""Largest window that is mapped byte by byte."""

STATES = ("right", "contested", "misplaced", "unreached", "unowned")
"""What a run of bytes can be:

* ``right``: written by its owner alone;
* ``contested``: two or more writers;
* ``misplaced``: one writer, who is not the owner;
* ``unreached``: it has an owner, and no writer's view reaches it;
* ``unowned``: padding; nobody owns or writes it.
"""


@dataclass(frozen=True)
class Part:
    """One element of one view: a scale, or all data bytes of one cell.

    ``layer`` and ``half`` ("K", "V" or "") are read off a name of the form ``layer 3 K scale``.
    """

    view: str
    role: str
    index: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def layer(self) -> int | None:
        """The layer's number, if the view's name starts with one."""
        words = self.view.split()
        return int(words[1]) if len(words) > 1 and words[0] == "layer" and words[1].isdecimal() else None

    @property
    def half(self) -> str:
        """``K``, ``V`` or nothing."""
        return next((word for word in self.view.split() if word in ("K", "V")), "")

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {i}" for axis, i in zip(self.axes, self.index, strict=True))
        return f"{self.view} [{where}]"


@dataclass(frozen=True)
class ByteRun:
    """Bytes ``[start, stop)`` of the storage that have one owner, the same writers and so one state."""

    start: int
    stop: int
    owner: Part | None
    writers: tuple[Part, ...]
    state: str

    def __str__(self) -> str:
        owner = str(self.owner) if self.owner else "nobody"
        strangers = [str(w) for w in self.writers if w != self.owner]
        more = f", and {len(strangers) - 2} more" if len(strangers) > 2 else ""
        text = f"[{self.start}, {self.stop}) {self.state}: {owner}"
        return text + (f" <- {'; '.join(strangers[:2])}{more}" if strangers else "")


@dataclass(frozen=True)
class ByteMap:
    """The runs of ``[start, stop)`` of one storage, in order and without gaps.

    ``values`` are the bytes themselves, or None where only the geometry is known.
    """

    storage: Storage
    start: int
    stop: int
    runs: tuple[ByteRun, ...]
    values: bytes | None = None

    def at(self, byte: int) -> ByteRun:
        """The run that holds a byte of the storage."""
        if not self.start <= byte < self.stop:
            raise ValueError(f"byte {byte} is outside the map's window [{self.start}, {self.stop})")
        return next(run for run in self.runs if run.start <= byte < run.stop)

    def count(self, state: str) -> int:
        """Bytes in one of :data:`STATES`."""
        return sum(run.stop - run.start for run in self.runs if run.state == state)


def byte_map(
    owners: Sequence[View],
    claims: Sequence[View] = (),
    *,
    window: tuple[int, int] | None = None,
    values=None,
) -> ByteMap:
    """Map a window of the one storage that ``owners`` lie in.

    Args:
        owners: who rightly owns what.
        claims: views as they were really carved; a claim writes in place of the owner of its name. Owners
            whose name no claim bears write where they are.
        window: byte range ``[start, stop)``; default: the whole storage.
        values: the storage's bytes (a uint8 tensor or array of its full length); only the window is read.

    Raises:
        ValueError: no views, views of several storages, or a window outside the storage or too large.
    """
    storage = _one_storage([*owners, *claims])
    start, stop = window if window is not None else (0, storage.nbytes)
    if not 0 <= start < stop <= storage.nbytes:
        raise ValueError(f"the window [{start}, {stop}) must lie in {storage.name} of {storage.nbytes} bytes")
    if stop - start > MAX_WINDOW_BYTES:
        raise ValueError(f"a window of {stop - start} bytes is too large to map (at most {MAX_WINDOW_BYTES})")
    claimed = {view.name for view in claims}
    writers = [view for view in owners if view.name not in claimed] + list(claims)
    owner_cells = _cells_by_byte(owners, start, stop)
    writer_cells = _cells_by_byte(writers, start, stop)
    table = np.concatenate([owner_cells, writer_cells])
    edges = np.flatnonzero((table[:, 1:] != table[:, :-1]).any(axis=0)) + 1
    bounds = [0, *edges.tolist(), stop - start]
    runs = tuple(
        _run(
            start + first, start + last, _parts(owners, owner_cells[:, first]), _parts(writers, writer_cells[:, first])
        )
        for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    )
    return ByteMap(storage, start, stop, runs, _read(values, storage, start, stop))


def _one_storage(views: Sequence[View]) -> Storage:
    storages = {view.storage for view in views}
    if len(storages) != 1:
        names = ", ".join(sorted(s.name for s in storages)) or "none"
        raise ValueError(f"a byte map shows one storage, and the {len(views)} views lie in {len(storages)}: {names}")
    return storages.pop()


def _cell_axes(view: View) -> int:
    """Axes that tell cells apart: all but a trailing one named ``byte``."""
    return len(view.shape) - (view.axes[-1:] == ("byte",))


def _cells_by_byte(views: Sequence[View], start: int, stop: int) -> np.ndarray:
    """For each view and byte of the window, the flat number of the cell that claims it, or -1: ``(views, bytes)``."""
    cells = np.full((len(views), stop - start), -1, np.int64)
    for row, view in zip(cells, views, strict=True):
        starts = view.starts.ravel()
        near = np.flatnonzero((starts + view.itemsize > start) & (starts < stop))
        width = int(np.prod(view.shape[_cell_axes(view) :], dtype=np.int64))
        for byte in range(view.itemsize):
            at = starts[near] + byte - start
            inside = (at >= 0) & (at < stop - start)
            row[at[inside]] = near[inside] // width
    return cells


def _parts(views: Sequence[View], cells: np.ndarray) -> tuple[Part, ...]:
    parts = []
    for view, cell in zip(views, cells.tolist(), strict=True):
        if cell >= 0:
            shape = view.shape[: _cell_axes(view)]
            index = tuple(int(i) for i in np.unravel_index(cell, shape)) if shape else ()
            axes = view.axes[: len(shape)] or tuple(f"axis {i}" for i in range(len(shape)))
            parts.append(Part(view.name, view.role, index, axes))
    return tuple(parts)


def _run(start: int, stop: int, owners: tuple[Part, ...], writers: tuple[Part, ...]) -> ByteRun:
    """Where data and scale both own a byte (cells without a tail), the data is named as the owner."""
    owner = min(owners, key=lambda part: part.role != "data", default=None)
    if len(writers) > 1:
        state = "contested"
    elif writers:
        state = "right" if writers[0] in owners else "misplaced"
    else:
        state = "unreached" if owner else "unowned"
    return ByteRun(start, stop, owner, writers, state)


def _read(values, storage: Storage, start: int, stop: int) -> bytes | None:
    if values is None or getattr(values, "is_meta", False):
        return None
    if len(values) != storage.nbytes:
        raise ValueError(f"values has {len(values)} bytes and {storage.name} has {storage.nbytes}")
    window = values[start:stop]
    return bytes(window.cpu().numpy() if hasattr(window, "cpu") else np.asarray(window, np.uint8))


@dataclass(frozen=True)
class Row:
    """One row of a drawn map: its first byte, whose row it is (or ""), and its runs, clipped to the row."""

    start: int
    label: str
    runs: tuple[ByteRun, ...]


def rows(record: ByteMap, row_bytes: int) -> tuple[Row, ...]:
    """Cut a map into rows of ``row_bytes``; the page size gives a row a page.

    Raises:
        ValueError: ``row_bytes`` below 1.
    """
    if row_bytes < 1:
        raise ValueError(f"row_bytes must be at least 1, not {row_bytes}")
    pieces: dict[int, list[ByteRun]] = {start: [] for start in range(record.start, record.stop, row_bytes)}
    for run in record.runs:
        first = run.start - (run.start - record.start) % row_bytes
        for start in range(first, run.stop, row_bytes):
            ends = (max(run.start, start), min(run.stop, start + row_bytes))
            pieces[start].append(ByteRun(*ends, run.owner, run.writers, run.state))
    return tuple(Row(start, _row_label(runs), tuple(runs)) for start, runs in pieces.items())


def _row_label(runs: list[ByteRun]) -> str:
    """``block 1 · layer 0`` where all owned bytes of a row belong to one block and layer."""
    owners = {(r.owner.index[0], r.owner.layer) for r in runs if r.owner and r.owner.axes[:1] == ("block",)}
    if len(owners) != 1:
        return ""
    block, layer = owners.pop()
    return f"block {block}" + ("" if layer is None else f" · layer {layer}")
