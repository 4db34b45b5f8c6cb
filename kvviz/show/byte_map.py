"""The byte map: for each byte of a window of a storage, who owns it, who writes it, and what is in it.

A record, made from views and optionally from the live buffer. Text and figures are renderings of it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvviz.audit.view import MAX_ELEMENTS, Storage, View

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


def layer_of(name: str) -> int | None:
    """The layer's number in a view's name of the form ``layer 3 K scale``, or None."""
    words = name.split()
    return int(words[1]) if len(words) > 1 and words[0] == "layer" and words[1].isdecimal() else None


def half_of(name: str) -> str:
    """``K``, ``V`` or nothing: which half a view's name speaks of."""
    return next((word for word in name.split() if word in ("K", "V")), "")


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
        return layer_of(self.view)

    @property
    def half(self) -> str:
        """``K``, ``V`` or nothing."""
        return half_of(self.view)

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {i}" for axis, i in zip(self.axes, self.index, strict=True))
        return f"{self.view} [{where}]"


@dataclass(frozen=True)
class ByteRange:
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
    """The byte ranges of ``[start, stop)`` of one storage, in order and without gaps.

    Attributes:
        values: the bytes themselves, or None where only the geometry is known.
        owners, writers: the views of this storage that the runs come from.
        beneath: views that count as owners and writers of bytes that none of those has.
        kv_cache_dtype: the mode that the bytes are decoded in, or None.
    """

    storage: Storage
    start: int
    stop: int
    ranges: tuple[ByteRange, ...]
    values: bytes | None = None
    owners: tuple[View, ...] = ()
    writers: tuple[View, ...] = ()
    kv_cache_dtype: str | None = None
    beneath: tuple[View, ...] = ()

    def at(self, byte: int) -> ByteRange:
        """The run that holds a byte of the storage."""
        if not self.start <= byte < self.stop:
            raise ValueError(f"byte {byte} is outside the map's window [{self.start}, {self.stop})")
        return self.ranges[bisect_right(self.ranges, byte, key=lambda run: run.start) - 1]

    def value(self, start: int, size: int) -> bytes | None:
        """``size`` bytes from ``start`` on, or None where they are not all known."""
        if self.values is None or not self.start <= start <= start + size <= self.stop:
            return None
        return self.values[start - self.start : start - self.start + size]

    def count(self, state: str) -> int:
        """Bytes in one of :data:`STATES`."""
        return sum(run.stop - run.start for run in self.ranges if run.state == state)


def byte_map(
    owners: Sequence[View],
    claims: Sequence[View] = (),
    *,
    window: tuple[int, int] | None = None,
    storage: Storage | None = None,
    values=None,
    kv_cache_dtype: str | None = None,
) -> ByteMap:
    """Map a window of one storage.

    Args:
        owners: who rightly owns what.
        claims: views as they were really carved; a claim writes in place of the owner of its name. Owners
            whose name no claim bears write where they are.
        window: byte range ``[start, stop)``; default: the whole storage.
        storage: the one to show; default: the one that all views lie in.
        values: the storage's bytes (a uint8 tensor or array of its full length); only the window is read.
        kv_cache_dtype: one of ``kvviz.cache.modes.MODES``, to say what the values mean.

    Raises:
        ValueError: no views, views of several storages, or a window outside the storage or too large.
    """
    storage = storage if storage is not None else _one_storage([*owners, *claims])
    if not storage.nbytes:
        raise ValueError(f"{storage.name} has no bytes: there is nothing to map")
    start, stop = window if window is not None else (0, storage.nbytes)
    if not 0 <= start < stop <= storage.nbytes:
        raise ValueError(f"the window [{start}, {stop}) must lie in {storage.name} of {storage.nbytes} bytes")
    if stop - start > MAX_WINDOW_BYTES:
        raise ValueError(f"a window of {stop - start} bytes is too large to map (at most {MAX_WINDOW_BYTES})")
    claimed = {view.name for view in claims}
    writers = [view for view in owners if view.name not in claimed] + list(claims)
    owners, writers = ([view for view in views if view.storage == storage] for views in (owners, writers))
    (owned, owner_cells), (written, writer_cells) = (_cells_by_byte(v, start, stop) for v in (owners, writers))
    edges = np.zeros(stop - start, bool)
    for cells in (*owner_cells, *writer_cells):
        edges[1:] |= cells[1:] != cells[:-1]
    bounds = [0, *np.flatnonzero(edges).tolist(), stop - start]
    runs = tuple(
        _run(start + first, start + last, _parts(owned, owner_cells[:, first]), _parts(written, writer_cells[:, first]))
        for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    )
    read = _read(values, storage, start, stop)
    return ByteMap(storage, start, stop, runs, read, tuple(owners), tuple(writers), kv_cache_dtype)


def byte_maps(
    owners: Sequence[View],
    claims: Sequence[View] = (),
    *,
    most_bytes: int = MAX_WINDOW_BYTES,
    values: Mapping[str, object] | None = None,
    kv_cache_dtype: str | None = None,
) -> dict[str, ByteMap]:
    """A map for each storage that the views lie in, by its name: its first ``most_bytes`` bytes.

    Args:
        values: the bytes of storages, by name.

    Raises:
        ValueError: no views, or storages without bytes only.
    """
    storages = {view.storage: None for view in (*owners, *claims) if view.storage.nbytes}
    if not storages:
        raise ValueError(f"there is nothing to map: {len(owners) + len(claims)} views and no storage with a byte")
    return {
        storage.name: byte_map(
            owners,
            claims,
            window=(0, min(storage.nbytes, most_bytes)),
            storage=storage,
            values=(values or {}).get(storage.name),
            kv_cache_dtype=kv_cache_dtype,
        )
        for storage in storages
    }


def claimed_bytes(view: View, start: int, stop: int) -> np.ndarray:
    """Whether the view claims each byte of ``[start, stop)``: bool, shape ``(stop - start,)``."""
    _, cells = _cells_by_byte([view], start, stop)
    return (cells >= 0).any(axis=0)


def _one_storage(views: Sequence[View]) -> Storage:
    storages = {view.storage for view in views}
    if len(storages) != 1:
        names = ", ".join(sorted(s.name for s in storages)) or "none"
        raise ValueError(f"a byte map shows one storage, and the {len(views)} views lie in {len(storages)}: {names}")
    return storages.pop()


def _cell_axes(view: View) -> int:
    """Axes that tell cells apart: all but a trailing one named ``byte``."""
    return len(view.shape) - (view.axes[-1:] == ("byte",))


def _cells_by_byte(views: Sequence[View], start: int, stop: int) -> tuple[list[View], np.ndarray]:
    """The views that reach into the window, and for each of them and each byte the flat number of its cell, or -1."""
    found, cells = [], []
    for view in views:
        near, starts = _elements_within(view, start, stop)
        if not len(near):
            continue
        row = np.full(stop - start, -1, np.int64)
        width = int(np.prod(view.shape[_cell_axes(view) :], dtype=np.int64))
        for byte in range(view.itemsize):
            at = starts + byte - start
            inside = (at >= 0) & (at < stop - start)
            row[at[inside]] = near[inside] // width
        found.append(view)
        cells.append(row)
    return found, np.asarray(cells, np.int64).reshape(len(cells), stop - start)


def _elements_within(view: View, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat numbers, ascending, of the elements that reach into ``[start, stop)``, and the first byte of each.

    Axis after axis, the longest steps first, only those indices are kept from which the axes that follow can
    reach the window: work and memory are in proportion to the window. Where an axis has no step, its last
    index stands for all.
    """
    numbers, firsts = np.zeros(1, np.int64), np.full(1, view.start_of(view.lowest), np.int64)
    axes = _axes_by_step(view)
    reach = sum(step * (size - 1) for step, size, _, _ in axes)
    for step, size, first_number, number_step in axes:
        reach -= step * (size - 1)
        low = np.clip((start - view.itemsize - reach - firsts) // step + 1, 0, size)
        high = np.clip(-((firsts - stop) // step), low, size)
        _check_few(view, int((high - low).sum()))
        which = np.repeat(np.arange(len(firsts)), high - low)
        index = np.arange(len(which)) - np.repeat(np.cumsum(high - low) - high, high - low)
        firsts = firsts[which] + index * step
        numbers = numbers[which] + first_number + index * number_step
    inside = (firsts + view.itemsize > start) & (firsts < stop) & (view.num_elements > 0)
    order = np.argsort(numbers[inside])
    return numbers[inside][order], firsts[inside][order]


def _axes_by_step(view: View) -> list[tuple[int, int, int, int]]:
    """For each axis ``(step_bytes, size, first_number, number_step)``, counted upwards in memory, longest step first.

    The numbers are what an index adds to an element's flat number: an axis with a negative stride starts at its
    last index and counts down. An axis without a step is one place: its last index.
    """
    axes, inner = [], view.num_elements
    for size, stride in zip(view.shape, view.stride, strict=True):
        inner //= max(size, 1)
        last = (size - 1) * inner
        if stride == 0:
            axes.append((1, 1, last, 0))
        else:
            axes.append((abs(stride) * view.itemsize, size, 0 if stride > 0 else last, inner if stride > 0 else -inner))
    return sorted(axes, reverse=True)


def _check_few(view: View, count: int) -> None:
    if count > MAX_ELEMENTS:
        raise ValueError(f"{view.name}: {count} elements reach into the window, too many to list ({MAX_ELEMENTS})")


def _parts(views: Sequence[View], cells: np.ndarray) -> tuple[Part, ...]:
    parts = []
    for here in np.flatnonzero(cells >= 0).tolist():
        view, cell, index = views[here], int(cells[here]), []
        shape = view.shape[: _cell_axes(view)]
        for size in reversed(shape):
            cell, i = divmod(cell, size)
            index.append(i)
        axes = view.axes[: len(shape)] or tuple(f"axis {i}" for i in range(len(shape)))
        parts.append(Part(view.name, view.role, tuple(reversed(index)), axes))
    return tuple(parts)


def _run(start: int, stop: int, owners: tuple[Part, ...], writers: tuple[Part, ...]) -> ByteRange:
    """Where data and scale both own a byte (cells without a tail), the data is named as the owner."""
    owner = min(owners, key=lambda part: part.role != "data", default=None)
    if len(writers) > 1:
        state = "contested"
    elif writers:
        state = "right" if writers[0] in owners else "misplaced"
    else:
        state = "unreached" if owner else "unowned"
    return ByteRange(start, stop, owner, writers, state)


def _read(values, storage: Storage, start: int, stop: int) -> bytes | None:
    if values is None or getattr(values, "is_meta", False):
        return None
    if len(values) != storage.nbytes:
        raise ValueError(f"values has {len(values)} bytes and {storage.name} has {storage.nbytes}")
    held = values.untyped_storage().nbytes() if hasattr(values, "untyped_storage") else len(values)
    if held < storage.nbytes:
        raise ValueError(
            f"{storage.name} was freed: {held} of its {storage.nbytes} bytes are left; map it without values"
        )
    window = values[start:stop]
    return bytes(window.cpu().numpy() if hasattr(window, "cpu") else np.asarray(window, np.uint8))


@dataclass(frozen=True)
class Row:
    """One row of a drawn map: its first byte, whose row it is (or ""), and its runs, clipped to the row."""

    start: int
    label: str
    ranges: tuple[ByteRange, ...]

    @property
    def mixed(self) -> bool:
        """Whether its bytes do not all belong to one block of one layer."""
        return len(_homes(self.ranges)) != 1


def rows(record: ByteMap, row_bytes: int) -> tuple[Row, ...]:
    """Cut a map into rows of ``row_bytes``; the page size gives a row a page.

    Raises:
        ValueError: ``row_bytes`` below 1.
    """
    if row_bytes < 1:
        raise ValueError(f"row_bytes must be at least 1, not {row_bytes}")
    pieces: dict[int, list[ByteRange]] = {start: [] for start in range(record.start, record.stop, row_bytes)}
    for run in record.ranges:
        first = run.start - (run.start - record.start) % row_bytes
        for start in range(first, run.stop, row_bytes):
            ends = (max(run.start, start), min(run.stop, start + row_bytes))
            pieces[start].append(ByteRange(*ends, run.owner, run.writers, run.state))
    return tuple(Row(start, _row_label(runs), tuple(runs)) for start, runs in pieces.items())


def _row_label(runs: Sequence[ByteRange]) -> str:
    """``block 1 · layer 0``, or ``block 0 · layers 0–3`` where a row spans several; "" where nobody has a home."""
    homes = _homes(runs)
    blocks = sorted({block for block, _ in homes if block is not None})
    layers = sorted({layer for _, layer in homes if layer is not None})
    return " · ".join(_span(word, found) for word, found in (("block", blocks), ("layer", layers)) if found)


def _homes(runs: Sequence[ByteRange]) -> set[tuple[int | None, int | None]]:
    """Block and layer of each owner, as far as it has them."""
    owners = [run.owner for run in runs if run.owner]
    return {(part.index[0] if part.axes[:1] == ("block",) else None, part.layer) for part in owners} - {(None, None)}


def _span(word: str, numbers: Sequence[int]) -> str:
    return f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {numbers[0]}–{numbers[-1]}"
