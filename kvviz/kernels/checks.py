"""Check the tensors of a launch, before the kernel starts.

If a kernel cannot serve a tensor, the check raises a ValueError with the numbers. A launcher never copies, moves or
repairs a view, because that would hide an overlap.
"""

from itertools import pairwise

import torch

from kvviz.audit.arguments import is_integer
from kvviz.cache.scale_views import kv_halves
from kvviz.kernels.codec import RUNTIME, kernel_mode

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def cache_halves(kv_cache: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K cells and V cells ``(B, N, H, C)`` of one layer's view: int16 for a bfloat16 cache, else uint8."""
    is_bfloat16 = kernel_mode(mode).code == "bfloat16"
    dtype = torch.bfloat16 if is_bfloat16 else torch.uint8
    if kv_cache.dtype != dtype:
        raise ValueError(f"a cache of mode {mode} must be {dtype}, but the given KV view is {kv_cache.dtype}")
    check_device("kv_cache", kv_cache)
    k_cells, v_cells = kv_halves(kv_cache)
    if is_bfloat16:
        return k_cells.view(torch.int16), v_cells.view(torch.int16)
    return k_cells, v_cells


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the kernels of this process can reach the tensor."""
    if tensor.is_meta:
        raise ValueError(f"{name} is a meta tensor, which has no memory: allocate it on the CPU or on a GPU")
    if RUNTIME == "gpu" and not tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}, but the kernels of this process run on the GPU: allocate it on cuda, or "
            "set TRITON_INTERPRET=1 before starting Python to run the kernels on the CPU"
        )


def check_inputs(key: torch.Tensor, value: torch.Tensor, k_cells: torch.Tensor, mode: str) -> None:
    """Check K and V of new tokens ``(T, H, D)``: shape, dtype, device, strides, and the size of the cells."""
    if key.shape != value.shape or key.dim() != 3:
        raise ValueError(
            f"key and value must have the same shape (T, H, D), not {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if key.shape[1] != k_cells.shape[2]:
        raise ValueError(f"key has {key.shape[1]} KV heads, but the cache has {k_cells.shape[2]}: they must be equal")
    if key.dtype != value.dtype or key.dtype not in FLOATS:
        raise ValueError(
            f"key and value must have the same dtype, one of {', '.join(map(str, FLOATS))}, "
            f"not {key.dtype} and {value.dtype}"
        )
    if 0 in key.shape[1:]:
        raise ValueError(f"key of shape {tuple(key.shape)} has no elements: heads and head_size must be at least 1")
    if key.is_neg() or value.is_neg():
        raise ValueError(
            "key or value is a lazily negated tensor, whose memory holds the opposite sign: call resolve_neg() first"
        )
    _check_same_device(k_cells, key=key, value=value)
    if key.stride(-1) != 1 or key.stride() != value.stride():
        raise ValueError(
            f"key and value must have equal strides, with the innermost stride 1, not {key.stride()} and "
            f"{value.stride()}"
        )
    check_head_size(key.shape[-1], k_cells, mode)


def check_head_size(head_size: int, k_cells: torch.Tensor, mode: str) -> None:
    """Check that the codes of one head fill a cell exactly, with or without a tail for the scale."""
    record = kernel_mode(mode)
    cell_bytes = k_cells.shape[-1] * k_cells.element_size()
    if head_size % record.codes_per_byte:
        raise ValueError(
            f"mode {mode} packs {record.codes_per_byte} codes into a byte: head_size must be a multiple of "
            f"{record.codes_per_byte}, not {head_size}"
        )
    data_bytes = head_size * record.code_bits // 8
    sizes = sorted({data_bytes, data_bytes + record.scale_bytes})
    if cell_bytes not in sizes:
        raise ValueError(
            f"head_size {head_size} in mode {mode} needs cells of {' or '.join(map(str, sizes))} bytes, but the cells "
            f"of the cache have {cell_bytes}"
        )


def check_slots(slot_mapping: torch.Tensor, num_tokens: int, k_cells: torch.Tensor, *, look: bool = True) -> None:
    """Check ``slot_mapping``: int64 ``(T,)``; negative entries are padding, all others must lie inside the cache.

    The entries are read only if ``look`` is True. Reading them waits for the GPU.
    """
    if slot_mapping.dtype != torch.int64 or tuple(slot_mapping.shape) != (num_tokens,):
        raise ValueError(
            f"slot_mapping must be int64 of shape ({num_tokens},), one slot per token, "
            f"not {slot_mapping.dtype} of shape {tuple(slot_mapping.shape)}"
        )
    _check_same_device(k_cells, slot_mapping=slot_mapping)
    if not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous, but its stride is {slot_mapping.stride(0)}")
    slots = k_cells.shape[0] * k_cells.shape[1]
    if look and num_tokens and (last := int(slot_mapping.max())) >= slots:
        raise ValueError(
            f"slot {last} does not exist: the cache of {k_cells.shape[0]} blocks has slots 0 to {slots - 1}"
        )


def check_scales(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, k_cells: torch.Tensor, mode: str) -> None:
    """Check the scale views: ``(B, N, H)`` in the mode's scale dtype with equal strides, or None in other modes."""
    record = kernel_mode(mode)
    if not record.is_per_token_head:
        if k_scale is not None or v_scale is not None:
            raise ValueError(
                f"mode {mode} has no scales in the cache: k_scale_cache and v_scale_cache must be None, not tensors"
            )
        return
    if k_scale is None or v_scale is None:
        raise ValueError(f"mode {mode} needs k_scale_cache and v_scale_cache, but at least one of them is None")
    dtype = getattr(torch, record.scale_dtype)
    for name, scale in (("k_scale_cache", k_scale), ("v_scale_cache", v_scale)):
        if scale.dtype != dtype or scale.shape != k_cells.shape[:3]:
            raise ValueError(
                f"{name} must be {dtype} of shape {tuple(k_cells.shape[:3])}, "
                f"not {scale.dtype} of shape {tuple(scale.shape)}"
            )
    _check_same_device(k_cells, k_scale_cache=k_scale, v_scale_cache=v_scale)
    if k_scale.stride() != v_scale.stride():
        raise ValueError(
            f"k_scale_cache and v_scale_cache must have equal strides, not {k_scale.stride()} and {v_scale.stride()}"
        )


def check_queries(query: torch.Tensor, k_cells: torch.Tensor, mode: str) -> None:
    """Check queries ``(T, Hq, D)``: Hq is a multiple of the KV heads, the innermost stride is 1, no elements overlap.

    The output gets the strides of the query. If elements of the query overlapped, elements of the output would too.
    """
    if query.dim() != 3 or query.dtype not in FLOATS:
        raise ValueError(
            f"query must have shape (T, Hq, D) and a dtype of {', '.join(map(str, FLOATS))}, "
            f"not {query.dtype} of shape {tuple(query.shape)}"
        )
    if query.shape[1] % k_cells.shape[2]:
        raise ValueError(
            f"the number of query heads is {query.shape[1]}, but it must be a multiple of the {k_cells.shape[2]} "
            "KV heads of the cache"
        )
    if query.stride(-1) != 1:
        raise ValueError(f"the innermost stride of query is {query.stride(-1)}, but it must be 1")
    if _may_overlap(query):
        raise ValueError(
            f"query of shape {tuple(query.shape)} with strides {query.stride()} has several elements at one address: "
            "pass a query whose elements do not overlap"
        )
    _check_same_device(k_cells, query=query)
    check_head_size(query.shape[-1], k_cells, mode)


def check_lengths(max_query_len: int | None, max_seq_len: int | None) -> tuple[int, int] | None:
    """Return both lengths as Python integers. If one of them is None, return None."""
    for name, length in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len)):
        if length is not None and not is_integer(length, 1):
            raise ValueError(f"{name} must be an integer of at least 1, not {length!r}")
    return None if max_query_len is None or max_seq_len is None else (int(max_query_len), int(max_seq_len))


def check_sequences(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_queries: int,
    k_cells: torch.Tensor,
    known: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Check ``block_table (S, W)``, ``seq_lens (S,)`` and ``query_start_loc (S + 1,)``: int32, innermost stride 1.

    The table must have every block that the tokens of a sequence need, and the cache must have these blocks. Reading
    the numbers waits for the GPU. So they are not read if the caller gives the largest lengths in ``known``.

    Returns:
        The largest number of queries of a sequence, and the largest number of tokens of a sequence.
    """
    tensors = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    _check_same_device(k_cells, **tensors)
    for name, tensor in tensors.items():
        axes = 2 if name == "block_table" else 1
        if tensor.dtype != torch.int32 or tensor.dim() != axes:
            raise ValueError(
                f"{name} must be int32 with {axes} {'axes' if axes > 1 else 'axis'}, "
                f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"the innermost stride of {name} is {tensor.stride(-1)}, but it must be 1")
    count = block_table.shape[0]
    if seq_lens.shape[0] != count or query_start_loc.shape[0] != count + 1:
        raise ValueError(
            f"block_table of shape {tuple(block_table.shape)} needs seq_lens of shape ({count},) and query_start_loc "
            f"of shape ({count + 1},), not {tuple(seq_lens.shape)} and {tuple(query_start_loc.shape)}"
        )
    if num_queries == 0:
        raise ValueError(f"query has 0 rows, and block_table has {count}: pass at least one query of one sequence")
    return known or _check_numbers(block_table, seq_lens.tolist(), query_start_loc.tolist(), num_queries, k_cells)


def _check_numbers(
    block_table: torch.Tensor, lengths: list[int], starts: list[int], num_queries: int, k_cells: torch.Tensor
) -> tuple[int, int]:
    """Check the length, queries and blocks of each sequence. Return the most queries and the most tokens of one
    sequence."""
    if starts[0] != 0 or starts[-1] != num_queries:
        raise ValueError(
            f"query_start_loc must go from 0 to {num_queries} queries, but it goes from {starts[0]} to {starts[-1]}"
        )
    (num_blocks, block_size), width = k_cells.shape[:2], block_table.shape[1]
    for number, (length, row) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
        queries, needed = starts[number + 1] - starts[number], -(-length // block_size)
        if not 0 <= queries <= length:
            raise ValueError(
                f"sequence {number} has {queries} queries and {length} tokens: the number of queries must be at least "
                "0 and at most the number of tokens"
            )
        if needed > width:
            raise ValueError(
                f"sequence {number} of {length} tokens needs {needed} blocks, but a row of block_table has {width}"
            )
        for block in row[:needed]:
            if not 0 <= block < num_blocks:
                raise ValueError(
                    f"block_table has block {block} for sequence {number}, but the cache has blocks 0 to "
                    f"{num_blocks - 1}"
                )
    return max(stop - start for start, stop in pairwise(starts)), max(lengths)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return False if each stride is larger than everything inside it; then no two elements have one address."""
    reach = 1
    for step, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if step < reach:
            return True
        reach += step * (size - 1)
    return False


def _check_same_device(k_cells: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != k_cells.device:
            raise ValueError(f"{name} is on {tensor.device}, but the cache is on {k_cells.device}: move it there first")
