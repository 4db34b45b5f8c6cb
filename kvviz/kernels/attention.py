"""Paged attention over the quantised cache. The kernel dequantises K and V itself, with the scales of the cells.

It serves decoding, whole prompts and parts of prompts. There are two implementations. On GPUs of sm_89 and later, the
kernels of ``attention_tiles`` compute each call that they support. All other calls use the kernel of this module, and
so do the interpreter and older GPUs.
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
# Work:   One program computes the attention of up to QUERIES queries of one sequence. It does this for HEADS KV heads,
#         with GROUP query heads each. It reads the context in tiles of TILE tokens, and keeps a running softmax.
# Reads:  One program reads the cells (codes and scales) of K and V, up to the position of its last query.
# Writes: One program writes head_size float32 values per query and query head.
# Tiles:  Queries and output have shape (HEADS, ROWS, COLUMNS). Row r belongs to query r // GROUP and to query head
#         r % GROUP of the KV head. Keys have shape (HEADS, COLUMNS, TILE). Values have shape (HEADS, TILE, COLUMNS).
#         Scores have shape (HEADS, ROWS, TILE).
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

            # 3b. Load the keys and compute the scores. A query sees the tokens up to its own position.
            down = channel[None, :, None]
            k = load_values(k_cache_ptr, cell, down, real_cell & (down < head_size), k_scale, CODE)
            scores = tl.dot(q, k, input_precision="ieee")
            if SCALED:
                scores = scores * k_scale
            scores = tl.where(real_cell & (context <= position), scores, -INFINITY)

            # 3c. Compute the weights. If the maximum of a row has grown, scale down the sums of the earlier tiles.
            new_max = tl.maximum(running_max, tl.max(scores, axis=2, keep_dims=True))
            shift = tl.where(new_max == -INFINITY, 0.0, new_max)  # 0 for a row that has seen no token: avoid inf - inf
            weights = tl.exp(scores - shift)
            shrink = tl.exp(running_max - shift)
            weight_sum = weight_sum * shrink + tl.sum(weights, axis=2, keep_dims=True)

            # 3d. Load the values and add them to the sums.
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

    A NaN in V always reaches the queries that attend to the cell of the NaN. It can also reach earlier queries of the
    same sequence, because the kernel multiplies a whole tile of tokens at once. If ``query_start_loc`` does not name a
    row of ``query``, the row of the result is 0.

    In the shapes, T is the number of queries, Hq the number of query heads, and D the head size. S is the number of
    sequences. B, N and H are the number of blocks, of tokens per block, and of KV heads.

    Args:
        query: float32, bfloat16 or float16 tensor of shape ``(T, Hq, D)``. Sequence i has rows ``query_start_loc[i]``
            to ``query_start_loc[i + 1] - 1``. These are the last tokens of the sequence. Their K and V must already be
            in the cache.
        kv_cache: the KV view of one layer, as for ``write_kv``.
        block_table: int32 tensor of shape ``(S, W)``. Row i lists the blocks of sequence i in order.
        seq_lens: int32 tensor of shape ``(S,)``: the number of tokens of each sequence. This number includes the
            tokens of the queries.
        query_start_loc: int32 tensor of shape ``(S + 1,)``: the first row of each sequence in ``query``, then T.
        kv_cache_dtype: the name of the mode.
        k_scale_cache, v_scale_cache: the scale views of the layer, of shape ``(B, N, H)`` and of the scale dtype of
            the mode. They must be None in a mode without scales. The kernel reads the scales through these views.
        softmax_scale: the factor of the scores. Default: ``D ** -0.5``.
        max_query_len: the most queries of one sequence.
        max_seq_len: the most tokens of one sequence. If both numbers are given, the numbers in ``block_table``,
            ``seq_lens`` and ``query_start_loc`` are not checked. This saves waiting for the GPU. Give both numbers
            only if the numbers in the three tensors are known to be correct.

    Returns:
        A float32 tensor of shape ``(T, Hq, D)``.

    Raises:
        ValueError: a shape, dtype, device, stride, length or block number is not supported. The message contains the
            numbers.
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
    out = torch.empty_strided(query.shape, query.stride(), dtype=torch.float32, device=query.device).zero_()
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
    """Round a size up to a power of two of at least 16, because ``tl.dot`` accepts only such sizes."""
    return max(16, triton.next_power_of_2(size))


def _program_size(
    on_gpu: bool, max_query_len: int, group: int, num_heads: int, head_size: int, max_seq_len: int
) -> tuple[int, int, int]:
    """Return how many queries and KV heads one program has, and how many context tokens a tile has.

    In the interpreter, a large program takes almost the same time as a small program. So programs are as large as
    Triton's largest tensor allows. A GPU is faster with many small programs.
    """
    if on_gpu:
        return max(1, min(max_query_len, 16 // group or 1)), 1, 32
    queries, heads, tile = max_query_len, triton.next_power_of_2(num_heads), min(256, _padded(max_seq_len))
    while heads * _padded(queries * group) * max(tile, _padded(head_size)) > LARGEST_TENSOR and queries > 1:
        queries = (queries + 1) // 2
    while heads * max(_padded(queries * group), tile) * max(tile, _padded(head_size)) > LARGEST_TENSOR and heads > 1:
        heads //= 2
    return queries, heads, tile
