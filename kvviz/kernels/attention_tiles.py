"""Attention over the quantised cache on the tensor cores of a GPU, for decoding and for whole prompts.

The context of a sequence is divided into parts, and one program computes one part. A second kernel merges the results
of all parts.

float16 represents every code of the quantised modes exactly. Codes of the mode bfloat16 stay bfloat16. So the tensor
cores multiply the codes themselves. Then each product is multiplied by the scale of the token. The module ``operands``
explains how numbers lie in the operands of a tensor core.
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
"""Number of context tokens in one tile. A program works on one tile after another."""
PROGRAM = {16: (2, 6), 4: (1, 16)}
"""For the bits of a code: the warps of a decoding program, and how many such programs a multiprocessor runs at once.

The second number was counted on an H200, with head size 128 and 4 query heads per KV head."""
OTHER_PROGRAM = (1, 12)
"""The same two numbers for all other codes."""
PREFILL, PREFILL_ROWS = (4, 4), 64
"""PREFILL has the same two numbers for a program with more than 16 rows. PREFILL_ROWS is the most rows of a program. A
row is one query of one query head."""
LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST_UNIT = tl.constexpr(1e-30)
"""The first value of ``unit`` in the tile kernel. It is smaller than every V scale. It is not 0, because the kernel
divides by ``unit``."""


@device_function
def _rotated(x, sign, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG2_LENGTH: tl.constexpr):
    """Multiply the columns of x by their signs, then apply the Walsh-Hadamard transform. x: shape (ROWS, COLUMNS)."""
    x = hadamard(tl.reshape(x * sign[None, :], (1, ROWS, COLUMNS)), 1, ROWS, COLUMNS, LOG2_LENGTH)
    return tl.reshape(x, (ROWS, COLUMNS))


@device_function
def _load_queries(
    query_ptr, source, inside, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LOG2_LENGTH: tl.constexpr, SIGNS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Load queries of shape (ROWS, COLUMNS), and divide each query by the size of its largest element.

    In a mode with rotation, the queries are rotated before the division. After the division, all elements fit into
    16-bit floats. Returns the divided queries, and the divisors of shape (ROWS,).
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
    """Compute the scores of one tile, before the softmax scale and the mask. The result has shape (TILE, ROWS).

    Zero points are subtracted after the dot product, because sum q * (k - z) = sum q * k - z * sum q.
    """
    scores = dot_scores(queries, word_values(keys, CODE, PTX), ROWS, TILE, PER_WORD)
    if ZERO_POINT:
        scores = scores - query_sum[None, :] * zero_points(k_scale)[:, None]
    if SCALED:
        scores = scores * k_scale[:, None]
    return scores


# Grid:   S x ceil(longest query / QUERIES) x splits x H programs. A split is a part of the context. All programs lie in
#         one axis, because the other axes of a grid allow only 65,535 programs. The heads are innermost.
# Work:   One program computes the attention of up to QUERIES queries of one sequence, for one KV head and its GROUP
#         query heads. It reads one split, which has `span` tokens of the context.
# Reads:  One program reads the cells (codes and scales) of K and V of these tokens, TILE tokens at a time.
# Writes: One program writes head_size + 2 float32 values per query and query head. These are the weighted sum of the
#         values, the largest score, and the sum of the weights.
# Tiles:  A row is one query of one query head. A word has 16 bits.
#         words of keys, words of values: (TILE, WIDE)
#         scores, weights: (TILE, ROWS)
#         queries, sums: PER_WORD tensors of shape (WIDE, 2 * ROWS)
#         one number per row: (ROWS,)
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

    # 1. Find the head, the sequence, the split, the queries and the context tokens [start, stop) of this program.
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

    # 2. Load the queries. `factor` undoes the division by `size`, and contains the softmax scale. It also contains
    #    log2(e), because the weights are computed with exp2.
    token_row, head_row = (first_query + skip + row // GROUP).to(tl.int64), head * GROUP + row % GROUP
    inside = real[:, None] & (column < HEAD_SIZE)[None, :]
    source = (token_row * query_token + head_row * query_head)[:, None] + column[None, :]
    query, size = _load_queries(query_ptr, source, inside, column, ROWS, COLUMNS, LOG2_LENGTH, SIGNS, ROTATED)
    factor = size * (softmax_scale * LOG2_E)
    query_sum = tl.sum(query, axis=1)
    queries = query_operands(query, ROWS, WIDE, PER_WORD, NARROW)

    # 3. Go over the tiles of the context. `unit` is the largest V scale until now. `sums` are weighted sums of V codes,
    #    divided by `unit`. So no product of weight and V scale is larger than 1, and 16-bit floats can hold it. `zeros`
    #    are weighted sums of zero points, also divided by `unit`.
    running_max = tl.full((ROWS,), -INFINITY, tl.float32)
    weight_sum = tl.full((ROWS,), 0.0, tl.float32)
    zeros = tl.full((ROWS,), 0.0, tl.float32)
    sums = zero_sums(ROWS, WIDE, PER_WORD)
    unit = SMALLEST_UNIT if SCALED else 1.0
    table = block_table_ptr + sequence * table_row
    k_base, v_base = k_cache_ptr + head * cache_head, v_cache_ptr + head * cache_head
    for first in range(loop_bound(start), loop_bound(stop), TILE):
        # 3a. Load the words and the scales of the tile. After the last token of the split, the kernel reads this token
        #     again. Step 3b gives the copies the weight 0.
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

        # 3b. Compute the scores. A query sees the tokens up to its own position.
        scores = _tile_scores(queries, query_sum, keys, k_scale, ROWS, TILE, PER_WORD, CODE, SCALED, ZERO_POINT, PTX)
        visible = (first + tl.arange(0, TILE))[:, None] <= tl.minimum(position, stop - 1)[None, :]
        scores = tl.where(visible, scores * factor[None, :], -INFINITY)

        # 3c. Compute the weights. If the maximum of a row has grown, or `unit` has grown, scale down the sums of the
        #     earlier tiles. In a long context, this is not needed for most tiles.
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

        # 3d. Add the values, multiplied by the weights, to the sums.
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
# Reads:  One program reads head_size + 2 float32 values per split and query head.
# Writes: One program writes head_size float32 values per query head. In a mode with rotation, it undoes the rotation.
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
    if ROTATED:  # undo the rotation: first apply the transform, then multiply by sign / length
        sign = rotation_sign(column, SIGNS, 1 << LOG2_LENGTH)
        whole = _rotated(whole, tl.full((COLUMNS,), 1.0, tl.float32), HEADS, COLUMNS, LOG2_LENGTH)
        whole = whole * (sign / (1 << LOG2_LENGTH))[None, :]
    tl.store(out_ptr + token * out_token + head[:, None] * out_head + column[None, :], whole, mask=inside)


def serves(query: torch.Tensor, k_cells: torch.Tensor, v_cells: torch.Tensor, mode: str) -> bool:
    """Return True if :func:`tiled_attention` can serve these tensors.

    The address of each cell must be a multiple of 2 bytes, because the kernel reads words of 16 bits. A cell must have
    at least 16 words, because a tensor core needs them. A KV head may have at most 64 query heads.
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
    """Compute causal attention of the last tokens of each sequence.

    The caller must check all arguments first, as ``paged_attention`` does.

    Args:
        query: tensor of shape ``(T, Hq, D)``. The other tensors are described at ``paged_attention``.
        k_cells, v_cells: the K cells and the V cells of one layer, as ``checks.cache_halves`` returns them.
        num_splits: number of parts into which the context is divided. Default: the fastest number for this GPU.

    Returns:
        A float32 tensor of shape ``(T, Hq, D)``.
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
    """Return the number of splits that should take the shortest time. A split has at least 256 tokens.

    Each multiprocessor runs ``resident`` programs at the same time. The programs that a GPU runs at the same time are
    one wave, and the other programs wait for the next wave. A wave with few programs takes as long as a full wave. The
    row ``decode splits`` of ``benchmarks/kernels.py`` shows this.
    """
    if INTERPRETED:
        return 1
    at_once = resident * torch.cuda.get_device_properties(device).multi_processor_count
    most = min(triton.cdiv(max_seq_len, 256), triton.cdiv(2 * at_once, programs))
    return min(range(1, max(most, 1) + 1), key=lambda splits: triton.cdiv(programs * splits, at_once) / splits)
