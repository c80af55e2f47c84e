"""How often the usual questions go to the server and back: over a network each is waited for, and a process asks one after the other."""

from dataclasses import replace

import pytest
from tests.contract.test_log import SIGNAL, TURN

from ostinato.core.records import Signal, Turn
from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.server import Server


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
    found, dial = [], Server.dial
    monkeypatch.setattr(Server, "dial", lambda server: Counting(dial(server), found))
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
