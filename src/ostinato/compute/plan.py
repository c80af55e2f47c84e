"""Capacity planning of one training cycle: machines, bytes, seconds and cost per phase, and the bottleneck.

Every default of the inputs states its source: measured here, published by others, computed or assumed.

Lanes run in parallel; the phases of a lane run one after another. A lane's load is the share of a cycle in which it is busy, at peak
traffic for serving lanes. If the description leaves a lane's machines open, the plan sizes them by the load. Of the other lanes, the one
with the highest load is the bottleneck: it saturates first, when cycles become shorter by the factor 1/load.

A phase's time follows the roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009): the maximum of the times for its operations,
its memory traffic and its network traffic, which overlap.
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


_UNBOUNDED = 1e30


def _of(default: float, description: str, source: str, *, least: float = 1e-12, most: float = _UNBOUNDED) -> Any:
    return Field(default=default, ge=least, le=most, description=description, json_schema_extra={"source": source})


def _count(default: int, description: str, source: str, *, least: int = 1) -> Any:
    return Field(default=default, ge=least, le=10**9, description=description, json_schema_extra={"source": source})


def _share(default: float, description: str, source: str) -> Any:
    return _of(default, description, source, most=1.0)


_KIMI = "published: config.json of Kimi K2 (1.04e12 parameters, 32e9 of them active)"
_DEEPSEEK = "published: DeepSeek, inference system overview of March 2025"


class PlannedModel(BaseModel, frozen=True, extra="forbid"):
    """The model: a mixture of experts, or a dense model if `experts` is 0."""

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
            raise ValueError("active is less than parameters x experts_per_token / experts")
        return self


class PlannedTurns(BaseModel, frozen=True, extra="forbid"):
    """The turns that are served, and those that a cycle learns from."""

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
    """A class of machines with equal accelerators. Rates are the peaks of one accelerator; `PlannedShares` has the utilisation."""

    accelerators: int = _count(8, "Accelerators per machine.", "published: NVIDIA HGX")
    flops: float = _of(989e12, "Dense bf16 operations per second.", "published: NVIDIA data sheet")
    memory: float = _of(141e9, "Bytes of memory.", "published: NVIDIA data sheet, H200")
    memory_rate: float = _of(4.8e12, "Memory bandwidth, in bytes per second.", "published: NVIDIA data sheet, H200")
    network: float = _of(50e9, "Bytes per second to other machines.", "assumed: 400 Gbit/s for each accelerator")
    load_rate: float = _of(50e9, "Bytes per second from the machine's own memory.", "assumed: PCIe 5, 64e9 at most")
    price: float = _of(2.5, "Price of an accelerator-hour, in the currency of your choice.", "assumed")


class PlannedShares(BaseModel, frozen=True, extra="forbid"):
    """Utilisation: the shares of the peak rates that are reached."""

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
    """The trainer's machines, and its work per token and per parameter."""

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
    """The evaluation of candidates and of the versions that they are compared with."""

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
    """The publication of a version. Sizes of deltas, and seconds for transfer and coding, are computed as by `ostinato weights plan`."""

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
    """The inputs of a plan. The defaults are a trillion parameters, ten billion tokens per cycle and four regions.

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
        """Yield (key, value, source, meaning) of every input."""
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


# ---------------------------------------------------------------- work of a phase, and its time by the roofline model


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The work of a phase: operations, bytes from memory and bytes over the network, summed over all accelerators.

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
    """Accelerator-seconds, and the resource that bounds them: "operations", "memory" or "network"."""

    seconds: float
    by: str


def roofline(need: Need, on: PlannedHardware, reached: PlannedShares, compute: float) -> AcceleratorTime:
    """Return how long one accelerator would take. `compute`: the share of the peak FLOP/s that this phase reaches."""
    times = {
        "operations": need.flops / (on.flops * compute),
        "memory": need.memory / (on.memory_rate * reached.memory_rate),
        "network": need.wire / (on.network * reached.network),
    }
    by = max(times, key=times.__getitem__)
    return AcceleratorTime(seconds=times[by], by=by)


def planned_work(model: PlannedModel) -> TokenWork:
    """Return the work per token: two operations per active parameter, the head included, plus attention (see `compute.ledger`)."""
    return TokenWork(body=2 * model.active, head=0, pair=pair_work(model.layers, model.heads, model.head_size))


def cache_bytes(model: PlannedModel) -> float:
    """Return the bytes that one token adds to the KV cache: a key and a value in each layer."""
    return 2.0 * model.layers * model.kv_heads * model.head_size * model.cache_bytes


def parameters_read(model: PlannedModel, tokens: float) -> float:
    """Return the number of parameters read by one pass over a batch of `tokens`, if all experts are equally likely.

    parameters = d + x and active = d + x k/E give the experts' parameters x; at least one of n tokens is routed to a fraction
    1 - (1 - k/E)^n of them.

    Example: all parameters for a large batch, `active` for one token.
    """
    if not model.experts or model.experts == model.experts_per_token:
        return model.parameters
    used = model.experts_per_token / model.experts
    experts = (model.parameters - model.active) / (1 - used)
    return model.parameters - experts * (1 - used) ** tokens


def dispatch_bytes(model: PlannedModel, copies: float) -> float:
    """Return the expert-parallel traffic in bytes per token and pass: to `copies` machines and back in each layer, in 16 bits."""
    return 2.0 * 2.0 * model.layers * copies * model.hidden if model.experts else 0.0


def prefill_work(model: PlannedModel, turns: PlannedTurns, chunk: float, copies: float) -> Need:
    """Return the work of one turn's prefill: the prompt without its cached part. Weights are read once per `chunk` tokens."""
    new, old = turns.prompt * (1 - turns.cached), turns.prompt * turns.cached
    return Need(
        flops=planned_work(model).forward(new, causal_pairs(new, old), 0),
        memory=new / chunk * parameters_read(model, chunk) * model.weight_bytes + turns.prompt * cache_bytes(model),
        wire=new * dispatch_bytes(model, copies),
    )


def decode_work(model: PlannedModel, turns: PlannedTurns, batch: float, copies: float) -> Need:
    """Return the work of one turn's decoding, token by token, in a batch of `batch` turns that share the weight reads."""
    pairs = causal_pairs(turns.answer, turns.prompt)
    return Need(
        flops=planned_work(model).forward(turns.answer, pairs, 0),
        memory=turns.answer / batch * parameters_read(model, batch) * model.weight_bytes + pairs * cache_bytes(model),
        wire=turns.answer * dispatch_bytes(model, copies),
    )


def fitting_answers(
    model: PlannedModel, turns: PlannedTurns, on: PlannedHardware, reached: PlannedShares, replica: int
) -> float:
    """Return how many answers' KV caches fit beside the weights on a replica of `replica` machines. Below 1 the model does not fit.

    Each cache contains a prompt and, on average, half an answer; no prefix is shared.
    """
    free = replica * on.accelerators * on.memory * reached.memory - model.parameters * model.weight_bytes
    return free / ((turns.prompt + turns.answer / 2) * cache_bytes(model))


def smallest_replica(model: PlannedModel, turns: PlannedTurns, on: PlannedHardware, reached: PlannedShares) -> int:
    """Return the smallest number of machines on which the weights and one answer's KV cache fit."""
    need = model.parameters * model.weight_bytes + (turns.prompt + turns.answer / 2) * cache_bytes(model)
    return int(-(-need // (on.accelerators * on.memory * reached.memory)))


# ---------------------------------------------------------------- the plan of a cycle


NOT_COUNTED = (
    "norms, activations, token sampling, embedding lookups; work wasted by speculative decoding or failed answers",
    "in training: pipeline bubbles, and gradient exchange between replicas of the trainer; weights stay, tokens travel",
    "bucket requests and storage (see `ostinato weights plan`); machines without accelerators: gateways, log, sandboxes",
    "assumed: all experts are equally likely; prefill, decode and training reach the listed shares of the peaks at every size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The delivery of one version, from the weight store's own plan.

    `bytes`: size of its delta. `encode_s`, `upload_s`: seconds to encode it and to upload it to the bucket. `regions`: by region, the
    seconds of the download and of decoding.

    Example: ``Delivery(bytes=1e10, encode_s=3.0, upload_s=28.0, regions={"europe": (28.0, 2.0)})``
    """

    bytes: float
    encode_s: float
    upload_s: float
    regions: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPhase:
    """The cost of one phase per cycle. `by`: the bounding resource. `bytes`: read from memory, or sent if a network bounds the phase.
    `money`: the price of its busy time.
    """

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
    """Phases that run one after another on the same machines.

    `load`: the share of the cycle in which they are busy. `idle`: the price of the machines in the rest of the cycle. `open`: the
    description left their number open.
    """

    name: str
    machines: int
    load: float
    idle: float
    open: bool
    phases: tuple[PlannedPhase, ...]

    @property
    def widest(self) -> PlannedPhase:
        """The phase that takes the longest."""
        return max(self.phases, key=lambda phase: phase.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclePlan:
    """The plan of a cycle. `lag`: by region, seconds from the end of a step until its version serves there, without evaluation."""

    lanes: tuple[Lane, ...]
    lag: Mapping[str, float]
    bottleneck: Lane

    @property
    def machines(self) -> int:
        """The number of machines of all lanes."""
        return sum(lane.machines for lane in self.lanes)

    @property
    def money(self) -> float:
        """The cost of a cycle, including idle machines and egress."""
        return sum(lane.idle + sum(phase.money for phase in lane.phases) for lane in self.lanes)


def plan_cycle(inputs: Description, delivery: Delivery) -> CyclePlan:
    """Compute the plan of a cycle. Raises BadConfig, which names the field, for inputs that contradict each other."""
    _check_classes(inputs)
    serving = {name: _serving(inputs, name) for name in inputs.regions}
    replicas = {name: serving[name].machines // region.replica for name, region in inputs.regions.items()}
    follow = {name: _following(inputs, name, delivery, replicas[name]) for name in inputs.regions}
    lanes = (
        *serving.values(),
        _training(inputs),
        _evaluation(inputs),
        _publication(inputs, delivery),
        *follow.values(),
    )
    fixed = [lane for lane in lanes if not lane.open]
    ahead = delivery.encode_s + delivery.upload_s
    return CyclePlan(
        lanes=lanes,
        lag={
            name: ahead + sum(each.seconds for each in follow[name].phases) / inputs.training.steps for name in follow
        },
        bottleneck=max(fixed, key=lambda lane: lane.load),
    )


def _check_classes(inputs: Description) -> None:
    users = {"training": inputs.training, "evaluation": inputs.evaluation}
    for name, user in (users | {f"regions.{name}": region for name, region in inputs.regions.items()}).items():
        if user.hardware not in inputs.hardware:
            known = ", ".join(inputs.hardware)
            raise BadConfig(f"{name}.hardware: no class {user.hardware!r} in hardware; defined: {known}")


def _phase(
    inputs: Description, lane: str, name: str, need: Need, compute: float, hardware: str, machines: int
) -> PlannedPhase:
    on = inputs.hardware[hardware]
    bound = roofline(need, on, inputs.reached, compute)
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
    inputs: Description, name: str, phases: Sequence[PlannedPhase], hardware: str, *, peak: float = 1.0, is_open: bool
) -> Lane:
    on, machines, cycle = inputs.hardware[hardware], phases[0].machines, inputs.turns.hours * 3600
    seconds = sum(phase.seconds for phase in phases)
    idle = max(0.0, cycle - seconds) / 3600 * machines * on.accelerators * on.price
    return Lane(
        name=name, machines=machines, load=seconds * peak / cycle, idle=idle, open=is_open, phases=tuple(phases)
    )


def _sampling_work(
    inputs: Description, where: str, region: PlannedRegion, turns: float
) -> tuple[tuple[str, Need, float], ...]:
    """Return (name, work, share of the peak FLOP/s) of prefill and decode for this many turns. `where`: the field that an error names."""
    on, at = inputs.hardware[region.hardware], min(inputs.training.copies, region.replica - 1)
    fitting = fitting_answers(inputs.model, inputs.turns, on, inputs.reached, region.replica)
    if fitting < 1:
        least = smallest_replica(inputs.model, inputs.turns, on, inputs.reached)
        raise BadConfig(
            f"{where}: {region.replica} machines cannot hold the model and one answer's cache; it takes at least {least}"
        )
    batch = min(float(region.batch), fitting)
    return (
        ("prefill", prefill_work(inputs.model, inputs.turns, region.chunk, at) * turns, inputs.reached.prefill),
        ("decode", decode_work(inputs.model, inputs.turns, batch, at) * turns, inputs.reached.decode),
    )


def learned_turns(inputs: Description) -> float:
    """Return the number of turns that a cycle learns from."""
    return inputs.turns.tokens / (inputs.turns.prompt + inputs.turns.answer)


def _serving(inputs: Description, name: str) -> Lane:
    region = inputs.regions[name]
    on, lane = inputs.hardware[region.hardware], f"serve {name}"
    part = region.share / sum(each.share for each in inputs.regions.values())
    work = _sampling_work(inputs, f"regions.{name}.replica", region, learned_turns(inputs) * inputs.turns.served * part)
    machines = region.machines
    if not machines:
        seconds = sum(roofline(need, on, inputs.reached, compute).seconds for _, need, compute in work)
        replicas = (
            seconds
            * inputs.turns.peak
            / (inputs.turns.hours * 3600 * inputs.reached.busy * on.accelerators * region.replica)
        )
        machines = max(1, math.ceil(replicas)) * region.replica
    if machines % region.replica:
        raise BadConfig(f"regions.{name}.machines: {machines} is not a multiple of replica, {region.replica}")
    phases = [_phase(inputs, lane, what, need, compute, region.hardware, machines) for what, need, compute in work]
    return _lane(inputs, lane, phases, region.hardware, peak=inputs.turns.peak, is_open=not region.machines)


def training_work(inputs: Description) -> tuple[tuple[str, Need], ...]:
    """Return (name, work) of the trainer's phases per cycle. Shared prompt tokens are computed once."""
    turns, model, training = inputs.turns, inputs.model, inputs.training
    new, old = turns.prompt * (1 - turns.cached) + turns.answer, turns.prompt * turns.cached
    one = Need(
        flops=planned_work(model).forward(new, causal_pairs(new, old), 0),
        wire=new * dispatch_bytes(model, training.copies),
    )
    forward = one * learned_turns(inputs)
    back = Need(flops=2 * forward.flops, wire=forward.wire) + forward * training.recomputed
    return (
        ("forward", forward),
        ("backward", back),
        ("reference", forward * training.references),
        ("optimizer", Need(memory=training.step_bytes * model.parameters * training.steps)),
    )


def _training(inputs: Description) -> Lane:
    training = inputs.training
    on, work = inputs.hardware[training.hardware], training_work(inputs)
    fits = training.state_bytes * inputs.model.parameters / (on.accelerators * on.memory * inputs.reached.memory)
    if 0 < training.machines < fits:
        raise BadConfig(
            f"training.machines: {training.machines} machines cannot hold the trainer's state; set {math.ceil(fits)} or more, or 0 "
            "for as many as keep up"
        )
    seconds = sum(roofline(need, on, inputs.reached, inputs.reached.train).seconds for _, need in work)
    wanted = seconds / (inputs.turns.hours * 3600 * inputs.reached.busy * on.accelerators)
    machines = training.machines or max(1, math.ceil(max(fits, wanted)))
    phases = [
        _phase(inputs, "train", name, need, inputs.reached.train, training.hardware, machines) for name, need in work
    ]
    return _lane(inputs, "train", phases, training.hardware, is_open=not training.machines)


def _evaluation(inputs: Description) -> Lane:
    evaluation = inputs.evaluation
    # candidates are served as in the first region: the same replica, batch and lengths
    region = next(iter(inputs.regions.values())).model_copy(update={"hardware": evaluation.hardware})
    turns = float(evaluation.candidates * evaluation.items * evaluation.draws * evaluation.versions)
    work = _sampling_work(inputs, "evaluation.hardware", region, turns)
    machines = evaluation.replicas * region.replica
    phases = [
        _phase(inputs, "evaluate", what, need, compute, evaluation.hardware, machines) for what, need, compute in work
    ]
    return _lane(inputs, "evaluate", phases, evaluation.hardware, is_open=False)


def _transfer_lane(inputs: Description, lane: str, rows: Sequence[tuple[str, float, float, float, str]]) -> Lane:
    """Return a lane without machines of its own, from rows of (name, bytes, seconds, money, by) per version."""
    steps = inputs.training.steps
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
    load = sum(phase.seconds for phase in phases) / (inputs.turns.hours * 3600)
    return Lane(name=lane, machines=0, load=load, idle=0.0, open=False, phases=phases)


def _publication(inputs: Description, delivery: Delivery) -> Lane:
    whole = inputs.model.parameters * inputs.model.weight_bytes
    return _transfer_lane(
        inputs,
        "publish",
        (
            ("diff, encode, check", whole, delivery.encode_s, 0.0, "cores"),
            ("upload", delivery.bytes, delivery.upload_s, 0.0, "line"),
        ),
    )


def _following(inputs: Description, name: str, delivery: Delivery, replicas: int) -> Lane:
    region, (line_s, cores_s) = inputs.regions[name], delivery.regions[name]
    on, whole = inputs.hardware[region.hardware], inputs.model.parameters * inputs.model.weight_bytes
    inside = delivery.bytes * replicas
    return _transfer_lane(
        inputs,
        f"follow {name}",
        (
            ("fetch", delivery.bytes, line_s, delivery.bytes / 1e9 * inputs.publication.egress_per_gb, "line"),
            ("to each replica", inside, inside * 8 / 1e9 / inputs.publication.relay_gbit, 0.0, "relays"),
            ("decode, verify", whole * replicas, cores_s, 0.0, "cores"),
            ("swap", whole * replicas, whole / (region.replica * on.accelerators * on.load_rate), 0.0, "load"),
        ),
    )
