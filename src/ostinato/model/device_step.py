"""Decoding steps over the cache: a step's numbers in one tensor, and whole steps as CUDA graphs.

One token's attention reads keys and values in blocks (`paged_triton`). A forward pass of one token per sequence is recorded once, as a CUDA
graph, then replayed with other numbers. A step takes the host far longer to launch than a GPU to compute. A recorded pass is launched at
once. It holds for one model, up to a number of rows and of blocks per sequence; spare rows write to a block of their own, which no sequence
holds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.model.attention import hidden
from ostinato.model.device_attention import CachedLayer
from ostinato.model.paged import PagedEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        from ostinato.model.paged_triton import attend  # here, because only torch's CUDA builds bring Triton

        held, step = self._layers[layer], self._step
        held.keys.index_copy_(0, step.slots_R, k)
        held.values.index_copy_(0, step.slots_R, v)
        return attend(q, held.keys, held.values, step.table_RB, step.lengths_R, self._block, scale, window)


# ---------------------------------------------------------------- decoding


_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_BLOCKS = 128  # fewest columns of a table of blocks; unused ones are not read
_LOG = logging.getLogger(__name__)


def rounded_rows(rows: int) -> int:
    """The rows of the recorded pass that computes `rows` rows."""
    return next((size for size in _ROWS if size >= rows), -(-rows // 128) * 128)


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """A recorded pass: it reads `step` and writes `states_RD`."""

    graph: Any
    step: DecodingStep
    states_RD: Tensor


class Decoding:
    """The recorded passes over one cache, whose block `spare` belongs to no sequence.

    They share one pool of memory, which is sound because one runs at a time and its result is copied before the next. A model's passes go
    with the model. A model whose first pass fails is not recorded: its steps are launched as any others.
    """

    def __init__(self, layers: Sequence[CachedLayer], block: int, spare: int) -> None:
        self._layers, self._block, self._spare = layers, block, spare
        self._made: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, int], RecordedPass]] = WeakKeyDictionary()
        self._pool: Any = None
        self._failed: WeakSet[PreTrainedModel] = WeakSet()
        self._one = Lock()  # two versions' parts of a step may run on two threads

    @torch.inference_mode()
    def run(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> Tensor | None:
        """The final states [R, hidden] of one token per entry; None for a model that cannot be recorded."""
        with self._one:
            return None if model in self._failed else self._run(model, ids, entries)

    def _run(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> Tensor | None:
        most = max(-(-entry.end // self._block) for entry in entries)
        rows, blocks = rounded_rows(len(entries)), max(_BLOCKS, 1 << (most - 1).bit_length())
        passes = self._made.setdefault(model, {})
        found = passes.get((rows, blocks)) or self._record(model, rows, blocks)
        if found is None:
            return None
        passes[rows, blocks] = found
        numbers = numbers_of(ids, entries, self._block, rows, blocks, self._spare)
        found.step.numbers.copy_(torch.from_numpy(numbers))
        found.graph.replay()
        return found.states_RD[: len(entries)].clone()  # recorded passes share their memory

    def _record(self, model: PreTrainedModel, rows: int, blocks: int) -> RecordedPass | None:
        empty = torch.from_numpy(numbers_of((), (), self._block, rows, blocks, self._spare))
        step = DecodingStep(empty.to(model.device))
        attend = StepAttend(self._layers, self._block, step)
        with torch.cuda.device(model.device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(aside):  # kernels are compiled and libraries set up before the recording
                    hidden(model, step.ids_R, step.positions_R, attend)
            except Exception:  # noqa: BLE001 (whatever a compiler or a model of another kind raises, its steps can be launched)
                _LOG.exception("decoding steps are not recorded for this version, and so are slower")
                self._failed.add(model)
                return None
            torch.cuda.current_stream().wait_stream(aside)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # another thread may be building the next version's model: only this thread's calls may spoil the recording
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                states_RD = hidden(model, step.ids_R, step.positions_R, attend)
        return RecordedPass(graph, step, states_RD)
