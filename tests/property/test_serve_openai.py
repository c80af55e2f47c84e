"""Whatever arrives, the gateway answers: never a 500, never a hang, and only served calls leave a turn."""

import asyncio
import json

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.deadlines import PATIENT_S

from ostinato.core.errors import BadRequest
from ostinato.serve.config import ServeConfig
from ostinato.serve.dialects.openai import ChatRequest, CompletionRequest
from ostinato.serve.gateway import create_app
from ostinato.serve.wire.body import parse_json
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 2**64, 1e308])
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3), max_leaves=8
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", ""])
TEXT = st.text(max_size=5) | VALUES
FUNCTION = st.fixed_dictionaries(
    {"name": TEXT}, optional={"arguments": TEXT, "parameters": VALUES, "description": TEXT}
)
TOOLS = (
    st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION | VALUES}), max_size=2) | VALUES
)
CALLS = st.lists(st.fixed_dictionaries({"id": TEXT, "function": FUNCTION | VALUES}), max_size=2) | VALUES
MESSAGE = (
    st.fixed_dictionaries(
        {"role": ROLES | VALUES, "content": TEXT},
        optional={"tool_calls": CALLS, "tool_call_id": TEXT, "reasoning_content": TEXT},
    )
    | VALUES
)
FIELDS = [*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "logit_bias", "store", "audio", "zzz"]
BASE = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@st.composite
def near_valid(draw):
    body = {
        "model": "m",
        draw(st.sampled_from(["messages", "prompt"])): draw(st.lists(MESSAGE, max_size=3) | st.text(max_size=5)),
    }
    changes = draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
    if draw(st.booleans()):
        changes["tools"] = draw(TOOLS)
    return (BASE if draw(st.booleans()) else {}) | body | changes


EVENTS = st.fixed_dictionaries(
    {"id": st.text(max_size=4) | VALUES, "target": st.text(max_size=4), "name": st.text(max_size=4), "value": VALUES},
    optional={
        "source": st.sampled_from(["human", "llm", "x"]),
        "occurred_at": VALUES,
        "retracts": VALUES,
        "comment": VALUES,
    },
)
HEADERS = ["x-ostinato-user", "x-ostinato-episode", "x-ostinato-group", "x-ostinato-slot", "x-ostinato-user-signature"]
HEADERS += ["authorization", "x-api-key", "idempotency-key"]
BODIES = near_valid() | VALUES | EVENTS | st.lists(EVENTS, max_size=3)
PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/feedback"])


@pytest.fixture(scope="module")
def gateway():
    log = MemoryLog()
    app = create_app(
        engine=FakeEngine(lambda request: "ok"),
        renderer=ByteRenderer(context=100_000),
        log=log,
        config=ServeConfig(),
        clock=lambda: 1.0,
        model_name="m",
    )
    loop, life = asyncio.new_event_loop(), app.router.lifespan_context(app)
    loop.run_until_complete(life.__aenter__())
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1")

    def post(path, data, headers):
        async def send():
            async with asyncio.timeout(PATIENT_S):
                return await http.post(path, content=data, headers=headers)

        return loop.run_until_complete(send())

    yield post, log
    loop.run_until_complete(http.aclose())
    loop.run_until_complete(life.__aexit__(None, None, None))  # deliveries may be on their way to the log
    loop.close()


def check(gateway, path, data, headers):
    post, log = gateway
    before = len(log.turns())
    reply = post(path, data, {"content-type": "application/json", **headers})
    assert reply.status_code in (200, 202, 400, 401, 404, 413, 422), (reply.status_code, reply.text, data)
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    served = len(log.turns()) - before
    assert (served > 0) == (reply.status_code == 200)


@settings(max_examples=300)
@given(path=PATHS, body=BODIES)
def test_any_json_gets_an_answer(gateway, path, body):
    check(gateway, path, json.dumps(body).encode(), {})


@settings(max_examples=150)
@given(
    path=PATHS,
    data=st.binary(max_size=60) | st.text(alphabet='[]{}",:\\u0d8e1', max_size=60).map(str.encode),
    headers=st.dictionaries(
        st.sampled_from(HEADERS),
        st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20).map(
            str.strip
        ),
        max_size=3,
    ),
)
def test_any_bytes_and_headers_get_an_answer(gateway, path, data, headers):
    check(gateway, path, data, {name: value.encode("latin-1") for name, value in headers.items()})


@settings(max_examples=300)
@given(VALUES)
def test_parsing_agrees_with_the_standard_library(value):
    text = json.dumps(value, allow_nan=True)
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:  # a NaN or an infinity: the standard library would take it back
        with pytest.raises(BadRequest, match="not JSON"):
            parse_json(text.encode(), depth=64, values=1_000)
    else:
        assert parse_json(text.encode(), depth=64, values=1_000) == json.loads(text)


@settings(max_examples=200)
@given(
    st.recursive(st.text(alphabet='[]{}"\\a', max_size=4), lambda v: st.lists(v, max_size=3), max_leaves=20),
    st.integers(1, 8),
)
def test_depth_is_what_the_value_has(value, depth):
    def deep(v):
        return 1 + max(map(deep, v), default=0) if isinstance(v, list) else 0

    try:
        parse_json(json.dumps(value).encode(), depth=depth, values=1_000)
    except BadRequest:
        assert deep(value) > depth
    else:
        assert deep(value) <= depth
