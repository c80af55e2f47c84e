"""Checkpoints that trainers on several hosts share."""

import asyncio
import logging
import shutil
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore
from tests.deadlines import PATIENT_S

from ostinato.app.checkpoints import SharedCheckpoints
from ostinato.core.errors import Unauthorized, Unavailable
from ostinato.train.checkpoint import MANIFEST, Checkpoint, adopt, load, partial_of, save
from ostinato.weights.config import BucketConfig
from ostinato.weights.store.copies import Copies
from ostinato.weights.version.signing import Signer


def made(step, value=0.0):
    return Checkpoint(
        step=step, weights={"w": np.full((3, 4), value, np.float32)}, moments={"rng": np.arange(9, dtype=np.uint8)}
    )


@pytest.fixture
def inside():
    return MemoryStore()


@pytest.fixture
def shared(tmp_path, inside):
    def on(host, keep=2, batches=lambda step: f"batch {step}", **keys):
        async def batch_of(step):
            return batches(step)

        copies = Copies(BucketConfig(url="memory:///"), "checkpoints", MANIFEST, inside=inside)
        (tmp_path / host).mkdir(exist_ok=True)
        return SharedCheckpoints(copies, tmp_path / host, keep, batch_of, **keys), tmp_path / host

    return on


async def sent(shared):
    shared.begin()
    await shared._sending


async def test_a_trainer_elsewhere_continues_from_the_newest_checkpoint(shared):
    one, here = shared("one")
    for step in (5, 10, 15):
        save(here, made(step, value=step))
        await sent(one)
    two, there = shared("two")
    assert load(there) is None
    assert (await two.fetch_newer()).startswith("00000015-")
    assert load(there).step == 15
    assert load(there).weights["w"].tobytes() == made(15, value=15).weights["w"].tobytes()
    assert await two.fetch_newer() is None, "it has this one"
    save(there, made(20))
    await sent(two)
    assert (await one.fetch_newer()).startswith("00000020-")
    assert load(here).step == 20, "although the host had a LATEST of its own"
    assert [name.split("-")[0] for name in await one._copies.names()] == ["00000015", "00000020"]


async def test_a_newer_checkpoint_of_its_own_is_kept(shared):
    (one, here), (two, there) = shared("one"), shared("two")
    save(here, made(5))
    await sent(one)
    save(there, made(6))
    assert await two.fetch_newer() is None
    assert load(there).step == 6


async def test_a_copy_of_steps_that_the_log_does_not_have_is_not_taken(shared):
    one, here = shared("one")
    for step in (5, 10):
        save(here, made(step))
        await sent(one)
    batches = {5: "batch 5", 6: "another 6", 10: ""}
    two, there = shared("two", batches=batches.get)
    assert (await two.fetch_newer()).startswith("00000005-")
    assert load(there).step == 5
    save(there, made(6))
    await sent(two)
    steps = [name.split("-")[0] for name in await two._copies.names()]
    assert steps == ["00000005", "00000006", "00000010"], "those of the other log stay"
    batches[10] = "another 10"  # the log lost its rows in a failover, and has come to step 10 again, by other turns
    three, last = shared("three", keep=1, batches=batches.get)
    assert (await three.fetch_newer()).startswith("00000006-")
    save(last, made(10, value=3.0))
    await sent(three)
    assert (await shared("four", batches=batches.get)[0].fetch_newer()).startswith("00000010-")
    assert load(here.parent / "four").weights["w"].tobytes() == made(10, value=3.0).weights["w"].tobytes()
    assert [name.split("-")[0] for name in await three._copies.names()] == ["00000010"] * 2, "only its own are deleted"


async def test_a_copy_of_another_run_is_not_taken_although_the_same_key_signed_it(shared, inside, tmp_path):
    key = Signer.create(tmp_path / "key")
    one, here = shared("one", signer=key, batches=lambda step: f"another run's {step}")
    save(here, made(5))
    await sent(one)
    two, there = shared("two", trusted=[key.public])
    assert await two.fetch_newer() is None
    name = (await one._copies.names())[0]
    obstore.put(inside, f"checkpoints/{name}/batch", b"batch 5")  # whoever can write to the bucket calls it this run's
    assert await two.fetch_newer() is None
    assert list(there.iterdir()) == []


async def test_nothing_large_is_fetched_before_the_manifest_is_found_right(shared, inside, tmp_path, monkeypatch):
    key = Signer.create(tmp_path / "key")
    one, here = shared("one")
    save(here, made(5))
    await sent(one)
    fetched, get = [], obstore.get_range_async

    async def noted(store, path, **rest):
        fetched.append(path.rpartition("/")[2])
        return await get(store, path, **rest)

    monkeypatch.setattr(obstore, "get_range_async", noted)
    assert await shared("two", trusted=[key.public])[0].fetch_newer() is None
    assert set(fetched) == {"batch", MANIFEST}
    name = (await one._copies.names())[0]
    obstore.put(inside, f"checkpoints/{name}/weights.safetensors", b"?" * 5000)
    obstore.put(inside, f"checkpoints/{name}/more.safetensors", b"?" * 5000)
    assert await shared("three")[0].fetch_newer() is None
    assert set(fetched) == {"batch", MANIFEST}
    endless = b'{"files": {"a": {"bytes": Infinity}}}'
    for nonsense in (b"[]", b"{", b'{"files": {"a": []}}', endless, b"[" * 100_000):
        obstore.put(inside, f"checkpoints/{name}/{MANIFEST}", nonsense)
        assert await shared("four")[0].fetch_newer() is None


async def test_what_a_killed_trainer_left_is_removed_at_the_next_start(shared):
    one, here = shared("one")
    kept = save(here, made(5))
    for left in (".sending/00000003-aa", ".partial-00000004-aa"):
        (here / left).mkdir(parents=True)
        (here / left / "weights.safetensors").write_bytes(b"?")
    assert await one.fetch_newer() is None
    assert {path.name for path in here.iterdir()} == {"LATEST", kept.name}


async def test_a_fetched_checkpoint_is_the_newest_although_the_process_died_as_it_came(shared, monkeypatch):
    one, here = shared("one")
    save(here, made(10))
    await sent(one)
    _, there = shared("two")
    save(there, made(5))
    replaced = Path.replace

    def dies(self, target):
        replaced(self, target)
        if target.is_dir():
            raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            adopt(copied(here, there))
    assert load(there).step == 10


def copied(here, there):
    """A checkpoint as it is after it was fetched."""
    found = next(here.glob("0*"))
    return shutil.copytree(found, partial_of(there, found.name))


async def test_a_bucket_that_refuses_checkpoints_stops_only_who_has_none(shared, monkeypatch, caplog):
    def refused(*_, **__):
        raise obstore.exceptions.PermissionDeniedError("no")

    monkeypatch.setattr(obstore, "list", refused)
    one, here = shared("one")
    with pytest.raises(Unauthorized):
        await one.fetch_newer()
    save(here, made(5))
    assert await one.fetch_newer() is None
    assert "cannot be read" in one.trouble


async def test_what_earlier_trainers_sent_in_part_is_deleted(shared, inside):
    one, here = shared("one")
    for path in ("00000003-aa/weights.safetensors", "00000099-aa/weights.safetensors"):
        obstore.put(inside, f"checkpoints/{path}", b"?")
    save(here, made(5))
    await sent(one)
    assert await one._copies.torn() == ["00000099-aa"], "that one may be on its way"


async def test_a_checkpoint_that_is_replaced_while_it_is_sent_is_sent_whole(shared, monkeypatch):
    one, here = shared("one", keep=1)
    save(here, made(5, value=5.0))
    put, begun, go = obstore.put_async, asyncio.Event(), asyncio.Event()

    async def slow(store, path, file, **rest):
        begun.set()
        await go.wait()
        return await put(store, path, file, **rest)

    monkeypatch.setattr(obstore, "put_async", slow)
    one.begin()
    await asyncio.wait_for(begun.wait(), PATIENT_S)
    save(here, made(6), keep=1)
    go.set()
    await one._sending
    assert one.trouble is None
    two, there = shared("two")
    assert (await two.fetch_newer()).startswith("00000005-")
    assert load(there).weights["w"].tobytes() == made(5, value=5.0).weights["w"].tobytes()
    assert not (here / ".sending").exists()


async def test_what_no_trusted_key_signed_is_not_taken(shared, inside, tmp_path, caplog):
    ours, theirs = (Signer.create(tmp_path / name) for name in ("ours.key", "theirs.key"))
    one, here = shared("one", signer=ours)
    save(here, made(5))
    await sent(one)
    for step, signer in ((6, theirs), (7, None)):
        stranger, elsewhere = shared(f"stranger-{step}", keep=9, signer=signer)
        save(elsewhere, made(step, value=9.0))
        await sent(stranger)
    two, there = shared("two", trusted=[ours.public])
    with caplog.at_level(logging.WARNING):
        assert (await two.fetch_newer()).startswith("00000005-")
    assert load(there).step == 5
    assert "is signed by nobody" in caplog.text
    assert "is signed by " + theirs.public[:16] in caplog.text
    (three, last), manifest = shared("three", trusted=[ours.public]), next(iter(here.glob("0*"))) / MANIFEST
    obstore.put(inside, f"checkpoints/{manifest.parent.name}/{MANIFEST}", manifest.read_bytes() + b" ")
    assert await three.fetch_newer() is None, "its signature does not fit the text"
    assert load(last) is None


async def test_a_damaged_copy_falls_back_to_the_one_before(shared, inside, tmp_path, caplog):
    one, here = shared("one")
    for step in (5, 10):
        save(here, made(step))
        await sent(one)
    newest = (await one._copies.names())[-1]
    path = f"checkpoints/{newest}/weights.safetensors"
    body = bytearray(obstore.get(inside, path).bytes())
    body[-1] ^= 1
    obstore.put(inside, path, bytes(body))
    two, there = shared("two")
    with caplog.at_level(logging.WARNING):
        assert (await two.fetch_newer()).startswith("00000005-")
    assert load(there).step == 5
    assert newest in caplog.text
    assert [path.name.split("-")[0] for path in there.iterdir()] != [], "nothing partial is left"
    assert not list(there.glob(".partial-*"))


@pytest.mark.parametrize("name", ["00000099-{hash}", "nonsense"])
async def test_a_copy_under_a_wrong_name_is_not_taken(shared, inside, name):
    one, here = shared("one")
    path = save(here, made(5))
    (other := here.parent / name.format(hash=path.name.split("-")[1])).mkdir()
    for file in path.iterdir():
        shutil.copy(file, other / file.name)
    await one._copies.send(other)
    two, there = shared("two")
    assert await two.fetch_newer() is None
    assert load(there) is None


async def test_a_bucket_that_is_away_delays_nothing_and_is_said(shared, monkeypatch):
    one, here = shared("one")
    save(here, made(5))
    put = obstore.put_async

    async def away(*_, **__):
        raise obstore.exceptions.GenericError("connection refused")

    with monkeypatch.context() as broken:
        broken.setattr(obstore, "put_async", away)
        await sent(one)
    assert "connection refused" in one.trouble
    with monkeypatch.context() as broken:
        broken.setattr(obstore, "list", lambda *_, **__: (_ for _ in ()).throw(obstore.exceptions.GenericError("no")))
        with pytest.raises(Unavailable):
            await shared("two")[0].fetch_newer()
    monkeypatch.setattr(obstore, "put_async", put)
    await sent(one)
    assert one.trouble is None


async def test_a_slow_bucket_leaves_out_checkpoints_and_is_not_waited_for_at_the_end(shared, monkeypatch):
    one, here = shared("one")
    save(here, made(5))
    started, put = [], obstore.put_async

    async def slow(store, path, file, **rest):
        started.append(path)
        await asyncio.sleep(60)
        return await put(store, path, file, **rest)

    monkeypatch.setattr(obstore, "put_async", slow)
    one.begin()
    async with asyncio.timeout(PATIENT_S):
        while not started:
            await asyncio.sleep(0.01)
    save(here, made(10))
    one.begin()
    await asyncio.sleep(0.05)
    assert len(started) == 1
    await asyncio.wait_for(one.close(), PATIENT_S)
    assert await one._copies.names() == []
