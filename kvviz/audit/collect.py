"""Makes views from live tensors and arrays, or from the layers of a vLLM worker. Finds tensors that share memory.

It calls only methods of the given tensors. So it works without importing torch or vLLM, and reads and copies no data.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import Any

from kvviz.audit.claims import Disjoint, Follows
from kvviz.audit.view import Storage, View
from kvviz.audit.writer import tensors_of_vllm


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


def views_of(tensors: Mapping[str, Any]) -> tuple[View, ...]:
    """Return the views of torch tensors (CPU, GPU or ``meta``) and numpy arrays.

    Tensors that share memory get the same storage: ``storage 0``, ``storage 1``, ... in order of appearance. A view's
    role is ``scale`` if the last word of its name contains "scale", otherwise ``data``. Words end at blanks and dots.

    Args:
        tensors: name to tensor, or name to a list of tensors. The tensors of a list are numbered: ``k 0``, ``k 1``.

    Raises:
        ValueError: a value is neither a strided tensor nor an array, or two views would have the same name.
    """
    found = [_geometry(name, tensor) for key, given in tensors.items() for name, tensor in _named(str(key), given)]
    names = [one.name for one in found]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tensors would be named {double!r} (lists are numbered): rename one of them")
    storages = _storages(found)
    return tuple(_view(one, *storages[one.space, one.base]) for one in found)


def views_of_vllm(static_forward_context: Mapping[str, Any]) -> tuple[View, ...]:
    """Return the views of a vLLM worker's attention layers, named by layer: see :func:`tensors_of_vllm`.

    Args:
        static_forward_context: the runner's ``compilation_config.static_forward_context``.
    """
    return views_of(tensors_of_vllm(static_forward_context))


def usual_claims(views: Sequence[View]) -> tuple[Disjoint | Follows, ...]:
    """Return the claims that hold in any cache whose layers share no bytes. :func:`write_views` writes the same claims.

    - No two data views share a byte. No two scale views share a byte.
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
    groups = [tuple(view.name for view in views if (view.role == "scale") == is_scale) for is_scale in (False, True)]
    return (*(Disjoint(names) for names in groups if len(names) > 1), *follow)


def _has_room(data: View, scale: View) -> bool:
    """Return True if there is one scale per data cell, and cells are farther apart than their data is long."""
    if data.storage != scale.storage or data.shape[:-1] != scale.shape or not scale.shape or data.stride[-1] != 1:
        return False
    return min(data.stride[:-1]) > data.shape[-1]


def _named(name: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the tensor; for a list, yield each tensor with its number."""
    if isinstance(given, list | tuple):
        for number, part in enumerate(given):
            yield from _named(f"{name} {number}", part)
    else:
        yield name, given


def _geometry(name: str, given: Any) -> _Geometry:
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
    size, base = tensor.element_size(), memory.data_ptr()
    space = (str(tensor.device),) if base else (str(tensor.device), memory._cdata)
    bytes_ = tuple(int(step) * size for step in stride)
    shape = tuple(int(n) for n in tensor.shape)
    return _Geometry(name, space, base, memory.nbytes(), base + int(offset) * size, shape, bytes_, size)


def _of_array(name: str, array: Any) -> _Geometry:
    # An array does not hold the size of its memory. The last array in the chain of bases covers all of it.
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
    ends: dict[tuple, int] = {}
    for one in found:
        key = one.space, one.base
        ends[key] = max(ends.get(key, 0), one.base + one.nbytes)
    start_of, stop_of, last = {}, {}, None
    for key in sorted(ends, key=_by_address):
        joined = last is not None and last[0] == key[0] and key[1] < stop_of[last]
        last = last if joined else key
        start_of[key], stop_of[last] = last, max(stop_of.get(last, 0), ends[key])
    named: dict[tuple, Storage] = {}
    for one in found:
        start = start_of[one.space, one.base]
        named.setdefault(start, Storage(f"storage {len(named)}", stop_of[start] - start[1]))
    return {key: (named[start], start[1]) for key, start in start_of.items()}


def _by_address(key: tuple) -> tuple[str, int]:
    return str(key[0]), key[1]


def _view(one: _Geometry, storage: Storage, base: int) -> View:
    """Return the view of one geometry.

    Offset and strides of a view count elements. If an address or a stride is not a multiple of the element's size, the
    view counts bytes instead, and has one more axis for the bytes of an element.
    """
    last_word = one.name.lower().replace(".", " ").split(" ")[-1]
    role, size, first = "scale" if "scale" in last_word else "data", one.itemsize, one.first - base
    if any(number % size for number in (first, *one.stride_bytes)):
        axes = (*(f"axis {axis}" for axis in range(len(one.shape))), "byte")
        return View(one.name, storage, (*one.shape, size), (*one.stride_bytes, 1), first, 1, axes, role)
    stride = tuple(step // size for step in one.stride_bytes)
    return View(one.name, storage, one.shape, stride, first // size, size, role=role)
