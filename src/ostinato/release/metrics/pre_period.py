"""People's turns before a trial, which give each person's expected values, the quantiles, and the tenants of their own stratum. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.core.records import Person
from ostinato.release.metrics.metric import Metric

_SHRINK = 6.0  # turns of an average user that a user's own past is mixed with
_MOST_VALUES = 20_000
_IN_THE_TAIL = 5.0  # values beyond a quantile that are needed to estimate it


@dataclass(slots=True)
class _History:
    """A person: when last seen, and by metric the sums of numerator and denominator, and the number of turns."""

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
    """Adds up the turns from before a comparison. M metrics."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        self._people: dict[Person, _History] = {}
        self._quantiles = tuple(metric for metric in metrics if metric.quantile is not None)
        self._values: dict[str, deque[float]] = {metric.name: deque(maxlen=_MOST_VALUES) for metric in self._quantiles}

    def remember(self, person: Person, at: float, known: Mapping[str, float]) -> None:
        """Add one turn, with the facts and signals that are known of it."""
        sums_M = self.see(person, at).sums_M
        self.sample(known)
        for m, metric in enumerate(self._metrics):
            if metric.quantile is None and (measured := metric.measure(known)) is not None:
                over, under, turns = sums_M[m]
                sums_M[m] = over + measured[0], under + measured[1], turns + 1

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
        """Each person's own ratio, mixed with `_SHRINK` turns of the average; later turns do not change the result."""
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
