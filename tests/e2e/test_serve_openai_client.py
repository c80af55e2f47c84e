"""The official `openai` client, unchanged, against a real socket."""

import asyncio

import openai
import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.records import Arm, Finish
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

KEY = "sk-0123456789abcdef"
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def server():
    log, engine = MemoryLog(), FakeEngine(lambda request: "hello world")
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(api_keys=(KEY,)),
        clock=lambda: 1000.0,
        model_name="m",
    )
    async with serving(app) as url:
        yield url + "/v1", log, engine


async def test_sync_client(server):
    url, log, _ = server

    def work():
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            answer = client.chat.completions.create(
                model="m", messages=ASK, n=2, seed=3, user="u", stop=["!"], metadata={"a": "b"}
            )
            assert [c.message.content for c in answer.choices] == ["hello world"] * 2
            assert answer.usage.completion_tokens == 24
            assert answer.ostinato["turns"] == [f"{answer.id}:0", f"{answer.id}:1"]
            raw = client.chat.completions.with_raw_response.create(model="m", messages=ASK)
            assert raw.headers["x-ostinato-weights"] == "fake0"
            events = list(
                client.chat.completions.create(
                    model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
                )
            )
            assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == "hello world"
            assert events[-1].usage.total_tokens == events[-1].usage.prompt_tokens + 12
            text = client.completions.create(model="m", prompt="x", max_tokens=5, logprobs=1)
            assert (text.choices[0].text, text.choices[0].finish_reason) == ("hello", "length")
            assert len(text.choices[0].logprobs.token_logprobs) == 5
            assert (
                "".join(e.choices[0].text for e in client.completions.create(model="m", prompt="x", stream=True))
                == "hello world"
            )
            assert [m.id for m in client.models.list()] == ["m"]
            assert client.models.retrieve("m").owned_by == "ostinato"

    await asyncio.to_thread(work)
    assert len(log.turns()) == 6
    assert {turn.arm for turn in log.turns()} == {Arm.LIVE}


async def test_async_client_follows_up_with_the_answer_it_got(server):
    url, log, _ = server
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        first = await client.chat.completions.create(model="m", messages=ASK, logprobs=True, user="u")
        assert len(first.choices[0].logprobs.content) == 12
        # What applications do: put the client's own message object back into the list.
        talk = [*ASK, first.choices[0].message, {"role": "user", "content": "more"}]
        stream = await client.chat.completions.create(model="m", messages=talk, stream=True, user="u")
        assert "".join([e.choices[0].delta.content or "" async for e in stream]) == "hello world"
        prefilled = await client.chat.completions.create(
            model="m",
            messages=[*ASK, {"role": "assistant", "content": "def f():"}],
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
            extra_headers={"X-Ostinato-User": "u9"},
        )
        assert prefilled.choices[0].message.content == "hello world"
    one, two, three = log.turns()
    assert two.parent == one.id
    assert two.prompt_ids[: len(one.prompt_ids) + 12] == one.prompt_ids + one.sampled_ids
    assert (three.user, three.parent) == ("u9", None)


async def test_errors_arrive_as_the_clients_own(server):
    url, log, engine = server
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="no model"):
            await create(model="gpt-4", messages=ASK)
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="m", messages=ASK, tools=[{"type": "custom", "custom": {"name": "f"}}])
        assert caught.value.param == "tools[0].type"
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="m", messages=[{"role": "user", "content": "x" * 5000}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        assert not log.turns()
        engine.fail_after = 3
        with pytest.raises(openai.InternalServerError):
            await create(model="m", messages=ASK)
        got = []

        async def listen():
            async for event in await create(model="m", messages=ASK, stream=True):
                got.append(event)

        with pytest.raises(openai.APIError, match="ended the answer early"):
            await listen()
        assert [c.finish_reason for e in got for c in e.choices if c.finish_reason] == []
        engine.fail_after = None
        log.full = True
        with pytest.raises(openai.InternalServerError) as caught:
            await create(model="m", messages=ASK)
        assert caught.value.status_code == 507
        log.full = False
    assert {turn.finish for turn in log.turns()} == {Finish.ERROR}


async def test_closing_a_stream_early_stops_the_work(server):
    url, log, engine = server
    engine.delay_s = 0.05
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        async for event in stream:
            if event.choices[0].delta.content:
                break
        await stream.close()
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not log.turns():  # the log has no event
                await asyncio.sleep(0.01)
    assert log.turns()[0].finish is Finish.LEFT
    assert engine.running == 0


async def test_two_hundred_calls_at_once(server):
    url, log, _ = server
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=WHOLE_PROGRAM_S) as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="m", messages=ASK, user=f"u{i}") for i in range(200))
        )
    assert len({answer.id for answer in answers}) == 200
    assert {turn.user for turn in log.turns()} == {f"u{i}" for i in range(200)}
