"""Health says whether calls can be answered, and finds out again by itself."""

import asyncio
import json

import pytest
from gateway_world import eventually, world
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import BadRequest
from ostinato.serve.calls import answer
from ostinato.serve.writes import FAILING_S
from ostinato.testing.log import MemoryLog

EVENT = {"id": "s1", "target": "x", "name": "accepted", "value": True, "source": "human"}


async def health(w):
    status, text = await w.get("/health")
    return status, json.loads(text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
async def test_it_fails_while_the_log_takes_nothing_and_recovers_with_the_next_write(path):
    async with world() as w:
        ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} if "chat" in path else EVENT
        assert await health(w) == (200, {"status": "ready", "model": "m", "slots": (await health(w))[1]["slots"]})
        w.log.full = True
        assert (await w.post(path, ask))[0] == 507
        status, body = await health(w)
        assert (status, body["status"], "storage_full" in body["reason"]) == (503, "failing", True)
        assert body["slots"], "it can be evaluated all the same"
        w.log.full = False
        assert (await w.post(path, ask))[0] < 300
        assert (await health(w))[0] == 200


async def test_without_calls_it_is_tried_again_after_a_while():
    async with world() as w:
        w.log.full = True
        assert (await w.chat())[0] == 507
        w.now += FAILING_S
        assert (await health(w))[0] == 503
        w.now += 1
        assert (await health(w))[0] == 200
        assert (await w.chat())[0] == 507
        assert (await health(w))[0] == 503, "and the first call finds out"


async def test_a_clock_that_is_set_back_does_not_keep_it_failing():
    async with world() as w:
        w.log.full = True
        assert (await w.chat())[0] == 507
        w.now -= 3600
        assert (await health(w))[0] == 503
        w.now += FAILING_S + 1
        assert (await health(w))[0] == 200


@in_virtual_time
async def test_what_was_delivered_is_noted_again_and_finds_that_the_log_is_well(monkeypatch):
    monkeypatch.setattr(answer, "_RETRY_S", 0.05)
    async with world() as w:
        await w.chat()
        w.log.full = True
        await eventually(lambda: w.app._parts.writes.failing())
        assert (await health(w))[0] == 503
        w.log.full = False
        await eventually(lambda: not w.app._parts.writes.failing())
        assert (await health(w))[0] == 200


@in_virtual_time
async def test_a_log_that_says_nothing_fails_until_it_does():
    async with world(log=MemoryLog(delay_s=0.3), store_timeout_s=0.1) as w:
        call = asyncio.create_task(w.feedback("x"))
        await eventually(lambda: w.app._parts.writes._tasks)
        assert (await health(w))[0] == 200
        w.now += 1
        assert (await health(w))[1]["status"] == "failing"
        with pytest.raises(AssertionError):
            await call
        await eventually(lambda: not w.app._parts.writes._tasks)
        assert (await health(w))[0] == 200


async def test_rows_that_cannot_be_stored_are_no_fault_of_the_log():
    async def picky(*rows):
        raise BadRequest("no")

    async with world() as w:
        w.log.append = picky
        assert (await w.post("/v1/feedback", EVENT))[0] == 400
        w.log.append = MemoryLog().append
        assert (await health(w))[0] == 200


KEY, OTHER = "0123456789abcdef", "fedcba9876543210"
SETTINGS = {
    "api_keys": [f"acme:{KEY}"],
    "admin_key": "admin-0123456789abcdef",
    "metrics_key": "scraper-0123456789abcdef",
}


@pytest.mark.parametrize("key", [None, OTHER, SETTINGS["metrics_key"]])
async def test_a_stranger_is_told_the_status_alone(key):
    async with world(**SETTINGS) as w:
        assert await w.get("/health", w.key(key)) == (200, '{"status":"ready"}')
        w.log.full = True
        assert (await w.chat(headers=w.key(KEY)))[0] == 507
        assert await w.get("/health", w.key(key)) == (503, '{"status":"failing"}')


@pytest.mark.parametrize("key", [KEY, SETTINGS["admin_key"]])
async def test_whoever_has_a_key_is_told_the_model_and_its_versions(key):
    async with world(**SETTINGS) as w:
        told = json.loads((await w.get("/health", w.key(key)))[1])
        assert told == {"status": "ready", "model": "m", "slots": {"live": {"number": 0, "hash": "fake0"}}}
