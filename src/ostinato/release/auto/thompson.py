"""Thompson sampling with known propensities: the probability that an arm is the best, computed and not sampled. Pure maths.

Thompson (1933) plays each arm with the probability that it is the best. Drawing once from every arm's posterior does that without ever
knowing the probability; here it is computed first and the arm is drawn with it, so that the logged probability is exactly the one used:

    P(a is best) = integral of f_a(x) prod_{b != a} F_b(x) dx      f_a, F_a: the normal density and distribution of arm a's utility

(Russo et al. 2018, *A Tutorial on Thompson Sampling*, section 3). The integral is computed by four-point Gauss-Legendre quadrature on each
interval of a fixed grid, at most a quarter of some arm's deviation wide, and scaled so that the probabilities sum to one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ostinato.release.auto.posterior import Belief

# of each arm, in units of its deviation: beyond them a normal has no mass that a float shows
_EDGES = np.linspace(-8.5, 8.5, 69)
_POINTS, _SHARES = np.polynomial.legendre.leggauss(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What the operator values in an answer: how much each metric counts, and how much reward one unit of money is worth.

    Example: ``Worth(weights={"reward": 1.0}, price=2.0)``: an answer that costs a cent more must be better by 0.02.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"reward": 1.0})
    price: float = 0.0


def utility(beliefs: Mapping[str, Belief], cost: float, worth: Worth) -> Belief:
    """An arm's utility: its metrics times what each is worth, less the price times its mean cost per turn.

    The correlation of the metrics is not known, so the deviation is the largest possible one, the sum of theirs (the triangle inequality
    of standard deviations): with one metric it is exact, with several the router explores a little more than it must.

    Raises:
        KeyError: a metric of `worth` that there is no belief about.
    """
    parts = [(weight, beliefs[name]) for name, weight in worth.weights.items()]
    return Belief(
        mean=math.fsum(weight * belief.mean for weight, belief in parts) - worth.price * cost,
        deviation=math.fsum(abs(weight) * belief.deviation for weight, belief in parts),
        users=min((belief.users for _, belief in parts), default=0.0),
    )


def with_failures(reward: Belief, failing: Belief, low: float) -> Belief:
    """The reward per turn, f low + (1 - f) m: an answer earns m on average, and a share f of all turns fails and earns `low`.

    m rests on the rated answers and f on all turns, so a failure weighs the same however few answers are rated. Both deviations count
    users as clusters. To first order (the delta method) the error is (1 - f) times that of m less (m - low) times that of f. The
    correlation of the two is not known, so the deviation is the largest possible one: (1 - f) sd(m) + (m - low) sd(f). The users are the
    mean of the two parts' users, weighted by f and 1 - f.
    """
    share, lost = failing.mean, reward.mean - low
    return Belief(
        mean=low + (1.0 - share) * lost,
        deviation=(1.0 - share) * reward.deviation + abs(lost) * failing.deviation,
        users=share * failing.users + (1.0 - share) * reward.users,
    )


def best_probabilities(utilities: Sequence[Belief]) -> NDArray[np.float64]:
    """The probability that each arm is the best, for independent normal utilities; shape [arms], sums to 1.

    Raises:
        ValueError: no arm, or a mean or deviation that is not finite, or a deviation that is not above 0.
    """
    if not utilities:
        raise ValueError("no arm to choose from")
    if not all(math.isfinite(each.mean) and 0.0 < each.deviation < math.inf for each in utilities):
        raise ValueError("every arm needs a finite mean and a finite deviation above 0")
    if len(utilities) == 1:
        return np.ones(1)
    from scipy import special  # takes a quarter of a second to import, which processes that never route are spared

    means_A = np.array([each.mean for each in utilities])
    deviations_A = np.array([each.deviation for each in utilities])
    edges_E = np.unique(means_A[:, None] + deviations_A[:, None] * _EDGES)
    halves_E = np.diff(edges_E)[:, None] / 2
    grid_X = (edges_E[:-1, None] + halves_E * (1.0 + _POINTS)).ravel()
    steps_X = (halves_E * _SHARES).ravel()
    scaled_AX = (grid_X - means_A[:, None]) / deviations_A[:, None]
    below_AX: NDArray[np.float64] = special.ndtr(scaled_AX)
    density_AX = np.exp(-0.5 * scaled_AX**2) / deviations_A[:, None]
    others_AX = np.array([np.delete(below_AX, arm, axis=0).prod(axis=0) for arm in range(len(utilities))])
    best_A = (density_AX * others_AX) @ steps_X
    return best_A / best_A.sum()


def probabilities(utilities: Mapping[str, Belief], floor: float) -> dict[str, float]:
    """The probability with which to choose each arm: at least `floor` each, the rest by Thompson sampling.

    Raises:
        ValueError: no arm, or a floor that so many arms cannot all have.
    """
    if not 0.0 <= floor * len(utilities) <= 1.0:
        raise ValueError(f"a floor of {floor} for each of {len(utilities)} arms is more than there is to give")
    free = 1.0 - floor * len(utilities)
    best_A = best_probabilities(list(utilities.values()))
    return {arm: floor + free * float(best) for arm, best in zip(utilities, best_A, strict=True)}


def drawn(odds: Mapping[str, float], place: float) -> str:
    """The arm at `place` in [0, 1), with the arms' odds laid side by side in the mapping's order. Raises ValueError without an arm.

    Example: ``drawn({"live": 0.7, "cheap": 0.3}, 0.71) == "cheap"``
    """
    edge, last = 0.0, ""
    for arm, chance in odds.items():
        edge += chance
        if chance > 0.0:
            last = arm
            if place < edge:
                return arm
    if not last:
        raise ValueError("no arm has a probability above 0")
    return last  # the probabilities' sum fell short of 1 by a rounding
