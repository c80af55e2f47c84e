"""The desk's alarms, as a fold of the log: the reward function fails, feedback stops arriving, or most trainable turns go unused.

Coverage is the share of turns with feedback. If it drops too far, silence no longer means anything. Each tenant's turns are observed in the
order in which their rewards were decided, each with feedback or without. The usual share of turns with feedback is an exponentially
weighted mean. A sequential test (CUSUM: Page 1954, Biometrika 41) watches for a drop: S = max(0, S + log likelihood ratio) of "nearly
nothing arrives" (a twentieth of the usual share) against "at least half of the usual share arrives"; the alarm is due when S reaches log
N. If each turn has feedback with its own probability of at least half the usual share, the mean number of turns between two false alarms
is at least N (Lorden 1971, Ann. Math. Stat. 42). A null hypothesis of half the usual share leaves room for the estimate's error and for
users who give little feedback.

The usual share is estimated from turns up to the last time that S was 0, so that the silence under test does not count as usual. While
the alarm stands the estimate is frozen, and the same test with its hypotheses exchanged detects when feedback is back. Each signal name of
a tenant is watched in the same way, since a product may lose one kind of signal while the others continue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from typing import Any

from ostinato.core.notices import Alarm, AlarmState
from ostinato.reward.config import CoverageConfig

# ---------------------------------------------------------------- coverage


MEMORY = 2000.0  # time constant of the exponentially weighted counts, in turns
LEAST_COVERED = 20.0  # least number of turns with feedback behind the usual share
STILL_USUAL, NEARLY_NOTHING = 0.5, 0.05  # fractions of the usual share: the test's two hypotheses
FALSE_COMFORT = 5e3  # least mean number of silent turns between two false all-clears


@dataclass(slots=True, kw_only=True)
class Coverage:
    """One tenant's feedback. `turns` counts all matured turns, `silent` the most recent run of turns without feedback.

    `weight` and `covered` are the weighted counts of turns and of turns with feedback. `recent` and `recent_heard` count the turns
    that are not included in them yet, because they may belong to an outage.
    """

    turns: int = 0
    weight: float = 0.0
    covered: float = 0.0
    recent: int = 0
    recent_heard: int = 0
    silent: int = 0
    falling: float = 0.0
    rising: float = 0.0

    @property
    def usual(self) -> float:
        """The usual share of turns with feedback."""
        return self.covered / self.weight if self.weight else 0.0

    def see(self, heard: bool, *, standing: bool, config: CoverageConfig) -> None:
        """Take in one matured turn. `standing`: the alarm is raised."""
        ratio = self._ratio(heard)
        if standing:
            self.rising = max(0.0, self.rising - ratio)
        elif self.turns >= config.min_turns and self.covered >= LEAST_COVERED:
            self.falling = max(0.0, self.falling + ratio)
        self.turns += 1
        self.silent = 0 if heard else self.silent + 1
        if not standing:
            self.recent += 1
            self.recent_heard += heard
            if self.falling == 0.0:
                self._learn()

    def fallen_silent(self, config: CoverageConfig) -> bool:
        """True if the test says that feedback has stopped."""
        return self.falling >= math.log(config.false_alarm_turns)

    def is_back(self) -> bool:
        """True if feedback arrives again."""
        return self.rising >= math.log(FALSE_COMFORT)

    def settle(self) -> None:
        """Restart both tests after an alarm was raised or cleared, and leave the turns that led to it out of the usual share."""
        self.falling = self.rising = 0.0
        self.recent = self.recent_heard = 0

    def _learn(self) -> None:
        kept = (1.0 - 1.0 / MEMORY) ** self.recent
        self.weight = kept * self.weight + self.recent
        self.covered = kept * self.covered + self.recent_heard
        self.recent = self.recent_heard = 0

    def _ratio(self, heard: bool) -> float:
        """Return the log likelihood ratio of one turn."""
        usual, nothing = STILL_USUAL * self.usual, NEARLY_NOTHING * self.usual
        if not usual:
            return 0.0
        return math.log(nothing / usual) if heard else math.log((1.0 - nothing) / (1.0 - usual))


# ---------------------------------------------------------------- share of trainable turns that were trained on


LEAST_DECIDED = 100.0  # least number of decided turns behind the share
TOO_FEW_USED, ENOUGH_USED = 0.5, 0.6  # the alarm is raised below the first share and cleared above the second
REMEDIES: Mapping[str, str] = {
    "stale": "the trainer was too many steps ahead: set learn.batch = 'auto', raise reward.batch_tokens or ship more often",
    "greedy": "clients ask for temperature 0, which explores nothing: override it in serve.sampling",
    "cold": "clients ask for a temperature below reward.min_temperature: override it in serve.sampling",
    "top_p": "clients ask for a top_p below 1: override it in serve.sampling, or serve with the embedded engine",
    "too_few": "too few turns came for a batch: lower learn.batch",
    "passed_over": "a step cannot hold all turns with a reward: raise reward.batch_tokens, or give the trainer a faster machine",
    "untaken": "the trainer waited for the gate: ship more often",
    "too_long": "they have too many tokens: raise reward.batch_tokens",
}
"""Why trainable turns of people are not trained on, and what to do about it."""


@dataclass(slots=True)
class TrainedShare:
    """Outcomes of people's most recent trainable turns: weighted counts by outcome, "trained" or a key of `REMEDIES`."""

    counts: dict[str, float] = field(default_factory=dict[str, float])

    def see(self, outcome: str) -> None:
        """Count one turn."""
        self.counts = {name: (1.0 - 1.0 / MEMORY) * count for name, count in self.counts.items()}
        self.counts[outcome] = self.counts.get(outcome, 0.0) + 1.0

    def share(self, waiting: int = 0) -> float | None:
        """Return the share that was trained on; None while it is unknown, because too few turns were decided, or because there was no batch
        yet and at least as many turns are `waiting` for the first one.
        """
        decided = sum(self.counts.values())
        trained = self.counts.get("trained", 0.0)
        return None if decided < LEAST_DECIDED or (not trained and waiting >= decided) else trained / decided

    def reason(self) -> str:
        """Describe the share, the commonest reasons for losses, and the first reason's remedy."""
        decided = sum(self.counts.values())
        lost = sorted((name for name in self.counts if name != "trained"), key=lambda name: -self.counts[name])
        causes = ", ".join(f"{100 * self.counts[name] / decided:.0f}% {name}" for name in lost[:3])
        trained = 100 * self.counts.get("trained", 0.0) / decided
        return f"{trained:.0f}% of the last turns that could teach were trained on ({causes}): {REMEDIES[lost[0]]}"


# ---------------------------------------------------------------- alarms


FUNCTION, LATE_FUNCTION = "reward_function", "late_reward_function"
FUNCTIONS = (FUNCTION, LATE_FUNCTION)
UNUSED = "unused"
COVERAGE = "coverage:"
SIGNAL = "signal:"
SURROGATE, SURROGATE_GAP = "surrogate:", "surrogate_gap:"
MOST_NAMES = 16  # most signal names of a tenant that are watched
DISCONTINUED_AFTER = 10_000  # turns without a signal after which it counts as discontinued, not as lost
FAILURES = ("reward_failed", "reward_hung", "reward_nonsense")
REWARDS_TO_CLEAR = 20  # rewards in a row after which a failed reward function counts as working again


@dataclass(slots=True)
class _Alarm:
    standing: bool = False
    rows: int = 0


class Alarms:
    """Folds the events that matter for alarms. An alarm stands from its row in the log on, for every reader of the log.

    `coverages` holds each tenant's feedback; `due` yields the rows to write next. Rows are numbered from `start`, the place in the
    log after which the fold began: there were fewer alarms than rows before it, so no number occurs twice.
    """

    def __init__(self, config: CoverageConfig, start: int = 0) -> None:
        self._config = config
        self._start = start
        self._known: dict[str, _Alarm] = {}
        self._failures: dict[str, str] = {}  # by function: the last failure since its alarm's last row
        self._sound: Counter[str] = Counter()  # by function: rewards in a row since its last failure or alarm row
        self.coverages: dict[str, Coverage] = {}
        self.signals: dict[str, dict[str, Coverage]] = {}  # by tenant and by name
        self.use = TrainedShare()

    def standing(self) -> list[str]:
        """The names of the alarms that stand."""
        return [name for name, alarm in self._known.items() if alarm.standing]

    def silenced(self, tenant: str) -> bool:
        """Return True while the tenant's silence is not trusted."""
        return self._stands(COVERAGE + tenant)

    def decided(self, tenant: str, *, heard: bool, names: AbstractSet[str] = frozenset()) -> None:
        """Count a delivered turn whose reward was decided, with feedback (`heard`) or without; `names` are the names of its signals."""
        coverage, silenced = self.coverages.setdefault(tenant, Coverage()), self.silenced(tenant)
        coverage.see(heard, standing=silenced, config=self._config)
        signals = self.signals.setdefault(tenant, {})
        for name in sorted(names - signals.keys())[:MOST_NAMES]:
            if len(signals) == MOST_NAMES:  # the rarest signal makes room, unless it is usual or alarmed
                rarest = min(signals, key=lambda each: (signals[each].covered + signals[each].recent_heard, each))
                if signals[rarest].covered >= LEAST_COVERED or self._stands(_signal_alarm(tenant, rarest)):
                    break
                del signals[rarest]
            signals[name] = Coverage()
        for name, each in () if silenced else signals.items():  # the tenant's own alarm says that all feedback is lost
            each.see(name in names, standing=self._stands(_signal_alarm(tenant, name)), config=self._config)

    def answered(self, function: str = FUNCTION) -> None:
        """Note that the reward function, or the function of late rewards, computed a reward."""
        self._sound[function] += 1

    def failed(self, reason: str, function: str = FUNCTION) -> None:
        """Note that the reward function, or the function of late rewards, failed."""
        self._failures[function], self._sound[function] = reason, 0

    def apply(self, row: Alarm) -> None:
        """Take in an alarm row; rows about other components' alarms are ignored."""
        own = row.name.startswith((COVERAGE, SIGNAL, SURROGATE, SURROGATE_GAP))
        if row.name not in (*FUNCTIONS, UNUSED) and not own:
            return
        known = self._known.setdefault(row.name, _Alarm())
        known.standing, known.rows = row.state is AlarmState.RAISED, known.rows + 1
        if row.name in FUNCTIONS:
            self._failures.pop(row.name, None)
            self._sound[row.name] = 0
        elif row.name.startswith(SIGNAL):
            for tenant, signals in self.signals.items():
                for name, coverage in signals.items():
                    if _signal_alarm(tenant, name) == row.name:
                        coverage.settle()
                        if coverage.silent >= DISCONTINUED_AFTER:
                            coverage.weight = coverage.covered = 0.0
        elif row.name.startswith(COVERAGE):
            self.coverages.setdefault(row.name.removeprefix(COVERAGE), Coverage()).settle()

    def due(self, at: float, waiting: int = 0) -> Iterator[Alarm]:
        """Yield the alarm rows that have to be written now. `waiting`: the number of people's turns that may still be trained on."""
        for name in FUNCTIONS:
            standing, sound = self._stands(name), self._sound[name]
            if not standing and name in self._failures:
                yield self.row(name, AlarmState.RAISED, self._failures[name], at)
            elif standing and sound >= REWARDS_TO_CLEAR:
                yield self.row(name, AlarmState.CLEARED, f"{sound} rewards in a row", at)
        for tenant in self.coverages:
            yield from self._coverage(tenant, at)
        for tenant, signals in self.signals.items():
            for name, coverage in signals.items() if not self.silenced(tenant) else ():
                yield from self._signal(tenant, name, coverage, at)
        used, standing = self.use.share(waiting), self._stands(UNUSED)
        if used is not None and not standing and used < TOO_FEW_USED:
            yield self.row(UNUSED, AlarmState.RAISED, self.use.reason(), at, {"counts": dict(self.use.counts)})
        elif used is not None and standing and used > ENOUGH_USED:
            yield self.row(UNUSED, AlarmState.CLEARED, f"{100 * used:.0f}% of the last turns were trained on", at)

    def row(
        self, name: str, state: AlarmState, reason: str, at: float, detail: Mapping[str, Any] | None = None
    ) -> Alarm:
        """Return the next row about `name`; its id is determined by the rows of the log before it."""
        number = self._start + self._known.get(name, _Alarm()).rows + 1
        return Alarm(id=f"{name}:{number}", name=name, state=state, reason=reason, at=at, detail=detail or {})

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "known": {name: [alarm.standing, alarm.rows] for name, alarm in self._known.items()},
            "coverages": {tenant: asdict(each) for tenant, each in self.coverages.items()},
            "signals": {
                tenant: {name: asdict(each) for name, each in signals.items()}
                for tenant, signals in self.signals.items()
            },
            "use": self.use.counts,
            "failures": self._failures,
            "sound": +self._sound,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a `snapshot`."""
        self._known = {name: _Alarm(*pair) for name, pair in state["known"].items()}
        self.coverages = {tenant: Coverage(**each) for tenant, each in state["coverages"].items()}
        self.signals = {
            tenant: {name: Coverage(**each) for name, each in signals.items()}
            for tenant, signals in state["signals"].items()
        }
        self.use = TrainedShare({str(name): float(count) for name, count in state["use"].items()})
        self._failures, self._sound = dict(state["failures"]), Counter(state["sound"])

    def _stands(self, name: str) -> bool:
        alarm = self._known.get(name)
        return alarm is not None and alarm.standing

    def _signal(self, tenant: str, signal: str, coverage: Coverage, at: float) -> Iterator[Alarm]:
        name = _signal_alarm(tenant, signal)
        standing = self._stands(name)
        detail = {"usual": coverage.usual, "silent": coverage.silent, "turns": coverage.turns}
        if standing and not self._config.enabled:
            yield self.row(name, AlarmState.CLEARED, "reward.coverage is switched off", at, detail)
        elif standing and coverage.is_back():
            yield self.row(name, AlarmState.CLEARED, f"{signal!r} is back", at, detail)
        elif standing and coverage.silent >= DISCONTINUED_AFTER:
            yield self.row(name, AlarmState.CLEARED, f"{signal!r} counts as discontinued", at, detail)
        elif self._config.enabled and not standing and coverage.fallen_silent(self._config):
            if self.coverages[tenant].falling > coverage.falling / 2:
                return  # other feedback stops too, which has its own alarm
            reason = (
                f"no {signal!r} for {coverage.silent} turns, where {100 * coverage.usual:.0f}% of turns usually have it, while other "
                "feedback arrives: what is learned now lacks it. Check what sends it, and whether a new version of the product still does"
            )
            yield self.row(name, AlarmState.RAISED, reason, at, detail)

    def _coverage(self, tenant: str, at: float) -> Iterator[Alarm]:
        coverage, standing, name = self.coverages[tenant], self.silenced(tenant), COVERAGE + tenant
        detail = {"usual": coverage.usual, "silent": coverage.silent, "turns": coverage.turns}
        if standing and not self._config.enabled:
            yield self.row(name, AlarmState.CLEARED, "reward.coverage is switched off", at, detail)
        elif standing and coverage.is_back():
            yield self.row(name, AlarmState.CLEARED, "feedback is back", at, detail)
        elif self._config.enabled and not standing and coverage.fallen_silent(self._config):
            reason = (
                f"no feedback for {coverage.silent} turns, where {100 * coverage.usual:.0f}% of turns usually have some: "
                "silence is not learned from until it is back. Look at what sends feedback to /v1/feedback"
            )
            yield self.row(name, AlarmState.RAISED, reason, at, detail)


def _signal_alarm(tenant: str, signal: str) -> str:
    return f"{SIGNAL}{tenant}:{signal}"
