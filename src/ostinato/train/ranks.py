"""The processes that take one step together, and the exchanges between them. One process needs none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ostinato.train.microbatch import Microbatch


class Ranks(Protocol):
    """The processes that share one model's training. Every rank calls the same methods in the same order."""

    @property
    def count(self) -> int:
        """The number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This process's rank, from 0 on; the first rank writes to log and store."""
        ...

    def share(self, work: Sequence[Microbatch]) -> list[Microbatch]:
        """The micro-batches that this rank computes, equally many on every rank; the last ones may teach nothing."""
        ...

    def any(self, mine: bool) -> bool:
        """Whether `mine` is True on any rank."""
        ...

    def exchange(
        self, work: Sequence[Microbatch], mine: Sequence[Tensor], *, each: int, extra: int = 0
    ) -> list[Tensor]:
        """One tensor for each micro-batch of `work`, from the rank that computed it; `mine` are those of this rank's `share`.

        For a micro-batch with M sampled tokens it has ``each * M + extra`` entries in fp32.
        """
        ...

    def gather(self, said: bytes) -> list[bytes]:
        """The bytes of every rank, on every rank, in rank order. No rank continues before all have called it."""
        ...


class SingleProcess:
    """One process, which computes everything."""

    count, rank = 1, 0

    def share(self, work: Sequence[Microbatch]) -> list[Microbatch]:
        """All micro-batches."""
        return list(work)

    def any(self, mine: bool) -> bool:
        """`mine` itself."""
        return mine

    def exchange(
        self, work: Sequence[Microbatch], mine: Sequence[Tensor], *, each: int, extra: int = 0
    ) -> list[Tensor]:
        """This process's own tensors."""
        del work, each, extra
        return list(mine)

    def gather(self, said: bytes) -> list[bytes]:
        """This process's own bytes."""
        return [said]
