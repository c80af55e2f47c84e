"""Rules that clear old tool results and thinking of a prompt: what goes, what stays, what is told, and how the turns are linked."""

import pytest
from tests.unit.serve.gateway_world import world
from tests.unit.serve.test_compaction_blocks import said_in_turn, told_in

from ostinato.core.conversation import Conversation, Message, Role, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.core.records import Branch
from ostinato.serve.dialects.anthropic import parse_messages
from ostinato.serve.dialects.context_edits import CLEARED, ContextManagement, cleared
from ostinato.testing.engine import decode
from ostinato.testing.renderer import ByteRenderer

ASK = {"model": "m", "max_tokens": 200, "metadata": {"user_id": "ann"}}
USES = {"type": "clear_tool_uses_20250919"}
THINKING = {"type": "clear_thinking_20251015"}
LOW = {"trigger": {"type": "tool_uses", "value": 1}}
TOOLS = {"tools": [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "run")]}


def count(conversation):
    return len(ByteRenderer().chat(conversation))


def uses(number, name="read"):
    """A user's message, then so many calls with their results."""
    messages = [Message(role=Role.USER, text="Look.")]
    for i in range(number):
        call = ToolCall(id=f"c{i}", name=name if i else "run", arguments=f'{{"path":"{i}.py"}}')
        messages += [
            Message(role=Role.ASSISTANT, text=f"At {i}.", reasoning=f"thought {i}", calls=(call,)),
            Message(role=Role.TOOL, text=f"result {i} " * 30, answers=f"c{i}"),
        ]
    return Conversation(messages=tuple(messages))


def after(conversation, *edits, most=10**6):
    wanted = ContextManagement.model_validate({"edits": [*edits]})
    return cleared(conversation, wanted, count, most)


def results(conversation):
    return [message.text == CLEARED for message in conversation.messages if message.role is Role.TOOL]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({}, [True, True, False, False, False]),
        ({"keep": {"type": "tool_uses", "value": 1}}, [True] * 4 + [False]),
        ({"keep": {"type": "tool_uses", "value": 0}}, [True] * 5),
        ({"keep": {"type": "tool_uses", "value": 9}}, [False] * 5),
        ({"exclude_tools": ["run"]}, [False, True, False, False, False]),
        ({"exclude_tools": ["run", "read"]}, [False] * 5),
        ({"trigger": {"type": "tool_uses", "value": 5}}, [False] * 5),
        ({"trigger": {"type": "input_tokens", "value": 1_000}}, [True, True, False, False, False]),
        ({"trigger": {"type": "input_tokens", "value": 9_000}}, [False] * 5),
        ({"trigger": None}, [False] * 5),
        ({"clear_at_least": {"type": "input_tokens", "value": 400}}, [True, True, False, False, False]),
        ({"clear_at_least": {"type": "input_tokens", "value": 500}}, [False] * 5),
    ],
)
def test_old_tool_results_are_cleared_as_the_edit_says(edit, expected):
    talk = uses(5)
    shorter, applied = after(talk, USES | LOW | edit)
    assert results(shorter) == expected
    assert shorter is not talk or not any(expected)
    if any(expected):
        (told,) = applied
        assert (told["type"], told["cleared_tool_uses"]) == (USES["type"], sum(expected))
        assert told["cleared_input_tokens"] == count(talk) - count(shorter) > 0
    else:
        assert (shorter, applied) == (talk, [])


def test_a_trigger_beyond_the_share_of_the_context_works_at_the_share():
    talk = uses(5)
    assert after(talk, USES, most=count(talk))[1] == []
    assert after(talk, USES, most=count(talk) - 1)[1] != []


def test_a_short_conversation_is_not_even_counted():
    wanted = ContextManagement.model_validate({"edits": [USES]})
    cleared(uses(5), wanted, lambda _: pytest.fail("counted"), 10**6)


@pytest.mark.parametrize(
    ("inputs", "expected"), [(True, [True, True]), (["read"], [False, True]), ([], [False] * 2), (False, [False] * 2)]
)
def test_inputs_of_cleared_uses_go_if_that_is_wanted(inputs, expected):
    shorter, _ = after(uses(5), USES | LOW | {"clear_tool_inputs": inputs})
    calls = [call for message in shorter.messages for call in message.calls]
    assert [call.arguments == "{}" for call in calls] == [*expected, False, False, False]


def test_an_open_call_and_a_result_without_its_call_stay():
    call = ToolCall(id="open", name="read", arguments="{}")
    talk = uses(3)
    odd = (Message(role=Role.ASSISTANT, calls=(call,)), Message(role=Role.TOOL, text="stray", answers="unknown"))
    shorter, _ = after(
        Conversation(messages=(*talk.messages, *odd)), USES | LOW | {"keep": {"type": "tool_uses", "value": 0}}
    )
    assert results(shorter) == [True, True, True, False]


def said(*thoughts):
    """A turn for each thought: a user's message, and an answer with it, or without if it is empty."""
    return [
        message
        for place, thought in enumerate(thoughts)
        for message in (
            Message(role=Role.USER, text=f"{place}?"),
            Message(role=Role.ASSISTANT, text=f"{place}!", reasoning=thought),
        )
    ]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, ["", "", "", "c"]),
        ({"type": "thinking_turns", "value": 2}, ["", "b", "", "c"]),
        ({"type": "thinking_turns", "value": 3}, ["a", "b", "", "c"]),
        ({"type": "thinking_turns", "value": 0}, [""] * 4),
        ("all", ["a", "b", "", "c"]),
        ({"type": "all"}, ["a", "b", "", "c"]),
    ],
)
def test_thinking_of_older_turns_is_cleared(keep, expected):
    talk = Conversation(messages=tuple(said("a", "b", "", "c")))
    shorter, applied = after(talk, THINKING | ({} if keep is None else {"keep": keep}))
    assert [message.reasoning for message in shorter.messages if message.role is Role.ASSISTANT] == expected
    gone = 3 - sum(map(bool, expected))
    assert [each["cleared_thinking_turns"] for each in applied] == ([gone] if gone else [])
    before, now = talk.messages[1], shorter.messages[1]
    assert (before.digest == now.digest) == (before.reasoning == now.reasoning)


def test_a_turn_of_many_calls_keeps_its_thinking_whole():
    shorter, applied = after(uses(5), THINKING)
    assert applied == []
    assert all(message.reasoning for message in shorter.messages if message.role is Role.ASSISTANT)


@pytest.mark.parametrize(
    ("edit", "field", "reason"),
    [
        (USES | {"instructions": "x"}, "edits[0]", "leave instructions out"),
        (THINKING | {"trigger": {"type": "input_tokens", "value": 9}}, "edits[0]", "leave trigger out"),
        (THINKING | {"keep": {"type": "tool_uses", "value": 9}}, "edits[0]", "thinking_turns or all"),
        ({"type": "compact_20260112", "trigger": {"type": "tool_uses", "value": 9}}, "edits[0]", "input_tokens"),
        (USES | {"trigger": {"type": "input_tokens"}}, "edits[0].trigger", "a value"),
        (USES | {"trigger": {"type": "input_tokens", "value": -1}}, "edits[0].trigger.value", "greater than or equal"),
        (USES | {"clear_tool_inputs": [""]}, "edits[0].clear_tool_inputs", "at least 1"),
    ],
)
def test_edits_that_make_no_sense_are_refused_by_name(edit, field, reason):
    body = ASK | {"messages": [{"role": "user", "content": "hi"}], "context_management": {"edits": [edit]}}
    with pytest.raises(BadRequest, match=reason) as caught:
        parse_messages(body)
    assert str(caught.value.field).startswith(f"context_management.{field}")


def test_an_edit_is_given_once():
    body = ASK | {"messages": [{"role": "user", "content": "hi"}], "context_management": {"edits": [USES, USES]}}
    with pytest.raises(BadRequest, match="two edits"):
        parse_messages(body)


# ---------------------------------------------------------------- through the gateway


CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
KEEP = USES | LOW | {"keep": {"type": "tool_uses", "value": 1}}


async def worked(w, calls, edit=None, **headers):
    """So many calls of a tool, each with a result; returns the conversation and the bodies."""
    talk, bodies = [{"role": "user", "content": "Look at all of them."}], []
    more = {} if edit is None else {"context_management": {"edits": [edit]}}
    for number in range(calls):
        status, _, body = await w.post("/v1/messages", ASK | TOOLS | more | {"messages": talk}, headers=headers)
        assert status == 200, body
        bodies.append(body)
        use = next(block["id"] for block in body["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use, "content": f"result {number} " * 9}
        talk += [{"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}]
    return talk, bodies


@pytest.mark.parametrize("headers", [{}, {"x-ostinato-episode": "fix"}])
async def test_cleared_turns_are_one_episode_and_say_why_they_have_another_prefix(headers):
    async with world(CALL) as w:
        _, bodies = await worked(w, 5, KEEP, **headers)
        turns = w.log.turns()
        assert len({turn.episode for turn in turns}) == 1
        assert [turn.branch for turn in turns] == [Branch.NONE, Branch.NONE, *[Branch.EDITED] * 3]
        assert turns[1].parent == turns[0].id
        shown = [[f"result {number}" in decode(turn.prompt_ids) for number in range(4)] for turn in turns]
        assert shown == [[number == turn - 1 for number in range(4)] for turn in range(5)], "the newest is kept"
        told = [body["context_management"]["applied_edits"] for body in bodies]
        assert [[each["cleared_tool_uses"] for each in edits] for edits in told] == [[], [], [1], [2], [3]]


async def test_without_the_edit_the_whole_history_is_shown_again():
    async with world(CALL) as w:
        talk, _ = await worked(w, 3, KEEP)
        status, _, body = await w.post("/v1/messages", ASK | TOOLS | {"messages": talk})
        last = w.log.turns()[-1]
        assert (status, "context_management" in body) == (200, False)
        assert all(f"result {number}" in decode(last.prompt_ids) for number in range(3))
        assert last.episode == w.log.turns()[0].episode


async def test_the_same_clearing_goes_on_from_the_tokens_that_were_sampled():
    async with world(engine=said_in_turn(CALL, CALL, CALL, "Done.", "Bye.")) as w:
        talk, _ = await worked(w, 3, KEEP)
        more = {"context_management": {"edits": [KEEP]}}
        _, _, body = await w.post("/v1/messages", ASK | TOOLS | more | {"messages": talk})
        talk += [{"role": "assistant", "content": body["content"]}, {"role": "user", "content": "Thanks."}]
        await w.post("/v1/messages", ASK | TOOLS | more | {"messages": talk})
        *_, before, last = w.log.turns()
        known = before.prompt_ids + before.sampled_ids
        assert (last.parent, last.branch, last.prompt_ids[: len(known)]) == (before.id, Branch.NONE, known)


async def test_thinking_that_is_cleared_is_not_in_the_tokens_either():
    thought = "<think>\nsecret plan\n</think>\n\nFirst."
    async with world(engine=said_in_turn(thought, "Second.", "Third.")) as w:
        talk = [{"role": "user", "content": "One?"}]
        first = ASK | {"messages": talk}
        await w.post("/v1/messages", first)
        again = {"type": "thinking", "thinking": "secret plan", "signature": "x"}
        talk += [
            {"role": "assistant", "content": [again, {"type": "text", "text": thought}]},
            {"role": "user", "content": "Two?"},
        ]
        keep = {"type": "thinking_turns", "value": 0}
        edits = {"context_management": {"edits": [THINKING | {"keep": keep}]}}
        _, _, body = await w.post("/v1/messages", ASK | edits | {"messages": talk})
        one, two = w.log.turns()
        assert (two.parent, two.branch, two.episode) == (None, Branch.EDITED, one.episode)
        assert body["context_management"]["applied_edits"][0]["cleared_thinking_turns"] == 1


async def test_counting_counts_what_is_left_and_tells_what_there_was():
    async with world(CALL) as w:
        talk, _ = await worked(w, 4, KEEP)
        more = {"context_management": {"edits": [KEEP]}}
        ask = {"model": "m", "messages": talk, **TOOLS}
        _, _, plain = await w.post("/v1/messages/count_tokens", ask)
        _, _, shorter = await w.post("/v1/messages/count_tokens", ask | more)
        await w.post("/v1/messages", ASK | ask | more | {"metadata": {"user_id": "bob"}})  # rendered whole
        assert shorter == {
            "input_tokens": len(w.log.turns()[-1].prompt_ids),
            "context_management": {"original_input_tokens": plain["input_tokens"]},
        }
        assert shorter["input_tokens"] < plain["input_tokens"]
        _, _, none = await w.post("/v1/messages/count_tokens", ask | {"context_management": {"edits": []}})
        assert none == plain | {"context_management": {"original_input_tokens": plain["input_tokens"]}}


async def test_what_is_cleared_is_told_in_a_stream_and_in_a_repeat():
    async with world(CALL) as w:
        talk, _ = await worked(w, 4, KEEP)
        ask = ASK | TOOLS | {"context_management": {"edits": [KEEP]}, "messages": talk}
        key = {"idempotency-key": "k"}
        _, _, body = await w.post("/v1/messages", ask, headers=key)
        _, _, stream = await w.post("/v1/messages", ask | {"stream": True}, headers=key)
        told = next(event for event in told_in(stream) if event["type"] == "message_delta")
        assert told["context_management"] == body["context_management"]
        assert body["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 3


async def test_results_are_cleared_before_a_summary_is_thought_of():
    async with world(CALL, compaction_least_tokens=256) as w:
        talk, _ = await worked(w, 6)
        ask = ASK | TOOLS | {"messages": talk}
        edit = {"context_management": {"edits": [KEEP]}}
        _, _, left = await w.post("/v1/messages/count_tokens", {"model": "m", "messages": talk, **TOOLS, **edit})
        trigger = {"type": "input_tokens", "value": left["input_tokens"] + 20}
        compact = {"type": "compact_20260112", "trigger": trigger}
        _, _, body = await w.post("/v1/messages", ask | {"context_management": {"edits": [compact, KEEP]}})
        assert [block["type"] for block in body["content"]] == ["tool_use"]
        w.engine.script = said_in_turn("Summary.", "On.").script
        _, _, body = await w.post("/v1/messages", ask | {"context_management": {"edits": [compact]}})
        assert [block["type"] for block in body["content"]] == ["compaction", "text"]
