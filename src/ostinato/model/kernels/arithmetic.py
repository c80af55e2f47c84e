# pyright: basic, reportCallIssue=false
"""The scalar operations of the kernels: fused multiply-add, exp, and bf16 as the upper half of a float.

Every operation is IEEE 754 single precision and nothing is compiled with fast-math, so LLVM may vectorise but not reorder: the
result is the same at every vector width, in every loop shape, and in `numpy` written out by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

inlined = njit(forceinline=True, nogil=True, error_model="numpy")
"""For functions that kernels call: LLVM inlines them. Numba's `inline="always"` compiles up to twice as long for kernels no faster."""

LOG2E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)  # short enough that n * LN2_HIGH is exact for |n| < 2^15
LN2_LOW = np.float32(-2.12194440e-4)
ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves a rounded integer in the low mantissa bits
LOWEST = np.float32(-87.0)  # exp of anything below is 0 here
INVERSE_FACTORIALS = tuple(np.float32(c) for c in (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0))
_C7, _C6, _C5, _C4, _C3, _C2, _C1, _C0 = INVERSE_FACTORIALS


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """A * b + c with one rounding, on float32."""
    del typingctx, a, b, c

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """The float32 with these bits."""
    del typingctx, bits

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """The bits of a float32."""
    del typingctx, value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@inlined
def exp(x):
    """Exp of x <= 0 to about 1 ulp: Cody-Waite reduction and a Taylor polynomial of degree 7; 0 below -87, NaN for NaN."""
    shifted = fma(x, LOG2E, ROUND)
    n = shifted - ROUND
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    p = fma(r, _C7, _C6)
    p = fma(p, r, _C5)
    p = fma(p, r, _C4)
    p = fma(p, r, _C3)
    p = fma(p, r, _C2)
    p = fma(p, r, _C1)
    p = fma(p, r, _C0)
    scaled = float_of(np.uint32(bits_of(p) + np.uint32(np.uint32(bits_of(shifted)) << np.uint32(23))))
    return scaled if x > LOWEST else (x if x != x else np.float32(0.0))


@intrinsic
def load(typingctx: Any, x: Any) -> Any:
    """A stored number as float32: float32 itself, or bf16 held as uint16."""
    del typingctx

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context
        if signature.args[0] == types.float32:
            return args[0]
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(x), generate


@intrinsic
def store(typingctx: Any, like: Any, x: Any) -> Any:
    """A float32 in the number format of `like`: float32, or bf16 in uint16, rounded to nearest, ties to even; a NaN stays a NaN."""
    del typingctx, x

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context
        x = args[1]
        if signature.args[0] == types.float32:
            return x
        word, half = ir.IntType(32), ir.IntType(16)
        bits = builder.bitcast(x, word)
        sixteen = ir.Constant(word, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(word, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), odd), sixteen)
        is_nan = builder.fcmp_unordered("uno", x, x)
        return builder.select(is_nan, ir.Constant(half, 0x7FC0), builder.trunc(rounded, half))

    return like(like, types.float32), generate
