"""Objects are read in pieces: no more of them in memory than allowed, all of it decoded, and damage healed whoever kept it."""

import asyncio
import threading
import tracemalloc

import numpy as np
import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.faults import FaultyStore, flipped

from ostinato.core.errors import Corrupt
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow import delta_apply
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.relay import RelayStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import weights_root

MB = 1 << 20
RNG = np.random.default_rng(5)


def model(tensors=12, size=2 * MB):
    """Bytes that nothing compresses."""
    return {f"w{i}": WeightArray("U8", (size,), RNG.integers(0, 256, size, np.uint8)) for i in range(tensors)}


@pytest.fixture
def pieces(monkeypatch):
    """Pieces of 2 MB, of which two are in memory at once."""
    monkeypatch.setattr(delta_apply, "_PIECE_BYTES", 2 * MB)
    monkeypatch.setattr(delta_apply, "_READ_AHEAD_BYTES", 4 * MB)


async def test_payloads_are_let_go_when_they_are_decoded(pieces):
    store, weights = MemoryStore(), model()
    done = await VersionPublisher(store, PublisherConfig(object_bytes=8 * MB)).publish(0, weights, run="r", base=None)
    follower = Follower(store)
    tracemalloc.start()
    try:
        fetched = await follower.fetch(done.policy)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert weights_root(fetched) == done.policy.hash
    assert peak < (24 + 4 + 8) * MB, "the weights, two pieces and what is at work on them; 48 with all payloads"


async def test_no_more_than_so_many_bytes_are_on_their_way(pieces):
    class Counting(FaultyStore):
        now = most = 0

        async def get_range(self, hash, start, length):
            self.now += length
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.001)
            self.now -= length
            return await super().get_range(hash, start, length)

    inner = MemoryStore()
    done = await VersionPublisher(inner, PublisherConfig(object_bytes=8 * MB)).publish(0, model(), run="r", base=None)
    store = Counting(inner)
    assert weights_root(await Follower(store).fetch(done.policy)) == done.policy.hash
    assert store.most == 4 * MB


async def test_a_payload_larger_than_what_may_be_on_its_way_is_read_all_the_same(monkeypatch):
    monkeypatch.setattr(delta_apply, "_PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(delta_apply, "_READ_AHEAD_BYTES", 1 << 10)
    store = MemoryStore()
    done = await VersionPublisher(store).publish(0, model(3, MB), run="r", base=None)
    assert weights_root(await Follower(store).fetch(done.policy)) == done.policy.hash


async def test_one_damaged_piece_is_a_refusal_and_nothing_is_left_running(pieces):
    store = MemoryStore()
    done = await VersionPublisher(store, PublisherConfig(object_bytes=2 * MB)).publish(0, model(), run="r", base=None)
    manifest = (await Follower(store).log(f"version/{done.policy.hash}"))[0]
    name = manifest.tensors[5].chunks[0].object
    store.objects[name] = flipped(store.objects[name])
    before = asyncio.all_tasks()
    with pytest.raises(Corrupt, match=name):
        await Follower(store).fetch(done.policy)
    assert asyncio.all_tasks() == before


async def test_after_an_error_no_thread_writes_and_the_event_loop_was_not_held_up(monkeypatch):
    store = MemoryStore()
    done = await VersionPublisher(store).publish(0, model(2, MB), run="r", base=None)
    at_work, began, ended = threading.Barrier(2), [], []

    def decode(pairs):
        at_work.wait()
        if pairs[0][0].tensor.name == "w0":
            raise Corrupt("told to by a test")
        began.append(True)
        if turned.wait(PATIENT_S):  # the event loop goes on while this thread works
            ended.append(True)

    turned = threading.Event()

    async def watch():
        while not began:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # who asked has been told of the error by now, if nobody waits for this thread
        turned.set()

    monkeypatch.setattr(delta_apply, "_decode", decode)
    watching = asyncio.create_task(watch())
    with pytest.raises(Corrupt, match="told to"):
        await Follower(store).fetch(done.policy)
    assert began == ended == [True]
    await watching


async def test_both_threads_decode_a_small_delta(monkeypatch):
    store, old = MemoryStore(), model(4, MB)
    new = {name: WeightArray(a.dtype, a.shape, a.data.copy()) for name, a in old.items()}
    for array in new.values():
        array.data[::1000] ^= 1
    publisher, seen = VersionPublisher(store), set()
    first = await publisher.publish(0, old, run="r", base=None)
    second = await publisher.publish(1, new, run="r", base=first.policy)
    follower, plain, together = Follower(store), delta_apply._decode, threading.Barrier(2, timeout=PATIENT_S)
    await follower.fetch(first.policy)

    def decode(pairs):
        together.wait()  # one thread alone would wait for ever
        seen.add(threading.get_ident())
        plain(pairs)

    monkeypatch.setattr(delta_apply, "_decode", decode)
    assert weights_root(await follower.fetch(second.policy)) == second.policy.hash
    assert len(seen) == 2


@pytest.mark.parametrize("what", ["damaged", "cut", "gone"])
async def test_what_rots_in_a_cache_after_it_was_checked_is_fetched_again(tmp_path, what):
    """The cache looks at a whole object when it is fetched; a part of it that comes back damaged makes it look again."""
    upstream, weights = MemoryStore(), model(3, MB)
    done = await VersionPublisher(upstream).publish(0, weights, run="r", base=None)
    cache = RelayStore(upstream, DirectoryStore(tmp_path))
    assert weights_root(await Follower(cache).fetch(done.policy)) == done.policy.hash
    for path in (tmp_path / "objects").glob("*/*"):
        if path.stat().st_size > MB:
            match what:
                case "damaged":
                    path.write_bytes(flipped(path.read_bytes()))
                case "cut":
                    path.write_bytes(path.read_bytes()[:1000])
                case _:
                    path.unlink()
    assert weights_root(await Follower(cache).fetch(done.policy)) == done.policy.hash
