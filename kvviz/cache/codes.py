"""Quantise and dequantise cells in plain torch. This module defines what the bytes of a cell mean in each mode.

The Triton kernels must write the same bytes as this module, and byte maps use this module to decode bytes. The formulas
follow vLLM 0.33. The tests compare the results with bytes that vLLM's kernels wrote. All arithmetic is in float32, and
divisions are IEEE 754 divisions.

If the input of a cell contains NaN or infinity, the cell is poisoned. The scale of a poisoned cell is NaN, and all
codes are 0. So all values that are read from this cell are NaN. A mode without scales stores NaN as a NaN code. The
mode fp8 stores infinity as NaN too.
"""

from functools import lru_cache

import torch

from kvviz.cache.modes import CODES, MODES, Mode, get_mode

SMALLEST_SCALE = 1e-6
"""The smallest scale, as in vLLM. Without this limit, a cell of zeros would lead to a division by zero."""

ROTATION_SEED = 0x9E3779B9
"""The seed for the signs of the rotation, as in vLLM. Every process must use the same signs."""

BFLOAT16_NAN = 0x7FC0
"""In the mode bfloat16, every NaN gets these bits."""


def encode(x: torch.Tensor, mode: str | Mode) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise cells.

    Args:
        x: float32, bfloat16 or float16 tensor of shape ``(..., head_size)``.
        mode: a Mode, or a name in ``MODES``. ``fp8`` uses the scale 1.0 for the whole tensor, which is vLLM's default.

    Returns:
        Two tensors. The first contains the data bytes, uint8 of shape ``(..., data_bytes)``. The second contains the
        scales, of shape ``(...)`` and of the scale dtype of the mode. The lowest four bits of an int4 scale hold the
        zero point. For a mode without scales in the cache, the second value is None.

    Raises:
        ValueError: the mode does not exist, or the dtype of ``x`` is not a floating-point type.
    """
    mode = get_mode(mode)
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, but cells are made from floating-point numbers: pass x.float()")
    if mode.is_per_token_head:
        return _encode_with_scales(x, mode)
    if mode.code == "bfloat16":
        bits = x.to(torch.bfloat16).contiguous().view(torch.int16)
        return torch.where(x.isnan(), BFLOAT16_NAN, bits).view(torch.uint8), None
    if mode.code == "e4m3":
        return _to_e4m3(torch.where(x.float().isfinite(), x.float(), torch.nan)), None
    raise _unknown_code(mode)


def _encode_with_scales(x: torch.Tensor, mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
    values = (rotate(x) if mode.rotated else x).float()
    low, high = values.amin(-1), values.amax(-1)
    # If the mode has a zero point, the codes cover the interval [low, high]. Otherwise they cover [-span, span].
    span = high - low if mode.has_zero_point else torch.maximum(high, -low)
    poisoned = ~values.isfinite().all(-1) | ~span.isfinite()
    values = torch.where(poisoned[..., None], 0, values)
    low, span = torch.where(poisoned, 0, low), torch.where(poisoned, 0, span)
    scale = torch.clamp(span / mode.largest_code, min=SMALLEST_SCALE).to(getattr(torch, mode.scale_dtype))
    scaled = values * (1.0 / scale.float())[..., None]
    if mode.has_zero_point:
        zero_point = _half_away(-low / scale.float()).clamp(0, mode.largest_code)
        scaled = scaled + zero_point[..., None]
        scale = _with_zero_point(scale, zero_point, mode)
    codes = _pack(_to_codes(scaled, mode), mode)
    return torch.where(poisoned[..., None], 0, codes), torch.where(poisoned, torch.nan, scale)


def decode(data: torch.Tensor, scale: torch.Tensor | None, mode: str | Mode) -> torch.Tensor:
    """Dequantise cells.

    In a mode with rotation (int4), the values stay rotated. Call :func:`unrotate` to undo the rotation.

    Args:
        data: the data bytes, a uint8 tensor of shape ``(..., data_bytes)``.
        scale: the scales, a tensor of shape ``(...)``. None for a mode without scales in the cache.
        mode: a Mode, or a name in ``MODES``.

    Returns:
        A float32 tensor of shape ``(..., head_size)``.

    Raises:
        ValueError: the mode does not exist, or the scales are missing.
    """
    mode = get_mode(mode)
    if mode.code == "bfloat16":
        return data.contiguous().view(torch.bfloat16).float()
    if mode.is_per_token_head and scale is None:
        raise ValueError(f"mode {mode.name} has one scale per cell, but scale is None: pass the scales of the cells")
    values = _from_codes(_unpack(data, mode), mode)
    if mode.has_zero_point:
        values = values - (_bits_of(scale) & mode.zero_point_mask).float()[..., None]
    return values if scale is None else values * scale.float()[..., None]


def _to_codes(scaled: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Convert values to codes. The values are already divided by the scale. The result has one uint8 per element."""
    if mode.code == "int8":
        return _half_away(scaled).clamp(-128, 127).to(torch.int8).view(torch.uint8)
    if mode.code == "e4m3":
        return _to_e4m3(scaled)
    if mode.code == "int4":
        return _half_away(scaled).clamp(0, mode.largest_code).to(torch.uint8)
    raise _unknown_code(mode)


def _from_codes(codes: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return each code as a float32 number. Zero point and scale are not applied yet."""
    if mode.code == "int8":
        return codes.view(torch.int8).float()
    if mode.code == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if mode.code == "int4":
        return codes.float()
    raise _unknown_code(mode)


def _pack(codes: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Put codes into bytes. If a byte has two codes, the first code is in the low four bits."""
    return codes if mode.codes_per_byte == 1 else codes[..., 0::2] | codes[..., 1::2] << 4


def _unpack(data: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Undo :func:`_pack`. The result has one code per element."""
    return data if mode.codes_per_byte == 1 else torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _with_zero_point(scale: torch.Tensor, zero_point: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Write the zero point into the lowest bits of each scale.

    This changes a float32 scale by less than 1 / 500,000 of the scale.
    """
    bits = _bits_of(scale)
    return (bits & ~mode.zero_point_mask | zero_point.to(bits.dtype)).view(scale.dtype)


def _bits_of(scale: torch.Tensor) -> torch.Tensor:
    """Return the bits of each scale as an integer of the same size."""
    return scale.view(torch.int32 if scale.element_size() == 4 else torch.int16)


def _unknown_code(mode: Mode) -> ValueError:
    scales = "with" if mode.is_per_token_head else "without"
    return ValueError(
        f"mode {mode.name} stores {mode.code} codes {scales} scales, but kvviz.cache.codes has no formula for this "
        f"combination: add a formula there, or use one of the modes {', '.join(MODES)}"
    )


@lru_cache
def rotation_signs(length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the signs of the rotation, as float32 of shape ``(length,)``. Each sign is +1 or -1.

    The signs are the same in every process.
    """
    generator = torch.Generator().manual_seed(ROTATION_SEED)
    return (2 * torch.bernoulli(torch.full((length,), 0.5), generator=generator) - 1).to(device)


def rotation_run(head_size: int) -> int:
    """Return how many adjacent elements the rotation mixes. It is the largest power of two that divides head_size."""
    return head_size & -head_size


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate cells before they are quantised. The rotation spreads a large element over the neighbouring elements.

    Each group of :func:`rotation_run` elements is multiplied by fixed signs, and then by the Walsh-Hadamard matrix,
    without normalising. The sums are computed in float32, in the same order as in the kernel. So kernel and reference
    give the same bits. The result is rounded to the dtype of ``x``.

    In float16, the sums can overflow although all numbers of ``x`` are finite. Then the result contains infinity. If
    the sizes of the numbers of a group add up to at most 65,504, no sum overflows.
    """
    length = rotation_run(x.shape[-1])
    groups = x.float().unflatten(-1, (-1, length)) * rotation_signs(length, x.device)
    return _hadamard(groups).flatten(-2).to(x.dtype)


def unrotate(y: torch.Tensor) -> torch.Tensor:
    """Undo :func:`rotate`. The result is float32."""
    length = rotation_run(y.shape[-1])
    groups = _hadamard(y.float().unflatten(-1, (-1, length)))
    return (groups * rotation_signs(length, y.device) / length).flatten(-2)


def _hadamard(groups: torch.Tensor) -> torch.Tensor:
    """Multiply the last axis by the Walsh-Hadamard matrix, in log2(length) steps of sums and differences."""
    length, half = groups.shape[-1], 1
    while half < length:
        pairs = groups.unflatten(-1, (length // (2 * half), 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        groups = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return groups


def _half_away(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, and halves away from zero.

    The sum x + 0.5 is computed in float64, because in float32 the sum would be rounded for some x.
    """
    return torch.copysign(torch.floor(x.abs().double() + 0.5), x.double()).float()


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    largest = CODES["e4m3"].largest
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
