"""A rollout whose time is over while its model speaks, against a real gateway: what was said counts, and nothing is asked without end."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.gateways import world_gateway
from tests.fakes.stalling_engine import Stalls

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import Unavailable
from ostinato.core.records import Finish
from ostinato.worlds.harness import gateway as harness_gateway
from ostinato.worlds.harness.gateway import EpisodeModel
from ostinato.worlds.harness.harnesses import open_harness
from ostinato.worlds.harness.rollout import OVERRAN, Ended, OutOfTime
from ostinato.worlds.tasks.task import Grading, Task

ASK = (Message(role=Role.USER, text="hi"),)
TASK = Task(id="t", family="f", messages=ASK, grading=Grading(grader="pattern"), timeout_s=3600.0)


async def in_time(ask):
    """What comes of a time that is long enough for the machine to begin, and that ends."""
    for seconds in (0.4, 4.0, 40.0):
        with contextlib.suppress(OutOfTime):
            return await ask(seconds)
    raise AssertionError("it never began")


async def test_what_was_said_in_time_is_the_answer_and_a_turn():
    async with world_gateway(engine=Stalls(3)) as (gateway, log):
        model = gateway.model("e", group="g", harness="h")
        answered = await in_time(lambda seconds: model.ask(ASK, max_tokens=50, left_s=seconds))
    (turn,) = log.turns()
    assert (answered.finish, answered.message.text, answered.tokens) == (OVERRAN, "hel", 3)
    assert (answered.turn, turn.finish, model.turns) == (turn.id, Finish.DEADLINE, [turn.id])
    assert model.policies == set(turn.versions_T())


async def test_the_plainest_harness_ends_with_it():
    async with world_gateway(engine=Stalls(3)) as (gateway, log):

        async def run(seconds):
            model = gateway.model("e", group="g", harness="h")
            return await open_harness("single").run(replace(TASK, timeout_s=seconds), model, None)

        rollout = await in_time(run)
    assert (rollout.ended, rollout.turns) == (Ended.TIMEOUT, (log.turns()[0].id,))
    assert rollout.messages[-1].text == "hel"
    assert rollout.effort["tokens"] == 3
    assert rollout.detail["why"].startswith("after ")


@pytest.mark.parametrize("seconds", [0.3, 0.0, -1.0])
async def test_where_nothing_was_said_in_time_nothing_is_asked_again(seconds):
    engine = Stalls(0)
    async with world_gateway(engine=engine) as (gateway, log):
        model = gateway.model("e", group="g", harness="h")
        await gateway.named()
        with pytest.raises(OutOfTime):
            await model.ask(ASK, max_tokens=50, left_s=seconds)
    assert (log.turns(), model.turns) == ([], [])
    assert len(engine.requests) <= 1
    assert engine.running == 0


async def test_a_huge_time_is_none():
    async with world_gateway() as (gateway, _):
        answered = await gateway.model("e", group=None, harness="h").ask(ASK, max_tokens=50, left_s=1e12)
    assert answered.finish == "stop"


class Dead:
    """A gateway that takes calls and says nothing, or fails each."""

    temperature = 1.0

    def __init__(self, error=None):
        self.error, self.calls, self.left = error, 0, []

    async def named(self):
        return "m"

    async def call(self, method, path, body=None, headers=None):
        self.calls += 1
        self.left.append(int(headers["X-Ostinato-Left-Ms"]))
        if self.error is None:
            await asyncio.get_running_loop().create_future()
        raise self.error


async def test_a_gateway_that_hangs_is_given_up_soon_after(monkeypatch):
    monkeypatch.setattr(harness_gateway, "GRACE_S", 0.05)
    dead = Dead()
    async with asyncio.timeout(PATIENT_S):
        with pytest.raises(OutOfTime, match="did not respond by the deadline"):
            await EpisodeModel(dead, "e", None, "h").ask(ASK, max_tokens=5, left_s=0.05)
    assert dead.calls == 1


async def test_a_gateway_that_fails_is_asked_while_there_is_time_and_the_reason_is_told():
    dead = Dead(Unavailable("the engine is down"))
    with pytest.raises(OutOfTime, match="the engine is down"):
        await EpisodeModel(dead, "e", None, "h", pause_s=60.0).ask(ASK, max_tokens=5, left_s=0.2)
    assert dead.calls == 1, "the pause before the second try does not outlast the time"
    dead = Dead(Unavailable("the engine is down"))
    with pytest.raises(Unavailable) as caught:
        await EpisodeModel(dead, "e", None, "h", pause_s=0.001).ask(ASK, max_tokens=5, left_s=3600.0)
    assert not isinstance(caught.value, OutOfTime)
    assert dead.calls == 3
    assert dead.left == sorted(dead.left, reverse=True), "each try tells what is left then"


async def test_a_turn_without_a_token_is_none():
    """Nobody learns from one, so that the grade of a rollout that ends with it would be lost."""
    empty = {
        "choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 0},
        "ostinato": {"turns": ["chatcmpl-1:0"], "spans": []},
    }

    class Empty(Dead):
        async def call(self, method, path, body=None, headers=None):
            return empty

    model = EpisodeModel(Empty(), "e", None, "h")
    with pytest.raises(Unavailable, match="no token"):
        await model.ask(ASK, max_tokens=5)
    assert model.turns == []
