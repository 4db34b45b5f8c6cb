"""A byte map says for each byte in a window of a storage who owns the byte, who writes it, and which value it has.

A byte map is a record. It is made from views. With the live buffer, it also has the values of the bytes. Texts,
pictures, figures and interactive maps are drawn from this record.
"""

import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvviz.audit.budget import spend
from kvviz.audit.view import Storage, View
from kvviz.cache.modes import get_mode

MAX_WINDOW_BYTES = 1 << 20
"""Largest window of a byte map. For a window of this size, the arrays of the map take 8 MiB per view."""

MAX_NEAR = 1 << 23
"""Work limit of one map: elements of all views that reach into the window. 8 million take about a second."""


def layer_of(name: str) -> int | None:
    """Return the layer of a view: 3 for the name ``layer 3 K scale``. Return None if the name starts with no layer."""
    words = name.split()
    return int(words[1]) if len(words) > 1 and words[0] == "layer" and words[1].isdecimal() else None


def half_of(name: str) -> str:
    """Return ``K`` or ``V`` if this letter is a word in the name of a view. Otherwise return ""."""
    return next((word for word in name.split() if word in ("K", "V")), "")


@dataclass(frozen=True)
class Part:
    """One scale, or the data of one cell: the smallest part of a view that a map names.

    Attributes:
        view, role: name and role of the view.
        index: the index of the part in the view. There is no number for a last axis with the name ``byte``.
        axes: for each number in ``index``, the name of its axis.
    """

    view: str
    role: str
    index: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def layer(self) -> int | None:
        """The number of the layer with which the name of the view starts. None if the name starts with no layer."""
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
    """Adjacent bytes ``[start, stop)`` of the storage that have the same owner and the same writers.

    ``owner`` is None for padding, which belongs to no view. ``state`` is a key of :data:`~kvviz.show.states.STATES`.
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
        values: the bytes of the window, or None if their values are not known.
        owners, writers: the views of this storage from which the ranges were made.
        beneath: more views. They own and write bytes that no view of ``owners`` or ``writers`` has.
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
        """Return the range that holds a byte of the storage. Raises ValueError if the byte is outside the window."""
        if not self.start <= byte < self.stop:
            raise ValueError(
                f"byte {byte} is outside the map's window [{self.start}, {self.stop}): give a byte of the window, "
                f"or make a map with another window"
            )
        return self.ranges[bisect_right(self.ranges, byte, key=lambda stretch: stretch.start) - 1]

    def value(self, start: int, size: int) -> bytes | None:
        """Return ``size`` bytes that begin at byte ``start``, or None if some of the bytes are not known."""
        if self.values is None or not self.start <= start <= start + size <= self.stop:
            return None
        return self.values[start - self.start : start - self.start + size]

    def count(self, state: str) -> int:
        """Count the bytes in a state. ``state`` is a key of :data:`~kvviz.show.states.STATES`."""
        return sum(stretch.stop - stretch.start for stretch in self.ranges if stretch.state == state)


def byte_map(
    owners: Sequence[View],
    writers: Sequence[View] = (),
    *,
    window: tuple[int, int] | None = None,
    storage: Storage | None = None,
    values=None,
    kv_cache_dtype: str | None = None,
    most_elements: int = MAX_NEAR,
    readers: bool = False,
) -> ByteMap:
    """Map a window of one storage. Views that are only read own no bytes.

    Args:
        owners: views at the places where they should be. They say to which view each byte belongs.
        writers: views at the places where the program really has them. They say which views write each byte. If no
            writer has the name of an owner, this owner writes its own bytes.
        window: byte range ``[start, stop)``. Default: the whole storage.
        storage: the storage to map. Default: the storage in which all views lie.
        values: all bytes of the storage: ``bytes``, or a uint8 tensor or array with one axis. Only the window is read.
        kv_cache_dtype: a key of ``kvviz.cache.modes.MODES``. With this mode, renderings of the map can decode values.
        most_elements: work limit: elements of all owners, or of all writers, that have bytes in the window.
        readers: True to show views that are only read among the writers. Bytes that nobody writes are never contested.

    Raises:
        ValueError: there are no views, the views lie in several storages, the window does not fit into the storage or
            is too large, too many elements have bytes in the window, ``values`` are not the bytes of the storage, or
            the mode does not exist.
    """
    if kv_cache_dtype is not None:
        get_mode(kv_cache_dtype)
    storage = storage if storage is not None else _one_storage([*owners, *writers])
    start, stop = _checked_window(window, storage)
    replaced = {view.name for view in writers}
    writers = [view for view in owners if view.name not in replaced] + list(writers)
    given, owners = {*owners}, [view for view in owners if view.storage == storage and not view.read_only]
    users = [view for view in writers if view.storage == storage and (readers or not view.read_only)]
    at_home = {view.name for view in users if view.read_only and view in given}
    only_read = {view.name for view in users if view.read_only}
    (owned, owner_cells), (written, writer_cells) = (
        _cells_by_byte(views, start, stop, most_elements) for views in (owners, users)
    )
    edges = np.zeros(stop - start, bool)
    for cells in (*owner_cells, *writer_cells):
        edges[1:] |= cells[1:] != cells[:-1]
    bounds = [0, *np.flatnonzero(edges).tolist(), stop - start]
    ranges = []
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        who = (_parts(owned, owner_cells[:, first]), _parts(written, writer_cells[:, first]))
        made = _byte_range(start + first, start + last, *who)
        if made.state == "contested" and only_read.issuperset(part.view for part in made.writers):
            made = replace(made, state="right")
        if made.state == "misplaced" and made.writers[0].view in at_home:
            made = replace(made, state="right")
        ranges.append(made)
    known = _bytes_of(values, storage, start, stop)
    return ByteMap(storage, start, stop, tuple(ranges), known, tuple(owners), tuple(users), kv_cache_dtype)


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
        ValueError: there are no views, or no storage has a byte.
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


def _checked_window(window: tuple[int, int] | None, storage: Storage) -> tuple[int, int]:
    if not storage.nbytes:
        raise ValueError(f"the storage {storage.name!r} has 0 bytes: map a storage that has bytes")
    try:
        start, stop = map(operator.index, window if window is not None else (0, storage.nbytes))
    except (TypeError, ValueError):
        raise ValueError(f"window must be two integers, (first byte, byte after the last), not {window!r}") from None
    if stop <= start:
        raise ValueError(f"the window [{start}, {stop}) is empty: its second number must be larger than the first")
    if start < 0 or stop > storage.nbytes:
        raise ValueError(
            f"the window [{start}, {stop}) is not inside the storage {storage.name!r} of {storage.nbytes} bytes: "
            f"give numbers from 0 to {storage.nbytes}"
        )
    if stop - start > MAX_WINDOW_BYTES:
        raise ValueError(
            f"a window of {stop - start} bytes is too large: give a window of at most {MAX_WINDOW_BYTES} bytes"
        )
    return start, stop


def _one_storage(views: Sequence[View]) -> Storage:
    storages = {view.storage for view in views}
    if not storages:
        raise ValueError("there are 0 views to map: give at least one view")
    if len(storages) > 1:
        names = ", ".join(sorted(s.name for s in storages))
        raise ValueError(
            f"a byte map shows one storage, but the {len(views)} views lie in {len(storages)} ({names}): "
            f"call byte_map with storage=..., or call byte_maps"
        )
    return storages.pop()


def _cell_axes(view: View) -> int:
    """Return how many axes number the cells: all axes, except a last axis with the name ``byte``."""
    return len(view.shape) - (view.axes[-1:] == ("byte",))


def _cells_by_byte(views: Sequence[View], start: int, stop: int, most: int = MAX_NEAR) -> tuple[list[View], np.ndarray]:
    """Return the views that have bytes in the window, and an int64 array of shape (views, stop - start).

    For each of these views and each byte, the array has the flat number of the cell that holds the byte. It has -1 if
    no cell of the view holds the byte.
    """
    found, cells, left = [], [], most
    for view in views:
        low, high = view.span_bytes
        if low >= stop or high <= start:
            continue
        near, starts = _elements_within(view, start, stop, left)
        if not len(near):
            continue
        left -= len(near)
        row = np.full(stop - start, -1, np.int64)
        width = int(np.prod(view.shape[_cell_axes(view) :], dtype=np.int64))
        _write_cells(row, starts - start, near // width, view.itemsize)
        found.append(view)
        cells.append(row)
    return found, np.asarray(cells, np.int64).reshape(len(cells), stop - start)


def _write_cells(row: np.ndarray, starts: np.ndarray, cells: np.ndarray, itemsize: int) -> None:
    """Write the number of its cell on each byte of each element. If elements overlap, the number of the last one stays.

    The loop runs over the bytes of an element, over the bytes of the window, or over the elements. The function takes
    the shortest of these three loops.
    """
    spend(len(starts) * min(itemsize, len(row)))
    if itemsize <= min(len(row), len(starts)):
        for byte in range(itemsize):
            at = starts + byte
            inside = (at >= 0) & (at < len(row))
            row[at[inside]] = cells[inside]
    elif len(row) <= len(starts):
        for byte in range(len(row)):
            here = np.flatnonzero((starts <= byte) & (starts > byte - itemsize))
            if len(here):
                row[byte] = cells[here[-1]]
    else:
        for first, cell in zip(starts.tolist(), cells.tolist(), strict=True):
            row[max(first, 0) : first + itemsize] = cell


def _elements_within(view: View, start: int, stop: int, most: int = MAX_NEAR) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat numbers of the elements that have bytes in ``[start, stop)``, and the first byte of each element.

    The flat numbers are in ascending order. The function handles one axis after the other, and begins with the longest
    step. On each axis, it keeps only the indices from which the remaining axes can still reach the window. So work and
    memory grow with the window, and not with the view. If an axis has stride 0, all its indices have the same place.
    The last index then stands for all.
    """
    numbers, firsts = np.zeros(1, np.int64), np.full(1, view.start_of(view.lowest), np.int64)
    axes = _axes_by_step(view)
    reach = sum(step * (size - 1) for step, size, _, _ in axes)
    for step, size, first_number, number_step in axes:
        reach -= step * (size - 1)
        low = np.clip((start - view.itemsize - reach - firsts) // step + 1, 0, size)
        high = np.clip(-((firsts - stop) // step), low, size)
        _check_few(view, int((high - low).sum()), most)
        which = np.repeat(np.arange(len(firsts)), high - low)
        index = np.arange(len(which)) - np.repeat(np.cumsum(high - low) - high, high - low)
        firsts = firsts[which] + index * step
        numbers = numbers[which] + first_number + index * number_step
    inside = (firsts + view.itemsize > start) & (firsts < stop) & (view.num_elements > 0)
    order = np.argsort(numbers[inside])
    return numbers[inside][order], firsts[inside][order]


def _axes_by_step(view: View) -> list[tuple[int, int, int, int]]:
    """Return ``(step_bytes, size, first_number, number_step)`` of each axis, sorted by step, the longest step first.

    Every axis is walked from low to high addresses. The lowest place adds ``first_number`` to the flat number of an
    element. Each further place adds ``number_step`` more. So an axis with a negative stride starts at its last index,
    and counts down. An axis with stride 0 has only one place, which has the last index.
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


def _check_few(view: View, count: int, most: int) -> None:
    spend(count)
    if count > most:
        raise ValueError(
            f"{view.name!r} has {count} elements in the window, more than the limit of {most}: give a smaller window"
        )


def _parts(views: Sequence[View], cells: np.ndarray) -> tuple[Part, ...]:
    """Return the parts that hold one byte.

    ``cells`` is an int64 array of shape (views,). For each view it has the flat number of the cell that holds the byte,
    or -1 if no cell does.
    """
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
    """Return the range with its state. If data and a scale both own the bytes, the owner of the range is the data."""
    owner = min(owners, key=lambda part: part.role != "data", default=None)
    if len(writers) > 1:
        state = "contested"
    elif writers:
        state = "right" if writers[0] in owners else "misplaced"
    else:
        state = "unreached" if owner else "unowned"
    return ByteRange(start, stop, owner, writers, state)


def _bytes_of(values, storage: Storage, start: int, stop: int) -> bytes | None:
    """Return the bytes ``[start, stop)`` of the storage. Return None if ``values`` is None or a meta tensor."""
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
            f"values has {len(values)} bytes, but the storage {storage.name!r} has {storage.nbytes}: "
            f"give all bytes of the storage"
        )
    held = values.untyped_storage().nbytes() if hasattr(values, "untyped_storage") else len(values)
    if held < storage.nbytes:
        raise ValueError(
            f"the memory of {storage.name!r} was freed, and now has {held} of {storage.nbytes} bytes: "
            f"make the map without values"
        )
