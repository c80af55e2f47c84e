"""Errors in the words, codes and statuses by which agents recognise that they must shorten a conversation, slow down or try again."""

import json
import re

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from tests.unit.serve.gateway_world import world

from ostinato.core.errors import Overloaded, Unavailable
from ostinato.serve.config import ServeConfig
from ostinato.serve.quotas import Quotas
from ostinato.testing.engine import FakeEngine

LONG = "x" * 5000
VERY_LONG = "x" * 200_000
PATHS = {
    "/v1/chat/completions": lambda text: {"model": "m", "messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"model": "m", "prompt": text},
    "/v1/responses": lambda text: {"model": "m", "input": text},
    "/v1/messages": lambda text: {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": text}]},
}
# as public agents and client libraries look for them in the message
OPENAI = re.compile(r"maximum context length is \d+ tokens", re.IGNORECASE)
RESPONSES = re.compile(r"Your input exceeds the context window of this model\.")
ANTHROPIC = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
NOT_OVERFLOW = re.compile(r"too many tokens|context|too long|reduce the length", re.IGNORECASE)
SLOW_DOWN = re.compile(r"Rate limit reached.*Please try again in (\d+(?:\.\d+)?)s")


@pytest.mark.parametrize("text", [LONG, VERY_LONG])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completions", OPENAI),
        ("/v1/completions", OPENAI),
        ("/v1/responses", OPENAI),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", ANTHROPIC),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_in_the_protocols_words(path, words, text):
    async with world(max_chars_per_token=16) as w:
        status, _, body = await w.post(path, PATHS[path](text))
        error = body["error"]
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert words.search(error["message"])
        assert "4096" in error["message"]
        if path != "/v1/messages":
            assert (error["code"], error["param"]) == ("context_length_exceeded", field_of(path))


def field_of(path):
    return {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]


@pytest.mark.parametrize("text", [LONG, VERY_LONG])
async def test_the_numbers_show_that_the_prompt_is_longer_than_may_be(text):
    async with world(max_chars_per_token=16) as w:
        _, _, body = await w.post("/v1/messages", PATHS["/v1/messages"](text))
        prompt, most = map(int, ANTHROPIC.search(body["error"]["message"]).groups())
        assert prompt > most


async def test_a_prompt_that_fits_without_room_for_the_answer_is_too_long_as_well():
    async with world() as w:
        _, _, body = await w.post("/v1/messages", PATHS["/v1/messages"]("x" * 4080))
        prompt, most = map(int, ANTHROPIC.search(body["error"]["message"]).groups())
        assert (prompt > most, most) == (True, 4096 - 64)
        _, _, body = await w.chat(messages=[{"role": "user", "content": "x" * 4080}], max_tokens=64)
        assert "the answer needs 64 at least" in body["error"]["message"]


@pytest.mark.parametrize("text", [LONG, VERY_LONG])
async def test_a_streamed_response_tells_it_in_its_stream(text):
    async with world(max_chars_per_token=16) as w:
        status, headers, raw = await w.post("/v1/responses", {"model": "m", "input": text, "stream": True})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        told = [json.loads(block.partition(b"data: ")[2]) for block in raw.strip().split(b"\n\n")]
        created, _, error = [TypeAdapter(ResponseStreamEvent).validate_python(event) for event in told[:-1]]
        failed = told[-1]["response"]
        assert [event["sequence_number"] for event in told] == [0, 1, 2, 3]
        assert (error.type, error.code, error.param) == ("error", "context_length_exceeded", "input")
        assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
        assert RESPONSES.match(failed["error"]["message"])
        assert told[2]["error"]["type"] == "invalid_request_error"
        assert created.response.id == failed["id"]
        assert w.log.turns() == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_in_other_dialects_it_is_a_status_also_of_a_stream(path):
    async with world() as w:
        assert (await w.post(path, PATHS[path](LONG) | {"stream": True}))[0] == 400


@pytest.mark.parametrize("path", PATHS)
async def test_a_rate_limit_says_when_to_come_again_and_looks_like_no_overflow(path):
    async with world(quota={"calls_per_s": 0.25, "burst": 1}) as w:
        await w.post(path, PATHS[path]("hi"))
        status, headers, body = await w.post(path, PATHS[path]("hi"))
        error = body["error"]
        assert (status, headers["retry-after"], headers["retry-after-ms"]) == (429, "4", "4000")
        assert SLOW_DOWN.match(error["message"]).group(1) == "4"
        assert not NOT_OVERFLOW.search(error["message"])
        assert (error["type"], error.get("code")) == (
            ("rate_limit_error", None) if path == "/v1/messages" else ("requests", "rate_limit_exceeded")
        )


async def test_a_token_budget_that_is_used_up_looks_like_no_overflow():
    async with world(quota={"tokens_per_minute": 100}) as w:
        await w.chat(max_tokens=60)
        status, _, body = await w.chat(max_tokens=90)
        assert (status, body["error"]["type"]) == (429, "tokens")
        assert SLOW_DOWN.match(body["error"]["message"])
        assert not NOT_OVERFLOW.search(body["error"]["message"])


@pytest.mark.parametrize(
    ("failure", "statuses", "code"),
    [
        (Overloaded("The engine is overloaded."), (503, 529), "overloaded"),
        (Unavailable("Loading."), (503, 503), "unavailable"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_an_overload_is_told_in_the_dialects_way_and_may_be_tried_again(path, failure, statuses, code):
    class Full(FakeEngine):
        async def generate(self, request):
            raise failure
            yield

    async with world(engine=Full()) as w:
        status, headers, body = await w.post(path, PATHS[path]("hi"))
        assert headers["retry-after"] == "1"
        if path == "/v1/messages":
            assert (status, body["error"]["type"]) == (statuses[1], "overloaded_error")
        else:
            assert (status, body["error"]["type"], body["error"]["code"]) == (statuses[0], "server_error", code)


def test_a_server_without_a_free_place_is_overloaded():
    limits = Quotas(ServeConfig(max_inflight=1), ["acme"], lambda: 0.0, lambda tenant, code: None)
    with limits.places("acme", 1), pytest.raises(Overloaded, match="overloaded"), limits.places("acme", 1):
        pass


async def test_the_model_list_tells_the_contexts_length_by_every_name_that_agents_look_for():
    async with world(engine=FakeEngine(context=2048)) as w:
        listed = json.loads((await w.get("/v1/models"))[1])
        one = json.loads((await w.get("/v1/models/m"))[1])
        assert listed["data"] == [one]
        names = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
        assert {one[name] for name in names} == {2048}
        assert one["architecture"]["input_modalities"] == ["text"]


async def test_the_model_list_is_anthropics_too():
    from anthropic.types import ModelInfo
    from anthropic.types.beta import BetaModelInfo

    async with world() as w:
        listed = json.loads((await w.get("/v1/models"))[1])
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "m", "m")
        one = json.loads((await w.get("/v1/models/m"))[1])
        info = ModelInfo.model_validate(one, strict=False)
        assert BetaModelInfo.model_validate(one, strict=False).capabilities.compaction is not None
        assert (info.id, info.type, info.display_name, info.max_input_tokens) == ("m", "model", "m", 4096)
        assert (info.max_tokens, info.lifecycle) == (4096, "active")
        assert info.capabilities.structured_outputs.supported
        assert info.capabilities.context_management.compact_20260112.supported
