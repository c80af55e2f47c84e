"""The repair harness: it runs the model's code and shows failures, and the answer after that counts."""

from dataclasses import replace

import pytest
import pytest_asyncio
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.repair_tasks import check_program, repair_tasks
from tests.fakes.scripted_model import ScriptedModel, says

from ostinato.core.conversation import Message, Role
from ostinato.core.sandbox import SandboxSpec
from ostinato.demo.tasks import load
from ostinato.worlds.harness.harnesses import RepairConfig, RepairLoop, code_in, open_harness
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.sandbox import Boxes
from ostinato.worlds.tasks.task import Grading, Task

CHECK = b"from answer import twice\nif twice(2) != 4: raise SystemExit(f'twice(2) gives {twice(2)}')\n"
PATIENT = RepairConfig(command_s=WHOLE_PROGRAM_S)  # a busy machine runs a check late
HEAD = "```python\ndef twice(x):"
TASK = Task(
    id="twice",
    family="doubling",
    messages=(Message(role=Role.USER, text="Double x."), Message(role=Role.ASSISTANT, text=HEAD)),
    spec=SandboxSpec(files={"check.py": CHECK}),
    grading=Grading(grader="pattern"),
    harness="repair",
    turns=2,
)


with_the_module = pytest.mark.asyncio(loop_scope="module")
"""The loop of what all tests here share."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes():
    made = Boxes()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(boxes: Boxes):
    started = await boxes.start(TASK.spec)
    yield started
    await started.stop()


def shown(model: ScriptedModel, number: int) -> list[tuple[Role, str]]:
    return [(message.role, message.text) for message in model.asked[number]]


@with_the_module
async def test_what_passes_is_not_asked_for_again(box):
    rollout = await RepairLoop(PATIENT).run(TASK, ScriptedModel(says("\n    return 2 * x\n")), box)
    assert (rollout.ended, rollout.turns, rollout.detail["checks"]) == (Ended.SUBMITTED, ("t0:0",), (True,))
    assert rollout.messages[-1].text == "\n    return 2 * x\n"


@with_the_module
async def test_code_that_gets_in_its_own_way_is_told_so(box):
    spoils = "\n    return 3\nimport os\nos.remove('answer.py'); os.mkdir('answer.py')\n"
    model = ScriptedModel(says(spoils), says("\n    return 2 * x\n"))
    rollout = await RepairLoop(PATIENT).run(TASK, model, box)
    assert (rollout.ended, rollout.turns, rollout.detail["checks"]) == (Ended.TURNS, ("t0:0", "t1:0"), (False, False))


@with_the_module
async def test_a_failure_is_shown_and_the_answer_begins_anew(box):
    model = ScriptedModel(says("\n    return x + 3\n"), says("\n    return x + x\n"))
    rollout = await RepairLoop(PATIENT).run(TASK, model, box)
    assert (rollout.ended, rollout.turns) == (Ended.SUBMITTED, ("t0:0", "t1:0"))
    assert rollout.detail["checks"] == (False, True)
    assert shown(model, 1) == [
        (Role.USER, "Double x."),
        (Role.ASSISTANT, f"{HEAD}\n    return x + 3\n"),
        (Role.USER, "That fails:\ntwice(2) gives 5\nWrite it again."),
        (Role.ASSISTANT, HEAD),
    ]
    assert (rollout.effort["turns"], rollout.effort["tokens"]) == (2, 20)


@with_the_module
async def test_after_the_last_turn_nothing_more_is_asked(box):
    model = ScriptedModel(says("\n    return 1\n"), says("\n    return 2\n"))
    rollout = await RepairLoop(PATIENT).run(TASK, model, box)
    assert (rollout.ended, rollout.detail["checks"], len(model.asked)) == (Ended.TURNS, (False, False), 2)


class HurriedOnce:
    """A sandbox whose first command gets half a second, and every other one the time that its caller gives it."""

    def __init__(self, box):
        self._box, self._hurried = box, False

    def __getattr__(self, name):
        return getattr(self._box, name)

    async def exec(self, argv, *, timeout, **more):
        timeout, self._hurried = (timeout if self._hurried else 0.5), True
        return await self._box.exec(argv, timeout=timeout, **more)


@with_the_module
async def test_a_check_that_never_ends_is_killed_and_told(box):
    model = ScriptedModel(says("\n    while True: pass\n"), says("\n    return 2 * x\n"))
    rollout = await RepairLoop(PATIENT).run(TASK, model, HurriedOnce(box))
    assert "killed: timeout" in shown(model, 1)[2][1]
    assert rollout.detail["checks"] == (False, True)


@with_the_module
async def test_an_answer_without_a_beginning_is_a_fenced_block(box):
    task = replace(TASK, messages=TASK.messages[:1])
    model = ScriptedModel(
        says("So:\n```python\ndef twice(x): return 5\n```"), says("```\ndef twice(x): return 4\n```\nDone.")
    )
    rollout = await RepairLoop(PATIENT).run(task, model, box)
    assert rollout.detail["checks"] == (False, True)
    assert [role for role, _ in shown(model, 1)] == [Role.USER, Role.ASSISTANT, Role.USER]


def test_settings_decide_the_hash():
    assert open_harness("repair").hash != open_harness("repair", {"told": "{output}"}).hash


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1\n", "x = 1\n"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\n```py\nb\n", "b\n"),
        ("```", ""),
    ],
)
def test_the_last_fence_holds_the_code(text: str, code: str):
    assert code_in(text) == code


@with_the_module
async def test_the_check_of_a_shipped_task_passes_its_solution_and_says_what_fails(boxes: Boxes):
    blank = next(each for each in load() if each.id.endswith("/count_lower"))
    box = await boxes.start(SandboxSpec(files={"check.py": check_program(blank).encode()}))
    command = RepairConfig().command
    await box.write("answer.py", (blank.head + blank.solution).encode())
    assert (await box.exec(command, timeout=WHOLE_PROGRAM_S)).code == 0
    await box.write("answer.py", (blank.head + "    return -1\n").encode())
    failed = await box.exec(command, timeout=WHOLE_PROGRAM_S)
    assert failed.code == 1
    assert failed.stderr.decode() == "count_lower('Hello') gives -1, but it must hold that count_lower('Hello') == 4\n"


def test_repair_tasks_show_a_part_of_the_tests_only():
    for task in repair_tasks().tasks:
        hidden = task.grading.data["tests"].splitlines()
        check = task.spec.files["check.py"].decode()
        assert task.turns == 2
        assert sum(check.count(repr(line.removeprefix("assert "))) for line in hidden) <= 3
