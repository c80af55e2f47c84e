"""Gaps between the reward, a proxy for what people want, and what they want: three signs of reward hacking.

*Teacher favour*: if the model learns to please only the people whose feedback it learns from (teachers), their reward rises, and that of
*gold* people, whose feedback is never learned from, does not. Gold people are chosen by a hash, so without such learning both groups are
the same on average, at any time and whatever happens to the product: the difference between them needs no reference and no past.

*Outcome gap*: flattery and other tricks that earn everybody's thumbs-up raise the reward of both groups alike. So live is compared with
control twice, by the reward and by an outcome that the reward does not contain, such as whether people come back the next day. If the
reward has risen and the outcome has fallen, the reward is being optimised at the outcome's expense (Goodhart's law; Gao et al., arXiv
2210.10760, for gold and proxy rewards).

*Feedback gap*: a reward covers only the turns that get feedback. If people on live give feedback on fewer turns than people on control,
bad answers may have gone unnoticed (selection on the outcome).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ostinato.core.arm_assignment import dealing_key, place_of
from ostinato.core.notices import Alarm, Forgotten
from ostinato.core.records import Arm, Person, Purpose, Reward, Signal, Turn
from ostinato.release.monitors.active_alarms import GapAlarm
from ostinato.release.monitors.config import DAY, MonitorsConfig
from ostinato.release.monitors.influence import Owner
from ostinato.release.trial.contrast import Contrast, Effect, TimeSlot, lower_bound, upper_bound

TEACHER_FAVOUR = "teacher_favour"
"""Name of the alarm that people who are learned from are pleased more often than gold people."""

OLD_TEACHER_FAVOUR = "proxy_gap"
"""Its name in logs of earlier versions; an alarm raised under it is cleared under it."""

OUTCOME_GAP = "outcome_gap"
"""Name of the alarm that the reward rises while an outcome falls."""

FEEDBACK_GAP = "feedback_gap"
"""Name of the alarm that fewer turns get feedback on live than on control."""

UNHEARD = 0.02
"""The tolerance for a lower share of turns with feedback on live."""

LEAST_PEOPLE = 20  # least effective number of people on each side
_SALT = "gold"
T = TypeVar("T")


def is_gold(tenant: str, user: str, *, share: float, salt: str) -> bool:
    """Return true if this person's feedback is never learned from. It never changes for one salt; a larger `share` only adds people.

    Example: ``is_gold("default", "ann", share=0.1, salt="gold")``
    """
    return place_of(dealing_key(salt), tenant, user) < share


def gold_people(config: MonitorsConfig) -> Callable[[str, str], bool]:
    """Return the function from tenant and user to whether they are gold, by the settings.

    Example: ``gold_people(MonitorsConfig(gold=0.05))("default", "ann")``
    """
    share = config.gold if config.enabled else 0.0
    return lambda tenant, user: share > 0.0 and is_gold(tenant, user, share=share, salt=_SALT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFavour:
    """The share of turns with a positive reward among people who are learned from, minus that among gold people, in [-1, 1].

    `lower` exceeds the truth at any look with probability at most `alpha` (`teacher_favour`). `taught_by` and `gold` count people.

    Example: ``TeacherFavour(taught_by=412, gold=41, mean=0.041, lower=0.022)``
    """

    taught_by: int
    gold: int
    mean: float
    lower: float


def teacher_favour(
    outcomes: Mapping[Person, tuple[float, float]], gold: Callable[[str, str], bool], alpha: float
) -> TeacherFavour | None:
    """Return the gap among people who were served the same versions at the same time; None with fewer than 20 effective people on a side.

    `outcomes`: each person's number of turns with a positive reward, and of all turns with a reward. The estimate is clustered by person,
    and the bound is that of a confidence sequence (`release.trial.contrast`), which allows repeated looks.
    """
    effect, taught, others = person_difference(outcomes, lambda person: not gold(*person))
    if effect.people < LEAST_PEOPLE:
        return None
    lower = lower_bound(effect.difference, effect.variance, alpha)
    return TeacherFavour(taught_by=taught, gold=others, mean=effect.difference, lower=lower)


def person_difference(
    outcomes: Mapping[Person, tuple[float, float]], treated: Callable[[Person], bool]
) -> tuple[Effect, int, int]:
    """Return treated people's mean minus that of the others, clustered by person, and the number of people on each side."""
    people = [person for person, (_, turns) in outcomes.items() if turns > 0]
    treated_R = np.array([treated(person) for person in people], dtype=np.bool_)
    contrast = Contrast(most_turns_a_day=float("inf"))
    contrast.add(
        TimeSlot(
            day=0,
            people_R=np.arange(len(people), dtype=np.int64),
            turns_R=np.array([outcomes[person][1] for person in people], dtype=np.float64),
            good_R=np.array([outcomes[person][0] for person in people], dtype=np.float64),
            expected_R=np.zeros(len(people)),
            treated_R=treated_R,
        )
    )
    count = int(treated_R.sum())
    return contrast.effect(), count, len(people) - count


class _Daily(Protocol):
    day: int
    today: int


def counts_today(counted: _Daily, at: float, most: int) -> bool:
    """Count one more event on the day of `at`. Return false beyond `most` of them."""
    day = int(at // DAY)
    if counted.day != day:
        counted.day, counted.today = day, 0
    counted.today += 1
    return counted.today <= most


def dealt_by_chance(turn: Turn) -> bool:
    """Return true if the arm was assigned at random: neither live for want of a name, nor by Auto, whose shares follow the reward."""
    return turn.propensity < 1.0 and turn.auto is None


@dataclass(slots=True)
class _Counted:
    good: float = 0.0
    turns: float = 0.0
    day: int = -1
    today: int = 0


class PersonCrowd(Generic[T]):
    """At most `most` people, by tenant. A tenant that invents names cannot displace people of smaller tenants.

    When the crowd is full, the newest person of the largest tenant is dropped for a person of a smaller tenant. `full`: a person was left
    out since the last `clear`.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._tenants: dict[str, dict[str, T]] = {}
        self.full = False

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[tuple[Person, T]]:
        return (((tenant, user), each) for tenant, users in self._tenants.items() for user, each in users.items())

    def get(self, person: Person, new: Callable[[], T]) -> T | None:
        """Return the counts of a person, `new()` if they are new; None if there is no room for them."""
        tenant, user = person
        users = self._tenants.get(tenant, {})
        known = users.get(user)
        if known is None and self._has_room(len(users)):
            known = new()
            self.put(person, known)
        return known

    def known(self, person: Person) -> T | None:
        """Return the counts of a person; None if they are not there."""
        return self._tenants.get(person[0], {}).get(person[1])

    def put(self, person: Person, counted: T) -> None:
        """Add a person who is not there yet, without checking for room."""
        tenant, user = person
        self._tenants.setdefault(tenant, {})[user] = counted
        self._size += 1

    def forget(self, row: Forgotten) -> None:
        """Drop a person, or all people of a tenant."""
        users = self._tenants.get(row.tenant, {})
        for user in [user for user in users if row.covers((row.tenant, user))]:
            self.drop((row.tenant, user))

    def drop(self, person: Person) -> None:
        """Drop a person, if they are there."""
        if self._tenants.get(person[0], {}).pop(person[1], None) is not None:
            self._size -= 1

    def clear(self) -> None:
        """Drop everybody."""
        self._tenants.clear()
        self._size, self.full = 0, False

    def _has_room(self, own: int) -> bool:
        if self._size < self._most:
            return True
        self.full = True
        _, largest = max(self._tenants.items(), key=lambda each: (len(each[1]), each[0]))
        if len(largest) <= own + 1:
            return False
        largest.popitem()
        self._size -= 1
        return True


class GapWatch:
    """The base of the monitors of a gap: an alarm that follows the log, and crowds from which people can be forgotten."""

    def __init__(self, gap: GapAlarm, *crowds: PersonCrowd[Any]) -> None:
        self.gap, self._crowds = gap, crowds

    @property
    def standing(self) -> list[str]:
        """The alarm's name while it is raised."""
        return self.gap.standing

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a saved state: the alarm is raised if the log says so."""
        self.gap.begin(alarms)

    def alarm(self, row: Alarm) -> None:
        """Apply a person's acceptance of the gap that was found last. Other rows are ignored."""
        self.gap.accepted(row)

    def forget(self, row: Forgotten) -> None:
        """Drop the counts of a person."""
        for crowd in self._crowds:
            crowd.forget(row)


class GoldWatch(GapWatch):
    """The monitor of teacher favour: rewards in, alarms out.

    Both sides are counted for a week (`gold_s`), compared hourly, and then counted anew.
    """

    def __init__(self, config: MonitorsConfig) -> None:
        self._people = PersonCrowd[_Counted](config.most_people)
        super().__init__(GapAlarm(TEACHER_FAVOUR, config.gold_gap, former=OLD_TEACHER_FAVOUR), self._people)
        self._config = config
        self._gold = gold_people(config)

    @property
    def full(self) -> bool:
        """True if a person was left out for want of room in the current period."""
        return self._people.full

    def reward(self, row: Reward, owner: Owner | None) -> Iterator[Alarm]:
        """Process a reward, with the owner of its turn; yield alarms."""
        if self._config.gold <= 0.0 or not self._config.enabled:
            yield from self.gap.end("there are no gold people any more (release.monitors.gold)", row.at)
            return
        if self.gap.lasted(row.at) >= self._config.gold_s:
            yield from self.gap.anew(row.at)
            self._people.clear()
        if owner is not None and owner.live:
            self._count(owner.person, row)
        if self.gap.look_due(row.at):
            yield from self._look(row.at)

    def _count(self, person: Person, row: Reward) -> None:
        known = self._people.get(person, _Counted)
        if known is not None and counts_today(known, row.at, self._config.turns_a_day):
            known.turns += 1.0
            known.good += row.value > 0.0

    def _look(self, at: float) -> Iterator[Alarm]:
        outcomes = {person: (each.good, each.turns) for person, each in self._people}
        gap = teacher_favour(outcomes, self._gold, self._config.gold_alpha)
        if gap is None or gap.lower <= self.gap.tolerated or not self.gap.find(gap.mean):
            return
        reason = (
            f"{gap.taught_by} people whose feedback is learned from are pleased more often than {gap.gold} gold people: by "
            f"{100 * gap.mean:.1f} pp, at least {100 * gap.lower:.1f} pp, where {100 * self.gap.tolerated:.1f} pp are tolerated"
            + ("; not all people are counted (release.monitors.most_people)" if self.full else "")
        )
        detail = {
            "gap": gap.mean,
            "lower": gap.lower,
            "taught_by": gap.taught_by,
            "gold": gap.gold,
            "full": self.full,
            "pauses": True,
        }
        yield self.gap.raised(reason, at, detail)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "people": [[*person, c.good, c.turns, c.day, c.today] for person, c in self._people],
            "full": self._people.full,
            **self.gap.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._people.clear()
        for tenant, user, good, turns, day, today in state["people"]:
            self._people.put((str(tenant), str(user)), _Counted(float(good), float(turns), int(day), int(today)))
        self._people.full = bool(state["full"])
        self.gap.restore(state)


# ---------------------------------------------------------------- the outcome gap


class _OnASide(Protocol):
    treated: bool


_Side = TypeVar("_Side", bound=_OnASide)


def _compared(people: PersonCrowd[_Side], owner: Owner | None) -> _Side | None:
    """Return the counts of the person who was served a turn by live or control, if the arm was assigned at random; else None.

    It is also None if the person has since moved to the other side: feedback on the turn may arrive after control's share was changed.
    """
    if owner is None or owner.auto or not (owner.live or owner.control):
        return None
    known = people.known(owner.person)
    return known if known is not None and known.treated is owner.live else None


RETURNED = "returned"
"""The outcome that needs no signal: whether people who came on one day came back on the next."""

_REMEMBERED_DAYS = 7
_SIDES = {Arm.LIVE: True, Arm.CONTROL: False}


@dataclass(slots=True)
class _Visits:
    """A person's outcomes and visits, on live if `treated`, else on control.

    `sums`: by outcome (`""`: the reward), the sum and the number. `last` and `before`: the newest days with a visit, each with whether it
    was to live (true), control (false) or another arm (None).
    """

    treated: bool
    sums: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    last: tuple[int, bool | None] = (-9, None)
    before: tuple[int, bool | None] = (-9, None)
    day: int = -9
    today: int = 0

    def add(self, outcome: str, value: float) -> None:
        good, count = self.sums.get(outcome, (0.0, 0.0))
        self.sums[outcome] = good + value, count + 1.0

    def to_json(self) -> list[Any]:
        return [self.treated, self.sums, self.last, self.before, self.day, self.today]

    @classmethod
    def from_json(cls, state: list[Any]) -> _Visits:
        treated, sums, last, before, day, today = state
        return cls(
            treated=bool(treated),
            sums={str(name): (float(good), float(count)) for name, (good, count) in sums.items()},
            last=(int(last[0]), last[1]),
            before=(int(before[0]), before[1]),
            day=int(day),
            today=int(today),
        )


class OutcomeGapWatch(GapWatch):
    """The monitor of the outcome gap: turns, rewards and signals in, alarms out.

    Both arms are counted for a week (`gold_s`), compared hourly, and counted anew. The alarm is raised when live's share of turns with a
    positive reward is shown to be above control's and an outcome's mean below it, each at level `gold_alpha` over all looks; several
    outcomes share their level equally. An outcome that merely stays where it was raises nothing: it may not depend on the model. After a
    person has accepted the alarm, only a larger loss of that outcome raises it again.
    """

    def __init__(self, config: MonitorsConfig) -> None:
        self._people = PersonCrowd[_Visits](config.most_people)
        super().__init__(GapAlarm(OUTCOME_GAP), self._people)
        self._config = config
        self._on = config.enabled and bool(config.outcomes)
        self._today: int | None = None
        self._lost: dict[str, float] = {}
        self._tolerated: dict[str, float] = {}

    def turn(self, turn: Turn) -> None:
        """Record a person's turn as a visit. Turns of arms that were not assigned at random, and of the learner arm, are left out."""
        if not self._on or not turn.arm.people or turn.arm is Arm.LEARNER or not dealt_by_chance(turn):
            return
        day, side = int(turn.ended_at // DAY), _SIDES.get(turn.arm)
        if self._today is None or day > self._today:
            self._close(day)
        known = self._people.get(turn.person, lambda: _Visits(treated=side is not False))
        if known is not None and side is not None and side is not known.treated:
            # control's share was changed: drop what the person did on the other side
            known.treated, known.sums = side, {}
        if known is not None and day > known.last[0]:
            known.before, known.last = known.last, (day, side)

    def reward(self, row: Reward, owner: Owner | None) -> Iterator[Alarm]:
        """Process a reward, with the owner of its turn; yield alarms."""
        if not self._on:
            yield from self.gap.end("no outcome is compared any more (release.monitors.outcomes)", row.at)
            return
        if self.gap.lasted(row.at) >= self._config.gold_s:
            yield from self.gap.anew(row.at)
            self._anew()
        known = _compared(self._people, owner)
        if known is not None and counts_today(known, row.at, self._config.turns_a_day):
            known.add("", float(row.value > 0.0))
        if self.gap.look_due(row.at):
            yield from self._look(row.at)

    def signal(self, signal: Signal, owner: Owner | None) -> None:
        """Count a signal about a turn. Retractions are ignored."""
        if not self._on or signal.retracts is not None or signal.name not in self._config.outcomes:
            return
        known = _compared(self._people, owner) if owner is not None and owner.person[0] == signal.tenant else None
        # limited as rewards are, so that nobody dominates by sending many signals
        most = self._config.turns_a_day * self._config.gold_s / DAY
        if known is not None and known.sums.get(signal.name, (0.0, 0))[1] < most:
            known.add(signal.name, min(max(signal.value, 0.0), 1.0))

    def alarm(self, row: Alarm) -> None:
        """Apply a person's acceptance of the losses that were found last. Other rows are ignored."""
        if self.gap.accepted(row):
            for name, lost in self._lost.items():
                self._tolerated[name] = max(lost, self._tolerated.get(name, 0.0))

    def _close(self, day: int) -> None:
        """Count who came back on the day that is over, of those who came to live or control on the day before it."""
        over, self._today = self._today, day
        if over is None or RETURNED not in self._config.outcomes:
            return
        for _, each in self._people:
            visit = each.before if each.last[0] == over else each.last
            if visit[0] == over - 1 and visit[1] is each.treated:
                each.add(RETURNED, float(each.last[0] == over))

    def _anew(self) -> None:
        today = self._today or 0
        kept = (
            [] if self._people.full else [pair for pair in self._people if today - pair[1].last[0] <= _REMEMBERED_DAYS]
        )
        self._people.clear()
        for person, each in kept:
            each.sums = {}
            self._people.put(person, each)

    def _effect(self, outcome: str) -> Effect:
        sums = {person: each.sums[outcome] for person, each in self._people if outcome in each.sums}
        treated = {person: each.treated for person, each in self._people}
        return person_difference(sums, lambda person: treated[person])[0]

    def _look(self, at: float) -> Iterator[Alarm]:
        alpha, reward = self._config.gold_alpha, self._effect("")
        if reward.people < LEAST_PEOPLE or lower_bound(reward.difference, reward.variance, alpha) <= 0.0:
            return
        for name in self._config.outcomes:
            effect = self._effect(name)
            above, level = -self._tolerated.get(name, 0.0), alpha / len(self._config.outcomes)
            if effect.people < LEAST_PEOPLE or upper_bound(effect.difference, effect.variance, level) >= above:
                continue
            self._lost[name] = max(-effect.difference, 0.0)
            if not self.gap.find(self._lost[name]):
                continue
            reason = (
                f"rewards on live are positive more often than on control, by {100 * reward.difference:.1f} pp, but {name} is lower by "
                f"{-100 * effect.difference:.1f} pp: the reward is optimised at the expense of what it stands for"
            )
            detail = {"outcome": name, "reward": reward.difference, "difference": effect.difference, "pauses": True}
            yield self.gap.raised(reason, at, detail)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "people": [[*person, *each.to_json()] for person, each in self._people],
            "full": self._people.full,
            "today": self._today,
            "gap": self.gap.snapshot(),
            "lost": self._lost,
            "tolerated": self._tolerated,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._people.clear()
        for tenant, user, *visits in state["people"]:
            self._people.put((str(tenant), str(user)), _Visits.from_json(visits))
        self._people.full = bool(state["full"])
        self.gap.restore(state["gap"])
        self._today = None if state["today"] is None else int(state["today"])
        self._lost = {str(name): float(lost) for name, lost in state["lost"].items()}
        self._tolerated = {str(name): float(lost) for name, lost in state["tolerated"].items()}


# ---------------------------------------------------------------- the feedback gap


@dataclass(slots=True)
class _FeedbackCounts:
    """A person's turns, on live if `treated`, else on control; those of them with feedback; and their weight, limited by day."""

    treated: bool
    turns: float = 0.0
    heard: float = 0.0
    weight: float = 0.0
    day: int = -9
    today: int = 0


class FeedbackGapWatch(GapWatch):
    """The monitor of the feedback gap: turns and rewards in, alarms out.

    Both arms are counted for a week (`gold_s`), compared hourly, and counted anew. Only turns whose purpose is a task count; a turn has
    feedback if its reward rests on signals. The alarm is raised when live's share of turns with feedback is shown to be lower by more than
    `UNHEARD`, at level `gold_alpha` over all looks. It pauses nothing: people may say less because there is less to complain about.
    """

    def __init__(self, config: MonitorsConfig) -> None:
        self._people = PersonCrowd[_FeedbackCounts](config.most_people)
        super().__init__(GapAlarm(FEEDBACK_GAP, UNHEARD), self._people)
        self._config = config

    def turn(self, turn: Turn) -> None:
        """Count a person's turn if its purpose is a task. People who were not assigned to live or control at random are left out."""
        side = _SIDES.get(turn.arm)
        if not self._config.enabled or side is None or turn.purpose is not Purpose.TASK or not dealt_by_chance(turn):
            return
        known = self._people.get(turn.person, lambda: _FeedbackCounts(treated=side))
        if known is None:
            return
        if known.treated is not side:  # control's share was changed
            known.treated, known.turns, known.heard, known.weight = side, 0.0, 0.0, 0.0
        known.turns += 1.0
        known.weight += counts_today(known, turn.ended_at, self._config.turns_a_day)

    def reward(self, row: Reward, owner: Owner | None) -> Iterator[Alarm]:
        """Process a reward, with the owner of its turn; yield alarms."""
        if not self._config.enabled:
            yield from self.gap.end("nothing is watched any more (release.monitors.enabled)", row.at)
            return
        if self.gap.lasted(row.at) >= self._config.gold_s:
            yield from self.gap.anew(row.at)
            self._people.clear()
        known = _compared(self._people, owner)
        if known is not None and owner is not None and owner.task and row.signals:
            known.heard = min(known.heard + 1.0, known.turns)
        if self.gap.look_due(row.at):
            yield from self._look(row.at)

    def _look(self, at: float) -> Iterator[Alarm]:
        sides = {person: each.treated for person, each in self._people}
        # the share is over all of a person's turns, as a reward does not say whether its turn was among the day's first
        counts = {person: (each.weight * each.heard / each.turns, each.weight) for person, each in self._people}
        effect, live, control = person_difference(counts, sides.__getitem__)
        upper = upper_bound(effect.difference, effect.variance, self._config.gold_alpha)
        found = effect.people >= LEAST_PEOPLE and upper < -self.gap.tolerated
        if not found or not self.gap.find(-effect.difference):
            return
        reason = (
            f"{live} people on live give feedback on {-100 * effect.difference:.1f} pp fewer of their turns than {control} on control, "
            f"where {100 * self.gap.tolerated:.1f} pp are tolerated: bad answers may go unnoticed, or there is less to complain about"
        )
        detail = {"difference": effect.difference, "live": live, "control": control, "pauses": False}
        yield self.gap.raised(reason, at, detail)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "people": [
                [*person, each.treated, each.turns, each.heard, each.weight, each.day, each.today]
                for person, each in self._people
            ],
            "full": self._people.full,
            **self.gap.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._people.clear()
        for tenant, user, treated, turns, heard, weight, day, today in state["people"]:
            one = _FeedbackCounts(bool(treated), float(turns), float(heard), float(weight), int(day), int(today))
            self._people.put((str(tenant), str(user)), one)
        self._people.full = bool(state["full"])
        self.gap.restore(state)
