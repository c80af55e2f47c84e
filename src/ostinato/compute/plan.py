"""A cycle by phase: machines, bytes, seconds, money, and the first bottleneck.

Every default of its inputs states its source: measured here, published by others, computed or assumed.

Lanes work in parallel, the phases of a lane one after another. A lane's load is the share of a cycle in which it works, at the peak for
lanes that serve. If the description leaves a number of machines open, it is set as the load requires. Of the other lanes the one with the
highest load is the first bottleneck: it is full when a cycle is shortened by 1/load.

A phase's time is the roofline's (Williams, Waterman and Patterson, CACM 52(4), 2009): it takes as long as the slowest of its operations,
its bytes from memory and its bytes over the network, if they overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from ostinato.compute.ledger import TokenWork, causal_pairs, pair_work
from ostinato.core.errors import BadConfig

# ---------------------------------------------------------------- a plan's inputs


_MOST = 1e30


def _of(default: float, description: str, source: str, *, least: float = 1e-12, most: float = _MOST) -> Any:
    return Field(default=default, ge=least, le=most, description=description, json_schema_extra={"source": source})


def _count(default: int, description: str, source: str, *, least: int = 1) -> Any:
    return Field(default=default, ge=least, le=10**9, description=description, json_schema_extra={"source": source})


def _share(default: float, description: str, source: str) -> Any:
    return _of(default, description, source, most=1.0)


_KIMI = "published: config.json of Kimi K2 (1.04e12 parameters, 32e9 of them active)"
_DEEPSEEK = "published: DeepSeek, inference system overview of March 2025"


class PlannedModel(BaseModel, frozen=True, extra="forbid"):
    """A mixture of experts, or with `experts = 0` a dense model."""

    parameters: float = _of(1.04e12, "Parameters in total.", _KIMI, least=1)
    active: float = _of(32e9, "Parameters that one token activates.", _KIMI, least=1)
    layers: int = _count(61, "Layers.", _KIMI)
    hidden: int = _count(7168, "Width of the hidden state.", _KIMI)
    heads: int = _count(64, "Query heads.", _KIMI)
    kv_heads: int = _count(8, "Key-value heads, which are cached.", "assumed: grouped-query attention")
    head_size: int = _count(128, "Width of a head.", _KIMI)
    experts: int = _count(384, "Experts per layer; 0: dense.", _KIMI, least=0)
    experts_per_token: int = _count(8, "Experts per token.", _KIMI)
    weight_bytes: float = _of(2.0, "Bytes per weight, as served and published.", "assumed: bf16")
    cache_bytes: float = _of(2.0, "Bytes per cached key or value.", "assumed: bf16")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.active > self.parameters:
            raise ValueError("active is more than parameters")
        if not self.experts and self.active < self.parameters:
            raise ValueError("active is less than parameters, but experts is 0: a dense model uses all")
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError("experts_per_token is more than experts")
        if self.experts and self.active < self.parameters * self.experts_per_token / self.experts:
            raise ValueError("active is less than experts_per_token of experts make of parameters")
        return self


class PlannedTurns(BaseModel, frozen=True, extra="forbid"):
    """The turns that are served and that a cycle learns from."""

    tokens: float = _of(
        10e9, "Prompt and answer tokens of the turns that one cycle learns from.", "assumed: 'billions' is published"
    )
    hours: float = _of(5.0, "Length of a cycle, in hours.", "published: Cursor, real-time RL (about five hours)")
    served: float = _of(1.0, "Turns served per turn that is learned from.", "assumed", least=1)
    peak: float = _of(2.0, "Peak traffic divided by mean traffic.", "assumed", least=1)
    prompt: float = _of(8000, "Tokens per prompt.", "assumed", least=1)
    answer: float = _of(1000, "Sampled tokens per turn.", "assumed", least=1)
    cached: float = Field(
        default=0.563,
        ge=0,
        lt=1,
        description="Share of a prompt's tokens that a cache or a shared prefix saves, in serving and in training.",
        json_schema_extra={
            "source": f"{_DEEPSEEK} (56.3% of input tokens); here 2,800 of 6,300 in the trainer (measurements of training, The loop closes)"
        },
    )


class PlannedHardware(BaseModel, frozen=True, extra="forbid"):
    """A class of machines with equal accelerators. Rates are peaks of one accelerator; `PlannedShares` says what is reached of them."""

    accelerators: int = _count(8, "Accelerators per machine.", "published: NVIDIA HGX")
    flops: float = _of(989e12, "Dense bf16 operations per second.", "published: NVIDIA data sheet")
    memory: float = _of(141e9, "Bytes of memory.", "published: NVIDIA data sheet, H200")
    memory_rate: float = _of(4.8e12, "Memory bandwidth, in bytes per second.", "published: NVIDIA data sheet, H200")
    network: float = _of(50e9, "Bytes per second to other machines.", "assumed: 400 Gbit/s for each accelerator")
    load_rate: float = _of(50e9, "Bytes per second from the machine's own memory.", "assumed: PCIe 5, 64e9 at most")
    price: float = _of(2.5, "Price of an accelerator-hour, in the currency of your choice.", "assumed")


class PlannedShares(BaseModel, frozen=True, extra="forbid"):
    """The shares of the peaks that are reached."""

    prefill: float = _share(
        0.30,
        "Share of `flops` reached in prefill.",
        f"{_DEEPSEEK}: 73,700 tokens/s a node, 56.3% cached, 37e9 active; in FP8",
    )
    decode: float = _share(0.50, "Share of `flops` reached in decode, if not bound by memory.", "assumed")
    train: float = _share(
        0.35,
        "Share of `flops` reached in training.",
        "published: DeepSeek-V3 (180,000 H800 hours for 1e12 tokens); in FP8",
    )
    memory_rate: float = _share(
        0.58, "Share of `memory_rate` reached.", "published: Cursor, warp decode (3.95 TB/s of a B200)"
    )
    network: float = _share(0.8, "Share of `network` reached.", "assumed")
    memory: float = _share(0.9, "Share of `memory` that weights, cache and states may fill.", "assumed")
    busy: float = _share(0.8, "Share of the time that a machine computes at peak traffic.", "assumed")


class PlannedTraining(BaseModel, frozen=True, extra="forbid"):
    """The trainer's machines and its work per token."""

    hardware: str = Field(default="h200", description="Hardware class.", json_schema_extra={"source": "assumed"})
    machines: int = _count(0, "Machines; 0: as many as needed to keep up with `turns`.", "computed", least=0)
    steps: int = _count(10, "Optimizer steps per cycle; each is published.", "assumed")
    recomputed: float = _of(
        1.0, "Forward passes recomputed in the backward pass.", "assumed: full recomputation", least=0
    )
    references: float = _of(
        1.0,
        "Additional forward passes, of the KL penalty's reference.",
        "measured here: what the trainer does",
        least=0,
    )
    state_bytes: float = _of(
        18.0,
        "Bytes per parameter: fp32 master, two moments and gradient, bf16 weight.",
        "measured here: our trainer's arrays",
    )
    step_bytes: float = _of(
        30.0, "Bytes per parameter that an AdamW step reads or writes.", "computed: 16 read, 14 written"
    )
    copies: float = _of(
        4.0,
        "Other machines that a token is sent to per layer of experts, in serving at most those of its replica.",
        "published: DeepSeek-V3 (at most 4 nodes)",
        least=0,
    )


class PlannedEvaluation(BaseModel, frozen=True, extra="forbid"):
    """The evaluation of a candidate and of the versions that it is compared with."""

    hardware: str = Field(default="h200", description="Hardware class.", json_schema_extra={"source": "assumed"})
    replicas: int = _count(1, "Replicas that answer the suite.", "assumed")
    candidates: int = _count(1, "Versions evaluated per cycle.", "assumed", least=0)
    items: int = _count(
        2000,
        "Items of the suite.",
        "computed: margins of 2.2 points, simulated (measurements of releases, Many small losses)",
    )
    draws: int = _count(8, "Answers per item.", "computed: as there")
    versions: int = _count(4, "Versions compared: candidate, live, best, anchor.", "measured here: what the gate does")


class PlannedPublication(BaseModel, frozen=True, extra="forbid"):
    """How a version is published; the sizes of deltas and the seconds on lines and cores are those of `ostinato weights plan`."""

    changed: float = _of(
        0.02,
        "Share of the weights that a version changes.",
        "published: Fireworks (above 98% unchanged); here 0.3 to 2.3%",
        most=0.25,
    )
    factor: float = _of(
        1.0,
        "Bits of a delta divided by n H(p).",
        "measured here: 0.73 to 1.54 (measurements of weights, What weights cost to move)",
    )
    shards: int = _count(16, "Parts of the model that are published as separate chains.", "assumed")
    cores: int = _count(16, "Cores per shard.", "assumed")
    encode: float = _of(2.0, "GB of weights that a core encodes per second.", "measured here: 2.3% changed at random")
    decode: float = _of(2.8, "GB of weights that a core decodes per second.", "measured here: 2.3% changed at random")
    gbit: float = _of(10.0, "Bandwidth from the trainer to the bucket, in Gbit/s.", "assumed")
    rtt_ms: float = _of(10.0, "Round-trip time on this line, in milliseconds.", "assumed")
    streams: int = _count(64, "Concurrent connections, on this and on every region's line.", "assumed")
    relay_gbit: float = _of(400.0, "Total bandwidth from a region's relays to its machines, in Gbit/s.", "assumed")
    egress_per_gb: float = _of(0.02, "Price per GB that a region reads.", "assumed", least=0)


class PlannedRegion(BaseModel, frozen=True, extra="forbid"):
    """A region that serves turns."""

    share: float = _share(0.25, "Share of all traffic, relative to the other regions' shares.", "assumed")
    hardware: str = Field(
        default="h200", description="Hardware class that serves.", json_schema_extra={"source": "assumed"}
    )
    machines: int = _count(0, "Machines; 0: as many as needed at the peak.", "computed", least=0)
    replica: int = _count(4, "Machines per replica of the model.", "assumed")
    batch: int = _count(1024, "Answers that a replica samples at once, if the cache has room.", "assumed")
    chunk: int = _count(16384, "Prompt tokens computed at once.", "assumed")
    gbit: float = _of(10.0, "Bandwidth from the bucket, in Gbit/s.", "assumed")
    rtt_ms: float = _of(
        43.0, "Round-trip time on this line, in milliseconds.", "assumed: of the distances that were measured here"
    )


def _regions() -> dict[str, PlannedRegion]:
    return {
        "us-east": PlannedRegion(share=0.35, rtt_ms=43),
        "us-west": PlannedRegion(share=0.20, rtt_ms=58),
        "europe": PlannedRegion(share=0.30, rtt_ms=145),
        "asia": PlannedRegion(share=0.15, rtt_ms=300),
    }


class Description(BaseModel, frozen=True, extra="forbid"):
    """The whole description. The defaults are a trillion parameters, ten billion tokens a cycle and four regions.

    Example: ``Description.model_validate({"turns": {"tokens": 1e9}})``
    """

    model: PlannedModel = PlannedModel()
    turns: PlannedTurns = PlannedTurns()
    training: PlannedTraining = PlannedTraining()
    evaluation: PlannedEvaluation = PlannedEvaluation()
    publication: PlannedPublication = PlannedPublication()
    reached: PlannedShares = PlannedShares()
    regions: dict[str, PlannedRegion] = Field(default_factory=_regions, min_length=1, description="Regions by name.")
    hardware: dict[str, PlannedHardware] = Field(
        default_factory=lambda: {"h200": PlannedHardware()}, min_length=1, description="Hardware classes by name."
    )

    def assumptions(self) -> Iterator[tuple[str, Any, str, str]]:
        """(key, value, source, meaning) of every input of the plan."""
        for name in type(self).model_fields:
            part = getattr(self, name)
            for key, each in part.items() if isinstance(part, dict) else ((None, part),):
                where = name if key is None else f"{name}.{key}"
                for leaf, field in type(each).model_fields.items():
                    source = field.json_schema_extra["source"]
                    set_by_hand = name in self.model_fields_set and leaf in each.model_fields_set
                    yield (
                        f"{where}.{leaf}",
                        getattr(each, leaf),
                        "given" if set_by_hand else source,
                        field.description or "",
                    )


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
    """Two operations per active parameter, including the head's, plus attention: see `compute.ledger`."""
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
