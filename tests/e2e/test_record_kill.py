"""The log against real processes and real disks: kill -9, several writers, a full file system."""

import asyncio
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
import pytest

from ostinato.core.errors import StorageFull
from ostinato.core.notices import Stamp
from ostinato.core.records import Signal, Source
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog

SMALL = RecordConfig(segment_rows=150, append_s=600.0, retain_days=1.0)

WRITER = """
import asyncio, sys
from pathlib import Path
from ostinato.core.records import Signal, Source, Stamp
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog

async def main(path, name, tasks, limit):
    log = SqlLog.open(path, config=RecordConfig(segment_rows=150, append_s=600.0))
    async def work(task):
        for i in range(limit):
            key = f"{name}-{task}-{i}"
            rows = [Signal(id=f"{key}-{part}", turn="t", name="n", value=1.0, source=Source.CODE, occurred_at=1.0,
                           received_at=1.0, comment="x" * 300) for part in "ab"]
            await log.append(Stamp(id=key, contract="", at=1.0), *rows)
            sys.stdout.write(key + "\\n")
            sys.stdout.flush()
    await asyncio.gather(*[work(task) for task in range(tasks)])
    log.close()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""

DROPPER = """
import asyncio, sys
from pathlib import Path
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog

async def main(path):
    log = SqlLog.open(path, config=RecordConfig(segment_rows=150, append_s=600.0, retain_days=1.0))
    print("dropping", flush=True)
    while True:
        await log.drop_old(1e12, log.newest() - 600)

asyncio.run(main(Path(sys.argv[1])))
"""


def start(path: Path, name: str, *, tasks: int, limit: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(tasks), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def start_dropper(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", DROPPER, str(path)], stdout=subprocess.PIPE, text=True)


def acknowledged(process: subprocess.Popen[str]) -> set[str]:
    """The appends that the writer was told are durable. A last line without its end was cut by the kill."""
    assert process.stdout is not None
    with process, process.stdout:
        return {line.strip() for line in process.stdout if line.endswith("\n")}


def first_line(process: subprocess.Popen[str]) -> str:
    """Wait until it is at work."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def stored(path: Path, kind: type = Signal) -> list[tuple[int, str]]:
    with SqlLog.open(path, config=SMALL) as log:
        return [(seq, row.id) async for seq, row in log.read(0, {kind}) if isinstance(row, Signal | Stamp)]


def integrity(path: Path) -> set[str]:
    driver: Any = pysqlite3.dbapi2
    answers: set[str] = set()
    for file in path.glob("*.db"):
        connection = driver.connect(str(file))
        try:
            answers.add(connection.execute("PRAGMA integrity_check").fetchone()[0])
        finally:
            connection.close()
    return answers


@pytest.mark.examination
async def test_kill_9_at_random_instants_loses_and_repeats_no_acknowledged_row(tmp_path: Path):
    """Two writers and one who drops old segments are killed again and again, while rows end segments all the time."""
    path, rng = tmp_path / "log", random.Random(4)
    told: set[str] = set()
    for life in range(10):
        writers = [start(path, f"life{life}{name}", tasks=8, limit=100_000) for name in "pq"]
        dropper = start_dropper(path)
        told |= {first_line(process) for process in writers}
        first_line(dropper)
        for process in rng.sample([*writers, dropper], 3):
            await asyncio.sleep(rng.random() * 0.3)
            process.kill()
        acknowledged(dropper)
        for process in writers:
            told |= acknowledged(process)
        assert integrity(path) == {"ok"}
    with SqlLog.open(path, config=SMALL) as log:
        horizon, newest = await log.horizon(), log.newest()
    stamps, signals = await stored(path, Stamp), await stored(path, Signal)
    assert 600 < horizon < newest
    assert len(told) > 200

    # what stays for ever: each acknowledged append once, in one order
    assert [seq for seq, _ in stamps] == sorted({seq for seq, _ in stamps})
    keys = [key for _, key in stamps]
    assert len(keys) == len(set(keys))
    assert told <= set(keys)
    assert len(set(keys) - told) <= 10 * 2 * 8  # what was killed unacknowledged is at most what was under way

    # what is newer than the horizon: no place is missing, and an append is there whole or not at all
    after = sorted((seq, key) for seq, key in stamps + signals if seq > horizon)
    assert [seq for seq, _ in after] == list(range(horizon + 1, newest + 1))
    whole = {key for seq, key in stamps if seq > horizon}
    assert {key[:-2] for seq, key in signals if seq > horizon + 2} <= whole
    assert {f"{key}-{part}" for key in whole for part in "ab"} <= {key for _, key in signals}


async def test_processes_that_open_and_append_at_once_share_one_order(tmp_path: Path):
    path = tmp_path / "log"
    processes = [start(path, f"p{i}", tasks=2, limit=40) for i in range(4)]
    told = [acknowledged(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert [len(each) for each in told] == [80] * 4
    ids = [key for _, key in await stored(path)]
    assert len(ids) == len(set(ids)) == 640
    assert len(list(path.glob("*.db"))) >= 5
    for i in range(4):
        for task in range(2):
            mine = [each for each in ids if each.startswith(f"p{i}-{task}-")]
            assert mine == [f"p{i}-{task}-{n}-{part}" for n in range(40) for part in "ab"]


async def test_a_reader_in_another_process_never_misses_a_row(tmp_path: Path):
    """Neither while segments end, nor while old ones are dropped behind it."""
    path = tmp_path / "log"
    with SqlLog.open(path, config=SMALL) as log:
        process = start(path, "w", tasks=4, limit=150)
        cursor, seen = 0, list[str]()
        while len(seen) < 1800 and (process.poll() is None or cursor < log.newest()):
            async for seq, row in log.read(cursor, {Signal, Stamp}):
                assert seq == cursor + 1
                cursor = seq
                assert isinstance(row, Signal | Stamp)
                seen.append(row.id)
            await log.drop_old(1e12, cursor)
        acknowledged(process)
        assert await log.horizon() > 0
        left = [row.id async for _, row in log.read(0, {Stamp}) if isinstance(row, Stamp)]
    assert len(seen) == len(set(seen)) == 1800
    assert left == [key for key in seen if key.count("-") == 2]


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
    path = small_disk / "log"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 700_000)
    kept, refused = await fill_until_full(path, lambda: ballast.unlink())
    ids = [key for _, key in await stored(path)]
    assert ids[: len(kept)] == kept
    assert not set(ids) & set(refused)
    assert ids[-1] == "after"
    assert integrity(path) == {"ok"}


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
        SqlLog.open(small_disk / "log")
    (small_disk / "ballast").unlink()
    SqlLog.open(small_disk / "log").close()


async def test_a_limit_on_file_size_is_a_full_disk(tmp_path: Path):
    """The same through another system error (EFBIG), which needs no privileges."""
    path = tmp_path / "log.sqlite"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    SqlLog.open(path).close()
    size = os.path.getsize(path / "0000000000000001.db")
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 300_000, hard))
    try:
        kept, refused = await fill_until_full(path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ids = [key for _, key in await stored(path)]
    assert ids == [*kept, "after"]
    assert not set(ids) & set(refused)
    assert integrity(path) == {"ok"}
