import asyncio
import json

import numpy as np
import pytest
from safetensors import deserialize, safe_open
from tests.deadlines import PATIENT_S
from tests.fakes.faults import FaultyDisk, FaultyStore, dropped, flipped, truncated

from ostinato.core.errors import Corrupt, NotFound, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore, WatchedStore
from ostinato.weights.follow.export import files_beside
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.follow.journal import Journal, JournalEntry, Version
from ostinato.weights.keep.fsck import verify
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.version.content import version_ref, weights_root
from ostinato.weights.version.manifest import canonical, plain

RNG = np.random.default_rng(11)


def model():
    codes = (RNG.normal(0, 0.1, 2048).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {
        "w": WeightArray("BF16", (64, 32), codes.view(np.uint8)),
        "n": WeightArray("F32", (2,), np.ones(2, "<f4").view(np.uint8)),
    }


def nudged(weights):
    codes = weights["w"].data.view(np.uint16).copy()
    codes[RNG.choice(codes.size, 20, replace=False)] ^= 1
    return {**weights, "w": WeightArray("BF16", (64, 32), codes.view(np.uint8))}


async def chain(store, length, **config):
    """Publish `length` versions; returns [(policy, weights)], the last at ref live."""
    publisher = VersionPublisher(store, PublisherConfig(**config))
    weights, base, found = model(), None, []
    for number in range(length):
        done = await publisher.publish(number, weights, run="r", base=base, ref="live")
        found.append((done.policy, weights))
        base, weights = done.policy, nudged(weights)
    return found


async def test_a_follower_that_keeps_up_reads_only_the_new_link():
    inner = MemoryStore()
    versions = await chain(inner, 12)
    store = FaultyStore(inner)
    follower = Follower(store)
    await follower.fetch(versions[10][0])
    before = store.gets
    await follower.fetch(versions[11][0])
    assert store.gets == before + 2  # the manifest and the payloads
    await follower.fetch(versions[11][0])
    assert store.gets == before + 2


async def test_refs_may_hold_a_root_or_a_manifest_hash():
    store = MemoryStore()
    (policy, _), *_ = await chain(store, 1)
    await store.move_ref("canary", None, store.links[version_ref(policy.hash)])
    follower = Follower(store)
    assert await follower.resolve("live") == await follower.resolve("canary") == policy
    assert await follower.resolve("control") is None


async def test_fetched_weights_cannot_be_written_to():
    store = MemoryStore()
    versions = await chain(store, 2)
    fetched = await Follower(store).fetch(versions[1][0])
    with pytest.raises(ValueError, match="read-only"):
        fetched["w"].data[0] = 1


@pytest.mark.parametrize("damage", [truncated, flipped])
async def test_whichever_read_arrives_damaged_it_is_asked_for_again(damage):
    inner = MemoryStore()
    versions = await chain(inner, 4)
    policy, weights = versions[-1]
    count = FaultyStore(inner)
    await Follower(count).fetch(policy)
    assert count.gets == 8
    for nth in range(1, count.gets + 1):
        store = FaultyStore(inner, fail_get=nth, damage=damage)
        assert (await Follower(store).fetch(policy))["w"].data.tobytes() == weights["w"].data.tobytes()
        assert count.gets < store.gets <= count.gets + 2  # the manifest, or the damaged payloads alone


async def test_whichever_read_finds_nothing_the_fetch_is_refused_by_name_and_the_next_succeeds():
    inner = MemoryStore()
    versions = await chain(inner, 4)
    policy, weights = versions[-1]
    for nth in range(1, 9):
        follower = Follower(FaultyStore(inner, fail_get=nth, damage=dropped))
        with pytest.raises((Corrupt, NotFound), match=r"object|manifest"):
            await follower.fetch(policy)
        assert (await follower.fetch(policy))["w"].data.tobytes() == weights["w"].data.tobytes()


async def test_each_rotten_object_is_named_and_what_does_not_need_it_still_loads():
    store = MemoryStore()
    versions = await chain(store, 3, anchor_every=1)  # full, delta, delta and full
    whole, counts = dict(store.objects), set[int]()
    for name in whole:
        store.objects = {**whole, name: flipped(whole[name])}
        loaded = 0
        for policy, _ in versions:
            try:
                await Follower(store).fetch(policy)
                loaded += 1
            except Corrupt as error:
                assert name in str(error)  # noqa: PT017 (some versions load, some do not)
        counts.add(loaded)
        findings = await verify(store, every=True)
        assert findings.problems
        assert all(name in problem for problem in findings.problems)
    assert counts == {1, 2, 3}  # with either the delta or the full snapshot of the last one damaged, the other is taken
    store.objects = whole
    assert (await verify(store)).problems == []


async def test_old_weights_stay_in_the_follower_when_the_new_ones_are_damaged():
    store = MemoryStore()
    (old, weights), (new, _) = await chain(store, 2)
    follower = Follower(store)
    kept = await follower.fetch(old)
    manifest = (await follower.log(f"version/{new.hash}"))[0]
    (payloads,) = manifest.objects()
    store.objects[payloads] = flipped(store.objects[payloads])
    with pytest.raises(Corrupt, match=payloads):
        await follower.fetch(new)
    assert await follower.fetch(old) is kept
    assert weights_root(kept) == weights_root(weights)


async def test_a_manifest_that_changes_its_meaning_on_the_way_is_refused():
    inner = MemoryStore()
    policy, _ = (await chain(inner, 1))[0]

    class Lying(FaultyStore):
        async def get(self, hash):
            return plain(await self.inner.get(hash)).replace(b'"number":0', b'"number":9')

    with pytest.raises(Corrupt, match="does not match its hash"):
        await Follower(Lying(inner)).fetch(policy)


async def test_a_chunk_said_to_be_unchanged_must_have_the_hash_it_had():
    """A forged manifest, sound in itself (root recomputed, canonical), that claims other weights without sending any."""
    store = MemoryStore()
    _, (new, _) = await chain(store, 2)
    document = json.loads(plain(store.objects[store.links[version_ref(new.hash)]]))
    for tensor in document["tensors"]:
        for chunk in tensor["chunks"]:
            chunk.update(codec="equal", object=None, payload=None, offset=0, length=0)
    document.update(payload_bytes=0, chain_bytes=0)
    store.links[version_ref(new.hash)] = await store.put(canonical(document))
    with pytest.raises(Corrupt, match="said to be unchanged"):
        await Follower(store).fetch(new)


async def test_a_version_that_was_never_published_is_not_found():
    with pytest.raises(NotFound, match="never published"):
        await Follower(MemoryStore()).fetch(PolicyVersion(number=1, hash="0" * 64))


async def test_a_version_ref_that_leads_elsewhere_is_refused():
    store = MemoryStore()
    (one, _), (two, _) = await chain(store, 2)
    store.links[version_ref(one.hash)] = store.links[version_ref(two.hash)]
    with pytest.raises(Corrupt, match=one.hash):
        await Follower(store).fetch(one)
    assert any(one.hash in problem for problem in (await verify(store)).problems)


async def test_a_ref_is_never_resolved_to_another_version_than_it_names():
    """The version ref of what `live` names leads to another sound version: that one must not be served in its place."""
    store = MemoryStore()
    (one, _), (two, _) = await chain(store, 2)
    good = store.links[version_ref(two.hash)]
    store.links[version_ref(two.hash)] = store.links[version_ref(one.hash)]
    with pytest.raises(Corrupt, match=two.hash):
        await Follower(store).resolve("live")
    store.links[version_ref(two.hash)] = "0" * 64
    with pytest.raises(NotFound, match=f"{version_ref(two.hash)} leads to manifest {'0' * 64}"):
        await Follower(store).resolve("live")
    del store.links[version_ref(two.hash)]
    with pytest.raises(NotFound, match=f"neither a ref {version_ref(two.hash)}"):
        await Follower(store).resolve("live")
    store.links[version_ref(two.hash)] = good
    assert await Follower(store).resolve("live") == two


async def test_a_version_beyond_the_limit_is_refused_before_memory_is_taken():
    store = MemoryStore()
    (policy, _), *_ = await chain(store, 1)
    with pytest.raises(Corrupt, match="max_bytes"):
        await Follower(store, FollowerConfig(max_bytes=1000)).fetch(policy)


class Watch:
    """Runs a watch and records what it delivered and reported."""

    def __init__(self, follower, refs, refuse=()):
        self.seen: list[tuple[str, int]] = []
        self.errors: list[str] = []
        self.refuse = set(refuse)
        self._follower, self._refs = follower, refs

    async def __aenter__(self):
        self._task = asyncio.create_task(
            self._follower.watch(
                self._refs, self._change, 0.001, lambda ref, error: self.errors.append(f"{ref}: {error}")
            )
        )
        return self

    async def __aexit__(self, *error):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _change(self, ref, snapshot):
        assert weights_root(snapshot.weights) == snapshot.policy.hash
        if snapshot.policy.number in self.refuse:
            raise Unavailable("the engine is busy")
        self.seen.append((ref, snapshot.policy.number))

    async def until(self, condition):
        async with asyncio.timeout(PATIENT_S):
            while not condition():
                assert not self._task.done()
                await asyncio.sleep(0.001)


async def test_watch_delivers_each_move_once_and_a_rollback_too():
    store = MemoryStore()
    versions = await chain(store, 3)
    async with Watch(Follower(store), ["live", "canary"]) as watch:
        await watch.until(lambda: watch.seen == [("live", 2)])
        await store.move_ref("canary", None, versions[1][0].hash)
        await watch.until(lambda: watch.seen[1:] == [("canary", 1)])
        await store.move_ref("live", versions[2][0].hash, versions[0][0].hash)
        await watch.until(lambda: watch.seen[2:] == [("live", 0)])
        await asyncio.sleep(0.02)
        assert len(watch.seen) == 3
        assert not watch.errors


async def test_watch_survives_damage_reports_it_once_and_delivers_when_it_is_repaired():
    store = MemoryStore()
    (old, _), (new, _) = await chain(store, 2)
    await store.move_ref("live", new.hash, old.hash)
    (payloads,) = (await Follower(store).log(f"version/{new.hash}"))[0].objects()
    good = store.objects[payloads]
    store.objects[payloads] = flipped(good)
    async with Watch(Follower(store), ["live"]) as watch:
        await watch.until(lambda: watch.seen == [("live", 0)])
        await store.move_ref("live", old.hash, new.hash)
        await watch.until(lambda: bool(watch.errors))
        await asyncio.sleep(0.02)
        assert len(watch.errors) == 1
        assert payloads in watch.errors[0]
        assert watch.seen == [("live", 0)]
        store.objects[payloads] = good
        await watch.until(lambda: watch.seen == [("live", 0), ("live", 1)])


async def test_a_follower_that_starts_beside_damage_serves_what_it_served_before(tmp_path):
    store = MemoryStore()
    (old, _), (new, _) = await chain(store, 2)
    await store.move_ref("live", new.hash, old.hash)
    first = Journal(tmp_path / "j")
    async with Watch(Follower(store, journal=first), ["live"]) as watch:
        await watch.until(lambda: "live" in first.entries and first.entries["live"].have is not None)
    await store.move_ref("live", old.hash, new.hash)
    (payloads,) = (await Follower(store).log(f"version/{new.hash}"))[0].objects()
    good = store.objects[payloads]
    store.objects[payloads] = flipped(good)
    journal = Journal(tmp_path / "j")
    assert journal.entries["live"].have.policy == old
    async with Watch(Follower(store, journal=journal), ["live"]) as watch:
        await watch.until(lambda: watch.seen == [("live", 0)])
        assert payloads in watch.errors[0]
        assert (journal.entries["live"].have.policy, journal.entries["live"].want.policy) == (old, new)
        store.objects[payloads] = good
        await watch.until(lambda: watch.seen == [("live", 0), ("live", 1)])
        await watch.until(lambda: journal.entries["live"].have.policy == new)
        assert journal.entries["live"].want is None


@pytest.mark.parametrize("damage", [truncated, flipped, lambda data: b"", lambda data: b'{"live":{}}'])
def test_a_damaged_journal_is_left_aside(tmp_path, damage):
    journal = Journal(tmp_path / "j")
    journal.want("live", PolicyVersion(number=3, hash="a" * 64))
    assert Journal(tmp_path / "j").entries["live"].want is not None
    (tmp_path / "j").write_bytes(damage((tmp_path / "j").read_bytes()))
    again = Journal(tmp_path / "j")
    assert not again.entries
    again.have("live", PolicyVersion(number=4, hash="b" * 64))
    assert Journal(tmp_path / "j").entries["live"].have.number == 4


def test_a_journal_that_cannot_be_read_is_left_aside(tmp_path, caplog):
    (tmp_path / "j").mkdir()
    assert not Journal(tmp_path / "j").entries
    assert "continuing without it" in caplog.text


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4, 5])  # create, write, fsync, rename, fsync of the directory
async def test_a_journal_that_cannot_be_written_holds_nothing_up_and_is_written_when_there_is_space(tmp_path, fail_at):
    store = MemoryStore()
    _, (new, _) = await chain(store, 2)
    disk = FaultyDisk(fail_at, sticky=True)
    async with Watch(Follower(store, journal=Journal(tmp_path / "j", disk)), ["live"]) as watch:
        await watch.until(lambda: bool(watch.errors))
        assert watch.seen == [("live", 1)]
        assert "free some space" in watch.errors[0]
        disk.fail_at = 0
        await watch.until(
            lambda: Journal(tmp_path / "j").entries.get("live") == JournalEntry(have=Version(number=1, hash=new.hash))
        )
        assert (watch.seen, len(watch.errors)) == ([("live", 1)], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


async def test_a_ref_that_vanishes_is_reported_and_what_was_served_goes_on(tmp_path):
    store = MemoryStore()
    ((policy, _),) = await chain(store, 1)
    async with Watch(Follower(store, journal=Journal(tmp_path / "j")), ["live", "canary"]) as watch:
        await watch.until(
            lambda: (tmp_path / "j").exists() and Journal(tmp_path / "j").entries["live"].have is not None
        )
        del store.links["live"]
        await watch.until(lambda: bool(watch.errors))
    async with Watch(Follower(store, journal=Journal(tmp_path / "j")), ["live", "canary"]) as again:
        await again.until(lambda: again.seen == [("live", 0)])
        assert again.errors == watch.errors
        assert [error.startswith("live: ref live is no longer") for error in again.errors] == [True]
        store.links["live"] = policy.hash
        await asyncio.sleep(0.01)
        assert again.seen == [("live", 0)]


async def test_a_look_at_a_ref_that_did_not_move_reads_the_ref_and_nothing_else():
    read = []

    class Refs(MemoryStore):
        async def read_ref(self, ref):
            read.append(ref)
            return await super().read_ref(ref)

    store = WatchedStore(Refs())
    await chain(store, 3)
    async with Watch(Follower(store), ["live"]) as watch:
        await watch.until(lambda: watch.seen == [("live", 2)])
        objects = store.gets.total()
        read.clear()
        await watch.until(lambda: len(read) > 10)
        assert set(read) == {"live"}
        assert store.gets.total() == objects


async def test_watch_tries_again_when_the_engine_refused_and_goes_on_with_other_refs():
    store = MemoryStore()
    versions = await chain(store, 2)
    await store.move_ref("canary", None, versions[0][0].hash)
    async with Watch(Follower(store), ["live", "canary"], refuse=[1]) as watch:
        await watch.until(lambda: watch.seen == [("canary", 0)])
        assert watch.errors == ["live: the engine is busy"]
        watch.refuse.clear()
        await watch.until(lambda: ("live", 1) in watch.seen)


async def test_watch_does_not_hide_a_bug_in_the_callback():
    store = MemoryStore()
    await chain(store, 1)

    async def broken(ref, snapshot):
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await asyncio.wait_for(Follower(store).watch(["live"], broken, 0.001), PATIENT_S)


async def test_a_version_can_be_taken_out_as_a_plain_model_directory(tmp_path):
    store = MemoryStore()
    policy, weights = (await chain(store, 3))[-1]
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    target = tmp_path / "out"
    path = await Follower(store).materialise(policy, target, [config])
    assert (target / "config.json").read_text() == config.read_text()
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]
    header = safe_open(path, framework="np").metadata()
    assert header["ostinato_root"] == policy.hash
    found = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in deserialize(path.read_bytes())}
    assert found == {name: (a.dtype, a.shape, a.data.tobytes()) for name, a in weights.items()}
    await Follower(store).materialise(policy, target, [target / "config.json"])  # again, in place


async def test_a_missing_file_or_ref_is_named(tmp_path):
    store = MemoryStore()
    policy, _ = (await chain(store, 1))[0]
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        await Follower(store).materialise(policy, tmp_path, [tmp_path / "tokenizer.json"])
    with pytest.raises(NotFound, match="canary"):
        await Follower(store).log("canary")


def test_a_model_directory_is_written_with_all_of_its_tokenizer_and_none_of_its_weights(tmp_path):
    kept = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    for name in (*kept, "model.safetensors", "model.safetensors.index.json", "README.md", "pytorch_model.bin"):
        (tmp_path / name).write_text("")
    (tmp_path / "onnx.json").mkdir()
    assert sorted(path.name for path in files_beside(tmp_path)) == sorted(kept)
