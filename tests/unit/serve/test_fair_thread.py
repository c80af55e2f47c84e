"""Long prompts are tokenised beside the event loop; whoever sends many of them waits behind himself only."""

import asyncio
import threading

import pytest
from gateway_world import world
from tests.deadlines import PATIENT_S

from ostinato.core.errors import BadRequest
from ostinato.serve.fair_thread import AT_ONCE_CHARS, MOST_WAITING, FairThread
from ostinato.serve.quotas import QuotaExceeded

LONG = AT_ONCE_CHARS + 1


@pytest.fixture
async def held():
    """A thread that is busy until told, and the order in which what waits for it is done."""
    thread, free, order = FairThread(), threading.Event(), []
    first = asyncio.ensure_future(thread.run("many", LONG, free.wait))
    await asyncio.sleep(0)
    yield thread, free, order
    free.set()
    await first
    thread.close()


def put(thread, order, tenant, number):
    return asyncio.ensure_future(thread.run(tenant, LONG, lambda: order.append((tenant, number))))


async def test_tenants_take_turns(held):
    thread, free, order = held
    waiting = [put(thread, order, "many", number) for number in range(20)]
    await asyncio.sleep(0)
    waiting += [put(thread, order, "few", number) for number in range(2)]
    await asyncio.sleep(0)
    free.set()
    await asyncio.gather(*waiting)
    assert order[:4] == [("many", 0), ("few", 0), ("many", 1), ("few", 1)]


async def test_a_queue_is_bounded_for_its_own_tenant_only(held):
    thread, free, order = held
    waiting = [put(thread, order, "many", number) for number in range(MOST_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(QuotaExceeded):
        await thread.run("many", LONG, lambda: None)
    waiting.append(put(thread, order, "few", 0))
    free.set()
    await asyncio.gather(*waiting)
    assert len(order) == MOST_WAITING + 1


async def test_a_thread_that_could_not_start_is_started_for_the_next(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    thread, order = FairThread(), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(MOST_WAITING + 2):
            with pytest.raises(RuntimeError):
                await thread.run("few", LONG, lambda: order.append("refused"))
    async with asyncio.timeout(PATIENT_S):
        assert await thread.run("few", LONG, lambda: "done") == "done"
        assert not order, "whoever was told of a failure has nothing done later"
    thread.close()


async def test_who_has_gone_is_passed_over_and_errors_reach_who_asked(held):
    thread, free, order = held
    gone = put(thread, order, "many", 0)
    stays = put(thread, order, "many", 1)

    def bad():
        raise BadRequest("no", field="messages")

    fails = asyncio.ensure_future(thread.run("few", LONG, bad))
    await asyncio.sleep(0)
    gone.cancel()
    free.set()
    with pytest.raises(BadRequest):
        await fails
    await stays
    assert order == [("many", 1)]


async def test_short_texts_wait_for_nobody(held):
    thread, _, _ = held
    assert await thread.run("few", AT_ONCE_CHARS, lambda: "now") == "now"


async def test_many_messages_without_a_word_are_no_short_text():
    async with world() as w:
        threads, chat = [], w.renderer.chat
        w.renderer.chat = lambda messages, **more: (
            threads.append(threading.current_thread().name) or chat(messages, **more)
        )
        for messages in (1, 300):
            assert (await w.chat(messages=[{"role": "user", "content": ""}] * messages))[0] == 200
        assert threads[0] == threading.current_thread().name
        assert threads[1].startswith("requests")
