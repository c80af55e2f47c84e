# pyright: basic, reportCallIssue=false
"""Scalar operations of the kernels: fused multiply-add, exp, log, sine, cosine, and conversion of bf16.

Every operation is IEEE 754, in single precision except log, sine and cosine. Nothing is compiled with fast-math, so LLVM may vectorise but
not reorder: the result is the same at every vector width, in every loop shape, and in hand-written numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

inlined = njit(forceinline=True, nogil=True, error_model="numpy")
"""Decorates functions that LLVM inlines into kernels. Numba's `inline="always"` compiles up to twice as long, for kernels no faster."""

LOG2E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)  # short enough that n * LN2_HIGH is exact for |n| < 2^15
LN2_LOW = np.float32(-2.12194440e-4)
ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves a rounded integer in the low mantissa bits
LOWEST = np.float32(-87.0)  # exp of anything below is 0 here
INVERSE_FACTORIALS = tuple(np.float32(c) for c in (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0))
_C7, _C6, _C5, _C4, _C3, _C2, _C1, _C0 = INVERSE_FACTORIALS


def operation(generate: Callable[..., Any], result: Any, *given: Any) -> Any:
    """Return an intrinsic from arguments of the types `given` to a `result` of that type; `generate(builder, *values)` emits its code."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del signature
        value = generate(builder, *args)
        return context.get_dummy_value() if result is types.void else value

    def definition(typingctx: Any, *values: Any) -> Any:
        del typingctx, values
        return result(*given), code

    # numba reads the number of arguments from the signature
    names = ("typingctx", *"abcde"[: len(given)])
    signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    cast("Any", definition).__signature__ = signature
    return intrinsic(definition)


fma = operation(lambda builder, a, b, c: builder.fma(a, b, c), *[types.float32] * 4)
"""a * b + c with one rounding, on float32."""
float_of = operation(lambda builder, bits: builder.bitcast(bits, ir.FloatType()), types.float32, types.uint32)
"""The float32 with these bits."""
bits_of = operation(lambda builder, value: builder.bitcast(value, ir.IntType(32)), types.uint32, types.float32)
"""The bits of a float32."""


@inlined
def exp(x):
    """Return exp x for x <= 0 to about 1 ulp: Cody-Waite reduction and a Taylor polynomial of degree 7; 0 below -87, NaN for NaN."""
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
    """Convert a stored number to float32: float32 itself, or bf16 stored as uint16."""
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
    """Convert a float32 to the format of `like`: float32, or bf16 as uint16, rounded to nearest, ties to even; a NaN stays a NaN."""
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


# ---------------------------------------------------------------- double precision, after FreeBSD's msun (fdlibm)

_LN2_HIGH64, _LN2_LOW64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LG1, _LG2, _LG3, _LG4 = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
)
_LG5, _LG6, _LG7 = 1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01
_HALF_ROOT = 0.70710678118654752440
_P1, _P2, _P3 = 1.66666666666666019037e-01, -2.77777777770155933842e-03, 6.61375632143793436117e-05
_P4, _P5 = -1.65339022054652515390e-06, 4.13813679705723846039e-08
_TWO_OVER_PI = 6.36619772367581382433e-01
_PIO2_1, _PIO2_2, _PIO2_3 = 1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21
_S1, _S2, _S3 = -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04
_S4, _S5, _S6 = 2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10
_C1_64, _C2_64, _C3_64 = 4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05
_C4_64, _C5_64, _C6_64 = -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11


@njit(nogil=True, cache=True)
def log64(x):
    """Return the natural logarithm of a positive normal float64, to less than 1 ulp; -inf for 0; inf and NaN unchanged."""
    if not x < np.inf:
        return x
    if x <= 0.0:
        return -np.inf if x == 0.0 else np.nan
    m, k = math.frexp(x)
    if m < _HALF_ROOT:
        m, k = m * 2.0, k - 1
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (_LG2 + w * (_LG4 + w * _LG6))
    odd = z * (_LG1 + w * (_LG3 + w * (_LG5 + w * _LG7)))
    half = 0.5 * f * f
    return k * _LN2_HIGH64 - ((half - (s * (half + (even + odd)) + k * _LN2_LOW64)) - f)


@njit(nogil=True, cache=True)
def exp64(x):
    """Return exp(x) for a float64 between -700 and 700, to about 1 ulp."""
    n = np.rint(x * (1.0 / (_LN2_HIGH64 + _LN2_LOW64)))
    high, low = x - n * _LN2_HIGH64, n * _LN2_LOW64
    r = high - low
    z = r * r
    c = r - z * (_P1 + z * (_P2 + z * (_P3 + z * (_P4 + z * _P5))))
    return math.ldexp(1.0 - ((low - (r * c) / (2.0 - c)) - high), int(n))


@njit(nogil=True, cache=True)
def cos_and_sin(x):
    """Return the cosine and sine of a float64 of magnitude below 2^20, to less than 1 ulp; both NaN for infinities and NaN."""
    if not abs(x) < np.inf:
        return np.nan, np.nan
    n = np.rint(x * _TWO_OVER_PI)
    r = ((x - n * _PIO2_1) - n * _PIO2_2) - n * _PIO2_3  # the first two products are exact
    z = r * r
    sine = r + r * z * (_S1 + z * (_S2 + z * (_S3 + z * (_S4 + z * (_S5 + z * _S6)))))
    rest = z * (_C1_64 + z * (_C2_64 + z * (_C3_64 + z * (_C4_64 + z * (_C5_64 + z * _C6_64)))))
    half = 0.5 * z
    whole = 1.0 - half
    cosine = whole + (((1.0 - whole) - half) + z * rest)
    quarter = int(n) % 4
    if quarter == 0:
        return cosine, sine
    if quarter == 1:
        return -sine, cosine
    if quarter == 2:
        return -cosine, -sine
    return sine, -cosine
