"""Two answers with visible tests between them."""

from tests.fakes.tasks import calc_task
from tests.fakes.worlds import DictSandbox, ScriptedModel, says

from ostinato.core.conversation import Message, Role
from ostinato.worlds.harness.repair import RepairOnce
from ostinato.worlds.harness.rollout import Ended

START = Message(role=Role.ASSISTANT, text="```python\ndef f():")


def tried(argv, files, stdin):
    right = b"return 1" in files["solution.py"]
    return (0, b"") if right else (1, b"AssertionError: f() == 1\n")


async def work(*script, **changes):
    model, sandbox = ScriptedModel(*script), DictSandbox(run=tried)
    task = calc_task(harness="repair", messages=(Message(role=Role.USER, text="Write f."), START), **changes)
    return await RepairOnce().run(task, model, sandbox), model, sandbox


async def test_what_passes_at_once_is_asked_once():
    rollout, _, sandbox = await work(says("\n    return 1"))
    assert (rollout.ended, len(rollout.turns), rollout.detail["visible"]) == (Ended.SUBMITTED, 1, True)
    assert sandbox.files == {"solution.py": b"def f():\n    return 1\n"}
    assert sandbox.ran == [(["python3", "visible_tests.py"], {}, 10.0)]


async def test_what_fails_is_shown_and_written_again_once():
    rollout, model, sandbox = await work(says("\n    return 2"), says("\n    return 1"), says("never"))
    assert (len(rollout.turns), rollout.detail["visible"]) == (2, True)
    *_, answer, told, start = model.asked[1][0]
    assert answer.text == "```python\ndef f():\n    return 2\n```"
    assert told.role is Role.USER
    assert "AssertionError: f() == 1\nexit code 1" in told.text
    assert start == START
    assert sandbox.files == {"solution.py": b"def f():\n    return 1\n"}


async def test_a_second_failure_is_the_end():
    rollout, model, _ = await work(says("\n    return 2"), says("\n    return 3"))
    assert (len(model.asked), rollout.detail["visible"], rollout.messages[-1].role) == (2, False, Role.ASSISTANT)


async def test_a_task_of_one_turn_is_not_repaired():
    rollout, model, _ = await work(says("\n    return 2"), turns=1)
    assert (len(model.asked), rollout.detail["visible"], rollout.ended) == (1, False, Ended.SUBMITTED)
