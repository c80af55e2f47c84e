"""Measuring a taskset through the real processes: which weights answer is exact, nothing is learned, and the run is left as it was."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.e2e.test_world_training import SETTINGS, steps, train, write_tasks

from ostinato.app.storage import home, open_follower, open_log, open_store
from ostinato.config import load
from ostinato.core.records import Batch, Turn
from ostinato.launch.commands.worlds.run import read_attempts
from ostinato.record.roles import hold
from ostinato.run_directory import EVALUATION_REF
from ostinato.worlds.rollout.finished import read_finished


def run(tasks: Path, settings, *more: str) -> subprocess.CompletedProcess[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    return worlds("run", str(tasks), *more, *words)


def watch(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return worlds("watch", str(directory), *more)


def worlds(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ostinato.cli", "worlds", *words],
        capture_output=True,
        text=True,
        timeout=WHOLE_PROGRAM_S,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
        check=False,
    )


def versions(found: dict) -> list[tuple[int, int, int]]:
    """(oldest, newest, rollouts) of what answered."""
    return [
        (each["policy"]["number"], each["policy_last"]["number"], each["rollouts"]) for each in found["answered_by"]
    ]


@pytest.mark.examination
async def test_a_fresh_run_measures_the_model_that_it_starts_from(tmp_path, quick_settings):
    tasks = write_tasks(tmp_path / "letters.jsonl", held_out=6, canary=2)
    settings, out = quick_settings(tmp_path, "evaluate.suite=''", "model.numerics=fast"), tmp_path / "out.jsonl"
    done = await asyncio.to_thread(
        run, tasks, settings, "--split", "all", "--tries", "3", "--limit", "20", "--out", str(out)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass@1" in done.stdout
    assert "best of 3" in done.stdout
    assert "answered by v0@" in done.stdout
    assert ", pinned" in done.stdout
    config = load(None, settings)
    records, bad = read_finished(out.read_text().splitlines())
    assert (len(records), bad) == (60, 0)
    assert len({record.task for record in records}) == 20
    assert read_finished(home(config).finished.read_text().splitlines()) == (records, 0)
    with open_log(config) as log:
        turns = {row.id: row async for _, row in log.read(0, {Turn})}
    assert {turn for record in records for turn in record.turns} == set(turns)
    assert {span.policy for turn in turns.values() for span in turn.spans} == {records[0].policy}
    assert {turn.arm.people for turn in turns.values()} == {False}


@pytest.mark.examination
async def test_a_version_of_ones_choice_answers_and_the_run_is_left_as_it_was(tmp_path, quick_settings):
    tasks = write_tasks(tmp_path / "letters.jsonl", held_out=10)
    settings = quick_settings(tmp_path)
    trained = await asyncio.to_thread(train, tasks, settings, "--steps", "4")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    config = load(None, [*settings, *SETTINGS])
    place, store = home(config), open_store(config)
    own, refs = place.config.read_bytes(), await store.refs()
    found = {}
    for release in ("newest", "v0", "v2"):
        done = await asyncio.to_thread(run, tasks, settings, "--tries", "2", "--json", "--release", release)
        assert done.returncode == 0, done.stdout + done.stderr
        found[release] = json.loads(done.stdout)
        assert found[release]["whole"]
        number = found[release]["asked_for"]["number"]
        assert versions(found[release]) == [(number, number, 20)]
    assert [found[release]["asked_for"]["number"] for release in ("v0", "v2")] == [0, 2]
    newest = await open_follower(config).resolve("world")
    assert newest.number == max(line["step"] for line in steps(place)), "the last step's version is stored at the end"
    assert found["newest"]["asked_for"] == {"number": newest.number, "hash": newest.hash}
    assert newest.number >= 4
    assert place.config.read_bytes() == own
    assert not (place.root / "measuring.json").exists()
    after = await store.refs()
    assert after.pop(EVALUATION_REF) == refs["live"]
    assert after == refs
    assert {attempt.policy.number for attempt in read_attempts(place.finished)} >= {0, 2}
    with open_log(config) as log:
        rows = [row async for _, row in log.read(0, {Turn, Batch})]
    measured = {row.id for row in rows if isinstance(row, Turn) and row.group is None}
    assert not measured & {turn for row in rows if isinstance(row, Batch) for turn in row.turns}
    screen = await asyncio.to_thread(watch, place.root, "--once")
    assert screen.returncode == 0, screen.stderr
    assert "letters" in screen.stdout
    assert "held_out" in screen.stdout
    one = await asyncio.to_thread(watch, place.root, "--task", "held_out0")
    assert one.returncode == 0, one.stderr
    assert "say 0" in one.stdout, "the prompt in words"
    assert "graded" in one.stdout
    with hold(place.root, "release"):
        refused = await asyncio.to_thread(run, tasks, settings, "--release", "v2")
    assert refused.returncode == 2
    assert "the release worker is running" in refused.stderr


def test_what_is_wrong_is_said_before_anything_is_started(tmp_path, quick_settings):
    tasks = write_tasks(tmp_path / "letters.jsonl")
    found = run(tasks, quick_settings(tmp_path), "--split", "canary")
    assert found.returncode == 2
    assert "no task has the split 'canary'" in found.stderr
    assert not (tmp_path / "run" / "log").exists()
