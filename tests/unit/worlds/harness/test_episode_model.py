"""The model of an episode against a real gateway: what is captured, and that no call is sampled twice."""

import pytest
from tests.fakes.gateways import lost_answers, world_gateway

from ostinato.core.conversation import Message, Role, Tool
from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.records import PolicyVersion, Purpose
from ostinato.testing.engine import FakeEngine
from ostinato.worlds.harness.harnesses import open_harness
from ostinato.worlds.tasks.task import Grading, Task

ASK = (Message(role=Role.USER, text="hi"),)


async def test_a_captured_turn_bears_its_harness_episode_and_group():
    harness = open_harness("single")
    async with world_gateway() as (gateway, log):
        model = gateway.model("e.0", group="g.0", harness=harness.hash)
        rollout = await harness.run(
            Task(id="t", family="f", messages=ASK, grading=Grading(grader="pattern")), model, None
        )
    (turn,) = log.turns()
    assert (turn.harness, turn.episode, turn.group, turn.arm) == (harness.hash, "e.0", "g.0", "world")
    assert rollout.turns == (turn.id,) == tuple(model.turns)
    assert model.policies == set(turn.versions_T()) != set()
    assert rollout.harness == f"single@{turn.harness}"
    assert rollout.messages[-1].text == "hello"


async def test_each_call_of_an_episode_has_a_seed_of_its_own_that_only_the_first_decides():
    async with world_gateway() as (gateway, log):
        for seed in (7, 7, None):
            model = gateway.model("e", group=None, harness="h", seed=seed)
            await model.ask(ASK, max_tokens=8)
            await model.ask(ASK, max_tokens=8)
    seeds = [turn.sampling.seed for turn in log.turns()]
    assert seeds[:4] == [7, 8, 7, 8]
    assert not {7, 8} & set(seeds[4:])


async def test_an_answer_that_is_lost_on_its_way_is_not_sampled_again():
    async with world_gateway() as (gateway, log):
        model = lost_answers(gateway, 2)
        first = await model.ask(ASK, max_tokens=8)
        second = await model.ask(ASK, max_tokens=8)
    assert [turn.id for turn in log.turns()] == [first.turn, second.turn] == model.turns
    assert first.turn != second.turn, "the same messages asked again are another call"
    assert model.policies == {span.policy for turn in log.turns() for span in turn.spans}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/elsewhere", {}),
        ("GET", "/v1/feedback", None),
        ("POST", "/v1/chat/completions", {"model": "another", "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_what_the_gateway_does_not_have_is_not_asked_for_again(method, path, body):
    async with world_gateway() as (gateway, _):
        with pytest.raises(BadRequest, match="start the gateway and its workers with the same version and settings"):
            await gateway.call(method, path, body, {"X-Ostinato-Slot": "world"})


async def test_an_agent_is_told_what_the_gateway_does_not_have():
    async with world_gateway() as (gateway, _):
        model = gateway.model("e", group="g", harness="h")
        async with model.passed("/v1/elsewhere", b"{}", {}) as answer:
            assert answer.status == 404
            assert b"There is nothing at" in b"".join([part async for part in answer.parts])


async def test_an_empty_slot_may_be_filled_again():
    engine = FakeEngine(slots={"live": PolicyVersion(number=0, hash="fake0")})
    async with world_gateway(engine=engine) as (gateway, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        with pytest.raises(Unavailable, match="No weights are loaded in slot 'world'"):
            await gateway.call("POST", "/v1/chat/completions", body, {"X-Ostinato-Slot": "world"})


async def test_an_answer_that_never_arrives_is_unavailable():
    async with world_gateway() as (gateway, log):
        with pytest.raises(Unavailable):
            await lost_answers(gateway, 3).ask(ASK, max_tokens=8)
    assert len(log.turns()) == 1


async def test_calls_and_their_answers_reach_the_model_again():
    script = 'Let me look.<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    tool = Tool(name="read", parameters={"type": "object", "properties": {"path": {"type": "string"}}})
    async with world_gateway(script) as (gateway, log):
        model = gateway.model("e", group=None, harness="h")
        first = await model.ask(ASK, [tool], max_tokens=200)
        (call,) = first.message.calls
        told = (*ASK, first.message, Message(role=Role.TOOL, text="gone away", answers=call.id))
        second = await model.ask(told, [tool], max_tokens=200)
        with pytest.raises(BadRequest):
            await model.ask((*told, Message(role=Role.USER, text="x" * 5000)), [tool], max_tokens=200)
    assert (call.name, call.values(), first.message.text) == ("read", {"path": "a"}, "Let me look.")
    before, after = log.turns()
    assert after.id == second.turn
    assert (
        after.prompt_ids[: len(before.prompt_ids) + len(before.sampled_ids)] == before.prompt_ids + before.sampled_ids
    )
    assert b"gone away" in bytes(token for token in after.prompt_ids if token < 256)


async def test_a_summary_is_captured_as_one_behind_its_window_and_calls_nothing():
    tool = Tool(name="read", parameters={"type": "object", "properties": {}})
    script = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    async with world_gateway(script) as (gateway, log):
        model = gateway.model("e", group="g", harness="h")
        called = await model.ask(ASK, [tool], max_tokens=200)
        (call,) = called.message.calls
        window = (*ASK, called.message, Message(role=Role.TOOL, text="it is empty", answers=call.id))
        request = Message(role=Role.USER, text="Sum up.")
        asked = await model.ask((*window, request), [tool], max_tokens=200, purpose=Purpose.COMPACTION)
    before, summary = log.turns()
    assert asked.message.calls == ()
    assert (before.purpose, summary.purpose) == (Purpose.TASK, Purpose.COMPACTION)
    assert (summary.episode, summary.group, summary.parent) == ("e", "g", before.id)
    known = before.prompt_ids + before.sampled_ids
    assert summary.prompt_ids[: len(known)] == known, "the window is computed once for its turns and its summary"
    assert model.turns == [before.id, summary.id]
