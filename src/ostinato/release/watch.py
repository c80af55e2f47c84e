"""The guard's input: live against the control arm over the same hours, compared after each time slot.

`Outcomes` joins the log's turns and signals into a window of what users did with each version's turns. `ReleaseWatch` tallies them by arm,
version and person, slot by slot, and `GuardTest` compares them. A tenant's signals about another tenant's turn are ignored.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ostinato.core.errors import Unavailable
from ostinato.core.pending_signals import PendingSignals
from ostinato.core.records import Arm, Person, PolicyVersion, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.guard import GuardConfig, GuardTest, Harm
from ostinato.release.ledger import State
from ostinato.release.metrics.config import DEFAULT_METRICS, MetricConfig, OutcomeConfig
from ostinato.release.metrics.facts import MOST_SIGNALS
from ostinato.release.metrics.metric import Metric, metrics_of, wanted
from ostinato.release.metrics.reactions import Reacted, reacted
from ostinato.release.pace import DAY, WEEK, Traffic
from ostinato.release.trial.config import HOUR
from ostinato.release.trial.contrast import TimeSlot

# ---------------------------------------------------------------- outcomes


_PSEUDO_TURNS = 6.0  # pseudo-count: average turns mixed into a person's own past
_MOST_DAYS = 9  # days of users' visits that are kept
_MOST_PEOPLE = 200_000  # users of a day whose visits are kept; later ones are left out
_Met = frozenset[tuple[Arm, str, bool]]  # arm, version, and whether the user was assigned to it at random
_FAILED = Metric.of(MetricConfig(name="failed"), 0.0)


class Outcomes:
    """A window over the log's turns. A turn that mixed versions across a weight swap counts for neither.

    Args:
        metrics: the declared metrics. `acceptance` tallies the first goal, if that is not a quantile.
    """

    def __init__(self, log: Log, config: OutcomeConfig, metrics: Sequence[MetricConfig] = DEFAULT_METRICS) -> None:
        self._log = log
        self._config = config
        self._goal = metrics_of(metrics, 0.0)[0]
        self._wanted = wanted((self._goal, _FAILED))
        self._cursor: Cursor | None = None
        self._window: deque[Reacted] = deque()
        self._by_turn: dict[str, Reacted] = {}
        self._early = PendingSignals[Signal](most=config.window, most_each=MOST_SIGNALS, seconds=config.early_s)
        self._came: dict[int, dict[Person, _Met]] = {}  # by day; not limited to the turns of the window
        self._met: dict[int, dict[_Met, _Met]] = {}  # by day: one shared copy of each set
        self._returned: dict[Arm, tuple[tuple[str, int, int], dict[tuple[int, Person], tuple[float, int]]]] = {}

    async def refresh(self) -> None:
        """Read the log's new rows. The first call reads only as far back as the window reaches, however long the log is."""
        if self._cursor is None:
            self._cursor = await self._log.before_last(self._config.window, Turn)
        async for cursor, row in self._log.read(self._cursor, {Turn, Signal}):
            self._cursor = cursor
            if isinstance(row, Turn):
                self._early.advance(row.ended_at)
                self._turn(row)
            elif isinstance(row, Signal):
                self._early.advance(row.received_at)
                self._signal(row)

    @property
    def since(self) -> float | None:
        """When the oldest turn of the window ended; None if there is none."""
        return self._window[0].ended_at if self._window else None

    @property
    def maturity_s(self) -> float:
        """The age in seconds at which a turn counts."""
        return self._config.maturity_s

    def expected(self, before: float, slot_s: float) -> tuple[Mapping[Person, float], Mapping[Person, float]]:
        """Return how much better than everybody else each person did in the week before: by the goal, and in turns without engine errors.

        The difference is taken from the mean of each slot, so that people who came during an outage do not differ from those who came
        before it. A person's mean is shrunk by `_PSEUDO_TURNS` average turns.
        """
        found: list[dict[Person, float]] = []
        for metric in (self._goal, _FAILED):
            tallies: defaultdict[tuple[int, Person], list[float]] = defaultdict(lambda: [0.0, 0.0])
            for arm in (Arm.LIVE, Arm.CONTROL):
                for key, (value, count) in self._tally(
                    metric, arm, None, before - WEEK, before, dealt=True, slot_s=slot_s
                ).items():
                    tallies[key][0] += value
                    tallies[key][1] += count
            slots: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
            people: defaultdict[Person, list[float]] = defaultdict(lambda: [0.0, _PSEUDO_TURNS])
            for (slot, _), (value, count) in tallies.items():
                slots[slot][0] += value
                slots[slot][1] += count
            for (slot, person), (value, count) in tallies.items():
                people[person][0] += value - count * slots[slot][0] / slots[slot][1]
                people[person][1] += count
            found.append({person: more / turns for person, (more, turns) in people.items()})
        return found[0], found[1]

    def acceptance(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float
    ) -> dict[Person, tuple[float, int]]:
        """Return each person's sum of the goal from `since` to `until` (1 is a turn's best) and the number of turns that have a value.

        Turns younger than `maturity_s` at `until` are left out, as quick reactions would otherwise count more than slow ones.
        """
        until -= self._config.maturity_s
        found = self._tally(self._goal, arm, policy, since, until, dealt=False, slot_s=math.inf)
        return {person: tally for (_, person), tally in found.items()}

    def acceptance_by_slot(
        self, arm: Arm, policy: PolicyVersion | None, since: float, until: float, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """As `acceptance`, by time slot, for people who were assigned to the arm at random."""
        return self._tally(self._goal, arm, policy, since, until - self._config.maturity_s, dealt=True, slot_s=slot_s)

    def success_by_slot(
        self, arm: Arm, policy: PolicyVersion | None, since: float, until: float, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """Return, by slot and person assigned to the arm at random, the turns that did not end in an engine error, and all turns."""
        return self._tally(_FAILED, arm, policy, since, until, dealt=True, slot_s=slot_s)

    def returned_by_day(
        self, arm: Arm, policy: PolicyVersion | None, since: float, until: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """Return, by day and person randomly assigned to the arm who used it the day before, 1 if they came to any arm (else 0), and 1.

        Only whole UTC days of the last week between `since` and `until` count: an unfinished day would count against those who are yet to
        come. Only the day before decides about the arm, since shares may have changed earlier.
        """
        first, over = math.ceil(since / DAY), math.floor((until - self._config.maturity_s) / DAY)
        key = "" if policy is None else policy.hash, first, over
        # cached: this is called every second, and the result changes once a day
        if self._returned.get(arm, (None,))[0] != key:
            tally = {
                (day + 1, person): (float(person in self._came.get(day + 1, {})), 1)
                for day, people in self._came.items()
                if first <= day and day + 1 < over
                for person, met in people.items()
                if any(
                    side is arm and dealt and (policy is None or root in (policy.hash, "")) for side, root, dealt in met
                )
            }
            self._returned[arm] = key, tally
        return self._returned[arm][1]

    def _tally(
        self,
        metric: Metric,
        arm: Arm,
        policy: PolicyVersion | None,
        since: float,
        until: float,
        *,
        dealt: bool,
        slot_s: float,
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """Tally one metric by slot and person. `policy`: None for any version.

        A turn that ended before its first token names no version; it counts for the requested version.
        """
        tally: dict[tuple[int, Person], tuple[float, int]] = {}
        for each in self._window:
            if each.arm != arm or not since <= each.ended_at <= until:
                continue
            if policy is not None and each.policy not in (policy.hash, ""):
                continue
            if dealt and not each.dealt:
                continue
            measured = metric.measure(each.known())
            if measured is not None:
                good = measured[0] / measured[1]
                key = int(each.ended_at // slot_s), each.person
                value, count = tally.get(key, (0.0, 0))
                tally[key] = value + (good if metric.sign > 0 else 1.0 - good), count + 1
        return tally

    def _turn(self, turn: Turn) -> None:
        found = reacted(turn, self._wanted, self._config.nothing)
        if found is None:
            return
        self._visit(found)
        self._window.append(found)
        self._by_turn[turn.id] = found
        for signal in self._early.claim(turn.tenant, turn.id):
            self._signal(signal)
        if len(self._window) > self._config.window:
            del self._by_turn[self._window.popleft().turn]

    def _visit(self, found: Reacted) -> None:
        day = int(found.ended_at // DAY)
        people, known = self._came.setdefault(day, {}), self._met.setdefault(day, {})
        # the learner arm's versions count as one: they change with every step, and a person's set would grow for ever
        policy = "" if found.arm is Arm.LEARNER else found.policy
        met, side = people.get(found.person, frozenset()), (found.arm, policy, found.dealt)
        if side not in met and (met or len(people) < _MOST_PEOPLE):
            met |= {side}
            people[found.person] = known.setdefault(met, met)
        if len(self._came) > _MOST_DAYS:
            oldest = min(self._came)
            del self._came[oldest], self._met[oldest]

    def _signal(self, signal: Signal) -> None:
        found = self._by_turn.get(signal.turn)
        if found is None:
            self._early.add(signal.tenant, signal.turn, replace(signal, comment=None, correction=None))
        elif signal.tenant == found.person[0]:
            found.said.hear(signal)


# ---------------------------------------------------------------- looks


_RELEASES = 8
"""The number of newest releases whose users are counted."""

_Rows = list[tuple[Person, bool, float, int]]
"""Person, whether on live, sum of outcomes in [0, 1], number of outcomes."""
_MEASURES = (
    "acceptance against the control arm",
    "success rate against the control arm",
    "users who came again the next day against the control arm",
)


class ReleaseWatch:
    """Compares live with control after each time slot.

    After a restart it reads the slots of the current period again, as far back as the window of outcomes reaches.

    Args:
        slot_s: length of a slot in seconds.
        control_moves: the control arm's version changes, as that of a branch does; turns of any of its versions are compared with live's.
    """

    def __init__(
        self,
        outcomes: Outcomes,
        config: GuardConfig,
        slot_s: float,
        *,
        most_turns_a_day: float = 20.0,
        control_moves: bool = False,
    ) -> None:
        self._outcomes = outcomes
        self._config = config
        self._slot_s = slot_s
        self._most = most_turns_a_day
        self._control_moves = control_moves
        self._key: tuple[str, str, float] | None = None
        self.test = GuardTest(config, 0.0)
        self._expected: tuple[Mapping[Person, float], ...] = ({}, {}, {})
        self._people: dict[Person, int] = {}
        self._next = 0
        self._harm: Harm | None = None

    async def live(self, state: State, control: PolicyVersion, now: float) -> Harm | None:
        """Return the harm that live does in the current period (`GuardTest`), compared with control; None if none was found.

        Acceptance, engine errors and users who came again the next day are compared, at a third of alpha each. Raises Unavailable while the
        release lies in the future, because the clock was ahead when it shipped.
        """
        live, since = state.live, state.shipped_at
        if not self._config.enabled or live is None or control.hash == live.hash:
            return None
        if since > now + self._slot_s:
            raise Unavailable(
                f"{live} went live {(since - now) / HOUR:.1f} hours from now: the clock was ahead; the guard judges nothing until then; "
                "end that with `ostinato ship` or `ostinato rollback`"
            )
        await self._outcomes.refresh()
        beside = None if self._control_moves else control
        key = live.hash, "" if beside is None else beside.hash, since
        ahead = self._next * self._slot_s > max(now, since) + self._slot_s  # the clock was ahead and has been set back
        if self._key != key or ahead:
            self._key = key
            self._begin(since, now)
        until = math.floor((now - self._outcomes.maturity_s) / self._slot_s)
        if until <= self._next:
            return self._harm  # found before, if the rollback for it failed
        for slot, measures in self._slots(live, beside, since, until):
            at = max(slot * self._slot_s, since)
            if self.test.over(at):
                self._people = {}
            self.test.add({name: self._slot(measures[name], m, at) for m, name in enumerate(_MEASURES)}, at)
        self._next, self._harm = until, self.test.harm()
        return self._harm

    def _begin(self, since: float, now: float) -> None:
        """Begin with the current period: earlier ones were decided in their time."""
        self.test, self._harm = GuardTest(self._config, since, most_turns_a_day=self._most), None
        self._expected, self._people = (*self._outcomes.expected(since, self._slot_s), {}), {}
        period = max(0, math.floor((now - self._outcomes.maturity_s - since) / self._config.period_s))
        began = (since + period * self._config.period_s) / self._slot_s
        # a slot belongs to the period in which it begins
        self._next = math.ceil(began) if period else math.floor(began)

    def _slots(
        self, live: PolicyVersion, control: PolicyVersion | None, since: float, until: int
    ) -> list[tuple[int, dict[str, _Rows]]]:
        """Return the rows of the finished slots that were not added yet, in order, by measure."""
        found: dict[int, dict[str, _Rows]] = {}
        begin, end = max(since, self._next * self._slot_s), until * self._slot_s + self._outcomes.maturity_s
        for arm, policy in ((Arm.LIVE, live), (Arm.CONTROL, control)):
            days = self._outcomes.returned_by_day(arm, policy, since, end)
            read = (
                self._outcomes.acceptance_by_slot(arm, policy, begin, end, self._slot_s),
                self._outcomes.success_by_slot(arm, policy, begin, end, self._slot_s),
                # a day counts in the slot in which it ends
                {(math.ceil((day + 1) * DAY / self._slot_s) - 1, who): tally for (day, who), tally in days.items()},
            )
            for name, tallies in zip(_MEASURES, read, strict=True):
                for (slot, person), (value, count) in tallies.items():
                    if self._next <= slot < until:
                        measures = found.setdefault(slot, {each: [] for each in _MEASURES})
                        measures[name].append((person, arm is Arm.LIVE, value, count))
        return sorted(found.items())

    def _slot(self, rows: _Rows, measure: int, at: float) -> TimeSlot:
        return TimeSlot(
            day=int(at // DAY),
            people_R=np.array([self._people.setdefault(row[0], len(self._people)) for row in rows], dtype=np.int64),
            turns_R=np.array([row[3] for row in rows], dtype=np.float64),
            good_R=np.array([row[2] for row in rows], dtype=np.float64),
            expected_R=np.array([self._expected[measure].get(row[0], 0.0) for row in rows], dtype=np.float64),
            treated_R=np.array([row[1] for row in rows], dtype=np.bool_),
        )

    async def traffic(self, state: State, now: float) -> Traffic | None:
        """Return the last day's traffic of people who may take part in trials; None before there is an hour of it.

        If the window is shorter than a day, turns are extrapolated to a day. People are not, as somebody who came twice would count twice.
        """
        await self._outcomes.refresh()
        since = max(now - DAY, self._outcomes.since or now)
        if now - since < HOUR:
            return None
        served: list[tuple[Arm, PolicyVersion]] = [(Arm.LIVE, release) for release in state.releases[-_RELEASES:]]
        if state.trial is not None:
            served += [(Arm.CANARY, state.trial.candidate), (Arm.PREVIOUS, state.trial.against)]
        people: set[Person] = set()
        turns, good = 0, 0.0
        for arm, policy in served:
            tally = self._outcomes.acceptance(arm, policy, since, now)
            people |= tally.keys()
            turns += sum(count for _, count in tally.values())
            good += sum(value for value, _ in tally.values())
        a_day = round(turns * DAY / (now - since))
        return Traffic(people=len(people), turns=a_day, good=good / turns if turns else 0.0)
