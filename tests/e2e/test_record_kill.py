"""The log against real processes and real disks: kill -9, several writers, a full file system."""

import asyncio
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
import pytest

from ostinato.core.errors import StorageFull
from ostinato.core.records import Signal, Source
from ostinato.record.log import SqlLog

WRITER = """
import asyncio, sys
from pathlib import Path
from ostinato.core.records import Signal, Source
from ostinato.record.log import SqlLog

async def main(path, name, tasks, limit):
    log = SqlLog.open(path)
    async def work(task):
        for i in range(limit):
            key = f"{name}-{task}-{i}"
            rows = [Signal(id=f"{key}-{part}", turn="t", name="n", value=1.0, source=Source.CODE, occurred_at=1.0,
                           received_at=1.0, comment="x" * 300) for part in "ab"]
            await log.append(*rows)
            sys.stdout.write(key + "\\n")
            sys.stdout.flush()
    await asyncio.gather(*[work(task) for task in range(tasks)])
    log.close()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


def start(path: Path, name: str, *, tasks: int, limit: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(tasks), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def acknowledged(process: subprocess.Popen[str]) -> set[str]:
    """The appends that the writer was told are durable. A last line without its end was cut by the kill."""
    assert process.stdout is not None
    with process, process.stdout:
        return {line.strip() for line in process.stdout if line.endswith("\n")}


async def stored(path: Path) -> list[str]:
    with SqlLog.open(path) as log:
        found = [row async for _, row in log.read(0, {Signal})]
    return [row.id for row in found if isinstance(row, Signal)]


def integrity(path: Path) -> str:
    driver: Any = pysqlite3.dbapi2
    connection = driver.connect(str(path))
    try:
        return connection.execute("PRAGMA integrity_check").fetchone()[0]
    finally:
        connection.close()


async def test_kill_9_at_random_instants_loses_and_repeats_no_acknowledged_row(tmp_path: Path):
    path, rng = tmp_path / "log.sqlite", random.Random(4)
    told: set[str] = set()
    for life in range(12):
        process = start(path, f"life{life}", tasks=8, limit=100_000)
        assert process.stdout is not None
        first = process.stdout.readline()  # it is writing now
        await asyncio.sleep(rng.random() * 0.25)
        process.kill()
        told |= acknowledged(process) | {first.strip()}
        assert integrity(path) == "ok"
    ids = await stored(path)
    assert len(ids) == len(set(ids))
    present = set(ids)
    assert len(told) > 200
    assert all(f"{key}-a" in present and f"{key}-b" in present for key in told)
    whole = {each[:-2] for each in ids}
    assert present == {f"{key}-{part}" for key in whole for part in "ab"}  # an append is there whole or not at all
    # per writer, what was killed unacknowledged is at most what was under way
    assert len(whole - told) <= 12 * 8


async def test_processes_that_open_and_append_at_once_share_one_order(tmp_path: Path):
    path = tmp_path / "log.sqlite"
    processes = [start(path, f"p{i}", tasks=2, limit=40) for i in range(4)]
    told = [acknowledged(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert [len(each) for each in told] == [80] * 4
    ids = await stored(path)
    assert len(ids) == len(set(ids)) == 640
    for i in range(4):
        for task in range(2):
            mine = [each for each in ids if each.startswith(f"p{i}-{task}-")]
            assert mine == [f"p{i}-{task}-{n}-{part}" for n in range(40) for part in "ab"]


async def test_a_reader_in_another_process_never_misses_a_row(tmp_path: Path):
    path = tmp_path / "log.sqlite"
    with SqlLog.open(path) as log:
        process = start(path, "w", tasks=4, limit=60)
        cursor, seen = 0, list[str]()
        deadline = time.monotonic() + 60
        while len(seen) < 480 and time.monotonic() < deadline:
            async for seq, row in log.read(cursor, {Signal}):
                assert seq == cursor + 1
                cursor = seq
                assert isinstance(row, Signal)
                seen.append(row.id)
            await asyncio.sleep(0)
        acknowledged(process)
    assert seen == await stored(path)
    assert len(seen) == 480


# ---------------------------------------------------------------- a disk that is really full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, or none where mounting is not allowed."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mount)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("mounting a tmpfs needs privileges that this user does not have")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def row(key: str) -> Signal:
    return Signal(
        id=key, turn="t", name="n", value=1.0, source=Source.CODE, occurred_at=1.0, received_at=1.0, comment="y" * 2000
    )


async def test_a_full_disk_refuses_rows_loses_none_and_works_again_when_there_is_room(small_disk: Path):
    path = small_disk / "log.sqlite"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 700_000)
    kept, refused = await fill_until_full(path, lambda: ballast.unlink())
    ids = await stored(path)
    assert ids[: len(kept)] == kept
    assert not set(ids) & set(refused)
    assert ids[-1] == "after"
    assert integrity(path) == "ok"


async def fill_until_full(path: Path, relieve: Any) -> tuple[list[str], list[str]]:
    kept: list[str] = []
    refused: list[str] = []
    with SqlLog.open(path) as log:
        for wave in range(400):
            keys = [f"{wave}-{i}" for i in range(8)]
            answers = await asyncio.gather(*[log.append(row(key)) for key in keys], return_exceptions=True)
            kept += [key for key, answer in zip(keys, answers, strict=True) if isinstance(answer, int)]
            refused += [key for key, answer in zip(keys, answers, strict=True) if isinstance(answer, StorageFull)]
            assert all(isinstance(answer, int | StorageFull) for answer in answers)
            if len(refused) > 20:
                break
        assert len(refused) > 20
        assert len(kept) > 20
        seen = [found.id async for _, found in log.read(0, {Signal}) if isinstance(found, Signal)]
        assert seen == kept  # reading goes on while writing cannot
        relieve()
        await log.append(row("after"))
    return kept, refused


async def test_opening_on_a_full_disk_says_so(small_disk: Path):
    (small_disk / "ballast").write_bytes(b"\0" * (2 << 20))
    with pytest.raises(StorageFull):
        SqlLog.open(small_disk / "log.sqlite")
    (small_disk / "ballast").unlink()
    SqlLog.open(small_disk / "log.sqlite").close()


async def test_a_limit_on_file_size_is_a_full_disk(tmp_path: Path):
    """The same through another system error (EFBIG), which needs no privileges."""
    path = tmp_path / "log.sqlite"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    SqlLog.open(path).close()
    size = os.path.getsize(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 300_000, hard))
    try:
        kept, refused = await fill_until_full(path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ids = await stored(path)
    assert ids == [*kept, "after"]
    assert not set(ids) & set(refused)
    assert integrity(path) == "ok"
