"""A declared metric, ready to measure: what one turn adds to its numerator and its denominator.

People's turns before a trial give each person's expected values, the quantiles, and the tenants that are a stratum of their own.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ostinato.core.records import Person
from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.facts import USER_FACTS, Term, largest, parse_term
from ostinato.release.metrics.retention import REMEMBERED_DAYS, Retention

Role = Literal["goal", "guardrail", "diagnostic"]

Measured = tuple[float, float]
"""What a turn adds to numerator and denominator, scaled so that the first lies between 0 and the second, whatever the metric's units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A ratio of sums over turns, scaled to [0, 1]: `most` in the metric's own units is 1 here.

    `sign` is -1 where lower is better, as it is for the share of users in a `tail`; `better` is 1 if a higher ratio is better, else -1.
    `tolerance` is in the metric's own units.

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
        """The metric of a declaration; `margin`, on the [0, 1] scale, is the tolerance of a goal that names none."""
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
        """The value of a turn, or of a user's day, with the facts and signals `known`, before any comparison; None where it has none."""
        for term in self.unless:
            if term.name in known and term.happened(known):
                return 0.0
        found = largest(self.numerator, known)
        return 0.0 if found is None and self.denominator else found

    def measure(self, known: Mapping[str, float], threshold: float | None = None) -> Measured | None:
        """What a turn adds; None where it adds nothing.

        A metric with a quantile compares the value with `threshold`; without one a turn adds nothing.

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
    """All metrics, goals first."""
    found = [Metric.of(config, margin) for config in configs]
    return tuple(sorted(found, key=lambda metric: ("goal", "guardrail", "diagnostic").index(metric.role)))


def wanted(metrics: Sequence[Metric]) -> frozenset[str]:
    """The names of signals and facts that they read."""
    return frozenset(
        term.name for metric in metrics for term in (*metric.numerator, *metric.unless, *metric.denominator)
    )


# ---------------------------------------------------------------- the period before a trial


_SHRINK = 6.0  # turns, or days, of an average user that a user's own past is mixed with
_MOST_VALUES = 20_000
_IN_THE_TAIL = 5.0  # values beyond a quantile that are needed to estimate it


@dataclass(slots=True)
class _History:
    """A person: when last seen, and by metric the sums of numerator and denominator, and the number of turns (or days)."""

    seen: float
    sums_M: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMetrics:
    """The expected value of each metric per unit of its denominator, by person and, as `usual_M`, of an unknown person.

    Example: ``ExpectedMetrics(people={("default", "ann"): (0.71, 0.0)}, usual_M=(0.6, 0.01))``
    """

    people: Mapping[Person, tuple[float, ...]]
    usual_M: tuple[float, ...]

    def of(self, person: Person) -> tuple[float, ...]:
        """A person's expected values, by metric."""
        return self.people.get(person, self.usual_M)


class Past:
    """Adds up the turns from before a comparison. M metrics.

    Args:
        until: when the comparison begins, in Unix seconds. Users' days are counted back from there; without it none are counted.
    """

    def __init__(self, metrics: Sequence[Metric], until: float | None = None) -> None:
        self._metrics = metrics
        self._days = None if until is None or not any(metric.daily for metric in metrics) else Retention(until)
        self._people: dict[Person, _History] = {}
        self._quantiles = tuple(metric for metric in metrics if metric.quantile is not None)
        self._values: dict[str, deque[float]] = {metric.name: deque(maxlen=_MOST_VALUES) for metric in self._quantiles}

    def remember(self, person: Person, at: float, known: Mapping[str, float]) -> None:
        """Add one turn, with the facts and signals that are known of it."""
        history = self.see(person, at)
        if self._days is not None:
            self._days.see(person, at)
        self.sample(known)
        self._add(history, known)

    def _add(self, history: _History, known: Mapping[str, float]) -> None:
        for m, metric in enumerate(self._metrics):
            if metric.quantile is None and (measured := metric.measure(known)) is not None:
                over, under, rows = history.sums_M[m]
                history.sums_M[m] = over + measured[0], under + measured[1], rows + 1

    def see(self, person: Person, at: float) -> _History:
        """Note that a person was there, and nothing of the turn."""
        history = self._people.get(person)
        if history is None:
            history = self._people[person] = _History(at, [(0.0, 0.0, 0)] * len(self._metrics))
        history.seen = max(history.seen, at)
        return history

    def sample(self, known: Mapping[str, float]) -> None:
        """Add one turn to the values that `threshold` takes its quantiles from, and to nothing else."""
        for metric in self._quantiles:
            value = metric.raw(known)
            if value is not None:
                self._values[metric.name].append(value)

    def forget(self, before: float) -> None:
        """Drop people who were not seen after `before`."""
        self._people = {who: history for who, history in self._people.items() if history.seen > before}

    def active(self, since: float) -> set[Person]:
        """People who were seen after `since`."""
        return {who for who, history in self._people.items() if history.seen > since}

    def tenants(self, least: float) -> tuple[str, ...]:
        """Tenants with at least `least` people, the largest first."""
        counts = Counter(tenant for tenant, _ in self._people)
        return tuple(tenant for tenant, count in counts.most_common() if count >= least)

    def expected(self) -> ExpectedMetrics:
        """Each person's own ratio, mixed with `_SHRINK` turns, or days, of the average; later turns do not change the result."""
        if self._days is not None:
            for day in range(1 - REMEMBERED_DAYS, 0):
                for person, known in self._days.rows(day):
                    if (history := self._people.get(person)) is not None:
                        self._add(history, known)
            self._days = None
        usual_M, mixed_M = zip(*(self._usual(m) for m in range(len(self._metrics))), strict=True)
        people = {
            who: tuple(
                (over + mixed * usual) / (under + mixed)
                for (over, under, _), usual, mixed in zip(history.sums_M, usual_M, mixed_M, strict=True)
            )
            for who, history in self._people.items()
        }
        return ExpectedMetrics(people=people, usual_M=usual_M)

    def threshold(self, metric: Metric) -> float | None:
        """A metric's quantile among the newest values; None for a metric without one, or with too few values to estimate it."""
        if metric.quantile is None:
            return None
        values = self._values[metric.name]
        if len(values) * min(metric.quantile, 1.0 - metric.quantile) < _IN_THE_TAIL:
            return None
        return sorted(values)[math.ceil(metric.quantile * len(values)) - 1]

    def _usual(self, m: int) -> tuple[float, float]:
        """The average of all people, and the units of the denominator in `_SHRINK` turns."""
        sums = [history.sums_M[m] for history in self._people.values()]
        over, under, turns = (math.fsum(each[i] for each in sums) for i in range(3))
        return (over / under, _SHRINK * under / turns) if under else (0.5, _SHRINK)
