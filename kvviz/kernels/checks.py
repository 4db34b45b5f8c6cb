"""What the kernels ask of the tensors they are given, checked before anything is launched.

A launcher that gets something it cannot serve raises; it never copies, moves or repairs a view.
"""

from itertools import pairwise

import torch

from kvviz.cache.modes import get_mode
from kvviz.cache.scale_views import kv_halves

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def cache_halves(kv_cache: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V cells ``(B, N, H, C)`` as the kernels address them: uint8, or int16 for a bfloat16 cache."""
    get_mode(mode)
    want = torch.bfloat16 if mode == "bfloat16" else torch.uint8
    if kv_cache.dtype != want:
        raise ValueError(f"mode {mode} keeps its cache in {want}, and the KV view given is {kv_cache.dtype}")
    k_cells, v_cells = kv_halves(kv_cache)
    if mode == "bfloat16":
        return k_cells.view(torch.int16), v_cells.view(torch.int16)
    return k_cells, v_cells


def check_inputs(key: torch.Tensor, value: torch.Tensor, k_cells: torch.Tensor, mode: str) -> None:
    """K and V of new tokens against the cache: shape ``(T, H, D)``, dtype, device, strides and room for the data."""
    if key.shape != value.shape or key.dim() != 3:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} must both be (T, H, D)")
    if key.shape[1] != k_cells.shape[2]:
        raise ValueError(f"key has {key.shape[1]} KV heads and the cache has {k_cells.shape[2]}")
    if key.dtype != value.dtype or key.dtype not in FLOATS:
        raise ValueError(
            f"key is {key.dtype} and value {value.dtype}: both must be one of {', '.join(map(str, FLOATS))}"
        )
    if 0 in key.shape[1:]:
        raise ValueError(f"key {tuple(key.shape)} has no heads or no elements: H and D are at least 1")
    if key.is_neg() or value.is_neg():
        raise ValueError("key or value is a lazily negated tensor, whose memory has the other sign: resolve_neg() it")
    _same_device(k_cells, key=key, value=value)
    if key.stride(-1) != 1 or key.stride() != value.stride():
        raise ValueError(
            f"key and value must have equal strides with the innermost 1, not {key.stride()} and {value.stride()}"
        )
    check_head_size(key.shape[-1], k_cells, mode)


def check_head_size(head_size: int, k_cells: torch.Tensor, mode: str) -> None:
    """The data of one head must fit its cell: with a tail for the scale, or without any."""
    bits = get_mode(mode).code_bits
    cell = k_cells.shape[-1] * k_cells.element_size()
    data, odd = divmod(head_size * bits, 8)
    if odd:
        raise ValueError(f"int4 packs two elements in a byte: head_size {head_size} must be even")
    fits = {data, data + get_mode(mode).scale_bytes} if get_mode(mode).is_per_token_head else {data}
    if cell not in fits:
        sizes = " or ".join(map(str, sorted(fits)))
        raise ValueError(f"head_size {head_size} in mode {mode} needs cells of {sizes} bytes, and these have {cell}")


def check_slots(slot_mapping: torch.Tensor, num_tokens: int, k_cells: torch.Tensor, *, look: bool = True) -> None:
    """``slot_mapping`` must be int64 ``(T,)``; entries below 0 are padding, the others lie inside the cache.

    ``look`` at the entries, which waits for the GPU.
    """
    if slot_mapping.dtype != torch.int64 or tuple(slot_mapping.shape) != (num_tokens,):
        raise ValueError(
            f"slot_mapping must be int64 of shape ({num_tokens},), one slot a token, "
            f"not {slot_mapping.dtype} of shape {tuple(slot_mapping.shape)}"
        )
    _same_device(k_cells, slot_mapping=slot_mapping)
    if not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous, and its stride is {slot_mapping.stride(0)}")
    slots = k_cells.shape[0] * k_cells.shape[1]
    if look and num_tokens and (last := int(slot_mapping.max())) >= slots:
        raise ValueError(
            f"slot {last} is beyond the cache, whose {k_cells.shape[0]} blocks hold slots 0 to {slots - 1}"
        )


def check_scales(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, k_cells: torch.Tensor, mode: str) -> None:
    """Scale views: float32 ``(B, N, H)`` with equal strides for per-token-head modes, None for the others."""
    if not get_mode(mode).is_per_token_head:
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"mode {mode} has no scales in the cache, and scale views were given")
        return
    if k_scale is None or v_scale is None:
        raise ValueError(f"mode {mode} needs k_scale_cache and v_scale_cache")
    for name, scale in (("k_scale_cache", k_scale), ("v_scale_cache", v_scale)):
        if scale.dtype != torch.float32 or scale.shape != k_cells.shape[:3]:
            raise ValueError(
                f"{name} must be float32 of shape {tuple(k_cells.shape[:3])}, not {scale.dtype} of {tuple(scale.shape)}"
            )
    _same_device(k_cells, k_scale_cache=k_scale, v_scale_cache=v_scale)
    if k_scale.stride() != v_scale.stride():
        raise ValueError(f"both scale views must step alike, not by {k_scale.stride()} and {v_scale.stride()}")


def check_queries(query: torch.Tensor, k_cells: torch.Tensor, mode: str) -> None:
    """Queries: ``(T, Hq, D)``, Hq a multiple of the KV heads, innermost stride 1, no two at one address.

    The output gets the query's strides, so an expanded query would have its outputs overwrite one another.
    """
    if query.dim() != 3 or query.dtype not in FLOATS:
        raise ValueError(f"query must be (T, Hq, D) in float, not {query.dtype} of shape {tuple(query.shape)}")
    if query.shape[1] % k_cells.shape[2]:
        raise ValueError(f"{query.shape[1]} query heads cannot be grouped over {k_cells.shape[2]} KV heads")
    if query.stride(-1) != 1:
        raise ValueError(f"the innermost stride of query is {query.stride(-1)}, not 1")
    if _may_overlap(query):
        raise ValueError(
            f"query {tuple(query.shape)} with strides {query.stride()} has several elements at one address"
        )
    _same_device(k_cells, query=query)
    check_head_size(query.shape[-1], k_cells, mode)


def check_sequences(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_queries: int,
    k_cells: torch.Tensor,
    known: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Block table ``(S, W)``, ``seq_lens`` ``(S,)``, ``query_start_loc`` ``(S + 1,)``, all int32, innermost stride 1.

    Every block that a sequence's tokens need must be in the table and in the cache. Looking at that waits for the GPU;
    where the lengths are ``known``, nobody looks.

    Returns:
        The longest run of queries and the longest sequence.
    """
    tensors = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    _same_device(k_cells, **tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or tensor.dim() != (2 if name == "block_table" else 1):
            raise ValueError(f"{name} must be int32, not {tensor.dtype} of shape {tuple(tensor.shape)}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"the innermost stride of {name} is {tensor.stride(-1)}, not 1")
    count, width = block_table.shape
    if seq_lens.shape[0] != count or query_start_loc.shape[0] != count + 1:
        raise ValueError(
            f"{count} rows of block_table need {count} seq_lens and {count + 1} query_start_loc, "
            f"not {seq_lens.shape[0]} and {query_start_loc.shape[0]}"
        )
    if num_queries == 0:
        raise ValueError(f"0 queries of {count} sequences: there is nothing to attend")
    if known is not None:
        return known
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    if starts[0] != 0 or starts[-1] != num_queries:
        raise ValueError(
            f"query_start_loc must run from 0 to the {num_queries} queries, not {starts[0]} to {starts[-1]}"
        )
    num_blocks, block_size = k_cells.shape[:2]
    for number, (length, row) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
        queries, needed = starts[number + 1] - starts[number], -(-length // block_size)
        if not 0 <= queries <= length:
            raise ValueError(
                f"sequence {number} has {queries} queries and {length} tokens: queries are its last tokens"
            )
        if needed > width:
            raise ValueError(f"sequence {number} of {length} tokens needs {needed} blocks, and the table holds {width}")
        for block in row[:needed]:
            if not 0 <= block < num_blocks:
                raise ValueError(
                    f"block_table of sequence {number} names block {block}; the cache has 0 to {num_blocks - 1}"
                )
    return max(stop - start for start, stop in pairwise(starts)), max(lengths)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """True unless each stride steps over everything inside it."""
    reach = 1
    for step, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if step < reach:
            return True
        reach += step * (size - 1)
    return False


def _same_device(k_cells: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != k_cells.device:
            raise ValueError(f"{name} is on {tensor.device} and the cache on {k_cells.device}: move it there first")
