"""What every harness does, whichever it is: the same suite, over a scripted model and a sandbox in memory."""

import asyncio
import re
from dataclasses import replace

import pytest
from tests.fakes.tasks import calc_task
from tests.fakes.worlds import DictSandbox, ScriptedModel, says

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadRequest, TooLarge, Unavailable
from ostinato.worlds.harness.catalog import NAMES, open_harness
from ostinato.worlds.harness.rollout import Ended

CODE = "```python\nx = 1\n```"


@pytest.fixture(params=NAMES)
def harness(request):
    return open_harness(request.param)


def task_for(harness, **changes):
    return replace(calc_task(harness=harness.name), **changes)


async def test_an_answer_without_a_call_is_a_rollout_of_one_turn(harness):
    task, model, sandbox = task_for(harness), ScriptedModel(says(CODE)), DictSandbox({"calc.py": b""})
    rollout = await harness.run(task, model, sandbox)
    assert (rollout.task, rollout.ended) == (task.id, Ended.SUBMITTED)
    assert rollout.harness == f"{harness.name}@{harness.hash}"
    assert rollout.turns == ("chatcmpl-0:0",)
    assert rollout.messages[-1] == Message(role=Role.ASSISTANT, text=CODE)
    assert rollout.messages[:-1][-len(task.messages) :] == task.messages
    assert rollout.messages[:-1] == model.asked[0][0]
    assert (rollout.effort["turns"], rollout.effort["tokens"], rollout.effort["prompt_tokens"]) == (1, 5, 10)


async def test_the_task_says_how_long_an_answer_is_and_where_it_stops(harness):
    model = ScriptedModel(says(CODE))
    await harness.run(task_for(harness, tokens=33, stop=("\n\n",)), model, DictSandbox())
    assert model.asked[0][2:] == (33, ("\n\n",))


async def test_a_prefilled_answer_is_one_message_in_the_end(harness):
    start = Message(role=Role.ASSISTANT, text="```python\ndef f():")
    task = task_for(harness, messages=(Message(role=Role.USER, text="Complete it."), start))
    model = ScriptedModel(says("\n    return 1"))
    rollout = await harness.run(task, model, DictSandbox())
    assert model.asked[0][0][-1] == start
    assert rollout.messages[-1].text == "```python\ndef f():\n    return 1\n```"
    assert [message.role for message in rollout.messages].count(Role.ASSISTANT) == 1
    assert rollout.detail["answer"] == "\n    return 1"


async def test_an_answer_that_was_cut_ends_for_its_length(harness):
    rollout = await harness.run(task_for(harness), ScriptedModel(says("so", finish="length")), DictSandbox())
    assert rollout.ended is Ended.LENGTH


@pytest.mark.parametrize("error", [TooLarge("the prompt does not fit"), BadRequest("tools: no")])
async def test_a_first_question_that_cannot_be_asked_teaches_nothing(harness, error):
    rollout = await harness.run(task_for(harness), ScriptedModel(error), DictSandbox())
    assert (rollout.ended, rollout.turns, rollout.detail["why"]) == (Ended.FAILED, (), str(error))


async def test_what_the_gateway_cannot_do_now_is_raised(harness):
    with pytest.raises(Unavailable, match="later"):
        await harness.run(task_for(harness), ScriptedModel(Unavailable("later")), DictSandbox())


async def test_a_deadline_ends_it(harness):
    model = ScriptedModel(asyncio.Event())
    rollout = await harness.run(task_for(harness, timeout_s=0.01), model, DictSandbox())
    assert (rollout.ended, rollout.turns) == (Ended.TIMEOUT, ())


async def test_a_timeout_of_the_models_own_is_not_the_deadline(harness):
    with pytest.raises(Unavailable):
        await harness.run(task_for(harness), ScriptedModel(TimeoutError("slow")), DictSandbox())


def test_a_hash_is_one_of_all_that_decides(harness):
    assert re.fullmatch("[0-9a-f]{64}", harness.hash)
    assert open_harness(harness.name).hash == harness.hash
    assert [open_harness(name).hash for name in NAMES].count(harness.hash) == 1
