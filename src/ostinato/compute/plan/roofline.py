"""The work of a phase, and the time it takes on an accelerator. Pure.

The roofline (Williams, Waterman and Patterson, CACM 52(4), 2009): a phase takes as long as the slowest of its operations, its bytes from
memory and its bytes over the network, if they overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.compute.plan.description import PlannedHardware, PlannedModel, PlannedShares, PlannedTurns
from ostinato.compute.work import TokenWork, causal_pairs, pair_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Operations, bytes from memory and bytes over the network, for all accelerators together.

    Example: ``Need(flops=2e15, memory=1e12) + Need(wire=1e9)``
    """

    flops: float = 0.0
    memory: float = 0.0
    wire: float = 0.0

    def __add__(self, other: Need) -> Need:
        return Need(flops=self.flops + other.flops, memory=self.memory + other.memory, wire=self.wire + other.wire)

    def __mul__(self, times: float) -> Need:
        return Need(flops=self.flops * times, memory=self.memory * times, wire=self.wire * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorTime:
    """Accelerator-seconds, and the bound that sets them: operations, memory or network."""

    seconds: float
    by: str


def roofline(need: Need, on: PlannedHardware, reached: PlannedShares, compute: float) -> AcceleratorTime:
    """How long one accelerator would take. `compute` is the share of its peak operations per second that this phase reaches."""
    times = {
        "operations": need.flops / (on.flops * compute),
        "memory": need.memory / (on.memory_rate * reached.memory_rate),
        "network": need.wire / (on.network * reached.network),
    }
    by = max(times, key=times.__getitem__)
    return AcceleratorTime(seconds=times[by], by=by)


def planned_work(model: PlannedModel) -> TokenWork:
    """Two operations per active parameter, including the head's, plus attention: see `compute.work`."""
    return TokenWork(body=2 * model.active, head=0, pair=pair_work(model.layers, model.heads, model.head_size))


def cache_bytes(model: PlannedModel) -> float:
    """Bytes that one token adds to the cache: a key and a value in each layer."""
    return 2.0 * model.layers * model.kv_heads * model.head_size * model.cache_bytes


def touched(model: PlannedModel, tokens: float) -> float:
    """Parameters that are read when this many tokens are computed at once, if all experts are equally likely.

    Parameters = d + x and active = d + x k/E give the experts' share x; of them 1 - (1 - k/E)^n are chosen by at least one of n tokens.

    Example: all of them for a large batch, `active` for one token.
    """
    if not model.experts or model.experts == model.experts_per_token:
        return model.parameters
    used = model.experts_per_token / model.experts
    experts = (model.parameters - model.active) / (1 - used)
    return model.parameters - experts * (1 - used) ** tokens


def dispatched(model: PlannedModel, copies: float) -> float:
    """Bytes over the network for one token and one pass: sent to `copies` machines and back in each layer of experts, in 16 bits."""
    return 2.0 * 2.0 * model.layers * copies * model.hidden if model.experts else 0.0


def prefilled(model: PlannedModel, turns: PlannedTurns, chunk: float, copies: float) -> Need:
    """The prefill of one turn: its prompt except the cached part; the weights are read once per `chunk` tokens."""
    new, old = turns.prompt * (1 - turns.cached), turns.prompt * turns.cached
    return Need(
        flops=planned_work(model).forward(new, causal_pairs(new, old), 0),
        memory=new / chunk * touched(model, chunk) * model.weight_bytes + turns.prompt * cache_bytes(model),
        wire=new * dispatched(model, copies),
    )


def decoded(model: PlannedModel, turns: PlannedTurns, batch: float, copies: float) -> Need:
    """The decoding of one turn: its answer, token by token, in a batch of `batch` turns that share the reads of the weights."""
    pairs = causal_pairs(turns.answer, turns.prompt)
    return Need(
        flops=planned_work(model).forward(turns.answer, pairs, 0),
        memory=turns.answer / batch * touched(model, batch) * model.weight_bytes + pairs * cache_bytes(model),
        wire=turns.answer * dispatched(model, copies),
    )


def room(model: PlannedModel, turns: PlannedTurns, on: PlannedHardware, reached: PlannedShares, replica: int) -> float:
    """How many answers' caches fit on a replica of `replica` machines beside the weights; below 1: the model does not fit.

    Each cache holds a prompt and, on average, half an answer; no prefix is shared.
    """
    free = replica * on.accelerators * on.memory * reached.memory - model.parameters * model.weight_bytes
    return free / ((turns.prompt + turns.answer / 2) * cache_bytes(model))


def least_replica(model: PlannedModel, turns: PlannedTurns, on: PlannedHardware, reached: PlannedShares) -> int:
    """The fewest machines on which weights and one answer's cache fit."""
    need = model.parameters * model.weight_bytes + (turns.prompt + turns.answer / 2) * cache_bytes(model)
    return int(-(-need // (on.accelerators * on.memory * reached.memory)))
