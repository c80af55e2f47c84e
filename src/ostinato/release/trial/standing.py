"""Live against the best release that users ever proved: the watch that small losses, each too small to see, add up under.

Each release is compared with the one before it, so a staircase of losses below what one comparison can see would pass. A share of users
stays on the best release; live is compared with them all the time, whatever live is by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import BaseModel, Field

from ostinato.release.trial.contrast import Contrast, Effect, Slot
from ostinato.release.trial.evidence import log_evidence

_DAY = 86_400.0


class StandingConfig(BaseModel, frozen=True, extra="forbid"):
    """The comparison of live with the best release."""

    share: float = Field(default=0.05, gt=0.0, lt=1.0, description="Share of users who stay on the best release.")
    alpha: float = Field(
        default=0.02, gt=0.0, lt=0.5, description="Chance of a false alarm in one period, however often one looks."
    )
    period_s: float = Field(default=3 * _DAY, gt=0.0, description="Seconds after which the comparison begins anew.")
    min_people: float = Field(
        default=20.0, ge=2.0, description="Effective users on each side before anything is decided."
    )
    better_evidence: float = Field(
        default=50.0, gt=1.0, description="Odds against 'no difference' from which on live becomes the best release."
    )
    better_after_s: float = Field(
        default=_DAY, ge=0.0, description="Seconds of comparison before which live does not become the best release."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How live stands against the best. Example: ``Standing(effect=Effect(...), worse=False, better=True)``"""

    effect: Effect
    worse: bool
    better: bool


class StandingWatch:
    """Begins anew every `period_s`, and whenever the best release changes."""

    def __init__(self, config: StandingConfig, *, most_turns_a_day: float = 20.0) -> None:
        self._config = config
        self._most = most_turns_a_day
        self._since = -math.inf
        self._contrast = Contrast(most_turns_a_day)

    def restart(self, now: float) -> None:
        """Forget what was seen: live or best is another version."""
        self._contrast, self._since = Contrast(self._most), now

    def add(self, slot: Slot, now: float) -> Standing:
        """One more slot, treated is live; `now` is its end."""
        if now - self._since >= self._config.period_s:
            self.restart(now)
        self._contrast.add(slot)
        effect = self._contrast.effect()
        enough = effect.people >= self._config.min_people
        aged = now - self._since >= self._config.better_after_s
        said = [log_evidence(effect.difference, effect.variance, side) for side in (-1, 1)]
        return Standing(
            effect=effect,
            worse=enough and said[0] >= -math.log(self._config.alpha),
            better=enough and aged and said[1] >= math.log(self._config.better_evidence),
        )
