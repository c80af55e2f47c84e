# pyright: basic, reportCallIssue=false
"""All decoder layers of a model in one call, on any number of threads: x + attention(norm(x)), then x + mlp(norm(x)).

A layer has nine phases, in each of which threads take pieces of work (`turns`). The operations of a piece, and their order, are stated
in the modules of the kernels that it calls, and each number is rounded to bf16 where the library's layers round it, so the division of
work changes no bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from ostinato.model.kernels.arithmetic import inlined
from ostinato.model.kernels.attention import attend_head, room
from ostinato.model.kernels.chains import PANEL, ROWS_AT_ONCE, narrow16, sums
from ostinato.model.kernels.gate import sigmoid16
from ostinato.model.kernels.norm import rms_norm
from ostinato.model.kernels.rotary import rotate
from ostinato.model.kernels.turns import await_all, claim, finished
from ostinato.model.kernels.vector import WIDE, add16, div16, load16, mul16, round16, store16

PHASES = 9  # of a layer: norm, qkv, rotation, cache, attention, out, norm, gate and up, down
ATTENTION = 4  # the phase that needs the cache
_TOKENS = 4  # of a piece of work in phases other than products
_ROWS = 16 * ROWS_AT_ONCE  # of a product's piece: their inputs stay in the second-level cache
_HEADS = 16  # the most pieces that attention is divided into


@intrinsic
def _pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """A pointer, from an address, to numbers of the dtype of the array `like`."""
    del typingctx, address

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.intp, like), generate


@inlined
def _parts(count, size):
    return (count + size - 1) // size


@njit(nogil=True, cache=True)
def _give_rows(sums_RX, rows, bias_LN, layer, out_MN, m, n, adding):
    """Write products as the library does: with a bias, rounded; if `adding`, added to the present values and rounded again."""
    for r in range(rows):
        for i in range(0, PANEL, WIDE):
            y = load16(sums_RX, r, i)
            if bias_LN.shape[1] > 0:
                y = add16(y, load16(bias_LN, layer, n + i))
            y = narrow16(y)
            if adding:
                y = add16(load16(out_MN, m + r, n + i), y)
            store16(out_MN, m + r, n + i, y)


@njit(nogil=True, cache=True, error_model="numpy")
def _give_gated(sums_RX, rows, out_MF, m, f):
    """Write silu(gate) * up as in `gate.silu_mul`, from a panel of sixteen of each."""
    for r in range(rows):
        g, u = narrow16(load16(sums_RX, r, 0)), narrow16(load16(sums_RX, r, WIDE))
        numerator, denominator = sigmoid16(g)
        y = round16(out_MF, div16(mul16(g, numerator), denominator))
        store16(out_MF, m + r, f, mul16(y, u))


@njit(nogil=True, cache=True)
def _multiply(piece, x_MK, weight, chain, bias_LN, layer, out_MN, kind, sums_RX):
    """Compute one panel for one group of rows. `kind`: 0 writes the products, 1 adds them to the present values, 2 gates them."""
    inputs = x_MK.shape[1]
    groups = _parts(x_MK.shape[0], _ROWS)
    panel, group = piece // groups, piece % groups
    m, end = group * _ROWS, min((group + 1) * _ROWS, x_MK.shape[0])
    x, weight = x_MK.ctypes.data, weight + panel * PANEL * inputs * 2
    while m < end:
        rows = sums(x + m * inputs * 2, inputs * 2, end - m, weight, inputs, chain, sums_RX)
        if kind == 2:
            _give_gated(sums_RX, rows, out_MN, m, panel * WIDE)
        else:
            _give_rows(sums_RX, rows, bias_LN, layer, out_MN, m, panel * PANEL, kind == 1)
        m += rows


@njit(nogil=True, cache=True)
def project(counters, x_MK, weight, chain, bias_LN, out_MN):
    """Fill out_MN [M, N] with the products of bf16 rows and a weight in panels, plus a bias [1, N] or [1, 0] for none."""
    sums_RX = np.zeros((2 * ROWS_AT_ONCE, PANEL), np.float32)
    pieces = out_MN.shape[1] // PANEL * _parts(x_MK.shape[0], _ROWS)
    while True:
        piece = claim(counters, 0)
        if piece >= pieces:
            break
        _multiply(piece, x_MK, weight, chain, bias_LN, 0, out_MN, 0, sums_RX)
        finished(counters, 0)
    await_all(counters, 0, pieces)


@njit(nogil=True, cache=True)
def _keep(k_NX, qkv_NW, places_3P, first, last, keys, values):
    """Put keys and values of some tokens into their blocks; `places_3P` is (tokens, blocks, offsets)."""
    kv, dim = keys.shape[1], keys.shape[2]
    begin = qkv_NW.shape[1] - kv * dim
    for p in range(first, last):
        n, b, j = places_3P[0, p], places_3P[1, p], places_3P[2, p]
        for head in range(kv):
            for d in range(dim):
                keys[b, head, d, j] = k_NX[n, head * dim + d]
                values[b, head, j, d] = qkv_NW[n, begin + head * dim + d]


@inlined
def _pieces(part, rows, outs, heads, places):
    """The number of pieces of work in a phase."""
    if part == 1 or part == 5 or part == 7 or part == 8:
        return outs * _parts(rows, _ROWS)
    if part == 3:
        return _parts(places, _TOKENS)
    if part == 4:
        return _parts(heads, _parts(heads, _HEADS)) if heads > 0 else 0
    return _parts(rows, _TOKENS)


@inlined
def _attend(dim, block, share, piece, layer, cache, state, place):
    """Compute a piece of the attention phase: some heads of some tiles."""
    caches, blocks, _, tiles, positions, starts, table, scales, windows, _ = cache
    q, k, seen, lse = state[3], state[4], state[5], state[7]
    kv = k.shape[1] // dim
    keys = carray(_pointer(caches[layer, 0], q), (blocks, kv, dim, block))
    values = carray(_pointer(caches[layer, 1], q), (blocks, kv, block, dim))
    where, size = (positions, starts, table), _parts(len(tiles) * kv, _HEADS)
    for unit in range(piece * size, min((piece + 1) * size, len(tiles) * kv)):
        tile, head = unit // kv, unit % kv
        after = tiles[min(tile + 1, len(tiles) - 1), 0]
        tile_3 = (tiles[tile, 0], tiles[tile, 1], tiles[tile, 2])
        scale, window = scales[layer], windows[layer]
        attend_head(dim, block, share, q, keys, values, tile_3, after, head, where, scale, window, seen, lse, place)


@inlined
def _compute(dim, block, part, layer, piece, model, cache, state, sums_RX):
    """Compute a piece of any other phase."""
    weights, chains, bias_qkv, bias_out, none, norms, norm_eps, of_queries, of_keys, head_eps = model
    x, normed, qkv, q, k, seen, gated, _, cos, sin = state
    rows, kv = len(x), k.shape[1] // dim
    heads = q.shape[1] * dim
    a, b = piece * _TOKENS, min((piece + 1) * _TOKENS, rows)
    if part == 0 or part == 6:
        at = 2 * layer + part // 6
        rms_norm(x[a:b], norms[at : at + 1], norm_eps[at], normed[a:b], np.empty(0, np.float32))
    elif part == 1:
        _multiply(piece, normed, weights[layer, 0], chains[0], bias_qkv, layer, qkv, 0, sums_RX)
    elif part == 2:
        flat_q, at = q.reshape(rows, heads), slice(layer, layer + 1)
        rotate(qkv[a:b], 0, q.shape[1], cos[a:b], sin[a:b], of_queries[at], head_eps[0], flat_q[a:b])
        rotate(qkv[a:b], heads, kv, cos[a:b], sin[a:b], of_keys[at], head_eps[1], k[a:b])
    elif part == 3:
        caches, blocks, places = cache[0], cache[1], cache[2]
        keys = carray(_pointer(caches[layer, 0], q), (blocks, kv, dim, block))
        values = carray(_pointer(caches[layer, 1], q), (blocks, kv, block, dim))
        _keep(k, qkv, places, a, min((piece + 1) * _TOKENS, places.shape[1]), keys, values)
    elif part == 5:
        _multiply(piece, seen.reshape(rows, heads), weights[layer, 1], chains[1], bias_out, layer, x, 1, sums_RX)
    elif part == 7:
        _multiply(piece, normed, weights[layer, 2], chains[2], none, layer, gated, 2, sums_RX)
    else:
        _multiply(piece, gated, weights[layer, 3], chains[3], none, layer, x, 1, sums_RX)


@lru_cache
def decoder(dim, block, share):
    """The kernel for one head size, block size and number of query heads per key head.

    ``run(first, last, counters, model, cache, state)`` computes phases [first, last), with `PHASES` per layer; one more phase, after the
    last layer's, is the final norm. `counters` belong to the call, with a row for each of its phases. Tuples of arrays:

    - `model`: addresses of the four weights [L, 4] and their chains [4]; biases of qkv [L, W] and out [L, D], or [L, 0], and none
      [L, 0]; norms [2 L + 1, D] and their epsilons; the heads' norms [L, dim] or [L, 0] of queries and keys and their epsilons [2].
    - `cache`: addresses of each layer's keys and values [L, 2], blocks; places [3, P]; tiles, positions, where, table as in
      `attention`; scales and windows [L]; the longest sequence.
    - `state`: x [N, D], which is changed; buffers for normed [N, D], qkv [N, W], q [N, H, dim], k [N, KV dim], the output of
      attention [N, H, dim], the gated [N, F] and log-sums [N, H]; cosines and sines [N, dim].
    """

    @njit(nogil=True, cache=True, error_model="numpy")
    def run(first, last, counters, model, cache, state):
        x, qkv, k, gated = state[0], state[2], state[4], state[6]
        heads, places = len(cache[3]) * (k.shape[1] // dim), cache[2].shape[1]
        sums_RX = np.zeros((2 * ROWS_AT_ONCE, PANEL), np.float32)
        place = room(dim, block, share, cache[9])
        width = x.shape[1] // PANEL
        outs = (0, qkv.shape[1] // PANEL, 0, 0, 0, width, 0, gated.shape[1] // WIDE, width)
        for phase in range(first, last):
            layer, part, turn = phase // PHASES, phase % PHASES, phase - first
            pieces = _pieces(part, len(x), outs[part], heads, places)
            while True:
                piece = claim(counters, turn)
                if piece >= pieces:
                    break
                if part == 4:
                    _attend(dim, block, share, piece, layer, cache, state, place)
                else:
                    _compute(dim, block, part, layer, piece, model, cache, state, sums_RX)
                finished(counters, turn)
            await_all(counters, turn, pieces)

    return run
