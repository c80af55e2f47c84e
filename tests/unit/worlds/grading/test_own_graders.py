"""Graders of the operator's own: what they may give, and that one that fails or never ends is no grade of 0 and holds up nobody."""

import asyncio
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from ostinato.app.worlds import GRADERS, check_tasks, open_graders, runs_code
from ostinato.config import load
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.worlds.grading import own
from ostinato.worlds.grading.grade import Grade, last_answer
from ostinato.worlds.grading.own import OwnGrader, own_graders
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.task import Grading, Task

TASK = Task(
    id="t",
    family="f",
    messages=(Message(role=Role.USER, text="In a word?"),),
    grading=Grading(grader="brevity", data={"words": 2}, timeout_s=0.2),
)
ROLLOUT = Rollout(
    task="t",
    harness="single@h",
    ended=Ended.SUBMITTED,
    messages=(*TASK.messages, Message(role=Role.ASSISTANT, text="Well, yes.")),
    turns=("c:0",),
)


def brevity(task, rollout):
    return len(last_answer(rollout).split()) <= task.grading.data["words"]


async def patient(task, rollout):
    await asyncio.sleep(0.01)
    return Grade(value=0.5, why="half")


def graded(function, task=TASK):
    return OwnGrader("worlds.graders.brevity", "yours:brevity", function).grade(task, ROLLOUT)


async def test_a_function_gives_a_number_or_a_grade_plain_or_async():
    assert await graded(brevity) == Grade(value=1.0)
    assert await graded(lambda task, rollout: 0.25) == Grade(value=0.25)
    assert await graded(patient) == Grade(value=0.5, why="half")
    for value in (np.float32(1.0), np.bool_(True), 1.0 + 1e-15, True):
        assert (await graded(lambda task, rollout, value=value: value)).value == 1.0

    class Callable:
        async def __call__(self, task, rollout):
            return 0.5

    assert (await graded(Callable())).value == 0.5


@pytest.mark.parametrize("value", [None, "1", 1.5, -0.1, float("nan"), Grade(value=2.0)])
async def test_anything_else_is_refused_and_names_the_setting(value):
    with pytest.raises(BadConfig, match=r"task 't': the grader of worlds\.graders\.brevity gave .* from 0 to 1"):
        await graded(lambda task, rollout: value)


async def test_what_it_raises_is_no_grade():
    async def broken(task, rollout):
        raise ValueError("no words")

    def timed_out(task, rollout):
        raise TimeoutError("its own")

    functions = {
        "KeyError": lambda task, rollout: task.grading.data["absent"],
        "ValueError: no words": broken,
        "TimeoutError: its own": timed_out,
        "StopIteration": lambda task, rollout: next(iter(())),
        "SystemExit: 3": lambda task, rollout: sys.exit(3),
    }
    patient_task = replace(TASK, grading=replace(TASK.grading, timeout_s=600.0))
    for told, function in functions.items():
        with pytest.raises(Unavailable, match=rf"task 't': the grader of worlds\.graders\.brevity raised.*{told}"):
            await graded(function, patient_task)


async def test_so_many_calls_that_do_not_end_are_the_last(monkeypatch):
    monkeypatch.setattr(own, "_MOST_STUCK", 2)
    over = threading.Event()
    quick = replace(TASK, grading=replace(TASK.grading, timeout_s=0.01))
    grader = OwnGrader("worlds.graders.brevity", "yours:brevity", lambda task, rollout: over.wait(600.0))
    for told in ("gave no grade", "gave no grade", "has 2 calls that do not end"):
        with pytest.raises(Unavailable, match=told):
            await grader.grade(quick, ROLLOUT)
    over.set()
    while grader._stuck:
        await asyncio.sleep(0.001)
    assert (await grader.grade(TASK, ROLLOUT)).value == 1.0


def test_its_identity_is_its_name_and_its_source():
    one, same, other = (OwnGrader("k", "yours:f", function) for function in (brevity, brevity, patient))
    assert one.identity == same.identity != other.identity
    assert one.identity.startswith("yours:f@")
    assert OwnGrader("k", "math:sqrt", len).identity.startswith("math:sqrt@")


async def test_one_that_never_ends_holds_up_no_other_and_is_given_up():
    ends = []

    def endless(task, rollout):
        while not ends:
            try:
                time.sleep(0.001)
            except BaseException:  # noqa: BLE001 (as hostile as can be)
                continue

    async def asleep(task, rollout):
        await asyncio.sleep(3600)

    others = [graded(brevity, replace(TASK, grading=replace(TASK.grading, timeout_s=60.0))) for _ in range(50)]
    stuck = [asyncio.ensure_future(graded(function)) for function in (endless, asleep)]
    assert {grade.value for grade in await asyncio.gather(*others)} == {1.0}
    for each in stuck:
        with pytest.raises(Unavailable, match=r"gave no grade in 0\.2 s \(grading\.timeout_s\)"):
            await each
    ends.append(True)


async def test_the_configuration_names_them_and_tasks_use_them(tmp_path, monkeypatch):
    (tmp_path / "house_graders.py").write_text("def brevity(task, rollout):\n    return 0.75\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = load(None, ["worlds.graders.brevity='house_graders:brevity'"])
    check_tasks(config, [TASK])
    assert not runs_code(config, [TASK])
    grader = open_graders(None, None, "python3", own=own_graders(config.worlds.graders, GRADERS))  # pyright: ignore[reportArgumentType]
    assert (await grader.grade(TASK, ROLLOUT)).value == 0.75
    sys.modules.pop("house_graders")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "there is no grader 'brevity'; there are function, .*; worlds.graders adds your own"),
        (["worlds.graders.pattern='a:b'"], r"worlds\.graders\.pattern: a built-in grader has this name"),
        (["worlds.graders.brevity='brevity'"], r"worlds\.graders\.brevity 'brevity' must have the form"),
        (["worlds.graders.brevity='absent_graders:b'"], "module absent_graders cannot be imported"),
        (["worlds.graders.brevity='math:brevity'"], "no brevity in it"),
    ],
)
def test_one_that_is_not_there_is_named_before_anything_runs(settings, told):
    with pytest.raises(BadConfig, match=told):
        check_tasks(load(None, settings), [TASK])
