from contextlib import suppress
from itertools import count

import numpy as np
import pytest

from ostinato.core.errors import BadConfig, Conflict, Corrupt, NotFound, Unavailable
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.keep.gc import CollectConfig, Node, Rules, collect, marked, starts, versions_of
from ostinato.weights.keep.pins import held, hold, let_go, pin, unpin
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.interface import ListedRef
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.content import hash_of, version_ref, weights_root
from ostinato.weights.version.manifest import Route, stored

HOUR, DAY = 3600, 86_400
FEW = CollectConfig(keep=1)


def model(number: int):
    codes = np.arange(3000, dtype=np.uint16)
    codes[: 5 * (number + 1)] += number + 1
    return {"a": WeightArray("BF16", (3000,), codes.view(np.uint8))}


async def history(store, count=9, anchor_every=3):
    """Versions v0, v1, ... a full snapshot after every three deltas; `candidate` is at the last."""
    publisher = VersionPublisher(store, PublisherConfig(anchor_every=anchor_every, anchor_share=100, skips=()))
    made = []
    for number in range(count):
        base = made[-1] if made else None
        made.append((await publisher.publish(number, model(number), run="r", base=base, ref="candidate")).policy)
    return made


async def fetched(store, policy):
    return weights_root(await Follower(store).fetch(policy)) == policy.hash


async def assert_sound(store):
    assert (await verify(store, every=True)).problems == []


def numbers(policies):
    return sorted(policy.number for policy in policies)


async def test_what_nothing_needs_goes_and_what_a_kept_delta_builds_on_stays():
    store = MemoryStore()
    made = await history(store)  # full: v0, v4, v8
    await store.move_ref("live", None, made[6].hash)
    before = dict(store.objects)
    store.now += 2 * DAY
    found = await collect(store, FEW)
    assert numbers(found.gone) == [0, 1, 2, 3, 7]
    assert {p.number: r for p, r in found.reasons.items()} == {
        8: ("candidate", "newest 1"),
        6: ("live",),
        5: ("a later version builds on it",),
        4: ("a later version builds on it",),
    }
    for policy in (made[4], made[5], made[6], made[8]):
        assert await fetched(store, policy)
    await assert_sound(store)
    with pytest.raises(NotFound):
        await Follower(store).fetch(made[7])
    lost = before.keys() - store.objects.keys()
    assert found.deleted.objects == len(lost) == 10
    assert found.deleted.bytes == sum(len(before[hash]) for hash in lost)
    assert found.kept.objects == len(store.objects) == 12
    assert found.kept.bytes == sum(map(len, store.objects.values()))
    assert [m.number for m in await Follower(store).log("candidate")] == [8]  # history before it is gone, quietly


async def test_a_dry_run_says_the_same_and_deletes_nothing():
    store = MemoryStore()
    await history(store)
    await hold(store, "gone", (await Follower(store).resolve("candidate")).hash)
    store.now += 2 * DAY
    objects, links = dict(store.objects), dict(store.links)
    said = await collect(store, FEW, dry_run=True)
    assert (store.objects, store.links) == (objects, links)
    done = await collect(store, FEW)
    assert (said.gone, said.leases, said.deleted, said.reasons) == (done.gone, done.leases, done.deleted, done.reasons)
    assert done.leases == ("lease/gone",)
    assert done.deleted.objects > 0


async def test_nothing_younger_than_the_grace_goes():
    store = MemoryStore()
    made = await history(store, 3)
    store.now += DAY - 1
    await history(store, 2)  # v0 and v1 were published before: nothing new
    orphan = await store.put(b"what a publisher at work has just written")
    found = await collect(store, FEW)
    assert not found.gone
    assert found.deleted.objects == 0
    assert found.young.objects == 1
    store.now += DAY
    assert (await collect(store, FEW)).deleted.objects == 1
    assert not await store.has(orphan)
    assert await fetched(store, made[1])  # candidate


async def test_newest_is_by_number_and_roots_of_the_caller_stay():
    store = MemoryStore()
    made = await history(store, 9, anchor_every=1)
    await store.move_ref("candidate", made[8].hash, made[0].hash)  # rolled back
    store.now += 2 * DAY
    found = await collect(store, CollectConfig(keep=2), roots=[made[2].hash, hash_of(b"elsewhere")])
    assert numbers(found.reasons) == [0, 2, 6, 7, 8]
    assert "released" in found.reasons[made[2]]
    assert found.missing == (hash_of(b"elsewhere"),)


async def with_routes(store, anchored: bool):
    """v0 full <- v1 <- v2 <- v3 <- v4; v3 also has a full snapshot if `anchored`; v4 has a squashed delta from v0."""
    made = await history(store, 5, anchor_every=99)
    manifests = Manifests(store)
    extra: dict[str, set[str]] = {}
    chain = [(await manifests.of_root(policy.hash)) for policy in made]
    full = None
    if anchored:
        elsewhere = MemoryStore()
        done = await VersionPublisher(elsewhere).publish(3, model(3), run="r", base=None)
        manifest = await Manifests(elsewhere).read(done.manifest)
        for data in elsewhere.objects.values():
            await store.put(data)
        full, extra["full"] = done.manifest, {done.manifest, *manifest.objects()}
        main = chain[3][1].model_copy(
            update={
                "routes": (Route(manifest=full, base=None, bytes=manifest.payload_bytes),),
                "links": 0,
                "chain_bytes": 0,
                "anchor": full,
            }
        )
        chain[3] = (await store.put(stored(main)), main)
        await store.move_ref(version_ref(made[3].hash), store.links[version_ref(made[3].hash)], chain[3][0])
    squashed = chain[4][1].model_copy(update={"parent": chain[0][0], "meta": {"squashed": 4}})
    route = await store.put(stored(squashed))
    last = chain[4][1].model_copy(
        update={
            "parent": chain[3][0],
            "links": 1 if anchored else 4,
            "anchor": full or chain[0][0],
            "routes": (Route(manifest=route, base=made[0].hash, bytes=squashed.payload_bytes),),
        }
    )
    data = stored(last)
    await store.move_ref(version_ref(made[4].hash), chain[4][0], await store.put(data))
    extra["squashed"] = {route, *squashed.objects()}
    return made, chain, extra


@pytest.mark.parametrize("anchored", [True, False])
async def test_routes_stay_and_the_chain_is_cut_where_a_version_has_a_full_snapshot(anchored):
    store = MemoryStore()
    made, chain, extra = await with_routes(store, anchored)
    store.now += 2 * DAY
    found = await collect(store, FEW)
    assert numbers(found.gone) == ([0, 1, 2] if anchored else [])
    for needed in extra.values():
        assert needed <= store.objects.keys()
    for (hash, manifest), policy in zip(chain[:3], made[:3], strict=True):
        assert (hash in store.objects) is not anchored
        assert (version_ref(policy.hash) in store.links) is not anchored
        assert (manifest.objects().keys() <= store.objects.keys()) is not anchored
    await assert_sound_history(store, made[4])


async def assert_sound_history(store, policy):
    """By the definition of a complete version, spelled out apart from the code under test."""
    manifests = Manifests(store)
    at, manifest = await manifests.of_root(policy.hash)
    while True:
        for hash in (at, *(route.manifest for route in manifest.routes)):
            for name in (await manifests.read(hash)).objects():
                await store.get(name)
        if manifest.links == 0:
            return
        at = manifest.parent
        manifest = await manifests.read(at)


async def test_a_payload_that_is_also_a_manifest_is_still_followed():
    policy = None
    nodes = {
        "child": Node(policy, "parent", (), frozenset({"parent", "x"})),
        "parent": Node(policy, None, ("route",), frozenset({"y"})),
        "route": Node(policy, "before", (), frozenset({"z"})),
    }
    assert marked(nodes, ["child"]) == {"child", "parent", "route", "x", "y", "z"}


def test_where_marking_starts():
    refs = {
        "live": ListedRef("A", 1e9, ""),
        "pin/a": ListedRef("B", 1e9, ""),
        "lease/one": ListedRef("C", 3599, ""),
        "lease/two": ListedRef("D", 3601, ""),
        "version/A": ListedRef("a", 1e9, ""),
        "version/D": ListedRef("d", 10, ""),
        "version/E": ListedRef("e", 1e9, ""),
    }
    versions = versions_of(refs) | {"B": "b", "C": "c"}
    found = starts(refs, versions, {"a": 5, "e": 6, "d": 7}, Rules(2, 100, 3600, ("E", "F")))
    assert found.reasons == {
        "a": ["live"],
        "b": ["pin/a"],
        "c": ["lease/one"],
        "d": ["young", "newest 2"],
        "e": ["newest 2", "released"],
    }
    assert found.missing == ["F"]


async def test_pins_hold_until_they_are_taken_away():
    store = MemoryStore()
    made = await history(store, 9)
    assert await pin(store, "paper", made[2].hash) is None
    store.now += 2 * DAY
    assert made[2] in (await collect(store, FEW)).reasons
    assert await fetched(store, made[2])
    assert await pin(store, "paper", made[1].hash) == made[2].hash
    with pytest.raises(NotFound, match="paper"):
        await unpin(store, "papre")
    with pytest.raises(NotFound, match="not in the weight store"):
        await pin(store, "paper", hash_of(b"never"))
    assert store.links["pin/paper"] == made[1].hash
    assert await unpin(store, "paper") == made[1].hash
    assert numbers((await collect(store, FEW)).gone) == [0, 1, 2]
    await assert_sound(store)


async def test_a_lease_holds_while_it_is_renewed_and_expires_by_the_stores_clock():
    store = MemoryStore()
    made = await history(store, 9)
    store.now += 2 * DAY
    await hold(store, "gateway-1", made[2].hash)
    for _ in range(3):
        store.now += 3000
        await hold(store, "gateway-1", made[2].hash)  # the same version: only young again
        assert made[2] in (await collect(store, FEW)).reasons
    store.now += 3601
    found = await collect(store, FEW)
    assert numbers(found.gone) == [0, 1, 2]
    assert found.leases == ()  # expired, but younger than the grace
    with pytest.raises(NotFound, match="not in the weight store"):
        await hold(store, "gateway-1", made[2].hash)
    assert "lease/gateway-1" not in store.links
    await hold(store, "gateway-1", made[8].hash)
    await let_go(store, "gateway-1")
    await let_go(store, "gateway-1")
    async with held(store, "publisher", made[8].hash):
        assert store.links["lease/publisher"] == made[8].hash
    assert not any(ref.startswith("lease/") for ref in store.links)


@pytest.mark.parametrize("jump", [-10 * DAY, -1, HOUR, 10 * DAY, 3650 * DAY])
async def test_a_clock_that_jumps_costs_nothing_that_is_needed(jump):
    """Backwards everything is new. Forwards leases expire and what is unneeded is old: never what is needed."""
    store = MemoryStore()
    store.now = 20 * DAY
    made = await history(store, 9)
    await store.move_ref("live", None, made[5].hash)
    await pin(store, "p", made[2].hash)
    store.now += jump
    found = await collect(store, FEW)
    assert bool(found.gone) is (jump > DAY)
    for policy in (made[2], made[5], made[8]):
        assert await fetched(store, policy)
    await assert_sound(store)


@pytest.mark.parametrize("damage", ["missing", "rotten"])
@pytest.mark.parametrize("number", [1, 6, 8], ids=["old", "base of a kept one", "newest"])
async def test_a_manifest_that_cannot_be_read_stops_it_before_anything_is_deleted(number, damage):
    store = MemoryStore()
    made = await history(store, 8)
    await store.move_ref("live", None, made[6].hash)
    made += [(await VersionPublisher(store).publish(8, model(8), run="r", base=made[7], ref="candidate")).policy]
    store.now += 2 * DAY
    hash = store.links[version_ref(made[number].hash)]
    if damage == "missing":
        del store.objects[hash]
    else:
        store.objects[hash] = b"{}"
    objects, links = dict(store.objects), dict(store.links)
    with pytest.raises(Corrupt, match=hash) as caught:
        await collect(store, FEW)
    assert "Nothing was deleted" in str(caught.value)
    assert (store.objects, store.links) == (objects, links)


async def test_a_ref_to_a_version_that_is_gone_stops_it():
    store = MemoryStore()
    await history(store, 9)
    await store.move_ref("live", None, hash_of(b"gone"))
    store.now += 2 * DAY
    objects = dict(store.objects)
    with pytest.raises(Corrupt, match=hash_of(b"gone")):
        await collect(store, FEW)
    assert store.objects == objects


async def test_a_grace_that_is_too_short_for_the_store_is_refused():
    store = MemoryStore()
    store.renews_s = 3600.0
    with pytest.raises(BadConfig, match="at least 2,"):
        await collect(store, CollectConfig(grace_hours=1))
    await collect(store, CollectConfig(grace_hours=2))


async def test_it_says_how_far_it_is():
    store = MemoryStore()
    await history(store, 9)
    store.now += 2 * DAY
    steps = []
    found = await collect(store, FEW, on_step=steps.append)
    last = {step.stage: step for step in steps}
    assert list(last) == ["listing objects", "reading manifests", "deleting manifests", "deleting objects"]
    assert last["deleting manifests"].done == last["deleting manifests"].total == len(found.gone) + 1  # v4 has two
    assert last["deleting manifests"].bytes + last["deleting objects"].bytes == found.deleted.bytes
    assert last["listing objects"].bytes == found.kept.bytes + found.deleted.bytes


async def test_a_store_that_fails_on_the_way_gives_back_the_versions_refs():
    store = MemoryStore()
    made = await history(store, 9)
    store.now += 2 * DAY
    dead, calls = [version_ref(made[number].hash) for number in range(8)], []
    listed = store.list_refs

    async def second():
        calls.append(1)
        if len(calls) == 2:
            assert not any(ref in store.links for ref in dead)
            raise Unavailable("no answer")
        return await listed()

    store.list_refs = second
    with pytest.raises(Unavailable):
        await collect(store, FEW)
    assert all(ref in store.links for ref in dead)
    await assert_sound(store)


async def test_a_store_that_fails_while_refs_are_deleted_leaves_none_in_use_without_its_version():
    store = MemoryStore()
    made = await history(store, 9)
    store.now += 2 * DAY
    delete, deleted = store.delete_ref, list[str]()

    async def failing(ref, old, stamp=None):
        if deleted:
            raise Unavailable("no answer")
        await delete(ref, old, stamp)
        deleted.append(ref)
        await store.move_ref("pin/paper", None, old_root(ref))  # by a holder that saw its version just before

    def old_root(ref):
        return ref.removeprefix("version/")

    store.delete_ref = failing
    with pytest.raises(Unavailable):
        await collect(store, FEW)
    store.delete_ref = delete
    pinned = next(policy for policy in made if version_ref(policy.hash) == deleted[0])
    assert await fetched(store, pinned)
    await collect(store, FEW)
    assert await fetched(store, pinned)


async def test_whichever_call_the_store_refuses_the_next_collection_goes_on(monkeypatch):
    for nth in count(1):
        store, calls = MemoryStore(), [0]
        made = await history(store, 9)
        await store.move_ref("live", None, made[6].hash)
        store.now += 2 * DAY

        def refused(real, calls=calls, nth=nth):
            async def call(*args, **more):
                calls[0] += 1
                if calls[0] == nth:
                    raise Unavailable("status 500")
                return await real(*args, **more)

            return call

        with monkeypatch.context() as away:
            for name in ("get", "refs", "list_refs", "read_ref", "move_ref", "delete_ref", "delete"):
                away.setattr(store, name, refused(getattr(store, name)))
            with suppress(Unavailable):
                await collect(store, FEW)
        for policy in (made[6], made[8]):
            assert await fetched(store, policy)
        found = await collect(store, FEW)
        await assert_sound(store)
        assert {policy.number for policy in found.reasons} >= {6, 8}
        if calls[0] < nth:
            break
    assert nth > 20


async def test_a_holders_name_that_many_share_is_said_so():
    class Restless(MemoryStore):
        async def move_ref(self, ref, old, new):
            if ref.startswith("lease/"):
                raise Conflict("again")
            await super().move_ref(ref, old, new)

    store = Restless()
    made = await history(store, 1)
    with pytest.raises(Conflict, match="a different name"):
        await hold(store, "same", made[0].hash)


@pytest.mark.parametrize("take", [pin, hold])
async def test_a_version_that_goes_while_it_is_taken_is_said_so(take):
    class Collecting(MemoryStore):
        async def move_ref(self, ref, old, new):
            await super().move_ref(ref, old, new)
            if ref.endswith("/x") and new == made[1].hash:
                del self.links[version_ref(new)]

    store, made = Collecting(), []
    made += await history(store, 2)
    for before in (None, made[0].hash):
        if before:
            await store.move_ref(version_ref(made[1].hash), None, hash_of(b"published again"))
            await take(store, "x", before)
        with pytest.raises(NotFound, match=made[1].hash):
            await take(store, "x", made[1].hash)
        held_ = {value for ref, value in store.links.items() if ref.endswith("/x")}
        assert held_ == ({before} if before and take is pin else set())
