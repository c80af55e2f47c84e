"""The training worker: rewards, credit assignment, optimizer steps, publication. After a crash it repeats the recorded steps, if it can."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator
from dataclasses import replace

import torch

from ostinato.app.branch_erasure import BranchErasure
from ostinato.app.branches import TenantRows, begin_anew
from ostinato.app.checkpoints import shared_checkpoints
from ostinato.app.erasure import ErasureReplay
from ostinato.app.memory import check_memory
from ostinato.app.numerics import trained_in, trainer_backend, trainer_contract
from ostinato.app.storage import Run, rows_of
from ostinato.app.trainer import Learning, open_learning
from ostinato.config import Config
from ostinato.core.errors import BadConfig, BadWeights, Conflict, Corrupt, NoSignal, NotFound, StorageFull
from ostinato.core.memory import process_limit
from ostinato.core.records import Batch, PolicyVersion, ReleaseEvent, Turn
from ostinato.core.samples import TrainingBatch
from ostinato.core.seams import Cursor, Trainer
from ostinato.core.weights import Learned
from ostinato.launch.placing.heartbeat import Heartbeat
from ostinato.launch.views.progress import Progress, kept_bytes
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.shutdown import unless
from ostinato.launch.workers.worker_main import WorkerContext, run_in_role
from ostinato.loop import step
from ostinato.model.kernels.cache import announced
from ostinato.reward.protocol import Asker
from ostinato.reward.runners import asker_of, late_asker_of
from ostinato.train.checkpoint import ALL, newest_step, thin
from ostinato.train.sharding.trainer import return_freed_memory
from ostinato.weights.follow.follower import parent_of, run_of, versions_between
from ostinato.weights.version.content import version_ref

logger = logging.getLogger(__name__)

# a worker must end within `supervise.stop_s`; these seconds of it are reserved for what follows the clean-up
_EXIT_RESERVE_S = 3.0
_MIN_CLEANING_S = 1.0

# reasons why recorded steps are not repeated
_TURNS_ERASED = "has turns that were erased"
_DIFFERS = "gives other weights than were published with its number (the settings in `train`, the version or the machine have changed)"


class ReportingTrainer:
    """A `Trainer` that reports each step to the heartbeat.

    A step of up to `most` tokens may take `longest_s` seconds, a larger one proportionally more: a group of rollouts may have more tokens
    than a batch.
    """

    def __init__(self, inner: Trainer, pulse: Heartbeat, longest_s: float, most: int) -> None:
        self._inner, self._pulse, self._longest_s, self._most = inner, pulse, longest_s, most

    async def step(self, batch: TrainingBatch) -> Learned:
        longest_s = self._longest_s * max(1.0, batch.tokens / self._most)
        with self._pulse.during(f"taking step {batch.row.step}", longest_s):
            return await self._inner.step(batch)


class TrainWorker:
    """Takes optimizer steps, publishes versions and writes checkpoints; goes back to the live version when every newer one was refused.

    `parts` are its components.
    """

    def __init__(self, run: Run, learning: Learning, progress: Progress, pulse: Heartbeat) -> None:
        self._longest_s = run.config.supervise.work_s
        most = run.config.reward.batch_tokens
        reporting = ReportingTrainer(learning.learner.trainer, pulse, self._longest_s, most)
        self.parts = replace(learning, learner=replace(learning.learner, trainer=reporting))
        self._run, self._progress, self._pulse = run, progress, pulse
        self._shared = shared_checkpoints(run)
        branch = bool(run.config.run.tenant)
        self._erasure = BranchErasure(run, learning, self._begin_at) if branch else ErasureReplay(run, learning)
        self._erasure_error = ""
        self._tenant_rows = TenantRows(run) if branch else None
        self._seen: PolicyVersion | None = None  # the live version that `_rebase` last checked
        # how far `_last_base` has read the log, and its result
        self._base_scan: tuple[Cursor, Batch | None, bool] = (0, None, False)
        pulse.trouble = lambda: (
            learning.stored.trouble
            or (self._shared and self._shared.trouble)
            or self._erasure_error
            or self._erasure.trouble
            or None
        )
        self._settings = run.config.learn
        turns, groups = f"{self._settings.least_turns} turns", f"{run.config.worlds.groups} groups of rollouts"
        self._what = {"people": turns, "worlds": groups, "both": f"{turns} or {groups}"}[self._settings.source]

    async def resume(self) -> None:
        """Load the last checkpoint and repeat the recorded steps after it with the recorded advantages.

        A replay without forgotten people that was begun or requested comes first. Raises BadConfig if the checkpoint is newer than the
        log.
        """
        parts = self.parts
        if await self._erase(fresh=True):
            return
        if self._shared:
            # no limit: a large checkpoint takes hours
            with self._pulse.during("looking for a newer checkpoint of another host"):
                if fetched := await self._shared.fetch_newer():
                    logger.info("fetched the checkpoint %s of another host's trainer", fetched)
        if await asyncio.to_thread(parts.trainer.resume, self._run.home.checkpoints):
            logger.info("resumed at step %d", parts.trainer.step_count)
        if self._tenant_rows is not None:
            await self._resume_branch()
        named = await parts.released.candidate()
        parts.candidates.last = await self._present() or named or parts.released.live
        async with parts.candidates.repeating(named):
            async for batch in parts.desk.history(parts.trainer.step_count):
                if any(sample.turn.redacted for sample in batch.samples):
                    await self._skip_recorded(batch.row.step, _TURNS_ERASED)
                    break
                logger.info("taking recorded step %d again", batch.row.step)
                with self._log_refusals():
                    learned = await parts.learner.trainer.step(batch)
                    if await self._differs_from_published(learned):
                        await self._skip_recorded(batch.row.step, _DIFFERS)
                        break
                    await parts.stored.begin(learned)
            self._refuse_older_log()
            await self._settle()

    def _refuse_older_log(self) -> None:
        """Raise BadConfig if the checkpoint holds steps that are not in the log: the next batches would get other step numbers."""
        taken, last = self.parts.trainer.step_count, self.parts.desk.last_step
        if taken > last:
            raise BadConfig(
                f"the trainer's checkpoint in {self._run.home.checkpoints} holds step {taken}, and the log's last batch is of step {last}: "
                "restore a newer backup of the log, or put checkpoints in its place that were copied before that backup was made"
            )

    async def _differs_from_published(self, learned: Learned) -> bool:
        """Return True if a repeated step gave other weights than the version that was published with its number and the same parent.

        Always False with torch's kernels, whose results may differ bit by bit each time.
        """
        candidates, store, number = self.parts.candidates, self._run.store, learned.policy_number
        if trainer_backend(self._run.config).kernels == "torch" or await candidates.known(learned):
            return False
        await self._settle()
        if candidates.last is None or (before := await store.read_ref(version_ref(candidates.last.hash))) is None:
            return False
        versions = await versions_between(store, number, number, self._run.name)
        return before in [await parent_of(store, each) for each in versions]

    async def _skip_recorded(self, step: int, why: str) -> None:
        """Skip the recorded steps from `step` on and continue from the newest stored version.

        Step `step` cannot be repeated, since some of its turns were erased or the training settings have changed: it would give other
        weights under a number that was published. The skipped steps are only counted. A batch without turns in the log records from which
        version training continued. A checkpoint follows at once, so that this is decided only once.
        """
        parts, last = self.parts, self.parts.desk.last_step
        await self._settle()
        row = await parts.desk.last_batch()
        if row.turns:  # otherwise a trainer that was then killed has already recorded this decision
            base = next(reversed(await versions_between(self._run.store, 0, last, self._run.name)), None)
            await parts.releases.refresh()
            live = await parts.released.refresh()
            if base is None or await parts.ancestry.carried_on(base, parts.releases.harmful):
                base = live
            row = await parts.desk.restart(last + 1, base, live)
        logger.warning(
            "recorded step %d %s, so steps %d to %d are not repeated: training goes on from %s",
            *(step, why, step, last, row.base),
        )
        await self._restart_at(row)

    async def _restart_at(self, row: Batch) -> None:
        """Continue from the base of a recorded step without turns. Earlier steps are only counted. A checkpoint follows at once."""
        parts = self.parts
        while parts.trainer.step_count < row.step - 1:
            await asyncio.to_thread(parts.trainer.skip_step)
        with contextlib.suppress(NoSignal):  # it has no turns
            await parts.learner.trainer.step(TrainingBatch(row=row, samples=()))
        parts.candidates.last = row.base
        await self._checkpoint()

    async def _resume_branch(self) -> None:
        """Start a branch's training from the version that the branch began with, or from where it was last begun anew."""
        await self.parts.desk.catch_up()
        last, _ = await self._last_base()
        if last is None:
            await self._begin_at(self.parts.released.live)
        elif not last.turns and last.step > self.parts.trainer.step_count:
            # a trainer recorded it and was killed before its checkpoint
            await self._restart_branch(last)
        taken = self.parts.trainer.step_count
        async for row in rows_of(self._run.log, Batch):
            if row.step > taken and not await self._is_whole(row):
                await self._skip_recorded(row.step, _TURNS_ERASED)
                break

    async def _is_whole(self, row: Batch) -> bool:
        """Return False if turns of the step are gone: retention drops rows by age, even those that a paused branch has not trained on."""
        return len(await self._run.log.places(Turn, [(turn,) for turn in row.turns])) == len(set(row.turns))

    async def _begin_at(self, base: PolicyVersion) -> None:
        """Continue from a version of another lineage, with step numbers above its own."""
        last = max(self.parts.trainer.step_count, self.parts.desk.last_step, base.number)
        logger.info("the branch's training begins at %s", base)
        await self._restart_branch(await self.parts.desk.restart(last + 1, base, base))

    async def _restart_branch(self, row: Batch) -> None:
        """As `_restart_at`. If the base is of another lineage, begin the branch there, before the checkpoint is written."""
        if row.base is not None and await run_of(self._run.store, row.base) != self._run.name:
            await begin_anew(self._run, row.base)
        await self._restart_at(row)

    async def _last_base(self) -> tuple[Batch | None, bool]:
        """Return the newest recorded step that names a base, and whether the branch was told to begin anew after it."""
        async for cursor, row in self._run.log.read(self._base_scan[0], {Batch, ReleaseEvent}):
            _, found, anew = self._base_scan
            if isinstance(row, Batch) and row.base is not None:
                found, anew = row, False
            anew = anew or (isinstance(row, ReleaseEvent) and bool(row.detail.get("anew")))
            self._base_scan = cursor, found, anew
        return self._base_scan[1:]

    async def _rebase(self, live: PolicyVersion) -> None:
        """Restart the branch's training at the tenant's live version if somebody shipped one of another lineage there."""
        if self._seen == live:
            return
        (last, anew), run = await self._last_base(), await run_of(self._run.store, live)
        if run != self._run.name and (anew or last is None or last.base != live):
            await self._settle()
            await self._begin_at(live)
        self._seen = live

    async def _erase(self, *, fresh: bool) -> bool:
        """Repeat the training without forgotten people, if that is due. Return True if training continues from the result.

        A replay that fails is the worker's `trouble` until its next start, and training continues as before.
        """
        if self._erasure_error:
            return False
        try:
            if not await self._erasure.due():
                return False
            await self._settle()
            return await self._erasure.replay(self._say, fresh=fresh)
        except (Corrupt, NotFound, Conflict, BadConfig) as error:
            self._erasure_error = f"the training is not repeated without forgotten people: {error}"
            logger.error("%s", self._erasure_error)
            if fresh and self.parts.trainer.step_count and not newest_step(self._run.home.checkpoints):
                raise  # the only state to continue from is the one that the replay has changed
        if not fresh:
            await self.resume()
        return False

    def _say(self, what: str, limited: bool) -> None:
        self._pulse.begin(what, self._longest_s if limited else None)

    async def _present(self) -> PolicyVersion | None:
        """Return the stored version that has the trainer's current weights, or None."""
        return await self.parts.candidates.known(await asyncio.to_thread(self.parts.trainer.present))

    async def learn(self) -> None:
        """Take a step if the trainer may continue and a batch is ready, then write a checkpoint if one is due.

        The step is stored during the next one. Every call checks which version is live, since after a rollback every new turn would be
        too stale.
        """
        parts = self.parts
        await self._checkpoint_if_wanted()
        if await self._erase(fresh=False):
            return
        if self._tenant_rows is not None:
            await self._tenant_rows.copy()
            await self._rebase(await parts.released.refresh())
        may, ready = await self.may_learn(), await parts.source.look()
        if may and not ready:
            self._pulse.begin(f"waiting for {self._what} to learn from")
        if not may or not ready:
            await asyncio.sleep(self._settings.poll_s)
            return
        with self._log_refusals():
            await parts.stored.begin(await step(parts.learner))
            if quality := parts.desk.surrogate:
                self._progress.surrogate(quality)
            if parts.trainer.step_count % self._settings.checkpoint_every == 0:
                await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Write a checkpoint once all steps so far are stored: steps before a checkpoint are never repeated, hence not published later."""
        parts, place = self.parts, self._run.home.checkpoints
        with self._pulse.during(f"writing the checkpoint of step {parts.trainer.step_count}", self._longest_s):
            await parts.stored.settle()
            cursor, settings = await self._run.log.append(), self._settings
            await asyncio.to_thread(parts.trainer.save, place, cursor=cursor, keep=ALL)
            keep, every = settings.keep_checkpoints, settings.checkpoint_every
            await asyncio.to_thread(thin, place, keep=keep, every=every, ladder=settings.checkpoint_ladder)
            if self._shared:
                self._shared.begin()
        await parts.desk.save()

    async def _checkpoint_if_wanted(self) -> None:
        """Write the checkpoint that `ostinato forget` waits for. On a full disk only remove the request; the waiting command then sees
        that there is no new checkpoint.
        """
        wanted = self._run.home.checkpoint_wanted
        if not wanted.exists():
            return
        try:
            if newest_step(self._run.home.checkpoints) < self.parts.trainer.step_count:
                await self._checkpoint()
        except StorageFull as error:
            logger.warning("%s", error)
        wanted.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _log_refusals(self) -> Generator[None]:
        """Suppress NoSignal and BadWeights, and record them as a refused batch."""
        try:
            yield
        except (NoSignal, BadWeights) as error:
            count = self.parts.trainer.step_count
            logger.warning("after step %d: refused: %s", count, error)
            self._progress.write("refused", step=count, why=str(error))

    async def finish(self) -> None:
        """Publish the last step before the worker ends. A failure is only logged."""
        if self._shared:
            await self._shared.close()
        if self._tenant_rows is not None:
            self._tenant_rows.close()
        try:
            await self._settle()
        except Exception:
            logger.exception("the last version is not stored; it is made again at the next start")

    async def _settle(self) -> None:
        with self._log_refusals(), self._pulse.during("storing what was learned", self._longest_s):
            await self.parts.stored.settle()

    async def _leave_withdrawn(self, live: PolicyVersion) -> None:
        """Start the next step from the live version if the last steps build on a version that was withdrawn as harmful."""
        parts = self.parts
        await parts.releases.refresh()
        harmful = parts.releases.harmful
        if harmful is None or parts.trainer.step_count <= harmful.above or parts.source.base is not None:
            return
        if self._erasure.knows_erased(live):
            return
        if await parts.ancestry.clean_from(harmful) is None:
            logger.warning("what came after v%d was taken back: training goes back to %s", harmful.above, live)
            parts.source.base = live

    async def may_learn(self) -> bool:
        """Return False while the trainer is as far ahead of the live version as allowed.

        Goes back to the live version if every newer one was refused or the training builds on a withdrawn version. Before waiting, the
        newest version is offered as a candidate even if none is due; otherwise nothing could ever let the trainer continue.
        """
        parts = self.parts
        live = await parts.released.refresh()
        if purged := await self._erasure.purge(live):
            logger.info("deleted what knew forgotten people: %s", purged)
        await self._leave_withdrawn(live)
        if parts.source.base is not None:
            return True  # the next step starts from that version
        if self._settings.source == "worlds":
            return True  # rollouts follow the newest version, whatever is live
        ahead = parts.desk.lineage.lag(parts.trainer.step_count, live.number)
        # one step further, and every turn of the live version would be too stale to be learned from
        if ahead < min(self._settings.max_lead, max(self._run.config.reward.max_staleness, 1)):
            return True
        await self._settle()
        newest = parts.candidates.last
        erased = self._erasure.knows_erased(live)
        if not erased and (newest is None or newest.hash == live.hash):
            logger.warning("every step since %s was refused: training goes back to it", live)
            parts.source.base = live
            return True
        await parts.candidates.offer()
        if not erased and newest is not None and newest.hash in (await parts.releases.refresh()).refused:
            logger.warning("%s was refused and %s is live: training goes back to it", newest, live)
            parts.source.base = live
            return True
        what = "a verdict on" if self._run.config.evaluate.suite and not erased else "`ostinato ship`, to go on from"
        self._pulse.begin(f"waiting for {what} {newest}, {ahead} steps ahead of {live}")
        return False


async def train(config: Config, context: WorkerContext) -> None:
    """Train until told to stop. Raises what `run_in_role` raises."""
    if config.train.ranks > 1:
        return_freed_memory()  # must precede torch's first tensor, in the contract below
    torch.set_num_threads(config.train.threads)
    cleaning_s = max(_MIN_CLEANING_S, config.supervise.stop_s - _EXIT_RESERVE_S)
    await run_in_role(config, context, "train", lambda run: unless(context.stopping, _train(run, context), cleaning_s))


async def _train(run: Run, context: WorkerContext) -> None:
    """Open the reward functions, then learn. Their errors are reported before the model is loaded."""
    asker, late = asker_of(run.config.reward), late_asker_of(run.config.reward)
    try:
        context.starting(run.config)("loading the reward function")
        await asker.open()
        # only a check that it loads: from now on its failures raise an alarm and do not end the trainer
        if late is not None:
            await late.open()
            await late.close()  # the desk opens it when a late reward is due
        await _learn(run, context, asker, late)
    finally:
        await asker.close()
        if late is not None:
            await late.close()


async def _learn(run: Run, context: WorkerContext, asker: Asker, late: Asker | None) -> None:
    config, say = run.config, context.starting(run.config)
    path = await prepare(run, say)
    check_memory(config, path, ("train",), process_limit(), trained_in(config).itemsize)
    say("loading the model")
    live = await run.follower.resolve("live")
    assert live is not None
    with announced(say):
        contract = await asyncio.to_thread(trainer_contract, config)
    logger.info("numerics contract %s (%s)", contract.id, contract.mode)
    progress = Progress(run.home.progress("train"), kept_bytes(config))

    def build() -> Learning:
        torch.set_num_threads(config.train.threads)
        return open_learning(
            run,
            path,
            live,
            contract,
            on_learned=progress.learned,
            on_published=progress.published,
            asker=asker,
            late_asker=late,
        )

    worker = TrainWorker(run, await asyncio.to_thread(build), progress, context.pulse)
    try:
        say("resuming from the last checkpoint")
        await worker.resume()
        while True:
            await worker.learn()
    finally:
        try:
            await worker.finish()
        finally:
            await worker.parts.candidates.close()
            await worker.parts.desk.close()
