"""Writers and readers of one log in Postgres, in processes of their own, beside kill -9 of the writers and of the server."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from tests.fakes.fork_server import FORK_SERVER
from tests.fakes.postgres_server import started

from ostinato.core.records import Signal
from ostinato.record.config import RecordConfig
from ostinato.record.postgres.log import PostgresLog


def client(*arguments):
    output = subprocess.PIPE if arguments[0] == "follow" else None
    return FORK_SERVER.popen([sys.executable, "-m", "tests.fakes.log_clients", *arguments], stdout=output)


def acknowledged(file):
    """The numbers of the rows that were acknowledged to a writer."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {n for line in lines for first, last in [map(int, line.split())] for n in range(first, last + 1)}


def test_readers_beside_writers_see_every_row_once_and_in_order(in_postgres, tmp_path):
    config = in_postgres(segment_rows=300, append_s=600)
    PostgresLog.open(config).close()
    told = config.model_dump_json()
    readers = [client("follow", told, 1200, 0.001) for _ in range(2)]
    writers = [client("write", told, f"w{i}", 300, 5, 2, tmp_path / f"w{i}") for i in range(4)]
    for writer in writers:
        assert writer.wait() == 0
    for reader in readers:
        found = json.loads(reader.communicate()[0])
        assert (found["newest"], found["different"], found["out_of_order"]) == (1200, 1200, 0)


@pytest.fixture
def own_server():
    """A server to kill."""
    with started() as server:
        yield server


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.examination)])
async def test_what_was_acknowledged_is_there_once_after_kills_of_writers_and_server(own_server, tmp_path, kills):
    draw = random.Random(5)
    config = RecordConfig(url=own_server.url, append_s=600, segment_rows=250)
    PostgresLog.open(config).close()
    told = config.model_dump_json()
    files = [tmp_path / f"w{i}" for i in range(3)]

    def start(i):
        return client("write", told, f"w{i}", 250, 4, 1, files[i])

    writers = [start(i) for i in range(3)]
    for kill in range(kills):
        before = sum(len(acknowledged(file)) for file in files)
        # a kill falls into the midst of appends, or after all of them
        while sum(len(acknowledged(file)) for file in files) < before + 15 and any(w.poll() is None for w in writers):
            await asyncio.sleep(0.005)
        if kill % 2:
            own_server.kill()
            own_server.start()
        else:
            i = draw.randrange(3)
            writers[i].send_signal(signal.SIGKILL)
            writers[i].wait()
            writers[i] = start(i)  # it sends all of its rows again
    for writer in writers:
        assert writer.wait() == 0
    with PostgresLog.open(config) as log:
        rows = [(place, row.id) async for place, row in log.read(0, {Signal}) if isinstance(row, Signal)]
    assert [place for place, _ in rows] == list(range(1, 751))
    assert sorted(name for _, name in rows) == sorted(f"w{i}/{n}" for i in range(3) for n in range(250))
    assert all(acknowledged(Path(file)) == set(range(250)) for file in files)


@pytest.mark.examination
async def test_connections_that_an_administrator_cuts_at_random_lose_and_double_nothing(in_postgres, tmp_path):
    draw, config = random.Random(6), in_postgres(segment_rows=300, append_s=120)
    PostgresLog.open(config).close()
    told = config.model_dump_json()
    files = [tmp_path / f"w{i}" for i in range(3)]
    readers = [client("follow", told, 600, 0.001) for _ in range(2)]
    writers = [client("write", told, f"w{i}", 200, 4, 2, file) for i, file in enumerate(files)]
    theirs = "SELECT pid FROM pg_stat_activity WHERE application_name = 'ostinato' AND pid <> pg_backend_pid()"
    cut = 0
    with psycopg.connect(config.url, autocommit=True, application_name="administrator") as connection:
        while any(writer.poll() is None for writer in writers):
            pids = connection.execute(theirs).fetchall()
            if pids:
                cut += connection.execute("SELECT pg_terminate_backend(%s)", draw.choice(pids)).rowcount
            await asyncio.sleep(0.05)
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert cut > 3
    for reader in readers:
        found = json.loads(reader.communicate()[0])
        assert (found["newest"], found["different"], found["out_of_order"]) == (600, 600, 0)
    assert all(acknowledged(file) == set(range(200)) for file in files)
