"""What the evidence of a trial allows to say, and what happens next. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import Effect
from ostinato.release.trial.evidence import log_evidence, lower_bound, upper_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A look at a trial. Bounds are one-sided and hold at every look together; nothing may be said while `enough` is False.

    `sees` is the smallest loss that this many people could show by now.

    Example: ``Reading(effect=Effect(...), enough=True, lower=-0.014, upper=0.031, worse=False, not_worse=True, better=False, sees=0.02)``
    """

    effect: Effect
    enough: bool
    lower: float
    upper: float
    worse: bool
    not_worse: bool
    better: bool
    sees: float


def read(effect: Effect, config: TrialConfig, measures: int = 1, tolerance: float = 0.0) -> Reading:
    """Judge an effect. `measures` that are watched together share the chance of a false stop; a loss up to `tolerance` is no harm."""
    enough = effect.people >= config.min_people and effect.turns >= config.min_turns
    harm_alpha = min(0.05, config.false_stops / config.trials_a_week) / measures
    lower = lower_bound(effect.difference, effect.variance, config.ship_alpha)
    upper = upper_bound(effect.difference, effect.variance, config.ship_alpha)
    worse = log_evidence(effect.difference + tolerance, effect.variance, -1) >= -math.log(harm_alpha)
    better = log_evidence(effect.difference, effect.variance, 1) >= math.log(config.better_evidence)
    return Reading(
        effect=effect,
        enough=enough,
        lower=lower,
        upper=upper,
        worse=enough and worse,
        not_worse=enough and lower > -config.margin,
        better=enough and better,
        sees=upper_bound(0.0, effect.variance, harm_alpha),
    )


class Next(StrEnum):
    """What follows from a look."""

    WAIT = "wait"
    RAMP = "ramp"
    SHIP = "ship"
    BETTER = "better"
    BLOCK = "block"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows, and why, in a sentence for people. `share` is the candidate's share of users from now on.

    Example: ``Decision(next=Next.RAMP, share=0.25, reason="a loss of more than 4.1 pp is ruled out", reading=Reading(...))``
    """

    next: Next
    share: float
    reason: str
    reading: Reading
