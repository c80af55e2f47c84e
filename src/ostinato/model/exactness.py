"""End-to-end check that a whole model gives the same bits in one pass as cut up, with a cache, beside another sequence.

The last part of the start-up self-test, and a probe for a model that is already loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.errors import BadConfig
from ostinato.model import cpu, routing
from ostinato.model.attention import Attend, hidden, logits
from ostinato.model.paged import Blocks, PagedCache, PagedEntry, Reads, TokenPlaces


class Pack(Protocol):
    """Converts a module to the engine's form in place; its bits stay the same."""

    def __call__(self, model: nn.Module, /) -> object: ...


REMEDY = 'set model.numerics = "fast"'


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """Tokens [start, end) of one sequence in a forward pass; earlier ones are already in the memory."""

    sequence: int
    start: int
    end: int


Memory = Callable[[Sequence[SequencePiece]], Attend]
"""Called with the pieces of a forward pass, in order; returns the pass's `Attend`, which reads the memory and adds to it."""


class BlockMemory:
    """Keys and values in blocks, and attention by our kernel, as in the engine; each sequence's blocks lie in reverse order."""

    def __init__(self, sequences: int, tokens: int, block: int = 32) -> None:
        self.block, self._each = block, -(-tokens // block)
        self._total = sequences * self._each
        self._layers: dict[int, Blocks] = {}

    def __call__(self, pieces: Sequence[SequencePiece]) -> Attend:
        return _Memory(self, [self._entry(piece) for piece in pieces])

    def blocks(self, layer: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Blocks:
        """A layer's blocks, initially empty."""
        if layer not in self._layers:
            self._layers[layer] = Blocks(self._total, kv_heads, self.block, dim, dtype)
        return self._layers[layer]

    def _entry(self, piece: SequencePiece) -> PagedEntry:
        last = self._total - 1 - piece.sequence * self._each
        return PagedEntry(start=piece.start, end=piece.end, blocks=range(last, last - -(-piece.end // self.block), -1))


class _Memory:
    """Attention of one pass over a `BlockMemory`."""

    def __init__(self, memory: BlockMemory, entries: Sequence[PagedEntry]) -> None:
        self._memory, self._reads = memory, Reads(entries, memory.block)
        self._places = TokenPlaces.of(entries, memory.block)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        blocks = self._memory.blocks(layer, k.shape[1], k.shape[2], k.dtype)
        blocks.write(k, v, self._places)
        return self._reads.attend(q, blocks, scale, window)[0]

    def pages(self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> PagedCache:
        """The same attention as `PagedCache`, for code that runs all layers at once."""
        held = [self._memory.blocks(layer, kv_heads, dim, dtype) for layer in range(layers)]
        return PagedCache(self._reads, self._places, held)


_CUTS = (16, 16, 16, 7, 7, 1, 1, 1, 1, 1, 1, 1, 1)
"""The lengths into which a sequence is cut; the sequence beside it is cut in reverse order."""
_ALONE = 4
"""The last tokens of a sequence that are computed alone, in calls of one token."""


def check_exact(
    model: PreTrainedModel,
    make_memory: Callable[[int, int], Memory] = BlockMemory,
    pack: Pack | None = None,
    team: int | None = None,
) -> None:
    """Compute two sequences, each in one pass under autograd as in the trainer, then cut up, together and alone, as in the engine.

    With `team` the passes under autograd use that many threads, the others the number that the caller set.

    Hidden states, the logits of each cut's last token and the routers' choices must have the same bits.
    `make_memory(sequences, tokens)` gives an empty memory; `pack` is applied to a copy, for the engine's part. Raises BadConfig if the
    bits differ.
    """
    engine = model
    if pack is not None:
        engine = copy.deepcopy(model)
        pack(engine)
    total = sum(_CUTS)
    vocabulary = vocabulary_of(model)
    ids = torch.randint(vocabulary, (2, total), generator=torch.Generator().manual_seed(6))
    with cpu.team(team or torch.get_num_threads()):
        whole = [_whole(model, ids[i], make_memory(1, total)) for i in range(2)]
    memory, done = make_memory(2, total), [0, 0]
    for turn, sizes in enumerate(zip(_CUTS, reversed(_CUTS), strict=True)):
        pieces = [SequencePiece(i, done[i], done[i] + sizes[i]) for i in ((0, 1) if turn % 2 else (1, 0))]
        _check_pieces(engine, ids, pieces, memory, whole)
        done = [done[i] + sizes[i] for i in range(2)]
    memory, alone = make_memory(1, total), [0, total - _ALONE, *range(total - _ALONE + 1, total + 1)]
    for start, end in pairwise(alone):
        _check_pieces(engine, ids, [SequencePiece(0, start, end)], memory, whole)


def _check_pieces(
    engine: PreTrainedModel,
    ids: Tensor,
    pieces: Sequence[SequencePiece],
    memory: Memory,
    whole: Sequence[_Answer],
) -> None:
    """Run one forward pass of the engine, and compare each piece with the same tokens of its sequence's single pass."""
    ends = torch.tensor([piece.end - piece.start for piece in pieces]).cumsum(0)
    with torch.inference_mode():
        got = _answer(engine, ids, pieces, memory(pieces), ends - 1)
    for i, (piece, end) in enumerate(zip(pieces, ends.tolist(), strict=True)):
        want = whole[piece.sequence]
        part = slice(end - piece.end + piece.start, end)
        _compare("hidden states", got.states[part], want.states[piece.start : piece.end], piece)
        _compare("logits", got.logits[i], want.logits[piece.end - 1], piece)
        if got.routes is not None and want.routes is not None:
            _compare("expert choices", got.routes[part], want.routes[piece.start : piece.end], piece)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The bits of the states [N, D] and of some tokens' logits [M, vocab], and the routers' choices [N, L, k]."""

    states: Tensor
    logits: Tensor
    routes: Tensor | None


def _answer(
    model: PreTrainedModel, ids: Tensor, pieces: Sequence[SequencePiece], attend: Attend, heads: Tensor
) -> _Answer:
    flat = torch.cat([ids[piece.sequence, piece.start : piece.end] for piece in pieces])
    positions = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])
    routers = routing.of(model)
    seen = None
    with ExitStack() as stack:
        if routers is not None and routers.can_record:
            seen = stack.enter_context(routers.record())
        states = hidden(model, flat, positions, attend)
    answer = logits(model, states[heads])
    return _Answer(bits_of(states), bits_of(answer), None if seen is None else seen.ids_NLk())


def _whole(model: PreTrainedModel, ids: Tensor, memory: Memory) -> _Answer:
    piece = SequencePiece(0, 0, len(ids))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            return _answer(model, ids[None], [piece], memory([piece]), torch.arange(len(ids)))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _compare(what: str, got: Tensor, want: Tensor, piece: SequencePiece) -> None:
    if differing := int((got != want).sum()):
        raise BadConfig(
            f"exact mode cannot hold for this model: {differing} of {got.numel()} {what} of tokens {piece.start} to "
            f"{piece.end - 1} differ between one pass and one with a cache in company; {REMEDY}"
        )


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of token ids that can be looked up."""
    return len(cast("Tensor", model.get_input_embeddings().weight))


def bits_of(x: Tensor) -> Tensor:
    """A float's bits as integers, so that a comparison distinguishes all of them; integers as they are."""
    if not x.is_floating_point():
        return x
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
