# pyright: basic, reportCallIssue=false
"""Operations on 16-bit floats, 64 at a time, and integers that order their codes by value."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Codes = NDArray[np.uint16]

BLOCK = 64
MAGNITUDE = 0x7FFF


def _sixty_four(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    made = context.make_array(kind)(context, builder, array)
    vector = ir.VectorType(ir.IntType(16), BLOCK)
    return builder.load(builder.bitcast(builder.gep(made.data, [at]), vector.as_pointer()), align=2)


def _everywhere(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, BLOCK)
    nothing = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK))


@intrinsic
def differing(typingctx: Any, old: Any, new: Any, at: Any) -> Any:
    """Bit i of the answer: old[at + i] != new[at + i], for i < 64. Nothing checks the bounds."""
    del typingctx, at

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        old, new, at = args
        a = _sixty_four(context, builder, signature.args[0], old, at)
        b = _sixty_four(context, builder, signature.args[1], new, at)
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), ir.IntType(64))

    return types.uint64(old, new, types.intp), generate


@intrinsic
def exponents(typingctx: Any, codes: Any, at: Any, shift: Any, found: Any) -> Any:
    """found[i] (bytes) = exponent of codes[at + i], for i < 64; `shift` is the length of the mantissa. Nothing checks the bounds."""
    del typingctx, at, shift

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, at, shift, found = args
        values = _sixty_four(context, builder, signature.args[0], codes, at)
        masked = builder.and_(values, _everywhere(builder, ir.Constant(ir.IntType(16), MAGNITUDE)))
        shifted = builder.lshr(masked, _everywhere(builder, builder.trunc(shift, ir.IntType(16))))
        small = ir.VectorType(ir.IntType(8), BLOCK)
        made = context.make_array(signature.args[3])(context, builder, found)
        builder.store(builder.trunc(shifted, small), builder.bitcast(made.data, small.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.int64, found), generate


@intrinsic
def within(typingctx: Any, found: Any, first: Any, more: Any) -> Any:
    """Bit i of the answer: first <= found[i] <= first + more, for 64 bytes. Nothing checks the bounds."""
    del typingctx, first, more

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found, first, more = args
        made = context.make_array(signature.args[0])(context, builder, found)
        small = ir.VectorType(ir.IntType(8), BLOCK)
        values = builder.load(builder.bitcast(made.data, small.as_pointer()), align=1)
        inside = builder.icmp_unsigned(
            "<=", builder.sub(values, _everywhere(builder, first)), _everywhere(builder, more)
        )
        return builder.bitcast(inside, ir.IntType(64))

    return types.uint64(found, types.uint8, types.uint8), generate


@njit(inline="always")
def ordered(code):
    """16-bit float code -> an integer that grows with the value; a bijection: +0.0 -> 0, -0.0 -> -1."""
    return np.int64(code) if code < 32768 else 32767 - np.int64(code)


@njit(inline="always")
def unordered(position):
    """The inverse of `ordered`, modulo 2^16: a damaged step still gives a code, which the chunk's hash then exposes."""
    low = position & 0xFFFF
    return np.uint16(low) if low < 32768 else np.uint16(32767 - (low - 65536))
