"""A log for tests to break, and direct SQL access to its files."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
import pytest

from ostinato.record.log import SqlLog

driver: Any = pysqlite3.dbapi2


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqlLog]:
    with SqlLog.open(tmp_path / "deep" / "log", clock=lambda: 77.0) as opened:
        yield opened


@pytest.fixture
def sql() -> Callable[..., list[Any]]:
    """Run a statement on a database file, on a connection of its own."""

    def run(path: Path, statement: str, *values: Any) -> list[Any]:
        connection = driver.connect(str(path))
        try:
            rows = connection.execute(statement, values).fetchall()
            connection.commit()
            return rows
        finally:
            connection.close()

    return run
