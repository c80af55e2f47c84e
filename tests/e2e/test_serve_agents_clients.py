"""The official clients of both vendors with tools, unchanged, against a real socket."""

import asyncio
import importlib
import json

import openai
import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.records import Finish
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

KEY = "sk-0123456789abcdef"
ASK = [{"role": "user", "content": "What is in a.py?"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ANTHROPIC_TOOL = {"name": "read", "description": "Read a file.", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}
CALL = 'Let me look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
RESULT = 0xFC  # what a tool's message begins with


def script(request):
    if "slowly" in decode(request.prompt_ids):
        return "s" * 1000
    return "It is empty." if RESULT in request.prompt_ids else CALL


@pytest.fixture
def anthropic():
    """Imported by the tests that need it: it takes three seconds, and every worker collects this file."""
    return importlib.import_module("anthropic")


@pytest.fixture
async def server():
    log = MemoryLog()
    app = create_app(
        engine=FakeEngine(script, delay_s=0.0005),
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(api_keys=(KEY,)),
        clock=lambda: 1000.0,
        model_name="m",
    )
    async with serving(app) as url:
        yield url, log


def assert_one_chain(log):
    """Two turns, of which the second continues the first's tokens."""
    one, two = log.turns()
    known = one.prompt_ids + one.sampled_ids
    assert (one.finish, two.finish) == (Finish.TOOL_CALLS, Finish.STOP)
    assert (two.parent, two.prompt_ids[: len(known)]) == (one.id, known)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_client_calls_a_tool_and_goes_on(anthropic, server, stream):
    url, log = server
    asked = {"model": "m", "max_tokens": 1000, "tools": [ANTHROPIC_TOOL], "system": "Be brief."}

    def work():
        with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:

            def ask(messages):
                if not stream:
                    return client.messages.create(messages=messages, **asked)
                with client.messages.stream(messages=messages, **asked) as events:
                    text = "".join(events.text_stream)
                    answer = events.get_final_message()
                assert text == "".join(block.text for block in answer.content if block.type == "text")
                return answer

            first = ask(ASK)
            said, use = first.content
            assert (said.text, use.name, use.input) == ("Let me look.", "read", {"path": "a.py"})
            assert (first.stop_reason, first.usage.input_tokens) == ("tool_use", len(log.turns()[0].prompt_ids))
            result = {"type": "tool_result", "tool_use_id": use.id, "content": ""}
            rest = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = ask([*ASK, *rest])
            assert (second.content[0].text, second.stop_reason) == ("It is empty.", "end_turn")
            counted = client.messages.count_tokens(model="m", messages=ASK, tools=[ANTHROPIC_TOOL], system="Be brief.")
            assert counted.input_tokens == first.usage.input_tokens

    await asyncio.to_thread(work)
    assert_one_chain(log)


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_calls_a_tool_in_a_chat_and_goes_on(server, stream):
    url, log = server
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:

        async def ask(messages):
            asked = {"model": "m", "messages": messages, "tools": [CHAT_TOOL], "max_tokens": 1000}
            if not stream:
                return (await client.chat.completions.create(**asked)).choices[0].message
            async with client.chat.completions.stream(**asked) as events:
                return (await events.get_final_completion()).choices[0].message

        first = await ask(ASK)
        (call,) = first.tool_calls
        assert (first.content, call.function.name) == ("Let me look.", "read")
        assert json.loads(call.function.arguments) == {"path": "a.py"}
        said = {"role": "assistant", "content": first.content, "tool_calls": [call.model_dump(exclude={"index"})]}
        said["tool_calls"][0]["function"].pop("parsed_arguments", None)
        second = await ask([*ASK, said, {"role": "tool", "tool_call_id": call.id, "content": ""}])
        assert second.content == "It is empty."
    assert_one_chain(log)


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_calls_a_tool_in_a_response_and_goes_on(server, stream):
    url, log = server
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:

        async def ask(items):
            asked = {"model": "m", "input": items, "tools": [RESPONSES_TOOL], "max_output_tokens": 1000, "user": "u"}
            if not stream:
                return await client.responses.create(**asked)
            async with client.responses.stream(**asked) as events:
                return await events.get_final_response()

        first = await ask(ASK)
        call = first.output[1]
        assert (first.output_text, json.loads(call.arguments)) == ("Let me look.", {"path": "a.py"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": ""}
        output = [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in first.output]
        second = await ask([*ASK, *output, result])
        assert second.output_text == "It is empty."
    assert_one_chain(log)


async def test_anthropics_client_gets_errors_of_its_own_kind(anthropic, server):
    url, log = server
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        create = client.messages.create
        with pytest.raises(anthropic.NotFoundError, match="no model"):
            await create(model="claude", max_tokens=9, messages=ASK)
        choice = {"type": "tool", "name": "none of them"}
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await create(model="m", max_tokens=9, messages=ASK, tools=[ANTHROPIC_TOOL], tool_choice=choice)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x" * 5000}])
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(model="m", max_tokens=9, messages=ASK)
    assert log.turns() == []


async def test_a_hundred_streams_at_once_and_those_that_were_left_are_all_turns(anthropic, server):
    url, log = server
    slow = [{"role": "user", "content": "slowly"}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:

        async def whole():
            async with client.messages.stream(
                model="m", max_tokens=1000, messages=ASK, tools=[ANTHROPIC_TOOL]
            ) as events:
                return (await events.get_final_message()).stop_reason

        async def left():
            async with client.messages.stream(model="m", max_tokens=1000, messages=slow) as events:
                async for _ in events.text_stream:
                    return "left"

        ended = await asyncio.gather(*(whole() if i % 10 else left() for i in range(100)))
        assert (ended.count("tool_use"), ended.count("left")) == (90, 10)
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while len(log.turns()) < 100:  # what a client left is written when the engine has stopped
            await asyncio.sleep(0.01)
    finishes = [turn.finish for turn in log.turns()]
    assert (finishes.count(Finish.TOOL_CALLS), finishes.count(Finish.LEFT)) == (90, 10)
