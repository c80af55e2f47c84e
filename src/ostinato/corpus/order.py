"""The reading order of token shards: a deterministic function of the seed and the step, so that reading can resume at any step.

Data flow: each corpus's documents, cut into stretches -> the stretches, reshuffled each epoch, as one endless sequence of predictions ->
windows of the phase's length, each taken from the corpus that is furthest behind its share of the mixture -> steps of `batch_tokens`.

A document of n tokens has n - 1 next-token predictions. A piece is a part of one stretch, at most a window long, and independent of other
pieces, so there is no padding, and a step may begin and end within a stretch. A piece that continues a document begins with the last token
of the piece before it, so that every prediction is made once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
# an arbitrary salt, so that the split does not correlate with the order
_SPLIT_SALT = 0x68656C64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPiece:
    """Predictions [start, stop) of a document of a corpus: its tokens [start, stop + 1).

    Example: ``ReadPiece(corpus=0, document=3, start=0, stop=511)``
    """

    corpus: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of training with one window length (context length). `share`: its share of the steps, relative to the other phases.

    Example: ``(Phase(length=512, share=3), Phase(length=1024, share=1))``: the last quarter of the steps has longer windows.
    """

    length: int
    share: float = 1.0


def salted_hash(values: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """Hash 64-bit numbers with a salt (splitmix64, Steele et al. 2014). The result is the same on every machine and numpy version."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(salt % 2**64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def held_out(digests_D: Ints, share: float) -> NDArray[np.bool_]:
    """Return [D]: True for held-out documents (evaluation only). Depends on each document's digest alone, not on the rest of the corpus."""
    return salted_hash(digests_D.astype(np.uint64), _SPLIT_SALT) < np.uint64(int(share * (2**64 - 1)))


class EndlessOrder:
    """One corpus's predictions as an endless sequence: each epoch reads all stretches once, shard by shard, with both reshuffled per epoch.

    A stretch is the part of a document between two multiples of `longest`. Stretches are shuffled rather than documents; otherwise a step
    would read mostly one long file, whose tokens give much the same gradient.

    Args:
        corpus: the corpus's index, for the pieces.
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
        self._keys = salted_hash(digests_D[self._documents].astype(np.uint64), 0) + numbers.astype(np.uint64)
        self.length = int(predictions.sum())
        self._epoch = -1
        self._order = self._ends = np.empty(0, np.int64)

    def pieces(self, position: int, count: int, length: int) -> list[ReadPiece]:
        """Return predictions [position, position + count) of the sequence, in pieces of at most `length`."""
        result: list[ReadPiece] = []
        while count:
            epoch, at = divmod(position, self.length)
            self._shuffle_epoch(epoch)
            place = int(np.searchsorted(self._ends, at, side="right"))
            which = int(self._order[place])
            size = int(self._sizes[which])
            within = at - (int(self._ends[place]) - size)
            taken = min(count, size - within, length - within % length)
            start = int(self._starts[which]) + within
            document = int(self._documents[which])
            result.append(ReadPiece(corpus=self._corpus, document=document, start=start, stop=start + taken))
            position, count = position + taken, count - taken
        return result

    def _shuffle_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        salt = (self._seed << 20) + epoch
        of_shard = salted_hash(self._shards.astype(np.uint64), salt)
        self._order = np.lexsort((salted_hash(self._keys, salt), self._shards, of_shard))
        self._ends = self._sizes[self._order].cumsum()
        self._epoch = epoch


class ReadingOrder:
    """The pieces that each step reads.

    Args:
        rows: one sequence per corpus.
        weights: each corpus's share of the tokens, positive; they need not add up to 1.
        phases: in order. `batch_tokens` must be a multiple of each length.
        batch_tokens: predictions per step.
        steps: total number of steps, divided among the phases.

    Example: ``order.pieces(17)`` returns the pieces of step 17 (from 0), whatever was asked before.
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
        """Return the window length at this step, in predictions."""
        for phase, end in zip(self._phases, self._ends, strict=True):
            if step < end:
                return phase.length
        return self._phases[-1].length

    def pieces(self, step: int) -> list[ReadPiece]:
        """Return the pieces of a step, `batch_tokens` predictions in total."""
        if step < self._next:
            self._next, self._positions = 0, [0] * len(self._rows)
        while self._next < step:
            self._draw()
        length, drawn = self.length(step), self._draw()
        return [piece for row, at, count in drawn for piece in self._rows[row].pieces(at, count, length)]

    def _draw(self) -> list[tuple[int, int, int]]:
        """Advance by one step. Return its (row, position, predictions): each window is taken from the row furthest behind its weight."""
        length, before = self.length(self._next), list(self._positions)
        for _ in range(self._batch // length):
            after = sum(self._positions) + length
            behind = [weight * after - at for weight, at in zip(self._weights, self._positions, strict=True)]
            self._positions[max(range(len(behind)), key=behind.__getitem__)] += length
        self._next += 1
        return [(row, at, self._positions[row] - at) for row, at in enumerate(before) if self._positions[row] > at]
