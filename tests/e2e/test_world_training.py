"""Training in a simulated world through the real processes: it learns, whoever is killed; nothing is rewarded twice; the lag is bounded."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from world_runs import SETTINGS, crew, examined, graded_twice, steps, until_step, write_tasks

from ostinato.app.storage import home, open_log
from ostinato.config import load
from ostinato.core.records import Reward, Turn
from ostinato.launch.commands.worlds.run import read_attempts
from ostinato.launch.commands.worlds.train import world_overrides
from ostinato.worlds.rollout.finished import read_finished


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
        timeout=WHOLE_PROGRAM_S,
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
