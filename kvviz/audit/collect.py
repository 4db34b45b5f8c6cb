"""From real things to views: dicts of tensors or arrays, a vLLM worker's layers. Tensors that share memory are found.

Only the tensors' own methods are used, so neither torch nor vLLM need be importable; nothing is read or copied.
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
    """One tensor or array: its memory ``[base, base + nbytes)``, and its elements from ``first`` on, in bytes.

    ``space`` is the device whose addresses these are, or the one storage itself where it has no address.
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
    """The views of torch tensors (CPU, GPU or ``meta``) and numpy arrays, by name; lists of them are numbered.

    Tensors over one memory lie in one storage: ``storage 0``, ``storage 1``, ... in order of appearance. The role is
    ``scale`` where the name's last word (behind blank or dot) speaks of a scale, else ``data``.

    Raises:
        ValueError: something is neither a strided tensor nor an array, or two would have one name.
    """
    found = [_geometry(name, tensor) for key, given in tensors.items() for name, tensor in _named(str(key), given)]
    names = [one.name for one in found]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tensors would be named {double!r}: rename one, lists are numbered")
    homes = _storages(found)
    return tuple(_view(one, *homes[one.space, one.base]) for one in found)


def views_of_vllm(static_forward_context: Mapping[str, Any]) -> tuple[View, ...]:
    """The views of a vLLM worker's attention layers, by layer name: see :func:`tensors_of_vllm`.

    The context is the runner's ``compilation_config.static_forward_context``.
    """
    return views_of(tensors_of_vllm(static_forward_context))


def usual_claims(views: Sequence[View]) -> tuple[Disjoint | Follows, ...]:
    """What holds in any cache whose layers share nothing; :func:`write_views` writes these very claims.

    Data lie on no other data, scales on no other scales. And a view ``... scale`` lies right behind the cells of the
    view ``... data`` whose name begins alike, where both lie in one storage, there is a scale a cell, and cells are far
    enough apart to leave room for it: so data must be given without their tails.
    """
    by_name = {view.name: view for view in views}
    pairs = [(v, by_name.get(f"{v.name.removesuffix(' scale')} data")) for v in views if v.name.endswith(" scale")]
    follow = [Follows(v.name, of.name, of.shape[-1] * of.itemsize) for v, of in pairs if of and _has_room(of, v)]
    named = [tuple(v.name for v in views if (v.role == "scale") == scale) for scale in (False, True)]
    return (*(Disjoint(names) for names in named if len(names) > 1), *follow)


def _has_room(data: View, scale: View) -> bool:
    if data.storage != scale.storage or data.shape[:-1] != scale.shape or not scale.shape or data.stride[-1] != 1:
        return False
    return min(data.stride[:-1]) > data.shape[-1]


def _named(name: str, given: Any) -> Iterator[tuple[str, Any]]:
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
    raise ValueError(f"{name} is {type(given).__name__}: views are made of torch tensors and numpy arrays")


def _of_tensor(name: str, tensor: Any) -> _Geometry:
    try:
        memory, offset, stride = tensor.untyped_storage(), tensor.storage_offset(), tuple(tensor.stride())
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{name}: a tensor of layout {tensor.layout} has no strides to look at") from error
    size, base = tensor.element_size(), memory.data_ptr()
    space = (str(tensor.device),) if base else (str(tensor.device), memory._cdata)
    bytes_ = tuple(int(step) * size for step in stride)
    shape = tuple(int(n) for n in tensor.shape)
    return _Geometry(name, space, base, memory.nbytes(), base + int(offset) * size, shape, bytes_, size)


def _of_array(name: str, array: Any) -> _Geometry:
    root = array
    while getattr(getattr(root, "base", None), "__array_interface__", None) is not None:
        root = root.base
    first, shape, stride, size = _strided(array)
    low, high = _reach(*_strided(root))
    return _Geometry(name, ("cpu",), low, high - low, first, shape, stride, size)


def _strided(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Address of the first element, shape, strides in bytes and bytes of an element."""
    known = array.__array_interface__
    kind, digits = known["typestr"][1], "".join(takewhile(str.isdigit, known["typestr"][2:]))
    shape, size = tuple(known["shape"]), int(digits) * (4 if kind == "U" else 1)
    if size == 0:
        raise ValueError(f"an array of type {known['typestr']} has elements of no bytes: it claims nothing")
    dense = tuple(prod(shape[axis + 1 :]) * size for axis in range(len(shape)))
    return known["data"][0], shape, tuple(known.get("strides") or dense), size


def _reach(first: int, shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> tuple[int, int]:
    if 0 in shape:
        return first, first
    ends = [(n - 1) * step for n, step in zip(shape, stride, strict=True)]
    return first + sum(min(end, 0) for end in ends), first + sum(max(end, 0) for end in ends) + size


def _storages(found: Sequence[_Geometry]) -> dict[tuple, tuple[Storage, int]]:
    """For each memory its storage and the storage's address; memories of one space that overlap are one."""
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
    """In elements; where an address or a step is no multiple of the element, in bytes along one more axis."""
    last_word = one.name.lower().replace(".", " ").split(" ")[-1]
    role, size, first = "scale" if "scale" in last_word else "data", one.itemsize, one.first - base
    if any(number % size for number in (first, *one.stride_bytes)):
        axes = (*(f"axis {axis}" for axis in range(len(one.shape))), "byte")
        return View(one.name, storage, (*one.shape, size), (*one.stride_bytes, 1), first, 1, axes, role)
    stride = tuple(step // size for step in one.stride_bytes)
    return View(one.name, storage, one.shape, stride, first // size, size, role=role)
