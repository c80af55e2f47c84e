"""What a run keeps of what it made: which past releases its garbage collection holds on to."""

from __future__ import annotations

from ostinato.app.storage import Run
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.seams import Log
from ostinato.weights.keep.gc import Collected, OnStep, collect

_LIVE = ("shipped", "rolled_back")  # the actions after which the event's version is before users


async def released(log: Log, count: int) -> list[PolicyVersion]:
    """The last `count` versions that were live, newest first, by the run's ledger."""
    found: dict[PolicyVersion, None] = {}
    async for _, row in log.read(0, {ReleaseEvent}):
        if isinstance(row, ReleaseEvent) and row.action in _LIVE:
            found.pop(row.policy, None)  # last in the order of when it was live
            found[row.policy] = None
    return list(found)[::-1][:count]


async def collect_weights(run: Run, on_step: OnStep = lambda step: None) -> Collected:
    """Delete the versions that nothing needs, by the run's own rules. Raises as `weights.keep.gc.collect`."""
    settings = run.config.collect
    roots = [policy.hash for policy in await released(run.log, settings.releases)]
    return await collect(run.store, settings, roots=roots, on_step=on_step)
