import asyncio
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.faults import FaultyDisk

from ostinato.core.errors import Corrupt, StorageFull, TooLarge, Unavailable
from ostinato.weights.keep.gc import collect
from ostinato.weights.store import directory as module
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.disk import Disk
from ostinato.weights.version.content import hash_of

ONE, TWO = hash_of(b"1"), hash_of(b"2")


async def test_every_write_is_synced_before_and_after_it_is_renamed(tmp_path):
    disk = FaultyDisk()
    store = DirectoryStore(tmp_path, disk)
    for work in (store.put(b"data"), store.move_ref("live", None, ONE)):
        disk.calls.clear()
        await work
        calls = [call if call != "fsync" else f"fsync {what}" for call, what in disk.calls]
        at = calls.index("rename")
        assert calls[at - 1] == "fsync file"
        assert calls[at - 2] == "write"
        assert calls[-1] == "fsync directory"
        assert calls.index("fsync directory", at)


async def test_an_object_that_was_there_is_synced_again_but_not_rewritten(tmp_path):
    disk = FaultyDisk()
    store = DirectoryStore(tmp_path, disk)
    await store.put(b"data")
    disk.calls.clear()
    await store.put(b"data")
    assert [call for call, _ in disk.calls] == ["touch", "fsync"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_whichever_call_the_disk_refuses_a_put_leaves_no_partial_object(tmp_path, code):
    counted = FaultyDisk()
    await DirectoryStore(tmp_path / "count", counted).put(b"data" * 1000)
    made = FaultyDisk()
    DirectoryStore(tmp_path / "made", made)
    for nth in range(len(made.calls) + 1, len(counted.calls) + 1):
        root = tmp_path / str(nth)
        store = DirectoryStore(root, FaultyDisk(nth, code))
        with pytest.raises(StorageFull, match=hash_of(b"data" * 1000)):
            await store.put(b"data" * 1000)
        for path in (root / "objects").rglob("*"):
            if path.is_file():  # whole although not acknowledged: only the directory's sync failed
                assert path.read_bytes() == b"data" * 1000
        assert not list((root / "tmp").iterdir())
        assert await store.get(await store.put(b"data" * 1000)) == b"data" * 1000


async def test_whichever_call_the_disk_refuses_a_ref_does_not_move(tmp_path):
    for old in (None, ONE):
        for nth in range(1, 8):
            root = tmp_path / f"{old}-{nth}"
            if old:
                await DirectoryStore(root).move_ref("x/live", None, old)
            DirectoryStore(root)
            disk = FaultyDisk()
            store = DirectoryStore(root, disk)
            disk.fail_at = len(disk.calls) + nth
            try:
                await store.move_ref("x/live", old, TWO)
            except StorageFull:
                assert await store.read_ref("x/live") == old
                await store.move_ref("x/live", old, TWO)
            assert await store.read_ref("x/live") == TWO
    assert nth > len(disk.calls) - disk.fail_at  # the last round saw no fault: every call was tried


def test_a_store_that_cannot_be_made_says_so(tmp_path):
    with pytest.raises(StorageFull, match="No space left"):
        DirectoryStore(tmp_path / "s", FaultyDisk(1))


async def test_leftovers_of_a_killed_writer_are_cleared_but_not_those_of_a_live_one(tmp_path):
    store = DirectoryStore(tmp_path)
    (tmp_path / "tmp" / "123-1").write_bytes(b"half")
    with store._files.locked("tmp.lock", module.fcntl.LOCK_SH):
        DirectoryStore(tmp_path)
        assert (tmp_path / "tmp" / "123-1").exists()
    DirectoryStore(tmp_path)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("text", [b"", b"../../etc/passwd", b"\xff" * 64, b"a" * 63, b"a" * 65, b"a" * 10_000_000])
async def test_a_ref_that_holds_no_hash_is_corrupt(tmp_path, text):
    store = DirectoryStore(tmp_path)
    (tmp_path / "refs" / "live").write_bytes(text)
    with pytest.raises(Corrupt, match="live"):
        await store.read_ref("live")
    with pytest.raises(Corrupt, match="live"):
        await store.refs()


async def test_objects_have_a_largest_size(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)
    name = await store.put(b"12345")
    monkeypatch.setattr(module, "MAX_OBJECT_BYTES", 4)
    with pytest.raises(TooLarge):
        await store.put(b"12345")
    with pytest.raises(Corrupt, match="more than 4 bytes"):
        await store.get(name)


async def test_an_object_that_is_not_a_file_is_corrupt(tmp_path):
    store = DirectoryStore(tmp_path)
    name = await store.put(b"data")
    path = tmp_path / "objects" / name[:2] / name[2:]
    path.unlink()
    os.mkdir(path)
    with pytest.raises(Corrupt, match=name):
        await store.get(name)


def aged(path, seconds):
    then = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


async def listed(store):
    return {found.hash: found async for found in store.list_objects()}


async def test_ages_are_the_files_and_putting_or_moving_again_makes_young(tmp_path):
    store = DirectoryStore(tmp_path)
    name = await store.put(b"data")
    await store.move_ref("live", None, ONE)
    for path in (tmp_path / "objects" / name[:2] / name[2:], tmp_path / "refs" / "live"):
        aged(path, 5000)
    assert 4990 < (await listed(store))[name].age_s < 5100
    assert 4990 < (await store.list_refs())["live"].age_s < 5100
    await store.put(b"data")
    await store.move_ref("live", ONE, ONE)
    assert (await listed(store))[name].age_s < 60
    assert (await store.list_refs())["live"].age_s < 60


async def test_files_from_the_future_are_new_and_the_clock_leaves_nothing_behind(tmp_path):
    store = DirectoryStore(tmp_path)
    name = await store.put(b"data")
    await store.move_ref("live", None, ONE)
    for path in (tmp_path / "objects" / name[:2] / name[2:], tmp_path / "refs" / "live"):
        aged(path, -5000)
    assert (await listed(store))[name].age_s == 0
    assert (await store.list_refs())["live"].age_s == 0
    assert not list((tmp_path / "tmp").iterdir())


async def test_a_disk_that_takes_no_file_any_more_is_tidied_up_all_the_same(tmp_path):
    await DirectoryStore(tmp_path).put(b"data")
    name = await DirectoryStore(tmp_path).put(b"more data")
    aged(tmp_path / "objects" / name[:2] / name[2:], 2 * 86_400)

    class Full(Disk):
        def create(self, path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found = await collect(DirectoryStore(tmp_path, Full()))
    assert (found.deleted.objects, found.young.objects) == (1, 1)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO])
async def test_a_ref_that_cannot_be_read_just_now_is_a_store_that_is_away(tmp_path, monkeypatch, code):
    store, opened = DirectoryStore(tmp_path), Path.open
    await store.move_ref("live", None, ONE)

    def refused(path, *args, **more):
        if path.name == "live":
            raise OSError(code, os.strerror(code))
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", refused)
    for work in (store.read_ref("live"), store.refs(), store.move_ref("live", ONE, TWO), store.delete_ref("live", ONE)):
        with pytest.raises(Unavailable, match="live cannot be read"):
            await work
    monkeypatch.undo()
    assert await store.read_ref("live") == ONE


@pytest.mark.parametrize(
    ("code", "error"), [(errno.EMFILE, Unavailable), (errno.ENFILE, Unavailable), (errno.EIO, Corrupt)]
)
async def test_an_object_is_not_damaged_because_too_many_files_are_open(tmp_path, monkeypatch, code, error):
    """A trainer would publish it whole again, and an erasure leave out a version that knew somebody."""
    store, opened = DirectoryStore(tmp_path), Path.open
    name = await store.put(b"data")

    def refused(path, *args, **more):
        if path.name == name[2:]:
            raise OSError(code, os.strerror(code))
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", refused)
    for work in (store.get(name), store.get_range(name, 0, 4)):
        with pytest.raises(error, match=f"{name} cannot be read"):
            await work


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO])
async def test_no_ref_is_hidden_by_a_directory_that_cannot_be_listed(tmp_path, monkeypatch, code):
    """As one that `sudo ostinato weights pin` made: what was pinned would be collected."""
    store, scan = DirectoryStore(tmp_path), os.scandir
    await store.move_ref("live", None, ONE)
    await store.move_ref("pin/paper", None, TWO)

    def refused(path):
        if os.fspath(path).endswith("/pin"):
            raise OSError(code, os.strerror(code), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    for listing in (store.refs, store.list_refs):
        with pytest.raises(Unavailable, match="pin cannot be listed"):
            await listing()


async def test_what_is_no_object_is_not_listed(tmp_path):
    store = DirectoryStore(tmp_path)
    name = await store.put(b"data")
    for path in ("objects/README", "objects/zz/x", "objects/ab/" + "c" * 61, f"objects/{ONE[:2]}/{ONE[2:]}/x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"?")
    assert list(await listed(store)) == [name]


async def test_a_deletion_is_durable_and_one_that_the_disk_refuses_changes_nothing(tmp_path):
    disk = FaultyDisk()
    store = DirectoryStore(tmp_path, disk)
    name = await store.put(b"data")
    await store.move_ref("x/live", None, ONE)
    for nth in (1, 2):  # unlink, fsync of the directory
        disk.fail_at = len(disk.calls) + nth
        with pytest.raises(StorageFull, match="x/live"):
            await store.delete_ref("x/live", ONE)
        assert await store.read_ref("x/live") == ONE
    disk.fail_at = len(disk.calls) + 1
    with pytest.raises(StorageFull, match=name):
        await store.delete(name)
    assert await store.get(name) == b"data"
    for work in (store.delete(name), store.delete_ref("x/live", ONE)):
        disk.calls.clear()
        await work
        assert [call for call, _ in disk.calls] == ["unlink", "fsync"]


async def test_an_object_of_somebody_else_is_written_anew(tmp_path):
    """Whoever may not touch a file cannot make it young; a new one takes its place."""

    class Foreign(FaultyDisk):
        def touch(self, path):
            raise PermissionError(errno.EPERM, "not yours")

    disk = Foreign()
    store = DirectoryStore(tmp_path, disk)
    name = await store.put(b"data")
    aged(tmp_path / "objects" / name[:2] / name[2:], 5000)
    assert await store.put(b"data") == name
    assert (await listed(store))[name].age_s < 60


async def test_a_lock_that_another_process_holds_is_an_error_with_its_pid_and_no_hang(tmp_path):
    store = DirectoryStore(tmp_path / "weights", lock_wait_s=0.2)
    await store.move_ref("live", None, ONE)
    path = store.root / "refs.lock"
    with path.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(Unavailable) as told:
            await store.move_ref("live", ONE, TWO)
        with pytest.raises(Unavailable):
            await store.delete_ref("live", ONE)
        assert time.monotonic() - began < PATIENT_S
        assert str(path) in str(told.value)
        if Path("/proc/locks").exists():
            assert f"process {os.getpid()}" in str(told.value)
    await store.move_ref("live", ONE, TWO)


@pytest.mark.parametrize("name", ["ages.lock", "tmp.lock"])
async def test_no_lock_can_stop_a_write_for_ever(tmp_path, name):
    store = DirectoryStore(tmp_path / "weights", lock_wait_s=0.1)
    await store.put(b"old")
    with (store.root / name).open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match=name):
            await store.put(b"new")
        with pytest.raises(Unavailable, match=name):
            await store.move_ref("live", None, ONE)
    assert not list((store.root / "tmp").iterdir())
    assert await store.get(await store.put(b"new")) == b"new"


async def test_a_lock_is_waited_for(tmp_path):
    store = DirectoryStore(tmp_path / "weights")
    await store.move_ref("live", None, ONE)
    other = (store.root / "refs.lock").open("r+b")
    fcntl.flock(other, fcntl.LOCK_EX)
    asyncio.get_running_loop().call_later(0.1, other.close)
    await store.move_ref("live", ONE, TWO)
    assert await store.read_ref("live") == TWO


async def test_a_new_store_is_its_owners_alone_and_its_locks_always_are(tmp_path):
    root = tmp_path / "weights"
    store = DirectoryStore(root)
    await store.move_ref("some/ref", None, await store.put(b"data"))
    await store.delete(await store.put(b"more"))
    assert {path.name for path in root.glob("*.lock")} == {"refs.lock", "ages.lock", "tmp.lock"}
    assert [path for path in (root, *root.rglob("*")) if path.stat().st_mode & 0o077] == []

    for path in root.glob("*.lock"):
        path.chmod(0o644)  # as earlier versions made them
    await store.move_ref("other", None, ONE)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root / "refs.lock", root / "ages.lock")} == {0o600}


async def test_a_store_in_a_directory_that_others_may_read_stays_readable(tmp_path):
    root = tmp_path / "shared"
    root.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        store = DirectoryStore(root)
        await store.move_ref("live", None, hash := await store.put(b"data"))
    finally:
        os.umask(before)
    for path in (root / "refs" / "live", root / "objects" / hash[:2] / hash[2:]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "refs.lock").stat().st_mode) == 0o600
