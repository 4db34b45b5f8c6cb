"""Attention on tensor cores over the quantised cache: decode, its context split over many programs, and prefill.

The codes of every mode are exact in float16 (a bfloat16 cache stays bfloat16), so the tensor cores multiply the codes
themselves; scales come in afterwards, one a token. A query, and a row of weights, is given to them as the sum of two
16-bit numbers, which stand beside one another in columns that a small group leaves empty anyway: 22 bits of it count,
or 16 of bfloat16.
"""

import torch

from kvviz.cache.codes import rotation_run
from kvviz.cache.modes import get_mode
from kvviz.kernels.codec import (
    INFINITY,
    INTERPRETED,
    device_function,
    hadamard,
    launching,
    loop_bound,
    parts_of,
    rotation_sign,
    speaks_ptx,
    tl,
    triton,
)
from kvviz.kernels.write import alignment, sign_bits

PARTS = {"bfloat16": 1, "fp8": 2, "fp8_per_token_head": 2, "int8_per_token_head": 2, "int4_per_token_head": 4}
"""Codes in the 16 bits that are loaded at once."""
TILE = 32
"""Context tokens that a program takes at a time."""
PROGRAM = {"bfloat16": (2, 6), "int4_per_token_head": (1, 16)}
"""Warps of a program, and how many programs a multiprocessor of an H200 holds at once (head size 128, a group of 4);
every other mode: 1 and 12."""
PREFILL, PREFILL_ROWS = (4, 4), 64
"""The same where queries and their heads fill more than 16 rows, and the most that they may fill."""
LOG2_E = tl.constexpr(1.4426950408889634)
FAINT = tl.constexpr(1e-30)


@device_function
def _stacked(x, LENGTH: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr):
    """(LENGTH, ROWS) float32 -> (LENGTH, 2 ROWS): the nearest 16-bit numbers, and beside them what they miss."""
    high = x.to(NARROW)
    low = (x - high.to(tl.float32)).to(NARROW)
    return tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), (LENGTH, 2 * ROWS))


@device_function
def _split_columns(x, ROWS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """(ROWS, PARTS * WIDE) -> PARTS tensors (ROWS, WIDE): part ``p`` holds the columns ``PARTS * w + p``."""
    if PARTS == 1:
        return (x,)
    elif PARTS == 2:
        return tl.split(tl.reshape(x, (ROWS, WIDE, 2)))
    else:
        even, odd = tl.split(tl.reshape(x, (ROWS, WIDE, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@device_function
def _joined_columns(x, ROWS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """What :func:`_split_columns` took apart."""
    if PARTS == 1:
        return x[0]
    elif PARTS == 2:
        return tl.reshape(tl.join(x[0], x[1]), (ROWS, 2 * WIDE))
    else:
        return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (ROWS, 4 * WIDE))


@device_function
def _cells(base, cell, WORDS: tl.constexpr, WIDE: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr):
    """(TILE, WIDE) words of 16 bits, in chunks of 16: a tensor core wants eight rows in four lanes each."""
    chunk, lane = tl.arange(0, WIDE // 16)[:, None, None] * 16, tl.arange(0, 16)[None, None, :]
    place = tl.multiple_of(base + cell, [BYTES])[None, :, None] + (chunk + lane)
    if WORDS == WIDE:
        words = tl.load(place)
    else:
        words = tl.load(place, mask=tl.broadcast_to(chunk + lane < WORDS, place.shape), other=0)
    return tl.reshape(tl.permute(words, (1, 0, 2)), (TILE, WIDE))


@device_function
def _queries(x, ROWS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, NARROW: tl.constexpr):
    """The parts of (ROWS, PARTS * WIDE), each (WIDE, 2 ROWS): transposed and stacked."""
    out, parts = (), _split_columns(x, ROWS, WIDE, PARTS)
    for part in tl.static_range(PARTS):
        out = out + (_stacked(tl.trans(parts[part]), WIDE, ROWS, NARROW),)
    return out


@device_function
def _scores(queries, keys, ROWS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr):
    """(TILE, ROWS): keys times stacked queries, summed over the parts."""
    scores = tl.full((TILE, 2 * ROWS), 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        scores = tl.dot(keys[part], queries[part], scores, input_precision="ieee")
    return tl.sum(tl.reshape(scores, (TILE, 2, ROWS)), axis=1)


@device_function
def _nothing(ROWS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """Sums of no values yet: of each part (WIDE, 2 ROWS)."""
    out = ()
    for _ in tl.static_range(PARTS):
        out = out + (tl.full((WIDE, 2 * ROWS), 0.0, tl.float32),)
    return out


@device_function
def _faded(sums, fade, ROWS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """Each column of every part, and the one that it is stacked with, times ``fade``."""
    out = ()
    for part in tl.static_range(PARTS):
        pair = tl.reshape(sums[part], (WIDE, 2, ROWS)) * fade[None, None, :]
        out = out + (tl.reshape(pair, (WIDE, 2 * ROWS)),)
    return out


@device_function
def _added(sums, weights, values, PARTS: tl.constexpr):
    """The sums plus what the stacked weights, (TILE, 2 ROWS), make of a tile's values."""
    out = ()
    for part in tl.static_range(PARTS):
        out = out + (tl.dot(tl.trans(values[part]), weights, sums[part], input_precision="ieee"),)
    return out


@device_function
def _whole(sums, ROWS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """(ROWS, PARTS * WIDE): the sums of both columns of a stack, all parts in their places."""
    out = ()
    for part in tl.static_range(PARTS):
        out = out + (tl.trans(tl.sum(tl.reshape(sums[part], (WIDE, 2, ROWS)), axis=1)),)
    return _joined_columns(out, ROWS, WIDE, PARTS)


@device_function
def _zero_points(words):
    """What int4 scale words carry in their lowest four bits."""
    return (words.to(tl.int32, bitcast=True) & 15).to(tl.float32)


@device_function
def _rotated(x, sign, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG2_RUN: tl.constexpr):
    """Signs, then the transform of each run of columns; (ROWS, COLUMNS)."""
    x = hadamard(tl.reshape(x * sign[None, :], (1, ROWS, COLUMNS)), 1, ROWS, COLUMNS, LOG2_RUN)
    return tl.reshape(x, (ROWS, COLUMNS))


# grid   S x tiles of QUERIES queries x splits x H, in one axis, heads first: the others end at 65,535 programs
# job    QUERIES queries of one sequence for a KV head and its group, over span tokens of the context
# reads  the cells (data and scale) of K and V of these tokens, TILE at a time
# writes head_size + 2 float32 a query and head: the weighted sum, its largest score, and the sum of its weights
@triton.jit
def _tile_kernel(
    query_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, part_ptr, peak_ptr, total_ptr,
    block_table_ptr, seq_lens_ptr, query_start_ptr, softmax_scale, span, splits, parts,
    query_token, query_head, table_row, cache_block, cache_token, cache_head, scale_block, scale_token, scale_head,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, LOG2_RUN: tl.constexpr, SIGNS: tl.constexpr, SCALED: tl.constexpr,
    MODE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = COLUMNS // PARTS
    WORDS: tl.constexpr = HEAD_SIZE // PARTS
    NARROW: tl.constexpr = tl.float32 if not PTX else tl.bfloat16 if MODE == "bfloat16" else tl.float16
    ROTATED: tl.constexpr = MODE == "int4_per_token_head"
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    part = tl.program_id(0) // NUM_HEADS
    sequence = (part // parts).to(tl.int64)
    split, skip = part % parts % splits, part % parts // splits * QUERIES
    first_query = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_query
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    asked = (row < QUERIES * GROUP) & (skip + row // GROUP < num_queries)
    position = tl.load(seq_lens_ptr + sequence) - num_queries + skip + row // GROUP
    start = split * span
    stop = tl.minimum(tl.max(tl.where(asked, position, -1), axis=0) + 1, start + span)
    token_row, head_row = (first_query + skip + row // GROUP).to(tl.int64), head * GROUP + row % GROUP
    inside = asked[:, None] & (column < HEAD_SIZE)[None, :]
    source = (token_row * query_token + head_row * query_head)[:, None] + column[None, :]
    query = tl.load(query_ptr + source, mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        query = _rotated(query, rotation_sign(column, SIGNS, 1 << LOG2_RUN), ROWS, COLUMNS, LOG2_RUN)
    size = tl.max(tl.abs(query), axis=1)
    size = tl.where(size > 0.0, size, 1.0)
    query = query / size[:, None]
    grow = size * (softmax_scale * LOG2_E)
    query_sum = tl.sum(query, axis=1)
    queries = _queries(query, ROWS, WIDE, PARTS, NARROW)

    best = tl.full((ROWS,), -INFINITY, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    zeros = tl.full((ROWS,), 0.0, tl.float32)
    sums = _nothing(ROWS, WIDE, PARTS)
    loud = FAINT if SCALED else 1.0
    table = block_table_ptr + sequence * table_row
    k_base, v_base = k_cache_ptr + head * cache_head, v_cache_ptr + head * cache_head
    for at in range(loop_bound(start), loop_bound(stop), TILE):
        token = tl.minimum(at + tl.arange(0, TILE), stop - 1)  # beyond the end the last one again, with no weight
        block, place = tl.load(table + token // BLOCK_SIZE).to(tl.int64), token % BLOCK_SIZE
        cell = block * cache_block + place * cache_token
        keys = _cells(k_base, cell, WORDS, WIDE, K_BYTES, TILE)
        values = _cells(v_base, cell, WORDS, WIDE, V_BYTES, TILE)
        if SCALED:
            place = block * scale_block + place * scale_token + head * scale_head
            k_word, v_word = tl.load(k_scale_ptr + place), tl.load(v_scale_ptr + place)

        scores = _scores(queries, parts_of(keys, MODE, PTX), ROWS, TILE, PARTS)
        if ROTATED:
            scores = scores - query_sum[None, :] * _zero_points(k_word)[:, None]
        if SCALED:
            scores = scores * k_word[:, None]
        seen = (at + tl.arange(0, TILE))[:, None] <= tl.minimum(position, stop - 1)[None, :]
        scores = tl.where(seen, scores * grow[None, :], -INFINITY)

        top, louder = tl.maximum(best, tl.max(scores, axis=0)), loud
        if SCALED:
            louder = tl.maximum(loud, tl.max(tl.abs(v_word), axis=0))
        if (tl.max((top > best).to(tl.int32), axis=0) > 0) | (louder > loud):
            fade = tl.exp2(best - tl.where(top == -INFINITY, 0.0, top))
            total = total * fade
            fade = fade * (loud / louder)
            zeros = zeros * fade
            sums = _faded(sums, fade, ROWS, WIDE, PARTS)
            best, loud = top, louder
        weights = tl.exp2(scores - tl.where(best == -INFINITY, 0.0, best)[None, :])
        total += tl.sum(weights, axis=0)
        if SCALED:
            weights = weights * (v_word * (1.0 / loud))[:, None]
        if ROTATED:
            zeros += tl.sum(weights * _zero_points(v_word)[:, None], axis=0)
        sums = _added(sums, _stacked(weights, TILE, ROWS, NARROW), parts_of(values, MODE, PTX), PARTS)
    whole = (_whole(sums, ROWS, WIDE, PARTS) - zeros[:, None]) * loud
    out = (token_row * splits + split) * (NUM_HEADS * GROUP) + head_row
    tl.store(part_ptr + out[:, None] * HEAD_SIZE + column[None, :], whole, mask=inside)
    tl.store(peak_ptr + out, best, mask=asked)
    tl.store(total_ptr + out, total, mask=asked)


# grid   (T, ceil(Hq / HEADS))
# job    HEADS heads of one query: the parts that the splits left, weighed against one another
# reads  head_size + 2 float32 a split and head
# writes head_size float32 a head, rotated back for int4
@triton.jit
def _merge_kernel(
    part_ptr, peak_ptr, total_ptr, out_ptr, out_token, out_head, splits,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    LOG2_RUN: tl.constexpr, SIGNS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64), tl.arange(0, COLUMNS)
    real = head < NUM_HEADS
    inside = real[:, None] & (column < HEAD_SIZE)[None, :]
    best = tl.full((HEADS,), -INFINITY, tl.float32)
    total = tl.full((HEADS,), 0.0, tl.float32)
    whole = tl.full((HEADS, COLUMNS), 0.0, tl.float32)
    for split in range(splits):
        place = (token * splits + split) * NUM_HEADS + head
        peak = tl.load(peak_ptr + place, mask=real, other=-INFINITY)
        top = tl.maximum(best, peak)
        base = tl.where(top == -INFINITY, 0.0, top)
        fade, share = tl.exp2(best - base), tl.exp2(peak - base)
        total = total * fade + tl.load(total_ptr + place, mask=real, other=0.0) * share
        part = tl.load(part_ptr + place[:, None] * HEAD_SIZE + column[None, :], mask=inside, other=0.0)
        whole = whole * fade[:, None] + part * share[:, None]
        best = top
    whole = whole / tl.where(total == 0.0, 1.0, total)[:, None]
    if ROTATED:
        sign = rotation_sign(column, SIGNS, 1 << LOG2_RUN)
        whole = _rotated(whole, tl.full((COLUMNS,), 1.0, tl.float32), HEADS, COLUMNS, LOG2_RUN)
        whole = whole * (sign / (1 << LOG2_RUN))[None, :]
    tl.store(out_ptr + token * out_token + head[:, None] * out_head + column[None, :], whole, mask=inside)


def serves(query: torch.Tensor, k_cells: torch.Tensor, v_cells: torch.Tensor, mode: str) -> bool:
    """Whether :func:`tiled_attention` takes these: words of 16 bits must lie aligned and fill a tensor core's rows."""
    group, parts = query.shape[1] // k_cells.shape[2], PARTS[mode]
    wide = triton.next_power_of_2(query.shape[-1]) // parts
    return wide >= 16 and query.shape[-1] % parts == 0 and group <= 64 and alignment(k_cells, v_cells) % 2 == 0


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
    """Causal attention of the last tokens of each sequence; ``paged_attention`` has checked everything.

    Args:
        query: ``(T, Hq, D)``.
        k_cells, v_cells: ``(B, N, H, C)`` as ``contract.cache_halves`` gives them.
        num_splits: programs that share a context; by default as many as the GPU runs at once.

    Returns:
        float32 ``(T, Hq, D)``.
    """
    num_tokens, num_query_heads, head_size = query.shape
    num_heads, block_size, num_seqs = k_cells.shape[2], k_cells.shape[1], len(seq_lens)
    group, columns, run = num_query_heads // num_heads, triton.next_power_of_2(head_size), rotation_run(head_size)
    scaled, rotated = get_mode(mode).is_per_token_head, mode.startswith("int4")
    queries = min(triton.next_power_of_2(max_query_len), max(1, PREFILL_ROWS // group))
    warps, resident = PREFILL if queries * group > 16 else PROGRAM.get(mode, (1, 12))
    tiles = triton.cdiv(max_query_len, queries)
    splits = num_splits or _splits(query.device, num_heads * tiles * num_seqs, max_seq_len, resident)
    span = triton.cdiv(triton.cdiv(max_seq_len, splits), TILE) * TILE
    splits = triton.cdiv(max_seq_len, span)
    parts = torch.empty(num_tokens, splits, num_query_heads, head_size, dtype=torch.float32, device=query.device)
    peaks, totals = torch.empty(2, num_tokens, splits, num_query_heads, dtype=torch.float32, device=query.device)
    out = torch.empty_like(query, dtype=torch.float32)
    words = (k_cells.view(torch.int16), v_cells.view(torch.int16))
    rotation = {"LOG2_RUN": run.bit_length() - 1, "SIGNS": sign_bits(run) if rotated else 0}
    with launching(query.device):
        _tile_kernel[(num_seqs * tiles * splits * num_heads,)](
            query, *words, *((k_scale, v_scale) if scaled else words), parts, peaks, totals,
            block_table, seq_lens, query_start_loc, softmax_scale / run if rotated else softmax_scale, span, splits,
            tiles * splits, *query.stride()[:2], block_table.stride(0), *words[0].stride()[:3],
            *(k_scale.stride() if scaled else (0, 0, 0)),
            HEAD_SIZE=head_size, BLOCK_SIZE=block_size, NUM_HEADS=num_heads, GROUP=group, QUERIES=queries,
            ROWS=max(4, triton.next_power_of_2(queries * group)), TILE=TILE, COLUMNS=columns, PARTS=PARTS[mode],
            K_BYTES=alignment(words[0]), V_BYTES=alignment(words[1]), **rotation, SCALED=scaled, MODE=mode,
            PTX=speaks_ptx(query.device), num_warps=warps, num_stages=1,
        )  # fmt: skip
        _merge_kernel[(num_tokens, triton.cdiv(num_query_heads, 4))](
            parts, peaks, totals, out, *out.stride()[:2], splits, NUM_HEADS=num_query_heads, HEAD_SIZE=head_size,
            HEADS=4, COLUMNS=columns, **rotation, ROTATED=rotated,
        )  # fmt: skip
    return out


def _splits(device: torch.device, programs: int, max_seq_len: int, resident: int) -> int:
    """The number with the shortest time in turns of programs, each of 256 tokens at least.

    What does not fit the GPU at once waits for a second turn, and one and a half turns take as long as two
    (``decode splits`` in ``benchmarks/kernels.py``).
    """
    if INTERPRETED:
        return 1
    at_once = resident * torch.cuda.get_device_properties(device).multi_processor_count
    most = min(triton.cdiv(max_seq_len, 256), triton.cdiv(2 * at_once, programs))
    return min(range(1, max(most, 1) + 1), key=lambda splits: triton.cdiv(programs * splits, at_once) / splits)
