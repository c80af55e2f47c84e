"""Alarms of simulated worlds in the log: a policy cheats, or a checkpoint is surer of fewer tasks."""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.core.clock import wall_clock
from ostinato.core.seams import Log
from ostinato.evaluate.coverage import ScoredAttempt, covered, lost_coverage
from ostinato.release.alarms import note
from ostinato.worlds.rollout.finished import CHEATED, CheatWatch, Finished
from ostinato.worlds.tasks.task import Split

NARROWED = "worlds:best_of_k"
"""The name of the alarm that stands while the newest measured checkpoint solves more at the first try and less at the best of k."""


async def note_cheats(log: Log, watch: CheatWatch) -> None:
    """Write the watch's finding into the log, unless it is already there. Raises StorageFull."""
    if watch.raised is not None:
        await note(log, CHEATED, raised=watch.raised, why=watch.why, at=wall_clock())


async def note_coverage(log: Log, records: Iterable[Finished], k: int) -> None:
    """Write into the log whether the newest measured checkpoint is surer of fewer tasks than the first. Idempotent.

    Writes nothing until two checkpoints have tried ten held-out tasks k times. The records are of one taskset.
    """
    attempts = [
        ScoredAttempt(task=each.task, family=each.family, policy=each.policy, value=each.value)
        for each in records
        if each.split is Split.HELD_OUT
        and each.value is not None
        and each.policy is not None
        and each.policy == each.policy_last
    ]
    rows = covered(attempts, k)
    if k < 2 or not any(row.change is not None for row in rows):
        return
    lost = lost_coverage(rows)
    if lost is None:
        newest = next(row for row in reversed(rows) if row.rates is not None)
        why = f"{newest.policy} does not solve less at the best of {k} while it solves more at the first try"
    else:
        why = f"{lost.policy}: pass@1 rose and the best of {k} fell; what it gave up does not come back by training on"
    await note(log, NARROWED, raised=lost is not None, why=why, at=wall_clock())
