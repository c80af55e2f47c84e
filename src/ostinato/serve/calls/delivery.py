"""Records which answers were delivered in full: noted in memory and written to the log in batches, without delaying calls.

If the process is killed, at most the last quarter of a second of notes is lost; those turns count as not delivered.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

from ostinato.core.errors import OstinatoError
from ostinato.core.records import Delivered
from ostinato.core.seams import Clock, Log
from ostinato.serve.writes import Writes

_LOG = logging.getLogger(__name__)
EVERY_S = 0.25
MOST = 256  # turns in one row
_RETRY_S = 2.0
_KEPT = 100_000  # turns kept in memory while the log accepts no writes


class Deliveries:
    """Collects delivered turns and writes `Delivered` rows.

    Example: ``deliveries.note(["chatcmpl-3f:0"])``, and at the end ``await deliveries.close()``
    """

    def __init__(self, log: Log, clock: Clock, writes: Writes) -> None:
        self._log = log
        self._clock = clock
        self._writes = writes
        self._noted: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def note(self, turns: Sequence[str]) -> None:
        """Note that these turns' answers were handed to the connection, to their last byte."""
        self._noted += turns
        if len(self._noted) >= MOST:
            self._begin()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._begin)

    async def close(self) -> None:
        """Write all notes, without retrying."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await self._writing
        await self._write()

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
            self._writing.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._writing = None
        if self._noted and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self._begin)

    async def _write(self) -> None:
        while self._noted:
            turns, self._noted = self._noted[:MOST], self._noted[MOST:]
            row = Delivered(id=secrets.token_hex(8), turns=tuple(turns), at=self._clock())
            try:
                await self._writes.begin(self._log.append(row))
            except OstinatoError as error:
                _LOG.warning("%d deliveries were not noted, and will be tried again: %s", len(turns), error)
                self._noted = [*turns, *self._noted][:_KEPT]
                return
