"""The first schema: seven tables, each append-only."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _table(name: str, *columns: sa.Column[object]) -> None:
    op.create_table(name, sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False), *columns)
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {name}_no_{verb.lower()} BEFORE {verb} ON {name} "
            "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
        )


def _text(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.Text, nullable=nullable)


def _name(name: str, *, nullable: bool = False, unique: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.String, nullable=nullable, unique=unique)


def _number(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.Double, nullable=nullable)


def _bytes(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.LargeBinary, nullable=False)


def upgrade() -> None:
    """Create everything."""
    _table("entries", _name("kind"), _number("written_at", nullable=True))
    _table(
        "turns",
        _name("id", unique=True),
        _name("episode"),
        _name("parent", nullable=True),
        _name("user"),
        _name("tenant"),
        _name("arm"),
        _number("propensity"),
        _bytes("prompt_ids"),
        _bytes("sampled_ids"),
        _bytes("logprobs"),
        _text("spans"),
        _text("sampling"),
        _name("finish"),
        _text("text"),
        _number("started_at"),
        _number("ended_at"),
    )
    _table(
        "signals",
        _name("id", unique=True),
        _name("turn"),
        _name("name"),
        _number("value"),
        _name("source"),
        _number("occurred_at"),
        _number("received_at"),
        _text("correction", nullable=True),
        _text("comment", nullable=True),
        _name("retracts", nullable=True),
    )
    op.create_index("signals_turn", "signals", ["turn"])
    _table("rewards", _name("turn", unique=True), _number("value"), _name("function"), _text("signals"), _number("at"))
    _table("holdbacks", _name("turn", unique=True), _text("reason"), _number("at"))
    _table(
        "batches",
        sa.Column("step", sa.Integer, nullable=False, unique=True),
        _text("turns"),
        _bytes("credits"),
        _text("reference"),
        _number("at"),
        _text("base", nullable=True),
    )
    _table(
        "releases",
        _name("id", unique=True),
        _name("action"),
        _text("policy"),
        _text("previous", nullable=True),
        _text("reason"),
        _text("detail"),
        _number("at"),
    )


def downgrade() -> None:
    """Refuse: the log is append-only, and this schema is where it starts."""
    raise RuntimeError("there is no schema before the first; restore a copy of the log instead")
