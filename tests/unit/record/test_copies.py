"""A segment that the log's benchmark makes in bulk is the one that the writer would have written of the same rows."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.record.copies import Offsets, Pattern, copy
from benchmarks.record.traffic import LETTERS, Draws, Shape, Traffic
from record_rows import EVERY, collect, when_trained

from ostinato.core.records import Batch, PolicyVersion, Reward, Row, Turn
from ostinato.record.codec.kinds import KINDS
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.segment import Segment
from ostinato.record.segment_directory import LogDirectory

TURNS, SEED = 1_000, 3
OFFSETS = Offsets(place=0, seconds=1_000.5, step=7, number=40)
SHAPE = Shape(users=50, tenants=3, tokens=12, prompt=8, system=10, batch=16)


async def written(path: Path, rows: list[Row], piece: Any) -> None:
    """A closed segment of these rows."""
    with SqlLog.open(path, lambda: 5.0, RecordConfig()) as log:
        log.derive_text(piece)
        for at in range(0, len(rows), 500):
            await log.append(*rows[at : at + 500])
            when_trained(log)  # else it depends on the machine's load which rows are packed with a dictionary
    with SqlLog.open(path, lambda: 6.0, RecordConfig(segment_rows=1, retain_days=1e5)) as log:
        await log.drop_old(6.0, 0)


@pytest.fixture(scope="module")
def draws() -> Draws:
    return Draws(1)


@pytest.fixture(scope="module")
def rows(draws: Draws) -> list[Row]:
    traffic = Traffic(SHAPE, draws)
    return [row for call in [*traffic.calls(TURNS), *traffic.finish()] for row in call]


def renamed(value: Any, letters: Mapping[int, str], name: str = "") -> Any:
    """A row of the pattern as the copy should hold it, field by field."""
    match value:
        case PolicyVersion():
            return replace(value, number=value.number + OFFSETS.number, hash=value.hash.translate(letters))
        case Batch():
            value = replace(value, step=value.step + OFFSETS.step)
        case str():
            return value.translate(letters) if name not in ("text", "finish", "arm", "source") else value
        case float() if name in ("at", "started_at", "ended_at", "occurred_at", "received_at"):
            return value + OFFSETS.seconds
        case tuple() if name not in ("prompt_ids", "sampled_ids", "logprobs", "credits"):
            return tuple(renamed(each, letters) for each in value)
    if is_dataclass(value):
        changed = {
            each.name: renamed(getattr(value, each.name), letters, each.name) for each in fields(value) if each.init
        }
        return replace(value, **changed)
    return value


def test_the_made_up_traffic_is_whole(rows: list[Row]):
    """What the figures rest on: each turn is delivered, rewarded and ends in a batch or held back; follow-ups hold their parent."""
    turns = {row.id: row for row in rows if isinstance(row, Turn)}
    assert len(turns) >= TURNS
    assert {row.turn for row in rows if isinstance(row, Reward)} == set(turns)
    ended = [turn for row in rows if isinstance(row, Batch) for turn in row.turns]
    ended += [row.turn for row in rows if type(row).__name__ == "Holdback"]
    assert sorted(ended) == sorted(turns)
    follow_ups = [turn for turn in turns.values() if turn.parent is not None]
    assert len(follow_ups) > TURNS / 3
    for turn in follow_ups:
        parent = turns[turn.parent or ""]
        whole = parent.prompt_ids + parent.sampled_ids
        assert turn.prompt_ids[: len(whole)] == whole
    assert {type(row) for row in rows} >= {Turn, Reward, Batch}


@pytest.fixture
def contents() -> Iterator[Any]:
    opened: list[Segment] = []

    def read(path: Path, query: str) -> list[Any]:
        segment = Segment(path, None)
        opened.append(segment)
        return segment.db.execute(query).fetchall()

    yield read
    for segment in opened:
        segment.close()


async def test_a_copy_is_what_the_writer_writes(tmp_path: Path, rows: list[Row], draws: Draws, contents: Any):
    spell = draws.pieces.__getitem__
    await written(tmp_path / "pattern", rows, spell)
    pattern = Pattern(LogDirectory(tmp_path / "pattern").segment(1))
    bulk = LogDirectory(tmp_path / "bulk")
    bulk.prepare()
    copied = copy(pattern, bulk, OFFSETS, SEED)
    before = [row for _, row in await read_all(tmp_path / "pattern")]
    assert before == rows
    after = await read_all(bulk.path)

    letters = shuffled(before, [row for _, row in after])
    expected = [renamed(row, letters) for row in before]
    assert [row for _, row in after] == expected
    assert expected != before

    await written(tmp_path / "again", expected, spell)
    again = LogDirectory(tmp_path / "again").segment(1)
    for query in (
        "SELECT key, seq FROM identities",
        "SELECT last, kinds, filter FROM seal",
        "SELECT first FROM segment",
    ):
        assert contents(copied, query) == contents(again, query), query
    for table in ("pieces", "policies"):
        assert sorted(contents(copied, f"SELECT * FROM {table}")) == sorted(contents(again, f"SELECT * FROM {table}"))
    for kind in KINDS:
        assert contents(copied, f"SELECT seq FROM {kind.table}") == contents(again, f"SELECT seq FROM {kind.table}")
    assert contents(copied, "PRAGMA integrity_check") == [("ok",)]
    assert contents(copied, "PRAGMA journal_mode") == contents(again, "PRAGMA journal_mode") == [("wal",)]
    assert packed_size(copied) == pytest.approx(packed_size(again), rel=0.01)
    assert copied.stat().st_mode == again.stat().st_mode


def packed_size(path: Path) -> int:
    """The bytes of a segment whose pages are full: how full a file's own are depends on the keys that were drawn."""
    packed = path.with_suffix(".packed")
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("VACUUM INTO ?", (str(packed),))
    return packed.stat().st_size


async def read_all(path: Path) -> list[tuple[int, Row]]:
    with SqlLog.open(path) as log:
        return await collect(log, kinds=EVERY)


def shuffled(before: list[Row], after: list[Row]) -> dict[int, str]:
    """Which letter of a name became which, as the turns' names have it."""
    pairs = zip(before, after, strict=True)
    names = [(one.id, other.id) for one, other in pairs if isinstance(one, Turn) and isinstance(other, Turn)]
    found = {old: new for one, other in names for old, new in zip(one, other, strict=True) if old in LETTERS}
    assert sorted(found) == sorted(found.values()) == sorted(LETTERS)
    return str.maketrans(found)


async def test_copies_after_one_another_make_a_log(tmp_path: Path, rows: list[Row], draws: Draws):
    """Places go on without a gap, no name comes twice, and the writer goes on behind the last copy."""
    directory = LogDirectory(tmp_path / "log")
    await written(directory.path, rows, draws.pieces.__getitem__)
    pattern = Pattern(directory.segment(1))
    directory.drop(pattern.last + 1)
    for index in (1, 2):
        copy(pattern, directory, Offsets(index * pattern.rows, index * 1e4, index * pattern.steps, index * 9), index)
    with SqlLog.open(directory.path) as log:
        assert await log.append(rows[0]) == 3 * len(rows)  # known, in the pattern
        turn = next(row for row in rows if isinstance(row, Turn))
        assert await log.append(replace(turn, id="another")) == 3 * len(rows) + 1
        found = await collect(log, kinds={Batch, Turn})
    steps = [row.step for _, row in found if isinstance(row, Batch)]
    assert steps == list(range(1, 3 * pattern.steps + 1))
    names = [row.id for _, row in found if isinstance(row, Turn)]
    assert len(set(names)) == len(names) == 3 * pattern.turns + 1
    assert json.dumps(names[0]) != json.dumps(names[pattern.turns])
