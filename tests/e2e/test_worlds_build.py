"""A package of our own becomes tasks in real sandboxes, and each task holds what it says."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from tests.fakes.tiny_package import MODULE, tiny_sdist

from ostinato.app.worlds_building import open_build_place
from ostinato.worlds.building.config import BuildConfig
from ostinato.worlds.building.package_build import PackageBuild
from ostinato.worlds.building.sources.fetch import FetchedArchive
from ostinato.worlds.building.trying.runs import SuiteJob, SuiteRuns
from ostinato.worlds.tasks.tasksets import load, save, taskset_of


@pytest.fixture
def no_index(monkeypatch):
    """What is installed here stands for what pip would fetch: this test reaches no network."""

    async def wheels(_requirements):
        from importlib.metadata import files

        found = {}
        for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for path in files(name) or ():
                if path.suffix == ".py" or "dist-info" in str(path):
                    found[str(path)] = Path(str(path.locate())).read_bytes()
        return found

    monkeypatch.setattr("ostinato.worlds.building.package_build.fetch_wheels", wheels)


async def build(place, **more):
    data = tiny_sdist()
    archive = FetchedArchive(name="tiny_counts-1.0.tar.gz", data=data, sha256=hashlib.sha256(data).hexdigest())
    return await PackageBuild(place, BuildConfig(batch=2, **more), archive, "tiny-counts").run(lambda *_: None)


async def test_a_package_becomes_tasks_that_hold(tmp_path, no_index):
    out = tmp_path / "tiny.jsonl"
    place = open_build_place(out, tmp_path / "cache")
    try:
        result = await build(place)
        assert {task.family for task in result.tasks} == {"package.removal", "package.deletion", "package.bug"}
        assert not any("unused" in task.about["function"] for task in result.tasks)  # no test needs it
        journal = next((tmp_path / "cache").glob("*/tried.jsonl"))
        lines = journal.read_text()
        journal.write_text(lines[: lines.rindex('{"functions"') + 40])  # as if it was killed while it wrote
        again = await build(place)
        assert {task.id for task in again.tasks} == {task.id for task in result.tasks}
        await holds(place, result.tasks)
    finally:
        await place.backend.close()
    taskset = taskset_of("tiny", result.tasks)
    save(taskset, out)
    assert load(out) == taskset


async def holds(place, tasks):
    """Every listed test does what the task says, without the change and with it."""
    for task in tasks:
        runs = SuiteRuns(place.backend, task.spec, place.python, ("pytest",))
        spec = task.spec.env["PYTHONPATH"].replace("/work", place.workdir)
        object.__setattr__(task.spec, "env", {"PYTHONPATH": spec})
        fail, keep = task.grading.data["fail_to_pass"], task.grading.data["pass_to_pass"]
        job = SuiteJob(id="a", targets=("tests",), tests=(*fail, *keep))
        mended = SuiteJob(id="b", targets=("tests",), tests=(*fail, *keep), edits=task.grading.data["solution"])
        before, after = await runs.run([job, mended], 3)
        assert before is not None
        assert after is not None
        assert before.passed == set(keep)
        assert after.passed == {*fail, *keep}
        assert task.grading.data["solution"] == {"tiny_counts.py": MODULE}


async def test_a_suite_cannot_reach_the_host_and_what_it_writes_is_undone(tmp_path, no_index):
    place = open_build_place(tmp_path / "a.jsonl", tmp_path / "cache")
    try:
        result = await build(place, tasks=1)
        spec = result.tasks[0].spec
        object.__setattr__(spec, "env", {"PYTHONPATH": spec.env["PYTHONPATH"].replace("/work", place.workdir)})
        runs = SuiteRuns(place.backend, spec, place.python, ("pytest",))
        secret = tmp_path / "secret"
        secret.write_text("secret")
        hostile = (
            "import os, socket, pytest\n"
            f"def test_host():\n    assert not os.path.exists({str(secret)!r})\n"
            "def test_net():\n    with pytest.raises(OSError):\n        socket.create_connection(('1.1.1.1', 53), 1)\n"
            "def test_write():\n    assert not os.path.exists('left')\n    open('left', 'w').close()\n    os.unlink('tiny_counts.py')\n"
            'def test_print():\n    print(\'{"id": "0"}\')\n'
        )
        jobs = [
            SuiteJob(id=str(n), targets=("tests/test_counts.py",), edits={"tests/test_counts.py": hostile})
            for n in range(2)
        ]
        outcomes = await runs.run(jobs, 0)
        for outcome in outcomes:
            assert outcome is not None
            assert len(outcome.ended) == 4
            assert set(outcome.ended.values()) == {"passed"}, dict(outcome.ended)
            assert "./left" in outcome.changed
    finally:
        await place.backend.close()


def test_jobs_that_end_badly_are_told_apart(tmp_path, no_index):
    async def outcomes():
        place = open_build_place(tmp_path / "a.jsonl", tmp_path / "cache")
        try:
            spec = (await build(place, tasks=1)).tasks[0].spec
            object.__setattr__(spec, "env", {"PYTHONPATH": spec.env["PYTHONPATH"].replace("/work", place.workdir)})
            runs = SuiteRuns(place.backend, spec, place.python, ("pytest",))
            texts = [
                "def test_a():\n    while True: pass\n",
                "import os\ndef test_a():\n    os.kill(os.getpid(), 11)\n",
            ]
            where = "tests/test_counts.py"
            return await runs.run(
                [SuiteJob(id="x", targets=(where,), edits={where: text}, seconds=1.0) for text in texts], 0
            )
        finally:
            await place.backend.close()

    endless, crashed = asyncio.run(outcomes())
    assert endless is not None
    assert endless.hung
    assert crashed is not None
    assert crashed.code is None
    assert crashed.signal == 11
    assert not crashed.hung
