"""Were people dealt to the arms in the shares that were set? If not, the arms differ in who is in them, and no outcome means anything.

The test is valid at any time: a Bayes factor whose probability of ever reaching B, if the shares are right, is at most 1/B
(Lindon and Malek, arXiv 2011.03567).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_CONCENTRATION = 1000.0
"""How near to the set shares the alternatives lie: with 1,000, a 50% arm that gets 52% is detected in 20,000 people nine times in ten."""


class ArmBalance:
    """Counts people at their first turn of a trial, by arm, under the shares in force then.

    Each change of shares begins a new factor; the product of all factors is judged, so a ramp hides nothing.
    """

    def __init__(self) -> None:
        self._settled = 0.0
        self._shares: tuple[float, ...] = ()
        self._counts: list[float] = []

    def add(self, newcomers: Sequence[int], shares: Sequence[float]) -> None:
        """`newcomers` by arm, while `shares` were in force (they sum to 1; an arm of share 0 must get nobody and is left out).

        Raises:
            ValueError: `newcomers` and `shares` differ in length, or the shares do not sum to 1.
        """
        if len(newcomers) != len(shares) or abs(sum(shares) - 1.0) > 1e-9:
            raise ValueError(f"{len(newcomers)} arms with shares {tuple(shares)}: one share each, 1 in all")
        used = tuple(shares)
        if used != self._shares:
            self._settled, self._shares, self._counts = self.log_factor(), used, [0.0] * len(used)
        self._counts = [count + new for count, new in zip(self._counts, newcomers, strict=True)]

    def log_factor(self) -> float:
        """The logarithm of the Bayes factor against the set shares: log 1000 and more voids the trial."""
        total = sum(self._counts)
        if not total:
            return self._settled
        factor = math.lgamma(_CONCENTRATION) - math.lgamma(_CONCENTRATION + total)
        for count, share in zip(self._counts, self._shares, strict=True):
            if share > 0.0:
                prior = _CONCENTRATION * share
                factor += math.lgamma(prior + count) - math.lgamma(prior) - count * math.log(share)
            elif count:
                return math.inf
        return self._settled + factor
