"""Attention over a packed token tree: the `Attend` that the trainer passes to the model.

The forward pass lays the tree out in blocks and calls the same kernel as the engine, so its bits are the engine's. The backward
pass uses the same blocks. Memory is a few numbers per token: no array of size queries x keys is ever allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.model.cpu import split
from ostinato.model.kernels.gradients import (
    attention_gradient,
    gather,
    into_blocks,
    into_turned_blocks,
    queries_per_tile,
)
from ostinato.model.paged import Blocks, PagedEntry, Reads, TokenPlaces, array
from ostinato.train.packing import Ints, PackedBatch

BLOCK = 32
"""Tokens per block; any multiple of 16 gives the same bits."""
# parts of the tiles, each with its own sums of the keys' gradients, so that the result does not depend on the number of threads
_PARTS = 2


def _no_op() -> None: ...


class TreeAttention:
    """Callable as the model's `attend`: ``(layer, q[N,H,D], k[N,KV,D], v[N,KV,D], scale, window) -> [N,H,D]``, under autograd.

    `on_layer` is called before each layer, in the forward and in the backward pass; an exception from it ends the pass.

    Example: ``hidden(model, ids_N, positions_N, TreeAttention(packed))``.
    """

    def __init__(self, packed: PackedBatch, *, on_layer: Callable[[], None] = _no_op) -> None:
        self.packed, self.on_layer = packed, on_layer

    @cached_property
    def layout(self) -> Layout:
        """The block layout, built when our kernels need it; torch's operations use the tree itself (`policy.MaskedTree`)."""
        return Layout(self.packed)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Compute attention, the same for every layer; `layer` is part of the seam and not used."""
        del layer
        self.on_layer()
        result: Tensor = _Tree.apply(q, k, v, scale, window, self.layout, self.on_layer)  # pyright: ignore[reportAssignmentType]
        return result


class Layout:
    """The tree in blocks: full blocks of a shared prefix are stored once, the block at a branch once per branch.

    `reads` names the blocks of each token's path. The size grows with the tokens, and by one number per branch and block of its path.
    """

    def __init__(self, packed: PackedBatch) -> None:
        # unbranched runs
        starts = np.flatnonzero(np.diff(packed.positions_N, prepend=packed.positions_N[0]) != 1)
        stops = np.append(starts[1:], packed.tokens)
        branch = np.empty(int(packed.positions_N.max()) + 1, np.int64)  # the current path, from the root
        table: list[int] = []  # the path's blocks
        places: list[tuple[Ints, int]] = []
        self._entries: list[PagedEntry] = []
        for a, b in zip(starts.tolist(), stops.tolist(), strict=True):
            position = int(packed.positions_N[a])
            end = position + b - a
            branch[position:end] = np.arange(a, b)
            del table[position // BLOCK :]
            for start in range(position // BLOCK * BLOCK, end, BLOCK):
                table.append(len(places))
                places.append((branch[start : min(start + BLOCK, end)].copy(), len(places)))
            self._entries.append(PagedEntry(start=position, end=end, blocks=tuple(table)))
        sizes = [len(tokens) for tokens, _ in places]
        self.blocks = len(places)
        self.places = TokenPlaces(
            np.concatenate([tokens for tokens, _ in places]),
            np.repeat(np.arange(self.blocks), sizes),
            np.concatenate([np.arange(size) for size in sizes]),
        )
        self.reads = Reads(self._entries, BLOCK)

    def part(self, queries: Ints, keys: Ints) -> Layout:
        """Return the same tree for the queries of some of its tokens: ``q[i]`` is the query of token `queries[i]`, in ascending order; the
        key and the value of token n are ``k[keys[n]]`` and ``v[keys[n]]``.
        """
        part = copy(self)
        part._entries = _cut(self._entries, queries)
        part.reads = Reads(part._entries, BLOCK)
        part.places = TokenPlaces(keys[self.places.tokens], self.places.blocks, self.places.offsets)
        return part

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
        """Return the output [N, H, D] and the log-sum-exp [N, H]."""
        held = Blocks(self.blocks, k.shape[1], BLOCK, k.shape[2], k.dtype)
        held.write(k, v, self.places)
        return self.reads.attend(q, held, scale, window)

    def tiles(self, queries: int) -> Ints:
        """Return [T, 2]: (first query, count) of runs of at most `queries` adjacent queries on one path."""
        found: list[tuple[int, int]] = []
        first = 0
        for entry in self._entries:
            size = entry.end - entry.start
            found += [(first + at, min(queries, size - at)) for at in range(0, size, queries)]
            first += size
        return np.array(found, np.int64).reshape(-1, 2)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        scale: float,
        window: int,
        sums: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, from the output [N, H, D], its log-sum-exp [N, H] and its gradient [N, H, D].

        `sums`: the dtype of the gradients of k and v, None for their own.
        """
        kv, dim, share = k.shape[1], k.shape[2], q.shape[1] // k.shape[1]
        run, tiles = attention_gradient(dim, BLOCK, share), self.tiles(queries_per_tile(share))
        reads = self.reads
        pairs = np.concatenate([[0], reads.positions_N[tiles.sum(1) - 1].cumsum()])
        cuts = np.searchsorted(pairs, np.linspace(0, pairs[-1], _PARTS + 1))
        cuts[-1] = len(tiles)
        keys = self._spread(k, into_blocks, (BLOCK, dim))
        keys_by_dim, values_by_dim = (self._spread(x, into_turned_blocks, (dim, BLOCK)) for x in (k, v))
        dq = torch.zeros(q.shape, dtype=torch.float32)  # padding after the tree gets no gradient
        dk, dv = (np.zeros((_PARTS, self.blocks, kv, BLOCK, dim), np.float32) for _ in range(2))
        qs, dos, deltas = (x.float().contiguous().numpy() for x in (q, grad, (grad.float() * out.float()).sum(-1)))
        paged = (lse.numpy(), deltas, keys, keys_by_dim, values_by_dim)
        paths = (tiles, reads.positions_N, reads.where_N, reads.table)

        def work(first: int, last: int) -> None:
            for unit in range(first, last):
                head, part = divmod(unit, _PARTS)
                where = (cuts[part], cuts[part + 1], np.float32(scale), window)
                run(head, qs, dos, *paged, *paths, *where, dq.numpy(), dk[part], dv[part])

        split(kv * _PARTS, work)
        return dq.to(q.dtype), self._gather(dk, k, sums), self._gather(dv, v, sums)

    def _spread(self, x: Tensor, put: Callable[..., None], form: tuple[int, int]) -> NDArray[np.float32]:
        out, at = np.zeros((self.blocks, x.shape[1], *form), np.float32), self.places
        put(array(x.contiguous()), at.tokens, at.blocks, at.offsets, out)
        return out

    def _gather(self, parts: NDArray[np.float32], like: Tensor, dtype: torch.dtype | None) -> Tensor:
        out, at = torch.empty(like.shape, dtype=dtype or like.dtype), self.places
        gather(parts, at.tokens, at.blocks, at.offsets, np.zeros(like.shape, np.float32), array(out))
        return out


def _cut(entries: Sequence[PagedEntry], tokens: Ints) -> list[PagedEntry]:
    """Return the runs of `tokens` (ascending indices over all entries), each with the blocks of its path."""
    firsts = np.cumsum([0] + [entry.end - entry.start for entry in entries])
    owners = np.searchsorted(firsts, tokens, side="right") - 1
    starts = np.flatnonzero((np.diff(tokens, prepend=-2) != 1) | (np.diff(owners, prepend=-1) != 0))
    found: list[PagedEntry] = []
    for a, b in pairwise([*starts.tolist(), len(tokens)]):
        owner = int(owners[a])
        entry = entries[owner]
        start = entry.start + int(tokens[a] - firsts[owner])
        end = start + b - a
        found.append(PagedEntry(start=start, end=end, blocks=entry.blocks[: -(-end // BLOCK)]))
    return found


class _Tree(torch.autograd.Function):
    """The engine's kernel as the forward pass, and an explicit backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int,
        layout: Layout,
        on_layer: Callable[[], None],
    ) -> Tensor:
        out, lse = layout.forward(q, k, v, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = scale, window, layout, on_layer
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        scale, window, layout, on_layer = ctx.rest
        on_layer()
        return *layout.backward(q, k, v, out, lse, grads[0], scale, window), None, None, None, None
