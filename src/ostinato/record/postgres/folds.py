"""Folds of the log in the database that holds the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, LiteralString

from ostinato.core.seams import Cursor
from ostinato.record.folds import check_fold_name, pack_fold, unpack_fold
from ostinato.record.postgres.server import Connection, LogServer
from ostinato.record.retry import Patience

logger = logging.getLogger(__name__)


class PostgresFolds:
    """`core.seams.Folds` in a log's schema, which must exist. One writer per name; a connection for each call.

    Example: ``await PostgresFolds(LogServer.of(config.record)).save("desk", 812, {"open": []})``
    """

    def __init__(self, server: LogServer, patience: Patience | None = None) -> None:
        """`patience`: how to wait for a server that is unavailable; None: do not wait."""
        self._server, self._patience = server, patience

    async def save(self, name: str, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Save a fold, durably on return. Raises StorageFull, Unavailable, LeaseLost; the previous fold then stays."""
        check_fold_name(name)
        insert = "INSERT INTO folds VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET body = excluded.body"
        await self._patiently(insert, (name, pack_fold(cursor, state)), writes=True)

    async def load(self, name: str) -> tuple[Cursor, dict[str, Any]] | None:
        """The fold saved last. A fold that is damaged or has another format version is reported and counts as missing.

        Raises Unavailable.
        """
        check_fold_name(name)
        found = await self._patiently("SELECT body FROM folds WHERE name = %s", (name,))
        try:
            return unpack_fold(bytes(found[0][0])) if found else None
        except ValueError as error:
            logger.warning("fold %s in %s cannot be used, the log is read instead: %s", name, self._server.name, error)
            return None

    async def _patiently(self, query: LiteralString, values: tuple[Any, ...], *, writes: bool = False) -> list[Any]:
        def ask() -> Awaitable[list[Any]]:
            return asyncio.to_thread(self._asked, query, values, writes=writes)

        return await (ask() if self._patience is None else self._patience.until_there(ask))

    def _asked(self, query: LiteralString, values: tuple[Any, ...], *, writes: bool = False) -> list[Any]:
        def ask(connection: Connection) -> list[Any]:
            with connection.transaction():
                if writes:
                    self._server.fence(connection)
                cursor = connection.execute(query, values, binary=True)
                return cursor.fetchall() if cursor.description else []

        return self._server.ask(ask)
