"""What a run's housekeeping must keep.

Weights: versions that were live or that a restart needs, besides refs, pins, leases and the newest versions. Log rows: those that are not
scored yet and those that a restarted trainer reads again.
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

_LIVE = ("shipped", "rolled_back")  # actions after which the event's version serves users
# after this action the version waits for a person, for any time, while newer candidates take its refs
_WAITS = "awaits_approval"


async def needed(log: RowLog, config: Config) -> list[str]:
    """Return the roots that a collection must keep for this run, and for branches whose versions are in its store."""
    released = await _released(log, config.collect.releases)
    roots = [policy.hash for policy in (*released, *_reused(log, config))]
    for branch in branches_begun(config):
        with open_log(branch) as branch_log:
            roots += await needed(branch_log, branch)
    return list(dict.fromkeys(roots))


async def collect_weights(run: Run) -> Collected:
    """Delete the versions that nothing needs, by the run's settings. Raises like `weights.keep.gc.collect`."""
    return await collect(run.store, run.config.collect, roots=await needed(run.log, run.config))


async def _released(log: Log, count: int) -> list[PolicyVersion]:
    """Return the last `count` versions that were live, newest first, and the last that waited for approval, from the release ledger."""
    found: dict[PolicyVersion, None] = {}
    waits: list[PolicyVersion] = []
    async for row in rows_of(log, ReleaseEvent):
        if row.action in _LIVE:
            found.pop(row.policy, None)  # reinsert at the end, because the order is by when a version was last live
            found[row.policy] = None
        elif row.action == _WAITS:
            waits = [row.policy]
    return [*list(found)[::-1][:count], *waits]


def _reused(log: RowLog, config: Config) -> list[PolicyVersion]:
    """Return the reference and base versions of steps that a restarted trainer, or a replay from the checkpoint ladder, repeats."""
    octaves = config.learn.checkpoint_ladder
    batches = _batches(log, config, config.learn.checkpoint_every << octaves if octaves else 0)
    return [policy for batch in batches for policy in (batch.reference, batch.base) if policy is not None]


def _batches(log: RowLog, config: Config, least: int = 0) -> list[Batch]:
    """Return the steps that a trainer repeats from its oldest checkpoint, but at least `least` steps."""
    steps = max(least, config.learn.checkpoint_every * (config.learn.keep_checkpoints + 1))
    return [row for _, row in log.tail(steps, {Batch}) if isinstance(row, Batch)]


async def drop_old_rows(run: Run, others: Cursor) -> int:
    """Drop log rows older than `record.retain_days` that are no longer needed; return how many segments were dropped.

    `others`: the cursor up to which all folds other than the reward desk's have read the log. Rows that are not copied yet to a trained
    branch are needed. In the log of a branch that is no longer trained no row is needed. Raises StorageFull, Unavailable, Corrupt.
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
