"""Decoding steps on a GPU as CUDA graphs, with all inputs of a step in one tensor.

Launching a decoding step takes the host far longer than the GPU takes to compute it. So the forward pass of one token per sequence is
captured once as a CUDA graph ("recorded") and then replayed, in one launch, with other inputs. A graph belongs to one model, and to a
maximum number of rows and of blocks per sequence; unused rows write to a spare block that no sequence holds. A token's attention reads
keys and values in blocks (`paged_triton`).
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
    """The inputs of one step in one tensor on the device, [R, 4 + B]: token id, position, cache slot, length, then the block table."""

    numbers: Tensor

    @property
    def ids_R(self) -> Tensor:
        """Token ids."""
        return self.numbers[:, 0]

    @property
    def positions_R(self) -> Tensor:
        """Each token's index in its sequence."""
        return self.numbers[:, 1]

    @property
    def slots_R(self) -> Tensor:
        """The cache slots for the tokens' keys and values."""
        return self.numbers[:, 2]

    @property
    def lengths_R(self) -> Tensor:
        """The length of each sequence, this token included."""
        return self.numbers[:, 3]

    @property
    def table_RB(self) -> Tensor:
        """The block table: the blocks of each sequence."""
        return self.numbers[:, 4:]


def numbers_of(
    ids: Sequence[int], entries: Sequence[PagedEntry], block: int, rows: int, blocks: int, spare: int
) -> NDArray[np.int64]:
    """Return a step's inputs for one token per entry, [rows, 4 + blocks]; the remaining rows compute a token of the block `spare`."""
    numbers = np.zeros((rows, 4 + blocks), np.int64)
    numbers[:, 2:5] = spare * block, 1, spare
    for row, entry in enumerate(entries):
        numbers[row, :4] = (
            ids[row],
            entry.start,
            entry.blocks[entry.start // block] * block + entry.start % block,
            entry.end,
        )
        held = entry.blocks[: -(-entry.end // block)]
        numbers[row, 4 : 4 + len(held)] = held
    return numbers


class StepAttend:
    """Attention of one step over the cache: the model's `attend`. Everything that changes between steps is in the step's tensor."""

    def __init__(self, layers: Sequence[CachedLayer], block: int, step: DecodingStep) -> None:
        self._layers, self._block, self._step = layers, block, step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Attend: queries [R, H, D], keys and values [R, KV, D] -> [R, H, D]. Writes the keys and values to the cache."""
        from ostinato.model.paged_triton import attend  # here, because only torch's CUDA builds bring Triton

        held, step = self._layers[layer], self._step
        held.keys.index_copy_(0, step.slots_R, k)
        held.values.index_copy_(0, step.slots_R, v)
        return attend(q, held.keys, held.values, step.table_RB, step.lengths_R, self._block, scale, window)


# ---------------------------------------------------------------- CUDA graphs


_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_MIN_BLOCKS = 128  # fewest columns of a block table; unused ones are not read
_LOG = logging.getLogger(__name__)


def rounded_rows(rows: int) -> int:
    """Return the number of rows, at least `rows`, for which a graph is recorded."""
    return next((size for size in _ROWS if size >= rows), -(-rows // 128) * 128)


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """A captured CUDA graph that reads `step` and writes `states_RD`."""

    graph: Any
    step: DecodingStep
    states_RD: Tensor


class Decoding:
    """The CUDA graphs of decoding steps over one cache, whose block `spare` belongs to no sequence.

    The graphs share one memory pool, which is safe because only one runs at a time and its result is copied before the next. A model's
    graphs are freed with the model. If a model's first pass fails, nothing is recorded for it and its steps are launched as usual.
    """

    def __init__(self, layers: Sequence[CachedLayer], block: int, spare: int) -> None:
        self._layers, self._block, self._spare = layers, block, spare
        self._made: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, int], RecordedPass]] = WeakKeyDictionary()
        self._pool: Any = None
        self._failed: WeakSet[PreTrainedModel] = WeakSet()
        self._one = Lock()  # two versions' parts of one step may run on two threads

    @torch.inference_mode()
    def run(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> Tensor | None:
        """Return the final states [R, hidden] of one token per entry; None for a model that cannot be recorded."""
        with self._one:
            return None if model in self._failed else self._run(model, ids, entries)

    def _run(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> Tensor | None:
        most = max(-(-entry.end // self._block) for entry in entries)
        rows, blocks = rounded_rows(len(entries)), max(_MIN_BLOCKS, 1 << (most - 1).bit_length())
        passes = self._made.setdefault(model, {})
        recorded = passes.get((rows, blocks)) or self._record(model, rows, blocks)
        if recorded is None:
            return None
        passes[rows, blocks] = recorded
        numbers = numbers_of(ids, entries, self._block, rows, blocks, self._spare)
        recorded.step.numbers.copy_(torch.from_numpy(numbers))
        recorded.graph.replay()
        return recorded.states_RD[: len(entries)].clone()  # copied, because graphs share memory

    def _record(self, model: PreTrainedModel, rows: int, blocks: int) -> RecordedPass | None:
        empty = torch.from_numpy(numbers_of((), (), self._block, rows, blocks, self._spare))
        step = DecodingStep(empty.to(model.device))
        attend = StepAttend(self._layers, self._block, step)
        with torch.cuda.device(model.device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(aside):  # warm-up: compiles kernels and sets up libraries before the capture
                    hidden(model, step.ids_R, step.positions_R, attend)
            except Exception:  # noqa: BLE001 (compilers and models may raise anything; the steps can still be launched)
                _LOG.exception("decoding steps are not recorded for this version, and so are slower")
                self._failed.add(model)
                return None
            torch.cuda.current_stream().wait_stream(aside)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # thread_local: another thread may be building the next model, and its calls must not invalidate the capture
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                states_RD = hidden(model, step.ids_R, step.positions_R, attend)
        return RecordedPass(graph, step, states_RD)
