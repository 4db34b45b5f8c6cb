"""What the bytes of a cell mean: the codes of every mode, both ways, in plain torch.

This is the reference that the kernels are held against, and what byte maps decode with. Formulas as in
vLLM 0.33 (``facts`` checked against its kernels' bytes in ``tests/golden``); arithmetic in float32 with
IEEE division.

A cell that holds NaN or infinity is poisoned, not repaired: its scale word becomes NaN and its codes 0, so
that everything read from it is NaN. Modes without a scale keep NaN as a NaN code; fp8 (per tensor) makes
infinity NaN as well.
"""

from functools import lru_cache

import torch

from kvviz.cache.modes import get_mode

LARGEST_CODE = {"int8_per_token_head": 127.0, "fp8_per_token_head": 448.0, "int4_per_token_head": 15.0}
SMALLEST_SCALE = 1e-6
ROTATION_SEED = 0x9E3779B9
ZERO_POINT_MASK = 0xF
BFLOAT16_NAN = 0x7FC0


def encode(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise cells.

    Args:
        x: ``(..., head_size)``, float32, bfloat16 or float16.
        mode: one of ``MODES``; ``fp8`` uses the per-tensor scale 1.0, vLLM's default.

    Returns:
        The data bytes, uint8 ``(..., data_bytes)``, and the scale words, float32 ``(...)``, or None for modes
        without scales in the cache. The int4 word carries its zero-point in its lowest four bits.
    """
    get_mode(mode)
    if mode == "bfloat16":
        bits = x.to(torch.bfloat16).contiguous().view(torch.int16)
        return torch.where(x.isnan(), BFLOAT16_NAN, bits).view(torch.uint8), None
    if mode == "fp8":
        return _to_e4m3(torch.where(x.float().isfinite(), x.float(), torch.nan)), None
    values = rotate(x).float() if mode == "int4_per_token_head" else x.float()
    low, high = values.amin(-1), values.amax(-1)
    span = high - low if mode == "int4_per_token_head" else torch.maximum(high, -low)
    bad = ~values.isfinite().all(-1) | ~span.isfinite()
    values, span, low = (torch.where(bad[..., None] if t.dim() > bad.dim() else bad, 0, t) for t in (values, span, low))
    scale = torch.clamp(span / LARGEST_CODE[mode], min=SMALLEST_SCALE)
    codes, word = _quantise(values, scale, low, mode)
    return torch.where(bad[..., None], 0, codes), torch.where(bad, torch.nan, word)


def _quantise(values: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, mode: str):
    scaled = values * (1.0 / scale)[..., None]
    if mode == "int8_per_token_head":
        return _half_away(scaled).clamp(-128, 127).to(torch.int8).view(torch.uint8), scale
    if mode == "fp8_per_token_head":
        return _to_e4m3(scaled), scale
    zero_point = _half_away(-low / scale).clamp(0, 15)
    codes = _half_away(scaled + zero_point[..., None]).clamp(0, 15).to(torch.uint8)
    word = (scale.view(torch.int32) & ~ZERO_POINT_MASK | zero_point.to(torch.int32)).view(torch.float32)
    return codes[..., 0::2] | codes[..., 1::2] << 4, word


def decode(data: torch.Tensor, scale: torch.Tensor | None, mode: str) -> torch.Tensor:
    """Dequantise cells: float32 ``(..., head_size)`` from data bytes and scale words.

    int4 values stay in the rotated domain in which they are stored; :func:`unrotate` brings them back.
    """
    get_mode(mode)
    if mode == "bfloat16":
        return data.contiguous().view(torch.bfloat16).float()
    if mode == "int8_per_token_head":
        return data.view(torch.int8).float() * scale[..., None]
    if mode in ("fp8", "fp8_per_token_head"):
        values = data.view(torch.float8_e4m3fn).float()
        return values if scale is None else values * scale[..., None]
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).float()
    zero_point = (scale.view(torch.int32) & ZERO_POINT_MASK).float()
    return (codes - zero_point[..., None]) * scale[..., None]


def has_scale(mode: str) -> bool:
    """Whether cells of this mode carry a scale of their own."""
    return get_mode(mode).is_per_token_head


@lru_cache
def rotation_signs(run: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The fixed signs of the int4 rotation: float32 ``(run,)`` of +1 and -1, the same in every process."""
    generator = torch.Generator().manual_seed(ROTATION_SEED)
    return (2 * torch.bernoulli(torch.full((run,), 0.5), generator=generator) - 1).to(device)


def rotation_run(head_size: int) -> int:
    """Length of the runs that the int4 rotation mixes: the largest power of two that divides ``head_size``."""
    return head_size & -head_size


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Signs, then the unnormalised Walsh-Hadamard transform on each run, rounded to the dtype of ``x``.

    The sums are taken in butterfly order in float32, as the kernel takes them, so that both agree to the bit.
    """
    run = rotation_run(x.shape[-1])
    runs = x.float().unflatten(-1, (-1, run)) * rotation_signs(run, x.device)
    return _hadamard(runs).flatten(-2).to(x.dtype)


def unrotate(y: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`rotate`, in float32."""
    run = rotation_run(y.shape[-1])
    runs = _hadamard(y.float().unflatten(-1, (-1, run)))
    return (runs * rotation_signs(run, y.device) / run).flatten(-2)


def _hadamard(runs: torch.Tensor) -> torch.Tensor:
    run, half = runs.shape[-1], 1
    while half < run:
        pairs = runs.unflatten(-1, (run // (2 * half), 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        runs = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return runs


def _half_away(x: torch.Tensor) -> torch.Tensor:
    """Round half away from zero, exactly: the addition is done in float64."""
    return torch.copysign(torch.floor(x.abs().double() + 0.5), x.double()).float()


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
