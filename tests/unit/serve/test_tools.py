import json

import pytest
from tests.unit.serve.gateway_world import ASK, events, world

from ostinato.core.conversation import call_id, calling_turn
from ostinato.core.records import Finish, Turn
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "calc.py", "limit": 60000.0}}\n</tool_call>'
ASKED = [{"role": "user", "content": "fix it"}]


WRITE = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "text": "x = 1\\ny = 2\\n"}}\n</tool_call>'


def turns(w):
    return [row for row in w.log.rows if isinstance(row, Turn)]


async def ask(w, messages=ASKED, headers=None, **fields):
    status, _, body = await w.chat(headers, messages=messages, tools=[READ], max_tokens=200, user="ann", **fields)
    assert status == 200, body
    return body


async def test_a_call_comes_as_a_call_and_is_kept_as_it_was_sampled():
    async with world("Let me look." + CALL) as w:
        body = await ask(w)
        (choice,), (turn,) = body["choices"], turns(w)
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me look."
        assert call["type"] == "function"
        assert call["function"]["name"] == "read"
        assert json.loads(call["function"]["arguments"]) == {"path": "calc.py", "limit": 60000.0}
        assert (call["id"], calling_turn(call["id"])) == (call_id(turn.id, 0), turn.id)
        assert len(call["id"]) <= 40
        assert (turn.finish, turn.text) == (Finish.TOOL_CALLS, "Let me look." + CALL)
        assert decode(turn.sampled_ids) == turn.text


async def test_a_call_without_text_has_no_content():
    async with world(CALL) as w:
        message = (await ask(w))["choices"][0]["message"]
        assert message["content"] is None


async def test_a_streamed_call_comes_whole_and_nothing_of_it_as_text():
    async with world("Look: " + CALL + CALL) as w:
        told = events(await ask(w, stream=True))
        deltas = [choice["delta"] for event in told[:-1] for choice in event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Look:"
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert len({call["id"] for call in calls}) == 2
        assert [json.loads(call["function"]["arguments"])["path"] for call in calls] == ["calc.py"] * 2
        assert told[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "read", "arguments": {"path": \n</tool_call>',
        CALL[:-14],
        '<tool_call>{"name": 7}</tool_call> ok',
    ],
)
async def test_a_call_that_does_not_parse_is_shown_as_the_text_it_is(broken, stream):
    async with world("Hm. " + broken) as w:
        body = await ask(w, stream=stream)
        if stream:
            deltas = [choice["delta"] for event in events(body)[:-1] for choice in event["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
            assert not any("tool_calls" in delta for delta in deltas)
        else:
            text = body["choices"][0]["message"]["content"]
            assert body["choices"][0]["finish_reason"] == "stop"
        assert text == "Hm. " + broken == turns(w)[0].text
        assert turns(w)[0].finish is Finish.STOP


async def test_a_call_cut_by_the_budget_is_text():
    async with world(CALL) as w:
        status, _, body = await w.chat(messages=ASKED, tools=[READ], max_tokens=30)
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["message"]["content"] == CALL[:30]


async def test_without_tools_nothing_is_read_as_a_call():
    async with world(CALL) as w:
        for more in ({}, {"tools": [READ], "tool_choice": "none"}):
            _, _, body = await w.chat(messages=ASKED, max_tokens=200, **more)
            assert body["choices"][0]["message"]["content"] == CALL
            assert body["choices"][0]["finish_reason"] == "stop"


async def test_the_prompt_offers_the_tools():
    async with world("ok") as w:
        await ask(w)
        await ask(w, tool_choice="none")
        offered, forbidden = [decode(turn.prompt_ids) for turn in turns(w)]
        assert '"read"' in offered
        assert "Read a fi" in offered
        assert forbidden == offered


async def test_a_question_that_forbids_calls_goes_on_from_the_answer_before():
    async with world("hello") as w:
        message = (await ask(w))["choices"][0]["message"]
        await ask(w, [*ASKED, message, {"role": "user", "content": "Summarise."}], tool_choice="none")
        first, second = turns(w)
        assert second.parent == first.id
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


def history(message, result="def add(a, b): ...", **changed):
    """The conversation as an agent sends it back: the call written anew."""
    (call,) = message["tool_calls"]
    values = json.loads(call["function"]["arguments"]) | {"replace_all": False}
    again = json.dumps(dict(sorted(values.items())) | changed, separators=(",", ":")).replace("60000.0", "60000")
    sent = {**call, "function": {"name": "read", "arguments": again}, "provider_specific_fields": None}
    return [
        *ASKED,
        {"role": "assistant", "content": message["content"], "tool_calls": [sent]},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": result}]},
    ]


async def test_the_next_call_continues_the_sampled_ids_however_the_agent_wrote_them_anew():
    answers = iter(["Let me look.\n" + CALL, "yellow"])
    async with world(engine=FakeEngine(lambda _: next(answers))) as w:
        first = (await ask(w))["choices"][0]["message"]
        await ask(w, history(first))
        one, two = turns(w)
        known = one.prompt_ids + one.sampled_ids
        assert two.parent == one.id
        assert two.prompt_ids[: len(known)] == known
        assert two.episode == one.episode


async def test_a_call_that_was_changed_is_a_branch():
    answers = iter([CALL, "yellow"])
    async with world(engine=FakeEngine(lambda _: next(answers))) as w:
        first = (await ask(w))["choices"][0]["message"]
        await ask(w, history(first, path="other.py"))
        one, two = turns(w)
        assert two.parent is None
        assert "other.py" in decode(two.prompt_ids)
        assert one.sampled_ids != two.sampled_ids


async def test_a_hundred_turns_of_calls_are_one_chain():
    async with world("Again." + CALL) as w:
        messages = ASKED
        for number in range(20):
            message = (await ask(w, messages))["choices"][0]["message"]
            messages = [*messages[:-1], messages[-1], *history(message, f"result {number}")[1:]]
        told = turns(w)
        assert [turn.parent for turn in told[1:]] == [turn.id for turn in told[:-1]]


async def test_a_call_that_only_its_client_has_seen_joins_callers_without_a_name():
    async with world("Look." + CALL) as w:
        status, _, body = await w.chat(messages=ASKED, tools=[READ], max_tokens=200)
        assert status == 200
        message = body["choices"][0]["message"]
        await w.chat(messages=history(message), tools=[READ], max_tokens=200)
        guessed = {**message, "tool_calls": [{**message["tool_calls"][0], "id": "call_chatcmpl-00_0_0"}]}
        await w.chat(messages=history(guessed), tools=[READ], max_tokens=200)
        said = [*ASKED, {"role": "assistant", "content": "Look."}, {"role": "user", "content": "more"}]
        await w.chat(messages=said, tools=[READ], max_tokens=200)
        one, two, three, four = turns(w)
        assert (two.parent, two.episode) == (one.id, one.episode)
        assert (three.parent, four.parent) == (None, None)
        assert len({one.episode, three.episode, four.episode}) == 3


async def test_a_made_up_call_joins_nobody():
    made_up = {"id": "call_chatcmpl-00_0_0", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [made_up]},
        {"role": "tool", "tool_call_id": made_up["id"], "content": "x"},
    ]
    async with world("hello") as w:
        for more in ([], [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]):
            await w.chat(messages=[*messages, *more], tools=[READ])
        one, two = turns(w)
        assert two.parent is None
        assert one.episode != two.episode


async def test_text_after_a_call_is_joined_too():
    answers = iter([CALL, "It adds.", "yellow"])
    async with world(engine=FakeEngine(lambda _: next(answers))) as w:
        _, _, body = await w.chat(messages=ASKED, tools=[READ], max_tokens=200)
        messages = history(body["choices"][0]["message"])
        await w.chat(messages=messages, tools=[READ])
        more = [*messages, {"role": "assistant", "content": "It adds."}, {"role": "user", "content": "and?"}]
        await w.chat(messages=more, tools=[READ])
        assert [turn.parent for turn in turns(w)] == [None, *(turn.id for turn in turns(w)[:2])]


async def test_a_new_process_knows_calls_again():
    log = MemoryLog()
    async with world("Look." + CALL, log=log) as w:
        _, _, body = await w.chat(messages=ASKED, tools=[READ], max_tokens=200)
    async with world("yellow", log=log) as w:
        await w.chat(messages=history(body["choices"][0]["message"]), tools=[READ], max_tokens=200)
        one, two = turns(w)
        assert (two.parent, two.episode) == (one.id, one.episode)


async def test_another_set_of_tools_begins_anew():
    async with world("ok") as w:
        await ask(w)
        other = [{"type": "function", "function": {"name": "write"}}]
        again = [*ASKED, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
        await w.chat(messages=again, tools=other, user="ann")
        await ask(w, again)
        assert [turn.parent for turn in turns(w)] == [None, None, turns(w)[0].id]


async def test_a_repeat_gives_the_same_calls():
    async with world(CALL) as w:
        key = {"idempotency-key": "k1"}
        first, again = [(await ask(w, headers=key))["choices"] for _ in range(2)]
        assert first == again
        assert len(turns(w)) == 1


async def test_each_choice_has_its_own_calls():
    async with world(CALL) as w:
        body = await ask(w, n=2)
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]]
        assert len({*ids}) == 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "read"}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "params": {}}}]}, "tools[0].function.params"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [READ] * 1025}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": "c"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": 1}]},
            "messages[0].reasoning_content",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(fields, field):
    async with world() as w:
        status, _, body = await w.post("/v1/chat/completions", {**ASK, **fields})
        assert (status, body["error"]["param"]) == (400, field)
        assert turns(w) == []


async def test_lines_are_those_of_the_call_that_is_named_and_nobody_elses():
    scripts = iter([WRITE, CALL, "fine\n", WRITE])
    async with world(
        engine=FakeEngine(lambda request: next(scripts)), api_keys=("a:one-0123456789abcdef", "b:two-0123456789abcdef")
    ) as w:
        mine, theirs = w.key("one-0123456789abcdef"), w.key("two-0123456789abcdef")
        wrote, read, plain = [(await ask(w, [{"role": "user", "content": f"fix {i}"}], mine)) for i in range(3)]
        calls = [body["choices"][0]["message"]["tool_calls"][0]["id"] for body in (wrote, read)]
        lines = [{"argument": "text", "of": 2, "kept": "2"}]
        event = {"id": "s", "name": "lines_kept_1h", "value": 0.5, "source": "code", "lines": lines}

        async def told(target, headers=mine, **changes):
            status, _, body = await w.post("/v1/feedback", event | {"target": target} | changes, headers=headers)
            return (status, body["error"]["param"]) if status != 202 else (status, body["status"])

        assert await told(calls[1]) == (400, "lines"), "another call's lines"
        assert await told(calls[0][:-1] + "1") == (400, "lines"), "a call that the answer does not have"
        assert await told(calls[0], lines=[lines[0] | {"of": 3}]) == (400, "lines")
        assert await told(calls[0], lines=[lines[0] | {"argument": "content"}]) == (400, "lines")
        assert await told(plain["id"]) == (400, "lines"), "an argument without a call"
        assert await told(plain["id"], lines=[{"of": 2, "kept": ""}]) == (400, "lines")
        assert w.log.signals() == []
        assert await told(calls[0], theirs) == (400, "lines"), "as if there were no such turn"
        assert await told(calls[0]) == (202, "accepted")
        assert await told(plain["id"], id="p", lines=[{"of": 1, "kept": "1"}]) == (202, "accepted")
        w.now += 1.0
        assert await told(calls[0]) == (202, "repeated")
        assert await told(calls[0], lines=[lines[0] | {"kept": "1"}]) == (202, "changed")
        assert await told("chatcmpl-99:0", id="q") == (400, "lines"), "what cannot be checked is not kept"
