"""A branch that is trained is a run of its own: its refs, its settings, its tenant's rows alone, its guard, and what it refuses."""

import asyncio
import os
import random
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from tests.deadlines import PATIENT_S
from tests.oracles.words_on_disk import where

from ostinato.app import branches
from ostinato.app.backups import back_up_log, rekey_log, restore_log
from ostinato.app.branches import CopyWatch, TenantRows, begin_branch, branch_config, branches_begun, check_branches
from ostinato.app.evaluation import open_releases, open_suites
from ostinato.app.retention import drop_old_rows, needed
from ostinato.app.storage import home, open_log, open_run, open_store, operator_key, served_refs
from ostinato.app.trainer import Learning, open_desk
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, BadRequest, Conflict, NoSignal
from ostinato.core.notices import Forgotten
from ostinato.core.records import (
    Arm,
    Batch,
    Consent,
    ConsentGiven,
    Delivered,
    Finish,
    Holdback,
    PolicyVersion,
    ReleaseEvent,
    Reward,
    Signal,
    Turn,
)
from ostinato.core.staleness import Lineage
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.log import forget
from ostinato.launch.commands.release import ship_branch
from ostinato.launch.commands.weights import find_version
from ostinato.launch.placing.heartbeat import Heartbeat
from ostinato.launch.workers.release import _judge
from ostinato.launch.workers.train import TrainWorker
from ostinato.launch.workers.worker_main import WorkerContext
from ostinato.loop import Learner
from ostinato.record.keys import rekey
from ostinato.record.roles import hold
from ostinato.release.ledger import Ancestry, ReleaseLedger
from ostinato.reward.log_fold import LedgerFollower
from ostinato.testing.engine import encode
from ostinato.testing.records import a_signal, a_turn
from ostinato.testing.store import MemoryStore
from ostinato.train.stepper import Stepper
from ostinato.weights.follow.follower import Released, versions_between
from ostinato.weights.publish.publisher import Overlapped, VersionPublisher
from ostinato.weights.store.branch import BranchStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.interface import DamagedRefs

KEYS = "serve.api_keys=['acme:sk-acme-0123456789abcdef', 'bolt:sk-bolt-0123456789abcdef']"
MARKS = {"acme": "zebrastripe", "bolt": "quokkapatience"}


def settings(directory, *more):
    words = [f"run.directory='{directory}/run'", KEYS, "serve.branches=['acme']", "learn.tenants=['acme']"]
    return load(None, [*words, "record.encrypt='none'", "reward.settle_s=0", "reward.options={window=10}", *more])


def turn(id, tenant, arm, **more):
    """A turn whose words are its tenant's mark."""
    said = encode(f"{MARKS[tenant]} {id}")
    made = a_turn(id, arm=arm, prompt=said, sampled=said)
    return replace(made, **{"tenant": tenant, "text": MARKS[tenant], "propensity": 0.5} | more)


def said(made, name="accepted"):
    return replace(a_signal(made, name, id=f"s of {made.id}"), comment=f"{MARKS[made.tenant]} again")


async def publish(store, count, run="run", base=None, first=0, seed=0):
    publisher, made = VersionPublisher(store), [] if base is None else [base]
    for number in range(first, first + count):
        weights = {"w": WeightArray("F32", (4,), np.full(16, 16 * seed + number, np.uint8))}
        before = made[-1] if made else None
        made.append((await publisher.publish(number, weights, run=run, base=before, ref="live")).policy)
    return made


def test_branches_that_cannot_be_listed_are_not_taken_for_none(tmp_path, monkeypatch):
    config = settings(tmp_path)
    assert branches_begun(config) == []
    with open_log(branch_config(config, "acme")):
        pass
    (tmp_path / "run" / "branches" / "README").write_text("no branch")
    assert [each.run.tenant for each in branches_begun(config)] == ["acme"]

    def refusing(real):
        def listed(path="."):
            if os.fspath(path).rstrip("/").endswith("branches"):
                raise PermissionError(13, "Permission denied", path)
            return real(path)

        return listed

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(PermissionError):
        branches_begun(config)
    assert [each.run.tenant for each in branches_begun(config, "acme")] == ["acme"]


# ---------------------------------------------------------------- refs


async def test_its_refs_are_its_own_and_control_is_the_shared_live_version():
    shared = MemoryStore()
    mine, other = BranchStore(shared, "acme"), BranchStore(shared, "acme.eu")
    (v0,) = await publish(shared, 1)
    assert (await mine.read_ref("live"), await mine.read_ref("control")) == (None, v0.hash)
    await mine.move_ref("live", None, v0.hash)
    await mine.move_ref("candidate", None, v0.hash)
    assert await other.read_ref("live") is await other.read_ref("candidate") is None
    assert {ref for ref in await shared.refs() if not ref.startswith("version/")} == {
        *("live", "branch/acme", "branches/acme/candidate")
    }
    assert {*await mine.refs()} == {"live", "control", "candidate", f"version/{v0.hash}"}
    assert {*await other.refs()} == {"control", f"version/{v0.hash}"}
    await mine.delete_ref("candidate", v0.hash)
    assert "branches/acme/candidate" not in await shared.refs()


async def test_damaged_refs_are_told_under_the_branchs_own_names(tmp_path):
    shared = DirectoryStore(tmp_path)
    for ref in ("live", "branch/acme", "branch/bolt", "branches/bolt/candidate"):
        await shared.move_ref(ref, None, "a" * 64)
    (tmp_path / "refs" / "branches" / "bolt" / "candidate").write_text("junk")
    assert await BranchStore(shared, "acme").refs() == {"control": "a" * 64, "live": "a" * 64}
    for look in (BranchStore(shared, "bolt").refs, BranchStore(shared, "bolt").list_refs):
        with pytest.raises(DamagedRefs, match="candidate") as refused:
            await look()
        assert ({*refused.value.errors}, {*refused.value.sound}) == ({"candidate"}, {"control", "live"})


async def test_it_moves_and_deletes_nothing_of_others():
    shared = MemoryStore()
    store = BranchStore(shared, "acme")
    (v0,) = await publish(shared, 1)
    before = await shared.refs()
    for act in (
        store.move_ref("control", v0.hash, v0.hash),
        store.delete_ref("control", v0.hash),
        store.delete_ref(f"version/{v0.hash}", before[f"version/{v0.hash}"]),
        store.delete(before[f"version/{v0.hash}"]),
    ):
        with pytest.raises(BadRequest, match="do it in the run that serves"):
            await act
    assert await shared.refs() == before


async def test_two_lines_with_the_same_numbers_are_told_apart(tmp_path):
    config = settings(tmp_path)
    branch = branch_config(config, "acme")
    shared, own = (
        await publish(open_store(config), 3),
        await publish(open_store(branch), 2, "branch/acme", first=1, seed=1),
    )
    assert await versions_between(open_store(config), 0, 9, "run") == shared
    assert await versions_between(open_store(config), 0, 9, "a run of before") == shared
    assert await versions_between(open_store(branch), 0, 9, "branch/acme") == own
    assert await versions_between(open_store(branch), 0, 9, "branch/bolt") == []
    assert (await find_version(config, "v2")).policy == shared[2]
    assert (await find_version(branch, "v2")).policy == own[1]
    assert (await find_version(config, "v2", "branch/acme")).policy == own[1]
    assert (await find_version(config, "v0", "branch/acme")).policy == shared[0]


# ---------------------------------------------------------------- settings


def test_its_settings_are_the_runs_with_its_own_suites_first(tmp_path):
    config = settings(
        tmp_path, "evaluate.suite='demo'", "evaluate.tenant_suites={acme=['demo-tab']}", "release.canary=true"
    )
    branch = branch_config(config, "acme")
    assert (branch.run.directory, branch.run.tenant) == (config.run.directory / "branches" / "acme", "acme")
    assert (branch.evaluate.suite, branch.evaluate.further_suites) == ("demo-tab", ("demo",))
    assert [each.suite.name for each in open_suites(branch).compared] == [
        open_suites(load(None, [f"evaluate.suite='{name}'"])).compared[0].suite.name for name in ("demo-tab", "demo")
    ]
    assert not branch.release.canary
    assert not branch.housekeeping.collect
    assert operator_key(branch) == operator_key(config), "the gateway's, which is the serving run's"
    refs = ["branch/acme", "branches/acme/evaluation", "branches/acme/evaluation-best"]
    assert [ref for ref in served_refs(config) if "branch" in ref] == refs
    check_branches(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learn.tenants=['acne']"], "learn.tenants names 'acne', and serve.branches does not: add it there"),
        (["evaluate.tenant_suites={bolt=['x']}"], "evaluate.tenant_suites names 'bolt', and learn.tenants does not"),
        (["record.url='postgresql://x/y'"], "learn.tenants and record.url do not go together"),
        (["serve.auto.arms=[{name='a', slot='live'}]"], "learn.tenants and serve.auto do not go together"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path, words, message):
    with pytest.raises(BadConfig, match=message):
        check_branches(settings(tmp_path, *words))
    with pytest.raises(BadConfig, match="up --on ray"):
        check_branches(settings(tmp_path), on_ray=True)


def test_a_tenant_has_one_branch(tmp_path):
    with pytest.raises(BadConfig, match=r"learn.tenants: 'acme' is named twice; a tenant has one branch"):
        settings(tmp_path, "learn.tenants=['acme', 'bolt', 'acme']")


# ---------------------------------------------------------------- rows


async def fill(config):
    """Rows of two tenants on all arms, mixed, with a mark in every word."""
    rows = []
    with open_log(config) as log:
        for n in range(40):
            mine = turn(f"acme-{n}", "acme", (Arm.BRANCH, Arm.SHARED, Arm.LIVE, Arm.EVAL)[n % 4], user=f"u{n % 3}")
            theirs = turn(f"bolt-{n}", "bolt", (Arm.LIVE, Arm.BRANCH, Arm.SHARED)[n % 3], user=f"u{n % 3}")
            name = "accepted" if n % 8 else "rejected"
            rows += [mine, theirs, Delivered(id=f"d{n}", turns=(mine.id, theirs.id), at=11.0)]
            rows += [said(mine, name), said(theirs, name)]
            # somebody else's signal about a turn of this tenant
            rows.append(replace(said(mine), id=f"forged {n}", tenant="bolt", comment=MARKS["bolt"]))
        rows.append(ConsentGiven(id="c1", tenant="bolt", user="u0", level=Consent.NEVER, at=12.0))
        rows.append(ConsentGiven(id="c2", tenant="acme", user="u1", level=Consent.AGGREGATE, at=12.0))
        await log.append(*rows)


async def copied(run, *kinds):
    return [row async for _, row in run.log.read(0, {*kinds})]


async def test_no_row_of_another_tenant_reaches_its_log_or_a_batch(tmp_path):
    config = settings(tmp_path)
    branch = branch_config(config, "acme")
    await fill(config)
    with open_run(branch) as run:
        rows = TenantRows(run)
        await rows.copy()
        turns = await copied(run, Turn)
        assert [each.id for each in turns] == [f"acme-{n}" for n in range(40) if n % 4 < 2]
        assert [each.arm for each in turns] == [Arm.LIVE, Arm.CONTROL] * 10
        assert {each.tenant for each in await copied(run, Signal, ConsentGiven)} == {"acme"}
        assert [each.turns for each in await copied(run, Delivered)] == [(each.id,) for each in turns]
        desk = open_desk(branch, run.log, run.folds)
        base = turns[0].spans[0].policy
        await desk.poll()
        made = await desk.batch(1, 1, base)
        await desk.poll()
        assert made is not None
        consenting = [n for n in range(0, 40, 4) if n % 3 != 1]
        assert [sample.turn.id for sample in made.samples] == [f"acme-{n}" for n in consenting]
        assert {each.reason for each in await copied(run, Holdback)} == {"arm:control", "consent:withdrawn"}
        await desk.close()
        rows.close()
    assert where(home(branch).root, [MARKS["bolt"], "bolt"]) == []
    assert where(home(branch).root, [MARKS["acme"]]) != [], "the search finds words"


async def test_none_of_its_turns_is_in_a_batch_of_the_shared_trainer(tmp_path):
    config = settings(tmp_path)
    with open_log(config) as log:
        for n in range(24):
            mine, theirs = (
                turn(f"acme-{n}", "acme", (Arm.BRANCH, Arm.SHARED)[n % 2]),
                turn(f"bolt-{n}", "bolt", Arm.LIVE),
            )
            name = "accepted" if n % 4 else "rejected"
            await log.append(mine, theirs, said(mine, name), said(theirs, name))
        desk = open_desk(config, log)
        await desk.poll()
        made = await desk.batch(1, 1, mine.spans[0].policy)
        assert made is not None
        assert {sample.turn.tenant for sample in made.samples} == {"bolt"}
        held = [row async for _, row in log.read(0, {Holdback})]
        assert {row.reason for row in held if row.turn.startswith("acme")} == {"arm:branch", "arm:shared"}
        await desk.close()


async def test_a_copy_that_is_killed_or_begun_again_has_each_row_once(tmp_path):
    config = settings(tmp_path)
    await fill(config)
    with open_run(branch_config(config, "acme")) as run:
        first = TenantRows(run)
        whole = await first.copy()
        before = [row async for _, row in run.log.read(0, {Turn, Signal, Delivered, ConsentGiven})]
        assert whole == len(before)
        for path in run.home.folds.glob("*"):
            path.unlink()  # as if killed before it was saved how far the copy reached
        again = TenantRows(run)
        await again.copy()
        assert [row async for _, row in run.log.read(0, {Turn, Signal, Delivered, ConsentGiven})] == before
        later = turn("acme-99", "acme", Arm.BRANCH)
        with open_log(config) as log:
            await log.append(later)
        assert (await again.copy(), await first.copy()) == (1, 1)
        assert [row.id for row in await copied(run, Turn)].count("acme-99") == 1
        first.close()
        again.close()


async def test_rows_that_come_into_a_restored_log_are_copied_wherever_they_stand(tmp_path):
    config = settings(tmp_path)
    branch = branch_config(config, "acme")
    for n in range(3):
        with open_log(config) as log:
            await log.append(turn(f"acme-{n}", "acme", Arm.BRANCH))
        if n == 0:
            back_up_log(config, tmp_path / "kept", lambda *_: None)
    with open_run(branch) as run:
        rows = TenantRows(run)
        await rows.copy()
        rows.close()
        home(config).log.rename(tmp_path / "lost")
        with hold(run.home.root, "train"), pytest.raises(Conflict, match="another train process"):
            restore_log(config, tmp_path / "kept", None, lambda *_: None)
        restore_log(config, tmp_path / "kept", None, lambda *_: None)
        with open_log(config) as log:  # as many as were there, or more
            await log.append(*[turn(f"acme-new-{n}", "acme", Arm.BRANCH) for n in range(2)])
        again = TenantRows(run)
        await again.copy()
        again.close()
        known = [f"acme-{n}" for n in range(3)]
        assert [each.id for each in await copied(run, Turn)] == [*known, "acme-new-0", "acme-new-1"]


async def test_a_new_master_key_opens_the_copy_too(tmp_path):
    for name in ("master", "next"):
        (tmp_path / name).write_bytes(name.encode() * 10)
    config, since = (
        settings(tmp_path, "record.encrypt='user'", f"record.master_key='{tmp_path / name}'")
        for name in ("master", "next")
    )
    for each in (config, branch_config(config, "acme")):
        with open_log(each) as log:
            await log.append(turn("acme-1", "acme", Arm.BRANCH, user="ann"))
    with pytest.raises(BadConfig, match="trains a branch: rekey in the run that serves"):
        rekey_log(branch_config(config, "acme"), tmp_path / "next")
    assert rekey_log(config, tmp_path / "next") == 2
    with open_log(since) as log:
        assert await needed(log, since) == []
    await forget(since, "acme", "ann", Console(quiet=True), wait_s=0.1)
    with open_run(branch_config(since, "acme")) as run:
        assert [each.redacted for each in await copied(run, Turn)] == [True]


async def test_rows_are_not_dropped_before_they_are_copied_nor_kept_in_a_copy_that_is_trained_no_more(tmp_path):
    old = ("record.segment_rows=10", "record.retain_days=1e-9")
    config = settings(tmp_path, *old)
    with open_run(config) as run, open_run(branch_config(config, "acme")) as branch:
        await run.log.append(*[turn(f"acme-{n}", "acme", Arm.BRANCH, finish=Finish.ABORT) for n in range(40)])
        await run.log.append(turn("acme-last", "acme", Arm.BRANCH))  # closes the last of the segments
        reading = LedgerFollower(run.log, config.reward, run.folds)
        await reading.catch_up()
        await reading.save()
        assert await drop_old_rows(run, run.log.newest()) == 0
        assert await run.log.horizon() == 0, "nothing is copied"
        rows = TenantRows(branch)
        await rows.copy()
        rows.close()
        assert await drop_old_rows(run, run.log.newest()) > 0
        assert await run.log.horizon() == 40
        assert await branch.log.horizon() == 0, "its own housekeeping drops its rows"
    without = settings(tmp_path, *old, "learn.tenants=[]")
    with open_run(without) as run:
        for _ in range(2):  # the first closes the newest segment
            await drop_old_rows(run, run.log.newest())
    with open_run(branch_config(config, "acme")) as branch:
        assert await branch.log.horizon() == 41
        assert await copied(branch, Turn) == []


async def test_whoever_is_forgotten_is_erased_from_the_copy_too(tmp_path):
    config = settings(tmp_path, "record.encrypt='user'")
    branch = branch_config(config, "acme")
    mine, stays = turn("acme-1", "acme", Arm.BRANCH, user="ann"), turn("acme-2", "acme", Arm.BRANCH, user="bob")
    with open_log(config) as log:
        await log.append(mine, stays)
    with open_run(branch) as run:
        rows = TenantRows(run)
        await rows.copy()
        console = Console(record=True, width=200)
        await forget(config, "acme", "ann", console, wait_s=0.1)
        text = " ".join(console.export_text().split())
        assert "`ostinato ship live --for acme` begins it anew" in text
        assert [each.redacted for each in await copied(run, Turn)] == [True, False]
        with pytest.raises(BadConfig, match="trains a branch: forget in the run that serves"):
            await forget(branch, "acme", "ann", console)
        with open_log(config) as log:  # ann comes back
            await log.append(turn("acme-3", "acme", Arm.BRANCH, user="ann"))
        await rows.copy()
        for path in run.home.folds.glob("*"):
            path.unlink()
        again = TenantRows(run)
        await again.copy()
        assert [each.redacted for each in await copied(run, Turn)] == [True, False, False]
        assert await copied(run, Forgotten)
        rows.close()
        again.close()


async def test_what_was_copied_while_somebody_was_forgotten_is_erased_when_the_row_about_it_comes(tmp_path):
    config = settings(tmp_path, "record.encrypt='user'")
    with open_log(config) as log:
        await log.append(turn("acme-1", "acme", Arm.BRANCH, user="ann"))
        with open_run(branch_config(config, "acme")) as run:
            rows = TenantRows(run)
            await rows.copy()
            await log.forget("acme", "ann")  # the branch's keys are not destroyed with it
            assert [each.redacted for each in await copied(run, Turn)] == [False]
            await rows.copy()
            assert [each.redacted for each in await copied(run, Turn)] == [True]
            rows.close()


async def test_a_person_is_erased_whose_row_there_has_the_number_of_another_persons_key_here(tmp_path):
    config = settings(tmp_path, "record.encrypt='user'")
    with open_log(config) as log:
        await log.append(turn("bolt-1", "bolt", Arm.LIVE, user="zoe"))
        await log.append(*[turn(f"acme-{user}", "acme", Arm.BRANCH, user=user) for user in ("ann", "bob")])
        with open_run(branch_config(config, "acme")) as run:
            rows = TenantRows(run)
            await rows.copy()
            await run.log.forget("acme", "bob")  # his is the second key here, and there hers is
            await log.forget("acme", "ann")
            (there,) = [row async for _, row in log.read(0, {Forgotten})]
            assert there.id in [row.id for row in await copied(run, Forgotten)], "the two rows have one id"
            await rows.copy()
            assert [each.redacted for each in await copied(run, Turn)] == [True, True]
            assert await run.log.note_forgotten() == 0, "each key that was destroyed here has its row"
            rows.close()


async def test_who_was_forgotten_alone_is_erased_from_the_copy_though_keys_are_tenants_now(tmp_path):
    config = settings(tmp_path, "record.encrypt='user'")
    now = settings(tmp_path, "record.encrypt='tenant'")
    with open_log(config) as log:
        await log.append(*[turn(f"acme-{user}", "acme", Arm.BRANCH, user=user) for user in ("ann", "bob")])
        with open_run(branch_config(config, "acme")) as run:
            rows = TenantRows(run)
            await rows.copy()
            rows.close()
        await log.forget("acme", "ann")
    with open_run(branch_config(now, "acme")) as run:
        rows = TenantRows(run)
        await rows.copy()
        assert [each.redacted for each in await copied(run, Turn)] == [True, False]
        rows.close()


async def test_rows_of_one_person_that_are_copied_while_keys_are_tenants_can_be_forgotten_alone(tmp_path):
    config, now = (settings(tmp_path, f"record.encrypt='{mode}'") for mode in ("user", "tenant"))
    with open_log(config) as log:
        await log.append(*[turn(f"acme-{user}", "acme", Arm.BRANCH, user=user) for user in ("ann", "bob")])
    with open_run(branch_config(now, "acme")) as run:
        rows = TenantRows(run)
        await rows.copy()
        rows.close()
    await forget(config, "acme", "ann", Console(quiet=True), wait_s=0.1)
    with open_run(branch_config(now, "acme")) as run:
        assert [each.redacted for each in await copied(run, Turn)] == [True, False]


async def test_what_lies_under_keys_is_not_copied_into_a_log_without(tmp_path):
    with open_log(settings(tmp_path, "record.encrypt='user'")) as log:
        await log.append(turn("acme-1", "acme", Arm.BRANCH, user="ann"))
    config = settings(tmp_path)
    said = "record.encrypt is 'none', and rows of the log lie under the keys in"
    with pytest.raises(BadConfig, match=said):
        check_branches(config)
    with open_run(branch_config(config, "acme")) as run, pytest.raises(BadConfig, match=said):
        TenantRows(run)


async def test_nobody_is_forgotten_anywhere_if_a_branchs_keys_cannot_be_opened(tmp_path):
    config = settings(tmp_path, "record.encrypt='user'")
    branch = branch_config(config, "acme")
    with open_log(config) as log, open_log(branch) as copy:
        for each in (log, copy):
            await each.append(turn("acme-1", "acme", Arm.BRANCH, user="ann"))
    (tmp_path / "master").write_bytes(b"m" * 40)
    rekey(home(branch).keys, None, tmp_path / "master")
    with pytest.raises(BadConfig, match="wrapped with a master key"):
        await forget(config, "acme", "ann", Console(quiet=True), wait_s=0.1)
    with open_log(config) as log:
        assert [row.redacted async for _, row in log.read(0, {Turn})] == [False]


# ---------------------------------------------------------------- the beginning, and a person's moves


async def test_it_begins_where_live_is_once_there_is_a_checkpoint(tmp_path):
    config = settings(tmp_path)
    made = await publish(open_store(config), 3)
    with open_run(branch_config(config, "acme")) as run:
        waits = asyncio.Event()
        beginning = asyncio.ensure_future(begin_branch(run, lambda _: waits.set()))
        waiting = asyncio.ensure_future(waits.wait())
        await asyncio.wait({beginning, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert not beginning.done(), "v2 was trained, and its trainer has no checkpoint yet"
        assert await run.store.read_ref("live") is None
        beginning.cancel()
        await asyncio.wait({beginning})
    fresh = settings(tmp_path / "fresh")
    (v0,) = await publish(open_store(fresh), 1)
    with open_run(branch_config(fresh, "acme")) as run:
        await begin_branch(run, lambda _: None)
        assert await run.store.read_ref("live") == await run.store.read_ref("base") == v0.hash
    assert made[0] == v0


class Steps:
    """Takes every step but those without turns, as the trainer does, and notes the anchors that it was given."""

    def __init__(self):
        self.step_count, self.anchors, self.bases = 0, [], []

    def step(self, samples, references, stop):
        self.anchors.append(references.anchor)
        raise NoSignal("no turns")

    def go_back(self, weights, number):
        self.bases.append(number)

    def skip_step(self):
        self.step_count += 1


async def a_trainer(run, live):
    """The branch's training worker over `Steps`, which writes no checkpoint."""
    trainer, desk = Steps(), open_desk(run.config, run.log, run.folds)
    released = Released(run.follower, live)

    async def anchor():
        return await run.follower.resolve("base")

    parts = {field.name: None for field in fields(Learning)}
    stepper = Stepper(trainer, released.snapshot, lambda learned: None, anchor)
    learner = Learner(source=None, rewards=None, trainer=stepper, publisher=None)
    candidates = SimpleNamespace(last=None)
    parts |= {"learner": learner, "trainer": trainer, "desk": desk, "released": released}
    parts |= {"candidates": candidates, "stored": Overlapped(candidates)}
    parts |= {"releases": ReleaseLedger(run.log, wall_clock), "ancestry": Ancestry(run.log)}
    worker = TrainWorker(run, Learning(**parts), SimpleNamespace(write=lambda *_, **__: None), Heartbeat())

    async def write():
        pass

    worker._checkpoint = write
    return worker, trainer


async def test_begun_anew_it_is_kept_near_its_new_beginning_and_offers_nothing_of_before(tmp_path):
    config = settings(tmp_path)
    v0, *_, v3 = await publish(open_store(config), 4)
    branch = branch_config(config, "acme")
    own, offered = await publish(open_store(branch), 2, "branch/acme", first=1, seed=1)
    with open_run(branch) as run:
        for ref, policy in {"base": v0, "candidate": offered, "previous": own}.items():
            await run.store.move_ref(ref, None, policy.hash)
        worker, trainer = await a_trainer(run, v0)
        await worker._begin_at(v0)
        await run.store.move_ref("candidate", None, offered.hash)
        await run.store.move_ref("live", offered.hash, v3.hash)
        await worker._rebase(v3)
        assert trainer.bases == [0, 3]
        assert trainer.anchors == [v0, v3], "its training is kept near where it is now"
        refs = await run.store.refs()
        assert refs["base"] == v3.hash
        assert {"candidate", "previous"}.isdisjoint(refs)
        await worker.parts.desk.close()
        await run.store.move_ref("base", v3.hash, v0.hash)  # as if killed once the step was written
        again, after = await a_trainer(run, v3)
        await again._resume_branch()
        assert (await run.store.read_ref("base"), after.anchors) == (v3.hash, [v3])
        await again.parts.desk.close()


async def test_a_release_on_a_branch_does_not_have_its_whole_log_read_again(tmp_path, monkeypatch):
    config = settings(tmp_path)
    (v0,) = await publish(open_store(config), 1)
    branch = branch_config(config, "acme")
    own, newer = await publish(open_store(branch), 2, "branch/acme", first=1, seed=1)
    with open_run(branch) as run:
        await run.store.move_ref("base", None, v0.hash)
        worker, trainer = await a_trainer(run, v0)
        await worker._begin_at(v0)
        await worker._rebase(own)
        begun, read = [], run.log.read
        monkeypatch.setattr(run.log, "read", lambda after, kinds: begun.append(after) or read(after, kinds))
        await worker._rebase(newer)
        assert begun == [1], "behind the step with which it began"
        assert trainer.bases == [0]
        await worker.parts.desk.close()


async def test_a_branch_that_is_trained_again_goes_on_though_rows_of_its_last_steps_were_dropped(tmp_path):
    old = ("record.retain_days=1e-9", "record.segment_rows=1")
    config = settings(tmp_path, *old)
    (v0,) = await publish(open_store(config), 1)
    branch = branch_config(config, "acme")
    (own,) = await publish(open_store(branch), 1, "branch/acme", first=2, seed=1)
    with open_run(branch) as run:
        begun = Batch(step=1, turns=(), credits=(), reference=v0, at=1.0, base=v0, even=True)
        given = Reward(turn="acme-1", value=1.0, function="f@1", signals=(), at=1.0)
        taken = Batch(step=2, turns=("acme-1",), credits=((0.1,),), reference=v0, at=2.0)
        await run.log.append(begun, turn("acme-1", "acme", Arm.LIVE), given, taken)
        desk = open_desk(branch, run.log, run.folds)
        await desk.poll()
        await desk.close()
    with open_run(settings(tmp_path, *old, "learn.tenants=[]")) as run:
        for _ in range(2):
            await drop_old_rows(run, 0)
    with open_run(branch) as run:
        assert await copied(run, Turn) == []
        worker, trainer = await a_trainer(run, v0)
        await worker._resume_branch()
        assert (trainer.bases, trainer.step_count) == ([v0.number, own.number], 3)
        assert [batch async for batch in worker.parts.desk.history(trainer.step_count)] == []
        await worker.parts.desk.close()


async def test_a_branch_that_was_not_trained_for_long_goes_on_behind_its_last_step(tmp_path):
    old = ("record.retain_days=1e-9", "record.segment_rows=1")
    config = settings(tmp_path, *old)
    (v0,) = await publish(open_store(config), 1)
    branch = branch_config(config, "acme")
    (own,) = await publish(open_store(branch), 1, "branch/acme", first=2, seed=1)
    with open_run(branch) as run:
        begun = Batch(step=1, turns=(), credits=(), reference=v0, at=1.0, base=v0, even=True)
        taken = replace(begun, step=2, base=None, at=2.0)
        desk = open_desk(branch, run.log, run.folds)
        await run.log.append(begun, taken)
        await desk.poll()
        await desk.close()
        await open_releases(run).bootstrap(own)  # a row that the desk does not read lies behind its snapshot
    with open_run(settings(tmp_path, *old, "learn.tenants=[]")) as run:
        for _ in range(2):
            await drop_old_rows(run, 0)
    with open_run(branch) as run:
        assert await run.log.horizon() == run.log.newest()
        worker, trainer = await a_trainer(run, own)
        trainer.step_count = 2  # as its checkpoint
        await worker._resume_branch()
        worker._refuse_older_log()
        assert (trainer.bases, worker.parts.desk.last_step, worker.parts.desk.lineage) == ([], 2, Lineage())
        await worker._begin_at(v0)
        assert [row.step for row in await copied(run, Batch)] == [1, 2, 3]
        await worker.parts.desk.close()


async def test_a_replay_names_the_branches_that_began_at_a_version_which_may_know_the_person(tmp_path):
    config = settings(tmp_path, "record.encrypt='user'")
    store = open_store(config)
    *_, v2 = await publish(store, 3)
    with open_run(branch_config(config, "acme")) as run:
        await run.store.move_ref("base", None, v2.hash)
        (own,) = await publish(run.store, 1, "branch/acme", first=3, seed=1)
    console = Console(record=True, width=400)
    with open_log(config) as log:
        await log.append(turn("bolt-1", "bolt", Arm.LIVE, user="zoe"))
    await forget(config, "bolt", "zoe", console, wait_s=0.1, replay=True)
    text = console.export_text()
    assert f"{v2} may know them, and the ref branches/acme/base keeps it" in text
    assert str(own) not in text


async def test_shipping_by_hand_writes_its_ledger_and_moves_live_nowhere(tmp_path):
    config = settings(tmp_path)
    v0, v1 = await publish(open_store(config), 2)
    branch = branch_config(config, "acme")
    with open_run(branch) as run:
        await run.store.move_ref("live", None, v0.hash)
        await open_releases(run).bootstrap(v0)
    await ship_branch(config, "live", "acme", "ann", Console(quiet=True))
    refs = await open_store(config).refs()
    assert (refs["branch/acme"], refs["live"]) == (v1.hash, v1.hash)
    with open_run(branch) as run:
        events = await copied(run, ReleaseEvent)
        assert [(row.action, row.policy, row.previous) for row in events] == [
            ("shipped", v0, None),
            ("shipped", v1, v0),
        ]
        assert await needed(run.log, branch) == [v1.hash, v0.hash]
    with open_run(config) as run:
        assert await needed(run.log, config) == [v1.hash, v0.hash], "a collection keeps what a branch needs"
    assert [each.run.tenant for each in branches_begun(config)] == ["acme"]
    assert branches_begun(config, "bolt") == []


# ---------------------------------------------------------------- the guard


async def test_it_is_told_that_the_guard_is_blind_while_rows_wait_to_be_copied(tmp_path):
    config = settings(tmp_path)
    with open_log(config) as log, open_run(branch_config(config, "acme")) as run:
        rows, watch = TenantRows(run), CopyWatch(run)

        async def told(now):
            await watch.look(now)
            return watch.trouble

        assert await told(0.0) == ""
        first = turn("bolt-0", "bolt", Arm.LIVE)
        await log.append(first)
        assert [await told(now) for now in (1000.0, 1599.0)] == ["", ""]
        assert "rows have waited for 10 minutes to be copied" in await told(1600.0)
        await rows.copy()
        await log.append(Holdback(turn="bolt-0", reason="x", at=1.0))
        assert [await told(now) for now in (1601.0, 9000.0)] == ["", ""], "rows that are not copied do not wait"
        await log.append(turn("bolt-1", "bolt", Arm.LIVE))
        assert await told(9001.0) == ""
        await rows.copy()
        await log.append(turn("bolt-2", "bolt", Arm.LIVE))
        assert await told(9700.0) == "", "it is another row that waits"
        assert "train@acme copies them" in await told(10300.0)
        rows.close()
        watch.close()


async def test_the_release_worker_tells_it(tmp_path, monkeypatch):
    monkeypatch.setattr(branches, "_STALLED_S", 0.0)
    monkeypatch.setattr(branches, "_WATCH_S", 0.001)
    config = settings(tmp_path)
    (v0,) = await publish(open_store(config), 1)
    life = WorkerContext(stopping=asyncio.Event(), pulse=Heartbeat())
    with open_log(config) as log, open_run(branch_config(config, "acme")) as run:
        await log.append(turn("bolt-0", "bolt", Arm.LIVE))
        await run.store.move_ref("live", None, v0.hash)
        judging = asyncio.create_task(_judge(run, life))
        async with asyncio.timeout(PATIENT_S):
            while "the guard is blind" not in (life.pulse.trouble() or ""):
                assert not judging.done()
                await asyncio.sleep(0.001)
        life.stopping.set()
        await judging


async def served_beside(config, own, good, days=0.4):
    """Turns of forty people, half of whom stayed on live; the shares of good ones on the branch, and beside it."""
    chance, now, rows = random.Random(3), wall_clock(), []
    with open_log(config) as log:
        for slot in range(int(days * 48) - 2):
            at = now - days * 86_400 + slot * 1800.0 + 900.0
            for n in range(40):
                arm = (Arm.BRANCH, Arm.SHARED)[n % 2]
                live = PolicyVersion(number=slot // 6, hash=f"{slot // 6:064x}")  # it moves on meanwhile
                policy = own if arm is Arm.BRANCH else live
                made = turn(f"{slot}:{n}", "acme", arm, user=f"u{n}", ended_at=at)
                made = replace(made, spans=(replace(made.spans[0], policy=policy),))
                name = "accepted" if chance.random() < good[n % 2] else "rejected"
                rows += [made, a_signal(made, name, at=at + 1.0, id=made.id)]
        await log.append(*rows)


@pytest.mark.parametrize(("good", "harmful"), [((0.3, 0.7), True), ((0.7, 0.7), False), ((0.9, 0.5), False)])
async def test_a_branch_that_harms_beside_live_is_rolled_back_alone(tmp_path, good, harmful):
    config = settings(tmp_path, "release.outcomes.maturity_s=1")
    branch = branch_config(config, "acme")
    (v0,) = await publish(open_store(config), 1)
    (own,) = await publish(open_store(branch), 1, "branch/acme", first=1, seed=1)
    await served_beside(config, own, good)
    began = wall_clock() - 0.4 * 86_400
    with open_run(branch) as run:
        for n, (policy, previous) in enumerate([(v0, None), (own, v0)]):
            row = ReleaseEvent(
                id=f"r{n}", action="shipped", policy=policy, previous=previous, reason="x", detail={}, at=began + n
            )
            await run.log.append(row)
        rows = TenantRows(run)
        await rows.copy()
        rows.close()
        event = await open_releases(run).watch()
    refs = await open_store(config).refs()
    assert refs["live"] == v0.hash
    assert refs["branch/acme"] == (v0 if harmful else own).hash
    assert (event is not None) is harmful
    if event is not None:
        assert event.action == "rolled_back"
        assert "acceptance against the control arm worse by" in event.reason
