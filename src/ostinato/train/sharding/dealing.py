"""Assigns chunks to the ranks that publish them, and moves the pieces: a chunk is divided if it holds rows of several ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.core.weights import CHUNK_ELEMENTS, ITEMSIZES, ChunkName, Form
from ostinato.train.sharding.balance import rows_of
from ostinato.train.sharding.group import RankGroup


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Elements [`first`, `last`) of a tensor, which `rank` has: a whole chunk, or a part of one."""

    rank: int
    first: int
    last: int


def pieces_of(shape: tuple[int, ...], ranks: int) -> list[list[TensorPiece]]:
    """For each chunk of a tensor that is divided by rows, the pieces that it consists of, in order.

    Example: 5 rows of 2^20 elements on 2 ranks are three chunks: rows 0 and 1, rows 2 of the first and 3 of the second rank, row 4.
    """
    total, width = math.prod(shape), math.prod(shape[1:])
    spans = [tuple(row * width for row in rows_of(shape[0], ranks, rank)) for rank in range(ranks)]
    found: list[list[TensorPiece]] = []
    for start in range(0, total, CHUNK_ELEMENTS):
        end = min(start + CHUNK_ELEMENTS, total)
        cut = [(rank, max(start, first), min(end, last)) for rank, (first, last) in enumerate(spans)]
        found.append([TensorPiece(*piece) for piece in cut if piece[2] > piece[1]])
    return found


def owners(chunks: Mapping[ChunkName, list[TensorPiece]], sizes: Mapping[str, int]) -> dict[ChunkName, int]:
    """The rank that publishes each chunk: of the ranks that have a piece of it, the one with the fewest bytes so far.

    The same on every rank. `sizes`: bytes per element, by tensor. Undivided chunks are assigned first, then divided ones, largest first.
    """
    dealt: dict[ChunkName, int] = {}
    loads: dict[int, int] = dict.fromkeys((piece.rank for pieces in chunks.values() for piece in pieces), 0)

    def size(at: ChunkName) -> int:
        return (chunks[at][-1].last - chunks[at][0].first) * sizes[at[0]]

    for at in sorted(chunks, key=lambda at: (len(chunks[at]) > 1, -size(at), at)):
        rank = min((piece.rank for piece in chunks[at]), key=lambda rank: (loads[rank], rank))
        dealt[at] = rank
        loads[rank] += size(at)
    return dealt


class TensorDealing:
    """The chunks of the tensors of `forms`, each tensor divided by rows over the ranks of `group`.

    Example::

        dealing = TensorDealing({"w": ("BF16", (49152, 576))}, group)
        mine = dealing.chunks(lambda name: rows[name])
    """

    def __init__(self, forms: Mapping[str, Form], group: RankGroup) -> None:
        self._group = group
        self._sizes = {name: ITEMSIZES[dtype] for name, (dtype, _) in forms.items()}
        self._starts = {name: _first_element(shape, group) for name, (_, shape) in forms.items()}
        self._pieces = {
            (name, index): pieces
            for name, (_, shape) in sorted(forms.items())
            for index, pieces in enumerate(pieces_of(shape, group.count))
        }
        self._owners = owners(self._pieces, self._sizes)

    def chunks(self, rows: Callable[[str], Tensor]) -> dict[ChunkName, NDArray[np.uint8]]:
        """The chunks that this rank publishes. All ranks call it together; `rows` gives a tensor's own rows in the published dtype."""
        mine: dict[ChunkName, NDArray[np.uint8]] = {}
        for name, group in itertools.groupby(self._pieces.items(), lambda item: item[0][0]):
            own = rows(name).reshape(-1).view(torch.uint8)
            for at, pieces in group:
                found = self._brought(at, pieces, own)
                if found is not None:
                    mine[at] = found.numpy()
        return mine

    def _brought(self, at: ChunkName, pieces: list[TensorPiece], own: Tensor) -> Tensor | None:
        """The chunk, on its owner; None elsewhere. All ranks visit the chunks in the same order, so that they cannot deadlock."""
        owner, size, start = self._owners[at], self._sizes[at[0]], self._starts[at[0]]
        if self._group.rank != owner:
            for piece in pieces:
                if piece.rank == self._group.rank:
                    self._group.send(own[(piece.first - start) * size : (piece.last - start) * size].clone(), owner)
            return None
        first = pieces[0].first
        whole = torch.empty((pieces[-1].last - first) * size, dtype=torch.uint8)
        for piece in pieces:
            part = whole[(piece.first - first) * size : (piece.last - first) * size]
            if piece.rank == owner:
                part.copy_(own[(piece.first - start) * size : (piece.last - start) * size])
            else:
                self._group.receive(part, piece.rank)
        return whole


def _first_element(shape: tuple[int, ...], group: RankGroup) -> int:
    return rows_of(shape[0], group.count, group.rank)[0] * math.prod(shape[1:])
