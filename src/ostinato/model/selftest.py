"""The start-up self-test: whether exact mode holds for a model on this machine, and which torch operations the model depends on.

Our kernels compute a token's numbers from that token alone (batch invariance). A model also runs the library's modules, whose kernels may
depend on the number of tokens. So every module's output is compared over calls of many lengths, and then the whole model (`check_exact`,
which also works on a loaded model): in one pass, as the trainer runs it, and in chunks with a KV cache and another sequence in the batch,
as the engine does. Several threads must give the bits of one thread. The test is seeded and no decision depends on time, so all processes
on one machine reach the same verdict.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.errors import BadConfig
from ostinato.model import cpu, routing
from ostinato.model.attention import Attend, hidden, logits
from ostinato.model.cpu import team
from ostinato.model.experts import experts_of
from ostinato.model.linear import order_in_use
from ostinato.model.load import empty_model
from ostinato.model.numerics import definitions_of
from ostinato.model.paged import Blocks, PagedAttend, PagedEntry, WholeAttend
from ostinato.model.portable import library_operations

Pack = Callable[[nn.Module], object]
"""Converts a module to the engine's form in place, without changing its results' bits."""
REMEDY = 'set model.numerics = "fast"'


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """Tokens [start, end) of one sequence in a forward pass; the earlier ones are already in the cache."""

    sequence: int
    start: int
    end: int


Memory = Callable[[Sequence[SequencePiece]], Attend]
"""A KV cache: called with the pieces of a forward pass, in order, it returns the pass's `Attend`, which reads and extends the cache."""


class BlockMemory:
    """A paged KV cache with our attention kernel, as in the engine; each sequence's blocks are in reverse order."""

    def __init__(self, sequences: int, tokens: int, block: int = 32) -> None:
        self.block, self._each = block, -(-tokens // block)
        self._total = sequences * self._each
        self._layers: dict[int, Blocks] = {}

    def __call__(self, pieces: Sequence[SequencePiece]) -> Attend:
        return PagedAttend([self._entry(piece) for piece in pieces], self.block, self.blocks)

    def blocks(self, layer: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Blocks:
        """Return a layer's blocks, initially empty."""
        if layer not in self._layers:
            self._layers[layer] = Blocks(self._total, kv_heads, self.block, dim, dtype)
        return self._layers[layer]

    def _entry(self, piece: SequencePiece) -> PagedEntry:
        last = self._total - 1 - piece.sequence * self._each
        return PagedEntry(start=piece.start, end=piece.end, blocks=range(last, last - -(-piece.end // self.block), -1))


_CUTS = (16, 16, 16, 7, 7, 1, 1, 1, 1, 1, 1, 1, 1)
"""The chunk lengths of a sequence; the other sequence of the batch has them in reverse order. The first is longer for large blocks."""
_BEYOND = 16
"""Tokens of a sequence beyond its first block: more than the single ones at its end."""
_ALONE = 4
"""The number of last tokens that are also computed alone, in calls of one token."""


def check_exact(
    model: PreTrainedModel,
    make_memory: Callable[[int, int], Memory] = BlockMemory,
    pack: Pack | None = None,
    team: int | None = None,
    block: int | None = None,
) -> None:
    """Compute two sequences in one pass each, under autograd as in the trainer, then in chunks, together and alone, as in the engine.

    Hidden states, the logits of each chunk's last token and the routers' choices must have the same bits; raises BadConfig if not.

    Args:
        model: the model.
        make_memory: ``make_memory(sequences, tokens)`` returns an empty cache.
        pack: converts a copy of the model to the engine's form, for the engine's passes.
        team: threads of the passes under autograd; the others use the caller's number.
        block: if given, the engine's passes use a `BlockMemory` with this block size, and each sequence reaches its second block.
    """
    engine = model
    if pack is not None:
        engine = copy.deepcopy(model)
        pack(engine)
    cuts = (_CUTS[0] + max(0, (block or 0) + _BEYOND - sum(_CUTS)), *_CUTS[1:])
    total = sum(cuts)
    vocabulary = vocabulary_of(model)
    ids = torch.randint(vocabulary, (2, total), generator=torch.Generator().manual_seed(6))
    with cpu.team(team or torch.get_num_threads()):
        whole = [_whole(model, ids[i], make_memory(1, total)) for i in range(2)]
    make_memory = make_memory if block is None else partial(BlockMemory, block=block)
    memory, done = make_memory(2, total), [0, 0]
    for turn, sizes in enumerate(zip(cuts, reversed(cuts), strict=True)):
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
    """Run one forward pass of the engine, and compare each piece with the same tokens in its sequence's single pass."""
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
    """The bits of the hidden states [N, D] and of some tokens' logits [M, vocab], and the routers' choices [N, L, k]."""

    states: Tensor
    logits: Tensor
    routes: Tensor | None


def _answer(
    model: PreTrainedModel, ids: Tensor, pieces: Sequence[SequencePiece], attend: Attend, heads: Tensor
) -> _Answer:
    flat = torch.cat([ids[piece.sequence, piece.start : piece.end] for piece in pieces])
    positions = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])
    routers = routing.of(model)
    with routers.record() if routers is not None and routers.can_record else nullcontext() as seen:
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
            f"{piece.end - 1} differ between one pass and passes with a KV cache beside another sequence; {REMEDY}"
        )


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embedding."""
    return len(cast("Tensor", model.get_input_embeddings().weight))


def bits_of(x: Tensor) -> Tensor:
    """Return floats as integers with the same bits, so that a comparison distinguishes them all; integers as they are."""
    if not x.is_floating_point():
        return x
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


# ---------------------------------------------------------------- the self-test


Teams = Sequence[int]
"""Thread counts; the bits with the first are the reference."""

_POOL = 65_537  # random numbers that a large matrix repeats; prime, so that no two rows are equal
_TOKENS = (1, 2, 3, 1, 5, 8, 13, 1, 4, 31, 64, 100, 129)  # lengths of the compared calls
_REFERENCE_TOKENS = 192  # length of the reference call


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixShape:
    """The shape of a matrix product of the model: [rows, inputs] -> [rows, outputs]."""

    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """Floating-point operations per row."""
        return 2 * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessVerdict:
    """The result of the self-test; `reason` says why exact mode cannot hold, "" if it holds.

    `threads`: the thread count of the reference bits. `table`: the comparisons that passed, in words. `library`: torch operations that may
    give other bits on another kind of CPU; without any, the bits are the same on all CPUs. `definitions`: those of our definitions that
    only some models use (`numerics.definitions_of`).

    Example::

        ExactnessVerdict(
            exact=True, threads=1, reason="", seconds=1.9, table=("every module of whole layers",), library=(),
        )
    """

    exact: bool
    threads: int
    reason: str
    seconds: float
    table: tuple[str, ...]
    library: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()


def examine(
    path: Path, dtype: torch.dtype, threads: Sequence[int] = (1,), pack: Pack | None = None, block: int = 32
) -> ExactnessVerdict:
    """Run the self-test on the model in a directory, in `dtype`; return the verdict.

    All thread counts in `threads` must give the bits of the first, and the engine's cache, in blocks of `block` tokens, the bits of the
    trainer. The test builds enough layers to include every kind of layer, with random weights, because values do not affect the choice of
    kernels. `pack` converts a model to the engine's form. Raises BadConfig for an unsupported architecture; a model that is merely not
    exact gets a verdict.
    """
    began = time.perf_counter()
    table = [f"matrix products by our own kernels, in the order {order_in_use()!r}"]
    reason = ""
    model = filled(empty_model(path, dtype, shallow=True))
    try:
        check_layers(model, threads)
        table.append("every module of whole layers")
        for count in threads:
            for autograd in dict.fromkeys((threads[0], count)):  # both parts run with every thread count
                with team(count):
                    check_exact(model, pack=pack, team=autograd, block=block)
        table.append("end to end: one pass, or chunks with a KV cache beside another sequence")
    except BadConfig as error:
        reason = str(error)
    ids = torch.arange(3)
    library = library_operations(lambda: logits(model, hidden(model, ids, ids, WholeAttend([3]))))
    if any(getattr(module, "own_frequencies", True) is False for module in model.modules()):
        library = (*library, "pow (rotary frequencies)")
    seconds = time.perf_counter() - began
    return ExactnessVerdict(
        exact=not reason,
        threads=threads[0],
        reason=reason,
        seconds=seconds,
        table=tuple(table),
        library=library,
        definitions=definitions_of(model),
    )


@torch.no_grad()
def filled(model: PreTrainedModel) -> PreTrainedModel:
    """Fill the model with weights from a repeated pool of random numbers, which is fast even for a large vocabulary."""
    weights = set(dict(model.named_parameters(remove_duplicate=False)))
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        numbers = random_numbers(1, tensor.numel(), tensor.dtype, seed=seed).view(tensor.shape)
        if tensor.dim() > 1:
            tensor.copy_(numbers * tensor.shape[-1] ** -0.5)
        else:
            tensor.copy_(numbers * 0.1 + 1 if name in weights else numbers * 0)
    return model


def shapes_of(model: nn.Module) -> list[MatrixShape]:
    """Return the distinct shapes of a model's matrix products: linear layers, the output head, routers, and single experts."""
    found: dict[MatrixShape, None] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and _multiplies(module):
            outputs, inputs = weight.shape
            found[MatrixShape(inputs=inputs, outputs=outputs)] = None
    for module in experts_of(model):
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            stacked, turned = getattr(module, name, None), bool(cast("Any", module).is_transposed)
            if isinstance(stacked, Tensor) and stacked.dim() == 3:
                one, two = stacked.shape[1:]
                inputs, outputs = (one, two) if turned else (two, one)
                found[MatrixShape(inputs=inputs, outputs=outputs)] = None
    return list(found)


def _multiplies(module: nn.Module) -> bool:
    """Return True for linear layers and routers; an embedding is only looked up, and the test of whole layers covers Conv1D."""
    return isinstance(module, nn.Linear) or hasattr(module, "top_k")


# ---------------------------------------------------------------- whole layers


def check_layers(model: PreTrainedModel, teams: Teams) -> None:
    """Raise BadConfig, with the module's name, for the first module whose output for a token depends on the other tokens or on threads."""
    if culprit := _first_difference(model, teams):
        raise BadConfig(f"exact mode cannot hold for this model: {culprit}; {REMEDY}")


@torch.inference_mode()
def _first_difference(model: PreTrainedModel, teams: Teams) -> str:
    source = torch.Generator().manual_seed(5)
    ids, positions = (
        torch.randint(vocabulary_of(model), (_REFERENCE_TOKENS,), generator=source),
        torch.arange(_REFERENCE_TOKENS),
    )
    with team(teams[0]):
        want = _module_outputs(model, ids, positions)
    for tokens, size in ((tokens, size) for tokens in _TOKENS for size in teams):
        at = int(torch.randint(_REFERENCE_TOKENS - tokens + 1, (1,), generator=source))
        with team(size):
            got = _module_outputs(model, ids[at : at + tokens], positions[at : at + tokens])
        for name, part in got.items():
            whole = want.get(name)
            if whole is not None and not torch.equal(part, whole[at : at + tokens]):
                return f"{name} gives other bits for {tokens} tokens than for {_REFERENCE_TOKENS}, or on {size} threads"
    return ""


def _module_outputs(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the bits of each module's output per token, in order of execution. Attention returns its values."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, answer: object) -> None:
        for i, tensor in enumerate(cast("tuple[object, ...]", answer) if isinstance(answer, tuple) else (answer,)):
            if isinstance(tensor, Tensor):
                flat = tensor[0] if tensor.dim() > 2 and len(tensor) == 1 else tensor
                if len(flat) == len(ids):
                    seen.setdefault(f"{name}[{i}]" if i else name, bits_of(flat))

    def through(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        keep(f"layer {layer}'s queries", q)
        keep(f"layer {layer}'s keys", k)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    with _watched(model, keep):
        keep("logits", logits(model, hidden(model, ids, positions, through)))
    return seen


@contextmanager
def _watched(model: nn.Module, keep: Callable[[str, object], None]) -> Generator[None]:
    # modules inside experts are skipped, because their rows are sorted by expert, not by token
    inside = {id(part) for expert in experts_of(model) for part in expert.modules() if part is not expert}
    handles: list[Any] = []

    def watch(name: str, module: nn.Module) -> None:
        handles.append(module.register_forward_hook(lambda _module, _args, answer: keep(name, answer)))

    for name, module in model.named_modules():
        if name and id(module) not in inside:
            watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def random_numbers(rows: int, columns: int, dtype: torch.dtype, *, seed: int = 1) -> Tensor:
    """Return [rows, columns] normal random numbers; a large matrix repeats a pool of them, which is fast."""
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed)).to(dtype)
    repeated = pool.repeat(-(-rows * columns // _POOL))
    return repeated[: rows * columns].view(rows, columns)
