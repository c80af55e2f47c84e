"""What calls are for, and why a turn does not go on from the one before: told apart, kept on the turn, and chores are not learned from."""

import json
from dataclasses import replace

import pytest
from tests.fakes.summary_requests import (
    CLAUDE,
    NO_REQUESTS,
    OPENCODE,
    OPENCODE_SYSTEM,
    REQUESTS,
)
from tests.fakes.summary_requests import (
    CODEX as CODEX_REQUEST,
)
from tests.unit.serve.gateway_world import world
from tests.unit.serve.test_tools import READ

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.core.records import Branch, Purpose, Turn
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger_entries import untrainable
from ostinato.serve.calls.caller import purpose_of
from ostinato.testing.records import a_turn

HI = Conversation(messages=(Message(role=Role.USER, text="hi"),))
TOOLED = Conversation(messages=HI.messages, tools=(Tool(name="read"),))
CALLED = Conversation(
    messages=(Message(role=Role.ASSISTANT, calls=(ToolCall(id="c", name="read", arguments="{}"),)), *HI.messages)
)
CODEX = {"Session-Id": "s", "X-Codex-Turn-Metadata": json.dumps({"turn_id": "1", "request_kind": "turn"})}


def raw(headers):
    return {name.lower().encode(): value.encode() for name, value in headers.items()}


@pytest.mark.parametrize(
    ("headers", "conversation", "purpose"),
    [
        ({}, HI, Purpose.TASK),
        ({}, TOOLED, Purpose.TASK),
        ({"X-Session-Id": "s"}, TOOLED, Purpose.TASK),
        ({"X-Session-Id": "s"}, CALLED, Purpose.TASK),  # tools were used, and this call may not use them
        ({"X-Session-Id": "s"}, HI, Purpose.SIDE),  # opencode's title
        ({"X-Claude-Code-Session-Id": "s"}, HI, Purpose.SIDE),  # Claude Code's title
        ({"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a"}, TOOLED, Purpose.SUBAGENT),
        ({"X-Session-Id": "s", "X-Parent-Session-Id": "p"}, TOOLED, Purpose.SUBAGENT),
        (CODEX, TOOLED, Purpose.TASK),
        ({**CODEX, "X-Openai-Subagent": "collab_spawn"}, TOOLED, Purpose.SUBAGENT),
        ({**CODEX, "X-Codex-Turn-Metadata": '{"request_kind": "compaction"}'}, HI, Purpose.COMPACTION),
        ({**CODEX, "X-Openai-Subagent": "compact"}, HI, Purpose.COMPACTION),
        (
            {**CODEX, "X-Codex-Turn-Metadata": json.dumps({"request_kind": "compaction", "more": "x" * 2000})},
            HI,
            Purpose.COMPACTION,
        ),
        ({"X-Codex-Turn-Metadata": "{no json"}, TOOLED, Purpose.TASK),
        ({"X-Codex-Turn-Metadata": '["request_kind"]'}, TOOLED, Purpose.TASK),
        ({"X-Codex-Turn-Metadata": '{"request_kind": {}}'}, TOOLED, Purpose.TASK),
        ({"X-Ostinato-Purpose": "side"}, TOOLED, Purpose.SIDE),
        ({"X-Ostinato-Purpose": "task", "X-Session-Id": "s"}, HI, Purpose.TASK),
        ({"X-Session-Id": "s"}, None, Purpose.TASK),
    ],
)
def test_what_a_call_is_for_is_read_off_what_agents_send(headers, conversation, purpose):
    assert purpose_of(raw(headers), conversation) is purpose


@pytest.mark.parametrize(
    "headers", [{}, {"X-Claude-Code-Session-Id": "s"}, {"X-Session-Id": "s", "X-Parent-Session-Id": "p"}]
)
@pytest.mark.parametrize("name", REQUESTS)
def test_an_agents_own_request_for_a_summary_is_a_compaction_when_it_arrives(name, headers):
    assert purpose_of(raw(headers), REQUESTS[name]) is Purpose.COMPACTION
    assert purpose_of(raw({**headers, "X-Ostinato-Purpose": "side"}), REQUESTS[name]) is Purpose.SIDE


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_what_only_speaks_of_a_summary_is_no_compaction(name):
    assert purpose_of({}, NO_REQUESTS[name]) is Purpose.TASK


async def test_an_agents_summary_has_room_though_the_agent_names_no_budget():
    """Codex names no budget and cannot go on when its summary is cut off: it gets as much as a summary on demand."""
    long = "x" * 200
    async with world(long, default_max_tokens=100) as w:
        for content in ("Mend it.", CODEX_REQUEST):
            status, _, body = await w.post("/v1/responses", {"model": "m", "input": content, "user": "ann"})
            assert status == 200, body
        task, summary = w.log.turns()
        assert (task.purpose, len(task.sampled_ids)) == (Purpose.TASK, 100)
        assert (summary.purpose, summary.text) == (Purpose.COMPACTION, long)


async def test_the_wire_of_each_dialect_is_read():
    async with world() as w:
        tool = {"name": "read", "input_schema": {"type": "object"}}
        talk = [
            {"role": "user", "content": "Mend it."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "..."},
                    {"type": "text", "text": CLAUDE},
                ],
            },
        ]
        body = {"model": "m", "max_tokens": 99, "tools": [tool], "messages": talk}
        status, headers, _ = await w.post("/v1/messages", body, headers={"X-Claude-Code-Session-Id": "s"})
        assert (status, headers["x-ostinato-purpose"]) == (200, "compaction")
        chat = [{"role": "system", "content": OPENCODE_SYSTEM}, {"role": "user", "content": OPENCODE}]
        status, headers, _ = await w.chat(messages=chat, headers={"X-Session-Id": "s"})
        assert (status, headers["x-ostinato-purpose"]) == (200, "compaction")


def test_an_unknown_purpose_is_refused():
    with pytest.raises(BadRequest, match="task, subagent, compaction, side"):
        purpose_of(raw({"X-Ostinato-Purpose": "fun"}), HI)


@pytest.mark.parametrize("purpose", Purpose)
def test_all_but_side_calls_are_learned_from_unless_asked(purpose):
    turn = replace(a_turn("a:0"), purpose=purpose)
    assert untrainable(turn, 0.1) == ("purpose:side" if purpose is Purpose.SIDE else None)
    assert purpose is Purpose.SIDE or purpose in RewardConfig().purposes
    assert untrainable(turn, 0.1, purposes=tuple(Purpose)) is None


async def test_the_purpose_is_on_the_turn():
    async with world() as w:
        await w.chat(headers={"x-session-id": "s"})
        await w.chat(headers={"x-session-id": "s"}, tools=[READ], max_tokens=99)
        status, _, _ = await w.chat(headers={"x-ostinato-purpose": "fun"})
        assert status == 400
        found = [row.purpose for row in w.log.rows if isinstance(row, Turn)]
        assert found == [Purpose.SIDE, Purpose.TASK]


# ------------------------------------------------------------ branches


class Talk:
    """One person's conversation; what is said of each call is the branch of its turn."""

    def __init__(self, w, **headers):
        self.w, self.headers, self.messages = w, headers, []

    async def ask(self, text, *, keep=True):
        messages = [*self.messages, {"role": "user", "content": text}]
        status, _, body = await self.w.chat(headers=self.headers, messages=messages, user="ann")
        assert status == 200, body
        turn = [row for row in self.w.log.rows if isinstance(row, Turn)][-1]
        if keep:
            self.messages = [*messages, {"role": "assistant", "content": body["choices"][0]["message"]["content"]}]
        return turn


SESSION = {"x-ostinato-episode": "e"}


async def test_what_goes_on_is_no_branch():
    async with world() as w:
        talk = Talk(w, **SESSION)
        turns = [await talk.ask(text) for text in ("one", "two", "three")]
        assert [turn.branch for turn in turns] == [Branch.NONE] * 3
        assert [turn.parent for turn in turns] == [None, turns[0].id, turns[1].id]


async def test_the_same_question_again_is_a_retry():
    async with world() as w:
        talk = Talk(w, **SESSION)
        await talk.ask("one")
        first = await talk.ask("two", keep=False)
        again = await talk.ask("two")
        assert (first.branch, again.branch) == (Branch.NONE, Branch.AGAIN)
        assert first.parent == again.parent
        assert (await talk.ask("three")).branch is Branch.NONE


async def test_another_question_to_the_same_turn_is_parallel():
    async with world() as w:
        talk = Talk(w, **SESSION)
        first = await talk.ask("one")
        await talk.ask("two", keep=False)
        other = await talk.ask("two, or rather three", keep=False)
        assert (other.branch, other.parent) == (Branch.PARALLEL, first.id)


async def test_a_history_that_was_changed_is_edited():
    async with world() as w:
        talk = Talk(w, **SESSION)
        first = await talk.ask("one")
        await talk.ask("two")
        talk.messages[-1] = {"role": "assistant", "content": "I never said that"}
        edited = await talk.ask("three")
        assert (edited.branch, edited.parent) == (Branch.EDITED, first.id)
        talk.messages[1] = {"role": "assistant", "content": "nor that"}
        assert (await talk.ask("four")).branch is Branch.EDITED


async def test_an_episode_that_goes_on_without_its_history_is_fresh():
    async with world() as w:
        talk = Talk(w, **SESSION)
        await talk.ask("one")
        talk.messages = []
        assert (await talk.ask("Summary: we said hello. Go on.")).branch is Branch.FRESH
        other = Talk(w, **{"x-ostinato-episode": "other"})
        assert (await other.ask("one")).branch is Branch.NONE


async def test_what_the_client_did_not_see_is_unseen():
    async with world("hello STOP") as w:
        talk = Talk(w, **SESSION)
        await w.chat(headers=SESSION, messages=[{"role": "user", "content": "one"}], user="ann", stop=["STOP"])
        talk.messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "hello"}]
        assert (await talk.ask("two")).branch is Branch.UNSEEN


async def test_strangers_who_ask_alike_repeat_nobody():
    async with world() as w:
        for _ in range(2):
            await w.chat()
        for user in ("ann", "bob", "ann"):
            await w.chat(user=user)  # a first word alone says nothing
        assert {row.branch for row in w.log.rows if isinstance(row, Turn)} == {Branch.NONE}
