"""A declared metric, ready to measure: what one turn adds to its numerator and its denominator. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.terms import Term, largest, parse

Role = Literal["goal", "guardrail", "diagnostic"]

Measured = tuple[float, float]
"""What a turn adds to numerator and denominator, scaled so that the first lies between 0 and the second, whatever the metric's units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A ratio of sums over turns, scaled to [0, 1]: `most` in the metric's own units is 1 here.

    `sign` is -1 where lower is better. `tolerance` is in the metric's own units.

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

    @classmethod
    def of(cls, config: MetricConfig, margin: float) -> Metric:
        """The metric of a declaration; `margin`, on the [0, 1] scale, is the tolerance of a goal that names none."""
        tolerated = config.tolerated
        return cls(
            name=config.name,
            role=config.role,
            sign=1 if config.direction == "higher" else -1,
            numerator=tuple(parse(text) for text in config.numerator),
            unless=tuple(parse(text) for text in config.unless),
            denominator=tuple(parse(text) for text in config.denominator),
            most=config.most,
            quantile=config.quantile,
            tolerance=margin * config.most if tolerated is None else tolerated,
        )

    @property
    def allowed(self) -> float:
        """The tolerance on the [0, 1] scale."""
        return self.tolerance / self.most

    def raw(self, known: Mapping[str, float]) -> float | None:
        """The value of a turn with the facts and signals `known`, before any comparison; None where the turn has none."""
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
