"""Several corpora read as one: batches of token pieces by step, and the pieces that are only measured on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.core.errors import BadConfig
from ostinato.corpus.order import EndlessOrder, Ints, Phase, ReadingOrder, held_out
from ostinato.corpus.shards import ShardSet

Tokens = tuple[int, ...]


class CorpusReader:
    """Reads a mixture of corpora. Memory: one shard of each corpus, and 32 bytes a document.

    Args:
        corpora: made with one tokenizer.
        weights: each one's share of the tokens.
        phases: lengths of windows, one after the other.
        batch_tokens: predictions of a step.
        steps: of the whole reading.
        share: of the documents, by their digests, that are held out.
        seed: of the order.

    Raises BadConfig: other tokenizers, or a corpus too small to hold something out and read the rest.

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
        rows: list[EndlessOrder] = []
        self._held: list[Ints] = []
        for number, each in enumerate(corpora):
            apart = held_out(each.digests_D, share)
            if apart.all() or (share and not apart.any()):
                raise BadConfig(
                    f"{each.directory} has {len(apart)} documents, of which a share of {share} held out leaves "
                    f"{int((~apart).sum())} to read and {int(apart.sum())} to measure on: both must be some"
                )
            kept = np.flatnonzero(~apart)
            rows.append(EndlessOrder(number, each.sizes_D, each.digests_D, each.shards_D, kept, seed))
            self._held.append(np.flatnonzero(apart))
        self.predictions = sum(row.length for row in rows)
        self._order = ReadingOrder(rows, weights, phases, batch_tokens=batch_tokens, steps=steps)
        self._longest = max(phase.length for phase in phases)

    def batch(self, step: int) -> list[Tokens]:
        """The pieces of a step, from 0; `batch_tokens` predictions in all."""
        pieces = [piece for window in self._order.windows(step) for piece in window]
        return [self._tokens(piece.corpus, piece.document, piece.start, piece.stop + 1) for piece in pieces]

    def held_out(self, predictions: int) -> list[Tokens]:
        """Pieces of the held-out documents, each document from its start: about so many predictions, by the mixture's weights."""
        found: list[Tokens] = []
        for number, (held, weight) in enumerate(zip(self._held, self._weights, strict=True)):
            wanted = int(predictions * weight / sum(self._weights))
            for document in held.tolist():
                size = int(self._corpora[number].sizes_D[document]) - 1
                for start in range(0, size, self._longest):
                    stop = min(size, start + self._longest, start + wanted)
                    if stop > start:
                        found.append(self._tokens(number, document, start, stop + 1))
                    wanted -= max(0, stop - start)
                if wanted <= 0:
                    break
        return found

    def _tokens(self, corpus: int, document: int, start: int, stop: int) -> Tokens:
        return tuple(self._corpora[corpus].tokens(document, start, stop).tolist())
