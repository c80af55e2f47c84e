"""One call at most: `parallel_tool_calls: false` and `disable_parallel_tool_use`, where the model may also answer in text."""

import json

import pytest
from tests.unit.serve.gateway_world import events, world

from ostinato.core.conversation import Conversation, Message, Role, Tool
from ostinato.core.errors import Unavailable
from ostinato.core.generation import Chunk
from ostinato.core.records import MAX_PARSED_CALLS, Branch, Finish
from ostinato.model.answer_reader import HERMES, Reader, format_for
from ostinato.serve.calls.conversations import AnswerParser
from ostinato.testing.engine import FakeEngine, decode

ASKED = [{"role": "user", "content": "Read both."}]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
BEGIN, END = "<tool_call>\n", "\n</tool_call>"


def call(path):
    return BEGIN + json.dumps({"name": "read", "arguments": {"path": path}}) + END


TWO = "Both. " + call("a.py") + "\n" + call("b.py")
CHAT = {
    "model": "m",
    "user": "ann",
    "messages": ASKED,
    "tools": [{"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}],
    "parallel_tool_calls": False,
    "max_tokens": 400,
}
MESSAGES = {
    "model": "m",
    "messages": ASKED,
    "tools": [{"name": "read", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "max_tokens": 400,
}
RESPONSES = {
    "model": "m",
    "input": ASKED,
    "tools": [{"type": "function", "name": "read", "parameters": PARAMETERS}],
    "parallel_tool_calls": False,
    "max_output_tokens": 400,
}


def calls_of(path, stream, body):
    """The paths that the calls of an answer read, and why it ended."""
    if path == "/v1/messages":
        if stream:
            told = [json.loads(block.partition(b"data: ")[2]) for block in body.strip().split(b"\n\n")]
            pieces = [event["delta"]["partial_json"] for event in told if "partial_json" in event.get("delta", {})]
            return [json.loads(piece)["path"] for piece in pieces], told[-2]["delta"]["stop_reason"]
        return [block["input"]["path"] for block in body["content"] if block["type"] == "tool_use"], body["stop_reason"]
    if path == "/v1/responses":
        response = json.loads(body.strip().split(b"data: ")[-1])["response"] if stream else body
        items = [item for item in response["output"] if item["type"] == "function_call"]
        return [json.loads(item["arguments"])["path"] for item in items], response["status"]
    choices = [each for event in events(body)[:-1] for each in event["choices"]] if stream else body["choices"]
    calls = [each for choice in choices for each in choice["delta" if stream else "message"].get("tool_calls") or []]
    return [json.loads(each["function"]["arguments"])["path"] for each in calls], choices[-1]["finish_reason"]


DIALECTS = [
    ("/v1/chat/completions", CHAT, "tool_calls"),
    ("/v1/messages", MESSAGES, "tool_use"),
    ("/v1/responses", RESPONSES, "completed"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "reason"), DIALECTS)
async def test_one_call_comes_back_and_what_was_sampled_is_kept(path, body, reason, stream):
    async with world(TWO) as w:
        status, _, reply = await w.post(path, body | {"stream": stream})
        assert status == 200
        assert calls_of(path, stream, reply) == (["a.py"], reason)
        (turn,) = w.log.turns()
        assert turn.finish is Finish.TOOL_CALLS
        assert decode(turn.sampled_ids) == "Both. " + call("a.py") + "\n" + BEGIN.strip()
        assert len(turn.logprobs) == len(turn.sampled_ids) == sum(span.tokens for span in turn.spans)
        assert w.engine.stats()["running"] == 0
        assert w.engine.cancelled == 1, "the engine is not kept busy with a call that nobody gets"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "reason"), DIALECTS)
async def test_several_calls_come_back_where_they_may(path, body, reason, stream):
    allowed = {name: value for name, value in body.items() if name not in ("parallel_tool_calls", "tool_choice")}
    async with world(TWO) as w:
        _, _, reply = await w.post(path, allowed | {"stream": stream})
        assert calls_of(path, stream, reply) == (["a.py", "b.py"], reason)
        assert w.engine.cancelled == 0


async def test_text_between_the_calls_is_told_and_text_after_one_call_too():
    async with world(call("a.py") + " and " + call("b.py")) as w:
        _, _, body = await w.post("/v1/chat/completions", CHAT)
        assert body["choices"][0]["message"]["content"] == "and"
    async with world(call("a.py") + " That is all.") as w:
        _, _, body = await w.post("/v1/chat/completions", CHAT)
        assert body["choices"][0]["message"]["content"] == "That is all."
        (turn,) = w.log.turns()
        assert decode(turn.sampled_ids) == turn.text == call("a.py") + " That is all."
        assert w.engine.cancelled == 0


async def test_each_of_several_answers_makes_one_call():
    async with world(TWO) as w:
        _, _, body = await w.post("/v1/chat/completions", CHAT | {"n": 3})
        assert [len(choice["message"]["tool_calls"]) for choice in body["choices"]] == [1, 1, 1]
        assert [turn.finish for turn in w.log.turns()] == [Finish.TOOL_CALLS] * 3
        assert w.engine.cancelled == 1


async def test_an_answer_that_goes_on_is_not_stopped_by_one_that_is_over():
    class Uneven(FakeEngine):
        """The first answer makes two calls, the second one."""

        async def generate(self, request):
            async for chunk in super().generate(request):
                if chunk.index == 0:
                    yield chunk
            for index, text in ((0, "never seen"), (1, call("c.py"))):
                last = {"index": index, "ids": (7,), "logprobs": (-1.0,), "policy": self.slots()["live"], "text": text}
                yield Chunk(**last, finish=Finish.STOP)

    async with world(engine=Uneven(lambda _: TWO)) as w:
        _, _, body = await w.post("/v1/chat/completions", CHAT | {"n": 2})
        paths = [json.loads(c["message"]["tool_calls"][0]["function"]["arguments"])["path"] for c in body["choices"]]
        assert paths == ["a.py", "c.py"]
        assert "never seen" not in str([turn.text for turn in w.log.turns()])


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_sampled_after_an_answers_end_is_charged_and_not_told(stream):
    class Goes(FakeEngine):
        """The first answer is over with its second call, and goes on for fifty tokens before the second answer ends."""

        async def generate(self, request):
            policy, count = self.slots()["live"], 50
            yield Chunk(index=0, ids=(7,), logprobs=(-1.0,), policy=policy, text=TWO)
            for _ in range(count):
                yield Chunk(index=0, ids=(8,), logprobs=(-1.0,), policy=policy, text="x")
            yield Chunk(index=1, ids=(9,), logprobs=(-1.0,), policy=policy, text="Done.", finish=Finish.STOP)

    body = CHAT | {"n": 2, "max_tokens": 60, "stream": stream, "stream_options": {"include_usage": True}}
    body = body if stream else {name: value for name, value in body.items() if name != "stream_options"}
    async with world(engine=Goes(lambda _: TWO), quota={"tokens_per_minute": 60_000}) as w:
        bucket = w.app._parts.quotas._tenants["default"].tokens
        _, _, reply = await w.post("/v1/chat/completions", body)
        usage = (events(reply)[-2] if stream else reply)["usage"]
        assert usage["completion_tokens"] == 2
        used = 1_000 * bucket.wait(60_000, w.now)  # what is missing comes back at a thousand a second
        assert round(used) == usage["prompt_tokens"] + 2 + 50


@pytest.mark.parametrize("fails", [False, True])
async def test_an_answer_that_was_cut_has_the_routes_of_its_tokens(fails):
    asked = []

    class Experts(FakeEngine):
        async def end_sample(self, request, index, tokens):
            asked.append((request, index, tokens))
            if fails:
                raise Unavailable("the engine has ended")
            return b"routes"

    async with world(engine=Experts(lambda _: TWO)) as w:
        status, _, _ = await w.post("/v1/chat/completions", CHAT)
        (turn,) = w.log.turns()
    assert (status, turn.finish, turn.routes) == (200, Finish.TOOL_CALLS, b"" if fails else b"routes")
    assert asked == [(turn.id.partition(":")[0], 0, len(turn.sampled_ids))]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_gives_the_same_one_call(stream):
    async with world(TWO) as w:
        key, body = {"idempotency-key": "k"}, CHAT | {"stream": stream}
        first, again = [(await w.post("/v1/chat/completions", body, headers=key))[2] for _ in range(2)]
        assert calls_of("/v1/chat/completions", stream, first) == calls_of("/v1/chat/completions", stream, again)
        assert len(w.log.turns()) == 1


def followed(message, text="def a(): ..."):
    (made,) = message["tool_calls"]
    said = {"role": "assistant", "content": message["content"], "tool_calls": [made]}
    return [*ASKED, said, {"role": "tool", "tool_call_id": made["id"], "content": text}]


async def test_a_session_goes_on_after_an_answer_that_was_cut_without_the_tokens_that_its_client_did_not_see():
    answers = iter([TWO, "Done."])
    async with world(engine=FakeEngine(lambda _: next(answers))) as w:
        _, _, body = await w.post("/v1/chat/completions", CHAT)
        await w.post("/v1/chat/completions", CHAT | {"messages": followed(body["choices"][0]["message"])})
        one, two = w.log.turns()
        assert (two.episode, two.parent, two.branch) == (one.episode, None, Branch.UNSEEN)
        assert "b.py" not in decode(two.prompt_ids)


async def test_an_answer_that_ends_after_its_only_call_is_continued_to_the_token():
    answers = iter(["One. " + call("a.py"), "Done."])
    async with world(engine=FakeEngine(lambda _: next(answers))) as w:
        _, _, body = await w.post("/v1/chat/completions", CHAT)
        await w.post("/v1/chat/completions", CHAT | {"messages": followed(body["choices"][0]["message"])})
        one, two = w.log.turns()
        known = one.prompt_ids + one.sampled_ids
        assert (two.parent, two.prompt_ids[: len(known)]) == (one.id, known)


async def test_calls_that_come_in_one_piece_are_cut_and_not_taken_for_seen():
    class Whole(FakeEngine):
        """Sends an answer in one chunk, with its end token."""

        async def generate(self, request):
            parts = [chunk async for chunk in super().generate(request)]
            ids = tuple(token for part in parts for token in part.ids)
            logprobs = tuple(value for part in parts for value in part.logprobs)
            text = "".join(part.text for part in parts)
            last = parts[-1]
            yield Chunk(index=0, ids=ids, logprobs=logprobs, policy=last.policy, text=text, finish=last.finish)

    answers = iter([TWO, "Done."])
    async with world(engine=Whole(lambda _: next(answers))) as w:
        _, _, body = await w.post("/v1/chat/completions", CHAT)
        message = body["choices"][0]["message"]
        assert len(message["tool_calls"]) == 1
        await w.post("/v1/chat/completions", CHAT | {"messages": followed(message)})
        one, two = w.log.turns()
        assert decode(one.sampled_ids) == TWO
        assert (two.parent, "b.py" in decode(two.prompt_ids)) == (None, False)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_where_an_answer_is_over_does_not_depend_on_how_its_text_arrives(size):
    conversation = Conversation(messages=(Message(role=Role.USER, text="x"),), tools=(Tool(name="read"),))
    reading = AnswerParser(Reader(HERMES, tools=conversation.tools, turn="chatcmpl-3f:0"), one_call=True)
    for start in range(0, len(TWO), size):
        reading.take(TWO[start : start + size], last=start + size >= len(TWO))
        if reading.over:
            break
    message = reading.message()
    assert (reading.over, message.text, len(message.calls)) == (True, "Both.", 1)
    (made,) = reading.parsed_calls()
    assert TWO[made.start : made.end] == call("a.py")


def test_where_a_second_call_begins_behind_as_many_as_are_stored_none_of_them_is_lost():
    tools = [Tool(name="read")]
    reading = AnswerParser(Reader(HERMES, tools=tools, turn="t:0"), one_call=True)
    broken = "<tool_call>{</tool_call>" * (MAX_PARSED_CALLS - 1)
    reading.take(broken + call("a.py") + "<tool_call>{", last=False)
    assert reading.over
    assert [made.name for made in reading.parsed_calls()] == [""] * (MAX_PARSED_CALLS - 1) + ["read"]


ARGUMENTS = '{"path": "a.py"}'
LISTED = f'{{"name": "read", "arguments": {ARGUMENTS}}}'


@pytest.mark.parametrize(
    "text",
    [
        f"[TOOL_CALLS][{LISTED}, {LISTED}]",
        f"[TOOL_CALLS]read[ARGS]{ARGUMENTS}[TOOL_CALLS]read[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS]read[ARGS]{ARGUMENTS}[TOOL_CALLS]read[ARGS]" + '{"pa',
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_that_was_not_told_is_not_among_those_that_are_stored(text, size):
    reading = AnswerParser(Reader(format_for("[TOOL_CALLS]", ()), tools=[Tool(name="read")], turn="t:0"), one_call=True)
    for start in range(0, len(text), size):
        reading.take(text[start : start + size], last=start + size >= len(text))
    assert (reading.over, [call.name for call in reading.parsed_calls()]) == (True, ["read"])
