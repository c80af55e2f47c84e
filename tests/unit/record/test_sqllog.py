"""The SQLite log beyond its seam: schema, refusals, a full disk, queries."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
import pytest
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DatabaseError

import ostinato.record.migrations
from ostinato.core.errors import BadConfig, BadRequest, Corrupt, StorageFull, Unavailable
from ostinato.core.records import Holdback, PolicyVersion, Row, Signal, Source, Stamp, Turn
from ostinato.record import log as log_module
from ostinato.record.log import SqlLog
from ostinato.record.schema import HEAD, metadata
from ostinato.record.sqlite import refuse_faulty
from ostinato.testing.records import a_turn

driver: Any = pysqlite3.dbapi2
TURN = a_turn("r:0")
SIGNAL = Signal(id="s", turn="r:0", name="accepted", value=1.0, source=Source.HUMAN, occurred_at=1.0, received_at=2.0)


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqlLog]:
    with SqlLog.open(tmp_path / "deep" / "log.sqlite", clock=lambda: 77.0) as opened:
        yield opened


def sql(path: Path, statement: str) -> list[Any]:
    connection = driver.connect(str(path))
    try:
        rows = connection.execute(statement).fetchall()
        connection.commit()
        return rows
    finally:
        connection.close()


async def collect(log: SqlLog, kinds: set[type], after: int = 0) -> list[Row]:
    return [row async for _, row in log.read(after, kinds)]


# ---------------------------------------------------------------- schema


def shape(path: Path) -> list[Any]:
    names = "SELECT type, name, tbl_name FROM sqlite_master WHERE tbl_name != 'alembic_version' ORDER BY 1, 2, 3"
    triggers = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY 1"
    tables = sql(path, "SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'alembic_version' ORDER BY 1")
    columns = [(name, *column) for (name,) in tables for column in sql(path, f"PRAGMA table_info({name})")]
    return [sql(path, names), sql(path, triggers), columns]


def test_migrations_build_exactly_the_schema_of_the_code(tmp_path: Path):
    SqlLog.open(tmp_path / "migrated.sqlite").close()
    engine = create_engine(f"sqlite:///{tmp_path}/created.sqlite", module=driver)
    metadata.create_all(engine)
    engine.dispose()
    migrated, created = shape(tmp_path / "migrated.sqlite"), shape(tmp_path / "created.sqlite")
    assert migrated == created
    assert len(migrated[1]) == 2 * len(metadata.tables)


def test_alembic_sees_no_difference_and_head_is_the_newest_migration(tmp_path: Path):
    from alembic.autogenerate import compare_metadata

    SqlLog.open(tmp_path / "log.sqlite").close()
    engine = create_engine(f"sqlite:///{tmp_path}/log.sqlite", module=driver)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()
    assert ScriptDirectory(str(Path(ostinato.record.migrations.__file__).parent)).get_heads() == [HEAD]


@pytest.mark.parametrize("table", sorted(metadata.tables))
@pytest.mark.parametrize("attack", ["UPDATE {0} SET seq = 99", "DELETE FROM {0}"])
async def test_no_table_can_be_changed(log: SqlLog, table: str, attack: str):
    v = PolicyVersion(number=1, hash="a")
    from ostinato.core.records import Alarm, AlarmState, Batch, Delivered, Quarantine, ReleaseEvent, Reward

    await log.append(TURN, SIGNAL, Reward(turn="r:0", value=1.0, function="f", signals=(), at=1.0))
    await log.append(Holdback(turn="q", reason="x", at=1.0), Batch(step=1, turns=(), credits=(), reference=v, at=1.0))
    await log.append(ReleaseEvent(id="a", action="shipped", policy=v, previous=v, reason="", detail={}, at=1.0))
    await log.append(Stamp(id="a", contract="{}", at=1.0), Delivered(id="a", turns=(), at=1.0))
    await log.append(Quarantine(turn="q", reason="x", at=1.0))
    await log.append(Alarm(id="a", name="n", state=AlarmState.RAISED, reason="", at=1.0))
    with pytest.raises(driver.IntegrityError, match="append-only"):
        sql(log._path, attack.format(table))


async def test_replace_cannot_slip_past_the_triggers_on_our_connections(log: SqlLog):
    await log.append(Holdback(turn="q", reason="first", at=1.0))
    with pytest.raises(DatabaseError, match="append-only"), log._write_engine.begin() as connection:
        connection.execute(text("INSERT OR REPLACE INTO holdbacks SELECT seq, turn, 'second', at FROM holdbacks"))


async def test_reading_connections_cannot_write(log: SqlLog):
    with pytest.raises(DatabaseError, match="readonly"), log._read_engine.begin() as connection:
        connection.execute(text("INSERT INTO entries VALUES (9, 'x', 0)"))


async def test_the_file_is_in_wal_mode_synced_fully_and_stamped_by_the_clock(log: SqlLog):
    await log.append(TURN)
    with log._write_engine.begin() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == 2
    assert sql(log._path, "SELECT * FROM entries") == [(1, "turns", 77.0)]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("version", ["3.6.23", "3.7.0", "3.40.1", "3.51.2", "weird"])
def test_a_sqlite_that_can_corrupt_its_wal_is_refused(version: str):
    with pytest.raises(BadConfig, match=r"pip install --upgrade 'pysqlite3>=0\.6\.1'"):
        refuse_faulty(version)


@pytest.mark.parametrize("version", ["3.51.3", "3.53.4", "4.0.0"])
def test_a_sound_sqlite_is_not_refused(version: str):
    refuse_faulty(version)


def test_opening_refuses_a_faulty_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "sqlite_version", "3.40.1")
    with pytest.raises(BadConfig, match=r"SQLite 3\.40\.1"):
        SqlLog.open(tmp_path / "log.sqlite")
    assert not (tmp_path / "log.sqlite").exists()


def test_a_newer_database_is_refused_untouched(tmp_path: Path):
    path = tmp_path / "log.sqlite"
    SqlLog.open(path).close()
    sql(path, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(BadConfig, match="schema 9999, this Ostinato reads"):
        SqlLog.open(path)
    assert sql(path, "SELECT version_num FROM alembic_version") == [("9999",)]


def test_another_programs_database_is_refused(tmp_path: Path):
    sql(tmp_path / "other.sqlite", "CREATE TABLE bookmarks (url)")
    with pytest.raises(BadConfig, match="no log of Ostinato's"):
        SqlLog.open(tmp_path / "other.sqlite")


def test_a_file_that_is_no_database_is_corrupt(tmp_path: Path):
    (tmp_path / "log.sqlite").write_bytes(b"not a database, " * 512)
    with pytest.raises(Corrupt, match="restore"):
        SqlLog.open(tmp_path / "log.sqlite")


def test_a_path_with_odd_characters_works(tmp_path: Path):
    path = tmp_path / "50% of #1?" / "log.sqlite"
    SqlLog.open(path).close()
    assert path.exists()


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (replace(TURN, text="half a pair: \ud83d"), "text"),
        (replace(TURN, prompt_ids=(2**31,)), "prompt_ids"),
        (replace(TURN, started_at=float("nan")), "started_at"),
        (replace(SIGNAL, value=float("nan")), "value"),
        (replace(SIGNAL, comment="\udfff"), "comment"),
    ],
)
async def test_what_cannot_be_stored_is_the_callers_error_alone(log: SqlLog, row: Row, field: str):
    good = [log.append(replace(SIGNAL, id=f"good{i}")) for i in range(3)]
    answers = await asyncio.gather(
        *good[:2], log.append(replace(SIGNAL, id="with"), row), *good[2:], return_exceptions=True
    )
    (error,) = [answer for answer in answers if isinstance(answer, BaseException)]
    assert isinstance(error, BadRequest)
    assert error.field == field
    assert len(await collect(log, {Signal, Turn})) == 3


async def test_a_type_that_is_no_record_is_refused(log: SqlLog):
    with pytest.raises(BadRequest, match="not Sampling"):
        await log.append(TURN.sampling)  # type: ignore[arg-type]


async def test_a_row_that_only_the_database_refuses_hurts_nobody_else(log: SqlLog):
    bad = replace(SIGNAL, id="bad", name=None)  # type: ignore[arg-type]
    worse = replace(SIGNAL, id="worse", name=object())  # type: ignore[arg-type]
    answers = await asyncio.gather(
        log.append(replace(SIGNAL, id="a")),
        log.append(bad),
        log.append(worse),
        log.append(replace(SIGNAL, id="b")),
        return_exceptions=True,
    )
    assert [isinstance(answer, Unavailable) for answer in answers] == [False, True, True, False]
    assert [row.id for row in await collect(log, {Signal}) if isinstance(row, Signal)] == ["a", "b"]


async def test_a_closed_log_says_so(tmp_path: Path):
    log = SqlLog.open(tmp_path / "log.sqlite")
    waiting = [asyncio.create_task(log.append(replace(SIGNAL, id=str(i)))) for i in range(20)]
    await asyncio.sleep(0)
    log.close()
    log.close()
    assert max(await asyncio.gather(*waiting)) == 20
    with pytest.raises(Unavailable, match="closed"):
        await log.append(SIGNAL)


# ---------------------------------------------------------------- a full disk


def limit_pages(log: SqlLog, pages: int | None) -> None:
    """Let the file grow no further than `pages` (SQLite itself answers SQLITE_FULL); None lifts the limit."""

    def pragma(connection: Any, _record: Any) -> None:
        connection.execute(f"PRAGMA max_page_count={pages or 2**30}")

    log._write_engine.dispose()
    event.listen(log._write_engine, "connect", pragma)


async def test_a_full_disk_fails_exactly_the_callers_that_do_not_fit(log: SqlLog):
    await log.append(TURN)
    pages = sql(log._path, "PRAGMA page_count")[0][0]
    limit_pages(log, pages + 3)
    small = [replace(SIGNAL, id=f"small{i}") for i in range(4)]
    huge = [replace(TURN, id=f"huge{i}:0", text="x" * 400_000) for i in range(2)]
    answers = await asyncio.gather(
        log.append(small[0]),
        log.append(huge[0]),
        log.append(small[1], small[2]),
        log.append(small[3], huge[1]),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [int, StorageFull, int, StorageFull]
    assert "free space" in str(answers[1])
    assert await collect(log, {Turn, Signal}) == [TURN, small[0], small[1], small[2]]
    limit_pages(log, None)
    assert await log.append(small[3], huge[1]) == 6
    assert sql(log._path, "PRAGMA integrity_check") == [("ok",)]


# ---------------------------------------------------------------- queries


async def test_queries(log: SqlLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_module, "LOOKUP", 2)
    turns = [replace(TURN, id=f"t{i}:0") for i in range(5)]
    signals = [replace(SIGNAL, id=f"s{i}", turn=f"t{i % 2}:0") for i in range(4)]
    await log.append(*turns, *signals)
    assert log.newest() == 9
    assert await log.find(Turn, [("t4:0",), ("absent",), ("t0:0",), ("t2:0",)]) == [turns[4], turns[0], turns[2]]
    assert log.tail(3, {Turn, Signal}) == [(7, signals[1]), (8, signals[2]), (9, signals[3])]
    assert log.tail(2, {Turn}) == [(4, turns[3]), (5, turns[4])]
    assert log.tail(0, {Turn}) == []


async def test_callers_share_commits(log: SqlLog):
    commits = 0

    def count(_connection: Any) -> None:
        nonlocal commits
        commits += 1

    event.listen(log._write_engine, "commit", count)
    await asyncio.gather(*[log.append(replace(SIGNAL, id=str(i))) for i in range(300)])
    assert len(await collect(log, {Signal})) == 300
    assert commits < 60


async def test_a_caller_that_gives_up_disturbs_nobody(log: SqlLog):
    tasks = [asyncio.create_task(log.append(replace(SIGNAL, id=str(i)))) for i in range(10)]
    await asyncio.sleep(0)
    tasks[4].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(answer, int) for answer in answers) == 9
