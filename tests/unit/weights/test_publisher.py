import asyncio
import re

import numpy as np
import pytest
from tests.fakes.faults import FaultyStore

from ostinato.core.errors import BadRequest, BadWeights, Conflict, StorageFull
from ostinato.core.records import PolicyVersion
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import CHUNK_ELEMENTS, weights_root

RNG = np.random.default_rng(7)


def bf16(*shape):
    codes = (RNG.normal(0, 0.1, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return WeightArray("BF16", shape, codes.reshape(-1).view(np.uint8))


def model():
    return {
        "embed": bf16(300, 16),
        "layer.w": bf16(16, 16),
        "norm": WeightArray("F32", (4,), np.ones(4, "<f4").view(np.uint8)),
    }


def nudged(weights, share=0.01):
    """A copy with `share` of the bf16 codes moved by one ulp."""
    new = dict(weights)
    for name, array in weights.items():
        if array.dtype == "BF16":
            codes = array.data.view(np.uint16).copy()
            codes[RNG.random(codes.size) < share] ^= 1
            new[name] = WeightArray("BF16", array.shape, codes.view(np.uint8))
    return new


def same(one, two):
    return {n: (a.dtype, a.shape, a.data.tobytes()) for n, a in one.items()} == {
        n: (a.dtype, a.shape, a.data.tobytes()) for n, a in two.items()
    }


async def test_first_a_full_snapshot_then_deltas_that_name_what_changed():
    store = MemoryStore()
    publisher = VersionPublisher(store)
    old = model()
    new = nudged(old)
    first = await publisher.publish(0, old, run="r", base=None, ref="candidate")
    second = await publisher.publish(1, new, run="r", base=first.policy, ref="candidate")
    assert (first.kind, first.reason, first.changed) == ("full", "no base", None)
    assert (second.kind, second.reason) == ("delta", "")
    codes = [np.concatenate([w[n].data.view(np.uint16) for n in ("embed", "layer.w")]) for w in (old, new)]
    assert second.changed == pytest.approx(np.count_nonzero(codes[0] != codes[1]) / (codes[0].size + 4))
    assert second.policy == PolicyVersion(number=1, hash=weights_root(new))
    assert store.links["candidate"] == second.policy.hash
    for policy, weights in ((first.policy, old), (second.policy, new)):
        assert same(await Follower(store).fetch(policy), weights)
    assert (await verify(store, every=True)).problems == []


async def test_publishing_the_same_weights_again_writes_nothing_and_is_no_error():
    store = MemoryStore()
    weights = model()
    first = await VersionPublisher(store).publish(3, weights, run="r", base=None, ref="candidate")
    objects = dict(store.objects)
    for publisher in (VersionPublisher(store), VersionPublisher(store)):
        again = await publisher.publish(3, weights, run="r", base=first.policy, ref="candidate")
        assert (again.policy, again.manifest, again.bytes) == (first.policy, first.manifest, 0)
    assert store.objects == objects


async def test_a_step_that_changed_no_bit_is_a_version_of_its_own_number():
    store = MemoryStore()
    publisher = VersionPublisher(store)
    weights = model()
    first = await publisher.publish(0, weights, run="r", base=None, ref="candidate")
    second = await publisher.publish(1, weights, run="r", base=first.policy, ref="candidate")
    assert (second.kind, second.changed, second.policy.hash) == ("delta", 0.0, first.policy.hash)
    assert await Follower(store).resolve("candidate") == PolicyVersion(number=1, hash=first.policy.hash)
    assert same(await Follower(store).fetch(second.policy), weights)
    third = await publisher.publish(2, nudged(weights), run="r", base=second.policy, ref="candidate")
    assert [m.number for m in await Follower(store).log("candidate")] == [2, 1, 0]
    assert third.kind == "delta"


@pytest.mark.parametrize("code", [0x7FC0, 0x7F80, 0xFF80])
async def test_weights_with_nan_or_infinity_leave_no_trace(code):
    store = MemoryStore()
    weights = nudged(model())
    weights["layer.w"].data.view(np.uint16)[17] = code
    with pytest.raises(BadWeights, match=r"layer\.w.*element 17"):
        await VersionPublisher(store).publish(0, weights, run="r", base=None, ref="candidate")
    assert not store.objects
    assert not store.links


async def test_an_anchor_is_published_after_so_many_deltas():
    store = MemoryStore()
    publisher = VersionPublisher(store, PublisherConfig(anchor_every=3))
    weights, base, versions = model(), None, []
    for number in range(9):
        done = await publisher.publish(number, weights, run="r", base=base, ref="candidate")
        versions.append((done, weights))
        base, weights = done.policy, nudged(weights)
    log = await Follower(store).log("candidate")
    assert [m.number for m in log] == list(range(8, -1, -1))
    assert [m.links for m in reversed(log)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert (
        "".join(done.kind[0] for done, _ in versions) == "fdddddddd"
    )  # who follows never fetches a full snapshot again
    done, weights = versions[8]
    assert done.stored > done.bytes
    assert same(await Follower(store).fetch(done.policy), weights)


@pytest.mark.parametrize("at", [4, 8])
async def test_a_version_with_a_full_snapshot_needs_nothing_from_before(at):
    store = MemoryStore()
    publisher = VersionPublisher(store, PublisherConfig(anchor_every=3))
    weights, base = model(), None
    for number in range(at):
        base = (await publisher.publish(number, weights, run="r", base=base, ref="candidate")).policy
        weights = nudged(weights)
    old = set(store.objects)
    policy = (await publisher.publish(at, weights, run="r", base=base, ref="candidate")).policy
    for name in old:
        del store.objects[name]
    assert same(await Follower(store).fetch(policy), weights)
    assert [m.number for m in await Follower(store).log("candidate")] == [at]


async def history(skips, length):
    store = MemoryStore()
    publisher = VersionPublisher(store, PublisherConfig(skips=skips, anchor_share=50.0))
    versions, base, weights = [], None, model()
    for number in range(length):
        base = (await publisher.publish(number, weights, run="r", base=base, ref="candidate")).policy
        versions.append((base, weights))
        weights = nudged(weights, 0.05)
    return store, versions


async def test_squashed_deltas_are_published_every_so_many_versions():
    store, versions = await history((2, 4), 13)
    number = {policy.hash: policy.number for policy, _ in versions}
    for manifest in await Follower(store).log("candidate"):
        at = manifest.number
        assert [number[route.base] for route in manifest.routes] == [at - s for s in (2, 4) if at and at % s == 0]
        for route in manifest.routes:
            apart = sum(m.payload_bytes for m in await Follower(store).log("candidate") if at - 4 < m.number <= at)
            assert 0 < route.bytes < apart


@pytest.mark.parametrize("have", range(12))
async def test_a_follower_behind_takes_the_cheapest_way_and_gets_the_same_bits(have):
    store, versions = await history((2, 4), 13)
    payloads = []

    class Counting(FaultyStore):
        async def get_range(self, hash, start, length):
            payloads.append(hash)
            return await super().get_range(hash, start, length)

    follower = Follower(Counting(store))
    assert same(await follower.fetch(versions[have][0]), versions[have][1])
    payloads.clear()
    assert same(await follower.fetch(versions[12][0]), versions[12][1])
    at, hops = 12, 0
    while at > have:  # as far back as a squashed delta from here goes without going past what is held
        at -= next(span for span in (4, 2, 1) if at % span == 0 and at - span >= have)
        hops += 1
    assert len(payloads) == hops


async def test_an_anchor_is_published_once_the_deltas_are_large():
    publisher = VersionPublisher(MemoryStore(), PublisherConfig(anchor_share=0.2))
    weights, base, kinds = model(), None, []
    for number in range(6):
        done = await publisher.publish(number, weights, run="r", base=base)
        kinds.append("f" if done.reason else "d")
        base, weights = done.policy, nudged(weights, 0.3)
    assert re.fullmatch("(fd{1,3}){1,2}fd{0,3}", "".join(kinds)), kinds
    assert done.changed is not None


async def test_a_restarted_publisher_takes_the_base_from_the_store():
    store = MemoryStore()
    old = model()
    first = await VersionPublisher(store).publish(0, old, run="r", base=None)
    new = nudged(old)
    second = await VersionPublisher(store).publish(1, new, run="r", base=first.policy)
    assert second.kind == "delta"
    assert same(await Follower(store).fetch(second.policy), new)


@pytest.mark.parametrize("on_disk", [False, True])
async def test_a_base_that_was_overwritten_in_memory_is_not_trusted(on_disk, tmp_path):
    store = MemoryStore()
    publisher = VersionPublisher(store, PublisherConfig(scratch=tmp_path if on_disk else None))
    weights = {name: WeightArray(a.dtype, a.shape, a.data.copy()) for name, a in model().items()}
    first = await publisher.publish(0, weights, run="r", base=None)
    weights["embed"].data.view(np.uint16)[::50] ^= 1  # a trainer that reuses its buffer
    second = await publisher.publish(1, weights, run="r", base=first.policy)
    assert second.kind == "delta"
    assert second.changed is not None
    assert second.changed > 0
    assert same(await Follower(store).fetch(second.policy), weights)


async def test_a_base_that_is_missing_or_damaged_gives_a_full_snapshot_that_says_so():
    store = MemoryStore()
    weights = model()
    never = PolicyVersion(number=0, hash="0" * 64)
    done = await VersionPublisher(store).publish(1, weights, run="r", base=never)
    assert done.kind == "full"
    assert "never published" in done.reason
    store.objects[done.manifest] = b"rotten"
    after = await VersionPublisher(store).publish(2, nudged(weights), run="r", base=done.policy)
    assert after.kind == "full"
    assert done.manifest in after.reason


async def test_publishing_a_version_again_repairs_its_ref(tmp_path):
    store = DirectoryStore(tmp_path)
    weights = model()
    done = await VersionPublisher(store).publish(0, weights, run="r", base=None, ref="candidate")
    path = tmp_path / "refs" / "version" / done.policy.hash
    for rotten in ("", "not a hash", "0" * 64):
        path.write_text(rotten)
        assert (await verify(store)).problems != []
        again = await VersionPublisher(store).publish(0, weights, run="r", base=None, ref="candidate")
        assert (again.policy, path.read_text().strip()) == (done.policy, done.manifest)
        assert (await verify(store, every=True)).problems == []


async def test_publishing_a_damaged_version_again_repairs_it():
    store = MemoryStore()
    weights = model()
    done = await VersionPublisher(store).publish(1, weights, run="r", base=None, ref="candidate")
    for name in list(store.objects):
        store.objects[name] = b"rotten"
        again = await VersionPublisher(store).publish(1, weights, run="r", base=None, ref="candidate")
        assert "damaged" in again.reason
        assert again.policy == done.policy
        assert (await verify(store, every=True)).problems == []


async def test_another_set_of_tensors_gives_a_full_snapshot():
    store = MemoryStore()
    publisher = VersionPublisher(store)
    first = await publisher.publish(0, model(), run="r", base=None)
    other = await publisher.publish(1, {"embed": bf16(3, 3)}, run="r", base=first.policy)
    assert (other.kind, other.changed) == ("full", None)
    assert set(await Follower(store).fetch(other.policy)) == {"embed"}


async def test_payloads_are_packed_into_few_objects():
    store = MemoryStore()
    publisher = VersionPublisher(store, PublisherConfig(object_bytes=4096))
    weights = {f"w{i}": bf16(32, 32) for i in range(40)}
    first = await publisher.publish(0, weights, run="r", base=None)
    assert 2 <= len(store.objects) <= 40 * 2048 // 4096 + 2
    before = len(store.objects)
    second = await publisher.publish(1, nudged(weights, 0.001), run="r", base=first.policy)
    assert len(store.objects) == before + 2  # one object of payloads and the manifest
    assert same(await Follower(store).fetch(first.policy), weights)
    assert (await Follower(store).resolve(f"version/{second.policy.hash}")) == second.policy


async def test_a_tensor_of_several_chunks_ships_only_the_chunk_that_changed():
    store = MemoryStore()
    publisher = VersionPublisher(store)
    data = RNG.integers(0, 256, CHUNK_ELEMENTS * 2 + 3, np.uint8)
    old = {"w": WeightArray("U8", (data.size,), data)}
    other = data.copy()
    other[CHUNK_ELEMENTS + 1] ^= 1
    new = {
        "w": WeightArray("U8", (data.size,), other),
    }
    first = await publisher.publish(0, old, run="r", base=None)
    second = await publisher.publish(1, new, run="r", base=first.policy)
    assert second.bytes < 3000
    chunks = (await Follower(store).log(f"version/{second.policy.hash}"))[0].tensors[0].chunks
    assert [c.codec for c in chunks] == ["equal", "xor-planes-zstd", "equal"]
    assert same(await Follower(store).fetch(second.policy), new)


async def test_scalars_and_empty_tensors_survive():
    store = MemoryStore()
    weights = {
        "s": WeightArray("F32", (), np.ones(1, "<f4").view(np.uint8)),
        "e": WeightArray("BF16", (0, 4), np.zeros(0, np.uint8)),
    }
    first = await VersionPublisher(store).publish(0, weights, run="r", base=None)
    assert same(await Follower(store).fetch(first.policy), weights)
    changed = {**weights, "s": WeightArray("F32", (), np.zeros(1, "<f4").view(np.uint8))}
    second = await VersionPublisher(store).publish(1, changed, run="r", base=first.policy)
    assert second.kind == "delta"
    assert same(await Follower(store).fetch(second.policy), changed)


async def test_two_publishers_that_race_for_one_ref_give_one_conflict():
    store = MemoryStore()
    first = await VersionPublisher(store).publish(0, model(), run="r", base=None, ref="candidate")
    racers = [
        VersionPublisher(store).publish(1, model(), run=f"r{i}", base=first.policy, ref="candidate") for i in range(2)
    ]
    done = await asyncio.gather(*racers, return_exceptions=True)
    won = [d for d in done if not isinstance(d, BaseException)]
    assert [type(d) for d in done if isinstance(d, BaseException)] == [Conflict]
    assert store.links["candidate"] == won[0].policy.hash
    assert (await verify(store, every=True)).problems == []


async def test_two_publishers_of_the_same_weights_agree():
    store = MemoryStore()
    weights = model()
    done = await asyncio.gather(*(VersionPublisher(store).publish(0, weights, run="r", base=None) for _ in range(3)))
    assert len({d.policy for d in done}) == 1


async def test_the_base_does_not_advance_when_the_ref_did_not_move():
    inner = MemoryStore()
    old = model()
    first = await VersionPublisher(inner).publish(0, old, run="r", base=None, ref="candidate")
    new = nudged(old)
    writes = FaultyStore(MemoryStore())
    await VersionPublisher(writes).publish(0, old, run="r", base=None, ref="candidate")
    for fail_put in range(1, 5):  # payloads, manifest, version ref, candidate
        store = FaultyStore(inner, fail_put=fail_put)
        publisher = VersionPublisher(store)
        with pytest.raises(StorageFull):
            await publisher.publish(1, new, run="r", base=first.policy, ref="candidate")
        assert inner.links["candidate"] == first.policy.hash
        assert (await verify(inner, every=True)).problems == []
        newer = nudged(new)
        done = await publisher.publish(2, newer, run=f"r{fail_put}", base=first.policy, ref="candidate")
        assert same(await Follower(inner).fetch(done.policy), newer)
        await inner.move_ref("candidate", done.policy.hash, first.policy.hash)


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": -1}, {"run": ""}, {"run": "a\nb"}, {"meta": {"x": object()}}, {"meta": {"x": float("nan")}},
        {"meta": {"x": "\ud800"}}, {"ref": "../live"},
    ],
)  # fmt: skip
async def test_arguments_of_the_wrong_form_are_refused_and_named(wrong):
    store = MemoryStore()
    asked = {"number": 0, "run": "r", "meta": None, "ref": None, **wrong}
    number = asked.pop("number")
    with pytest.raises(BadRequest) as caught:
        await VersionPublisher(store).publish(number, model(), base=None, **asked)
    assert next(iter(wrong)) in str(caught.value.field)
    assert not store.links


class WritesMeanwhile(MemoryStore):
    """A store whose first look for the version is the moment at which somebody writes to the arrays that are published."""

    def __init__(self, codes):
        super().__init__()
        self.codes = codes

    async def read_ref(self, ref):
        self.codes[3] ^= 1
        return await super().read_ref(ref)


async def test_arrays_that_change_while_they_are_published_are_refused_and_never_named():
    weights = {"w": WeightArray("BF16", (64,), np.full(64, 0x3F80, np.uint16).view(np.uint8))}
    store = WritesMeanwhile(weights["w"].data.view(np.uint16))
    with pytest.raises(BadWeights, match="'w' chunk 0 changed while it was being published"):
        await VersionPublisher(store).publish(0, weights, run="r", base=None)
    assert not store.links
