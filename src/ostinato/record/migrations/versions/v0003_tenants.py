"""The schema as it stands. Logs made before the first release are refused."""

from __future__ import annotations

from alembic import op

from ostinato.record.schema import metadata

revision = "0003"
down_revision = None


def upgrade() -> None:
    """All tables and their triggers."""
    metadata.create_all(op.get_bind())


def downgrade() -> None:
    """Refuse: the log is append-only."""
    raise RuntimeError("a log does not go back to an older schema; restore a copy of it instead")
