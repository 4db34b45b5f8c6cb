"""Device functions shared by the kernels: rounding, the three codes, and the rotation of int4.

Everything is written so that Triton's interpreter and a GPU give the same bits: fp8 by integer arithmetic
(the interpreter's own cast drops a mantissa carry), rounding on the bits, IEEE division. Launch with
``enable_fp_fusion=False``, or a product and a sum may fuse.

Where the interpreter and a GPU need different words for the same bits, the choice falls here: ``PTX`` is True for a
launch on sm_89 and later (:func:`speaks_ptx`), ``INTERPRETED`` in the interpreter.
"""

import threading
from contextlib import contextmanager
from functools import lru_cache

import torch

from kvviz.kernels.runtime import prepare

MODE = prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kvviz.kernels import ptx  # noqa: E402

LARGEST_TENSOR = 1 << 20
"""Elements of the largest tensor that Triton allows inside a kernel, in the interpreter too."""

INTERPRETED = tl.constexpr(MODE == "interpreter")
INDEX = tl.constexpr(tl.int64 if MODE == "interpreter" else tl.int32)
"""Tokens, heads and slots: the interpreter checks 32-bit sums for overflow, and a GPU multiplies 64 bits slowly."""
LARGEST_SLOT = (1 << 31) - 1
ROWS_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7))
"""Which of two axes follows the innermost one over the threads: before Triton 3.7 the first, since then the last."""
NAN_BITS = tl.constexpr(0x7FC00000)
E4M3_NAN = tl.constexpr(0x7F)
INFINITY = tl.constexpr(float("inf"))


_INTERPRETER_LOCK = threading.Lock()


@contextmanager
def launching(device: torch.device):
    """Around each launch: on the tensors' own GPU, whichever is the current one.

    The interpreter keeps a program's place in globals, so only one kernel may run in it.
    """
    with _INTERPRETER_LOCK if MODE == "interpreter" else torch.cuda.device(device):
        yield


@lru_cache
def speaks_ptx(device: torch.device) -> bool:
    """Whether launches on ``device`` use the instructions of ``kvviz.kernels.ptx``: an NVIDIA GPU of sm_89 or later."""
    return MODE == "gpu" and torch.cuda.get_device_capability(device) >= (8, 9)


def device_function(function):
    """A function that kernels call: compiled for a GPU, plain Python in the interpreter.

    The interpreter would set up its patches of ``tl`` anew at each call of a jitted function (about 1 ms).
    """
    return function if MODE == "interpreter" else triton.jit(function)


@device_function
def loop_bound(number):
    """A loaded number as the bound of a ``range``: itself on a GPU, a Python integer in the interpreter.

    The interpreter of Triton 3.6 cannot turn its one-element arrays into an index under numpy 2.4.
    """
    return number.handle.data.item() if INTERPRETED else number


@device_function
def finite(x):
    """True where x is neither NaN nor infinite."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@device_function
def round_half_away(x):
    """Nearest integer as float32, halves away from zero; the difference to the floor is exact."""
    size = tl.abs(x)
    below = tl.floor(size)
    size = below + (size - below >= 0.5).to(tl.float32)
    return tl.where(x < 0, -size, size)


@device_function
def widened(x):
    """Any float to float32, exactly; the interpreter's own cast of bfloat16 loses subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@device_function
def to_bfloat16_bits(x):
    """float32 -> bfloat16 bits (int16), to nearest even; every NaN becomes 0x7FC0."""
    bits = x.to(tl.uint32, bitcast=True).to(tl.int64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@device_function
def to_e4m3_bits(x):
    """float32 (no NaN) -> e4m3fn bits (uint8), clamped to +-448, to nearest even."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True).to(tl.int64)
    normal = (bits + ((bits >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True).to(tl.int64) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return (tl.where(size >= 0.015625, normal, subnormal) | sign).to(tl.uint8)


@device_function
def from_e4m3_bits(code):
    """e4m3fn bits (uint8) -> float32; the two NaN codes give NaN."""
    wide = code.to(tl.int32)
    value = (((wide & 127) << 20) | ((wide & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((wide & 127) == 127, float("nan"), value)


@device_function
def rotation_sign(column, SIGNS: tl.constexpr, RUN: tl.constexpr):
    """+1.0 or -1.0 for each column, from an integer whose bit ``column % RUN`` is set where the sign is minus."""
    place = column % RUN
    word = place.to(tl.int64) * 0
    for part in tl.static_range((RUN + 31) // 32):
        word = tl.where(place // 32 == part, (SIGNS >> (32 * part)) & 0xFFFFFFFF, word)
    return 1.0 - 2.0 * ((word >> (place % 32).to(tl.int64)) & 1).to(tl.float32)


@device_function
def butterfly(x, AXIS: tl.constexpr, NDIM: tl.constexpr):
    """Sum and difference of each pair along an axis of length 2: no element changes its thread unless it must."""
    second = tl.arange(0, 2)
    for axis in tl.static_range(NDIM):
        if axis != AXIS:
            second = tl.expand_dims(second, axis)
    bits = x.to(tl.int32, bitcast=True)
    other = (tl.xor_sum(bits, axis=AXIS, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
    return tl.fma(x, 1.0 - 2.0 * second.to(tl.float32), other)


@device_function
def hadamard(x, REP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, LOG2_RUN: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of each run of ``2**LOG2_RUN`` columns, in butterfly order.

    x: float32 (REP, ROWS, WIDE), column ``r * WIDE + w`` of a row at ``[r, row, w]``.
    """
    if INTERPRETED:  # its xor_sum is a Python loop
        x = tl.reshape(x if REP == 1 else tl.permute(x, (1, 0, 2)), (ROWS, REP * WIDE))
        for stage in tl.static_range(LOG2_RUN):
            pairs = tl.reshape(x, (ROWS, REP * WIDE // (2 << stage), 2, 1 << stage))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            x = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
            x = tl.reshape(x, (ROWS, REP * WIDE))
        x = tl.reshape(x, (ROWS, REP, WIDE)) if REP != 1 else tl.reshape(x, (1, ROWS, WIDE))
        x = x if REP == 1 else tl.permute(x, (1, 0, 2))
    else:
        for stage in tl.static_range(LOG2_RUN):
            if 1 << stage < WIDE:
                x = butterfly(tl.reshape(x, (REP, ROWS, WIDE // (2 << stage), 2, 1 << stage)), 3, 5)
            else:
                x = tl.reshape(x, (REP * WIDE // (2 << stage), 2, (1 << stage) // WIDE, ROWS, WIDE))
                x = butterfly(x, 1, 5)
            x = tl.reshape(x, (REP, ROWS, WIDE))
    return x


@device_function
def least(x, REP: tl.constexpr, ROWS: tl.constexpr):
    """The smallest number of each row of (REP, ROWS, WIDE); NaN is passed over, or given, as Triton's version does."""
    x = tl.min(x if not INTERPRETED else tl.where(x == x, x, INFINITY), axis=2)
    return tl.reshape(x, (ROWS,)) if REP == 1 else tl.min(x, axis=0)


@device_function
def largest(x, REP: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """The largest of each row of (REP, ROWS, WIDE); infinite or NaN if anything in the row is not finite."""
    if PTX:
        x = tl.reduce(x, 2, ptx.louder)
        return tl.reshape(x, (ROWS,)) if REP == 1 else tl.reduce(x, 0, ptx.louder)
    else:
        x = tl.max(tl.where(finite(x), x, INFINITY), axis=2)
        return tl.reshape(x, (ROWS,)) if REP == 1 else tl.max(x, axis=0)


@device_function
def rounded_to(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """float32 through the dtype of the inputs and back, to nearest even."""
    if tl.bfloat16 == DTYPE:
        if PTX:
            return ptx.through_bfloat16(x)
        else:
            return (to_bfloat16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(tl.float32)


@device_function
def scales_of(
    x, real, REP: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr, PTX: tl.constexpr
):
    """What a row's codes are made with: scale word (int32), scale's inverse, zero-point (float32), and "finite".

    x: float32 (REP, ROWS, WIDE), rotated already for int4, and ``WHOLE`` unless some columns are not ``real`` (they
    hold 0). All results are (ROWS,); the word of a row that is not finite is NaN.
    """
    if MODE == "int4_per_token_head":
        low = least(x if WHOLE else tl.where(real, x, INFINITY), REP, ROWS)
        span = largest(x if WHOLE else tl.where(real, x, low[None, :, None]), REP, ROWS, PTX) - low
    else:
        span = largest(tl.abs(x), REP, ROWS, PTX)
    good = tl.abs(span) < INFINITY
    span = tl.where(good, span, 0.0)
    if MODE == "int4_per_token_head":
        scale = tl.maximum(tl.div_rn(span, 15.0), 1e-6)
        zero_point = tl.minimum(tl.maximum(round_half_away(tl.div_rn(-tl.where(good, low, 0.0), scale)), 0.0), 15.0)
        word = (scale.to(tl.int32, bitcast=True) & -16) | zero_point.to(tl.int32)
    else:
        scale = tl.maximum(tl.div_rn(span, 127.0 if MODE == "int8_per_token_head" else 448.0), 1e-6)
        zero_point = scale  # unused
        word = scale.to(tl.int32, bitcast=True)
    return tl.where(good, word, NAN_BITS), tl.div_rn(1.0, scale), zero_point, good


@device_function
def codes_of(
    x, inverse, zero_point, good,
    REP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, MODE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The code bytes of rows: (REP, ROWS, WIDE), or half as wide for int4; 0 in rows that are not finite."""
    if PTX:
        keep = tl.where(good, -1, 0).to(tl.int8)[None, :, None]
        if MODE == "int8_per_token_head":
            return ptx.int8_codes(x, inverse[None, :, None], keep)
        elif MODE == "fp8_per_token_head":
            return ptx.e4m3_codes(x, inverse[None, :, None], keep)
        else:
            even, odd = tl.split(tl.reshape(x, (REP, ROWS, WIDE // 2, 2)))
            return ptx.int4_pairs(even, odd, inverse[None, :, None], zero_point[None, :, None], keep)
    else:
        scaled = tl.where(good[None, :, None], x, 0.0) * inverse[None, :, None]
        if MODE == "int8_per_token_head":
            codes = tl.minimum(tl.maximum(round_half_away(scaled), -128.0), 127.0).to(tl.int32)
        elif MODE == "fp8_per_token_head":
            codes = to_e4m3_bits(scaled).to(tl.int32)
        else:
            codes = round_half_away(scaled + zero_point[None, :, None])
            codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)
        codes = tl.where(good[None, :, None], codes, 0)
        if MODE == "int4_per_token_head":
            low, high = tl.split(tl.reshape(codes, (REP, ROWS, WIDE // 2, 2)))
            codes = low | (high << 4)
        return codes.to(tl.uint8)


@device_function
def parts_of(words, MODE: tl.constexpr, PTX: tl.constexpr):
    """The values of the codes in int16 words, lowest first, before zero-point and scale; exact.

    bfloat16, or float16 for the codes of the other modes; float32 without ``PTX``.
    """
    if MODE == "bfloat16":
        if PTX:
            return (words.to(tl.bfloat16, bitcast=True),)
        else:
            return ((words.to(tl.int32) << 16).to(tl.float32, bitcast=True),)
    elif MODE == "int4_per_token_head":
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
    elif MODE == "int8_per_token_head":
        if PTX:
            return ptx.int8_halves(words)
        else:
            wide = words.to(tl.int32)
            return ((wide << 24) >> 24).to(tl.float32), ((wide << 16) >> 24).to(tl.float32)
    elif PTX:
        return ptx.e4m3_halves(words)
    else:
        wide = words.to(tl.int32)
        return from_e4m3_bits(wide & 255), from_e4m3_bits((wide >> 8) & 255)
