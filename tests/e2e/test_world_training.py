"""Training in a simulated world through the real processes: it learns, whoever is killed; nothing is rewarded twice; the lag is bounded."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from ostinato.app.storage import Home, home, open_log
from ostinato.config import load
from ostinato.core.records import Arm, Batch, Holdback, Reward, Turn
from ostinato.launch.commands.up import launch
from ostinato.launch.commands.worlds.coverage import read_attempts
from ostinato.launch.commands.worlds.overrides import world_overrides
from ostinato.launch.commands.worlds.train import CREW
from ostinato.launch.views.progress import last_lines
from ostinato.record.lock import hold
from ostinato.reward.accounting import account, recount
from ostinato.worlds.rollout.finished import read_finished
from ostinato.worlds.rollout.journal import EventFile

LIKED = "^[a-z]"
GROUP, GROUPS, BOUND = 16, 4, 6
SETTINGS = (
    f"worlds.group={GROUP}",
    f"worlds.groups={GROUPS}",
    "worlds.concurrency=64",
    "worlds.window=8",
    "worlds.epochs=0",
    "worlds.retry_pause_s=0.1",
    "worlds.poll_s=0.05",
    f"reward.world_staleness={BOUND}",
    "learn.publish_every=1000",
    "train.learning_rate=5e-3",
    "follow.interval_s=0.1",
    "evaluate.suite=''",
    "model.numerics=fast",
)


def write_tasks(path: Path, **held_out: int) -> Path:
    """Prompts that are answered well with a lower-case letter."""
    rows = [
        {
            "id": f"{split}{n}",
            "family": "letters",
            "split": split,
            "messages": [{"role": "user", "content": f"say {n % 7}"}],
            "tokens": 6,
            "grading": {"grader": "pattern", "data": {"pattern": LIKED}},
        }
        for split, count in ({"train": 40} | held_out).items()
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextlib.asynccontextmanager
async def crew(config):
    events = []
    with hold(home(config).root, "up"):
        async with launch(config, lambda who, what: events.append((who, what)), front="serve", names=CREW) as launched:
            yield launched


def steps(place: Home) -> list[dict]:
    return [line for line in last_lines(place.progress("train"), 1 << 22) if line["kind"] == "step"]


async def until_step(place: Home, count: int) -> None:
    while max((line["step"] for line in steps(place)), default=0) < count:
        await asyncio.sleep(0.1)


async def examined(config) -> dict:
    """What the log says of the run, and that nothing in it contradicts a promise."""
    with open_log(config) as log:
        rows = [row async for _, row in log.read(0, {Turn, Batch, Reward, Holdback})]
        found, again = await recount(log), await account(log, config=config.reward)
    turns = {row.id: row for row in rows if isinstance(row, Turn)}
    batches = [row for row in rows if isinstance(row, Batch)]
    rewards = Counter(row.turn for row in rows if isinstance(row, Reward))
    trained = Counter(turn for batch in batches for turn in batch.turns)
    assert found.balanced, found.contradictions
    assert (found.trained, found.held) == (again.trained, again.held)
    assert max(rewards.values()) == max(trained.values()) == 1, "nothing is rewarded or learned from twice"
    assert {turn.arm for turn in turns.values()} == {Arm.WORLD}
    lags = [
        batch.step - 1 - span.policy.number for batch in batches for turn in batch.turns for span in turns[turn].spans
    ]
    assert max(lags) <= BOUND
    taken = defaultdict(set)
    for batch in batches:
        for turn in batch.turns:
            taken[turns[turn].group].add(batch.step)
        assert len({turns[turn].group for turn in batch.turns}) == GROUPS
    assert all(len(at) == 1 for at in taken.values()), "no group is parted"
    sizes = Counter(turns[turn].group for turn in trained)
    assert set(sizes.values()) == {GROUP}, "a rollout that was torn is replaced"
    return {"lags": lags, "steps": len(batches), "torn": found.held.get("world:rollout_torn", 0)}


def graded_twice(place: Home) -> list[str]:
    """Members of groups that the journal graded more than once."""
    journal, events = EventFile.open(place.rollouts)
    journal.close()
    graded = Counter((event["n"], event["member"]) for event in events if event["kind"] == "ended" and event["last"])
    return [str(member) for member, times in graded.items() if times > 1]


@pytest.mark.examination
async def test_it_learns_while_each_worker_is_killed(tmp_path, quick_settings):
    tasks = write_tasks(tmp_path / "letters.jsonl")
    config = load(None, [*quick_settings(tmp_path, *world_overrides(tasks)), *SETTINGS])
    place = home(config)
    async with asyncio.timeout(420):
        async with crew(config) as launched:
            workers = {watched.worker.name: watched.worker for watched in launched.supervisor.watched}
            for number, name in enumerate(["rollout", "train", "serve", "rollout", "train", "rollout"], 1):
                await launched.during(until_step(place, 5 * number))
                os.kill(workers[name].pid, signal.SIGKILL)
            await launched.during(until_step(place, 45))
    found = await examined(config)
    assert found["steps"] >= 45
    assert graded_twice(place) == []
    rewards = [line["reward_mean"] for line in steps(place)]
    early, late = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert late > early + 0.2, f"reward {early:.2f} -> {late:.2f}"


def train(tasks: Path, settings: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    words = [word for setting in (*settings, *SETTINGS) for word in ("--set", setting)]
    return subprocess.run(
        [sys.executable, "-m", "ostinato.cli", "train", "--world", str(tasks), *more, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
        check=False,
    )


@pytest.mark.examination
async def test_the_command_trains_shows_its_steps_and_goes_on_where_it_was(tmp_path, quick_settings):
    tasks = write_tasks(tmp_path / "letters.jsonl", held_out=3, canary=1)
    settings = quick_settings(tmp_path, "worlds.measure_every=4")
    first = await asyncio.to_thread(train, tasks, settings, "--steps", "3")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "letters: 44 tasks" in first.stdout
    assert "step    3  reward" in first.stdout
    assert "trainer idle" in first.stdout
    assert "measured   held_out: " in first.stdout
    assert "measured   canary: " in first.stdout
    again = await asyncio.to_thread(train, tasks, settings, "--steps", "6")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on after step" in again.stdout
    assert "step    6  reward" in again.stdout
    config = load(None, [*settings, *world_overrides(tasks), *SETTINGS])
    assert (await examined(config))["steps"] >= 6
    await check_finished(config)


async def check_finished(config) -> None:
    """What is kept of finished rollouts is what the log says of them, their weights included."""
    kept, bad = read_finished(home(config).finished.read_text().splitlines())
    assert bad == 0
    with open_log(config) as log:
        turns = {row.id: row async for _, row in log.read(0, {Turn})}
        rewards = {row.turn: row.value async for _, row in log.read(0, {Reward})}
    for record in kept:
        spans = [span.policy for turn in record.turns for span in turns[turn].spans]
        assert (record.policy, record.policy_last) == (min(spans), max(spans))
        assert {(turns[turn].episode, turns[turn].group) for turn in record.turns} == {(record.episode, record.group)}
        if record.group is not None and record.turns[-1] in rewards:
            assert rewards[record.turns[-1]] == record.value
    assert {record.split.value for record in kept} == {"train", "held_out", "canary"}
    assert len({record.policy for record in kept}) > 1
    assert read_attempts(home(config).finished)


def test_what_is_wrong_is_said_before_anything_is_started(tmp_path, quick_settings):
    found = train(tmp_path / "missing.jsonl", quick_settings(tmp_path))
    assert found.returncode == 2
    assert "missing.jsonl" in found.stdout + found.stderr
    assert not (tmp_path / "run" / "log").exists()
