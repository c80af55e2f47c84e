"""The expected range of a rate: from people on another release at the same time, or from the rate itself while the monitors learned it.

An arm that stays on an earlier release follows the same daily cycle as the watched one, so its weighted mean gives the reference: the range
of all true means of which it may well be an estimate. Without such an arm the reference is fixed: the range that the rate's short-term mean
went through while it was learned, which should be a whole day. A fixed reference knows nothing about weekends.

The detectors' guarantee holds if the truth lies in the range that they are given. A mean that is off stays so for hundreds of sessions.
With thresholds as high as these, nearly all false alarms come from that: from means that were low by chance, or that lag behind the daily
cycle. So the guarantee depends on the range's width, which was chosen by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ostinato.release.monitors.detector import ExpectedRange

RANGE_ERRORS = 1.25  # standard errors from a mean to the ends of the range of true means; chosen by simulation
FIXED_SLACK = 1.0  # standard errors by which a fixed reference is widened beyond the range of its mean
DECILE_MEMORY = 10.0  # memory of a decile's difference from everybody, in multiples of the mean's memory
DECILE_SLACK = 2.0  # standard errors; larger, as there are ten times as many deciles to be wrong about
DECILE_LEAST = 2.0  # sessions before anything is expected of a decile, in multiples of the mean's memory
_UNSEEN = 1 / 2  # assumed dispersion of a behaviour that was never seen
_HALF_AN_EVENT = 1 / 16  # pseudo-count, of a session of eight events: what was never seen is not impossible


@dataclass(slots=True, kw_only=True)
class Level:
    """An exponentially weighted mean and variance (Finch 2009); a plain mean until `weight` reaches `memory`. Both are in sessions.

    Example: ``Level(memory=100.0).observe(0.25)``
    """

    memory: float
    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def observe(self, value: float) -> None:
        """Add a session's value."""
        self.weight = min(self.weight + 1.0, self.memory)
        part = 1.0 / self.weight
        away = value - self.mean
        self.mean += part * away
        self.variance = (1.0 - part) * (self.variance + part * away * away)

    @property
    def deviation(self) -> float:
        """The standard deviation of a session's value. It is above 0, because half an event each way is added to what was seen."""
        return math.sqrt((self.weight * self.variance + _HALF_AN_EVENT / 8) / (self.weight + 2 * _HALF_AN_EVENT))

    @property
    def error(self) -> float:
        """The standard error of the mean. With memory n it is worth 2n - 1 plain values; only n are counted, to allow for its lag."""
        return self.deviation / math.sqrt(max(1.0, self.weight))

    @property
    def dispersion(self) -> float:
        """The variance of a session's value, in units of the variance of a single event with the same mean (overdispersion).

        It is 1 / 8 for eight independent events, 1 for eight equal ones, and 1 / 2 while nothing was seen.
        """
        unseen = _HALF_AN_EVENT / 8 / max(1.0, self.weight)
        return self.deviation**2 / (self.mean * (1.0 - self.mean) + unseen / _UNSEEN)

    def to_json(self) -> list[float]:
        """Return the state as JSON types."""
        return [self.memory, self.weight, self.mean, self.variance]

    @classmethod
    def from_json(cls, state: list[float]) -> Self:
        """Restore what `to_json` returned. Raises TypeError or ValueError for an invalid state."""
        memory, weight, mean, variance = map(float, state)
        return cls(memory=memory, weight=weight, mean=mean, variance=variance)


@dataclass(slots=True, kw_only=True)
class ArmReference:
    """The rate among people on the reference arm: over everybody, and each decile's difference from everybody.

    A decile's own sessions are too few to follow the day, so the daily cycle is taken from everybody and the difference from a longer
    memory. Nothing is expected before the mean's memory is full: a rare behaviour may not occur in few sessions, which looks like proof
    that there is none. `long` estimates how much sessions differ. It does not follow the day; an estimate from few sessions would be low
    whenever the mean is.
    """

    level: Level
    long: Level = field(init=False)
    deciles: dict[int, Level] = field(default_factory=dict[int, Level])

    def __post_init__(self) -> None:
        self.long = Level(memory=DECILE_MEMORY * self.level.memory)

    def observe(self, mean: float, decile: int | None) -> None:
        """Add a session of the reference arm."""
        self.long.observe(mean)
        if decile is not None and self.level.weight >= self.level.memory:
            differs = self.deciles.setdefault(decile, Level(memory=DECILE_MEMORY * self.level.memory))
            differs.observe(mean - self.level.mean)
        self.level.observe(mean)

    def expected(self, decile: int | None) -> ExpectedRange | None:
        """Return the range expected of everybody (None) or of a decile; None while too little was seen."""
        level = self.level
        if level.weight < level.memory:
            return None
        if decile is None:
            low, high = plausible(level.mean, level.weight / self.long.dispersion, RANGE_ERRORS)
            return ExpectedRange(low=low, high=high, deviation=level.deviation)
        differs = self.deciles.get(decile)
        if differs is None or differs.weight < DECILE_LEAST * level.memory:
            return None
        error = math.hypot(level.error, differs.error)
        return _within(level.mean + differs.mean, DECILE_SLACK * error, differs.deviation)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        deciles = {str(k): each.to_json() for k, each in self.deciles.items()}
        return {"level": self.level.to_json(), "long": self.long.to_json(), "deciles": deciles}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `to_json` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        deciles = {int(key): Level.from_json(each) for key, each in state["deciles"].items()}
        found = cls(level=Level.from_json(state["level"]), deciles=deciles)
        found.long = Level.from_json(state["long"])
        return found


@dataclass(slots=True, kw_only=True)
class FixedReference:
    """The rate of a group of the watched sessions while it was learned: the range of its short-term mean, fixed from then on.

    `short` is the weighted mean whose range is `low` to `high`. `sessions` and `since` (Unix seconds) say how much was seen.
    """

    short: Level
    sessions: int = 0
    since: float = math.inf
    low: float = math.inf
    high: float = -math.inf
    learned: bool = False

    def observe(self, mean: float, at: float, *, sessions: int, seconds: float) -> None:
        """Add a session, unless enough was learned: `sessions` sessions over at least `seconds` seconds."""
        if self.learned:
            return
        self.sessions, self.since = self.sessions + 1, min(self.since, at)
        self.short.observe(mean)
        if self.short.weight >= min(self.short.memory, sessions):
            slack = FIXED_SLACK * self.short.error
            self.low, self.high = min(self.low, self.short.mean - slack), max(self.high, self.short.mean + slack)
            self.learned = self.sessions >= sessions and at - self.since >= seconds

    def expected(self) -> ExpectedRange | None:
        """Return the expected range; None while it is being learned."""
        if not self.learned:
            return None
        return ExpectedRange(low=max(0.0, self.low), high=min(1.0, self.high), deviation=self.short.deviation)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON types."""
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
        """Restore what `to_json` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        low, high = state["range"] or (math.inf, -math.inf)
        return cls(
            short=Level.from_json(state["short"]),
            sessions=int(state["sessions"]),
            since=math.inf if state["since"] is None else float(state["since"]),
            low=float(low),
            high=float(high),
            learned=bool(state["learned"]),
        )


def plausible(mean: float, events: float, errors: float) -> tuple[float, float]:
    """Return the Wilson (1927) score interval: the true means in [0, 1] within `errors` of *their* standard errors of `mean`.

    A mean's own standard error is misleading for a rare behaviour: if few events were seen by chance, it is small for the same reason.

    Args:
        mean: of `events` independent zeros and ones, or of evidence that is worth as many.
        events: the number of events.
        errors: the number of standard errors of a mean of so many events.

    Example: ``plausible(0.0, 100.0, 1.25)`` is about (0.0, 0.015), where 1.25 errors of a mean of 0 are 0.
    """
    mean = min(1.0, max(0.0, mean))  # rounding may put an average of ones above 1
    square = errors * errors / events
    middle = (mean + square / 2.0) / (1.0 + square)
    half = math.sqrt(square * mean * (1.0 - mean) + square * square / 4.0) / (1.0 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def _within(middle: float, slack: float, deviation: float) -> ExpectedRange:
    low, high = max(0.0, middle - slack), min(1.0, middle + slack)
    return ExpectedRange(low=min(low, 1.0), high=max(high, 0.0), deviation=deviation)
