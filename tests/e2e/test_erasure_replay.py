"""Trained again without a person: the weights have the bits of a training on a log that never held them, and nothing less has."""

import asyncio
import copy
import json
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.e2e.test_cycle import config_at, served, worker_of

from ostinato.app import erasure
from ostinato.app.erasure import ErasureFiles, ErasureReplay, ErasureRequest, OwnVersions, open_refold
from ostinato.app.numerics import trainer_contract, training
from ostinato.app.storage import model_path, open_run
from ostinato.app.trainer import ModelTokens
from ostinato.config import Config, load
from ostinato.core.errors import BadConfig, Corrupt, NoSignal, NotFound
from ostinato.core.records import Batch, PolicyVersion, Reward, SteeringBasis, Turn
from ostinato.core.steering import Basis, Steered
from ostinato.launch.commands.erasure import show_plan, verify
from ostinato.launch.commands.log import forget
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.train import TrainWorker
from ostinato.reward.pipeline import RewardDesk, training_batch
from ostinato.run_directory import Home, Run
from ostinato.testing.tiny import tiny_model
from ostinato.train.checkpoint import ALL, step_of, stored
from ostinato.train.checkpoint import load as load_checkpoint
from ostinato.train.references import References
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.follower import versions_between
from ostinato.weights.publish.publisher import Candidates
from ostinato.weights.version.certificate import check_erasure, read_certificate, read_rows
from ostinato.weights.version.content import weights_root
from ostinato.weights.version.signing import Signer

GONE, FIRST, STEPS = "ann", 3, 9
"""Who is erased, the first step that learns from them, and how many steps there are."""
GONE_TURNS = {f"t{number}:0" for number in range(8 * (FIRST - 1), 8 * STEPS) if number % 4 == 3}


@asynccontextmanager
async def at_work(config: Config) -> AsyncIterator[TrainWorker]:
    with open_run(config) as run:
        live = await run.follower.resolve("live")
        worker = worker_of(run, live)
        await worker.resume()
        yield worker
        await worker.parts.stored.settle()


async def release(run: Run) -> None:
    """Make the newest version live."""
    newest, before = await run.follower.resolve("candidate"), await run.store.read_ref("live")
    await run.store.move_ref("live", before, newest.hash)


BASIS = Basis(
    names=("brief",),
    tokens_M=np.arange(9),
    directions_KM=np.linspace(-1, 1, 9, dtype=np.float32)[None],
    weights="0" * 64,
)
STEERED = Steered(basis=BASIS.hash, dials=(0.5,), cap=0.1, budget=3.0, tokens=5, kl=0.1, features=(0.2,))


async def trained_run(directory: Path, steps: int = STEPS, **train: float) -> Config:
    """A run of so many steps, with a release after every second, so that batches name versions which knew the person. `train`: settings."""
    tiny_model(directory / "model")
    made = config_at(directory / "a")
    learn = {"checkpoint_every": 2, "keep_checkpoints": 90, "max_lead": 50}
    config = made.model_copy(
        update={
            "record": load(None, ["record.encrypt='user'"]).record,
            "learn": made.learn.model_copy(update=learn),
            "train": made.train.model_copy(
                update={"min_ess": 0.0, "max_k3": 9.0, "mean_weight": 99.0, "anchor_limit": 99.0, **train}
            ),
        }
    )
    with open_run(config) as run:
        await prepare(run, lambda _: None)
        base = await run.follower.resolve("base")
        worker = worker_of(run, base)
        await worker.resume()
        await run.log.append(SteeringBasis.of(BASIS, at=1.0))
        numbers = iter(range(16 * steps))
        sampler = base
        for step in range(1, steps + 1):
            if step % 20 == 1:  # or turns would be too old to be learned from
                sampler = await run.follower.resolve("live")
            while worker.parts.trainer.step_count < step:
                # eight equal rewards are held back, and eight other turns come
                some = [*islice(numbers, 8)]
                assert some, f"step {step} was not taken"
                for number in some:
                    turn, signal = served(number, sampler)
                    turn = replace(turn, steered=STEERED if number % 8 == 1 else None)
                    user = GONE if step >= FIRST and number % 4 == 3 else f"u{number % 3}"
                    opposite = {"accepted": "rejected", "rejected": "accepted"}[signal.name]
                    await run.log.append(
                        replace(turn, user=user), replace(signal, name=opposite) if user == GONE else signal
                    )
                await worker.learn()
                await worker.parts.stored.settle()
            if step % 2 == 0:
                await release(run)
        await worker._checkpoint()
    return config


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Config:
    return asyncio.run(trained_run(tmp_path_factory.mktemp("erasure")))


def copied(config: Config, directory: Path) -> Config:
    """A copy of a run."""
    shutil.copytree(config.run.directory, directory / "run")
    return config.model_copy(update={"run": config.run.model_copy(update={"directory": directory / "run"})})


async def forgotten(config: Config) -> Config:
    """The run, whose person is forgotten now and to be taken out of the weights."""
    with open_run(config) as run:
        upto = await run.log.forget("default", GONE)
        ErasureFiles(run.home).request(ErasureRequest(tenant="default", user=GONE, upto=upto))
    return config


@pytest.fixture
async def config(original, tmp_path) -> Config:
    """A copy of the run, whose person is forgotten and to be taken out of the weights."""
    return await forgotten(copied(original, tmp_path))


@pytest.fixture(scope="module")
def truth(original, tmp_path_factory) -> dict[int, str]:
    """What training on the log without the person comes to: step -> root."""

    async def found() -> dict[int, str]:
        config = await forgotten(copied(original, tmp_path_factory.mktemp("truth")))
        return await plainly(config, credits_anew=True, own_references=True)

    torch.set_num_threads(1)
    return asyncio.run(found())


@pytest.fixture(scope="module")
def once_replayed(original, tmp_path_factory) -> Config:
    """A run whose person was taken out; the version that came of it is not live yet."""

    async def done() -> Config:
        config = await forgotten(copied(original, tmp_path_factory.mktemp("replayed")))
        await resumed(config)
        return config

    return asyncio.run(done())


@pytest.fixture
def replayed(once_replayed, tmp_path) -> Config:
    """A copy of that run, for what comes later."""
    return copied(once_replayed, tmp_path)


async def plainly(
    config: Config,
    *,
    credits_anew: bool,
    own_references: bool,
    first: int = FIRST,
    user: str = GONE,
    heads: list[bytes] | None = None,
) -> dict[int, str]:
    """Training on the log without the person from the last checkpoint before them, step by step and in memory: step -> root. `heads` gets
    the states of the value heads.
    """
    with open_run(config) as run:
        tokens = ModelTokens(model_path(config))
        request = ErasureRequest(tenant="default", user=user, upto=run.log.newest())
        refold = open_refold(config, run.log, [request], tokens)
        trainer = PolicyTrainer(model_path(config), training(config), trainer_contract(config))
        trainer.set_bases([SteeringBasis.of(BASIS, at=1.0)])
        older = [path for path in stored(run.home.checkpoints) if step_of(path) < first]
        if older:
            (alone := run.home.root / "alone").mkdir(exist_ok=True)
            (alone / older[0].name).symlink_to(older[0]) if not (alone / older[0].name).exists() else None
            trainer.restore(load_checkpoint(alone))
        anchor = await run.follower.resolve("base")
        mine: dict[int, tuple[PolicyVersion, object]] = {}
        roots: dict[int, str] = {}
        async for batch in refold.batches():
            row = batch.row if credits_anew else recorded_without(batch.recorded, batch.row)
            if row.step <= trainer.step_count:
                continue
            identities = [(turn,) for turn in row.turns]
            made = training_batch(row, await run.log.find(Turn, identities), await run.log.find(Reward, identities))
            release_ = (
                mine[row.reference.number][0] if own_references and row.reference.number in mine else row.reference
            )
            weights = {anchor.hash: await run.follower.fetch(anchor)}
            if release_ == row.reference:
                weights[release_.hash] = await run.follower.fetch(release_)
            weights |= {version.hash: kept for version, kept in mine.values()}
            trainer.hold_nothing()
            references = References(
                release=release_, anchor=anchor, fetch=lambda policy, found=weights: found[policy.hash]
            )
            try:
                if credits_anew and batch.refused:
                    raise NoSignal(batch.refused)
                trainer.step(made.samples, references)
            except NoSignal:
                trainer.skip_step()
            if heads is not None:
                heads.append(trainer.state().moments["values"].tobytes())
            root = roots[row.step] = weights_root(trainer.weights())
            mine[row.step] = (PolicyVersion(number=row.step, hash=root), copy.deepcopy(dict(trainer.weights())))
        return roots


def recorded_without(recorded: Batch, row: Batch) -> Batch:
    """The recorded batch with the person's turns left out, and nothing else changed."""
    credits = dict(zip(recorded.turns, recorded.credits, strict=True))
    return replace(row, credits=tuple(credits[turn] for turn in row.turns))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def noted(config: Config) -> dict[int, str]:
    """What the replay noted: step -> root."""
    (path,) = (config.run.directory / "erasure").glob("*.steps.jsonl")
    return {line["step"]: line["root"] for line in lines_of(path)}


async def test_the_replay_has_the_bits_of_a_training_on_the_log_without_the_person_at_every_step(config, truth):
    torch.set_num_threads(1)
    async with at_work(config) as worker:
        assert worker.parts.trainer.step_count == STEPS + 1
        version = worker.parts.candidates.last
        assert noted(config) == truth
        assert (version.number, version.hash) == (STEPS + 1, truth[STEPS])
        assert weights_root(worker.parts.trainer.weights()) == version.hash
        assert await worker._run.follower.resolve("candidate") == version
    with open_run(config) as run:
        last = [row async for _, row in run.log.read(0, {Batch})][-1]
        assert (last.step, last.turns, last.base) == (STEPS + 1, (), version)
    lesser = {
        "rows dropped, recorded credits, recorded references": (False, False),
        "rows dropped, credits anew, recorded references": (True, False),
        "rows dropped, recorded credits, own references": (False, True),
    }
    for name, (credits, references) in lesser.items():
        roots = await plainly(config, credits_anew=credits, own_references=references)
        assert roots[STEPS] != truth[STEPS], name


async def test_values_of_turns_are_those_of_a_training_without_the_person(tmp_path):
    """The value heads are in no weights, and in every checkpoint that training goes on from."""
    torch.set_num_threads(1)
    steps, heads = FIRST + 2, list[bytes]()
    config = await trained_run(tmp_path, steps, value_lambda=1.0)
    with open_run(config) as run:
        upto = await run.log.forget("default", GONE)
        ErasureFiles(run.home).request(ErasureRequest(tenant="default", user=GONE, upto=upto))
        rows = [row async for _, row in run.log.read(0, {Batch})]
        assert all(len(row.scales) == len(row.turns) > 0 for row in rows)
        knew = load_checkpoint(run.home.checkpoints).moments["values"].tobytes()
    truth = await plainly(config, credits_anew=True, own_references=True, heads=heads)
    async with at_work(config) as worker:
        assert noted(config) == truth
        assert worker.parts.trainer.state().moments["values"].tobytes() == heads[-1]
        assert load_checkpoint(worker._run.home.checkpoints).moments["values"].tobytes() == heads[-1]
    assert knew != heads[-1], "the case: they had taught them"


class Killed(BaseException):
    """The process ends here; nothing that was not written before is left."""


class Kills:
    """Ends the process at the n-th of the acts by which a replay goes on, before or after it."""

    def __init__(self, monkeypatch, at: int) -> None:
        self.left = at
        for owner, name in (
            (PolicyTrainer, "step"),
            (PolicyTrainer, "save"),
            (OwnVersions, "keep"),
            (ErasureFiles, "put"),
            (Candidates, "publish"),
            (RewardDesk, "restart"),
            (ErasureReplay, "_certify"),
            (erasure, "point_ref"),
            (Candidates, "offer"),
        ):
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, act):
        if asyncio.iscoroutinefunction(act):

            async def acted(*args, **more):
                self.tick()
                found = await act(*args, **more)
                self.tick()
                return found

        else:

            def acted(*args, **more):
                self.tick()
                found = act(*args, **more)
                self.tick()
                return found

        return acted

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


async def resumed(config: Config) -> None:
    async with at_work(config):
        pass


async def test_killed_at_twenty_places_it_goes_on_to_the_same_bits(config, truth, monkeypatch):
    places = random.Random(5)
    killed = 0
    while killed < 25:
        with monkeypatch.context() as patched:
            Kills(patched, places.randrange(1, 14))
            try:
                await resumed(config)
            except Killed:
                killed += 1
            else:
                break
    assert killed >= 5, "the case: killed on the way"
    await resumed(config)
    assert noted(config) == truth
    with open_run(config) as run:
        rows = [row async for _, row in run.log.read(0, {Batch})]
        assert [row.step for row in rows] == list(range(1, STEPS + 2))
        assert (await run.follower.resolve("candidate")).hash == truth[STEPS]
        assert ErasureFiles(run.home).job().phase == "release"
        assert not ErasureFiles(run.home).work.exists()


async def test_if_the_checkpoint_that_it_would_begin_at_is_damaged_it_begins_at_the_one_before(config, truth):
    torch.set_num_threads(1)
    place = config.run.directory / "checkpoints"
    latest, newest = (place / "LATEST").read_bytes(), next(path for path in stored(place) if step_of(path) < FIRST)
    PolicyTrainer(model_path(config), training(config), trainer_contract(config)).save(place, cursor=0, keep=ALL)
    before = stored(place)[-1]
    (place / "LATEST").write_bytes(latest)
    (newest / "weights.safetensors").write_bytes(b"")
    async with at_work(config) as worker:
        assert worker._erasure_error == ""
        files = ErasureFiles(worker._run.home)
        job = files.job()
    assert {step: root for step, root in noted(config).items() if step in truth} == truth
    assert (job.start, job.checkpoint) == (0, before.name)
    made = read_certificate(files.certificate(job.id).read_bytes())
    assert (made.checkpoint, made.steps) == (before.name, STEPS)


async def test_of_a_backup_amid_a_replay_it_begins_again_at_the_runs_own_checkpoint(config, truth, monkeypatch):
    torch.set_num_threads(1)
    files = ErasureFiles(Home(config.run.directory))
    with monkeypatch.context() as patched:
        Kills(patched, 4)  # of put, put, step
        with pytest.raises(Killed):
            await resumed(config)
    begun = files.job()
    assert (begun.phase, begun.start) == ("replay", FIRST - 1)
    shutil.rmtree(files.work)  # the guide's backup has no part of it
    async with at_work(config) as worker:
        assert worker._erasure_error == ""
        assert noted_by(files, files.job().id) == truth
    job = files.job()
    assert (job.start, job.checkpoint, job.people) == (begun.start, begun.checkpoint, begun.people)


def noted_by(files: ErasureFiles, id: str) -> dict[int, str]:
    return {line["step"]: line["root"] for line in lines_of(files.steps(id))}


@pytest.mark.parametrize("step", ["link", "delete"])
async def test_what_the_disk_refuses_is_told_by_its_path(config, monkeypatch, step):
    files = ErasureFiles(Home(config.run.directory))
    files.work.mkdir(parents=True)
    (files.work / "left").write_text("")

    def refusing(*args, **more):
        raise OSError(28 if step == "link" else 13, "refused")

    with monkeypatch.context() as patched:
        patched.setattr(*((os, "link") if step == "link" else (shutil, "rmtree")), refusing)
        if step == "link":  # a full disk is no trainer's own fault
            with pytest.raises(OSError, match="refused") as refused:
                await resumed(config)
            assert refused.value.errno == 28
        else:
            async with at_work(config) as worker:
                assert str(files.work) in worker._erasure_error
                assert worker.parts.trainer.step_count == STEPS
    assert len(files.pending()) == 1, "it is still asked for"
    async with at_work(config) as worker:
        assert worker.parts.trainer.step_count == STEPS + 1


async def test_nothing_is_repeated_for_somebody_who_taught_nothing(original, tmp_path):
    config = copied(original, tmp_path)
    with open_run(config) as run:
        ErasureFiles(run.home).request(ErasureRequest(tenant="default", user="nobody", upto=run.log.newest()))
    async with at_work(config) as worker:
        assert worker.parts.trainer.step_count == STEPS
    assert ErasureFiles(Home(config.run.directory)).requests() == []


async def test_training_never_goes_back_to_what_knew_the_person_and_it_is_deleted_once_the_version_is_live(replayed):
    async with at_work(replayed) as worker:
        run, version = worker._run, worker.parts.candidates.last
        before = await run.follower.resolve("live")
        assert before.number < version.number
        await worker.parts.releases.append("blocked", version, before, "test")
        worker._settings = worker._settings.model_copy(update={"max_lead": 1})
        assert not await worker.may_learn(), "the version was refused, and what is live knew the person"
        assert worker.parts.source.base is None
        assert worker._erasure.knows_erased(before)
        assert not worker._erasure.knows_erased(await run.follower.resolve("base")), "it never knew them"
        assert {step_of(path) for path in stored(run.home.checkpoints)} >= {4, 6, 8, 9}
        await release(run)
        assert await worker.may_learn()
        assert {step_of(path) for path in stored(run.home.checkpoints)} == {2, STEPS + 1}
        left = [policy.number for policy in await versions_between(run.store, 0, 99, run.name)]
        assert left == [0, 1, 2, STEPS + 1]
        assert ErasureFiles(run.home).job().phase == "done"
    async with at_work(replayed) as worker:
        assert worker.parts.trainer.step_count == STEPS + 1


async def test_what_a_ref_names_waits_until_the_ref_moves(replayed):
    async with at_work(replayed) as worker:
        run = worker._run
        knew = next(policy for policy in await versions_between(run.store, FIRST, STEPS, run.name))
        await run.store.move_ref("previous", await run.store.read_ref("previous"), knew.hash)
        await release(run)
        assert await worker.may_learn()
        assert ErasureFiles(run.home).job().phase == "release"
        assert knew in await versions_between(run.store, FIRST, STEPS, run.name)
        await run.store.move_ref("previous", knew.hash, await run.store.read_ref("live"))
        assert await worker.may_learn()
        assert ErasureFiles(run.home).job().phase == "done"
        assert not await versions_between(run.store, FIRST, STEPS, run.name)


async def test_a_certificate_says_what_the_weights_learned_from(config):
    config = config.model_copy(
        update={"publish": config.publish.model_copy(update={"key": config.run.directory / "key"})}
    )
    public = Signer.create(config.run.directory / "key").public
    async with at_work(config) as worker:
        version = worker.parts.candidates.last
        files = ErasureFiles(worker._run.home)
        job = files.job()
    made = read_certificate(files.certificate(job.id).read_bytes())
    rows = read_rows(files.rows(job.id).read_text().splitlines())
    assert (made.first, made.last, made.steps, made.refused) == (FIRST, STEPS, STEPS - FIRST + 1, 0)
    assert made.weights == (version.number, version.hash)
    assert made.erased_turns == len(GONE_TURNS)
    assert (made.checkpoint.split("-")[0], made.verdict) == (f"{FIRST - 1:08d}", "")
    assert 0.0 < made.ess_turns <= 1.0
    check_erasure(made, rows, GONE_TURNS, [public])
    with pytest.raises(Corrupt, match="step 1 was trained on turn t0:0"):
        check_erasure(made, rows, {"t0:0"}, [public])
    with pytest.raises(Corrupt, match="Merkle root differs"):
        check_erasure(made, rows[1:], GONE_TURNS, [public])
    with pytest.raises(Corrupt, match="is not valid for it"):
        check_erasure(made.model_copy(update={"refused": 1}), rows, GONE_TURNS, [public])
    with pytest.raises(Corrupt, match="is signed by"):
        check_erasure(made, rows, GONE_TURNS, ["0" * 64])


def files_of(place: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.stat().st_size, path.read_bytes())
        for path in place.rglob("*")
        if path.suffix not in ("", ".db-shm")
    }


async def test_a_dry_run_says_what_would_be_done_and_does_nothing(original, tmp_path):
    config = copied(original, tmp_path)
    with open_run(config):
        pass
    before, console = files_of(tmp_path / "run"), Console(record=True, width=400)
    await show_plan(config, "default", GONE, console)
    assert files_of(tmp_path / "run").keys() == before.keys()
    said = console.export_text()
    assert f"{len(GONE_TURNS)} turns are taken out; {STEPS - FIRST + 1} of {STEPS} steps differ" in said
    assert f"{STEPS - FIRST + 1} steps are taken again, from checkpoint {FIRST - 1:08d}-" in said
    assert f"the result is version {STEPS + 1}" in said
    assert "4 checkpoints and" in said
    await show_plan(config, "default", "nobody", console)
    assert "none of 9 steps would differ" in console.export_text()


async def test_a_stranger_checks_a_certificate_by_the_ids_of_turns(replayed):
    config = replayed
    id = ErasureFiles(Home(config.run.directory)).job().id
    path = config.run.directory / "erasure" / f"{id}.json"
    turns = config.run.directory / "ids"
    turns.write_text("\n".join(sorted(GONE_TURNS)) + "\n")
    console = Console(record=True, width=400)
    verify(config, path, turns, console)
    said = console.export_text()
    assert "signed by nobody" in said
    assert f"none of the {len(GONE_TURNS)} given turns is among them" in said
    for id in ("t3:0", "t3"):
        turns.write_text(f"{id}\n")
        with pytest.raises(Corrupt, match=f"step 1 was trained on turn {id}$"):
            verify(config, path, turns, console)
    for text in ("\n", "  12  turn  t3:0  live\n"):
        turns.write_text(text)
        with pytest.raises(BadConfig, match="--turns"):
            verify(config, path, turns, console)
    with pytest.raises(NotFound, match="the certificate"):
        verify(config, path.with_name("x.json"), None, console)
    path.write_text("{}")
    with pytest.raises(Corrupt, match="no certificate"):
        verify(config, path, None, console)


async def test_forget_with_replay_asks_the_trainer(original, tmp_path):
    config = copied(original, tmp_path)
    console = Console(record=True, width=400)
    await forget(config, "default", GONE, console, replay=True)
    assert "at its next start" in console.export_text()
    async with at_work(config) as worker:
        assert worker.parts.trainer.step_count == STEPS + 1


async def test_a_running_trainer_takes_the_request_up_between_two_steps(original, truth, tmp_path):
    config = copied(original, tmp_path)
    async with at_work(config) as worker:
        assert worker.parts.trainer.step_count == STEPS
        before = await worker._run.follower.resolve("live")
        await forget(config, "default", GONE, Console(quiet=True), wait_s=0.0, replay=True)
        await worker.learn()
        assert worker._erasure.knows_erased(before), "it must not go back to it, before a restart too"
        root = worker.parts.candidates.last.hash
        assert worker.parts.trainer.step_count == STEPS + 1
        for number in range(72, 80):
            await worker._run.log.append(*served(number, await worker._run.follower.resolve("base")))
        await worker.learn()
        assert worker.parts.trainer.step_count == STEPS + 2, "and learns on"
    assert root == truth[STEPS]


async def test_what_cannot_be_repeated_is_the_trainers_trouble_and_training_goes_on(config):
    baseline = config.reward.baseline.model_copy(update={"shrinkage": 1.0})
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"baseline": baseline})})
    async with at_work(config) as worker:
        assert "batch 2 was made under other settings" in worker._erasure_error
        assert worker._pulse.trouble() == worker._erasure_error
        assert worker.parts.trainer.step_count == STEPS


async def test_a_second_person_is_taken_out_of_what_came_of_the_first_replay(config):
    async with at_work(config) as worker:
        run = worker._run
        await release(run)
        assert await worker.may_learn()
        base = await run.follower.resolve("base")
        for number in range(8 * STEPS, 8 * STEPS + 8):
            turn, signal = served(number, base)
            await run.log.append(replace(turn, user="zoe" if number % 4 == 1 else f"u{number % 3}"), signal)
        await worker.learn()
        first = ErasureFiles(run.home).job().id
    await forget(config, "default", "zoe", Console(quiet=True), replay=True)
    truth = await plainly(config, credits_anew=True, own_references=True)
    async with at_work(config) as worker:
        job = ErasureFiles(worker._run.home).job()
        assert (job.last, job.version) == (STEPS + 2, (STEPS + 3, truth[STEPS + 2]))
    assert job.id != first
    steps = lines_of(config.run.directory / "erasure" / f"{job.id}.steps.jsonl")
    assert {line["step"]: line["root"] for line in steps} == truth
    with open_run(config) as run:
        taken_out = {turn.id async for _, turn in run.log.read(0, {Turn}) if turn.redacted}
    rows = read_rows((config.run.directory / "erasure" / f"{job.id}.rows.jsonl").read_text().splitlines())
    assert len(rows) == STEPS + 2
    assert taken_out > GONE_TURNS
    assert all(taken_out.isdisjoint(turns) for _, turns in rows)
    async with at_work(config) as worker:
        await release(worker._run)
        assert await worker.may_learn()
        assert ErasureFiles(worker._run.home).job().phase == "done", (
            "what came of the first replay knew her, and is gone"
        )
        assert [ref for ref in await worker._run.store.refs() if ref.startswith("erasure/")] == [f"erasure/{job.id}"]


async def test_without_an_older_checkpoint_it_begins_at_the_start_of_training_in_a_trainer_that_just_started(
    original, tmp_path
):
    config = copied(original, tmp_path)
    async with at_work(config) as worker:
        await forget(config, "default", "u1", Console(quiet=True), wait_s=0.0, replay=True)
        await worker.learn()
        assert "restart the trainer" in worker._erasure_error
        assert worker.parts.trainer.step_count == STEPS, "until then it goes on from where it was"
        base = await worker._run.follower.resolve("base")
        for number in range(8 * STEPS, 8 * STEPS + 8):
            turn, signal = served(number, base)
            await worker._run.log.append(replace(turn, user="u2"), signal)
        await worker.learn()
        assert worker.parts.trainer.step_count == STEPS + 1
    truth = await plainly(config, credits_anew=True, own_references=True, first=1, user="u1")
    async with at_work(config) as worker:
        assert worker.parts.candidates.last == PolicyVersion(number=STEPS + 2, hash=truth[STEPS + 1])
        assert ErasureFiles(worker._run.home).job().checkpoint == "base"
    assert noted(config) == truth
    assert truth.keys() == set(range(1, STEPS + 2))
