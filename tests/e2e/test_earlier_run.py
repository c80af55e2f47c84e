"""A run that an earlier version made is opened, and goes on: log, snapshots, checkpoint and weights keep their formats."""

import asyncio
import contextlib
import tarfile
from pathlib import Path

import pytest
from tests.e2e.conftest import Run, ready
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import home, open_run
from ostinato.config import load
from ostinato.core.records import Batch, Signal, Turn
from ostinato.launch.commands.crew import launch
from ostinato.record.roles import hold
from ostinato.reward.log_fold import LedgerFollower, snapshot
from ostinato.status.observed_run import RunObserver
from ostinato.train import checkpoint
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "earlier_run.tar.xz"
TURNS, STEPS = 959, 6


@pytest.fixture
def earlier(tmp_path):
    """The run's configuration, as it was written, at another place."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "run"
    moved = {"run.directory": run, "model.source": tmp_path / "model", "evaluate.suite": tmp_path / "suite.jsonl"}
    return load(run / "config.json", [f"{key}='{value}'" for key, value in moved.items()])


async def test_an_earlier_run_is_opened(earlier):
    with open_run(earlier) as opened:
        log = opened.log
        turns = [row async for _, row in log.read(0, {Turn})]
        signals = [row async for _, row in log.read(0, {Signal})]
        found, seen = await recount(log), await RunObserver(home(earlier), log).look()
        stored = await verify(opened.store, every=True)
        folds = {name: await opened.folds.load(name) for name in ("desk", "monitors", "status")}
        (live,) = [event.policy for event in seen.shipped()][-1:]
        served = await Follower(opened.store).fetch(live)  # verified by hash
    assert (len(turns), found.balanced, len(signals) > 300) == (TURNS, True, True)
    assert all(turn.sampled_ids and len(turn.logprobs) == len(turn.sampled_ids) for turn in turns)
    assert {turn.calls for turn in turns} == {None}, "which tools they called was not stored"
    assert len(seen.shipped()) == 3, "besides version 0"
    assert (stored.problems, stored.rebuilt > 0) == ([], True)
    assert [name for name, fold in folds.items() if fold is None] == []
    assert len(served) > 5
    kept = checkpoint.load(home(earlier).checkpoints)
    assert kept is not None
    assert kept.step == STEPS


async def test_the_reward_ledger_of_an_earlier_run_is_made_again_from_its_log_and_goes_on_from_there(earlier):
    """Its snapshot has the format of a baseline that learned otherwise."""
    with open_run(earlier) as opened:
        anew = LedgerFollower(opened.log, earlier.reward)
        await anew.catch_up()
        upgraded = LedgerFollower(opened.log, earlier.reward, opened.folds)
        read = [row async for row in upgraded.rows(saving=False)]
        await upgraded.save()
        resumed = LedgerFollower(opened.log, earlier.reward, opened.folds)
        more = [row async for row in resumed.rows(saving=False)]
    assert len(read) > TURNS
    assert len(more) < TURNS / 10, "it was not read from the first row"
    assert snapshot(upgraded.ledger) == snapshot(anew.ledger) == snapshot(resumed.ledger)


@pytest.mark.examination
async def test_an_earlier_run_goes_on(earlier, simulated_users):
    """Restarted under all its workers, it takes further steps on new turns and publishes them, and its books balance."""
    events, place = [], home(earlier)
    with open_run(earlier) as opened:
        observer = RunObserver(place, opened.log)
        with hold(place.root, "up"):
            async with launch(earlier, lambda who, what: events.append((who, what))) as launched, asyncio.timeout(300):
                url = await launched.during(ready(place, ("live", "control")))
                async with simulated_users(Run(earlier, launched, events, url, contextlib.AsyncExitStack())) as acked:
                    while len([row async for _, row in opened.log.read(0, {Batch})]) < STEPS + 3:
                        await asyncio.sleep(0.3)
        found, seen = await recount(opened.log), await observer.look()
        stored = await verify(opened.store)
    assert (acked.failures, found.balanced, stored.problems) == (0, True, [])
    assert max(each["number"] for each in seen.published) > STEPS
    assert not [what for _, what in events if "starts again" in what]
