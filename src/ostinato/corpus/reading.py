"""Reads a mixture of corpora: batches of token pieces by step, and held-out pieces for evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ostinato.core.errors import BadConfig
from ostinato.corpus.order import EndlessOrder, Phase, ReadingOrder, ReadPiece, held_out
from ostinato.corpus.shards import ShardSet

Tokens = tuple[int, ...]


class CorpusReader:
    """Reads a mixture of corpora. Memory: one shard of each corpus, 24 bytes a document and 56 a stretch of the longest phase's length.

    Args:
        corpora: all built with the same tokenizer.
        weights: each corpus's share of the tokens.
        phases: lengths of windows, in order.
        batch_tokens: predictions per step.
        steps: total number of steps.
        share: the share of documents that are held out, chosen by their digests.
        seed: seed of the order.

    Raises BadConfig for different tokenizers, or a corpus too small to hold some documents out and read the rest.

    Example::

        reader = CorpusReader([ShardSet(Path("corpus"))], [1.0], [Phase(length=512)], batch_tokens=8192, steps=100, share=0.01, seed=0)
        reader.batch(17)  # the pieces of step 17, each a tuple of tokens: the first is given, the others are predicted
    """

    def __init__(
        self,
        corpora: Sequence[ShardSet],
        weights: Sequence[float],
        phases: Sequence[Phase],
        *,
        batch_tokens: int,
        steps: int,
        share: float,
        seed: int,
    ) -> None:
        if len({(each.manifest.tokenizer, each.manifest.separator) for each in corpora}) != 1:
            raise BadConfig("--corpus: the corpora were made with different tokenizers; build them for one model")
        self._corpora, self._weights = corpora, weights
        self._longest = max(phase.length for phase in phases)
        rows: list[EndlessOrder] = []
        self._held: list[EndlessOrder] = []
        for number, each in enumerate(corpora):
            apart = held_out(each.digests_D, share)
            if apart.all() or (share and not apart.any()):
                raise BadConfig(
                    f"--held-out {share:g} of the {len(apart)} files in {each.directory} leaves {int((~apart).sum())} to read and "
                    f"{int(apart.sum())} to measure on, and it takes some of both: give another share, or more files"
                )
            arrays = (each.sizes_D, each.digests_D, each.shards_D)
            rows.append(EndlessOrder(number, *arrays, np.flatnonzero(~apart), longest=self._longest, seed=seed))
            self._held.append(EndlessOrder(number, *arrays, np.flatnonzero(apart), longest=self._longest, seed=0))
        self._rows = rows
        self._order = ReadingOrder(rows, weights, phases, batch_tokens=batch_tokens, steps=steps)

    def epochs(self, predictions: int) -> float:
        """The number of epochs, after so many predictions, of the corpus that is repeated most."""
        total = sum(self._weights)
        return max(predictions * w / total / row.length for w, row in zip(self._weights, self._rows, strict=True))

    def batch(self, step: int) -> list[Tokens]:
        """The pieces of a step (from 0), `batch_tokens` predictions in total."""
        return self._tokens(self._order.pieces(step))

    def held_out(self, predictions: int) -> list[Tokens]:
        """Pieces from anywhere in the held-out documents: about this many predictions, by the mixture's weights.

        They are the same for every seed.
        """
        found: list[Tokens] = []
        for row, weight in zip(self._held, self._weights, strict=True):
            wanted = math.ceil(predictions * weight / sum(self._weights))
            found += self._tokens(row.pieces(0, min(wanted, row.length), self._longest))
        return found

    def _tokens(self, pieces: Sequence[ReadPiece]) -> list[Tokens]:
        found = (self._corpora[each.corpus].tokens(each.document, each.start, each.stop + 1) for each in pieces)
        return [tuple(tokens.tolist()) for tokens in found]
