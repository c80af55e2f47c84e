"""A database that is held, slow or silent: every caller is answered in time, and nobody waits in another's stead."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import pysqlite3.dbapi2
import pytest
from record_rows import collect, limit_pages, signal
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S, OwnTime

from ostinato.core.errors import StorageFull, Unavailable
from ostinato.core.records import Row, Turn
from ostinato.record import rowlog as writer_module
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.log import SqlLog
from ostinato.testing.records import a_turn

driver: Any = pysqlite3.dbapi2
WAIT_S = 1.0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqlLog]:
    with SqlLog.open(tmp_path / "log", config=RecordConfig(append_s=WAIT_S)) as opened:
        yield opened


@pytest.fixture
def holder(log: SqlLog) -> Iterator[Any]:
    """Another process's connection, which has the write lock."""
    with held(log) as connection:
        yield connection


@pytest.fixture
def patient_log(tmp_path: Path) -> Iterator[SqlLog]:
    """One whose callers have all the time that a busy machine may take to let a lock go."""
    with SqlLog.open(tmp_path / "patient", config=RecordConfig(append_s=WHOLE_PROGRAM_S)) as opened:
        yield opened


@contextlib.contextmanager
def held(log: SqlLog) -> Iterator[Any]:
    """Another process's connection, which has the write lock."""
    connection = driver.connect(str(log._directory.segment(1)), isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


async def timed(log: SqlLog, *rows: Row) -> tuple[float, int | BaseException]:
    start = time.monotonic()
    try:
        answer: int | BaseException = await log.append(*rows)
    except Unavailable as error:
        answer = error
    return time.monotonic() - start, answer


async def many_ended(tasks: list[asyncio.Task[Any]], count: int) -> list[Any]:
    """The answers of those that ended, once there are so many."""
    async with asyncio.timeout(PATIENT_S):
        while sum(task.done() for task in tasks) < count:
            await asyncio.sleep(0.01)
    return [task.result()[1] for task in tasks if task.done()]


async def test_callers_at_a_held_lock_are_answered_together_at_their_deadline(log: SqlLog, holder: Any):
    async with OwnTime() as own:
        answers = await asyncio.gather(*[timed(log, signal(i)) for i in range(11)])
    assert all(isinstance(answer, Unavailable) for _, answer in answers)
    assert all(waited >= WAIT_S - 0.05 for waited, _ in answers), answers
    assert own.seconds < 2 * WAIT_S
    assert all("in time; nothing of it was kept. See what holds" in str(answer) for _, answer in answers)
    holder.execute("ROLLBACK")
    assert await log.append(signal(100)) == 1
    assert [row for _, row in await collect(log)] == [signal(100)]


async def test_who_comes_later_has_a_deadline_of_his_own(log: SqlLog, holder: Any, monkeypatch: pytest.MonkeyPatch):
    early = asyncio.create_task(timed(log, signal(0)))
    await asyncio.sleep(0.6 * WAIT_S)
    monkeypatch.setattr(log._writer, "_wait_s", WHOLE_PROGRAM_S)
    late = asyncio.create_task(timed(log, signal(1)))
    async with asyncio.timeout(PATIENT_S):
        (_, answer) = await early
    assert isinstance(answer, Unavailable)
    assert not late.done()
    holder.execute("ROLLBACK")
    assert (await late)[1] == 1
    assert [row for _, row in await collect(log)] == [signal(1)]


async def test_a_lock_that_is_let_go_in_time_costs_nobody_an_answer(patient_log: SqlLog):
    with held(patient_log) as holder:
        asyncio.get_running_loop().call_later(0.3, holder.execute, "ROLLBACK")
        answers = await asyncio.gather(*[timed(patient_log, signal(i)) for i in range(11)])
    assert [type(answer) for _, answer in answers] == [int] * 11
    assert patient_log.newest() == 11


async def test_nobody_is_tried_alone_at_a_held_lock(log: SqlLog, holder: Any):
    tries: list[int] = []
    attempt, all_queued = log._writer._try, threading.Event()

    def counted(jobs: Any) -> Any:
        all_queued.wait(PATIENT_S)  # how many come together must not depend on how fast this machine is
        tries.append(len(jobs))
        return attempt(jobs)

    log._writer._try = counted  # type: ignore[method-assign]
    appending = [asyncio.create_task(timed(log, signal(i))) for i in range(40)]
    await asyncio.sleep(0)  # each task puts its job into the queue before it waits
    all_queued.set()
    await asyncio.gather(*appending)
    assert len(tries) <= 2 * WAIT_S / 0.1 + 2
    assert set(tries[2:]) <= {40}, "who came first, and all"


async def test_readers_read_while_the_lock_is_held(log: SqlLog, holder: Any, tmp_path: Path):
    holder.execute("ROLLBACK")
    await log.append(signal(0))
    holder.execute("BEGIN IMMEDIATE")
    assert [row for _, row in await collect(log)] == [signal(0)]
    with SqlLog.open(tmp_path / "log") as other:
        assert [row for _, row in await collect(other)] == [signal(0)]


async def test_a_commit_that_hangs_is_answered_as_one_that_may_be_kept(log: SqlLog):
    """The disk takes longer than the deadline: the caller is told, the row is there in the end, and sending it again is safe."""
    stuck, going = threading.Event(), threading.Event()
    write = log._appender.write

    def slow(head: Any, rows: Any) -> int:
        going.set()
        assert stuck.wait(PATIENT_S)
        return write(head, rows)

    log._appender.write = slow  # type: ignore[method-assign]
    first = asyncio.create_task(timed(log, signal(0)))
    await asyncio.to_thread(going.wait, PATIENT_S)
    second = asyncio.create_task(timed(log, signal(1)))
    async with asyncio.timeout(PATIENT_S):  # while the disk hangs
        (_, answer), (_, answer_2) = await first, await second
    assert "in time; it may still be kept: sending it again is safe. See" in str(answer)
    assert "nothing of it was kept" in str(answer_2)
    stuck.set()
    assert await log.append(signal(0), replace(signal(0), value=9.0)) == 1
    assert [row for _, row in await collect(log)] == [signal(0)]


async def test_too_many_who_wait_are_refused_at_once(patient_log: SqlLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_module, "BACKLOG", 20)
    monkeypatch.setattr(writer_module, "GROUP", 10)
    with held(patient_log) as holder:
        appending = [asyncio.create_task(timed(patient_log, signal(i))) for i in range(100)]
        refused = await many_ended(appending, 60)
        assert all("20 appends behind" in str(answer) for answer in refused)
        holder.execute("ROLLBACK")
        await asyncio.gather(*appending)


async def test_too_many_bytes_that_wait_are_refused_at_once(patient_log: SqlLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_module, "BACKLOG_BYTES", 2**20)
    rows = [replace(signal(i), comment="x" * 100_000) for i in range(30)]
    large = replace(signal(30), comment="x" * 2**21)
    with held(patient_log) as holder:
        appending = [asyncio.create_task(timed(patient_log, row)) for row in rows]
        refused = await many_ended(appending, 20)
        assert all("1 MiB behind; nothing was kept" in str(answer) for answer in refused)
        holder.execute("ROLLBACK")
        answers = await asyncio.gather(*appending)
    kept = [row for row, (_, answer) in zip(rows, answers, strict=True) if isinstance(answer, int)]
    assert (len(kept), len(refused)) == (10, 20)
    assert [row for _, row in await collect(patient_log)] == kept
    assert (await timed(patient_log, large))[1] == 11, "there is room again, and for whoever waits alone always"


async def test_rows_that_were_answered_before_their_turn_came_take_no_memory(log: SqlLog):
    stuck, going = threading.Event(), threading.Event()
    write = log._appender.write

    def slow(head: Any, rows: Any) -> int:
        going.set()
        assert stuck.wait(PATIENT_S)
        return write(head, rows)

    class Text(str):
        """Text that can be looked for."""

    async def sent(number: int) -> tuple[weakref.ref[Text], str]:
        comment = Text("x" * 100_000)
        row = replace(signal(number), comment=comment)
        return weakref.ref(comment), str((await timed(log, row))[1])

    log._appender.write = slow  # type: ignore[method-assign]
    first = asyncio.create_task(timed(log, signal(0)))
    await asyncio.to_thread(going.wait, PATIENT_S)
    answers = await asyncio.gather(*[sent(number) for number in range(1, 4)])
    gc.collect()
    assert [text() for text, _ in answers] == [None] * 3, "while the disk hangs still"
    assert all("nothing of it was kept" in answer for _, answer in answers)
    await first
    stuck.set()
    assert await log.append(signal(9)) == 2
    assert [row for _, row in await collect(log)] == [signal(0), signal(9)]


async def test_closing_at_a_held_lock_ends(tmp_path: Path):
    log = SqlLog.open(tmp_path / "log", config=RecordConfig(append_s=0.3))
    holder = driver.connect(str(log._directory.segment(1)), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(timed(log, signal(0)))
    await asyncio.sleep(0)
    log.close()  # while the lock is held
    assert isinstance((await waiting)[1], Unavailable)
    holder.close()


async def test_a_held_file_of_keys_is_waited_for_together_and_no_longer(tmp_path: Path):
    """A new person's key cannot be made; who has one already waits in the same group, and all are told in time."""
    config = RecordConfig(append_s=WAIT_S, encrypt=Encrypt.USER)
    with SqlLog.open(tmp_path / "log", config=config) as log:
        await log.append(a_turn("t", user="known"))
        holder = driver.connect(str(tmp_path / "log-keys.db"), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        turns = [a_turn(f"t{i}", user="known" if i % 2 else f"new{i}") for i in range(11)]
        async with OwnTime() as own:
            answers = await asyncio.gather(*[timed(log, turn) for turn in turns])
        assert own.seconds < 2 * WAIT_S
        assert all("nothing of it was kept" in str(answer) for _, answer in answers if not isinstance(answer, int))
        holder.execute("ROLLBACK")
        holder.close()
        await asyncio.gather(*[log.append(turn) for turn in turns])
        assert {row.id for _, row in await collect(log, kinds={Turn}) if isinstance(row, Turn)} == {
            "t",
            *(turn.id for turn in turns),
        }


async def test_a_full_disk_is_said_at_once_to_each_of_many(log: SqlLog, sql: Any):
    """Nobody waits for a deadline, or for the others: one is tried alone, and none that is larger after it."""
    await log.append(signal(0))
    limit_pages(log, sql(log._directory.segment(1), "PRAGMA page_count")[0][0])
    rows = [replace(signal(i), comment=token_hex(4000)) for i in range(1, 401)]
    tries: list[int] = []
    attempt, all_queued = log._writer._try, threading.Event()

    def counted(jobs: Any) -> Any:
        all_queued.wait(PATIENT_S)  # how many come together must not depend on how fast this machine is
        tries.append(len(jobs))
        return attempt(jobs)

    log._writer._try = counted  # type: ignore[method-assign]
    appending = [asyncio.create_task(log.append(row)) for row in rows]
    await asyncio.sleep(0)  # each task puts its job into the queue before it waits
    all_queued.set()
    answers = await asyncio.gather(*appending, return_exceptions=True)
    assert [type(answer) for answer in answers] == [StorageFull] * 400
    assert len({id(answer) for answer in answers}) == 400  # each his own: tracebacks are attached to them
    assert 400 <= sum(tries) <= 400 + tries.count(1)  # the first to come may have been a group of its own
    assert tries.count(1) <= 3
    assert len(tries) <= 5
    limit_pages(log, None)
    assert await log.append(*rows) == 401


async def test_on_a_full_disk_the_small_ones_that_fit_are_kept_whatever_their_place(log: SqlLog, sql: Any):
    await log.append(signal(0))
    limit_pages(log, sql(log._directory.segment(1), "PRAGMA page_count")[0][0] + 2)
    rows = [replace(signal(i), comment=token_hex(30_000) if i % 2 else None) for i in range(1, 21)]
    answers = await asyncio.gather(*[log.append(row) for row in rows], return_exceptions=True)
    assert [type(answer) for answer in answers] == [StorageFull, int] * 10
    assert {row for _, row in await collect(log)} == {signal(0), *rows[1::2]}


async def test_a_reader_waits_while_another_process_destroys_keys(tmp_path: Path):
    with SqlLog.open(tmp_path / "log", config=RecordConfig(encrypt=Encrypt.USER)) as log:
        await log.append(a_turn("t0:0", user="ann"))
        keys = driver.connect(str(tmp_path / "log-keys.db"), isolation_level=None, check_same_thread=False)
        keys.execute("BEGIN EXCLUSIVE")
        finding = asyncio.create_task(log.find(Turn, [("t0:0",)]))
        assert not (await asyncio.wait({finding}, timeout=0.3))[0]
        keys.execute("COMMIT")
        assert [turn.id for turn in await finding] == ["t0:0"]
        keys.close()
