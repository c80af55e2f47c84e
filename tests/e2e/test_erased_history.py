"""What was erased while a trainer was down is not trained on again under the numbers of versions that were published with it."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from rich.console import Console
from tests.deadlines import WHOLE_PROGRAM_S
from tests.e2e.test_cycle import config_at, served, worker_of

from ostinato.app.roles import open_roles
from ostinato.app.storage import open_run
from ostinato.config import Config, load
from ostinato.core.errors import StorageFull
from ostinato.core.records import Batch, Turn
from ostinato.launch.commands.erasure import await_checkpoint
from ostinato.launch.commands.log import forget
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.train import TrainWorker
from ostinato.status.progress_lines import Lines
from ostinato.testing.tiny import tiny_model
from ostinato.train.checkpoint import newest_step
from ostinato.weights.version.content import weights_root

GONE = "sim-3"


@pytest.fixture
async def config(tmp_path: Path) -> Config:
    """A run whose texts lie under a key for each user, with four batches of turns, and a checkpoint after every second."""
    tiny_model(tmp_path / "model")
    made = config_at(tmp_path / "a")
    made = made.model_copy(
        update={
            "record": load(None, ["record.encrypt='user'"]).record,
            "learn": made.learn.model_copy(update={"checkpoint_every": 2, "max_lead": 50}),
        }
    )
    with open_run(made) as run:
        await prepare(run, lambda _: None)
        base = await run.follower.resolve("base")
        assert base is not None
        for number in range(40):
            await run.log.append(*served(number, base))
    return made


@contextlib.asynccontextmanager
async def at_work(config: Config):
    """A trainer that has resumed; left as a killed one is, with whatever it stored."""
    with open_run(config) as run:
        live = await run.follower.resolve("live")
        assert live is not None
        worker = worker_of(run, live)
        await worker.resume()
        yield worker
        await worker.parts.stored.settle()


async def train(worker: TrainWorker, steps: int) -> None:
    while worker.parts.trainer.step_count < steps:
        await worker.learn()


def published(config: Config) -> dict[int, str]:
    """Number -> root of everything that was published. Fails for a number with two roots."""
    found: dict[int, str] = {}
    for line in Lines(config.run.directory / "train.jsonl").new():
        if line["kind"] == "published":
            assert found.setdefault(line["number"], line["hash"]) == line["hash"], "one number, two versions"
    return found


async def bases(config: Config) -> list[int | None]:
    with open_run(config) as run:
        return [row.base and row.base.number async for _, row in run.log.read(0, {Batch}) if isinstance(row, Batch)]


async def test_a_step_with_erased_turns_is_not_repeated_and_training_goes_on_from_what_was_published(config):
    async with at_work(config) as worker:
        await train(worker, 3)
    before = published(config)
    assert newest_step(config.run.directory / "checkpoints") == 2
    with open_run(config) as run:
        turns = [(turn,) for turn in (await run.log.find(Batch, [(3,)]))[0].turns]
        assert any(turn.user == GONE for turn in await run.log.find(Turn, turns)), (
            "the case: a turn of theirs in step 3"
        )
        await run.log.forget("default", GONE)
    async with at_work(config) as worker:
        assert published(config) == before, "nothing else under a number that has been published"
        assert weights_root(worker.parts.trainer.weights()) == before[3], "from the version that has the turns"
        assert worker.parts.trainer.step_count == 4
        await train(worker, 5)
    assert await bases(config) == [None, None, None, 3, None]
    assert set(published(config)) == {*before, 5}
    root = published(config)[5]
    async with at_work(config) as worker:
        assert (worker.parts.trainer.step_count, worker.parts.candidates.last.hash) == (5, root)
    assert await bases(config) == [None, None, None, 3, None], "decided once"


async def test_a_step_that_gives_other_weights_under_changed_settings_is_not_published_under_its_number(config, caplog):
    """After a restart with another learning rate a number named two versions, and turns of one passed for the other's."""
    async with at_work(config) as worker:
        await train(worker, 3)
    before = published(config)
    slower = config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": 5e-4})})
    async with at_work(slower) as worker:
        assert published(config) == before
        assert weights_root(worker.parts.trainer.weights()) == before[3], "from the newest version that was published"
        assert "recorded step 3 gives other weights than were published with its number" in caplog.text
        await train(worker, 5)
    assert await bases(config) == [None, None, None, 3, None]
    assert set(published(config)) == {*before, 5}
    async with at_work(slower) as worker:
        assert worker.parts.trainer.step_count == 5
    assert await bases(config) == [None, None, None, 3, None], "decided once"


async def test_a_trainer_killed_while_it_decides_decides_the_same_again(config, monkeypatch):
    async with at_work(config) as worker:
        await train(worker, 3)
    before = published(config)
    with open_run(config) as run:
        await run.log.forget("default", GONE)

    async def full(_: TrainWorker) -> None:
        raise StorageFull("no checkpoint")

    with monkeypatch.context() as patched:
        patched.setattr(TrainWorker, "_checkpoint", full)
        for _ in range(2):
            with pytest.raises(StorageFull):
                async with at_work(config):
                    pass
    async with at_work(config) as worker:
        assert weights_root(worker.parts.trainer.weights()) == before[3]
    assert await bases(config) == [None, None, None, 3]
    assert published(config) == before


async def test_a_step_whose_turns_are_all_there_is_repeated_as_before(config):
    async with at_work(config) as worker:
        await train(worker, 3)
    before = published(config)
    with open_run(config) as run:
        await run.log.forget("default", "nobody")
    async with at_work(config) as worker:
        assert worker.parts.trainer.step_count == 3
        assert weights_root(worker.parts.trainer.weights()) == before[3]


async def test_forget_has_the_running_trainer_write_a_checkpoint_first(config):
    async with at_work(config) as worker:
        await train(worker, 3)
        root, held = weights_root(worker.parts.trainer.weights()), open_roles(config).take("train")
        forgetting = asyncio.create_task(forget(config, "default", GONE, Console(quiet=True), wait_s=WHOLE_PROGRAM_S))
        while not forgetting.done():
            await worker._checkpoint_if_wanted()
            await asyncio.sleep(0)
        held.close()
        await forgetting
    assert newest_step(config.run.directory / "checkpoints") == 3
    async with at_work(config) as worker:
        assert (worker.parts.trainer.step_count, weights_root(worker.parts.trainer.weights())) == (3, root)
    assert await bases(config) == [None] * 3


async def test_forget_says_what_is_in_no_checkpoint_if_nobody_writes_one(config):
    async with at_work(config) as worker:
        await train(worker, 3)
    assert "no trainer is up, and steps 3 to 3" in await await_checkpoint(config, wait_s=0.0)
    held = open_roles(config).take("train")
    assert "no checkpoint within 0 s, and steps 3 to 3" in await await_checkpoint(config, wait_s=0.0)
    held.close()
    assert not (config.run.directory / "checkpoint.wanted").exists()
