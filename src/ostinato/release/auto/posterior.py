"""Thompson sampling over arms: the posterior of each arm's mean reward, and the probability that it is the best. Pure functions.

**The posterior** treats each user as one cluster, because turns of one user are correlated. A user with n turns has the weight
w(n) = n / (1 + (n - 1) rho): the number of independent turns that they are worth if any two of their rewards have the correlation rho (Kish
1965, *Survey Sampling*, section 5.4), never more than 1 / rho. The mean is m = sum(w_u y_u) / sum(w_u) over users' means y_u. Its variance
is the cluster-robust one, k / (k - 1) sum(w_u^2 (y_u - m)^2) / sum(w_u)^2 (Liang and Zeger 1986; Cameron and Miller 2015, section II). By
the central limit theorem over users, the posterior under a weak prior is about normal (Gelman et al., *Bayesian Data Analysis*, section
4.1).

The prior is two pseudo-users of one turn each, one at either end of the range, as Agresti and Coull (1998) add successes and failures.
Before any user, the mean is therefore the middle of the range, and the deviation half the range. If one end is rare, as failures are, the
pseudo-users may count for less than a turn each (`doubt`), so that a few users without a failure are no evidence of many failures.

**The propensities** are computed, not sampled. Thompson (1933) plays each arm with the probability that it is the best. One draw from every
arm's posterior does that without the probability ever being known. Here the probability is computed first and the arm is drawn with it, so
that the logged probability is exactly the one used:

    P(a is best) = integral of f_a(x) prod_{b != a} F_b(x) dx      f_a, F_a: the normal density and distribution of arm a's utility

(Russo et al. 2018, *A Tutorial on Thompson Sampling*, section 3). The integral uses four-point Gauss-Legendre quadrature on each interval
of a fixed grid, at most a quarter of some arm's deviation wide, and is normalised so that the probabilities sum to one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.core.records import Person

_SUMS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """A normal distribution of an arm's mean, in units of the reward. `users`: the number of users behind it, faded ones in part.

    Example: ``Belief(mean=0.61, deviation=0.02, users=412.0)``
    """

    mean: float
    deviation: float
    users: float


class Posterior:
    """The posterior of a mean reward, updated one reward at a time. Memory grows with the users kept individually, up to `most_users`.

    A user who is no longer kept individually stays in the sums, and counts as another user when they come back.

    Args:
        low: the least reward; a lower one counts as this.
        high: the most reward; a higher one counts as this.
        rho: the assumed correlation of two rewards of one user. The larger it is, the less influence a user with many turns has.
        most_users: the number of users kept individually: those with the latest rewards.
        doubt: the weight of each pseudo-user of the prior, in turns.

    Raises:
        ValueError: an empty range, rho outside (0, 1], or a doubt that is not above 0.

    Example::

        posterior = Posterior(low=0.0, high=1.0)
        posterior.add(("acme", "u42"), 1.0)
        posterior.belief()  # Belief(mean=0.66..., ...)
    """

    def __init__(
        self, *, low: float, high: float, rho: float = 0.5, most_users: int = 50_000, doubt: float = 1.0
    ) -> None:
        if not low < high:
            raise ValueError(f"the range of the reward is empty: low {low}, high {high}")
        if not 0.0 < rho <= 1.0:
            raise ValueError(f"rho {rho} must lie above 0 and be at most 1")
        self._middle, self._half = (low + high) / 2, (high - low) / 2
        if not doubt > 0.0:
            raise ValueError(f"the doubt {doubt} must lie above 0")
        self._rho, self._doubt = rho, doubt
        self._most = most_users
        # by user: the number of turns, and the sum of their scaled rewards
        self._users: OrderedDict[Person, tuple[int, float]] = OrderedDict()
        self._sums = [0.0] * _SUMS  # over users: 1, w, w y, w^2, w^2 y, w^2 y^2

    def add(self, person: Person, reward: float) -> None:
        """Count one turn's reward. Raises ValueError for NaN."""
        if math.isnan(reward):
            raise ValueError("a reward is not a number")
        scaled = min(1.0, max(-1.0, (reward - self._middle) / self._half))
        turns, total = self._users.pop(person, (0, 0.0))
        if turns:
            self._shift(turns, total, -1.0)
        self._shift(turns + 1, total + scaled, +1.0)
        self._users[person] = (turns + 1, total + scaled)
        if len(self._users) > self._most:
            self._users.popitem(last=False)

    def forget(self, gone: Callable[[Person], bool]) -> None:
        """Drop these users' own counts; they stay in the sums, as others who are not kept individually do."""
        self._users = OrderedDict((person, sums) for person, sums in self._users.items() if not gone(person))

    def belief(self) -> Belief:
        """Return the current posterior."""
        users, w, wy, ww, wwy, wwyy = self._sums
        doubt = self._doubt
        count, weight = users + 2.0, w + 2.0 * doubt
        mean = wy / weight
        more = 2.0 * doubt * doubt  # the pseudo-users add 2 `doubt` to w and nothing to w y, as their rewards cancel
        squares = (wwyy + more) - 2.0 * mean * wwy + mean * mean * (ww + more)
        variance = count / (count - 1.0) * max(0.0, squares) / (weight * weight)
        return Belief(
            mean=self._middle + self._half * mean, deviation=self._half * math.sqrt(variance), users=max(0.0, users)
        )

    def fade(self, kept: float) -> None:
        """Scale the weight of all rewards so far by `kept`, because the arm has changed a little.

        Raises ValueError for a share outside [0, 1].
        """
        if not 0.0 <= kept <= 1.0:
            raise ValueError(f"the share that is kept, {kept}, must lie in [0, 1]")
        self._sums = [kept * value for value in self._sums]
        self._users.clear()

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {"sums": list(self._sums), "users": [[*person, *said] for person, said in self._users.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError, TypeError or LookupError for anything else."""
        sums = [float(value) for value in state["sums"]]
        if len(sums) != _SUMS or not all(map(math.isfinite, sums)):
            raise ValueError(f"a posterior's state has {_SUMS} finite sums")
        users = OrderedDict(
            ((str(tenant), str(user)), (int(turns), float(total))) for tenant, user, turns, total in state["users"]
        )
        self._sums, self._users = sums, users

    def _shift(self, turns: int, total: float, sign: float) -> None:
        weight, mean = turns / (1.0 + (turns - 1) * self._rho), total / turns
        heavy = weight * weight
        added = (1.0, weight, weight * mean, heavy, heavy * mean, heavy * mean * mean)
        self._sums = [value + sign * more for value, more in zip(self._sums, added, strict=True)]


# ---------------------------------------------------------------- Thompson sampling


# grid of each arm in units of its deviation; beyond it, a float cannot represent the normal's mass beside 1
_EDGES = np.linspace(-8.5, 8.5, 69)
_POINTS, _SHARES = np.polynomial.legendre.leggauss(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What the operator values in an answer: the weight of each metric, and how much reward one unit of money is worth.

    Example: ``Worth(weights={"reward": 1.0}, price=2.0)``: an answer that costs a cent more must be better by 0.02.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"reward": 1.0})
    price: float = 0.0


def utility(beliefs: Mapping[str, Belief], cost: float, worth: Worth) -> Belief:
    """Return an arm's utility: the weighted sum of its metrics, less the price times its mean cost per turn.

    The correlation of the metrics is not known, so the deviation is the largest possible one, the sum of theirs (the triangle inequality of
    standard deviations). It is exact with one metric; with several, the router explores a little more than necessary.

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
    """Return the reward per turn, f low + (1 - f) m: a share f of all turns fails and earns `low`, and an answer earns m on average.

    m is estimated from the rated answers and f from all turns, so a failure has the same weight however few answers are rated. Both
    deviations count users as clusters. To first order (the delta method), the error is (1 - f) times that of m less (m - low) times that of
    f. The correlation of the two is not known, so the deviation is the largest possible one: (1 - f) sd(m) + (m - low) sd(f). The number of
    users is the mean of the two parts' users, weighted by f and 1 - f.
    """
    share, lost = failing.mean, reward.mean - low
    return Belief(
        mean=low + (1.0 - share) * lost,
        deviation=(1.0 - share) * reward.deviation + abs(lost) * failing.deviation,
        users=share * failing.users + (1.0 - share) * reward.users,
    )


def best_probabilities(utilities: Sequence[Belief]) -> NDArray[np.float64]:
    """Return the probability that each arm is the best, for independent normal utilities; shape [arms], sums to 1.

    Raises:
        ValueError: no arm, or a mean or deviation that is not finite, or a deviation that is not above 0.
    """
    if not utilities:
        raise ValueError("no arm to choose from")
    if not all(math.isfinite(each.mean) and 0.0 < each.deviation < math.inf for each in utilities):
        raise ValueError("every arm needs a finite mean and a finite deviation above 0")
    if len(utilities) == 1:
        return np.ones(1)
    from scipy import special  # a slow import (a quarter of a second), needed only by processes that route

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
    """Return the probability with which to choose each arm: at least `floor` each, the rest by Thompson sampling.

    Raises:
        ValueError: no arm, or a floor that so many arms cannot all have.
    """
    if not 0.0 <= floor * len(utilities) <= 1.0:
        raise ValueError(f"a floor of {floor} for each of {len(utilities)} arms is more than there is to give")
    free = 1.0 - floor * len(utilities)
    best_A = best_probabilities(list(utilities.values()))
    return {arm: floor + free * float(best) for arm, best in zip(utilities, best_A, strict=True)}


def drawn(odds: Mapping[str, float], place: float) -> str:
    """Return the arm at `place` in [0, 1), with the arms' odds laid side by side in the mapping's order. Raises ValueError without an arm.

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
    return last  # rounding left the sum of the probabilities just below 1
