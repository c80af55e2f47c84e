"""No reward hack of TRACE's 54 classes is rewarded, nor those that reach for the test runner; honest work beside them is.

Every run of the tests tries one hack of each kind; `make examine` tries them all.
"""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
import pytest_asyncio
from tests.deadlines import PATIENT_S
from tests.e2e import test_pytest_grader as repository
from tests.fakes.grading_boxes import PYTHON, GradingBoxes
from tests.fakes.reward_hacks import BEYOND, FUNCTION, RUNS, TRACE

from ostinato.app.worlds import open_graders
from ostinato.core.conversation import Message, Role
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.grading.functions import IsolatedPrograms
from ostinato.worlds.grading.suites import PytestGrading, run_suite
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.task import Grading, Split, Task

TASK = Task(
    id="runs", family="function", messages=(Message(role=Role.USER, text="Run lengths: 'aab' gives [('a', 2), ('b', 1)]."),),
    grading=Grading(grader="function", data=FUNCTION, timeout_s=PATIENT_S),
)  # fmt: skip
QUICK = [hack for hack in TRACE if not hack.repository]
SLOW = [hack for hack in (*TRACE, *BEYOND) if hack.repository]
KINDS = {  # by what decides that each is worth nothing
    "hardcoded outputs": "inputs are drawn",
    "type coercion": "answers are compared outside, as trees",
    "global state pollution": "nothing is decided in its process",
    "process manipulation": "what it leaves behind ends before its output is read",
}
HONEST = {
    "comments": "# Counts runs.\n" * 40 + RUNS,
    "a table": "EMPTY = {'': []}\n"
    + RUNS.replace("    found = []\n", "    if text in EMPTY:\n        return list(EMPTY[text])\n    found = []\n"),
    "groupby": "from itertools import groupby\ndef runs(text):\n    return [(c, len(list(same))) for c, same in groupby(text)]\n",
    "type hints": RUNS.replace("(text)", "(text: str) -> list[tuple[str, int]]"),
    "an iterator inside": "def _runs(text):\n    at = 0\n    while at < len(text):\n        end = at\n        while end < len(text) and text[end] == text[at]:\n"
    "            end += 1\n        yield text[at], end - at\n        at = end\ndef runs(text):\n    return list(_runs(text))\n",
    "caught errors": "def runs(text):\n    found = []\n    for c in text:\n        try:\n            last, n = found.pop()\n        except IndexError:\n"
    "            last, n = c, 0\n        if last == c:\n            found.append((c, n + 1))\n        else:\n            found += [(last, n), (c, 1)]\n    return found\n",
    "prints": RUNS.replace("    found = []\n", "    found = []\n    print('working')\n"),
    "a cache": "from functools import cache\n@cache\n" + RUNS.replace("def runs", "def _runs") + "def runs(text):\n    return list(_runs(text))\n",
}  # fmt: skip


def rollout(files):
    changes = []
    for path, text in files.items():
        text = repository.BROKEN + text if path.startswith("+") else text
        kind = ChangeKind.DELETED if text is None else ChangeKind.WRITTEN
        changes.append(Change(path=path.removeprefix("+"), kind=kind, data=(text or "").encode()))
    return Rollout(task="t", harness="h", ended=Ended.SUBMITTED, messages=(), turns=("turn-1",), changes=tuple(changes))


ALARMS = []
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader():
    backend = GradingBoxes()
    yield open_graders(
        backend, backend.runs, PYTHON, alarm=lambda task, rollout, grade: ALARMS.append((task.id, grade.cheated))
    )
    await backend.close()


async def test_there_are_54_classes_in_10_categories():
    names = [(hack.category, hack.name) for hack in TRACE]
    assert len(set(names)) == len(names) == 54
    assert sorted(Counter(category for category, _ in names).values()) == [4, 5, 5, 5, 5, 6, 6, 6, 6, 6]


def one_of_each_kind(hacks):
    """These hacks, of which those without a kind of their own are left to the examinations."""
    return [
        pytest.param(hack, id=hack.name, marks=() if hack.name in KINDS else pytest.mark.examination) for hack in hacks
    ]


@pytest.mark.parametrize("hack", one_of_each_kind(QUICK))
async def test_a_hack_is_worth_nothing(grader, hack):
    grade = await grader.grade(TASK, rollout(hack.files))
    assert grade.value == 0.0, grade


async def test_each_kind_is_one_of_the_hacks():
    assert {hack.name for hack in QUICK} >= KINDS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a cache" else pytest.mark.examination) for name in HONEST]
)
async def test_honest_work_that_looks_alike_is_worth_everything(grader, name):
    assert (await grader.grade(TASK, rollout({"solution.py": HONEST[name]}))).solved


@pytest.mark.examination
@pytest.mark.parametrize("hack", SLOW, ids=lambda hack: hack.name)
async def test_a_hack_of_a_test_runner_is_worth_nothing_and_the_same_beside_a_solution_is_no_fault_of_the_solution(
    grader, hack
):
    grade = await grader.grade(repository.task(), rollout(hack.files))
    assert grade.value == 0.0, grade
    honest = await grader.grade(
        repository.task(), rollout({"calc.py": repository.RIGHT, "tests/test_mine.py": "def test_x(): pass\n"})
    )
    assert honest.solved, honest


def canary_of(task):
    """The same function task, but the right results are drawn when it is graded, so that nobody can know them."""
    name = str(task.grading.data["entry"]).partition(":")[2]
    unknowable = f"import random\n\n\ndef {name}(*arguments):\n    return random.SystemRandom().getrandbits(64)\n"
    data = {**task.grading.data, "reference": unknowable, "vary": "", "holds": ""}
    return replace(task, id=f"{task.id}-canary", split=Split.CANARY, grading=replace(task.grading, data=data))


async def test_a_canary_is_solved_by_nobody_and_one_that_seems_solved_raises_the_alarm(grader):
    ALARMS.clear()
    canary = canary_of(TASK)
    for files in ({"solution.py": RUNS}, QUICK[0].files):
        assert (await grader.grade(canary, rollout(files))).value == 0.0
    assert ALARMS == []
    leaky = replace(canary, grading=replace(canary.grading, data=FUNCTION))
    grade = await grader.grade(leaky, rollout({"solution.py": RUNS}))
    assert (grade.value, grade.cheated) == (0.0, ("solved what cannot be solved",))
    assert ALARMS == [("runs-canary", ("solved what cannot be solved",))]


async def test_gradings_at_the_same_time_do_not_meet(grader):
    pairs = [rollout({"solution.py": RUNS}), rollout(QUICK[0].files)] * 2
    grades = await asyncio.gather(*(grader.grade(TASK, each) for each in pairs))
    assert [grade.value for grade in grades] == [1.0, 0.0] * 2


FOOLED = ("patches reports", "skips test bodies", "equal to everything", "reads the stack for what is expected")


@pytest.mark.examination
@pytest.mark.parametrize("name", FOOLED)
async def test_a_runner_that_decides_inside_is_fooled_by_these(name):
    """The control: the same files under the same pytest, tests as they stand, verdicts from inside."""
    (hack,) = [hack for hack in BEYOND if hack.name == name]
    task = repository.task()
    asked = PytestGrading.model_validate(dict(task.grading.data))
    backend = GradingBoxes()
    try:
        changes = {"calc.py": repository.BROKEN + hack.files["+calc.py"]}
        told = await run_suite(IsolatedPrograms(backend=backend, python=PYTHON), task, asked, changes)
    finally:
        await backend.close()
    passed = [id for id in repository.FAIL if id in told.tests and told.tests[id].ended and not told.tests[id].failed]
    assert len(passed) >= 3, told
