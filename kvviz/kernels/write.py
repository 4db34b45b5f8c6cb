"""Quantise K and V of new tokens, and write codes and scales into the cache through the given views."""

import math
from dataclasses import dataclass

import torch

from kvviz.audit.arguments import is_integer
from kvviz.cache.codes import rotation_run
from kvviz.cache.modes import Mode
from kvviz.kernels.checks import cache_halves, check_inputs, check_scales, check_slots
from kvviz.kernels.codec import (
    INDEX,
    INTERPRETED,
    LARGEST_SLOT,
    LARGEST_TENSOR,
    ROWS_FIRST,
    codes_of,
    codes_without_scale,
    kernel_mode,
    launching,
    rounded_to,
    scales_of,
    tl,
    triton,
    uses_ptx,
    widened,
)
from kvviz.kernels.rotation import hadamard, rotation_sign, sign_bits


# Grid:   (ceil(T / TOKENS), ceil(H / HEADS)) programs.
# Work:   One program writes the K and V cells of TOKENS tokens and HEADS heads. Each cell is one row of the tile: even
#         rows are cells of K, odd rows are cells of V.
# Reads:  One program reads head_size elements per cell, and 8 bytes of slot_mapping per token.
# Writes: For each cell, first the scale, then the codes. vLLM's kernel has the same order.
# Tiles:  The elements have shape (REP, ROWS, WIDE); column r * WIDE + w of a row lies at [r, row, w]. On a GPU a row is
#         spread over WIDE / 8 threads, and a thread holds 8 columns for each r. The codes have shape
#         (ROWS, REP * WIDE / PER_BYTE). Numbers per row have shape (ROWS,).
@triton.jit
def _write_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slot_ptr, num_tokens,
    in_token, in_head, cache_block, cache_token, cache_head, scale_block, scale_token, scale_head,
    HEAD_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, REP: tl.constexpr, WIDE: tl.constexpr, IN_BYTES: tl.constexpr,
    CACHE_BYTES: tl.constexpr, LOG2_LENGTH: tl.constexpr, SIGNS: tl.constexpr, CODE: tl.constexpr, SCALED: tl.constexpr,
    ROTATED: tl.constexpr, ZERO_POINT: tl.constexpr, PER_BYTE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    # 1. Find the token and the head of each row.
    WHOLE: tl.constexpr = HEAD_SIZE == REP * WIDE
    row = tl.arange(0, ROWS).to(INDEX)
    is_value = (row % 2) == 1
    head = tl.program_id(1).to(INDEX) * HEADS + (row // 2) % HEADS
    local = row // (2 * HEADS)
    token = tl.program_id(0).to(INDEX) * TOKENS + local
    inside = token < num_tokens
    if ROWS != 2 * TOKENS * HEADS:  # ROWS is a power of two: the last rows may be padding
        inside = inside & (local < TOKENS)
    if NUM_HEADS % HEADS != 0:
        inside = inside & (head < NUM_HEADS)
    head, token = head.to(tl.int64), token.to(tl.int64)

    # 2. Load the elements.
    source = tl.where(is_value, value_ptr, key_ptr) + token * in_token + head * in_head
    source = tl.multiple_of(source, [IN_BYTES])
    PERMUTED: tl.constexpr = ROWS_FIRST and REP != 1  # make ROWS the axis that Triton spreads over the threads
    column = (tl.arange(0, REP) * WIDE)[:, None, None] + tl.arange(0, WIDE)[None, None, :]
    if PERMUTED:
        place, tile = source[:, None, None] + tl.permute(column, (1, 0, 2)), inside[:, None, None]
        real = tl.permute(column, (1, 0, 2)) < HEAD_SIZE
    else:
        place, tile, real = source[None, :, None] + column, inside[None, :, None], column < HEAD_SIZE
    given = tl.load(place, mask=tile if WHOLE else tile & real, other=0.0)
    if PERMUTED:
        given = tl.permute(given, (1, 0, 2))

    # 3. Find the address of each row's cell. Rows of padding tokens (negative slots) write nothing.
    slot = tl.load(slot_ptr + token, mask=inside, other=-1)
    inside = inside & (slot >= 0)
    slot = slot.to(INDEX)
    block, place = (slot // BLOCK_SIZE).to(tl.int64), (slot % BLOCK_SIZE).to(tl.int64)
    target = tl.where(is_value, v_cache_ptr, k_cache_ptr)
    target += block * cache_block + place * cache_token + head * cache_head
    target = tl.multiple_of(target, [CACHE_BYTES])

    # 4. Quantise, and store the scales.
    if SCALED:
        SCALE_DTYPE: tl.constexpr = k_scale_ptr.dtype.element_ty
        x = widened(given)
        if ROTATED:
            sign = rotation_sign(column, SIGNS, 1 << LOG2_LENGTH)
            x = rounded_to(hadamard(x * sign, REP, ROWS, WIDE, LOG2_LENGTH), given.dtype, PTX)
        scale, inverse, zero_point, good = scales_of(
            x, column < HEAD_SIZE, REP, ROWS, WHOLE, CODE, ZERO_POINT, SCALE_DTYPE, PTX
        )
        codes = codes_of(x, inverse, zero_point, good, REP, ROWS, WIDE, CODE, PTX)
        scale_place = tl.where(is_value, v_scale_ptr, k_scale_ptr)
        scale_place += block * scale_block + place * scale_token + head * scale_head
        tl.store(scale_place, scale, mask=inside)
        tl.debug_barrier()  # if scales and codes overlap, the codes must stay: store the scales before the codes
    else:
        tl.static_assert(not ROTATED, "only modes with scales can be rotated")
        codes = codes_without_scale(given, CODE, PTX)

    # 5. Store the codes.
    codes = tl.reshape(codes if REP == 1 else tl.permute(codes, (1, 0, 2)), (ROWS, REP * WIDE // PER_BYTE))
    column = tl.arange(0, REP * WIDE // PER_BYTE)
    tile = inside[:, None] if WHOLE else inside[:, None] & (column[None, :] < HEAD_SIZE // PER_BYTE)
    tl.store(target[:, None] + column[None, :], codes, mask=tile)


@dataclass(frozen=True)
class Program:
    """The shape of a launch of :func:`write_kv`: how much one program writes, and what the compiler may assume.

    Attributes:
        tokens, heads: one program writes ``tokens x heads`` cells of K, and the same number of V. Default in the
            interpreter: all tokens and heads, up to Triton's largest tensor. Default on a GPU: 8 cells, or 16 cells in
            modes with rotation. vLLM's own kernel has 1 and 1.
        wide: columns of a cell that are spread over neighbouring threads in one pass; a power of two, at least 8. If a
            cell has more columns, the same threads take them in further passes. Default in the interpreter: all
            columns. Default on a GPU: 32 columns (4 threads), or 8 columns (1 thread) in modes with rotation, because
            fewer threads per cell exchange less data.
        warps: warps of 32 threads in one program; a power of two.
        aligned: True if the compiler gets a divisor of all addresses. Then it may load and store up to 16 bytes at
            once.
        instructions: True to convert with single PTX instructions on a GPU that has them (sm_89 and later).
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
    """Write T tokens of one layer into the cache, through exactly the given views.

    Nothing is copied, moved or repaired first: if the scale views overlap bytes of another owner, these bytes are
    overwritten. If writes of one launch overlap (cells without a tail, or one slot given twice), the result is a race.
    On a GPU, two runs can give different results. In both runtimes, another program shape can give another result.

    A token with a negative slot is padding, and nothing is written for it. A cell with NaN or infinity is poisoned
    (see ``kvviz.cache.codes``).

    Args:
        key, value: ``(T, H, D)``, float32, bfloat16 or float16, on the cache's device.
        kv_cache: the view of one layer, ``(B, 2, N, H, C)`` or ``(B, H, N, 2C)``.
        slot_mapping: int64 ``(T,)``; slot ``s`` is token ``s % N`` of block ``s // N``.
        kv_cache_dtype: the name of the mode.
        k_scale_cache, v_scale_cache: ``(B, N, H)`` in the mode's scale dtype (float32) for per-token-head modes, else
            None.
        program: the shape of the launch. It does not change the result, unless cells written by one launch overlap.
        slots_checked: True if the caller has checked that every slot lies inside the cache. Otherwise the slots are
            checked here. That check waits for the GPU, which takes longer than a small launch.

    Raises:
        ValueError: the kernel cannot serve these shapes, dtypes, devices, strides or slots. The message has the
            numbers.
    """
    mode = kernel_mode(kv_cache_dtype)
    k_cells, v_cells = cache_halves(kv_cache, kv_cache_dtype)
    check_inputs(key, value, k_cells, kv_cache_dtype)
    check_slots(slot_mapping, key.shape[0], k_cells, look=not slots_checked)
    check_scales(k_scale_cache, v_scale_cache, k_cells, kv_cache_dtype)
    num_tokens, num_heads, head_size = key.shape
    if (slots := k_cells.shape[0] * k_cells.shape[1]) > LARGEST_SLOT:
        raise ValueError(
            f"the cache has {slots} slots, but the kernel supports at most {LARGEST_SLOT}: use fewer blocks"
        )
    if num_tokens == 0:
        return
    tokens, heads, wide, warps = _launch_shape(program, key, mode)
    rows, columns = triton.next_power_of_2(2 * tokens * heads), triton.next_power_of_2(head_size)
    scaled, length = mode.is_per_token_head, rotation_run(head_size)
    with launching(key.device):
        _write_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads))](
            key, value, k_cells, v_cells,
            k_scale_cache if scaled else k_cells, v_scale_cache if scaled else v_cells, slot_mapping, num_tokens,
            key.stride(0), key.stride(1), *k_cells.stride()[:3], *(k_scale_cache.stride() if scaled else (0, 0, 0)),
            HEAD_SIZE=head_size, NUM_HEADS=num_heads, BLOCK_SIZE=k_cells.shape[1], TOKENS=tokens, HEADS=heads,
            ROWS=rows, REP=columns // wide, WIDE=wide, IN_BYTES=alignment(key, value) if program.aligned else 1,
            CACHE_BYTES=alignment(k_cells, v_cells) if program.aligned else 1, LOG2_LENGTH=length.bit_length() - 1,
            SIGNS=sign_bits(length) if mode.rotated else 0, CODE=mode.code, SCALED=scaled, ROTATED=mode.rotated,
            ZERO_POINT=mode.has_zero_point, PER_BYTE=mode.codes_per_byte,
            PTX=program.instructions and uses_ptx(key.device), num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def alignment(*tensors: torch.Tensor) -> int:
    """Return the largest divisor, at most 16 bytes, of the addresses of all innermost rows of the tensors."""
    steps = [step * t.element_size() for t in tensors for step in t.stride()[:-1]]
    return math.gcd(16, *(t.data_ptr() for t in tensors), *steps)


def _launch_shape(program: Program, key: torch.Tensor, mode: Mode) -> tuple[int, int, int, int]:
    """Return tokens, heads, wide and warps of a launch: the program's numbers, or the defaults of the class."""
    num_tokens, num_heads, head_size = key.shape
    given_tokens, given_heads, given_wide, given_warps = _checked_numbers(program)
    columns = triton.next_power_of_2(head_size)
    largest = LARGEST_TENSOR // columns
    wide, rows = (columns, largest) if INTERPRETED else (8, 32) if mode.rotated else (32, 16)
    wide = min(given_wide or wide, columns)
    heads = min(given_heads or (num_heads if INTERPRETED else rows // 2), num_heads)
    most_tokens = max(1, (largest if given_tokens else rows) // (2 * heads))
    tokens = min(given_tokens or num_tokens, num_tokens, most_tokens)
    warps = max(1, min(8, triton.next_power_of_2(2 * tokens * heads) * wide // 512))
    return tokens, heads, wide, given_warps or warps


def _checked_numbers(program: Program) -> tuple[int | None, ...]:
    """Return tokens, heads, wide and warps of a program as Python integers. Raises ValueError for a wrong number."""
    names = ("tokens", "heads", "wide", "warps")
    numbers = [getattr(program, name) for name in names]
    for name, number in zip(names, numbers, strict=True):
        if number is not None and not is_integer(number, 1):
            raise ValueError(f"{name} of a program must be an integer of at least 1, not {number!r}")
    for name, number, least in (("wide", program.wide, 8), ("warps", program.warps, 1)):
        if number is not None and (number < least or number & (number - 1)):
            raise ValueError(f"{name} of a program must be a power of two of at least {least}, not {number}")
    return tuple(None if number is None else int(number) for number in numbers)
