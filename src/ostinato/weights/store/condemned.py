"""Marks of deletion in a bucket, so that a deletion and a new write of the same name never cross.

No bucket deletes on a condition. So whoever deletes an object first writes a mark, then looks at the object's age again, then
deletes, then takes the mark away. Whoever writes an object looks for marks afterwards, and if there is one waits until it is gone
and writes again what was deleted. One of the two always sees the other. The mark of a killed collector is obeyed for a while.
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime
from typing import Any, Final

import obstore

from ostinato.weights.store.location import again

OBEYED_S: Final = 600.0
"""How long a mark holds: longer than a request that is still under way can live."""

Instant = datetime
"""A time by the bucket's clock, never by ours."""

_PAUSE_S: Final = 0.2


class Condemned:
    """The marks of one bucket, and its clock."""

    def __init__(self, store: Any, retries: int) -> None:
        self._store, self._retries = store, retries

    async def now(self) -> Instant:
        """The time by the bucket's clock: that of an object written for this."""
        await obstore.put_async(self._store, "clock", b"")
        return (await obstore.head_async(self._store, "clock"))["last_modified"]

    async def is_old(self, modified: Instant) -> bool:
        """True for a mark whose maker must have died."""
        return (await self.now() - modified).total_seconds() > OBEYED_S

    async def mark(self, hash: str) -> str:
        """Say that an object is about to be deleted; returns the mark's path."""
        path = f"condemned/{hash}/{uuid.uuid4().hex}"
        await obstore.put_async(self._store, path, b"")
        return path

    async def clear(self, mark: str) -> None:
        """Take a mark away: the deletion has happened, or will not."""
        await obstore.delete_async(self._store, mark)

    async def waited(self, hash: str) -> bool:
        """Wait until nobody is about to delete the object. False if nobody was."""

        async def listed() -> list[Any]:
            return [mark async for page in obstore.list(self._store, prefix=f"condemned/{hash}/") for mark in page]

        waited = False
        while marks := await again(self._retries, listed):
            waited = True
            for mark in marks:
                if await self.is_old(mark["last_modified"]):
                    await self.clear(mark["path"])
            await asyncio.sleep(_PAUSE_S)
        return waited
