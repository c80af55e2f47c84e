"""A version is stored while the next step is computed: in order, once, and no error is lost."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import StorageFull
from ostinato.core.weights import Learned, WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import Candidates, Overlapped, VersionPublisher
from ostinato.weights.version.content import weights_root


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
    return Overlapped(
        Candidates(VersionPublisher(store), "r", 1, lambda published: done.append(published.policy.number))
    )


async def test_the_trainer_goes_on_while_a_version_is_stored_and_waits_for_the_one_before():
    store, done = SlowStore(), []
    stored = overlapped(store, done)
    await stored.begin(learned(1))
    assert done == []
    second = asyncio.create_task(stored.begin(learned(2)))
    await asyncio.sleep(0.02)
    assert not second.done()  # one version under way, no more
    store.gate.set()
    await second
    await stored.settle()
    assert done == [1, 2]
    newest, first = await Follower(store).log("candidate")
    assert (newest.policy.hash, first.policy.hash) == tuple(weights_root(learned(step).weights) for step in (2, 1))
    for policy in (newest.policy, first.policy):
        assert weights_root(await Follower(store).fetch(policy)) == policy.hash
    await stored.settle()


@pytest.mark.parametrize("stopped", ["in begin", "in settle"])
async def test_who_is_stopped_while_it_waits_stores_the_last_step_all_the_same(stopped):
    store, done = SlowStore(), []
    stored = overlapped(store, done)
    await stored.begin(learned(1))
    waiting = asyncio.create_task(stored.begin(learned(2)) if stopped == "in begin" else stored.settle())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    store.gate.set()
    await stored.settle()
    assert done == ([1, 2] if stopped == "in begin" else [1])
    assert (await Follower(store).resolve("candidate")).number == done[-1]


async def test_a_publication_that_failed_is_told_before_the_next_one_begins():
    store = MemoryStore()
    stored = overlapped(store, [])

    async def put(data):
        raise StorageFull("no room")

    store.put = put
    await stored.begin(learned(1))
    async with asyncio.timeout(PATIENT_S):
        while stored.trouble is None:
            await asyncio.sleep(0.001)
    assert stored.trouble == "the last version is not stored: StorageFull: no room"
    with pytest.raises(StorageFull):
        await stored.settle()
    assert stored.trouble is None


async def test_steps_taken_again_name_no_older_candidate_and_one_that_is_still_due():
    store = MemoryStore()
    candidates = Candidates(VersionPublisher(store), "r", 2, lambda _: None)
    named = []
    for step in range(1, 5):
        await candidates.publish(learned(step))
        named.append((found := await Follower(store).resolve("candidate")) and found.number)
    assert named == [None, 2, 2, 4]
    present = await Follower(store).resolve("candidate")
    again = Candidates(VersionPublisher(store), "r", 2, lambda _: None)
    async with again.repeating(present):
        for step in range(1, 7):  # it was killed before it could name the last one
            again.last = await again.publish(learned(step))
            assert (await Follower(store).resolve("candidate")) == present
    assert (await Follower(store).resolve("candidate")).number == 6


class Untouchable(dict):
    """Weights that nobody may look at before `may`."""

    may = False

    def __getitem__(self, name):
        assert self.may
        return super().__getitem__(name)

    def items(self):
        assert self.may
        return super().items()


async def test_to_begin_costs_the_trainer_no_look_at_the_weights():
    store, done = SlowStore(), []
    stored = overlapped(store, done)
    new = learned(1)
    weights = Untouchable(new.weights)
    await stored.begin(replace(new, weights=weights))
    weights.may = True  # from here on the loop runs beside the trainer
    store.gate.set()
    await stored.settle()
    assert done == [1]


async def test_what_went_wrong_is_raised_by_the_next_call_and_stops_nothing():
    store, done = SlowStore(), []
    stored = overlapped(store, done)
    store.gate.set()
    store.full = True
    await stored.begin(learned(1))
    async with asyncio.timeout(PATIENT_S):
        while stored.trouble is None:
            await asyncio.sleep(0.001)
    store.full = False
    with pytest.raises(StorageFull):
        await stored.begin(learned(2))
    await stored.settle()
    assert done == [2]
    store.full = True
    await stored.begin(learned(3))
    with pytest.raises(StorageFull):
        await stored.settle()
