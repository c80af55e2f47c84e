"""The keys of a restored log: what was forgotten stays so, whenever that was, and no key that rows lie under is lost."""

import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from record_backups import killed_at, opened, put_back, rows_of, saved
from record_rows import collect
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Turn
from ostinato.record import backup as module
from ostinato.record import keys as keys_module
from ostinato.record import restore as restoring
from ostinato.record.backup import KEYS
from ostinato.record.config import RecordConfig
from ostinato.record.keys import KeyRing, Scope, rekey
from ostinato.record.restore import restore
from ostinato.record.segment_directory import LogDirectory
from ostinato.record.sqlite import connect
from ostinato.testing.records import a_turn

USER = RecordConfig(segment_rows=7, encrypt="user")  # type: ignore[arg-type]


def turn(i: int, user: str) -> Turn:
    return a_turn(f"t{i}:0", user=user)


async def redacted(run: Path, config: RecordConfig = USER) -> list[str]:
    return [row.id for _, row in await rows_of(run, config) if isinstance(row, Turn) and row.redacted]


async def test_the_keys_are_copied_after_the_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A person who comes while the segments are copied has their key in the backup."""
    with opened(tmp_path / "run", USER) as log:
        await log.append(*[turn(i, f"u{i}") for i in range(20)])
        segments = module._Copy.segments

        def later(self: Any) -> Any:
            copied = segments(self)
            asyncio.run_coroutine_threadsafe(log.append(turn(50, "late")), loop).result()
            return copied

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(module._Copy, "segments", later)
        await asyncio.to_thread(saved, tmp_path / "run", tmp_path / "kept")
    keys = sqlite_rows(tmp_path / "kept" / KEYS, "SELECT scope FROM keys")
    assert ('["default", "late", null]',) in keys
    put_back(tmp_path / "kept", tmp_path / "new")
    assert len(await rows_of(tmp_path / "new", USER)) == 20


def sqlite_rows(path: Path, query: str) -> list[Any]:
    import pysqlite3.dbapi2 as driver

    connection: Any = driver.connect(str(path))  # type: ignore[attr-defined]
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


async def test_what_was_forgotten_since_the_backup_stays_forgotten(tmp_path: Path):
    run, old = tmp_path / "run", tmp_path / "old"
    with opened(run, USER) as log:
        await log.append(*[turn(i, f"u{i % 4}") for i in range(12)])
        saved(run, old)
        await log.append(turn(20, "u9"))
        saved(run, tmp_path / "newer")
        await log.forget("default", "u2")
        await log.forget("default", "u9")
        await log.append(turn(30, "u2"))  # somebody of that name comes again
    (run / "log").rename(run / "log.old")
    manifest, destroyed = put_back(old, run)
    assert (manifest.last, destroyed) == (12, 1)
    assert await redacted(run) == ["t2:0", "t6:0", "t10:0"]

    # the restored file still knows of the key that the older backup did not have
    (run / "log").rename(run / "log.older")
    assert put_back(tmp_path / "newer", run)[1] == 2
    assert await redacted(run) == ["t2:0", "t6:0", "t10:0", "t20:0"]

    # on another machine the newest file of keys is named
    assert put_back(old, tmp_path / "bare")[1] == 0
    assert await redacted(tmp_path / "bare") == []
    assert put_back(old, tmp_path / "new", run / KEYS)[1] == 1
    assert await redacted(tmp_path / "new") == ["t2:0", "t6:0", "t10:0"]


async def test_no_trace_of_a_key_that_was_forgotten_is_restored(tmp_path: Path):
    run = tmp_path / "run"
    with opened(run, USER) as log:
        await log.append(*[turn(i, f"u{i}") for i in range(40)])
        saved(run, tmp_path / "kept")
        ((secret,),) = sqlite_rows(run / KEYS, "SELECT secret FROM keys WHERE tenant = 'default' AND id = 7")
        await log.forget("default")
    (run / "log").rename(run / "log.old")
    assert secret[1:] in (tmp_path / "kept" / KEYS).read_bytes()
    assert put_back(tmp_path / "kept", run)[1] == 40
    assert [path for path in run.rglob("*") if path.is_file() and secret[1:] in path.read_bytes()] == []


async def test_keys_that_are_made_after_a_restore_have_new_numbers(tmp_path: Path):
    run = tmp_path / "run"
    with opened(run, USER) as log:
        await log.append(turn(0, "u0"))
        saved(run, tmp_path / "kept")
        await log.append(turn(1, "u1"), turn(2, "u2"))
    (run / "log").rename(run / "log.old")
    put_back(tmp_path / "kept", run)
    with opened(run, USER) as log:
        await log.append(turn(3, "u3"))
    assert [number for (number,) in sqlite_rows(run / KEYS, "SELECT id FROM keys ORDER BY id")] == [1, 2, 3, 4]
    put_back(tmp_path / "kept", tmp_path / "new", run / KEYS)  # of another file only what is destroyed is taken
    with opened(tmp_path / "new", USER) as log:
        await log.append(turn(3, "u3"))
    assert [number for (number,) in sqlite_rows(tmp_path / "new" / KEYS, "SELECT id FROM keys ORDER BY id")] == [1, 5]


@pytest.mark.parametrize("wrapped", [True, False])
async def test_a_log_that_was_moved_away_can_be_read_with_the_keys_after_a_restore(tmp_path: Path, wrapped: bool):
    """Also with what was written after the backup, while nothing was forgotten; keys from before the master key are wrapped."""
    run, master = tmp_path / "run", tmp_path / "master"
    master.write_bytes(b"m" * 40)
    config = USER.model_copy(update={"master_key": master})
    with opened(run, config if wrapped else USER) as log:
        await log.append(turn(0, "u0"))
        saved(run, tmp_path / "kept")
        await log.append(turn(1, "u1"), turn(2, "u2"))
        await log.forget("default", "u2")
        whole = await collect(log)
    (run / "log").rename(run / "log.old")
    put_back(tmp_path / "kept", run, master=master)
    assert {secret[:1] for (secret,) in sqlite_rows(run / KEYS, "SELECT secret FROM keys WHERE secret NOTNULL")} == {
        b"\1"
    }
    assert await rows_of(run, config) == whole[:1]
    (run / "log").rename(run / "log.restored")
    (run / "log.old").rename(run / "log")
    assert await rows_of(run, config) == whole


async def test_keys_of_the_run_that_the_master_key_does_not_open_are_not_lost(tmp_path: Path):
    run = tmp_path / "run"
    for name in ("before", "since"):
        (tmp_path / name).write_bytes(name.encode() * 40)
    with opened(run, USER.model_copy(update={"master_key": tmp_path / "before"})) as log:
        await log.append(turn(0, "u0"))
    saved(run, tmp_path / "kept")
    rekey(run / KEYS, tmp_path / "before", tmp_path / "since")
    with opened(run, USER.model_copy(update={"master_key": tmp_path / "since"})) as log:
        await log.append(turn(1, "u1"), turn(2, "u2"))
        await log.forget("default", "u0")
    (run / "log").rename(run / "log.old")
    found = (run / KEYS).read_bytes()
    with pytest.raises(BadConfig, match=r"opens the keys of the backup, but not those in .* name it with --keys"):
        put_back(tmp_path / "kept", run, master=tmp_path / "before")
    with pytest.raises(BadConfig, match=r"does not open the keys in .*kept"):
        put_back(tmp_path / "kept", run, master=tmp_path / "since")
    assert (run / KEYS).read_bytes() == found
    assert sorted(path.name for path in run.iterdir()) == [KEYS, "log.old"]
    (run / KEYS).rename(tmp_path / "aside.db")
    assert put_back(tmp_path / "kept", run, tmp_path / "aside.db", master=tmp_path / "before")[1] == 1


async def test_a_backup_from_before_a_new_master_key_is_restored_with_both(tmp_path: Path):
    """Beside the run's own keys, which are under the new one, or alone; what was forgotten since stays so."""
    run = tmp_path / "run"
    for name in ("before", "since", "wrong"):
        (tmp_path / name).write_bytes(name.encode() * 40)
    before, since = tmp_path / "before", tmp_path / "since"
    config = USER.model_copy(update={"master_key": since})
    with opened(run, USER.model_copy(update={"master_key": before})) as log:
        await log.append(turn(0, "u0"), turn(1, "u1"))
    saved(run, tmp_path / "kept")
    rekey(run / KEYS, before, since)
    with opened(run, config) as log:
        await log.append(turn(2, "u2"))
        await log.forget("default", "u0")
    (run / "log").rename(run / "log.old")
    found = (run / KEYS).read_bytes()
    for old, said in (
        (None, r"name the old one's file with --old-master"),
        (tmp_path / "wrong", "--old-master does not open"),
    ):
        with pytest.raises(BadConfig, match=said):
            put_back(tmp_path / "kept", run, master=since, old_master=old)
        assert (run / KEYS).read_bytes() == found
    assert put_back(tmp_path / "kept", run, master=since, old_master=before)[1] == 1
    assert await redacted(run, config) == ["t0:0"]
    assert put_back(tmp_path / "kept", tmp_path / "new", master=since, old_master=before)[1] == 0
    assert await rows_of(tmp_path / "new", config) == [(1, turn(0, "u0")), (2, turn(1, "u1"))]
    (run / "log").rename(run / "log.restored")
    (run / "log.old").rename(run / "log")
    assert [row.id for _, row in await rows_of(run, config)] == ["t0:0", "t1:0", "t2:0", "forgotten-key-1"]


KILLED_WRITING = """
import os, signal, sys
from pathlib import Path

from ostinato.record import restore as module
from ostinato.record.segment_directory import LogDirectory

kept, run, master, steps = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
wrap = module.rewrap

def then_dies(db, before, after):
    wrap(db, before, after)  # the file is written next, by VACUUM INTO; with a small cache, page by page
    db.execute("PRAGMA cache_size=2")
    db.set_progress_handler(lambda: os.kill(os.getpid(), signal.SIGKILL), steps)

module.rewrap = then_dies
module.restore(kept, LogDirectory(run / "log"), run / "log-keys.db", [], master, lambda *_: None)
"""


async def test_a_restore_that_is_killed_while_it_writes_the_keys_leaves_none_that_count(tmp_path: Path):
    run, master = tmp_path / "run", tmp_path / "master"
    master.write_bytes(b"m" * 40)
    config = USER.model_copy(update={"master_key": master})
    with opened(run, config) as log:
        await log.append(*[turn(i, f"u{i}") for i in range(600)])
        saved(run, tmp_path / "kept")
        await log.forget("default", "u3")
    (run / "log").rename(tmp_path / "log.old")
    found, half = (run / KEYS).read_bytes(), run / ".log.restoring" / KEYS
    sizes = set[int]()
    for steps in (10, 1_500, 3_000):
        command = [sys.executable, "-c", KILLED_WRITING, *map(str, (tmp_path / "kept", run, master, steps))]
        ended = await asyncio.to_thread(FORK_SERVER.run, command, timeout=WHOLE_PROGRAM_S)
        assert ended.returncode == -signal.SIGKILL
        assert (run / KEYS).read_bytes() == found
        assert not (run / "log").exists()
        sizes.add(half.stat().st_size)
    assert len(sizes) == 3, "each time more of the file was written"
    assert put_back(tmp_path / "kept", run, master=master)[1] == 1
    assert await redacted(run, config) == ["t3:0"]
    assert not half.parent.exists()


async def test_a_file_of_keys_with_the_same_owners_and_other_keys_is_of_another_log(tmp_path: Path):
    for name in ("run", "other"):
        with opened(tmp_path / name, USER) as log:
            await log.append(turn(0, "ann"))
    saved(tmp_path / "run", tmp_path / "kept")
    shutil.rmtree(tmp_path / "other" / "log")
    found = (tmp_path / "other" / KEYS).read_bytes()
    with pytest.raises(BadConfig, match="is the file of keys of another log"):
        put_back(tmp_path / "kept", tmp_path / "other")
    assert (tmp_path / "other" / KEYS).read_bytes() == found


async def test_who_is_forgotten_while_a_log_is_restored_is_not_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before the keys are read it counts; afterwards the command fails, and does its work when it is called again."""
    run = tmp_path / "run"
    with opened(run, USER) as log:
        await log.append(*[turn(i, f"u{i}") for i in range(3)])
    saved(run, tmp_path / "kept")
    (run / "log").rename(run / "log.old")
    monkeypatch.setattr(keys_module, "_WAIT_S", 0.2)
    early = KeyRing(run / KEYS, None, lambda: 1.0)
    waiting = KeyRing(run / KEYS, None, lambda: 1.0)

    def forget(ring: KeyRing, user: str) -> int:
        return ring.forget("default", [Scope("default", user=user)])

    def before_install() -> None:
        with pytest.raises(Unavailable, match="locked"):
            forget(waiting, "u1")

    def reading(done: int, total: int) -> None:
        forget(early, "u0")

    source = LogDirectory(run / "log")
    assert restore(tmp_path / "kept", source, run / KEYS, [], None, reading, before_install)[1] == 1
    with pytest.raises(Unavailable, match="readonly"):  # it has the file that was replaced
        forget(waiting, "u1")
    assert await redacted(run) == ["t0:0"]
    again = KeyRing(run / KEYS, None, lambda: 1.0)
    assert forget(again, "u1") == 1
    for ring in (early, waiting, again):
        ring.close()
    assert await redacted(run) == ["t0:0", "t1:0"]


async def test_a_restore_waits_for_a_process_that_changes_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    with opened(run, USER) as log:
        await log.append(turn(0, "ann"))
    saved(run, tmp_path / "kept")
    (run / "log").rename(run / "log.old")
    writer: Any = connect(run / KEYS, write=True)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE keys SET secret = NULL")
    monkeypatch.setattr(restoring, "_WAIT_S", 0.2)
    with pytest.raises(Unavailable, match=r"another process uses .*log-keys\.db"):
        put_back(tmp_path / "kept", run)
    assert not (run / "log").exists()
    monkeypatch.setattr(restoring, "_WAIT_S", 60.0)
    waiting = asyncio.create_task(asyncio.to_thread(put_back, tmp_path / "kept", run))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    writer.execute("COMMIT")
    writer.close()
    assert (await waiting)[1] == 1


async def test_a_killed_restore_leaves_no_key_that_was_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed before each call that changes a file or a name: a forgotten key is never on the run's disk again."""
    run = tmp_path / "run"
    with opened(run, USER) as log:
        await log.append(*[turn(i, f"u{i}") for i in range(20)])
        saved(run, tmp_path / "kept")
        ((secret,),) = sqlite_rows(run / KEYS, "SELECT secret FROM keys WHERE scope LIKE '%\"u3\"%'")
        await log.forget("default", "u3")
    shutil.copy(run / KEYS, tmp_path / "newest-keys.db")
    for point in range(1000):
        new = tmp_path / f"new{point}"
        new.mkdir()
        shutil.copy(tmp_path / "newest-keys.db", new / KEYS)
        if not killed_at(point, tmp_path / "kept", new, monkeypatch):
            break
        assert [path for path in new.rglob("*") if path.is_file() and secret[1:] in path.read_bytes()] == []
    assert point > 10


async def test_the_keys_of_another_log_are_refused(tmp_path: Path):
    for name, user in (("run", "ann"), ("other", "bob")):
        with opened(tmp_path / name, USER) as log:
            await log.append(turn(0, user))
    saved(tmp_path / "run", tmp_path / "kept")
    with pytest.raises(BadConfig, match="is the file of keys of another log"):
        put_back(tmp_path / "kept", tmp_path / "new", tmp_path / "other" / KEYS)
    assert list((tmp_path / "new").iterdir()) == []


async def test_keys_stay_wrapped_and_a_wrong_master_key_is_refused_before_anything_is_installed(tmp_path: Path):
    (tmp_path / "right").write_bytes(b"r" * 40)
    (tmp_path / "wrong").write_bytes(b"w" * 40)
    config = USER.model_copy(update={"master_key": tmp_path / "right"})
    with opened(tmp_path / "run", config) as log:
        await log.append(turn(0, "ann"))
    saved(tmp_path / "run", tmp_path / "kept")
    ((secret,),) = sqlite_rows(tmp_path / "kept" / KEYS, "SELECT secret FROM keys")
    assert secret[:1] == b"\1"
    assert [path for path in (tmp_path / "kept").iterdir() if b"r" * 40 in path.read_bytes()] == []
    for master, said in ((tmp_path / "wrong", "does not open the keys"), (None, "are wrapped with a master key")):
        with pytest.raises(BadConfig, match=said):
            put_back(tmp_path / "kept", tmp_path / "new", master=master)
        assert list((tmp_path / "new").iterdir()) == []
    put_back(tmp_path / "kept", tmp_path / "new", master=tmp_path / "right")
    assert await rows_of(tmp_path / "new", config) == [(1, turn(0, "ann"))]


async def test_a_key_that_is_being_made_delays_a_backup_and_fails_it_not(tmp_path: Path):
    with opened(tmp_path / "run", USER) as log:
        await log.append(turn(0, "ann"))
    writer: Any = connect(tmp_path / "run" / KEYS, write=True)
    writer.execute("BEGIN EXCLUSIVE")
    saving = asyncio.create_task(asyncio.to_thread(saved, tmp_path / "run", tmp_path / "kept"))
    await asyncio.sleep(0.5)
    assert not saving.done()
    writer.execute("COMMIT")
    writer.close()
    assert (await saving).last == 1
