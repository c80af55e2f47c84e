"""A suite that cannot be graded is told before anything is sampled; a run without one says so in its log."""

import json

import pytest

from ostinato.app.proving import NO_SUITE, check_suite, note_suite, open_suite
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.records import Alarm

ITEM = {"id": "a", "family": "f", "messages": [{"role": "user", "content": "x"}]}


def suite(tmp_path, **more):
    path = tmp_path / "suite.jsonl"
    path.write_text(json.dumps({**ITEM, **more}) + "\n")
    return load(None, [f"evaluate.suite={path}", f"run.directory={tmp_path / 'run'}"])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"grader": "vibes"}, "no grader 'vibes'; there are python_tests and pattern"),
        ({"grader": "pattern"}, "needs a string 'pattern'"),
        ({"grader": "pattern", "pattern": "("}, "is not a regular expression"),
        ({"grader": "python_tests", "tests": "assert f()"}, "needs a 'head' that starts with 'def name"),
        ({"grader": "python_tests", "head": "x = 1", "tests": "assert f()"}, "needs a 'head'"),
        ({"grader": "python_tests", "head": "def f():\n", "tests": " "}, "needs 'tests'"),
    ],
)
async def test_an_item_that_cannot_be_graded_is_named(tmp_path, more, told):
    with pytest.raises(BadConfig, match="suite item 'a'") as caught:
        await check_suite(suite(tmp_path, **more))
    assert told in str(caught.value)


async def test_a_suite_that_can_be_graded_passes(tmp_path):
    assert len((await check_suite(suite(tmp_path, grader="pattern", pattern="x"))).items) == 1
    good = suite(tmp_path, grader="python_tests", head="def f():\n", tests="assert f() == 1")
    assert len((await check_suite(good)).items) == 1
    assert len((await check_suite(load(None, ["evaluate.suite=demo"]))).items) > 50


def test_there_is_no_suite_unless_one_is_named():
    with pytest.raises(BadConfig, match=r"name a task file in evaluate\.suite"):
        open_suite(load())


async def test_a_run_without_a_suite_says_so_once_and_takes_it_back(tmp_path):
    without = load(None, [f"run.directory={tmp_path / 'run'}"])
    with_one = load(None, [f"run.directory={tmp_path / 'run'}", "evaluate.suite=demo"])
    for config in (with_one, without, without, with_one, with_one, without):
        with open_run(config) as run:
            await note_suite(run)
    with open_run(without) as run:
        alarms = [row async for _, row in run.log.read(0, {Alarm})]
    assert [(alarm.name, str(alarm.state)) for alarm in alarms] == [
        (NO_SUITE, "raised"),
        (NO_SUITE, "cleared"),
        (NO_SUITE, "raised"),
    ]
    assert "nothing ships by itself" in alarms[0].reason
