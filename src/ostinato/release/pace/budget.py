"""Upper bounds on the expected number of wrong decisions in the last weeks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.release.guard import GuardConfig
from ostinato.release.pace.cadence import WEEK, Cadence, Traffic
from ostinato.release.pace.history import PaceHistory
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.incumbent_test import StandingConfig

WEEKS = 4
"""How far back decisions are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Upper bounds on the expected errors of the last `WEEKS` weeks.

    `false_ships`: candidates that shipped although they lose the margin, if all candidates lose it; by linearity of expectation the sum
    of the levels at which `trials`, or the gate's `verdicts` where candidates are not tried, were decided. `false_stops`: comparisons on
    users that ended as harmful, if none is: trials, releases beside the version they replaced, and their later periods; `stops_allowed` is
    what `release.trial.false_stops` allows for as long, at `trials_a_week`. `false_rollbacks`: releases that were taken back by the
    guard or beside the verified release, if none is worse.

    Example: ``Spent(trials=12, verdicts=40, false_ships=0.6, false_stops=0.3, stops_allowed=2.0, false_rollbacks=0.24)``
    """

    trials: int
    verdicts: int
    false_ships: float
    false_stops: float
    stops_allowed: float
    false_rollbacks: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast releases may follow each other, and the recent risk. `tried`: candidates are tried on users.

    Example: ``Pace(traffic=Traffic(...), cadence=Cadence(...), spent=Spent(...), tried=True)``
    """

    traffic: Traffic | None
    cadence: Cadence | None
    spent: Spent
    tried: bool


def spent(
    history: PaceHistory,
    config: TrialConfig,
    *,
    tried: bool,
    gate_alpha: float,
    now: float,
    guard: GuardConfig | None = None,
    standing: StandingConfig | None = None,
) -> Spent:
    """Add up the levels. `tried`: candidates are tried on users; `gate_alpha`: the gate's level for one candidate.

    `guard` and `standing`: None where they do not run. The guard's alpha is per release, including the one live at the start of `WEEKS`.
    """
    since = now - WEEKS * WEEK
    trials = sum(each.at >= since for each in history.trials)
    verdicts = sum(at >= since for at in history.verdicts)
    live = sum(at >= since for at in history.moved) + any(at < since for at in history.moved)
    stop_alpha = min(0.05, config.false_stops / config.trials_a_week)
    return Spent(
        trials=trials,
        verdicts=verdicts,
        false_ships=trials * config.ship_alpha if tried else verdicts * gate_alpha,
        false_stops=history.trying.periods(config.retest_s, since, now) * stop_alpha if tried else 0.0,
        stops_allowed=WEEKS * config.false_stops,
        false_rollbacks=(0.0 if guard is None else live * guard.alpha)
        + (0.0 if standing is None else history.standing.periods(standing.period_s, since, now) * standing.alpha),
    )
