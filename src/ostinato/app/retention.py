"""What a run's housekeeping must keep.

Collecting weights keeps the versions that were live or that a restart needs, besides refs, pins, leases and the newest. Dropping log
rows keeps those that are not decided yet and those that a restarted trainer reads again.
"""

from __future__ import annotations

from ostinato.app.branches import branches_begun, copied_upto
from ostinato.app.storage import Run, open_folds, open_log, rows_of
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.records import Batch, PolicyVersion, ReleaseEvent, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.record.rowlog import RowLog
from ostinato.reward.log_fold import needed_above
from ostinato.weights.keep.gc import Collected, collect

_LIVE = ("shipped", "rolled_back")  # the actions after which the event's version serves users
# the action after which it waits for a person, for however long, and newer ones take its refs
_WAITS = "awaits_approval"


async def needed(log: RowLog, config: Config) -> list[str]:
    """The roots that a collection must keep for this run, and for the branches whose versions lie in its store."""
    released = await _released(log, config.collect.releases)
    roots = [policy.hash for policy in (*released, *_retaken(log, config))]
    for branch in branches_begun(config):
        with open_log(branch) as branch_log:
            roots += await needed(branch_log, branch)
    return list(dict.fromkeys(roots))


async def collect_weights(run: Run) -> Collected:
    """Delete the versions that nothing needs, by the run's own rules. Raises as `weights.keep.gc.collect`."""
    return await collect(run.store, run.config.collect, roots=await needed(run.log, run.config))


async def _released(log: Log, count: int) -> list[PolicyVersion]:
    """The last `count` versions that were live, newest first, and the last one that waited for approval, by the run's ledger."""
    found: dict[PolicyVersion, None] = {}
    waits: list[PolicyVersion] = []
    async for row in rows_of(log, ReleaseEvent):
        if row.action in _LIVE:
            found.pop(row.policy, None)  # moves it to the end: the order is by when it was last live
            found[row.policy] = None
        elif row.action == _WAITS:
            waits = [row.policy]
    return [*list(found)[::-1][:count], *waits]


def _retaken(log: RowLog, config: Config) -> list[PolicyVersion]:
    """The reference and base versions of the steps that a restarted trainer repeats, or a replay from the ladder of checkpoints."""
    octaves = config.learn.checkpoint_ladder
    batches = _batches(log, config, config.learn.checkpoint_every << octaves if octaves else 0)
    return [policy for batch in batches for policy in (batch.reference, batch.base) if policy is not None]


def _batches(log: RowLog, config: Config, least: int = 0) -> list[Batch]:
    """The steps that a trainer repeats from its oldest checkpoint, or at least so many."""
    steps = max(least, config.learn.checkpoint_every * (config.learn.keep_checkpoints + 1))
    return [row for _, row in log.tail(steps, {Batch}) if isinstance(row, Batch)]


async def drop_old_rows(run: Run, others: Cursor) -> int:
    """Drop log rows older than `record.retain_days` that are no longer needed; returns how many segments.

    `others` is how far the log was read by the keepers of folds other than the reward desk. What is not copied yet for a branch is needed,
    and nothing in the log of a branch that is trained no more. Raises StorageFull, Unavailable, Corrupt.
    """
    trained = run.config.learn.tenants
    begun = branches_begun(run.config)
    copied = [await copied_upto(open_folds(each), run.log) for each in begun if each.run.tenant in trained]
    turns = [(turn,) for batch in _batches(run.log, run.config) for turn in batch.turns]
    again = [place - 1 for place in await run.log.places(Turn, turns)]
    now = wall_clock()
    needed = await needed_above(run.folds, run.config.reward, now)
    dropped = await run.log.drop_old(now, min([needed, others, *again, *copied]))
    for branch in begun:
        if branch.run.tenant not in trained:
            with open_log(branch) as log:
                dropped += await log.drop_old(now, log.newest())
    return dropped
