"""The two ways in which vLLM's Triton backend has carved its fp32 scale views out of the KV buffer.

Both give views of shape ``(B, N, H)`` in float32 over the very storage of the KV view.
"""

import torch

SCALE_BYTES = 4


def kv_halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K cells and V cells of one layer's view, each ``(B, N, H, C)``, sharing its memory.

    Raises:
        ValueError: the view is neither ``(B, 2, N, H, C)`` nor ``(B, H, N, 2C)``, or its innermost stride is not 1.
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


def carve_from_shape(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Carve as vLLM did up to 0.25.1: strides computed from the shape alone.

    The layer is taken for one dense ``(B, 2, N, H, C)`` buffer that starts where the *storage* starts: neither
    its strides nor its storage offset are read. On any other buffer the views land elsewhere (issue 48412).

    Raises:
        ValueError: the view is not in the split packing, or bytes and floats do not line up.
    """
    if kv_cache.dim() != 5:
        raise ValueError(
            f"shape-carved scale views belong to the split packing (B, 2, N, H, C) of vLLM 0.20 to 0.25, "
            f"and this view has shape {tuple(kv_cache.shape)}: no release carved the packed form from its shape"
        )
    blocks, _, tokens, heads, cell = kv_cache.shape
    words = _storage_as_float32(kv_cache)
    _check_words("cell of", cell)
    strides = [step // SCALE_BYTES for step in (2 * tokens * heads * cell, heads * cell, cell)]
    k_offset = (cell - SCALE_BYTES) // SCALE_BYTES
    v_offset = k_offset + tokens * heads * cell // SCALE_BYTES
    return tuple(words.as_strided((blocks, tokens, heads), strides, offset) for offset in (k_offset, v_offset))


def carve_from_strides(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Carve as vLLM does from 0.26.0 on: the view's own strides and storage offset, divided by four.

    Raises:
        ValueError: a stride or the offset is not a multiple of four bytes.
    """
    words = _storage_as_float32(kv_cache)
    views = []
    for half in kv_halves(kv_cache):
        offset = half.storage_offset() + half.shape[-1] - SCALE_BYTES
        for number in (offset, *half.stride()[:3]):
            _check_words("stride or offset of", number)
        strides = [step // SCALE_BYTES for step in half.stride()[:3]]
        views.append(words.as_strided(half.shape[:3], strides, offset // SCALE_BYTES))
    return views[0], views[1]


CARVINGS = {"shape": carve_from_shape, "strides": carve_from_strides}


def _storage_as_float32(kv_cache: torch.Tensor) -> torch.Tensor:
    if kv_cache.element_size() != 1:
        raise ValueError(f"scales are carved from a one-byte cache, not from {kv_cache.dtype}")
    storage = kv_cache.untyped_storage()
    if storage.nbytes() % SCALE_BYTES:
        raise ValueError(
            f"a float32 view needs a storage of a multiple of {SCALE_BYTES} bytes, and this one has {storage.nbytes()}"
        )
    return torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(storage).view(torch.float32)


def _check_words(what: str, number: int) -> None:
    if number % SCALE_BYTES:
        raise ValueError(
            f"a {what} {number} bytes is not a multiple of {SCALE_BYTES}: a float32 scale view cannot follow it"
        )
