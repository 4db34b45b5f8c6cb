"""Conversions between numbers and codes, in few PTX instructions, for GPUs of sm_89 and later.

Triton itself needs more instructions for each of these conversions. For the interpreter and for older GPUs, ``codec``
has code that gives the same bits. Tests compare the bits. Most functions work on 2 or 4 neighbouring elements at once.

Two tricks occur in several functions. The first trick rounds halves away from zero. It adds 0.5 with the sign of the
number, in the rounding mode towards zero. Then it cuts off the fraction. The second trick converts a small integer to
float16. It writes the integer into the mantissa of 1024.0 (0x6400). Then it subtracts 1024.0.
"""

from kvviz.kernels.runtime import prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def maximum_or_nan(a, b):
    """Return the larger of two floats. If at least one of them is NaN, return NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def int8_codes(x, inverse, keep):
    """Convert float32 to int8 codes. Multiply by ``inverse``, round halves away from zero, and clamp to -128 and 127.

    ``keep`` is an int8 mask. If it is -1, the code stays. If it is 0, the code becomes 0.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 v<4>, h<4>; .reg .s32 i<4>; .reg .b32 t;
        mul.rn.f32 v0, $1, $5; copysign.f32 h0, v0, 0f3F000000; add.rz.f32 v0, v0, h0; cvt.rzi.s32.f32 i0, v0;
        mul.rn.f32 v1, $2, $6; copysign.f32 h1, v1, 0f3F000000; add.rz.f32 v1, v1, h1; cvt.rzi.s32.f32 i1, v1;
        mul.rn.f32 v2, $3, $7; copysign.f32 h2, v2, 0f3F000000; add.rz.f32 v2, v2, h2; cvt.rzi.s32.f32 i2, v2;
        mul.rn.f32 v3, $4, $8; copysign.f32 h3, v3, 0f3F000000; add.rz.f32 v3, v3, h3; cvt.rzi.s32.f32 i3, v3;
        cvt.pack.sat.s8.s32.b32 t, i3, i2, 0;
        cvt.pack.sat.s8.s32.b32 t, i1, i0, t;
        and.b32 $0, t, $9;
        }""",
        "=r,r,r,r,r,r,r,r,r,r",
        [x, inverse, keep],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_codes(x, inverse, keep):
    """Convert float32 to e4m3fn bits. Multiply by ``inverse``, round to nearest even, and clamp to +-448.

    NaN becomes 0x7F. ``keep`` is an int8 mask. If it is -1, the code stays. If it is 0, the code becomes 0.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 v<4>; .reg .b16 a, b; .reg .b32 t;
        mul.rn.f32 v0, $1, $5; mul.rn.f32 v1, $2, $6; mul.rn.f32 v2, $3, $7; mul.rn.f32 v3, $4, $8;
        cvt.rn.satfinite.e4m3x2.f32 a, v1, v0;
        cvt.rn.satfinite.e4m3x2.f32 b, v3, v2;
        mov.b32 t, {a, b};
        and.b32 $0, t, $9;
        }""",
        "=r,r,r,r,r,r,r,r,r,r",
        [x, inverse, keep],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def int4_pairs(even, odd, inverse, zero_point, keep):
    """Convert two float32 numbers to two int4 codes in one byte. The code of ``even`` is in the low half of the byte.

    To make a code, multiply the number by ``inverse``, add ``zero_point``, round halves up, and clamp to 0 and 15.
    ``keep`` is an int8 mask. If it is -1, both codes stay. If it is 0, both codes become 0.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 v<8>; .reg .s32 i<8>; .reg .b32 t;
        mul.rn.f32 v0, $1, $9;  add.rn.f32 v0, v0, $13; add.rz.f32 v0, v0, 0f3F000000; cvt.rzi.s32.f32 i0, v0;
        mul.rn.f32 v1, $2, $10; add.rn.f32 v1, v1, $14; add.rz.f32 v1, v1, 0f3F000000; cvt.rzi.s32.f32 i1, v1;
        mul.rn.f32 v2, $3, $11; add.rn.f32 v2, v2, $15; add.rz.f32 v2, v2, 0f3F000000; cvt.rzi.s32.f32 i2, v2;
        mul.rn.f32 v3, $4, $12; add.rn.f32 v3, v3, $16; add.rz.f32 v3, v3, 0f3F000000; cvt.rzi.s32.f32 i3, v3;
        mul.rn.f32 v4, $5, $9;  add.rn.f32 v4, v4, $13; add.rz.f32 v4, v4, 0f3F000000; cvt.rzi.s32.f32 i4, v4;
        mul.rn.f32 v5, $6, $10; add.rn.f32 v5, v5, $14; add.rz.f32 v5, v5, 0f3F000000; cvt.rzi.s32.f32 i5, v5;
        mul.rn.f32 v6, $7, $11; add.rn.f32 v6, v6, $15; add.rz.f32 v6, v6, 0f3F000000; cvt.rzi.s32.f32 i6, v6;
        mul.rn.f32 v7, $8, $12; add.rn.f32 v7, v7, $16; add.rz.f32 v7, v7, 0f3F000000; cvt.rzi.s32.f32 i7, v7;
        cvt.pack.sat.u4.s32.b32 t, i7, i3, 0;
        cvt.pack.sat.u4.s32.b32 t, i6, i2, t;
        cvt.pack.sat.u4.s32.b32 t, i5, i1, t;
        cvt.pack.sat.u4.s32.b32 t, i4, i0, t;
        and.b32 $0, t, $17;
        }""",
        "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [even, odd, inverse, zero_point, keep],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def through_bfloat16(x):
    """Round float32 to the precision of bfloat16 (to nearest even). The result is float32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }",
        "=r,=r,r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def e4m3_halves(word):
    """Decode the two e4m3fn codes in an int16. Return two float16 numbers, and the number of the low byte first.

    The numbers are exact. A NaN code gives NaN.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t; .reg .b16 a, b;
        prmt.b32 t, $2, 0, 0x3120;
        mov.b32 {a, b}, t;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        }""",
        "=r,=r,r",
        [word],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def int8_halves(word):
    """Decode the two int8 codes in an int16. Return two float16 numbers, and the number of the low byte first.

    The numbers are exact. Flipping the sign bit of a code makes the unsigned number code + 128. This number is written
    into the mantissa of 1024.0, which gives 1024 + 128 + code. Then 1024 + 128 (0x6480) is subtracted.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, m, z;
        mov.b32 m, 0x00ff00ff; mov.b32 z, 0x64806480;
        lop3.b32 t, $2, m, z, 0x6a; sub.rn.f16x2 $0, t, z;
        shr.u32 t, $2, 8; lop3.b32 t, t, m, z, 0x6a; sub.rn.f16x2 $1, t, z;
        }""",
        "=r,=r,r",
        [word],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def int4_quarters(word):
    """Decode the four int4 codes in an int16. Return four float16 numbers, and the number of the lowest bits first.

    The numbers are code - 8, and they are exact. Codes in bits 0 to 3 are written into the mantissa of 1024.0, and then
    1032 (0x6408) is subtracted. Codes in bits 4 to 7 give 1024 + 16 * code. This is multiplied by 1/16 (0x2c00), and 72
    (0xd480 is -72) is subtracted.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, l, h, z, a, f, s;
        mov.b32 l, 0x000f000f; mov.b32 h, 0x00f000f0; mov.b32 z, 0x64006400;
        mov.b32 a, 0x64086408; mov.b32 f, 0x2c002c00; mov.b32 s, 0xd480d480;
        lop3.b32 t, $4, l, z, 0xea; sub.rn.f16x2 $0, t, a;
        lop3.b32 t, $4, h, z, 0xea; fma.rn.f16x2 $1, t, f, s;
        shr.u32 u, $4, 8;
        lop3.b32 t, u, l, z, 0xea; sub.rn.f16x2 $2, t, a;
        lop3.b32 t, u, h, z, 0xea; fma.rn.f16x2 $3, t, f, s;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [word],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
