"""Turns name their numerics contract and carry their routes; a table says what each contract's id stands for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Older turns are of unknown arithmetic and have no routes. Adding a column rewrites no row, so the triggers stay."""
    op.add_column("turns", sa.Column("numerics", sa.Text, nullable=False, server_default=""))
    op.add_column("turns", sa.Column("routes", sa.LargeBinary, nullable=False, server_default=sa.text("x''")))
    op.create_table(
        "stamps",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("contract", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER stamps_no_{verb.lower()} BEFORE {verb} ON stamps "
            "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
        )


def downgrade() -> None:
    """Refuse: the log is append-only, and older code would lose what turns say about their arithmetic."""
    raise RuntimeError("a log does not go back to an older schema; restore a copy of it instead")
