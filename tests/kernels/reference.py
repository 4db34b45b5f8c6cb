"""Reference for the kernels: the same work in plain torch, with ordinary indexing."""

import torch

from kvviz.cache.codes import decode, encode, unrotate
from kvviz.cache.modes import get_mode
from kvviz.cache.scale_views import kv_halves


def write_reference(key, value, kv_cache, slots, mode, k_scale=None, v_scale=None):
    """Write token by token through the given views: the scale first, then the data."""
    halves, scales = kv_halves(kv_cache), (k_scale, v_scale)
    block_size = halves[0].shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, place = divmod(slot, block_size)
        for half, scale, source in zip(halves, scales, (key, value), strict=True):
            data, word = encode(source[token], mode)
            if scale is not None:
                scale[block, place] = word
            cells = half[block, place].view(torch.uint8)
            cells[:, : data.shape[-1]] = data


def read_reference(kv_cache, slots, mode, head_size, k_scale=None, v_scale=None):
    """Return the dequantised K and V of the given slots, float32 ``(T, H, D)`` each, with the rotation undone."""
    values = []
    for half, scale in zip(kv_halves(kv_cache), (k_scale, v_scale), strict=True):
        block, place = slots // half.shape[1], slots % half.shape[1]
        bytes_ = half[block, place].view(torch.uint8)
        width = head_size * get_mode(mode).code_bits // 8
        cells = decode(bytes_[..., :width], None if scale is None else scale[block, place], mode)
        values.append(unrotate(cells) if get_mode(mode).rotated else cells)
    return values


def attention_reference(query, key, value, num_context):
    """Compute causal attention in float32. The queries are the last tokens of a context of ``num_context`` tokens."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.float().repeat_interleave(group, 1) for t in (key, value))
    scores = torch.einsum("thd,shd->hts", query.float(), key) * query.shape[-1] ** -0.5
    positions = torch.arange(num_context, device=query.device)
    seen = (
        positions[None, :]
        <= (num_context - query.shape[0] + torch.arange(query.shape[0], device=query.device))[:, None]
    )
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, value)
