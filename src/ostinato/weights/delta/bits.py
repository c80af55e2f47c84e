# pyright: basic, reportCallIssue=false
"""Bit streams of numbers, least significant bit first, in 64-bit words: plain, Rice and Elias gamma codes. Compiled.

The functions here check no bounds. A writer must zero its words first and stop at its limit. A reader must compare its position with the
end regularly, and append zero words that cover what it reads between two comparisons, so that it notices a damaged stream and reads no
memory beyond.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

ESCAPE = 24  # a quotient this large is escaped: 24 ones, then the number in 32 plain bits
LONGEST = ESCAPE + 32  # bits of the longest number


@intrinsic
def ones(typingctx: Any, word: Any) -> Any:
    """Return the number of set bits of a uint64 (popcount)."""
    del typingctx, word

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic
def lowest(typingctx: Any, word: Any) -> Any:
    """Return the index of a uint64's lowest set bit, 64 if there is none."""
    del typingctx, word

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


_PLACES = np.array([[*[i for i in range(8) if byte >> i & 1], *[0] * 8][:8] for byte in range(256)], np.uint8)
_EACH = np.uint64(0x0101010101010101)


@njit(inline="always")
def nth(word, n):
    """Return the index of the set bit of a uint64 that has `n` set bits below it (select). It must exist. No branches.

    Vigna 2008, "Broadword implementation of rank/select queries", algorithm 2; the last byte by table.
    """
    sums = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    sums = (sums & np.uint64(0x3333333333333333)) + ((sums >> np.uint64(2)) & np.uint64(0x3333333333333333))
    sums = ((sums + (sums >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)) * _EACH  # byte i: set bits in bytes 0 to i
    high = np.uint64(0x8080808080808080)
    place = np.uint64(8 * ones(((np.uint64(n) * _EACH | high) - sums) & high))  # bytes that have too few
    rest = np.uint64(n) - (((sums << np.uint64(8)) >> place) & np.uint64(0xFF))
    return np.int64(place) + np.int64(_PLACES[(word >> place) & np.uint64(0xFF), rest])


@njit(inline="always")
def put(words, at, value, count):
    """Append the low `count` (0 to 64) bits of value; the bits above must be 0. Returns the next bit position."""
    word, shift, bits = at >> 6, np.uint64(at & 63), np.uint64(value)
    words[word] |= bits << shift
    if (at & 63) + count > 64:
        words[word + 1] |= bits >> (np.uint64(64) - shift)
    return at + count


@njit(inline="always")
def put_rice(words, at, value, k):
    """Append a Rice code of 0 <= `value` < 2^32: the quotient by 2^k in unary (ones and a zero), then the remainder in k bits."""
    quotient = value >> k
    if quotient >= ESCAPE:
        at = put(words, at, (1 << ESCAPE) - 1, ESCAPE)
        return put(words, at, value, 32)
    at = put(words, at, (1 << quotient) - 1, quotient + 1)
    return put(words, at, value & ((1 << k) - 1), k)


@njit(inline="always")
def put_signed_gap(words, at, value, k, negative):
    """Append a Rice code and one more bit, which is 1 for `negative`, in a single write if possible."""
    quotient = value >> k
    if quotient >= ESCAPE:
        return put(words, put_rice(words, at, value, k), negative, 1)
    bits = ((1 << quotient) - 1) | ((value & ((1 << k) - 1)) | (negative << k)) << (quotient + 1)
    return put(words, at, bits, quotient + k + 2)


@njit(inline="always")
def peek(words, at) -> Any:
    """Return the next 64 bits."""
    word, shift = at >> 6, np.uint64(at & 63)
    return (words[word] >> shift) | ((words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift))


@njit(inline="always")
def take(words, at, count) -> Any:
    """Read a number of `count` <= 32 bits. Returns (number, next bit position)."""
    return np.int64(peek(words, at) & ((np.uint64(1) << np.uint64(count)) - np.uint64(1))), at + count


@njit(inline="always")
def take_rice(words, at, k) -> Any:
    """Read a Rice code with k <= 32. Returns (number, next bit position)."""
    word = peek(words, at)
    quotient = lowest(~word)
    if quotient >= ESCAPE:
        return take(words, at + ESCAPE, 32)
    rest = np.int64((word >> np.uint64(quotient + 1)) & ((np.uint64(1) << np.uint64(k)) - np.uint64(1)))
    return (quotient << k) | rest, at + quotient + 1 + k


@njit(inline="always")
def put_gamma(words, at, value):
    """Append the Elias gamma code of `value` + 1, for 0 <= `value` < 2^31."""
    size = 0
    while (value + 1) >> (size + 1):
        size += 1
    at = put(words, at, np.int64(1) << size, size + 1)
    return put(words, at, (value + 1) & ((np.int64(1) << size) - 1), size)


@njit(inline="always")
def take_gamma(words, at) -> Any:
    """Read an Elias gamma code. Returns (number, next bit position); the number is -1 for a code that no writer makes."""
    size = lowest(peek(words, at))
    if size > 31:
        return np.int64(-1), at
    rest, at = take(words, at + size + 1, size)
    return ((np.int64(1) << size) | rest) - 1, at


# ---------------------------------------------------------------- blocks of 16-bit codes


Codes = NDArray[np.uint16]

BLOCK = 64
MAGNITUDE = 0x7FFF


def _load_block(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    made = context.make_array(kind)(context, builder, array)
    vector = ir.VectorType(ir.IntType(16), BLOCK)
    return builder.load(builder.bitcast(builder.gep(made.data, [at]), vector.as_pointer()), align=2)


def _broadcast(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, BLOCK)
    nothing = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK))


@intrinsic
def differing(typingctx: Any, old: Any, new: Any, at: Any) -> Any:
    """Return a mask whose bit i is old[at + i] != new[at + i], for i < 64. Does not check bounds."""
    del typingctx, at

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        old, new, at = args
        a = _load_block(context, builder, signature.args[0], old, at)
        b = _load_block(context, builder, signature.args[1], new, at)
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), ir.IntType(64))

    return types.uint64(old, new, types.intp), generate


@intrinsic
def exponents(typingctx: Any, codes: Any, at: Any, shift: Any, found: Any) -> Any:
    """Set found[i] (bytes) to the exponent of codes[at + i], for i < 64. `shift`: bits of the mantissa. Does not check bounds."""
    del typingctx, at, shift

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, at, shift, found = args
        values = _load_block(context, builder, signature.args[0], codes, at)
        masked = builder.and_(values, _broadcast(builder, ir.Constant(ir.IntType(16), MAGNITUDE)))
        shifted = builder.lshr(masked, _broadcast(builder, builder.trunc(shift, ir.IntType(16))))
        small = ir.VectorType(ir.IntType(8), BLOCK)
        made = context.make_array(signature.args[3])(context, builder, found)
        builder.store(builder.trunc(shifted, small), builder.bitcast(made.data, small.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.int64, found), generate


@intrinsic
def within(typingctx: Any, found: Any, first: Any, more: Any) -> Any:
    """Return a mask whose bit i is first <= found[i] <= first + more, for 64 bytes. Does not check bounds."""
    del typingctx, first, more

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found, first, more = args
        made = context.make_array(signature.args[0])(context, builder, found)
        small = ir.VectorType(ir.IntType(8), BLOCK)
        values = builder.load(builder.bitcast(made.data, small.as_pointer()), align=1)
        inside = builder.icmp_unsigned("<=", builder.sub(values, _broadcast(builder, first)), _broadcast(builder, more))
        return builder.bitcast(inside, ir.IntType(64))

    return types.uint64(found, types.uint8, types.uint8), generate


@njit(inline="always")
def ordered(code):
    """Map a 16-bit float code to an integer that grows with the value. A bijection: +0.0 -> 0, -0.0 -> -1."""
    return np.int64(code) if code < 32768 else 32767 - np.int64(code)


@njit(inline="always")
def unordered(position):
    """Invert `ordered`, modulo 2^16. A damaged step still gives a code; the chunk's hash then shows the damage."""
    low = position & 0xFFFF
    return np.uint16(low) if low < 32768 else np.uint16(32767 - (low - 65536))
