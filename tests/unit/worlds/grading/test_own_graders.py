"""Graders of the operator's own: what they may give, and that one that fails or never ends is no grade of 0 and holds up nobody."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.app.worlds import GRADERS, check_tasks, open_graders, runs_code
from ostinato.config import load
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.grading.own import OwnGrader, _graded, own_graders
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


HOUSE = """
import asyncio, os, sys, time
import numpy as np
from ostinato.worlds.grading.grade import Grade, last_answer

def brevity(task, rollout):
    return len(last_answer(rollout).split()) <= task.grading.data["words"]

async def patient(task, rollout):
    await asyncio.sleep(0.01)
    return Grade(value=0.5, parts={"half": np.float32(0.5)}, why="half")

async def broken(task, rollout):
    raise ValueError("no words")

def timed_out(task, rollout):
    raise TimeoutError("its own")

class Callable:
    async def __call__(self, task, rollout):
        return 0.5

async def slow(task, rollout):
    await asyncio.sleep(0.5)
    return 0.125

def endless(task, rollout):
    while True:
        try:
            time.sleep(0.001)
        except BaseException:  # as hostile as can be
            continue

ACTS = {
    "brevity": brevity, "patient": patient, "broken": broken, "timed_out": timed_out, "endless": endless, "slow": slow,
    "callable": Callable(),
    "quarter": lambda task, rollout: 0.25, "float32": lambda task, rollout: np.float32(1.0),
    "bool": lambda task, rollout: np.bool_(True), "above": lambda task, rollout: 1.0 + 1e-15, "true": lambda task, rollout: True,
    "None": lambda task, rollout: None, "text": lambda task, rollout: "1", "large": lambda task, rollout: 1.5,
    "negative": lambda task, rollout: -0.1, "nan": lambda task, rollout: float("nan"),
    "large grade": lambda task, rollout: Grade(value=2.0), "odd grade": lambda task, rollout: Grade(value=0.5, why=object()),
    "absent": lambda task, rollout: task.grading.data["absent"], "stop": lambda task, rollout: next(iter(())),
    "exit": lambda task, rollout: sys.exit(3), "die": lambda task, rollout: os._exit(7),
    "hoard": lambda task, rollout: len(bytearray(3 << 30)) * 0.0,
    "pid": lambda task, rollout: Grade(value=1.0, why=str(os.getpid())),
    "print": lambda task, rollout: print("noise") or 0.75, "fork": lambda task, rollout: os.fork() * 0 + 0.5,
    "read": lambda task, rollout: float(sys.stdin.read() == ""),
    "helper": lambda task, rollout: Grade(value=1.0, why=str(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600"))),
}

def acts(task, rollout):
    return ACTS[task.grading.data["do"]](task, rollout)
"""


@pytest.fixture
def house(tmp_path, monkeypatch):
    """The place of the function `acts`, which does what `grading.data` says."""
    (tmp_path / "house_of_graders.py").write_text(HOUSE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "house_of_graders:acts"
    sys.modules.pop("house_of_graders")


@pytest.fixture
async def grader(house):
    found = own_graders({"brevity": house}, GRADERS)["brevity"]
    yield found
    await found.close()


def doing(act, timeout_s=60.0):
    return replace(TASK, grading=replace(TASK.grading, data={"words": 2, "do": act}, timeout_s=timeout_s))


async def test_a_function_gives_a_number_or_a_grade_plain_or_async(grader):
    assert await grader.grade(doing("brevity"), ROLLOUT) == Grade(value=1.0)
    assert await grader.grade(doing("quarter"), ROLLOUT) == Grade(value=0.25)
    assert await grader.grade(doing("patient"), ROLLOUT) == Grade(value=0.5, parts={"half": 0.5}, why="half")
    for act in ("float32", "bool", "above", "true"):
        assert (await grader.grade(doing(act), ROLLOUT)).value == 1.0
    assert (await grader.grade(doing("callable"), ROLLOUT)).value == 0.5


async def test_anything_else_is_refused_and_names_the_setting(grader):
    for act in ("None", "text", "large", "negative", "nan", "large grade", "odd grade"):
        with pytest.raises(BadConfig, match=r"task 't': the grader of worlds\.graders\.brevity gave .* from 0 to 1"):
            await grader.grade(doing(act), ROLLOUT)


async def test_what_it_raises_is_no_grade(grader):
    acts = {
        "absent": "KeyError",
        "broken": "ValueError: no words",
        "timed_out": "TimeoutError: its own",
        "stop": "StopIteration",
        "exit": "SystemExit: 3",
    }
    for act, told in acts.items():
        with pytest.raises(Unavailable, match=rf"task 't': the grader of worlds\.graders\.brevity raised.*{told}"):
            await grader.grade(doing(act, 600.0), ROLLOUT)


async def test_one_that_ends_its_process_costs_the_grades_of_that_moment_and_no_more(grader):
    with pytest.raises(Unavailable, match=r"the grader of worlds\.graders\.brevity: its process ended \(7\)"):
        await grader.grade(doing("die"), ROLLOUT)
    assert (await grader.grade(doing("quarter"), ROLLOUT)).value == 0.25


async def test_one_that_takes_too_much_memory_costs_its_own_grade_only(house):
    grader = own_graders({"brevity": house}, GRADERS, 2 << 30)["brevity"]
    try:
        with pytest.raises(Unavailable, match=r"the grader of worlds\.graders\.brevity raised MemoryError"):
            await grader.grade(doing("hoard"), ROLLOUT)
        assert (await grader.grade(doing("quarter"), ROLLOUT)).value == 0.25
    finally:
        await grader.close()


async def test_it_runs_elsewhere_and_its_output_and_forks_disturb_nothing(grader):
    first, second = [await grader.grade(doing("pid"), ROLLOUT) for _ in range(2)]
    assert first.why == second.why != str(os.getpid()), "one process for all"
    for act, value in (("print", 0.75), ("read", 1.0), ("fork", 0.5), ("fork", 0.5), ("quarter", 0.25)):
        assert (await grader.grade(doing(act), ROLLOUT)).value == value, act


async def test_a_grade_whose_value_misses_1_by_rounding_is_1():
    kind, grade = await _graded(lambda task, rollout: Grade(value=1.0 + 1e-10), TASK, ROLLOUT)
    assert (kind, grade.value) == ("grade", 1.0)
    kind, grade = await _graded(lambda task, rollout: Grade(value=-1e-10), TASK, ROLLOUT)
    assert (kind, grade.value) == ("grade", 0.0)


@pytest.mark.parametrize(
    "given",
    [Grade(value=1.0, parts={"a": None}), Grade(value=1.0, parts=["a"]), 10**400],
    ids=["part", "parts", "huge"],
)
async def test_what_is_no_number_is_unusable_at_once_and_not_late(given):
    kind, _ = await _graded(lambda task, rollout: given, TASK, ROLLOUT)
    assert kind == "unusable"


def test_its_identity_is_its_name_and_its_source():
    def one(task, rollout):
        return 1.0

    def two(task, rollout):
        return 2.0

    first, same, other = (OwnGrader("k", "yours:f", function) for function in (one, one, two))
    assert first.identity == same.identity != other.identity
    assert first.identity.startswith("yours:f@")
    assert OwnGrader("k", "math:sqrt", len).identity.startswith("math:sqrt@")


async def test_one_that_never_ends_holds_up_no_other_and_is_killed_with_all_that_it_started(grader):
    """The process that an endless call keeps busy gets no more questions, and is killed once its others have ended."""
    before = await grader.grade(doing("pid"), ROLLOUT)
    helper = await grader.grade(doing("helper"), ROLLOUT)
    stuck = asyncio.ensure_future(grader.grade(doing("endless", 0.2), ROLLOUT))
    others = [grader.grade(doing("quarter"), ROLLOUT) for _ in range(50)]
    assert {grade.value for grade in await asyncio.gather(*others)} == {0.25}
    with pytest.raises(Unavailable, match=r"gave no grade in 0\.2 s \(grading\.timeout_s\)"):
        await stuck
    after = await grader.grade(doing("pid"), ROLLOUT)
    assert before.why != after.why
    for process in (before.why, helper.why):
        assert not running(int(process))


def running(process: int) -> bool:
    """False for one that has ended, whoever is to collect it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_a_late_grade_does_not_cost_those_that_are_under_way(grader):
    """The async one is asked first, and ends after the endless one's time is over, in the same process."""
    await grader.grade(doing("quarter"), ROLLOUT)
    slow = asyncio.ensure_future(grader.grade(doing("slow"), ROLLOUT))
    with pytest.raises(Unavailable, match="gave no grade"):
        await grader.grade(doing("endless", 0.05), ROLLOUT)
    assert (await slow).value == 0.125


async def test_the_configuration_names_them_and_tasks_use_them(tmp_path, monkeypatch):
    (tmp_path / "house_graders.py").write_text("def brevity(task, rollout):\n    return 0.75\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = load(None, ["worlds.graders.brevity='house_graders:brevity'"])
    check_tasks(config, [TASK])
    assert not runs_code(config, [TASK])
    own = own_graders(config.worlds.graders, GRADERS)
    grader = open_graders(None, None, "python3", own=own)  # pyright: ignore[reportArgumentType]
    patient_task = replace(TASK, grading=replace(TASK.grading, timeout_s=60.0))
    assert (await grader.grade(patient_task, ROLLOUT)).value == 0.75
    await own["brevity"].close()
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
