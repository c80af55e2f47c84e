"""Are the logged propensities those of the actual draws? A test that may be looked at after every draw. Pure maths.

If they are, E[1{arm is drawn} / p] = 1 for every arm that could be drawn, that is, the arm comes up with probability p. The test bets
against that: against each of a few alternatives q, in which the arm's odds are r times what the log says, it multiplies its stake by q / p
when the arm comes up and by (1 - q) / (1 - p) when it does not. While the propensities are right the expected stake stays constant, so by
Ville's inequality (1939) the stake ever reaches 1 / alpha with probability alpha at most, however often it is looked at and however the
propensities change from draw to draw (Waudby-Smith and Ramdas 2024, arXiv 2010.09686; a mixture as in Robbins 1970). Exact, not asymptotic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TIMES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # the alternatives: the true odds are so many times the logged ones

_NOTHING = [0.0] * (3 + len(_TIMES))
_CERTAIN = 1e9  # the log of a stake that refutes at any level


@dataclass(frozen=True, slots=True, kw_only=True)
class PropensityBalance:
    """One arm's draws. `ratio` is the mean of 1{drawn} / p, about 1 if the propensities are right; `p_value` is valid at any time.

    Example: ``PropensityBalance(arm="live", draws=4000, ratio=1.01, p_value=1.0)``
    """

    arm: str
    draws: int
    ratio: float
    p_value: float


class PropensityTest:
    """Takes in every draw: which arm came up, and the logged probabilities of all arms that could have.

    Example::

        test = PropensityTest()
        test.add("live", {"live": 0.7, "cheap": 0.3})
        test.wrong(alpha=0.001)  # the arms whose logged propensities are not what was done
    """

    def __init__(self) -> None:
        # draws, sum of 1{drawn} / p, log stakes, the largest log of the mean stake
        self._arms: dict[str, list[float]] = {}

    def add(self, arm: str, odds: Mapping[str, float]) -> None:
        """Count one draw, one per episode. Odds that exclude the drawn arm, or do not sum to 1, are refuted at once."""
        if odds.get(arm, 0.0) <= 0.0 or not math.isclose(math.fsum(odds.values()), 1.0, abs_tol=1e-6):
            draws, total, _, *stakes = self._arms.get(arm, _NOTHING)
            self._arms[arm] = [draws + 1.0, total, _CERTAIN, *stakes]
            return
        for name, chance in odds.items():
            if 0.0 < chance < 1.0:
                self._bet(name, chance, name == arm)

    def balances(self) -> list[PropensityBalance]:
        """The balance of every arm so far, by name. An arm whose draws were all certain has none."""
        return [
            PropensityBalance(arm=arm, draws=int(draws), ratio=total / draws, p_value=min(1.0, math.exp(-best)))
            for arm, (draws, total, best, *_) in sorted(self._arms.items())
        ]

    def wrong(self, alpha: float) -> list[str]:
        """The arms whose propensities are refuted; while all are right, any is ever refuted with probability `alpha` at most.

        The j-th arm to appear may spend alpha / (j (j + 1)), which sums to alpha however many arms there come to be.
        """
        allowed = {arm: alpha / (j * (j + 1)) for j, arm in enumerate(self._arms, 1)}
        return [balance.arm for balance in self.balances() if balance.p_value <= allowed[balance.arm]]

    def state(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return {arm: list(values) for arm, values in self._arms.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`. Raises ValueError, TypeError or AttributeError for something else."""
        arms = {str(arm): [float(value) for value in values] for arm, values in state.items()}
        if any(len(values) != len(_NOTHING) for values in arms.values()):
            raise ValueError(f"every arm has {len(_NOTHING)} numbers")
        self._arms = arms

    def _bet(self, arm: str, chance: float, drawn: bool) -> None:
        draws, total, best, *stakes = self._arms.get(arm, _NOTHING)
        for i, times in enumerate(_TIMES):
            # with odds r p / (1 - p) the probability is r p / (1 - p + r p), and q / p and (1 - q) / (1 - p) follow
            stakes[i] += (math.log(times) if drawn else 0.0) - math.log1p(chance * (times - 1.0))
        most = max(stakes)
        mixed = most + math.log(math.fsum(math.exp(stake - most) for stake in stakes) / len(stakes))
        total += 1.0 / chance if drawn else 0.0
        self._arms[arm] = [draws + 1.0, total, max(best, mixed), *stakes]
