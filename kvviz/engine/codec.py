"""Device functions shared by the kernels: rounding, the three codes, and the rotation of int4.

Everything is written so that Triton's interpreter and a GPU give the same bits: fp8 by integer arithmetic
(the interpreter's own cast drops a mantissa carry), rounding on the bits, IEEE division. Launch with
``enable_fp_fusion=False``, or a product and a sum may fuse.
"""

import threading
from contextlib import contextmanager, nullcontext

from kvviz.engine.mode import prepare

MODE = prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

LARGEST_TENSOR = 1 << 20
"""Elements of the largest tensor that Triton allows inside a kernel, in the interpreter too."""

INTERPRETED = tl.constexpr(MODE == "interpreter")
NAN_BITS = tl.constexpr(0x7FC00000)
E4M3_NAN = tl.constexpr(0x7F)
INFINITY = tl.constexpr(float("inf"))


_INTERPRETER_LOCK = threading.Lock()


@contextmanager
def launching():
    """Around each launch: the interpreter keeps a program's place in globals, so only one kernel may run in it."""
    with _INTERPRETER_LOCK if MODE == "interpreter" else nullcontext():
        yield


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
def hadamard(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG2_RUN: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of each run of ``2**LOG2_RUN`` columns, in butterfly order."""
    for stage in tl.static_range(LOG2_RUN):
        pairs = tl.reshape(x, (ROWS, COLUMNS // (2 << stage), 2, 1 << stage))
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        x = tl.reshape(x, (ROWS, COLUMNS))
    return x


@device_function
def encode_cells(x, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MODE: tl.constexpr):
    """Codes (not packed) and scale words of ``ROWS`` cells.

    x: float32 (ROWS, COLUMNS), rotated already for int4, 0 outside ``inside``. Returns integers of the same
    shape, and int32 words (ROWS,). A cell that is not finite gets codes 0 and a NaN word.
    """
    bad = finite(x) == 0
    if MODE == "int4_per_token_head":
        low = tl.min(tl.where(bad, -INFINITY, tl.where(inside, x, INFINITY)), axis=1)
        span = tl.max(tl.where(bad, INFINITY, tl.where(inside, x, -INFINITY)), axis=1) - low
    else:
        span = tl.max(tl.where(bad, INFINITY, tl.abs(x)), axis=1)
    good = tl.abs(span) < INFINITY
    span = tl.where(good, span, 0.0)
    if MODE == "int4_per_token_head":
        scale = tl.maximum(tl.div_rn(span, 15.0), 1e-6)
        zero_point = tl.minimum(tl.maximum(round_half_away(tl.div_rn(-tl.where(good, low, 0.0), scale)), 0.0), 15.0)
        word = (scale.to(tl.int32, bitcast=True) & -16) | zero_point.to(tl.int32)
    else:
        scale = tl.maximum(tl.div_rn(span, 127.0 if MODE == "int8_per_token_head" else 448.0), 1e-6)
        word = scale.to(tl.int32, bitcast=True)
    scaled = tl.where(good[:, None], x, 0.0) * tl.div_rn(1.0, scale)[:, None]
    if MODE == "int8_per_token_head":
        codes = tl.minimum(tl.maximum(round_half_away(scaled), -128.0), 127.0).to(tl.int32)
    elif MODE == "fp8_per_token_head":
        codes = to_e4m3_bits(scaled).to(tl.int32)
    else:
        codes = tl.minimum(tl.maximum(round_half_away(scaled + zero_point[:, None]), 0.0), 15.0).to(tl.int32)
    return tl.where(good[:, None], codes, 0), tl.where(good, word, NAN_BITS)
