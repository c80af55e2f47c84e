# pyright: basic, reportCallIssue=false
"""16-bit floats, 64 at a time, and the line of all their codes in the order of their values."""

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
    vector = ir.VectorType(ir.IntType(16), BLOCK)
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
def within(typingctx: Any, codes: Any, at: Any, low: Any, span: Any) -> Any:
    """Bit i of the answer: low <= magnitude of codes[at + i] < low + span, for i < 64. Nothing checks the bounds."""
    del typingctx, at, low, span

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, at, low, span = args
        values = _sixty_four(context, builder, signature.args[0], codes, at)
        masked = builder.and_(values, _everywhere(builder, ir.Constant(ir.IntType(16), MAGNITUDE)))
        found = builder.icmp_unsigned("<", builder.sub(masked, _everywhere(builder, low)), _everywhere(builder, span))
        return builder.bitcast(found, ir.IntType(64))

    return types.uint64(codes, types.intp, types.uint16, types.uint16), generate


@njit(inline="always")
def ordered(code):
    """16-bit float code -> an integer that grows with the value; a bijection: +0.0 -> 0, -0.0 -> -1."""
    return np.int64(code) if code < 32768 else 32767 - np.int64(code)


@njit(inline="always")
def unordered(position):
    """The inverse, modulo 2^16: a damaged step gives some code, and the chunk's hash then refuses it."""
    low = position & 0xFFFF
    return np.uint16(low) if low < 32768 else np.uint16(32767 - (low - 65536))
