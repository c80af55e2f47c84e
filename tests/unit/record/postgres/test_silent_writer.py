"""Who falls silent in the middle of a transaction, cut off or without power, holds the log's lock no longer than others can wait."""

import asyncio
import threading
from dataclasses import replace

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from tests.contract.test_log import SIGNAL, read

from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.server import Server


@pytest.mark.parametrize("written", [False, True], ids=["before it writes", "before it commits"])
async def test_others_write_within_their_time_while_a_writer_is_silent(in_postgres, written):
    config = in_postgres(append_s=6)
    inside, goes_on = threading.Event(), threading.Event()
    with PostgresLog.open(config) as silent, PostgresLog.open(config) as other:
        await silent.append(SIGNAL)
        await other.append(replace(SIGNAL, id="before"))
        write = silent._appender.write

        def falls_silent(head, rows):
            done = write(head, rows) if written else None
            if not inside.is_set():
                inside.set()
                goes_on.wait(30)
            return write(head, rows) if done is None else done

        silent._appender.write = falls_silent
        paused = asyncio.create_task(silent.append(replace(SIGNAL, id="silent")))
        await asyncio.to_thread(inside.wait)
        try:
            assert await other.append(replace(SIGNAL, id="meanwhile")) == 3  # raises Unavailable where the lock is kept
        finally:
            goes_on.set()
        await asyncio.gather(paused, return_exceptions=True)
        assert await silent.append(replace(SIGNAL, id="silent")) == 4
        assert [row.id for _, row in await read(silent)] == [SIGNAL.id, "before", "meanwhile", "silent"]


def _commit(connection):
    """As a segment does; it fails."""
    with connection.pipeline():
        connection.execute("SELECT 1 / %s::int", (0,))
        connection.execute("COMMIT")


def test_who_falls_silent_after_a_commit_that_failed_holds_nothing(in_postgres):
    server = Server.of(in_postgres())
    with server.dial() as silent, server.dial() as other:
        silent.execute("BEGIN")
        silent.execute("SELECT pg_advisory_xact_lock(%s)", (server.lock,))
        free = "SELECT pg_try_advisory_lock(%s)"
        assert other.execute(free, (server.lock,)).fetchone() == (False,)
        with pytest.raises(psycopg.errors.DivisionByZero):
            _commit(silent)
        assert silent.info.transaction_status == TransactionStatus.INERROR
        assert other.execute(free, (server.lock,)).fetchone() == (True,)


async def test_both_ends_of_a_connection_notice_that_the_other_is_gone(in_postgres):
    server = Server.of(in_postgres(append_s=5))
    assert int(server.parameters["keepalives_idle"]) * 3 < 5
    with server.dial() as connection:
        names = (
            "idle_in_transaction_session_timeout",
            "tcp_user_timeout",
            "tcp_keepalives_idle",
            "tcp_keepalives_count",
        )
        settings = dict(
            connection.execute("SELECT name, reset_val FROM pg_settings WHERE name = ANY(%s)", (list(names),))
        )
        assert set(settings) == set(names)
        assert connection.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("2500ms",)
