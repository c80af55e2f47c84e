"""Each refusal in full: what is wrong, where, and what to do. A person reads these at night, so every word is held to."""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
import pytest
from record_rows import EVERY, collect, signal

from ostinato.core.errors import BadConfig, BadRequest, Corrupt, OstinatoError, StorageFull, Unavailable
from ostinato.core.records import Delivered, PolicyVersion, ReleaseEvent, Row, Span
from ostinato.record import retention, roles
from ostinato.record import rowlog as writer_module
from ostinato.record.codec import tokens
from ostinato.record.codec.turns import prepare
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.folds import FileFolds
from ostinato.record.keys import KeyRing
from ostinato.record.log import SqlLog
from ostinato.record.rowlog import GroupWriter
from ostinato.record.segment import Segment
from ostinato.record.segment_directory import LogDirectory
from ostinato.record.sqlite import refuse_faulty
from ostinato.testing.records import a_turn

driver: Any = pysqlite3.dbapi2
FIRST = "0000000000000001.db"
TURN = a_turn()
NOT_DIRECTORY = f"[Errno {errno.ENOTDIR}] {os.strerror(errno.ENOTDIR)}"


def refused(kind: type[OstinatoError], message: str) -> Any:
    """The whole message, to the letter."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def no_space(*_: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (replace(TURN, prompt_ids=(2**31,)), "Turn.prompt_ids cannot be stored: a token id is a whole number from 0 to 2147483647"),
        (replace(TURN, logprobs=(float("nan"),)), "Turn.logprobs cannot be stored: NaN is not a number that the log keeps"),
        (replace(TURN, started_at=float("nan")), "Turn.started_at cannot be stored: NaN is not a number that the log keeps"),
        (replace(TURN, user=3), "Turn.user cannot be stored: int is not a string"),
        (replace(TURN, text=b"x"), "Turn.text cannot be stored: bytes is not a string"),
        (replace(TURN, routes=3.5), "Turn.routes cannot be stored: cannot convert 'float' object to bytes"),
        (
            replace(TURN, spans=(Span(policy=PolicyVersion(number=2**63, hash=""), tokens=1),)),
            "Turn.spans cannot be stored: a policy's number does not fit in 64 bits",
        ),
        (
            replace(TURN, spans=(Span(policy=PolicyVersion(number=-(2**63) - 1, hash=""), tokens=1),)),
            "Turn.spans cannot be stored: a policy's number does not fit in 64 bits",
        ),
        (
            replace(TURN, spans=(Span(policy=PolicyVersion(number=1, hash=""), tokens=1.5),)),  # type: ignore[arg-type]
            "Turn.spans cannot be stored: float is not a whole number",
        ),
        (replace(signal(1), name=None), "Signal.name cannot be stored: NoneType is not a string"),
        (replace(signal(1), correction=3), "Signal.correction cannot be stored: int is not a string"),
        (Delivered(id="d", turns=(3,), at=1.0), "Delivered.turns cannot be stored: int is not a string"),  # type: ignore[arg-type]
        (
            ReleaseEvent(id="r", action="a", policy=PolicyVersion(number="1", hash=""), previous=None, reason="", detail={}, at=1.0),  # type: ignore[arg-type]
            "ReleaseEvent.policy cannot be stored: str is not a whole number",
        ),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_stored(row: Row, message: str):
    with refused(BadRequest, message) as told:
        prepare(row)
    assert told.value.field == message.split(" ")[0].split(".")[1]


def test_numbers_at_their_limits_can_be_stored():
    for number in (2**63 - 1, -(2**63)):
        span = Span(policy=PolicyVersion(number=number, hash=""), tokens=1)
        assert prepare(replace(TURN, spans=(span,))).turn
    assert tokens.flat((2**31 - 1,))


@pytest.mark.parametrize("value", [2**70, -1, 1.5, "1"])
def test_no_token_id(value: Any):
    with pytest.raises(ValueError, match=r"^a token id is a whole number from 0 to 2147483647 \("):
        tokens.flat((value,))


@pytest.mark.parametrize("value", [-1e300, "1"])
def test_no_log_probability(value: Any):
    with pytest.raises(ValueError, match=r"^a log-probability is a float32 number \("):
        tokens.pack_logprobs((value,))


def test_a_type_that_the_log_does_not_keep():
    kinds = "Alarm, Batch, ConsentGiven, Delivered, DialPrior, DialSet, Forgotten, Holdback, Quarantine, ReleaseEvent, Reward, "
    kinds += "Signal, Stamp, SteeringBasis, Turn"
    with refused(BadRequest, f"the log keeps {kinds}, not Sampling"):
        prepare(TURN.sampling)  # type: ignore[arg-type]


# ---------------------------------------------------------------- files and directories


def test_a_role_that_is_no_name(tmp_path: Path):
    message = "lock role 'Serve' must be a plain lower-case name"
    with refused(BadConfig, message), roles.hold(tmp_path, "Serve"):
        pass


def test_a_lock_that_cannot_be_made_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / ".serve.lock"
    error = f"[Errno {errno.EEXIST}] {os.strerror(errno.EEXIST)}: '{tmp_path / 'file'}'"
    with (
        refused(StorageFull, f"cannot create {path}: {error}; make the directory writable"),
        roles.hold(path.parent, "serve"),
    ):
        pass
    monkeypatch.setattr(os, "ftruncate", no_space)
    message = f"cannot write {tmp_path / '.serve.lock'}: [Errno 28] No space left on device; free space"
    with refused(StorageFull, message), roles.hold(tmp_path, "serve"):
        pass


def test_a_lock_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As after a command by sudo: the directory is writable, and its lock is not this user's."""
    path, denied = tmp_path / ".draining.lock", f"[Errno {errno.EACCES}] {os.strerror(errno.EACCES)}"

    def deny(*_: object) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    path.touch()
    monkeypatch.setattr(os, "open", deny)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    remedy = (
        f"it belongs to user {path.stat().st_uid}: give it and their other files in {tmp_path} to user 4711 (chown)"
    )
    with refused(StorageFull, f"cannot open {path}: {denied}; {remedy}"), roles.hold(tmp_path, "draining"):
        pass
    path.unlink()
    remedy = "make the directory writable"
    with refused(StorageFull, f"cannot create {path}: {denied}; {remedy}"), roles.hold(tmp_path, "draining"):
        pass


@pytest.mark.parametrize("name", ["", "Desk", "a/b", "x" * 65])
async def test_a_fold_that_has_no_name(tmp_path: Path, name: str):
    with refused(BadConfig, f"fold {name!r} must be a plain lower-case name"):
        await FileFolds(tmp_path).load(name)
    await FileFolds(tmp_path).save("x" * 64, 1, {})


@pytest.mark.parametrize("name", ["log", "log.db"])
def test_a_log_in_one_file(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    message = (
        f"{tmp_path / name} is a log in the single-file format of earlier Ostinato versions, which this version cannot read; "
        f"use the version that wrote it, or move {name} away to begin a new log"
    )
    with refused(BadConfig, message):
        LogDirectory(tmp_path / "log").prepare()


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "log"
    with refused(StorageFull, f"cannot create {path}: {NOT_DIRECTORY}: '{path}'; make the run's directory writable"):
        SqlLog.open(path)
    monkeypatch.setattr(LogDirectory, "listing", no_space)
    message = f"cannot create {tmp_path / 'log'}: [Errno 28] No space left on device; make the run's directory writable"
    with refused(StorageFull, message):
        SqlLog.open(tmp_path / "log")


def test_a_sqlite_that_can_corrupt_its_log():
    message = (
        "SQLite 3.40.1 can corrupt a write-ahead log (every version before 3.51.3); "
        "install the wheel that bundles a newer one: pip install --upgrade 'pysqlite3>=0.6.1'"
    )
    with refused(BadConfig, message):
        refuse_faulty("3.40.1")


def test_a_database_of_another_program_or_time(tmp_path: Path, sql: Callable[..., Any]):
    (tmp_path / "log").mkdir()
    sql(tmp_path / "log" / FIRST, "CREATE TABLE bookmarks (url)")
    with refused(
        BadConfig, f"{tmp_path / 'log' / FIRST} is a database, but not a log of Ostinato; use another directory"
    ):
        SqlLog.open(tmp_path / "log")
    SqlLog.open(tmp_path / "newer").close()
    sql(tmp_path / "newer" / FIRST, "PRAGMA user_version = 99")
    message = (
        f"{tmp_path / 'newer' / FIRST} has format 99, this Ostinato reads 1, 2, 3, 4, 5; "
        "open it with the Ostinato that wrote it, or start a new run"
    )
    with refused(BadConfig, message):
        SqlLog.open(tmp_path / "newer")


async def test_a_disk_that_cannot_be_read_or_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(signal(1))
        monkeypatch.setattr(LogDirectory, "listing", no_space)
        with refused(
            StorageFull, f"{tmp_path / 'log'} cannot be read: [Errno 28] No space left on device; repair the disk"
        ):
            await collect(log)
        message = f"old rows of {tmp_path / 'log'} could not be dropped: [Errno 28] No space left on device; free space, then try again"
        with refused(StorageFull, message):
            retention.drop_segments(LogDirectory(tmp_path / "log"), 1.0, 1.0, 1)


# ---------------------------------------------------------------- what is damaged


async def test_rows_whose_neighbours_are_missing(tmp_path: Path, sql: Callable[..., Any]):
    path = tmp_path / "log" / FIRST
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(TURN)
    segment = Segment(path, None)
    try:
        with pytest.raises(ValueError, match=r"^turn 7, on which others depend, is missing$"):
            segment.tokens(7)
        with pytest.raises(ValueError, match=r"^policy 7 is missing$"):
            segment.policy(7)
        with pytest.raises(ValueError, match=r"^packed bytes need dictionary 99, which is missing$"):
            segment.shrinker.unpack(b"\x63abc")
        with refused(Corrupt, f"{path} holds encrypted rows, but their keys are missing; restore the file of keys"):
            segment.decrypt(1, "text", 1, b"")
        assert segment.decrypt(None, "text", 1, b"open") == b"open"
    finally:
        segment.close()
    sql(path, "DROP TRIGGER turns_no_update")
    sql(path, "UPDATE turns SET head = x'ff'")
    with SqlLog.open(tmp_path / "log") as log:
        with pytest.raises(Corrupt) as told:
            await collect(log, 0, EVERY)
        assert re.fullmatch(
            rf"row 1 of {re.escape(str(path))} cannot be read: \w+\(.*\); restore it from a copy", str(told.value)
        )


# ---------------------------------------------------------------- keys


async def test_what_cannot_be_forgotten(tmp_path: Path):
    with SqlLog.open(tmp_path / "open") as log:
        message = "record.encrypt is 'none': nothing can be forgotten; set it to 'tenant' or 'user' beforehand"
        with refused(BadConfig, message):
            await log.forget("acme")
    message = "record.encrypt is 'tenant': set it to 'user' to forget a user alone"
    config = RecordConfig(encrypt=Encrypt.TENANT)
    with SqlLog.open(tmp_path / "log", config=config) as log, refused(BadConfig, message):
        await log.forget("acme", "ann")


async def test_a_key_that_cannot_be_destroyed(tmp_path: Path, sql: Callable[..., Any]):
    path = tmp_path / "log-keys.db"
    with SqlLog.open(tmp_path / "log", config=RecordConfig(encrypt=Encrypt.USER)) as log:
        await log.append(TURN)
        sql(path, "CREATE TRIGGER stuck BEFORE UPDATE ON keys BEGIN SELECT RAISE(ABORT, 'stuck'); END")
        told = f"the log at {path} could not be used: stuck; see which process holds it and try again"
        with refused(Unavailable, told):
            await log.forget(TURN.tenant, TURN.user)
        assert await collect(log) == [(1, TURN)]


def test_a_file_of_keys_that_does_not_fit(tmp_path: Path, sql: Callable[..., Any]):
    path = tmp_path / "keys.db"
    sql(path, "CREATE TABLE bookmarks (url)")
    message = f"{path} is not a file of keys; restore it from a copy: what they encrypt cannot be read"
    with refused(Corrupt, message):
        KeyRing(path, None, lambda: 1.0)


async def test_keys_that_do_not_open(tmp_path: Path, sql: Callable[..., Any]):
    masters = [tmp_path / "one", tmp_path / "two"]
    for i, master in enumerate(masters):
        master.write_bytes(bytes([65 + i]) * 32)
    path, log = tmp_path / "log-keys.db", tmp_path / "log"
    with SqlLog.open(log, config=RecordConfig(encrypt=Encrypt.USER, master_key=masters[0])) as opened:
        await opened.append(TURN)
        ring = opened._ring
        assert ring is not None
        with refused(Corrupt, f"{path} lacks key 9, which encrypts rows of the log; restore it from a copy"):
            ring.decrypt(9, b"", b"")
        with refused(Corrupt, "what is stored under key 1 was changed; restore the log from a copy"):
            ring.decrypt(1, b"", b"x" * 40)
        with refused(Corrupt, "what is stored under key 1 was changed; restore the log from a copy"):
            ring.decrypt(1, b"", b"x" * 7)  # less than a nonce
    with refused(BadConfig, f"the keys in {path} are wrapped with a master key; name its file in record.master_key"):
        SqlLog.open(log, config=RecordConfig(encrypt=Encrypt.USER))
    with refused(BadConfig, f"record.master_key does not open the keys in {path}; name the right file"):
        SqlLog.open(log, config=RecordConfig(encrypt=Encrypt.USER, master_key=masters[1]))
    sql(path, "UPDATE keys SET secret = substr(secret, 1, 4)")  # less than a nonce
    with refused(BadConfig, f"record.master_key does not open the keys in {path}; name the right file"):
        SqlLog.open(log, config=RecordConfig(encrypt=Encrypt.USER, master_key=masters[0]))


def test_a_master_key_that_is_missing_or_short(tmp_path: Path):
    master = tmp_path / "master"
    error = f"[Errno {errno.ENOENT}] {os.strerror(errno.ENOENT)}: '{master}'"
    with refused(BadConfig, f"record.master_key: {master} cannot be read: {error}"):
        KeyRing(tmp_path / "keys.db", master, lambda: 1.0)
    master.write_bytes(b"x" * 31)
    message = f"record.master_key: {master} holds 31 bytes; write 32 or more random ones into it"
    with refused(BadConfig, message):
        KeyRing(tmp_path / "keys.db", master, lambda: 1.0)


# ---------------------------------------------------------------- the writer


async def test_a_log_that_is_closed(tmp_path: Path):
    log = SqlLog.open(tmp_path / "log")
    log.close()
    with refused(Unavailable, f"the log at {tmp_path / 'log'} is closed"):
        await log.append(signal(1))


async def test_a_log_that_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_module, "BACKLOG", 0)
    message = f"the log at {tmp_path / 'log'} is 0 appends behind; nothing was kept, send less"
    with SqlLog.open(tmp_path / "log") as log, refused(Unavailable, message):
        await log.append(signal(1))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(28, "full"), StorageFull, "nothing was written to {}: [Errno 28] full; free space, then try again"),
        (ZeroDivisionError("so"), Unavailable, "rows could not be written to {}: ZeroDivisionError('so')"),
        (driver.OperationalError("odd"), Unavailable, "the log at {} could not be used: odd; see which process holds it and try again"),
        (Corrupt("known"), Corrupt, "known"),
    ],
)  # fmt: skip
async def test_whatever_befalls_the_writer(
    tmp_path: Path, error: Exception, kind: type[OstinatoError], message: str, monkeypatch: pytest.MonkeyPatch
):
    with SqlLog.open(tmp_path / "log") as log:
        writer: GroupWriter = log._writer

        def fail(*_: object) -> Any:
            raise error

        monkeypatch.setattr(writer._appender, "write", fail)
        with refused(kind, message.format(tmp_path / "log")):
            await log.append(signal(1))
