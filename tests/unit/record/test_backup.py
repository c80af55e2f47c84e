"""A backup is a prefix of the log with every row that was there when it began; what is not whole, or not what it says, is not restored."""

import asyncio
import json
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_rows import collect, firsts, one_of_each, signal

from ostinato.core.errors import BadConfig, Conflict, Corrupt, NotFound, OstinatoError, StorageFull
from ostinato.core.records import Row, Turn
from ostinato.record import backup as module
from ostinato.record.backup import FORMAT, KEYS, MANIFEST, Manifest, back_up
from ostinato.record.codec.kinds import FOR_EVER
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.restore import restore
from ostinato.record.segments import schema
from ostinato.record.segments.directory import LogDirectory
from ostinato.record.sqlite import connect
from ostinato.testing.records import a_turn

SMALL = RecordConfig(segment_rows=7, retain_days=1.0)


def saved(run: Path, target: Path, on_bytes: Callable[[int, int], object] = lambda done, total: None) -> Manifest:
    return back_up(LogDirectory(run / "log"), run / KEYS, target, "0.0.0", lambda: 5.0, on_bytes)


def put_back(
    source: Path, run: Path, *others: Path, master: Path | None = None, on_bytes: Any = lambda done, total: None
) -> tuple[Manifest, int]:
    run.mkdir(exist_ok=True)
    return restore(source, LogDirectory(run / "log"), run / KEYS, others, master, on_bytes)


@contextmanager
def opened(run: Path, config: RecordConfig = SMALL) -> Iterator[SqlLog]:
    with SqlLog.open(run / "log", lambda: 1.0, config) as log:
        yield log


async def rows_of(run: Path, config: RecordConfig = SMALL) -> list[tuple[int, Row]]:
    with opened(run, config) as log:
        return await collect(log)


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run with rows of every kind in several segments."""
    with opened(tmp_path / "run") as log:
        for i in range(5):
            await log.append(*one_of_each(i))
    return tmp_path / "run"


@pytest.fixture
async def kept(run: Path, tmp_path: Path) -> Path:
    """A backup of it."""
    saved(run, tmp_path / "kept")
    return tmp_path / "kept"


# ---------------------------------------------------------------- what is in it


async def test_a_restored_log_has_the_same_rows_and_goes_on(run: Path, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    made = saved(run, tmp_path / "kept", lambda done, total: seen.append((done, total)))
    assert (made.format, made.first, made.last, made.at) == (FORMAT, 1, 50, 5.0)
    assert seen[-1] == (sum(file.size for file in made.files),) * 2
    assert all(done <= total for done, total in seen)
    found = tmp_path / "kept"
    assert sorted(path.name for path in found.iterdir()) == [
        *[f"{first:016d}.db" for first in firsts(run / "log")],
        MANIFEST,
    ]
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in found.iterdir()} == {0o600}
    put_back(found, tmp_path / "new")
    with opened(tmp_path / "new") as log:
        assert await collect(log) == await rows_of(run)
        assert await log.append(signal(99), signal(0)) == 51
        (mode,) = log._appender._head.segment.db.execute("PRAGMA journal_mode").fetchone()  # type: ignore[union-attr]
        assert mode == "wal"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["log"]
    assert stat.S_IMODE((tmp_path / "new" / "log").stat().st_mode) == 0o700


async def test_an_empty_log_can_be_backed_up_and_restored(tmp_path: Path):
    with opened(tmp_path / "run"):
        pass
    assert saved(tmp_path / "run", tmp_path / "kept").last == 0
    put_back(tmp_path / "kept", tmp_path / "new")
    assert await rows_of(tmp_path / "new") == []


async def test_rows_that_come_while_it_copies_leave_a_prefix(run: Path, tmp_path: Path):
    """Each report of progress lets the log grow by whole segments; the backup ends nevertheless."""
    with opened(run) as log:
        until, number = log.newest(), 100
        loop = asyncio.get_running_loop()

        def grow(_: int, __: int) -> None:
            nonlocal number
            for _ in range(3):
                number += 1
                asyncio.run_coroutine_threadsafe(log.append(*one_of_each(number)), loop).result()

        made = await asyncio.to_thread(saved, run, tmp_path / "kept", grow)
        assert until <= made.last < log.newest()
        put_back(tmp_path / "kept", tmp_path / "new")
        assert await rows_of(tmp_path / "new") == [item for item in await collect(log) if item[0] <= made.last]


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("keep_after", [15, 25, 1000])
async def test_segments_that_retention_drops_meanwhile_are_left_out_and_their_permanent_rows_are_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, keep_after: int
):
    """Before each segment is copied in turn: then the ones that were copied before are gone, too."""
    segment, at = module._Copy._segment, firsts(run / "log")[before]
    with opened(run) as log:
        loop, whole = asyncio.get_running_loop(), await collect(log)

        def dropping(self: Any, first: int) -> Any:
            if first == at:
                asyncio.run_coroutine_threadsafe(log.drop_old(1e9, keep_after), loop).result()
            return segment(self, first)

        monkeypatch.setattr(module._Copy, "_segment", dropping)
        made = await asyncio.to_thread(saved, run, tmp_path / "kept")
        assert (made.first > at) == (at + 9 <= keep_after)  # each segment has ten rows
        put_back(tmp_path / "kept", tmp_path / "new")
        with opened(tmp_path / "new") as new:
            restored, permanent = await collect(new), {kind.record for kind in FOR_EVER}
            assert restored == [(seq, row) for seq, row in whole if seq >= made.first or type(row) in permanent]
            assert await new.horizon() == made.first - 1
            everything = [type(row) for _, row in restored]
            for kind in set(everything):  # permanent rows that are in two places count once
                assert await new.before_last(everything.count(kind) + 1, kind) == 0


async def test_a_backup_of_a_log_that_retention_has_cut_has_its_permanent_rows(run: Path, tmp_path: Path):
    with opened(run) as log:
        await log.drop_old(1e9, 1000)
        whole = await collect(log)
    made = saved(run, tmp_path / "kept")
    assert made.first > 1
    put_back(tmp_path / "kept", tmp_path / "new")
    assert await rows_of(tmp_path / "new") == whole


async def test_a_segment_that_a_killed_process_left_empty_is_left_out(run: Path, tmp_path: Path):
    with opened(run) as log:
        await log.drop_old(1e9, 30)
        whole = await collect(log)
    schema.create(LogDirectory(run / "log").segment(3), 3, 1.0)
    assert saved(run, tmp_path / "kept").first > 3
    put_back(tmp_path / "kept", tmp_path / "new")
    assert await rows_of(tmp_path / "new") == whole


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    appends=st.lists(st.integers(1, 9), max_size=8),
    segment_rows=st.integers(1, 12),
    cut=st.integers(0, 40),
    encrypt=st.sampled_from(["none", "user"]),
)
async def test_any_log_comes_back(tmp_path: Path, appends: list[int], segment_rows: int, cut: int, encrypt: str):
    root = tmp_path / "each"
    shutil.rmtree(root, ignore_errors=True)
    config = RecordConfig(segment_rows=segment_rows, retain_days=1.0, encrypt=encrypt)  # type: ignore[arg-type]
    with opened(root / "run", config) as log:
        for i, count in enumerate(appends):
            await log.append(*one_of_each(i)[:count])
        await log.drop_old(1e9, cut)
        whole, horizon, newest = await collect(log), await log.horizon(), log.newest()
    made = saved(root / "run", root / "kept")
    assert (made.first, made.last) == (horizon + 1, newest)
    put_back(root / "kept", root / "new")
    assert await rows_of(root / "new", config) == whole


# ---------------------------------------------------------------- a backup that cannot be made


async def test_a_directory_that_is_not_empty_is_refused_and_left_alone(run: Path, tmp_path: Path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").touch()
    with pytest.raises(BadConfig, match="is not empty; name a new directory"):
        saved(run, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["mine"]


def test_what_is_no_log_is_refused(tmp_path: Path):
    with pytest.raises(NotFound, match=r"there is no log in .*; name the run in run\.directory"):
        saved(tmp_path, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


async def test_a_full_disk_is_said_and_leaves_an_empty_directory(run: Path, tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (40_000, hard)
    )  # a segment's -shm file has 32 KiB, the segment more than this
    try:
        with pytest.raises(StorageFull, match=r"kept.*free space"):
            saved(run, tmp_path / "kept")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "kept").iterdir()) == []
    saved(run, tmp_path / "kept")


class Killed(BaseException):
    """Stands for kill -9."""


async def test_a_killed_backup_is_refused_by_restore(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def kill(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(module, "_publish", kill)
    monkeypatch.setattr(module._Copy, "discard", lambda self: None)
    with pytest.raises(Killed):
        saved(run, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) > 3
    with pytest.raises(NotFound, match="or one that was interrupted"):
        put_back(tmp_path / "kept", tmp_path / "new")
    with pytest.raises(BadConfig, match="what an interrupted backup left"):
        saved(run, tmp_path / "kept")


# ---------------------------------------------------------------- a backup that is not restored


def change(kept: Path, **changed: Any) -> None:
    manifest = json.loads((kept / MANIFEST).read_text())
    (kept / MANIFEST).write_text(json.dumps(manifest | changed))


def files(kept: Path) -> list[dict[str, Any]]:
    return json.loads((kept / MANIFEST).read_text())["files"]


def flip(kept: Path) -> None:
    path = kept / files(kept)[1]["name"]
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def cut_short(kept: Path) -> None:
    os.truncate(kept / files(kept)[1]["name"], 4096)


def grown(kept: Path) -> None:
    with (kept / files(kept)[1]["name"]).open("ab") as file:
        file.write(b"more")


def missing(kept: Path) -> None:
    (kept / files(kept)[1]["name"]).unlink()


def left_out(kept: Path) -> None:
    change(kept, files=[*files(kept)[:2], *files(kept)[3:]])


def newest_left_out(kept: Path) -> None:
    change(kept, files=files(kept)[:-1])


def linked(kept: Path) -> None:
    path = kept / files(kept)[1]["name"]
    path.rename(kept.parent / "elsewhere.db")
    path.symlink_to(kept.parent / "elsewhere.db")


def named(name: str) -> Callable[[Path], None]:
    def rename(kept: Path) -> None:
        first, *others = files(kept)
        (kept.parent / "0000000000000001.db").write_bytes((kept / first["name"]).read_bytes())
        change(kept, files=[first | {"name": name}, *others])

    return rename


def twice(kept: Path) -> None:
    change(kept, files=[files(kept)[0], *files(kept)])


def swapped(kept: Path) -> None:
    one, two, *others = files(kept)
    for file, name in ((one, two["name"]), (two, one["name"])):
        (kept / file["name"]).rename(kept / f"{name}.new")
    for file in (one, two):
        (kept / f"{file['name']}.new").rename(kept / file["name"])
    change(kept, files=[one | {"name": two["name"]}, two | {"name": one["name"]}, *others])


def directory(kept: Path) -> None:
    path = kept / files(kept)[1]["name"]
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (flip, Corrupt, "was changed since the backup was made"),
        (cut_short, Corrupt, "was changed since the backup was made"),
        (grown, Corrupt, "was changed since the backup was made"),
        (missing, Corrupt, "is missing"),
        (left_out, Corrupt, "are not the rows that its manifest says"),
        (newest_left_out, Corrupt, "are not the rows that its manifest says"),
        (swapped, Corrupt, "are not the rows that its manifest says"),
        (linked, Corrupt, "is a link or no file"),
        (directory, Corrupt, "is a link or no file"),
        (twice, Corrupt, "names a file twice"),
        (named("../0000000000000001.db"), Corrupt, "is no file of a log"),
        (named("/etc/passwd"), Corrupt, "is no file of a log"),
        (named("a/../0000000000000001.db"), Corrupt, "is no file of a log"),
        (named("0000000000000001.db\n"), Corrupt, "is no file of a log"),
        (named("postgres"), Corrupt, "is no file of a log"),
        (lambda kept: change(kept, format=FORMAT + 1), BadConfig, "restore it with the Ostinato that made it"),
        (lambda kept: change(kept, format="one"), Corrupt, "cannot be read"),
        (lambda kept: change(kept, files=[]), Corrupt, "are not the rows"),
        (lambda kept: change(kept, more=1), Corrupt, "cannot be read"),
        (lambda kept: change(kept, last=7), Corrupt, "are not the rows"),
        (lambda kept: (kept / MANIFEST).write_text("[" * 100_000), Corrupt, "cannot be read"),
        (lambda kept: (kept / MANIFEST).write_text("3"), Corrupt, "cannot be read"),
        (lambda kept: (kept / MANIFEST).unlink(), NotFound, "holds no manifest.json"),
    ],
)
async def test_a_backup_that_was_tampered_with_is_refused_and_nothing_is_installed(
    kept: Path, tmp_path: Path, damage: Callable[[Path], None], error: type[OstinatoError], said: str
):
    damage(kept)
    with pytest.raises(error, match=said):
        put_back(kept, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


async def test_a_link_in_place_of_the_manifest_is_not_followed(kept: Path, tmp_path: Path):
    (kept / MANIFEST).rename(tmp_path / "elsewhere")
    (kept / MANIFEST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corrupt, match="is a link or no file"):
        put_back(kept, tmp_path / "new")


@pytest.mark.parametrize("place", [0, -1])
async def test_a_segment_of_a_newer_format_is_refused(run: Path, tmp_path: Path, sql: Any, place: int):
    with opened(run) as log:
        await log.drop_old(1e9, 15)
    saved(run, tmp_path / "kept")
    name = files(tmp_path / "kept")[place]["name"]  # the last one holds the permanent rows
    sql(tmp_path / "kept" / name, "PRAGMA user_version=99")
    whole = [module._described(tmp_path / "kept" / file["name"]).model_dump() for file in files(tmp_path / "kept")]
    change(tmp_path / "kept", files=whole)
    with pytest.raises(BadConfig, match="has format 99"):
        put_back(tmp_path / "kept", tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


# ---------------------------------------------------------------- where it is restored


async def test_a_log_that_is_there_is_not_overwritten(run: Path, kept: Path):
    before = await rows_of(run)
    with pytest.raises(Conflict, match=r"move it away \(mv .*log .*log\.old\)"):
        put_back(kept, run)
    assert await rows_of(run) == before


async def test_a_damaged_log_counts_as_one_that_is_there(kept: Path, tmp_path: Path):
    (tmp_path / "new" / "log").mkdir(parents=True)
    (tmp_path / "new" / "log" / "0000000000000001.db").write_bytes(b"no database" * 1000)
    with pytest.raises(Conflict, match="there is a log"):
        put_back(kept, tmp_path / "new")


async def test_a_link_in_place_of_the_log_is_not_replaced(kept: Path, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "log").symlink_to(tmp_path / "disk")
    with pytest.raises(BadConfig, match="is a link"):
        put_back(kept, tmp_path / "new")
    assert list((tmp_path / "disk").iterdir()) == []


async def test_a_log_without_rows_is_replaced(run: Path, kept: Path, tmp_path: Path):
    with opened(tmp_path / "new"):
        pass
    put_back(kept, tmp_path / "new")
    assert await rows_of(tmp_path / "new") == await rows_of(run)


async def test_a_restore_that_is_killed_anywhere_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed before each call that changes a file or a name, with an empty log and a file of keys in place."""
    config = RecordConfig(segment_rows=7, encrypt="user")  # type: ignore[arg-type]
    turns = [a_turn(f"t{i}:0", user=f"u{i}") for i in range(20)]
    with opened(tmp_path / "run", config) as log:
        await log.append(*turns)
        saved(tmp_path / "run", tmp_path / "kept")
        await log.forget("default", "u3")
        whole = await collect(log)
    shutil.copy(tmp_path / "run" / KEYS, tmp_path / "newest-keys.db")
    for point in range(1000):
        new = tmp_path / f"new{point}"
        with opened(new, config):
            pass
        shutil.copy(tmp_path / "newest-keys.db", new / KEYS)
        if not _killed_at(point, tmp_path / "kept", new, monkeypatch):
            break
        with suppress(Conflict):  # it was complete
            put_back(tmp_path / "kept", new)
        assert await rows_of(new, config) == whole
        assert {path.name for path in new.iterdir()} <= {"log", KEYS, ".log.replaced"}
    assert point > 10


def _killed_at(point: int, kept: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    calls = 0

    def dying(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > point:  # nothing that would clean up works any more
                raise Killed
            return act(*args, **named)

        return call

    with monkeypatch.context() as patched:
        for place, name in ((os, "open"), (os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
            patched.setattr(place, name, dying(getattr(place, name)))
        with suppress(Killed):
            put_back(kept, new)
            return False
    return True


# ---------------------------------------------------------------- keys


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
    assert [number for (number,) in sqlite_rows(run / KEYS, "SELECT id FROM keys ORDER BY id")] == [1, 4]


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
