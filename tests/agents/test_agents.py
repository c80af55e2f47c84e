"""Unmodified coding agents, with the settings that `ostinato connect` writes, solve a task through the gateway.

The policy is scripted, so that the test is about the wire: every call is answered and captured, and every prompt consists of the
tokens of the turn before it and the new part. Needs the agents: `make agents`.
"""

from itertools import pairwise

from tests.agents.solving import TELEMETRY, answer, passes, solve

from ostinato.core.records import Branch, Finish, Purpose, Signal, Turn
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.renderer import ByteRenderer

RESULT = 0xFC  # first byte of a tool's message
CONTEXT = 4_000_000


async def test_an_unmodified_agent_solves_a_task_and_every_prompt_continues_the_turn_before(agent, repo, home):
    def script(request):
        ids = request.prompt_ids
        told = "</tools>" in decode(ids)
        return answer(agent.steps(repo), uses_tools=agent.uses_tools, told=told, results=ids.count(RESULT))

    assert not passes(repo)
    log, refused = await solve(agent, repo, home, FakeEngine(script, context=CONTEXT), ByteRenderer(context=CONTEXT))
    assert passes(repo)
    assert refused == []
    turns = [row for row in log.rows if isinstance(row, Turn)]
    assert all(turn.finish in (Finish.STOP, Finish.TOOL_CALLS) for turn in turns)
    if not agent.uses_tools:
        assert len(turns) >= 1
        return
    own = [turn for turn in turns if "</tools>" in decode(turn.prompt_ids)]
    steps = agent.steps(repo)
    assert [turn.text for turn in own[: len(steps)]] == steps
    assert len({turn.episode for turn in own}) == 1
    assert {(turn.purpose, turn.branch) for turn in own} == {(Purpose.TASK, Branch.NONE)}
    assert {turn.purpose for turn in turns if turn not in own} <= {Purpose.SIDE}
    for before, after in pairwise(own):
        known = before.prompt_ids + before.sampled_ids
        assert after.parent == before.id
        assert after.prompt_ids[: len(known)] == known
    if agent.name in TELEMETRY:
        told = {(row.turn, row.name) for row in log.rows if isinstance(row, Signal)}
        assert {(turn.id, "tool_ok") for turn in own[: len(steps)]} <= told
