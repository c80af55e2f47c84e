"""The tables of a log in Postgres, and their creation. Each segment is a table named by its first row.

Stored rows are byte for byte the same as in SQLite, but all kinds share one table, with a column for the kind's number. A segment's
policies, token texts and dictionaries are dropped with it. Identities are in one table for the whole log. Triggers refuse UPDATE and DELETE
of rows.
"""

from __future__ import annotations

from typing import LiteralString
from uuid import uuid4

import psycopg
from psycopg import sql

from ostinato.core.errors import BadConfig
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import KINDS, Kind
from ostinato.record.postgres.server import Connection, LogServer, ask_at_once, passes

LAYOUT = 5
"""The version of these tables.

2: leases.
3: a segment names the layout of its rows; turns store their parsed tool calls.
4: turns store steering and consent; rows for bases and people's consents.
5: rows for forgotten people, for dials that people set, and for priors of dials.
"""

_LEASES = (
    "CREATE TABLE leases (role text PRIMARY KEY, number bigint NOT NULL, mark uuid NOT NULL, holder text NOT NULL, "
    "until timestamptz NOT NULL)"
)

_SEGMENT_LAYOUT = "ALTER TABLE segments ADD COLUMN layout int NOT NULL DEFAULT 2"

_MIGRATIONS = {
    1: (_LEASES, "UPDATE log SET layout = 2"),
    2: (_SEGMENT_LAYOUT, "UPDATE log SET layout = 3"),
    3: ("UPDATE log SET layout = 4",),
    4: ("UPDATE log SET layout = 5",),
}
"""Layout version -> the statements that migrate it to the next version."""

NUMBERS = {
    "turns": 1,
    "signals": 2,
    "deliveries": 3,
    "rewards": 4,
    "quarantines": 5,
    "holdbacks": 6,
    "batches": 7,
    "releases": 8,
    "stamps": 9,
    "alarms": 10,
    "bases": 11,
    "consents": 12,
    "priors": 15,
    "forgotten": 13,
    "dials": 14,
}
"""The number that stands for each kind in a row; never changed."""

NUMBERED: dict[int, Kind] = {NUMBERS[kind.table]: kind for kind in KINDS}

_TABLES = (
    "CREATE TABLE log (id int PRIMARY KEY CHECK (id = 1), layout int NOT NULL, name text NOT NULL)",
    "CREATE TABLE segments (first bigint PRIMARY KEY, made_at float8 NOT NULL, last bigint, at float8)",
    _SEGMENT_LAYOUT,
    "CREATE TABLE identities (identity uuid PRIMARY KEY, seq bigint NOT NULL)",
    "CREATE TABLE policies (segment bigint, id int, number bigint NOT NULL, hash bytea NOT NULL, PRIMARY KEY (segment, id))",
    "CREATE TABLE pieces (segment bigint, token bigint, text bytea NOT NULL, PRIMARY KEY (segment, token))",
    "CREATE TABLE dictionaries (segment bigint, id int, use text NOT NULL, body bytea NOT NULL, PRIMARY KEY (segment, id))",
    "CREATE TABLE kept (seq bigint PRIMARY KEY, kind smallint NOT NULL, body bytea NOT NULL)",
    "CREATE INDEX kept_kinds ON kept (kind, seq)",
    "CREATE TABLE folds (name text PRIMARY KEY, body bytea NOT NULL)",
    _LEASES,
    "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
    "$$BEGIN RAISE EXCEPTION 'the log is append-only'; END$$",
)

_SEGMENT: LiteralString = (
    "CREATE TABLE {rows} (seq bigint PRIMARY KEY, kind smallint NOT NULL, identity uuid NOT NULL, secret bigint, "
    "body bytea NOT NULL, said bytea, spelt int, tokens bytea, logprobs bytea, routes bytea); "
    "CREATE INDEX ON {rows} (kind, seq); "
    # Postgres need not compress the columns again
    "ALTER TABLE {rows} ALTER body SET STORAGE EXTERNAL, ALTER said SET STORAGE EXTERNAL, ALTER tokens SET STORAGE EXTERNAL, "
    "ALTER logprobs SET STORAGE EXTERNAL, ALTER routes SET STORAGE EXTERNAL; "
    "CREATE TRIGGER no_change BEFORE UPDATE OR DELETE ON {rows} FOR EACH ROW EXECUTE FUNCTION refuse(); "
    "CREATE TRIGGER no_emptying BEFORE TRUNCATE ON {rows} EXECUTE FUNCTION refuse(); "
    "INSERT INTO segments (first, made_at, layout) VALUES ({first}, {made_at}, {layout})"
)


def table_of(first: Cursor) -> sql.Identifier:
    """Return the table of the segment that begins with row `first`."""
    return sql.Identifier(f"rows_{first:016d}")


def add_segment(connection: Connection, first: Cursor, made_at: float) -> None:
    """Create the segment that begins with row `first`. Must be called in a transaction that holds the log's lock."""
    ask_at_once(connection, _SEGMENT, rows=table_of(first), first=first, made_at=made_at, layout=LAYOUT)


def ready_schema(connection: Connection, server: LogServer, made_at: float, first: Cursor = 1) -> str:
    """Create the log's tables and its first segment unless they exist. Return the name that the log got when it was created.

    Tables of an older version are migrated, which only their owner may do. Any number of processes may call this at once. Raises BadConfig
    if the schema belongs to another program or is newer, or if a privilege is missing.
    """
    found = _layout(connection, server)
    if found is None or found[0] in _MIGRATIONS:
        try:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (server.lock,))
                found = _layout(connection, server)
                if found is None:
                    found = _make(connection, server, made_at, first)
                while found[0] in _MIGRATIONS:
                    for statement in _MIGRATIONS[found[0]]:
                        connection.execute(statement)  # pyright: ignore[reportArgumentType,reportCallIssue]
                    found = (found[0] + 1, found[1])
        except psycopg.errors.InsufficientPrivilege as error:
            if found is not None:
                raise BadConfig(
                    f"{server.name} has layout {found[0]} and cannot be migrated to {LAYOUT}: {error}; start once as the tables' owner, "
                    "or let an administrator run ALTER TABLE ... OWNER TO the user of record.url for each of its tables"
                ) from error
            raise BadConfig(
                f"{server.name} cannot be created: {error}; let the database's owner run CREATE SCHEMA {server.namespace} "
                "AUTHORIZATION the user of record.url"
            ) from error
        except psycopg.Error as error:
            if passes(error):
                raise
            raise server.refusal(error) from error
    layout, name = found
    check_layout(server, layout)
    return name


def has_log(connection: Connection, server: LogServer) -> bool:
    """Return True if a log exists. Creates nothing. Raises BadConfig if the schema belongs to another program."""
    return _layout(connection, server) is not None


def check_layout(server: LogServer, layout: int) -> None:
    """Raise BadConfig unless the tables have this version's layout."""
    if layout != LAYOUT:
        raise BadConfig(
            f"{server.name} has layout {layout}, this Ostinato reads {LAYOUT}; use the Ostinato that wrote it, or name another "
            "schema in record.namespace"
        )


def _layout(connection: Connection, server: LogServer) -> tuple[int, str] | None:
    """Return the log's layout and name; None if there is no such schema or it is empty."""
    query = "SELECT relname, relkind::text FROM pg_class WHERE relnamespace = to_regnamespace(%s)"
    names = {name for name, _ in connection.execute(query, (f'"{server.namespace}"',)).fetchall()}
    if not names:
        return None
    strange = BadConfig(
        f"{server.name} holds tables that are not a log of Ostinato; name another schema in record.namespace"
    )
    if not {"log", "segments", "identities"} <= names:
        raise strange
    try:
        found = connection.execute("SELECT layout, name FROM log").fetchone()
    except psycopg.errors.UndefinedColumn as error:
        raise strange from error
    # without the USAGE privilege on the schema it is UndefinedTable
    except (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege) as error:
        raise BadConfig(
            f"{server.name}: permission denied; let its owner grant the user of record.url USAGE of the schema, and "
            "SELECT, INSERT, UPDATE and DELETE of its tables"
        ) from error
    if found is None:
        raise strange
    return found


def _make(connection: Connection, server: LogServer, made_at: float, first: Cursor) -> tuple[int, str]:
    connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(server.namespace)))
    for statement in _TABLES:
        connection.execute(statement)  # pyright: ignore[reportArgumentType,reportCallIssue]
    name = uuid4().hex
    connection.execute("INSERT INTO log VALUES (1, %s, %s)", (LAYOUT, name))
    add_segment(connection, first, made_at)
    return LAYOUT, name
