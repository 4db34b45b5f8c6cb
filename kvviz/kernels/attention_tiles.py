"""Attention over the quantised cache on the tensor cores of a GPU, for decoding and for whole prompts.

The context of a sequence is divided into parts, and one program computes one part. A second kernel merges the results
of all parts.

float16 represents every code of the quantised modes exactly. Codes of the mode bfloat16 stay bfloat16. So the tensor
cores multiply the codes themselves. Then each product is multiplied by the scale of the token. The module ``operands``
explains how numbers lie in the operands of a tensor core.
"""

from dataclasses import dataclass

import torch

from kvviz.cache.codes import rotation_run
from kvviz.kernels.codec import (
    CENTRE,
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


@dataclass(frozen=True)
class Shape:
    """The shape of the programs of a launch.

    Attributes:
        tile: number of context tokens in one tile. A program works on one tile after another.
        warps: number of warps of a program.
        stages: ``num_stages`` of the launch. With more stages, more tiles are on their way into shared memory.
        resident: how many such programs a multiprocessor runs at once. This number was counted on an H200, with head
            size 128 and 4 query heads per KV head.
    """

    tile: int
    warps: int
    stages: int
    resident: int


DECODE = {16: Shape(64, 2, 2, 4), 8: Shape(32, 1, 3, 8), 4: Shape(32, 1, 5, 8)}
"""The shapes for decoding. The key is the number of bits of a code."""
PREFILL, PREFILL_ROWS = Shape(32, 4, 1, 4), 64
"""PREFILL is the shape of a program with more than 16 rows. PREFILL_ROWS is the most rows of a program. A row is one
query of one query head."""
LEAST_SPAN, MOST_SPAN = 64, 4096
"""The fewest and the most context tokens of a split, for decoding. With MOST_SPAN, no program of a batch works much
longer than the others if the sequences have very different lengths."""
MERGED = 16
"""Number of splits that the merge kernel reads at once."""
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
def _cells(
    table, first, stop, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Find the cells of the TILE context tokens from ``first`` on. Return their blocks, and their places in the blocks.

    WHOLE says two things. All tokens of the tile are before ``stop``. The tile begins and ends with the ends of blocks,
    or it lies inside one block. Then the kernel reads one number of the block table per block, and the places are
    constants. So almost all addresses are constants, too. Otherwise, the kernel reads the table for each token, and the
    tokens from ``stop`` on are replaced by the last token before ``stop``.
    """
    number = tl.arange(0, TILE).to(tl.int64)
    if WHOLE:
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64) + number * 0
        for other in tl.static_range(1, max(TILE // BLOCK_SIZE, 1)):
            more = tl.load(table + first // BLOCK_SIZE + other).to(tl.int64)
            block = tl.where(number // BLOCK_SIZE == other, more, block)
        return block, number % BLOCK_SIZE + (first % BLOCK_SIZE if BLOCK_SIZE > TILE else 0)
    else:
        token = tl.minimum(first + number, stop - 1)
        return tl.load(table + token // BLOCK_SIZE).to(tl.int64), token % BLOCK_SIZE


@device_function
def _add_tile(
    first, stop, table, k_base, v_base, k_scale_ptr, v_scale_ptr, cache_block, scale_block,
    queries, query_sum, factor, position, running_max, weight_sum, zeros, sums, unit,
    BLOCK_SIZE: tl.constexpr, CACHE_TOKEN: tl.constexpr, SCALE_TOKEN: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, CODE: tl.constexpr, SCALED: tl.constexpr,
    ZERO_POINT: tl.constexpr, PTX: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Add the TILE context tokens from ``first`` on to the sums of a program. Return the new sums.

    ``running_max`` is the largest score of each row, and ``weight_sum`` is the sum of its weights. ``unit`` is the
    largest V scale until now. ``sums`` are weighted sums of V codes, divided by ``unit``. So no product of weight and V
    scale is larger than 1, and 16-bit floats can hold it. ``zeros`` are weighted sums of zero points, also divided by
    ``unit``.
    """
    # a. Load the words and the scales of the tile.
    block, place = _cells(table, first, stop, BLOCK_SIZE, TILE, WHOLE)
    cell = block * cache_block + place * CACHE_TOKEN
    keys = load_words(k_base, cell, WORDS, WIDE, K_BYTES, TILE)
    values = load_words(v_base, cell, WORDS, WIDE, V_BYTES, TILE)
    k_scale, v_scale = 1.0, 1.0  # not used in a mode without scales
    if SCALED:
        cell = block * scale_block + place * SCALE_TOKEN
        k_scale = tl.load(k_scale_ptr + cell).to(tl.float32)
        v_scale = tl.load(v_scale_ptr + cell).to(tl.float32)

    # b. Compute the scores. Zero points are subtracted after the dot product, because
    #    sum q * (k - z) = sum q * k - z * sum q. A query sees the tokens up to its own position.
    scores = dot_scores(queries, word_values(keys, CODE, PTX), ROWS, TILE, PER_WORD)
    if ZERO_POINT:
        scores = scores - query_sum[:, None] * (zero_points(k_scale) - CENTRE)[None, :]
    if SCALED:
        scores = scores * k_scale[None, :]
    visible = (first + tl.arange(0, TILE))[None, :] <= tl.minimum(position, stop - 1)[:, None]
    scores = tl.where(visible, scores * factor[:, None], -INFINITY)

    # c. Compute the weights. If the maximum of a row has grown, or `unit` has grown, scale down the sums of the earlier
    #    tiles. In a long context, this is not needed for most tiles.
    new_max, new_unit = tl.maximum(running_max, tl.max(scores, axis=1)), unit
    if SCALED:
        new_unit = tl.maximum(unit, tl.max(tl.abs(v_scale), axis=0))
    if (tl.max((new_max > running_max).to(tl.int32), axis=0) > 0) | (new_unit > unit):
        shrink = tl.exp2(running_max - tl.where(new_max == -INFINITY, 0.0, new_max))
        weight_sum = weight_sum * shrink
        shrink = shrink * (unit / new_unit)
        zeros = zeros * shrink
        sums = multiplied_sums(sums, shrink, ROWS, WIDE, PER_WORD)
        running_max, unit = new_max, new_unit
    weights = tl.exp2(scores - tl.where(running_max == -INFINITY, 0.0, running_max)[:, None])
    weight_sum += tl.sum(weights, axis=1)

    # d. Add the values, multiplied by the weights, to the sums.
    if SCALED:
        weights = weights * (v_scale * (1.0 / unit))[None, :]
    if ZERO_POINT:
        zeros += tl.sum(weights * (zero_points(v_scale) - CENTRE)[None, :], axis=1)
    sums = added_values(sums, stacked(weights, TILE, ROWS, NARROW), word_values(values, CODE, PTX), PER_WORD)
    return running_max, weight_sum, zeros, sums, unit


# Grid:   S x ceil(longest query / QUERIES) x splits x H programs. A split is a part of the context. All programs lie in
#         one axis, because the other axes of a grid allow only 65,535 programs. The heads are innermost.
# Work:   One program computes the attention of up to QUERIES queries of one sequence, for one KV head and its GROUP
#         query heads. It reads one split, which has `span` tokens of the context.
# Reads:  One program reads the cells (codes and scales) of K and V of these tokens, TILE tokens at a time. While it
#         computes with one tile, the next tiles are on their way into shared memory (`num_stages` of the launch).
# Writes: One program writes head_size + 2 float32 values per query and query head. These are the weighted sum of the
#         values, the largest score, and the sum of the weights. If a split has no token, the largest score is minus
#         infinity.
# Tiles:  A row is one query of one query head. A word has 16 bits.
#         words of keys, words of values: (TILE, WIDE)
#         scores, weights: (ROWS, TILE)
#         queries, sums: PER_WORD tensors of shape (2 * ROWS, WIDE)
#         one number per row: (ROWS,)
@triton.jit
def _tile_kernel(
    query_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, sum_ptr, max_ptr, weight_ptr,
    block_table_ptr, seq_lens_ptr, query_start_ptr, softmax_scale, span, splits, programs_per_sequence,
    query_token, query_head, table_row, cache_block, cache_head, scale_block, scale_head,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    CACHE_TOKEN: tl.constexpr, SCALE_TOKEN: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, PER_WORD: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    LOG2_LENGTH: tl.constexpr, SIGNS: tl.constexpr, CODE: tl.constexpr, SCALED: tl.constexpr, ROTATED: tl.constexpr,
    ZERO_POINT: tl.constexpr, PTX: tl.constexpr,
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
    token_row, head_row = (first_query + skip + row // GROUP).to(tl.int64), head * GROUP + row % GROUP
    out = (token_row * splits + split) * (NUM_HEADS * GROUP) + head_row
    running_max = tl.full((ROWS,), -INFINITY, tl.float32)
    # 2. Load the queries. `factor` undoes the division by `size`, and contains the softmax scale. It also contains
    #    log2(e), because the weights are computed with exp2.
    inside = real[:, None] & (column < HEAD_SIZE)[None, :]
    source = (token_row * query_token + head_row * query_head)[:, None] + column[None, :]
    query, size = _load_queries(query_ptr, source, inside, column, ROWS, COLUMNS, LOG2_LENGTH, SIGNS, ROTATED)
    factor = size * (softmax_scale * LOG2_E)
    query_sum = tl.sum(query, axis=1)
    queries = query_operands(query, ROWS, WIDE, PER_WORD, NARROW)

    # 3. Go over the tiles of the context. First come the tiles that are WHOLE (see `_cells`). Then comes the rest.
    weight_sum = tl.full((ROWS,), 0.0, tl.float32)
    zeros = tl.full((ROWS,), 0.0, tl.float32)
    sums = zero_sums(ROWS, WIDE, PER_WORD)
    unit = SMALLEST_UNIT if SCALED else 1.0
    table = block_table_ptr + sequence * table_row
    k_base, v_base = k_cache_ptr + head * cache_head, v_cache_ptr + head * cache_head
    k_scale_base, v_scale_base = k_scale_ptr + head * scale_head, v_scale_ptr + head * scale_head
    rest = start
    if BLOCK_SIZE % TILE == 0 or TILE % BLOCK_SIZE == 0:
        rest = tl.maximum(start, start + (stop - start) // TILE * TILE)
        for first in range(loop_bound(start), loop_bound(rest), TILE):
            running_max, weight_sum, zeros, sums, unit = _add_tile(
                first, stop, table, k_base, v_base, k_scale_base, v_scale_base, cache_block, scale_block,
                queries, query_sum, factor, position, running_max, weight_sum, zeros, sums, unit,
                BLOCK_SIZE, CACHE_TOKEN, SCALE_TOKEN, ROWS, TILE, True, WORDS, WIDE, PER_WORD,
                K_BYTES, V_BYTES, CODE, SCALED, ZERO_POINT, PTX, NARROW,
            )  # fmt: skip
    for first in tl.range(loop_bound(rest), loop_bound(stop), TILE, num_stages=1):
        running_max, weight_sum, zeros, sums, unit = _add_tile(
            first, stop, table, k_base, v_base, k_scale_base, v_scale_base, cache_block, scale_block,
            queries, query_sum, factor, position, running_max, weight_sum, zeros, sums, unit,
            BLOCK_SIZE, CACHE_TOKEN, SCALE_TOKEN, ROWS, TILE, False, WORDS, WIDE, PER_WORD,
            K_BYTES, V_BYTES, CODE, SCALED, ZERO_POINT, PTX, NARROW,
        )  # fmt: skip

    # 4. Store the results of this split.
    whole = (joined_sums(sums, ROWS, WIDE, PER_WORD) - zeros[:, None]) * unit
    tl.store(sum_ptr + out[:, None] * HEAD_SIZE + column[None, :], whole, mask=inside)
    tl.store(weight_ptr + out, weight_sum, mask=real)
    tl.store(max_ptr + out, running_max, mask=real)


# Grid:   (T, Hq) programs.
# Work:   One program merges the results of all splits, for one query and one query head.
# Reads:  One program reads head_size + 2 float32 values per split that has a token, SPLITS splits at a time.
# Writes: One program writes head_size float32 values. In a mode with rotation, it undoes the rotation. Queries that
#         query_start does not name become 0.
# Tiles:  The sums of splits have shape (SPLITS, COLUMNS). Each number per split has shape (SPLITS,).
@triton.jit
def _merge_kernel(
    sum_ptr, max_ptr, weight_ptr, out_ptr, query_start_ptr, num_seqs, out_token, out_head, splits,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    LOG2_LENGTH: tl.constexpr, SIGNS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    token, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, COLUMNS)
    named = (token >= tl.load(query_start_ptr)) & (token < tl.load(query_start_ptr + num_seqs))
    running_max, weight_sum = tl.full((1,), -INFINITY, tl.float32), tl.full((1,), 0.0, tl.float32)
    whole = tl.full((1, COLUMNS), 0.0, tl.float32)
    for first in range(0, loop_bound(splits), SPLITS):
        split = first + tl.arange(0, SPLITS)
        place = (token * splits + split) * NUM_HEADS + head
        split_max = tl.load(max_ptr + place, mask=(split < splits) & named, other=-INFINITY)
        filled = split_max != -INFINITY
        new_max = tl.maximum(running_max, tl.max(split_max, axis=0, keep_dims=True))
        base = tl.where(new_max == -INFINITY, 0.0, new_max)
        shrink, share = tl.exp2(running_max - base), tl.exp2(split_max - base)
        weights = tl.load(weight_ptr + place, mask=filled, other=0.0)
        inside = filled[:, None] & (column < HEAD_SIZE)[None, :]
        split_sums = tl.load(sum_ptr + place[:, None] * HEAD_SIZE + column[None, :], mask=inside, other=0.0)
        weight_sum = weight_sum * shrink + tl.sum(weights * share, axis=0, keep_dims=True)
        whole = whole * shrink[:, None] + tl.sum(split_sums * share[:, None], axis=0, keep_dims=True)
        running_max = new_max
    whole = whole / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    if ROTATED:  # undo the rotation: first apply the transform, then multiply by sign / length
        sign = rotation_sign(column, SIGNS, 1 << LOG2_LENGTH)
        whole = _rotated(whole, tl.full((COLUMNS,), 1.0, tl.float32), 1, COLUMNS, LOG2_LENGTH)
        whole = whole * (sign / (1 << LOG2_LENGTH))[None, :]
    place = out_ptr + token * out_token + head * out_head + column[None, :]
    tl.store(place, whole, mask=(column < HEAD_SIZE)[None, :])


def serves(query: torch.Tensor, k_cells: torch.Tensor, v_cells: torch.Tensor, mode: str) -> bool:
    """Return True if :func:`tiled_attention` can serve these tensors.

    The address of each cell must be a multiple of 2 bytes, because the kernel reads words of 16 bits. A KV head may
    have at most 64 query heads.
    """
    group, per_word = query.shape[1] // k_cells.shape[2], 16 // kernel_mode(mode).code_bits
    return query.shape[-1] % per_word == 0 and group <= 64 and alignment(k_cells, v_cells) % 2 == 0


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
    group, length, per_word = num_query_heads // num_heads, rotation_run(head_size), 16 // record.code_bits
    columns = max(triton.next_power_of_2(head_size), 16 * per_word)  # a tensor core needs 16 words
    scaled, rotated = record.is_per_token_head, record.rotated
    queries = min(triton.next_power_of_2(max_query_len), max(1, PREFILL_ROWS // group))
    shape = PREFILL if queries * group > 16 else DECODE[record.code_bits]
    tiles = triton.cdiv(max_query_len, queries)
    splits = num_splits or _best_splits(
        query.device, num_heads * tiles * num_seqs, max_seq_len, shape, max_query_len, head_size
    )
    span = triton.cdiv(triton.cdiv(max_seq_len, splits), shape.tile) * shape.tile
    splits = triton.cdiv(max_seq_len, span)
    sums = torch.empty(num_tokens, splits, num_query_heads, head_size, dtype=torch.float32, device=query.device)
    maxima, weights = torch.empty(2, num_tokens, splits, num_query_heads, dtype=torch.float32, device=query.device)
    out = torch.empty_like(query, dtype=torch.float32)
    words = (k_cells.view(torch.int16), v_cells.view(torch.int16))
    (cache_block, cache_token, cache_head), (scale_block, scale_token, scale_head) = (
        words[0].stride()[:3],
        k_scale.stride() if scaled else (0, 0, 0),
    )
    rotation = {"LOG2_LENGTH": length.bit_length() - 1, "SIGNS": sign_bits(length) if rotated else 0}
    rotation |= {"ROTATED": rotated}
    with launching(query.device):
        _tile_kernel[(num_seqs * tiles * splits * num_heads,)](
            query, *words, *((k_scale, v_scale) if scaled else words), sums, maxima, weights,
            block_table, seq_lens, query_start_loc, softmax_scale / length if rotated else softmax_scale, span, splits,
            tiles * splits, *query.stride()[:2], block_table.stride(0),
            cache_block, cache_head, scale_block, scale_head,
            HEAD_SIZE=head_size, BLOCK_SIZE=block_size, NUM_HEADS=num_heads, GROUP=group, CACHE_TOKEN=cache_token,
            SCALE_TOKEN=scale_token, QUERIES=queries, ROWS=max(8, triton.next_power_of_2(queries * group)),
            TILE=shape.tile, COLUMNS=columns, PER_WORD=per_word, K_BYTES=alignment(words[0]),
            V_BYTES=alignment(words[1]), **rotation, CODE=record.code, SCALED=scaled,
            ZERO_POINT=record.has_zero_point, PTX=uses_ptx(query.device), num_warps=shape.warps,
            num_stages=shape.stages,
        )  # fmt: skip
        _merge_kernel[(num_tokens, num_query_heads)](
            sums, maxima, weights, out, query_start_loc, num_seqs, *out.stride()[:2], splits,
            NUM_HEADS=num_query_heads, HEAD_SIZE=head_size, SPLITS=min(MERGED, max(2, triton.next_power_of_2(splits))),
            COLUMNS=triton.next_power_of_2(head_size), **rotation, num_warps=4,
        )  # fmt: skip
    return out


def _best_splits(
    device: torch.device, programs: int, max_seq_len: int, shape: Shape, max_query_len: int, head_size: int
) -> int:
    """Return the number of splits that should take the shortest time.

    Each multiprocessor runs ``shape.resident`` programs at the same time. The programs that a GPU runs at the same time
    are one wave, and the other programs wait for the next wave. A wave with few programs takes as long as a full wave.
    So the splits should fill one wave. The row ``decode splits`` of ``benchmarks/kernels.py`` shows this. Programs of
    small heads need fewer registers, so more of them run at the same time.
    """
    if INTERPRETED:
        return 1
    resident = shape.resident if head_size > 64 else shape.resident * 3 // 2
    at_once = resident * torch.cuda.get_device_properties(device).multi_processor_count
    least = triton.cdiv(max_seq_len, MOST_SPAN) if max_query_len == 1 else 1
    most = max(least, min(triton.cdiv(max_seq_len, LEAST_SPAN), triton.cdiv(at_once, programs)))
    return min(range(least, most + 1), key=lambda splits: triton.cdiv(programs * splits, at_once) / splits)
