"""A backup is a prefix of the log with every row that was there when it began; what is not whole, or not what it says, is not restored."""

import asyncio
import json
import os
import resource
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_backups import Killed, killed_at, opened, put_back, rows_of, saved
from record_rows import collect, firsts, one_of_each, signal
from tests.grids import covering

from ostinato.core.errors import BadConfig, Conflict, Corrupt, NotFound, OstinatoError, StorageFull, Unavailable
from ostinato.record import backup as module
from ostinato.record.backup import FORMAT, KEYS, MANIFEST
from ostinato.record.codec.kinds import FOR_EVER
from ostinato.record.config import RecordConfig
from ostinato.record.segment import create_segment
from ostinato.record.segment_directory import LogDirectory
from ostinato.record.sqlite import driver
from ostinato.testing.records import a_turn


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs a run writes it, for the others to copy."""
    return tmp_path_factory.mktemp("written") / "run"


@pytest.fixture
async def run(written: Path, tmp_path: Path) -> Path:
    """A run with rows of every kind in several segments."""
    if not written.exists():
        with opened(written) as log:
            for i in range(5):
                await log.append(*one_of_each(i))
    return shutil.copytree(written, tmp_path / "run")


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


@pytest.mark.parametrize(("before", "keep_after"), covering([0, 1, 2, 3], [15, 25, 1000]))
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
    create_segment(LogDirectory(run / "log").segment(3), 3, 1.0)
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


async def test_of_two_into_one_directory_at_once_the_later_deletes_nothing_of_the_other(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    empty, kept = module._make_empty, tmp_path / "kept"

    def overtaken(target: Path) -> None:
        empty(target)
        monkeypatch.setattr(module, "_make_empty", empty)
        saved(run, target)  # by another process, meanwhile

    monkeypatch.setattr(module, "_make_empty", overtaken)
    with pytest.raises(BadConfig, match="another backup"):
        saved(run, kept)
    put_back(kept, tmp_path / "new")
    assert await rows_of(tmp_path / "new") == await rows_of(run)


# ---------------------------------------------------------------- a backup that cannot be made


async def test_a_backup_that_fails_after_its_manifest_leaves_nothing(run: Path, tmp_path: Path):
    def interrupted(done: int, total: int) -> None:
        if (tmp_path / "kept" / MANIFEST).exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saved(run, tmp_path / "kept", interrupted)
    assert list((tmp_path / "kept").iterdir()) == []


async def test_a_file_that_cannot_be_deleted_keeps_no_other(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    stuck, delete = f"{firsts(run / 'log')[1]:016d}.db", module.remove

    def refused(path: Path) -> None:
        if path.name == stuck:
            raise PermissionError(path)
        delete(path)

    monkeypatch.setattr(module, "_publish", full)
    monkeypatch.setattr(module, "remove", refused)
    with pytest.raises(StorageFull, match="nothing was backed up"):
        saved(run, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [stuck]


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


class _Failing:
    """A database whose copying fails with these words, as the driver says them: without a code."""

    def __init__(self, db: Any, words: str, first: Callable[[], object]) -> None:
        self._db, self._words, self._first = db, words, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def backup(self, *_: Any, **__: Any) -> None:
        self._first()
        raise driver.OperationalError(self._words)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ("database or disk is full", StorageFull, "kept.*free space"),
        ("disk I/O error", StorageFull, "kept.*free space or repair the disk"),
        ("database disk image is malformed", Corrupt, r"run/log/0{15}1\.db is damaged"),
        ("file is not a database", Corrupt, r"run/log/0{15}1\.db is damaged"),
        ("unable to open database file", Unavailable, r"run/log/0{15}1\.db could not be used"),
    ],
)
async def test_why_a_copy_failed_is_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, error: type[OstinatoError], said: str
):
    pages = module.copy_pages
    monkeypatch.setattr(
        module, "copy_pages", lambda source, *others: pages(_Failing(source, words, lambda: None), *others)
    )
    with pytest.raises(error, match=said):
        saved(run, tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []


async def test_a_segment_that_is_dropped_while_it_is_copied_leaves_nothing_in_the_backup(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pages, at = module.copy_pages, firsts(run / "log")[1]
    with opened(run) as log:
        loop = asyncio.get_running_loop()

        def drop() -> None:
            asyncio.run_coroutine_threadsafe(log.drop_old(1e9, at + 10), loop).result()

        def copied(source: Any, copy: Any, *others: Any) -> None:
            dropped = source.execute("PRAGMA database_list").fetchone()[2].endswith(f"{at:016d}.db")
            pages(_Failing(source, "disk I/O error", drop) if dropped else source, copy, *others)

        monkeypatch.setattr(module, "copy_pages", copied)
        made = await asyncio.to_thread(saved, run, tmp_path / "kept")
        assert made.first > at
        assert f"{at:016d}.db" not in [file.name for file in made.files]
    put_back(tmp_path / "kept", tmp_path / "new")
    with opened(tmp_path / "new") as new:
        assert await new.horizon() == made.first - 1


async def test_a_segment_that_is_dropped_while_the_log_is_measured_is_no_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    vanishing, stat = run / "log" / "vanishing.db", Path.stat
    vanishing.touch()

    def vanish(path: Path, **named: Any) -> Any:
        found = stat(path, **named)
        if path == vanishing:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", vanish)
    made = await asyncio.to_thread(saved, run, tmp_path / "kept")
    assert vanishing.name not in {file.name for file in made.files}


async def test_a_killed_backup_is_refused_by_restore(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def kill(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(module, "_publish", kill)
    monkeypatch.setattr(module._Copy, "discard", lambda self: None)
    with pytest.raises(Killed):
        saved(run, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) > 3
    with pytest.raises(NotFound, match="or the backup was interrupted"):
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
        (linked, Corrupt, "is a link or not a file"),
        (directory, Corrupt, "is a link or not a file"),
        (twice, Corrupt, "names a file twice"),
        (named("../0000000000000001.db"), Corrupt, "is not a file of a log"),
        (named("/etc/passwd"), Corrupt, "is not a file of a log"),
        (named("a/../0000000000000001.db"), Corrupt, "is not a file of a log"),
        (named("0000000000000001.db\n"), Corrupt, "is not a file of a log"),
        (named("postgres"), Corrupt, "is not a file of a log"),
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
    with pytest.raises(Corrupt, match="is a link or not a file"):
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


async def test_a_log_that_is_begun_while_another_is_restored_stays(tmp_path: Path, run: Path, kept: Path):
    new, loop = tmp_path / "new", asyncio.get_running_loop()
    with opened(new) as log:

        def begin(done: int, total: int) -> None:
            if done == total:
                asyncio.run_coroutine_threadsafe(log.append(signal(0)), loop).result()

        with pytest.raises(Conflict, match="there is a log"):
            await asyncio.to_thread(put_back, kept, new, on_bytes=begin)
    assert await rows_of(new) == [(1, signal(0))]


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
        *whole, gone = await collect(log)
    shutil.copy(tmp_path / "run" / KEYS, tmp_path / "newest-keys.db")
    for point in range(1000):
        new = tmp_path / f"new{point}"
        with opened(new, config):
            pass
        shutil.copy(tmp_path / "newest-keys.db", new / KEYS)
        if not killed_at(point, tmp_path / "kept", new, monkeypatch):
            break
        with suppress(Conflict):  # it was complete
            put_back(tmp_path / "kept", new)
        assert await rows_of(new, config) == whole
        with opened(new, config) as log:  # which lacks the row that is newer than the backup
            assert (await log.note_forgotten(), (await collect(log))[-1]) == (1, gone) if point < 3 else True
        assert {path.name for path in new.iterdir()} <= {"log", KEYS, ".log.replaced"}
    assert point > 10
