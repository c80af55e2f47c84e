"""What `ostinato up` tidies up: the disk of a run that goes on stays bounded, and a chore that fails hides no other."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import PATIENT_S

from ostinato.app.storage import open_follower, open_run
from ostinato.config import load
from ostinato.core.errors import Corrupt, NotFound, Unavailable
from ostinato.core.files import disk_use
from ostinato.core.notices import Stamp
from ostinato.core.records import Batch, Finish, PolicyVersion, ReleaseEvent, Reward, Turn
from ostinato.core.weights import WeightArray
from ostinato.launch.placing.heartbeat import Heartbeat
from ostinato.launch.workers import housekeeping
from ostinato.launch.workers.housekeeping import Rounds, remove_leftovers
from ostinato.launch.workers.worker_main import WorkerContext
from ostinato.reward.log_fold import LedgerFollower
from ostinato.status.progress_lines import last_lines
from ostinato.status.summary import FOLD, keep, summarise
from ostinato.testing.records import a_turn
from ostinato.weights.keep.fsck import verify
from ostinato.weights.publish.publisher import VersionPublisher


def weights(step: int):
    codes = np.random.default_rng(step).integers(0x3F80, 0x3FFF, 20_000).astype(np.uint16)
    return {"w": WeightArray("BF16", (20_000,), codes.view(np.uint8))}


@pytest.fixture
def settings(tmp_path):
    return [
        f"run.directory={tmp_path / 'run'}",
        "collect.grace_hours=0",
        "collect.keep=3",
        "collect.releases=2",
        "housekeeping.every_s=0.05",
        "publish.anchor_every=4",
    ]


@pytest.fixture
def run(settings):
    with open_run(load(None, settings)) as opened:
        yield opened


@pytest.fixture
def life():
    return WorkerContext(stopping=asyncio.Event(), pulse=Heartbeat())


class Busy:
    """A run at work: each step a version, and now and then a release."""

    def __init__(self, run) -> None:
        self._run, self._publisher = run, VersionPublisher(run.store, run.config.publish)
        self.base = None
        self.step = 0

    async def work(self, steps: int) -> None:
        for _ in range(steps):
            ref = "candidate" if self.step % 2 else "live"
            done = await self._publisher.publish(self.step, weights(self.step), run="r", base=self.base, ref=ref)
            if ref == "live":
                event = ReleaseEvent(
                    id=str(self.step),
                    action="shipped",
                    policy=done.policy,
                    previous=self.base,
                    reason="",
                    detail={},
                    at=1.0,
                )
                await self._run.log.append(event)
            self.base = done.policy
            self.step += 1


async def test_the_disk_of_a_run_that_goes_on_stays_bounded(run, life):
    busy, rounds, sizes = Busy(run), Rounds(run, life), []
    for _ in range(8):
        await busy.work(5)
        await rounds.tidy()
        sizes.append(disk_use(run.home.weights))
    assert max(sizes[4:]) < 1.5 * max(sizes[:3]), sizes
    assert life.pulse.trouble() is None
    assert (await verify(run.store)).problems == []
    kept = [ref for ref in await run.store.refs() if ref.startswith("version/")]
    assert 3 <= len(kept) <= 3 + 2 + 2 + 4, "the newest, the last released, the refs, and what they build on"
    untidied = disk_use(run.home.weights)
    await busy.work(30)
    assert disk_use(run.home.weights) > 2 * untidied, "without rounds it grows"
    said = [line["said"] for line in last_lines(run.home.progress("housekeeping"))]
    assert len(said) == 8
    assert "deleted" in said[-1]["weights"]


async def test_what_a_restarted_trainer_takes_again_stays(run, life):
    """A batch names the release that it was measured against; a checkpoint may be older than that release's place in the ledger."""
    busy = Busy(run)
    await busy.work(1)
    old = busy.base
    for step in range(1, 4):
        await run.log.append(Batch(step=step, turns=(f"t{step}",), credits=((0.1,),), reference=old, at=1.0))
    await busy.work(20)
    await Rounds(run, life).tidy()
    await open_follower(run.config).fetch(old)  # another process's: one keeps what it has read
    for step in range(4, 40):
        await run.log.append(Batch(step=step, turns=(f"t{step}",), credits=((0.1,),), reference=busy.base, at=1.0))
    await Rounds(run, life).tidy()
    with pytest.raises(NotFound):
        await open_follower(run.config).fetch(old)  # another process's: one keeps what it has read


@pytest.mark.parametrize(("waiting", "taught", "horizon"), [(0, 0, 40), (17, 0, 10), (0, 25, 20), (34, 8, 0)])
async def test_the_log_forgets_what_is_old_and_needed_no_more(settings, life, waiting, taught, horizon):
    """Ten rows a segment. Turn `waiting` has no outcome yet; `taught` is in a batch that a restarted trainer takes again."""
    words = [*settings, "record.segment_rows=10", "record.retain_days=1e-9", "housekeeping.collect=false"]
    with open_run(load(None, words)) as run:
        rounds = Rounds(run, life)
        for number in range(1, 41):
            finish = Finish.STOP if number in (waiting, taught) else Finish.ABORT
            await run.log.append(a_turn(f"t{number}:0", finish=finish))
        if taught:
            await run.log.append(Reward(turn=f"t{taught}:0", value=1.0, function="f@1", signals=(), at=1.0))
            policy = PolicyVersion(number=0, hash="a" * 64)
            await run.log.append(Batch(step=1, turns=(f"t{taught}:0",), credits=((0.1,),), reference=policy, at=1.0))
        await run.log.append(Stamp(id="c", contract="{}", at=1.0))
        await rounds.tidy()
        assert await run.log.horizon() == 0, "nobody has said yet how far the log was read"
        reading = LedgerFollower(run.log, run.config.reward, run.folds)
        await reading.catch_up()
        await reading.save()
        await rounds.tidy()
        assert await run.log.horizon() == 0, "one of two has not said it"
        seen, _ = await summarise(run.log, run.folds, run.log.newest())
        await keep(seen, run.folds)
        await rounds.tidy()
        assert await run.log.horizon() == horizon
        assert life.pulse.trouble() is None
        again = LedgerFollower(run.log, run.config.reward, run.folds)
        await again.catch_up()
        assert again.ledger.open.keys() == ({f"t{waiting}:0"} if waiting else set())
        needed = [(f"t{number}:0",) for number in (waiting, taught) if number]
        assert len(await run.log.find(Turn, needed)) == len(needed)
    said = [line["said"].get("log") for line in last_lines(run.home.progress("housekeeping"))]
    assert said == [None, None, f"dropped {horizon // 10} old segments of the log" if horizon else None]


async def test_without_a_time_to_keep_it_the_log_keeps_everything(settings, life):
    with open_run(load(None, [*settings, "record.segment_rows=1"])) as run:
        for number in range(4):
            await run.log.append(a_turn(f"t{number}:0", finish=Finish.ABORT))
        await Rounds(run, life).tidy()
        assert len([row async for _, row in run.log.read(0, {Turn})]) == 4


async def test_collection_can_be_left_to_others(settings, life):
    with open_run(load(None, [*settings, "housekeeping.collect=false"])) as run:
        await Busy(run).work(20)
        await Rounds(run, life).tidy()
        assert len([ref for ref in await run.store.refs() if ref.startswith("version/")]) == 20


async def test_a_chore_that_fails_is_trouble_until_it_succeeds_and_the_others_go_on(run, life, monkeypatch):
    busy, rounds = Busy(run), Rounds(run, life)
    await busy.work(10)

    left = run.home.root / "config.json.77.partial"
    left.touch()
    os.utime(left, (1, 1))

    async def away(_):
        raise Unavailable("the bucket is away")

    with monkeypatch.context() as patched:
        patched.setattr(housekeeping, "collect_weights", away)
        await rounds.tidy()
        assert life.pulse.trouble() == "weights: the bucket is away"
        assert not left.exists()
        assert last_lines(run.home.progress("housekeeping"))[-1]["failing"] == ["weights"]
    await rounds.tidy()
    assert life.pulse.trouble() is None
    assert last_lines(run.home.progress("housekeeping"))[-1]["failing"] == []


async def test_a_manifest_that_cannot_be_read_is_trouble_and_no_end(run, life):
    busy, rounds = Busy(run), Rounds(run, life)
    await busy.work(10)
    for path in (run.home.weights / "objects").rglob("*"):
        if path.is_file() and path.stat().st_size < 1_500:
            path.write_bytes(b"damaged")
    await rounds.tidy()
    assert life.pulse.trouble().startswith("weights: ")
    with pytest.raises(Corrupt):
        await housekeeping.collect_weights(run)


async def test_the_worker_keeps_the_summary_that_status_starts_from(run, life, settings):
    await Busy(run).work(4)
    working = asyncio.create_task(housekeeping._work(run, life))
    async with asyncio.timeout(PATIENT_S):
        while await run.folds.load(FOLD) is None:
            await asyncio.sleep(0.01)
    working.cancel()
    cursor, state = await run.folds.load(FOLD)
    assert cursor == run.log.newest()
    assert state["actions"] == {"shipped": 2}


def test_only_what_killed_writers_left_is_removed(tmp_path):
    old = [
        "config.json.77.partial",
        "folds/status.77",
        "checkpoints/.LATEST.77-1.partial",
        "erasure/.job.json.77-1.partial",
    ]
    kept = ["config.json", "folds/status.fold", "gateway.url.78.partial", "admin.key", "log.db", "run.77"]
    for name in [*old, *kept]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for name in [*old, "config.json", "run.77", "folds/status.fold"]:
        os.utime(tmp_path / name, (0, 0))
    assert sorted(remove_leftovers(tmp_path, before=1_000.0)) == sorted(Path(name).name for name in old)
    assert {str(path.relative_to(tmp_path)) for path in Path(tmp_path).rglob("*") if path.is_file()} == set(kept)


def test_a_partial_file_that_gets_its_name_meanwhile_is_passed_over(tmp_path, monkeypatch):
    for name in (".workers.json.7-8.partial", "config.json.77.partial"):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (0, 0))
    is_file = Path.is_file

    def seen(path):
        found = is_file(path)
        if path.name.startswith(".workers"):
            path.rename(tmp_path / "workers.json")  # by its writer
        return found

    monkeypatch.setattr(Path, "is_file", seen)
    assert remove_leftovers(tmp_path, before=1_000.0) == ["config.json.77.partial"]


def test_what_a_killed_restoration_left_is_removed(tmp_path):
    """Unless something in it was written a short while ago: it may be going on."""
    names = (".log.restoring", ".log.replaced")
    for name in (*names, "log", ".log.other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log-keys.db").write_text("x")
        os.utime(tmp_path / name, (0, 0))
    assert remove_leftovers(tmp_path, before=1_000.0) == []
    for name in (*names, "log", ".log.other"):
        os.utime(tmp_path / name / "log-keys.db", (0, 0))
    assert remove_leftovers(tmp_path, before=1_000.0) == list(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".log.other", "log"]
