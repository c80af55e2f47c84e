"""The log on Postgres, for workers on several machines: rows have a single order and are durable when `append` returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Row
from ostinato.core.seams import Clock, Cursor
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.patience import Patience
from ostinato.record.postgres.appender import PostgresAppender
from ostinato.record.postgres.reader import PostgresReader
from ostinato.record.postgres.retention import drop_tables, keep_copied
from ostinato.record.postgres.schema import ready_schema
from ostinato.record.postgres.server import Server
from ostinato.record.roles import FencingToken
from ostinato.record.rowlog import RowLog

T = TypeVar("T")


def server_of(config: RecordConfig) -> Server:
    """The server of the log with these settings. Raises BadConfig for settings that Postgres logs do not support; does not connect."""
    if config.encrypt is not Encrypt.NONE:
        raise BadConfig(
            "record.encrypt is not there for a log in Postgres; set it to 'none', or leave record.url empty"
        )
    return Server.of(config)


class PostgresLog(RowLog):
    """The `Log` seam on a schema of a Postgres database. Use `open`.

    Example::

        with PostgresLog.open(RecordConfig(url="postgresql://ann@db.example/loop?sslmode=verify-full")) as log:
            await log.append(turn, signal)
    """

    def __init__(
        self, server: Server, name: str, clock: Clock, config: RecordConfig, patience: Patience | None = None
    ) -> None:
        self.name = name
        self._server, self._patience = server, patience
        self._answers = PostgresReader(server, None)
        super().__init__(self._answers, PostgresAppender(server, config, clock, None), None, config)

    @classmethod
    def open(
        cls,
        config: RecordConfig,
        clock: Clock = wall_clock,
        *,
        first: Cursor = 1,
        token: FencingToken | None = None,
        patience: Patience | None = None,
    ) -> Self:
        """Open or create the log at `record.url`, in the schema `record.namespace`. Waits `record.append_s` for a server that starts.

        `first`: the place of the first row of a log that is created. `token`: the fencing token of a process with a role, checked with
        each write; once another process has that role, writes raise LeaseLost. `patience`: how to wait, once the log is open, for a
        server that is unavailable; None: calls raise Unavailable within `record.append_s`.

        Raises:
            BadConfig: the URL is not valid, the server is too old or not durable, or the schema is another program's or version's.
            Unavailable: no writable server answers.
        """
        server = server_of(config).fenced(token)
        name = server.ask(lambda connection: ready_schema(connection, server, clock(), first))
        return cls(server, name, clock, config, patience)

    async def append(self, *rows: Row) -> Cursor:
        append = super().append
        return await self._patiently(lambda: append(*rows)) if rows else await append()

    async def keep(self, rows: Sequence[tuple[Cursor, Row]]) -> None:
        await asyncio.to_thread(keep_copied, self._server, rows)

    async def drop_old(self, now: float, keep_after: Cursor) -> int:
        days = self._config.retain_days
        if days is None:
            return 0
        await self._writer.submit(())
        return await asyncio.to_thread(drop_tables, self._server, now, days, keep_after)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await self._patiently(lambda: self._answered(question))

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await (ask() if self._patience is None else self._patience.until_there(ask))

    async def _answered(self, question: Callable[[], T]) -> T:
        """Run a query; queries run one at a time. Raises Unavailable after `record.append_s` without any answer from the server.

        A query that has not started by then is cancelled.
        """
        asked, wait_s = time.monotonic(), self._config.append_s
        answer = asyncio.get_running_loop().run_in_executor(self._asking, question)
        try:
            while not answer.done():
                left = max(asked, self._answers.heard) + wait_s - time.monotonic()
                if left <= 0:
                    raise Unavailable(
                        f"the log at {self._server.name} did not answer within {wait_s:g} s; see whether its server runs and try again"
                    )
                await asyncio.wait({answer}, timeout=left)
            return answer.result()
        finally:
            answer.cancel()
