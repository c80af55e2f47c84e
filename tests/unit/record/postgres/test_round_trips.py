"""How often the usual questions go to the server and back: over a network each is waited for, and a process asks one after the other."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest
from tests.contract.test_log import SIGNAL, TURN, read
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.distant_postgres import DistantPostgres

from ostinato.core.errors import Conflict
from ostinato.core.records import PolicyVersion, Signal, Turn
from ostinato.record.postgres.leases import PostgresRoles
from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.server import LogServer


class Counting:
    """A connection that counts what is sent over it."""

    def __init__(self, connection, sent):
        self._connection, self._sent = connection, sent

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def __enter__(self):
        self._connection.__enter__()
        return self

    def __exit__(self, *error):
        self._connection.__exit__(*error)

    def execute(self, statement, *rest, **options):
        self._sent.append(statement)
        return self._connection.execute(statement, *rest, **options)


@pytest.fixture
def sent(monkeypatch):
    found, dial = [], LogServer.dial
    monkeypatch.setattr(LogServer, "dial", lambda server: Counting(dial(server), found))
    return found


async def test_what_is_not_there_and_where_the_log_ends_take_one(in_postgres, sent):
    with PostgresLog.open(in_postgres()) as log:
        await log.append(TURN)
        assert await log.find(Turn, [(TURN.id,)]) == [TURN]
        sent.clear()
        assert await log.find(Turn, [("another:0",)]) == []
        assert len(sent) == 1
        await log.append(SIGNAL)
        sent.clear()
        assert log.newest() == 2
        assert len(sent) == 1
        sent.clear()
        assert await log.find(Turn, [(TURN.id,)]) == [TURN]
        assert len(sent) == 3


async def test_the_end_is_seen_although_others_began_and_dropped_segments(in_postgres):
    now, day = [0.0], 86_400.0
    config = in_postgres(segment_rows=2, retain_days=1)
    with PostgresLog.open(config, lambda: now[0]) as log, PostgresLog.open(config, lambda: now[0]) as other:
        for number in range(7):
            place = await other.append(replace(SIGNAL, id=f"s{number}"))
            assert log.newest() == place == number + 1
        now[0] = 3 * day
        assert log.newest() == 7
        assert await other.drop_old(now[0], keep_after=7) == 3
        assert log.newest() == 7
        assert await log.find(Signal, [(SIGNAL.tenant, "s0"), (SIGNAL.tenant, "s6")]) == [replace(SIGNAL, id="s6")]


@pytest.fixture
def far(postgres_server):
    # psycopg sends a message more after those of a pipeline and waits for nothing: on a line without length it may pass the answer
    with DistantPostgres(postgres_server.directory, round_trip_s=0.04) as distant:
        yield distant


async def trips(far, work):
    before = far.trips
    await work
    return far.trips - before


def turns(count, **fields):
    return [replace(TURN, id=f"t{number}:0", **fields) for number in range(count)]


async def test_an_append_takes_two_however_much_it_writes(in_postgres, far):
    first, *others = turns(40)
    with PostgresLog.open(far.of(in_postgres())) as log:
        await log.append(first)
        assert await trips(far, log.append(others[0])) == 2
        assert await trips(far, log.append(SIGNAL)) == 2
        assert await trips(far, log.append(*others[1:])) == 2
        assert await trips(far, log.append(SIGNAL)) == 2  # it is there
        assert [row for _, row in await read(log)] == [first, others[0], SIGNAL, *others[1:]]


async def test_an_append_in_a_role_takes_two_as_well(in_postgres, far):
    config = far.of(in_postgres(lease_s=3600))
    with closing(PostgresRoles(config).take("train")) as lease, PostgresLog.open(config, token=lease.token) as log:
        await log.append(SIGNAL)
        assert await trips(far, log.append(TURN)) == 2


async def test_another_policy_costs_none_and_another_writer_none_either(in_postgres, far):
    here, there = [replace(TURN.spans[0], policy=PolicyVersion(number=n, hash=f"{n:064x}")) for n in (8, 9)]
    with PostgresLog.open(far.of(in_postgres())) as log, PostgresLog.open(in_postgres()) as other:
        await log.append(TURN)
        rows = [replace(TURN, id=f"p{n}", spans=(span,)) for n, span in enumerate((here, there, here, there))]
        assert await trips(far, log.append(rows[0])) == 2
        await other.append(rows[1])
        assert await trips(far, log.append(rows[2], rows[3])) == 2
        assert [row for _, row in await read(other)] == [TURN, *rows]


async def test_what_a_turn_leans_on_and_new_tokens_are_asked_for_before_the_lock_is_taken(in_postgres, far):
    config = in_postgres()
    with PostgresLog.open(far.of(config)) as log, PostgresLog.open(config) as other:
        for each in (log, other):
            each.derive_text(lambda token: f"<{token}>")
        await log.append(SIGNAL)
        await other.append(TURN)
        child = replace(TURN, id="child", parent=TURN.id, sampled_ids=(71, 72), text="<71><72>")
        assert await trips(far, log.append(child)) == 5  # where its parent is, its parent's ids, the tokens' texts
        again = replace(child, id="again", sampled_ids=(72, 71), text="<72><71>")
        assert await trips(far, log.append(again)) == 2
        assert [row for _, row in await read(other)] == [SIGNAL, TURN, child, again]


async def test_a_lock_that_another_holds_for_long_costs_no_new_connection(in_postgres, far, monkeypatch):
    config, waited, step_back = in_postgres(), [], LogServer.end_silent_writer

    def counted(*asked, **more):
        waited.append(True)
        return step_back(*asked, **more)

    monkeypatch.setattr(LogServer, "end_silent_writer", counted)
    with PostgresLog.open(far.of(config)) as log:
        await log.append(SIGNAL)
        with LogServer.of(config).dial() as holder:
            holder.execute("BEGIN")
            holder.execute("SELECT pg_advisory_xact_lock(%s)", (LogServer.of(config).lock,))
            before, connections = far.trips, far.connections
            waiting = asyncio.create_task(log.append(TURN))
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                while not waited:  # an attempt waits a second
                    await asyncio.sleep(0.01)
            holder.execute("COMMIT")
            assert await waiting == 2
        assert far.connections == connections
        assert (
            far.trips - before == 2 * len(waited) + 2
        )  # it asked and stepped back, perhaps once more, asked again, and wrote


async def test_a_page_takes_two_and_the_end_one(in_postgres, far):
    with PostgresLog.open(far.of(in_postgres())) as log:
        await log.append(*turns(3))
        await read(log)
        assert await trips(far, read(log)) == 3


async def test_who_lost_the_race_for_a_name_writes_nothing_and_goes_on(in_postgres, far):
    with PostgresLog.open(far.of(in_postgres())) as log, PostgresLog.open(in_postgres()) as other:
        await log.append(SIGNAL)
        await other.append(TURN)
        with pytest.raises(Conflict):
            await log.append(replace(TURN, sampled_ids=(5,), text="other"))
        child = replace(TURN, id="next:0")
        assert await log.append(child) == 3
        assert [row for _, row in await read(other)] == [SIGNAL, TURN, child]


async def test_a_writer_whose_segment_was_closed_and_dropped_meanwhile_goes_on(in_postgres):
    now, day = [0.0], 86_400.0
    config = in_postgres(segment_rows=2, retain_days=1)
    with PostgresLog.open(config, lambda: now[0]) as idle, PostgresLog.open(config, lambda: now[0]) as other:
        await idle.append(replace(SIGNAL, id="s0"))
        for number in range(1, 6):
            await other.append(replace(SIGNAL, id=f"s{number}"))
        now[0] = 3 * day
        await other.append(replace(SIGNAL, id="s6"))
        assert await other.drop_old(now[0], keep_after=7) >= 2
        assert await idle.append(replace(SIGNAL, id="s7")) == 8
