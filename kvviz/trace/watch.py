"""Watches memory while a program runs. Afterwards it says which bytes changed, and which of them had to stay.

Example::

    with watch(tensors_of_vllm(layers), allowed=Allowed(slots=range(19))) as seen:
        engine.step()
    print(seen)

``watch`` only reads the memory. A write that stores an equal value is no change, so it is not seen.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
import torch

from kvviz.audit.findings import counted
from kvviz.audit.view import View
from kvviz.cache.footprint import Comparison
from kvviz.show.byte_map import MAX_WINDOW_BYTES, byte_map
from kvviz.show.live_map import MapView
from kvviz.trace.memory import Memory, cell_shape, elements_at, memory_of, named_index, where

PART_BYTES = 1 << 26
"""Bytes that are compared at once. The comparison needs this much memory more."""
MOST_VIEWS = 8
"""The most views in the text of a step."""


@dataclass(frozen=True)
class Allowed:
    """Which cells a call may change. A cell must fit all that is given. None means that everything fits.

    Attributes:
        views: names of views.
        blocks: block ids.
        slots: slots of tokens. Slot ``s`` is token ``s % block_size`` of block ``s // block_size``.
    """

    views: Collection[str] | None = None
    blocks: Collection[int] | None = None
    slots: Collection[int] | None = None

    def allows(self, view: View, cells: np.ndarray) -> np.ndarray:
        """Return for each cell of a view whether the call may change the cell: bool array of the shape of ``cells``.

        Raises:
            ValueError: blocks or slots are given, but the view has no axis of this name.
        """
        if self.views is not None and view.name not in self.views:
            return np.zeros(len(cells), bool)
        index, allowed = named_index(view, cells), np.ones(len(cells), bool)
        needed = ["block"] * (self.blocks is not None or self.slots is not None) + ["token"] * (self.slots is not None)
        if missing := [axis for axis in needed if axis not in index]:
            raise ValueError(
                f"{view.name} has the axes {view.axes}, and no axis with the name {missing[0]!r}: give its axes with "
                f"the tensor, as ({view.name!r}, (tensor, axes))"
            )
        if self.blocks is not None:
            allowed &= np.isin(index["block"], list(self.blocks))
        if self.slots is not None:
            block_size = view.shape[view.axes.index("token")]
            allowed &= np.isin(index["block"] * block_size + index["token"], list(self.slots))
        return allowed


@dataclass(frozen=True, eq=False)
class ViewChanges:
    """The changed cells of one view.

    Attributes:
        view: the view.
        cells: flat numbers of the cells, int64 of shape (n,).
        nbytes: number of changed bytes of each cell.
        first: first changed byte of each cell, counted from the start of the storage.
        allowed: True for each cell that the call may change.
    """

    view: View
    cells: np.ndarray
    nbytes: np.ndarray
    first: np.ndarray
    allowed: np.ndarray

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON. One row per cell: index, first byte, number of bytes, allowed."""
        index = np.stack([*named_index(self.view, self.cells).values()], 1).tolist() if cell_shape(self.view) else [[]]
        rows = zip(index, self.first.tolist(), self.nbytes.tolist(), self.allowed.tolist(), strict=True)
        axes = self.view.axes[: len(cell_shape(self.view))]
        return {"view": self.view.name, "storage": self.view.storage.name, "axes": axes, "cells": list(rows)}


@dataclass(frozen=True, eq=False)
class Step:
    """What changed in one step of a watched program.

    Attributes:
        title: name of the step.
        exact: True if each byte was compared. False if a byte only lies in a chunk with another fingerprint.
        changed: for each storage with changes, the changed bytes in ascending order.
        forbidden: for each storage, those changed bytes that had to stay. If the way is not exact,
            only chunks of which no byte may change.
        old, new: the values of the changed bytes before and after the step. Empty if the way is not exact.
        views: the changed cells of each view.
        unowned: number of changed bytes that no view has.
        undecided: number of changed chunks that also have cells which had to stay. 0 if the way is exact.
    """

    title: str
    exact: bool
    changed: dict[str, np.ndarray]
    forbidden: dict[str, np.ndarray]
    old: dict[str, np.ndarray]
    new: dict[str, np.ndarray]
    views: tuple[ViewChanges, ...]
    unowned: int
    undecided: int = 0

    @property
    def num_changed(self) -> int:
        """Return the number of changed bytes."""
        return sum(map(len, self.changed.values()))

    @property
    def num_forbidden(self) -> int:
        """Return the number of bytes that changed, but had to stay."""
        return sum(map(len, self.forbidden.values()))

    @property
    def first_forbidden(self) -> str:
        """Return the owner and the address of the first byte that changed, but had to stay, or ""."""
        for storage, at in self.forbidden.items():
            if len(at):
                return f"{_owner(self.views, storage, int(at[0]))}, byte {at[0]} of {storage}"
        return ""

    def __str__(self) -> str:
        cells = sum(len(one.cells) for one in self.views)
        what = "changed" if self.exact else "lie in chunks that changed"
        lines = [f"{self.title}: {counted(self.num_changed, 'byte')} {what}, in {counted(cells, 'cell')}"]
        for one in self.views[:MOST_VIEWS]:
            first = where(one.view, int(one.cells[0]))
            lines.append(
                f"  {one.view.name}: {int(one.nbytes.sum())} bytes of {counted(len(one.cells), 'cell')}, first {first}"
            )
        if len(self.views) > MOST_VIEWS:
            lines.append(f"  {len(self.views) - MOST_VIEWS} more views")
        if self.unowned:
            lines.append(f"  {counted(self.unowned, 'byte')} that no view has")
        if self.num_forbidden:
            lines.append(f"  FORBIDDEN: {counted(self.num_forbidden, 'byte')}. The first is {self.first_forbidden}")
        if self.undecided:
            lines.append(
                f"  {counted(self.undecided, 'chunk')} also hold bytes that may not change: use exact=True to decide"
            )
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "title": self.title,
            "exact": self.exact,
            "changed_bytes": self.num_changed,
            "forbidden_bytes": self.num_forbidden,
            "first_forbidden": self.first_forbidden,
            "bytes_without_an_owner": self.unowned,
            "undecided_chunks": self.undecided,
            "views": [one.as_data() for one in self.views],
        }


class Watch:
    """Compares memory before and after each step. Made by :func:`watch`.

    Attributes:
        steps: the records of all steps until now.
    """

    def __init__(self, memory: Memory, allowed: Allowed | None, exact: bool) -> None:
        self.memory, self.allowed, self.exact = memory, allowed, exact
        self.steps: list[Step] = []
        if allowed and allowed.views is not None:
            known = {view.name for view in memory.views}
            if unknown := [name for name in allowed.views if name not in known]:
                raise ValueError(f"allowed names the view {unknown[0]!r}, but no watched view has this name")

    def __enter__(self) -> "Watch":
        if self.exact:
            self._copy = self.memory.copy()
        else:
            from kvviz.kernels.fingerprint import Fingerprints

            self.memory.synchronise()
            self._prints = {name: Fingerprints(flat) for name, flat in self.memory.flats.items()}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        rest = self._compare("the call" if not self.steps else "after the last step")
        if not self.steps or rest.num_changed:
            self.steps.append(rest)
        if error is not None:
            error.add_note(f"kvviz watched this call until the error:\n{self}")

    def step(self, title: str, allowed: Allowed | None = None) -> Step:
        """End a step: record what changed since the last step. ``allowed`` replaces that of the watch."""
        self.steps.append(self._compare(title, allowed))
        return self.steps[-1]

    def launch(self, function: Callable, title: str = "", allowed: Allowed | None = None) -> Callable:
        """Return a function that calls ``function`` and then ends a step. Put it in the place of ``function``."""

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.step(f"{title or function.__name__} {len(self.steps)}", allowed)
            return result

        return watched

    @property
    def first_forbidden(self) -> str:
        """Return the step, the owner and the address of the first byte that changed, but had to stay, or ""."""
        return next((f"{step.title}: {step.first_forbidden}" for step in self.steps if step.num_forbidden), "")

    def __str__(self) -> str:
        bad = sum(step.num_forbidden for step in self.steps)
        verdict = f"{counted(bad, 'byte')} changed, but had to stay" if bad else "no forbidden byte changed"
        return "\n".join([verdict, *map(str, self.steps)])

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"first_forbidden": self.first_forbidden, "steps": [step.as_data() for step in self.steps]}

    def masks(self) -> dict[str, np.ndarray]:
        """Return for each storage a bool array with one entry per byte: True if the byte changed in a step."""
        masks = {name: np.zeros(flat.numel(), bool) for name, flat in self.memory.flats.items()}
        for step in self.steps:
            for name, at in step.changed.items():
                masks[name][at] = True
        return masks

    def map(self, storage: str | None = None, window: tuple[int, int] | None = None, row_bytes: int = 64) -> MapView:
        """Return a live map of a part of a storage, with one frame per step.

        The values are the bytes. If the watch is not exact, a value is the number of the step that changed the chunk.

        Args:
            storage: name of the storage. Default: the first storage with a change.
            window: byte range. Default: the first MiB of the storage.
        """
        name = storage or next((name for step in self.steps for name in step.changed), next(iter(self.memory.flats)))
        start, stop = window or (0, min(self.memory.flats[name].numel(), MAX_WINDOW_BYTES))
        if self.exact:
            now = self._copy[name][start:stop].cpu().numpy().copy()
            for step in reversed(self.steps):
                _put(now, start, step, name, step.old)
        else:
            now = np.zeros(stop - start, np.uint8)
        frames, before = [], now.copy()
        for number, step in enumerate(self.steps, 1):
            marks = {name: np.full(len(step.changed.get(name, ())), number, np.uint8)}
            _put(now, start, step, name, step.new if self.exact else marks)
            frames.append((step.title, now.tobytes()))
        return frames_map(self.memory.views, name, (start, stop), before, frames, row_bytes)

    def _compare(self, title: str, allowed: Allowed | None = None) -> Step:
        changed, old, new = {}, {}, {}
        self.memory.synchronise()
        for name, flat in self.memory.flats.items():
            if self.exact:
                at, before, after = _differences(self._copy[name], flat)
                old[name], new[name] = before, after
            else:
                at = self._prints[name].changed_bytes(flat)
            if len(at):
                changed[name] = at
        return attribute(title, self.memory, allowed or self.allowed, changed, old, new, self.exact)


def watch(
    given: Any,
    storages: Mapping[str, torch.Tensor] | None = None,
    *,
    allowed: Allowed | None = None,
    exact: bool = True,
) -> Watch:
    """Return a context manager that watches memory. After it, ``print`` shows its record.

    Args:
        given: the tensors by name, or views. See :func:`kvviz.trace.memory.memory_of`.
        storages: the bytes of the storages of views.
        allowed: what the program may change. Default: all bytes of the given tensors, but no byte between them.
        exact: True to copy all bytes and compare them. False to compare fingerprints of chunks of 2,048 bytes, which
            needs 0.44 % more memory instead of 100 %.

    Raises:
        ValueError: the memory cannot be watched. Or ``allowed`` names an unknown view.
        MemoryError: there is too little memory for a copy.
    """
    return Watch(memory_of(given, storages), allowed, exact)


def compared_with(predicted: Mapping[str, np.ndarray], *watches: Watch) -> Comparison:
    """Compare predicted bytes with the bytes that changed in at least one of the watched runs.

    Run the program twice, over memory full of 0x00 and of 0xFF. Then each written byte changes at least once.

    Args:
        predicted: the result of :func:`kvviz.cache.footprint.predict`.
    """
    observed: dict[str, np.ndarray] = {}
    for one in watches:
        for name, mask in one.masks().items():
            observed[name] = observed[name] | mask if name in observed else mask
    return Comparison(dict(predicted), observed)


def compared_map(
    views: tuple[View, ...], compared: Comparison, storage: str, window: tuple[int, int] | None = None
) -> MapView:
    """Return a live map with the frames "predicted", "observed" and "only one of both". A byte of a frame is 255."""
    size = next(view.storage.nbytes for view in views if view.storage.name == storage)
    start, stop = window or (0, min(size, MAX_WINDOW_BYTES))
    none = np.zeros(size, bool)
    both = [masks.get(storage, none)[start:stop] for masks in (compared.predicted, compared.observed)]
    planes = {"predicted": both[0], "observed": both[1], "only one of both": both[0] ^ both[1]}
    frames = [(title, (plane * np.uint8(255)).tobytes()) for title, plane in planes.items()]
    return frames_map(views, storage, (start, stop), np.zeros(stop - start, np.uint8), frames)


def frames_map(
    views: tuple[View, ...],
    storage: str,
    window: tuple[int, int],
    before: np.ndarray,
    frames: list[tuple[str, bytes]],
    row_bytes: int = 64,
) -> MapView:
    """Return a live map of one storage with a slider over frames. ``before`` has the bytes of the window at first."""
    here = [view for view in views if view.storage.name == storage]
    record = replace(byte_map(here, window=window, storage=here[0].storage), values=before.tobytes())
    return MapView({storage: record}, row_bytes=row_bytes, frames=frames)


def attribute(
    title: str,
    memory: Memory,
    allowed: Allowed | None,
    changed: dict[str, np.ndarray],
    old: dict[str, np.ndarray],
    new: dict[str, np.ndarray],
    exact: bool,
) -> Step:
    """Find the owners of changed bytes, and return the record. If views share a byte, each of them owns the byte."""
    found, forbidden, unowned, undecided = [], {}, 0, 0
    for name, at in changed.items():
        owned, permitted = np.zeros(len(at), bool), np.zeros(len(at), bool)
        for view in memory.views:
            if view.storage.name != name:
                continue
            low, high = np.searchsorted(at, view.span_bytes)
            elements = elements_at(view, at[low:high])
            inside = np.flatnonzero(elements >= 0)
            if not len(inside):
                continue
            width = view.num_elements // int(np.prod(cell_shape(view), dtype=np.int64))
            cells, first, of, nbytes = np.unique(
                elements[inside] // width, return_index=True, return_inverse=True, return_counts=True
            )
            may = np.ones(len(cells), bool) if allowed is None else allowed.allows(view, cells)
            owned[low + inside] = True
            permitted[low + inside] |= may[of]
            found.append(ViewChanges(view, cells, nbytes, at[low + inside[first]], may))
        unowned += int((~owned).sum())
        if exact:
            forbidden[name] = at[~permitted]
        else:
            from kvviz.kernels.fingerprint import CHUNK_BYTES

            chunk, of = np.unique(at // CHUNK_BYTES, return_inverse=True)
            some, every = np.zeros(len(chunk), bool), np.ones(len(chunk), bool)
            np.logical_or.at(some, of, permitted)
            np.logical_and.at(every, of, permitted | ~owned)
            forbidden[name] = at[~some[of]]
            undecided += int((some & ~every).sum())
    return Step(title, exact, changed, forbidden, old, new, tuple(found), unowned, undecided)


def _differences(before: torch.Tensor, now: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the changed bytes, and their old and new values. ``before`` gets the new values."""
    found: list[tuple[np.ndarray, ...]] = []
    for start in range(0, now.numel(), PART_BYTES):
        old, new = before[start : start + PART_BYTES], now[start : start + PART_BYTES]
        at = torch.nonzero(old != new)[:, 0]
        if len(at):
            found.append(((at + start).cpu().numpy(), old[at].cpu().numpy(), new[at].cpu().numpy()))
            old.copy_(new)
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.uint8)
    at, old, new = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return at, old, new


def _put(plane: np.ndarray, start: int, step: Step, name: str, values: Mapping[str, np.ndarray]) -> None:
    """Write the values of the changed bytes of a step into a window that begins at byte ``start``."""
    at = step.changed.get(name, np.zeros(0, np.int64)) - start
    inside = (at >= 0) & (at < len(plane))
    if len(at):
        plane[at[inside]] = values[name][inside]


def _owner(found: tuple[ViewChanges, ...], storage: str, byte: int) -> str:
    for one in found:
        if one.view.storage.name == storage and (element := elements_at(one.view, np.array([byte]))[0]) >= 0:
            width = one.view.num_elements // int(np.prod(cell_shape(one.view), dtype=np.int64))
            return where(one.view, int(element) // width)
    return "a byte that no view has"
