# pyright: basic, reportCallIssue=false
"""8-bit integer products with exact sums in 32 bits: by the CPU's byte dot products (VNNI, AMX), or by products of 16-bit pairs.

The result of exact sums does not depend on their order, so all CPUs, instructions, batch sizes and thread counts give the same bits. An
activation's level, from -127 to 127, is stored as the byte level + `OFFSET`, because the instruction `vpdpbusd` takes its left bytes as
unsigned. A weight's level is a signed byte. The offset's contribution to a sum, `OFFSET` times the sum of the output's weights, is
subtracted at the end. Sums may wrap around in between; the end result is exact all the same.

Weights are stored in panels of `PANEL` outputs as in `kernels.product`, with four inputs per word. The first two words of an output are
its offset, which is added to its sums, and its scale, a float.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.np.numpy_support import carray

from ostinato.model.kernels.arithmetic import operation
from ostinato.model.kernels.processor import IS_ARM, cpu_features
from ostinato.model.kernels.tiles import tile_sums
from ostinato.model.kernels.vector import PANEL, WIDE, address_at, in_all_lanes, loop, outlined, pointer, prefetch

INT8, INT8_TILES = 3, 4
"""How integer products are computed, beside the ways in `product`: by vectors or by tiles. Both give the same bits."""
OFFSET = 128
INT8_BLOCK = 64
"""Rows and weights are padded to a multiple of this number of inputs, a row of a tile."""
HEADER = 2
"""Words of an output before its weights: its offset and its scale."""
MOST_INPUTS = (1 << 31) // (127 * OFFSET)
"""With more inputs, a sum could overflow 32 bits."""

_LONG, _WORD, _HALF, _BYTE, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, WIDE), ir.VectorType(_FLOAT, WIDE)
_VECTOR, _ROW = 4 * WIDE, 4 * PANEL  # bytes
_UNROLLED = 4  # words
_AHEAD = 4096  # prefetch distance for weights, in bytes


# ---------------------------------------------------------------- dot products of four bytes


def possible_instructions() -> tuple[str, ...]:
    """Return the instructions for dot products that this process may use, the fastest first: "vnni512", "vnni256", ..., "plain"."""
    has = cpu_features()
    supported = {
        "vnni512": "avx512vnni" in has,
        "vnni256": "avxvnni" in has or {"avx512vnni", "avx512vl"} <= has,
        "pairs512": "avx512bw" in has,
        "pairs256": "avx2" in has,
        "pairs128": not IS_ARM,
        "plain": True,
    }
    return tuple(name for name, possible in supported.items() if possible)


def _constant(kind: Any, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _parts(builder: Any, value: Any, bits: int) -> list[Any]:
    """Split a vector into vectors of `bits` bits."""
    count = bits // value.type.element.width
    nothing = ir.Constant(value.type, ir.Undefined)
    return [
        builder.shuffle_vector(value, nothing, ir.Constant(ir.VectorType(_WORD, count), list(range(at, at + count))))
        for at in range(0, value.type.count, count)
    ]


def _joined(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        mask = ir.Constant(ir.VectorType(_WORD, count), list(range(count)))
        parts = [builder.shuffle_vector(a, b, mask) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _by_instruction(builder: Any, name: str, bits: int, *operands: Any) -> Any:
    """Apply an instruction on vectors of `bits` bits to each part of the operands; return 32-bit words."""
    result = ir.VectorType(_WORD, bits // 32)
    kinds = [ir.VectorType(each.type.element, bits // each.type.element.width) for each in operands]
    call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    cut = [_parts(builder, operand, bits) for operand in operands]
    return _joined(builder, [builder.call(call, part) for part in zip(*cut, strict=True)])


_DOT_PRODUCTS = {512: "llvm.x86.avx512.vpdpbusd.512", 256: "llvm.x86.avx512.vpdpbusd.256"}
_PAIR_SUMS = {512: "llvm.x86.avx512.pmaddw.d.512", 256: "llvm.x86.avx2.pmadd.wd", 128: "llvm.x86.sse2.pmadd.wd"}


class _DotProducts:
    """Emits dot products with given instructions: adds the products of 4 unsigned and 4 signed bytes to each of sixteen sums.

    Bytes are unpacked to the instructions' operands once, for all products with them. For pairs, `prepare_levels` has already unpacked the
    levels: each word became two words of two 16-bit numbers, its even and its odd bytes.
    """

    def __init__(self, instructions: str) -> None:
        self.name = instructions
        self._kind, self._bits = (
            instructions.rstrip("0123456789"),
            int(instructions.lstrip("abcdefghijklmnopqrstuvwxyz") or 0),
        )

    @property
    def rows(self) -> int:
        """The most rows whose sums fit into the registers."""
        return {"vnni512": 12, "pairs512": 12, "vnni256": 6, "pairs256": 4, "plain": 4}.get(self.name, 2)

    @property
    def vectors(self) -> int:
        """The number of vectors of sixteen sums that are computed at once."""
        return 2 if self._bits == 512 else 1

    @property
    def words(self) -> int:
        """The number of words that hold four levels of a row."""
        return 2 if self._kind == "pairs" else 1

    def weights(self, builder: Any, words: Any) -> list[Any]:
        """Unpack the bytes of sixteen words of weights, sign-extended."""
        if self._kind == "vnni":
            return [words]
        if self._kind == "pairs":
            halves = builder.bitcast(words, ir.VectorType(_HALF, 2 * WIDE))
            eight = _constant(halves.type, 8)
            return [builder.ashr(builder.shl(halves, eight), eight), builder.ashr(halves, eight)]
        return self._each_byte(builder, words, builder.ashr)

    def levels(self, builder: Any, place: Any) -> list[Any]:
        """Load four levels of a row at an address, zero-extended, and broadcast each to all lanes."""
        loaded = [builder.load(address_at(builder, place, 4 * i, _WORD), align=4) for i in range(self.words)]
        words = [in_all_lanes(builder, each) for each in loaded]
        if self._kind == "pairs":
            return [builder.bitcast(each, ir.VectorType(_HALF, 2 * WIDE)) for each in words]
        return words if self._kind == "vnni" else self._each_byte(builder, words[0], builder.lshr)

    @staticmethod
    def _each_byte(builder: Any, words: Any, extend: Any) -> list[Any]:
        up = [builder.shl(words, _constant(_WORDS, 24 - 8 * byte)) for byte in range(4)]
        return [extend(each, _constant(_WORDS, 24)) for each in up]

    def add(self, builder: Any, sums: Any, levels: list[Any], weights: list[Any]) -> Any:
        """Return the sums after adding the products of unpacked bytes."""
        if self._kind == "vnni":
            return _by_instruction(builder, _DOT_PRODUCTS[self._bits], self._bits, sums, levels[0], weights[0])
        for level, weight in zip(levels, weights, strict=True):
            if self._kind == "pairs":
                more = _by_instruction(builder, _PAIR_SUMS[self._bits], self._bits, level, weight)
            else:
                more = builder.mul(level, weight)
            sums = builder.add(sums, more)
        return sums


# ---------------------------------------------------------------- sums in registers


def _body(builder: Any, rows: int, vectors: int, dots: _DotProducts) -> None:
    """Emit the body of `integer_sums`."""
    x, step, weight, words, out = builder.function.args
    places = [builder.add(x, builder.mul(step, ir.Constant(_LONG, row))) for row in range(rows)]

    def products(index: Any, sums: list[Any]) -> list[Any]:
        grown = list(sums)
        at = builder.mul(index, ir.Constant(_LONG, 4 * dots.words))
        here = builder.add(weight, builder.mul(index, ir.Constant(_LONG, _ROW)))
        for i in range(_UNROLLED):
            weights: list[list[Any]] = []
            for vector in range(vectors):
                prefetch(builder, here, _AHEAD + i * _ROW + vector * _VECTOR)
                place = address_at(builder, here, i * _ROW + vector * _VECTOR, _WORDS)
                weights.append(dots.weights(builder, builder.load(place, align=4)))
            for row, start in enumerate(places):
                moved = ir.Constant(_LONG, 4 * dots.words * i)
                levels = dots.levels(builder, builder.add(builder.add(start, at), moved))
                for vector in range(vectors):
                    number = row * vectors + vector
                    grown[number] = dots.add(builder, grown[number], levels, weights[vector])
        return grown

    grown = loop(builder, words, _UNROLLED, [_constant(_WORDS, 0)] * (rows * vectors), products)
    for number, value in enumerate(grown):
        offset = number // vectors * _ROW + number % vectors * _VECTOR
        builder.store(value, address_at(builder, out, offset, _WORDS), align=4)
    builder.ret_void()


def integer_sums(rows: int, vectors: int, instructions: str) -> Any:
    """Return ``sums(x, step, weight, words, out)``, which stores the sums of `rows` rows and `vectors` vectors of a panel's outputs.

    Row i of levels, as `prepare_levels` returns it, begins at address x + i * step, the panel's weights at `weight`, and row i of the
    32-bit sums at out + i * 4 * PANEL. `words`, a multiple of 4 above 0, counts words of four inputs.
    """
    name = f"ostinato_integer_sums_{rows}_{vectors}_{instructions}"
    return outlined(name, lambda builder: _body(builder, rows, vectors, _DotProducts(instructions)))


INSTRUCTIONS = possible_instructions()[0]
"""The instructions for dot products of bytes in this process."""
_MOST, _VECTORS = _DotProducts(INSTRUCTIONS).rows, _DotProducts(INSTRUCTIONS).vectors
_PART = _VECTORS * _VECTOR
_WORDS_OF_FOUR = _DotProducts(INSTRUCTIONS).words
_EIGHT, _FOUR = min(8, _MOST), min(4, _MOST)
_sums_most, _sums_8, _sums_4, _sums_2, _sums_1 = (
    integer_sums(rows, _VECTORS, INSTRUCTIONS) for rows in (_MOST, _EIGHT, _FOUR, 2, 1)
)


@njit(nogil=True, cache=True)
def _vector_sums(x, step, rows, weight, words, sums_MX):
    """Fill the first rows of sums_MX with the integer sums of `rows` rows and a panel."""
    for at in range(0, _ROW, _PART):
        m, out = 0, sums_MX.ctypes.data + at
        while m < rows:
            row, to, left = x + m * step, out + m * _ROW, rows - m
            if left >= _MOST:
                _sums_most(row, step, weight + at, words, to)
                m += _MOST
            elif left >= _EIGHT:
                _sums_8(row, step, weight + at, words, to)
                m += _EIGHT
            elif left >= _FOUR:
                _sums_4(row, step, weight + at, words, to)
                m += _FOUR
            elif left >= 2:
                _sums_2(row, step, weight + at, words, to)
                m += 2
            else:
                _sums_1(row, step, weight + at, words, to)
                m += 1


def _dequantised(builder: Any, place: Any, panel: Any, scale: Any) -> None:
    total = builder.add(
        builder.load(address_at(builder, place, 0, _WORDS), align=4),
        builder.load(address_at(builder, panel, 0, _WORDS), align=4),
    )
    weights = builder.load(address_at(builder, panel, _ROW, _FLOATS), align=4)
    factor = builder.fmul(in_all_lanes(builder, scale), weights)
    result = builder.fmul(builder.sitofp(total, _FLOATS), factor)
    builder.store(result, address_at(builder, place, 0, _FLOATS), align=4)


_dequantise = operation(_dequantised, types.void, types.intp, types.intp, types.float32)
"""Replaces sixteen 32-bit sums at an address by floats: (sum + output's offset) x (row's scale x output's scale)."""


@njit(nogil=True, cache=True)
def prepare_levels(levels_MK, first, rows, inputs, how, space):
    """Prepare rows [first, first + rows) of levels for `int8_panel_products`; return their address, and the bytes between rows.

    For products of 16-bit pairs, levels are first unpacked into `space` (float32, `inputs` numbers per row).
    """
    step = levels_MK.strides[0]
    start = levels_MK.ctypes.data + first * step
    if how == INT8_TILES or _WORDS_OF_FOUR == 1:
        return start, step
    pairs = space.reshape(-1).view(np.uint32)
    count = inputs // 4
    for m in range(rows):
        words = carray(pointer(start + m * step, pairs), count)
        for k in range(count):
            pairs[2 * (m * count + k)] = words[k] & np.uint32(0x00FF00FF)
            pairs[2 * (m * count + k) + 1] = (words[k] >> np.uint32(8)) & np.uint32(0x00FF00FF)
    return space.ctypes.data, 8 * count


@njit(nogil=True, cache=True)
def int8_panel_products(x, step, scales_M, first, rows, inputs, panel, how, sums_MX):
    """Fill the first rows of sums_MX [M, PANEL] (float32) with the products of rows [first, first + rows) and the panel at an address.

    Row i of levels begins at address x + i * step, as `prepare_levels` returns it, with `inputs` levels, a multiple of `INT8_BLOCK`.
    `scales_M`: the scales of all rows. A product is the exact sum, rounded to fp32, times the scales of its row and its output. `how` is
    INT8 or INT8_TILES.
    """
    weight = panel + HEADER * _ROW
    if how == INT8_TILES:
        tile_sums(x, step, rows, weight, inputs // INT8_BLOCK, sums_MX, True)
    else:
        _vector_sums(x, step, rows, weight, inputs // 4, sums_MX)
    for r in range(rows):
        for at in range(0, _ROW, _VECTOR):
            _dequantise(sums_MX.ctypes.data + r * _ROW + at, panel + at, scales_M[first + r])
