"""Paged attention over the quantised cache: dequantise K and V inside the kernel, with the scales in the cells.

It serves decoding, whole prompts and parts of prompts. GPUs of sm_89 and later use the kernels of ``attention_tiles``
if possible. The interpreter, older GPUs and all other calls use the kernel of this module.
"""

import torch

from kvviz.cache.codes import rotate, rotation_run, unrotate
from kvviz.kernels.attention_tiles import serves, tiled_attention
from kvviz.kernels.checks import cache_halves, check_lengths, check_queries, check_scales, check_sequences
from kvviz.kernels.codec import (
    INFINITY,
    LARGEST_TENSOR,
    kernel_mode,
    launching,
    load_values,
    loop_bound,
    tl,
    triton,
    uses_ptx,
)


# Grid:   (S, ceil(longest query / QUERIES), ceil(H / HEADS)) programs.
# Work:   One program computes the attention of up to QUERIES queries of one sequence, for HEADS KV heads with GROUP
#         query heads each. It goes over the context in tiles of TILE tokens and keeps a running softmax.
# Reads:  One program reads the cells (codes and scales) of K and V, up to the position of its last query.
# Writes: head_size float32 values per (query, query head).
# Tiles:  Queries and output have shape (HEADS, ROWS, COLUMNS). Row r is query r // GROUP and query head r % GROUP of
#         the KV head. Keys (HEADS, COLUMNS, TILE), values (HEADS, TILE, COLUMNS), scores (HEADS, ROWS, TILE).
@triton.jit
def _attention_kernel(
    query_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    block_table_ptr, seq_lens_ptr, query_start_ptr,
    num_heads, head_size, block_size, softmax_scale,
    query_token, query_head, table_row,
    cache_block, cache_token, cache_head, scale_block, scale_token, scale_head,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, CODE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    # 1. Find the sequence and the queries of this program.
    sequence = tl.program_id(0).to(tl.int64)
    first_query = tl.load(query_start_ptr + sequence).to(tl.int64)
    num_queries = tl.load(query_start_ptr + sequence + 1).to(tl.int64) - first_query
    length = tl.load(seq_lens_ptr + sequence).to(tl.int64)
    skip = tl.program_id(1).to(tl.int64) * QUERIES
    if skip < num_queries:
        # 2. Load the queries.
        head = (tl.program_id(2).to(tl.int64) * HEADS + tl.arange(0, HEADS).to(tl.int64))[:, None, None]
        row = tl.arange(0, ROWS).to(tl.int64)[None, :, None]
        channel = tl.arange(0, COLUMNS).to(tl.int64)
        query = skip + row // GROUP
        real_head = head < num_heads
        real_query = (row < QUERIES * GROUP) & (query < num_queries) & real_head
        position = length - num_queries + query
        across = channel[None, None, :]
        source = (first_query + query) * query_token + (head * GROUP + row % GROUP) * query_head + across
        real_query = real_query & (across < head_size)
        q = tl.load(query_ptr + source, mask=real_query, other=0.0).to(tl.float32) * softmax_scale

        # 3. Go over the tiles of the context.
        running_max = tl.full((HEADS, ROWS, 1), -INFINITY, tl.float32)
        weight_sum = tl.full((HEADS, ROWS, 1), 0.0, tl.float32)
        value_sum = tl.full((HEADS, ROWS, COLUMNS), 0.0, tl.float32)
        stop = tl.minimum(length, length - num_queries + skip + QUERIES)
        for start in range(0, loop_bound(stop), TILE):
            # 3a. Find the cells of this tile, and load their scales.
            token = start + tl.arange(0, TILE).to(tl.int64)
            table = tl.load(block_table_ptr + sequence * table_row + token // block_size, mask=token < stop, other=0)
            block, place = table.to(tl.int64), token % block_size
            context = token[None, None, :]
            cell = (block * cache_block + place * cache_token)[None, None, :] + head * cache_head
            real_cell = (context < stop) & real_head
            k_scale = tl.full((HEADS, 1, TILE), 0.0, tl.float32)
            v_scale = k_scale
            if SCALED:
                scale_place = (block * scale_block + place * scale_token)[None, None, :] + head * scale_head
                k_scale = tl.load(k_scale_ptr + scale_place, mask=real_cell, other=0.0).to(tl.float32)
                v_scale = tl.load(v_scale_ptr + scale_place, mask=real_cell, other=0.0).to(tl.float32)

            # 3b. Keys and scores. A query sees the tokens up to its own position.
            down = channel[None, :, None]
            k = load_values(k_cache_ptr, cell, down, real_cell & (down < head_size), k_scale, CODE)
            scores = tl.dot(q, k, input_precision="ieee")
            if SCALED:
                scores = scores * k_scale
            scores = tl.where(real_cell & (context <= position), scores, -INFINITY)

            # 3c. Softmax: if the maximum has grown, scale the sums of the earlier tiles down.
            new_max = tl.maximum(running_max, tl.max(scores, axis=2, keep_dims=True))
            shift = tl.where(new_max == -INFINITY, 0.0, new_max)  # a row without any token yet: avoid inf - inf
            weights = tl.exp(scores - shift)
            shrink = tl.exp(running_max - shift)
            weight_sum = weight_sum * shrink + tl.sum(weights, axis=2, keep_dims=True)

            # 3d. Values.
            if SCALED:
                weights = tl.where(context < stop, weights * v_scale, 0.0)
            v_cell = tl.trans(cell, (0, 2, 1))
            v_real = tl.trans(real_cell, (0, 2, 1)) & (across < head_size)
            v = load_values(v_cache_ptr, v_cell, across, v_real, tl.trans(v_scale, (0, 2, 1)), CODE)
            value_sum = value_sum * shrink + tl.dot(weights, v, input_precision="ieee")
            running_max = new_max

        # 4. Store the weighted mean of the values.
        tl.store(out_ptr + source, value_sum / tl.where(weight_sum == 0.0, 1.0, weight_sum), mask=real_query)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_cache_dtype: str,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
) -> torch.Tensor:
    """Compute causal attention of the last tokens of each sequence over the K and V in the cache.

    A NaN in V is never hidden, but it can reach too many queries: all queries of the call whose KV head and tile have
    the NaN, even queries of earlier positions.

    Args:
        query: ``(T, Hq, D)``. Sequence i has rows ``query_start_loc[i]`` to ``query_start_loc[i + 1]``. These are the
            last tokens of the sequence, and their K and V are already in the cache.
        kv_cache: the view of one layer, as for ``write_kv``.
        block_table: int32 ``(S, W)``, the blocks of each sequence in order.
        seq_lens: int32 ``(S,)``, the number of tokens of each sequence, the queries included.
        query_start_loc: int32 ``(S + 1,)``.
        kv_cache_dtype: the name of the mode.
        k_scale_cache, v_scale_cache: ``(B, N, H)`` in the mode's scale dtype (float32) for per-token-head modes. The
            scales are read through exactly these views.
        softmax_scale: default ``D ** -0.5``.
        max_query_len, max_seq_len: the largest number of queries and of tokens of one sequence. Give both only if the
            table, the lengths and the starts are known to be right: they are not checked then. That saves waiting for
            the GPU.

    Returns:
        float32 ``(T, Hq, D)``.

    Raises:
        ValueError: the kernel cannot serve these shapes, dtypes, devices, lengths or block numbers. The message has
            the numbers.
    """
    mode = kernel_mode(kv_cache_dtype)
    k_cells, v_cells = cache_halves(kv_cache, kv_cache_dtype)
    check_queries(query, k_cells, kv_cache_dtype)
    check_scales(k_scale_cache, v_scale_cache, k_cells, kv_cache_dtype)
    known = check_lengths(max_query_len, max_seq_len)
    max_query_len, max_seq_len = check_sequences(block_table, seq_lens, query_start_loc, query.shape[0], k_cells, known)
    num_heads, head_size = k_cells.shape[2], query.shape[-1]
    softmax_scale = head_size**-0.5 if softmax_scale is None else softmax_scale
    if uses_ptx(query.device) and serves(query, k_cells, v_cells, kv_cache_dtype):
        return tiled_attention(
            query, k_cells, v_cells, block_table, seq_lens, query_start_loc, kv_cache_dtype, k_scale_cache,
            v_scale_cache, softmax_scale=float(softmax_scale), max_query_len=max_query_len, max_seq_len=max_seq_len,
        )  # fmt: skip
    if mode.rotated:
        query = rotate(query.float())
        softmax_scale = softmax_scale / rotation_run(head_size)
    out = torch.empty_strided(query.shape, query.stride(), dtype=torch.float32, device=query.device)
    group = query.shape[1] // num_heads
    queries, heads, tile = _program_size(query.is_cuda, max_query_len, group, num_heads, head_size, max_seq_len)
    scaled = mode.is_per_token_head
    with launching(query.device):
        _attention_kernel[(len(seq_lens), triton.cdiv(max_query_len, queries), triton.cdiv(num_heads, heads))](
            query, k_cells, v_cells,
            k_scale_cache if scaled else k_cells, v_scale_cache if scaled else v_cells, out,
            block_table, seq_lens, query_start_loc,
            num_heads, head_size, k_cells.shape[1], float(softmax_scale),
            *query.stride()[:2], block_table.stride(0),
            *k_cells.stride()[:3], *(k_scale_cache.stride() if scaled else (0, 0, 0)),
            GROUP=group, QUERIES=queries, ROWS=_padded(queries * group), HEADS=heads, TILE=tile,
            COLUMNS=_padded(head_size), CODE=mode.code, SCALED=scaled,
        )  # fmt: skip
    return unrotate(out) if mode.rotated else out


def _padded(size: int) -> int:
    """Return the next power of two, at least 16: the sizes that ``tl.dot`` accepts."""
    return max(16, triton.next_power_of_2(size))


def _program_size(
    on_gpu: bool, max_query_len: int, group: int, num_heads: int, head_size: int, max_seq_len: int
) -> tuple[int, int, int]:
    """Return the number of queries, KV heads and context tokens that one program takes at a time.

    In the interpreter the time of a program hardly depends on its size. So one program takes as much as Triton's
    largest tensor allows. A GPU is faster with many small programs.
    """
    if on_gpu:
        return max(1, min(max_query_len, 16 // group or 1)), 1, 32
    queries, heads, tile = max_query_len, triton.next_power_of_2(num_heads), min(256, _padded(max_seq_len))
    while heads * _padded(queries * group) * max(tile, _padded(head_size)) > LARGEST_TENSOR and queries > 1:
        queries = (queries + 1) // 2
    while heads * max(_padded(queries * group), tile) * max(tile, _padded(head_size)) > LARGEST_TENSOR and heads > 1:
        heads //= 2
    return queries, heads, tile
