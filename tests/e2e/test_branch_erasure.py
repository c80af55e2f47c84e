"""Somebody is taken out of a tenant's branch: it begins anew at a shared version that does not know them, and nothing of before is left."""

import asyncio
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.e2e.test_cycle import config_at, served, worker_of

from ostinato.app import branch_erasure
from ostinato.app.branch_erasure import BranchErasure
from ostinato.app.branches import branch_config
from ostinato.app.erasure import ErasureFiles
from ostinato.app.evaluation import open_releases
from ostinato.app.storage import open_run, open_store
from ostinato.config import load
from ostinato.core.records import Arm
from ostinato.launch.commands.erasure import show_plan, verify
from ostinato.launch.commands.log import forget
from ostinato.launch.commands.release import ship_branch
from ostinato.launch.workers.prepare import prepare
from ostinato.release.controller import ReleaseController
from ostinato.reward.pipeline import RewardDesk
from ostinato.run_directory import Home
from ostinato.testing.tiny import tiny_model
from ostinato.train.checkpoint import newest_step
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.follower import versions_between
from ostinato.weights.version.certificate import SHARED, read_certificate
from ostinato.weights.version.content import weights_root

KEYS = "serve.api_keys=['acme:sk-acme-0123456789abcdef', 'bolt:sk-bolt-0123456789abcdef']"


@asynccontextmanager
async def at_work(config):
    with open_run(config) as run:
        await prepare(run, lambda _: None)
        worker = worker_of(run, await run.follower.resolve("live"))
        await worker.resume()
        yield worker
        await worker.finish()


async def taught(shared, worker, numbers, tenant, arm, user):
    """Append eight turns to the shared log, a quarter of them by `user`, until this worker takes a step; and store its version."""
    before = worker.parts.trainer.step_count
    while worker.parts.trainer.step_count == before:
        with open_run(shared) as run:
            policy = await run.follower.resolve("live")
            for number in (next(numbers) for _ in range(8)):
                turn, signal = served(number, policy)
                who = user if number % 4 == 3 else f"u{number % 3}"
                await run.log.append(replace(turn, tenant=tenant, arm=arm, user=who), replace(signal, tenant=tenant))
        await worker.learn()
        await worker.parts.stored.settle()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Two steps of bolt's people, the second with zoe, released as the shared version 2; then two of acme's for its branch, with ann."""

    async def made(directory):
        torch.set_num_threads(1)
        tiny_model(directory / "model")
        first = config_at(directory / "a")
        config = first.model_copy(
            update={
                "record": load(None, ["record.encrypt='user'"]).record,
                "serve": load(None, [KEYS, "serve.branches=['acme']"]).serve,
                "learn": first.learn.model_copy(
                    update={"tenants": ("acme",), "checkpoint_every": 1, "keep_checkpoints": 9, "max_lead": 50}
                ),
            }
        )
        numbers = count()
        async with at_work(config) as worker:
            for user in ("u0", "zoe"):
                await taught(config, worker, numbers, "bolt", Arm.LIVE, user)
            run = worker._run
            await run.store.move_ref("live", await run.store.read_ref("live"), worker.parts.candidates.last.hash)
        async with at_work(branch_config(config, "acme")) as worker:
            await worker.learn()  # copies what is there
            for _ in range(2):
                await taught(config, worker, numbers, "acme", Arm.BRANCH, "ann")
            own = worker.parts.candidates.last
            with open_run(worker._run.config) as run:
                await open_releases(run).ship(own, "it is better", actor="op")
                for ref in ("best", "evaluation", "evaluation-best"):  # as its gate leaves them
                    await run.store.move_ref(ref, await run.store.read_ref(ref), own.hash)
        return config

    return asyncio.run(made(tmp_path_factory.mktemp("branch")))


@pytest.fixture
def config(original, tmp_path):
    shutil.copytree(original.run.directory, tmp_path / "run")
    return original.model_copy(update={"run": original.run.model_copy(update={"directory": tmp_path / "run"})})


async def refs_of(config):
    return {ref: root for ref, root in (await open_store(config).refs()).items() if "acme" in ref}


async def own_versions(config):
    return await versions_between(open_store(config), 0, 999, "branch/acme")


async def check_begun_anew(config, start):
    """Nothing of before is left in any state of the branch, and its state is the shared one's."""
    branch = branch_config(config, "acme")
    async with at_work(branch) as worker:
        await worker.may_learn()
        trainer = worker.parts.trainer
        assert weights_root(trainer.weights()) == start.hash
        assert worker.parts.candidates.last == start
        with open_run(config) as run:
            fresh = worker_of(run, start).parts.trainer
            fresh.resume(run.home.checkpoints)
            fresh.go_back(await run.follower.fetch(start), start.number)
        mine, theirs = trainer.state().moments, fresh.state().moments
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine), "moments are the shared trainer's"
        assert {*(await refs_of(config)).values()} == {start.hash}
        assert await own_versions(config) == []
        job = ErasureFiles(worker._run.home).job()
        assert (job.phase, job.version) == ("done", (start.number, start.hash))
        state = await worker.parts.releases.refresh()
        assert (state.releases, state.best) == ((start,), start), "the gate compares with nothing of before"
        step = trainer.step_count
        await taught(config, worker, count(1000), "acme", Arm.BRANCH, "bob")
        assert worker.parts.candidates.last.number == step + 1, "and it learns on"
    return job


async def test_who_taught_a_branch_is_taken_out_and_nothing_that_it_learned_is_left(config):
    branch, console = branch_config(config, "acme"), Console(record=True, width=500)
    start = await open_run_version(config, "live")
    knew = await own_versions(config)
    assert len(knew) == 2
    await show_plan(config, "acme", "ann", console)
    assert "the branch of acme begins anew at the shared version" in console.export_text()
    await forget(config, "acme", "ann", console, wait_s=0.0, replay=True)
    assert "the branch of acme begins anew at the shared version if it may know them" in console.export_text()
    async with at_work(branch) as worker:
        await worker.learn()
        assert await own_versions(config) == knew, "it waits until the shared training is through"
        async with at_work(config):
            pass
        assert ErasureFiles(Home(config.run.directory)).job() is None, "the shared run learned nothing from her"
        await worker.learn()
        assert weights_root(worker.parts.trainer.weights()) == start.hash
    job = await check_begun_anew(config, start)
    path = ErasureFiles(Home(branch.run.directory)).certificate(job.id)
    made = read_certificate(path.read_bytes())
    assert (made.weights, made.checkpoint) == ((start.number, start.hash), f"{SHARED}{start}")
    assert (made.steps, made.erased_turns > 0) == (0, True)
    assert made.verdict.endswith("the branch begins anew without forgotten people")
    verify(config, path, None, console)
    assert f"a branch began anew at v{start.number} with root {start.hash}" in console.export_text()


async def open_run_version(config, ref):
    with open_run(config) as run:
        return await run.follower.resolve(ref)


async def test_a_branch_that_began_with_a_version_which_knew_somebody_waits_for_one_that_does_not(config):
    branch, console = branch_config(config, "acme"), Console(record=True, width=500)
    knew, began = await own_versions(config), await open_run_version(config, "live")
    await forget(config, "bolt", "zoe", console, wait_s=0.0, replay=True)
    assert f"{began} may know them, and the ref branches/acme/base keeps it" in console.export_text()
    async with at_work(config) as shared, at_work(branch) as worker:
        erased = shared.parts.candidates.last
        assert erased.number > began.number
        await worker.learn()
        assert await own_versions(config) == knew, "what is live still knows her"
        run = shared._run
        await run.store.move_ref("live", await run.store.read_ref("live"), erased.hash)
        await shared.may_learn()
        assert ErasureFiles(run.home).job().phase == "release", "the branch holds a version that knew her"
        await worker.learn()
    await check_begun_anew(config, erased)
    async with at_work(config) as shared:
        await shared.may_learn()
        assert ErasureFiles(shared._run.home).job().phase == "done"
    left = await versions_between(open_store(config), 0, 99, "run")
    assert began not in left


async def test_a_branch_that_knows_nobody_of_them_stays(config):
    branch, before = branch_config(config, "acme"), await refs_of(config)
    console = Console(record=True, width=500)
    await show_plan(config, "acme", "carl", console)
    assert "the branch of acme stays" in console.export_text()
    await forget(config, "acme", "carl", Console(quiet=True), wait_s=0.0, replay=True)
    async with at_work(config), at_work(branch) as worker:
        step = worker.parts.trainer.step_count
        await worker.learn()
        files = ErasureFiles(worker._run.home)
        assert (files.pending(), files.job(), worker.parts.trainer.step_count) == ([], None, step)
    assert await refs_of(config) == before


async def test_who_taught_it_before_it_was_begun_anew_by_hand_is_not_in_it_any_more(config):
    branch, start = branch_config(config, "acme"), await open_run_version(config, "live")
    await ship_branch(config, "live", "acme", "op", Console(quiet=True))
    async with at_work(branch) as worker:
        await worker.learn()
        assert {*(await refs_of(config)).values()} == {start.hash}, "best and the judged ones move, too"
        assert (await worker.parts.releases.refresh()).best == start
        step = worker.parts.trainer.step_count
        await forget(config, "acme", "ann", Console(quiet=True), wait_s=0.0, replay=True)
        async with at_work(config):
            pass
        await worker.learn()
        assert (ErasureFiles(worker._run.home).job(), worker.parts.trainer.step_count) == (None, step)


class Killed(BaseException):
    """The process ends here."""


async def test_killed_at_each_of_its_acts_it_begins_anew_all_the_same(config, monkeypatch):
    branch, start = branch_config(config, "acme"), await open_run_version(config, "live")
    await forget(config, "acme", "ann", Console(quiet=True), wait_s=0.0, replay=True)
    async with at_work(config):
        pass
    acts = (
        *((ErasureFiles, "put"), (branch_erasure, "begin_anew"), (ReleaseController, "ship")),
        *((branch_erasure, "take_checkpoint"), (RewardDesk, "restart"), (PolicyTrainer, "go_back")),
        *((PolicyTrainer, "save"), (BranchErasure, "_certify")),
    )
    for owner, name in acts:
        with monkeypatch.context() as patched:
            act = getattr(owner, name)

            def fatal(*args, act=act, **more):
                made = act(*args, **more)
                if asyncio.iscoroutine(made):
                    return ended(made)
                raise Killed

            async def ended(made):
                await made
                raise Killed

            patched.setattr(owner, name, fatal)
            with pytest.raises(Killed):
                async with at_work(branch):
                    pass
    await check_begun_anew(config, start)
    assert newest_step(Home(branch.run.directory).checkpoints) > start.number


async def test_it_does_not_begin_anew_beside_a_checkpoint_of_before_that_cannot_be_deleted(config, monkeypatch):
    branch, start = branch_config(config, "acme"), await open_run_version(config, "live")
    place, delete = Home(branch.run.directory), shutil.rmtree
    await forget(config, "acme", "ann", Console(quiet=True), wait_s=0.0, replay=True)
    async with at_work(config):
        pass

    def refusing(path, ignore_errors=False, **more):
        if path != place.checkpoints:
            delete(path, ignore_errors, **more)
        elif not ignore_errors:
            raise PermissionError(13, "somebody else's")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refusing)
        async with at_work(branch) as worker:
            assert f"{place.checkpoints} cannot be deleted" in worker._erasure_error
            await worker.learn()
    job = ErasureFiles(place).job()
    assert not ErasureFiles(place).certificate(job.id).exists()
    await check_begun_anew(config, start)


async def test_without_a_shared_checkpoint_it_begins_anew_when_its_trainer_starts(config):
    branch, start = branch_config(config, "acme"), await open_run_version(config, "live")
    await forget(config, "acme", "ann", Console(quiet=True), wait_s=0.0, replay=True)
    async with at_work(config):
        pass
    shutil.rmtree(Home(config.run.directory).checkpoints)
    async with at_work(branch) as worker:
        pass
    assert weights_root(worker.parts.trainer.weights()) == start.hash
    assert not any(array.any() for name, array in worker.parts.trainer.state().moments.items() if "mean" in name)
