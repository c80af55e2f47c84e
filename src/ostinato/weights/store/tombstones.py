"""Deletion marks in a bucket, so that a deletion and a new write of the same name never cross.

Buckets have no conditional delete. A collector therefore writes a mark, checks the object's age again, deletes the object, and removes
the mark. A writer looks for marks after it has written; if there is one, it waits until the mark is gone and writes again if the object
was deleted. One of the two always sees the other. The mark of a killed collector is obeyed for `OBEYED_S`.
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime
from typing import Any, Final

import obstore

from ostinato.weights.store.location import again

OBEYED_S: Final = 600.0
"""How long a mark is obeyed: longer than any request that is still under way can last."""

Instant = datetime
"""A time on the bucket's clock, never on the local clock."""

_PAUSE_S: Final = 0.2


class Condemned:
    """The deletion marks of one bucket, and its clock."""

    def __init__(self, store: Any, retries: int) -> None:
        self._store, self._retries = store, retries

    async def now(self) -> Instant:
        """The time on the bucket's clock, read from an object written for this purpose."""
        await obstore.put_async(self._store, "clock", b"")
        return (await obstore.head_async(self._store, "clock"))["last_modified"]

    async def is_old(self, modified: Instant) -> bool:
        """True for a mark whose collector must have died."""
        return (await self.now() - modified).total_seconds() > OBEYED_S

    async def mark(self, hash: str) -> str:
        """Mark an object as about to be deleted; returns the mark's path."""
        path = f"condemned/{hash}/{uuid.uuid4().hex}"
        await obstore.put_async(self._store, path, b"")
        return path

    async def clear(self, mark: str) -> None:
        """Remove a mark, because the deletion has happened or will not."""
        await obstore.delete_async(self._store, mark)

    async def waited(self, hash: str) -> bool:
        """Wait until the object has no deletion mark. False if it had none."""

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
