"""What people are told when something is wrong: which file, and what to do."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
import pytest
import zstandard
from blake3 import blake3

from ostinato.core.errors import Conflict, Corrupt, OstinatoError, StorageFull, TooLarge, Unavailable
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.folds import FileFolds
from ostinato.record.log import SqlLog
from ostinato.record.roles import hold
from ostinato.record.sqlite import is_busy, translate
from ostinato.testing.records import a_turn

driver: Any = pysqlite3.dbapi2
PATH = Path("run/log")


class Failed(Exception):
    """As the driver raises it."""

    def __init__(self, code: int) -> None:
        super().__init__("it said so")
        self.sqlite_errorcode = code


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        ("SQLITE_FULL", StorageFull, "nothing was written to run/log: it said so; free space or repair the disk"),
        ("SQLITE_IOERR", StorageFull, "nothing was written to run/log: it said so; free space or repair the disk"),
        ("SQLITE_CORRUPT", Corrupt, "run/log is damaged or not a log: it said so; restore it from a copy"),
        ("SQLITE_NOTADB", Corrupt, "run/log is damaged or not a log: it said so; restore it from a copy"),
        ("SQLITE_TOOBIG", TooLarge, "a row is larger than run/log can hold: it said so; send less at once"),
        ("SQLITE_PERM", Unavailable, "the log at run/log could not be used: it said so; see which process holds it"),
    ],
)
@pytest.mark.parametrize("extended", [0, 0x100, 0xA00])
def test_a_databases_errors_are_told_in_our_words(code: str, kind: type[OstinatoError], told: str, extended: int):
    found = translate(Failed(getattr(driver, code) | extended), PATH)
    assert type(found) is kind
    assert str(found).startswith(told)


def test_only_locks_are_busy():
    codes = ["SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_CANTOPEN", "SQLITE_FULL", "SQLITE_PERM"]
    errors = [Failed(getattr(driver, code) | 0x200) for code in codes]
    assert [is_busy(error) for error in errors] == [True, True, False, False, False]
    assert not is_busy(ValueError())


@pytest.mark.parametrize(
    ("left", "named"), [(b"41\n", "41"), (b"", "unknown"), (b"\xff\n", "�"), (b"7" * 40, "7" * 32)]
)
def test_a_conflict_names_whoever_the_file_names(tmp_path: Path, left: bytes, named: str):
    path = tmp_path / ".serve.lock"
    path.write_bytes(left)
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(Conflict) as told, hold(tmp_path, "serve"):
            pass
        assert (
            f"another serve process (pid {named}) already uses {tmp_path}; stop it (kill {named}) or use another directory"
            in str(told.value)
        )
    finally:
        os.close(descriptor)


def test_a_lock_names_its_holder_alone(tmp_path: Path):
    (tmp_path / ".serve.lock").write_text("12345678901234567890 and whatever else stood here\n")
    with hold(tmp_path, "serve") as path:
        assert path.read_text() == f"{os.getpid()}\n"


async def test_the_shortest_master_key_has_32_bytes(tmp_path: Path):
    (tmp_path / "master").write_bytes(bytes(range(65, 97)))
    config = RecordConfig(encrypt=Encrypt.USER, master_key=tmp_path / "master")
    with SqlLog.open(tmp_path / "log", config=config) as log:
        assert await log.append(a_turn()) == 1


@pytest.mark.parametrize(
    ("format_", "hashed", "told"),
    [
        ("ostinato-fold@1", b"x" * 32, "it does not have its promised hash"),
        ("ostinato-fold@0", None, "its format is 'ostinato-fold@0', not 'ostinato-fold@1'"),
    ],
)
async def test_a_fold_that_is_not_used_says_why(
    tmp_path: Path, format_: str, hashed: bytes | None, told: str, caplog: pytest.LogCaptureFixture
):
    plain = json.dumps({"format": format_, "cursor": 1, "state": {}}).encode()
    packed = zstandard.ZstdCompressor().compress(plain)
    (tmp_path / "desk.fold").write_bytes((hashed or blake3(plain).digest()) + packed)
    assert await FileFolds(tmp_path).load("desk") is None
    assert f"{tmp_path / 'desk.fold'} cannot be used, the log is read instead: {told}" in caplog.text


async def test_a_fold_whose_directory_cannot_be_made_leaves_nothing_behind(tmp_path: Path):
    await FileFolds(tmp_path / "deep" / "folds").save("desk", 1, {})
    with pytest.raises(
        StorageFull, match=r"desk\.fold was not written: .*; free space\. What it held before is untouched"
    ):
        await FileFolds(tmp_path / "deep" / "folds" / "desk.fold").save("desk", 1, {})
    assert [path.name for path in (tmp_path / "deep" / "folds").iterdir()] == ["desk.fold"]
