"""The byte map: for each byte of a part of a storage, who owns it, who writes it, and its value.

A byte map is a record. It is made from views and, if you have it, from the live buffer. Texts, pictures, figures and
interactive maps are drawn from this record.
"""

import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvviz.audit.view import MAX_ELEMENTS, Storage, View
from kvviz.cache.modes import get_mode

MAX_WINDOW_BYTES = 1 << 20
"""Largest window that is mapped byte by byte. The arrays of the map then take 8 MiB per view in the window."""


def layer_of(name: str) -> int | None:
    """Return 3 for a view with the name ``layer 3 K scale``, or None if the name does not start with a layer."""
    words = name.split()
    return int(words[1]) if len(words) > 1 and words[0] == "layer" and words[1].isdecimal() else None


def half_of(name: str) -> str:
    """Return ``K`` or ``V`` if it is a word of a view's name, else nothing."""
    return next((word for word in name.split() if word in ("K", "V")), "")


@dataclass(frozen=True)
class Part:
    """One scale, or the data of one cell: the smallest part of a view that a map names.

    Attributes:
        view, role: name and role of the view.
        index: the place in the view; without the index of a last axis ``byte``.
        axes: a name for each index.
    """

    view: str
    role: str
    index: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def layer(self) -> int | None:
        """The number of the layer, if the view's name starts with one."""
        return layer_of(self.view)

    @property
    def half(self) -> str:
        """The letter K or V in the name of the view, or "" if there is none."""
        return half_of(self.view)

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {i}" for axis, i in zip(self.axes, self.index, strict=True))
        return f"{self.view} [{where}]"


@dataclass(frozen=True)
class ByteRange:
    """Bytes ``[start, stop)`` of the storage with one owner and the same writers.

    ``owner`` is None for padding, which belongs to no view. ``state`` is one of :data:`~kvviz.show.states.STATES`.
    """

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
    """The bytes ``[start, stop)`` of one storage, cut into byte ranges, in order and without gaps.

    Attributes:
        values: the bytes, or None if only the geometry is known.
        owners, writers: the views of this storage from which the ranges were made.
        beneath: more views. They count as owner and writer of bytes that ``owners`` and ``writers`` leave out.
        kv_cache_dtype: name of the mode that says how to decode the bytes, or None.
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
        """Return the range that holds a byte of the storage. Raises ValueError if the window leaves the byte out."""
        if not self.start <= byte < self.stop:
            raise ValueError(f"byte {byte} is outside the map's window [{self.start}, {self.stop})")
        return self.ranges[bisect_right(self.ranges, byte, key=lambda stretch: stretch.start) - 1]

    def value(self, start: int, size: int) -> bytes | None:
        """Return ``size`` bytes that begin at byte ``start``, or None if some of the bytes are not known."""
        if self.values is None or not self.start <= start <= start + size <= self.stop:
            return None
        return self.values[start - self.start : start - self.start + size]

    def count(self, state: str) -> int:
        """Count the bytes in one of :data:`~kvviz.show.states.STATES`."""
        return sum(stretch.stop - stretch.start for stretch in self.ranges if stretch.state == state)


def byte_map(
    owners: Sequence[View],
    writers: Sequence[View] = (),
    *,
    window: tuple[int, int] | None = None,
    storage: Storage | None = None,
    values=None,
    kv_cache_dtype: str | None = None,
) -> ByteMap:
    """Map a window of one storage.

    Args:
        owners: views of the bytes as they should be.
        writers: views as they really are in the program. A writer replaces the owner of the same name. An owner
            without a writer of its name writes its own bytes.
        window: byte range ``[start, stop)``; default: the whole storage.
        storage: the storage to map; default: the one that holds all views.
        values: all bytes of the storage: ``bytes``, or a uint8 tensor or array with one axis. Only the window is read.
        kv_cache_dtype: one of ``kvviz.cache.modes.MODES``, to decode the values.

    Raises:
        ValueError: no views, views of several storages, a window outside the storage or too large, values that are
            not the bytes of the storage, or an unknown mode.
    """
    if kv_cache_dtype is not None:
        get_mode(kv_cache_dtype)
    storage = storage if storage is not None else _one_storage([*owners, *writers])
    start, stop = _checked_window(window, storage)
    replaced = {view.name for view in writers}
    writers = [view for view in owners if view.name not in replaced] + list(writers)
    owners, writers = ([view for view in views if view.storage == storage] for views in (owners, writers))
    (owned, owner_cells), (written, writer_cells) = (_cells_by_byte(v, start, stop) for v in (owners, writers))
    edges = np.zeros(stop - start, bool)
    for cells in (*owner_cells, *writer_cells):
        edges[1:] |= cells[1:] != cells[:-1]
    bounds = [0, *np.flatnonzero(edges).tolist(), stop - start]
    ranges = []
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        who = (_parts(owned, owner_cells[:, first]), _parts(written, writer_cells[:, first]))
        ranges.append(_byte_range(start + first, start + last, *who))
    known = _bytes_of(values, storage, start, stop)
    return ByteMap(storage, start, stop, tuple(ranges), known, tuple(owners), tuple(writers), kv_cache_dtype)


def byte_maps(
    owners: Sequence[View],
    writers: Sequence[View] = (),
    *,
    most_bytes: int = MAX_WINDOW_BYTES,
    values: Mapping[str, object] | None = None,
    kv_cache_dtype: str | None = None,
) -> dict[str, ByteMap]:
    """Map the first ``most_bytes`` bytes of every storage of the views. Return the maps by name of the storage.

    Args:
        owners, writers, kv_cache_dtype: see :func:`byte_map`.
        values: for each storage name, all bytes of the storage.

    Raises:
        ValueError: no views, or all storages are empty.
    """
    storages = {view.storage: None for view in (*owners, *writers) if view.storage.nbytes}
    if not storages:
        raise ValueError(
            f"there is nothing to map: the {len(owners) + len(writers)} views lie in storages without bytes. "
            f"Give views of a storage that has bytes."
        )
    return {
        storage.name: byte_map(
            owners,
            writers,
            window=(0, min(storage.nbytes, most_bytes)),
            storage=storage,
            values=(values or {}).get(storage.name),
            kv_cache_dtype=kv_cache_dtype,
        )
        for storage in storages
    }


def claimed_bytes(view: View, start: int, stop: int) -> np.ndarray:
    """Return a bool for each byte of ``[start, stop)``: True if the byte belongs to the view. Shape (stop - start,)."""
    _, cells = _cells_by_byte([view], start, stop)
    return (cells >= 0).any(axis=0)


def _checked_window(window: tuple[int, int] | None, storage: Storage) -> tuple[int, int]:
    if not storage.nbytes:
        raise ValueError(f"{storage.name} has no bytes: there is nothing to map")
    try:
        start, stop = map(operator.index, window if window is not None else (0, storage.nbytes))
    except (TypeError, ValueError):
        raise ValueError(f"window must be two integers, (first byte, byte after the last), not {window!r}") from None
    if not 0 <= start < stop <= storage.nbytes:
        raise ValueError(f"the window [{start}, {stop}) must lie in {storage.name} of {storage.nbytes} bytes")
    if stop - start > MAX_WINDOW_BYTES:
        raise ValueError(
            f"a window of {stop - start} bytes is too large to map (at most {MAX_WINDOW_BYTES}): give a smaller window"
        )
    return start, stop


def _one_storage(views: Sequence[View]) -> Storage:
    storages = {view.storage for view in views}
    if len(storages) != 1:
        names = ", ".join(sorted(s.name for s in storages)) or "none"
        raise ValueError(f"a byte map shows one storage, and the {len(views)} views lie in {len(storages)}: {names}")
    return storages.pop()


def _cell_axes(view: View) -> int:
    """Count the axes that number the cells: all axes but a last one with the name ``byte``."""
    return len(view.shape) - (view.axes[-1:] == ("byte",))


def _cells_by_byte(views: Sequence[View], start: int, stop: int) -> tuple[list[View], np.ndarray]:
    """Return the views that reach into the window, and an array with one row per view and one column per byte.

    An element of the array is the flat number of the view's cell that holds the byte, or -1 if none does.
    """
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
    """Return the flat numbers of the elements that reach into ``[start, stop)``, ascending, and the first byte of each.

    The axes are taken one after the other, the longest step first. Of each axis, only the indices are kept from which
    the remaining axes can still reach the window. So work and memory grow with the window, not with the view. All
    elements of an axis with stride 0 lie at the same place; the last index stands for all of them.
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
    """Return ``(step_bytes, size, first_number, number_step)`` of each axis, the longest step first.

    Every axis is walked upwards in memory. ``first_number`` is what the lowest place adds to the flat number of an
    element, and ``number_step`` is what each further place adds. So an axis with a negative stride starts at its last
    index and counts down. An axis with stride 0 has one place: its last index.
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
        raise ValueError(
            f"{view.name}: {count} elements reach into the window, too many to list (at most {MAX_ELEMENTS}): "
            f"give a smaller window"
        )


def _parts(views: Sequence[View], cells: np.ndarray) -> tuple[Part, ...]:
    """Return the parts that hold one byte; ``cells`` has the number of the cell of each view, or -1."""
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


def _byte_range(start: int, stop: int, owners: tuple[Part, ...], writers: tuple[Part, ...]) -> ByteRange:
    """Return the range with its state. If data and scale both own the bytes (there is no tail), data is the owner."""
    owner = min(owners, key=lambda part: part.role != "data", default=None)
    if len(writers) > 1:
        state = "contested"
    elif writers:
        state = "right" if writers[0] in owners else "misplaced"
    else:
        state = "unreached" if owner else "unowned"
    return ByteRange(start, stop, owner, writers, state)


def _bytes_of(values, storage: Storage, start: int, stop: int) -> bytes | None:
    """Read ``[start, stop)`` of the storage's bytes. Return None if there are none: no values, or a meta tensor."""
    if values is None or getattr(values, "is_meta", False):
        return None
    _check_values(values, storage)
    window = values[start:stop]
    if isinstance(window, bytes | bytearray | memoryview):
        return bytes(window)
    return bytes(window.cpu().numpy() if hasattr(window, "cpu") else np.asarray(window, np.uint8))


def _check_values(values, storage: Storage) -> None:
    shape, dtype = getattr(values, "shape", None), str(getattr(values, "dtype", "uint8")).removeprefix("torch.")
    if isinstance(values, str | type | Mapping) or not hasattr(values, "__getitem__"):
        found = f"{values!r:.40}"
    elif dtype != "uint8" or (shape is not None and len(shape) != 1):
        found = f"{type(values).__name__} of {dtype} with shape {tuple(shape)}"
    else:
        found = ""
    if found:
        raise ValueError(f"values must be bytes, or a uint8 tensor or array with one axis, not {found}")
    if len(values) != storage.nbytes:
        raise ValueError(
            f"values has {len(values)} bytes and {storage.name} has {storage.nbytes}: give all bytes of the storage"
        )
    held = values.untyped_storage().nbytes() if hasattr(values, "untyped_storage") else len(values)
    if held < storage.nbytes:
        raise ValueError(
            f"{storage.name} was freed: {held} of its {storage.nbytes} bytes are left. Map it without values."
        )
