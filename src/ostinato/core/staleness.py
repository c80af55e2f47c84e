"""Staleness: the number of optimizer steps between the weights that sampled a token and the trainer's.

Policy numbers count steps and never repeat. When everything newer than a release was refused, the trainer goes back to that
release's weights but continues the numbering; a difference of numbers is then no longer a distance.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The trainer's last return: step `first` was the first one taken from the weights of policy number `base`.

    Example: after 9 steps the trainer went back to v4: ``Lineage(first=10, base=4)``. The weights after step 11 are then two
    steps from v4 and three from v3: ``lag(11, 4) == 2``, ``lag(11, 3) == 3``, ``lag(11, 10) == 1``.
    """

    first: int = 1
    base: int = 0

    def lag(self, step: int, number: int) -> int:
        """Return the steps between policy `number` and the weights after `step` steps. For an abandoned version, the way back to `base`
        counts too.
        """
        if number >= self.first:
            return step - number
        return (step - self.first + 1) + abs(self.base - number)
