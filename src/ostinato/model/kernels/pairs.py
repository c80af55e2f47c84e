# pyright: basic, reportCallIssue=false
"""Matrix products in bf16 with the CPU's dot-product instruction for pairs (AVX512-BF16).

An output is one chain over K: the instruction `vdpbf16ps` adds two products at a time to an fp32 sum that starts at 0, pairs in ascending
order, and flushes numbers below 2^-126 to 0. The weights are in the panels of `kernels.product`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from ostinato.model.kernels.arithmetic import operation
from ostinato.model.kernels.processor import cpu_features
from ostinato.model.kernels.vector import PANEL, WIDE, address_at, in_all_lanes, loop, prefetch

HAS_PAIRS = "avx512bf16" in cpu_features()
"""Whether this process may use the instruction."""
_BYTES = 4 * WIDE  # bytes of a vector
_LONG, _WORD, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_FLOAT, WIDE), ir.VectorType(_WORD, WIDE)
_AHEAD = 4096  # prefetch distance for weights, in bytes


class _BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    intrinsic_name = "bf16"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat(), PANEL)


def _weights(builder: Any, place: Any, *, ask: bool) -> list[Any]:
    """Load the panel's two weight vectors of one pair of inputs; with `ask`, prefetch later ones."""
    vectors = [
        builder.bitcast(builder.load(address_at(builder, place, half, _WORDS), align=4), _PAIRS) for half in (0, _BYTES)
    ]
    if ask:
        for half in (0, _BYTES):
            prefetch(builder, place, _AHEAD + half)
    return vectors


def _both(builder: Any, place: Any) -> Any:
    """Broadcast a row's pair of inputs to all lanes."""
    return builder.bitcast(in_all_lanes(builder, builder.load(place, align=4)), _PAIRS)


def _chain(rows: int) -> Any:
    """Return ``chain(x, step, weight, pairs, out)``, which stores at `out` the products of `rows` rows, `step` bytes apart, and a panel."""

    def generate(builder: Any, x: Any, step: Any, weight: Any, pairs: Any, out: Any) -> None:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        places = [builder.add(x, builder.mul(step, ir.Constant(_LONG, row))) for row in range(rows)]

        def products(pair: Any, sums: list[Any]) -> list[Any]:
            here = builder.add(weight, builder.mul(pair, ir.Constant(_LONG, 2 * _BYTES)))
            halves = _weights(builder, here, ask=rows < 8)
            grown: list[Any] = []
            for row in range(rows):
                at = builder.add(places[row], builder.shl(pair, ir.Constant(_LONG, 2)))
                both = _both(builder, address_at(builder, at, 0, _WORD))
                grown += [builder.call(dot, [sums[2 * row + i], both, halves[i]]) for i in (0, 1)]
            return grown

        zero = ir.Constant(_FLOATS, [0.0] * WIDE)
        for at, value in enumerate(loop(builder, pairs, 1, [zero] * (2 * rows), products)):
            builder.store(value, address_at(builder, out, at * _BYTES, _FLOATS), align=4)

    return operation(generate, types.void, *[types.intp] * 5)


_chain1, _chain2, _chain4, _chain8, _chain12 = (_chain(rows) for rows in (1, 2, 4, 8, 12))
# twelve rows fill the registers: 24 sums, 2 weight vectors, 1 pair


def by_pairs(x, step, rows, weight, pairs, sums_MX):
    """Fill the first rows of sums_MX with the products of bf16 rows at addresses x + i * step and the panel at `weight`."""
    m, out = 0, sums_MX.ctypes.data
    while m < rows:
        row, to, left = x + m * step, out + m * PANEL * 4, rows - m
        if left >= 12:
            _chain12(row, step, weight, pairs, to)
            m += 12
        elif left >= 8:
            _chain8(row, step, weight, pairs, to)
            m += 8
        elif left >= 4:
            _chain4(row, step, weight, pairs, to)
            m += 4
        elif left >= 2:
            _chain2(row, step, weight, pairs, to)
            m += 2
        else:
            _chain1(row, step, weight, pairs, to)
            m += 1


@njit(nogil=True, cache=True)
def _unsupported(x, step, rows, weight, pairs, sums_MX):
    """Stand in for `by_pairs` on CPUs without its instruction, where pairs are never chosen."""
    sums_MX[:rows] = np.nan


pair_sums = njit(nogil=True, cache=True)(by_pairs) if HAS_PAIRS else _unsupported
