"""The loop as it is told (`loop.cycle`) and as it runs (workers) write the same log; a trainer whose candidates are refused goes back."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.app.evaluation import open_releases, open_suite
from ostinato.app.numerics import trainer_contract
from ostinato.app.storage import Run, model_path, open_run
from ostinato.app.trainer import open_learning
from ostinato.config import Config, load
from ostinato.core.clock import wall_clock
from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadConfig
from ostinato.core.records import (
    Arm,
    Batch,
    Finish,
    Holdback,
    PolicyVersion,
    ReleaseEvent,
    Reward,
    Sampling,
    Signal,
    Source,
    Span,
    Turn,
)
from ostinato.core.report import ItemScore
from ostinato.core.weights import Learned
from ostinato.evaluate.evaluation import Evaluation
from ostinato.launch.commands.weights import replay
from ostinato.launch.placing.heartbeat import Heartbeat
from ostinato.launch.views.progress import Progress
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.train import TrainWorker
from ostinato.loop import Prover, cycle
from ostinato.model.renderer import HFRenderer
from ostinato.run_directory import EVALUATION_REF
from ostinato.testing.tiny import tiny_model
from ostinato.weights.version.content import weights_root

BATCH = 8


def config_at(directory: Path) -> Config:
    return load(
        None,
        [
            f"run.directory='{directory / 'run'}'",
            f"model.source='{directory.parent / 'model'}'",
            "model.dtype='float32'",
            "train.compute='fp32'",
            "train.publish='fp32'",
            "train.learning_rate=1e-3",
            "reward.max_staleness=50",
            "reward.options={window=30.0}",
            f"learn.batch={BATCH}",
            "learn.publish_every=1",
            "learn.max_lead=2",
            "learn.checkpoint_every=100",
            "evaluate.suite=demo",
            "evaluate.gate.candidates_per_week=56",  # not by the seconds between two candidates, which differ
            "evaluate.gate.margin=0.2",
            "evaluate.gate.total_margin=0.2",
        ],
    )


def served(number: int, policy) -> tuple[Turn, Signal]:
    """A turn that ended an hour ago, and what its simulated user did."""
    rng = np.random.default_rng(number)
    ids = tuple(rng.integers(0, 256, 5).tolist())
    at = wall_clock() - 3600 + number
    turn = Turn(
        id=f"t{number}:0", episode=f"e{number}", parent=None, user=f"sim-{number % 5}", tenant="default", arm=Arm.LIVE,
        propensity=1.0, prompt_ids=tuple(rng.integers(0, 256, 6).tolist()), sampled_ids=ids, logprobs=(-5.5,) * 5,
        spans=(Span(policy=policy, tokens=5),), sampling=Sampling(max_tokens=5), finish=Finish.LENGTH, text="", started_at=at, ended_at=at,
    )  # fmt: skip
    name = "accepted" if ids[0] % 2 else "rejected"
    signal = Signal(
        id=f"s{number}", turn=turn.id, name=name, value=1.0, source=Source.HUMAN, occurred_at=at, received_at=at
    )
    return turn, signal


class Scores:
    """A runner that needs no gateway: even versions are better."""

    def __init__(self, config: Config) -> None:
        self.suite = open_suite(config).suite

    async def run(self, slot, policy, draws, items=None, *, seed=0):
        better = float(policy.number % 2 == 0)
        return [ItemScore(item=item.id, draw=draw, score=better) for item in items for draw in draws]


@pytest.fixture
async def seeded(tmp_path):
    """Two copies of one run: a log with three batches' worth of matured turns, version 0 live."""
    tiny_model(tmp_path / "model")
    first = config_at(tmp_path / "a")
    with open_run(first) as run:
        await prepare(run, lambda _: None)
        base = await run.follower.resolve("base")
        for number in range(3 * BATCH):
            await run.log.append(*served(number, base))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return first, config_at(tmp_path / "b"), base


def worker_of(run: Run, live: PolicyVersion) -> TrainWorker:
    progress = Progress(run.home.progress("train"))
    learning = open_learning(
        run,
        model_path(run.config),
        live,
        trainer_contract(run.config),
        on_learned=progress.learned,
        on_published=progress.published,
    )
    return TrainWorker(run, learning, progress, Heartbeat())


def evaluation(config: Config) -> Evaluation:
    return Evaluation([Scores(config)], config.evaluate.gate, candidate_slot=EVALUATION_REF)


async def history(log) -> list:
    """What was decided, without the times at which it was."""
    kinds = {Batch, Reward, Holdback, ReleaseEvent}
    found = []
    async for _, row in log.read(0, kinds):
        if isinstance(row, Batch):
            found.append((row.step, row.turns, row.credits, row.reference, row.base))
        elif isinstance(row, ReleaseEvent):
            found.append((row.action, row.policy, row.previous, row.reason))
        else:
            found.append(row)
    return found


async def test_the_told_loop_and_the_workers_write_the_same_log(seeded):
    told, worked, base = seeded
    with open_run(told) as run:
        worker = worker_of(run, base)
        judge = evaluation(told)
        releases = open_releases(run, judge)
        await releases.bootstrap(base)
        for _ in range(3):
            await cycle(worker.parts.learner, Prover(evals=judge, releases=releases))
        as_told = await history(run.log)
    with open_run(worked) as run:
        worker = worker_of(run, base)
        await worker.resume()
        controller = open_releases(run, evaluation(worked))
        for _ in range(3):
            await worker.learn()
            await worker.parts.stored.settle()  # the release worker looks until there is a candidate
            await controller.step()
        as_worked = await history(run.log)
    assert as_told == as_worked
    actions = [row[0] for row in as_told if isinstance(row, tuple) and isinstance(row[0], str)]
    assert actions.count("evaluated") == 3
    assert {"shipped", "blocked"} <= set(actions)


async def test_a_trainer_goes_back_when_all_that_is_newer_was_refused(seeded):
    config, _, base = seeded
    with open_run(config) as run:
        worker = worker_of(run, base)
        parts = worker.parts
        await worker.resume()
        await worker.learn()
        await worker.learn()
        await parts.stored.settle()
        assert parts.trainer.step_count == 2
        assert not await worker.may_learn(), "as far ahead as allowed, and the gate has not spoken"
        newest = await run.follower.resolve("candidate")
        await open_releases(run).ledger.append("blocked", newest, base, "test")
        await worker.learn()
        await parts.stored.settle()
        batches = [row async for _, row in run.log.read(0, {Batch})]
        assert [batch.base for batch in batches] == [None, None, base]
        assert parts.desk.lineage.lag(3, base.number) == 1
        published = (await run.follower.resolve("candidate")).hash

        again = worker_of(run, base)
        await again.resume()
        assert again.parts.trainer.step_count == 3
        assert again.parts.candidates.last.hash == published, "a restarted trainer goes back alike"
        assert (await replay(run, model_path(config)))[3] == published


def rarely(config: Config, **learn) -> Config:
    """A trainer that would publish only every eighth step, but may be two steps ahead at most."""
    return config.model_copy(update={"learn": config.learn.model_copy(update={"publish_every": 8, **learn})})


async def test_steps_with_hints_are_taken_again_to_the_bit_and_a_forgotten_persons_hints_go(tmp_path):
    """A comment is encoded by the model's tokenizer behind the turn's own prompt, and read by the weights of the step."""
    renderer = HFRenderer(tiny_model(tmp_path / "model"))
    config = config_at(tmp_path / "a")
    hints = config.reward.hints.model_copy(update={"weight": 1.0})
    rewards, log = config.reward.model_copy(update={"hints": hints}), load(None, ["record.encrypt='user'"]).record
    config = config.model_copy(update={"reward": rewards, "record": log})
    with open_run(config) as run:
        await prepare(run, lambda _: None)
        base = await run.follower.resolve("base")
        for number in range(2 * BATCH):
            turn, signal = served(number, base)
            asked = Conversation(messages=(Message(role=Role.USER, text=f"Question {number}?"),))
            comment = "Say seven." if signal.name == "rejected" else None
            turn = replace(turn, prompt_ids=tuple(renderer.chat(asked)))
            await run.log.append(turn, replace(signal, comment=comment))
        worker = worker_of(run, base)
        await worker.resume()
        desk, learned = worker.parts.desk, list[Learned]()
        for step in (1, 2):
            made = await desk.batch(step, BATCH, base)
            assert made is not None
            learned.append(await worker.parts.learner.trainer.step(made))
        assert all(each.metrics["hints"] >= 1.0 for each in learned)
        roots = {each.step: weights_root(each.weights) for each in learned}
        assert await replay(run, model_path(config)) == roots
        batches = [row async for _, row in run.log.read(0, {Batch})]
        assert [len(batch.hints) for batch in batches] == [each.metrics["hints"] for each in learned]
        await run.log.forget("default", "sim-1")
        samples = [sample async for made in desk.history() for sample in made.samples]
        theirs = {sample.turn.id for sample in samples if sample.turn.redacted}
        left = [sample.turn.id for sample in samples if sample.hinted]
        named = [hint.turn for batch in batches for hint in batch.hints]
        assert theirs & set(named)
        assert left == [turn for turn in named if turn not in theirs]


async def test_a_trainer_that_must_wait_offers_what_it_learned(seeded):
    config, _, base = seeded
    with open_run(rarely(config)) as run:
        worker = worker_of(run, base)
        await worker.resume()
        await worker.learn()
        await worker.learn()
        await worker.parts.stored.settle()
        assert await run.follower.resolve("candidate") is None, "the eighth step is far away"
        assert not await worker.may_learn()
        offered = await run.follower.resolve("candidate")
        assert offered is not None
        assert offered.number == 2
        await open_releases(run).ship(offered, "test", actor="test")
        assert await worker.may_learn()


async def test_one_killed_before_it_could_offer_offers_after_its_restart(seeded):
    config, _, base = seeded
    with open_run(rarely(config, checkpoint_every=2)) as run:
        worker = worker_of(run, base)
        await worker.resume()
        await worker.learn()
        await worker.learn()
        learned = worker.parts.candidates.last
        assert await run.follower.resolve("candidate") is None
        again = worker_of(run, base)
        await again.resume()
        assert again.parts.trainer.step_count == 2, "nothing is taken again after a checkpoint"
        assert not await again.may_learn()
        assert again.parts.source.base is None, "what was learned is not thrown away"
        assert await run.follower.resolve("candidate") == learned


async def test_a_checkpoint_that_is_newer_than_the_log_is_refused_before_a_step_is_taken(seeded):
    later, restored, base = seeded
    with open_run(rarely(later, checkpoint_every=2)) as run:
        worker = worker_of(run, base)
        await worker.resume()
        await worker.learn()
        await worker.learn()
        checkpoints = run.home.checkpoints
    with open_run(restored) as run:  # as after pg_restore, or a log that was put back by hand
        shutil.copytree(checkpoints, run.home.checkpoints)
        with pytest.raises(BadConfig, match=r"holds step 2, and the log's last batch is of step 0: restore a newer"):
            await worker_of(run, base).resume()
        assert not [row async for _, row in run.log.read(0, {Batch})]


def forgetful(config: Config, max_staleness: int) -> Config:
    """A trainer that may be far ahead, and learns from what few steps ago made."""
    reward = config.reward.model_copy(update={"max_staleness": max_staleness})
    return rarely(config, max_lead=8).model_copy(update={"reward": reward})


async def held_back(run: Run) -> list[str]:
    return [row.reason async for _, row in run.log.read(0, {Holdback})]


async def test_a_trainer_waits_before_all_that_live_makes_is_too_old(seeded):
    config, _, base = seeded
    with open_run(forgetful(config, 2)) as run:
        worker = worker_of(run, base)
        await worker.resume()
        for _ in range(5):
            await worker.learn()
        assert worker.parts.trainer.step_count == 2
        assert await held_back(run) == []


async def test_a_trainer_that_waits_for_turns_sees_a_rollback(seeded):
    """What live makes after it is learned from, however few turns were there when it came."""
    config, _, base = seeded
    with open_run(forgetful(config, 2)) as run:
        worker = worker_of(run, base)
        await worker.resume()
        for _ in range(2):
            await worker.learn()
        await worker.parts.stored.settle()
        assert not await worker.may_learn()
        releases = open_releases(run)
        await releases.ship(await run.follower.resolve("candidate"), "test", actor="test")
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            for _ in range(3):  # the third finds nothing, and does not wait for it
                await worker.learn()
        assert worker.parts.trainer.step_count == 3
        await releases.rollback(None, "test", actor="test")
        for number in range(3 * BATCH, 4 * BATCH):
            await run.log.append(*served(number, base))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while worker.parts.trainer.step_count < 4:
                await worker.learn()
        batches = [row async for _, row in run.log.read(0, {Batch})]
        assert batches[-1].base == base
        assert await held_back(run) == []


async def test_a_trainer_whose_steps_were_all_refused_does_not_wait_for_ever(seeded):
    config, _, base = seeded
    with open_run(rarely(config)) as run:
        worker = worker_of(run, base)
        await worker.resume()
        for _ in range(config.learn.max_lead):
            worker.parts.trainer.skip_step()
        assert await worker.may_learn()
        assert worker.parts.source.base == base
        assert await run.follower.resolve("candidate") is None, "there is nothing to offer"
