# pyright: basic, reportCallIssue=false
"""Computes all decoder layers of a model in one call, on any number of threads: x + attention(norm(x)), then x + mlp(norm(x)).

A layer has eleven phases, and threads share the work of each (`thread_barrier`). The modules of the called kernels define the operations
of a piece of work and their order, and each number is rounded to bf16 where the library's layers round it. So the division of work changes
no bit.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from ostinato.model.kernels.arithmetic import inlined, load, store
from ostinato.model.kernels.attention import attend_head, attention_buffers
from ostinato.model.kernels.elementwise import activation16
from ostinato.model.kernels.int8_product import HEADER, INT8, INT8_BLOCK, int8_panel_products, prepare_levels
from ostinato.model.kernels.norm import rms_norm, rotate
from ostinato.model.kernels.product import BLOCK, CHUNK, panel_sums, prepare_rows
from ostinato.model.kernels.quantize import to_levels
from ostinato.model.kernels.thread_barrier import await_all, claim, finished
from ostinato.model.kernels.vector import PANEL, WIDE, add16, load16, mul16, pointer, round16, store16

PHASES = 11  # of a layer: norm, qkv, rotation, cache, attention, levels, out, norm, gate and up, levels, down
ATTENTION = 4  # the phase that reads the cache
_TOKENS = 4  # per piece of work, in phases other than products
_MOST_ROWS, _LEAST_ROWS = 192, 48  # of a product's piece; multiples of every kernel's number of rows at once
_L2_NUMBERS = 1 << 17  # numbers that stay in the L2 cache
_ATTENTION_PIECES = 16  # the most pieces into which attention is divided


@inlined
def _parts(count, size):
    return (count + size - 1) // size


@inlined
def filled_up(inputs):
    """Return the number of inputs with which a panel is stored: the next multiple of the block size."""
    return _parts(inputs, BLOCK) * BLOCK


@inlined
def _rows_of_piece(inputs):
    """Return the number of rows of a product's piece: as many as stay in the L2 cache."""
    return min(_MOST_ROWS, max(_LEAST_ROWS, _L2_NUMBERS // inputs // 12 * 12))


@njit(nogil=True, cache=True)
def workspace(rows, inputs):
    """Allocate a thread's buffers for products of up to `inputs` inputs and `rows` rows: prepared rows, sums, a panel's blocks in fp32, and
    which phase and group of rows are prepared.
    """
    rows = min(rows, _MOST_ROWS)
    return (
        np.empty((rows, filled_up(inputs)), np.float32),
        np.empty((rows, PANEL), np.float32),
        np.empty((CHUNK * BLOCK, PANEL), np.float32),
        np.full(4, -1, np.int64),
    )


@njit(nogil=True, cache=True)
def _write_rows(sums_MX, rows, bias_LN, layer, out_MN, m, n, adding):
    """Write products plus a bias, rounded; if `adding`, add them to the present values and round again."""
    columns = min(PANEL, out_MN.shape[1] - n)
    whole = columns // WIDE * WIDE
    for r in range(rows):
        for i in range(0, whole, WIDE):
            y = load16(sums_MX, r, i)
            if bias_LN.shape[1] > 0:
                y = add16(y, load16(bias_LN, layer, n + i))
            y = round16(out_MN, y)
            if adding:
                y = add16(load16(out_MN, m + r, n + i), y)
            store16(out_MN, m + r, n + i, y)
        for i in range(whole, columns):
            one = sums_MX[r, i]
            if bias_LN.shape[1] > 0:
                one += load(bias_LN[layer, n + i])
            if adding:
                one = load(out_MN[m + r, n + i]) + load(store(out_MN[0, 0], one))
            out_MN[m + r, n + i] = store(out_MN[0, 0], one)


@njit(nogil=True, cache=True, error_model="numpy")
def _write_gated(sums_MX, rows, gelu, out_MF, m, f):
    """Write activation(gate) * up as in `elementwise.activation_mul`, from a panel with sixteen outputs of each."""
    for r in range(rows):
        g, u = round16(out_MF, load16(sums_MX, r, 0)), round16(out_MF, load16(sums_MX, r, WIDE))
        store16(out_MF, m + r, f, mul16(round16(out_MF, activation16(g, gelu)), u))


@njit(nogil=True, cache=True)
def _multiply(turn, piece, x_MK, levels, weight, how, bias_LN, layer, out_MN, kind, space):
    """Compute one panel's products for one group of rows.

    `kind`: 0 writes the products, 1 adds them to the present values, 2 gates them with SiLU, 3 with GELU. For integer products (`how`),
    `levels` already holds the rows' levels and scales.
    """
    rows_in_line, sums_MX, wide, place = space
    inputs, halves = filled_up(x_MK.shape[1]), x_MK.itemsize == 2
    panels = _parts(out_MN.shape[1], WIDE if kind >= 2 else PANEL)
    group, panel = piece // panels, piece % panels
    size = _rows_of_piece(inputs)
    m = group * size
    rows = min(size, x_MK.shape[0] - m)
    whole = _parts(x_MK.shape[1], INT8_BLOCK) * INT8_BLOCK
    if place[0] != turn or place[1] != group:
        line = rows_in_line.reshape(-1)[: rows * inputs].reshape(rows, inputs)
        if how >= INT8:
            place[2], place[3] = prepare_levels(levels[0], m, rows, whole, how, line)
        else:
            place[2], place[3] = prepare_rows(x_MK, m, rows, inputs, how, line)
        place[0], place[1] = turn, group
    if how >= INT8:
        at = weight + panel * PANEL * (whole + 4 * HEADER)
        int8_panel_products(place[2], place[3], levels[1], m, rows, whole, at, how, sums_MX)
    else:
        at = weight + panel * PANEL * inputs * x_MK.itemsize
        panel_sums(place[2], place[3], rows, at, inputs, how, halves, sums_MX, wide)
    if kind >= 2:
        _write_gated(sums_MX, rows, kind == 3, out_MN, m, panel * WIDE)
    else:
        _write_rows(sums_MX, rows, bias_LN, layer, out_MN, m, panel * PANEL, kind == 1)


@njit(nogil=True, cache=True)
def _quantise(x_MK, piece, levels):
    """Compute the levels and scales of a piece's rows."""
    a, b = piece * _TOKENS, min((piece + 1) * _TOKENS, x_MK.shape[0])
    to_levels(x_MK[a:b], levels[0][a:b], levels[1][a:b])


@njit(nogil=True, cache=True)
def project(counters, x_MK, levels, weight, how, bias_LN, out_MN):
    """Fill out_MN [M, N] with the products of rows and a weight in panels, plus a bias [1, N] ([1, 0] for none), all of one dtype.

    `counters` has two rows; `levels` are buffers for the rows' levels and scales, as in `decoder`.
    """
    space = workspace(x_MK.shape[0], x_MK.shape[1])
    if how >= INT8:
        pieces = _parts(x_MK.shape[0], _TOKENS)
        while True:
            piece = claim(counters, 1)
            if piece >= pieces:
                break
            _quantise(x_MK, piece, levels)
            finished(counters, 1)
        await_all(counters, 1, pieces)
    pieces = _product_pieces(x_MK.shape[0], x_MK.shape[1], _parts(out_MN.shape[1], PANEL))
    while True:
        piece = claim(counters, 0)
        if piece >= pieces:
            break
        _multiply(0, piece, x_MK, levels, weight, how, bias_LN, 0, out_MN, 0, space)
        finished(counters, 0)
    await_all(counters, 0, pieces)


@inlined
def _product_pieces(rows, inputs, panels):
    return panels * _parts(rows, _rows_of_piece(filled_up(inputs)))


@njit(nogil=True, cache=True)
def _write_cache(k_NX, qkv_NW, places_3P, first, last, keys, values):
    """Write the keys and values of places [first, last) to their blocks; `places_3P` is (tokens, blocks, offsets)."""
    kv, dim = keys.shape[1], keys.shape[2]
    begin = qkv_NW.shape[1] - kv * dim
    for p in range(first, last):
        n, b, j = places_3P[0, p], places_3P[1, p], places_3P[2, p]
        for head in range(kv):
            for d in range(dim):
                keys[b, head, d, j] = k_NX[n, head * dim + d]
                values[b, head, j, d] = qkv_NW[n, begin + head * dim + d]


@inlined
def _pieces(part, rows, inputs, panels, heads, places, how):
    """Return the number of pieces of work in a phase; `inputs` and `panels` are those of the phase's product."""
    if part == 1 or part == 6 or part == 8 or part == 10:
        return _product_pieces(rows, inputs, panels)
    if part == 3:
        return _parts(places, _TOKENS)
    if part == 4:
        return _parts(heads, _parts(heads, _ATTENTION_PIECES)) if heads > 0 else 0
    if (part == 5 or part == 9) and how < INT8:
        return 0
    return _parts(rows, _TOKENS)


@inlined
def _attend(dim, block, share, piece, layer, cache, state, place):
    """Compute a piece of the attention phase: some heads of some tiles."""
    caches, blocks, _, tiles, positions, starts, table, scales, windows, _ = cache
    q, k, seen, lse = state[3], state[4], state[5], state[7]
    kv = k.shape[1] // dim
    keys = carray(pointer(caches[layer, 0], q), (blocks, kv, dim, block))
    values = carray(pointer(caches[layer, 1], q), (blocks, kv, block, dim))
    where, size = (positions, starts, table), _parts(len(tiles) * kv, _ATTENTION_PIECES)
    for unit in range(piece * size, min((piece + 1) * size, len(tiles) * kv)):
        tile, head = unit // kv, unit % kv
        after = tiles[min(tile + 1, len(tiles) - 1), 0]
        tile_3 = (tiles[tile, 0], tiles[tile, 1], tiles[tile, 2])
        scale, window = scales[layer], windows[layer]
        attend_head(dim, block, share, q, keys, values, tile_3, after, head, where, scale, window, seen, lse, place)


@inlined
def _compute(dim, block, part, layer, turn, piece, model, cache, state, space):
    """Compute a piece of any other phase."""
    weights, how, bias_qkv, bias_out, none, norms, norm_eps, of_queries, of_keys, head_eps, centred, gelu = model
    x, normed, qkv, q, k, seen, gated, _, cos, sin, levels = state
    rows, kv = len(x), k.shape[1] // dim
    heads = q.shape[1] * dim
    a, b = piece * _TOKENS, min((piece + 1) * _TOKENS, rows)
    if part == 0 or part == 7:
        at = 2 * layer + part // 7
        rms_norm(x[a:b], norms[at : at + 1], norm_eps[at], centred, normed[a:b], np.empty(0, np.float32))
        if how >= INT8:
            _quantise(normed, piece, levels)
    elif part == 1:
        _multiply(turn, piece, normed, levels, weights[layer, 0], how, bias_qkv, layer, qkv, 0, space)
    elif part == 2:
        flat_q, at = q.reshape(rows, heads), slice(layer, layer + 1)
        rotate(qkv[a:b], 0, q.shape[1], cos[a:b], sin[a:b], of_queries[at], head_eps[0], centred, flat_q[a:b])
        rotate(qkv[a:b], heads, kv, cos[a:b], sin[a:b], of_keys[at], head_eps[1], centred, k[a:b])
    elif part == 3:
        caches, blocks, places = cache[0], cache[1], cache[2]
        keys = carray(pointer(caches[layer, 0], q), (blocks, kv, dim, block))
        values = carray(pointer(caches[layer, 1], q), (blocks, kv, block, dim))
        _write_cache(k, qkv, places, a, min((piece + 1) * _TOKENS, places.shape[1]), keys, values)
    elif part == 5 or part == 9:
        _quantise(seen.reshape(rows, heads) if part == 5 else gated, piece, levels)
    elif part == 6:
        _multiply(turn, piece, seen.reshape(rows, heads), levels, weights[layer, 1], how, bias_out, layer, x, 1, space)
    elif part == 8:
        gate = 3 if gelu else 2
        _multiply(turn, piece, normed, levels, weights[layer, 2], how, none, layer, gated, gate, space)
    else:
        _multiply(turn, piece, gated, levels, weights[layer, 3], how, none, layer, x, 1, space)


@lru_cache
def decoder(dim, block, share):
    """Return the kernel for one head size, block size and number of query heads per key head.

    ``run(first, last, counters, model, cache, state)`` computes phases [first, last), with `PHASES` per layer; one more phase after the
    last layer is the final norm. Each call needs its own `counters`, with a row per phase of the call. The other arguments are tuples:

    - `model`: addresses of the four weights in panels [L, 4], and how they are multiplied (`product`, `int8_product`); biases of qkv
      [L, W] and of the attention output [L, D], or [L, 0] each, and an empty one [L, 0]; norms [2 L + 1, D] and their epsilons; the head
      norms of queries and of keys, [L, dim] or [L, 0], and their epsilons [2]; whether norm weights are zero-centred; whether the
      activation is GELU.
    - `cache`: addresses of each layer's keys and values [L, 2]; the number of blocks; places [3, P]; tiles, positions, where, table as in
      `attention`; scales and windows [L]; the longest sequence.
    - `state`: x [N, D], which is changed; buffers for normed [N, D], qkv [N, W], q [N, H, dim], k [N, KV dim], the attention output
      [N, H, dim], gated [N, F] and log-sums [N, H]; cosines and sines [N, dim]; for integer products, buffers for levels [N, S] (uint8,
      S the most inputs of a product, padded to `INT8_BLOCK`) and scales [N], else two empty arrays.
    """

    @njit(nogil=True, cache=True, error_model="numpy")
    def run(first, last, counters, model, cache, state):
        x, qkv, k, gated = state[0], state[2], state[4], state[6]
        heads, places = len(cache[3]) * (k.shape[1] // dim), cache[2].shape[1]
        width, inner, seen = x.shape[1], gated.shape[1], state[3].shape[1] * dim
        space = workspace(len(x), max(width, inner, seen))
        place = attention_buffers(dim, block, share, cache[9])
        across = _parts(width, PANEL)
        panels = (0, _parts(qkv.shape[1], PANEL), 0, 0, 0, 0, across, 0, inner // WIDE, 0, across)
        inputs = (1, width, 1, 1, 1, 1, seen, 1, width, 1, inner)
        how = model[1]
        for phase in range(first, last):
            layer, part, turn = phase // PHASES, phase % PHASES, phase - first
            pieces = _pieces(part, len(x), inputs[part], panels[part], heads, places, how)
            while True:
                piece = claim(counters, turn)
                if piece >= pieces:
                    break
                if part == 4:
                    _attend(dim, block, share, piece, layer, cache, state, place)
                else:
                    _compute(dim, block, part, layer, turn, piece, model, cache, state, space)
                finished(counters, turn)
            await_all(counters, turn, pieces)

    return run
