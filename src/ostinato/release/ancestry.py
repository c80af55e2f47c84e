"""Whether a candidate descends from a version that harmed people.

A step starts from the weights of the step before it, so every version after a harmful one may carry on the harm, until the trainer goes
back to the weights of a standing release. The batch of that step records it (`core.records.Batch.base`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import Batch, PolicyVersion
from ostinato.core.seams import Cursor, Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmful:
    """Versions numbered above `above` may carry on the harm, if they were trained before the trainer went back.

    `known_at` is the place in the log where the harm was recorded.

    Example: ``Harmful(above=5, known_at=8123)``: v9 was rolled back to v5.
    """

    above: int
    known_at: Cursor


class Ancestry:
    """Reads the log's batches from the place of the harm on; without harm it reads nothing."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._of: Harmful | None = None
        self._cursor: Cursor = 0
        self._clean_from: int | None = None

    async def carried_on(self, policy: PolicyVersion, harmful: Harmful | None) -> bool:
        """True if this version may descend from a harmful one."""
        if harmful is None or policy.number <= harmful.above:
            return False
        clean_from = await self.clean_from(harmful)
        return clean_from is None or policy.number < clean_from

    async def clean_from(self, harmful: Harmful) -> int | None:
        """The first step since the harm that was taken from a standing release's weights; None if there is none yet."""
        if harmful != self._of:
            self._of, self._cursor, self._clean_from = harmful, harmful.known_at, None
        if self._clean_from is None:
            async for cursor, row in self._log.read(self._cursor, {Batch}):
                self._cursor = cursor
                if isinstance(row, Batch) and row.base is not None:
                    self._clean_from = row.step
                    break
        return self._clean_from
