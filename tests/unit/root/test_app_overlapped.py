"""A version is stored while the next step is computed: in order, once, and no error is lost."""

import asyncio

import numpy as np
import pytest

from ostinato import app
from ostinato.core.errors import StorageFull
from ostinato.core.records import Learned, WeightArray
from ostinato.publish.follower import Follower
from ostinato.publish.publisher import Publisher
from ostinato.testing.store import MemoryStore


class SlowStore(MemoryStore):
    """Writes wait for `gate`; `full` refuses them."""

    def __init__(self):
        super().__init__()
        self.gate = asyncio.Event()
        self.full = False

    async def put(self, data):
        await self.gate.wait()
        if self.full:
            raise StorageFull("told to be full by a test")
        return await super().put(data)


def learned(step):
    data = np.arange(600, dtype=np.uint16)
    data[:step] += 1
    return Learned(
        step=step, policy_number=step, weights={"w": WeightArray("BF16", (600,), data.view(np.uint8))}, metrics={}
    )


def overlapped(store, done):
    return app.Overlapped(
        app.Candidates(Publisher(store), "r", 1, lambda published: done.append(published.policy.number))
    )


async def test_the_trainer_goes_on_while_a_version_is_stored_and_waits_for_the_one_before():
    store, done = SlowStore(), []
    publisher = overlapped(store, done)
    first = await publisher.publish(learned(1))
    assert done == []
    second = asyncio.create_task(publisher.publish(learned(2)))
    await asyncio.sleep(0.02)
    assert not second.done()  # one version under way, no more
    store.gate.set()
    assert (await second).number == 2
    await publisher.settle()
    assert done == [1, 2]
    assert await Follower(store).resolve("candidate") == await second
    assert await Follower(store).fetch(first)
    await publisher.settle()


async def test_what_went_wrong_is_raised_by_the_next_call_and_stops_nothing():
    store, done = SlowStore(), []
    publisher = overlapped(store, done)
    store.gate.set()
    store.full = True
    await publisher.publish(learned(1))
    await asyncio.sleep(0.05)
    store.full = False
    with pytest.raises(StorageFull):
        await publisher.publish(learned(2))
    await publisher.settle()
    assert done == [2]
    store.full = True
    await publisher.publish(learned(3))
    with pytest.raises(StorageFull):
        await publisher.settle()
