"""What every weight store promises. Add an implementation to `make_store` and it has to pass."""

import asyncio
from pathlib import Path

import boto3
import obstore
import pytest
from moto.server import ThreadedMotoServer

from ostinato.core.errors import BadConfig, BadRequest, Conflict, Corrupt, NotFound, Unavailable
from ostinato.core.seams import WeightStore
from ostinato.publish.bucket import BucketConfig, BucketStore
from ostinato.publish.content import hash_of
from ostinato.publish.store import DirectoryStore
from ostinato.testing.faults import flipped
from ostinato.testing.store import MemoryStore

ONE, TWO, THREE = (hash_of(text) for text in (b"1", b"2", b"3"))


@pytest.fixture(scope="module")
def s3():
    """moto's S3 server: the real API over HTTP."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def bucket(url: str, prefix: str) -> BucketStore:
    options = {
        "aws_endpoint": url,
        "aws_region": "us-east-1",
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
    }
    boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    ).create_bucket(Bucket="weights")
    return BucketStore(BucketConfig(url=f"s3://weights/{prefix}", options=options, retries=2, part_bytes=5 << 20))


@pytest.fixture(params=["directory", "memory", "bucket", "s3"])
def store(request, tmp_path):
    match request.param:
        case "directory":
            return DirectoryStore(tmp_path / "store")
        case "bucket":
            return BucketStore(BucketConfig(url="memory:///"), inside=obstore.store.MemoryStore())
        case "s3":
            return bucket(request.getfixturevalue("s3"), tmp_path.name)
        case _:
            return MemoryStore()


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
    if isinstance(store, MemoryStore):
        pytest.skip("its refs cannot rot")
    await store.move_ref("version/a", None, ONE)
    if isinstance(store, BucketStore):
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
    monkeypatch.setattr(obstore, "put_async", None)  # a second transfer would fail
    assert await store.put(data) == name


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
