"""Check the tensors of a launch, before the kernel starts.

Each check raises ValueError if a kernel cannot work with a tensor. A launcher never copies, moves or repairs a view,
because that would hide an overlap.

In all shapes, B is the number of blocks, N the tokens per block, H the KV heads, and C the elements of a cell. T is the
number of tokens, D the head size, Hq the query heads, and S the number of sequences.
"""

from itertools import pairwise

import torch

from kvviz.audit.arguments import is_integer
from kvviz.cache.scale_views import kv_halves
from kvviz.kernels.codec import RUNTIME, kernel_mode

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def cache_halves(kv_cache: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K cells and the V cells of the KV view of one layer, each of shape ``(B, N, H, C)``.

    The cells of a bfloat16 cache are int16, so that the kernels can copy bits. All other cells are uint8.
    """
    is_bfloat16 = kernel_mode(mode).code == "bfloat16"
    dtype = torch.bfloat16 if is_bfloat16 else torch.uint8
    if kv_cache.dtype != dtype:
        raise ValueError(
            f"kv_cache has dtype {kv_cache.dtype}, but a cache of mode {mode} has dtype {dtype}: pass the KV view of a "
            f"cache of mode {mode}"
        )
    check_device("kv_cache", kv_cache)
    k_cells, v_cells = kv_halves(kv_cache)
    if is_bfloat16:
        return k_cells.view(torch.int16), v_cells.view(torch.int16)
    return k_cells, v_cells


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if the tensor lies in memory that the kernels of this process cannot read."""
    if tensor.is_meta:
        raise ValueError(f"{name} is a meta tensor, which has no memory: allocate {name} on the CPU or on a GPU")
    if RUNTIME == "gpu" and not tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}, but the kernels of this process run on the GPU: allocate {name} on cuda. "
            "To run the kernels on the CPU instead, set TRITON_INTERPRET=1 before starting Python."
        )


def check_inputs(key: torch.Tensor, value: torch.Tensor, k_cells: torch.Tensor, mode: str) -> None:
    """Check K and V of new tokens. Both tensors must have the same shape ``(T, H, D)``, dtype, strides and device."""
    if key.shape != value.shape:
        raise ValueError(
            f"key has shape {tuple(key.shape)}, but value has shape {tuple(value.shape)}: pass two tensors of the same "
            "shape (T, H, D)"
        )
    if key.dim() != 3:
        raise ValueError(
            f"key has shape {tuple(key.shape)}, but it must have 3 axes: reshape key and value to (T, H, D)"
        )
    if key.shape[1] != k_cells.shape[2]:
        raise ValueError(
            f"key has {key.shape[1]} KV heads, but the cache has {k_cells.shape[2]}: pass one key for each KV head of "
            "the cache"
        )
    _check_float("key", key)
    if key.dtype != value.dtype:
        raise ValueError(f"key has dtype {key.dtype}, but value has dtype {value.dtype}: convert both to one dtype")
    if 0 in key.shape[1:]:
        raise ValueError(
            f"key has shape {tuple(key.shape)}, so a token has no elements: the number of heads and head_size must be "
            "at least 1"
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.is_neg():
            raise ValueError(
                f"the memory of {name} contains the opposite signs, because torch negates this tensor only when it is "
                f"read: pass {name}.resolve_neg()"
            )
    _check_same_device(k_cells, key=key, value=value)
    if key.stride(-1) != 1:
        raise ValueError(f"key has strides {key.stride()}, but the innermost stride must be 1: pass key.contiguous()")
    if key.stride() != value.stride():
        raise ValueError(
            f"key has strides {key.stride()}, but value has strides {value.stride()}: pass two tensors with equal "
            "strides"
        )
    check_head_size(key.shape[-1], k_cells, mode)


def _check_float(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}: convert {name} to {', '.join(map(str, FLOATS[:-1]))} or {FLOATS[-1]}"
        )


def check_head_size(head_size: int, k_cells: torch.Tensor, mode: str) -> None:
    """Check that the codes of one head fill the data of a cell exactly. The cell may have a tail for the scale."""
    record = kernel_mode(mode)
    cell_bytes = k_cells.shape[-1] * k_cells.element_size()
    if head_size % record.codes_per_byte:
        raise ValueError(
            f"head_size is {head_size}, but mode {mode} puts {record.codes_per_byte} codes into one byte: use a "
            f"head_size that is a multiple of {record.codes_per_byte}"
        )
    data_bytes = head_size * record.code_bits // 8
    sizes = sorted({data_bytes, data_bytes + record.scale_bytes})
    if cell_bytes not in sizes:
        raise ValueError(
            f"head_size {head_size} in mode {mode} needs cells of {' or '.join(map(str, sizes))} bytes, but the cells "
            f"of the cache have {cell_bytes} bytes: pass a cache that was allocated for this head_size and this mode"
        )


def check_slots(slot_mapping: torch.Tensor, num_tokens: int, k_cells: torch.Tensor, *, look: bool = True) -> None:
    """Check ``slot_mapping``, a contiguous int64 tensor of shape ``(T,)``.

    A negative slot is padding. All other slots must exist in the cache. The slots are read only if ``look`` is True,
    because the read waits for the GPU.
    """
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping has dtype {slot_mapping.dtype}: convert slot_mapping to torch.int64")
    if tuple(slot_mapping.shape) != (num_tokens,):
        raise ValueError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)}, but {num_tokens} tokens are given: pass one slot per "
            f"token, in shape ({num_tokens},)"
        )
    _check_same_device(k_cells, slot_mapping=slot_mapping)
    if not slot_mapping.is_contiguous():
        raise ValueError(
            f"slot_mapping has stride {slot_mapping.stride(0)}, but the stride must be 1: pass "
            "slot_mapping.contiguous()"
        )
    slots = k_cells.shape[0] * k_cells.shape[1]
    if look and num_tokens and (last := int(slot_mapping.max())) >= slots:
        raise ValueError(
            f"slot {last} does not exist: the cache of {k_cells.shape[0]} blocks has slots 0 to {slots - 1}"
        )


def check_scales(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, k_cells: torch.Tensor, mode: str) -> None:
    """Check the scale views of one layer.

    In a per-token-head mode, both scale views must have shape ``(B, N, H)``, the scale dtype of the mode, and equal
    strides. In all other modes, both must be None.
    """
    record = kernel_mode(mode)
    if not record.is_per_token_head:
        if k_scale is not None or v_scale is not None:
            raise ValueError(
                f"mode {mode} has no scales in the cache, but scale views are given: leave out k_scale_cache and "
                "v_scale_cache"
            )
        return
    dtype, shape = getattr(torch, record.scale_dtype), tuple(k_cells.shape[:3])
    for name, scale in (("k_scale_cache", k_scale), ("v_scale_cache", v_scale)):
        if scale is None:
            raise ValueError(
                f"mode {mode} needs k_scale_cache and v_scale_cache, but {name} is None: pass both scale views"
            )
        if scale.dtype != dtype:
            raise ValueError(f"{name} has dtype {scale.dtype}: pass a scale view of dtype {dtype} for mode {mode}")
        if tuple(scale.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(scale.shape)}: pass a scale view of shape {shape} for this cache"
            )
    _check_same_device(k_cells, k_scale_cache=k_scale, v_scale_cache=v_scale)
    if k_scale.stride() != v_scale.stride():
        raise ValueError(
            f"k_scale_cache has strides {k_scale.stride()}, but v_scale_cache has strides {v_scale.stride()}: pass two "
            "scale views with equal strides"
        )


def check_queries(query: torch.Tensor, k_cells: torch.Tensor, mode: str) -> None:
    """Check queries of shape ``(T, Hq, D)``. Hq must be a multiple of H, and the innermost stride must be 1.

    No two elements of the query may have the same address, because the output gets the strides of the query.
    """
    if query.dim() != 3:
        raise ValueError(f"query has shape {tuple(query.shape)}, but it must have 3 axes: reshape query to (T, Hq, D)")
    _check_float("query", query)
    if query.shape[1] % k_cells.shape[2]:
        raise ValueError(
            f"query has {query.shape[1]} query heads: pass a multiple of the {k_cells.shape[2]} KV heads of the cache"
        )
    if query.stride(-1) != 1:
        raise ValueError(
            f"the innermost stride of query is {query.stride(-1)}, but it must be 1: pass query.contiguous()"
        )
    if _may_overlap(query):
        raise ValueError(
            f"several elements of query can have the same address, because query has shape {tuple(query.shape)} and "
            f"strides {query.stride()}: pass query.clone(memory_format=torch.contiguous_format)"
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
    """Check ``block_table (S, W)``, ``seq_lens (S,)`` and ``query_start_loc (S + 1,)``.

    All three tensors must be int32, with innermost stride 1. The table must list every block that the tokens of a
    sequence need, and these blocks must exist in the cache. To check the numbers in the tensors, Python waits for the
    GPU. If the caller passes the return value in ``known``, the numbers are not checked.

    Returns:
        The most queries of one sequence, and the most tokens of one sequence.
    """
    tensors = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    _check_same_device(k_cells, **tensors)
    for name, tensor in tensors.items():
        axes = 2 if name == "block_table" else 1
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} has dtype {tensor.dtype}: convert {name} to torch.int32")
        if tensor.dim() != axes:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: pass a tensor with {axes} {'axes' if axes > 1 else 'axis'}"
            )
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"the innermost stride of {name} is {tensor.stride(-1)}, but it must be 1: pass {name}.contiguous()"
            )
    count = block_table.shape[0]
    for name, tensor, length in (("seq_lens", seq_lens, count), ("query_start_loc", query_start_loc, count + 1)):
        if tensor.shape[0] != length:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but block_table has shape {tuple(block_table.shape)}: pass "
                f"{name} of shape ({length},)"
            )
    if num_queries == 0:
        raise ValueError(f"query has 0 rows, and block_table has {count} rows: pass at least one query of one sequence")
    return known or _check_numbers(block_table, seq_lens.tolist(), query_start_loc.tolist(), num_queries, k_cells)


def _check_numbers(
    block_table: torch.Tensor, lengths: list[int], starts: list[int], num_queries: int, k_cells: torch.Tensor
) -> tuple[int, int]:
    """Check the numbers of ``check_sequences``, and return the most queries and the most tokens of one sequence."""
    if starts[0] != 0:
        raise ValueError(f"query_start_loc starts with {starts[0]}, but it must start with 0")
    if starts[-1] != num_queries:
        raise ValueError(
            f"query_start_loc ends with {starts[-1]}, but it must end with {num_queries}, the number of rows of query"
        )
    (num_blocks, block_size), width = k_cells.shape[:2], block_table.shape[1]
    for number, (length, row) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
        queries, needed = starts[number + 1] - starts[number], -(-length // block_size)
        if queries < 0:
            raise ValueError(
                f"query_start_loc goes from {starts[number]} back to {starts[number + 1]} at sequence {number}: each "
                "number must be at least as large as the number before it"
            )
        if queries > length:
            raise ValueError(
                f"sequence {number} has {queries} queries but only {length} tokens: seq_lens must count the tokens of "
                "the queries too"
            )
        if needed > width:
            raise ValueError(
                f"sequence {number} has {length} tokens and needs {needed} blocks, but a row of block_table has "
                f"{width}: pass a block_table of shape ({len(lengths)}, {needed}) or wider"
            )
        for block in row[:needed]:
            if not 0 <= block < num_blocks:
                raise ValueError(
                    f"block_table has block {block} for sequence {number}, but the cache has only the blocks 0 to "
                    f"{num_blocks - 1}"
                )
    return max(stop - start for start, stop in pairwise(starts)), max(lengths)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return False if no two elements can have the same address.

    This holds if each stride is larger than the largest offset that the axes with smaller strides can give.
    """
    reach = 1
    for step, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if step < reach:
            return True
        reach += step * (size - 1)
    return False


def _check_same_device(k_cells: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != k_cells.device:
            raise ValueError(f"{name} is on {tensor.device}, but the cache is on {k_cells.device}: move {name} there")
