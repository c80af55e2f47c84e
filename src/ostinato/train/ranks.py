"""Data-parallel ranks: the processes that take one step together, their exchanges, and the rows of a checkpoint that each writes.

A single process needs no exchange. Any number of ranks can read a checkpoint, whatever number wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ostinato.core.errors import Corrupt
from ostinato.train.microbatch import Microbatch


class Ranks:
    """The processes that share one model's training; here this one alone. `sharding.group` has several.

    Every rank must call the same methods in the same order. `rank` counts from 0; the first rank writes to log and store.
    """

    count = 1
    rank = 0

    def share(self, work: Sequence[Microbatch]) -> list[Microbatch]:
        """Return the micro-batches that this rank computes, the same number on every rank; the last ones may be idle."""
        return list(work)

    def any(self, mine: bool) -> bool:
        """Return True if `mine` is True on any rank."""
        return mine

    def exchange(
        self, work: Sequence[Microbatch], mine: Sequence[Tensor], *, each: int, extra: int = 0
    ) -> list[Tensor]:
        """Return one tensor for each micro-batch of `work`, from the rank that computed it; `mine` are those of this rank's `share`.

        For a micro-batch with M sampled tokens it has ``each * M + extra`` entries in fp32.
        """
        del work, each, extra
        return list(mine)

    def gather(self, said: bytes) -> list[bytes]:
        """Return the bytes of every rank, on every rank, in rank order. No rank continues before all have called it."""
        return [said]


ALONE = Ranks()


# ---------------------------------------------------------------- tensors divided over ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The rows of tensors that a rank has: each tensor's whole shape, and the first of this rank's rows.

    Example: ``RankPart(shapes={"w": (5, 8)}, firsts={"w": 3})`` beside an array "w" of shape (2, 8) is rows 3 and 4 of 5.
    """

    shapes: Mapping[str, tuple[int, ...]]
    firsts: Mapping[str, int]


class Joined(Mapping[str, NDArray[Any]]):
    """Arrays by name, joined from pieces on access; `rows` joins only the requested rows.

    `pieces`: name -> (first row, array) in any order. Raises Corrupt if they are not contiguous from row 0 on.
    """

    def __init__(self, pieces: Mapping[str, list[tuple[int, NDArray[Any]]]]) -> None:
        self._pieces = {name: sorted(parts, key=lambda part: (part[0], len(part[1]))) for name, parts in pieces.items()}
        for name, parts in self._pieces.items():
            at = 0
            for first, array in parts:
                if len(array) and first != at:
                    raise Corrupt(f"the pieces of tensor {name!r} do not meet at row {at}")
                at += len(array)

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Return rows [first, last) of a tensor; a view if one piece has them all."""
        found = [
            array[max(0, first - at) : last - at]
            for at, array in self._pieces[name]
            if at < last and at + len(array) > first
        ]
        if not found:
            return self._pieces[name][0][1][:0]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.rows(name, 0, sum(len(array) for _, array in self._pieces[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
