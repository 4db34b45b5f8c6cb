"""Carve scale views out of a KV buffer, in the two ways of vLLM's Triton backend.

Up to vLLM 0.25.1 the backend computes the views from the *shape* of the KV view. From 0.26.0 on it reads the
*strides*. Both ways return two views per layer, for the scales of K and of V. Each has shape ``(B, N, H)`` and lies in
the same storage as the KV view. Scales are float32 in all released modes.
"""

import torch


def kv_halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K cells and the V cells of one layer's KV view, each ``(B, N, H, C)``. Both share its memory.

    Raises:
        ValueError: the shape is neither ``(B, 2, N, H, C)`` nor ``(B, H, N, 2C)``, or the innermost stride is not 1.
    """
    if kv_cache.dim() and kv_cache.stride(-1) != 1:
        raise ValueError(
            f"the KV view's innermost stride is {kv_cache.stride(-1)}, not 1: the bytes of a cell must be adjacent"
        )
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
        return kv_cache[:, 0], kv_cache[:, 1]
    if kv_cache.dim() == 4 and kv_cache.shape[-1] % 2 == 0:
        cell = kv_cache.shape[-1] // 2
        return kv_cache[..., :cell].transpose(1, 2), kv_cache[..., cell:].transpose(1, 2)
    raise ValueError(f"a KV view has shape (B, 2, N, H, C) or (B, H, N, 2C), not {tuple(kv_cache.shape)}")


def carve_from_shape(
    kv_cache: torch.Tensor, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carve as vLLM did up to 0.25.1: compute the strides from the shape alone.

    This is right only for a dense ``(B, 2, N, H, C)`` buffer that starts where its *storage* starts. The view's own
    strides and its storage offset are not read. For any other buffer the scale views lie in the wrong place (vLLM
    issue 48412).

    Raises:
        ValueError: the view is not in the split packing, or a size is not a multiple of the scale's bytes.
    """
    if kv_cache.dim() != 5:
        raise ValueError(
            f"carving from the shape needs a KV view of the split packing (B, 2, N, H, C), as in vLLM 0.20 to 0.25, "
            f"but this view has shape {tuple(kv_cache.shape)}. No release carves the packed form from its shape: "
            f"carve from the strides"
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
    """Carve as vLLM does from 0.26.0 on: divide the view's own strides and storage offset by the scale's bytes.

    Raises:
        ValueError: a stride or the offset is not a multiple of the scale's bytes.
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
"""Both ways to carve, by the name that ``KVCache.carve_scales`` takes."""


def _storage_as(dtype: torch.dtype, kv_cache: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a KV view as a flat tensor of ``dtype``."""
    if kv_cache.element_size() != 1:
        raise ValueError(f"scales are carved from a cache with one byte per element, not from {kv_cache.dtype}")
    storage = kv_cache.untyped_storage()
    _check_multiple("the storage", storage.nbytes(), dtype)
    return torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(storage).view(dtype)


def _check_multiple(what: str, nbytes: int, dtype: torch.dtype) -> None:
    if nbytes % dtype.itemsize:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{what} is {nbytes} bytes, not a multiple of {dtype.itemsize}: {name} scales cannot be carved from it"
        )
