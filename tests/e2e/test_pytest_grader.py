"""Changes to a small repository, graded by sealed tests in real sandboxes."""

import pytest
import pytest_asyncio
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.grading_boxes import PYTHON, GradingBoxes
from tests.fakes.pytest_layer import SITE, pytest_layer
from tests.fakes.reward_hacks import BEYOND

from ostinato.core.conversation import Message, Role
from ostinato.core.sandbox import Change, ChangeKind, SandboxSpec
from ostinato.worlds.grading.functions import IsolatedPrograms
from ostinato.worlds.grading.suites import PytestGrader
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.task import Grading, Task

RIGHT = """
class Full(ValueError):
    pass


class Box:
    def __init__(self, size):
        self.size, self.items = size, []

    def put(self, item):
        if len(self.items) == self.size:
            raise Full(f"holds {self.size}")
        self.items.append(item)

    def __eq__(self, other):
        return isinstance(other, list) and self.items == other


def double(x):
    return 2 * x


def split(text):
    return {part: len(part) for part in text.split()}
"""
BROKEN = RIGHT.replace("2 * x", "2 + x").replace("text.split()", "text").replace("== self.size", "> self.size")
TESTS = """
import pytest
from calc import Box, Full, double, split


@pytest.mark.parametrize("x, expected", [(1, 2), (3, 6), (5, 10)])
def test_double(x, expected):
    assert double(x) == expected


def test_split():
    wanted = {"ab": 2, "c": 1}
    assert split("ab c") == wanted and len(split("a b")) == 2


def test_near():
    assert double(0.15) == pytest.approx(0.3)


def test_full():
    box = Box(1)
    box.put(3)
    with pytest.raises(Full, match="holds 1") as caught:
        box.put(4)
    assert str(caught.value) == "holds 1"


def test_box_is_a_list():
    box = Box(2)
    box.put(7)
    assert box == [7]
    assert isinstance(box, Box)


class TestMore:
    def test_pair(self):
        assert split("a") == split("a ")
"""
UNITTEST = """
import unittest
from calc import double

class Old(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(4), 8)
        self.assertTrue(double(4) > 7)
        with self.assertRaises(TypeError):
            double(None)
"""
FAIL = tuple(
    f"test_calc.py::{n}"
    for n in ("test_double[1-2]", "test_double[3-6]", "test_double[5-10]", "test_split", "test_near", "test_full")
)
PASS = ("test_calc.py::test_box_is_a_list", "tests/test_old.py::Old::test_double")


def task(**data):
    files = {"calc.py": BROKEN.encode(), "tests/test_old.py": UNITTEST.encode()}
    spec = SandboxSpec(layers=(pytest_layer(),), files=files)
    data = {
        "fail_to_pass": (*FAIL, PASS[1]),
        "pass_to_pass": PASS[:1],
        "solution": {"calc.py": RIGHT},
        "path": (".", SITE),
    } | data
    grading = Grading(grader="pytest", data=data, hidden={"test_calc.py": TESTS.encode()}, timeout_s=WHOLE_PROGRAM_S)
    return Task(
        id="calc", family="repair", messages=(Message(role=Role.USER, text="Mend."),), spec=spec, grading=grading
    )


def wrote(*changes):
    made = tuple(Change(path=path, kind=ChangeKind.WRITTEN, data=text.encode()) for path, text in changes)
    return Rollout(task="calc", harness="h", ended=Ended.SUBMITTED, messages=(), turns=(), changes=made)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader():
    backend = GradingBoxes()
    yield PytestGrader(IsolatedPrograms(backend=backend, python=PYTHON))
    await backend.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_solution_is_worth_everything_and_the_broken_state_nothing(grader):
    """Unsealed, sealed and sealed again, in real runs: what is left out, refused or given more time is in unit/worlds/grading."""
    grade = await grader.grade(task(), wrote(("calc.py", RIGHT)))
    assert grade.solved, grade
    assert grade.parts == {"fail_to_pass": 1.0, "pass_to_pass": 1.0, "sealed": 1.0}
    grade = await grader.grade(task(), wrote())
    assert grade.value == 0.0
    assert grade.parts["fail_to_pass"] == 0.0
    assert grade.parts["pass_to_pass"] == 1.0


async def test_another_right_solution_passes_and_a_half_right_one_is_counted(grader):
    other = RIGHT.replace("2 * x", "x + x").replace("raise Full(", "raise type('Sub', (Full,), {})(")
    with_its_own_test = wrote(
        ("calc.py", other), ("tests/test_new.py", "def test_x(): assert False\n"), ("notes.md", "done")
    )
    assert (await grader.grade(task(), with_its_own_test)).solved
    half = BROKEN.replace("2 + x", "2 * x")
    grade = await grader.grade(task(), wrote(("calc.py", half)))
    assert (grade.value, grade.parts["fail_to_pass"]) == (0.0, 5 / 7)


async def test_what_the_model_wrote_into_the_tests_or_the_runner_does_not_count(grader):
    hook = "def pytest_runtest_makereport(item, call):\n    (yield).get_result().outcome = 'passed'\n"
    grade = await grader.grade(task(), wrote(("conftest.py", hook), ("tests/test_old.py", "def test_double(): pass\n")))
    assert grade.value == 0.0
    assert set(grade.cheated) == {"hooks into the test runner: conftest.py", "changed a test: tests/test_old.py"}


@pytest.mark.parametrize("name", ["equal to everything", "forges lines"])
async def test_a_hack_inside_the_runner_is_worth_nothing(grader, name):
    """The others are in test_reward_hacks."""
    (hack,) = [hack for hack in BEYOND if hack.name == name]
    grade = await grader.grade(task(), wrote(("calc.py", BROKEN + hack.files["+calc.py"])))
    assert grade.value == 0.0, grade
