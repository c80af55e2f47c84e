# pyright: basic, reportCallIssue=false
"""Matrix products in bf16 and int8 with the CPU's tiles (Intel AMX).

In bf16 the order of additions is that of the instruction `tdpbf16ps`, which `kernels.product` defines as its own. Integer sums are exact
(`kernels.int8_product`).

A weight tile is 16 pairs of bf16 inputs, or 16 groups of four bytes, by 16 outputs: 16 rows of 64 bytes, 128 bytes apart, in a panel. Up
to 32 rows are computed at once, by two tiles of rows and two of outputs. A tile with fewer rows costs less, so the last rows get a tile
configuration of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from ostinato.model.kernels.arithmetic import operation
from ostinato.model.kernels.processor import cpu_features
from ostinato.model.kernels.vector import PANEL, prefetch

HAS_TILES = {"amx-tile", "amx-bf16", "amx-int8"} <= cpu_features()
"""Whether the kernel is compiled; the operating system must also allow tiles (`processor.tiles_allowed`)."""
_BYTE = ir.IntType(8)
_TILE = 16  # rows
_ROW = 4 * PANEL  # bytes of a pair of inputs in a panel, and of a row of sums
_BLOCK = 16 * _ROW  # bytes
_AHEAD = 8192  # prefetch distance for weights in bytes; beyond 16 rows prefetching does not pay


def _call(builder: Any, name: str, args: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _operation(name: str, *tiles: int, address: bool = False, step: bool = False) -> Any:
    """Return a tile instruction on tiles with these numbers; with `address` and `step`, on memory whose rows are `step` bytes apart."""

    def generate(builder: Any, *args: Any) -> None:
        values = [ir.Constant(_BYTE, tile) for tile in tiles]
        if address:
            values.append(builder.inttoptr(args[0], _BYTE.as_pointer()))
        _call(builder, f"llvm.x86.{name}", [*values, *args[1:]])

    return operation(generate, types.void, *[types.intp] * (address + step))


_fetch = operation(lambda builder, place: prefetch(builder, place, 0), types.void, types.intp)
# tiles 0 to 3 are sums (upper rows, lower rows, by two halves of the outputs), 4 and 5 rows, 6 and 7 weights
_configure, _release = _operation("ldtilecfg", address=True), _operation("tilerelease")
_zero0, _zero1, _zero2, _zero3 = (_operation("tilezero", tile) for tile in range(4))
_load4, _load5, _load6, _load7 = (_operation("tileloadd64", tile, address=True, step=True) for tile in range(4, 8))
_store0, _store1, _store2, _store3 = (_operation("tilestored64", tile, address=True, step=True) for tile in range(4))
_PRODUCTS = ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7))
_dot046, _dot147, _dot256, _dot357 = (_operation("tdpbf16ps", *tiles) for tiles in _PRODUCTS)
_bytes046, _bytes147, _bytes256, _bytes357 = (_operation("tdpbusd", *tiles) for tiles in _PRODUCTS)


@njit(nogil=True, cache=True)
def _shape(config, rows):
    """Fill the 64 bytes of a tile configuration for 1 to 32 rows."""
    upper, lower = min(rows, _TILE), max(rows - _TILE, 1)
    config[:] = 0
    config[0] = 1
    for tile in range(8):
        config[16 + 2 * tile] = 64
        config[48 + tile] = _TILE
    config[48] = config[49] = config[52] = upper
    config[50] = config[51] = config[53] = lower


def by_tiles(x, step, rows, weight, blocks, sums_MX, int8):
    """Fill the first rows of sums_MX with the products of rows at addresses x + i * step and the panel at `weight`.

    Rows and panel are bf16. With `int8`, they are unsigned and signed bytes, and the sums are 32-bit integers stored in place of floats.
    """
    config = np.empty(64, np.uint8)
    shaped = 0
    for m in range(0, rows, 2 * _TILE):
        count = min(2 * _TILE, rows - m)
        if count != shaped:
            _shape(config, count)
            _configure(config.ctypes.data)
            shaped = count
        upper, out = x + m * step, sums_MX.ctypes.data + m * _ROW
        lower, out_lower = upper + _TILE * step, out + _TILE * _ROW
        _zero0()
        _zero1()
        if count > _TILE:
            _zero2()
            _zero3()
        for block in range(blocks):
            at = weight + block * _BLOCK
            if count <= _TILE:
                for line in range(0, _BLOCK, 64):
                    _fetch(at + _AHEAD + line)
            _load4(upper + block * 64, step)
            _load6(at, _ROW)
            _load7(at + 64, _ROW)
            if int8:
                _bytes046()
                _bytes147()
            else:
                _dot046()
                _dot147()
            if count > _TILE:
                _load5(lower + block * 64, step)
                if int8:
                    _bytes256()
                    _bytes357()
                else:
                    _dot256()
                    _dot357()
        _store0(out, _ROW)
        _store1(out + 64, _ROW)
        if count > _TILE:
            _store2(out_lower, _ROW)
            _store3(out_lower + 64, _ROW)
    _release()


@njit(nogil=True, cache=True)
def _unsupported(x, step, rows, weight, blocks, sums_MX, int8):
    """Stand in for `by_tiles` on CPUs without its instructions, where tiles are never chosen."""
    sums_MX[:rows] = np.nan


tile_sums = njit(nogil=True, cache=True)(by_tiles) if HAS_TILES else _unsupported
