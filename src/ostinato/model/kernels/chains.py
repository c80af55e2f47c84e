# pyright: basic, reportCallIssue=false
"""Matrix products in bf16 with the CPU's dot-product instruction for pairs, in oneDNN's order of additions.

An output is a sum over K in chains of at most `chain` numbers: within a chain the instruction `vdpbf16ps` adds two products at a time to
an fp32 number that begins at 0, pairs ascending; the chains' sums are added in fp32, ascending. The length of oneDNN's chains depends on
the matrix, and `model.panels` finds it by trial. So the bits are those of the trainer's products, at any number of rows and for any
share of the outputs, without the overhead of a call through torch.

A weight [N, K] is stored in panels of `PANEL` outputs: the pairs ascending, and for each pair one 32-bit word per output.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.model.kernels.vector import WIDE, add16, load16, store16, v16

PANEL = 2 * WIDE
ROWS_AT_ONCE = 12  # as many as fit into the registers: 24 sums, 2 weights, a row's pair
_BYTES = 4 * WIDE  # of a vector
_LONG, _WORD, _BYTE, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_FLOAT, WIDE), ir.VectorType(_WORD, WIDE)
_AHEAD = 4096  # bytes by which a weight is prefetched ahead of its use


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat(), PANEL)


def _at(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(_LONG, offset)), kind.as_pointer())


def _weights(builder: Any, place: Any, *, ask: bool) -> list[Any]:
    """The panel's two vectors of one pair."""
    found = [builder.bitcast(builder.load(_at(builder, place, half, _WORDS), align=4), _PAIRS) for half in (0, _BYTES)]
    if ask:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _WORD, _WORD, _WORD])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for half in (0, _BYTES):
            line = _at(builder, place, _AHEAD + half, _BYTE)
            builder.call(hint, [line, *(ir.Constant(_WORD, flag) for flag in (0, 3, 1))])  # to read, keep near, data
    return found


def _both(builder: Any, place: Any) -> Any:
    """The pair of a row in all lanes."""
    nothing = ir.Constant(_WORDS, ir.Undefined)
    one = builder.insert_element(nothing, builder.load(place, align=4), ir.Constant(_WORD, 0))
    return builder.bitcast(builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * WIDE)), _PAIRS)


def _chain(rows: int) -> Any:
    """``chain(x, step, weight, pairs, sums_RX)``: one chain's sums of `rows` rows, which begin `step` bytes apart, and a panel."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, step, weight, pairs, out = args
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        places = [builder.add(x, builder.mul(step, ir.Constant(_LONG, row))) for row in range(rows)]
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        pair = builder.phi(_LONG)
        sums = [builder.phi(_FLOATS) for _ in range(2 * rows)]
        halves = _weights(builder, builder.add(weight, builder.mul(pair, ir.Constant(_LONG, 2 * _BYTES))), ask=rows < 8)
        grown: list[Any] = []
        for row in range(rows):
            both = _both(
                builder, _at(builder, builder.add(places[row], builder.shl(pair, ir.Constant(_LONG, 2))), 0, _WORD)
            )
            grown += [builder.call(dot, [sums[2 * row + i], both, halves[i]]) for i in (0, 1)]
        following = builder.add(pair, ir.Constant(_LONG, 1))
        for phi, first, value in zip(
            [pair, *sums],
            [ir.Constant(_LONG, 0), *[ir.Constant(_FLOATS, [0.0] * WIDE)] * len(sums)],
            [following, *grown],
            strict=True,
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)
        builder.position_at_end(after)
        made = context.make_array(signature.args[4])(context, builder, out)
        address = builder.ptrtoint(made.data, _LONG)
        for at, value in enumerate(grown):
            builder.store(value, _at(builder, address, at * _BYTES, _FLOATS), align=4)
        return context.get_dummy_value()

    @intrinsic
    def chain(typingctx: Any, x: Any, step: Any, weight: Any, pairs: Any, sums_RX: Any) -> Any:
        del typingctx, x, step, weight, pairs
        return types.void(types.intp, types.intp, types.intp, types.intp, sums_RX), generate

    return chain


_chain1, _chain2, _chain4, _chain8, _chain12 = (_chain(rows) for rows in (1, 2, 4, 8, ROWS_AT_ONCE))


@intrinsic
def narrow16(typingctx: Any, value: Any) -> Any:
    """The value rounded to bf16 as oneDNN rounds an output: by the CPU's instruction, which takes numbers below 2^-126 as 0."""
    del typingctx, value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        kind = ir.FunctionType(ir.VectorType(_BFloat(), WIDE), [_FLOATS])
        cut = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512")
        halves = builder.bitcast(builder.call(cut, [args[0]]), ir.VectorType(ir.IntType(16), WIDE))
        sixteen = ir.Constant(_WORDS, [16] * WIDE)
        return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), sixteen), _FLOATS)

    return v16(v16), generate


@njit(nogil=True, cache=True)
def sums(x, step, left, weight, inputs, chain, sums_RX):
    """Fill the first rows of sums_RX with the products of some of `left` rows and one panel; returns the number of these rows.

    Row i's `inputs` bf16 numbers begin at address x + i * step, the panel's at `weight`. `inputs` and `chain` are even. `sums_RX`
    [2 * ROWS_AT_ONCE, PANEL] is a thread's own; its second half is scratch space.
    """
    rows = 12 if left >= 12 else 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
    for first in range(0, inputs, chain):
        pairs = min(chain, inputs - first) // 2
        row, panel = x + 2 * first, weight + 2 * first * PANEL
        if first > 0:
            sums_RX[ROWS_AT_ONCE : ROWS_AT_ONCE + rows] = sums_RX[:rows]
        if rows == 12:
            _chain12(row, step, panel, pairs, sums_RX)
        elif rows == 8:
            _chain8(row, step, panel, pairs, sums_RX)
        elif rows == 4:
            _chain4(row, step, panel, pairs, sums_RX)
        elif rows == 2:
            _chain2(row, step, panel, pairs, sums_RX)
        else:
            _chain1(row, step, panel, pairs, sums_RX)
        if first > 0:
            for r in range(rows):
                for n in range(0, PANEL, WIDE):
                    before = load16(sums_RX, ROWS_AT_ONCE + r, n)
                    store16(sums_RX, r, n, add16(before, load16(sums_RX, r, n)))
    return rows
