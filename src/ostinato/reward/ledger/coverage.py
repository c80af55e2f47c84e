"""How much feedback is usual, and whether there is too little of it for silence to mean anything. Pure.

Each tenant's turns are observed in the order in which their rewards were decided, each with feedback or without. The usual share of
turns with feedback is an exponentially weighted mean. A sequential test (CUSUM: Page 1954, Biometrika 41) watches for a drop:
S = max(0, S + log likelihood ratio) of "nearly nothing arrives" (a twentieth of the usual share) against "at least half of the usual
share arrives"; the alarm is due when S reaches log N. If each turn has feedback with its own probability of at least half the usual
share, two false alarms are N turns apart on average, or more (Lorden 1971, Ann. Math. Stat. 42). A null of half the usual share
leaves room for the estimate's error and for users who say little. The usual share is learned from turns up to the last time that S was
0, so that the silence under test does not count as usual; while the alarm stands it is frozen, and the same test with its hypotheses
exchanged detects when feedback is back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ostinato.reward.config import CoverageConfig

MEMORY = 2000.0  # turns
LEAST_COVERED = 20.0  # turns with feedback that the usual share must rest on
STILL_USUAL, NEARLY_NOTHING = 0.5, 0.05  # parts of the usual share: the test's two hypotheses
FALSE_COMFORT = 5e3  # silent turns between two false all-clears, at least and on average


@dataclass(slots=True, kw_only=True)
class Coverage:
    """One tenant's feedback. `turns` counts all matured turns, `silent` the latest turns in a row without feedback.

    `weight` and `covered` are the weighted counts of turns and of turns with feedback; `recent` and `recent_heard` count the turns
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
        """Take in one matured turn. `standing`: the alarm has been raised."""
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
        """An alarm was raised or cleared: restart both tests, and leave the turns that led to it out of the usual share."""
        self.falling = self.rising = 0.0
        self.recent = self.recent_heard = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**state)

    def _learn(self) -> None:
        kept = (1.0 - 1.0 / MEMORY) ** self.recent
        self.weight = kept * self.weight + self.recent
        self.covered = kept * self.covered + self.recent_heard
        self.recent = self.recent_heard = 0

    def _ratio(self, heard: bool) -> float:
        """The log likelihood ratio of one turn."""
        usual, nothing = STILL_USUAL * self.usual, NEARLY_NOTHING * self.usual
        if not usual:
            return 0.0
        return math.log(nothing / usual) if heard else math.log((1.0 - nothing) / (1.0 - usual))
