"""Paged attention that reads the quantised cache with its inline scales: prefill, chunks of it, and decode."""

import torch

from kvviz.cache.codes import rotate, rotation_run, unrotate
from kvviz.cache.modes import get_mode
from kvviz.kernels.attention_tiles import serves, tiled_attention
from kvviz.kernels.checks import cache_halves, check_queries, check_scales, check_sequences
from kvviz.kernels.codec import (
    INFINITY,
    LARGEST_TENSOR,
    device_function,
    from_e4m3_bits,
    launching,
    loop_bound,
    speaks_ptx,
    tl,
    triton,
)


@device_function
def _load_cells(base, place, channel, mask, word, MODE: tl.constexpr):
    """Values of cells before their scale, float32; ``word`` holds the cells' scale words (int4: the zero-point)."""
    if MODE == "bfloat16":
        bits = tl.load(base + place + channel, mask=mask, other=0)
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif MODE == "int4_per_token_head":
        pair = tl.load(base + place + channel // 2, mask=mask, other=0).to(tl.int32)
        code = (pair >> ((channel % 2) * 4).to(tl.int32)) & 15
        return code.to(tl.float32) - (word.to(tl.int32, bitcast=True) & 15).to(tl.float32)
    elif MODE == "int8_per_token_head":
        return tl.load(base + place + channel, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        return from_e4m3_bits(tl.load(base + place + channel, mask=mask, other=0))


# grid   (S, ceil(longest query / QUERIES), ceil(H / HEADS))
# job    QUERIES queries of one sequence for HEADS KV heads and their groups, over the whole context
# reads  the cells (data and scale) of K and V up to the last query's position, TILE tokens at a time
# writes head_size float32 a query and query head
@triton.jit
def _attention_kernel(
    query_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    block_table_ptr, seq_lens_ptr, query_start_ptr,
    num_heads, head_size, block_size, softmax_scale,
    query_token, query_head, table_row,
    cache_block, cache_token, cache_head, scale_block, scale_token, scale_head,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, SCALED: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    first_query = tl.load(query_start_ptr + sequence).to(tl.int64)
    num_queries = tl.load(query_start_ptr + sequence + 1).to(tl.int64) - first_query
    length = tl.load(seq_lens_ptr + sequence).to(tl.int64)
    skip = tl.program_id(1).to(tl.int64) * QUERIES
    if skip < num_queries:
        head = (tl.program_id(2).to(tl.int64) * HEADS + tl.arange(0, HEADS).to(tl.int64))[:, None, None]
        row = tl.arange(0, ROWS).to(tl.int64)[None, :, None]
        channel = tl.arange(0, COLUMNS).to(tl.int64)
        query = skip + row // GROUP
        real = head < num_heads
        asked = (row < QUERIES * GROUP) & (query < num_queries) & real
        position = length - num_queries + query
        lane = channel[None, None, :]
        source = (first_query + query) * query_token + (head * GROUP + row % GROUP) * query_head + lane
        asked = asked & (lane < head_size)
        q = tl.load(query_ptr + source, mask=asked, other=0.0).to(tl.float32) * softmax_scale
        best = tl.full((HEADS, ROWS, 1), -INFINITY, tl.float32)
        total = tl.full((HEADS, ROWS, 1), 0.0, tl.float32)
        acc = tl.full((HEADS, ROWS, COLUMNS), 0.0, tl.float32)
        stop = tl.minimum(length, length - num_queries + skip + QUERIES)
        for start in range(0, loop_bound(stop), TILE):
            token = start + tl.arange(0, TILE).to(tl.int64)
            table = tl.load(block_table_ptr + sequence * table_row + token // block_size, mask=token < stop, other=0)
            block, place = table.to(tl.int64), token % block_size
            across = token[None, None, :]
            cell = (block * cache_block + place * cache_token)[None, None, :] + head * cache_head
            seen = (across < stop) & real
            k_word = tl.full((HEADS, 1, TILE), 0.0, tl.float32)
            v_word = k_word
            if SCALED:
                at = (block * scale_block + place * scale_token)[None, None, :] + head * scale_head
                k_word = tl.load(k_scale_ptr + at, mask=seen, other=0.0)
                v_word = tl.load(v_scale_ptr + at, mask=seen, other=0.0)
            down = channel[None, :, None]
            k = _load_cells(k_cache_ptr, cell, down, seen & (down < head_size), k_word, MODE)
            scores = tl.dot(q, k, input_precision="ieee")
            if SCALED:
                scores = scores * k_word
            scores = tl.where(seen & (across <= position), scores, -INFINITY)
            top = tl.maximum(best, tl.max(scores, axis=2, keep_dims=True))
            shift = tl.where(top == -INFINITY, 0.0, top)  # rows that have seen nothing yet
            weights = tl.exp(scores - shift)
            fade = tl.exp(best - shift)
            total = total * fade + tl.sum(weights, axis=2, keep_dims=True)
            if SCALED:
                weights = tl.where(across < stop, weights * v_word, 0.0)
            cell_t = tl.trans(cell, (0, 2, 1))
            seen_t = tl.trans(seen, (0, 2, 1)) & (lane < head_size)
            v = _load_cells(v_cache_ptr, cell_t, lane, seen_t, tl.trans(v_word, (0, 2, 1)), MODE)
            acc = acc * fade + tl.dot(weights, v, input_precision="ieee")
            best = top
        tl.store(out_ptr + source, acc / tl.where(total == 0.0, 1.0, total), mask=asked)


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
    """Causal attention of the last tokens of each sequence over its cached K and V.

    NaN in V reaches every query of the same call and KV head that shares its tile, earlier ones too: it is loud,
    not exact.

    Args:
        query: ``(T, Hq, D)``; sequence i owns rows ``query_start_loc[i]`` to ``query_start_loc[i + 1]``, and
            these are its last tokens, already in the cache.
        kv_cache: one layer's view, as for ``write_kv``.
        block_table: int32 ``(S, W)``, the blocks of each sequence in order.
        seq_lens: int32 ``(S,)``, tokens of each sequence, the queries included.
        query_start_loc: int32 ``(S + 1,)``.
        k_scale_cache, v_scale_cache: float32 ``(B, N, H)`` for per-token-head modes; read where they point.
        softmax_scale: by default ``D ** -0.5``.
        max_query_len, max_seq_len: the longest run of queries and the longest sequence. Given both, the caller
            vouches for the numbers in the table, lengths and starts, and nothing waits for the GPU.

    Returns:
        float32 ``(T, Hq, D)``.

    Raises:
        ValueError: shapes, dtypes, devices or block numbers that cannot be served, with the numbers.
    """
    k_cells, v_cells = cache_halves(kv_cache, kv_cache_dtype)
    check_queries(query, k_cells, kv_cache_dtype)
    check_scales(k_scale_cache, v_scale_cache, k_cells, kv_cache_dtype)
    known = None if max_query_len is None or max_seq_len is None else (max_query_len, max_seq_len)
    max_query_len, max_seq_len = check_sequences(block_table, seq_lens, query_start_loc, query.shape[0], k_cells, known)
    num_heads, head_size = k_cells.shape[2], query.shape[-1]
    softmax_scale = head_size**-0.5 if softmax_scale is None else softmax_scale
    if speaks_ptx(query.device) and serves(query, k_cells, v_cells, kv_cache_dtype):
        return tiled_attention(
            query, k_cells, v_cells, block_table, seq_lens, query_start_loc, kv_cache_dtype, k_scale_cache,
            v_scale_cache, softmax_scale=float(softmax_scale), max_query_len=max_query_len, max_seq_len=max_seq_len,
        )  # fmt: skip
    rotated = kv_cache_dtype == "int4_per_token_head"
    if rotated:
        query = rotate(query.float())
        softmax_scale = softmax_scale / rotation_run(head_size)
    out = torch.empty_strided(query.shape, query.stride(), dtype=torch.float32, device=query.device)
    group = query.shape[1] // num_heads
    queries, heads, tile = _program_size(query.is_cuda, max_query_len, group, num_heads, head_size, max_seq_len)
    scaled = get_mode(kv_cache_dtype).is_per_token_head
    with launching(query.device):
        _attention_kernel[(len(seq_lens), triton.cdiv(max_query_len, queries), triton.cdiv(num_heads, heads))](
            query, k_cells, v_cells,
            k_scale_cache if scaled else k_cells, v_scale_cache if scaled else v_cells, out,
            block_table, seq_lens, query_start_loc,
            num_heads, head_size, k_cells.shape[1], float(softmax_scale),
            *query.stride()[:2], block_table.stride(0),
            *k_cells.stride()[:3], *(k_scale_cache.stride() if scaled else (0, 0, 0)),
            GROUP=group, QUERIES=queries, ROWS=_padded(queries * group), HEADS=heads, TILE=tile,
            COLUMNS=_padded(head_size), SCALED=scaled, MODE=kv_cache_dtype,
        )  # fmt: skip
    return unrotate(out) if rotated else out


def _padded(size: int) -> int:
    """The power of two that a dot product takes, at least 16."""
    return max(16, triton.next_power_of_2(size))


def _program_size(
    on_gpu: bool, longest: int, group: int, num_heads: int, head_size: int, context: int
) -> tuple[int, int, int]:
    """Queries, KV heads and context tokens that one program takes at a time.

    In the interpreter a program costs the same whatever its size, so one program takes as much as Triton's largest
    tensor allows; a GPU wants many small ones.
    """
    if on_gpu:
        return max(1, min(longest, 16 // group or 1)), 1, 32
    queries, heads, tile = longest, triton.next_power_of_2(num_heads), min(256, _padded(context))
    while heads * _padded(queries * group) * max(tile, _padded(head_size)) > LARGEST_TENSOR and queries > 1:
        queries = (queries + 1) // 2
    while heads * max(_padded(queries * group), tile) * max(tile, _padded(head_size)) > LARGEST_TENSOR and heads > 1:
        heads //= 2
    return queries, heads, tile
