# pyright: basic, reportCallIssue=false
"""Matrix products in a defined order of additions: the same bits on every CPU, for any number of rows and any share of the outputs.

An output is a sum over K inputs in blocks of 32; the last block is padded with zeros. In a block, the even inputs and the odd inputs each
form a chain of 16 fused multiply-adds in fp32, ascending from 0. The two chains are added, and their sum is added to the total, which
starts at 0. Inputs below 2^-126 count as 0, and so do results below it after rounding to 24 bits. For bf16 this is what Intel's tile
instruction `tdpbf16ps` computes (`kernels.tiles`); here it is done by ordinary fused multiply-adds, for bf16 and fp32 alike. In the other
order, `PAIRS`, which is faster on CPUs with AVX512-BF16 and without tiles, an output is one chain of all pairs (`kernels.pairs`).

A weight [N, K] is stored in panels of `PANEL` outputs (the last one padded with zeros): pairs of inputs in ascending order, and for each
pair one 32-bit word per output in bf16, or the 32 outputs' even inputs followed by their odd inputs in fp32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.np.numpy_support import carray

from ostinato.model.kernels.arithmetic import load, operation
from ostinato.model.kernels.pairs import pair_sums
from ostinato.model.kernels.processor import IS_ARM, cpu_features
from ostinato.model.kernels.tiles import tile_sums
from ostinato.model.kernels.vector import (
    PANEL,
    WIDE,
    address_at,
    fused,
    in_all_lanes,
    load16,
    loop,
    outlined,
    pointer,
    prefetch,
    store16,
)

BLOCK = 32  # inputs
_VECTOR = 4 * WIDE  # bytes
_LONG, _WORD, _BYTE, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_FLOAT, WIDE), ir.VectorType(_WORD, WIDE)
_AHEAD = 2048  # prefetch distance for weights, in bytes


_WIDE_REGISTERS = IS_ARM or "avx512f" in cpu_features()  # 32 registers instead of 16
ROWS = 6 if _WIDE_REGISTERS else 3
"""The most rows computed at once: their chains fill the registers."""
CHUNK = 8
"""Blocks of a panel that all rows use before the next ones, so that they stay in the cache."""
FUSED, TILES, PAIRS = 0, 1, 2
"""How a product is computed; FUSED and TILES give the same bits."""
_UNROLLED = 4  # pairs
_WIDEN_ROWS = 24  # number of rows from which a bf16 panel is converted to fp32 first


# ---------------------------------------------------------------- flushing subnormal numbers


def _float_state(builder: Any) -> Any:
    """Read the thread's floating-point control register, as 64 bits."""
    if IS_ARM:
        read = ir.FunctionType(_LONG, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, read, "llvm.aarch64.get.fpcr"), [])
    place = cgutils.alloca_once(builder, _WORD)
    _control(builder, "stmxcsr", place)
    return builder.zext(builder.load(place), _LONG)


def _set_float_state(builder: Any, state: Any) -> None:
    if IS_ARM:
        write = ir.FunctionType(ir.VoidType(), [_LONG])
        builder.call(cgutils.get_or_insert_function(builder.module, write, "llvm.aarch64.set.fpcr"), [state])
        return
    place = cgutils.alloca_once(builder, _WORD)
    builder.store(builder.trunc(state, _WORD), place)
    _control(builder, "ldmxcsr", place)


def _control(builder: Any, name: str, place: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer()])
    call = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}")
    builder.call(call, [builder.bitcast(place, _BYTE.as_pointer())])


def _flushing(builder: Any) -> Any:
    before = _float_state(builder)
    _set_float_state(builder, builder.or_(before, ir.Constant(_LONG, 1 << 24 if IS_ARM else 0x8040)))
    return before


flush_small = operation(_flushing, types.int64)
"""Makes this thread flush numbers below 2^-126 to 0, as inputs and results; returns the old state, for `restore`."""
restore = operation(_set_float_state, types.void, types.int64)
"""Undoes `flush_small`."""


# ---------------------------------------------------------------- weights in panels


@njit(nogil=True, cache=True)
def lay_out(address, rows, first, last, out_PXL):
    """Fill panels [first, last) of out_PXL with a weight's rows of 32-bit words, transposed; missing rows of the last panel are zeros.

    The weight is passed by address, because torch refuses to resize memory that numpy has viewed, and FSDP resizes its weights.
    """
    words = out_PXL.shape[1]
    words_NX = carray(pointer(address, out_PXL), (rows, words))
    for panel in range(first, last):
        begin = panel * PANEL
        count = min(PANEL, rows - begin)
        for x in range(0, words, WIDE):  # one square of words at a time, to stay in the L1 cache
            end = min(words, x + WIDE)
            for lane in range(count):
                for word in range(x, end):
                    out_PXL[panel, word, lane] = words_NX[begin + lane, word]
            for lane in range(count, PANEL):
                for word in range(x, end):
                    out_PXL[panel, word, lane] = 0


# ---------------------------------------------------------------- sums in registers


def _even_and_odd(builder: Any, place: Any, offset: int, *, halves: bool) -> list[Any]:
    """Load a vector of outputs' weights for the two inputs of a pair."""
    if not halves:
        return [
            builder.load(address_at(builder, place, offset + odd * 2 * _VECTOR, _FLOATS), align=4) for odd in (0, 1)
        ]
    words = builder.load(address_at(builder, place, offset, _WORDS), align=4)
    even = builder.shl(words, ir.Constant(_WORDS, [16] * WIDE))
    odd = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * WIDE))
    return [builder.bitcast(even, _FLOATS), builder.bitcast(odd, _FLOATS)]


def _pair(builder: Any, xs: list[Any], place: Any, chains: list[Any], *, vectors: int, halves: bool) -> list[Any]:
    """Emit one more pair of inputs; return the chains, ordered by row, vector, even or odd."""
    grown = list(chains)
    for vector in range(vectors):
        weights = _even_and_odd(builder, place, vector * _VECTOR, halves=halves)
        for odd in (0, 1):
            for row, x in enumerate(xs):
                at = (row * vectors + vector) * 2 + odd
                number = builder.load(address_at(builder, x, 4 * odd, _FLOAT), align=4)
                grown[at] = fused(builder, in_all_lanes(builder, number), weights[odd], grown[at])
    return grown


def _chains_of_block(builder: Any, xs: list[Any], panel: Any, *, vectors: int, halves: bool, ask: bool) -> list[Any]:
    """Emit one block; return its finished chains."""
    size, zero = _pair_bytes(halves), ir.Constant(_FLOATS, [0.0] * WIDE)

    def pairs(index: Any, chains: list[Any]) -> list[Any]:
        here = builder.add(panel, builder.mul(index, ir.Constant(_LONG, size)))
        starts = [builder.add(x, builder.shl(index, ir.Constant(_LONG, 3))) for x in xs]
        for i in range(_UNROLLED):
            if ask:
                for line in range(0, size, 64):
                    prefetch(builder, here, _AHEAD + i * size + line)
            moved = [builder.add(start, ir.Constant(_LONG, 8 * i)) for start in starts]
            place = builder.add(here, ir.Constant(_LONG, size * i))
            chains = _pair(builder, moved, place, chains, vectors=vectors, halves=halves)
        return chains

    return loop(builder, ir.Constant(_LONG, BLOCK // 2), _UNROLLED, [zero] * (2 * len(xs) * vectors), pairs)


def _pair_bytes(halves: bool) -> int:
    return PANEL * (4 if halves else 8)


def _adding(rows: int, vectors: int, *, halves: bool) -> Any:
    """Return ``add(x, step, weight, blocks, out)``, which adds blocks to the sums [rows, vectors * WIDE] at address `out`.

    Rows of the sums are PANEL numbers apart.
    """

    def body(builder: Any) -> None:
        x, step, weight, blocks, out = builder.function.args
        places = [builder.add(x, builder.mul(step, ir.Constant(_LONG, row))) for row in range(rows)]
        outs = [
            address_at(builder, out, (row * PANEL + vector * WIDE) * 4, _FLOATS)
            for row in range(rows)
            for vector in range(vectors)
        ]
        with cgutils.for_range(builder, blocks) as block:
            xs = [builder.add(place, builder.mul(block.index, ir.Constant(_LONG, BLOCK * 4))) for place in places]
            skip = ir.Constant(_LONG, BLOCK // 2 * _pair_bytes(halves))
            panel = builder.add(weight, builder.mul(block.index, skip))
            grown = _chains_of_block(builder, xs, panel, vectors=vectors, halves=halves, ask=rows < 3)
            for number, place in enumerate(outs):
                both = builder.fadd(grown[2 * number], grown[2 * number + 1])
                builder.store(builder.fadd(builder.load(place, align=4), both), place, align=4)
        builder.ret_void()

    return outlined(f"ostinato_add_{rows}_{vectors}_{'halves' if halves else 'floats'}", body)


def _widened(builder: Any, words: Any, out: Any) -> None:
    for odd, half in enumerate(_even_and_odd(builder, words, 0, halves=True)):
        builder.store(half, address_at(builder, out, odd * 2 * _VECTOR, _FLOATS), align=4)


_widen = operation(_widened, types.void, types.intp, types.intp)
"""Widens 16 words of two bf16 at an address to fp32: the first of each to another address, the second PANEL numbers later."""
_VECTORS = 2 if _WIDE_REGISTERS else 1
_PART, _ROW = _VECTORS * WIDE * 4, PANEL * 4  # bytes of the sums computed at once, and of a panel's sums
_halves_most, _halves_two, _halves_one = (
    _adding(rows, vectors, halves=True) for rows, vectors in ((ROWS, _VECTORS), (2, _VECTORS), (1, 2))
)
_floats_most, _floats_two, _floats_one = (
    _adding(rows, vectors, halves=False) for rows, vectors in ((ROWS, _VECTORS), (2, _VECTORS), (1, 2))
)


@njit(nogil=True, cache=True)
def _add_halves(x, step, rows, weight, blocks, sums_MX):
    """Add some blocks of a bf16 panel to the sums of all rows."""
    out, whole = sums_MX.ctypes.data, rows // ROWS * ROWS
    for at in range(0, _ROW, _PART):
        for m in range(0, whole, ROWS):
            _halves_most(x + m * step, step, weight + at, blocks, out + m * _ROW + at)
        for m in range(whole, rows - 1, 2):
            _halves_two(x + m * step, step, weight + at, blocks, out + m * _ROW + at)
    if (rows - whole) % 2:
        _halves_one(x + (rows - 1) * step, step, weight, blocks, out + (rows - 1) * _ROW)


@njit(nogil=True, cache=True)
def _add_floats(x, step, rows, weight, blocks, sums_MX):
    """Add some blocks of an fp32 panel to the sums of all rows."""
    out, whole = sums_MX.ctypes.data, rows // ROWS * ROWS
    for at in range(0, _ROW, _PART):
        for m in range(0, whole, ROWS):
            _floats_most(x + m * step, step, weight + at, blocks, out + m * _ROW + at)
        for m in range(whole, rows - 1, 2):
            _floats_two(x + m * step, step, weight + at, blocks, out + m * _ROW + at)
    if (rows - whole) % 2:
        _floats_one(x + (rows - 1) * step, step, weight, blocks, out + (rows - 1) * _ROW)


@njit(nogil=True, cache=True)
def _fused_sums(x, step, rows, weight, blocks, halves, sums_MX, wide):
    """Compute `panel_sums` by fused multiply-adds, a few of the panel's blocks at a time, so that they stay in the L1 cache."""
    sums_MX[:rows] = 0
    before = flush_small()
    for first in range(0, blocks, CHUNK):
        count = min(CHUNK, blocks - first)
        row, pair = x + first * BLOCK * 4, first * BLOCK // 2
        if not halves:
            _add_floats(row, step, rows, weight + pair * PANEL * 8, count, sums_MX)
        elif rows < _WIDEN_ROWS:
            _add_halves(row, step, rows, weight + pair * PANEL * 4, count, sums_MX)
        else:
            words, floats = weight + pair * PANEL * 4, wide.ctypes.data
            for i in range(count * BLOCK // 2):
                for half in range(0, PANEL * 4, WIDE * 4):
                    _widen(words + i * PANEL * 4 + half, floats + i * PANEL * 8 + half)
            _add_floats(row, step, rows, floats, count, sums_MX)
    restore(before)


# ---------------------------------------------------------------- one panel, in any order


@njit(nogil=True, cache=True)
def panel_sums(x, step, rows, weight, inputs, how, halves, sums_MX, wide):
    """Fill the first rows of sums_MX [M, PANEL] with the products of `rows` rows and one panel.

    Row i begins at address x + i * step, the panel at `weight`. Both hold `inputs` numbers, a multiple of 32: the panel in bf16 if
    `halves`, else in fp32, the rows as `prepare_rows` returns them. `how` is FUSED, TILES or PAIRS. `wide` is the thread's scratch space
    [CHUNK * BLOCK, PANEL].
    """
    if how == TILES:
        tile_sums(x, step, rows, weight, inputs // BLOCK, sums_MX, False)
    elif how == PAIRS:
        pair_sums(x, step, rows, weight, inputs // 2, sums_MX)
    else:
        _fused_sums(x, step, rows, weight, inputs // BLOCK, halves, sums_MX, wide)


@njit(nogil=True, cache=True)
def prepare_rows(x_MK, first, rows, inputs, how, space):
    """Prepare rows [first, first + rows) for `panel_sums`; return their address, and the bytes from one row to the next.

    Rows must be padded with zeros to `inputs` numbers, in fp32 for FUSED, else in bf16. Rows that are not are copied to `space`
    [rows, inputs] of fp32.
    """
    size = x_MK.shape[1]
    width = x_MK.strides[0]
    if (how != FUSED or x_MK.itemsize == 4) and size == inputs:
        return x_MK.ctypes.data + first * width, width
    if how == FUSED:
        for m in range(rows):
            whole = size // WIDE * WIDE
            for k in range(0, whole, WIDE):
                store16(space, m, k, load16(x_MK, first + m, k))
            for k in range(whole, size):
                space[m, k] = load(x_MK[first + m, k])
            space[m, size:inputs] = 0
        return space.ctypes.data, space.strides[0]
    halves = space.view(x_MK.dtype)
    for m in range(rows):
        halves[m, :size] = x_MK[first + m]
        halves[m, size:inputs] = 0
    return space.ctypes.data, space.strides[0]
