"""Idempotency keys: one call, one sampling, one set of turns."""

import asyncio
import itertools
import json

import openai
import pytest
from gateway_world import ASK, all_sampled, events, world
from tests.fakes.proxy import LosesAnswers

from ostinato.core.records import Finish
from ostinato.serve.calls.response_store import IdempotencyKeys, KeyReused
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog

KEY = {"idempotency-key": "k1"}


def counting():
    """An engine that never says the same twice."""
    numbers = itertools.count()
    return FakeEngine(lambda request: f"answer {next(numbers)}")


def without_head(raw):
    """The text of a stream and its last event."""
    got = events(raw)
    return "".join(c["delta"].get("content", "") for e in got[:-1] for c in e["choices"]), got[-2]["ostinato"]


async def test_a_repeat_gets_the_first_answer_to_the_letter():
    async with world(engine=counting()) as w:
        first = await w.chat(headers=KEY, n=2, logprobs=True, user="u")
        w.now += 100
        again = await w.chat(headers=KEY, n=2, logprobs=True, user="u")
        assert (first[0], first[2]) == (again[0], again[2]) == (200, first[2])
        assert again[1]["idempotent-replayed"] == "true"
        assert "idempotent-replayed" not in first[1]
        assert len(w.engine.requests) == 1
        assert len(w.log.turns()) == 2


async def test_also_after_a_restart_and_as_a_stream():
    log = MemoryLog()
    async with world(engine=counting(), log=log) as w:
        _, _, first = await w.chat(headers=KEY)
    async with world(engine=counting(), log=log) as w:
        _, _, again = await w.chat(headers=KEY)
        assert again == first
        _, headers, raw = await w.chat(headers=KEY, stream=True)
        assert without_head(raw) == (first["choices"][0]["message"]["content"], first["ostinato"])
        assert headers["x-ostinato-turn"] == first["ostinato"]["turns"][0]
        assert not w.engine.requests
        assert len(log.turns()) == 1
        status, _, body = await w.chat(headers=KEY, temperature=0.5)
        assert (status, body["error"]["code"], body["error"]["param"]) == (
            422,
            "idempotency_key_reused",
            "Idempotency-Key",
        )


async def test_another_body_user_or_path_under_the_same_key_is_refused():
    async with world() as w:
        await w.chat(headers=KEY, user="u")
        for change in ({"user": "v"}, {"user": "u", "max_tokens": 5}, {"user": "u", "n": 2}):
            assert (await w.chat(headers=KEY, **change))[0] == 422
        assert (await w.chat(headers={**KEY, "x-ostinato-episode": "e"}, user="u"))[0] == 422
        assert (await w.post("/v1/completions", {"model": "m", "prompt": "x"}, headers=KEY))[0] == 422
        reordered = json.dumps({"user": "u", **dict(reversed(ASK.items()))}).encode()
        assert (await w.post("/v1/chat/completions", data=reordered, headers=KEY))[0] == 200
        assert (await w.chat(headers={"idempotency-key": "k2"}, user="v"))[0] == 200
        assert len(w.log.turns()) == 2


async def test_concurrent_repeats_wait_for_the_first():
    engine = counting()
    engine.delay_s = 0.01
    async with world(engine=engine) as w:
        answers = await asyncio.gather(*(w.chat(headers=KEY, user="u") for _ in range(8)))
        assert {answer[2]["choices"][0]["message"]["content"] for answer in answers} == {"answer 0"}
        assert len(engine.requests) == 1
        assert len(w.log.turns()) == 1


async def test_tenants_have_keys_of_their_own():
    keys = ("acme:sk-acme-0123456789", "bolt:sk-bolt-0123456789")
    async with world(engine=counting(), api_keys=keys) as w:
        for key in keys:
            status, headers, _ = await w.chat(headers={**KEY, "x-api-key": key.partition(":")[2]})
            assert status == 200
            assert "idempotent-replayed" not in headers
        assert [turn.tenant for turn in w.log.turns()] == ["acme", "bolt"]


async def test_a_failed_try_is_followed_by_another():
    engine = FakeEngine(lambda r: "hello", fail_after=2)
    async with world(engine=engine) as w:
        assert (await w.chat(headers=KEY))[0] == 500
        engine.fail_after = None
        assert (await w.chat(headers=KEY))[0] == 200
        failed, good = w.log.turns()
        assert (failed.finish, good.finish) == (Finish.ERROR, Finish.STOP)
        assert failed.id != good.id
        _, _, body = await w.chat(headers=KEY)
        assert body["ostinato"]["turns"] == [good.id]


async def test_a_half_written_answer_is_made_anew():
    log = MemoryLog()
    async with world(engine=counting(), log=log) as w:
        await w.chat(headers=KEY, n=2)
    del log.rows[1:], log._known[next(reversed(log._known))]  # killed between the two choices of a stream
    log._known = {key: row for key, row in log._known.items() if row in log.rows}
    async with world(engine=counting(), log=log) as w:
        _, headers, body = await w.chat(headers=KEY, n=2)
        assert "idempotent-replayed" not in headers
        assert set(body["ostinato"]["turns"]).isdisjoint({log.turns()[0].id})
        assert len(log.turns()) == 3


async def test_a_repeat_after_a_client_left_during_the_write_finds_what_was_written():
    log = MemoryLog(delay_s=0.3)
    async with world(engine=counting(), log=log, real=True) as w:
        _, writer = await w.connect(ASK, "idempotency-key: k1")
        await all_sampled(w, "answer 0")
        writer.transport.abort()
        _, headers, body = await w.chat(headers=KEY)
        assert headers["idempotent-replayed"] == "true"
        assert body["choices"][0]["message"]["content"] == "answer 0"
        assert len(log.turns()) == 1


async def test_a_refused_body_does_not_use_up_its_key():
    async with world() as w:
        assert (await w.chat(headers=KEY, messages=[{"role": "user", "content": "x" * 5000}]))[0] == 400
        assert (await w.chat(headers=KEY, max_tokens=10))[0] == 200


async def test_a_call_that_waited_for_one_that_left_nothing_has_the_key_to_itself():
    keys = IdempotencyKeys(MemoryLog(), remembered=10)
    ends = [asyncio.Event(), asyncio.Event()]

    async def call(shape, end):
        async with keys.attempt("chatcmpl", "acme", "k", shape, n=1):
            await end.wait()

    first, second = (asyncio.create_task(call("a" * 12, end)) for end in ends)
    await asyncio.sleep(0)
    ends[0].set()
    await first
    other = asyncio.create_task(call("b" * 12, ends[1]))
    for _ in range(10):
        await asyncio.sleep(0)
    ends[1].set()
    answers = await asyncio.gather(second, other, return_exceptions=True)
    assert [type(each) for each in answers] == [type(None), KeyReused]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_clients_retries_make_one_turn(stream):
    async with world(engine=counting(), real=True, wrap=lambda app: LosesAnswers(app, 2, status=502)) as w:
        async with openai.AsyncOpenAI(base_url=w.url + "/v1", api_key="none", max_retries=3) as client:
            answer = await client.chat.completions.create(**ASK, stream=stream, extra_headers={"Idempotency-Key": "k1"})
            text = (
                "".join([event.choices[0].delta.content or "" async for event in answer])
                if stream
                else answer.choices[0].message.content
            )
        assert text == "answer 0"
        assert len(w.log.turns()) == 1


async def test_the_keys_of_one_tenant_drive_out_none_of_anothers():
    async with world(api_keys=("acme:sk-acme-0123456789", "bolt:sk-bolt-0123456789"), repeat_keys=6) as w:
        acme = w.key("sk-acme-0123456789", **KEY)
        assert (await w.chat(headers=acme))[0] == 200
        for number in range(10):
            bolt = w.key("sk-bolt-0123456789", **{"idempotency-key": f"k{number}"})
            assert (await w.chat(headers=bolt))[0] == 200
        assert (await w.chat(headers=acme, temperature=0.5))[0] == 422
