"""What a graded program leaves behind to hold up its grader."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from ostinato.core.sandbox import ExecResult, SandboxSpec
from ostinato.worlds.grading import suites
from ostinato.worlds.grading.functions import FunctionGrader, IsolatedPrograms, clashing
from ostinato.worlds.grading.hidden_values import Claim, Site
from ostinato.worlds.grading.suites import PytestGrader, PytestGrading, Rehearsal
from ostinato.worlds.grading.test_report import TestHeard, Testimony, deeper, lines_of
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.task import Grading, Task


class Nowhere:
    """A backend that must not be asked."""

    async def start(self, spec):
        raise AssertionError("nothing can be started of this")


def nested(depth: int):
    tree: object = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def test_what_is_nested_too_deep_to_be_written_again_is_no_answer():
    lines = [json.dumps(nested(3)), json.dumps(nested(900)), json.dumps(1)]
    assert lines_of(("\n".join(lines) + "\n").encode()) == [nested(3)]
    assert not deeper(nested(5), 5)
    assert deeper(nested(6), 5)
    assert deeper({"a": {"b": [1]}}, 2)


@pytest.mark.parametrize(
    ("files", "clash"),
    [
        ({"a.py": b"", "b/c.py": b""}, None),
        ({"README.md": b"", "README.md/x.py": b""}, "README.md"),
        ({"a/b/c.py": b"", "a/b": b""}, "a/b"),
    ],
)
async def test_a_path_that_would_be_file_and_directory_ends_the_run_before_it_begins(files, clash):
    spec = SandboxSpec(files=files)
    assert clashing(spec) == clash
    if clash:
        result = await IsolatedPrograms(backend=Nowhere(), python="python3").run(
            "answering", spec, stdin=b"", timeout=1.0
        )
        assert result.code == 126
        assert clash in result.stderr.decode()


def test_layers_are_looked_at_too(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "setup.py").write_text("")
    assert clashing(SandboxSpec(layers=(str(tmp_path),), files={"setup.py/x.py": b""})) == "setup.py"
    assert clashing(SandboxSpec(layers=(str(tmp_path),), files={"pkg": b""})) == "pkg"
    assert clashing(SandboxSpec(layers=(str(tmp_path),), files={"pkg/new.py": b"", "setup.py": b""})) is None


async def standing(work):
    """What the work results in, and the longest time that its loop stood still meanwhile."""
    doing, stood = asyncio.create_task(work), 0.0
    while not doing.done():
        at = time.monotonic()
        await asyncio.sleep(0.01)
        stood = max(stood, time.monotonic() - at)
    return await doing, stood


class ManyLines:
    """A backend whose programs write a line of JSON as often as they can."""

    async def start(self, spec):
        return self

    async def exec(self, argv, *, stdin=b"", cwd=None, env=None, timeout):
        said = b"1\n" * 250_000
        return ExecResult(code=0, stdout=said, stderr=b"", timed_out=False, killed_reason=None, seconds=1.0)

    async def stop(self):
        pass


async def test_millions_of_lines_hold_up_no_other_rollout():
    data = PytestGrading(fail_to_pass=("test_calc.py::test_it",))
    hidden = {"test_calc.py": b"def test_it():\n    assert f() == 1\n"}
    task = Task(id="t", family="f", messages=(), grading=Grading(grader="pytest", data={}, hidden=hidden))
    testimony, stood = await standing(
        suites.run_suite(IsolatedPrograms(backend=ManyLines(), python=""), task, data, {}, open_places={})
    )
    assert testimony.forged == 250_000
    assert stood < 1.0


class Seen(ManyLines):
    """Remembers what its sandboxes started from."""

    def __init__(self):
        self.specs = []

    async def start(self, spec):
        self.specs.append(spec)
        return self

    async def exec(self, argv, *, stdin=b"", cwd=None, env=None, timeout):
        return ExecResult(code=0, stdout=b"[[1], 1]\n", stderr=b"", timed_out=False, killed_reason=None, seconds=1.0)


async def test_graded_code_reaches_neither_the_hosts_nor_the_mounts_that_its_task_may_reach(tmp_path):
    backend = Seen()
    apart = IsolatedPrograms(backend=backend, python="python3")
    spec = SandboxSpec(
        files={"f.py": b"def f(): ..."}, hosts=("pypi.org:443",), mounts={"/data": str(tmp_path)}, env={"A": "b"}
    )
    function = {"entry": "f.py:f", "draw": "def draw(random): return 1,", "reference": "def f(x): return x", "draws": 1}
    rollout = Rollout(task="t", harness="single@h", ended=Ended.SUBMITTED, messages=(), turns=("c:0",))
    task = Task(id="t", family="f", messages=(), spec=spec, grading=Grading(grader="function", data=function))
    await FunctionGrader(apart).grade(task, rollout)
    tests = PytestGrading(fail_to_pass=("test_f.py::test_it",))
    hidden = {"test_f.py": b"def test_it(): ..."}
    await suites.run_suite(
        apart, replace(task, grading=Grading(grader="pytest", data={}, hidden=hidden)), tests, {}, open_places={}
    )
    assert any("f.py" in each.files for each in backend.specs)
    assert {(each.hosts, *each.mounts) for each in backend.specs} == {((),)}


async def graded(monkeypatch, pattern: str, *messages: str):
    """The grade of a run whose only test raised errors with these messages, and the longest time that its loop stood still."""
    id, place = "test_calc.py::test_it", ("test_calc.py", (3, 4))
    site = Site(place=place[1], claim=Claim.RAISES, errors=("ValueError",), pattern=pattern)
    saw = [(place, site, ["raised", ["ValueError"], message]) for message in messages]
    heard = Testimony(collected=(id,), tests={id: TestHeard(id=id, ended=True, saw=saw)})

    async def rehearsed(*_):
        return Rehearsal(ids={id: id})

    async def ran(*_, **__):
        return heard

    monkeypatch.setattr(suites, "rehearse", rehearsed)
    monkeypatch.setattr(suites, "run_suite", ran)
    data = {"fail_to_pass": (id,), "solution": {"calc.py": ""}}
    task = Task(id="t", family="f", messages=(), grading=Grading(grader="pytest", data=data))
    rollout = Rollout(task="t", harness="single@h", ended=Ended.SUBMITTED, messages=(), turns=("c:0",))
    grade, stood = await standing(PytestGrader(IsolatedPrograms(backend=Nowhere(), python="")).grade(task, rollout))
    return grade.value, stood


async def test_messages_that_are_long_to_search_hold_up_no_other_rollout(monkeypatch):
    found = "a" * 1_900 + "!x must be y, got z"
    value, stood = await graded(monkeypatch, r"(\w+) must be (\w+), got (\w+)", *[found] * 60)
    assert value == 1.0
    assert stood < 1.0


async def test_a_message_that_is_searched_for_ever_does_not_match(monkeypatch):
    value, stood = await graded(monkeypatch, "^(a|aa)+(b|c)+$", "a" * 1_000)
    assert value == 0.0
    assert stood < 1.0
