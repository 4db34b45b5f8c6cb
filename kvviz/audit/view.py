"""View: the geometry of a strided tensor over a storage, without its data.

A view answers where each of its elements starts. It is made from any torch tensor, a ``meta`` one
included, or written down by hand; nothing here needs torch to be importable.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from numbers import Integral

import numpy as np

MAX_ELEMENTS = 1 << 26
"""Largest number of elements whose addresses are listed one by one."""

MAX_ADDRESS = 1 << 62
"""Addresses stay below this, so that 64-bit arithmetic on them is exact."""


@dataclass(frozen=True)
class Storage:
    """One allocation: a name, and its size in bytes. Byte offsets are relative to its start."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class View:
    """A strided view: element ``index`` occupies ``itemsize`` bytes from ``offset_bytes(index)``.

    Args:
        name: what a person calls it, for example ``layer 3 K scale``.
        storage: the allocation it lies in.
        shape, stride: per axis; strides in elements.
        offset: storage offset of element (0, ..., 0), in elements.
        itemsize: bytes of one element.
        axes: a name for each axis, for example ``("block", "token", "head")``; may be empty.
        role: what it is for: ``data``, ``scale`` or any word of the caller's.

    Raises:
        ValueError: shape, stride and axes differ in length, or a number is not an integer.
    """

    name: str
    storage: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    itemsize: int = 1
    axes: tuple[str, ...] = ()
    role: str = field(default="data")

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise ValueError(f"{self.name}: shape {self.shape} and stride {self.stride} differ in length")
        if self.axes and len(self.axes) != len(self.shape):
            raise ValueError(f"{self.name}: {len(self.axes)} axis names {self.axes} for {len(self.shape)} axes")
        for number in (*self.shape, *self.stride, self.offset, self.itemsize):
            if not isinstance(number, Integral):
                raise ValueError(f"{self.name}: shape, stride, offset and itemsize are integers, not {number!r}")
        far = sum(abs(n * step) for n, step in zip(self.shape, self.stride, strict=True)) + abs(self.offset)
        if far * self.itemsize >= MAX_ADDRESS:
            raise ValueError(f"{self.name}: shape {self.shape} and stride {self.stride} reach beyond 2**62 bytes")
        if any(n < 0 for n in self.shape) or self.itemsize < 1:
            raise ValueError(
                f"{self.name}: shape {self.shape} must not be negative, itemsize {self.itemsize} at least 1"
            )

    @classmethod
    def of(cls, tensor, name: str, storage: Storage, axes: tuple[str, ...] = (), role: str = "data") -> "View":
        """The geometry of a torch tensor; ``storage`` must describe the tensor's own untyped storage."""
        if storage.nbytes != tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{name}: storage {storage.name!r} is said to have {storage.nbytes} bytes, "
                f"the tensor's own has {tensor.untyped_storage().nbytes()}"
            )
        geometry = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.element_size())
        return cls(name, storage, *geometry, axes, role)

    @cached_property
    def num_elements(self) -> int:
        """Number of index tuples."""
        return prod(self.shape)

    def start_of(self, index: tuple[int, ...]) -> int:
        """Byte offset of the first byte of one element."""
        return (self.offset + sum(i * step for i, step in zip(index, self.stride, strict=True))) * self.itemsize

    @property
    def lowest(self) -> tuple[int, ...]:
        """The element with the lowest address."""
        return tuple(size - 1 if step < 0 else 0 for step, size in zip(self.stride, self.shape, strict=True))

    @cached_property
    def span_bytes(self) -> tuple[int, int]:
        """``[start, stop)`` from the lowest byte that the view claims to the highest; meaningless when it is empty."""
        start = self.start_of(self.lowest)
        reach = sum(abs(step) * (size - 1) for step, size in zip(self.stride, self.shape, strict=True))
        return start, start + (reach + 1) * self.itemsize

    @cached_property
    def nested(self) -> bool:
        """True when each stride steps over everything inside it, so that no two elements can meet."""
        reach = 1
        for step, size in sorted((abs(step), n) for step, n in zip(self.stride, self.shape, strict=True) if n > 1):
            if step < reach:
                return False
            reach += step * (size - 1)
        return True

    @cached_property
    def starts(self) -> np.ndarray:
        """Byte offset of the first byte of each element: int64, of the view's shape, read-only.

        Raises:
            ValueError: more than :data:`MAX_ELEMENTS` elements.
        """
        if self.num_elements > MAX_ELEMENTS:
            raise ValueError(f"{self.name}: {self.num_elements} elements are too many to list (at most {MAX_ELEMENTS})")
        starts = np.full(self.shape, self.offset * self.itemsize, np.int64)
        for axis, (size, step) in enumerate(zip(self.shape, self.stride, strict=True)):
            along = np.arange(size, dtype=np.int64) * (step * self.itemsize)
            starts += along.reshape([-1 if i == axis else 1 for i in range(len(self.shape))])
        starts.flags.writeable = False
        return starts

    def bytes_of(self, starts: np.ndarray) -> np.ndarray:
        """Every byte of the elements that start at ``starts``: int64, shape ``(*starts.shape, itemsize)``."""
        return starts[..., None] + np.arange(self.itemsize)

    @property
    def all_bytes(self) -> np.ndarray:
        """Every byte that the view claims, flat, an entry for each byte of each element."""
        return self.bytes_of(self.starts).ravel()

    def index(self, element: int) -> tuple[int, ...]:
        """Coordinates of the flat element number ``element``."""
        return tuple(int(i) for i in np.unravel_index(element, self.shape)) if self.shape else ()

    def where(self, index: tuple[int, ...]) -> str:
        """Coordinates in words: ``layer 3 K scale [block 1, token 0, head 2]``."""
        names = self.axes or tuple(f"axis {i}" for i in range(len(index)))
        return f"{self.name} [{', '.join(f'{a} {i}' for a, i in zip(names, index, strict=True))}]"
