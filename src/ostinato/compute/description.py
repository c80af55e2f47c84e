"""The inputs of a cycle plan. Every default states its source: measured here, published by others, computed or assumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

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
