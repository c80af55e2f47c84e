"""Old segments go, whole; what must stay for ever stays; whoever reads meanwhile is not disturbed."""

import asyncio
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_rows import EVERY, collect, firsts, one_of_each, signal

from ostinato.core.errors import StorageFull
from ostinato.core.notices import Alarm, Forgotten, Stamp
from ostinato.core.records import (
    Batch,
    ConsentGiven,
    Holdback,
    ReleaseEvent,
    Reward,
    Row,
    Signal,
    SteeringBasis,
    Turn,
    identity,
)
from ostinato.core.steering import DialPrior
from ostinato.record import retention, sqlite
from ostinato.record import segment as segment_module
from ostinato.record.codec.kinds import FOR_EVER
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.segment import Segment

DAY = 86_400.0
STAYS = (Batch, ReleaseEvent, Stamp, Alarm, SteeringBasis, ConsentGiven, DialPrior, Forgotten)
CONFIG = RecordConfig(segment_rows=10, retain_days=30.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs the log writes it, for the others to copy."""
    return tmp_path_factory.mktemp("written") / "log"


@pytest.fixture
async def log(written: Path, tmp_path: Path, clock: Clock) -> AsyncIterator[SqlLog]:
    """Eight segments of ten rows each, closed a day after one another, and one open segment with a row."""
    if not written.exists():
        writing = Clock()
        with SqlLog.open(written, writing, CONFIG) as log:
            for i in range(1, 9):
                await log.append(*one_of_each(i))
                writing.now += DAY
            await log.append(signal(0))
    clock.now += 8 * DAY
    with SqlLog.open(shutil.copytree(written, tmp_path / "log"), clock, CONFIG) as log:
        yield log


def kept(rows: list[tuple[int, Row]]) -> list[tuple[int, Row]]:
    return [(seq, row) for seq, row in rows if isinstance(row, STAYS)]


async def test_nothing_goes_unless_it_was_asked_for(tmp_path: Path, clock: Clock):
    with SqlLog.open(tmp_path / "log", clock, RecordConfig(segment_rows=1)) as log:
        for i in range(4):
            await log.append(signal(i))
        assert await log.drop_old(clock.now + 1000 * DAY, 4) == 0
        assert len(firsts(tmp_path / "log")) == 4


async def test_old_segments_go_and_what_must_stay_for_ever_stays_in_its_place(log: SqlLog, clock: Clock):
    before = await collect(log)
    assert await log.drop_old(clock.now + 26.5 * DAY, 1000) == 4
    assert firsts(log._directory.path) == [41, 51, 61, 71, 81]
    assert await log.horizon() == 40
    assert await collect(log) == kept(before[:40]) + before[40:]
    assert await collect(log, 17) == kept(before[17:40]) + before[40:]
    assert await collect(log, 0, {Stamp, Turn}) == [
        item for item in kept(before[:40]) + before[40:] if isinstance(item[1], Stamp | Turn)
    ]
    assert log.tail(7, {Stamp}) == [item for item in before if isinstance(item[1], Stamp)][-7:]
    gone = [row for _, row in before[:40] if not isinstance(row, STAYS)]
    for _, row in before:
        assert await log.find(type(row), [identity(row)]) == ([] if row in gone else [row])
    assert {kind.record for kind in FOR_EVER} == set(STAYS)


async def test_what_stays_keeps_its_identity_and_what_went_may_come_again(log: SqlLog, clock: Clock):
    await log.drop_old(clock.now + 29 * DAY, 1000)
    end = log.newest()
    rows = [row for row in one_of_each(1) if isinstance(row, STAYS)]
    assert await log.append(*rows) == end
    assert await log.append(signal(1)) == end + 1
    log.close()
    with SqlLog.open(log._directory.path, clock, CONFIG) as again:
        assert await again.append(*rows) == end + 1


async def test_no_segment_goes_that_a_saved_fold_needs(log: SqlLog, clock: Clock):
    later = clock.now + 100 * DAY
    assert await log.drop_old(later, 0) == 0
    assert await log.drop_old(later, 29) == 2
    assert await log.horizon() == 20
    assert await log.drop_old(later, 30) == 1
    assert await log.horizon() == 30
    assert await log.drop_old(later, 30) == 0


async def test_the_open_segment_is_closed_when_its_time_has_come_though_nobody_appends(log: SqlLog, clock: Clock):
    clock.now += 2 * DAY
    assert await log.drop_old(clock.now, 1000) == 0
    assert firsts(log._directory.path)[-1] == 82
    clock.now += 40 * DAY
    assert await log.drop_old(clock.now, 1000) == 9
    assert await log.horizon() == 81
    assert log.newest() == 81


async def test_a_segment_that_was_made_in_the_future_is_closed_at_once(tmp_path: Path, clock: Clock):
    right = clock.now
    clock.now = right + 1500 * DAY
    with SqlLog.open(tmp_path / "log", clock, RecordConfig(retain_days=30.0)) as log:
        await log.append(signal(0))
        clock.now = right
        await log.append(signal(1))
        assert firsts(tmp_path / "log") == [1, 2]
        await log.append(signal(2))
        assert firsts(tmp_path / "log") == [1, 2], "once"


async def stamped(path: Path, clock: Clock, times: list[float]) -> SqlLog:
    """A log of segments of a row each that were closed at these days, as their clock said, and an open one."""
    log = SqlLog.open(path / "log", clock, RecordConfig(segment_rows=1, retain_days=30.0))
    right = clock.now
    for number, at in enumerate(times):
        clock.now = right + at * DAY
        await log.append(signal(number))
    clock.now = right + times[-1] * DAY
    await log.append(signal(len(times)))
    assert len(firsts(path / "log")) == len(times) + 1
    clock.now = right
    return log


ONCE_KNOWN = [0, 1, 1, 0, 3, 1]
"""Segments dropped on days 30.5, 31.5, 32.5, 34.5, 35.5 and 36.5."""


@pytest.mark.parametrize(
    ("wrong", "dropped"),
    [(1500.0, ONCE_KNOWN), (14.0, ONCE_KNOWN), (-700.0, [0, 1, 3, 0, 1, 1])],
    ids=["years_ahead", "days_ahead", "behind"],
)
async def test_a_clock_that_was_wrong_for_a_while_holds_no_other_segment_and_makes_none_old(
    tmp_path: Path, clock: Clock, wrong: float, dropped: list[int]
):
    """Those that were closed meanwhile go with the next one; or, by a clock that was behind, with the one before."""
    clock.now = 1000 * DAY
    with await stamped(tmp_path, clock, [0.0, 1.0, 2.0, wrong, wrong + 0.5, 5.0, 6.0, 7.0]) as log:
        days = (30.5, 31.5, 32.5, 34.5, 35.5, 36.5)
        assert [await log.drop_old(clock.now + day * DAY, 1000) for day in days] == dropped


def test_the_times_that_are_in_order_are_believed():
    assert retention.closed_at([1.0, 9.0, 3.0, 0.5, 4.0, 99.0, None], now=50.0) == [1.0, 3.0, 3.0, 4.0, 4.0, None, None]
    assert retention.closed_at([26.1, 0.7], now=30.0) == [26.1, None], "rather kept than lost"
    assert retention.closed_at([26.1, 0.7, 26.2], now=30.0) == [26.1, 26.2, 26.2]
    assert retention.closed_at([], now=1.0) == []


@given(right=st.lists(st.integers(0, 100), min_size=1, max_size=30).map(sorted), data=st.data())
def test_fewer_wrong_times_than_right_ones_before_and_after_change_nothing_else(right: list[float], data: Any):
    at = data.draw(st.integers(0, len(right)))
    most = max(0, min(at, len(right) - at) - 1)
    wrong = data.draw(st.lists(st.sampled_from([-5.0, 150.0, 1000.0]), max_size=most))
    found = retention.closed_at([*right[:at], *wrong, *right[at:]], now=200.0)
    assert found == [*right[:at], *[right[at] for _ in wrong], *right[at:]]


async def test_a_reader_that_is_under_way_reads_on(tmp_path: Path, clock: Clock, log: SqlLog):
    """It holds the oldest segment open; when it comes to one that went, it goes on behind it with what stayed."""
    before = await collect(log)
    reading = log.read(0, EVERY)
    seen = [await anext(reading)]
    await log.drop_old(clock.now + 26.5 * DAY, 1000)
    seen += [item async for item in reading]
    assert seen == before[:10] + kept(before[10:40]) + before[40:]


async def test_a_reader_elsewhere_that_has_the_segment_open_reads_all_of_it(tmp_path: Path, clock: Clock, log: SqlLog):
    before = await collect(log)
    segment = Segment(log._directory.segment(11), None)  # opened, nothing read yet but what opening reads
    try:
        await log.drop_old(clock.now + 29 * DAY, 1000)
        found = [(row[0], segment.decode(kind, row)) for kind in FOR_EVER for row in segment.fetch(kind, 0, 99, 99)]
        assert sorted(found, key=lambda item: item[0]) == kept(before[10:20])
    finally:
        segment.close()


@pytest.mark.parametrize("instant", range(12))
async def test_killed_at_any_instant_nothing_is_lost_or_doubled(
    log: SqlLog, clock: Clock, instant: int, monkeypatch: pytest.MonkeyPatch
):
    """An exception stands for the kill: no step that follows it is taken."""
    before = await collect(log)
    steps = itertools.count()

    class Killed(BaseException):
        pass

    def killing(step: Any) -> Any:
        def taken(*args: Any, **named: Any) -> Any:
            if next(steps) == instant:
                raise Killed
            return step(*args, **named)

        return taken

    with monkeypatch.context() as patch:
        patch.setattr(retention, "_copy", killing(retention._copy))
        patch.setattr(retention, "sync_directory", killing(retention.sync_directory))
        patch.setattr(retention, "_checkpoint", killing(retention._checkpoint))
        patch.setattr(Path, "unlink", killing(Path.unlink))
        with pytest.raises(Killed):
            retention.drop_segments(log._directory, clock.now + 26.5 * DAY, 30.0, 1000)
    found = await collect(log)
    horizon = await log.horizon()
    assert horizon in (0, 10, 20)
    # this reader still has some segments open whose names are gone
    assert found in (kept(before[:at]) + before[at:] for at in (0, 10, 20))
    with SqlLog.open(log._directory.path, clock, CONFIG) as other:
        assert await collect(other) == kept(before[:horizon]) + before[horizon:]
    assert await log.drop_old(clock.now + 26.5 * DAY, 1000) == 4 - horizon // 10
    with SqlLog.open(log._directory.path, clock, CONFIG) as other:
        assert await collect(other) == kept(before[:40]) + before[40:]
        assert await other.append(*[row for _, row in before if isinstance(row, STAYS)]) == 81


async def test_segments_that_another_process_drops_leave_no_filters_behind(tmp_path: Path, clock: Clock):
    """As housekeeping does beside a gateway that runs on for weeks."""
    made = range(1, 401, 10)
    with SqlLog.open(tmp_path / "log", clock, CONFIG) as log:
        for first in made:
            await log.append(*(signal(first + i) for i in range(10)))
            clock.now += DAY
            retention.drop_segments(log._directory, clock.now, 3.0, 1000)
        await log.append(signal(1000))
        sealed = log._appender._closed.sealed
        assert set(made).difference(sealed.missing(made)) <= set(firsts(tmp_path / "log"))
        assert sum(table.shape[1] for table, _ in sealed._sizes.values()) <= 8


async def test_what_a_kill_left_behind_is_swept_up(log: SqlLog, clock: Clock):
    directory = log._directory.path
    old = time.time() - 7200  # noqa: TID251 - the file system's clock
    for name in (
        f"{3:016d}.db-wal",
        f"{3:016d}.db-shm",
        f".{99:016d}.db.12.ab",
        f".{99:016d}.db.12.ab-wal",
        ".kept.db.9.a",
    ):
        (directory / name).write_bytes(b"x")
        os.utime(directory / name, (old, old))
    fresh = directory / f".{99:016d}.db.13.cd"
    fresh.write_bytes(b"x")
    (directory / "notes.txt").write_text("mine")
    files = {path.name for path in directory.iterdir()}
    await log.drop_old(clock.now + 1e9, 0)
    swept = files - {path.name for path in directory.iterdir()}
    assert swept == {
        f"{3:016d}.db-wal", f"{3:016d}.db-shm", f".{99:016d}.db.12.ab", f".{99:016d}.db.12.ab-wal", ".kept.db.9.a"
    }  # fmt: skip


async def test_a_segment_that_a_reader_holds_in_an_old_state_waits_for_the_next_time(
    log: SqlLog, clock: Clock, sql: Any
):
    path = log._directory.segment(11)
    segment = Segment(path, None, write=True)
    segment.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    segment.db.execute("CREATE TABLE unread (x)")  # what is not in the main file yet
    reader = Segment(path, None)
    reader.db.execute("BEGIN")
    reader.db.execute("SELECT * FROM segment").fetchall()
    segment.db.execute("DROP TABLE unread")
    try:
        assert await log.drop_old(clock.now + 29 * DAY, 1000) == 1
        assert await log.horizon() == 10
    finally:
        reader.close()
        segment.close()
    assert await log.drop_old(clock.now + 29 * DAY, 1000) == 5


async def test_two_that_drop_at_once_agree(log: SqlLog, clock: Clock):
    before = await collect(log)
    with SqlLog.open(log._directory.path, clock, CONFIG) as other:
        later = clock.now + 26.5 * DAY
        await asyncio.gather(*[each.drop_old(later, 1000) for each in (log, other, log, other)])
        await log.drop_old(later, 1000)
        assert await collect(other, 0) == kept(before[:40]) + before[40:]


@pytest.mark.parametrize(
    ("where", "name"),
    [(segment_module, "connect"), (segment_module, "check_format"), (Segment, "seal")],
    ids=["connect", "check", "seal"],
)
async def test_a_segment_that_another_drops_while_it_is_looked_at_is_gone(
    log: SqlLog, clock: Clock, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
):
    look = getattr(where, name)

    def gone(*args: Any, **named: Any) -> Any:
        path = log._directory.segment(1)
        if path in (*args, getattr(args[0], "path", None)):
            sqlite.remove(path)
            raise io_error()
        return look(*args, **named)

    assert await log.drop_old(clock.now, 1000) == 0  # from now on each segment's end is known
    monkeypatch.setattr(where, name, gone)
    assert await log.drop_old(clock.now + 26.5 * DAY, 1000) == 4
    assert firsts(log._directory.path)[0] == 41


def io_error() -> Exception:
    """What SQLite says when a file that it has open is not there any more."""
    error = sqlite.driver.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite.driver.SQLITE_IOERR
    return error


async def test_a_disk_that_refuses_keeps_the_segment(log: SqlLog, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ostinato.record.sqlite.os.link", full)
        with pytest.raises(StorageFull, match="free space"):
            await log.drop_old(clock.now + 29 * DAY, 1000)
    assert await log.horizon() == 0
    assert len(await collect(log, 0, {Reward, Signal, Holdback})) == 25


async def test_a_segment_that_was_made_and_never_used_goes(log: SqlLog, clock: Clock):
    """Left by a process that was stopped while it made it, until others had gone past."""
    from ostinato.record.segment import create_segment

    await log.drop_old(clock.now + 26.5 * DAY, 1000)
    create_segment(log._directory.segment(11), 11, clock.now)
    assert await log.append(signal(500)) == 82
    assert len(await collect(log)) > 40
    await log.drop_old(clock.now + 26.5 * DAY, 1000)
    assert await log.horizon() == 40
