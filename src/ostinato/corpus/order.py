"""The order in which token shards are read: a function of the seed and the step, so that reading can go on from any step. Pure.

Data flow: each set's documents in an order of the epoch's own -> one endless row of predictions -> windows of a phase's length, each from
the set that is furthest behind its share of the mixture -> steps of so many tokens.

A document of n tokens holds n - 1 predictions. A window is cut into pieces where a document ends: a piece knows nothing of the one
before it. A piece that goes on with a document begins with the last token of the piece before it, so that every prediction is made once
an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_HELD_OUT = 0x68656C64  # any number: the split must not follow the order


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPiece:
    """Predictions [start, stop) of a document of a set; its tokens are [start, stop + 1).

    Example: ``ReadPiece(corpus=0, document=3, start=0, stop=511)``
    """

    corpus: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the reading with windows of one length; `share` of the steps, relative to the other phases'.

    Example: ``(Phase(length=512, share=3), Phase(length=1024, share=1))``: the last quarter in longer windows.
    """

    length: int
    share: float = 1.0


def scrambled(values: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers (splitmix64, Steele et al. 2014): the same on every machine and with every library."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(salt % 2**64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def held_out(digests_D: Ints, share: float) -> NDArray[np.bool_]:
    """[D]: the documents that are never read, only measured on. Decided by each one's digest alone, whatever else is in the corpus."""
    return scrambled(digests_D.astype(np.uint64), _HELD_OUT) < np.uint64(int(share * (2**64 - 1)))


class EndlessOrder:
    """One set's predictions in a row without end: all documents once an epoch, shard after shard, both in the epoch's own order.

    Args:
        corpus: the set's number, which the pieces carry.
        sizes_D: tokens of each document, at least 2.
        digests_D: each one's digest.
        shards_D: each one's shard.
        seed: of the order.
    """

    def __init__(self, corpus: int, sizes_D: Ints, digests_D: Ints, shards_D: Ints, documents: Ints, seed: int) -> None:
        self._corpus, self._seed = corpus, seed
        self._predictions = sizes_D[documents] - 1
        self._digests, self._shards, self._documents = digests_D[documents], shards_D[documents], documents
        self.length = int(self._predictions.sum())
        self._epoch = -1
        self._order = self._ends = np.empty(0, np.int64)

    def pieces(self, position: int, count: int) -> list[ReadPiece]:
        """Predictions [position, position + count) of the row."""
        found: list[ReadPiece] = []
        while count:
            epoch, at = divmod(position, self.length)
            self._turn_to(epoch)
            place = int(np.searchsorted(self._ends, at, side="right"))
            which = int(self._order[place])
            size = int(self._predictions[which])
            start = at - (int(self._ends[place]) - size)
            taken = min(count, size - start)
            document = int(self._documents[which])
            found.append(ReadPiece(corpus=self._corpus, document=document, start=start, stop=start + taken))
            position, count = position + taken, count - taken
        return found

    def _turn_to(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        salt = (self._seed << 20) + epoch
        of_document = scrambled(self._digests.astype(np.uint64), salt)
        of_shard = scrambled(self._shards.astype(np.uint64), salt)
        self._order = np.lexsort((of_document, self._shards, of_shard))
        self._ends = self._predictions[self._order].cumsum()
        self._epoch = epoch


class ReadingOrder:
    """Which pieces each step reads.

    Args:
        rows: the sets.
        weights: each one's share of the tokens, positive; they need not add up to 1.
        phases: one after the other. `batch_tokens` must be a multiple of each length.
        batch_tokens: predictions of a step.
        steps: of the whole reading, which is what the phases share.

    Example: ``order.windows(17)`` are the windows of step 17 (from 0), each a list of pieces; asked in any order, the answers are the same.
    """

    def __init__(
        self,
        rows: Sequence[EndlessOrder],
        weights: Sequence[float],
        phases: Sequence[Phase],
        *,
        batch_tokens: int,
        steps: int,
    ) -> None:
        total = sum(weights)
        self._rows, self._weights = rows, [weight / total for weight in weights]
        self._batch, self._phases = batch_tokens, phases
        shares = list(accumulate(phase.share for phase in phases))
        self._ends = [round(steps * share / shares[-1]) for share in shares]
        self._next, self._positions = 0, [0] * len(rows)

    def length(self, step: int) -> int:
        """Predictions of a window at this step."""
        for phase, end in zip(self._phases, self._ends, strict=True):
            if step < end:
                return phase.length
        return self._phases[-1].length

    def windows(self, step: int) -> list[list[ReadPiece]]:
        """The windows of a step."""
        if step < self._next:
            self._next, self._positions = 0, [0] * len(self._rows)
        while self._next < step:
            self._draw()
        return [self._rows[row].pieces(position, length) for row, position, length in self._draw()]

    def _draw(self) -> list[tuple[int, int, int]]:
        length = self.length(self._next)
        drawn: list[tuple[int, int, int]] = []
        for _ in range(self._batch // length):
            after = sum(self._positions) + length
            behind = [weight * after - at for weight, at in zip(self._weights, self._positions, strict=True)]
            row = max(range(len(behind)), key=behind.__getitem__)
            drawn.append((row, self._positions[row], length))
            self._positions[row] += length
        self._next += 1
        return drawn
