"""Describes where the elements of a strided tensor lie in memory: its geometry, without its data.

A view is made from a torch tensor (a ``meta`` tensor too), or written by hand. This module does not import torch.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod

import numpy as np

from kvviz.audit.arguments import is_integer, plain
from kvviz.audit.packed import packed_axis

MAX_ELEMENTS = 1 << 26
"""Largest number of elements whose addresses are listed one by one. 64 million addresses take 512 MiB."""

MAX_ADDRESS = 1 << 62
"""Limit of addresses in bytes. The sum of two smaller addresses fits in 64 bits."""


ADDRESS_MODULUS = 1 << 21
"""The address of a storage is kept modulo this number: 2 MiB, the largest boundary in use (a huge page)."""


@dataclass(frozen=True)
class Storage:
    """One allocation: its name and its size in bytes. Byte offsets count from its first byte.

    Two storages are equal if their names and sizes are equal.

    Args:
        address: the address of the first byte modulo ``address_modulus``, or None if the address is not known. Only
            checks of alignment need it.
        address_modulus: a power of two.

    Raises:
        ValueError: ``nbytes`` is not an integer of at least 0, ``address_modulus`` is not a power of two, or
            ``address`` is not an integer from 0 to ``address_modulus - 1``.
    """

    name: str
    nbytes: int
    address: int | None = field(default=None, compare=False)
    address_modulus: int = field(default=ADDRESS_MODULUS, compare=False)

    def __post_init__(self) -> None:
        if not is_integer(self.nbytes):
            raise ValueError(f"storage {self.name}: nbytes must be an integer of at least 0, not {self.nbytes!r}")
        for part in fields(self):
            object.__setattr__(self, part.name, plain(getattr(self, part.name)))
        modulus = self.address_modulus
        if not is_integer(modulus, 1) or modulus & (modulus - 1):
            raise ValueError(f"storage {self.name}: address_modulus must be a power of two, not {modulus!r}")
        if self.address is not None and not (is_integer(self.address) and self.address < modulus):
            raise ValueError(
                f"storage {self.name}: address must be an integer from 0 to {modulus - 1}, not {self.address!r}: give "
                f"the remainder of the address divided by {modulus}"
            )

    def address_modulo(self, boundary: int) -> int | None:
        """Return the address of the first byte modulo ``boundary``. If the address is not known, return None."""
        known = self.address is not None and self.address_modulus % boundary == 0
        return self.address % boundary if known else None


@dataclass(frozen=True)
class View:
    """A strided view. Each element has ``itemsize`` bytes. The first byte of an element is ``start_of(index)``.

    Args:
        name: a name for people, for example ``layer 3 K scale``.
        storage: the allocation in which the view lies.
        shape, stride: one integer per axis. Strides count elements. Lists and numpy integers are converted.
        offset: storage offset of element (0, ..., 0), in elements.
        itemsize: bytes of one element.
        axes: a name for each axis, for example ``("block", "token", "head")``. It may be empty.
        role: the purpose of the view: ``data``, ``scale`` or any other word.
        values: number of values that one element stores: 2 for int4, 32 for q8_0. See :mod:`kvviz.audit.packed`.
        read_only: True if the program only reads through this view. Readers may share bytes with each other.

    Raises:
        ValueError: shape, stride and axes differ in length, a number is not an integer, a size is negative, or
            an element lies 2**62 bytes or more from the storage's start.
    """

    name: str
    storage: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    itemsize: int = 1
    axes: tuple[str, ...] = ()
    role: str = field(default="data")
    values: int = 1
    read_only: bool = False

    def __post_init__(self) -> None:
        for part in fields(self):
            object.__setattr__(self, part.name, plain(getattr(self, part.name)))
        if len(self.shape) != len(self.stride):
            raise ValueError(f"{self.name}: shape {self.shape} and stride {self.stride} differ in length")
        if self.axes and len(self.axes) != len(self.shape):
            raise ValueError(f"{self.name}: {len(self.axes)} axis names {self.axes} for {len(self.shape)} axes")
        for number in (*self.shape, *self.stride, self.offset, self.itemsize, self.values):
            if type(number) is not int:
                raise ValueError(
                    f"{self.name}: shape, stride, offset, itemsize and values must be integers, not {number!r}"
                )
        farthest = sum(abs(n * step) for n, step in zip(self.shape, self.stride, strict=True)) + abs(self.offset)
        if farthest * self.itemsize >= MAX_ADDRESS:
            raise ValueError(f"{self.name}: shape {self.shape} and stride {self.stride} reach beyond 2**62 bytes")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"{self.name}: the sizes of shape {self.shape} must be at least 0")
        if self.itemsize < 1 or self.values < 1:
            number = ("itemsize", self.itemsize) if self.itemsize < 1 else ("values", self.values)
            raise ValueError(f"{self.name}: {number[0]} must be at least 1, not {number[1]}")
        if type(self.read_only) is not bool:
            raise ValueError(f"{self.name}: read_only must be True or False, not {self.read_only!r}")

    @classmethod
    def of(cls, tensor, name: str, storage: Storage, axes: tuple[str, ...] = (), role: str = "data") -> "View":
        """Return the geometry of a torch tensor. ``storage`` must describe the tensor's own untyped storage.

        Raises:
            ValueError: the tensor's storage has another size than ``storage``.
        """
        if storage.nbytes != tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{name}: storage {storage.name!r} should have {storage.nbytes} bytes, "
                f"but the tensor's storage has {tensor.untyped_storage().nbytes()}"
            )
        geometry = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.element_size())
        return cls(name, storage, *geometry, axes, role)

    @cached_property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def start_of(self, index: tuple[int, ...]) -> int:
        """Return the byte offset of the first byte of one element."""
        return (self.offset + sum(int(i) * step for i, step in zip(index, self.stride, strict=True))) * self.itemsize

    @property
    def lowest(self) -> tuple[int, ...]:
        """Return the index of the element with the lowest address."""
        return tuple(size - 1 if step < 0 else 0 for step, size in zip(self.stride, self.shape, strict=True))

    @cached_property
    def span_bytes(self) -> tuple[int, int]:
        """Return the byte range ``[start, stop)`` from the lowest to the highest element.

        The range means nothing if the view has no elements.
        """
        start = self.start_of(self.lowest)
        reach = sum(abs(step) * (size - 1) for step, size in zip(self.stride, self.shape, strict=True))
        return start, start + (reach + 1) * self.itemsize

    @cached_property
    def nested(self) -> bool:
        """Return True if each stride is larger than the reach of all axes with smaller strides together.

        Then no two elements overlap.
        """
        reach = 1
        for step, size in sorted((abs(step), n) for step, n in zip(self.stride, self.shape, strict=True) if n > 1):
            if step < reach:
                return False
            reach += step * (size - 1)
        return True

    @cached_property
    def starts(self) -> np.ndarray:
        """Return the byte offset of the first byte of each element: a read-only int64 array in the shape of the view.

        Raises:
            ValueError: the view has more than :data:`MAX_ELEMENTS` elements.
        """
        return self.list_starts()

    def list_starts(self) -> np.ndarray:
        """Return the same array as :attr:`starts`, but do not keep it in memory."""
        if self.num_elements > MAX_ELEMENTS:
            raise ValueError(f"{self.name}: {self.num_elements} elements are too many to list (at most {MAX_ELEMENTS})")
        starts = np.full(self.shape, self.offset * self.itemsize, np.int64)
        for axis, (size, step) in enumerate(zip(self.shape, self.stride, strict=True)):
            along = np.arange(size, dtype=np.int64) * (step * self.itemsize)
            starts += along.reshape([-1 if i == axis else 1 for i in range(len(self.shape))])
        starts.flags.writeable = False
        return starts

    def bytes_of(self, starts: np.ndarray) -> np.ndarray:
        """Return every byte of the elements that start at ``starts``: int64, shape ``(*starts.shape, itemsize)``."""
        return starts[..., None] + np.arange(self.itemsize)

    @property
    def all_bytes(self) -> np.ndarray:
        """Return every byte of every element as a flat array. Bytes of overlapping elements are repeated."""
        return self.bytes_of(self.starts).ravel()

    def index(self, element: int) -> tuple[int, ...]:
        """Return the index of an element from its flat number. The last axis changes fastest."""
        return tuple(int(i) for i in np.unravel_index(element, self.shape)) if self.shape else ()

    def where(self, index: tuple[int, ...]) -> str:
        """Return an element's name and index as text: ``layer 3 K scale [block 1, token 0, head 2]``."""
        names = self.axes or tuple(f"axis {i}" for i in range(len(index)))
        shown = [str(i) for i in index]
        axis = packed_axis(self.shape, self.stride) if self.values > 1 else None
        if axis is not None:
            first = index[axis] * self.values
            shown[axis] = f"{first} to {first + self.values - 1}"
        return f"{self.name} [{', '.join(f'{a} {i}' for a, i in zip(names, shown, strict=True))}]"
