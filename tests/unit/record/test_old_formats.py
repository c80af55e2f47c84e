"""A log that an earlier version wrote is read, appended to, backed up and restored. `format_1.tar.gz` to `format_4.tar.gz` were written by
such versions.

`APPENDS` says what they were given. Retention has dropped its first segment, the newest has no row, and of its two users bob is forgotten.
"""

import tarfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_rows import collect, firsts, one_of_each, signal

from ostinato.core.records import ParsedCall, Row, Signal, SteeringBasis, Turn
from ostinato.core.steering import Basis, DialSet, SetBy
from ostinato.record import segment as segment_file
from ostinato.record.backup import KEYS, back_up
from ostinato.record.codec.kinds import FOR_EVER
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.restore import restore
from ostinato.record.segment import Segment
from ostinato.record.segment_directory import LogDirectory
from ostinato.testing.records import a_turn

CONFIG = RecordConfig(encrypt="user", retain_days=1.0, segment_rows=12)  # type: ignore[arg-type]
STOP = "the end"
BASIS = Basis(("brief", "lists"), np.array([2, 7]), np.array([[1.0, -0.5], [0.25, 3.0]], np.float32), "3f")


def asked_and_told(i: int) -> list[Row]:
    """A turn with stop strings, a grammar and a bias, whose tokens spell its text; a signal with words; a turn of other text."""
    turn = replace(a_turn(f"t{i}:0", user=("ann", "bob")[i % 2]), parent=f"t{i - 1}:0", text="<7><9>")
    asked = replace(turn.sampling, stop=(STOP,), grammar='start: "a"', logit_bias=((7, 1.5),))
    told = replace(signal(i), turn=turn.id, comment=f"comment {i}", correction="meant")
    written = replace(a_turn(f"w{i}:0", user="ann", prompt=tuple(range(40))), text="written by hand")
    return [replace(turn, sampling=asked), told, written]


APPENDS: list[list[Row]] = [*(one_of_each(i) for i in range(3)), *(asked_and_told(i) for i in range(3, 8))]
FIRST_KEPT = 21  # rows before it were dropped


def as_read(row: Row, version: int) -> Row:
    """A row as it is read from a log of this format. Of a forgotten person, format 1 left the stop strings and the bias; before format 3
    it was stored of nobody which tools were called.
    """
    if isinstance(row, Turn) and row.user == "bob":
        left = replace(row.sampling, grammar="")
        asked = left if version == 1 else replace(left, stop=(), logit_bias=())
        return replace(row, prompt_ids=(), sampled_ids=(), logprobs=(), text="", sampling=asked, calls=None)
    if isinstance(row, Turn):
        return replace(row, calls=None) if version < 3 else row
    if isinstance(row, Signal) and row.turn in ("t3:0", "t5:0", "t7:0"):
        return replace(row, comment=None, correction=None)
    return row


def expected(version: int) -> list[tuple[int, Row]]:
    permanent = {kind.record for kind in FOR_EVER}
    rows = list(enumerate((as_read(row, version) for rows in APPENDS for row in rows), 1))
    return [(seq, row) for seq, row in rows if seq >= FIRST_KEPT or type(row) in permanent]


@pytest.fixture(params=[1, 2, 3, 4])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def old(tmp_path: Path, version: int) -> Path:
    with tarfile.open(Path(__file__).with_name(f"format_{version}.tar.gz")) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


async def test_it_is_read_and_appended_to_in_a_new_segment(old: Path, version: int, sql: Any):
    new = asked_and_told(8)
    rows = expected(version)
    with SqlLog.open(old / "log", lambda: 1.0, CONFIG) as log:
        assert await collect(log) == rows
        assert await log.append(*APPENDS[-1]) == log.newest()  # known rows are known
        await log.append(*new)
        assert [row for _, row in await collect(log)][-3:] == new
        await log.forget("default")
        assert {row.sampling.stop for _, row in await collect(log, rows[-1][0], {Turn}) if isinstance(row, Turn)} == {
            ()
        }
    versions = [sql(old / "log" / f"{first:016d}.db", "PRAGMA user_version")[0][0] for first in firsts(old / "log")]
    assert (versions[:2], {*versions[2:]}) == ([version, version], {5})
    assert sql(old / "log" / "kept.db", "PRAGMA user_version") == [(version,)]


async def test_who_reads_it_while_another_appends_knows_what_calls_the_new_turns_made(old: Path):
    """The newest segment has no row: its format is that of the version that wrote its first."""
    called = replace(a_turn("c:0", user="ann"), calls=(ParsedCall(name="ls", start=0, end=1),))
    with (
        SqlLog.open(old / "log", lambda: 1.0, CONFIG) as reads,
        SqlLog.open(old / "log", lambda: 1.0, CONFIG) as writes,
    ):
        newest = reads.newest()
        assert await collect(reads, newest) == []
        reads._reader._segments.newest()
        await writes.append(a_turn("n:0", user="ann"), called)
        assert [row for _, row in await collect(reads, newest)] == [a_turn("n:0", user="ann"), called]


@pytest.mark.parametrize("asks_while_open", [True, False])
async def test_who_opened_it_empty_knows_the_calls_of_what_was_written_and_sealed_since(
    old: Path, version: int, asks_while_open: bool
):
    directory = LogDirectory(old / "log")
    path = directory.segment(firsts(old / "log")[-1])
    with closing(Segment(path, None)) as reader, closing(Segment(path, None, write=True)) as writer:
        assert (reader.version, reader.seal(), reader.newest()) == (version, None, reader.first - 1)
        assert not asks_while_open or reader.knows_calls is (version >= 3)
        writer.db.execute("BEGIN IMMEDIATE")
        writer.upgrade()
        writer.db.execute("INSERT INTO seal VALUES (1, ?, 1.0, '[]', x'')", (writer.first,))
        writer.db.execute("COMMIT")
        assert reader.seal() is not None  # asked for first, as a reader does that comes to the segment's end
        assert (reader.knows_calls, reader.version) == (True, 5)


async def test_a_sealed_segment_of_an_older_format_is_asked_for_it_once(
    old: Path, version: int, monkeypatch: pytest.MonkeyPatch
):
    with closing(Segment(LogDirectory(old / "log").segment(firsts(old / "log")[0]), None)) as sealed:
        asked = list[Path]()
        monkeypatch.setattr(segment_file, "check_format", lambda _, path: asked.append(path) or version)
        assert [sealed.knows_calls for _ in range(3)] == [version >= 3] * 3
        assert asked == [sealed.path]


async def test_a_basis_goes_to_a_new_segment_and_is_found_beside_the_old_ones(old: Path, version: int):
    basis = SteeringBasis.of(BASIS, at=2.0)
    with (
        SqlLog.open(old / "log", lambda: 1.0, CONFIG) as reads,
        SqlLog.open(old / "log", lambda: 1.0, CONFIG) as log,
    ):
        before = await collect(reads)
        assert reads.tail(1, {SteeringBasis}) == []
        assert await log.append(basis, basis) == before[-1][0] + 1
        assert await collect(reads) == [*before, (before[-1][0] + 1, basis)]
        await log.append(*one_of_each(10))
        await log.append(*one_of_each(11))
        assert await log.drop_old(1e9, 10_000) >= 3, "the segment of the basis among them"
        assert (await log.find(SteeringBasis, [(BASIS.hash,)]))[0].basis() == BASIS
        assert await log.append(basis) == log.newest()


async def test_dials_that_a_person_sets_go_to_a_new_segment_under_their_key(old: Path, version: int):
    chosen = DialSet(id="d", tenant="default", user="ann", at=2.0, by=SetBy.PERSON, dials={"brief": 0.5})
    with (
        SqlLog.open(old / "log", lambda: 1.0, CONFIG) as reads,
        SqlLog.open(old / "log", lambda: 1.0, CONFIG) as log,
    ):
        before = await collect(reads)
        assert reads.tail(1, {DialSet}) == []
        assert await log.append(chosen, chosen) == before[-1][0] + 1
        assert await collect(reads) == [*before, (before[-1][0] + 1, chosen)]
        await log.forget("default", "ann")
        assert await log.find(DialSet, [("d",)]) == [replace(chosen, dials=None)]


async def test_it_is_backed_up_and_restored_with_the_same_rows(old: Path, version: int, tmp_path: Path):
    back_up(LogDirectory(old / "log"), old / KEYS, tmp_path / "kept", "0.0.0", lambda: 1.0, lambda done, total: None)
    (tmp_path / "new").mkdir()
    restore(
        tmp_path / "kept", LogDirectory(tmp_path / "new" / "log"), tmp_path / "new" / KEYS, [], None, lambda *_: None
    )
    with SqlLog.open(tmp_path / "new" / "log", lambda: 1.0, CONFIG) as log:
        assert await collect(log) == expected(version)
        assert await log.append(*asked_and_told(9)) == expected(version)[-1][0] + 3


async def test_permanent_rows_join_those_of_the_earlier_version(old: Path, version: int):
    with SqlLog.open(old / "log", lambda: 1.0, CONFIG) as log:
        await log.append(*one_of_each(10))
        assert await log.drop_old(1e9, 10_000) == 2
        permanent = {kind.record for kind in FOR_EVER}
        rows = [row for _, row in expected(version) if type(row) in permanent]
        assert [row for _, row in await collect(log, 0, permanent)] == [
            *rows,
            *(row for row in one_of_each(10) if type(row) in permanent),
        ]
