"""Who falls silent in the middle of a transaction, cut off or without power, holds the log's lock no longer than others can wait."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from tests.contract.test_log import SIGNAL, read
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.unit.record.postgres.test_leases import expire

from ostinato.core.errors import Conflict
from ostinato.record.postgres.leases import PostgresRoles
from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.server import LogServer


@pytest.mark.parametrize("written", [False, True], ids=["before it writes", "before it commits"])
async def test_others_write_within_their_time_while_a_writer_is_silent(in_postgres, monkeypatch, written):
    monkeypatch.setattr(
        LogServer, "silence_s", 2.0
    )  # of an append's 45 s: others have time enough, however busy the machine is
    config = in_postgres(append_s=PATIENT_S)
    inside, goes_on = threading.Event(), threading.Event()
    with PostgresLog.open(config) as silent, PostgresLog.open(config) as other:
        await silent.append(SIGNAL)
        await other.append(replace(SIGNAL, id="before"))
        write = silent._appender.write

        def falls_silent(head, rows):
            done = write(head, rows) if written else None
            if not inside.is_set():
                inside.set()
                goes_on.wait(WHOLE_PROGRAM_S)
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


async def test_others_write_within_their_time_while_a_writer_is_stopped_between_the_messages_of_its_commit(
    in_postgres, monkeypatch
):
    """There Postgres counts no idle time, and the machine still answers for a process that is stopped."""
    monkeypatch.setattr(
        LogServer, "silence_s", 2.0
    )  # of an append's 45 s: others have time enough, however busy the machine is
    config = in_postgres(append_s=PATIENT_S)
    with PostgresLog.open(config) as other:
        await other.append(SIGNAL)
        with _started(config, "stopped") as writer:
            try:
                _, status = await asyncio.to_thread(os.waitpid, writer.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status)
                # raises Unavailable where the lock is kept
                assert await other.append(replace(SIGNAL, id="meanwhile")) == 2
            finally:
                writer.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(writer.wait) == 0
        assert [row.id for _, row in await read(other)] == [SIGNAL.id, "meanwhile", "stopped"]


def _started(config, name):
    return subprocess.Popen([sys.executable, "-m", "tests.fakes.stopping_writer", config.model_dump_json(), name])


def test_only_who_holds_this_logs_lock_and_is_silent_within_a_pipeline_is_ended(in_postgres):
    server = LogServer.of(in_postgres(append_s=2))
    patient = LogServer.of(in_postgres(append_s=60))
    elsewhere = replace(patient, namespace="elsewhere")
    with closing(server.dial()) as waiting, closing(patient.dial()) as idle, closing(patient.dial()) as foreign:
        for holder, log in ((idle, patient), (foreign, elsewhere)):
            holder.execute("BEGIN")
            holder.execute("SELECT pg_advisory_xact_lock(%s)", (log.lock,))
        _begin_pipeline(foreign)
        time.sleep(1.2 * server.silence_s)
        server.end_silent_writer(waiting)
        assert idle.execute("SELECT 1").fetchone() == (1,)
        _begin_pipeline(idle)
        patient.end_silent_writer(waiting)
        assert not _lock_is_free(waiting, server)  # it was not silent for half a minute
        time.sleep(1.2 * server.silence_s)
        server.end_silent_writer(waiting)
        while not _lock_is_free(waiting, server):
            time.sleep(0.01)
        assert not _lock_is_free(waiting, elsewhere)


def test_a_role_is_taken_over_from_who_fell_silent_in_the_middle_of_its_commit(in_postgres):
    config = in_postgres(append_s=2, lease_s=3600)
    roles, server = PostgresRoles(config), LogServer.of(config)
    with closing(roles.take("train")) as first, closing(LogServer.of(in_postgres(append_s=60)).dial()) as silent:
        expire(config)
        silent.execute("BEGIN")
        silent.execute("SELECT pg_advisory_xact_lock(%s)", (server.lock,))
        server.fenced(first.token).fence(silent)
        _begin_pipeline(silent)
        time.sleep(1.2 * server.silence_s)
        with pytest.raises(Conflict, match="is writing; try again"):
            roles.take("train")
        with closing(_taken(roles)) as second:
            assert second.token.number == first.token.number + 1


def _taken(roles):
    """The role, once the server has ended the session of who had it."""
    until = time.monotonic() + PATIENT_S
    while True:
        try:
            return roles.take("train")
        except Conflict:
            assert time.monotonic() < until
            time.sleep(0.01)


def _begin_pipeline(connection):
    """Send a first statement, have it carried out, and say no more."""
    connection.pgconn.enter_pipeline_mode()
    connection.pgconn.send_query_params(b"SELECT 1", [])
    connection.pgconn.send_flush_request()
    connection.pgconn.flush()
    time.sleep(0.05)


def _lock_is_free(connection, server):
    return connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (server.lock,)).fetchone() == (True,)


def _commit(connection):
    """As a segment does; it fails."""
    with connection.pipeline():
        connection.execute("SELECT 1 / %s::int", (0,))
        connection.execute("COMMIT")


def test_who_falls_silent_after_a_commit_that_failed_holds_nothing(in_postgres):
    server = LogServer.of(in_postgres())
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
    server = LogServer.of(in_postgres(append_s=5))
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
