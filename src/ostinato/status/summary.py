"""The log's summary for people: a saved fold, so that only new rows are read.

Its size does not grow with the log: counts, the newest releases, the alarms that are raised, and the newest answers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ostinato.core.notices import Alarm, AlarmState, Forgotten, Stamp
from ostinato.core.records import (
    Batch,
    Holdback,
    Person,
    Quarantine,
    ReleaseEvent,
    Reward,
    Row,
    Signal,
    SteeringBasis,
    Turn,
)
from ostinato.core.seams import Cursor, Folds, Log
from ostinato.core.staleness import Lineage
from ostinato.core.steering import NO_STYLE
from ostinato.release.auto.estimating import StyleTally
from ostinato.release.monitors.dial_effect import DialTally
from ostinato.reward.ledger import kind_of
from ostinato.status.compactions import CompactionTally

FOLD = "status"
KINDS: frozenset[type] = frozenset(
    {Turn, Signal, Reward, Quarantine, Holdback, Batch, ReleaseEvent, Stamp, Alarm, SteeringBasis, Forgotten}
)
RATED, OPEN, RELEASES, CONTRACTS = 2_000, 20_000, 20, 20
"""How many of the newest rated turns, turns without a reward yet, releases and contracts are kept."""
NAMES, OTHERS = 50, "others"
"""At most `NAMES` names of signals or reasons of holdbacks are counted separately, the rest together, because a client may invent any."""

_FORMAT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A person's turn, reduced to what a screen shows.

    `number`: policy number of its oldest token. `dealt`: the person's position for the holdout of dials
    (`core.arm_assignment.holdout_place`); None if the turn could not have been steered. `session`: its episode, if that is followed for its
    summaries (`status.compactions`). `style`: for a conversation that was randomized to a style or to none, what its reward says about it
    (`StyleTally.turn`). `by_chance`: the person could have been assigned to another arm.
    """

    arm: str
    person: Person
    started_at: float
    number: int | None
    dealt: float | None = None
    session: str | None = None
    style: list[Any] | None = None
    by_chance: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedTurn:
    """A person's turn with its reward. `heard`: somebody reacted; otherwise it is the reward for no reaction."""

    served: Served
    value: float
    heard: bool


def rated_turn(turn: Turn, reward: Reward) -> RatedTurn:
    """Return a turn and its reward, reduced to what a screen shows."""
    return RatedTurn(served=_of_turn(turn), value=reward.value, heard=bool(reward.signals))


def _of_turn(
    turn: Turn, dealt: float | None = None, session: str | None = None, style: list[Any] | None = None
) -> Served:
    return Served(
        arm=turn.arm.value,
        person=turn.person,
        started_at=turn.started_at,
        number=turn.oldest,
        dealt=dealt,
        session=session,
        style=style,
        by_chance=turn.propensity < 1.0 and turn.auto is None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One event of the release ledger, as a screen shows it. `actor`: the person who did it; None for the release worker."""

    action: str
    number: int
    reason: str
    at: float
    actor: str | None = None


@dataclass(slots=True)
class Summary:
    """The fold's state. `apply` rows in log order; `cursor` is the last row's. `held`: number of turns held back, by reason.

    `first`, `base`: when training last went back, step `first` started from the weights of policy number `base`.
    """

    cursor: Cursor = 0
    tokens: int = 0
    signals: int = 0
    step: int = 0
    first: int = 1
    base: int = 0
    names: Counter[str] = field(default_factory=Counter[str])
    actions: Counter[str] = field(default_factory=Counter[str])
    held: Counter[str] = field(default_factory=Counter[str])
    releases: deque[LedgerLine] = field(default_factory=lambda: deque(maxlen=RELEASES))
    alarms: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    contracts: OrderedDict[str, str] = field(default_factory=OrderedDict[str, str])
    rated: deque[RatedTurn] = field(default_factory=lambda: deque(maxlen=RATED))
    unrated: OrderedDict[str, Served] = field(default_factory=OrderedDict[str, Served])
    dials: DialTally = field(default_factory=DialTally)
    compactions: CompactionTally = field(default_factory=CompactionTally)
    styles: StyleTally = field(default_factory=lambda: StyleTally(NO_STYLE))

    def apply(self, cursor: Cursor, row: Row) -> None:
        self.cursor = cursor
        match row:
            case Turn():
                self._turn(row)
            case Signal():
                self.signals += 1
                _count(self.names, row.name)
            case Reward():
                self._rewarded(row)
            case Quarantine():
                self.unrated.pop(row.turn, None)
            case Holdback():
                _count(self.held, kind_of(row.reason))
            case Batch():
                self.step = row.step
                if row.base is not None:
                    self.first, self.base = row.step, row.base.number
            case _:
                self._decided(row)

    @property
    def lineage(self) -> Lineage:
        return Lineage(first=self.first, base=self.base)

    def _turn(self, turn: Turn) -> None:
        self.tokens += sum(span.tokens for span in turn.spans)
        if turn.arm.people and turn.finish.trainable and turn.counts:
            style = None if turn.style is None else self.styles.turn(turn.style)
            session = turn.episode if self.compactions.turn(turn) else None
            self.unrated[turn.id] = _of_turn(turn, self.dials.turn(turn), session, style)
            if len(self.unrated) > OPEN:
                self.unrated.popitem(last=False)

    def _rewarded(self, row: Reward) -> None:
        served = self.unrated.pop(row.turn, None)
        if served is None:
            return
        if served.style is not None:
            self.styles.reward(served.person, served.style, row.value)
            served = replace(served, style=None)  # it is now in the sums, which name nobody
        self.rated.append(RatedTurn(served=served, value=row.value, heard=bool(row.signals)))
        if served.dealt is not None:
            self.dials.reward(served.person[0], served.dealt, row.value, row.at)
        if served.session is not None:
            self.compactions.reward((served.person[0], served.session), row.value)

    def _decided(self, row: Row) -> None:
        match row:
            case ReleaseEvent():
                self.actions[row.action] += 1
                told, number = row.detail.get("actor"), row.policy.number
                actor = None if told is None else str(told)
                line = LedgerLine(action=row.action, number=number, reason=row.reason, at=row.at, actor=actor)
                self.releases.append(line)
            case SteeringBasis():
                self.dials.basis(row)
            case Stamp():
                self.contracts[row.id] = row.contract
                self.contracts.move_to_end(row.id)
                if len(self.contracts) > CONTRACTS:
                    self.contracts.popitem(last=False)
            case Alarm():
                if row.state is AlarmState.RAISED:
                    self.alarms[row.name] = (row.reason, row.at)
                else:
                    self.alarms.pop(row.name, None)
            case Forgotten():
                self._forget(row)
            case _:
                pass

    def _forget(self, gone: Forgotten) -> None:
        """Drop a person's newest answers and what is counted about the person."""
        self.dials.forget(gone)
        self.compactions.forget(gone)
        kept = [each for each in self.rated if not gone.covers(each.served.person)]
        self.rated.clear()
        self.rated.extend(kept)
        waiting = self.unrated.items()
        self.unrated = OrderedDict((turn, served) for turn, served in waiting if not gone.covers(served.person))

    def state(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            **{name: getattr(self, name) for name in _NUMBERS},
            "names": dict(self.names),
            "actions": dict(self.actions),
            "held": dict(self.held),
            "releases": [asdict(each) for each in self.releases],
            "alarms": {name: list(each) for name, each in self.alarms.items()},
            "contracts": dict(self.contracts),
            "rated": [[*_listed(each.served), each.value, each.heard] for each in self.rated],
            "unrated": {turn: _listed(served) for turn, served in self.unrated.items()},
            "dials": self.dials.state(),
            "compactions": self.compactions.state(),
            "styles": self.styles.state(),
        }

    @classmethod
    def of(cls, cursor: Cursor, state: Mapping[str, Any]) -> Summary:
        """Restore a summary from `state`. Raises KeyError, TypeError or ValueError for the state of another version."""
        if state["format"] != _FORMAT:
            raise ValueError(f"format {state['format']}, not {_FORMAT}")
        made = cls(cursor=cursor)
        for name in _NUMBERS:
            setattr(made, name, int(state[name]))
        made.names = Counter(state.get("names", {}))
        made.actions, made.held = Counter(state["actions"]), Counter(state["held"])
        made.releases.extend(LedgerLine(**each) for each in state["releases"])
        made.alarms = {name: (str(reason), float(at)) for name, (reason, at) in state["alarms"].items()}
        made.contracts.update(state["contracts"])
        made.rated.extend(
            RatedTurn(served=_served(served), value=float(value), heard=bool(heard))
            for *served, value, heard in state["rated"]
        )
        made.unrated.update({turn: _served(served) for turn, served in state["unrated"].items()})
        made.dials = DialTally.of(state["dials"])
        made.compactions = CompactionTally.of(state["compactions"])
        made.styles.restore(state["styles"])
        return made


_NUMBERS = ("tokens", "signals", "step", "first", "base")


def _count(counted: Counter[str], name: str) -> None:
    counted[name if name in counted or len(counted) < NAMES else OTHERS] += 1


def _listed(served: Served) -> list[Any]:
    where = [served.arm, *served.person, served.started_at, served.number]
    return [*where, served.dealt, served.session, served.style, served.by_chance]


def _served(listed: list[Any]) -> Served:
    arm, tenant, user, started_at, number, dealt, session, style, by_chance = listed
    return Served(
        arm=str(arm),
        person=(str(tenant), str(user)),
        started_at=float(started_at),
        number=None if number is None else int(number),
        dealt=None if dealt is None else float(dealt),
        session=None if session is None else str(session),
        style=style,
        by_chance=bool(by_chance),
    )


async def summarise(log: Log, folds: Folds, newest: Cursor) -> tuple[Summary, int]:
    """Return the log's current summary, continued from the saved one, and how many rows were read for it. Saves nothing.

    `newest` is the log's newest row. A saved summary with a later cursor belongs to another log and is ignored.
    """
    kept, summary = await folds.load(FOLD), Summary()
    if kept is not None and kept[0] <= newest:
        try:
            summary = Summary.of(*kept)
        except (KeyError, TypeError, ValueError):  # written by another version: read the whole log instead
            summary = Summary()
    return summary, await catch_up(summary, log)


async def catch_up(summary: Summary, log: Log) -> int:
    """Apply the log's new rows and return how many there were."""
    count = 0
    async for cursor, row in log.read(summary.cursor, set(KINDS)):
        summary.apply(cursor, row)
        count += 1
    return count


async def keep(summary: Summary, folds: Folds) -> None:
    """Save the summary, so that the next reading starts from it. Raises StorageFull."""
    await folds.save(FOLD, summary.cursor, summary.state())
