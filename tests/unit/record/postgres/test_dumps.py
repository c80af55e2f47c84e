"""A log in Postgres that is dumped while it is written, and restored into another database, holds what was acknowledged before."""

import asyncio
import itertools
import subprocess
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from tests.contract.test_log import ROWS, TURN, read
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.postgres_server import binaries
from tests.unit.record.postgres.test_postgres_log import signals, sql

from ostinato.record.postgres.log import PostgresFolds, PostgresLog
from ostinato.record.postgres.server import LogServer


@pytest.fixture
def elsewhere(postgres_server):
    """The URL of an empty database."""
    parts = urlsplit(postgres_server.url)
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE elsewhere")
    yield urlunsplit(parts._replace(path="/elsewhere"))
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("DROP DATABASE elsewhere WITH (FORCE)")


def run(program, *arguments):
    """One of Postgres's own programs, as the guide calls it."""
    bin = binaries()
    assert bin is not None
    done = subprocess.run([bin / program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_dump_under_load_restored_elsewhere_goes_on_where_it_was_taken(tmp_path, in_postgres, elsewhere):
    config, file = in_postgres(segment_rows=40), tmp_path / "monday.dump"
    five = signals(5)
    acknowledged, stop = 0, asyncio.Event()

    async def write(log):
        nonlocal acknowledged
        for group in itertools.count():
            if stop.is_set():
                return
            acknowledged = await log.append(*(replace(each, id=f"s{group}-{i}") for i, each in enumerate(five)))

    def dump():
        """What was acknowledged when it ended."""
        output = "--format=custom", f"--file={file}"
        run("pg_dump", *output, f"--schema={config.namespace}", config.url)
        return acknowledged

    with PostgresLog.open(config) as log:
        first = await log.append(*ROWS)
        await PostgresFolds(LogServer.of(config)).save("desk", first, {"open": [1]})
        writing = asyncio.create_task(write(log))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while acknowledged < first + 100:  # several segments
                await asyncio.sleep(0)
            before = acknowledged
            while await asyncio.to_thread(dump) == before:  # nothing was written meanwhile
                before = acknowledged
        stop.set()
        await writing
        written = await read(log)

    run("pg_restore", f"--dbname={elsewhere}", "--exit-on-error", file)
    restored = config.model_copy(update={"url": elsewhere})
    with PostgresLog.open(restored) as log:
        there = await read(log)
        assert before <= len(there) <= acknowledged
        assert there == written[: len(there)]
        assert await PostgresFolds(LogServer.of(restored)).load("desk") == (first, {"open": [1]})
        last = await log.append(*written_again(written, len(there)))
        assert last == len(written)  # rows that the dump holds are recognised, the others follow without a gap
        assert await read(log) == written
        assert await log.append(replace(TURN, id="one more")) == len(written) + 1
    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        sql(restored, "DELETE FROM {}".format("rows_0000000000000001"))


def written_again(written, there):
    """What a gateway would send again: rows around the place where the dump ends."""
    return [row for _, row in written[max(0, there - 7) :]]
