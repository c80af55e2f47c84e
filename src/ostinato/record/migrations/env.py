"""Alembic's entry point: runs the migrations on the connection it was given, inside the caller's transaction."""

from __future__ import annotations

from alembic import context

from ostinato.record.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
context.run_migrations()
