"""Makes views from live tensors and arrays, or from the layers of a vLLM worker. Finds tensors that share memory.

It calls only methods of the given tensors. So it works without importing torch or vLLM, and reads and copies no data.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from typing import Any

from kvviz.audit.arguments import one_of
from kvviz.audit.claims import Disjoint, Follows
from kvviz.audit.packed import PACKED, elements_of
from kvviz.audit.view import ADDRESS_MODULUS, Storage, View
from kvviz.audit.writer import tensors_of_vllm

QUANTISED = {"torch.quint4x2": 2, "torch.quint2x4": 4}
"""Values per byte of the torch types whose shape counts values, although a byte stores several of them."""


@dataclass(frozen=True)
class _Geometry:
    """One tensor or array. Its memory is ``[base, base + nbytes)``, and its first element starts at byte ``first``.

    ``space`` says which addresses can be compared: the addresses of one device. A storage without an address (``meta``)
    has a space of its own.
    """

    name: str
    space: tuple
    base: int
    nbytes: int
    first: int
    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    itemsize: int
    axes: tuple[str, ...] = ()


def views_of(tensors: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> tuple[View, ...]:
    """Return the views of torch tensors (CPU, GPU or ``meta``) and numpy arrays.

    Tensors that share memory get the same storage: ``storage 0``, ``storage 1``, ... in order of appearance. A view's
    role is ``scale`` if the last word of its name contains "scale", otherwise ``data``. Words end at blanks and dots.

    Args:
        tensors: name to tensor, name to a pair of a tensor and the names of its axes, or name to a list of tensors. The
            tensors of a list are numbered: ``k 0``, ``k 1``.
        dtypes: the type of tensors of bytes that store several values together, for example ``{"K data": "q8_0"}``. The
            names are those of :data:`~kvviz.audit.packed.PACKED`.

    Raises:
        ValueError: a value is neither a strided tensor nor an array, two views would have the same name, or a tensor
            does not have whole elements of its type.
    """
    type_of = {
        name: (dtypes or {}).get(key) for key, given in tensors.items() for name, _ in named_tensors(str(key), given)
    }
    if unknown := [key for key in dtypes or {} if key not in tensors]:
        raise ValueError(f"dtypes names {unknown[0]!r}, but no tensor has this name")
    found = [
        _geometry(name, tensor) for key, given in tensors.items() for name, tensor in named_tensors(str(key), given)
    ]
    names = [geometry.name for geometry in found]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tensors would get the name {double!r}: rename one of them")
    storages = _storages(found)
    views = (_view(geometry, *storages[geometry.space, geometry.base]) for geometry in found)
    return tuple(_as_packed(view, type_of[view.name]) if type_of[view.name] else view for view in views)


def views_of_vllm(static_forward_context: Mapping[str, Any]) -> tuple[View, ...]:
    """Return the views of a vLLM worker's attention layers, named by layer: see :func:`tensors_of_vllm`.

    Args:
        static_forward_context: the runner's ``compilation_config.static_forward_context``.
    """
    return views_of(tensors_of_vllm(static_forward_context))


def usual_claims(views: Sequence[View]) -> tuple[Disjoint | Follows, ...]:
    """Return the claims that hold in any cache whose layers share no bytes. :func:`write_views` writes the same claims.

    - No two data views share a byte. No two scale views share a byte.
    - If there is a view ``X data``, the view ``X scale`` shares no byte with any data view. If each scale is the last
      part of its cell in ``X data``, this is not claimed: then ``X data`` includes the scales.
    - Each element of a view ``X scale`` starts where the data of its cell in the view ``X data`` ends. This is claimed
      only if both views lie in one storage, there is one scale per cell, and there is room between the cells. So
      data views must be given without their tails.
    """
    by_name = {view.name: view for view in views}
    scales = [view for view in views if view.name.endswith(" scale")]
    pairs = [(scale, by_name.get(f"{scale.name.removesuffix(' scale')} data")) for scale in scales]
    follow = [
        Follows(scale.name, data.name, data.shape[-1] * data.itemsize)
        for scale, data in pairs
        if data and _has_room(data, scale)
    ]
    apart = {scale.name for scale, data in pairs if data and not _ends_its_cell(data, scale)}
    scale_names = tuple(view.name for view in views if view.role == "scale")
    groups = [tuple(view.name for view in views if view.role != "scale" or view.name in apart)]
    groups += [scale_names] if not apart.issuperset(scale_names) else []
    return (*(Disjoint(names) for names in groups if len(names) > 1), *follow)


def _ends_its_cell(data: View, scale: View) -> bool:
    """Return True if each scale is the last bytes of its cell in a data view that has its tails."""
    if data.storage != scale.storage or data.shape[:-1] != scale.shape or data.stride[-1:] != (1,):
        return False
    steps = zip(data.stride, scale.stride, scale.shape, strict=False)
    if any(step * data.itemsize != scale_step * scale.itemsize for step, scale_step, size in steps if size > 1):
        return False
    cell_end = (data.offset + data.shape[-1]) * data.itemsize
    return (scale.offset + 1) * scale.itemsize == cell_end


def _has_room(data: View, scale: View) -> bool:
    """Return True if there is one scale per data cell, and cells are farther apart than their data is long."""
    if data.storage != scale.storage or data.shape[:-1] != scale.shape or not scale.shape or data.stride[-1] != 1:
        return False
    return min(data.stride[:-1]) > data.shape[-1]


def named_tensors(name: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the tensor; for a list, yield each tensor with its number."""
    if isinstance(given, list | tuple) and not is_with_axes(given):
        for number, part in enumerate(given):
            yield from named_tensors(f"{name} {number}", part)
    else:
        yield name, given


def is_with_axes(given: Any) -> bool:
    """Return True for a pair of a tensor and the names of its axes."""
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], tuple)


def _geometry(name: str, given: Any) -> _Geometry:
    if is_with_axes(given):
        return replace(_geometry(name, given[0]), axes=given[1])
    if hasattr(given, "untyped_storage"):
        return _of_tensor(name, given)
    if hasattr(given, "__array_interface__"):
        return _of_array(name, given)
    raise ValueError(f"{name} is of type {type(given).__name__}: give torch tensors and numpy arrays")


def _of_tensor(name: str, tensor: Any) -> _Geometry:
    try:
        memory, offset, stride = tensor.untyped_storage(), tensor.storage_offset(), tuple(tensor.stride())
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{name}: a tensor of layout {tensor.layout} has no strides: give a strided tensor") from error
    shape = tuple(int(n) for n in tensor.shape)
    if (values := QUANTISED.get(str(tensor.dtype))) and shape:
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: a tensor of type {tensor.dtype} must be contiguous to have whole bytes")
        shape = (*shape[:-1], -(-shape[-1] // values))
        stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        offset //= values
    size, base = tensor.element_size(), memory.data_ptr()
    space = (str(tensor.device),) if base else (str(tensor.device), memory._cdata)
    bytes_ = tuple(int(step) * size for step in stride)
    return _Geometry(name, space, base, memory.nbytes(), base + int(offset) * size, shape, bytes_, size)


def _of_array(name: str, array: Any) -> _Geometry:
    # An array does not hold the size of its memory. Follow .base to the last array: this array covers the whole
    # memory.
    root = array
    while getattr(getattr(root, "base", None), "__array_interface__", None) is not None:
        root = root.base
    first, shape, stride, size = _strided(array)
    low, high = _reach(*_strided(root))
    return _Geometry(name, ("cpu",), low, high - low, first, shape, stride, size)


def _strided(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Return the address of the first element, the shape, the strides in bytes and the bytes of one element.

    ``__array_interface__`` is numpy's description of an array. Its ``typestr`` is for example ``<f4``: byte order,
    kind, and bytes of one element. Kind U counts characters of 4 bytes.
    """
    known = array.__array_interface__
    kind, digits = known["typestr"][1], "".join(takewhile(str.isdigit, known["typestr"][2:]))
    shape, size = tuple(known["shape"]), int(digits) * (4 if kind == "U" else 1)
    if size == 0:
        raise ValueError(f"an array of type {known['typestr']} has elements of 0 bytes: leave it out")
    dense = tuple(prod(shape[axis + 1 :]) * size for axis in range(len(shape)))
    return known["data"][0], shape, tuple(known.get("strides") or dense), size


def _reach(first: int, shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> tuple[int, int]:
    """Return the address range from the lowest to the highest byte of an array."""
    if 0 in shape:
        return first, first
    ends = [(n - 1) * step for n, step in zip(shape, stride, strict=True)]
    return first + sum(min(end, 0) for end in ends), first + sum(max(end, 0) for end in ends) + size


def _storages(found: Sequence[_Geometry]) -> dict[tuple, tuple[Storage, int]]:
    """Return the storage of each memory, and the storage's address. Overlapping memories of one space are merged."""
    stop_at: dict[tuple, int] = {}  # (space, first address) -> end of the largest memory that starts there
    for geometry in found:
        key = geometry.space, geometry.base
        stop_at[key] = max(stop_at.get(key, 0), geometry.base + geometry.nbytes)
    first_of: dict[tuple, tuple] = {}  # memory -> the first of the memories that are merged with it
    merged_stop: dict[tuple, int] = {}
    first: tuple | None = None
    for key in sorted(stop_at, key=_by_address):
        overlaps = first is not None and first[0] == key[0] and key[1] < merged_stop[first]
        first = first if overlaps else key
        first_of[key], merged_stop[first] = first, max(merged_stop.get(first, 0), stop_at[key])
    storages: dict[tuple, Storage] = {}
    for geometry in found:
        first = first_of[geometry.space, geometry.base]
        address = first[1] % ADDRESS_MODULUS if first[1] else None  # a meta tensor has no address
        storages.setdefault(first, Storage(f"storage {len(storages)}", merged_stop[first] - first[1], address))
    return {key: (storages[first], first[1]) for key, first in first_of.items()}


def _as_packed(view: View, dtype: str) -> View:
    """Return a view of bytes as a view of elements that store several values together."""
    itemsize, values = PACKED[one_of(f"{view.name}: type", dtype, PACKED)]
    if view.itemsize != 1:
        raise ValueError(f"{view.name} has elements of {view.itemsize} bytes: a tensor of type {dtype} must have bytes")
    try:
        shape, stride, offset = elements_of((view.shape, view.stride, view.offset), itemsize, "bytes")
    except ValueError as error:
        raise ValueError(f"{view.name}: {error}") from None
    return replace(view, shape=shape, stride=stride, offset=offset, itemsize=itemsize, values=values)


def _by_address(key: tuple) -> tuple[str, int]:
    return str(key[0]), key[1]


def _view(geometry: _Geometry, storage: Storage, base: int) -> View:
    """Return the view of a tensor in a storage that starts at address ``base``.

    Offset and strides of a view count elements. If an address or a stride is not a multiple of the element's size, the
    view counts bytes instead, and has one more axis for the bytes of an element.
    """
    last_word = geometry.name.lower().replace(".", " ").split(" ")[-1]
    role = "scale" if "scale" in last_word else "data"
    size, offset_bytes = geometry.itemsize, geometry.first - base
    if any(number % size for number in (offset_bytes, *geometry.stride_bytes)):
        shape, stride = (*geometry.shape, size), (*geometry.stride_bytes, 1)
        axes = (*(geometry.axes or (f"axis {axis}" for axis in range(len(geometry.shape)))), "byte")
        return View(geometry.name, storage, shape, stride, offset_bytes, axes=axes, role=role)
    stride = tuple(step // size for step in geometry.stride_bytes)
    return View(geometry.name, storage, geometry.shape, stride, offset_bytes // size, size, geometry.axes, role)
