"""The training worker: rewards, credit, optimizer steps, publication; replays what a killed one had begun."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import torch

from ostinato import app
from ostinato.config import Config
from ostinato.core.errors import BadWeights, NoSignal
from ostinato.core.records import PolicyVersion
from ostinato.launch.prepare import prepare, run_name
from ostinato.launch.progress import Progress
from ostinato.launch.stopping import until, until_stopped
from ostinato.loop import Learner, step
from ostinato.publish.content import weights_root
from ostinato.publish.publisher import Publisher
from ostinato.record.lock import hold
from ostinato.release.ledger import Ledger
from ostinato.train import checkpoint
from ostinato.train.trainer import PolicyTrainer

logger = logging.getLogger(__name__)


class TrainWorker:
    """The trainer and everything around it."""

    def __init__(self, config: Config, path: Path, log: app.SqlLog, live: PolicyVersion) -> None:
        self.config = config
        self.place = app.home(config)
        self.log = log
        contract = app.trainer_contract(config)
        logger.info("numerics contract %s (%s)", contract.id, contract.mode)
        self.trainer = PolicyTrainer(path, config.train, contract)
        self.desk = app.open_desk(config, log, contract)
        self.releases = Ledger(log, app.wall_clock)
        self.follows = app.Follows(app.Follower(app.open_store(config), config.follow), live)
        self.source = app.DeskSource(self.desk, config, self.follows)
        self.progress = Progress(self.place.root / "train.jsonl")
        settings = config.publish.model_copy(update={"scratch": config.publish.scratch or self.place.root})
        self.candidates = app.Candidates(
            Publisher(app.open_store(config), settings),
            run_name(config),
            config.learn.publish_every,
            self.progress.published,
            numerics=contract.id,
        )
        self.stored = app.Overlapped(self.candidates)
        self.learner = Learner(
            source=self.source,
            rewards=self.source,
            trainer=app.ThreadedTrainer(self.trainer, self.source, self.follows, self.progress.learned),
            publisher=self.candidates,
        )

    async def resume(self) -> None:
        """Load the last checkpoint and take the recorded steps after it again, with the recorded credits."""
        found = await asyncio.to_thread(checkpoint.load, self.place.checkpoints)
        if found is not None:
            self.trainer.restore(found)
            self.source.step = found.step
            logger.info("resumed at step %d", found.step)
        self.candidates.last = await self.follows.follower.resolve("candidate") or self.follows.live
        async for batch, samples in self.desk.history(self.source.step):
            self.source.batch = batch
            logger.info("taking recorded step %d again", batch.step)
            with self.refusals():
                await self.stored.begin(await self.learner.trainer.step(samples))
        with self.refusals():
            await self.stored.settle()

    async def learn(self) -> None:
        """One step, stored beside the next, if the trainer may go on; then a checkpoint, if one is due."""
        if not await self.may_learn():
            await self.desk.poll()
            await asyncio.sleep(self.config.learn.poll_s)
            return
        with self.refusals():
            await self.stored.begin(await step(self.learner))
            if self.source.step % self.config.learn.checkpoint_every == 0:
                await self.stored.settle()  # what a checkpoint is past is never published again
                state = replace(self.trainer.state(), cursor=self.log.newest())
                await asyncio.to_thread(checkpoint.save, self.place.checkpoints, state)

    @contextlib.contextmanager
    def refusals(self) -> Generator[None]:
        """A batch that teaches nothing is said aloud, never skipped in silence."""
        try:
            yield
        except (NoSignal, BadWeights) as error:
            logger.warning("after step %d: refused: %s", self.source.step, error)
            self.progress.write("refused", step=self.source.step, why=str(error))

    async def may_learn(self) -> bool:
        """False while the trainer is as far ahead of what is live as allowed; goes back when all that is newer was refused."""
        live = await self.follows.refresh()
        if self.desk.lineage.lag(self.source.step, live.number) < self.config.learn.max_lead:
            return True
        with self.refusals():
            await self.stored.settle()
        state = await self.releases.refresh()
        newest = await self.follows.follower.resolve("candidate")
        if newest is not None and newest.hash in state.refused:
            logger.warning("%s was refused and %s is live: training goes back to it", newest, live)
            self.source.base = live
            return True
        return False


async def train(config: Config) -> None:
    """Train until told to stop. Raises Conflict if the run is trained already."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(config.train.threads)
    place = app.home(config)
    with hold(place.root, "train"):
        path = await prepare(config, logger.info)
        stopping = until_stopped()
        with app.open_log(config) as log:
            live = await app.Follower(app.open_store(config), config.follow).resolve("live")
            assert live is not None
            worker = TrainWorker(config, path, log, live)
            await until(stopping, _work(worker))


async def _work(worker: TrainWorker) -> None:
    await worker.resume()
    while True:
        await worker.learn()


async def replay(config: Config, path: Path, log: app.SqlLog) -> dict[int, str]:
    """Take every recorded step again, from the starting model, and return step -> root of its weights.

    Needs the same machine type, torch and thread count to give the same bits. Nothing is written.
    """
    torch.set_num_threads(config.train.threads)
    trainer = PolicyTrainer(path, config.train, app.trainer_contract(config))
    base = await app.Follower(app.open_store(config), config.follow).resolve("base")
    assert base is not None
    follows = app.Follows(app.Follower(app.open_store(config), config.follow), base)
    source = app.DeskSource(app.open_desk(config, log), config, follows)
    stepper = app.ThreadedTrainer(trainer, source, follows, lambda _: None)
    roots: dict[int, str] = {}
    async for batch, samples in app.open_desk(config, log).history():
        source.batch = batch
        with contextlib.suppress(NoSignal, BadWeights):  # refused then, refused now
            roots[batch.step] = weights_root((await stepper.step(samples)).weights)
    return roots
