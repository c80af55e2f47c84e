"""Time that stands still while anything can be done, and time that only a test advances."""

import asyncio
import threading
import time
from functools import partial

import pytest
from tests import virtual_time
from tests.deadlines import WHOLE_PROGRAM_S
from tests.virtual_time import VirtualTimeLoop, advance, in_held_time, in_virtual_time, until

A_DAY_S = 86_400.0


@in_virtual_time
async def test_a_long_wait_takes_no_time_and_a_short_one_is_shorter_whatever_a_step_takes():
    done, loop = [], asyncio.get_running_loop()
    began = loop.time()

    async def waits(seconds):
        await asyncio.sleep(seconds)
        done.append((seconds, loop.time() - began))

    async def works():
        for _ in range(3):
            time.sleep(0.05)  # noqa: ASYNC251 - a busy machine
            await asyncio.sleep(0)
        done.append(("worked", loop.time() - began))

    await asyncio.gather(waits(A_DAY_S), waits(0.01), works())
    assert done == [("worked", 0.0), (0.01, pytest.approx(0.01)), (A_DAY_S, pytest.approx(A_DAY_S))]


@in_virtual_time
async def test_work_in_threads_is_waited_for_and_takes_no_time_either():
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(0.01):
        assert await asyncio.to_thread(lambda: time.sleep(0.1) or "done") == "done"
    assert loop.time() == began
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()


@in_held_time
async def test_held_time_passes_by_the_tests_word_alone():
    come = threading.Event()
    loop, fired = asyncio.get_running_loop(), []
    loop.call_later(0.01, fired.append, "soon")
    loop.call_later(1.0, fired.append, "late")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b"", "sockets go on"
    writer.close()
    server.close()
    threading.Timer(0.05, come.set).start()
    await until(come.is_set)
    assert fired == []
    await advance(0.9)
    assert fired == ["soon"]
    await advance(0.2)
    assert fired == ["soon", "late"]


@pytest.mark.parametrize("jumps", [True, False])
def test_what_nothing_can_end_fails(monkeypatch, jumps):
    monkeypatch.setattr(virtual_time, "WHOLE_PROGRAM_S", -1.0)
    assert WHOLE_PROGRAM_S > 0
    loop = VirtualTimeLoop(jumps=jumps)
    task = loop.create_task(asyncio.Event().wait())
    with pytest.raises(TimeoutError, match="could end this test"):
        loop.run_until_complete(task)
    monkeypatch.undo()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


async def beats():
    while True:
        await asyncio.sleep(0.05)


async def never_beside_a_heartbeat():
    beating = asyncio.create_task(beats())
    await asyncio.Event().wait()
    beating.cancel()


@pytest.mark.parametrize(
    ("jumps", "endless"),
    [(True, never_beside_a_heartbeat), (True, partial(until, lambda: False)), (False, partial(until, lambda: False))],
    ids=["heartbeat", "until", "until in held time"],
)
def test_what_turns_for_ever_fails_too(monkeypatch, jumps, endless):
    monkeypatch.setattr(virtual_time, "WHOLE_PROGRAM_S", 0.1)
    with pytest.raises(TimeoutError, match="could end this test"):
        virtual_time._on(partial(VirtualTimeLoop, jumps=jumps), endless)()


def test_its_decorators_run_the_test():
    ran = []

    async def test(word):
        ran.append((word, type(asyncio.get_running_loop())))

    in_virtual_time(test)(word="one")
    in_held_time(test)(word="two")
    assert ran == [("one", VirtualTimeLoop), ("two", VirtualTimeLoop)]
