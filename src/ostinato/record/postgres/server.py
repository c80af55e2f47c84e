"""A Postgres server for the log: durable commits, timeouts on every statement, and errors translated into OstinatoError."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from ipaddress import ip_address
from itertools import zip_longest
from typing import Any, LiteralString, TypeVar
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from ostinato.core.errors import BadConfig, Corrupt, LeaseLost, OstinatoError, StorageFull, TooLarge, Unavailable
from ostinato.core.records import Identity
from ostinato.record.codec.kinds import Kind
from ostinato.record.config import RecordConfig
from ostinato.record.roles import FencingToken

logger = logging.getLogger(__name__)

OLDEST = 130000
"""The oldest supported server version: Postgres 13."""

LOCK_MS = 1000
"""How long one attempt waits for another process's lock, in milliseconds. Callers that want to wait longer retry."""

_PAUSE_S = 0.1  # after a failed connection attempt
_TRANSIENT = frozenset(
    {"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "57P05", "25006", "25P03", "53300"}
)
"""SQLSTATEs worth a retry: serialization failure, deadlock, lock or statement timeout, a server that is stopping, starting or has become
a standby, idle-in-transaction timeout, too many clients."""
_LOGIN_REFUSED = re.compile(
    r"does not exist|authentication failed|no password|pg_hba\.conf|not permitted|invalid (?!response)|certificate|signature failure"
    r"|does not support SSL"
)
_VERIFIED = ("verify-full", "verify-ca")
# servers that accepted this process before: a later refusal is the server's fault and may pass
_LOGGED_IN: set[str] = set()

_END_SILENT: LiteralString = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted "
    "AND objsubid = 1 AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND (classid::bigint << 32 | objid::bigint) = {lock} AND usename = current_user AND state = 'active' "
    "AND wait_event = 'ClientRead' AND state_change < clock_timestamp() - {silence} * interval '1 s'"
)
"""Ends the session that holds the log's lock if its next message within a pipeline is overdue by `silence` seconds. `state_change` is the
time of its last message."""

Connection = psycopg.Connection[Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogServer:
    """The location of a log. `name` is for messages and contains no password. `token`: the role's fencing token, checked with each write.

    Example: ``LogServer.of(RecordConfig(url="postgresql://ann@db.example/loop?sslmode=verify-full"))``
    """

    name: str
    namespace: str
    parameters: Mapping[str, Any] = field(repr=False)
    wait_s: float
    token: FencingToken | None = None

    @classmethod
    def of(cls, config: RecordConfig, environment: Mapping[str, str] = os.environ) -> LogServer:
        """Return the server of these settings.

        Raises BadConfig for an invalid URL, a URL with a password, an environment variable that is not set, or another host whose
        certificate would not be checked.
        """
        try:
            found = conninfo_to_dict(config.url)
        except psycopg.ProgrammingError:  # its message may repeat the URL
            raise BadConfig("record.url is not a Postgres URL; write postgresql://user@host/database") from None
        if "password" in found:
            raise BadConfig(
                "record.url holds a password; put it into an environment variable, and name that in record.password_env"
            )
        if not config.allow_unverified:
            _check_verified(found, environment)
        host, port, database = (found.get(key) for key in ("host", "port", "dbname"))
        name = f"postgresql://{host or ''}{f':{port}' if port else ''}/{database or ''} (schema {config.namespace})"
        wait = max(2, round(config.append_s))
        parameters = {"target_session_attrs": "read-write", "application_name": "ostinato", "connect_timeout": wait}
        alive = max(1, wait // 5)  # a vanished server is detected after three times this
        parameters |= {"keepalives_idle": alive, "keepalives_interval": alive, "keepalives_count": 2}
        parameters |= {"tcp_user_timeout": wait * 1000, **found, "client_encoding": "UTF8"}
        if config.password_env:
            if not environment.get(config.password_env):
                raise BadConfig(
                    f"record.password_env names the variable {config.password_env}, which is not set: export it where this is started"
                )
            parameters["password"] = environment[config.password_env]
        return cls(name, config.namespace, parameters, config.append_s)

    def dial(self) -> Connection:
        """Open a connection in autocommit mode with the log's schema as search path. Statements time out after `record.append_s`.

        Raises BadConfig for a server that the log cannot rely on; psycopg's OperationalError, after a short pause.
        """
        try:
            connection: Connection = psycopg.connect(**self.parameters, autocommit=True)
        except psycopg.OperationalError:
            time.sleep(_PAUSE_S)
            raise
        try:
            _prepare(connection, self)
        except BaseException:
            connection.close()
            raise
        _LOGGED_IN.add(self.name)
        return connection

    def ask(self, question: Callable[[Connection], T]) -> T:
        """Return the result of `question` over a connection of its own, retried on transient errors for `record.append_s`.

        So `question` must be idempotent: it may be repeated although it succeeded. Raises BadConfig if the server refuses the login and has
        never accepted this process, and the errors of `refusal`.
        """
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                with self.dial() as connection:
                    return question(connection)
            except psycopg.Error as error:
                if error.sqlstate is None and _LOGIN_REFUSED.search(str(error)) and self.name not in _LOGGED_IN:
                    raise BadConfig(f"{self.name} refuses the login: {_line(error)}; correct record.url") from None
                if not passes(error) or time.monotonic() > deadline:
                    raise self.refusal(error) from error

    def fenced(self, token: FencingToken | None) -> LogServer:
        """Return the same server for a process that writes in a role, with its fencing token."""
        return replace(self, token=token)

    def fence(self, connection: Connection) -> None:
        """Prevent a takeover of our role until the caller's transaction ends. Raises LeaseLost if the role is already lost."""
        if self.token is None:
            return
        self.check_fence(connection.execute(self.fencing).fetchone())

    @property
    def fencing(self) -> sql.SQL | sql.Composed:
        """The statement that `fence` sends, for callers that send it with others. Pass its answer to `check_fence`."""
        if self.token is None:
            return sql.SQL("SELECT 1")
        query = sql.SQL("SELECT 1 FROM leases WHERE role = {} AND number = {} AND mark = {} FOR SHARE")
        return query.format(self.token.role, self.token.number, self.token.mark)

    def check_fence(self, found: object) -> None:
        """Raise LeaseLost unless the row of `fencing` was found."""
        token = self.token
        if token is not None and found is None:
            raise LeaseLost(
                f"another process has become the {token.role} process at {self.name}, and token {token.number} is refused: this one "
                "paused, or was cut off, for longer than record.lease_s; nothing was written"
            )

    @property
    def lock(self) -> int:
        """The key of the advisory lock that an appending process holds; each schema of a database has its own."""
        return int.from_bytes(
            blake2b(f"ostinato {self.namespace}".encode(), digest_size=8).digest(), "big", signed=True
        )

    @property
    def silence_s(self) -> float:
        """How long the holder of the log's lock may be silent, so that others get the lock within their `record.append_s`."""
        return self.wait_s / 2

    def end_silent_writer(self, connection: Connection, before: LiteralString = "") -> None:
        """End the session of a writer that fell silent between the messages of its commit, where Postgres has no idle timeout.

        Call it after a lock timeout; `before` is sent in the same message. If the writer resumes, it retries its rows. Only sessions of our
        own database user are seen and ended.
        """
        *_, ended = ask_at_once(connection, before + _END_SILENT, lock=self.lock, silence=self.silence_s)
        if ended:
            logger.warning(
                "a writer of %s was silent for %g s in the middle of a commit: its connection is ended",
                self.name,
                self.silence_s,
            )

    def refusal(self, error: Exception) -> OstinatoError:
        """Translate a psycopg error into StorageFull, Corrupt, TooLarge, BadConfig or Unavailable; the message names the remedy."""
        if isinstance(error, OstinatoError):
            return error
        code, text = getattr(error, "sqlstate", None) or "", _line(error)
        if code in ("53100", "58030"):
            return StorageFull(f"nothing was written to {self.name}: {text}; free space on the server, then try again")
        if code.startswith("XX0"):
            return Corrupt(f"{self.name} is damaged: {text}; restore it from a copy")
        if code.startswith("54"):
            return TooLarge(f"a row is larger than {self.name} can hold: {text}; send less at once")
        if code == "42501":
            return BadConfig(f"{self.name} refuses access: {text}; grant the user of record.url its schema")
        if code == "55P03":
            return Unavailable(
                f"the log at {self.name} could not be used: {text}; another session (a pg_dump, say) holds a table or the log's lock: "
                "see pg_stat_activity, and try again once it has ended"
            )
        return Unavailable(
            f"the log at {self.name} could not be used: {text}; see whether its server runs and try again"
        )


def ask_at_once(connection: Connection, statements: LiteralString, **values: object) -> list[list[tuple[Any, ...]]]:
    """Run several statements in one round trip and return the rows of each. Values and names replace {name} in the text.

    They must not contain user text, because the server logs the text of a failed statement.

    It does not use psycopg's pipeline, which sends one more message, after which the server no longer counts how long a transaction is
    idle. A process that lost its network or power would then keep the log's lock until another process waits for it in vain
    (`LogServer.end_silent_writer`).
    """
    cursor = connection.execute(sql.SQL(statements).format(**values), prepare=False)
    answers = [cursor.fetchall() if cursor.description else []]
    while cursor.nextset():
        answers.append(cursor.fetchall() if cursor.description else [])
    return answers


def passes(error: Exception) -> bool:
    """Return True for transient errors, which are worth a retry: lost connections, failovers, locks, deadlocks, timeouts."""
    if not isinstance(error, psycopg.Error):
        return False
    code = error.sqlstate
    if code is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return code in _TRANSIENT or code.startswith("08")


def digest_of(kind: Kind, identity: Identity) -> UUID:
    """Return a 128-bit hash of an identity. Raises UnicodeEncodeError for a lone surrogate."""
    parts = [kind.table, *map(str, identity)]
    # with the separator inside a part two identities could give the same text; JSON escapes it
    plain = json.dumps(parts, ensure_ascii=False) if any("\0" in part for part in parts) else "\0".join(parts)
    return UUID(bytes=blake2b(plain.encode(), digest_size=16).digest())


def _check_verified(found: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Raise BadConfig if a host beyond this machine could be impersonated. libpq takes what the URL leaves out from PG* variables."""
    # a service file may name any host, and takes precedence over the variables
    service = found.get("service") or environment.get("PGSERVICE")
    mode = found.get("sslmode") or ("" if service else environment.get("PGSSLMODE", ""))
    if mode in _VERIFIED or (not service and all(map(_is_local, _addresses(found, environment)))):
        return
    raise BadConfig(
        f"record.url leads to another host, and sslmode={mode or 'prefer'} does not check who answers there: what people wrote could "
        "be read on the way. Add ?sslmode=verify-full&sslrootcert=FILE (or sslrootcert=system) to it, or set "
        "record.allow_unverified = true if nobody else can reach the network between"
    )


def _addresses(found: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Return the addresses that libpq connects to: each host's `hostaddr`, else its name, which may be "" for the default socket."""
    hosts, addresses = (
        str(found.get(name) or environment.get(f"PG{name.upper()}", "")).split(",") for name in ("host", "hostaddr")
    )
    return [address or host for host, address in zip_longest(hosts, addresses, fillvalue="")]


def _is_local(host: str) -> bool:
    """Return True for this machine: its sockets (a path or, with @, an abstract one), localhost, or a loopback address."""
    if not host or host[0] in "/@" or host.lower().removesuffix(".") == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _prepare(connection: Connection, server: LogServer) -> None:
    version = connection.info.server_version
    if version < OLDEST:
        raise BadConfig(f"{server.name} runs Postgres {version // 10000}; the log needs 13 or newer")
    query = (
        "SELECT current_setting('fsync'), current_setting('synchronous_commit'), set_config('search_path', %s, false), "
        "set_config('statement_timeout', %s, false), set_config('lock_timeout', %s, false), "
        # at a higher level the snapshot would be older than the lock, and sequence numbers would be assigned twice
        "set_config('default_transaction_isolation', 'read committed', false), "
        # frees the log's lock if its holder is cut off, dies or pauses in a transaction
        "set_config('idle_in_transaction_session_timeout', %s, false), set_config('tcp_user_timeout', %s, false), "
        "set_config('tcp_keepalives_idle', %s, false), set_config('tcp_keepalives_interval', %s, false), "
        "set_config('tcp_keepalives_count', '2', false)"
    )
    timeout, silence = f"{round(server.wait_s * 1000)}ms", f"{round(server.silence_s * 1000)}ms"
    alive = str(max(1, round(server.wait_s / 6)))
    values = (f'"{server.namespace}"', timeout, f"{LOCK_MS}ms", silence, silence, alive, alive)
    found = connection.execute(query, values).fetchone()
    assert found is not None
    if found[0] != "on":
        raise BadConfig(f"{server.name} runs with fsync off and may lose what was acknowledged; switch it on")
    if found[1] == "off":
        connection.execute("SET synchronous_commit = on")
