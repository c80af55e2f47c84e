"""The training worker: rewards, credit, optimizer steps, publication; replays what a killed one had begun."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator
from dataclasses import replace

import torch

from ostinato.app.learning import Learning, open_learning
from ostinato.app.numerics import trainer_contract
from ostinato.app.storage import Run, home, open_run
from ostinato.config import Config
from ostinato.core.errors import BadWeights, NoSignal
from ostinato.launch.views.progress import Progress
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.stopping import until, until_stopped
from ostinato.loop import step
from ostinato.record.lock import hold
from ostinato.train import checkpoint

logger = logging.getLogger(__name__)


class TrainWorker:
    """Learns, stores versions, writes checkpoints; goes back when all that is newer than the live release was refused.

    `parts` is what it was built of.
    """

    def __init__(self, run: Run, learning: Learning, progress: Progress) -> None:
        self.parts, self._run, self._progress = learning, run, progress
        self._settings = run.config.learn

    async def resume(self) -> None:
        """Load the last checkpoint and take the recorded steps after it again, with the recorded credits."""
        parts = self.parts
        found = await asyncio.to_thread(checkpoint.load, self._run.home.checkpoints)
        if found is not None:
            parts.trainer.restore(found)
            logger.info("resumed at step %d", found.step)
        parts.candidates.last = await parts.released.candidate() or parts.released.live
        async for batch in parts.desk.history(parts.trainer.step_count):
            logger.info("taking recorded step %d again", batch.row.step)
            with self._refusals():
                await parts.stored.begin(await parts.learner.trainer.step(batch))
        with self._refusals():
            await parts.stored.settle()

    async def learn(self) -> None:
        """One step, stored beside the next, if the trainer may go on; then a checkpoint, if one is due."""
        parts = self.parts
        if not await self.may_learn():
            await parts.desk.poll()
            await asyncio.sleep(self._settings.poll_s)
            return
        with self._refusals():
            await parts.stored.begin(await step(parts.learner))
            if parts.trainer.step_count % self._settings.checkpoint_every == 0:
                await parts.stored.settle()  # what a checkpoint is past is never published again
                state = replace(parts.trainer.state(), cursor=self._run.log.newest())
                await asyncio.to_thread(checkpoint.save, self._run.home.checkpoints, state)
                await parts.desk.save()

    @contextlib.contextmanager
    def _refusals(self) -> Generator[None]:
        """A batch that teaches nothing is said aloud, never skipped in silence."""
        try:
            yield
        except (NoSignal, BadWeights) as error:
            count = self.parts.trainer.step_count
            logger.warning("after step %d: refused: %s", count, error)
            self._progress.write("refused", step=count, why=str(error))

    async def may_learn(self) -> bool:
        """False while the trainer is as far ahead of what is live as allowed; goes back when all that is newer was refused."""
        parts = self.parts
        live = await parts.released.refresh()
        if parts.desk.lineage.lag(parts.trainer.step_count, live.number) < self._settings.max_lead:
            return True
        with self._refusals():
            await parts.stored.settle()
        state = await parts.releases.refresh()
        newest = await parts.released.candidate()
        if newest is not None and newest.hash in state.refused:
            logger.warning("%s was refused and %s is live: training goes back to it", newest, live)
            parts.source.base = live
            return True
        return False


async def train(config: Config) -> None:
    """Train until told to stop. Raises Conflict if the run is trained already."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(config.train.threads)
    with hold(home(config).root, "train"), open_run(config) as run:
        path = await prepare(run, logger.info)
        stopping = until_stopped()
        live = await run.follower.resolve("live")
        assert live is not None
        contract = trainer_contract(config)
        logger.info("numerics contract %s (%s)", contract.id, contract.mode)
        progress = Progress(run.home.progress("train"))
        learning = open_learning(
            run, path, live, contract, on_learned=progress.learned, on_published=progress.published
        )
        await until(stopping, _work(TrainWorker(run, learning, progress)))


async def _work(worker: TrainWorker) -> None:
    try:
        await worker.resume()
        while True:
            await worker.learn()
    finally:
        await worker.parts.desk.close()
