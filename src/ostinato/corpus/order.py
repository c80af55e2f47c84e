"""The order in which token shards are read: a function of the seed and the step, so that reading can resume at any step.

Data flow: each set's documents, cut into stretches -> the stretches in a different order each epoch, one endless row of predictions ->
windows of a phase's length, each taken from the set that is furthest behind its share of the mixture -> steps of `batch_tokens`.

A document of n tokens holds n - 1 predictions. A piece is a part of one stretch, at most a window long, and independent of other pieces,
so there is no padding, and a step may begin and end within a stretch. A piece that continues a document begins with the last token of the
piece before it, so that every prediction is made once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_HELD_OUT = 0x68656C64  # an arbitrary salt: the split must not correlate with the order


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
    """A phase of reading with windows of one length; `share` is its share of the steps, relative to the other phases.

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
    """[D]: True for documents that are used only for evaluation. Depends on each document's digest alone, not on the rest of the corpus."""
    return scrambled(digests_D.astype(np.uint64), _HELD_OUT) < np.uint64(int(share * (2**64 - 1)))


class EndlessOrder:
    """One set's predictions in an endless row: all stretches once per epoch, shard after shard, with both shuffled anew in each epoch.

    A stretch is the part of a document between two multiples of `longest`. Stretches are shuffled rather than documents, because a step
    would otherwise read mostly one long file, whose tokens give much the same gradient.

    Args:
        corpus: the set's number, which the pieces carry.
        sizes_D: tokens of each document, at least 2.
        digests_D: digest of each document.
        shards_D: shard of each document.
        documents: indices of the documents to read.
        longest: maximum number of predictions in a stretch.
        seed: seed of the order.
    """

    def __init__(
        self, corpus: int, sizes_D: Ints, digests_D: Ints, shards_D: Ints, documents: Ints, *, longest: int, seed: int
    ) -> None:
        self._corpus, self._seed = corpus, seed
        predictions = sizes_D[documents] - 1
        counts = -(-predictions // longest)
        self._documents = np.repeat(documents, counts)
        numbers = np.arange(len(self._documents)) - np.repeat(counts.cumsum() - counts, counts)
        self._starts = numbers * longest
        self._sizes = np.minimum(longest, np.repeat(predictions, counts) - self._starts)
        self._shards = shards_D[self._documents]
        self._keys = scrambled(digests_D[self._documents].astype(np.uint64), 0) + numbers.astype(np.uint64)
        self.length = int(predictions.sum())
        self._epoch = -1
        self._order = self._ends = np.empty(0, np.int64)

    def pieces(self, position: int, count: int, length: int) -> list[ReadPiece]:
        """Predictions [position, position + count) of the row, in pieces of at most `length`."""
        found: list[ReadPiece] = []
        while count:
            epoch, at = divmod(position, self.length)
            self._turn_to(epoch)
            place = int(np.searchsorted(self._ends, at, side="right"))
            which = int(self._order[place])
            size = int(self._sizes[which])
            within = at - (int(self._ends[place]) - size)
            taken = min(count, size - within, length - within % length)
            start = int(self._starts[which]) + within
            document = int(self._documents[which])
            found.append(ReadPiece(corpus=self._corpus, document=document, start=start, stop=start + taken))
            position, count = position + taken, count - taken
        return found

    def _turn_to(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        salt = (self._seed << 20) + epoch
        of_shard = scrambled(self._shards.astype(np.uint64), salt)
        self._order = np.lexsort((scrambled(self._keys, salt), self._shards, of_shard))
        self._ends = self._sizes[self._order].cumsum()
        self._epoch = epoch


class ReadingOrder:
    """The pieces that each step reads.

    Args:
        rows: the sets.
        weights: each set's share of the tokens, positive; they need not add up to 1.
        phases: in order. `batch_tokens` must be a multiple of each length.
        batch_tokens: predictions per step.
        steps: total number of steps, which the phases divide among themselves.

    Example: ``order.pieces(17)`` is what step 17 (from 0) reads; asked in any order, the answers are the same.
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
        """The number of predictions in a window at this step."""
        for phase, end in zip(self._phases, self._ends, strict=True):
            if step < end:
                return phase.length
        return self._phases[-1].length

    def pieces(self, step: int) -> list[ReadPiece]:
        """The pieces that a step reads: `batch_tokens` predictions."""
        if step < self._next:
            self._next, self._positions = 0, [0] * len(self._rows)
        while self._next < step:
            self._draw()
        length, drawn = self.length(step), self._draw()
        return [piece for row, at, count in drawn for piece in self._rows[row].pieces(at, count, length)]

    def _draw(self) -> list[tuple[int, int, int]]:
        """The next step's (row, position, predictions): window after window, each from the row that is furthest behind."""
        length, before = self.length(self._next), list(self._positions)
        for _ in range(self._batch // length):
            after = sum(self._positions) + length
            behind = [weight * after - at for weight, at in zip(self._weights, self._positions, strict=True)]
            self._positions[max(range(len(behind)), key=behind.__getitem__)] += length
        self._next += 1
        return [(row, at, self._positions[row] - at) for row, at in enumerate(before) if self._positions[row] > at]
