# pyright: basic, reportCallIssue=false
"""A SIMD vector of sixteen floats, as a type that numba functions can hold in variables.

With LLVM's own vectoriser, sums in several lanes go through memory: attention took 1.6 times as long, and log-softmax 4 times. A vector
here is 16 floats on every machine, and LLVM splits it to the CPU's width. Each lane is the same chain of IEEE operations as in a scalar
loop, so the bits are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.core.datamodel.registry import register_default
from numba.extending import intrinsic

from ostinato.model.kernels.arithmetic import (
    INVERSE_FACTORIALS,
    LN2_HIGH,
    LN2_LOW,
    LOG2E,
    LOWEST,
    ROUND,
    inlined,
    operation,
)

WIDE = 16
PANEL = 2 * WIDE
"""Outputs per panel: their weights are stored together (`kernels.product`)."""
_LONG, _INT, _HALF, _BYTE, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.FloatType()
_FLOATS, _WORDS, _HALVES = (ir.VectorType(kind, WIDE) for kind in (_FLOAT, _INT, _HALF))
_C7, _C6, _C5, _C4, _C3, _C2, _C1, _C0 = INVERSE_FACTORIALS


class Sixteen(types.Type):
    """Numba's type of the vector."""

    def __init__(self) -> None:
        super().__init__(name="Sixteen")


v16 = Sixteen()


@register_default(Sixteen)
class _Model(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _words(*each: int) -> ir.Constant:
    return ir.Constant(_WORDS, list(each if len(each) > 1 else each * WIDE))


def address_at(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """Return a pointer to a value of this type, `offset` bytes after an address."""
    return builder.inttoptr(builder.add(address, ir.Constant(_LONG, offset)), kind.as_pointer())


def prefetch(builder: Any, place: Any, offset: int) -> None:
    """Prefetch the cache line `offset` bytes after an address."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(_INT, flag) for flag in (0, 3, 1)]  # to read, keep near, data
    builder.call(hint, [address_at(builder, place, offset, _BYTE), *flags])


def in_all_lanes(builder: Any, number: Any) -> Any:
    """Broadcast a 32-bit number to all lanes."""
    nothing = ir.Constant(ir.VectorType(number.type, WIDE), ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, nothing, _words(0))


def outlined(name: str, build: Callable[[Any], None]) -> Any:
    """Return a function of five addresses or counts, which `build` emits once per LLVM module. It is never inlined, because copies would
    take long to compile.
    """

    def generate(builder: Any, *args: Any) -> None:
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_LONG] * 5), name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            build(ir.IRBuilder(function.append_basic_block()))
        builder.call(function, args)

    return operation(generate, types.void, *[types.intp] * 5)


def loop(
    builder: Any, count: Any, step: int, firsts: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit a loop over 0, step, ... below `count` (above 0) with values in registers: `firsts` before it, `body(index, values)` after each
    pass. Returns the final values.
    """
    before, inside, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(inside)
    builder.position_at_end(inside)
    index, values = builder.phi(_LONG), [builder.phi(first.type) for first in firsts]
    grown = body(index, values)
    following = builder.add(index, ir.Constant(_LONG, step))
    starts = [ir.Constant(_LONG, 0), *firsts]
    for phi, first, value in zip([index, *values], starts, [following, *grown], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, inside)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return grown


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a fused multiply-add: a * b + c in all lanes, rounded once."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDE}f32"), [a, b, c])


def _times_power(builder: Any, p: Any, shifted: Any) -> Any:
    """Emit p * 2^n, where n is in the low mantissa bits of `shifted`."""
    exponent = builder.shl(builder.bitcast(shifted, _WORDS), _words(23))
    return builder.bitcast(builder.add(builder.bitcast(p, _WORDS), exponent), _FLOATS)


def _tail(builder: Any, y: Any, x: Any) -> Any:
    """Emit y where x > LOWEST, else 0; NaN for a NaN."""
    lowest = ir.Constant(_FLOATS, [float(LOWEST)] * WIDE)
    rest = builder.select(builder.fcmp_unordered("uno", x, x), x, ir.Constant(_FLOATS, [0.0] * WIDE))
    return builder.select(builder.fcmp_ordered(">", x, lowest), y, rest)


def _folded(builder: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Emit a horizontal reduction: join lanes that are 8, 4, 2 and 1 apart, and return lane 0."""
    for apart in (8, 4, 2, 1):
        other = builder.shuffle_vector(value, value, _words(*((lane + apart) % WIDE for lane in range(WIDE))))
        value = join(value, other)
    return builder.extract_element(value, ir.Constant(_INT, 0))


def _hadamard(builder: Any, value: Any) -> Any:
    for apart in (1, 2, 4, 8):
        other = builder.shuffle_vector(value, value, _words(*(lane ^ apart for lane in range(WIDE))))
        signs = ir.Constant(_FLOATS, [-1.0 if lane & apart else 1.0 for lane in range(WIDE)])
        value = fused(builder, value, signs, other)
    return value


_ONE, _TWO, _THREE = ([v16] * (1 + count) for count in (1, 2, 3))  # types of the result and of 1, 2, 3 vector arguments
fma16 = operation(fused, *_THREE)
add16 = operation(lambda builder, a, b: builder.fadd(a, b), *_TWO)
sub16 = operation(lambda builder, a, b: builder.fsub(a, b), *_TWO)
mul16 = operation(lambda builder, a, b: builder.fmul(a, b), *_TWO)
div16 = operation(lambda builder, a, b: builder.fdiv(a, b), *_TWO)
max16 = operation(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a), *_TWO)
"""b where b > a, else a: a NaN in b is ignored."""
pick16 = operation(
    lambda builder, x, a, b: builder.select(builder.fcmp_ordered("<", x, ir.Constant(_FLOATS, [0.0] * WIDE)), a, b),
    *_THREE,
)
"""a where x < 0, else b."""
_power16 = operation(_times_power, *_TWO)
_tail16 = operation(_tail, *_TWO)
all16 = operation(in_all_lanes, v16, types.float32)
"""Broadcasts a float32 to all lanes."""
away16 = operation(
    lambda builder, value: builder.bitcast(builder.or_(builder.bitcast(value, _WORDS), _words(1 << 31)), _FLOATS), *_ONE
)
"""-|value|: sets every sign bit."""
hadamard16 = operation(_hadamard, *_ONE)
"""Multiplies the lanes by the 16 x 16 Hadamard matrix of +1 and -1 (Sylvester's order), joining lanes 1, 2, 4 and 8 apart."""
sum16 = operation(lambda builder, value: _folded(builder, value, builder.fadd), types.float32, v16)
"""The sum of the lanes, folded 8, 4, 2, 1."""
top16 = operation(
    lambda builder, value: _folded(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a)),
    types.float32,
    v16,
)
"""The largest lane."""


def _place(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any) -> Any:
    """Emit the address of array[row, column]; rows are contiguous."""
    made = context.make_array(kind)(context, builder, array)
    skip = builder.mul(row, builder.extract_value(made.strides, 0))
    return builder.gep(cgutils.pointer_add(builder, made.data, skip), [column])


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """Convert an address to a pointer to numbers of the dtype of the array `like`."""
    del typingctx, address

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.intp, like), generate


@intrinsic
def load16(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Load array[row, column : column + 16], float32 or bf16 stored as uint16, as floats. Bounds are not checked."""
    del typingctx, row, column

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], *args)
        if signature.args[0].dtype == types.float32:
            return builder.load(builder.bitcast(place, _FLOATS.as_pointer()), align=4)
        halves = builder.load(builder.bitcast(place, _HALVES.as_pointer()), align=2)
        return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), _words(16)), _FLOATS)

    return v16(array, types.intp, types.intp), generate


@intrinsic
def store16(typingctx: Any, array: Any, row: Any, column: Any, value: Any) -> Any:
    """Store array[row, column : column + 16] = value; bf16 is rounded to nearest, ties to even, and a NaN stays a NaN."""
    del typingctx, row, column, value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, value = _place(context, builder, signature.args[0], *args[:3]), args[3]
        if signature.args[0].dtype == types.float32:
            builder.store(value, builder.bitcast(place, _FLOATS.as_pointer()), align=4)
        else:
            builder.store(_rounded(builder, value), builder.bitcast(place, _HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, v16), generate


@intrinsic
def store_bytes16(typingctx: Any, array: Any, row: Any, column: Any, value: Any) -> Any:
    """Store the low byte of each lane's bits, plus 128, in array[row, column : column + 16], which is uint8."""
    del typingctx, row, column, value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(8), WIDE)
        place = _place(context, builder, signature.args[0], *args[:3])
        low = builder.trunc(builder.bitcast(args[3], _WORDS), kind)
        raised = builder.xor(low, ir.Constant(kind, [128] * WIDE))  # adds 128 to a byte
        builder.store(raised, builder.bitcast(place, kind.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, v16), generate


def _rounded(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _WORDS)
    odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
    up = builder.lshr(builder.add(builder.add(bits, _words(0x7FFF)), odd), _words(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, ir.Constant(_HALVES, [0x7FC0] * WIDE), builder.trunc(up, _HALVES))


@intrinsic
def round16(typingctx: Any, array: Any, value: Any) -> Any:
    """Round the value as `array` would store it: unchanged for float32, rounded for bf16."""
    del typingctx, value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context
        if signature.args[0].dtype == types.float32:
            return args[1]
        halves = _rounded(builder, args[1])
        return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), _words(16)), _FLOATS)

    return v16(array, v16), generate


@intrinsic
def fetch(typingctx: Any, array: Any, first: Any) -> Any:
    """Prefetch elements [first, first + 32) of a contiguous array: a hint that never faults."""
    del typingctx, first

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, args[0])
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(made.data, [args[1]]), byte)
        for offset in range(0, 2 * WIDE * signature.args[0].dtype.bitwidth // 8, 64):
            line = cgutils.pointer_add(builder, place, offset)
            builder.call(ask, [line, *(ir.Constant(_INT, flag) for flag in (0, 3, 1))])  # to read, keep near, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@inlined
def exp16(x):
    """Compute `arithmetic.exp` in every lane."""
    shifted = fma16(x, all16(LOG2E), all16(ROUND))
    n = sub16(shifted, all16(ROUND))
    r = fma16(n, all16(np.float32(-LN2_LOW)), fma16(n, all16(np.float32(-LN2_HIGH)), x))
    p = fma16(r, all16(_C7), all16(_C6))
    p = fma16(p, r, all16(_C5))
    p = fma16(p, r, all16(_C4))
    p = fma16(p, r, all16(_C3))
    p = fma16(p, r, all16(_C2))
    p = fma16(p, r, all16(_C1))
    p = fma16(p, r, all16(_C0))
    return _tail16(_power16(p, shifted), x)
