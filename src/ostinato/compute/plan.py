"""A cycle by phase: machines, bytes, seconds, money, and the first bottleneck.

Lanes work in parallel, the phases of a lane one after another. A lane's load is the share of a cycle in which it works, at the peak for
lanes that serve. If the description leaves a number of machines open, it is set as the load requires. Of the other lanes the one with the
highest load is the first bottleneck: it is full when a cycle is shortened by 1/load.

A phase's time is the roofline's (Williams, Waterman and Patterson, CACM 52(4), 2009): it takes as long as the slowest of its operations,
its bytes from memory and its bytes over the network, if they overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostinato.compute.description import (
    Description,
    PlannedHardware,
    PlannedModel,
    PlannedRegion,
    PlannedShares,
    PlannedTurns,
)
from ostinato.compute.work import TokenWork, causal_pairs, pair_work
from ostinato.core.errors import BadConfig

# ---------------------------------------------------------------- a phase: its work, and its time by the roofline


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


# ---------------------------------------------------------------- a cycle


NOT_COUNTED = (
    "norms, activations, drawing tokens, the embedding's lookup; work that speculation or a failed answer wastes",
    "in training: time in which a pipeline waits, and gradients between replicas of the trainer; weights stay, tokens travel",
    "requests to the bucket and what lies in it; `ostinato weights plan` has both. Machines without accelerators: gateways, log, sandboxes",
    "experts are all as likely; prefill, decode and training reach the shares of the peaks that are listed, at every size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The delivery of one version, from the weight store's own plan.

    The bytes of its delta, the seconds to encode it and to upload it to the bucket, and by region the seconds on the line and on the cores.

    Example: ``Delivery(bytes=1e10, encode_s=3.0, upload_s=28.0, regions={"europe": (28.0, 2.0)})``
    """

    bytes: float
    encode_s: float
    upload_s: float
    regions: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPhase:
    """The cost of one phase in a cycle. `bytes` are read from memory, or sent if `by` is a line; `money` is for the time it computes."""

    lane: str
    name: str
    machines: int
    flops: float
    bytes: float
    seconds: float
    money: float
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Phases that run one after another. `idle` is the money for its machines in the rest of the cycle; `open`: the description left their
    number open.
    """

    name: str
    machines: int
    load: float
    idle: float
    open: bool
    phases: tuple[PlannedPhase, ...]

    @property
    def widest(self) -> PlannedPhase:
        """The phase that takes longest."""
        return max(self.phases, key=lambda phase: phase.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclePlan:
    """The plan. `lag` is, by region, the time from the end of a step until its version serves there, without evaluation."""

    lanes: tuple[Lane, ...]
    lag: Mapping[str, float]
    bottleneck: Lane

    @property
    def machines(self) -> int:
        """The machines of all lanes."""
        return sum(lane.machines for lane in self.lanes)

    @property
    def money(self) -> float:
        """The cost of a cycle, including idle machines and egress."""
        return sum(lane.idle + sum(phase.money for phase in lane.phases) for lane in self.lanes)


def plan_cycle(told: Description, delivery: Delivery) -> CyclePlan:
    """Compute the plan. Raises BadConfig, which names the field that does not fit."""
    _check_classes(told)
    serving = {name: _serving(told, name) for name in told.regions}
    replicas = {name: serving[name].machines // region.replica for name, region in told.regions.items()}
    follow = {name: _following(told, name, delivery, replicas[name]) for name in told.regions}
    lanes = (*serving.values(), _training(told), _evaluation(told), _publication(told, delivery), *follow.values())
    fixed = [lane for lane in lanes if not lane.open]
    ahead = delivery.encode_s + delivery.upload_s
    return CyclePlan(
        lanes=lanes,
        lag={name: ahead + sum(each.seconds for each in follow[name].phases) / told.training.steps for name in follow},
        bottleneck=max(fixed, key=lambda lane: lane.load),
    )


def _check_classes(told: Description) -> None:
    users = {"training": told.training, "evaluation": told.evaluation}
    for name, user in (users | {f"regions.{name}": region for name, region in told.regions.items()}).items():
        if user.hardware not in told.hardware:
            known = ", ".join(told.hardware)
            raise BadConfig(f"{name}.hardware: no class {user.hardware!r} in hardware; there are: {known}")


def _phase(
    told: Description, lane: str, name: str, need: Need, compute: float, hardware: str, machines: int
) -> PlannedPhase:
    on = told.hardware[hardware]
    bound = roofline(need, on, told.reached, compute)
    return PlannedPhase(
        lane=lane,
        name=name,
        machines=machines,
        flops=need.flops,
        bytes=need.wire if bound.by == "network" else need.memory,
        seconds=bound.seconds / (machines * on.accelerators),
        money=bound.seconds / 3600 * on.price,
        by=bound.by,
    )


def _lane(
    told: Description, name: str, phases: Sequence[PlannedPhase], hardware: str, *, peak: float = 1.0, is_open: bool
) -> Lane:
    on, machines, cycle = told.hardware[hardware], phases[0].machines, told.turns.hours * 3600
    seconds = sum(phase.seconds for phase in phases)
    idle = max(0.0, cycle - seconds) / 3600 * machines * on.accelerators * on.price
    return Lane(
        name=name, machines=machines, load=seconds * peak / cycle, idle=idle, open=is_open, phases=tuple(phases)
    )


def _answering(
    told: Description, where: str, region: PlannedRegion, turns: float
) -> tuple[tuple[str, Need, float], ...]:
    """(name, need, share of the peak) of prefill and decode for this many turns."""
    on, at = told.hardware[region.hardware], min(told.training.copies, region.replica - 1)
    held = room(told.model, told.turns, on, told.reached, region.replica)
    if held < 1:
        least = least_replica(told.model, told.turns, on, told.reached)
        raise BadConfig(f"{where}: {region.replica} machines have no room for the model and one answer; {least} have")
    batch = min(float(region.batch), held)
    return (
        ("prefill", prefilled(told.model, told.turns, region.chunk, at) * turns, told.reached.prefill),
        ("decode", decoded(told.model, told.turns, batch, at) * turns, told.reached.decode),
    )


def learned_turns(told: Description) -> float:
    """The number of turns that a cycle learns from."""
    return told.turns.tokens / (told.turns.prompt + told.turns.answer)


def _serving(told: Description, name: str) -> Lane:
    region = told.regions[name]
    on, lane = told.hardware[region.hardware], f"serve {name}"
    part = region.share / sum(each.share for each in told.regions.values())
    work = _answering(told, f"regions.{name}.replica", region, learned_turns(told) * told.turns.served * part)
    machines = region.machines
    if not machines:
        seconds = sum(roofline(need, on, told.reached, compute).seconds for _, need, compute in work)
        replicas = (
            seconds * told.turns.peak / (told.turns.hours * 3600 * told.reached.busy * on.accelerators * region.replica)
        )
        machines = max(1, math.ceil(replicas)) * region.replica
    if machines % region.replica:
        raise BadConfig(f"regions.{name}.machines: {machines} are not a multiple of replica, {region.replica}")
    phases = [_phase(told, lane, what, need, compute, region.hardware, machines) for what, need, compute in work]
    return _lane(told, lane, phases, region.hardware, peak=told.turns.peak, is_open=not region.machines)


def trained(told: Description) -> tuple[tuple[str, Need], ...]:
    """(name, need) of the trainer's phases in a cycle; shared prompt tokens are computed once, and only answers are scored."""
    turns, model, training = told.turns, told.model, told.training
    new, old = turns.prompt * (1 - turns.cached) + turns.answer, turns.prompt * turns.cached
    one = Need(
        flops=planned_work(model).forward(new, causal_pairs(new, old), 0),
        wire=new * dispatched(model, training.copies),
    )
    forward = one * learned_turns(told)
    back = Need(flops=2 * forward.flops, wire=forward.wire) + forward * training.recomputed
    return (
        ("forward", forward),
        ("backward", back),
        ("reference", forward * training.references),
        ("optimizer", Need(memory=training.step_bytes * model.parameters * training.steps)),
    )


def _training(told: Description) -> Lane:
    training = told.training
    on, work = told.hardware[training.hardware], trained(told)
    fits = training.state_bytes * told.model.parameters / (on.accelerators * on.memory * told.reached.memory)
    if 0 < training.machines < fits:
        raise BadConfig(
            f"training.machines: {training.machines} machines have no room for the trainer's state; set it to "
            f"{math.ceil(fits)} or more, or to 0 for as many as keep up"
        )
    seconds = sum(roofline(need, on, told.reached, told.reached.train).seconds for _, need in work)
    wanted = seconds / (told.turns.hours * 3600 * told.reached.busy * on.accelerators)
    machines = training.machines or max(1, math.ceil(max(fits, wanted)))
    phases = [_phase(told, "train", name, need, told.reached.train, training.hardware, machines) for name, need in work]
    return _lane(told, "train", phases, training.hardware, is_open=not training.machines)


def _evaluation(told: Description) -> Lane:
    asked = told.evaluation
    # Candidates are served like the first region's users: the same replica, batch and lengths.
    region = next(iter(told.regions.values())).model_copy(update={"hardware": asked.hardware})
    turns = float(asked.candidates * asked.items * asked.draws * asked.versions)
    work = _answering(told, "evaluation.hardware", region, turns)
    machines = asked.replicas * region.replica
    phases = [_phase(told, "evaluate", what, need, compute, asked.hardware, machines) for what, need, compute in work]
    return _lane(told, "evaluate", phases, asked.hardware, is_open=False)


def _moved(told: Description, lane: str, rows: Sequence[tuple[str, float, float, float, str]]) -> Lane:
    """A lane without its own machines, from rows of (name, bytes, seconds, money, by) for one version."""
    steps = told.training.steps
    phases = tuple(
        PlannedPhase(
            lane=lane,
            name=name,
            machines=0,
            flops=0.0,
            bytes=size * steps,
            seconds=seconds * steps,
            money=money * steps,
            by=by,
        )
        for name, size, seconds, money, by in rows
    )
    load = sum(phase.seconds for phase in phases) / (told.turns.hours * 3600)
    return Lane(name=lane, machines=0, load=load, idle=0.0, open=False, phases=phases)


def _publication(told: Description, delivery: Delivery) -> Lane:
    whole = told.model.parameters * told.model.weight_bytes
    return _moved(
        told,
        "publish",
        (
            ("diff, encode, check", whole, delivery.encode_s, 0.0, "cores"),
            ("upload", delivery.bytes, delivery.upload_s, 0.0, "line"),
        ),
    )


def _following(told: Description, name: str, delivery: Delivery, replicas: int) -> Lane:
    region, (line_s, cores_s) = told.regions[name], delivery.regions[name]
    on, whole = told.hardware[region.hardware], told.model.parameters * told.model.weight_bytes
    inside = delivery.bytes * replicas
    return _moved(
        told,
        f"follow {name}",
        (
            ("fetch", delivery.bytes, line_s, delivery.bytes / 1e9 * told.publication.egress_per_gb, "line"),
            ("to each replica", inside, inside * 8 / 1e9 / told.publication.relay_gbit, 0.0, "relays"),
            ("decode, verify", whole * replicas, cores_s, 0.0, "cores"),
            ("swap", whole * replicas, whole / (region.replica * on.accelerators * on.load_rate), 0.0, "load"),
        ),
    )
