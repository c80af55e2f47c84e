"""Brings a database to the schema of this code, or refuses one that newer code has written."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from ostinato.core.errors import BadConfig
from ostinato.record.lock import hold
from ostinato.record.schema import HEAD

WAIT_S = 60.0


def upgrade(engine: Engine, path: Path) -> None:
    """Migrate to HEAD in one transaction; processes that open the same file at once wait for each other.

    Raises:
        BadConfig: the database was written by newer code, or is no log at all.
        Conflict: another process has been migrating for over a minute.
    """
    with hold(path.parent, "migrate", wait_s=WAIT_S), engine.begin() as connection:
        if revision(connection) != HEAD:
            _refuse_unknown(connection, path)
            _run(connection)


def revision(connection: Connection) -> str | None:
    """The revision that the database names, or None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def _refuse_unknown(connection: Connection, path: Path) -> None:
    from alembic.script import ScriptDirectory  # a quarter of a second, so only when there is something to migrate

    found = revision(connection)
    known = {script.revision for script in ScriptDirectory(str(Path(__file__).parent)).walk_revisions()}
    if found is not None and found not in known:
        raise BadConfig(
            f"{path} has schema {found}, this Ostinato reads {HEAD}; open it with the Ostinato that wrote it, or start a new run"
        )
    if found is None and inspect(connection).get_table_names():
        raise BadConfig(f"{path} is a database, but no log of Ostinato's; name another file")


def _run(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
