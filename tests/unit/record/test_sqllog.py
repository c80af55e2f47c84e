"""The SQLite log beyond its seam: what it refuses, who may read its files, a full disk, queries."""

import asyncio
import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
import pytest
from record_rows import limit_pages
from tests.deadlines import PATIENT_S

from ostinato.core.errors import BadConfig, BadRequest, Corrupt, StorageFull, TooLarge, Unavailable
from ostinato.core.notices import Alarm, AlarmState, Forgotten, Stamp
from ostinato.core.records import (
    Batch,
    Consent,
    ConsentGiven,
    Delivered,
    Holdback,
    PolicyVersion,
    Quarantine,
    ReleaseEvent,
    Reward,
    Row,
    Signal,
    Source,
    Span,
    SteeringBasis,
    Turn,
)
from ostinato.core.steering import DialPrior, DialSet, SetBy
from ostinato.record.codec.tokens import write_ints
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.folds import FileFolds
from ostinato.record.log import SqlLog
from ostinato.record.sqlite import refuse_faulty, translate
from ostinato.testing.records import a_turn

driver: Any = pysqlite3.dbapi2
TURN = a_turn("r:0")
SIGNAL = Signal(id="s", turn="r:0", name="accepted", value=1.0, source=Source.HUMAN, occurred_at=1.0, received_at=2.0)
V1 = PolicyVersion(number=1, hash="a")
FIRST = "0000000000000001.db"
TABLES = [
    "alarms", "bases", "batches", "consents", "deliveries", "dials", "dictionaries", "forgotten", "holdbacks", "identities", "pieces",
    "policies", "priors", "quarantines", "releases", "rewards", "seal", "segment", "signals", "stamps", "turns",
]  # fmt: skip


async def collect(log: SqlLog, kinds: set[type], after: int = 0) -> list[Row]:
    return [row async for _, row in log.read(after, kinds)]


# ---------------------------------------------------------------- nothing is ever changed


@pytest.mark.parametrize("attack", ["UPDATE {0} SET {1} = {1}", "DELETE FROM {0}"])
async def test_no_table_can_be_changed(tmp_path: Path, sql: Any, attack: str):
    rows: list[Row] = [
        TURN,
        SIGNAL,
        Reward(turn="r:0", value=1.0, function="f", signals=(), at=1.0),
        Holdback(turn="q", reason="x", at=1.0),
        Batch(step=1, turns=(), credits=(), reference=V1, at=1.0),
        ReleaseEvent(id="a", action="shipped", policy=V1, previous=V1, reason="", detail={}, at=1.0),
        Stamp(id="a", contract="{}", at=1.0),
        Delivered(id="a", turns=(), at=1.0),
        Quarantine(turn="q", reason="x", at=1.0),
        Alarm(id="a", name="n", state=AlarmState.RAISED, reason="", at=1.0),
        SteeringBasis(hash="a", names=("a",), tokens=b"", directions=b"", weights="", at=1.0),
        ConsentGiven(id="a", tenant="t", user="u", level=Consent.NEVER, at=1.0),
        DialSet(id="a", tenant="t", user="u", at=1.0, by=SetBy.PERSON, dials={}),
        DialPrior(names="a", number=1, people=0, mean=(), within=(), between=(), organisations={}, upto=0, at=1.0),
        Forgotten(id="a", tenant="t", user="u", key=1, at=1.0),
    ]
    with SqlLog.open(tmp_path / "log", config=RecordConfig(segment_rows=14)) as log:
        log.derive_text(lambda token: "x")
        await log.append(*rows)
        path = tmp_path / "log" / FIRST
        sql(path, "INSERT INTO dictionaries VALUES (9, 'text', x'00')")
        await log.append(SIGNAL, replace(SIGNAL, id="next"))  # which closes the first segment
    tables = [name for (name,) in sql(path, "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
    assert tables == TABLES
    for table in tables:
        column = sql(path, f"PRAGMA table_info({table})")[0][1]
        assert sql(path, f"SELECT count(*) FROM {table}") != [(0,)]
        with pytest.raises(driver.IntegrityError, match="append-only"):
            sql(path, attack.format(table, column))


async def test_a_reading_connection_cannot_write(log: SqlLog):
    segment = log._reader._segments.newest()
    with pytest.raises(driver.OperationalError, match="readonly"):
        segment.db.execute("INSERT INTO policies VALUES (9, 9, '')")


async def test_the_files_are_in_wal_mode_and_synced_fully(log: SqlLog):
    await log.append(TURN)
    head = log._appender._head
    assert head is not None
    assert head.segment.db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert head.segment.db.execute("PRAGMA synchronous").fetchone() == (2,)
    with pytest.raises(driver.IntegrityError, match="append-only"):
        head.segment.db.execute("INSERT OR REPLACE INTO turns SELECT * FROM turns")


# ---------------------------------------------------------------- who may read it


async def test_files_are_their_owners_alone_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        (tmp_path / "run").mkdir(mode=0o755)
        with SqlLog.open(tmp_path / "run" / "log", config=RecordConfig(encrypt="user", segment_rows=2)) as log:
            for i in range(4):
                await log.append(replace(SIGNAL, id=f"s{i}", comment="why"))
            await FileFolds(tmp_path / "run" / "folds").save("desk", 1, {})
            files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
            names = {path.name for path in files}
            assert {FIRST, "0000000000000003.db", "0000000000000003.db-wal", "0000000000000003.db-shm"} <= names
            assert {"desk.fold", "log-keys.db"} <= names
            assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(names, "0o600")
            assert (tmp_path / "run" / "log").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


async def test_a_directory_that_was_open_to_others_is_closed_to_them(tmp_path: Path):
    (tmp_path / "log").mkdir(mode=0o755)
    SqlLog.open(tmp_path / "log").close()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700


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
        SqlLog.open(tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_newer_segment_is_refused_untouched(tmp_path: Path, sql: Any):
    SqlLog.open(tmp_path / "log").close()
    path = tmp_path / "log" / FIRST
    sql(path, "PRAGMA user_version = 99")
    with pytest.raises(
        BadConfig, match="has format 99, this Ostinato reads 1, 2, 3, 4, 5; open it with the Ostinato that wrote it"
    ):
        SqlLog.open(tmp_path / "log")
    assert sql(path, "PRAGMA user_version") == [(99,)]


async def test_a_newer_segment_among_the_closed_ones_is_refused_when_it_is_read(tmp_path: Path, sql: Any):
    with SqlLog.open(tmp_path / "log", config=RecordConfig(segment_rows=1)) as log:
        for i in range(3):
            await log.append(replace(SIGNAL, id=f"s{i}"))
    sql(tmp_path / "log" / FIRST, "PRAGMA user_version = 99")
    with SqlLog.open(tmp_path / "log") as log:
        assert len(await collect(log, {Signal}, after=1)) == 2
        with pytest.raises(BadConfig, match="has format 99"):
            await collect(log, {Signal})


def test_another_programs_database_is_refused(tmp_path: Path, sql: Any):
    (tmp_path / "log").mkdir()
    sql(tmp_path / "log" / FIRST, "CREATE TABLE bookmarks (url)")
    with pytest.raises(BadConfig, match="not a log of Ostinato"):
        SqlLog.open(tmp_path / "log")


def test_a_file_that_is_no_database_is_corrupt(tmp_path: Path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / FIRST).write_bytes(b"not a database, " * 512)
    with pytest.raises(Corrupt, match="restore"):
        SqlLog.open(tmp_path / "log")


@pytest.mark.parametrize("name", ["log", "log.db"])
def test_a_log_of_an_earlier_form_is_refused_with_what_to_do(tmp_path: Path, sql: Any, name: str):
    sql(tmp_path / name, "CREATE TABLE alembic_version (version_num)")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(BadConfig, match=rf"{name} is a log in the single-file format.*move {name} away"):
        SqlLog.open(tmp_path / "log")
    assert (tmp_path / name).read_bytes() == before


def test_a_path_with_odd_characters_works(tmp_path: Path):
    path = tmp_path / "50% of #1?" / "log"
    SqlLog.open(path).close()
    assert (path / FIRST).exists()


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (replace(TURN, text="half a pair: \ud83d"), "text"),
        (replace(TURN, user="\ud83d"), "user"),
        (replace(TURN, prompt_ids=(2**31,)), "prompt_ids"),
        (replace(TURN, prompt_ids=(2**70,)), "prompt_ids"),
        (replace(TURN, sampled_ids=(-1,)), "sampled_ids"),
        (replace(TURN, sampled_ids=(1.5,)), "sampled_ids"),
        (replace(TURN, logprobs=(float("nan"),)), "logprobs"),
        (replace(TURN, logprobs=(-1e300,)), "logprobs"),
        (replace(TURN, spans=(Span(policy=PolicyVersion(number=2**63, hash=""), tokens=1),)), "spans"),
        (replace(TURN, started_at=float("nan")), "started_at"),
        (replace(SIGNAL, value=float("nan")), "value"),
        (replace(SIGNAL, name=None), "name"),
        (replace(SIGNAL, name=object()), "name"),
        (replace(SIGNAL, comment="\udfff"), "comment"),
        (Delivered(id="d", turns=("a", None), at=1.0), "turns"),  # type: ignore[arg-type]
        (ReleaseEvent(id="a", action="x", policy=V1, previous=V1, reason="", detail={"a": {1}}, at=1.0), "detail"),
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
    assert len(await collect(log, {Signal, Turn, Delivered})) == 3


async def test_a_type_that_is_no_record_is_refused(log: SqlLog):
    with pytest.raises(BadRequest, match="not Sampling"):
        await log.append(TURN.sampling)  # type: ignore[arg-type]


async def test_a_row_that_only_the_database_refuses_hurts_nobody_else(log: SqlLog, sql: Any):
    sql(
        log._directory.segment(1),
        "CREATE TRIGGER picky BEFORE INSERT ON signals WHEN length(new.said) > 900 BEGIN SELECT RAISE(ABORT, 'no'); END",
    )
    bad = replace(SIGNAL, comment=os.urandom(1000).hex())
    answers = await asyncio.gather(
        log.append(replace(SIGNAL, id="a")),
        log.append(replace(bad, id="bad")),
        log.append(replace(bad, id="worse"), replace(SIGNAL, id="with")),
        log.append(replace(SIGNAL, id="b")),
        return_exceptions=True,
    )
    assert [isinstance(answer, Unavailable) for answer in answers] == [False, True, True, False]
    assert answers[1] is not answers[2]
    assert [row.id for row in await collect(log, {Signal}) if isinstance(row, Signal)] == ["a", "b"]


async def test_of_two_in_one_transaction_the_good_one_is_kept(log: SqlLog, sql: Any):
    sql(
        log._directory.segment(1),
        "CREATE TRIGGER picky BEFORE INSERT ON deliveries BEGIN SELECT RAISE(ABORT, 'no'); END",
    )
    bad = Delivered(id="d", turns=(), at=1.0)
    answers = await asyncio.gather(log.append(SIGNAL), log.append(bad), return_exceptions=True)
    assert [isinstance(answer, Unavailable) for answer in answers] == [False, True]
    assert await collect(log, {Signal, Delivered}) == [SIGNAL]


def test_a_row_larger_than_sqlite_takes_is_too_large(tmp_path: Path):
    with pytest.raises(driver.DataError) as error:
        driver.connect(":memory:").execute("SELECT zeroblob(2000000000)").fetchall()
    assert isinstance(translate(error.value, tmp_path), TooLarge)


@pytest.mark.parametrize(
    ("column", "damage"),
    [
        ("tokens", b"\0\0"),
        ("tokens", write_ints(0, 0, 0, 1, 2) + b"\0abc"),  # three bytes of ids of four each
        ("tokens", write_ints(1 << 70, 1, 8, 3, 0) + b"\0"),  # a base before the first row
        ("logprobs", write_ints(1 << 40) + b"\x80"),
        ("logprobs", write_ints(1 << 90) + b"\x80"),
        ("head", b"\1\xe0" + (1 << 50).to_bytes(8, "little")),  # a zstd frame of a petabyte
        ("head", b"\7abc"),
    ],
)
async def test_a_damaged_row_is_named(log: SqlLog, sql: Any, column: str, damage: bytes):
    await log.append(TURN)
    path = log._directory.segment(1)
    sql(path, "DROP TRIGGER turns_no_update")
    sql(path, f"UPDATE turns SET {column} = ?", damage)
    with pytest.raises(Corrupt, match=r"row 1 of .*0001\.db cannot be read.*restore"):
        await collect(log, {Turn})


async def test_a_damaged_row_is_named_when_it_is_looked_for(log: SqlLog, sql: Any):
    await log.append(TURN, SIGNAL)
    path = log._directory.segment(1)
    for table, column in (("turns", "head"), ("signals", "body")):
        sql(path, f"DROP TRIGGER {table}_no_update")
        sql(path, f"UPDATE {table} SET {column} = x'0041'")
    for look in (log.find(Turn, [("r:0",)]), log.places(Signal, [(SIGNAL.tenant, "s")]), log.append(TURN)):
        with pytest.raises(Corrupt, match=r"row [12] of .*0001\.db cannot be read.*restore"):
            await look
    with pytest.raises(Corrupt, match=r"row 1 of .*0001\.db cannot be read.*restore"):
        log._reader.owners(["r:0"])  # type: ignore[attr-defined]
    assert await log.append(replace(SIGNAL, id="another")) == 3


async def test_a_damaged_turn_does_not_hinder_those_that_follow_it(tmp_path: Path, sql: Any):
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(TURN)
    sql(tmp_path / "log" / FIRST, "DROP TRIGGER turns_no_update")
    sql(tmp_path / "log" / FIRST, "UPDATE turns SET tokens = x'0000'")
    following = replace(TURN, id="next:0", parent=TURN.id)
    with SqlLog.open(tmp_path / "log") as log:
        assert await log.append(following) == 2
        assert log.tail(1, {Turn}) == [(2, following)]


async def test_a_closed_log_says_so(tmp_path: Path):
    log = SqlLog.open(tmp_path / "log")
    waiting = [asyncio.create_task(log.append(replace(SIGNAL, id=str(i)))) for i in range(20)]
    await asyncio.sleep(0)
    log.close()
    log.close()
    assert max(await asyncio.gather(*waiting)) == 20
    with pytest.raises(Unavailable, match="closed"):
        await log.append(SIGNAL)


# ---------------------------------------------------------------- a full disk


async def test_a_full_disk_fails_exactly_the_callers_that_do_not_fit(log: SqlLog, sql: Any):
    await log.append(TURN)
    path = log._directory.segment(1)
    limit_pages(log, sql(path, "PRAGMA page_count")[0][0] + 3)
    small = [replace(SIGNAL, id=f"small{i}") for i in range(4)]
    huge = [replace(TURN, id=f"huge{i}:0", text=os.urandom(200_000).hex()) for i in range(2)]
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
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]


async def test_a_full_disk_is_said_as_such_while_keys_are_made(tmp_path: Path):
    with SqlLog.open(tmp_path / "log", config=RecordConfig(encrypt=Encrypt.USER)) as log:
        await log.append(TURN)
        keys = log._ring._db  # type: ignore[union-attr]
        keys.execute(f"PRAGMA max_page_count={keys.execute('PRAGMA page_count').fetchone()[0]}")
        crowd = [replace(TURN, id=f"crowd{i}:0", user=f"somebody {i}") for i in range(200)]
        with pytest.raises(StorageFull, match="free space"):
            await log.append(*crowd)
        keys.execute(f"PRAGMA max_page_count={2**30}")
        assert await log.append(*crowd) == 201
        assert await collect(log, {Turn}) == [TURN, *crowd]


def test_a_full_disk_is_said_as_such_while_the_file_of_keys_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    link = os.link

    def full(made: Path, name: Path) -> None:
        if name.name == "log-keys.db":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        link(made, name)

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StorageFull, match=r"log-keys\.db cannot be created.*free space"):
        SqlLog.open(tmp_path / "log", config=RecordConfig(encrypt=Encrypt.USER))


# ---------------------------------------------------------------- callers and queries


async def test_queries(log: SqlLog):
    turns = [replace(TURN, id=f"t{i}:0") for i in range(5)]
    signals = [replace(SIGNAL, id=f"s{i}", turn=f"t{i % 2}:0") for i in range(4)]
    await log.append(*turns, *signals)
    assert log.newest() == 9
    assert await log.find(Turn, [("t4:0",), ("absent",), ("t0:0",), ("t2:0",)]) == [turns[4], turns[0], turns[2]]
    assert log.tail(3, {Turn, Signal}) == [(7, signals[1]), (8, signals[2]), (9, signals[3])]
    assert log.tail(2, {Turn}) == [(4, turns[3]), (5, turns[4])]
    assert log.tail(0, {Turn}) == []
    assert await log.horizon() == 0


async def test_callers_share_commits(log: SqlLog):
    begun, all_queued = 0, threading.Event()
    transaction = log._appender.transaction

    def counted(rows: Any) -> Any:
        nonlocal begun
        all_queued.wait(PATIENT_S)  # how many come together must not depend on how fast this machine is
        begun += 1
        return transaction(rows)

    log._appender.transaction = counted  # type: ignore[method-assign]
    appending = [asyncio.create_task(log.append(replace(SIGNAL, id=str(i)))) for i in range(300)]
    await asyncio.sleep(0)  # each task puts its job into the queue before it waits
    all_queued.set()
    await asyncio.gather(*appending)
    assert len(await collect(log, {Signal})) == 300
    assert begun < 60


async def test_a_caller_that_gives_up_disturbs_nobody(log: SqlLog):
    tasks = [asyncio.create_task(log.append(replace(SIGNAL, id=str(i)))) for i in range(10)]
    await asyncio.sleep(0)
    tasks[4].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(answer, int) for answer in answers) == 9


async def test_two_event_loops_may_share_a_log(log: SqlLog):
    def elsewhere() -> int:
        return asyncio.run(log.append(replace(SIGNAL, id="there")))

    there, here = await asyncio.gather(asyncio.to_thread(elsewhere), log.append(replace(SIGNAL, id="here")))
    assert sorted((there, here)) in ([1, 2], [2, 2])
