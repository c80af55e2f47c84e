"""A log of many segments: when one is closed, what holds over all of them, and how little of them is looked at."""

import asyncio
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from record_rows import collect, firsts, one_of_each, signal

from ostinato.core.errors import Corrupt
from ostinato.core.notices import Stamp
from ostinato.core.records import Row, Signal, Turn, identity
from ostinato.record import segment as segment_file
from ostinato.record import sqlite
from ostinato.record.codec.kinds import key_of, kind_of
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.segment import Segment
from ostinato.record.segment_directory import OpenSegments, SegmentFilters, build_filter
from ostinato.testing.records import a_turn


@pytest.fixture
def many(tmp_path: Path) -> Iterator[SqlLog]:
    """Segments of seven rows."""
    with SqlLog.open(tmp_path / "log", config=RecordConfig(segment_rows=7)) as log:
        yield log


# ---------------------------------------------------------------- when a segment ends


async def test_rows_end_a_segment_between_two_transactions(many: SqlLog):
    for i in range(5):
        await many.append(*[signal(4 * i + j) for j in range(4)])
    assert firsts(many._directory.path) == [1, 9, 17]
    assert [seq for seq, _ in await collect(many)] == list(range(1, 21))


async def test_bytes_end_a_segment(tmp_path: Path):
    with SqlLog.open(tmp_path / "log", config=RecordConfig(segment_mb=0.3)) as log:
        for i in range(6):
            await log.append(replace(a_turn(f"t{i}:0"), routes=random.Random(i).randbytes(100_000)))
        assert 2 <= len(firsts(tmp_path / "log")) <= 5
        assert [row.id for _, row in await collect(log)] == [f"t{i}:0" for i in range(6)]  # type: ignore[union-attr]


async def test_age_ends_a_segment_that_has_rows(tmp_path: Path):
    now = 1000.0
    with SqlLog.open(tmp_path / "log", clock=lambda: now, config=RecordConfig(segment_hours=1.0)) as log:
        now += 7200.0
        await log.append(signal(0))
        assert firsts(tmp_path / "log") == [1]
        await log.append(signal(1))
        assert firsts(tmp_path / "log") == [1, 2]
        await log.append(signal(2))
        assert firsts(tmp_path / "log") == [1, 2]


async def test_a_segment_of_an_older_format_is_read_and_not_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Any
):
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(signal(0))
    monkeypatch.setattr(segment_file, "FORMAT", 6)
    monkeypatch.setattr(segment_file, "READABLE", frozenset({5, 6}))
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(signal(1))
        assert [row for _, row in await collect(log)] == [signal(0), signal(1)]
    versions = [sql(tmp_path / "log" / f"{first:016d}.db", "PRAGMA user_version") for first in (1, 2)]
    assert versions == [[(5,)], [(6,)]]


async def test_a_closed_segment_is_never_written_again(many: SqlLog):
    for i in range(10):
        await many.append(signal(i))
    path = many._directory.segment(1)
    before = path.read_bytes()
    for i in range(10):
        await many.append(signal(i), signal(100 + i))
    await collect(many)
    assert path.read_bytes() == before
    assert not path.with_name(path.name + "-wal").exists() or path.with_name(path.name + "-wal").stat().st_size == 0


async def test_who_was_killed_between_closing_a_segment_and_making_the_next_stops_nobody(tmp_path: Path):
    config = RecordConfig(segment_rows=3)
    with SqlLog.open(tmp_path / "log", config=config) as log:
        await log.append(signal(0), signal(1), signal(2))
        appender = log._appender
        appender._close(appender._begin())
    (tmp_path / "log" / f"{4:016d}.db").unlink()
    with SqlLog.open(tmp_path / "log", config=config) as log:
        assert log.newest() == 3
        assert len(await collect(log)) == 3
        assert await log.append(signal(1), signal(3)) == 4
        assert firsts(tmp_path / "log") == [1, 4]


def test_a_database_is_in_its_file_before_it_has_its_name_whatever_closing_it_can_write(tmp_path: Path):
    others: list[Any] = []

    def build_beside_a_reader(db: Any) -> None:
        """Somebody else has it open, so that closing writes nothing back, as on a disk that fills up just then."""
        db.execute("CREATE TABLE t (x)")
        others.append(sqlite.connect(Path(db.execute("PRAGMA database_list").fetchone()[2]), write=False))
        others[0].execute("SELECT count(*) FROM sqlite_master").fetchall()

    sqlite.create(tmp_path / "made.db", build_beside_a_reader)
    shutil.copy(tmp_path / "made.db", tmp_path / "copy.db")
    others[0].close()
    with closing(sqlite.connect(tmp_path / "copy.db", write=False)) as found:
        assert found.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]
        assert found.execute("PRAGMA journal_mode").fetchone() == ("wal",)


async def test_two_appenders_and_a_reader_follow_each_other_from_segment_to_segment(tmp_path: Path):
    config = RecordConfig(segment_rows=3)
    with (
        SqlLog.open(tmp_path / "log", config=config) as one,
        SqlLog.open(tmp_path / "log", config=config) as two,
        SqlLog.open(tmp_path / "log") as reader,
    ):
        cursor, seen = 0, list[Row]()
        for i in range(40):
            await asyncio.gather(one.append(signal(2 * i)), two.append(signal(2 * i + 1)))
            async for seq, row in reader.read(cursor, {Signal}):
                assert seq == cursor + 1
                cursor = seq
                seen.append(row)
            assert reader.newest() == one.newest() == 2 * i + 2
        assert sorted(row.id for row in seen if isinstance(row, Signal)) == sorted(f"s{i}" for i in range(80))
        assert len(firsts(tmp_path / "log")) > 20


# ---------------------------------------------------------------- what holds over all of them


async def test_an_identity_is_one_over_all_segments_whatever_its_kind(many: SqlLog):
    for i in range(1, 12):
        await many.append(*one_of_each(i))
    end = many.newest()
    assert len(firsts(many._directory.path)) > 8
    for i in range(1, 12):
        assert await many.append(*one_of_each(i)) == end
    assert len(await collect(many)) == 110


async def test_and_for_a_process_that_starts_later(tmp_path: Path):
    config = RecordConfig(segment_rows=7)
    with SqlLog.open(tmp_path / "log", config=config) as log:
        for i in range(1, 6):
            await log.append(*one_of_each(i))
    with SqlLog.open(tmp_path / "log", config=config) as log:
        assert await log.append(*one_of_each(1), *one_of_each(4)) == 50


async def test_rows_are_found_in_any_segment(many: SqlLog):
    rows = [row for i in range(1, 12) for row in one_of_each(i)]
    for row in rows:
        await many.append(row)
    for row in random.Random(0).sample(rows, 40):
        assert await many.find(type(row), [("absent",), identity(row)]) == [row]
    wanted = [rows[70], rows[0], rows[40]]
    assert await many.find(Turn, [identity(row) for row in wanted]) == wanted
    assert many.tail(9, {Turn}) == [(10 * i + 1, rows[10 * i]) for i in range(2, 11)]
    assert many.tail(100, {Stamp}) == [(10 * i + 9, rows[10 * i + 8]) for i in range(11)]


async def test_two_identities_with_one_key_are_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("codec.turns", "reader", "segment"):
        monkeypatch.setattr(f"ostinato.record.{module}.key_of", lambda kind, identity: len(str(identity)))
    config = RecordConfig(segment_rows=5)
    rows: list[Row] = [row for i in range(1, 5) for row in one_of_each(i)]
    with SqlLog.open(tmp_path / "log", config=config) as log:
        for i in range(0, 40, 4):
            await log.append(*rows[i : i + 4], *rows[i : i + 4])
        await log.append(*rows)
        assert [row for _, row in await collect(log)] == rows
        for row in rows:
            assert await log.find(type(row), [identity(row)]) == [row]
        assert await log.find(Signal, [("default", "s9")]) == []


# ---------------------------------------------------------------- how little is looked at


async def test_a_reader_with_a_cursor_looks_at_no_segment_before_it(many: SqlLog):
    """Those before it are made unreadable: who opened them would fail."""
    for i in range(60):
        await many.append(signal(i))
    directory = many._directory
    many.close()
    for first in firsts(directory.path)[:-3]:
        directory.segment(first).write_bytes(b"not a database, " * 512)
    with SqlLog.open(directory.path) as log:
        after = firsts(directory.path)[-3] - 1
        assert [seq for seq, _ in await collect(log, after)] == list(range(after + 1, 61))
        assert log.tail(3, {Signal})[0] == (58, signal(57))
        with pytest.raises(Corrupt):
            await collect(log, after - 1)


async def test_rare_kinds_are_read_without_reading_the_others(many: SqlLog):
    """Every turn is made unreadable: who read one would fail."""
    for i in range(1, 8):
        await many.append(*[a_turn(f"{i}-{j}:0") for j in range(6)], Stamp(id=f"c{i}", contract="{}", at=1.0))
    many.close()
    for first in firsts(many._directory.path):
        segment = Segment(many._directory.segment(first), None, write=True)
        segment.db.execute("DROP TRIGGER turns_no_update")
        segment.db.execute("UPDATE turns SET head = x'', tokens = x''")
        segment.close()
    with SqlLog.open(many._directory.path) as log:
        assert [row.id for _, row in await collect(log, 0, {Stamp})] == [f"c{i}" for i in range(1, 8)]  # type: ignore[union-attr]


async def test_a_fresh_identity_opens_no_closed_segment_however_many_there_are(tmp_path: Path):
    """What an append looks at does not grow with the segments: the closed ones' files are never opened for it."""
    config = RecordConfig(segment_rows=20)
    with SqlLog.open(tmp_path / "log", config=config) as log:
        for i in range(60):
            await log.append(*[signal(20 * i + j) for j in range(20)])
        assert len(firsts(tmp_path / "log")) == 60
        opened: list[int] = []
        get = log._appender._closed.get

        def counted(first: int) -> Segment:
            opened.append(first)
            return get(first)

        log._appender._closed.get = counted  # type: ignore[method-assign]
        for i in range(300):
            await log.append(signal(100_000 + i))
        assert len(opened) <= 60  # false alarms of 60 filters for 300 keys: about one in a thousand, each
        opened.clear()
        await log.append(signal(3))
        assert opened == [1]


def test_a_filter_lets_few_foreign_keys_pass():
    draw = random.Random(1)
    sealed = SegmentFilters()
    for segment in range(20):
        sealed.add(segment, build_filter([draw.getrandbits(63) for _ in range(4096)]))
    found = sealed.holding([draw.getrandbits(63) for _ in range(20_000)])
    alarms = sum(map(len, found.values()))
    assert 0 < alarms < 20 * 20_000 * 0.004


async def test_keys_are_spread_evenly_over_what_a_filter_uses(many: SqlLog):
    keys = [key_of(kind_of(Signal), ("default", f"s{i}")) for i in range(4000)]
    for bit in range(63):
        share = sum(key >> bit & 1 for key in keys) / len(keys)
        assert 0.45 < share < 0.55


async def test_six_segments_are_open_at_most_those_used_last(tmp_path: Path):
    with SqlLog.open(tmp_path / "log", config=RecordConfig(segment_rows=1)) as log:
        for i in range(8):
            await log.append(signal(i))
        opened = OpenSegments(log._directory, None, SegmentFilters())
        try:
            for first in (1, 2, 3, 4, 5, 6):
                opened.get(first)
            kept = opened.get(1)
            assert list(opened._open) == [2, 3, 4, 5, 6, 1]
            opened.get(7)
            assert list(opened._open) == [3, 4, 5, 6, 1, 7]
            assert opened.get(1) is kept
        finally:
            opened.close()


async def test_the_newest_of_a_kind_are_counted_over_all_segments_and_without_reading_them(
    many: SqlLog, monkeypatch: pytest.MonkeyPatch
):
    for i in range(5):
        await many.append(*one_of_each(i))
    for i in range(20):
        await many.append(signal(100 + i))
    assert len(firsts(many._directory.path)) >= 5
    places = {kind: [seq for seq, _ in await collect(many, 0, {kind})] for kind in (Signal, Turn, Stamp)}
    monkeypatch.setattr(Segment, "decode", lambda *_: pytest.fail("a row was read"))
    for kind, found in places.items():
        wanted = [*(place - 1 for place in reversed(found)), 0, 0]
        assert [await many.before_last(count + 1, kind) for count in range(len(wanted))] == wanted


async def test_the_newest_of_a_kind_are_counted_where_retention_left_them(tmp_path: Path):
    now = [0.0]
    with SqlLog.open(
        tmp_path / "log", clock=lambda: now[0], config=RecordConfig(segment_rows=10, retain_days=1.0)
    ) as log:
        for i in range(4):
            await log.append(*one_of_each(i))
        now[0] = 5 * 86_400.0
        assert await log.drop_old(now[0], 40) >= 2
        stamps = [seq for seq, _ in await collect(log, 0, {Stamp})]
        assert len(stamps) == 4
        assert [await log.before_last(count, Stamp) for count in (1, 2, 3, 4, 5)] == [
            *(s - 1 for s in reversed(stamps)),
            0,
        ]
        turns = [seq for seq, _ in await collect(log, 0, {Turn})]
        assert len(turns) < 4
        assert await log.before_last(len(turns) + 1, Turn) == 0


async def test_a_segment_that_goes_while_filters_are_read_is_passed_over(many: SqlLog):
    for i in range(8):
        await many.append(*[signal(4 * i + j) for j in range(4)])
    opened = OpenSegments(many._directory, None, SegmentFilters())
    try:
        first, second = opened.listing().firsts[:2]
        many._directory.drop(first)
        opened.learn_filters()
        assert first in opened.sealed.missing([first])
        assert second not in opened.sealed.missing([second])
    finally:
        opened.close()
