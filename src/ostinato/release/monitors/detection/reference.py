"""What a rate is expected to be: the mean of people on another release at the same time, or what it was while the monitors learned. Pure.

An arm that stays on an earlier release swings with the day as the watched one does, so its weighted mean is the reference, wider by
its standard error. Where there is no such arm the reference is fixed: the range that the rate's short mean went through while it was
learned, which should be a whole day. A fixed reference knows nothing of a weekend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ostinato.release.monitors.detection.detector import Expected

SLACK = 1.0  # standard errors by which a reference's mean is widened
SLOW = 10.0  # times as many sessions as the mean remembers: how a decile differs from everybody
DECILE_SLACK = 2.0  # standard errors; there are ten times as many deciles to be wrong about
DECILE_LEAST = 2.0  # times as many sessions as the mean remembers, before anything is expected of a decile
_HALF_AN_EVENT = 1 / 16  # of a session of eight: what was never seen is not impossible


@dataclass(slots=True, kw_only=True)
class Level:
    """An exponentially weighted mean and variance (Finch 2009); a plain mean until `weight` reaches `memory`. Counted in sessions.

    Example: ``Level(memory=100.0).observe(0.25)``
    """

    memory: float
    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def observe(self, value: float) -> None:
        """Take in a session's value."""
        self.weight = min(self.weight + 1.0, self.memory)
        part = 1.0 / self.weight
        away = value - self.mean
        self.mean += part * away
        self.variance = (1.0 - part) * (self.variance + part * away * away)

    @property
    def deviation(self) -> float:
        """Standard deviation of a session's value; above 0, because half an event each way is added to what was seen."""
        return math.sqrt((self.weight * self.variance + _HALF_AN_EVENT / 8) / (self.weight + 2 * _HALF_AN_EVENT))

    @property
    def error(self) -> float:
        """Standard error of the mean. A weighted mean of memory n is worth 2n - 1 plain ones; that it is late takes up the rest."""
        return self.deviation / math.sqrt(max(1.0, self.weight))

    def to_json(self) -> list[float]:
        """As JSON's types."""
        return [self.memory, self.weight, self.mean, self.variance]

    @classmethod
    def from_json(cls, state: list[float]) -> Self:
        """The inverse of `to_json`. Raises TypeError or ValueError for what is none."""
        memory, weight, mean, variance = map(float, state)
        return cls(memory=memory, weight=weight, mean=mean, variance=variance)


@dataclass(slots=True, kw_only=True)
class ArmReference:
    """The rate among people on the reference arm: of all, and how each decile differs from all.

    A decile's own sessions are too few to follow the day, so the day is taken from all and the difference from longer ago. Nothing is
    expected before the mean's memory is full: of few sessions a rare behaviour may show nothing, which looks like proof that there is none.
    """

    level: Level
    deciles: dict[int, Level] = field(default_factory=dict[int, Level])

    def observe(self, mean: float, decile: int | None) -> None:
        """Take in a session of the reference arm."""
        if decile is not None and self.level.weight >= self.level.memory:
            differs = self.deciles.setdefault(decile, Level(memory=SLOW * self.level.memory))
            differs.observe(mean - self.level.mean)
        self.level.observe(mean)

    def expected(self, decile: int | None) -> Expected | None:
        """What is expected of everybody (None) or of a decile; None while too little was seen."""
        level = self.level
        if level.weight < level.memory:
            return None
        if decile is None:
            return _within(level.mean, SLACK * level.error, level.deviation)
        differs = self.deciles.get(decile)
        if differs is None or differs.weight < DECILE_LEAST * level.memory:
            return None
        error = math.hypot(level.error, differs.error)
        return _within(level.mean + differs.mean, DECILE_SLACK * error, differs.deviation)

    def to_json(self) -> dict[str, Any]:
        """As JSON's types."""
        return {"level": self.level.to_json(), "deciles": {str(k): each.to_json() for k, each in self.deciles.items()}}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises LookupError, TypeError or ValueError for what is none."""
        deciles = {int(key): Level.from_json(each) for key, each in state["deciles"].items()}
        return cls(level=Level.from_json(state["level"]), deciles=deciles)


@dataclass(slots=True, kw_only=True)
class FixedReference:
    """The rate of a group of the watched sessions while it was learned: the range of its short mean, from then on fixed.

    `short` is the weighted mean whose range is `low` to `high`; `sessions` and `since` (Unix seconds) say how much was seen.
    """

    short: Level
    sessions: int = 0
    since: float = math.inf
    low: float = math.inf
    high: float = -math.inf
    learned: bool = False

    def observe(self, mean: float, at: float, *, sessions: int, seconds: float) -> None:
        """Take in a session, unless enough was learned: so many sessions in at least so much time."""
        if self.learned:
            return
        self.sessions, self.since = self.sessions + 1, min(self.since, at)
        self.short.observe(mean)
        if self.short.weight >= min(self.short.memory, sessions):
            slack = SLACK * self.short.error
            self.low, self.high = min(self.low, self.short.mean - slack), max(self.high, self.short.mean + slack)
            self.learned = self.sessions >= sessions and at - self.since >= seconds

    def expected(self) -> Expected | None:
        """What is expected; None while it is being learned."""
        if not self.learned:
            return None
        return Expected(low=max(0.0, self.low), high=min(1.0, self.high), deviation=self.short.deviation)

    def to_json(self) -> dict[str, Any]:
        """As JSON's types."""
        seen = self.low <= self.high
        return {
            "short": self.short.to_json(),
            "sessions": self.sessions,
            "since": self.since if self.sessions else None,
            "range": [self.low, self.high] if seen else None,
            "learned": self.learned,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises LookupError, TypeError or ValueError for what is none."""
        low, high = state["range"] or (math.inf, -math.inf)
        return cls(
            short=Level.from_json(state["short"]),
            sessions=int(state["sessions"]),
            since=math.inf if state["since"] is None else float(state["since"]),
            low=float(low),
            high=float(high),
            learned=bool(state["learned"]),
        )


def _within(middle: float, slack: float, deviation: float) -> Expected:
    low, high = max(0.0, middle - slack), min(1.0, middle + slack)
    return Expected(low=min(low, 1.0), high=max(high, 0.0), deviation=deviation)
