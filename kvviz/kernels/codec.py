"""Device functions that the kernels share: rounding, and the conversion to codes and back.

Triton's interpreter and a GPU must give the same bits. Therefore float8 is converted by integer arithmetic (the
interpreter's own cast loses a mantissa carry), rounding works on the bits, and divisions are IEEE divisions. Launch
with ``enable_fp_fusion=False``; otherwise the compiler may fuse a product and a sum.

Some results need different code in the interpreter, on older GPUs and on newer GPUs. The choice is made in this module.
``INTERPRETED`` is True in the interpreter. ``PTX`` is True in a launch on sm_89 and later (:func:`uses_ptx`).

A kernel gets the facts about a mode as constants, which the launcher takes from the record ``Mode``. ``CODE`` is
``Mode.code``. Codes are encoded and decoded in this module only. To add a code, add its name to ``SUPPORTED_CODES`` and
one branch to each function that takes ``CODE``.
"""

import threading
from contextlib import contextmanager
from functools import lru_cache

import torch

from kvviz.cache.modes import Mode, get_mode
from kvviz.kernels.runtime import prepare

RUNTIME = prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kvviz.kernels import ptx  # noqa: E402

SUPPORTED_CODES = ("bfloat16", "e4m3", "int8", "int4")
"""Every value of ``Mode.code`` that the kernels can encode and decode."""
LARGEST_TENSOR = 1 << 20
"""Elements of the largest tensor that Triton allows inside a kernel. The limit holds in the interpreter too."""

INTERPRETED = tl.constexpr(RUNTIME == "interpreter")
INDEX = tl.constexpr(tl.int64 if RUNTIME == "interpreter" else tl.int32)
"""Type of token, head and slot numbers. The interpreter checks each 32-bit sum for overflow, which is slow. A GPU
multiplies 64-bit numbers slowly."""
LARGEST_SLOT = (1 << 31) - 1
"""Largest number of slots in a cache, because a GPU counts slots in 32 bits."""
ROWS_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7))
"""True before Triton 3.7. Triton spreads the innermost axis of a 3-D tensor over the threads, and then another axis:
before 3.7 the first axis, since 3.7 the middle axis."""
FLOAT32_NAN = tl.constexpr(0x7FC00000)  # the bits of NaN in each type
BFLOAT16_NAN = tl.constexpr(0x7FC0)
E4M3_NAN = tl.constexpr(0x7F)
INFINITY = tl.constexpr(float("inf"))


_INTERPRETER_LOCK = threading.Lock()


@contextmanager
def launching(device: torch.device):
    """Surround each launch: make ``device`` the current GPU, or lock the interpreter.

    The interpreter keeps the position of a program in global variables, so only one kernel at a time may run in it.
    """
    with _INTERPRETER_LOCK if RUNTIME == "interpreter" else torch.cuda.device(device):
        yield


@lru_cache
def uses_ptx(device: torch.device) -> bool:
    """Return True if launches on ``device`` use ``kvviz.kernels.ptx``: on an NVIDIA GPU of sm_89 or later."""
    return RUNTIME == "gpu" and torch.cuda.get_device_capability(device) >= (8, 9)


def kernel_mode(name: str) -> Mode:
    """Return the record of a mode that the kernels support.

    Raises:
        ValueError: there is no mode of that name (the message names the nearest), or the kernels lack its code.
    """
    mode = get_mode(name)
    if mode.code not in SUPPORTED_CODES:
        raise ValueError(
            f"mode {mode.name} has codes of kind {mode.code!r}, but the kernels support only "
            f"{', '.join(SUPPORTED_CODES)}: add a branch for this kind to the functions of kvviz/kernels/codec.py"
        )
    if mode.has_zero_point != (mode.code == "int4"):
        raise ValueError(
            f"mode {mode.name} has codes {mode.code!r} and has_zero_point={mode.has_zero_point}: "
            "the kernels store a zero-point with int4 codes, and only with them"
        )
    return mode


def device_function(function):
    """Make a function that kernels can call: compiled for a GPU, plain Python in the interpreter.

    In the interpreter each call of a jitted function patches ``tl`` again, which takes about 1 ms. A plain function
    avoids that.
    """
    return function if RUNTIME == "interpreter" else triton.jit(function)


@device_function
def loop_bound(number):
    """Return a loaded number as a bound of ``range``: unchanged on a GPU, a Python integer in the interpreter.

    The interpreter of Triton 3.6 cannot use its one-element arrays as an index under numpy 2.4.
    """
    return number.handle.data.item() if INTERPRETED else number


@device_function
def finite(x):
    """Return True where x is neither NaN nor infinite."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@device_function
def round_half_away(x):
    """Round to the nearest integer, as float32; halves go away from zero. The difference to the floor is exact."""
    size = tl.abs(x)
    below = tl.floor(size)
    size = below + (size - below >= 0.5).to(tl.float32)
    return tl.where(x < 0, -size, size)


@device_function
def widened(x):
    """Convert any float type to float32, exactly. The interpreter's own cast of bfloat16 loses subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@device_function
def to_bfloat16_bits(x):
    """Convert float32 to bfloat16 bits (int16), rounded to nearest even. Every NaN becomes 0x7FC0."""
    bits = x.to(tl.uint32, bitcast=True).to(tl.int64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@device_function
def to_e4m3_bits(x):
    """Convert float32 (not NaN) to e4m3fn bits (uint8): clamped to +-448, rounded to nearest even.

    From 2**-6 up, e4m3 numbers are normal: subtract the difference of the exponent biases (120), and round 20 mantissa
    bits away. For numbers below 2**-6, add 16384. This float32 addition rounds to multiples of 2**-9, and the
    subnormal codes are these multiples.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True).to(tl.int64)
    normal = (bits + ((bits >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True).to(tl.int64) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return (tl.where(size >= 0.015625, normal, subnormal) | sign).to(tl.uint8)


@device_function
def from_e4m3_bits(code):
    """Convert e4m3fn bits (uint8) to float32. The two NaN codes give NaN.

    The code's exponent and mantissa are shifted into a float32. The product with 2**120 corrects the exponent bias.
    """
    wide = code.to(tl.int32)
    value = (((wide & 127) << 20) | ((wide & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((wide & 127) == 127, float("nan"), value)


@device_function
def row_minimum(x, REP: tl.constexpr, ROWS: tl.constexpr):
    """Return the smallest number of each row of (REP, ROWS, WIDE).

    A row with a NaN may give NaN, or the smallest other number of the row: this depends on Triton's version. The
    caller finds rows with a NaN by :func:`row_maximum`.
    """
    x = tl.min(x if not INTERPRETED else tl.where(x == x, x, INFINITY), axis=2)
    return tl.reshape(x, (ROWS,)) if REP == 1 else tl.min(x, axis=0)


@device_function
def row_maximum(x, REP: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Return the largest number of each row of (REP, ROWS, WIDE).

    The result is infinite or NaN if any number of the row is not finite.
    """
    if PTX:
        x = tl.reduce(x, 2, ptx.maximum_or_nan)
        return tl.reshape(x, (ROWS,)) if REP == 1 else tl.reduce(x, 0, ptx.maximum_or_nan)
    else:
        x = tl.max(tl.where(finite(x), x, INFINITY), axis=2)
        return tl.reshape(x, (ROWS,)) if REP == 1 else tl.max(x, axis=0)


@device_function
def rounded_to(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Round float32 numbers to DTYPE, to nearest even, and return them as float32."""
    if tl.bfloat16 == DTYPE:
        if PTX:
            return ptx.through_bfloat16(x)
        else:
            return (to_bfloat16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(tl.float32)


@device_function
def zero_points(scales):
    """Return the zero-points that int4 scales carry in their four lowest bits, as float32."""
    return (scales.to(tl.int32, bitcast=True) & 15).to(tl.float32)


@device_function
def scales_of(
    x, real, REP: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
    CODE: tl.constexpr, ZERO_POINT: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the scale of each row, and the numbers with which :func:`codes_of` quantises the row.

    Args:
        x: float32 (REP, ROWS, WIDE), already rotated in a mode with rotation.
        real: False for the columns that pad a row to a power of two; ``x`` is 0 in these columns.
        WHOLE: True if a row has no such columns.
        DTYPE: the type in which scales are stored.

    Returns:
        Four tensors (ROWS,): the scale to store (float32; NaN if a number of the row is not finite), the inverse of
        the scale (float32), the zero-point (float32), and True if all numbers of the row are finite.
    """
    if ZERO_POINT:
        low = row_minimum(x if WHOLE else tl.where(real, x, INFINITY), REP, ROWS)
        span = row_maximum(x if WHOLE else tl.where(real, x, low[None, :, None]), REP, ROWS, PTX) - low
    else:
        span = row_maximum(tl.abs(x), REP, ROWS, PTX)
    good = tl.abs(span) < INFINITY
    span = tl.where(good, span, 0.0)
    if CODE == "int8":
        scale = tl.div_rn(span, 127.0)
    elif CODE == "e4m3":
        scale = tl.div_rn(span, 448.0)
    elif CODE == "int4":
        scale = tl.div_rn(span, 15.0)
    else:
        tl.static_assert(False, "scales_of has no branch for this CODE")
    scale = rounded_to(tl.maximum(scale, 1e-6), DTYPE, PTX)
    word = scale.to(tl.int32, bitcast=True)
    if ZERO_POINT:
        zero_point = tl.minimum(tl.maximum(round_half_away(tl.div_rn(-tl.where(good, low, 0.0), scale)), 0.0), 15.0)
        word = (word & -16) | zero_point.to(tl.int32)
    else:
        zero_point = scale  # not used
    stored = tl.where(good, word, FLOAT32_NAN).to(tl.float32, bitcast=True)
    return stored, tl.div_rn(1.0, scale), zero_point, good


@device_function
def codes_of(
    x, inverse, zero_point, good,
    REP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, CODE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the code bytes of rows: (REP, ROWS, WIDE), or (REP, ROWS, WIDE // 2) for int4.

    The codes of a row are 0 if ``good`` is False for it.
    """
    if PTX:
        keep = tl.where(good, -1, 0).to(tl.int8)[None, :, None]
        if CODE == "int8":
            return ptx.int8_codes(x, inverse[None, :, None], keep)
        elif CODE == "e4m3":
            return ptx.e4m3_codes(x, inverse[None, :, None], keep)
        elif CODE == "int4":
            even, odd = tl.split(tl.reshape(x, (REP, ROWS, WIDE // 2, 2)))
            return ptx.int4_pairs(even, odd, inverse[None, :, None], zero_point[None, :, None], keep)
        else:
            tl.static_assert(False, "codes_of has no branch for this CODE")
    else:
        scaled = tl.where(good[None, :, None], x, 0.0) * inverse[None, :, None]
        if CODE == "int8":
            codes = tl.minimum(tl.maximum(round_half_away(scaled), -128.0), 127.0).to(tl.int32)
        elif CODE == "e4m3":
            codes = to_e4m3_bits(scaled).to(tl.int32)
        elif CODE == "int4":
            codes = round_half_away(scaled + zero_point[None, :, None])
            codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)
        else:
            tl.static_assert(False, "codes_of has no branch for this CODE")
        codes = tl.where(good[None, :, None], codes, 0)
        if CODE == "int4":  # the even column is the low half of a byte
            low, high = tl.split(tl.reshape(codes, (REP, ROWS, WIDE // 2, 2)))
            codes = low | (high << 4)
        return codes.to(tl.uint8)


@device_function
def codes_without_scale(given, CODE: tl.constexpr, PTX: tl.constexpr):
    """Return the codes of numbers in a mode without scales: int16 for bfloat16, bytes for e4m3.

    bfloat16 makes every NaN 0x7FC0. e4m3 makes NaN and infinity the NaN code.
    """
    x = widened(given)
    if CODE == "bfloat16":
        if given.dtype == tl.bfloat16:
            return tl.where(x != x, BFLOAT16_NAN, given.to(tl.int16, bitcast=True))
        else:
            return to_bfloat16_bits(x)
    elif CODE == "e4m3":
        good = finite(x)
        if PTX:
            one = tl.full(x.shape, 1.0, tl.float32)
            return ptx.e4m3_codes(tl.where(good, x, float("nan")), one, tl.full(x.shape, -1, tl.int8))
        else:
            return tl.where(good, to_e4m3_bits(tl.where(good, x, 0.0)), E4M3_NAN).to(tl.uint8)
    else:
        tl.static_assert(False, "codes_without_scale has no branch for this CODE")


@device_function
def load_values(base, cell, column, mask, scales, CODE: tl.constexpr):
    """Load columns of cells and return them as float32, before the multiplication with the scale.

    ``base + cell`` is the address of a cell, in elements of ``base`` (int16 for bfloat16, else bytes). The zero-points
    of int4 are taken from ``scales``, the scales of the cells.
    """
    if CODE == "bfloat16":
        bits = tl.load(base + cell + column, mask=mask, other=0)
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif CODE == "e4m3":
        return from_e4m3_bits(tl.load(base + cell + column, mask=mask, other=0))
    elif CODE == "int8":
        return tl.load(base + cell + column, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    elif CODE == "int4":
        pair = tl.load(base + cell + column // 2, mask=mask, other=0).to(tl.int32)
        code = (pair >> ((column % 2) * 4).to(tl.int32)) & 15
        return code.to(tl.float32) - zero_points(scales)
    else:
        tl.static_assert(False, "load_values has no branch for this CODE")


@device_function
def word_values(words, CODE: tl.constexpr, PTX: tl.constexpr):
    """Decode the codes in int16 words: return one tensor per code of a word, the lowest bits first.

    The values are exact. The zero-point and the scale are not applied. The type is bfloat16 for bfloat16 codes and
    float16 for all others; without ``PTX`` it is float32.
    """
    if CODE == "bfloat16":
        if PTX:
            return (words.to(tl.bfloat16, bitcast=True),)
        else:
            return ((words.to(tl.int32) << 16).to(tl.float32, bitcast=True),)
    elif CODE == "e4m3":
        if PTX:
            return ptx.e4m3_halves(words)
        else:
            wide = words.to(tl.int32)
            return from_e4m3_bits(wide & 255), from_e4m3_bits((wide >> 8) & 255)
    elif CODE == "int8":
        if PTX:
            return ptx.int8_halves(words)
        else:
            wide = words.to(tl.int32)
            return ((wide << 24) >> 24).to(tl.float32), ((wide << 16) >> 24).to(tl.float32)
    elif CODE == "int4":
        if PTX:
            return ptx.int4_quarters(words)
        else:
            wide = words.to(tl.int32)
            return (
                (wide & 15).to(tl.float32),
                ((wide >> 4) & 15).to(tl.float32),
                ((wide >> 8) & 15).to(tl.float32),
                ((wide >> 12) & 15).to(tl.float32),
            )
    else:
        tl.static_assert(False, "word_values has no branch for this CODE")
