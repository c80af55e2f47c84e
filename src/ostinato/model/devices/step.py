"""One decoding step over the cache: its numbers in one tensor, and the attention that reads them. Needs no model code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ostinato.model.devices.cache import CachedLayer
from ostinato.model.paged import PagedEntry


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """The numbers of one step, in one tensor on the device [R, 4 + B]: id, position, slot, length, then the blocks."""

    numbers: Tensor

    @property
    def ids_R(self) -> Tensor:
        """Token ids."""
        return self.numbers[:, 0]

    @property
    def positions_R(self) -> Tensor:
        """Each token's index in its own sequence."""
        return self.numbers[:, 1]

    @property
    def slots_R(self) -> Tensor:
        """The cache slots that the tokens' keys and values go to."""
        return self.numbers[:, 2]

    @property
    def lengths_R(self) -> Tensor:
        """The tokens of each sequence, this one included."""
        return self.numbers[:, 3]

    @property
    def table_RB(self) -> Tensor:
        """The blocks of each sequence."""
        return self.numbers[:, 4:]


def numbers_of(
    ids: Sequence[int], entries: Sequence[PagedEntry], block: int, rows: int, blocks: int, spare: int
) -> NDArray[np.int64]:
    """A step's numbers for one token per entry, [rows, 4 + blocks]; rows after them compute a token of the block `spare`."""
    made = np.zeros((rows, 4 + blocks), np.int64)
    made[:, 2:5] = spare * block, 1, spare
    for row, entry in enumerate(entries):
        made[row, :4] = (
            ids[row],
            entry.start,
            entry.blocks[entry.start // block] * block + entry.start % block,
            entry.end,
        )
        held = entry.blocks[: -(-entry.end // block)]
        made[row, 4 : 4 + len(held)] = held
    return made


class StepAttend:
    """Attention of one step over the cache: the model's `attend`. All that changes between steps is in the step's tensor."""

    def __init__(self, layers: Sequence[CachedLayer], block: int, step: DecodingStep) -> None:
        self._layers, self._block, self._step = layers, block, step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Queries [R, H, D], keys and values [R, KV, D] -> [R, H, D]; the keys and values are in the cache afterwards."""
        from ostinato.model.devices.paged_kernel import attend  # here, because only torch's CUDA builds bring Triton

        held, step = self._layers[layer], self._step
        held.keys.index_copy_(0, step.slots_R, k)
        held.values.index_copy_(0, step.slots_R, v)
        return attend(q, held.keys, held.values, step.table_RB, step.lengths_R, self._block, scale, window)
