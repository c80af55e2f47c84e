"""Paged attention on the CPU, the kernel's interface to torch: which tokens read which blocks, and the call of the kernel.

Engine and trainer describe their work in the same form, `PagedEntry`: a run of tokens of one sequence, and the blocks that hold the
sequence so far. The engine's blocks are its KV cache; the trainer lays out a packed batch in blocks, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.model.cpu import spread
from ostinato.model.kernels.attention import QUERIES, attention, write

_MIN_PAIRS = 4096  # query-key pairs below which a second thread costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedEntry:
    """The tokens of one sequence in one forward pass: positions [start, end), and the blocks of positions [0, end) in order.

    Example: ``PagedEntry(start=96, end=97, blocks=(4, 9, 2, 7))`` is one decode token with 32 tokens per block.
    """

    start: int
    end: int
    blocks: Sequence[int]


class Reads:
    """The blocks that each token reads in one flattened forward pass over `entries`: computed once, used by every layer.

    Token n is at position `positions_N[n]` and its blocks begin at `table[where_N[n]]`. `queries` and `longest` are kernel arguments.
    """

    def __init__(self, entries: Sequence[PagedEntry], block: int) -> None:
        self.block = block
        table: list[int] = []
        where: list[int] = []
        positions: list[int] = []
        for entry in entries:
            where += [len(table)] * (entry.end - entry.start)
            positions += range(entry.start, entry.end)
            table += entry.blocks
        tiles = np.array(_tiles(entries, block), np.int64).reshape(-1, 3)
        self.tokens = len(positions)
        self.positions_N, self.where_N = np.array(positions, np.int64), np.array(where, np.int64)
        self.table = np.array(table, np.int64)
        self.queries = (tiles, self.positions_N, self.where_N, self.table)
        pairs = self.positions_N.cumsum()[tiles[:, :2].sum(1) - 1] if len(tiles) else np.zeros(0, np.int64)
        self._pairs = np.concatenate([[0], pairs])
        self.longest = max((-(-entry.end // block) for entry in entries), default=0) * block

    def attend(self, q: Tensor, held: Blocks, scale: float, window: int) -> tuple[Tensor, Tensor]:
        """Compute the attention of all tokens.

        Args:
            q: [N, H, D]; rows after `self.tokens` are padding and get zeros.
            held: the keys and values, in the blocks that `entries` name.
            scale: multiplies the queries.
            window: the number of positions that a token sees, 0 for all.

        Returns:
            [N, H, D] in q's dtype, and the fp32 log-sum-exp of the scores [N, H].
        """
        q = q.contiguous()
        out = torch.empty_like(q)
        out[self.tokens :] = 0
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        run = attention(q.shape[2], self.block, q.shape[1] // held.keys.shape[1])
        arrays = (array(q), held.keys_array, held.values_array, *self.queries)
        rest = (np.float32(scale), window, array(out), lse.numpy(), self.longest)
        spread(self._cuts(), lambda a, b: run(*arrays, a, b, *rest))
        return out, lse

    def _cuts(self) -> list[int]:
        """Return the boundaries at which tiles are divided among threads, balanced by query-key pairs."""
        threads = torch.get_num_threads()
        if threads == 1 or self._pairs[-1] < _MIN_PAIRS:
            return [0, len(self.queries[0])]
        marks = np.linspace(0, self._pairs[-1], threads + 1)[1:-1]
        return [0, *np.searchsorted(self._pairs, marks).tolist(), len(self.queries[0])]


def _tiles(entries: Sequence[PagedEntry], block: int) -> list[tuple[int, int, int]]:
    """Return tiles (first query, number of queries, shared leading blocks): a run of one sequence, or rows that share a prompt."""
    tiles: list[tuple[int, int, int]] = []
    previous: PagedEntry | None = None  # the single query that the last tile ends with
    at = 0
    for entry in entries:
        size = entry.end - entry.start
        together = 0
        if size == 1 and previous is not None and tiles[-1][1] < QUERIES:
            together = _common(previous.blocks, entry.blocks, min(tiles[-1][2], entry.start // block + 1))
        if together:
            tiles[-1] = (tiles[-1][0], tiles[-1][1] + 1, together)
        else:
            for position in range(entry.start, entry.end, QUERIES):
                count = min(QUERIES, entry.end - position)
                tiles.append((at + position - entry.start, count, (position + count - 1) // block + 1))
        previous = entry if size == 1 else None
        at += size
    return tiles


def _common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Return the length of the common prefix, at most `most`."""
    for count in range(most):
        if a[count] != b[count]:
            return count
    return most


def array(x: Tensor) -> NDArray[Any]:
    """Return the tensor's memory as an array for a kernel: fp32 as it is, bf16 as uint16."""
    return x.detach().view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.detach().numpy()


class Blocks:
    """One layer's keys and values for every block. Initially zeros, because 0 x NaN of a masked key would be NaN."""

    __slots__ = ("keys", "keys_array", "values", "values_array")

    def __init__(self, blocks: int, kv_heads: int, block: int, dim: int, dtype: torch.dtype) -> None:
        self.keys = torch.zeros((blocks, kv_heads, dim, block), dtype=dtype)
        self.values = torch.zeros((blocks, kv_heads, block, dim), dtype=dtype)
        self.keys_array, self.values_array = array(self.keys), array(self.values)

    def write(self, k: Tensor, v: Tensor, places: TokenPlaces) -> None:
        """Write tokens of k and v [N, KV, D] to `places`."""
        write(array(k), array(v), places.tokens, places.blocks, places.offsets, self.keys_array, self.values_array)


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where tokens are written: token `tokens[i]` of the pass to offset `offsets[i]` of block `blocks[i]`. One token may have several."""

    tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @staticmethod
    def of(entries: Sequence[PagedEntry], block: int) -> TokenPlaces:
        """Return the places of each entry's own tokens, in the order of the flattened forward pass."""
        where = [(e.blocks[p // block], p % block) for e in entries for p in range(e.start, e.end)]
        pairs = np.array(where, np.int64).reshape(-1, 2)
        return TokenPlaces(np.arange(len(pairs)), pairs[:, 0].copy(), pairs[:, 1].copy())


@dataclass(frozen=True, slots=True)
class PagedCache:
    """All data of paged attention: the reads, the places of writes, and the blocks of each layer."""

    reads: Reads
    places: TokenPlaces
    layers: Sequence[Blocks]


class PagedAttend:
    """Attention of one flattened forward pass over `entries`, whose keys and values it writes: the model's `attend`.

    Indices are computed once per pass instead of once per layer. `blocks(layer, kv_heads, dim, dtype)` returns a layer's blocks.
    """

    def __init__(
        self, entries: Sequence[PagedEntry], block: int, blocks: Callable[[int, int, int, torch.dtype], Blocks]
    ) -> None:
        self._reads, self._places, self._blocks = Reads(entries, block), TokenPlaces.of(entries, block), blocks

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Attend: queries [N, H, D], keys and values [N, KV, D] -> [N, H, D]. Writes the keys and values to the blocks."""
        held = self._blocks(layer, k.shape[1], k.shape[2], k.dtype)
        held.write(k, v, self._places)
        return self._reads.attend(q, held, scale, window)[0]

    def pages(self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> PagedCache:
        """Return the data of this attention, for code that computes all layers in one call."""
        held = [self._blocks(layer, kv_heads, dim, dtype) for layer in range(layers)]
        return PagedCache(self._reads, self._places, held)


class WholeAttend(PagedAttend):
    """Causal attention over whole concatenated sequences, with the same arithmetic as in engine and trainer.

    Example: ``hidden(model, ids_N, positions_N, WholeAttend([5, 3]))`` for a sequence of 5 tokens and one of 3.
    """

    def __init__(self, lengths: Sequence[int], block: int = 32) -> None:
        ends = np.cumsum([0, *(-(-length // block) for length in lengths)]).tolist()
        entries = [
            PagedEntry(start=0, end=length, blocks=range(*places))
            for length, places in zip(lengths, pairwise(ends), strict=True)
        ]
        super().__init__(
            entries, block, lambda layer, kv_heads, dim, dtype: Blocks(ends[-1], kv_heads, block, dim, dtype)
        )
