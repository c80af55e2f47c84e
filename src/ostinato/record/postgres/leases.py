"""Roles of a run as leases in Postgres: a holder that does not renew for `record.lease_s` may lose the role to the next process that asks.

Only the server's clock decides when a lease may be taken over. The right to write depends on no clock: each write checks, in its own
transaction, that its fencing token is still the newest, and locks the lease's row until it is committed. A holder that resumes after a
pause can therefore write nothing, however wrong any clock is.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

import psycopg

from ostinato.core.clock import wall_clock
from ostinato.core.errors import Conflict, LeaseLost, OstinatoError
from ostinato.record.config import RecordConfig
from ostinato.record.postgres.schema import ready_schema
from ostinato.record.postgres.server import Connection, LogServer
from ostinato.record.roles import FencingToken, check_role

logger = logging.getLogger(__name__)

_TAKE = (
    "INSERT INTO leases AS held VALUES (%(role)s, 1, %(mark)s, %(holder)s, clock_timestamp() + %(s)s * interval '1 s') "
    "ON CONFLICT (role) DO UPDATE SET number = held.number + 1, mark = excluded.mark, holder = excluded.holder, "
    "until = clock_timestamp() + %(s)s * interval '1 s' WHERE held.until < clock_timestamp() RETURNING number"
)
_OURS = "WHERE role = %s AND number = %s AND mark = %s"
_RETRY_S = 0.5  # after a renewal that did not reach the server


class PostgresRoles:
    """Roles of the run whose log is in a schema; the tables are created if necessary. Raises like `PostgresLog.open`.

    Example: ``lease = PostgresRoles(config.record).take("train")``
    """

    pass_on = True

    def __init__(self, config: RecordConfig) -> None:
        self._server, self._lease_s = LogServer.of(config), config.lease_s
        self._server.ask(lambda connection: ready_schema(connection, self._server, wall_clock()))

    def take(self, role: str) -> Lease:
        """Take a role. Raises Conflict, which names the holder; BadConfig, Unavailable."""
        check_role(role)
        mark, holder = uuid4(), f"process {os.getpid()} on {socket.gethostname()}"[:200]
        asked = {"role": role, "mark": mark, "holder": holder, "s": self._lease_s}
        number = self._server.ask(lambda connection: _take(connection, self._server, asked))
        return Lease(self._server, FencingToken(role=role, number=number, mark=mark), self._lease_s)


def _take(connection: Connection, server: LogServer, asked: Mapping[str, Any]) -> int:
    """Take the lease and return the token's number. Raises Conflict."""
    role = asked["role"]
    query = (
        "SELECT number, mark, holder, extract(epoch FROM until - clock_timestamp())::float8 FROM leases "
        "WHERE role = %s AND until >= clock_timestamp()"
    )
    held = connection.execute(query, (role,)).fetchone()
    if held is not None and held[1] == asked["mark"]:
        return held[0]  # an earlier attempt took it, but its answer was lost
    if held is not None:
        number, _, holder, left = held
        raise Conflict(
            f"another {role} process ({holder}, token {number}) works at {server.name}; its role can be taken over if it sends no "
            f"heartbeat for {left:.1f} s; or stop it"
        )
    try:
        found = connection.execute(_TAKE, asked).fetchone()
    except psycopg.errors.LockNotAvailable:
        server.end_silent_writer(connection)
        raise Conflict(f"the last {role} process at {server.name} is writing; try again") from None
    if found is None:
        raise Conflict(f"another {role} process at {server.name} took the role first; try again")
    return found[0]


class Lease:
    """A role that this process holds and renews (heartbeat thread) until another process takes it or `close` is called."""

    def __init__(self, server: LogServer, token: FencingToken, lease_s: float) -> None:
        self.token = token
        self._server, self._lease_s = server.fenced(token), lease_s
        self._lost, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name=f"lease-{token.role}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """True once this process has learnt that another has the role."""
        return self._lost.is_set()

    def check(self) -> None:
        """Raise LeaseLost if another process now has the role, Unavailable if the server does not answer."""

        def look(connection: Connection) -> None:
            with connection.transaction():
                self._server.fence(connection)

        try:
            self._server.ask(look)
        except LeaseLost:
            self._lost.set()
            raise

    def close(self) -> None:
        """Stop renewing, and release the role at once if the server can be reached. May be called twice."""
        self._closing.set()
        self._thread.join()

    # ------------------------------------------------------------ the heartbeat thread

    def _renew_until_closed(self) -> None:
        connection: Connection | None = None
        wait = self._lease_s / 3
        while not self._closing.wait(wait):
            wait = self._lease_s / 3
            try:
                connection = connection or self._server.dial()
                self._renew(connection)
                if self.lost:
                    break
            except (psycopg.Error, OstinatoError) as error:
                logger.warning("no heartbeat reached %s: %s", self._server.name, error)
                _close(connection)
                connection, wait = None, min(_RETRY_S, wait)
        if not self.lost:
            with suppress(psycopg.Error, OstinatoError):
                connection = connection or self._server.dial()
                token = self.token
                query = f"UPDATE leases SET until = '-infinity' {_OURS}"
                connection.execute(query, (token.role, token.number, token.mark))
        _close(connection)

    def _renew(self, connection: Connection) -> None:
        token = self.token
        query = f"UPDATE leases SET until = clock_timestamp() + %s * interval '1 s' {_OURS}"
        # if one of our own writes has locked the row, nobody can take the role now
        with suppress(psycopg.errors.LockNotAvailable):
            if not connection.execute(query, (self._lease_s, token.role, token.number, token.mark)).rowcount:
                self._lost.set()


def _close(connection: Connection | None) -> None:
    if connection is not None:
        with suppress(psycopg.Error):
            connection.close()
