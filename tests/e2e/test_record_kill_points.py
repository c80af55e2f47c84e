"""kill -9 at one step after another of a log's whole life: its first start, its keys, the end of a segment, retention, forgetting.

A step is a statement that is given to SQLite, or an operation on files. The process is killed before it, in a child of its own.
"""

import asyncio
import itertools
import json
import os
import signal as signals
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
import pytest

from ostinato.core.records import Batch, PolicyVersion, Row, Signal, Source, Turn
from ostinato.record import keys, segment, sqlite
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.log import SqlLog
from ostinato.testing.records import a_turn

CONFIG = RecordConfig(segment_rows=6, retain_days=1.0, encrypt=Encrypt.USER, append_s=600.0)
DAY = 86_400.0
ROUNDS = 6
FORGOTTEN = "user1"
FILES = ("link", "open", "fsync", "unlink", "chmod", "mkdir")


def rows_of(i: int) -> list[Row]:
    """One append: a turn, what was said about it, and a step that was made of it. Every second turn's user is forgotten later."""
    turn = replace(a_turn(f"t{i}", user=f"user{i % 2}"), text=f"answer {i}")
    said = Signal(
        id=f"s{i}",
        turn=turn.id,
        name="n",
        value=1.0,
        source=Source.HUMAN,
        occurred_at=1.0,
        received_at=1.0,
        comment=f"comment {i}",
    )
    return [turn, said, Batch(step=i + 1, turns=(f"t{i}",), credits=((1.0,),), reference=V0, at=1.0)]


V0 = PolicyVersion(number=0, hash="a")


async def life(path: Path, told: Callable[[str], None]) -> None:
    """A log from its first start to where it has dropped and forgotten; says what was acknowledged."""
    now = itertools.count(0, DAY)
    with SqlLog.open(path, lambda: 1.0, CONFIG) as log:
        for i in range(ROUNDS - 1):
            await log.append(*rows_of(i))
            told(f"t{i}")
    with SqlLog.open(path, lambda: DAY * 10 + next(now), CONFIG) as log:
        await log.drop_old(DAY * 100, 9)
        await log.append(*rows_of(ROUNDS - 1))
        told(f"t{ROUNDS - 1}")
        await log.forget("default", FORGOTTEN)
        told("forgotten")


# ---------------------------------------------------------------- a child that is killed


class Steps:
    """Counts the steps of this process and kills it before one of them."""

    def __init__(self, fatal: int | None) -> None:
        self.labels: list[str] = []
        self._fatal = fatal
        self._lock = threading.Lock()

    def take(self, label: str) -> None:
        with self._lock:
            if len(self.labels) == self._fatal:
                os.kill(os.getpid(), signals.SIGKILL)
            self.labels.append(label)

    def watch_everything(self) -> None:
        """Only ever in a child: nothing is put back."""
        opened = sqlite.connect

        def connect(path: Path, *, write: bool) -> Any:
            return Watched(opened(path, write=write), self, path.name if path.name[0] != "." else "a new file")

        sqlite.connect = segment.connect = keys.connect = connect
        for name in FILES:
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, act: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.take(f"os.{name}")
            return act(*args, **kwargs)

        return watched


class Watched:
    """A connection whose statements are steps."""

    def __init__(self, connection: Any, steps: Steps, name: str) -> None:
        self._connection = connection
        self._steps = steps
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, *args: Any) -> Any:
        self._steps.take(f"{self._name}: {statement}")
        return self._connection.execute(statement, *args)

    def executemany(self, statement: str, *args: Any) -> Any:
        self._steps.take(f"{self._name}: {statement}")
        return self._connection.executemany(statement, *args)


def lived(path: Path, fatal: int | None = None) -> tuple[list[str], list[str]]:
    """Live in a child until the fatal step: what it was told, and the steps that it took if it was left alive."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        steps, status = Steps(fatal), 1
        try:
            steps.watch_everything()
            asyncio.run(life(path, lambda word: os.write(write, f"{word}\n".encode()) and None))
            os.write(write, json.dumps(steps.labels).encode())
            status = 0
        except BaseException:  # noqa: BLE001 - the child tells and ends, whatever it was
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    if fatal is None:
        assert status == 0, said
        return said[:-1], json.loads(said[-1])
    assert os.waitstatus_to_exitcode(status) == -signals.SIGKILL, said
    return said, []


# ---------------------------------------------------------------- what must hold afterwards


async def check(path: Path, told: list[str]) -> None:
    with SqlLog.open(path, lambda: 1.0, CONFIG) as log:
        horizon, newest = await log.horizon(), log.newest()
        found = [(seq, row) async for seq, row in log.read(0, {Turn, Signal, Batch})]
        assert [seq for seq, _ in found if seq > horizon] == list(range(horizon + 1, newest + 1))
        steps = [row.step for _, row in found if isinstance(row, Batch)]
        acknowledged = [int(word[1:]) for word in told if word != "forgotten"]
        assert steps == list(range(1, len(steps) + 1))  # they stay for ever, each once
        assert len(acknowledged) <= len(steps) <= len(acknowledged) + 1
        for seq, row in found:
            if isinstance(row, Turn | Signal):
                text = row.text if isinstance(row, Turn) else row.comment
                readable = "answer" if isinstance(row, Turn) else "comment"
                number = int(row.id[1:])
                if number % 2 == 0:
                    assert text == f"{readable} {number}", (seq, row)
                elif "forgotten" in told:
                    assert not text, (seq, row)
                else:
                    assert text in (f"{readable} {number}", "", None), (seq, row)
        for i in range(ROUNDS):  # whoever was not told appends again: what is there is not written twice
            if i >= len(steps) or 3 * i >= horizon:
                await log.append(*rows_of(i))
        again = [row.step async for _, row in log.read(0, {Batch}) if isinstance(row, Batch)]
        assert again == list(range(1, ROUNDS + 1))
        assert log.newest() == max(newest, 3 * ROUNDS)
    assert intact(path)


def intact(path: Path) -> bool:
    driver: Any = pysqlite3.dbapi2
    answers: set[str] = set()
    for file in [*path.glob("*.db"), path.with_name(path.name + "-keys.db")]:
        connection = driver.connect(str(file))
        try:
            answers.add(connection.execute("PRAGMA integrity_check").fetchone()[0])
        finally:
            connection.close()
    return answers == {"ok"}


@pytest.fixture
def whole(tmp_path: Path) -> list[str]:
    """The steps of a life that nobody ends."""
    told, labels = lived(tmp_path / "whole" / "log")
    assert told == [*(f"t{i}" for i in range(ROUNDS)), "forgotten"]
    return labels


def moments(labels: list[str]) -> dict[str, int]:
    """The steps at which a log is most easily hurt, by what they are."""

    def first(*parts: str, after: int = 0) -> int:
        return next(at for at in range(after, len(labels)) if all(part in labels[at] for part in parts))

    made = first("CREATE TABLE segment")
    keys = first("CREATE TABLE keys")
    key = first("INSERT INTO keys")
    sealed = first("INSERT INTO seal")
    kept = first("kept.db: BEGIN IMMEDIATE")
    forgot = first("UPDATE keys")
    return {
        "the first segment is half made": made + 3,
        "the first segment has no name yet": first("os.link"),
        "the first segment has its name": first("os.link") + 1,
        "the file of keys is half made": keys + 1,
        "the file of keys has no name yet": first("os.link", after=keys),
        "a key is made": key,
        "a key is not committed": first("keys.db: COMMIT", after=key),
        "a key is there, its rows are not": first("keys.db: COMMIT", after=key) + 1,
        "rows are written": first("INSERT INTO identities"),
        "rows are not committed": first("0001.db: COMMIT", after=first("INSERT INTO turns")),
        "a segment is being closed": sealed,
        "a segment's end is not committed": sealed + 1,
        "a segment is closed": sealed + 2,
        "the next segment is half made": first("CREATE TABLE turns", after=sealed),
        "the next segment has no name yet": first("os.link", after=sealed),
        "the next segment has its name": first("os.link", after=sealed) + 1,
        "what stays is being copied": kept + 2,
        "what stays is not committed": first("kept.db: COMMIT", after=kept),
        "what stays is copied": first("kept.db: COMMIT", after=kept) + 1,
        "an old segment goes": first("os.unlink", after=first("kept.db: COMMIT", after=kept)),
        "an old segment's file is gone": first("os.unlink", after=first("kept.db: COMMIT", after=kept)) + 1,
        "keys are being destroyed": forgot,
        "keys are destroyed, their traces are there": first("VACUUM", after=forgot),
        "keys are destroyed": first("VACUUM", after=forgot) + 1,
    }


def test_a_kill_at_the_worst_moments_loses_nothing_that_was_acknowledged(tmp_path: Path, whole: list[str]):
    for name, at in moments(whole).items():
        path = tmp_path / name / "log"
        told, _ = lived(path, at)
        try:
            asyncio.run(check(path, told))
        except BaseException as error:
            error.add_note(f"killed when {name}, before {whole[at]!r}")
            raise


@pytest.mark.examination
def test_nor_does_a_kill_at_every_seventh_step(tmp_path: Path, whole: list[str]):
    for at in range(0, len(whole), 7):
        path = tmp_path / str(at) / "log"
        told, _ = lived(path, at)
        try:
            asyncio.run(check(path, told))
        except BaseException as error:
            error.add_note(f"killed before step {at} of {len(whole)}, {whole[at]!r}")
            raise


@pytest.mark.parametrize("name", ["log/0000000000000001.db", "log-keys.db"])
def test_an_empty_file_is_refused_and_left_alone(tmp_path: Path, name: str):
    """No kill leaves one. A person, or a disk, may."""
    (tmp_path / "log").mkdir()
    (tmp_path / name).touch()
    with pytest.raises(Exception, match=Path(name).name):
        SqlLog.open(tmp_path / "log", lambda: 1.0, CONFIG)
    assert (tmp_path / name).stat().st_size == 0
