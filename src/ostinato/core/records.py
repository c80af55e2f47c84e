"""The records that pass between rooms: frozen, slotted, keyword-only.

Identifiers are strings chosen by the writer; times are Unix seconds (float); token ids are plain ints; log-probabilities are
natural logs of the distribution that was sampled from (logits divided by the temperature, before any top-p cut).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PolicyVersion:
    """A number that grows with training and the hash of the exact weights.

    Example: ``PolicyVersion(number=17, hash="9f2c...")``; number 0 is the model that training started from.
    """

    number: int
    hash: str

    def __str__(self) -> str:
        return f"v{self.number}@{self.hash[:12]}"


class Finish(StrEnum):
    """Why a turn ended. Only the first three can be trained on: the others were cut by something other than the policy."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"  # the client went away, or the operator cancelled
    ERROR = "error"  # the engine failed

    @property
    def trainable(self) -> bool:
        """True if the policy itself ended the turn (or ran into its token budget)."""
        return self in (Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS)


class Arm(StrEnum):
    """Which release a user was served. `control` never changes; `eval` is not a person."""

    LIVE = "live"
    CANARY = "canary"
    CONTROL = "control"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of sampled tokens made by one policy version.

    Example: a turn of 30 tokens that met a weight swap after 12: ``(Span(v7, 12), Span(v8, 18))``.
    """

    policy: PolicyVersion
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    r"""How tokens are drawn. `temperature` 0 is greedy; `seed` None lets the engine choose one and record it.

    Example: ``Sampling(temperature=1.0, top_p=1.0, max_tokens=64, stop=("\n\n",), seed=7)``.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call, as it was sampled: exact prompt ids in, exact sampled ids out.

    Example::

        Turn(id="chatcmpl-3f:0", episode="e1", parent=None, user="u42", tenant="default", arm=Arm.LIVE, propensity=0.8,
             prompt_ids=(1, 2, 3), sampled_ids=(7, 9), logprobs=(-0.1, -2.3), spans=(Span(policy=v7, tokens=2),),
             sampling=Sampling(max_tokens=64), finish=Finish.STOP, text="hi", started_at=10.0, ended_at=10.4)

    `parent` names the turn whose tokens are a prefix of `prompt_ids`. `sampled_ids`, `logprobs` and the spans' token counts
    have the same length T. `propensity` is the probability with which the user was put in `arm`.

    `numerics` is the id of the contract that the logprobs were computed under (`core.numerics`), "" if it is not known.
    `routes` are the encoded expert ids of the P + T - 1 tokens that were computed (P: the prompt's length), b"" for a model
    without experts.
    """

    id: str
    episode: str
    parent: str | None
    user: str
    tenant: str
    arm: Arm
    propensity: float
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    sampling: Sampling
    finish: Finish
    text: str
    started_at: float
    ended_at: float
    numerics: str = ""
    routes: bytes = b""

    @property
    def oldest(self) -> int | None:
        """The lowest policy number among the sampled tokens; None when nothing was sampled."""
        return min((span.policy.number for span in self.spans), default=None)

    def versions_T(self) -> tuple[PolicyVersion, ...]:
        """The policy version of each sampled token."""
        return tuple(span.policy for span in self.spans for _ in range(span.tokens))


class Source(StrEnum):
    """Who observed a signal."""

    HUMAN = "human"
    IMPLICIT = "implicit"
    CODE = "code"
    LLM = "llm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Something a person or a program did, as observed. Idempotent by `id`; `retracts` names a signal to forget.

    Example: ``Signal(id="s1", turn="chatcmpl-3f:0", name="accepted", value=1.0, source=Source.HUMAN, occurred_at=12.0, received_at=12.5)``
    """

    id: str
    turn: str
    name: str
    value: float
    source: Source
    occurred_at: float
    received_at: float
    correction: str | None = None
    comment: str | None = None
    retracts: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The scalar that a versioned reward function made of a turn's signals. At most one per turn.

    Example: ``Reward(turn="chatcmpl-3f:0", value=0.75, function="copilot@1", signals=("s1",), at=42.0)``
    """

    turn: str
    value: float
    function: str
    signals: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A reward function's answer while the maturity window is open. `until` is when to ask again (Unix seconds)."""

    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdback:
    """Why a served turn is not trained on. At most one per turn; a turn in a batch has none.

    Example: ``Holdback(turn="chatcmpl-3f:0", reason="finish:abort", at=42.0)``
    """

    turn: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The turns of one optimizer step, written before the step is taken, so that a killed step is taken again alike.

    `step` counts from 1. `reference` is the release that the KL penalty is measured against. `credits` are the per-turn
    advantages in the order of `turns`. `base` is set where the trainer first went back to the weights of a standing release,
    because everything newer had been refused; otherwise a step starts from the step before it.

    Example: ``Batch(step=3, turns=("a:0", "b:0"), credits=(0.9, -1.1), reference=v2, at=50.0)``
    """

    step: int
    turns: tuple[str, ...]
    credits: tuple[float, ...]
    reference: PolicyVersion
    at: float
    base: PolicyVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEvent:
    """One line of the release ledger. `action` is a verb: published, evaluated, canary, shipped, blocked, rolled_back.

    Example: ``ReleaseEvent(id="r9", action="shipped", policy=v9, previous=v7, reason="+4.1 pp, lower bound -0.2", detail={...}, at=60.0)``
    """

    id: str
    action: str
    policy: PolicyVersion
    previous: PolicyVersion | None
    reason: str
    detail: Mapping[str, Any]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a contract's id stands for: written before the first turn that names it, so that the id can be read back later.

    `contract` is `core.numerics.Contract.to_json()`.

    Example: ``Stamp(id=contract.id, contract=contract.to_json(), at=9.0)``
    """

    id: str
    contract: str
    at: float


Row = Turn | Signal | Reward | Holdback | Batch | ReleaseEvent | Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A turn with its credit, ready for the trainer: one advantage for all of the turn's sampled tokens."""

    turn: Turn
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True, eq=False)
class WeightArray:
    """One tensor as bytes: a safetensors dtype name ("BF16", "F32"), a shape, and a flat read-only uint8 array.

    Example: ``WeightArray("BF16", (576, 576), data)`` where ``data.nbytes == 576 * 576 * 2``.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


Weights = Mapping[str, WeightArray]
"""Tensor name -> bytes. The common currency of trainer, weight store and engine; needs no torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A policy version with its full weights in memory."""

    policy: PolicyVersion
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """What a hot swap cost: seconds during which no token could be made, and the streams that went on across it."""

    slot: str
    policy: PolicyVersion
    pause_s: float
    streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A request to the engine: exact prompt ids, how to sample, how many samples, from which slot (a ref name: live, ...)."""

    id: str
    slot: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of one sample. `finish` is set on the sample's last chunk only. `text` is what may be shown.

    `ids`, `logprobs` have one entry per token, all made by `policy`. Text that could still become part of a stop string is
    withheld until it cannot; a stop string itself is never shown, though its tokens are in `ids`. `routes` is set on the
    sample's last chunk only: the encoded expert ids of its prompt and sampled tokens (see `Turn.routes`).
    """

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy: PolicyVersion
    text: str
    finish: Finish | None = None
    seed: int = 0
    routes: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What one optimizer step did. `metrics` are scalars for the log and the screen."""

    step: int
    policy_number: int
    weights: Weights
    metrics: Mapping[str, float]


class Verdict(StrEnum):
    """The gate's answer. EXTEND means: not enough evidence yet, draw more."""

    SHIP = "SHIP"
    BLOCK = "BLOCK"
    EXTEND = "EXTEND"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScore:
    """One graded sample of one suite item: `score` in [0, 1]. Items are paired across policies by (item, draw)."""

    item: str
    draw: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Candidate against live on the same items. Differences are candidate minus live, in [-1, 1]."""

    suite: str
    suite_hash: str
    candidate: PolicyVersion
    live: PolicyVersion
    candidate_mean: float
    live_mean: float
    difference: float
    lower: float
    upper: float
    items: int
    draws: int
    margin: float
    power: float
    verdict: Verdict
    reason: str
