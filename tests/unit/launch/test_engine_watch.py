"""The serving worker looks after its engine: one that is dead or hangs is its own failure; one that is slow or idle is none. It also tells
how the process that reads long requests fares.
"""

import asyncio

import pytest
from tests.deadlines import PATIENT_S
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import Unavailable
from ostinato.launch.workers import serve
from ostinato.launch.workers.serve import EngineDied, watch_engine, watch_reader


class Engine:
    """Gives these statistics, one after the other, and the last one for ever."""

    def __init__(self, *stats):
        self._stats = list(stats)

    def stats(self):
        found = self._stats.pop(0) if len(self._stats) > 1 else self._stats[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(serve, "_POLL_S", 0.01)


async def test_a_dead_engine_is_the_workers_failure():
    with pytest.raises(EngineDied, match="its thread is gone"):
        await watch_engine(Engine({"steps": 1.0}, Unavailable("its thread is gone")), 60.0)


@pytest.mark.parametrize("busy", [{"running": 1.0}, {"waiting": 2.0}, {"orders_open": 1.0}])
@in_virtual_time
async def test_an_engine_that_ends_nothing_with_work_waiting_hangs(busy):
    with pytest.raises(EngineDied, match="has finished no step or command for"):
        async with asyncio.timeout(PATIENT_S):
            await watch_engine(Engine({"steps": 5.0, **busy}), 0.1)


@pytest.mark.parametrize(
    "stats",
    [
        [{"steps": 5.0, "running": 0.0, "waiting": 0.0}],
        [{"steps": float(step), "running": 3.0} for step in range(10_000)],
        [{"steps": 5.0, "orders_done": float(done), "orders_open": 2.0} for done in range(10_000)],
    ],
    ids=["idle", "steps", "orders"],
)
@in_virtual_time
async def test_one_that_is_idle_or_ends_what_it_does_goes_on(stats):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await watch_engine(Engine(*stats), 0.1)


@in_virtual_time
async def test_where_the_whole_process_stood_still_the_engine_did_not_hang():
    """As in a container that is frozen for a while: the engine had no time to end what it does."""
    loop = asyncio.get_running_loop()
    loop.call_later(0.055, loop.advance, 600.0)
    steps = [{"steps": 5.0, "running": 1.0}] * 9 + [{"steps": float(step), "running": 1.0} for step in range(6, 10_000)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600.5):
            await watch_engine(Engine(*steps), 0.1)


async def test_an_earlier_workers_alarm_stands_until_a_long_request_was_read(monkeypatch):
    told = []

    class Reader:
        looks, trouble = 0, ""

        @property
        def failures(self):
            self.looks += 1
            return int(self.looks > 8)

        @property
        def answers(self):
            return int(self.looks > 4)

    async def note(log, name, *, raised, why, at):
        told.append((name, raised, reader.looks))
        if raised:
            raise asyncio.CancelledError

    reader = Reader()
    monkeypatch.setattr(serve, "note", note)
    with pytest.raises(asyncio.CancelledError):
        await watch_reader(reader, None)
    assert told == [("serve:reader", False, 5), ("serve:reader", True, 9)]
