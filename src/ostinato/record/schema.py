"""The tables of the log: one per kind of record, and `entries`, which gives all of them one order.

A row's `seq` is allotted inside the transaction that writes it, and writers exclude each other, so `seq` is commit order: a
reader that has seen `seq` n will never see a smaller one appear. Identities (`Turn.id`, `Batch.step`, ...) are unique, and
triggers refuse UPDATE and DELETE on every table. Token ids are int32, log-probabilities float32 and credits float64, little
endian; what has no fixed shape is JSON text.
"""

from __future__ import annotations

from sqlalchemy import (
    DDL,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
)

HEAD = "0003"
"""The newest migration; a database that names another revision is migrated or refused."""

metadata = MetaData()

entries = Table(
    "entries",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("written_at", Double, nullable=True),  # the writer's clock; never used for order
)

turns = Table(
    "turns",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    Column("episode", String, nullable=False),
    Column("parent", String, nullable=True),
    Column("user", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("arm", String, nullable=False),
    Column("propensity", Double, nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("spans", Text, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("finish", String, nullable=False),
    Column("text", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("numerics", Text, nullable=False),
    Column("routes", LargeBinary, nullable=False),
    Column("group", String, nullable=True),
    Column("verified", Boolean, nullable=False),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    Column("turns", Text, nullable=False),
    Column("at", Double, nullable=False),
)

signals = Table(
    "signals",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("turn", String, nullable=False),  # no foreign key: a signal may arrive before its turn
    Column("name", String, nullable=False),
    Column("value", Double, nullable=False),
    Column("source", String, nullable=False),
    Column("occurred_at", Double, nullable=False),
    Column("received_at", Double, nullable=False),
    Column("correction", Text, nullable=True),
    Column("comment", Text, nullable=True),
    Column("retracts", String, nullable=True),
    UniqueConstraint("tenant", "id"),
    Index("signals_turn", "turn"),
)

rewards = Table(
    "rewards",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("turn", String, nullable=False, unique=True),
    Column("value", Double, nullable=False),
    Column("function", String, nullable=False),
    Column("signals", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("upto", Integer, nullable=False),
)

quarantines = Table(
    "quarantines",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("turn", String, nullable=False, unique=True),
    Column("reason", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("upto", Integer, nullable=False),
)

holdbacks = Table(
    "holdbacks",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("turn", String, nullable=False, unique=True),
    Column("reason", Text, nullable=False),
    Column("at", Double, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False, unique=True),
    Column("turns", Text, nullable=False),
    Column("credits", LargeBinary, nullable=False),
    Column("reference", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("base", Text, nullable=True),
)

releases = Table(
    "releases",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    Column("action", String, nullable=False),
    Column("policy", Text, nullable=False),
    Column("previous", Text, nullable=True),
    Column("reason", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("at", Double, nullable=False),
)

alarms = Table(
    "alarms",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    Column("name", String, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("detail", Text, nullable=False),
)

stamps = Table(
    "stamps",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    Column("contract", Text, nullable=False),
    Column("at", Double, nullable=False),
)


def append_only(table: str) -> list[str]:
    """The two triggers that make a table append-only, as SQL statements."""
    return [
        f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
        "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
        for verb in ("UPDATE", "DELETE")
    ]


for _table in metadata.sorted_tables:
    for _statement in append_only(_table.name):
        event.listen(_table, "after_create", DDL(_statement))
