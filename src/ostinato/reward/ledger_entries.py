"""Turns as the desk remembers them while their outcome is open: the facts needed to decide, without tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from pydantic import TypeAdapter

from ostinato.core.records import Arm, Consent, Person, Purpose, RewardReach, Turn
from ostinato.core.samples import EpisodeKey
from ostinato.core.seams import Cursor
from ostinato.core.staleness import Lineage
from ostinato.reward.baseline import BaselineInputs, context_of
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import of_world

Unit = tuple[str, str, str]
"""Turns that go into one batch together: (kind, tenant, name), with kind "world" (a group of a world's rollouts), "group" or "episode"."""

Rollout = tuple[Unit, str]
"""A group of a simulated world and the episode of one of its rollouts."""

Said = tuple[Cursor, str, str | None, str]
"""A signal about a turn: its place in the log, its id, the id of the signal that it retracts, if any, and its name."""

_NEW_PEOPLE = 10_000  # after so many, and as many as there were, it is looked through again whose turns are kept

LEARNING_ARMS = frozenset({Arm.LIVE, Arm.CANARY, Arm.LEARNER})
"""The arms that serve people and may be learned from."""

TEACHING_ARMS = LEARNING_ARMS | {Arm.WORLD}
"""All arms that a desk may have learned from: a reader of a desk's rows need not know that desk's own arms."""

Gold = Callable[[str, str], bool]
"""Tenant and user -> whether this person's turns are never learned from: such a holdout shows what the people who teach do not see."""


def said_bytes(said: Said) -> int:
    """The bytes of a signal's ids and name."""
    return sum(len(text.encode()) for text in (said[1], said[2] or "", said[3]))


class PeopleWithTurns:
    """Who may have a turn among those that are kept; nobody who has one is missing. `named` gives the people of all of them.

    A key's holder can record choices of people whom they invent, and none of these may cost a look at every turn.
    """

    def __init__(self, named: Callable[[], Iterable[Person]]) -> None:
        self._named, self._most = named, 0
        self._known: set[Person] | None = None  # None: to be looked through

    def __contains__(self, person: Person) -> bool:
        if self._known is None:
            self._known = set(self._named())
            self._most = 2 * len(self._known) + _NEW_PEOPLE
        return person in self._known

    def add(self, person: Person) -> None:
        """Note that a turn of a person is kept from now on."""
        if self._known is not None:
            self._known.add(person)
            if len(self._known) > self._most:
                self._known = None


def nobody(tenant: str, user: str) -> bool:
    """No gold people."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """Whose turns are learned from: people's, and in each step `groups` groups of a simulated world's rollouts (0: none).

    `every`: a step takes all of people's turns that are ready, and waits until that is its even share of those that are not ready.
    `worlds_weight`: see `ByOrigin`.
    `corrections`: the weight with which people's corrections are imitated (`reward.demonstrations`); 0: they are not.
    `values`: the trainer has values of turns, and batches say by which factors people are cut (`Batch.scales`).

    Example: ``Taught(people=False, groups=8)``
    """

    people: bool = True
    groups: int = 0
    every: bool = False
    worlds_weight: float | None = None
    corrections: float = 0.0
    values: bool = False

    @property
    def arms(self) -> frozenset[Arm]:
        """The arms whose turns may be learned from."""
        return (LEARNING_ARMS if self.people else frozenset[Arm]()) | ({Arm.WORLD} if self.groups else frozenset[Arm]())


def needs_reward(turn: Turn) -> bool:
    """True if a person or a world was served this turn, the policy itself ended it, and it may count in metrics."""
    return turn.finish.trainable and turn.arm is not Arm.EVAL and turn.counts


def untrainable(
    turn: Turn,
    min_temperature: float,
    purposes: Collection[Purpose] = (Purpose.TASK, Purpose.SUBAGENT, Purpose.COMPACTION),
    arms: Collection[Arm] = TEACHING_ARMS,
) -> str | None:
    """Why a turn can never be trained on, known from the turn alone; None if it can. The first reason that applies is given.

    ``consent:<x>``: sampled under a level that keeps it from the weights. ``finish:<x>``: cut by something other than the policy.
    ``arm:<x>``: control, evaluation and any other arm that is not in `arms` teach nothing. ``empty``: nothing was sampled. ``greedy``:
    temperature 0 explores nothing, and the log-probabilities are not those of the choice made. ``top_p``: the tokens were drawn from the
    head of the distribution, and it is not known which tokens that was, so that even praise for everything would move the policy.
    ``cold``: sampled below the lowest temperature that is learned from. ``purpose:<x>``: not one of `purposes`. ``secret``: it holds a
    secret or personal data.
    """
    if turn.consent is not Consent.YES:
        return f"consent:{turn.consent}"
    if not turn.finish.trainable:
        return f"finish:{turn.finish}"
    if turn.arm not in arms:
        return f"arm:{turn.arm}"
    if not turn.sampled_ids and not turn.redacted:  # an erased turn was judged before its erasure
        return "empty"
    if turn.sampling.temperature == 0:
        return "greedy"
    if turn.sampling.top_p < 1 and not turn.nucleus and not turn.redacted:
        return "top_p"
    if turn.sampling.temperature < min_temperature:
        return "cold"
    if turn.secret:
        return "secret"
    return None if turn.purpose in purposes else f"purpose:{turn.purpose}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """A turn without its tokens. `hold` is why it will not be trained on, None if nothing speaks against it yet.

    `world`: it belongs to a rollout in a simulated world, as its turn `number`, from 1. `tokens` counts its prompt and the sampled tokens;
    its prompt begins with all tokens of the turn `parent`. `versions`: the numbers of the policies that sampled, each with its tokens.

    Example: ``TurnFacts(seq=12, id="a:0", tenant="default", user="ann", episode="e1", parent=None, group=None, tokens=128,
    versions=((7, 20),), ended_at=10.0, hold=None, context=BaselineInputs(...))``
    """

    seq: Cursor
    id: str
    tenant: str
    user: str
    episode: str
    parent: str | None
    group: str | None
    tokens: int
    versions: tuple[tuple[int, int], ...]
    numerics: str
    ended_at: float
    hold: str | None
    context: BaselineInputs
    world: bool = False
    number: int = 0

    @classmethod
    def of(cls, seq: Cursor, turn: Turn, config: RewardConfig, arms: Collection[Arm] = TEACHING_ARMS) -> Self:
        """The facts of a turn that was read at `seq`."""
        return cls(
            seq=seq,
            id=turn.id,
            tenant=turn.tenant,
            user=turn.user,
            episode=turn.episode,
            parent=turn.parent,
            group=turn.group,
            tokens=len(turn.prompt_ids) + sum(span.tokens for span in turn.spans),
            versions=tuple((span.policy.number, span.tokens) for span in turn.spans),
            numerics=turn.numerics,
            ended_at=turn.ended_at,
            hold=untrainable(turn, config.min_temperature, config.purposes, arms),
            context=context_of(turn, config.users),
            world=of_world(turn),
        )

    def unnamed(self) -> Self:
        """The same about nobody, once the person was forgotten."""
        return replace(self, user="", context=replace(self.context, person=(self.tenant, "")))

    @property
    def person(self) -> Person:
        """Who was served."""
        return (self.tenant, self.user)

    @property
    def sampled(self) -> int:
        """The number of its sampled tokens."""
        return self.tokens - self.context.length

    def lag(self, lineage: Lineage, step: int) -> float:
        """Its staleness in steps, for weights after `step` steps: the mean over its tokens, of a world's rollout the oldest token's.

        People's long answers, over which weights change, would be dropped by their oldest token where short ones are kept: what is learned
        from would be shorter than what is served. How far the policy has gone from a turn's tokens the trainer measures itself. Worlds are
        paced by the oldest token.
        """
        lags = [(lineage.lag(step, number), tokens) for number, tokens in self.versions]
        if self.world or not lags:
            return max((lag for lag, _ in lags), default=0)
        return sum(lag * tokens for lag, tokens in lags) / sum(tokens for _, tokens in lags)

    @property
    def source(self) -> tuple[Person, str]:
        """Whom it counts for, and its episode."""
        return self.context.person, self.episode

    @property
    def unit(self) -> Unit:
        """The unit that goes into a batch with this turn."""
        if self.group is None:
            return ("episode", self.tenant, self.episode)
        return ("world" if self.world else "group", self.tenant, self.group)


@dataclass(slots=True, kw_only=True)
class OpenTurn:
    """A turn whose reward is not known. `said` is in the order of the log; `ask_at` is when to ask again, None if never asked about."""

    facts: TurnFacts
    said: list[Said] = field(default_factory=list[Said])
    delivered: bool = False
    ask_at: float | None = None

    @property
    def proven(self) -> bool:
        """True if somebody got the answer: its delivery is on record, or somebody said something about it."""
        return self.delivered or bool(self.said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matured:
    """A turn whose reward is known and whose outcome is open. `signals` are those that the reward rests on.

    `silent`: nothing at all had been said about it when the reward was made. `since`: when the reward was due (Unix seconds).
    `lines`: the mean value of the lines of which it is known, a part of `value`, and how many there are (`Reward.line_mean`).
    `spread`: the variance of the lines' values. `reach`: which turns the reward is about.
    """

    facts: TurnFacts
    value: float
    silent: bool
    signals: tuple[str, ...]
    since: float
    lines: tuple[float, int] = (0.0, 0)
    spread: float = 0.0
    reach: RewardReach = RewardReach.TURN

    @property
    def episode(self) -> EpisodeKey:
        """Its tenant and episode."""
        return self.facts.tenant, self.facts.episode

    @property
    def rollout(self) -> Rollout:
        """The group and the episode that it is a turn of."""
        return self.facts.unit, self.facts.episode


turn_facts: TypeAdapter[list[TurnFacts]] = TypeAdapter(list[TurnFacts])
"""Turns' facts as JSON's types, and back."""

open_turns: TypeAdapter[list[OpenTurn]] = TypeAdapter(list[OpenTurn])
"""Open turns as JSON's types, and back."""

matured_turns: TypeAdapter[list[Matured]] = TypeAdapter(list[Matured])
"""Matured turns as JSON's types, and back."""


# ---------------------------------------------------------------- reasons


MOST_REASONS = 1000  # that are counted apart


def count_reason(counts: Counter[str], kind: str) -> None:
    """Count a kind of reason; of further new ones only the part before the colon: functions make their own (`no_reward:<why>`)."""
    counts[kind if kind in counts or len(counts) < MOST_REASONS else kind.partition(":")[0]] += 1


# ---------------------------------------------------------------- settled turns


class Fate(StrEnum):
    """What became of a turn."""

    MOOT = "moot"  # an evaluation's, or cut short: no signal about it ever counts
    DECIDED = "decided"  # its reward, or why it has none, is written; its outcome may be open
    TRAINED = "trained"
    HELD = "held"


class Settled:
    """The most recently decided turns, by id; the oldest are dropped. `forgot`: some were."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._fates: OrderedDict[str, tuple[str, Fate]] = OrderedDict()
        self.forgot = False

    def get(self, turn: str) -> tuple[str, Fate] | None:
        """A turn's tenant and fate; None if it is not remembered."""
        return self._fates.get(turn)

    def put(self, turn: str, tenant: str, fate: Fate) -> None:
        """Remember a turn's fate, or update it."""
        self._fates[turn] = (tenant, fate)
        if len(self._fates) > self._most:
            self._fates.popitem(last=False)
            self.forgot = True

    def __len__(self) -> int:
        return len(self._fates)

    def snapshot(self) -> list[list[str]]:
        """[turn, tenant, fate], the earliest decided first."""
        return [[turn, tenant, fate.value] for turn, (tenant, fate) in self._fates.items()]

    def restore(self, rows: Sequence[Sequence[str]], *, forgot: bool) -> None:
        """The inverse of `snapshot`."""
        self._fates = OrderedDict((turn, (tenant, Fate(fate))) for turn, tenant, fate in rows)
        self.forgot = forgot
