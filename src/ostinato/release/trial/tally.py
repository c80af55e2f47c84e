"""Builds one time slot for a contrast: one row per person and arm, tenant by tenant. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ostinato.release.metrics.metric import Measured
from ostinato.release.trial.contrast import TimeSlot

POOLED = ""
"""The stratum of tenants that have too few people to be compared by themselves."""
_APART = 5  # people that a tenant needs on each side of a slot to be compared by itself in it


class SlotTally:
    """Adds up one metric over the turns of a slot. A stratum is a tenant, or `POOLED`."""

    def __init__(self) -> None:
        self._strata: dict[str, dict[tuple[int, bool], list[float]]] = {}

    def add(self, stratum: str, person: int, treated: bool, measured: Measured, expected: float) -> None:
        """Add a person's turn; `expected` is of one unit of the denominator, and the same for all turns of a person."""
        rows = self._strata.get(stratum)
        if rows is None:
            rows = self._strata[stratum] = {}
        row = rows.get((person, treated))
        if row is None:
            row = rows[person, treated] = [0.0, 0.0, 0.0, expected]
        row[0] += 1.0
        row[1] += measured[1]
        row[2] += measured[0]

    def slots(self, day: int) -> Mapping[str, TimeSlot]:
        """One slot per stratum; arms are compared within each.

        A person who is alone on a side does not differ from its mean, and m people show only (m - 1) / m of the spread. So strata with
        fewer than `_APART` people on either side are compared as one. Without that the variance of 40 tenants of 60 people was too small
        by a factor of 2.4.
        """
        made: dict[str, dict[tuple[int, bool], list[float]]] = {}
        for stratum, rows in self._strata.items():
            treated = sum(side for _, side in rows)
            apart = min(treated, len(rows) - treated) >= _APART
            made.setdefault(stratum if apart else POOLED, {}).update(rows)
        return {stratum: _slot(rows, day) for stratum, rows in made.items()}

    def slot(self, day: int) -> TimeSlot:
        """One slot of all strata together."""
        return _slot({key: row for rows in self._strata.values() for key, row in rows.items()}, day)


def _slot(rows: Mapping[tuple[int, bool], list[float]], day: int) -> TimeSlot:
    numbers = np.array(list(rows.values()), dtype=np.float64).reshape(-1, 4)
    return TimeSlot(
        day=day,
        people_R=np.array([person for person, _ in rows], dtype=np.int64),
        turns_R=numbers[:, 0],
        units_R=numbers[:, 1],
        good_R=numbers[:, 2],
        expected_R=numbers[:, 3],
        treated_R=np.array([treated for _, treated in rows], dtype=np.bool_),
    )
