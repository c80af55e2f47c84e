"""Versions published by several ranks: the roots, deltas and routes of one process, and no rank ever has another's chunks."""

import asyncio
import socket

import numpy as np
import pytest

from ostinato.core.errors import BadWeights, StorageFull, Unavailable
from ostinato.core.weights import CHUNK_ELEMENTS, WeightArray, WeightPart
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.chunk_source import PartHolder
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.publish.ranks import Handed, Together, publish_part
from ostinato.weights.version.content import part_of, weights_root

CONFIG = PublisherConfig(anchor_every=5, skips=(2,))


class Ranks:
    """A publisher over three ranks, the others as tasks at the other ends of real sockets."""

    def __init__(self, store, config=CONFIG, others=2):
        self.handed = [Handed() for _ in range(others)]
        pairs = [socket.socketpair() for _ in range(others)]
        self.lines = [ours for ours, _ in pairs]
        self.tasks = [
            asyncio.create_task(publish_part(theirs, PartHolder(store, config), handed))
            for (_, theirs), handed in zip(pairs, self.handed, strict=True)
        ]
        self.publisher = VersionPublisher(store, config, lambda own: Together(own, self.lines))

    def deal(self, number, weights):
        """Every rank is handed its chunks; the first one's are given back."""
        whole = part_of(weights)
        parts = [{} for _ in range(len(self.handed) + 1)]
        for place, (at, chunk) in enumerate(sorted(whole.chunks.items())):
            parts[place % len(parts)][at] = chunk
        for handed, part in zip(self.handed, parts[1:], strict=True):
            handed.put(number, WeightPart(whole.forms, part))
        return WeightPart(whole.forms, parts[0])

    async def publish(self, number, weights, **about):
        return await self.publisher.publish(number, self.deal(number, weights), run="r", **about)

    async def close(self):
        await self.publisher.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def ranks():
    made = []

    def make(*args, **options):
        made.append(Ranks(*args, **options))
        return made[-1]

    yield make
    for each in made:
        await each.close()


def models(count):
    """A tensor of three chunks, one of one chunk, one without elements; a few elements change each time."""
    draw = np.random.default_rng(7)
    large = draw.integers(0x3F00, 0x3F80, 2 * CHUNK_ELEMENTS + 5, np.uint16)
    small = draw.integers(0x3F00, 0x3F80, 4096, np.uint16)
    for _ in range(count):
        large, small = large.copy(), small.copy()
        large[draw.integers(0, len(large), 500)] ^= 1
        small[draw.integers(0, 4096, 40)] ^= 1
        yield {
            "large": WeightArray("BF16", large.shape, large.view(np.uint8)),
            "small": WeightArray("BF16", (64, 64), small.view(np.uint8)),
            "none": WeightArray("BF16", (0, 4), np.zeros(0, np.uint8)),
        }


async def test_they_are_the_versions_of_one_process(ranks):
    """Twelve versions with snapshots and squashed deltas: the same chunks, the same routes, about as many bytes."""
    stores = MemoryStore(), MemoryStore()
    one, three = VersionPublisher(stores[0], CONFIG), ranks(stores[1])
    bases = [None, None]
    for number, weights in enumerate(models(12)):
        alone = await one.publish(number, weights, run="r", base=bases[0], ref="live")
        together = await three.publish(number, weights, base=bases[1], ref="live")
        bases = [alone.policy, together.policy]
        assert together.policy.hash == weights_root(weights)
        assert (together.kind, together.reason, together.changed) == (alone.kind, alone.reason, alone.changed)
        manifests = [(await Follower(store).log("live"))[0] for store in stores]
        payloads = [
            [(chunk.codec, chunk.length, chunk.payload, chunk.result) for t in manifest.tensors for chunk in t.chunks]
            for manifest in manifests
        ]
        assert payloads[0] == payloads[1]
        assert [(r.base, r.bytes) for r in manifests[0].routes] == [(r.base, r.bytes) for r in manifests[1].routes]
        assert (manifests[0].links, manifests[0].chain_bytes) == (manifests[1].links, manifests[1].chain_bytes)
        snapshot = await Follower(stores[1]).fetch(together.policy)
        assert weights_root(snapshot) == together.policy.hash


async def test_each_rank_stores_its_own_chunks(ranks):
    store = MemoryStore()
    first, second = models(2)
    three = ranks(store)
    done = await three.publish(0, first, base=None)
    await three.publish(1, second, base=done.policy, ref="live")
    newest = (await Follower(store).log("live"))[0]
    objects = [chunk.object for tensor in newest.tensors for chunk in tensor.chunks]
    assert len(objects) == 4
    assert len(set(objects)) == 3


async def test_weights_that_are_stored_already_are_known_and_the_next_version_is_a_delta(ranks):
    store = MemoryStore()
    first, second = models(2)
    done = await VersionPublisher(store).publish(0, first, run="r", base=None)
    three = ranks(store)
    assert await three.publisher.known(0, three.deal(0, first)) == done.policy
    assert (await three.publish(1, second, base=done.policy)).kind == "delta"


async def test_ranks_that_have_not_the_base_write_a_full_snapshot(ranks):
    store = MemoryStore()
    first, second = models(2)
    done = await VersionPublisher(store).publish(0, first, run="r", base=None)
    three = ranks(store)
    assert await three.publisher.known(1, three.deal(1, second)) is None
    after = await three.publish(1, second, base=done.policy)
    assert (after.kind, after.policy.hash) == ("full", weights_root(second))
    assert "not every rank has" in after.reason


async def test_the_same_version_again_is_the_same_version(ranks):
    store = MemoryStore()
    (weights,) = models(1)
    three = ranks(store)
    first = await three.publish(3, weights, base=None)
    again = await three.publish(3, weights, base=None)
    assert (again.policy, again.reason) == (first.policy, "published before")


async def test_what_one_rank_refuses_is_not_published(ranks):
    store = MemoryStore()
    (weights,) = models(1)
    weights["small"].data[:2] = (0xC0, 0x7F)  # NaN, in the last of four chunks: the first rank has it
    weights["large"].data[2 * CHUNK_ELEMENTS : 2 * CHUNK_ELEMENTS + 2] = (0xC0, 0x7F)
    three = ranks(store)
    with pytest.raises(BadWeights, match=r"'(large|small)'"):
        await three.publish(0, weights, base=None)
    assert store.objects == {}


async def test_a_full_disk_at_one_rank_moves_no_ref_and_the_next_version_is_whole(ranks):
    class Store(MemoryStore):
        full = 0

        async def put(self, data):
            self.full -= 1
            if self.full == 0:
                raise StorageFull("told to be full by a test")
            return await super().put(data)

    store = Store()
    first, second, third = models(3)
    three = ranks(store)
    done = await three.publish(0, first, base=None, ref="live")
    store.full = 3
    with pytest.raises(StorageFull):
        await three.publish(1, second, base=done.policy, ref="live")
    assert await store.read_ref("live") == done.policy.hash
    after = await three.publish(2, third, base=done.policy, ref="live")
    assert after.kind == "delta"
    assert weights_root(await Follower(store).fetch(after.policy)) == weights_root(third)


async def test_a_lost_rank_is_an_error_and_nothing_is_named(ranks):
    store = MemoryStore()
    first, second = models(2)
    three = ranks(store)
    done = await three.publish(0, first, base=None, ref="live")
    three.tasks[1].cancel()
    await asyncio.gather(three.tasks[1], return_exceptions=True)
    three.deal(1, second)
    with pytest.raises(Unavailable, match="rank 2"):
        await three.publish(1, second, base=done.policy, ref="live")
    assert await store.read_ref("live") == done.policy.hash


def test_only_the_newest_parts_wait_and_only_until_they_are_published():
    handed = Handed()
    for number in range(6):
        handed.put(number, WeightPart({}, {}))
    assert sorted(handed._parts) == [3, 4, 5]
    assert handed.take(4) is handed.take(4)
    handed.published()
    assert sorted(handed._parts) == [5]


async def test_a_rank_keeps_no_part_that_is_published(ranks):
    three = ranks(MemoryStore())
    (weights,) = models(1)
    await three.publish(0, weights, base=None)
    assert [len(handed._parts) for handed in three.handed] == [0, 0]
