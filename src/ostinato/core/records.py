"""The records that pass between rooms: frozen, slotted, keyword-only.

Identifiers are strings chosen by the writer; times are Unix seconds (float); token ids are plain ints; log-probabilities are
natural logs of the distribution that was sampled from (logits with biases, penalties and grammar constraints applied, divided by
the temperature, renormalised over what `top_p` leaves open).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from ostinato.core.notices import Alarm, Forgotten, Stamp
from ostinato.core.steering import Basis, DialPrior, DialSet, Steered


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PolicyVersion:
    """A number that increases with training, and the hash of the exact weights.

    Example: ``PolicyVersion(number=17, hash="9f2c...")``; number 0 is the model that training started from.
    """

    number: int
    hash: str

    def __str__(self) -> str:
        return f"v{self.number}@{self.hash[:12]}"


class Finish(StrEnum):
    """Why a turn ended. Turns with the last three reasons cannot be trained on: the policy is not responsible for how they ended. Turns
    cut off by their client (`LEFT`) can be: when the client leaves depends on the tokens so far, so the gradient of the expected reward
    is that of the tokens sampled until then.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    DEADLINE = "deadline"  # its rollout ran out of time; clients see `LENGTH`
    LEFT = "left"  # the client closed the stream while the answer was being written
    ABORT = "abort"  # the client disconnected before any of the answer was sent, or the server was stopped
    ERROR = "error"  # the engine failed
    GRAMMAR = "grammar"  # the requested format is too complex to enforce to the end: the client's fault, not an arm's

    @property
    def trainable(self) -> bool:
        """True if all sampled tokens are present: the policy, a budget or the client ended the turn."""
        return self not in (Finish.ABORT, Finish.ERROR, Finish.GRAMMAR)

    @property
    def complete(self) -> bool:
        """True if the client was sent a whole answer: the policy itself ended it, or it used up a token or time budget."""
        return self.trainable and self is not Finish.LEFT

    @property
    def cut(self) -> bool:
        """True if a budget ended the turn. Everything sampled until then is present."""
        return self in (Finish.LENGTH, Finish.DEADLINE)


class Arm(StrEnum):
    """The release that served a user. `control` never changes; `previous` is what live replaced; `verified` is the best release proven
    with users so far; `learner` follows training; `branch` is the tenant's own version, and `shared` is live when it answers a user of such
    a tenant; `eval` and `world` (a simulated world's rollout) serve no people; `outside` is a third party's model, not a release.
    """

    LIVE = "live"
    CANARY = "canary"
    PREVIOUS = "previous"
    VERIFIED = "verified"
    LEARNER = "learner"
    CONTROL = "control"
    BRANCH = "branch"
    SHARED = "shared"
    EVAL = "eval"
    WORLD = "world"
    OUTSIDE = "outside"

    @property
    def people(self) -> bool:
        """True if it serves people."""
        return self not in (Arm.EVAL, Arm.WORLD)


class Purpose(StrEnum):
    """The purpose of a call. A side call is an auxiliary task: a title, a commit message."""

    TASK = "task"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"


class Branch(StrEnum):
    """Why a turn does not simply continue the newest turn of its conversation; `NONE` if it does, or if it begins a conversation."""

    NONE = ""
    AGAIN = "again"  # the same prompt was sent before
    EDITED = "edited"  # the history is not what was sampled
    PARALLEL = "parallel"  # another turn continues the same turn
    UNSEEN = "unseen"  # the client did not receive all tokens of the previous turn, so they cannot be reused
    FRESH = "fresh"  # the episode continues without its earlier messages
    COMPACTED = "compacted"  # it continues with a summary of its earlier messages


class WindowMaker(StrEnum):
    """Who requested the summary with which a window begins."""

    HARNESS = "harness"  # the program that runs a rollout in a simulated world
    GATEWAY = "gateway"  # the gateway, at its client's request
    AGENT = "agent"  # a product's agent, by itself
    OUTSIDE = "outside"  # an agent, and a third party's model wrote the summary: it has no tokens of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A context window of an episode whose earlier messages were replaced by a summary. The episode's first window, number 0, has no such
    record.

    `begins_with`: the turn that wrote the summary, which was a compaction whatever its `purpose` says; None if unknown. `budget`:
    the number of prompt tokens at which the window is to be summarised, 0 if unknown. A turn with the purpose `compaction` summarises the
    window that it is in.

    Example: ``Window(number=1, begins_with="msg-3f:0", by=WindowMaker.AGENT)``
    """

    number: int
    begins_with: str | None
    by: WindowMaker
    budget: int = 0


class Consent(StrEnum):
    """What may be done with a turn, strictest first.

    `NEVER`: answer it, but neither store nor count anything that was said. `AGGREGATE`: store it and count it in metrics.
    `ADAPT`: its own user's dials may learn from it, too. `YES`: the weights may.
    """

    NEVER = "never"
    AGGREGATE = "aggregate"
    ADAPT = "adapt"
    YES = "yes"

    @staticmethod
    def strictest(*levels: Consent) -> Consent:
        """Return the strictest of these levels; `YES` if there are none."""
        return min(levels, key=[*Consent].index, default=Consent.YES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of tokens sampled by one policy version.

    Example: a turn of 30 tokens that met a weight swap after 12: ``(Span(v7, 12), Span(v8, 18))``.
    """

    policy: PolicyVersion
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    r"""How tokens are sampled. `temperature` 0 is greedy; with `seed` None the engine chooses one and records it.

    `logit_bias` is added to the logits of token ids; `presence_penalty` (once) and `frequency_penalty` (once per occurrence) are subtracted
    from the logits of tokens already in the answer. `grammar`, in llguidance's Lark, constrains the answer; "" allows anything.

    Example: ``Sampling(temperature=1.0, top_p=1.0, max_tokens=64, stop=("\n\n",), seed=7)``.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""

    @property
    def edits_logits(self) -> bool:
        """True if tokens are not sampled from the model's own logits."""
        return bool(self.grammar or self.logit_bias or self.presence_penalty or self.frequency_penalty)


def logit_divisor(temperature: float) -> float:
    """Return the divisor of logits before their softmax: the temperature, or 1 for greedy sampling (temperature 0).

    Example: ``logit_divisor(0.0) == 1.0``
    """
    return temperature or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """The arm that Auto drew for an episode, or the style assigned to a conversation, and each arm's probability at the draw.

    `cost` is the turn's cost in the operator's currency; None if unknown. Every turn of the episode has the draw's odds.

    Example: ``Pick(arm="large", odds={"live": 0.7, "large": 0.3}, cost=0.0021)``
    """

    arm: str
    odds: Mapping[str, float]
    cost: float | None = None


MAX_PARSED_CALLS = 256
"""Most calls of one answer that are stored: the first ones, including malformed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A tool call that the gateway parsed in a turn's text, or a malformed attempt at one, which was sent to the client as text.

    `name` is the tool's, "" for a malformed attempt. The characters from `start` to `end` of the text are the call with its delimiters
    and arguments; several calls may share them, in formats that write a list. The first 256 calls of an answer are kept
    (`MAX_PARSED_CALLS`).

    Example: ``ParsedCall(name="bash", start=6, end=81)``
    """

    name: str
    start: int
    end: int


Person = tuple[str, str]
"""A tenant, and a user's name within that tenant: the same name in another tenant is another person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call, as sampled: exact prompt ids in, exact sampled ids out.

    Example::

        Turn(id="chatcmpl-3f:0", episode="e1", parent=None, user="u42", tenant="default", arm=Arm.LIVE, propensity=0.8,
             prompt_ids=(1, 2, 3), sampled_ids=(7, 9), logprobs=(-0.1, -2.3), spans=(Span(policy=v7, tokens=2),),
             sampling=Sampling(max_tokens=64), finish=Finish.STOP, text="hi", started_at=10.0, ended_at=10.4)

    `parent` names the turn whose tokens are a prefix of `prompt_ids`. `sampled_ids`, `logprobs` and the spans' token counts
    have the same length T. `propensity` is the probability with which the user was assigned to `arm`, or, if `auto` says that Auto drew
    an arm for the episode, the probability of that draw. An outside model's answer has a text but no ids: its tokens are its own.
    `numerics` is the id of the numerics contract of the logprobs (`core.numerics`), "" if unknown.
    `routes` are the encoded expert ids of the P + T - 1 tokens that were computed (P: the prompt's length), b"" for a model
    without experts. `nucleus`: the ids allowed by `top_p` for each sampled token (`core.nucleus`), b"" if all were or if they are
    unknown. `group` names the rollouts of one task, None for a turn that is compared only with its baseline.
    `verified`: the tenant proved that `user` made the request; otherwise `user` is only the caller's claim.
    `purpose`: the purpose of the call. `branch`: why it does not simply continue the previous turn. `window`: None in an episode's first
    window, and if windows are unknown. `harness`: the hash of the calling program, as reported by itself; "" if it reported none.
    `calls`: the first 256 tool calls that the gateway parsed in `text`, in order, including malformed ones; None if unknown.
    `steered`: how the user's dials steered it. `style`: the style in its prompt and the odds when its conversation began. Both may be None.
    `consent`: what may be done with it, decided before its first token; turns of earlier versions, which had no consent, have `YES`.
    `secret`: the gateway found a secret or personal data in it, so it is not learned from (`privacy.scrub = "hold"`).
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
    nucleus: bytes = b""
    group: str | None = None
    verified: bool = False
    auto: Pick | None = None
    purpose: Purpose = Purpose.TASK
    branch: Branch = Branch.NONE
    harness: str = ""
    calls: tuple[ParsedCall, ...] | None = ()
    steered: Steered | None = None
    style: Pick | None = None
    window: Window | None = None
    consent: Consent = Consent.YES
    secret: bool = False
    _packed_prompt: bytes = field(default=b"", init=False, repr=False, compare=False)

    @property
    def packed_prompt(self) -> bytes:
        """The prompt ids as little-endian uint32, if the turn's creator had them in this form; else empty. `replace` drops it."""
        return self._packed_prompt

    def keep_packed_prompt(self, packed: bytes) -> None:
        """Keep the prompt ids' packed form too, so that the log need not pack them again. Raises ValueError for another number of ids."""
        if len(packed) != 4 * len(self.prompt_ids):
            raise ValueError(f"{len(packed)} bytes are not {len(self.prompt_ids)} packed ids; pass four bytes for each")
        object.__setattr__(self, "_packed_prompt", packed)

    @property
    def redacted(self) -> bool:
        """True if its tokens were erased, or never stored. The log records that the call happened, for whom and by which policy, but not
        what was said.
        """
        return self.consent is Consent.NEVER or (not self.sampled_ids and any(span.tokens for span in self.spans))

    @property
    def counts(self) -> bool:
        """True if it may count in metrics."""
        return self.consent is not Consent.NEVER

    def without_words(self) -> Turn:
        """Return the redacted form of the turn, without anything that was said or that its caller wrote."""
        return replace(
            self,
            prompt_ids=(),
            sampled_ids=(),
            logprobs=(),
            text="",
            routes=b"",
            nucleus=b"",
            calls=None,
            sampling=Sampling(
                max_tokens=self.sampling.max_tokens,
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                seed=self.sampling.seed,
            ),
            steered=None,
            style=None,
        )

    @property
    def person(self) -> Person:
        """The person who was served."""
        return (self.tenant, self.user)

    @property
    def oldest(self) -> int | None:
        """The lowest policy number among the sampled tokens; None if nothing was sampled."""
        return min((span.policy.number for span in self.spans), default=None)

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The policy versions that sampled it, in order of use."""
        return tuple(dict.fromkeys(span.policy for span in self.spans))

    def versions_T(self) -> tuple[PolicyVersion, ...]:
        """Return the policy version of each sampled token."""
        return tuple(span.policy for span in self.spans for _ in range(span.tokens))


class RewardReach(StrEnum):
    """Which turns a reward is about: its own, so that it is discounted for earlier ones, or all of the episode up to its turn."""

    TURN = "turn"
    EPISODE = "episode"


class Source(StrEnum):
    """Who observed a signal."""

    HUMAN = "human"
    IMPLICIT = "implicit"
    CODE = "code"
    LLM = "llm"


Ranges = tuple[tuple[int, int], ...]
"""Ascending, disjoint ranges of line numbers, (first, last), from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSurvival:
    """Which lines of one text in an answer are still in place: line numbers only, no text.

    `call`: the number of the tool call in the answer, from 0, whose `argument` contains the text; None: the answer itself. `lines`: the
    number of lines. `followed`: the lines whose fate is known; `kept`: those of them that survive.

    Example: ``LineSurvival(call=0, argument="new_string", lines=12, followed=((1, 12),), kept=((1, 5), (9, 9)))``
    """

    call: int | None
    argument: str
    lines: int
    followed: Ranges
    kept: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class LineValues:
    """The values of lines of one text in an answer, as ascending runs (first, last, value of each line). For the rest see `LineSurvival`.

    Example: ``LineValues(call=0, argument="new_string", lines=12, runs=((1, 5, 0.5), (6, 8, -0.5), (9, 9, 0.5), (10, 12, -0.5)))``
    """

    call: int | None
    argument: str
    lines: int
    runs: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Something a person or a program did, as observed. Idempotent by `tenant` and `id`; `retracts` names a signal to disregard.

    It belongs to the tenant who sent it and applies only to that tenant's turns. `lines`: which lines of the answer survive, for a signal
    about lines that lists them.

    Example::

        Signal(id="s1", tenant="default", turn="chatcmpl-3f:0", name="accepted", value=1.0, source=Source.HUMAN,
               occurred_at=12.0, received_at=12.5)
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
    tenant: str = "default"
    lines: tuple[LineSurvival, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The scalar that a versioned reward function computed from a turn's signals. At most one per turn.

    `signals` lists those that counted; if there are none, the value is that of silence. `upto` is the last row of the log that had been
    read: computing it again from the rows up to there gives the same value. `lines`: the values of the answer's lines; their mean is a part
    of `value`. `reach`: which turns the other part is about. `early`: the features of a predicted value, by name.

    Example: ``Reward(turn="chatcmpl-3f:0", value=0.75, function="copilot@1", signals=("s1",), at=42.0, upto=817)``
    """

    turn: str
    value: float
    function: str
    signals: tuple[str, ...]
    at: float
    upto: int = 0
    lines: tuple[LineValues, ...] = ()
    reach: RewardReach = RewardReach.TURN
    early: tuple[tuple[str, float], ...] = ()

    @property
    def line_mean(self) -> tuple[float, int]:
        """The mean value of the lines with a value, and their number; (0.0, 0) without such lines."""
        runs = [run for text in self.lines for run in text.runs]
        total = sum(last - first + 1 for first, last, _ in runs)
        return (sum((last - first + 1) * value for first, last, value in runs) / total, total) if total else (0.0, 0)

    @property
    def line_variance(self) -> float:
        """The variance of these values; 0.0 without such lines."""
        mean, total = self.line_mean
        runs = [run for text in self.lines for run in text.runs]
        return sum((last - first + 1) * (value - mean) ** 2 for first, last, value in runs) / max(1, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A reward function's answer while the maturity window is open. `until` is when to ask again (Unix seconds)."""

    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReward:
    """A reward function's answer if there is no reward, such as for silence that means nothing. `reason` is one or two words.

    Example: ``NoReward(reason="silence")``: the turn is held back as ``no_reward:silence``.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Why a turn gets no reward: its reward function failed, hung, returned nonsense, or is missing. At most one per turn.

    Example: ``Quarantine(turn="chatcmpl-3f:0", reason="reward_failed: ZeroDivisionError: division by zero", at=42.0)``
    """

    turn: str
    reason: str
    at: float
    upto: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Turns whose whole answer was passed to the client's connection. Only these, and turns that got feedback, are trained on.

    Example: ``Delivered(id="5c1f", turns=("chatcmpl-3f:0", "chatcmpl-40:0"), at=11.0)``
    """

    id: str
    turns: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdback:
    """Why a served turn is not trained on. At most one per turn; a turn in a batch has none.

    Example: ``Holdback(turn="chatcmpl-3f:0", reason="finish:abort", at=42.0)``
    """

    turn: str
    reason: str
    at: float


Advantages = tuple[float, ...]
"""A turn's advantages, one per sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnHint:
    """Feedback that a turn of a batch learns from as a hint (`reward.hints`): the comment of a signal, or the message that followed the
    answer, in the prompt of another turn of the batch. Exactly one of the two ids is set. `weight`: of the term, per token.

    Example: ``TurnHint(turn="a:0", weight=0.5, signal="s1")``
    """

    turn: str
    weight: float
    signal: str = ""
    following: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The turns of one optimizer step, written before the step is taken, so that a killed step can be repeated identically.

    `step` counts from 1. `reference` is the release that the KL penalty is measured against. `credits` are each turn's advantages, one per
    sampled token, in the order of `turns`. `base` is set if the trainer first went back to the weights of an existing release because
    everything newer had been refused; otherwise a step starts from the previous one. `even`: all of people's turns weigh the same; in
    batches of earlier versions the turns of an episode shared a weight of 1. `weights`: each turn's weight in the loss, if turns were
    drawn because a step could not hold all, or got rewards with unequal probabilities. `drawn`: the draw's part of it; empty in batches of
    earlier versions. `shown`: the weight with which each turn's correction is imitated, 0 for a turn without one; empty if there is none.
    `after`: for each turn after which an episode was cut, the return that was assumed after it (`core.samples.LaterReturns`), else ();
    empty if no episode was cut. `upto`: the last row of the log that had been read when credit was computed: computing it again from the
    rows up to there gives the same; 0 in batches of earlier versions. `hints`: the feedback that turns learn from as hints. `scales`: the
    scale factor of each turn's person, 1 for a world's turn; empty unless the trainer has values of turns (`train.value_lambda`).

    Example: ``Batch(step=3, turns=("a:0", "b:0"), credits=((0.9, 0.9), (-1.1,)), reference=v2, at=50.0)``
    """

    step: int
    turns: tuple[str, ...]
    credits: tuple[Advantages, ...]
    reference: PolicyVersion
    at: float
    base: PolicyVersion | None = None
    even: bool = False
    weights: tuple[float, ...] = ()
    shown: tuple[float, ...] = ()
    after: tuple[Advantages, ...] = ()
    upto: int = 0
    hints: tuple[TurnHint, ...] = ()
    scales: tuple[float, ...] = ()
    drawn: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEvent:
    """One line of the release ledger. `action`: evaluated, canary, ramped, looked, awaits_approval, approved, shipped, better, confirmed,
    faded, verified, blocked or rolled_back. `detail["actor"]` names the person who did it; the release worker's own actions have none.

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
class SteeringBasis:
    """A basis of dials (`core.steering.Basis`), written before the first turn that names it by its hash.

    `tokens`: int64, `directions`: float32, row by row, both little-endian.

    Example: ``SteeringBasis.of(basis, at=9.0).basis() == basis``
    """

    hash: str
    names: tuple[str, ...]
    tokens: bytes
    directions: bytes
    weights: str
    at: float

    @staticmethod
    def of(basis: Basis, at: float) -> SteeringBasis:
        """Return the row of a basis."""
        return SteeringBasis(
            hash=basis.hash,
            names=basis.names,
            tokens=basis.tokens_M.astype("<i8").tobytes(),
            directions=basis.directions_KM.astype("<f4").tobytes(),
            weights=basis.weights,
            at=at,
        )

    @property
    def moves(self) -> bool:
        """False if it changes no logits, because every dial was dropped."""
        return any(self.directions)

    def basis(self) -> Basis:
        """Return the basis. Raises ValueError if the row's content does not match its hash."""
        tokens_M = np.frombuffer(self.tokens, "<i8").astype(np.int64)
        directions_KM = np.frombuffer(self.directions, "<f4").astype(np.float32).reshape(len(self.names), -1)
        made = Basis(names=self.names, tokens_M=tokens_M, directions_KM=directions_KM, weights=self.weights)
        if made.hash != self.hash:
            raise ValueError(f"the basis {self.hash} has the content of {made.hash}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsentGiven:
    """The consent that a person gives from now on. The newest row about a person counts; `Consent.YES` undoes a refusal.

    Example: ``ConsentGiven(id="c1", tenant="acme", user="ann", level=Consent.NEVER, at=12.0)``
    """

    id: str
    tenant: str
    user: str
    level: Consent
    at: float

    @property
    def person(self) -> Person:
        """The person whose choice it is."""
        return (self.tenant, self.user)


Row = (
    Turn
    | Delivered
    | Signal
    | Reward
    | Quarantine
    | Holdback
    | Batch
    | ReleaseEvent
    | Stamp
    | Alarm
    | SteeringBasis
    | ConsentGiven
    | DialSet
    | DialPrior
    | Forgotten
)

Identity = tuple[str | int, ...]


def identity(row: Row) -> Identity:
    """Return the key by which two rows of one kind are the same row.

    Example: ``identity(Signal(id="s1", tenant="acme", ...)) == ("acme", "s1")``
    """
    match row:
        case Signal():
            return (row.tenant, row.id)
        case Reward() | Quarantine() | Holdback():
            return (row.turn,)
        case Batch():
            return (row.step,)
        case Turn() | Delivered() | ReleaseEvent() | Stamp() | Alarm() | ConsentGiven() | DialSet() | Forgotten():
            return (row.id,)
        case SteeringBasis():
            return (row.hash,)
        case DialPrior():
            return (row.number,)
