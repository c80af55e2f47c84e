"""What every weight store promises. Add an implementation to `make_store` and it has to pass."""

import asyncio
from pathlib import Path

import numpy as np
import obstore
import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.faults import flipped
from tests.fakes.s3_server import s3_options, s3_server

from ostinato.core.errors import BadConfig, BadRequest, Conflict, Corrupt, NotFound, Unavailable
from ostinato.core.seams import WeightStore
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.keep.fsck import verify
from ostinato.weights.keep.gc import CollectConfig, collect
from ostinato.weights.keep.pins import hold, pin
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.bucket import BucketConfig, BucketStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import hash_of

ONE, TWO, THREE = (hash_of(text) for text in (b"1", b"2", b"3"))


@pytest.fixture(scope="module")
def s3():
    with s3_server() as url:
        yield url


def bucket(url: str, prefix: str, **settings) -> BucketStore:
    settings |= {"url": f"s3://weights/{prefix}", "options": s3_options(url), "retries": 2, "part_bytes": 5 << 20}
    return BucketStore(BucketConfig(**settings))


@pytest.fixture(params=["directory", "memory", "bucket", "s3"])
def store(request, tmp_path):
    match request.param:
        case "directory":
            return DirectoryStore(tmp_path / "store")
        case "bucket":
            return BucketStore(BucketConfig(url="memory:///", renew_s=0), inside=obstore.store.MemoryStore())
        case "s3":
            return bucket(request.getfixturevalue("s3"), tmp_path.name, renew_s=0)
        case _:
            return MemoryStore()


@pytest.fixture
def tick(store):
    """Lets the store's clock move on by more than its resolution."""
    slow = isinstance(store, BucketStore) and store.url.startswith("s3:")
    return lambda: asyncio.sleep(1.05 if slow else 0.02)


def spoil(store, name: str, data: bytes) -> None:
    if isinstance(store, MemoryStore):
        store.objects[name] = data
    elif isinstance(store, BucketStore):
        obstore.put(store._store, f"objects/{name[:2]}/{name[2:]}", data)
    else:
        (Path(store._root) / "objects" / name[:2] / name[2:]).write_bytes(data)


def test_it_is_a_weight_store(store):
    assert isinstance(store, WeightStore)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096])
async def test_bytes_come_back_under_their_blake3_hash(store, data):
    name = await store.put(data)
    assert name == hash_of(data)
    assert await store.get(name) == data
    assert await store.put(memoryview(data)) == name
    assert await store.has(name)


async def test_a_missing_object_is_not_found(store):
    assert not await store.has(ONE)
    with pytest.raises(NotFound, match=ONE):
        await store.get(ONE)


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
async def test_a_damaged_object_is_corrupt_and_writing_it_again_repairs_it(store, damage):
    data = b"some weights" * 100
    name = await store.put(data)
    spoil(store, name, damage(data))
    with pytest.raises(Corrupt, match=name):
        await store.get(name)
    assert await store.put(data) == name
    assert await store.get(name) == data


async def test_parts_of_an_object_come_as_asked_for_or_are_refused(store):
    data = bytes(range(256)) * 40
    name = await store.put(data)
    for start, length in ((0, len(data)), (0, 1), (300, 500), (len(data) - 1, 1), (len(data), 0), (0, 0)):
        assert await store.get_range(name, start, length) == data[start : start + length]
    for start, length in ((0, len(data) + 1), (len(data), 1), (len(data) + 5, 2), (len(data) + 1, 0)):
        with pytest.raises(Corrupt, match=name):
            await store.get_range(name, start, length)
    for start, length in ((-1, 2), (0, -1), (0, (1 << 30) + 1)):
        with pytest.raises(BadRequest, match="not a valid range"):
            await store.get_range(name, start, length)
    for length in (0, 1):
        with pytest.raises(NotFound, match=ONE):
            await store.get_range(ONE, 0, length)
    spoil(store, name, flipped(data))
    assert await store.get_range(name, 0, len(data)) == flipped(data)  # whoever asks for a part checks it


async def listed(store):
    return {found.hash: found async for found in store.list_objects()}


async def test_objects_are_listed_and_deleted(store):
    assert await listed(store) == {}
    names = [await store.put(bytes([n]) * n) for n in range(1, 6)]
    found = await listed(store)
    assert {name: found[name].bytes for name in found} == {name: n for n, name in enumerate(names, 1)}
    assert all(0 <= item.age_s < 60 for item in found.values())
    assert await store.delete(names[0])
    assert await store.delete(names[1], found[names[1]].stamp)
    assert not await store.delete(names[0])
    assert not await store.delete(names[1], found[names[1]].stamp)
    assert not await store.has(names[0])
    assert set(await listed(store)) == set(names[2:])


async def test_what_was_put_again_since_the_listing_is_not_deleted(store, tick):
    data = b"relied on"
    name = await store.put(data)
    old = (await listed(store))[name]
    await tick()
    assert await store.put(data) == name
    new = (await listed(store))[name]
    assert new.stamp != old.stamp
    assert not await store.delete(name, old.stamp)
    assert await store.get(name) == data
    assert await store.delete(name, new.stamp)


async def test_refs_are_deleted_only_from_where_they_are(store):
    await store.move_ref("a/b", None, ONE)
    for ref, old in (("a/b", TWO), ("a", ONE), ("none", ONE)):
        with pytest.raises(Conflict, match=ref):
            await store.delete_ref(ref, old)
    await store.delete_ref("a/b", ONE)
    assert await store.read_ref("a/b") is None
    assert await store.refs() == {}
    with pytest.raises(Conflict):
        await store.delete_ref("a/b", ONE)
    await store.move_ref("a", None, TWO)  # its child is gone, so the name is free
    await store.delete_ref("a", TWO)
    await store.move_ref("a/b", None, TWO)
    assert await store.refs() == {"a/b": TWO}


async def test_a_ref_that_was_moved_to_where_it_is_counts_as_new(store, tick):
    await store.move_ref("lease/x", None, ONE)
    old = (await store.list_refs())["lease/x"]
    assert old.value == ONE
    assert 0 <= old.age_s < 60
    await tick()
    await store.move_ref("lease/x", ONE, ONE)
    new = (await store.list_refs())["lease/x"]
    assert new.stamp != old.stamp
    with pytest.raises(Conflict, match="lease/x"):
        await store.delete_ref("lease/x", ONE, old.stamp)
    await store.delete_ref("lease/x", ONE, new.stamp)
    assert await store.list_refs() == {}


async def test_of_many_who_delete_or_move_a_ref_one_wins(store):
    for _ in range(3):
        await store.move_ref("live", None, ONE)
        done = await asyncio.gather(
            *(store.delete_ref("live", ONE) for _ in range(3)),
            *(store.move_ref("live", ONE, TWO) for _ in range(3)),
            return_exceptions=True,
        )
        assert [isinstance(result, Conflict) for result in done].count(False) == 1
        moved = None in done[3:]
        assert await store.read_ref("live") == (TWO if moved else None)
        if moved:
            await store.delete_ref("live", TWO)


async def test_a_collection_leaves_what_is_needed_and_nothing_else(store):
    publisher, made = VersionPublisher(store, PublisherConfig(anchor_every=2, anchor_share=100)), []
    for number in range(6):  # full: v0 and v3
        codes = np.arange(500, dtype=np.uint16)
        codes[: 9 * number] += number
        weights = {"w": WeightArray("U16", (500,), codes.view(np.uint8))}
        base = made[-1] if made else None
        made.append((await publisher.publish(number, weights, run="r", base=base, ref="candidate")).policy)
    await pin(store, "first", made[0].hash)
    await hold(store, "reader", made[4].hash)
    found = await collect(store, CollectConfig(keep=1, grace_hours=0))
    assert [policy.number for policy in found.gone] == [1, 2]
    assert [policy.number for policy in found.reasons] == [5, 4, 3, 0]
    assert found.kept.objects == len(await listed(store)) == 12  # v3 has a full snapshot too, v4 a delta from v0
    findings = await verify(store, every=True)
    assert (findings.problems, findings.rebuilt, findings.objects) == ([], 4, 6)
    assert (await collect(store, CollectConfig(keep=1, grace_hours=0))).deleted.objects == 0


@pytest.mark.parametrize("keep", [1000, 400, 0])
async def test_a_range_of_an_object_that_is_too_short_is_corrupt(store, keep):
    name = await store.put(b"some weights" * 100)
    spoil(store, name, (b"some weights" * 100)[:keep])
    for start, length in ((0, 1200), (500, 700), (1100, 100)):
        with pytest.raises(Corrupt, match=name):
            await store.get_range(name, start, length)


async def test_a_ref_moves_only_from_where_it_is(store):
    assert await store.read_ref("live") is None
    await store.move_ref("live", None, ONE)
    await store.move_ref("live", ONE, TWO)
    for wrong in (None, ONE, THREE):
        with pytest.raises(Conflict, match="live"):
            await store.move_ref("live", wrong, THREE)
    with pytest.raises(Conflict):
        await store.move_ref("canary", ONE, TWO)
    await store.move_ref("live", TWO, TWO)
    assert await store.refs() == {"live": TWO}


@pytest.mark.parametrize("rotten", [b"", b"no hash", bytes(range(256)), ONE.encode()[:-1]])
async def test_a_ref_that_holds_no_hash_is_corrupt_until_somebody_who_expects_nothing_moves_it(store, rotten):
    await store.move_ref("version/a", None, ONE)
    if isinstance(store, MemoryStore):
        store.links["version/a"] = rotten.decode("latin-1")
    elif isinstance(store, BucketStore):
        obstore.put(store._store, "refs/version/a", rotten)
    else:
        (Path(store._root) / "refs/version/a").write_bytes(rotten)
    for call in (store.read_ref("version/a"), store.move_ref("version/a", ONE, TWO)):
        with pytest.raises((Corrupt, Conflict), match="version/a"):
            await call
    await store.move_ref("version/a", None, TWO)
    assert await store.read_ref("version/a") == TWO


async def test_refs_are_listed_with_their_whole_names(store):
    for ref in ("live", "version/a.b", "runs/x/y_z-1"):
        await store.move_ref(ref, None, ONE)
    assert list(await store.refs()) == ["live", "runs/x/y_z-1", "version/a.b"]


async def test_a_ref_is_not_also_a_directory_of_refs(store):
    await store.move_ref("a/b", None, ONE)
    await store.move_ref("c", None, ONE)
    for ref in ("a", "c/d", "c/d/e"):
        assert await store.read_ref(ref) is None
        with pytest.raises(Conflict):
            await store.move_ref(ref, None, ONE)


@pytest.mark.parametrize("bad", ["", "..", "../x", "/etc/passwd", "a/../../x", "a\0b", "LIVE", "a//b", ".hidden"])
async def test_names_that_could_leave_the_store_are_refused(store, bad):
    for call in (
        store.read_ref(bad),
        store.move_ref(bad, None, ONE),
        store.get(bad),
        store.has(bad),
        store.get_range(bad, 0, 1),
        store.delete(bad),
        store.delete_ref(bad, ONE),
        store.delete_ref("live", bad),
        store.move_ref("live", None, bad),
    ):
        with pytest.raises(BadRequest):
            await call


async def test_of_many_writers_of_one_ref_exactly_one_wins_each_round(store):
    await store.move_ref("live", None, ONE)
    at = ONE
    for round_ in range(5):
        new = [hash_of(f"{round_}.{i}".encode()) for i in range(8)]
        done = await asyncio.gather(*(store.move_ref("live", at, h) for h in new), return_exceptions=True)
        won = [h for h, result in zip(new, done, strict=True) if result is None]
        assert len(won) == 1
        assert sum(isinstance(result, Conflict) for result in done) == 7
        at = won[0]
        assert await store.read_ref("live") == at


async def test_many_writers_of_the_same_object_agree(store):
    data = bytes(100_000)
    assert len(set(await asyncio.gather(*(store.put(data) for _ in range(8))))) == 1
    assert await store.get(hash_of(data)) == data


async def test_large_objects_travel_in_parts_and_whole_ones_are_not_sent_again(s3, tmp_path, monkeypatch):
    store = bucket(s3, tmp_path.name)
    data = bytes(range(256)) * (12 << 12)  # 12 MB: three parts of at most 5 MB
    name = await store.put(data)
    assert await store.get(name) == data
    sent, put = [], obstore.put_async

    async def counted(inside, path, *args, **kwargs):
        sent.append(path)
        return await put(inside, path, *args, **kwargs)

    monkeypatch.setattr(obstore, "put_async", counted)
    assert await store.put(data) == name
    assert sent == ["clock"]
    store._config = store._config.model_copy(update={"renew_s": 0.0})
    assert await store.put(data) == name  # old: sent again
    assert sent[-1] == f"objects/{name[:2]}/{name[2:]}"


async def test_an_object_of_many_parts_that_is_too_short_is_corrupt():
    config = BucketConfig.model_construct(**(BucketConfig(url="memory:///").model_dump() | {"part_bytes": 256}))
    store = BucketStore(config, inside=obstore.store.MemoryStore())
    name = await store.put(b"some weights" * 100)
    assert await store.get_range(name, 10, 1000) == (b"some weights" * 100)[10:1010]
    for keep in (1100, 600, 0):
        spoil(store, name, (b"some weights" * 100)[:keep])
        for call in (store.get(name), store.get_range(name, 0, 1200)):
            with pytest.raises(Corrupt, match=name):
                await call


async def test_of_two_publishers_one_wins(s3, tmp_path):
    one, two = bucket(s3, tmp_path.name), bucket(s3, tmp_path.name)
    await one.move_ref("live", None, ONE)
    moved = await asyncio.gather(
        one.move_ref("live", ONE, TWO), two.move_ref("live", ONE, THREE), return_exceptions=True
    )
    assert sum(isinstance(answer, Conflict) for answer in moved) == 1
    assert await one.read_ref("live") == (TWO if moved[0] is None else THREE)


async def test_a_write_whose_answer_was_lost_is_no_conflict(monkeypatch):
    store = BucketStore(BucketConfig(url="memory:///"), inside=obstore.store.MemoryStore())
    put = obstore.put_async

    async def twice(*args, **kwargs):
        await put(*args, **kwargs)
        return await put(*args, **kwargs)

    monkeypatch.setattr(obstore, "put_async", twice)
    await store.move_ref("live", None, ONE)
    await store.move_ref("live", ONE, TWO)
    assert await store.read_ref("live") == TWO


@pytest.mark.parametrize("kind", ["directory", "bucket"])
async def test_a_damaged_ref_hides_nothing_from_verification(tmp_path, kind):
    inside = obstore.store.MemoryStore()
    store = (
        DirectoryStore(tmp_path) if kind == "directory" else BucketStore(BucketConfig(url="memory:///"), inside=inside)
    )
    weights = {"w": WeightArray("BF16", (64,), np.ones(64, np.uint16).view(np.uint8))}
    policy = (await VersionPublisher(store).publish(0, weights, run="a", base=None, ref="live")).policy
    for ref in ("candidate", "canary"):
        if kind == "directory":
            (tmp_path / "refs" / ref).write_text("no hash")
        else:
            await obstore.put_async(inside, f"refs/{ref}", b"no hash")
    found = await verify(store)
    assert (found.refs, found.rebuilt) == (2, 1)
    assert sorted(problem.split()[1].strip(":") for problem in found.problems) == ["canary", "candidate"]
    with pytest.raises(Corrupt, match=r"canary.*candidate|candidate.*canary"):
        await store.refs()
    assert await store.read_ref("live") == policy.hash


async def test_the_refs_of_a_bucket_are_read_a_few_at_a_time(monkeypatch):
    store = BucketStore(BucketConfig(url="memory:///", parallel=4), inside=obstore.store.MemoryStore())
    for number in range(40):
        await store.move_ref(f"ref-{number}", None, ONE)
    read, now, most = store._small, 0, 0

    async def counted(path):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        try:
            return await read(path)
        finally:
            now -= 1

    monkeypatch.setattr(store, "_small", counted)
    assert len(await store.refs()) == 40
    assert most == 4


async def test_a_bucket_that_cannot_be_reached_or_does_not_exist_says_so(s3):
    options = {"aws_region": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "x"}
    gone = BucketConfig(url="s3://weights/x", options=options | {"aws_endpoint": "http://127.0.0.1:9"}, retries=0)
    with pytest.raises(Unavailable, match="cannot be used now"):
        await BucketStore(gone).put(b"x")
    missing = BucketConfig(url="s3://no-such-bucket/x", options=options | {"aws_endpoint": s3}, retries=0)
    with pytest.raises((NotFound, Unavailable), match="no-such-bucket"):
        await BucketStore(missing).put(b"x")
    with pytest.raises(BadConfig, match=r"weights\.url"):
        BucketStore(BucketConfig(url="ftp://somewhere"))


@pytest.fixture
def plain_bucket():
    return BucketStore(BucketConfig(url="memory:///"), inside=obstore.store.MemoryStore())


async def test_in_a_bucket_an_object_that_is_put_while_it_is_deleted_is_there_afterwards(plain_bucket, monkeypatch):
    """The collector has looked at the old object and is about to delete it; the publisher relies on it just then."""
    store, data = plain_bucket, b"relied on"
    name = await store.put(data)
    old = (await listed(store))[name]
    delete, publishers = obstore.delete_async, []

    async def late(inside, path):
        if path.startswith("objects/"):
            publishers.append(asyncio.create_task(store.put(data)))
            await asyncio.sleep(0.05)
            assert not publishers[0].done()  # it saw the mark
        return await delete(inside, path)

    monkeypatch.setattr(obstore, "delete_async", late)
    assert await store.delete(name, old.stamp)
    assert await publishers[0] == name
    assert await store.get(name) == data


async def test_in_a_bucket_a_ref_that_is_made_while_it_is_deleted_is_there_afterwards(plain_bucket, monkeypatch):
    store = plain_bucket
    await store.move_ref("live", None, ONE)
    delete, movers = obstore.delete_async, []

    async def late(inside, path):
        assert await store.read_ref("live") is None
        assert await store.refs() == {}
        movers.append(asyncio.create_task(store.move_ref("live", None, TWO)))
        await asyncio.sleep(0.05)
        return await delete(inside, path)

    monkeypatch.setattr(obstore, "delete_async", late)
    await store.delete_ref("live", ONE)
    await movers[0]
    assert await store.read_ref("live") == TWO


async def test_in_a_bucket_the_marks_of_a_killed_collector_do_not_hold_for_ever(plain_bucket, monkeypatch):
    store, delete = plain_bucket, obstore.delete_async
    name = await store.put(b"x")
    await store.move_ref("live", None, ONE)

    async def killed(*_):
        raise asyncio.CancelledError

    monkeypatch.setattr(obstore, "delete_async", killed)
    for work in (store.delete(name), store.delete_ref("live", ONE)):
        with pytest.raises(asyncio.CancelledError):
            await work
    monkeypatch.setattr(obstore, "delete_async", delete)
    for work in (store.put(b"x"), store.move_ref("live", None, TWO)):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.05)
    monkeypatch.setattr("ostinato.weights.store.object_storage.OBEYED_S", 0.0)
    await asyncio.wait_for(store.put(b"x"), PATIENT_S)
    await asyncio.wait_for(store.move_ref("live", None, TWO), PATIENT_S)
    assert await store.read_ref("live") == TWO
    assert await store.get(name) == b"x"
