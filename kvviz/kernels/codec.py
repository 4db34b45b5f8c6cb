"""Functions that all kernels share. They round numbers, convert numbers to codes, and convert codes back.

Triton's interpreter and a GPU must give the same bits. This needs three rules. Float8 is converted with integer
arithmetic, because the interpreter's own cast loses a mantissa carry. All divisions are IEEE divisions. A kernel that
quantises is launched with ``enable_fp_fusion=False``, because the compiler may otherwise fuse a product and a sum.

Some functions have different code for the interpreter, for older GPUs and for newer GPUs. ``INTERPRETED`` is True in
the interpreter. ``PTX`` is True in a launch on a GPU of sm_89 or later (see :func:`uses_ptx`).

A kernel gets the facts about a mode as constants, which the launcher takes from the record ``Mode``. The constant
``CODE`` is ``Mode.code``. Only this module encodes and decodes codes. To add a code, add a name to ``SUPPORTED_CODES``,
and add a branch to each function that takes ``CODE``.

REP, ROWS and WIDE give the shape (REP, ROWS, WIDE) of a tile. Column ``r * WIDE + w`` of a row lies at ``[r, row, w]``.
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
"""The values of ``Mode.code`` that the kernels can encode and decode."""
LARGEST_TENSOR = 1 << 20
"""The most elements of a tensor that Triton allows inside a kernel, on a GPU and in the interpreter."""

INTERPRETED = tl.constexpr(RUNTIME == "interpreter")
INDEX = tl.constexpr(tl.int64 if RUNTIME == "interpreter" else tl.int32)
"""The type of token, head and slot numbers. 32-bit numbers are slow in the interpreter, because it checks each sum for
overflow. 64-bit numbers are slow on a GPU."""
LARGEST_SLOT = (1 << 31) - 1
"""The most slots of a cache, because the kernels count slots in 32 bits on a GPU."""
ROWS_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7))
"""True before Triton 3.7. Triton spreads the elements of a 3-D tensor over the threads axis by axis. It begins with the
innermost axis. The next axis is the first axis before Triton 3.7, and the middle axis since Triton 3.7."""
FLOAT32_NAN = tl.constexpr(0x7FC00000)  # the bits of NaN in each type
BFLOAT16_NAN = tl.constexpr(0x7FC0)
E4M3_NAN = tl.constexpr(0x7F)
INFINITY = tl.constexpr(float("inf"))
CENTRE = tl.constexpr(8.0)
"""The attention on tensor cores subtracts this number from each int4 code, and from each zero point. This changes no
result, but the sums of the products become smaller, and so do their rounding errors."""


_INTERPRETER_LOCK = threading.Lock()


@contextmanager
def launching(device: torch.device):
    """Context manager for a launch. It makes ``device`` the current GPU, or locks the interpreter.

    The interpreter keeps the number of the current program in global variables. So only one kernel can run at a time.
    """
    with _INTERPRETER_LOCK if RUNTIME == "interpreter" else torch.cuda.device(device):
        yield


@lru_cache
def uses_ptx(device: torch.device) -> bool:
    """Return True if ``device`` is an NVIDIA GPU of sm_89 or later. Launches on it use ``kvviz.kernels.ptx``."""
    return RUNTIME == "gpu" and torch.cuda.get_device_capability(device) >= (8, 9)


def kernel_mode(name: str) -> Mode:
    """Return the record of a mode that the kernels support.

    Raises:
        ValueError: no mode has this name, or the kernels do not support the codes of the mode.
    """
    mode = get_mode(name)
    if mode.code not in SUPPORTED_CODES:
        raise ValueError(
            f"mode {mode.name} has codes of kind {mode.code!r}, but the kernels support only "
            f"{', '.join(SUPPORTED_CODES)}: add a branch for this kind to the functions of kvviz/kernels/codec.py"
        )
    if mode.has_zero_point != (mode.code == "int4"):
        raise ValueError(
            f"mode {mode.name} has codes {mode.code!r} and has_zero_point={mode.has_zero_point}: the kernels need "
            f"has_zero_point={mode.code == 'int4'} for these codes"
        )
    return mode


def device_function(function):
    """Make a function that kernels can call. On a GPU it is a jitted function, in the interpreter it is plain Python.

    In the interpreter, each call of a jitted function patches ``tl`` again, which takes about 1 ms. A plain function
    saves this time.
    """
    return function if RUNTIME == "interpreter" else triton.jit(function)


@device_function
def loop_bound(number):
    """Convert a loaded number so that ``range`` accepts it as a bound. On a GPU the number stays unchanged.

    The interpreter of Triton 3.6 keeps a number in an array with one element. With numpy 2.4, ``range`` does not accept
    this array. So the result is a Python integer in the interpreter.
    """
    return number.handle.data.item() if INTERPRETED else number


@device_function
def finite(x):
    """Return for each element of x: True if the element is a number, False if it is NaN or infinite."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@device_function
def round_half_away(x):
    """Round float32 to the nearest integer, and halves away from zero. The result is float32.

    No other rounding happens, because the difference ``size - below`` is exact.
    """
    size = tl.abs(x)
    below = tl.floor(size)
    size = below + (size - below >= 0.5).to(tl.float32)
    return tl.where(x < 0, -size, size)


@device_function
def widened(x):
    """Convert any float type to float32, exactly.

    The interpreter's own cast of bfloat16 loses subnormal numbers. So this function shifts the bits of bfloat16.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@device_function
def to_bfloat16_bits(x):
    """Convert float32 to bfloat16 bits (int16). Round to nearest even. Every NaN becomes 0x7FC0."""
    bits = x.to(tl.uint32, bitcast=True).to(tl.int64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@device_function
def to_e4m3_bits(x):
    """Convert float32 (not NaN) to e4m3fn bits (uint8). Clamp to +-448, and round to nearest even.

    Numbers of at least 2**-6 are normal in e4m3. For them, subtract the difference of the exponent biases (120), and
    round away 20 bits of the mantissa. Smaller numbers are subnormal in e4m3, and their codes count multiples of 2**-9.
    For them, add 16384 in float32, because this sum is rounded to a multiple of 2**-9.
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

    Exponent and mantissa of the code are shifted into a float32. Multiplying by 2**120 corrects the exponent bias.
    """
    wide = code.to(tl.int32)
    value = (((wide & 127) << 20) | ((wide & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((wide & 127) == 127, float("nan"), value)


@device_function
def row_minimum(x, REP: tl.constexpr, ROWS: tl.constexpr):
    """Return the smallest number of each row of x. The shape of x is (REP, ROWS, WIDE), and of the result (ROWS,).

    For a row with a NaN, the result is NaN in some versions of Triton. In other versions it is the smallest other
    number of the row. So the caller must find rows with a NaN by :func:`row_maximum`.
    """
    x = tl.min(x if not INTERPRETED else tl.where(x == x, x, INFINITY), axis=2)
    return tl.reshape(x, (ROWS,)) if REP == 1 else tl.min(x, axis=0)


@device_function
def row_maximum(x, REP: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Return the largest number of each row of x. The shape of x is (REP, ROWS, WIDE), and of the result (ROWS,).

    If a row contains NaN or infinity, the result for this row is NaN or infinite.
    """
    if PTX:
        x = tl.reduce(x, 2, ptx.maximum_or_nan)
        return tl.reshape(x, (ROWS,)) if REP == 1 else tl.reduce(x, 0, ptx.maximum_or_nan)
    else:
        x = tl.max(tl.where(finite(x), x, INFINITY), axis=2)
        return tl.reshape(x, (ROWS,)) if REP == 1 else tl.max(x, axis=0)


@device_function
def rounded_to(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Round float32 numbers to the precision of DTYPE (to nearest even). The result is float32."""
    if tl.bfloat16 == DTYPE:
        if PTX:
            return ptx.through_bfloat16(x)
        else:
            return (to_bfloat16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(tl.float32)


@device_function
def zero_points(scales):
    """Return the zero points as float32. The four lowest bits of an int4 scale hold the zero point."""
    return (scales.to(tl.int32, bitcast=True) & 15).to(tl.float32)


@device_function
def scales_of(
    x, real, REP: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
    CODE: tl.constexpr, ZERO_POINT: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the scale of each row, and the numbers with which :func:`codes_of` quantises the row.

    Args:
        x: float32 tensor of shape (REP, ROWS, WIDE). In a mode with rotation, x must be rotated already.
        real: False for the columns that only pad a row to a power of two. In these columns, x must be 0.
        WHOLE: True if no column is padding.
        DTYPE: the type in which scales are stored.

    Returns:
        Four tensors of shape (ROWS,). The first is the scale to store. It is float32, and it is NaN if a number of the
        row is not finite. The second is the inverse of the scale (float32), and the third is the zero point (float32).
        The fourth is True if all numbers of the row are finite.
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
    """Return the bytes of the codes. Their shape is (REP, ROWS, WIDE), or (REP, ROWS, WIDE // 2) for int4.

    ``inverse``, ``zero_point`` and ``good`` are results of :func:`scales_of`. If ``good`` is False for a row, all codes
    of the row are 0.
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
    """Return the codes of numbers in a mode without scales. They are int16 for bfloat16, and bytes for e4m3.

    In bfloat16, every NaN becomes 0x7FC0. In e4m3, NaN and infinity become the NaN code.
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
    """Load columns of cells, and decode the codes to float32. The values are not yet multiplied by the scale.

    ``base + cell`` points to a cell. ``base`` points to int16 numbers for bfloat16, and to bytes for all other codes.
    ``scales`` are the scales of the cells. For int4, they contain the zero points, which are subtracted.
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
    """Decode the codes in int16 words. Return one tensor per code of a word. The first tensor has the lowest bits.

    The values are exact. Zero point and scale are not applied. For int4, :data:`CENTRE` is subtracted. If ``PTX`` is
    False, the values are float32. Otherwise, bfloat16 codes give bfloat16, and all other codes give float16.
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
                (wide & 15).to(tl.float32) - CENTRE,
                ((wide >> 4) & 15).to(tl.float32) - CENTRE,
                ((wide >> 8) & 15).to(tl.float32) - CENTRE,
                ((wide >> 12) & 15).to(tl.float32) - CENTRE,
            )
    else:
        tl.static_assert(False, "word_values has no branch for this CODE")
