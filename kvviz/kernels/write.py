"""Quantise and write: K and V of new tokens, and their scales, into the cache through the views given."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvviz.audit.arguments import is_integer
from kvviz.cache.codes import rotation_run, rotation_signs
from kvviz.cache.modes import get_mode
from kvviz.kernels.checks import cache_halves, check_inputs, check_scales, check_slots
from kvviz.kernels.codec import (
    E4M3_NAN,
    INDEX,
    INTERPRETED,
    LARGEST_SLOT,
    LARGEST_TENSOR,
    ROWS_FIRST,
    codes_of,
    finite,
    hadamard,
    launching,
    ptx,
    rotation_sign,
    rounded_to,
    scales_of,
    speaks_ptx,
    tl,
    to_bfloat16_bits,
    to_e4m3_bits,
    triton,
    widened,
)


# grid   (ceil(T / TOKENS), ceil(H / HEADS))
# job    TOKENS x HEADS cells of K and as many of V, one row of a tile each
# reads  head_size elements a cell, 8 bytes of slot_mapping a token
# writes 4 bytes of scale, then data_bytes of codes a cell, in this order (upstream's)
# tile   (REP, ROWS, WIDE): on a GPU a row lies in WIDE / 8 threads, so that a long one is mostly one thread's own
@triton.jit
def _write_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slot_ptr, num_tokens,
    in_token, in_head, cache_block, cache_token, cache_head, scale_block, scale_token, scale_head,
    HEAD_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, REP: tl.constexpr, WIDE: tl.constexpr, IN_BYTES: tl.constexpr,
    CACHE_BYTES: tl.constexpr, LOG2_RUN: tl.constexpr, SIGNS: tl.constexpr, MODE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = HEAD_SIZE == REP * WIDE
    row = tl.arange(0, ROWS).to(INDEX)
    is_value = (row % 2) == 1
    head = tl.program_id(1).to(INDEX) * HEADS + (row // 2) % HEADS
    local = row // (2 * HEADS)
    token = tl.program_id(0).to(INDEX) * TOKENS + local
    inside = token < num_tokens
    if ROWS != 2 * TOKENS * HEADS:
        inside = inside & (local < TOKENS)
    if NUM_HEADS % HEADS != 0:
        inside = inside & (head < NUM_HEADS)
    head, token = head.to(tl.int64), token.to(tl.int64)

    source = tl.where(is_value, value_ptr, key_ptr) + token * in_token + head * in_head
    source = tl.multiple_of(source, [IN_BYTES])
    PERMUTED: tl.constexpr = ROWS_FIRST and REP != 1  # rows are spread over the threads before a row's repeats are
    column = (tl.arange(0, REP) * WIDE)[:, None, None] + tl.arange(0, WIDE)[None, None, :]
    if PERMUTED:
        place, tile = source[:, None, None] + tl.permute(column, (1, 0, 2)), inside[:, None, None]
        real = tl.permute(column, (1, 0, 2)) < HEAD_SIZE
    else:
        place, tile, real = source[None, :, None] + column, inside[None, :, None], column < HEAD_SIZE
    given = tl.load(place, mask=tile if WHOLE else tile & real, other=0.0)
    if PERMUTED:
        given = tl.permute(given, (1, 0, 2))
    slot = tl.load(slot_ptr + token, mask=inside, other=-1)
    inside = inside & (slot >= 0)
    slot = slot.to(INDEX)
    block, place = (slot // BLOCK_SIZE).to(tl.int64), (slot % BLOCK_SIZE).to(tl.int64)
    target = tl.where(is_value, v_cache_ptr, k_cache_ptr)
    target += block * cache_block + place * cache_token + head * cache_head
    target = tl.multiple_of(target, [CACHE_BYTES])

    x = widened(given)
    if MODE == "bfloat16":
        if given.dtype == tl.bfloat16:
            codes = tl.where(x != x, 0x7FC0, given.to(tl.int16, bitcast=True))
        else:
            codes = to_bfloat16_bits(x)
    elif MODE == "fp8":
        good = finite(x)
        if PTX:
            one = tl.full(x.shape, 1.0, tl.float32)
            codes = ptx.e4m3_codes(tl.where(good, x, float("nan")), one, tl.full(x.shape, -1, tl.int8))
        else:
            codes = tl.where(good, to_e4m3_bits(tl.where(good, x, 0.0)), E4M3_NAN).to(tl.uint8)
    else:
        if MODE == "int4_per_token_head":
            sign = rotation_sign(column, SIGNS, 1 << LOG2_RUN)
            x = rounded_to(hadamard(x * sign, REP, ROWS, WIDE, LOG2_RUN), given.dtype, PTX)
        word, inverse, zero_point, good = scales_of(x, column < HEAD_SIZE, REP, ROWS, WHOLE, MODE, PTX)
        codes = codes_of(x, inverse, zero_point, good, REP, ROWS, WIDE, MODE, PTX)
        scale = tl.where(is_value, v_scale_ptr, k_scale_ptr)
        scale += block * scale_block + place * scale_token + head * scale_head
        tl.store(scale, word.to(tl.float32, bitcast=True), mask=inside)
        tl.debug_barrier()  # no word of this program may land after its data, where the two overlap
    PACKED: tl.constexpr = 2 if MODE == "int4_per_token_head" else 1
    codes = tl.reshape(codes if REP == 1 else tl.permute(codes, (1, 0, 2)), (ROWS, REP * WIDE // PACKED))
    column = tl.arange(0, REP * WIDE // PACKED)
    tile = inside[:, None] if WHOLE else inside[:, None] & (column[None, :] < HEAD_SIZE // PACKED)
    tl.store(target[:, None] + column[None, :], codes, mask=tile)


@dataclass(frozen=True)
class Program:
    """The shape of a launch of :func:`write_kv`: what one program takes, and what its compiler is told.

    Attributes:
        tokens, heads: a program takes their product of cells of K, and as many of V. By default all of both in the
            interpreter, as far as Triton's largest tensor goes, and 8 cells on a GPU, 16 where they are rotated.
            1 and 1 is upstream's shape.
        wide: columns of a cell that lie beside one another in the threads, a power of two of at least 8; the other
            columns lie in the same threads again. By default all in the interpreter; on a GPU 32, which are 4 threads,
            and 8, a single thread, where cells are rotated: fewer threads a cell, fewer exchanges between them.
        warps: of 32 threads each; a power of two.
        aligned: the compiler is told what divides all addresses, so that it may load and store up to 16 bytes at once.
        instructions: conversions in single instructions where the GPU has them (sm_89 and later).
    """

    tokens: int | None = None
    heads: int | None = None
    wide: int | None = None
    warps: int | None = None
    aligned: bool = True
    instructions: bool = True


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    *,
    program: Program = Program(),
    slots_checked: bool = False,
) -> None:
    """Write T tokens of one layer into the cache, through exactly the views that are given.

    Nothing is copied, moved or repaired on the way: if the scale views overlap somebody else's bytes, those
    bytes are overwritten. Where bytes of one launch overlap (cells without a tail, or one slot given twice),
    programs race for them: on a GPU the result may differ from run to run, and anywhere with the program's size.

    A token with a negative slot is padding and writes nothing. A cell that holds NaN or infinity is poisoned
    (``kvviz.cache.codes``).

    Args:
        key, value: ``(T, H, D)``, float32, bfloat16 or float16, on the cache's device.
        kv_cache: one layer's view, ``(B, 2, N, H, C)`` or ``(B, H, N, 2C)``.
        slot_mapping: int64 ``(T,)``; slot ``s`` is token ``s % N`` of block ``s // N``.
        kv_cache_dtype: the mode.
        k_scale_cache, v_scale_cache: float32 ``(B, N, H)`` for per-token-head modes, else None.
        program: the shape of the launch; it changes no bytes unless those of one launch overlap.
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
    if (slots := k_cells.shape[0] * k_cells.shape[1]) > LARGEST_SLOT:
        raise ValueError(
            f"the cache has {slots} slots, and the kernel counts them up to {LARGEST_SLOT}: take fewer blocks"
        )
    if num_tokens == 0:
        return
    tokens, heads, wide, warps = _shape(program, key, kv_cache_dtype)
    rows, columns = triton.next_power_of_2(2 * tokens * heads), triton.next_power_of_2(head_size)
    scaled, run = get_mode(kv_cache_dtype).is_per_token_head, rotation_run(head_size)
    with launching(key.device):
        _write_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads))](
            key, value, k_cells, v_cells,
            k_scale_cache if scaled else k_cells, v_scale_cache if scaled else v_cells, slot_mapping, num_tokens,
            key.stride(0), key.stride(1), *k_cells.stride()[:3], *(k_scale_cache.stride() if scaled else (0, 0, 0)),
            HEAD_SIZE=head_size, NUM_HEADS=num_heads, BLOCK_SIZE=k_cells.shape[1], TOKENS=tokens, HEADS=heads,
            ROWS=rows, REP=columns // wide, WIDE=wide, IN_BYTES=alignment(key, value) if program.aligned else 1,
            CACHE_BYTES=alignment(k_cells, v_cells) if program.aligned else 1, LOG2_RUN=run.bit_length() - 1,
            SIGNS=sign_bits(run) if kv_cache_dtype == "int4_per_token_head" else 0, MODE=kv_cache_dtype,
            PTX=program.instructions and speaks_ptx(key.device), num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def alignment(*tensors: torch.Tensor) -> int:
    """Bytes, 16 at most, that divide the address of every innermost row of all tensors."""
    steps = [step * t.element_size() for t in tensors for step in t.stride()[:-1]]
    return math.gcd(16, *(t.data_ptr() for t in tensors), *steps)


@lru_cache
def sign_bits(run: int) -> int:
    """The signs of the int4 rotation as an integer: bit ``i`` is set where column ``i`` of a run changes its sign."""
    return sum(1 << place for place, sign in enumerate(rotation_signs(run).tolist()) if sign < 0)


def _shape(program: Program, key: torch.Tensor, mode: str) -> tuple[int, int, int, int]:
    """Tokens, heads, wide and warps: as asked, or by default as the class says."""
    num_tokens, num_heads, head_size = key.shape
    for name in ("tokens", "heads", "wide", "warps"):
        asked = getattr(program, name)
        if asked is not None and not is_integer(asked, 1):
            raise ValueError(f"{name} of a program must be an integer of at least 1, not {asked!r}")
    for name, asked, least in (("wide", program.wide, 8), ("warps", program.warps, 1)):
        if asked is not None and (asked < least or asked & (asked - 1)):
            raise ValueError(f"{name} of a program must be a power of two of at least {least}, not {asked}")
    rotated, columns = mode == "int4_per_token_head", triton.next_power_of_2(head_size)
    largest = LARGEST_TENSOR // columns
    wide, rows = (columns, largest) if INTERPRETED else (8, 32) if rotated else (32, 16)
    wide = min(program.wide or wide, columns)
    heads = min(program.heads or (num_heads if INTERPRETED else rows // 2), num_heads)
    most = max(1, (largest if program.tokens else rows) // (2 * heads))
    tokens = min(program.tokens or num_tokens, num_tokens, most)
    warps = max(1, min(8, triton.next_power_of_2(2 * tokens * heads) * wide // 512))
    return tokens, heads, wide, program.warps or warps
