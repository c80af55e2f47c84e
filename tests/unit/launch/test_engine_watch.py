"""The serving worker looks after its engine: one that is dead or hangs is its own failure; one that is slow or idle is none."""

import asyncio

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import Unavailable
from ostinato.launch.workers import serve
from ostinato.launch.workers.serve import EngineDied, attend


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
    monkeypatch.setattr(serve, "_LOOK_S", 0.01)


async def test_a_dead_engine_is_the_workers_failure():
    with pytest.raises(EngineDied, match="its thread is gone"):
        await attend(Engine({"steps": 1.0}, Unavailable("its thread is gone")), 60.0)


@pytest.mark.parametrize("busy", [{"running": 1.0}, {"waiting": 2.0}, {"orders_open": 1.0}])
async def test_an_engine_that_ends_nothing_with_work_waiting_hangs(busy):
    with pytest.raises(EngineDied, match="has ended no step or order for"):
        async with asyncio.timeout(PATIENT_S):
            await attend(Engine({"steps": 5.0, **busy}), 0.1)


@pytest.mark.parametrize(
    "stats",
    [
        [{"steps": 5.0, "running": 0.0, "waiting": 0.0}],
        [{"steps": float(step), "running": 3.0} for step in range(10_000)],
        [{"steps": 5.0, "orders_done": float(done), "orders_open": 2.0} for done in range(10_000)],
    ],
    ids=["idle", "steps", "orders"],
)
async def test_one_that_is_idle_or_ends_what_it_does_goes_on(stats):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await attend(Engine(*stats), 0.1)
