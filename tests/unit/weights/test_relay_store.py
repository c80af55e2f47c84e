import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.faults import FaultyDisk, flipped

from ostinato.core.errors import BadConfig, BadRequest, Conflict, Corrupt, NotFound, StorageFull, Unavailable
from ostinato.testing.store import MemoryStore, WatchedStore
from ostinato.weights import relay as module
from ostinato.weights.relay import CachedRef, RelayConfig, RelayStore, Shelf
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import hash_of

ONE, TWO = hash_of(b"1"), hash_of(b"2")


class Time:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def upstream():
    return WatchedStore(MemoryStore())


def relay(upstream, path: Path, clock=None, **settings) -> RelayStore:
    config = RelayConfig().model_copy(update=settings)  # not checked: a test's cap is smaller than an object may be
    return RelayStore(upstream, DirectoryStore(path), config, clock or Time())


def file(path: Path, name: str) -> Path:
    return path / "objects" / name[:2] / name[2:]


async def read(store: RelayStore, name: str) -> bytes:
    async with store.opened(name) as path:
        return path.read_bytes()


async def test_many_who_ask_at_once_share_one_fetch(upstream, tmp_path):
    name = await upstream.put(b"weights" * 1000)
    store = relay(upstream, tmp_path)
    upstream.gate.clear()
    asking = [asyncio.create_task(call(name)) for call in [store.get] * 5 + [lambda n: read(store, n)] * 5]
    await asyncio.sleep(0.01)
    asking[0].cancel()  # whoever came first and gives up does not take the others along
    upstream.gate.set()
    got = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(got[0], asyncio.CancelledError)
    assert got[1:] == [b"weights" * 1000] * 9
    assert upstream.gets == {name: 1}
    upstream.away = True
    assert await relay(upstream, tmp_path).get(name) == b"weights" * 1000  # another process, later
    assert upstream.gets == {name: 1}


async def test_no_more_than_so_many_objects_are_fetched_at_once(upstream, tmp_path):
    names = [await upstream.put(bytes([n])) for n in range(12)]
    store = relay(upstream, tmp_path, parallel=3)
    await asyncio.gather(*map(store.get, names))
    assert upstream.most == 3


async def test_a_failure_reaches_all_who_asked_and_is_not_remembered(upstream, tmp_path):
    name = await upstream.put(b"x")
    store = relay(upstream, tmp_path)
    upstream.away = True
    got = await asyncio.gather(*(store.get(name) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in got] == [Unavailable] * 3
    upstream.away = False
    assert await store.get(name) == b"x"
    with pytest.raises(NotFound, match=ONE):
        await store.get(ONE)
    with pytest.raises(BadRequest):
        await store.get("../../etc/passwd")


async def test_what_upstream_damages_is_neither_served_nor_kept(upstream, tmp_path):
    name = await upstream.put(b"weights")
    upstream.damage = flipped
    store = relay(upstream, tmp_path)
    for call in (store.get, lambda name: read(store, name)):
        with pytest.raises(Corrupt, match=name):
            await call(name)
    assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-1], lambda data: b""])
async def test_what_rots_here_is_fetched_again(upstream, tmp_path, damage):
    name, clock = await upstream.put(b"weights"), Time()
    store = relay(upstream, tmp_path, clock)
    for number, call in enumerate([store.get, lambda name: read(store, name)], start=2):
        await call(name)
        file(tmp_path, name).write_bytes(damage(b"weights"))
        clock.now += 61  # an open file is hashed at most once a minute
        assert await call(name) == b"weights"
        assert upstream.gets[name] == number
        assert file(tmp_path, name).read_bytes() == b"weights"
    file(tmp_path, name).unlink()
    clock.now += 61
    assert await read(store, name) == b"weights"
    file(tmp_path, name).write_bytes(damage(b"weights"))
    assert await read(relay(upstream, tmp_path), name) == b"weights"  # a new process trusts no file


async def test_refs_are_upstreams_and_asked_for_once_in_a_while(upstream, tmp_path):
    clock = Time()
    store = relay(upstream, tmp_path, clock, fresh_s=1.0)
    assert await store.read_ref("live") is None
    await upstream.inner.move_ref("live", None, ONE)
    assert await store.look("live") == CachedRef(ONE, 0.0)  # that there was none is not remembered
    await upstream.inner.move_ref("live", ONE, TWO)
    before = upstream.asked
    clock.now += 0.5
    assert await store.look("live") == CachedRef(ONE, 0.5)
    assert upstream.asked == before
    clock.now += 0.5
    assert await asyncio.gather(*(store.read_ref("live") for _ in range(20))) == [TWO] * 20
    assert upstream.asked == before + 1
    assert await store.refs() == {"live": TWO}


async def test_names_of_no_ref_take_no_memory(upstream, tmp_path):
    store = relay(upstream, tmp_path)
    for number in range(100):
        assert await store.read_ref(f"guess-{number}") is None
    assert store._refs._known == {}


async def test_while_upstream_is_away_the_last_known_refs_are_served_loudly(upstream, tmp_path, caplog):
    await upstream.move_ref("live", None, ONE)
    clock = Time()
    store = relay(upstream, tmp_path, clock, fresh_s=1.0, timeout_s=10.0)
    assert await store.read_ref("live") == ONE
    assert await store.refs() == {"live": ONE}
    upstream.away, before = True, upstream.asked
    for _ in range(9):
        clock.now += 1
        assert (await store.look("live")).value == ONE
        assert await store.refs() == {"live": ONE}
    assert upstream.asked == before + 1  # left alone for ten seconds
    assert (await store.look("live")).age_s == 9
    assert store.figures()["unreachable_s"] == 8
    with pytest.raises(Unavailable, match=r"canary.*does not answer"):
        await store.read_ref("canary")
    later = relay(upstream, tmp_path, Time())  # started while upstream is away
    assert await later.look("live") == CachedRef(ONE, None)
    assert await later.refs() == {"live": ONE}
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 2  # one for each relay
    upstream.away = False
    await upstream.inner.move_ref("live", ONE, TWO)
    clock.now += 10
    assert await store.look("live") == CachedRef(TWO, 0.0)
    assert store.figures()["unreachable_s"] is None
    assert "answers again" in caplog.text


async def test_a_ref_that_upstream_deleted_does_not_come_back_while_upstream_is_away(upstream, tmp_path):
    await upstream.move_ref("canary", None, ONE)
    await upstream.move_ref("live", None, TWO)
    assert await relay(upstream, tmp_path).read_ref("canary") == ONE
    await upstream.inner.delete_ref("canary", ONE)
    assert await relay(upstream, tmp_path).read_ref("canary") is None
    upstream.away = True
    with pytest.raises(Unavailable):
        await relay(upstream, tmp_path).read_ref("canary")


async def test_an_upstream_that_lost_all_refs_costs_no_ref_here(upstream, tmp_path):
    for ref, name in (("live", ONE), ("canary", TWO)):
        await upstream.move_ref(ref, None, name)
        assert await relay(upstream, tmp_path).read_ref(ref) == name
    upstream.inner.links.clear()  # as a directory that is not mounted
    store = relay(upstream, tmp_path)
    assert await store.read_ref("live") is await store.read_ref("canary") is None
    upstream.away = True
    store = relay(upstream, tmp_path)
    assert (await store.read_ref("live"), await store.read_ref("canary")) == (ONE, TWO)


async def tidied(store: RelayStore) -> None:
    if store._refs._cleaning is not None:
        await store._refs._cleaning


async def test_refs_of_old_versions_are_dropped_after_the_answer_and_beside_damaged_ones(
    upstream, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(module, "_KEPT_VERSION_REFS", 3)
    roots, local = [hash_of(bytes([number])) for number in range(10)], DirectoryStore(tmp_path)
    for number, root in enumerate(roots):
        await local.move_ref(f"version/{root}", None, ONE)
        os.utime(tmp_path / "refs" / "version" / root, (number, number))
    (tmp_path / "refs" / "canary").write_text("junk")
    await upstream.move_ref("live", None, roots[0])
    deleting, gate = DirectoryStore.delete_ref, asyncio.Event()

    async def delete_ref(self, ref, old, stamp=None):
        await gate.wait()
        if ref == f"version/{roots[1]}":
            raise Conflict("moved meanwhile")
        await deleting(self, ref, old, stamp)

    monkeypatch.setattr(DirectoryStore, "delete_ref", delete_ref)
    store = relay(upstream, tmp_path)
    async with asyncio.timeout(PATIENT_S):
        assert await store.read_ref("live") == roots[0]
        gate.set()
        await tidied(store)
    left = {path.name for path in (tmp_path / "refs" / "version").iterdir()}
    assert left == {roots[0], roots[1], *roots[-3:]}
    assert "not stored on disk" not in caplog.text


async def test_the_refs_of_old_versions_do_not_pile_up(upstream, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_VERSION_REFS", 3)
    monkeypatch.setattr(module, "_NEW_REFS_PER_CLEANUP", 2)
    roots = [hash_of(bytes([number])) for number in range(20)]
    store = relay(upstream, tmp_path)
    await upstream.inner.move_ref("live", None, roots[0])
    await store.read_ref("live")
    for number, root in enumerate(roots):
        await upstream.inner.move_ref(f"version/{root}", None, ONE)
        await store.read_ref(f"version/{root}")
        await tidied(store)
        os.utime(tmp_path / "refs" / "version" / root, (number, number))
    left = {ref for ref in await DirectoryStore(tmp_path).refs() if ref.startswith("version/")}
    assert {f"version/{root}" for root in (roots[0], roots[-1])} <= left
    assert len(left) <= 3 + 2 + 1
    assert {ref for ref in store._refs._known if ref.startswith("version/")} == left


async def test_an_upstream_that_hangs_is_given_up_on(upstream, tmp_path):
    await upstream.move_ref("live", None, ONE)
    assert await relay(upstream, tmp_path).read_ref("live") == ONE
    store = relay(upstream, tmp_path, fresh_s=0.0, timeout_s=0.02)
    upstream.gate.clear()
    async with asyncio.timeout(PATIENT_S):
        assert await store.read_ref("live") == ONE


async def test_writes_are_refused(upstream, tmp_path):
    store = relay(upstream, tmp_path)
    for call in (store.put(b"x"), store.move_ref("live", None, ONE)):
        with pytest.raises(BadConfig, match="can only be read"):
            await call


@pytest.mark.parametrize("restart", [False, True])
async def test_what_was_used_longest_ago_makes_room_also_after_a_restart(upstream, tmp_path, restart):
    names = [await upstream.put(bytes([n]) * 100) for n in range(4)]
    store = relay(upstream, tmp_path, max_bytes=300)
    for name in names[:3]:
        await store.get(name)
    await store.get(names[0])
    store = relay(upstream, tmp_path, max_bytes=300) if restart else store
    await store.get(names[3])
    assert [file(tmp_path, name).exists() for name in names] == [True, False, True, True]
    store = relay(upstream, tmp_path, max_bytes=200)  # a smaller cap holds from the start
    assert [file(tmp_path, name).exists() for name in names] == [True, False, False, True]
    assert store.figures()["bytes"] == 200


async def test_what_is_being_read_stays(upstream, tmp_path):
    one, two, three = [await upstream.put(bytes([n]) * 100) for n in range(3)]
    store = relay(upstream, tmp_path, max_bytes=200)
    async with store.opened(one) as path:
        await store.get(two)
        await store.get(three)
        assert path.read_bytes() == bytes(100)
        assert not file(tmp_path, two).exists()
        async with store.opened(three):
            assert await store.get(two) == b"\1" * 100  # passed on, not kept
            with pytest.raises(StorageFull, match=r"relay\.max_bytes"):
                await read(store, two)
    assert await read(store, two) == b"\1" * 100


async def test_a_full_disk_costs_the_cache_not_the_answer(upstream, tmp_path, caplog):
    name = await upstream.put(b"weights")
    store = RelayStore(upstream, DirectoryStore(tmp_path, disk := FaultyDisk()), RelayConfig(), Time())
    disk.fail_at, disk.sticky = len(disk.calls) + 1, True
    assert await store.get(name) == b"weights"
    assert "not cached" in caplog.text
    with pytest.raises(StorageFull):
        await read(store, name)
    disk.fail_at = 0
    assert await read(store, name) == b"weights"


async def test_a_disk_that_has_become_read_only_costs_the_cache_not_the_answer(upstream, tmp_path, monkeypatch):
    names = [await upstream.put(bytes([n]) * 100) for n in range(3)]
    store = RelayStore(
        upstream, DirectoryStore(tmp_path, disk := FaultyDisk()), RelayConfig().model_copy(update={"max_bytes": 200})
    )
    for name in names[:2]:
        await store.get(name)
    file(tmp_path, names[1]).write_bytes(b"rotten")

    def read_only(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    disk.fail_at, disk.sticky = len(disk.calls) + 1, True
    monkeypatch.setattr(Path, "unlink", read_only)
    assert await store.get(names[2]) == b"\2" * 100, "the first would have to make room"
    assert await store.get(names[1]) == b"\1" * 100, "what is damaged here cannot be removed"


async def test_the_order_of_use_is_kept_without_touching_when_a_file_was_written(tmp_path):
    store = DirectoryStore(tmp_path)
    shelf = Shelf(store, 1000)
    await shelf.put(ONE, b"1")
    os.utime(file(tmp_path, ONE), ns=(5, 7))
    await shelf.get(ONE)
    at = file(tmp_path, ONE).stat()
    assert at.st_mtime_ns == 7
    assert at.st_atime_ns > 1e18


async def test_too_many_open_files_drop_nothing_from_the_cache(upstream, tmp_path, monkeypatch):
    name, clock, opened = await upstream.put(b"weights"), Time(), Path.open
    store = relay(upstream, tmp_path, clock)
    await store.get(name)
    clock.now += 3600.0
    upstream.away = True

    def refused(path, *args, **more):
        if path == file(tmp_path, name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *args, **more)

    with monkeypatch.context() as crowded:
        crowded.setattr(Path, "open", refused)
        for call in (store.get, lambda name: read(store, name)):
            with pytest.raises(Unavailable, match="cannot be read now"):
                await call(name)
    assert await store.get(name) == await read(store, name) == b"weights"
