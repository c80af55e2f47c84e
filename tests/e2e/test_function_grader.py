"""Functions graded in real sandboxes by inputs drawn at that moment."""

import pytest
import pytest_asyncio
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.grading_boxes import PYTHON, GradingBoxes

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.grading.functions import FunctionGrader, IsolatedPrograms
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.task import Grading, Task

DATA = {
    "entry": "solution.py:total",
    "reference": "def total(xs):\n    if not xs:\n        raise ValueError(xs)\n    return sum(xs)\n",
    "draw": "def draw(r):\n    return ([r.randrange(-99, 99) for _ in range(r.randrange(6))],)\n",
}
RELATION = {
    "vary": "def vary(r, args):\n    return [(args[0] + [5],)]\n",
    "holds": "def holds(inputs, results):\n    return results[1] == results[0] + 5\n",
}
RIGHT = "def total(xs):\n    if not xs:\n        raise ValueError('none')\n    n = 0\n    for x in xs:\n        n += x\n    return n\n"


def task(**data):
    message = Message(role=Role.USER, text="Sum them.")
    return Task(
        id="t",
        family="f",
        messages=(message,),
        grading=Grading(grader="function", data=DATA | data, timeout_s=WHOLE_PROGRAM_S),
    )


def wrote(text, path="solution.py", said=""):
    changes = (Change(path=path, kind=ChangeKind.WRITTEN, data=text.encode()),) if text else ()
    messages = (Message(role=Role.ASSISTANT, text=said),)
    return Rollout(task="t", harness="h", ended=Ended.SUBMITTED, messages=messages, turns=(), changes=changes)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader():
    backend = GradingBoxes()
    yield FunctionGrader(IsolatedPrograms(backend=backend, python=PYTHON))
    await backend.close()


async def test_a_right_function_is_worth_everything_and_the_reason_says_on_what(grader):
    grade = await grader.grade(task(), wrote(RIGHT))
    assert grade.solved
    assert "32 of 32" in grade.why
    assert "seed" in grade.why


@pytest.mark.parametrize(
    "text",
    [
        "def total(xs):\n    return sum(xs)\n",  # raises nothing
        RIGHT.replace("    n = 0", "    xs.sort()\n    n = 0"),  # changes what it was given
        "def total(xs):\n    raise ValueError\n",
        "def total(xs):\n    import os; os._exit(0)\n",
        "import sys; sys.exit(0)\n",
        "def total(xs):\n    class A(int):\n        __eq__ = lambda s, o: True\n    return A(3)\n",
        "def totals(xs):\n    return 1\n",
        "def total(xs:\n",
        "",
    ],
)
async def test_a_wrong_one_is_worth_nothing(grader, text):
    grade = await grader.grade(task(), wrote(text))
    assert grade.value == 0.0
    assert not grade.cheated


async def test_inputs_differ_from_grading_to_grading(grader):
    shown = "import json\ndef total(xs):\n    raise ValueError\n"
    grades = [await grader.grade(task(draws=3), wrote(shown)) for _ in range(2)]
    assert grades[0].why != grades[1].why


async def test_relations_grade_without_a_reference(grader):
    asked = task(reference="", **RELATION)
    total = "def total(xs):\n    return sum(xs)\n"
    assert (await grader.grade(asked, wrote(total))).value == 1.0
    constant = "def total(xs):\n    return 7\n"
    grade = await grader.grade(asked, wrote(constant))
    assert (grade.value, grade.parts["answers"], grade.parts["relations"]) == (0.0, 1.0, 0.0)


async def test_code_in_the_last_message_can_be_the_answer(grader):
    said = f"First\n```python\nx = 1\n```\nthen\n```python\n{RIGHT}```\n"
    assert (await grader.grade(task(message=True), wrote("", said=said))).value == 1.0
    assert (await grader.grade(task(message=True), wrote(RIGHT, said="Done."))).value == 0.0


async def test_a_reference_that_fails_grades_nobody(grader):
    with pytest.raises(Unavailable, match="'t': its reference"):
        await grader.grade(task(draw="def draw(r):\n    raise OSError\n"), wrote(RIGHT))


@pytest.mark.parametrize("data", [{"reference": ""}, {"entry": "solution"}, {"holds": "x"}, {"more": 1}])
async def test_a_task_that_cannot_be_graded_is_named(grader, data):
    with pytest.raises(BadConfig, match="task 't': grading"):
        await grader.grade(task(**data), wrote(RIGHT))


async def test_what_reaches_for_the_test_runner_forfeits_a_right_answer(grader):
    rollout = wrote(RIGHT)
    hook = Change(path="sitecustomize.py", kind=ChangeKind.WRITTEN, data=b"")
    grade = await grader.grade(
        task(), Rollout(**{f: getattr(rollout, f) for f in rollout.__slots__} | {"changes": (*rollout.changes, hook)})
    )
    assert (grade.value, grade.parts["answers"]) == (0.0, 1.0)
    assert grade.cheated == ("runs before the tests: sitecustomize.py",)
