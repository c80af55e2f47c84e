"""The contract of `Folds`, tested on every implementation."""

import errno
import logging
import os
from pathlib import Path

import pytest

from ostinato.core.errors import BadConfig, StorageFull, Unavailable
from ostinato.record.folds import FileFolds
from ostinato.testing.log import MemoryFolds


def postgres_folds(config):
    from ostinato.record.postgres.log import PostgresFolds, PostgresLog
    from ostinato.record.postgres.server import LogServer

    PostgresLog.open(config).close()
    return PostgresFolds(LogServer.of(config))


STATE = {"open": [["a:0", 1.5, None]], "baseline": {"total": 0.1 + 0.2}, "naïve 🎵": True}


@pytest.fixture(params=["file", "postgres", "memory"])
def folds(request, tmp_path):
    if request.param == "postgres":
        return postgres_folds(request.getfixturevalue("in_postgres")())
    return FileFolds(tmp_path / "folds") if request.param == "file" else MemoryFolds()


async def test_what_was_saved_last_comes_back_equal(folds):
    assert await folds.load("desk") is None
    await folds.save("desk", 7, {})
    await folds.save("desk", 812, STATE)
    await folds.save("status", 3, {"n": 1})
    assert await folds.load("desk") == (812, STATE)
    assert await folds.load("status") == (3, {"n": 1})


async def test_what_is_given_back_is_a_copy(folds):
    await folds.save("desk", 1, {"list": []})
    _, state = await folds.load("desk")
    state["list"].append(1)
    assert await folds.load("desk") == (1, {"list": []})


A_PETABYTE = bytes(32) + b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little")  # as a zstd frame states it


@pytest.mark.parametrize("damage", [b"", b"x" * 40, None, A_PETABYTE])
async def test_a_damaged_file_is_reported_and_counts_as_none(tmp_path, damage, caplog):
    folds = FileFolds(tmp_path)
    await folds.save("desk", 812, STATE)
    path = tmp_path / "desk.fold"
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert await folds.load("desk") is None
    assert "desk.fold cannot be used" in caplog.text


async def test_too_many_open_files_are_no_reason_to_begin_anew(tmp_path, monkeypatch):
    """Where retention has cut the log, what the fold has of it is nowhere else."""
    folds = FileFolds(tmp_path)
    await folds.save("desk", 812, STATE)

    def refused(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as crowded:
        crowded.setattr(Path, "read_bytes", refused)
        with pytest.raises(Unavailable, match=r"desk\.fold cannot be read now"):
            await folds.load("desk")
    assert await folds.load("desk") == (812, STATE)


async def test_files_are_their_owners_alone_and_names_stay_inside(tmp_path):
    folds = FileFolds(tmp_path)
    await folds.save("desk", 1, {})
    assert (tmp_path / "desk.fold").stat().st_mode & 0o777 == 0o600
    for name in ("../desk", "", "Desk", "a/b"):
        with pytest.raises(BadConfig):
            await folds.save(name, 1, {})


async def test_a_disk_that_refuses_leaves_what_was_there(tmp_path, monkeypatch):
    folds = FileFolds(tmp_path)
    await folds.save("desk", 1, {"a": 1})

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageFull):
        await folds.save("desk", 2, {"a": 2})
    assert await folds.load("desk") == (1, {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["desk.fold"]
