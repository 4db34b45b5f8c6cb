"""Attention on the tensor cores of a GPU, over the quantised cache: decoding and whole prompts.

The context of a sequence is split over several programs, and a second kernel merges their results.

The codes of every mode are exact in float16 (bfloat16 codes stay bfloat16). So the tensor cores multiply the codes
themselves, and the scales are applied to the products: one scale per token. The module ``operands`` explains how
numbers lie in the operands of a tensor core.
"""

import torch

from kvviz.cache.codes import rotation_run
from kvviz.kernels.codec import (
    INFINITY,
    INTERPRETED,
    device_function,
    kernel_mode,
    launching,
    loop_bound,
    tl,
    triton,
    uses_ptx,
    word_values,
    zero_points,
)
from kvviz.kernels.operands import (
    added_values,
    dot_scores,
    joined_sums,
    load_words,
    multiplied_sums,
    query_operands,
    stacked,
    zero_sums,
)
from kvviz.kernels.rotation import hadamard, rotation_sign, sign_bits
from kvviz.kernels.write import alignment

TILE = 32
"""Context tokens that a program takes at a time."""
PROGRAM = {16: (2, 6), 4: (1, 16)}
"""Launch of a decoding program, by the bits of a code: warps, and programs that one multiprocessor runs at once.

Counted on an H200 with head size 128 and 4 query heads per KV head. All other codes: OTHER_PROGRAM."""
OTHER_PROGRAM = (1, 12)
PREFILL, PREFILL_ROWS = (4, 4), 64
"""The same two numbers for a program with more than 16 rows, and the most rows of a program. A row is one query of one
query head."""
LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST_UNIT = tl.constexpr(1e-30)
"""Start of ``unit`` in the tile kernel, below every V scale, and not 0 because the kernel divides by ``unit``."""


@device_function
def _rotated(x, sign, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG2_LENGTH: tl.constexpr):
    """Multiply (ROWS, COLUMNS) by the signs of the columns, then apply the Walsh-Hadamard transform."""
    x = hadamard(tl.reshape(x * sign[None, :], (1, ROWS, COLUMNS)), 1, ROWS, COLUMNS, LOG2_LENGTH)
    return tl.reshape(x, (ROWS, COLUMNS))


@device_function
def _load_queries(
    query_ptr, source, inside, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LOG2_LENGTH: tl.constexpr, SIGNS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Load and rotate queries (ROWS, COLUMNS), and divide each query by its largest element.

    After the division, all elements fit 16-bit numbers. Returns the divided queries and the divisors (ROWS,).
    """
    query = tl.load(query_ptr + source, mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        query = _rotated(query, rotation_sign(column, SIGNS, 1 << LOG2_LENGTH), ROWS, COLUMNS, LOG2_LENGTH)
    size = tl.max(tl.abs(query), axis=1)
    size = tl.where(size > 0.0, size, 1.0)
    return query / size[:, None], size


@device_function
def _tile_scores(
    queries, query_sum, keys, k_scale, ROWS: tl.constexpr, TILE: tl.constexpr, PER_WORD: tl.constexpr,
    CODE: tl.constexpr, SCALED: tl.constexpr, ZERO_POINT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the scores (TILE, ROWS) of one tile, before the softmax scale and the mask.

    Zero-points are subtracted after the dot product: sum q * (k - z) = sum q * k - z * sum q.
    """
    scores = dot_scores(queries, word_values(keys, CODE, PTX), ROWS, TILE, PER_WORD)
    if ZERO_POINT:
        scores = scores - query_sum[None, :] * zero_points(k_scale)[:, None]
    if SCALED:
        scores = scores * k_scale[:, None]
    return scores


# Grid:   S x (tiles of QUERIES queries) x splits x H programs. They lie in one axis, with the heads first, because the
#         other axes of a grid end at 65,535 programs.
# Work:   One program computes QUERIES queries of one sequence, for one KV head and its GROUP query heads, over `span`
#         tokens of the context (one split).
# Reads:  One program reads the cells (codes and scales) of K and V of these tokens, TILE tokens at a time.
# Writes: head_size + 2 float32 values per (query, query head): the weighted sum of the values, the largest score, and
#         the sum of the weights.
# Tiles:  A row is one query of one query head. Words of keys and values (TILE, WIDE), scores and weights (TILE, ROWS),
#         queries and sums PER_WORD tensors (WIDE, 2 * ROWS), numbers per row (ROWS,).
@triton.jit
def _tile_kernel(
    query_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, sum_ptr, max_ptr, weight_ptr,
    block_table_ptr, seq_lens_ptr, query_start_ptr, softmax_scale, span, splits, programs_per_sequence,
    query_token, query_head, table_row, cache_block, cache_token, cache_head, scale_block, scale_token, scale_head,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, PER_WORD: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, LOG2_LENGTH: tl.constexpr, SIGNS: tl.constexpr, CODE: tl.constexpr,
    SCALED: tl.constexpr, ROTATED: tl.constexpr, ZERO_POINT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = COLUMNS // PER_WORD
    WORDS: tl.constexpr = HEAD_SIZE // PER_WORD
    NARROW: tl.constexpr = tl.float32 if not PTX else tl.bfloat16 if CODE == "bfloat16" else tl.float16

    # 1. Find the work of this program: head, sequence, split, queries, and context tokens [start, stop).
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    program = tl.program_id(0) // NUM_HEADS
    sequence = (program // programs_per_sequence).to(tl.int64)
    split = program % programs_per_sequence % splits
    skip = program % programs_per_sequence // splits * QUERIES
    first_query = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_query
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    real = (row < QUERIES * GROUP) & (skip + row // GROUP < num_queries)
    position = tl.load(seq_lens_ptr + sequence) - num_queries + skip + row // GROUP
    start = split * span
    stop = tl.minimum(tl.max(tl.where(real, position, -1), axis=0) + 1, start + span)

    # 2. Load the queries. `factor` undoes the division by `size`. The factor also contains the softmax scale, and
    #    log2(e) because the weights are computed with exp2.
    token_row, head_row = (first_query + skip + row // GROUP).to(tl.int64), head * GROUP + row % GROUP
    inside = real[:, None] & (column < HEAD_SIZE)[None, :]
    source = (token_row * query_token + head_row * query_head)[:, None] + column[None, :]
    query, size = _load_queries(query_ptr, source, inside, column, ROWS, COLUMNS, LOG2_LENGTH, SIGNS, ROTATED)
    factor = size * (softmax_scale * LOG2_E)
    query_sum = tl.sum(query, axis=1)
    queries = query_operands(query, ROWS, WIDE, PER_WORD, NARROW)

    # 3. Go over the tiles of the context. `sums` are weighted sums of V codes, divided by `unit`, the largest V scale
    #    until now. So a weight times a V scale is at most 1 in this unit, and fits 16-bit numbers. `zeros` are weighted
    #    sums of zero-points, in the same unit.
    running_max = tl.full((ROWS,), -INFINITY, tl.float32)
    weight_sum = tl.full((ROWS,), 0.0, tl.float32)
    zeros = tl.full((ROWS,), 0.0, tl.float32)
    sums = zero_sums(ROWS, WIDE, PER_WORD)
    unit = SMALLEST_UNIT if SCALED else 1.0
    table = block_table_ptr + sequence * table_row
    k_base, v_base = k_cache_ptr + head * cache_head, v_cache_ptr + head * cache_head
    for first in range(loop_bound(start), loop_bound(stop), TILE):
        # 3a. Load the words and the scales of the tile. Beyond the end, the last token is read again, with weight 0.
        token = tl.minimum(first + tl.arange(0, TILE), stop - 1)
        block, place = tl.load(table + token // BLOCK_SIZE).to(tl.int64), token % BLOCK_SIZE
        cell = block * cache_block + place * cache_token
        keys = load_words(k_base, cell, WORDS, WIDE, K_BYTES, TILE)
        values = load_words(v_base, cell, WORDS, WIDE, V_BYTES, TILE)
        k_scale, v_scale = 1.0, 1.0  # not used in a mode without scales
        if SCALED:
            place = block * scale_block + place * scale_token + head * scale_head
            k_scale = tl.load(k_scale_ptr + place).to(tl.float32)
            v_scale = tl.load(v_scale_ptr + place).to(tl.float32)

        # 3b. Scores. A query sees the tokens up to its own position.
        scores = _tile_scores(queries, query_sum, keys, k_scale, ROWS, TILE, PER_WORD, CODE, SCALED, ZERO_POINT, PTX)
        visible = (first + tl.arange(0, TILE))[:, None] <= tl.minimum(position, stop - 1)[None, :]
        scores = tl.where(visible, scores * factor[None, :], -INFINITY)

        # 3c. Softmax. If the maximum of a row or the unit has grown, scale the earlier sums down. This is
        #     skipped if nothing has grown, which is the case for most tiles of a long context.
        new_max, new_unit = tl.maximum(running_max, tl.max(scores, axis=0)), unit
        if SCALED:
            new_unit = tl.maximum(unit, tl.max(tl.abs(v_scale), axis=0))
        if (tl.max((new_max > running_max).to(tl.int32), axis=0) > 0) | (new_unit > unit):
            shrink = tl.exp2(running_max - tl.where(new_max == -INFINITY, 0.0, new_max))
            weight_sum = weight_sum * shrink
            shrink = shrink * (unit / new_unit)
            zeros = zeros * shrink
            sums = multiplied_sums(sums, shrink, ROWS, WIDE, PER_WORD)
            running_max, unit = new_max, new_unit
        weights = tl.exp2(scores - tl.where(running_max == -INFINITY, 0.0, running_max)[None, :])
        weight_sum += tl.sum(weights, axis=0)

        # 3d. Values.
        if SCALED:
            weights = weights * (v_scale * (1.0 / unit))[:, None]
        if ZERO_POINT:
            zeros += tl.sum(weights * zero_points(v_scale)[:, None], axis=0)
        sums = added_values(sums, stacked(weights, TILE, ROWS, NARROW), word_values(values, CODE, PTX), PER_WORD)

    # 4. Store the results of this split.
    whole = (joined_sums(sums, ROWS, WIDE, PER_WORD) - zeros[:, None]) * unit
    out = (token_row * splits + split) * (NUM_HEADS * GROUP) + head_row
    tl.store(sum_ptr + out[:, None] * HEAD_SIZE + column[None, :], whole, mask=inside)
    tl.store(max_ptr + out, running_max, mask=real)
    tl.store(weight_ptr + out, weight_sum, mask=real)


# Grid:   (T, ceil(Hq / HEADS)) programs.
# Work:   One program merges the results of all splits, for one query and HEADS of its query heads.
# Reads:  head_size + 2 float32 values per split and query head.
# Writes: head_size float32 values per query head, rotated back in a mode with rotation.
# Tiles:  The sums have shape (HEADS, COLUMNS). Each number per head has shape (HEADS,).
@triton.jit
def _merge_kernel(
    sum_ptr, max_ptr, weight_ptr, out_ptr, out_token, out_head, splits,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    LOG2_LENGTH: tl.constexpr, SIGNS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64), tl.arange(0, COLUMNS)
    real = head < NUM_HEADS
    inside = real[:, None] & (column < HEAD_SIZE)[None, :]
    running_max = tl.full((HEADS,), -INFINITY, tl.float32)
    weight_sum = tl.full((HEADS,), 0.0, tl.float32)
    whole = tl.full((HEADS, COLUMNS), 0.0, tl.float32)
    for split in range(loop_bound(splits)):
        place = (token * splits + split) * NUM_HEADS + head
        split_max = tl.load(max_ptr + place, mask=real, other=-INFINITY)
        new_max = tl.maximum(running_max, split_max)
        base = tl.where(new_max == -INFINITY, 0.0, new_max)
        shrink, share = tl.exp2(running_max - base), tl.exp2(split_max - base)
        weight_sum = weight_sum * shrink + tl.load(weight_ptr + place, mask=real, other=0.0) * share
        split_sum = tl.load(sum_ptr + place[:, None] * HEAD_SIZE + column[None, :], mask=inside, other=0.0)
        whole = whole * shrink[:, None] + split_sum * share[:, None]
        running_max = new_max
    whole = whole / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    if ROTATED:  # the inverse rotation: transform first, then multiply by sign / length
        sign = rotation_sign(column, SIGNS, 1 << LOG2_LENGTH)
        whole = _rotated(whole, tl.full((COLUMNS,), 1.0, tl.float32), HEADS, COLUMNS, LOG2_LENGTH)
        whole = whole * (sign / (1 << LOG2_LENGTH))[None, :]
    tl.store(out_ptr + token * out_token + head[:, None] * out_head + column[None, :], whole, mask=inside)


def serves(query: torch.Tensor, k_cells: torch.Tensor, v_cells: torch.Tensor, mode: str) -> bool:
    """Return True if :func:`tiled_attention` can serve these tensors.

    The words must be aligned to 2 bytes. A cell must have at least 16 words, as a tensor core needs. A KV head may have
    at most 64 query heads.
    """
    group, per_word = query.shape[1] // k_cells.shape[2], 16 // kernel_mode(mode).code_bits
    wide = triton.next_power_of_2(query.shape[-1]) // per_word
    return wide >= 16 and query.shape[-1] % per_word == 0 and group <= 64 and alignment(k_cells, v_cells) % 2 == 0


def tiled_attention(
    query: torch.Tensor,
    k_cells: torch.Tensor,
    v_cells: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    mode: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *,
    softmax_scale: float,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Compute causal attention of the last tokens of each sequence. ``paged_attention`` has checked all arguments.

    Args:
        query: ``(T, Hq, D)``.
        k_cells, v_cells: ``(B, N, H, C)`` as ``checks.cache_halves`` returns them.
        num_splits: number of programs that share one context. Default: the fastest number for this GPU.

    Returns:
        float32 ``(T, Hq, D)``.
    """
    record = kernel_mode(mode)
    num_tokens, num_query_heads, head_size = query.shape
    num_heads, block_size, num_seqs = k_cells.shape[2], k_cells.shape[1], len(seq_lens)
    group, columns, length = num_query_heads // num_heads, triton.next_power_of_2(head_size), rotation_run(head_size)
    scaled, rotated = record.is_per_token_head, record.rotated
    queries = min(triton.next_power_of_2(max_query_len), max(1, PREFILL_ROWS // group))
    warps, resident = PREFILL if queries * group > 16 else PROGRAM.get(record.code_bits, OTHER_PROGRAM)
    tiles = triton.cdiv(max_query_len, queries)
    splits = num_splits or _best_splits(query.device, num_heads * tiles * num_seqs, max_seq_len, resident)
    span = triton.cdiv(triton.cdiv(max_seq_len, splits), TILE) * TILE
    splits = triton.cdiv(max_seq_len, span)
    sums = torch.empty(num_tokens, splits, num_query_heads, head_size, dtype=torch.float32, device=query.device)
    maxima, weights = torch.empty(2, num_tokens, splits, num_query_heads, dtype=torch.float32, device=query.device)
    out = torch.empty_like(query, dtype=torch.float32)
    words = (k_cells.view(torch.int16), v_cells.view(torch.int16))
    rotation = {"LOG2_LENGTH": length.bit_length() - 1, "SIGNS": sign_bits(length) if rotated else 0}
    rotation |= {"ROTATED": rotated}
    with launching(query.device):
        _tile_kernel[(num_seqs * tiles * splits * num_heads,)](
            query, *words, *((k_scale, v_scale) if scaled else words), sums, maxima, weights,
            block_table, seq_lens, query_start_loc, softmax_scale / length if rotated else softmax_scale, span, splits,
            tiles * splits, *query.stride()[:2], block_table.stride(0), *words[0].stride()[:3],
            *(k_scale.stride() if scaled else (0, 0, 0)),
            HEAD_SIZE=head_size, BLOCK_SIZE=block_size, NUM_HEADS=num_heads, GROUP=group, QUERIES=queries,
            ROWS=max(4, triton.next_power_of_2(queries * group)), TILE=TILE, COLUMNS=columns,
            PER_WORD=16 // record.code_bits, K_BYTES=alignment(words[0]), V_BYTES=alignment(words[1]), **rotation,
            CODE=record.code, SCALED=scaled, ZERO_POINT=record.has_zero_point, PTX=uses_ptx(query.device),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        _merge_kernel[(num_tokens, triton.cdiv(num_query_heads, 4))](
            sums, maxima, weights, out, *out.stride()[:2], splits, NUM_HEADS=num_query_heads, HEAD_SIZE=head_size,
            HEADS=4, COLUMNS=columns, **rotation,
        )  # fmt: skip
    return out


def _best_splits(device: torch.device, programs: int, max_seq_len: int, resident: int) -> int:
    """Return the number of splits with the shortest time. A split has at least 256 tokens.

    The GPU runs ``resident`` programs per multiprocessor at once: this is one turn. The other programs wait for the
    next turn. A turn with few programs takes as long as a full turn (row ``decode splits`` of
    ``benchmarks/kernels.py``).
    """
    if INTERPRETED:
        return 1
    at_once = resident * torch.cuda.get_device_properties(device).multi_processor_count
    most = min(triton.cdiv(max_seq_len, 256), triton.cdiv(2 * at_once, programs))
    return min(range(1, max(most, 1) + 1), key=lambda splits: triton.cdiv(programs * splits, at_once) / splits)
