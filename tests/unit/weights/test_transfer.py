import asyncio
import contextlib

import numpy as np
import pytest
from tests.fakes.faults import FaultyStore, dropped, flipped, truncated

from ostinato.core.errors import BadRequest, Conflict, Corrupt, NotFound, OstinatoError, StorageFull
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore, WatchedStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.keep.transfer import transfer
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.content import hash_of, version_ref
from ostinato.weights.version.manifest import Route, parse, plain, stored

CONFIG = PublisherConfig(object_bytes=4096, anchor_every=3, anchor_share=5.0)


def model(number: int):
    rng = np.random.default_rng(0)
    codes = (rng.normal(0, 0.1, 6000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes[: 40 * number] ^= 1
    return {name: WeightArray("BF16", (3000,), codes[i::2].copy().view(np.uint8)) for i, name in enumerate("ab")}


async def published(count: int, store=None, base=None):
    """A store with versions 0 to count - 1, the last at ref live; and their policies."""
    store, policies = store or MemoryStore(), []
    publisher = VersionPublisher(store, CONFIG)
    for number in range(count):
        base = (await publisher.publish(number, model(number), run="r", base=base, ref="live")).policy
        policies.append(base)
    return store, policies


async def with_routes(store, policies):
    """Give the last version a full snapshot and a squashed delta over all versions, as two routes."""
    scratch = MemoryStore()
    tip = policies[-1]
    full = await VersionPublisher(scratch, CONFIG).publish(tip.number, model(tip.number), run="r", base=None)
    squashed = MemoryStore()
    squashed.objects |= store.objects
    await squashed.move_ref(version_ref(policies[0].hash), None, (await store.refs())[version_ref(policies[0].hash)])
    jump = await VersionPublisher(squashed, CONFIG).publish(tip.number, model(tip.number), run="r", base=policies[0])
    store.objects |= scratch.objects | squashed.objects
    hash, manifest = await Manifests(store).of_root(tip.hash)
    routes = (
        Route(manifest=full.manifest, base=None, bytes=full.bytes),
        Route(manifest=jump.manifest, base=policies[0].hash, bytes=jump.bytes),
    )
    richer = manifest.model_copy(update={"routes": routes, "links": 0, "chain_bytes": 0, "anchor": full.manifest})
    new = await store.put(stored(richer))
    await store.move_ref(version_ref(tip.hash), hash, new)
    return new, routes


def incomplete(store: MemoryStore, routes=()) -> list[str]:
    """What a manifest in the store names and the store lacks, by an own reading of the rules; a route needs no parent."""
    manifests = {}
    for name, data in store.objects.items():
        with contextlib.suppress(OstinatoError):  # payloads
            manifests[name] = parse(plain(data))
    others = {r.manifest for r in (*routes, *(r for m in manifests.values() for r in m.routes))}
    lost = [f"{ref} needs {value}" for ref, value in store.links.items() if "/" in ref and value not in manifests]
    for name, manifest in manifests.items():
        names = [*manifest.objects(), *(route.manifest for route in manifest.routes)]
        names += [str(manifest.parent)] if manifest.links and name not in others else []
        lost += [f"{name} needs {need}" for need in names if need not in store.objects]
    return lost


async def test_a_damaged_ref_of_the_version_in_the_target_is_written_again(tmp_path):
    source, policies = await published(2)
    target = DirectoryStore(tmp_path)
    await transfer(source, target, "live")
    damaged = tmp_path / "refs" / version_ref(policies[-1].hash)
    damaged.write_text("no hash")
    done = await transfer(source, target, "live")
    assert await target.read_ref(version_ref(policies[-1].hash)) == done.manifest


async def test_a_version_arrives_with_its_chain_and_once():
    source, policies = await published(3)
    target, seen = MemoryStore(), []
    done = await transfer(source, target, "live", ref="mirror", on_bytes=lambda *now: seen.append(now))
    assert done.policy == policies[2]
    assert await target.refs() == {"mirror": policies[2].hash, version_ref(policies[2].hash): done.manifest}
    assert (await Follower(target).fetch(policies[2]))["a"].data.tobytes() == model(2)["a"].data.tobytes()
    assert (await verify(target, every=True)).problems == []
    assert (done.objects, done.bytes) == (len(target.objects), sum(map(len, target.objects.values())))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0
    again = await transfer(source, target, "live", ref="mirror")
    assert (again.objects, again.bytes) == (0, 0)
    assert again.skipped == seen[-1][1]


async def test_a_later_version_brings_only_what_is_new():
    source, policies = await published(3)
    target = MemoryStore()
    await transfer(source, target, policies[1].hash)
    watched = WatchedStore(source)
    done = await transfer(watched, target, "live", parallel=2)
    assert done.objects == len(source.objects) - (len(target.objects) - done.objects)
    payloads = {name for name in source.objects if not _is_manifest(source, name)}
    assert sum(watched.gets[name] for name in payloads) == done.objects - 1
    assert watched.most <= 2


async def test_what_lies_before_a_full_snapshot_need_not_exist():
    source, policies = await published(6)
    hash, manifest = await Manifests(source).of_root(policies[4].hash)
    assert (manifest.kind, manifest.links) == ("delta", 0)  # with a full snapshot among its routes
    del source.objects[manifest.parent]
    target = MemoryStore()
    await transfer(source, target, "live", ref="live")
    assert incomplete(target) == []
    assert hash in target.objects
    assert (await Follower(target).fetch(policies[5]))["b"].data.tobytes() == model(5)["b"].data.tobytes()


async def test_routes_travel_with_their_version():
    source, policies = await published(4)
    hash, routes = await with_routes(source, policies)
    target = MemoryStore()
    done = await transfer(source, target, "live")
    assert done.manifest == hash
    assert all(route.manifest in target.objects for route in routes)
    assert incomplete(target, routes) == []
    parent = (await Manifests(source).read(hash)).parent
    assert parent not in target.objects  # the full route makes it needless
    for route in routes:
        lost = MemoryStore()
        lost.objects |= source.objects
        lost.links |= source.links
        del lost.objects[route.manifest]
        with pytest.raises(NotFound, match=route.manifest):
            await transfer(lost, MemoryStore(), "live")


class FaultyTarget(FaultyStore):
    async def has(self, hash):
        return await self.inner.has(hash)

    async def refs(self):
        return await self.inner.refs()


async def test_refused_at_each_write_nothing_incomplete_is_named_and_a_second_call_goes_on():
    source, policies = await published(4)
    _, routes = await with_routes(source, policies)
    nth, total = 0, None
    while True:
        nth += 1
        target = MemoryStore()
        try:
            await transfer(source, FaultyTarget(target, fail_put=nth), "live", ref="live", parallel=3)
            break
        except StorageFull:
            assert incomplete(target, routes) == []
        kept = len(target.objects)
        done = await transfer(source, target, "live", ref="live")
        assert kept + done.objects == len(target.objects)
        assert total in (None, len(target.objects))
        total = len(target.objects)
        assert incomplete(target, routes) == []
        assert (await Follower(target).resolve("live")) == policies[-1]
    assert nth - 1 == total + 2  # two refs


@pytest.mark.parametrize(("damage", "error"), [(flipped, Corrupt), (truncated, Corrupt), (dropped, NotFound)])
async def test_damaged_at_each_read_it_is_refused_and_not_named(damage, error):
    source, _ = await published(2)
    nth = repaired = 0
    while True:
        nth += 1
        target = MemoryStore()
        faulty = FaultyStore(source, fail_get=nth, damage=damage)
        (refused,) = await asyncio.gather(transfer(faulty, target, "live", ref="live"), return_exceptions=True)
        if faulty.gets < nth:
            break
        if not isinstance(refused, Exception):  # a damaged manifest was asked for again
            repaired += 1
            assert (incomplete(target), target.links["live"]) == ([], source.links["live"])
            continue
        assert isinstance(refused, error)
        assert target.links == {}
        assert incomplete(target) == []
    assert nth > len(source.objects)
    assert repaired == (0 if damage is dropped else 2)


async def test_a_ref_that_moved_meanwhile_stays_where_it_is():
    source, policies = await published(2)
    target = MemoryStore()

    def move(done, total):
        target.links["live"] = hash_of(b"other")

    with pytest.raises(Conflict, match="live"):
        await transfer(source, target, "live", ref="live", on_bytes=move)
    assert target.links["live"] == hash_of(b"other")
    assert (await Follower(target).fetch(policies[1]))["a"].data.nbytes == 6000


async def test_a_chain_or_route_that_contradicts_itself_is_refused():
    source, policies = await published(3)
    hash, routes = await with_routes(source, policies)
    manifest = await Manifests(source).read(hash)
    wrong = Route(manifest=(await source.refs())[version_ref(policies[0].hash)], base=None, bytes=1)
    plain_ = (await Manifests(source).read((await source.refs())[version_ref(policies[1].hash)])).model_copy(
        update={"links": 2}
    )
    for bad in (manifest.model_copy(update={"routes": (wrong,), "anchor": wrong.manifest}), plain_):
        name = await source.put(stored(bad))
        target = MemoryStore()
        with pytest.raises(Corrupt, match=r"route|links"):
            await transfer(source, target, name)
        assert target.links == {}
    assert len(routes) == 2


async def test_an_object_that_is_shorter_than_its_manifest_says_is_refused():
    source, policies = await published(1)
    _, manifest = await Manifests(source).of_root(policies[0].hash)
    first, *rest = manifest.tensors
    beyond = first.chunks[0].model_copy(update={"offset": 1 << 20})
    tensors = (first.model_copy(update={"chunks": (beyond, *first.chunks[1:])}), *rest)
    name = await source.put(stored(manifest.model_copy(update={"tensors": tensors})))
    target = MemoryStore()
    with pytest.raises(Corrupt, match=r"has \d+ bytes"):
        await transfer(source, target, name)
    assert target.links == {}


async def test_what_does_not_exist_is_not_found():
    source, _ = await published(1)
    for version, error in (("nothing", NotFound), (hash_of(b"x"), NotFound), ("../x", BadRequest)):
        with pytest.raises(error):
            await transfer(source, MemoryStore(), version)
    with pytest.raises(BadRequest, match="ref"):
        await transfer(source, MemoryStore(), "live", ref="A B")


def _is_manifest(store: MemoryStore, name: str) -> bool:
    try:
        parse(plain(store.objects[name]))
    except OstinatoError:
        return False
    return True
