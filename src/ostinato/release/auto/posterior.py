"""The posterior of one arm's mean reward, a user counted once however much they say. Pure arithmetic over sums.

Turns of one user are alike, so a user is one cluster. A user with n turns has the weight w(n) = n / (1 + (n - 1) rho): the number of
independent turns that they are worth if any two of their rewards correlate by rho (Kish 1965, *Survey Sampling*, section 5.4), never more
than 1 / rho. The mean is m = sum(w_u y_u) / sum(w_u) over users' means y_u; its variance is the cluster-robust one,
k / (k - 1) sum(w_u^2 (y_u - m)^2) / sum(w_u)^2 (Liang and Zeger 1986; Cameron and Miller 2015, section II). By the central limit theorem
over users the posterior under a weak prior is about normal (Gelman et al., *Bayesian Data Analysis*, section 4.1).

The prior is two made-up users of one turn each, one at either end of the range, as Agresti and Coull (1998) add successes and failures:
with nobody yet the mean is the middle of the range, and the deviation half the range. Where one end is rare, as failures are, they may
count for less than a turn each (`doubt`), so that a few users without a failure are no evidence of many failures.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.core.records import Person

_SUMS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """A normal distribution of an arm's mean, in units of the reward. `users` is the number of users behind it, faded ones in part.

    Example: ``Belief(mean=0.61, deviation=0.02, users=412.0)``
    """

    mean: float
    deviation: float
    users: float


class Posterior:
    """Takes in rewards one by one; memory grows with the users that are remembered individually, up to `most_users`.

    A user who was forgotten stays in the sums, and counts as another user when they come back.

    Args:
        low: the least reward; a lower one counts as this.
        high: the most reward; a higher one counts as this.
        rho: the assumed correlation of two rewards of one user. The larger, the less influence a user with many turns has.
        most_users: users that are remembered: the latest to say something.
        doubt: the weight of each made-up user, in turns.

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
        # turns, and the sum of their scaled rewards
        self._users: OrderedDict[Person, tuple[int, float]] = OrderedDict()
        self._sums = [0.0] * _SUMS  # over users: 1, w, w y, w^2, w^2 y, w^2 y^2

    def add(self, person: Person, reward: float) -> None:
        """Count one turn's reward. Raises ValueError for one that is not a number."""
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

    def belief(self) -> Belief:
        """The posterior now."""
        users, w, wy, ww, wwy, wwyy = self._sums
        doubt = self._doubt
        count, weight = users + 2.0, w + 2.0 * doubt
        mean = wy / weight
        more = 2.0 * doubt * doubt  # the made-up users add twice `doubt` to w, and to w y nothing
        squares = (wwyy + more) - 2.0 * mean * wwy + mean * mean * (ww + more)
        variance = count / (count - 1.0) * max(0.0, squares) / (weight * weight)
        return Belief(
            mean=self._middle + self._half * mean, deviation=self._half * math.sqrt(variance), users=max(0.0, users)
        )

    def fade(self, kept: float) -> None:
        """Scale the weight of all rewards so far by `kept`, because the arm is not quite what it was.

        Raises ValueError for a share outside [0, 1].
        """
        if not 0.0 <= kept <= 1.0:
            raise ValueError(f"the share that is kept, {kept}, must lie in [0, 1]")
        self._sums = [kept * value for value in self._sums]
        self._users.clear()

    def state(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return {"sums": list(self._sums), "users": [[*person, *said] for person, said in self._users.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`. Raises ValueError, TypeError or LookupError for something else."""
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
