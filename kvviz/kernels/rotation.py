"""The rotation of the mode int4_per_token_head, as functions for the kernels.

The rotation multiplies each column by a sign, and then applies a Walsh-Hadamard transform. The transform mixes
``length`` adjacent columns with each other. ``length`` is the largest power of two that divides head_size.

``kvviz.cache.codes`` has the same rotation in plain torch. Both versions add numbers in the same order. So they
give the same bits.
"""

from functools import lru_cache

from kvviz.cache.codes import rotation_signs
from kvviz.kernels.codec import INTERPRETED, device_function, tl


@lru_cache
def sign_bits(length: int) -> int:
    """Return the signs of the rotation as one integer. Bit ``i`` is 1 if the sign of column ``i`` is -1."""
    return sum(1 << column for column, sign in enumerate(rotation_signs(length).tolist()) if sign < 0)


@device_function
def rotation_sign(column, SIGNS: tl.constexpr, LENGTH: tl.constexpr):
    """Return the sign of each column, as +1.0 or -1.0. SIGNS is the result of ``sign_bits(LENGTH)``."""
    bit = column % LENGTH
    word = bit.to(tl.int64) * 0
    for part in tl.static_range((LENGTH + 31) // 32):  # SIGNS may have more bits than an int64
        word = tl.where(bit // 32 == part, (SIGNS >> (32 * part)) & 0xFFFFFFFF, word)
    return 1.0 - 2.0 * ((word >> (bit % 32).to(tl.int64)) & 1).to(tl.float32)


@device_function
def butterfly(x, AXIS: tl.constexpr, NDIM: tl.constexpr):
    """Replace each pair (a, b) along an axis of length 2 by (a + b, a - b). AXIS is this axis, and x has NDIM axes.

    To compute its sum or difference, a needs b, and b needs a. So the kernel computes a ^ b for each pair, because
    a ^ (a ^ b) is b, and b ^ (a ^ b) is a. This moves data between threads only if a and b lie in different threads.
    """
    second = tl.arange(0, 2)
    for axis in tl.static_range(NDIM):
        if axis != AXIS:
            second = tl.expand_dims(second, axis)
    bits = x.to(tl.int32, bitcast=True)
    partner = (tl.xor_sum(bits, axis=AXIS, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
    return tl.fma(x, 1.0 - 2.0 * second.to(tl.float32), partner)


@device_function
def hadamard(x, REP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, LOG2_LENGTH: tl.constexpr):
    """Apply the Walsh-Hadamard transform to each group of ``2**LOG2_LENGTH`` adjacent columns. Nothing is normalised.

    The first stage combines pairs of columns at distance 1. The next stages have the distances 2, 4, and so on.

    x is a float32 tensor of shape (REP, ROWS, WIDE). Column ``r * WIDE + w`` of a row lies at ``[r, row, w]``.
    """
    if INTERPRETED:  # do not use butterfly, because xor_sum is a slow Python loop in the interpreter
        x = tl.reshape(x if REP == 1 else tl.permute(x, (1, 0, 2)), (ROWS, REP * WIDE))
        for stage in tl.static_range(LOG2_LENGTH):
            pairs = tl.reshape(x, (ROWS, REP * WIDE // (2 << stage), 2, 1 << stage))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            x = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
            x = tl.reshape(x, (ROWS, REP * WIDE))
        x = tl.reshape(x, (ROWS, REP, WIDE)) if REP != 1 else tl.reshape(x, (1, ROWS, WIDE))
        x = x if REP == 1 else tl.permute(x, (1, 0, 2))
    else:
        for stage in tl.static_range(LOG2_LENGTH):
            if 1 << stage < WIDE:  # both columns of a pair lie in the last axis
                x = butterfly(tl.reshape(x, (REP, ROWS, WIDE // (2 << stage), 2, 1 << stage)), 3, 5)
            else:  # the columns of a pair differ in the first axis
                x = tl.reshape(x, (REP * WIDE // (2 << stage), 2, (1 << stage) // WIDE, ROWS, WIDE))
                x = butterfly(x, 1, 5)
            x = tl.reshape(x, (REP, ROWS, WIDE))
    return x
