"""How often a policy that may stay silent suggests something, and how much of that is accepted. Pure functions.

Two ratios, each with its own denominator: suggestions per request, and acceptances per suggestion. Users are the unit of both, as in
`acceptance`: a user stays in one arm, and types some kinds of lines more than others. With the reward function `tab`, a reward above 0 is
an acceptance, one below 0 a rejection, and 0 means that nothing was suggested; a suite's scores mean the same relative to t.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ostinato.core.records import Arm, Person
from ostinato.core.report import ItemScore
from ostinato.evaluate.acceptance import Rated, tally_of
from ostinato.evaluate.statistics import (
    Estimate,
    Tally,
    agresti_caffo,
    clustered_difference,
    residuals,
    t_quantile,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tallies:
    """The outcomes of requests by user: suggestions among requests, and acceptances among suggestions.

    Example: ``Tallies(suggested={("default", "ann"): (7.0, 10)}, accepted={("default", "ann"): (3.0, 7)})``: ann asked ten times, was shown
    seven suggestions and accepted three.
    """

    suggested: Tally
    accepted: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmChange:
    """Live against control: the difference of two ratios, and their quotient minus 1, each with a 95% interval.

    Example: ``ArmChange(difference=..., relative=...)`` with ``relative.mean == -0.21``: a fifth fewer than control
    """

    difference: Estimate
    relative: Estimate


def shown(rated: Iterable[Rated]) -> list[Rated]:
    """Return the turns that suggested something."""
    return [(turn, reward) for turn, reward in rated if reward.value != 0.0]


def by_user(rated: Iterable[Rated]) -> dict[Arm, Tallies]:
    """Return the tallies of each arm."""
    outcomes: dict[Arm, list[tuple[Person, float]]] = defaultdict(list)
    for turn, reward in rated:
        outcomes[turn.arm].append((turn.person, reward.value))
    return {arm: _tallied(of) for arm, of in outcomes.items()}


def by_item(scores: Iterable[ItemScore], family: Mapping[str, str], t: float) -> dict[str, Tallies]:
    """Return the tallies of each family of a suite, with items in the place of users. `family` maps each item to its family.

    A score of `t` is silence, a higher one an acceptance (see `worlds.grading.grade`).
    """
    outcomes: dict[str, list[tuple[Person, float]]] = defaultdict(list)
    for score in scores:
        outcomes[family[score.item]].append(((family[score.item], score.item), score.score - t))
    return {name: _tallied(of) for name, of in outcomes.items()}


def _tallied(outcomes: Iterable[tuple[Person, float]]) -> Tallies:
    """Return the tallies of pairs of a person and a reward."""
    told = list(outcomes)
    return Tallies(
        suggested=tally_of((who, value != 0.0) for who, value in told),
        accepted=tally_of((who, value > 0.0) for who, value in told if value != 0.0),
    )


def ratio(tally: Tally) -> Estimate | None:
    """Return the pooled share over all outcomes with a 95% t interval, users as clusters, clipped to [0, 1]; None without two users.

    It is the linearised ratio estimator of `statistics.clustered_difference` for one side. If all users have the same share, the variance
    is that of Agresti and Caffo over the users, with one more success and one more failure.
    """
    users = [user for user, (_, count) in tally.items() if count > 0]
    n = len(users)
    if n < 2:
        return None
    mean, residuals_U = residuals(tally, users)
    alike = float(np.abs(residuals_U).max()) < 1e-12
    variance = agresti_caffo(mean, n) if alike else n / (n - 1) * float(residuals_U @ residuals_U)
    error = math.sqrt(variance)
    half = t_quantile(n - 1, 0.975) * error
    lower, upper = max(0.0, mean - half), min(1.0, mean + half)
    return Estimate(mean=mean, lower=lower, upper=upper, error=error, df=float(n - 1), n=n)


def change(live: Tally, control: Tally) -> ArmChange | None:
    """Return live against control, users as clusters; None if a side has fewer than two users or control's ratio is 0.

    The interval of the quotient is that of its logarithm, whose variance is the sum of the sides' relative variances (the delta method:
    Deng, Knoblich and Lu 2018, arXiv 1803.06336): arms have no user in common.
    """
    treated, untreated = ratio(live), ratio(control)
    if treated is None or untreated is None or treated.mean <= 0.0 or untreated.mean <= 0.0:
        return None
    difference = clustered_difference(live, control)
    error = math.hypot(treated.error / treated.mean, untreated.error / untreated.mean)
    quotient, spread = treated.mean / untreated.mean, math.exp(t_quantile(difference.df, 0.975) * error)
    relative = Estimate(
        mean=quotient - 1.0,
        lower=quotient / spread - 1.0,
        upper=quotient * spread - 1.0,
        error=quotient * error,
        df=difference.df,
        n=difference.n,
    )
    return ArmChange(difference=difference, relative=relative)
