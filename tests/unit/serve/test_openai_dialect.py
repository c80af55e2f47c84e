import json
import math
import tracemalloc

import pytest

from ostinato.core.conversation import Message, Piece, Role
from ostinato.core.errors import BadRequest, TooLarge
from ostinato.core.records import Finish
from ostinato.serve.dialects.dialect import Counts, Heading, Tokens, Whole
from ostinato.serve.dialects.openai import parse_chat, parse_completion
from ostinato.serve.dialects.openai_reply import Chat, Completion
from ostinato.serve.wire.body import parse_json, read_body
from ostinato.testing.renderer import ByteRenderer

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"user": "ann\nbob"}, "user"),
        ({"user": "ann\x9b2J"}, "user"),
        ({"user": "\u202eann"}, "user"),
        ({"safety_identifier": "a\x00"}, "safety_identifier"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"user": "x" * 513}, "user"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "rule": 1}]}, "messages[0].rule"),
    ],
)
def test_a_bad_value_is_named(extra, field):
    with pytest.raises(BadRequest) as caught:
        parse_chat(ASK | extra)
    assert caught.value.field == field
    assert field.split("[")[0].split(".")[0] in str(caught.value) or "field" in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {"audio": {}},
        {"modalities": ["text", "audio"]},
        {"top_k": 5},
        {"best_of": True},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(extra):
    with pytest.raises(BadRequest, match="not supported") as caught:
        parse_chat(ASK | extra)
    assert caught.value.field in extra


def test_harmless_and_inert_fields_are_taken():
    harmless = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}
    inert = {
        "tools": [],
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "audio": None,
    }
    parse_chat(ASK | harmless | inert)


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("message", "messages")]
)
def test_an_unknown_field_names_the_nearest(name, near):
    with pytest.raises(BadRequest, match=near) as caught:
        parse_chat(ASK | {name: 1})
    assert caught.value.field == name


def test_messages_become_plain_text_and_an_echoed_answer_is_taken():
    echoed = {
        "role": "assistant",
        "content": "yo",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    got = parse_chat(ASK | {"messages": [parts, echoed]}).conversation.messages
    assert got == (Message(role=Role.SYSTEM, text="ab"), Message(role=Role.ASSISTANT, text="yo"))


def test_sampling_has_openais_defaults():
    sampling = parse_chat(ASK | {"stop": "x", "top_p": 1}).sampling(7)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop) == (7, 1.0, 1.0, ("x",))
    assert parse_completion({"model": "m", "prompt": "x", "logprobs": 1, "echo": False, "best_of": 1}).wants_logprobs
    for bad in ({"logprobs": 6}, {"echo": True}, {"best_of": 2}, {"suffix": "x"}, {"prompt": 5}, {"prompt": [1, "a"]}):
        with pytest.raises(BadRequest):
            parse_completion({"model": "m", "prompt": "x"} | bad)


def test_nesting_is_counted_outside_of_strings_only():
    assert parse_json(b'{"a": "' + b"[" * 500 + b'\\"[[["}', depth=10, values=1_000) == {"a": "[" * 500 + '"[[['}
    assert parse_json(b"[[[[1],[1],[1]]]]", depth=4, values=1_000) == [[[[1], [1], [1]]]]
    for deep in (b"[" * 11 + b"]" * 11, b'["[[", ' + b"[" * 10 + b"]" * 11, b'{"a":' * 11 + b"1" + b"}" * 11):
        with pytest.raises(BadRequest, match="deeper"):
            parse_json(deep, depth=10, values=1_000)


@pytest.mark.parametrize(
    "body", [b"[" + b"[]," * 699_000 + b"[]]", b'["",' + b'"a",' * 500_000 + b'"\\""]', b"[" + b"1," * 101_000 + b"1]"]
)
def test_a_crowded_body_is_refused_before_it_is_built(body):
    tracemalloc.start()
    with pytest.raises(TooLarge, match="100000 values"):
        parse_json(body, depth=64, values=100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(body)  # a few numbers for each byte while it is looked at


def test_values_are_counted_outside_of_strings_only():
    crowded = ",[{" * 40_000
    assert parse_json(b'{"a": "' + crowded.encode() + b'"}', depth=4, values=10) == {"a": crowded}
    escaped = "\\" * 3 + '",[' * 1000
    assert parse_json(json.dumps([escaped] * 3).encode(), depth=4, values=4) == [escaped] * 3
    with pytest.raises(TooLarge):
        parse_json(b"[1,2,3]", depth=4, values=3)


def test_very_long_numbers_are_refused_without_being_read():
    body = b"[" + b"9" * 4000 + b"]"
    assert parse_json(body, depth=4, values=10) == [int("9" * 4000)]
    with pytest.raises(BadRequest, match="digits"):
        parse_json(b"[" + b",".join([b"9" * 4000] * 100) + b"]", depth=4, values=1000)


def test_prompts_come_alone_or_in_a_list_of_one():
    def prompt(value):
        return parse_completion({"model": "m", "prompt": value}).prompt

    assert [prompt(each) for each in ("x", ["x"], [1, 2], [[1, 2]])] == ["x", "x", [1, 2], [1, 2]]
    for bad in ([], ["a", "b"], [[1], [2]], [1, "a"], [True], None, {}, [None], [[[1]]]):
        with pytest.raises(BadRequest) as caught:
            prompt(bad)
        assert caught.value.field.startswith("prompt")


def test_an_answer_of_reasoning_alone_has_no_text():
    thought = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    got = parse_chat(ASK | {"messages": [*ASK["messages"], thought]}).conversation.messages[-1]
    assert got == Message(role=Role.ASSISTANT, reasoning="Hm.")


def test_a_name_is_taken_and_nobody_is_nobody():
    named = parse_chat(ASK | {"messages": [{"role": "user", "content": "hi", "name": "ann"}], "user": ""})
    assert named.conversation.messages == (Message(role=Role.USER, text="hi"),)
    assert (named.asker, parse_chat(ASK | {"safety_identifier": "s"}).asker) == (None, "s")
    with pytest.raises(BadRequest, match="needs logprobs"):
        parse_chat(ASK | {"top_logprobs": 2})


@pytest.mark.parametrize(
    "name",
    ["\u0639\u0644\u06cc\u200c\u0631\u0636\u0627", "\U0001f469\u200d\U0001f4bb", "山田\u3000太郎", "O\u00a0Neill"],
)
def test_names_may_hold_the_joiners_and_spaces_that_they_are_written_with(name):
    assert parse_chat(ASK | {"user": name}).asker == name


async def test_a_refused_body_is_never_held():
    sent, charged = 0, []

    async def flood():
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 1_000_000

    tracemalloc.start()
    head = {b"content-type": b"application/json"}
    with pytest.raises(TooLarge, match="2000000"):
        await read_body(flood(), head, limit=2_000_000, timeout_s=5, charge=charged.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000
    assert sum(charged) == sent * 1_000_000
    assert sent < 40  # an endless body is not read for ever


def test_every_token_is_told_as_json_that_reads_back():
    """Quotes, control characters, parts of a character, probabilities of nothing, whole and streamed."""
    renderer, ids = ByteRenderer(), [*range(256), *b'"\\\n']
    logprobs = [-float(i) / 3 for i in ids]
    tops = [((token, logprob), (0x22, -math.inf)) for token, logprob in zip(ids, logprobs, strict=True)]
    tokens = Tokens(ids, logprobs, tops)
    heading = Heading(id="x", created=0.0, model="m", choices=1, prompt_tokens=1, count_usage=False)

    def told(token, logprob):
        raw = renderer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(logprob, -9999.0)}

    expected = [
        {**told(token, logprob), "top_logprobs": [told(*top) for top in each]}
        for token, logprob, each in zip(ids, logprobs, tops, strict=True)
    ]
    whole = Whole(message=Message(role=Role.ASSISTANT, text="x"), tokens=tokens, finish=Finish.STOP)
    body = json.loads(Chat(heading, renderer).body([whole], Counts(prompt=1, answer=len(ids)), {}))
    assert body["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("x", "stop")
    event = json.loads(Chat(heading, renderer).delta(0, [Piece(text="x")], tokens).removeprefix("data: "))
    assert event["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    legacy = json.loads(Completion(heading, renderer).body([whole], Counts(prompt=1, answer=len(ids)), {}))
    logged = legacy["choices"][0]["logprobs"]
    assert logged["tokens"] == [each["token"] for each in expected]
    assert logged["top_logprobs"] == [
        {top["token"]: top["logprob"] for top in each["top_logprobs"]} | {each["token"]: each["logprob"]}
        for each in expected
    ]


def test_a_sampled_token_is_among_the_likeliest_of_a_completion():
    """OpenAI's clients look it up there: there may be one more than was asked for."""
    heading = Heading(id="x", created=0.0, model="m", choices=1, prompt_tokens=1, count_usage=False)
    tokens = Tokens([*b"ab"], [-0.5, -3.0], [((97, -0.5),), ((97, -0.1),)])
    event = json.loads(Completion(heading, ByteRenderer()).delta(0, [Piece(text="ab")], tokens).removeprefix("data: "))
    assert event["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"a": -0.1, "b": -3.0}]
