"""Entries of the turn ledger: the facts about a turn that the desk keeps until its outcome is decided, without tokens."""

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
"""A unit of turns that go into one batch together: (kind, tenant, name), with kind "world" (a group of rollouts), "group" or "episode"."""

Rollout = tuple[Unit, str]
"""A rollout in a simulated world: its group's unit and its episode."""

SignalRef = tuple[Cursor, str, str | None, str]
"""A signal about a turn: its place in the log, its id, the id of the signal that it retracts, if any, and its name."""

_NEW_PEOPLE = 10_000  # the set is rebuilt once it exceeds twice its size by this many people

LEARNING_ARMS = frozenset({Arm.LIVE, Arm.CANARY, Arm.LEARNER})
"""The arms that serve people and may be learned from."""

TEACHING_ARMS = LEARNING_ARMS | {Arm.WORLD}
"""All arms that a desk may have learned from. A process that only reads a desk's rows need not know that desk's own arms."""

Gold = Callable[[str, str], bool]
"""(tenant, user) -> True if this person's turns are never learned from: a holdout to compare with the people whose turns are."""


def signal_ref_bytes(said: SignalRef) -> int:
    """Return the number of bytes of a signal's ids and name."""
    return sum(len(text.encode()) for text in (said[1], said[2] or "", said[3]))


class PeopleWithTurns:
    """A superset of the people with a turn in the ledger, rebuilt from `named`, which returns the people of all these turns.

    The holder of an API key can record consent choices for invented people, and such a choice must not cost a scan of all turns.
    """

    def __init__(self, named: Callable[[], Iterable[Person]]) -> None:
        self._named, self._most = named, 0
        self._known: set[Person] | None = None  # None: must be rebuilt

    def __contains__(self, person: Person) -> bool:
        if self._known is None:
            self._known = set(self._named())
            self._most = 2 * len(self._known) + _NEW_PEOPLE
        return person in self._known

    def add(self, person: Person) -> None:
        """Note that a turn of a person is now in the ledger."""
        if self._known is not None:
            self._known.add(person)
            if len(self._known) > self._most:
                self._known = None


def no_gold(tenant: str, user: str) -> bool:
    """Return False for everybody: there are no gold people."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """Whose turns are learned from: people's, and in each step `groups` groups of a simulated world's rollouts (0: none).

    `every`: a step takes all of people's turns that are ready, and waits until they are its even share of those that are not ready yet.
    `worlds_weight`: see `ByOrigin`.
    `corrections`: the weight with which people's corrections are imitated (`reward.demonstrations`); 0: they are not.
    `values`: the trainer has a value function, and batches record people's scale factors (`Batch.scales`).

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
    """Return True if this turn was served to a person or a world, the policy itself ended it, and it may count in metrics."""
    return turn.finish.trainable and turn.arm is not Arm.EVAL and turn.counts


def untrainable(
    turn: Turn,
    min_temperature: float,
    purposes: Collection[Purpose] = (Purpose.TASK, Purpose.SUBAGENT, Purpose.COMPACTION),
    arms: Collection[Arm] = TEACHING_ARMS,
) -> str | None:
    """Return why a turn can never be trained on, known from the turn alone; None if it can. The first reason that applies is given.

    ``consent:<x>``: sampled under a consent level that excludes training. ``finish:<x>``: cut by something other than the policy.
    ``arm:<x>``: control, evaluation and any other arm that is not in `arms`. ``empty``: nothing was sampled. ``greedy``: temperature 0
    explores nothing, and the log-probabilities are not those of the choice made. ``top_p``: the tokens were drawn from the
    nucleus of the distribution, and it is not known which tokens that contains, so even equal praise for everything would move the policy.
    ``cold``: sampled below the lowest temperature that is learned from. ``purpose:<x>``: not one of `purposes`. ``secret``: it contains a
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
    """A turn without its tokens. `hold` is why it will not be trained on, None if no reason is known yet.

    `world`: it belongs to a rollout in a simulated world, as its turn `number`, from 1. `tokens` counts its prompt and the sampled tokens.
    Its prompt begins with all tokens of the turn `parent`. `versions`: the number of each policy that sampled, and how many tokens.

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
        """Return the facts of a turn that was read at `seq`."""
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
        """Return the same facts without the person, who was forgotten."""
        return replace(self, user="", context=replace(self.context, person=(self.tenant, "")))

    @property
    def person(self) -> Person:
        """The person who was served."""
        return (self.tenant, self.user)

    @property
    def sampled(self) -> int:
        """The number of its sampled tokens."""
        return self.tokens - self.context.length

    def lag(self, lineage: Lineage, step: int) -> float:
        """Return the staleness in steps for weights after `step` steps: the mean over tokens; for a world's rollout, that of the oldest.

        If people's turns were judged by their oldest token, long answers, during which the weights change, would be dropped and short ones
        kept: the turns learned from would be shorter than those served. The trainer itself measures how far the policy has moved from a
        turn's tokens. Worlds are paced by the oldest token.
        """
        lags = [(lineage.lag(step, number), tokens) for number, tokens in self.versions]
        if self.world or not lags:
            return max((lag for lag, _ in lags), default=0)
        return sum(lag * tokens for lag, tokens in lags) / sum(tokens for _, tokens in lags)

    @property
    def source(self) -> tuple[Person, str]:
        """The person that the turn counts for, and its episode."""
        return self.context.person, self.episode

    @property
    def unit(self) -> Unit:
        """The unit with which the turn goes into a batch."""
        if self.group is None:
            return ("episode", self.tenant, self.episode)
        return ("world" if self.world else "group", self.tenant, self.group)


@dataclass(slots=True, kw_only=True)
class OpenTurn:
    """A turn whose reward is not known. `said` is in log order; `ask_at` is when to ask again, None if it was never asked about."""

    facts: TurnFacts
    said: list[SignalRef] = field(default_factory=list[SignalRef])
    delivered: bool = False
    ask_at: float | None = None

    @property
    def proven(self) -> bool:
        """True if somebody received the answer: its delivery is on record, or there is a signal about it."""
        return self.delivered or bool(self.said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matured:
    """A turn whose reward is known and whose outcome is open. `signals` are those that the reward is based on.

    `silent`: there was no signal about it at all when the reward was computed. `since`: when the reward was due (Unix seconds).
    `lines`: the mean value of the lines with a value, a part of `value`, and their number (`Reward.line_mean`).
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
        """The rollout that it is a turn of."""
        return self.facts.unit, self.facts.episode


turn_facts: TypeAdapter[list[TurnFacts]] = TypeAdapter(list[TurnFacts])
"""Turn facts to and from JSON types."""

open_turns: TypeAdapter[list[OpenTurn]] = TypeAdapter(list[OpenTurn])
"""Open turns to and from JSON types."""

matured_turns: TypeAdapter[list[Matured]] = TypeAdapter(list[Matured])
"""Matured turns to and from JSON types."""


# ---------------------------------------------------------------- reasons


MOST_REASONS = 1000  # most reasons that are counted separately


def count_reason(counts: Counter[str], kind: str) -> None:
    """Count a kind of reason. Beyond `MOST_REASONS`, new kinds are counted by the part before the colon, as functions invent their own."""
    counts[kind if kind in counts or len(counts) < MOST_REASONS else kind.partition(":")[0]] += 1


# ---------------------------------------------------------------- settled turns


class Fate(StrEnum):
    """What has become of a turn so far."""

    MOOT = "moot"  # from an evaluation, or cut short: signals about it never count
    DECIDED = "decided"  # its reward, or the reason why it has none, is written; its outcome may be open
    TRAINED = "trained"
    HELD = "held"


class DecidedTurns:
    """The most recently decided turns, by id; the oldest are evicted. `forgot`: some were."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._fates: OrderedDict[str, tuple[str, Fate]] = OrderedDict()
        self.forgot = False

    def get(self, turn: str) -> tuple[str, Fate] | None:
        """Return a turn's tenant and fate; None if it is not remembered."""
        return self._fates.get(turn)

    def put(self, turn: str, tenant: str, fate: Fate) -> None:
        """Record or update a turn's fate."""
        self._fates[turn] = (tenant, fate)
        if len(self._fates) > self._most:
            self._fates.popitem(last=False)
            self.forgot = True

    def __len__(self) -> int:
        return len(self._fates)

    def snapshot(self) -> list[list[str]]:
        """Return rows [turn, tenant, fate], the earliest decided first."""
        return [[turn, tenant, fate.value] for turn, (tenant, fate) in self._fates.items()]

    def restore(self, rows: Sequence[Sequence[str]], *, forgot: bool) -> None:
        """Restore the state from a `snapshot`."""
        self._fates = OrderedDict((turn, (tenant, Fate(fate))) for turn, tenant, fate in rows)
        self.forgot = forgot
