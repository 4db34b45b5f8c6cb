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
# Work:   One program writes the K and V cells of TOKENS tokens and HEADS heads. Each cell is one row of the tile. Even
#         rows are cells of K, and odd rows are cells of V.
# Reads:  One program reads head_size elements per cell, and 8 bytes of slot_mapping per token.
# Writes: One program writes first the scales, then the codes. vLLM's kernel has the same order.
# Tiles:  The elements have shape (REP, ROWS, WIDE). Column r * WIDE + w of a row lies at [r, row, w]. On a GPU,
#         WIDE / 8 threads work on one row, and each thread has 8 columns for each r. The codes have shape
#         (ROWS, REP * WIDE / PER_BYTE). Each number per row has shape (ROWS,).
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
    if ROWS != 2 * TOKENS * HEADS:  # ROWS is a power of two, so the last rows may be padding
        inside = inside & (local < TOKENS)
    if NUM_HEADS % HEADS != 0:
        inside = inside & (head < NUM_HEADS)
    head, token = head.to(tl.int64), token.to(tl.int64)

    # 2. Load the elements.
    source = tl.where(is_value, value_ptr, key_ptr) + token * in_token + head * in_head
    source = tl.multiple_of(source, [IN_BYTES])
    PERMUTED: tl.constexpr = ROWS_FIRST and REP != 1  # Triton must spread the axis of ROWS over the threads
    column = (tl.arange(0, REP) * WIDE)[:, None, None] + tl.arange(0, WIDE)[None, None, :]
    if PERMUTED:
        place, tile = source[:, None, None] + tl.permute(column, (1, 0, 2)), inside[:, None, None]
        real = tl.permute(column, (1, 0, 2)) < HEAD_SIZE
    else:
        place, tile, real = source[None, :, None] + column, inside[None, :, None], column < HEAD_SIZE
    given = tl.load(place, mask=tile if WHOLE else tile & real, other=0.0)
    if PERMUTED:
        given = tl.permute(given, (1, 0, 2))

    # 3. Find the address of the cell of each row. A token with a negative slot is padding, and is not written.
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
        tl.debug_barrier()  # store all scales before the codes, because codes must win if the two overlap
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
    """The shape of a launch of :func:`write_kv`, which decides how much work one program does.

    Attributes:
        tokens, heads: one program writes ``tokens x heads`` cells of K and the same number of cells of V. In the
            interpreter, the default is all tokens and all heads, up to Triton's largest tensor. On a GPU, the default
            is 8 cells of K, or 16 in modes with rotation. In vLLM's kernel, both numbers are 1.
        wide: the number of columns of a cell that neighbouring threads convert in one pass. It must be a power of two,
            and at least 8. If a cell has more columns, the same threads convert more columns in the next pass. In the
            interpreter, the default is all columns. On a GPU, the default is 32 columns (4 threads). In modes with
            rotation, it is 8 columns (1 thread), because fewer threads exchange less data.
        warps: the number of warps in one program. It must be a power of two. Default: depends on the other numbers.
        aligned: True if the compiler is told by how many bytes all addresses can be divided. Then it can load and
            store up to 16 bytes at once.
        instructions: True if the kernel uses the PTX instructions of ``kvviz.kernels.ptx``. They exist on GPUs of sm_89
            and later. On all other devices, this attribute has no effect.
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
    """Write K and V of T tokens of one layer into the cache, through exactly the given views.

    Nothing is copied, moved or repaired first. If the scale views overlap bytes of another owner, these bytes are
    overwritten. Writes of one launch overlap if cells have no tail, or if a slot is given twice. Then the programs
    race. On a GPU, two runs can give different bytes. In both runtimes, another ``program`` can give other bytes.

    A token with a negative slot is padding, and is not written. If K or V of a token and head contains NaN or infinity,
    the cell is poisoned (see ``kvviz.cache.codes``).

    In a mode with rotation, the rotated numbers are rounded to the dtype of ``key``. In float16, they can overflow
    although all inputs are finite. Then the cell is poisoned too. If the sizes of the numbers of a cell add up to at
    most 65,504, no number overflows.

    In the shapes, H is the number of KV heads, D the head size, B the number of blocks, N the number of tokens per
    block, and C the number of elements of a cell.

    Args:
        key, value: float32, bfloat16 or float16 tensors of shape ``(T, H, D)``, on the device of the cache.
        kv_cache: the KV view of one layer, of shape ``(B, 2, N, H, C)`` or ``(B, H, N, 2C)``.
        slot_mapping: int64 tensor of shape ``(T,)``, the slot of each token. Slot ``s`` is place ``s % N`` of block
            ``s // N``.
        kv_cache_dtype: the name of the mode.
        k_scale_cache, v_scale_cache: the scale views of the layer, of shape ``(B, N, H)`` and of the scale dtype of
            the mode. They must be None in a mode without scales.
        program: the shape of the launch. It changes the speed. It changes the bytes only if writes of one launch
            overlap.
        slots_checked: True if the caller has checked that every slot exists. Otherwise this function reads and checks
            the slots. This waits for the GPU, and takes longer than a small launch.

    Raises:
        ValueError: a shape, dtype, device, stride or slot is not supported. The message contains the numbers.
    """
    mode = kernel_mode(kv_cache_dtype)
    k_cells, v_cells = cache_halves(kv_cache, kv_cache_dtype)
    check_inputs(key, value, k_cells, kv_cache_dtype)
    check_slots(slot_mapping, key.shape[0], k_cells, look=not slots_checked)
    check_scales(k_scale_cache, v_scale_cache, k_cells, kv_cache_dtype)
    num_tokens, num_heads, head_size = key.shape
    if (slots := k_cells.shape[0] * k_cells.shape[1]) > LARGEST_SLOT:
        raise ValueError(
            f"the cache has {slots} slots, but the kernel supports only {LARGEST_SLOT} slots: allocate fewer blocks"
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
    """Return the largest power of two, at most 16 bytes, that divides the address of every innermost row."""
    steps = [step * t.element_size() for t in tensors for step in t.stride()[:-1]]
    return math.gcd(16, *(t.data_ptr() for t in tensors), *steps)


def _launch_shape(program: Program, key: torch.Tensor, mode: Mode) -> tuple[int, int, int, int]:
    """Return tokens, heads, wide and warps of a launch. A number that ``program`` does not give gets the default."""
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
    """Return tokens, heads, wide and warps of a program as Python integers. Raise ValueError if one is wrong."""
    names = ("tokens", "heads", "wide", "warps")
    numbers = [getattr(program, name) for name in names]
    for name, number in zip(names, numbers, strict=True):
        if number is not None and not is_integer(number, 1):
            raise ValueError(f"program.{name} is {number!r}, but it must be an integer of at least 1")
    for name, number, least in (("wide", program.wide, 8), ("warps", program.warps, 1)):
        if number is not None and (number < least or number & (number - 1)):
            raise ValueError(f"program.{name} is {number}, but it must be a power of two, and at least {least}")
    return tuple(None if number is None else int(number) for number in numbers)
