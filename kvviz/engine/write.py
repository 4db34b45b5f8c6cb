"""Quantise and write: K and V of new tokens, and their scales, into the cache through the views given."""

import torch

from kvviz.engine.codec import (
    E4M3_NAN,
    LARGEST_TENSOR,
    encode_cells,
    finite,
    hadamard,
    launching,
    tl,
    to_bfloat16_bits,
    to_e4m3_bits,
    triton,
    widened,
)
from kvviz.engine.contract import cache_halves, check_inputs, check_scales, check_slots
from kvviz.memory.codes import rotation_run, rotation_signs
from kvviz.memory.spec import PER_TOKEN_HEAD_BITS, is_integer


# grid   (ceil(T / TOKENS), ceil(H / HEADS))
# job    TOKENS x HEADS cells of K and as many of V, one row of a tile each
# reads  head_size elements a cell, 8 bytes of slot_mapping a token
# writes 4 bytes of scale, then data_bytes of codes a cell, in this order (upstream's)
@triton.jit
def _write_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slot_ptr, signs_ptr,
    num_tokens, num_heads, head_size, block_size,
    in_token, in_head, cache_block, cache_token, cache_head, scale_block, scale_token, scale_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LOG2_RUN: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    is_value = (row % 2) == 1
    head = tl.program_id(1).to(tl.int64) * HEADS + (row // 2) % HEADS
    local = row // (2 * HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + local
    inside = (local < TOKENS) & (token < num_tokens) & (head < num_heads)
    slot = tl.load(slot_ptr + token, mask=inside, other=-1).to(tl.int64)
    inside = inside & (slot >= 0)
    block, place = slot // block_size, slot % block_size

    tile = inside[:, None] & (column[None, :] < head_size)
    source = tl.where(is_value, value_ptr, key_ptr) + token * in_token + head * in_head
    given = tl.load(source[:, None] + column[None, :], mask=tile, other=0.0)
    x = widened(given)
    target = tl.where(is_value, v_cache_ptr, k_cache_ptr)
    target += block * cache_block + place * cache_token + head * cache_head

    if MODE == "bfloat16":
        tl.store(target[:, None] + column[None, :], to_bfloat16_bits(x), mask=tile)
    elif MODE == "fp8":
        good = finite(x)
        codes = tl.where(good, to_e4m3_bits(tl.where(good, x, 0.0)), E4M3_NAN)
        tl.store(target[:, None] + column[None, :], codes.to(tl.uint8), mask=tile)
    else:
        if MODE == "int4_per_token_head":
            signs = tl.load(signs_ptr + column, mask=column < head_size, other=0.0)
            x = hadamard(x * signs[None, :], ROWS, COLUMNS, LOG2_RUN)
            if given.dtype == tl.bfloat16:
                x = (to_bfloat16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
            else:
                x = x.to(given.dtype).to(tl.float32)
        codes, word = encode_cells(x, tile, ROWS, COLUMNS, MODE)
        scale = tl.where(is_value, v_scale_ptr, k_scale_ptr)
        scale += block * scale_block + place * scale_token + head * scale_head
        tl.store(scale, word.to(tl.float32, bitcast=True), mask=inside)
        tl.debug_barrier()  # no word of this program may land after its data, where the two overlap
        if MODE == "int4_per_token_head":
            low, high = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 2, 2)))
            codes = low | (high << 4)
            column = tl.arange(0, COLUMNS // 2).to(tl.int64)
            tile = inside[:, None] & (column[None, :] < head_size // 2)
        tl.store(target[:, None] + column[None, :], codes.to(tl.uint8), mask=tile)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    *,
    tokens_per_program: int | None = None,
    heads_per_program: int | None = None,
    slots_checked: bool = False,
) -> None:
    """Write T tokens of one layer into the cache, through exactly the views that are given.

    Nothing is copied, moved or repaired on the way: if the scale views overlap somebody else's bytes, those
    bytes are overwritten. Where bytes of one launch overlap (cells without a tail, or one slot given twice),
    programs race for them: on a GPU the result may differ from run to run, and anywhere with the program's size.

    A token with a negative slot is padding and writes nothing. A cell that holds NaN or infinity is poisoned
    (``kvviz.memory.codes``).

    Args:
        key, value: ``(T, H, D)``, float32, bfloat16 or float16, on the cache's device.
        kv_cache: one layer's view, ``(B, 2, N, H, C)`` or ``(B, H, N, 2C)``.
        slot_mapping: int64 ``(T,)``; slot ``s`` is token ``s % N`` of block ``s // N``.
        kv_cache_dtype: the mode.
        k_scale_cache, v_scale_cache: float32 ``(B, N, H)`` for per-token-head modes, else None.
        tokens_per_program, heads_per_program: the size of one program, at least 1; by default all of both in the
            interpreter (as far as Triton's largest tensor goes), one token with all heads on a GPU. 1 and 1 is
            upstream's shape of a launch.
        slots_checked: the caller vouches that every slot lies inside the cache. Looking at them waits for the GPU,
            which costs more than a small launch.

    Raises:
        ValueError: shapes, dtypes, devices, strides or slots that the kernel cannot serve, with the numbers.
    """
    k_cells, v_cells = cache_halves(kv_cache, kv_cache_dtype)
    check_inputs(key, value, k_cells, kv_cache_dtype)
    check_slots(slot_mapping, key.shape[0], k_cells, look=not slots_checked)
    check_scales(k_scale_cache, v_scale_cache, k_cells, kv_cache_dtype)
    num_tokens, num_heads, head_size = key.shape
    if num_tokens == 0:
        return
    tokens, heads = _program_size(key, tokens_per_program, heads_per_program)
    scaled = kv_cache_dtype in PER_TOKEN_HEAD_BITS
    columns, run = triton.next_power_of_2(head_size), rotation_run(head_size)
    signs = key
    if kv_cache_dtype == "int4_per_token_head":
        signs = rotation_signs(run).repeat(head_size // run).to(key.device)
    with launching():
        _write_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads))](
            key, value, k_cells, v_cells,
            k_scale_cache if scaled else k_cells, v_scale_cache if scaled else v_cells,
            slot_mapping, signs, num_tokens, num_heads, head_size, k_cells.shape[1],
            key.stride(0), key.stride(1), *k_cells.stride()[:3], *(k_scale_cache.stride() if scaled else (0, 0, 0)),
            TOKENS=tokens, HEADS=heads, ROWS=triton.next_power_of_2(2 * tokens * heads), COLUMNS=columns,
            LOG2_RUN=run.bit_length() - 1, MODE=kv_cache_dtype, enable_fp_fusion=False,
        )  # fmt: skip


def _program_size(key: torch.Tensor, tokens: int | None, heads: int | None) -> tuple[int, int]:
    """Tokens and heads of one program: as asked, or by default few on a GPU, and in the interpreter as many as fit."""
    num_tokens, num_heads, head_size = key.shape
    for name, asked in (("tokens_per_program", tokens), ("heads_per_program", heads)):
        if asked is not None and not is_integer(asked, 1):
            raise ValueError(f"{name} must be an integer of at least 1, not {asked!r}")
    heads = min(heads or num_heads, num_heads)
    rows = LARGEST_TENSOR // triton.next_power_of_2(head_size)
    fits = rows // (2 * heads) if rows >= 2 * heads else 1
    return min(tokens or (1 if key.is_cuda else num_tokens), num_tokens, fits), heads
