"""Pins, leases, publications, kills and other collections at every instant of a collection: what is relied on is whole."""

import asyncio
import contextlib
import copy

import numpy as np

from ostinato.core.errors import Conflict, NotFound
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.keep.gc import CollectConfig, collect
from ostinato.weights.keep.pins import hold, pin
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.version.content import version_ref, weights_root

DAY = 86_400
FEW = CollectConfig(keep=1)


def model(number: int):
    codes = np.arange(3000, dtype=np.uint16)
    codes[: 5 * (number + 1)] += number + 1
    return {"a": WeightArray("BF16", (3000,), codes.view(np.uint8))}


async def history(store, count=9, anchor_every=3):
    """Versions v0, v1, ... a full snapshot after every three deltas; `candidate` is at the last."""
    publisher = VersionPublisher(store, PublisherConfig(anchor_every=anchor_every, anchor_share=100))
    made = []
    for number in range(count):
        base = made[-1] if made else None
        made.append((await publisher.publish(number, model(number), run="r", base=base, ref="candidate")).policy)
    return made


async def fetched(store, policy):
    return weights_root(await Follower(store).fetch(policy)) == policy.hash


async def assert_sound(store):
    assert (await verify(store, every=True)).problems == []


class Killed(BaseException):
    """Nobody catches it, as nobody catches signal 9."""


class Interrupted(MemoryStore):
    """Runs `work` right before the n-th call (from 1) that a collection makes; it may raise, as a kill would."""

    nth = 0

    async def _count(self):
        if self.nth:
            self.nth -= 1
            if not self.nth:
                await self.work()

    async def delete(self, hash, stamp=None):
        await self._count()
        return await super().delete(hash, stamp)

    async def delete_ref(self, ref, old, stamp=None):
        await self._count()
        await super().delete_ref(ref, old, stamp)

    async def list_refs(self):
        await self._count()
        return await super().list_refs()

    async def list_objects(self):
        async for listed in super().list_objects():
            await self._count()
            yield listed

    async def get(self, hash):
        await self._count()
        return await super().get(hash)


async def interrupted(work, prepare=None):
    """Yields a store per instant at which `work` ran in the middle of a collection, until it comes after its end."""
    first = Interrupted()
    made = await history(first, 9)
    if prepare:
        await prepare(first, made)
    first.now += 2 * DAY
    nth = 0
    while True:
        nth += 1
        store = copy.deepcopy(first)
        ran = []

        async def once(store=store, made=made, ran=ran):
            store.nth = 0
            ran.append(True)
            await work(store, made)

        store.work, store.nth = once, nth
        with contextlib.suppress(Killed, Conflict):
            await collect(store, FEW)
        if not ran:
            assert nth > 40
            return
        store.nth = 0
        yield store, made


async def test_a_pin_or_lease_that_comes_at_any_instant_holds_or_is_refused():
    for take in (pin, hold):
        refused = held_ = 0

        async def work(store, made, take=take):
            store.answer = await asyncio.gather(take(store, "x", made[2].hash), return_exceptions=True)

        async for store, made in interrupted(work):
            if isinstance(store.answer[0], NotFound):
                refused += 1
                assert not any(ref.endswith("/x") for ref in store.links)
            else:
                held_ += 1
                assert await fetched(store, made[2])
            await assert_sound(store)
        assert refused > 5
        assert held_ > 5


async def test_an_expired_lease_that_is_renewed_at_any_instant_is_not_deleted():
    async def expired(store, made):
        await hold(store, "x", made[8].hash)

    async def work(store, made):
        await hold(store, "x", made[8].hash)

    async for store, made in interrupted(work, expired):
        assert store.links["lease/x"] == made[8].hash
        assert "lease/x" not in (await collect(store, FEW)).leases


async def test_a_publication_at_any_instant_is_whole():
    """Weights that were published and collected before, or whose objects a killed publisher left: all are old when it comes."""

    async def orphans(store, made):
        elsewhere = MemoryStore()
        await VersionPublisher(elsewhere).publish(10, model(10), run="r", base=None)
        for data in elsewhere.objects.values():
            await store.put(data)

    for number in (2, 10):

        async def work(store, made, number=number):
            store.made = (
                await VersionPublisher(store).publish(number, model(number), run="r", base=None, ref="candidate")
            ).policy

        async for store, _ in interrupted(work, orphans):
            assert await fetched(store, store.made)
            await assert_sound(store)


async def test_stopped_at_any_instant_everything_needed_is_there_and_the_next_run_ends_the_work():
    clean = MemoryStore()
    await history(clean, 9)
    clean.now += 2 * DAY
    await collect(clean, FEW)

    async def work(store, made):
        raise Killed

    async for store, made in interrupted(work):
        assert await fetched(store, made[8])
        await assert_sound(store)
        for number in range(8):
            ref = version_ref(made[number].hash)
            assert ref not in store.links or await fetched(store, made[number])
        await collect(store, FEW)
        assert (store.objects, store.links) == (clean.objects, clean.links)


async def test_two_collections_at_once_lose_nothing():
    async def work(store, made):
        await asyncio.gather(collect(store, FEW), return_exceptions=True)

    async for store, made in interrupted(work):
        assert await fetched(store, made[8])
        await assert_sound(store)
