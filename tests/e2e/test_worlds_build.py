"""A package of our own becomes tasks in real sandboxes, and each task holds what it says."""

import asyncio
import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.tiny_package import MODULE, tiny_sdist
from tests.fakes.weak_package import weak_sdist
from tests.grids import first

from ostinato.app.worlds import open_build_place
from ostinato.worlds.building.config import BuildConfig
from ostinato.worlds.building.filters import ChangeFate
from ostinato.worlds.building.package_build import PackageBuild
from ostinato.worlds.building.runs import SuiteJob, SuiteRuns
from ostinato.worlds.building.sources import FetchedArchive
from ostinato.worlds.tasks.task import Split
from ostinato.worlds.tasks.tasksets import load, save, taskset_of


@pytest.fixture(scope="module", autouse=True)
def no_index():
    """What is installed here stands for what pip would fetch: these tests reach no network."""

    async def wheels(_requirements):
        from importlib.metadata import files

        found = {}
        for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for path in files(name) or ():
                if path.suffix == ".py" or "dist-info" in str(path):
                    found[str(path)] = Path(str(path.locate())).read_bytes()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato.worlds.building.package_build.fetch_wheels", wheels)
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The taskset's file, beside which all places here have their layers: what the tests need is compiled once."""
    return tmp_path_factory.mktemp("built") / "tiny.jsonl"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the build of the tiny package notes what it tried."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=first([1, 5]), ids="faults tried: {}".format)
def faults_tried(request):
    """Faults tried per function: as few as give a task of each family, and as many as a build tries."""
    return request.param


@pytest.fixture(scope="module")
def built(no_index, out, cache, faults_tried):
    """What comes of the tiny package, built once."""

    async def once():
        async with opened(out, cache) as place:
            return await build(place, faults_tried=faults_tried)

    return asyncio.run(once())


@contextlib.asynccontextmanager
async def opened(out, cache):
    place = open_build_place(out, cache)
    try:
        yield place
    finally:
        await place.backend.close()


def runs_of(task, place):
    """Runs of tests over a task's files in this place."""
    env = {"PYTHONPATH": task.spec.env["PYTHONPATH"].replace("/work", place.workdir)}
    return SuiteRuns(place.backend, replace(task.spec, env=env), place.python, ("pytest",))


async def build(place, data=None, name="tiny-counts", split=Split.TRAIN, **more):
    data = data or tiny_sdist()
    archive = FetchedArchive(name=f"{name}-1.0.tar.gz", data=data, sha256=hashlib.sha256(data).hexdigest())
    return await PackageBuild(place, BuildConfig(**({"batch": 2} | more)), archive, name, split).run(lambda *_: None)


async def test_a_package_becomes_tasks_that_hold(built, out, cache, faults_tried):
    assert {task.family for task in built.tasks} == {"package.removal", "package.deletion", "package.bug"}
    assert not any("unused" in task.about["function"] for task in built.tasks)  # no test needs it
    journal = max(cache.glob("*/tried.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    lines = journal.read_text()
    journal.write_text(lines[: lines.rindex('{"functions"') + 40])  # as if it was killed while it wrote
    async with opened(out, cache) as place:
        again = await build(place, faults_tried=faults_tried)
        assert {task.id for task in again.tasks} == {task.id for task in built.tasks}
        assert (await build(place, tasks=1, faults_tried=faults_tried)).tasks == built.tasks[:1]
        await holds(place, built.tasks)
    taskset = taskset_of("tiny", built.tasks)
    save(taskset, out)
    assert load(out) == taskset


async def test_what_a_stub_passes_or_nobody_can_know_is_no_task(tmp_path, out):
    async with opened(out, tmp_path / "cache") as place:
        result = await build(place, weak_sdist(), "weak-shapes", Split.HELD_OUT, batch=8, faults_tried=0)
    written = {task.about["function"].split("::")[1] for task in result.tasks}
    assert written == {"clamp"}
    journal = next((tmp_path / "cache").glob("*/tried.jsonl"))
    batches = [json.loads(line)["attempts"] for line in journal.read_text().split("\n") if line]
    refused = {
        (each["function"].split("::")[1], each["kind"]): each["detail"]
        for attempts in batches
        for each in attempts
        if each["fate"] in (ChangeFate.WEAK, ChangeFate.SAYS_LITTLE)
    }
    assert refused == {
        ("is_even", "removal"): "return True",
        ("is_even", "deletion"): "return True",
        ("first_of", "removal"): "return things",
        ("first_of", "deletion"): "return things",
        ("Square.sides", "removal"): "nothing in its place",  # what it inherits does
        ("_scaled", "removal"): "",  # no docstring, no types, and no test calls it
        ("_scaled", "deletion"): "",
    }
    assert result.fates[ChangeFate.WEAK.value] == 5
    assert result.fates[ChangeFate.SAYS_LITTLE.value] == 2
    assert {task.split for task in result.tasks} == {Split.HELD_OUT}


async def holds(place, tasks):
    """Every listed test does what the task says, without the change and with it."""
    for task in tasks:
        runs = runs_of(task, place)
        fail, keep = task.grading.data["fail_to_pass"], task.grading.data["pass_to_pass"]
        job = SuiteJob(id="a", targets=("tests",), tests=(*fail, *keep))
        mended = SuiteJob(id="b", targets=("tests",), tests=(*fail, *keep), edits=task.grading.data["solution"])
        before, after = await runs.run([job, mended], 3)
        assert before is not None
        assert after is not None
        assert before.passed == set(keep)
        assert after.passed == {*fail, *keep}
        assert task.grading.data["solution"] == {"tiny_counts.py": MODULE}


async def test_a_suite_cannot_reach_the_host_and_what_it_writes_is_undone(tmp_path, built, out, cache):
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
    async with opened(out, cache) as place:
        outcomes = await runs_of(built.tasks[0], place).run(jobs, 0)
    for outcome in outcomes:
        assert outcome is not None
        assert len(outcome.ended) == 4
        assert set(outcome.ended.values()) == {"passed"}, dict(outcome.ended)
        assert "./left" in outcome.changed


async def test_jobs_that_end_badly_are_told_apart(built, out, cache):
    where = "tests/test_counts.py"
    texts = [
        "def test_a():\n    while True: pass\n",
        "import os\ndef test_a():\n    os.kill(os.getpid(), 11)\n",
    ]
    jobs = [
        SuiteJob(id="x", targets=(where,), edits={where: text}, seconds=seconds)
        for text, seconds in zip(texts, (1.0, 60.0), strict=True)
    ]
    grouped = [
        SuiteJob(id="y", targets=(where,), tests=(f"{where}::test_a",), edits={where: text}, group=group)
        for group, text in (
            ("a", "def test_a():\n    assert False\n"),
            ("a", "def test_a():\n    pass\n"),
            ("a", "def test_a():\n    pass\n"),
            ("b", "def test_a():\n    pass\n"),
        )
    ]
    async with opened(out, cache) as place:
        endless, crashed, *grouped = await runs_of(built.tasks[0], place).run([*jobs, *grouped], 0)
    assert endless is not None
    assert endless.hung
    assert crashed is not None
    assert crashed.code is None
    assert crashed.signal == 11
    assert not crashed.hung
    assert [None if each is None else len(each.passed) for each in grouped] == [0, 1, None, 1]  # a pass ends its group
