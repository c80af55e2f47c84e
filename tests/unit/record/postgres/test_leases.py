"""Leases on Postgres: a holder that was paused, cut off or forgotten by a failover writes nothing once another has its role."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from uuid import uuid4

import psycopg
import pytest
from tests.contract.test_log import BATCH, EVENT, SIGNAL, TURN, read
from tests.fakes.postgres_server import started
from tests.unit.record.postgres.test_postgres_log import DAY, sql

from ostinato.app.roles import wait_for
from ostinato.core.clock import wall_clock
from ostinato.core.errors import Conflict, LeaseLost, Unavailable
from ostinato.record.config import RecordConfig
from ostinato.record.postgres.leases import PostgresRoles
from ostinato.record.postgres.log import PostgresFolds, PostgresLog
from ostinato.record.postgres.server import LogServer
from ostinato.record.roles import FencingToken


def expire(config, role="train"):
    """What the server's clock does to a holder that gives no sign of life."""
    sql(config, "UPDATE leases SET until = clock_timestamp() - interval '1 s' WHERE role = %s", (role,))


@pytest.fixture
def stale(in_postgres):
    """A configuration, a token that was the newest once, and the holder of the newest now."""
    config = in_postgres(lease_s=3600, retain_days=1, segment_rows=2)
    roles = PostgresRoles(config)
    first = roles.take("train")
    expire(config)
    with closing(roles.take("train")) as second:
        assert second.token.number == first.token.number + 1
        yield config, first.token, second
    first.close()


async def test_a_stale_holder_writes_no_row(stale):
    config, token, holder = stale
    with PostgresLog.open(config, token=token) as late, PostgresLog.open(config, token=holder.token) as log:
        answers = await asyncio.gather(*(late.append(row) for row in (BATCH, EVENT, SIGNAL)), return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, LeaseLost)
            assert "another process has become the train process" in str(answer)
            assert "token 1 is refused" in str(answer)
        assert await read(late) == []  # who only reads needs no role
        assert await log.append(BATCH) == 1
        assert await read(late) == [(1, BATCH)]


async def test_a_stale_holder_saves_no_fold(stale):
    config, token, holder = stale
    await PostgresFolds(LogServer.of(config).fenced(holder.token)).save("desk", 9, {"by": "the newest"})
    late = PostgresFolds(LogServer.of(config).fenced(token))
    with pytest.raises(LeaseLost):
        await late.save("desk", 3, {"by": "the stale one"})
    assert await late.load("desk") == (9, {"by": "the newest"})


async def test_a_stale_holder_drops_no_segment(stale):
    config, token, holder = stale
    now = [0.0]
    with PostgresLog.open(config, lambda: now[0]) as log:
        for row in (TURN, SIGNAL, BATCH, EVENT):
            await log.append(row)
    with (
        PostgresLog.open(config, lambda: 3 * DAY, token=token) as late,
        PostgresLog.open(config, lambda: 3 * DAY, token=holder.token) as log,
    ):
        with pytest.raises(LeaseLost):
            await late.drop_old(3 * DAY, keep_after=4)
        assert len(await read(log)) == 4
        assert await log.drop_old(3 * DAY, keep_after=4) >= 1


async def test_a_number_that_a_failover_gave_twice_is_told_apart_by_the_mark(in_postgres):
    config = in_postgres(lease_s=3600)
    with closing(PostgresRoles(config).take("train")) as holder:
        twin = replace(holder.token, mark=uuid4())
        with PostgresLog.open(config, token=twin) as late, pytest.raises(LeaseLost):
            await late.append(BATCH)


async def test_a_token_of_another_role_lets_nothing_through(in_postgres):
    config = in_postgres(lease_s=3600)
    with closing(PostgresRoles(config).take("train")) as holder:
        other = FencingToken(role="release", number=holder.token.number, mark=holder.token.mark)
        with PostgresLog.open(config, token=other) as late, pytest.raises(LeaseLost):
            await late.append(BATCH)


async def test_nobody_takes_over_between_the_look_at_a_token_and_the_commit(in_postgres):
    config = in_postgres(lease_s=3600, append_s=600)
    roles = PostgresRoles(config)
    holder = roles.take("train")
    expire(config)
    server = LogServer.of(config).fenced(holder.token)
    with server.dial() as writer, writer.transaction():
        server.fence(writer)
        with pytest.raises(Conflict, match="is writing"):
            roles.take("train")
    with closing(roles.take("train")), pytest.raises(LeaseLost):
        holder.check()
    assert holder.lost
    holder.close()


async def test_who_stops_in_the_middle_of_a_write_stops_nobody_for_longer_than_an_append_may_take(in_postgres):
    """The server ends the transaction that it waits for; what was not committed is not there."""
    config, hasty = in_postgres(lease_s=3600, append_s=600), in_postgres(lease_s=3600, append_s=2)
    roles = PostgresRoles(config)
    holder = roles.take("train")
    server = LogServer.of(hasty).fenced(holder.token)
    with PostgresLog.open(config) as gateway, closing(server.dial()) as paused:
        expire(config)
        paused.execute("BEGIN")
        paused.execute("SELECT pg_advisory_xact_lock(%s)", (server.lock,))
        server.fence(paused)
        with closing(await wait_for(roles, "train", lambda _: None)) as second:
            assert second.token.number == 2
            assert await gateway.append(TURN) == 1
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            paused.execute("COMMIT")
    holder.close()


async def test_a_client_whose_clock_is_wrong_by_years_gets_and_keeps_nothing_by_it(in_postgres, monkeypatch):
    config = in_postgres(lease_s=3600)
    with closing(PostgresRoles(config).take("train")) as holder:
        for years in (-30, 30):
            monkeypatch.setattr(time, "time", lambda years=years: 1.8e9 + years * 365 * DAY)
            with pytest.raises(Conflict, match="can be taken over"):
                PostgresRoles(config).take("train")
            with PostgresLog.open(config, wall_clock, token=holder.token) as log:
                await log.append(replace(BATCH, step=100 + years))


def test_signs_of_life_keep_a_lease_for_longer_than_it_is(in_postgres):
    config = in_postgres(lease_s=1, append_s=600)
    with closing(PostgresRoles(config).take("train")) as holder:
        until = sql(config, "SELECT until FROM leases")
        while sql(config, "SELECT until FROM leases") == until:
            time.sleep(0.02)
        holder.check()


def test_a_holder_whose_connections_are_cut_goes_on(in_postgres):
    config = in_postgres(lease_s=1, append_s=600)
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name = 'ostinato'"
    with closing(PostgresRoles(config).take("train")) as holder:
        for _ in range(3):
            until = sql(config, "SELECT until FROM leases")
            while sql(config, "SELECT until FROM leases") == until:
                time.sleep(0.02)
            sql(config, cut)
        holder.check()


async def test_a_holder_that_the_kernel_pauses_comes_back_to_find_its_role_taken(in_postgres):
    config = in_postgres(lease_s=1, append_s=600)
    command = [sys.executable, "-m", "tests.fakes.role_holder", config.model_dump_json(), "train"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - it does not block
        assert process.stdout.readline() == b"held\n"
        os.kill(process.pid, signal.SIGSTOP)
        with closing(await wait_for(PostgresRoles(config), "train", lambda _: None)) as taken:
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.readline() == b"lost\n"
            taken.check()


def test_a_server_that_starts_again_remembers_who_has_what(tmp_path):
    with started() as server:
        config = RecordConfig(url=server.url, lease_s=3600, append_s=600)
        roles = PostgresRoles(config)
        with closing(roles.take("train")) as holder:
            server.kill()
            server.start()
            holder.check()
            with pytest.raises(Conflict):
                roles.take("train")
            server.stop()
            with pytest.raises(Unavailable):
                PostgresRoles(config.model_copy(update={"append_s": 0.3}))
            server.start()
            holder.check()
            assert not holder.lost


async def test_two_who_ask_at_the_same_time_do_not_both_get_it(in_postgres):
    roles = PostgresRoles(in_postgres(lease_s=3600))
    taken = await asyncio.gather(*(asyncio.to_thread(roles.take, "train") for _ in range(8)), return_exceptions=True)
    got = [each for each in taken if not isinstance(each, Exception)]
    assert len(got) == 1
    assert all(isinstance(each, Conflict) for each in taken if each is not got[0])
    got[0].close()
