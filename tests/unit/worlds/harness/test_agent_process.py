"""An agent's process, whatever ends it."""

import asyncio

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.conversation import Message, Role
from ostinato.worlds.harness.agent import AgentConfig, CodingAgent
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.tasks.task import Grading, Task

TASK = Task(
    id="t", family="f", messages=(Message(role=Role.USER, text="hi"),), grading=Grading(grader="pattern"), turns=3
)


class Relay:
    def __init__(self):
        self.over = asyncio.get_running_loop().create_future()


class SlowToEnd:
    """A sandbox whose program has not ended when it is told to."""

    def __init__(self):
        self.began, self.ending = asyncio.Event(), asyncio.Event()

    async def exec(self, argv, **_):
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await asyncio.Event().wait()


async def test_a_rollout_that_is_cancelled_while_its_agent_ends_goes_on_no_further():
    agent, relay, sandbox = CodingAgent("agent", AgentConfig(command=("agent",))), Relay(), SlowToEnd()
    deadline = asyncio.get_running_loop().time() + PATIENT_S
    working = asyncio.create_task(agent._work(TASK, relay, sandbox, "m", deadline))
    async with asyncio.timeout(PATIENT_S):
        await sandbox.began.wait()
        relay.over.set_result((Ended.TURNS, ""))
        await sandbox.ending.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
