"""Compares people's outcomes when the guard says that a look is due: live against the control arm, over the same hours.

What users did with each version's turns: turns and signals of the log joined into a window of outcomes. The controller asks it for
tallies of one arm and one version, per tenant and user; the guard compares them. A tenant's signals about another tenant's turn are
ignored.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ostinato.core.pending_signals import PendingSignals
from ostinato.core.records import Arm, Person, PolicyVersion, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.guard import Compare, GuardConfig, Harm, Tally, judge, look_due, total
from ostinato.release.ledger import State
from ostinato.release.metrics.config import DEFAULT_METRICS, MetricConfig, OutcomeConfig
from ostinato.release.metrics.facts import MOST_SIGNALS
from ostinato.release.metrics.metric import Metric, metrics_of, wanted
from ostinato.release.metrics.reactions import Reacted, reacted
from ostinato.release.pace import DAY, Traffic
from ostinato.release.trial.config import HOUR

# ---------------------------------------------------------------- outcomes


_DAYS = 9  # of users' visits that are kept
_Met = frozenset[tuple[Arm, str, bool]]  # arms and versions, and whether the user was dealt to them by chance
_FAILED = Metric.of(MetricConfig(name="failed"), 0.0)


class Outcomes:
    """A window over the log's turns. Turns that mixed versions across a swap count for neither.

    Args:
        metrics: the declared metrics; `acceptance` tallies the first goal, if that has no quantile.
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
        self._came: dict[int, dict[Person, _Met]] = {}  # by day; not limited to the window's turns
        self._met: dict[_Met, _Met] = {}  # each set once, whoever met it
        self._returned: dict[Arm, tuple[tuple[str, int, int], dict[tuple[int, Person], tuple[float, int]]]] = {}

    async def refresh(self) -> None:
        """Read the log's new rows; the first time, only as far back as the window reaches, however long the log is."""
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
    def window(self) -> int:
        """How many turns it holds at most."""
        return self._config.window

    @property
    def upto(self) -> Cursor:
        """The place in the log that it was read to."""
        return self._cursor or 0

    def acceptance(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float, *, dealt: bool = False
    ) -> dict[Person, tuple[float, int]]:
        """Per person, from `since` to `until`: the goal's sum, with 1 the best for each turn, and the number of turns that have a value.

        With `dealt`, only people who were dealt to the arm by chance. Turns younger than `maturity_s` at `until` are left out: otherwise
        quick reactions would count more than slow ones.
        """
        tally: dict[Person, tuple[float, int]] = {}
        until -= self._config.maturity_s
        for (_, person), (value, count) in self._tally(
            self._goal, arm, policy, since, until, dealt=dealt, slot_s=math.inf
        ).items():
            tally[person] = value, count
        return tally

    def acceptance_by_slot(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """As `acceptance`, by time slot, for people who were dealt to the arm by chance."""
        return self._tally(self._goal, arm, policy, since, until - self._config.maturity_s, dealt=True, slot_s=slot_s)

    def success_by_slot(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """Per slot and person who was dealt to the arm: turns that did not end in an engine error, and all turns."""
        return self._tally(_FAILED, arm, policy, since, until, dealt=True, slot_s=slot_s)

    def returned_by_day(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """By day and person who was dealt to the arm and came to it on the day before: 1 if they came, to whatever arm, and the count 1.

        Only whole days between `since` and `until`, in UTC, of the last week: a day that is not over would count against those who are
        yet to come. Only the day before is asked about, since shares may have changed before it.
        """
        first, over = math.ceil(since / DAY), math.floor((until - self._config.maturity_s) / DAY)
        key = policy.hash, first, over
        if self._returned.get(arm, (None,))[0] != key:  # a look a second, and one new day in 86,400
            sides = {(arm, policy.hash, True), (arm, "", True)}
            tally = {
                (day + 1, person): (float(person in self._came.get(day + 1, {})), 1)
                for day, people in self._came.items()
                if first <= day and day + 1 < over
                for person, met in people.items()
                if met & sides
            }
            self._returned[arm] = key, tally
        return self._returned[arm][1]

    def _tally(
        self, metric: Metric, arm: Arm, policy: PolicyVersion, since: float, until: float, *, dealt: bool, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """A turn that ended before its first token names no version: it counts for the version that is asked about in that time."""
        tally: dict[tuple[int, Person], tuple[float, int]] = {}
        for each in self._window:
            if each.arm != arm or each.policy not in (policy.hash, "") or not since <= each.ended_at <= until:
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
        people = self._came.setdefault(int(found.ended_at // DAY), {})
        met, side = people.get(found.person, frozenset()), (found.arm, found.policy, found.dealt)
        if side not in met:
            met |= {side}
            people[found.person] = self._met.setdefault(met, met)
        if len(self._came) > _DAYS:
            del self._came[min(self._came)]

    def _signal(self, signal: Signal) -> None:
        found = self._by_turn.get(signal.turn)
        if found is None:
            self._early.add(signal.tenant, signal.turn, replace(signal, comment=None, correction=None))
        elif signal.tenant == found.person[0]:
            found.said.hear(signal)


# ---------------------------------------------------------------- side by side


SlotTallies = Mapping[tuple[int, Person], tuple[float, int]]
"""Time slot and person -> (sum of outcomes in [0, 1], number of outcomes)."""


def side_by_side(treated: SlotTallies, control: SlotTallies) -> tuple[Tally, Tally]:
    """The tallies of both arms, weighted so that every slot j has the same weight w_j = n_T n_C / (n_T + n_C) on both sides.

    The difference of the weighted means is ``D = sum_j w_j (mean_Tj - mean_Cj) / sum_j w_j``, the estimator that trials use
    (`trial/contrast.py`): shares that change while the hours differ do not bias it. In each slot the mean over both arms is replaced by
    the mean of all slots, so that differences between hours add nothing to the spread between people. This is skipped if all outcomes of
    an arm are alike, since a comparison must be able to tell that. A slot without one of the arms tells nothing and is left out.
    """
    turns: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    good: dict[int, float] = defaultdict(float)
    for side, tallies in enumerate((treated, control)):
        for (slot, _), (value, count) in tallies.items():
            turns[slot][side] += count
            good[slot] += value
    weights = {slot: one * other / (one + other) for slot, (one, other) in turns.items() if one and other}
    means = {slot: good[slot] / sum(turns[slot]) for slot in weights}
    if min(_varies(treated, weights), _varies(control, weights)):
        middle = sum(weights[slot] * mean for slot, mean in means.items()) / sum(weights.values())
        added = {slot: middle - mean for slot, mean in means.items()}
    else:
        added = dict.fromkeys(means, 0.0)
    sides: list[dict[Person, tuple[float, float]]] = []
    for side, tallies in enumerate((treated, control)):
        made: dict[Person, tuple[float, float]] = {}
        for (slot, person), (value, count) in tallies.items():
            if slot in weights:
                each = weights[slot] / turns[slot][side]
                before = made.get(person, (0.0, 0.0))
                made[person] = before[0] + each * (value + count * added[slot]), before[1] + each * count
        sides.append(made)
    return sides[0], sides[1]


def _varies(tallies: SlotTallies, slots: Collection[int]) -> bool:
    """True if some outcomes in these slots are good, and some are not."""
    within = [tally for (slot, _), tally in tallies.items() if slot in slots]
    return 0.0 < sum(value for value, _ in within) < sum(count for _, count in within)


# ---------------------------------------------------------------- looks


_RELEASES = 8
"""The number of newest releases whose users are counted."""

Pair = tuple[SlotTallies, Callable[[], SlotTallies]]
"""The watched tallies, and a function that counts those to compare with, called only when a look is due, which is seldom."""


class ReleaseWatch:
    """Makes each look once per release; a restarted process may repeat its last one.

    Both arms are compared within time slots: an outage or a night that both arms share says nothing about a version, whatever the
    arms' shares were before and after it.

    Args:
        slot_s: how long a slot is, in seconds.
    """

    def __init__(self, outcomes: Outcomes, config: GuardConfig, compare: Compare, slot_s: float) -> None:
        self._outcomes = outcomes
        self._config = config
        self._compare = compare
        self._slot_s = slot_s
        self._looked: dict[tuple[str, float, str], int] = {}

    async def live(self, state: State, control: PolicyVersion, after: Cursor, now: float) -> Harm | None:
        """Live against control since live shipped: acceptance, engine errors and users who came again the next day, a third of alpha each.

        `after` is the place in the log of the line that put it live: looks are counted from there, so a restart goes on with them.
        """
        live = state.live
        if not self._config.enabled or live is None or control.hash == live.hash:
            return None
        await self._outcomes.refresh()
        since, slot_s, outcomes = state.shipped_at, self._slot_s, self._outcomes
        pairs: dict[str, Pair] = {
            "acceptance against the control arm": (
                outcomes.acceptance_by_slot(Arm.LIVE, live, since, now, slot_s),
                lambda: outcomes.acceptance_by_slot(Arm.CONTROL, control, since, now, slot_s),
            ),
            "success rate against the control arm": (
                outcomes.success_by_slot(Arm.LIVE, live, since, now, slot_s),
                lambda: outcomes.success_by_slot(Arm.CONTROL, control, since, now, slot_s),
            ),
            "users who came again the next day against the control arm": (
                outcomes.returned_by_day(Arm.LIVE, live, since, now),
                lambda: outcomes.returned_by_day(Arm.CONTROL, control, since, now),
            ),
        }
        return self._look(live, since, self._outcomes.upto - after, pairs)

    async def traffic(self, state: State, now: float) -> Traffic | None:
        """The last day's traffic of people who may take part in trials; None before there is an hour of it.

        If the window is shorter than a day, turns are extrapolated to a day. People are not: a person who came twice would count twice.
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
            turns += total(tally)
            good += sum(value for value, _ in tally.values())
        a_day = round(turns * DAY / (now - since))
        return Traffic(people=len(people), turns=a_day, good=good / turns if turns else 0.0)

    def _look(self, policy: PolicyVersion, since: float, rows: int, pairs: Mapping[str, Pair]) -> Harm | None:
        """The harm found by the looks that are due, if any. The measures share alpha equally."""
        config = self._config.model_copy(update={"alpha": self._config.alpha / len(pairs)})
        for measure, (watched, baseline) in pairs.items():
            look = look_due(total(watched), rows, self._outcomes.window, config)
            key = policy.hash, since, measure
            if look is None or look <= self._looked.get(key, -1):
                continue
            self._looked[key] = look
            if harm := judge(measure, *side_by_side(watched, baseline()), look, config, self._compare):
                return harm
        return None
