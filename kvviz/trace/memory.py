"""Gives access to all bytes behind views, also of tensors that another program made.

The rest of this room sees a flat tensor of bytes per storage. On a CPU, this flat tensor is made from the address of
the memory. On a GPU, it is made from the tensor's own storage. No byte is copied.
"""

import ctypes
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvviz.audit.collect import is_with_axes, named_tensors, views_of
from kvviz.audit.view import View
from kvviz.cache.buffers import check_fits

CELL_INNER = ("byte", "element")
"""Names of a last axis that counts inside a cell. All other axes number the cells."""
MAPS = Path("/proc/self/maps")
"""On Linux, this file says which addresses of this process are writable, and which are shared."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Views, and the bytes of their storages.

    Attributes:
        views: the views. No two elements of one view share a byte.
        flats: for each name of a storage, all its bytes: a uint8 tensor with one axis.
        read_only: names of views that must not be written.
        keep: objects that must live as long as this record, because they hold the memory.
    """

    views: tuple[View, ...]
    flats: dict[str, torch.Tensor]
    read_only: tuple[str, ...] = ()
    keep: tuple[Any, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for view in self.views:
            _check_view(view, self.flats)

    def synchronise(self) -> None:
        """Wait until all work of the GPUs has ended. On a CPU, do nothing."""
        for device in {flat.device for flat in self.flats.values() if flat.is_cuda}:
            torch.cuda.synchronize(device)

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a copy of all bytes, on the same devices.

        Raises:
            MemoryError: a device has too little free memory.
        """
        self.synchronise()
        for device in {flat.device for flat in self.flats.values()}:
            needed = sum(flat.numel() for flat in self.flats.values() if flat.device == device)
            try:
                check_fits(needed, device)
            except MemoryError as error:
                raise MemoryError(
                    f"a copy of all watched bytes needs {needed} bytes on {device}, which are not free: give fewer "
                    "tensors, or use watch(..., exact=False)"
                ) from error
        return {name: flat.clone() for name, flat in self.flats.items()}

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Write a copy back."""
        self.synchronise()
        for name, before in saved.items():
            self.flats[name].copy_(before)
        self.synchronise()

    def check_writable(self) -> None:
        """Check that this process may write the memory. If other processes share the memory, give a warning.

        Raises:
            ValueError: a view or its memory is read-only.
        """
        if self.read_only:
            raise ValueError(f"{self.read_only[0]} is read-only, but dye writes into every cell: give a writable copy")
        for name, flat in self.flats.items():
            if flat.is_cuda:
                continue
            rights = _rights(flat.data_ptr(), flat.numel())
            if any(right[1] != "w" for right in rights):
                raise ValueError(
                    f"the memory of {name} is mapped read-only, but dye writes into every cell: give a writable copy"
                )
            if any(right[3] == "s" for right in rights):
                warnings.warn(
                    f"the memory of {name} is shared with other processes. Dye restores its bytes, but if this process "
                    "is killed before that, the memory keeps the dye",
                    stacklevel=4,
                )


def memory_of(given: Any, storages: Mapping[str, torch.Tensor] | None = None) -> Memory:
    """Return the memory of tensors.

    Args:
        given: a mapping of names to tensors, as for :func:`kvviz.audit.collect.views_of`. Or a sequence of views. Or a
            Memory, which is returned as it is.
        storages: for views: for each name of a storage, all its bytes as a uint8 tensor with one axis.

    Raises:
        ValueError: there is no tensor. Or a tensor has no bytes. Or a view reaches past its storage. Or two elements of
            a view share a byte. Or a storage of a view is missing.
    """
    if isinstance(given, Memory):
        return given
    if not isinstance(given, Mapping):
        return _of_views(tuple(given), storages)
    try:
        views = views_of(given)
    except RuntimeError as error:  # a fake tensor has a device, but no address
        raise ValueError(
            f"one of the tensors has no bytes in memory: give tensors on cpu or on a GPU ({error})"
        ) from None
    tensors = [
        pair[0] if is_with_axes(pair) else pair
        for key, one in given.items()
        for _, pair in named_tensors(str(key), one)
    ]
    if not any(view.num_elements for view in views):
        raise ValueError(
            f"there is nothing to trace: the {len(views)} tensors have no elements. Give tensors with elements."
        )
    flats: dict[str, torch.Tensor] = {}
    for view, tensor in zip(views, tensors, strict=True):
        if view.num_elements and view.storage.name not in flats:
            flats[view.storage.name] = _flat(view, tensor)
    frozen = [view.name for view, tensor in zip(views, tensors, strict=True) if _is_frozen(tensor)]
    return Memory(tuple(view for view in views if view.num_elements), flats, tuple(frozen), tuple(tensors))


def cell_shape(view: View) -> tuple[int, ...]:
    """Return the sizes of the axes that number the cells of a view."""
    return view.shape[:-1] if view.axes[-1:] and view.axes[-1] in CELL_INNER else view.shape


def _of_views(views: tuple[View, ...], storages: Mapping[str, torch.Tensor] | None) -> Memory:
    if not views:
        raise ValueError("there is nothing to trace: there are 0 views. Give at least one view.")
    names = [view.name for view in views]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two views have the name {twice!r}: give each view its own name")
    wanted = {view.storage.name: view.storage.nbytes for view in views}
    for name, nbytes in wanted.items():
        if name not in (storages or {}):
            raise ValueError(f"the bytes of storage {name!r} are not given: pass storages={{{name!r}: tensor}}")
        flat = storages[name]
        if flat.is_meta or flat.dtype != torch.uint8 or flat.shape != (nbytes,):
            raise ValueError(
                f"storage {name!r} must be a uint8 tensor of shape ({nbytes},) on cpu or on a GPU, not {flat.dtype} of "
                f"shape {tuple(flat.shape)} on {flat.device}"
            )
    return Memory(views, {name: storages[name] for name in wanted}, tuple(v.name for v in views if v.read_only))


def _check_view(view: View, flats: Mapping[str, torch.Tensor]) -> None:
    low, high = view.span_bytes
    nbytes = flats[view.storage.name].numel()
    if low < 0 or high > nbytes:
        raise ValueError(
            f"{view.name} reaches from byte {low} to byte {high}, but {view.storage.name} has {nbytes} bytes: the "
            "memory was freed, or the view is wrong"
        )
    if not view.nested:
        raise ValueError(
            f"two elements of {view.name} share a byte (shape {view.shape}, stride {view.stride}), so the byte has no "
            "single owner: give a view without such elements"
        )


def _flat(view: View, tensor: Any) -> torch.Tensor:
    """Return all bytes of the storage of a view. ``tensor`` is the tensor or the array of the view."""
    if not hasattr(tensor, "untyped_storage"):
        return _at(tensor.__array_interface__["data"][0] - view.start_of((0,) * len(view.shape)), view.storage.nbytes)
    storage = tensor.untyped_storage()
    if tensor.is_meta or not storage.data_ptr():
        raise ValueError(
            f"{view.name} is on {tensor.device} and has no bytes in memory: give a tensor on cpu or on a GPU"
        )
    base = tensor.data_ptr() - view.start_of((0,) * len(view.shape))
    if tensor.device.type == "cpu":
        return _at(base, view.storage.nbytes)
    if (storage.data_ptr(), storage.nbytes()) != (base, view.storage.nbytes):
        raise ValueError(
            f"{view.name} is only a part of its memory on {tensor.device}: give the tensor of the whole memory first"
        )
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _is_frozen(tensor: Any) -> bool:
    return isinstance(tensor, np.ndarray) and not tensor.flags.writeable


def _rights(address: int, nbytes: int) -> list[str]:
    """Return the rights of all parts of a memory, for example ``rw-p``: readable, writable, private."""
    if not MAPS.exists():
        return []
    found = []
    for line in MAPS.read_text().splitlines():
        span, right = line.split(maxsplit=2)[:2]
        first, last = (int(part, 16) for part in span.split("-"))
        if first < address + nbytes and last > address:
            found.append(right)
    return found


def elements_at(view: View, at: np.ndarray) -> np.ndarray:
    """Find the element of a view that holds each byte.

    Args:
        at: bytes of the storage: int64 array of shape (n,).

    Returns:
        int64 array of shape (n,): the flat number of the element, or -1 if no element holds the byte.
    """
    left, number = at - view.start_of(view.lowest), np.zeros(len(at), np.int64)
    inside, inner, axes = left >= 0, view.num_elements, []
    for size, stride in zip(view.shape, view.stride, strict=True):
        inner //= size
        axes.append((abs(stride) * view.itemsize, size, stride < 0, inner))
    for step, size, backwards, inner in sorted((axis for axis in axes if axis[1] > 1), reverse=True):
        index = np.clip(left // step, 0, size - 1)
        left = left - index * step
        number += (size - 1 - index if backwards else index) * inner
    return np.where(inside & (left < view.itemsize), number, -1)


def where(view: View, cell: int) -> str:
    """Return the name of a view and the index of a cell: ``layer 3 K data [block 1, token 0, head 2]``."""
    shape = cell_shape(view)
    index = np.unravel_index(cell, shape) if shape else ()
    axes = view.axes or tuple(f"axis {number}" for number in range(len(shape)))
    return f"{view.name} [{', '.join(f'{axis} {i}' for axis, i in zip(axes, index, strict=False))}]"


def named_index(view: View, cells: np.ndarray) -> dict[str, np.ndarray]:
    """Return the index of each cell along each axis, by the name of the axis."""
    shape = cell_shape(view)
    axes = view.axes or tuple(f"axis {number}" for number in range(len(shape)))
    return dict(zip(axes, np.unravel_index(cells, shape), strict=False)) if shape else {}
