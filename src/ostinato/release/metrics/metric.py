"""A declared metric, ready to measure what one turn adds to its numerator and its denominator.

`Past` estimates, from the turns before a trial, each person's and each task's expected values, the quantiles, and the tenants large enough
to be a stratum of their own.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ostinato.core.records import Person
from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.facts import USER_FACTS, Task, Term, largest, parse_term
from ostinato.release.metrics.retention import REMEMBERED_DAYS, Retention

Role = Literal["goal", "guardrail", "diagnostic"]

Measured = tuple[float, float]
"""What a turn adds to numerator and denominator, scaled so that 0 <= numerator <= denominator, whatever the metric's units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A ratio of sums over turns, scaled to [0, 1]: `most` in the metric's own units is 1 here.

    `better`: 1 if a higher ratio is better, else -1. `sign`: the same, except that it is -1 for the share of users in a `tail`, where lower
    is always better. `tolerance` is in the metric's own units.

    Example: ``Metric.of(MetricConfig(name="acceptance"), margin=0.02)``
    """

    name: str
    role: Role
    sign: Literal[-1, 1]
    numerator: tuple[Term, ...]
    unless: tuple[Term, ...]
    denominator: tuple[Term, ...]
    most: float
    quantile: float | None
    tolerance: float
    better: Literal[-1, 1] = 1
    tail: float | None = None

    @classmethod
    def of(cls, config: MetricConfig, margin: float) -> Metric:
        """Build the metric of a declaration. `margin`, on the [0, 1] scale, is the tolerance of a goal that names none."""
        tolerated = config.tolerated
        better: Literal[-1, 1] = 1 if config.direction == "higher" else -1
        return cls(
            name=config.name,
            role=config.role,
            sign=better if config.tail is None else -1,
            better=better,
            tail=config.tail,
            numerator=tuple(parse_term(text) for text in config.numerator),
            unless=tuple(parse_term(text) for text in config.unless),
            denominator=tuple(parse_term(text) for text in config.denominator),
            most=config.most,
            quantile=config.quantile,
            tolerance=margin * config.most if tolerated is None else tolerated,
        )

    @property
    def daily(self) -> bool:
        """True if it is measured once per user and day instead of once per turn."""
        return all(term.name in USER_FACTS for term in self.numerator)

    @property
    def allowed(self) -> float:
        """The tolerance on the [0, 1] scale."""
        return self.tolerance / self.most

    def raw(self, known: Mapping[str, float]) -> float | None:
        """Return the value of a turn or of a user's day before any comparison, given its facts and signals; None if it has none."""
        for term in self.unless:
            if term.name in known and term.happened(known):
                return 0.0
        found = largest(self.numerator, known)
        return 0.0 if found is None and self.denominator else found

    def measure(self, known: Mapping[str, float], threshold: float | None = None) -> Measured | None:
        """Return what a turn adds; None if it adds nothing.

        A quantile metric compares the value with `threshold`; without a threshold a turn adds nothing.

        Example: a turn that was accepted, then undone: ``acceptance.measure({"accepted": 1.0, "undone": 1.0}) == (0.0, 1.0)``
        """
        value = self.raw(known)
        if value is None or (self.quantile is not None and threshold is None):
            return None
        if threshold is not None and self.quantile is not None:
            return float(value > threshold), 1.0
        size = (largest(self.denominator, known) or 0.0) if self.denominator else 1.0
        return (min(max(value / self.most, 0.0), size), size) if size > 0.0 else None


def metrics_of(configs: Sequence[MetricConfig], margin: float) -> tuple[Metric, ...]:
    """Return all metrics, goals first."""
    found = [Metric.of(config, margin) for config in configs]
    return tuple(sorted(found, key=lambda metric: ("goal", "guardrail", "diagnostic").index(metric.role)))


def wanted(metrics: Sequence[Metric]) -> frozenset[str]:
    """Return the names of the signals and facts that the metrics read."""
    return frozenset(
        term.name for metric in metrics for term in (*metric.numerator, *metric.unless, *metric.denominator)
    )


# ---------------------------------------------------------------- the period before a trial


# turns (or days) of an average user mixed into a user's own past until that number can be estimated
_PSEUDO_TURNS = 6.0
_LEAST_GROUPS = 100  # people (or tasks) with several turns needed for estimating it
_MOST_SHRINKAGE = 1e6
_MOST_TASKS = 20_000  # tasks of a kind that are kept; each takes about 0.5 kB
_MOST_VALUES = 20_000
_LEAST_IN_TAIL = 5.0  # values beyond a quantile needed for estimating it


_Squares = tuple[float, float, float]
_Sums = tuple[float, float, int, float, float, float]
_NO_SUMS: _Sums = (0.0, 0.0, 0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class _History:
    """A person's past: when they were last seen, and sums by metric.

    The sums are those of numerator v and denominator u, the number of turns (or days), and the sums of v^2, u v and u^2.
    """

    seen: float
    sums_M: list[_Sums] = field(default_factory=list["_Sums"])


def shrinkage(groups: Iterable[tuple[float, float]], squares: float) -> float | None:
    """Return how many average turns to mix into a group's own turns: the variance within groups over that between them.

    That is 1 / rho - 1 for an intraclass correlation rho, estimated by the method of moments of a one-way analysis of variance with groups
    of unequal size (Searle, Casella and McCulloch, Variance Components, 1992, ch. 3). Infinity if groups do not differ; None if fewer than
    `_LEAST_GROUPS` groups have several turns.

    Args:
        groups: each group's sum of values, measured from the overall mean, and its number of turns.
        squares: the sum of the squares of all turns' values.
    """
    there = [(total, turns) for total, turns in groups if turns > 0.0]
    turns = math.fsum(count for _, count in there)
    if sum(count > 1.0 for _, count in there) < _LEAST_GROUPS:
        return None
    explained = math.fsum(total**2 / count for total, count in there)
    within = max(0.0, squares - explained) / (turns - len(there))
    more = explained - math.fsum(total for total, _ in there) ** 2 / turns - (len(there) - 1) * within
    between = more / (turns - math.fsum(count**2 for _, count in there) / turns)
    return min(within / between, _MOST_SHRINKAGE) if between > 0.0 else math.inf


def _squares_around(ratio: float, vv: float, uv: float, uu: float) -> float:
    """Return the sum of (v - ratio u)^2 over turns, from their sums of v^2, u v and u^2.

    `shrinkage` needs turns and groups measured from the same ratio, and that of all turns is known only at the end.
    """
    return vv - 2.0 * ratio * uv + ratio * ratio * uu


class _Tasks:
    """Deviations of the tasks of one kind from what was expected of the people who asked for them.

    Beyond `_MOST_TASKS`, the least recently seen task is evicted: a flood of new ones makes trials slower, but not wrong.
    """

    def __init__(self, metrics: int) -> None:
        self._sums: dict[Task, array[float]] = {}  # by metric: sum of residuals, units, turns
        # the sums that `_squares_around` takes, where v is a turn's residual
        self.squares_M: list[_Squares] = [(0.0, 0.0, 0.0)] * metrics

    def touch(self, task: Task) -> array[float]:
        """Return a task's sums, 3 numbers for each metric, and mark it as recently seen."""
        sums = self._sums.pop(task, None)
        if sums is None:
            sums = array("d", bytes(24 * len(self.squares_M)))
            if len(self._sums) >= _MOST_TASKS:
                del self._sums[next(iter(self._sums))]
        self._sums[task] = sums
        return sums

    def deviations(self) -> dict[Task, tuple[float, ...]]:
        """Return, by task, how much more than expected it brings per unit of each metric, if tasks of the kind differ at all."""
        found: dict[Task, list[float]] = {task: [0.0] * len(self.squares_M) for task in self._sums}
        for m, of_turns in enumerate(self.squares_M):
            totals, units, turns = ([sums[3 * m + i] for sums in self._sums.values()] for i in range(3))
            overall = math.fsum(totals) / (math.fsum(units) or 1.0)
            left = [total - overall * under for total, under in zip(totals, units, strict=True)]
            mixed = shrinkage(zip(left, turns, strict=True), _squares_around(overall, *of_turns))
            if mixed is None or math.isinf(mixed):
                continue
            a_turn = math.fsum(units) / math.fsum(turns)
            for task, total, under in zip(found, left, units, strict=True):
                weight = under + mixed * a_turn
                found[task][m] = total / weight if weight else 0.0
        return {task: tuple(each) for task, each in found.items() if any(each)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMetrics:
    """The expected value of each metric per unit of its denominator.

    It is given by person, as `usual_M` for an unknown person, and by task as the deviation from it. It is known before the comparison
    begins, and nothing that a version does changes it. Subtracting it from both arms' outcomes reduces variance and causes no bias
    (regression adjustment; CUPED: Deng et al., WSDM 2013; MLRATE: arXiv 2106.07263). Which tasks come may depend on the version: as far as
    tasks are known, a change in what people ask a version for does not count as its effect.

    Example: ``ExpectedMetrics(people={("default", "ann"): (0.71, 0.0)}, usual_M=(0.6, 0.01))``
    """

    people: Mapping[Person, tuple[float, ...]]
    usual_M: tuple[float, ...]
    tasks: Mapping[Task, tuple[float, ...]] = field(default_factory=dict[Task, tuple[float, ...]])

    def of(self, person: Person, tasks: Iterable[Task] = ()) -> tuple[float, ...]:
        """Return a person's expected values by metric; with the `tasks` of a turn, those of that turn. An unknown task changes nothing."""
        expected_M = self.people.get(person, self.usual_M)
        for more_M in filter(None, map(self.tasks.get, tasks)):
            expected_M = tuple(map(float.__add__, expected_M, more_M))
        return expected_M


class Past:
    """Tallies the turns from before a comparison. M metrics.

    Args:
        until: when the comparison begins, in Unix seconds. Users' days are counted back from there; without it none are counted.
    """

    def __init__(self, metrics: Sequence[Metric], until: float | None = None) -> None:
        self._metrics = metrics
        self._days = None if until is None or not any(metric.daily for metric in metrics) else Retention(until)
        self._people: dict[Person, _History] = {}
        self._totals_M = [(0.0, 0.0, 0)] * len(metrics)  # numerators, denominators and turns of everybody so far
        self._tasks: list[_Tasks] = []  # by kind
        self._quantiles = tuple(metric for metric in metrics if metric.quantile is not None)
        self._values: dict[str, deque[float]] = {metric.name: deque(maxlen=_MOST_VALUES) for metric in self._quantiles}

    def remember(self, person: Person, at: float, known: Mapping[str, float], tasks: Sequence[Task] = ()) -> None:
        """Add one turn, with its known facts and signals, and its tasks: one of each kind, the widest kind first."""
        history = self.see(person, at)
        if self._days is not None:
            self._days.see(person, at)
        self.sample(known)
        self._add(history, known, tasks)

    def _add(self, history: _History, known: Mapping[str, float], tasks: Sequence[Task] = ()) -> None:
        while len(self._tasks) < len(tasks):
            self._tasks.append(_Tasks(len(self._metrics)))
        asked = [(kind.touch(task), kind.squares_M) for kind, task in zip(self._tasks, tasks, strict=False)]
        for m, metric in enumerate(self._metrics):
            if metric.quantile is None and (measured := metric.measure(known)) is not None:
                history.sums_M[m] = self._sums(history.sums_M[m], m, measured, asked)

    def _sums(self, sums: _Sums, m: int, measured: Measured, asked: list[tuple[array[float], list[_Squares]]]) -> _Sums:
        """Return a person's sums with one more turn. Each task of the turn is given what neither the person nor the wider task explains."""
        (over, under, rows, vv, uv, uu), (all_over, all_under, turns) = sums, self._totals_M[m]
        value, units = measured
        if all_under:
            usual, mixed = all_over / all_under, _PSEUDO_TURNS * all_under / turns
            residual, at = value - units * (over + mixed * usual) / (under + mixed), 3 * m
            for of_task, squares_M in asked:
                more = residual - units * of_task[at] / (of_task[at + 1] + mixed)
                of_task[at] += residual
                of_task[at + 1] += units
                of_task[at + 2] += 1.0
                of_kind = squares_M[m]
                squares_M[m] = (
                    of_kind[0] + residual * residual,
                    of_kind[1] + units * residual,
                    of_kind[2] + units * units,
                )
                residual = more
        self._totals_M[m] = (all_over + value, all_under + units, turns + 1)
        return over + value, under + units, rows + 1, vv + value * value, uv + units * value, uu + units * units

    def see(self, person: Person, at: float) -> _History:
        """Note that a person was there, without counting a turn."""
        history = self._people.get(person)
        if history is None:
            history = self._people[person] = _History(at, [_NO_SUMS] * len(self._metrics))
        history.seen = max(history.seen, at)
        return history

    def sample(self, known: Mapping[str, float]) -> None:
        """Add one turn's values to those from which `threshold` takes its quantiles, and to nothing else."""
        for metric in self._quantiles:
            value = metric.raw(known)
            if value is not None:
                self._values[metric.name].append(value)

    def forget(self, before: float) -> None:
        """Drop people who were not seen after `before`."""
        self._people = {who: history for who, history in self._people.items() if history.seen > before}

    def active(self, since: float) -> set[Person]:
        """Return the people who were seen after `since`."""
        return {who for who, history in self._people.items() if history.seen > since}

    def tenants(self, least: float) -> tuple[str, ...]:
        """Return the tenants with at least `least` people, the largest first."""
        counts = Counter(tenant for tenant, _ in self._people)
        return tuple(tenant for tenant, count in counts.most_common() if count >= least)

    def expected(self) -> ExpectedMetrics:
        """Return each person's expected values, shrunk towards the average (`shrinkage`), and the tasks' deviations from them.

        Later turns do not change the result.
        """
        if self._days is not None:
            for day in range(1 - REMEMBERED_DAYS, 0):
                for person, known in self._days.rows(day):
                    if (history := self._people.get(person)) is not None:
                        self._add(history, known)
            self._days = None
        usual_M, mixed_M = zip(*(self._usual(m) for m in range(len(self._metrics))), strict=True)
        people = {
            who: tuple(
                usual if math.isinf(mixed) or not under + mixed else (over + mixed * usual) / (under + mixed)
                for (over, under, *_), usual, mixed in zip(history.sums_M, usual_M, mixed_M, strict=True)
            )
            for who, history in self._people.items()
        }
        tasks = {task: more_M for kind in self._tasks for task, more_M in kind.deviations().items()}
        return ExpectedMetrics(people=people, usual_M=usual_M, tasks=tasks)

    def threshold(self, metric: Metric) -> float | None:
        """Return a metric's quantile among the newest values; None for a metric without one, or with too few values to estimate it."""
        if metric.quantile is None:
            return None
        values = self._values[metric.name]
        if len(values) * min(metric.quantile, 1.0 - metric.quantile) < _LEAST_IN_TAIL:
            return None
        return sorted(values)[math.ceil(metric.quantile * len(values)) - 1]

    def _usual(self, m: int) -> tuple[float, float]:
        """Return the average of all people, and the units of the denominator mixed into a person's own."""
        sums = [history.sums_M[m] for history in self._people.values()]
        over, under, turns, *of_turns = (math.fsum(each[i] for each in sums) for i in range(6))
        if not under:
            return 0.5, _PSEUDO_TURNS
        usual = over / under
        groups = ((own - units * usual, count) for own, units, count, *_ in sums)
        mixed = shrinkage(groups, _squares_around(usual, *of_turns))
        return usual, (_PSEUDO_TURNS if mixed is None else mixed) * under / turns
