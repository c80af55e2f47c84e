"""The start-up self-test: which row rule this CPU, torch and thread count need, and whether exact mode can hold at all.

Matrix libraries choose their kernels by the number of rows, so a token's bits may depend on how many tokens are computed with it. The
row rule is the smallest r such that at multiples of r they do not. It is measured on each linear shape of the model alone, on
whole layers (every module's output), and end to end on the model with attention and KV cache; a team of threads must give the bits of
one thread. The test is seeded and no decision depends on time, so processes on one machine find the same rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ostinato.core.errors import BadConfig
from ostinato.model.attention import hidden
from ostinato.model.exactness import REMEDY, Pack, bits_of, check_exact, vocabulary_of
from ostinato.model.experts import experts_of, set_rows
from ostinato.model.linear import Linear, linear
from ostinato.model.load import empty_model
from ostinato.model.threads import team

RULES = (1, 2, 4, 8, 16, 32)
Teams = Sequence[int]
"""Numbers of threads; the bits of the first are the reference."""

_REFERENCE = 512  # rows of the call that others are compared with
_BEYOND = (1024, 2048)  # longer calls, whose first rows are compared
# row counts by importance, in multiples of the rule: the first ones are tested even for the largest matrices
_STEPS = (1, 2, 3, 5, 8, 4, 7, 16, 31, 6, 9, 12, 32, 15, 17,
          24, 33, 48, 64, 63, 100, 128, 13, 20, 96, 127, 200, 255, 256, 500)  # fmt: skip
_ELEMENTS = 300_000  # outputs compared per row count: bf16 rounding hides all but about one deviation in 5,000
_CANCELLING_ELEMENTS = 40_000  # the same for cancelling inputs, where rounding cannot hide deviations
_CALLS = 128  # at most, per row count
_WORK = 12e9  # floating-point operations per shape, draw and form
_POOL = 65_537  # random numbers that a large matrix repeats; a prime, so that no two rows are alike
_TOKENS = (1, 2, 3, 1, 5, 8, 13, 1, 4, 31, 64, 100, 129)  # lengths of the calls of whole layers
_FLOW = 192  # tokens of the reference call for whole layers


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixShape:
    """A matrix product of the model: [rows, inputs] -> [rows, outputs].

    `stacked`: the weight is a slice of a tensor that holds one matrix per expert. `transposed`: it is stored [inputs, outputs].
    `stock`: computed by the library itself with torch's `F.linear`, as in its routers.
    """

    inputs: int
    outputs: int
    dtype: torch.dtype
    bias: bool = False
    stacked: bool = False
    transposed: bool = False
    stock: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations per row."""
        return 2 * self.inputs * self.outputs

    def __str__(self) -> str:
        extra = " + bias" * self.bias + " of an expert" * self.stacked + " by F.linear" * self.stock
        return f"linear {self.inputs} -> {self.outputs}{extra}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the self-test's table. Example: ``Finding(what="linear 576 -> 1536, bfloat16", rows=2)``."""

    what: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessVerdict:
    """The result of the self-test. `rows` is the row rule, 1 if exact mode cannot hold; `reason` says why it cannot, else "".

    `threads` is the number of threads whose bits all the other numbers of threads must give too.

    Example::

        ExactnessVerdict(
            exact=True, threads=1, rows=4, reason="", seconds=1.9,
            table=(Finding(what="linear 576 -> 1536, float32", rows=4),),
        )
    """

    exact: bool
    threads: int
    rows: int
    reason: str
    seconds: float
    table: tuple[Finding, ...]


def examine(
    path: Path, dtype: torch.dtype, threads: Sequence[int] = (1,), pack: Pack | None = None
) -> ExactnessVerdict:
    """The verdict on the model in a directory, computed in `dtype`; every number of `threads` must give the bits of the first.

    Builds enough layers to include every kind of layer, with random weights: kernels are not chosen by values. Raises BadConfig
    for a model that our attention cannot express; a model that is merely not exact gets a verdict.
    """
    began = time.perf_counter()
    table: list[Finding] = []
    rows, reason = 1, ""
    model = _filled(empty_model(path, dtype, shallow=True))
    try:
        found = measure(model, pack, table, threads)
        for count in threads:
            for autograd in dict.fromkeys((threads[0], count)):  # both parts run with every team
                with team(count):
                    check_exact(model, found, pack=pack, team=autograd)
        table.append(Finding(what="end to end: one pass, or cut up with a cache in company", rows=found))
        rows = found
    except BadConfig as error:
        reason = str(error)
    seconds = time.perf_counter() - began
    return ExactnessVerdict(
        exact=not reason, threads=threads[0], rows=rows, reason=reason, seconds=seconds, table=tuple(table)
    )


def measure(model: PreTrainedModel, pack: Pack | None, table: list[Finding], teams: Teams) -> int:
    """The smallest r of `RULES` such that at multiples of r rows no result of the model depends on the row count.

    With `pack` the packed linear layers must give those bits too, and so must each number of threads. Appends to `table` the rule that
    each part needs alone. Weights and inputs are the test's own, except in the pass through the model's layers, whose experts are left
    at the rule found. Raises BadConfig if even 32 fails.
    """
    table.extend(Finding(what=str(shape), rows=rule_of(shape, pack, teams)) for shape in shapes_of(model))
    rows = max(line.rows for line in table)
    rows = _rule_of_layers(model, rows, teams)
    table.append(Finding(what="every module of whole layers", rows=rows))
    return rows


# ---------------------------------------------------------------- one matrix product


def shapes_of(model: nn.Module) -> list[MatrixShape]:
    """The distinct matrix products of a model: linear layers, the output head, routers, and the slices of stacked experts."""
    found: dict[MatrixShape, None] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and _multiplies(module):
            outputs, inputs = weight.shape
            bias = isinstance(getattr(module, "bias", None), Tensor)
            stock = not isinstance(module, Linear)
            found[MatrixShape(inputs=inputs, outputs=outputs, dtype=weight.dtype, bias=bias, stock=stock)] = None
    for module in experts_of(model):
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            stacked, turned = getattr(module, name, None), bool(cast("Any", module).is_transposed)
            if isinstance(stacked, Tensor) and stacked.dim() == 3:
                one, two = stacked.shape[1:]
                inputs, outputs = (one, two) if turned else (two, one)
                shape = MatrixShape(
                    inputs=inputs, outputs=outputs, dtype=stacked.dtype, stacked=True, transposed=turned
                )
                found[shape] = None
    return list(found)


def _multiplies(module: nn.Module) -> bool:
    """True for linear layers and routers; an embedding table is only looked up, and Conv1D is covered by the test of whole layers."""
    return isinstance(module, nn.Linear) or hasattr(module, "top_k")


def rule_of(shape: MatrixShape, pack: Pack | None, teams: Teams) -> int:
    """The row rule of one matrix product alone. Raises BadConfig if even the largest of `RULES` fails."""
    draws = (True,) if shape.flops * _REFERENCE > _WORK else (False, True)
    trials = [_Trial(shape, cancelling, pack, teams) for cancelling in draws]
    rule = next((rule for rule in RULES if not any(trial.bad(rule) for trial in trials)), None)
    if rule is None:
        counts = sorted({count for trial in trials for count in trial.bad(RULES[-1], stop=False)})
        raise BadConfig(
            f"exact mode cannot hold on this machine: {shape} gives other bits at {', '.join(map(str, counts[:6]))} rows "
            f"than at {trials[0].compared}; {REMEDY}"
        )
    return rule


class _Trial:
    """One shape with one draw of weights and inputs, in every form in which it is computed."""

    def __init__(self, shape: MatrixShape, cancelling: bool, pack: Pack | None, teams: Teams) -> None:
        self._flops, self._teams = shape.flops, teams
        most = int(_WORK / 2 / shape.flops)
        self.compared = max(128, min(_REFERENCE, most // 32 * 32))
        self._beyond = beyond = [rows for rows in _BEYOND if rows <= most]
        weight, self._x = _operands(shape, max([self.compared, *beyond]), cancelling)
        bias = _numbers(1, shape.outputs, shape.dtype, seed=3)[0] if shape.bias else None
        self._forms = _forms(shape, weight, bias, pack)
        self._enough = -(-(_CANCELLING_ELEMENTS if cancelling else _ELEMENTS) // shape.outputs)  # rows to compare
        with torch.inference_mode(), team(teams[0]):
            self._want = bits_of(self._forms[0](self._x[: self.compared]))

    def bad(self, rule: int, *, stop: bool = True) -> list[int]:
        """Row counts, multiples of `rule`, at which some form differs; only the first one if `stop`."""
        return sorted({count for size in self._teams for count in self._bad(rule, size, stop=stop)})

    def _bad(self, rule: int, size: int, *, stop: bool) -> list[int]:
        found: list[int] = []
        work = _WORK
        for count in [*(rule * step for step in _STEPS if rule * step <= self.compared), *self._beyond]:
            calls = min(-(-self._enough // count), self.compared // count, _CALLS)
            rows = count * max(1, calls)
            work -= rows * self._flops
            if work < 0 and count > 8 * rule:
                break
            with team(size):
                differs = any(self._differs(form, count, rows) for form in self._forms)
            if differs:
                found.append(count)
                if stop:
                    break
        return found

    @torch.inference_mode()
    def _differs(self, form: Callable[[Tensor], Tensor], count: int, rows: int) -> bool:
        for at in range(0, rows, count):
            got = bits_of(form(self._x[at : at + count]))[: self.compared]
            if not torch.equal(got, self._want[at : at + len(got)]):
                return True
        return False


def _operands(shape: MatrixShape, rows: int, cancelling: bool) -> tuple[Tensor, Tensor]:
    """A weight [outputs, inputs] and inputs [rows, inputs].

    If `cancelling`, most terms of each sum cancel in pairs and the rest is small. What remains then shows the order in which a
    kernel added, even in bf16, where the rounding of a plain sum hides it.
    """
    weight = _numbers(shape.outputs, shape.inputs, shape.dtype, seed=1)
    x = _numbers(rows, shape.inputs, shape.dtype, seed=2)
    if cancelling:
        order = torch.randperm(shape.inputs, generator=torch.Generator().manual_seed(4))
        pairs = max(0, shape.inputs - max(2, shape.inputs // 16)) // 2
        one, two, rest = order[:pairs], order[pairs : 2 * pairs], order[2 * pairs :]
        weight[:, two], x[:, two] = weight[:, one], -x[:, one]
        x[:, rest] *= 2.0**-6
    return weight, x


def _numbers(rows: int, columns: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed)).to(dtype)
    repeated = pool.repeat(-(-rows * columns // _POOL))
    return repeated[: rows * columns].view(rows, columns)


def _forms(
    shape: MatrixShape, weight: Tensor, bias: Tensor | None, pack: Pack | None
) -> list[Callable[[Tensor], Tensor]]:
    if shape.stacked:
        matrix = torch.stack([weight, weight])[1]
        if shape.transposed:
            turned = matrix.t().contiguous()
            return [lambda x: x @ turned]
        return [lambda x: linear(x, matrix)]
    if shape.stock:
        return [lambda x: F.linear(x, weight, bias)]
    forms: list[Callable[[Tensor], Tensor]] = [lambda x: linear(x, weight, bias)]
    if pack is not None:
        layer = nn.Linear(shape.inputs, shape.outputs, bias=shape.bias, dtype=shape.dtype, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        holder = nn.Sequential(Linear(layer))
        pack(holder)
        forms.append(holder)
    return forms


# ---------------------------------------------------------------- whole layers


def _rule_of_layers(model: PreTrainedModel, least: int, teams: Teams) -> int:
    culprit = ""
    for rows in (rule for rule in RULES if rule >= least):
        culprit = _first_difference(model, rows, teams)
        if not culprit:
            return rows
    raise BadConfig(f"exact mode cannot hold for this model: {culprit}; {REMEDY}")


@torch.inference_mode()
def _first_difference(model: PreTrainedModel, rows: int, teams: Teams) -> str:
    """The first module whose output for a token depends on how many tokens are computed with it; "" if there is none."""
    source = torch.Generator().manual_seed(5)
    ids, positions = torch.randint(vocabulary_of(model), (_FLOW,), generator=source), torch.arange(_FLOW)
    set_rows(model, rows)
    with team(teams[0]):
        want = _flow(model, ids, positions, rows)
    for tokens, size in ((tokens, size) for tokens in _TOKENS for size in teams):
        at = int(torch.randint(_FLOW - tokens + 1, (1,), generator=source))
        with team(size):
            got = _flow(model, ids[at : at + tokens], positions[at : at + tokens], rows)
        for name, part in got.items():
            whole = want.get(name)
            if whole is not None and not torch.equal(part[:tokens], whole[at : at + tokens]):
                return f"{name} gives other bits for {tokens} tokens than for {_FLOW} (row rule {rows})"
    return ""


def _flow(model: PreTrainedModel, ids: Tensor, positions: Tensor, rows: int) -> dict[str, Tensor]:
    """The bits of each module's output per token, in order of execution. Attention passes its values through."""
    seen: dict[str, Tensor] = {}
    padded = -(-len(ids) // rows) * rows

    def keep(name: str, answer: object) -> None:
        for i, tensor in enumerate(cast("tuple[object, ...]", answer) if isinstance(answer, tuple) else (answer,)):
            if isinstance(tensor, Tensor):
                flat = tensor[0] if tensor.dim() > 2 and len(tensor) == 1 else tensor
                if len(flat) in (padded, len(ids)):
                    key = f"{name}[{i}]" if i else name
                    seen.setdefault(key, bits_of(flat))

    def through(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        keep(f"layer {layer}'s queries", q)
        keep(f"layer {layer}'s keys", k)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    with _watched(model, keep):
        hidden(model, ids, positions, through, rows=rows)
    return seen


@contextmanager
def _watched(model: nn.Module, keep: Callable[[str, object], None]) -> Generator[None]:
    inside = {id(part) for expert in experts_of(model) for part in expert.modules() if part is not expert}
    handles: list[Any] = []

    def watch(name: str, module: nn.Module) -> None:
        handles.append(module.register_forward_hook(lambda _module, _args, answer: keep(name, answer)))

    for name, module in model.named_modules():
        # an expert's output is in the order of experts, not of tokens
        if name and id(module) not in inside:
            watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- small things


@torch.no_grad()
def _filled(model: PreTrainedModel) -> PreTrainedModel:
    """Fill the model with weights that repeat a pool of random numbers, which is fast even for a large vocabulary."""
    weights = set(dict(model.named_parameters(remove_duplicate=False)))
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        numbers = _numbers(1, tensor.numel(), tensor.dtype, seed=seed).view(tensor.shape)
        if tensor.dim() > 1:
            tensor.copy_(numbers * tensor.shape[-1] ** -0.5)
        else:
            tensor.copy_(numbers * 0.1 + 1 if name in weights else numbers * 0)
    return model
