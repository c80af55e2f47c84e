"""What copies of directories promise, in a directory, in memory and in a bucket over HTTP."""

import asyncio
import os
import sys

import obstore
import pytest
from obstore.store import MemoryStore
from tests.fakes.s3_server import s3_options, s3_server

from ostinato.core.errors import Corrupt, NotFound, OstinatoError, StorageFull, TooLarge, Unavailable
from ostinato.weights.config import BucketConfig
from ostinato.weights.store import copies as module
from ostinato.weights.store.copies import Copies

BIG = bytes(range(256)) * 45_000  # three parts of 5 MiB, the last one shorter


@pytest.fixture(scope="module")
def s3():
    with s3_server() as url:
        yield url


@pytest.fixture(params=["directory", "memory", "s3"])
def copies(request, tmp_path):
    settings = {"part_bytes": 5 << 20, "retries": 2}
    match request.param:
        case "directory":
            return Copies(BucketConfig(url=str(tmp_path / "there"), **settings), "checkpoints", "seal")
        case "memory":
            return Copies(BucketConfig(url="memory:///", **settings), "checkpoints", "seal", inside=MemoryStore())
        case _:
            options = s3_options(request.getfixturevalue("s3"))
            place = BucketConfig(url=f"s3://weights/{tmp_path.name}", options=options, **settings)
            return Copies(place, "checkpoints", "seal")


def made(tmp_path, name, **files):
    directory = tmp_path / name
    directory.mkdir()
    for file, body in ({"big": BIG, "empty": b"", "seal": b"whole"} | files).items():
        (directory / file).write_bytes(body)
    return directory


async def fetch_all(copies, name, into):
    await copies.fetch(name, (await copies._list(f"checkpoints/{name}/")).get(name, {}), into)


def bytes_of(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


async def test_a_directory_comes_back_with_its_bytes(copies, tmp_path):
    assert await copies.names() == []
    one, two = made(tmp_path, "0002-b"), made(tmp_path, "0001-a", big=BIG[:-7])
    for directory in (one, two, two):
        await copies.send(directory)
    assert await copies.names() == ["0001-a", "0002-b"]
    for directory in (one, two):
        await fetch_all(copies, directory.name, tmp_path / "fetched" / directory.name)
        assert bytes_of(tmp_path / "fetched" / directory.name) == bytes_of(directory)
    await copies.delete("0002-b")
    await copies.delete("0002-b")
    assert await copies.names() == ["0001-a"]
    assert not (tmp_path / "there" / "checkpoints" / "0002-b").exists()
    with pytest.raises(NotFound, match="0002-b"):
        await fetch_all(copies, "0002-b", tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


async def test_a_copy_that_was_cut_short_is_not_there_until_it_is_sent_again(copies, tmp_path, monkeypatch):
    put = obstore.put_async

    async def refuses_the_seal(store, path, file, **rest):
        if path.endswith("/seal"):
            raise obstore.exceptions.GenericError("connection reset")
        return await put(store, path, file, **rest)

    directory = made(tmp_path, "0001-a")
    with monkeypatch.context() as broken:
        broken.setattr(obstore, "put_async", refuses_the_seal)
        with pytest.raises(Unavailable, match="connection reset"):
            await copies.send(directory)
    assert (await copies.names(), await copies.torn()) == ([], ["0001-a"])
    with pytest.raises(NotFound):
        await fetch_all(copies, "0001-a", tmp_path / "fetched")
    await copies.send(directory)
    await fetch_all(copies, "0001-a", tmp_path / "fetched")
    assert bytes_of(tmp_path / "fetched") == bytes_of(directory)


async def test_a_deletion_that_was_cut_short_leaves_no_copy(copies, tmp_path, monkeypatch):
    await copies.send(made(tmp_path, "0001-a"))
    delete, calls = obstore.delete_async, []

    async def once(store, path):
        calls.append(path)
        if len(calls) > 1:
            raise obstore.exceptions.GenericError("connection reset")
        return await delete(store, path)

    monkeypatch.setattr(obstore, "delete_async", once)
    with pytest.raises(Unavailable):
        await copies.delete("0001-a")
    assert await copies.names() == []


async def test_what_others_put_there_is_passed_over(tmp_path):
    inside = MemoryStore()
    copies = Copies(BucketConfig(url="memory:///"), "checkpoints", "seal", inside=inside)
    await copies.send(made(tmp_path, "0001-a"))
    for path in ("checkpoints/seal", "checkpoints/.hidden/seal", "checkpoints/0001-a/.hidden", "checkpoints/x/y/seal"):
        obstore.put(inside, path, b"?")
    assert await copies.names() == ["0001-a"]
    await fetch_all(copies, "0001-a", tmp_path / "fetched")
    assert bytes_of(tmp_path / "fetched").keys() == {"big", "empty", "seal"}


async def test_a_full_disk_is_said_as_such(copies, tmp_path, monkeypatch):
    await copies.send(made(tmp_path, "0001-a"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", full)
    with pytest.raises(StorageFull, match="No space left"):
        await fetch_all(copies, "0001-a", tmp_path / "fetched")


async def test_a_disk_that_fills_up_within_a_write_is_not_taken_for_one_that_took_it_all(copies, tmp_path, monkeypatch):
    await copies.send(directory := made(tmp_path, "0001-a"))
    real = os.pwrite
    monkeypatch.setattr(module.os, "pwrite", lambda file, data, at: real(file, data[: max(1, len(data) // 2)], at))
    await fetch_all(copies, "0001-a", tmp_path / "fetched")
    assert bytes_of(tmp_path / "fetched") == bytes_of(directory)

    left = 10

    def filling(file, data, at):
        nonlocal left
        if not left:
            raise OSError(28, "No space left on device")
        data, left = data[:left], left - len(data[:left])
        return real(file, data, at)

    monkeypatch.setattr(module.os, "pwrite", filling)
    with pytest.raises(StorageFull, match="No space left"):
        await fetch_all(copies, "0001-a", tmp_path / "again")


async def test_a_bucket_that_is_away_is_said_as_such(tmp_path):
    options = {"aws_endpoint": "http://127.0.0.1:1", "aws_region": "us-east-1", "aws_access_key_id": "a"}
    options["aws_secret_access_key"] = "b"
    copies = Copies(BucketConfig(url="s3://weights/run", options=options, retries=0), "checkpoints", "seal")
    for call in (copies.names(), copies.send(made(tmp_path, "0001-a")), copies.fetch("0001-a", {}, tmp_path / "f")):
        with pytest.raises(OstinatoError) as refused:
            await call
        assert isinstance(refused.value, Unavailable)


async def test_only_what_is_asked_for_is_fetched_and_only_of_its_size(copies, tmp_path):
    await copies.send(made(tmp_path, "0001-a"))
    assert await copies.read("0001-a", "seal", 5) == b"whole"
    assert await copies.read("0001-a", "empty", 5) == b""
    with pytest.raises(TooLarge, match="the limit is 4"):
        await copies.read("0001-a", "seal", 4)
    for name, file in (("0001-a", "other"), ("0002-b", "seal")):
        with pytest.raises(NotFound):
            await copies.read(name, file, 5)
    for files in ({"seal": 6}, {"seal": 5, "other": 0}):
        with pytest.raises(Corrupt, match="bytes, not"):
            await copies.fetch("0001-a", files, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()
    await copies.fetch("0001-a", {"seal": 5}, tmp_path / "fetched")
    assert bytes_of(tmp_path / "fetched") == {"seal": b"whole"}


async def test_in_a_directory_the_half_written_file_of_a_killed_sender_is_found_and_removed(tmp_path):
    code = (
        "import os, obstore, threading; from obstore.store import LocalStore\n"
        f"store = LocalStore({str(tmp_path / 'there')!r}, mkdir=True)\n"
        "def parts():\n    yield b'x' * (6 << 20)\n    os.kill(os.getpid(), 9)\n"
        "obstore.put(store, 'checkpoints/0001-a/big', parts(), chunk_size=5 << 20)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == -9
    left = tmp_path / "there" / "checkpoints" / "0001-a"
    assert [file.name for file in left.iterdir()] == ["big#1"]
    copies = Copies(BucketConfig(url=str(tmp_path / "there")), "checkpoints", "seal")
    assert (await copies.names(), await copies.torn()) == ([], ["0001-a"])
    await copies.delete("0001-a")
    assert (await copies.torn(), left.exists()) == ([], False)
