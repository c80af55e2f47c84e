"""How many processes take one step together, and what they must agree on. One process agrees with itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ostinato.train.batch.microbatch import Microbatch


class Ranks(Protocol):
    """The processes that share one model's training. Every rank calls the same methods in the same order."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def rank(self) -> int:
        """Which of them this process is, from 0 on; the first speaks to log and store."""
        ...

    def share(self, work: Sequence[Microbatch]) -> list[Microbatch]:
        """What this rank computes of the whole, as many on every rank: the last ones may teach nothing."""
        ...

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        ...

    def exchange(
        self, work: Sequence[Microbatch], mine: Sequence[Tensor], *, each: int, extra: int = 0
    ) -> list[Tensor]:
        """One tensor for each micro-batch of the whole, from the rank that computed it; `mine` are those of this rank's `share`.

        Of a micro-batch with M sampled tokens it has ``each * M + extra`` entries in fp32.
        """
        ...

    def gather(self, said: bytes) -> list[bytes]:
        """What every rank says, on every rank, in the order of the ranks. Nobody goes on before all have spoken."""
        ...


class Alone:
    """One process, which computes everything."""

    count, rank = 1, 0

    def share(self, work: Sequence[Microbatch]) -> list[Microbatch]:
        """All of it."""
        return list(work)

    def any(self, mine: bool) -> bool:
        """As here."""
        return mine

    def exchange(
        self, work: Sequence[Microbatch], mine: Sequence[Tensor], *, each: int, extra: int = 0
    ) -> list[Tensor]:
        """What it computed itself."""
        del work, each, extra
        return list(mine)

    def gather(self, said: bytes) -> list[bytes]:
        """What it says itself."""
        return [said]
