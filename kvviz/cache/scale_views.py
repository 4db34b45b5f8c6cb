"""Carves scale views from a KV view, in the two ways of vLLM's Triton backend.

Up to vLLM 0.25.1, the backend computes the scale views from the *shape* of the KV view. From vLLM 0.26.0 on, it uses
the *strides*. In both ways, a layer gets two scale views, one for K and one for V. Each scale view has shape
``(B, N, H)``, and lies in the storage of the KV view. Scales are float32 in all released modes.

In all shapes, B is the number of blocks, N the tokens per block, H the KV heads, and C the elements of a cell.
"""

import torch


def kv_halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K cells and the V cells of the KV view of one layer. No byte is copied.

    Both results have shape ``(B, N, H, C)``.

    Raises:
        ValueError: the innermost stride is not 1. Or the shape is not ``(B, 2, N, H, C)`` and not ``(B, H, N, 2C)``.
    """
    if kv_cache.dim() and kv_cache.stride(-1) != 1:
        raise ValueError(
            f"the innermost stride is {kv_cache.stride(-1)}, but it must be 1, because the bytes of a cell must be "
            "adjacent: pass the KV view that allocate() made"
        )
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
        return kv_cache[:, 0], kv_cache[:, 1]
    if kv_cache.dim() == 4 and kv_cache.shape[-1] % 2 == 0:
        cell = kv_cache.shape[-1] // 2
        return kv_cache[..., :cell].transpose(1, 2), kv_cache[..., cell:].transpose(1, 2)
    raise ValueError(
        f"the KV view has shape {tuple(kv_cache.shape)}: pass a view of shape (B, 2, N, H, C) or (B, H, N, 2C)"
    )


def carve_from_shape(
    kv_cache: torch.Tensor, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carve scale views as vLLM did up to 0.25.1. The strides are computed from the shape only.

    The strides and the storage offset of the KV view are not used. So the scale views are correct only if the KV view
    is dense, and starts at the start of the *storage*. For every other KV view, the scale views lie in the wrong place
    (vLLM issue 48412).

    Raises:
        ValueError: the KV view does not have the split packing. Or a size is not a multiple of the size of a scale.
    """
    if kv_cache.dim() != 5:
        raise ValueError(
            f"the KV view has shape {tuple(kv_cache.shape)}, but only the split packing (B, 2, N, H, C) of vLLM 0.20 "
            "to 0.25 can be carved from the shape: carve from the strides"
        )
    blocks, _, tokens, heads, cell = kv_cache.shape
    elements, width = _storage_as(scale_dtype, kv_cache), scale_dtype.itemsize
    _check_multiple("a cell", cell, scale_dtype)
    strides = [step // width for step in (2 * tokens * heads * cell, heads * cell, cell)]
    k_offset = (cell - width) // width
    v_offset = k_offset + tokens * heads * cell // width
    k_scale, v_scale = (elements.as_strided((blocks, tokens, heads), strides, start) for start in (k_offset, v_offset))
    return k_scale, v_scale


def carve_from_strides(
    kv_cache: torch.Tensor, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carve scale views as vLLM does from 0.26.0 on.

    The strides and the storage offset of the KV view are divided by the size of a scale.

    Raises:
        ValueError: a stride or the offset is not a multiple of the size of a scale.
    """
    elements, width = _storage_as(scale_dtype, kv_cache), scale_dtype.itemsize
    views = []
    for half in kv_halves(kv_cache):
        first = half.storage_offset() + half.shape[-1] - width
        _check_multiple("the offset of the first scale", first, scale_dtype)
        for step in half.stride()[:3]:
            _check_multiple("a stride", step, scale_dtype)
        strides = [step // width for step in half.stride()[:3]]
        views.append(elements.as_strided(half.shape[:3], strides, first // width))
    return views[0], views[1]


CARVINGS = {"shape": carve_from_shape, "strides": carve_from_strides}
"""Both ways to carve. The names are the values of the argument ``carve`` of ``KVCache.carve_scales``."""


def _storage_as(dtype: torch.dtype, kv_cache: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a KV view as a flat tensor of ``dtype``."""
    if kv_cache.element_size() != 1:
        raise ValueError(f"the KV view has dtype {kv_cache.dtype}, but scales need a cache with one byte per element")
    storage = kv_cache.untyped_storage()
    _check_multiple("the storage", storage.nbytes(), dtype)
    return torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(storage).view(dtype)


def _check_multiple(what: str, nbytes: int, dtype: torch.dtype) -> None:
    if nbytes % dtype.itemsize:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{what} is {nbytes} bytes, not a multiple of {dtype.itemsize}, so {name} scales cannot be carved: use a "
            f"cache in which all strides and offsets are multiples of {dtype.itemsize} bytes"
        )
