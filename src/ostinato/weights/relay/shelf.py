"""An LRU cache of objects in a directory, with a limit on its bytes. One process per directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from blake3 import blake3

from ostinato.core.errors import Corrupt, NotFound, StorageFull
from ostinato.core.seams import Clock
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import is_hash

logger = logging.getLogger(__name__)

_TRUSTED_S: Final = 60.0
"""A file that is opened is hashed again if it was last hashed longer ago than this, because disks can corrupt data."""

_PIECE: Final = 1 << 20


class Shelf:
    """The objects of a directory store, kept under `max_bytes`. The order of use survives a restart, as the files' access times.

    Example::

        shelf = Shelf(DirectoryStore(Path("cache")), max_bytes=1 << 36)
        await shelf.put(name, data)
        async with shelf.opened(name) as path: ...
    """

    def __init__(self, store: DirectoryStore, max_bytes: int, clock: Clock = time.monotonic) -> None:
        self._store, self._max_bytes, self._clock = store, max_bytes, clock
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._checked: dict[str, float] = {}
        self._pins: Counter[str] = Counter()
        self.bytes = self.evicted = 0
        for name, size in _found(store.root):
            self._sizes[name] = size
            self.bytes += size
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, hash: str) -> bool:
        return hash in self._sizes

    async def get(self, hash: str) -> bytes | None:
        """The bytes, verified, or None if they are missing or damaged."""
        if hash not in self._sizes:
            return None
        try:
            data = await self._store.get(hash)
        except (NotFound, Corrupt) as error:
            self._drop(hash, error)
            return None
        self._used(hash)
        return data

    @contextlib.asynccontextmanager
    async def opened(self, hash: str) -> AsyncGenerator[Path | None]:
        """The verified file of an object, which is not evicted while the block runs. None if it is missing or damaged."""
        self._pins[hash] += 1
        try:
            yield self._path(hash) if await self._is_sound(hash) else None
        finally:
            self._pins[hash] -= 1
            if not self._pins[hash]:
                del self._pins[hash]

    async def put(self, hash: str, data: bytes) -> None:
        """Keep verified bytes. Raises StorageFull, also if everything else is being read and there is no room."""
        if hash in self._sizes:
            return
        self._make_room(len(data))
        self.bytes += len(data)  # reserves the room against objects that arrive meanwhile
        try:
            await self._store.put(data)
        except BaseException:
            self.bytes -= len(data)
            raise
        if hash in self._sizes:  # another caller put it meanwhile
            self.bytes -= len(data)
            return
        self._sizes[hash] = len(data)
        self._checked[hash] = self._clock()
        self._used(hash)  # the file system's own time may be some milliseconds behind

    def _path(self, hash: str) -> Path:
        return self._store.root / "objects" / hash[:2] / hash[2:]

    async def _is_sound(self, hash: str) -> bool:
        if hash not in self._sizes:
            return False
        checked = self._checked.get(hash)
        if checked is None or self._clock() - checked > _TRUSTED_S:
            try:
                await asyncio.to_thread(_check, self._path(hash), hash)
            except (OSError, Corrupt) as error:
                self._drop(hash, error)
                return False
            self._checked[hash] = self._clock()
        self._used(hash)
        return True

    def _used(self, hash: str) -> None:
        if hash in self._sizes:
            self._sizes.move_to_end(hash)
            with contextlib.suppress(OSError):
                path = self._path(hash)
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def _drop(self, hash: str, error: Exception) -> None:
        logger.warning("object %s is dropped and will be fetched again: %s", hash, error)
        self._remove(hash)

    def _remove(self, hash: str) -> None:
        self.bytes -= self._sizes.pop(hash, 0)
        self._checked.pop(hash, None)
        self._path(hash).unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Evict objects, at once and on the event loop: a late removal could hit the same object, fetched again."""
        for hash in [name for name in self._sizes if name not in self._pins]:
            if self.bytes + size <= self._max_bytes:
                return
            self._remove(hash)
            self.evicted += 1
        if size and self.bytes + size > self._max_bytes:
            raise StorageFull(
                f"{self._store.root} holds {self.bytes} of at most {self._max_bytes} bytes, all in use: no room for {size} more. "
                "Raise relay.max_bytes"
            )


def _found(root: Path) -> list[tuple[str, int]]:
    """The objects in a directory store with their sizes, least recently used first."""
    found: list[tuple[int, str, int]] = []
    for path in (root / "objects").glob("*/*"):
        name = path.parent.name + path.name
        if is_hash(name):
            at = path.stat()
            found.append((at.st_atime_ns, name, at.st_size))
    return [(name, size) for _, name, size in sorted(found)]


def _check(path: Path, hash: str) -> None:
    state = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    if state.hexdigest() != hash:
        raise Corrupt(f"{path} does not have the bytes that its name promises")
