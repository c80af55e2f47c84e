"""What a request demands of its answer, in every dialect, and that the answer is so, whatever the model would rather say."""

import asyncio
import json

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.unit.serve.gateway_world import events, world

from ostinato.core.conversation import Demand
from ostinato.core.errors import BadRequest
from ostinato.core.generation import Capabilities
from ostinato.core.records import Finish, Turn
from ostinato.model import grammars
from ostinato.serve.dialects.anthropic import parse_messages
from ostinato.serve.dialects.openai import parse_chat
from ostinato.serve.dialects.responses import parse_responses
from ostinato.testing.engine import FakeEngine
from ostinato.testing.tiny import tiny_model
from ostinato.testing.tiny_engine import tiny_engine

PATH = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 4}},
    "required": ["path"],
    "additionalProperties": False,
}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TALK = [{"role": "user", "content": "Look."}]
CHAT = {"model": "m", "messages": TALK}
MESSAGES = {"model": "m", "messages": TALK, "max_tokens": 200}
RESPONSES = {"model": "m", "input": "Look."}


def chat_tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": PATH, **more}}


def flat_tool(name, **more):
    return {"type": "function", "name": name, "parameters": PATH, **more}


def their_tool(name, **more):
    return {"name": name, "input_schema": PATH, **more}


BOTH = [chat_tool("a"), chat_tool("b", strict=True)]
FLAT = [flat_tool("a"), flat_tool("b", strict=True)]
THEIRS = [their_tool("a"), their_tool("b", strict=True)]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
NO_CALL_BUT_JSON = Demand(schema=SCHEMA, forbidden=True)


@pytest.mark.parametrize(
    ("parse", "body", "demand"),
    [
        (parse_chat, {"response_format": {"type": "text"}}, None),
        (parse_chat, {"response_format": {"type": "json_object"}}, Demand(schema={"type": "object"})),
        (parse_chat, {"response_format": JSON_SCHEMA}, Demand(schema=SCHEMA)),
        (parse_chat, {"response_format": JSON_SCHEMA, "tools": BOTH}, Demand(schema=SCHEMA, calls=("a", "b"))),
        (parse_chat, {"response_format": JSON_SCHEMA, "tools": BOTH, "tool_choice": "none"}, NO_CALL_BUT_JSON),
        (parse_chat, {"tools": BOTH[:1], "parallel_tool_calls": False}, None),
        (parse_chat, {"tools": BOTH, "tool_choice": "none"}, Demand(forbidden=True)),
        (parse_chat, {"tools": [], "tool_choice": "none"}, None),
        (parse_messages, {"tools": THEIRS, "tool_choice": {"type": "none"}}, Demand(forbidden=True)),
        (parse_responses, {"tools": FLAT, "tool_choice": "none"}, Demand(forbidden=True)),
        (parse_chat, {"tools": BOTH, "tool_choice": "required"}, Demand(calls=("a", "b"))),
        (
            parse_chat,
            {"tools": BOTH, "tool_choice": "required", "parallel_tool_calls": False},
            Demand(calls=("a", "b"), several=False),
        ),
        (
            parse_chat,
            {"tools": BOTH, "tool_choice": {"type": "function", "function": {"name": "b"}}},
            Demand(calls=("b",), several=False),
        ),
        (parse_messages, {"tools": THEIRS[:1], "tool_choice": {"type": "auto"}}, None),
        (parse_messages, {"tools": THEIRS, "tool_choice": {"type": "any"}}, Demand(calls=("a", "b"))),
        (
            parse_messages,
            {"tools": THEIRS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            Demand(calls=("a", "b"), several=False),
        ),
        (
            parse_messages,
            {"tools": THEIRS, "tool_choice": {"type": "tool", "name": "a"}},
            Demand(calls=("a",), several=False),
        ),
        (
            parse_messages,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            Demand(schema=SCHEMA),
        ),
        (parse_messages, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, Demand(schema=SCHEMA)),
        (parse_responses, {"text": {"format": {"type": "json_object"}}}, Demand(schema={"type": "object"})),
        (
            parse_responses,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
            Demand(schema=SCHEMA),
        ),
        (parse_responses, {"tools": FLAT, "tool_choice": "required"}, Demand(calls=("a", "b"))),
        (
            parse_responses,
            {"tools": FLAT, "tool_choice": {"type": "function", "name": "a"}, "parallel_tool_calls": True},
            Demand(calls=("a",), several=False),
        ),
    ],
)
def test_every_dialect_says_the_same(parse, body, demand):
    base = {parse_chat: CHAT, parse_messages: MESSAGES, parse_responses: RESPONSES}[parse]
    assert parse(base | body).conversation.demand == demand


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tools": BOTH, "tool_choice": {"type": "function", "function": {"name": "c"}}}, "not among the tools"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
def test_a_demand_that_cannot_be_meant_is_refused(body, words):
    with pytest.raises(BadRequest, match=words):
        parse_chat(CHAT | body)


def test_edits_reach_the_sampling():
    asked = parse_chat(CHAT | {"presence_penalty": 1, "frequency_penalty": -0.5, "logit_bias": {"7": -100, "8": 0}})
    sampling = asked.sampling(9)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (1.0, -0.5, ((7, -100.0),))


async def test_answers_are_as_demanded_and_the_turn_has_the_grammar(tmp_path):
    async with tiny_engine(tmp_path, context=2048) as tiny, world(engine=tiny.engine, renderer=tiny.renderer) as w:

        async def said(path, body):
            status, _, reply = await w.post(path, body)
            assert status == 200, reply
            return reply

        for _ in range(3):
            body = await said("/v1/chat/completions", CHAT | {"response_format": JSON_SCHEMA, "n": 3})
            assert all(json.loads(choice["message"]["content"])["n"] in (1, 2) for choice in body["choices"])
            body = await said(
                "/v1/chat/completions", CHAT | {"tools": BOTH, "tool_choice": "required", "parallel_tool_calls": False}
            )
            (call,) = body["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] in ("a", "b")
            assert len(json.loads(call["function"]["arguments"])["path"]) <= 4
            body = await said(
                "/v1/messages", MESSAGES | {"tools": THEIRS, "tool_choice": {"type": "tool", "name": "b"}}
            )
            (block,) = body["content"]
            assert (block["type"], block["name"], body["stop_reason"]) == ("tool_use", "b", "tool_use")
            body = await said(
                "/v1/responses", RESPONSES | {"tools": FLAT, "tool_choice": {"type": "function", "name": "a"}}
            )
            assert [item["name"] for item in body["output"]] == ["a"]
            body = await said(
                "/v1/responses",
                RESPONSES | {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            )
            assert json.loads(body["output"][0]["content"][0]["text"])["n"] in (1, 2)
        told = await said("/v1/chat/completions", CHAT | {"response_format": JSON_SCHEMA, "stream": True})
        text = "".join(c["delta"].get("content") or "" for e in events(told)[:-1] for c in e["choices"])
        assert json.loads(text)["n"] in (1, 2)
        turns = [row for row in w.log.rows if isinstance(row, Turn)]
        assert len(turns) == 22
        assert all("%json" in turn.sampling.grammar for turn in turns)


def write_tiny_with_calls(path, **more):
    """A tiny model whose tokenizer has `<tool_call>` as a control token, of id 259."""
    tiny_model(path, **more)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        written = (path / name).read_text().replace("<|pad|>", "<tool_call>")
        (path / name).write_text(written)
    return path


@pytest.mark.parametrize(
    ("path", "body", "none"),
    [
        ("/v1/chat/completions", CHAT | {"tools": BOTH}, "none"),
        ("/v1/messages", MESSAGES | {"tools": THEIRS}, {"type": "none"}),
        ("/v1/responses", RESPONSES | {"tools": FLAT}, "none"),
    ],
)
async def test_forbidden_calls_leave_the_prompt_and_its_parent_as_they_are(tmp_path, path, body, none):
    """The tools stay, so a request that forbids calls shares its conversation's prefix; the sampler is kept from beginning a call."""
    more = {"max_output_tokens" if "input" in body else "max_tokens": 8}
    async with (
        tiny_engine(tmp_path, context=2048, write=write_tiny_with_calls) as tiny,
        world(engine=tiny.engine, renderer=tiny.renderer) as w,
    ):
        assert tiny.renderer.call_token() == 259
        for choice in ({}, {"tool_choice": none}):
            status, _, reply = await w.post(path, body | more | choice)
            assert status == 200, reply
        free, forbidden = w.log.turns()
        assert free.prompt_ids == forbidden.prompt_ids
        assert (free.sampling.logit_bias, free.sampling.grammar) == ((), "")
        assert (forbidden.sampling.logit_bias, forbidden.sampling.grammar) == (((259, -100.0),), "")


async def test_no_call_is_sampled_where_calls_are_forbidden_however_much_it_is_wanted(tmp_path):
    others = {str(token): -60 for token in range(259)}  # as if the policy were sure of a call
    wanted = {"tools": BOTH, "max_tokens": 20, "logit_bias": {**others, "259": 100}, "n": 4, "seed": 1}
    async with (
        tiny_engine(tmp_path, context=2048, write=write_tiny_with_calls) as tiny,
        world(engine=tiny.engine, renderer=tiny.renderer) as w,
    ):
        for choice in ("auto", "none"):
            status, _, reply = await w.chat(tool_choice=choice, **wanted)
            assert status == 200, reply
        turns = w.log.turns()
        assert all(set(turn.sampled_ids) == {259} for turn in turns[:4])
        assert all(259 not in turn.sampled_ids for turn in turns[4:])


async def test_without_a_token_that_begins_calls_a_grammar_forbids_them(tmp_path):
    async with tiny_engine(tmp_path, context=2048) as tiny, world(engine=tiny.engine, renderer=tiny.renderer) as w:
        status, _, reply = await w.chat(tools=BOTH, tool_choice="none", max_tokens=20)
        assert status == 200, reply
        (turn,) = w.log.turns()
        grammar = turn.sampling.grammar
        assert tiny.renderer.fulfils(grammar, tiny.renderer.encode("I would call <tool call>."))
        assert not tiny.renderer.fulfils(grammar, tiny.renderer.encode('So: <tool_call>\n{"name": "a"}'))


async def test_an_engine_that_follows_no_grammar_tells_a_forbidden_call_as_text():
    call = '<tool_call>\n{"name": "a", "arguments": {"path": "x"}}\n</tool_call>'
    engine = FakeEngine(lambda request: call)
    engine.capabilities = lambda: Capabilities(context=4096, vocab_size=257, follows_grammars=False)
    async with world(engine=engine) as w:
        status, _, body = await w.chat(tools=BOTH, tool_choice="none", max_tokens=200)
        assert (status, body["choices"][0]["message"]["content"]) == (200, call)
        assert w.log.turns()[0].sampling.grammar == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_cannot_be_kept_is_a_bad_request_and_no_turn(tmp_path, stream):
    hostile = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://elsewhere/"}}}
    async with tiny_engine(tmp_path) as tiny, world(engine=tiny.engine, renderer=tiny.renderer) as w:
        status, _, body = await w.chat(response_format=hostile, stream=stream)
        assert (status, "cannot be enforced" in body["error"]["message"]) == (400, True)
        assert [row for row in w.log.rows if isinstance(row, Turn)] == []


GROWS = {"type": "string", "pattern": "^(a?){300}a{300}$"}
GROWING = [
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": GROWS}}},
        "response_format",
    ),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [
                {"type": "function", "function": {"name": "a", "parameters": {**PATH, "properties": {"path": GROWS}}}}
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    ("/v1/messages", MESSAGES | {"output_format": {"type": "json_schema", "schema": GROWS}}, "output_config.format"),
    (
        "/v1/responses",
        RESPONSES | {"text": {"format": {"type": "json_schema", "name": "x", "schema": GROWS}}},
        "text.format",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "field"), GROWING)
async def test_a_form_too_complex_to_be_enforced_is_the_clients_error(tmp_path, path, body, field, stream):
    async with tiny_engine(tmp_path, context=2048) as tiny, world(engine=tiny.engine, renderer=tiny.renderer) as w:
        for _ in range(2):
            status, _, reply = await w.post(path, body | {"stream": stream})
            if isinstance(reply, bytes):  # the tool's name was said before its arguments failed
                assert (status, field) == (200, "tools")
                reply = events(reply)[-1]
            else:
                assert status == 400
            error = reply["error"]
            assert error["type"] == "invalid_request_error"
            assert f"The form that {field} demands" in error["message"]
            assert "Simplify its patterns" in error["message"]
            if path != "/v1/messages":  # Anthropic's errors have no codes
                assert (error["code"], error["param"]) == ("grammar_too_complex", field)
        _, metrics = await w.get("/metrics")
        assert 'ostinato_refusals_total{reason="grammar_too_complex",tenant="default"} 2.0' in metrics
        assert 'finish="error"' not in metrics
        assert 'status="500"' not in metrics
        assert all(turn.finish is Finish.GRAMMAR for turn in w.log.turns())


@pytest.mark.parametrize(("path", "body", "field"), [GROWING[0], GROWING[2], GROWING[3]])
async def test_in_a_stream_that_has_begun_a_too_complex_form_is_the_last_event(path, body, field):
    engine = FakeEngine(lambda request: "hello", fail_after=2)
    engine.failure = Finish.GRAMMAR
    async with world(engine=engine) as w:
        status, _, raw = await w.post(path, body | {"stream": True})
        last = json.loads(raw.rpartition(b"data: ")[2])
        error = last["response"]["error"] if "response" in last else last["error"]
        assert status == 200
        assert f"The form that {field} demands" in error["message"]
        assert error.get("code", "grammar_too_complex") == "grammar_too_complex"
        assert b"[DONE]" not in raw
        (turn,) = w.log.turns()
        assert (turn.finish, len(turn.sampled_ids)) == (Finish.GRAMMAR, 2)


async def test_all_choices_of_a_call_end_with_the_one_whose_form_is_too_complex():
    engine = FakeEngine(lambda request: "hello", fail_after=2)
    engine.failure = Finish.GRAMMAR
    async with world(engine=engine) as w:
        status, _, body = await w.chat(n=3, response_format=JSON_SCHEMA)
        assert (status, body["error"]["code"]) == (400, "grammar_too_complex")
        assert [turn.finish for turn in w.log.turns()] == [Finish.GRAMMAR] * 3


async def test_a_neighbours_stream_goes_on_beside_a_form_that_is_too_complex(tmp_path):
    async with tiny_engine(tmp_path, context=2048) as tiny, world(engine=tiny.engine, renderer=tiny.renderer) as w:
        ask = {"max_tokens": 60, "seed": 7, "stream": True}
        answers = await asyncio.gather(w.chat(**ask), w.post(*GROWING[0][:2]), w.post(*GROWING[0][:2]))
        assert [status for status, *_ in answers] == [200, 400, 400]
        assert events(answers[0][2])[-1] == b"[DONE]"


async def test_an_engine_that_follows_no_grammar_says_so():
    engine = FakeEngine(lambda request: "hello")
    engine.capabilities = lambda: Capabilities(context=4096, vocab_size=257, follows_grammars=False)
    async with world(engine=engine) as w:
        status, _, body = await w.chat(response_format={"type": "json_object"})
        assert (status, "cannot enforce a format" in body["error"]["message"]) == (400, True)
        assert (await w.chat())[0] == 200


async def test_the_likeliest_tokens_are_told_in_both_endpoints():
    async with world("hi") as w:
        for stream in (False, True):
            _, _, body = await w.chat(logprobs=True, top_logprobs=2, stream=stream)
            choices = [c for e in events(body)[:-1] for c in e["choices"]] if stream else body["choices"]
            content = [token for c in choices for token in (c["logprobs"] or {"content": []})["content"]]
            assert [token["token"] for token in content] == ["h", "i", ""]
            assert [top["token"] for top in content[0]["top_logprobs"]] == ["h", "i"]
            assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
        _, _, body = await w.post("/v1/completions", {"model": "m", "prompt": "x", "logprobs": 2})
        told = body["choices"][0]["logprobs"]
        assert [*told["top_logprobs"][0]] == ["h", "i"]
        _, _, body = await w.post("/v1/completions", {"model": "m", "prompt": "x", "logprobs": 0})
        assert body["choices"][0]["logprobs"]["top_logprobs"] is None
        _, _, body = await w.chat(logprobs=True)
        assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_many_answers_may_not_each_have_many_alternatives():
    async with world("hi") as w:
        assert (await w.chat(logprobs=True, top_logprobs=20, n=6))[0] == 200
        status, _, body = await w.chat(logprobs=True, top_logprobs=20, n=7)
        assert (status, body["error"]["param"]) == (400, "top_logprobs")


async def test_schemas_that_are_dear_to_compile_hold_up_nobody_elses_calls(tmp_path, monkeypatch):
    """Each is given up after its two seconds, or as soon as it takes too much memory; another tenant waits for one of them at most."""

    def dear(number):
        parts = [{"type": "string", "pattern": f".*{letter}.{{20}}"} for letter in "abcdefghijklmnopqrst"]
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": str(number), "allOf": parts}}}

    def in_time(
        process, line, seconds, asked=grammars._asked
    ):  # what is not dear has the time that a busy machine takes
        return asked(process, line, seconds if b".{20}" in line else WHOLE_PROGRAM_S)

    monkeypatch.setattr(grammars, "_asked", in_time)
    fine = {"type": "json_schema", "json_schema": {"name": "y", "schema": SCHEMA}}
    acme, bolt = "ka-0123456789abcdef", "kb-0123456789abcdef"
    ended = []
    async with (
        tiny_engine(tmp_path, context=2048) as tiny,
        world(engine=tiny.engine, renderer=tiny.renderer, api_keys=(f"acme:{acme}", f"bolt:{bolt}")) as w,
    ):

        async def ask(key, name, **more):
            answer = await w.chat(headers={"x-api-key": key}, max_tokens=20, **more)
            ended.append((name, answer[0]))

        await ask(bolt, "first", response_format={"type": "json_object"})
        flood = [asyncio.create_task(ask(acme, "dear", response_format=dear(number))) for number in range(6)]
        await asyncio.sleep(0.2)
        await ask(bolt, "without")
        await ask(bolt, "known", response_format={"type": "json_object"})
        before = ended.count(("dear", 400))
        await ask(bolt, "new", response_format=fine)
        assert ended.count(("dear", 400)) <= before + 2
        await asyncio.gather(*flood)
    assert sorted(ended) == sorted(
        [*[(name, 200) for name in ("first", "without", "known", "new")], *[("dear", 400)] * 6]
    )
