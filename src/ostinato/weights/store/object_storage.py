"""Object storage: obstore's client for a bucket, the mapping of its errors, additional retries, and deletion marks.

Buckets have no conditional delete. To prevent a race between a deletion and a new write of the same name, a collector writes a mark, checks
the object's age again, deletes the object, and removes the mark. A writer looks for marks after it has written; if there is one, it waits
until the mark is gone, and writes again if the object was deleted. One of the two always sees the other. The mark of a killed collector
expires after `OBEYED_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Generator
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions as errors
from obstore.store import LocalStore, from_url

from ostinato.core.errors import BadConfig, Corrupt, NotFound, Unauthorized, Unavailable
from ostinato.weights.config import BucketConfig

_RETRY_S: Final = 0.1
_T = TypeVar("_T")


def connect(config: BucketConfig) -> Any:
    """Return obstore's client for the bucket or directory at `weights.url`. Raises BadConfig."""
    if in_directory(config.url):
        with contextlib.suppress(OSError):  # the client's own error is better
            directory_of(config.url).mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalStore(directory_of(config.url), mkdir=True, automatic_cleanup=True)
    # plain HTTP is allowed if the options name an http:// endpoint
    plain = any(value.startswith("http://") for value in config.options.values())
    options: Any = dict(config.options) or None
    try:
        return from_url(
            config.url,
            config=options,
            client_options={"timeout": f"{config.timeout_s}s", "allow_http": plain},
            retry_config={"max_retries": config.retries},
        )
    except (errors.BaseError, ValueError) as error:
        raise BadConfig(
            f"weights.url {config.url!r}: {short(error)}; give s3://bucket/path, gs://..., az://... or a directory"
        ) from error


def in_directory(url: str) -> bool:
    """Return True if the URL names a directory."""
    return "://" not in url or url.startswith("file://")


def is_relay(url: str) -> bool:
    """Return True if the URL names a relay, which is read-only."""
    return url.startswith(("http://", "https://"))


def directory_of(url: str) -> Path:
    """Return the directory that the URL names."""
    return Path(url.removeprefix("file://")).expanduser()


@contextlib.contextmanager
def refusals(url: str, doing: str, missing: str = "") -> Generator[None]:
    """Map obstore's errors to NotFound, Unauthorized or Unavailable."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _explained(url, group.exceptions[0], doing, missing) from group
    except (errors.BaseError, OSError) as error:
        raise _explained(url, error, doing, missing) from error


def _explained(url: str, error: BaseException, doing: str, missing: str) -> Exception:
    if isinstance(error, Corrupt):
        return error
    if isinstance(error, FileNotFoundError):
        return NotFound(missing or f"{doing}: there is nothing at {url}", field="hash")
    if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)):
        return Unauthorized(f"{doing}: {url} denies access; check its credentials ({short(error)})")
    return Unavailable(f"{doing}: {url} cannot be used now ({short(error)}); nothing was acknowledged")


async def again(retries: int, read: Callable[[], Awaitable[_T]]) -> _T:
    """Retry reads that obstore does not retry: a listing or a 404 that was cut off, a ref that moved while it was being read."""
    for _ in range(retries):
        try:
            return await read()
        except errors.GenericError as error:
            if "body error" not in str(error):
                raise
        await asyncio.sleep(_RETRY_S)
    return await read()


async def listed(store: Any, prefix: str, retries: int) -> list[Any]:
    """Return obstore's description of every object under a prefix."""

    async def pages() -> list[Any]:
        return [item async for page in obstore.list(store, prefix=prefix) for item in page]

    return await again(retries, pages)


def short(error: BaseException) -> str:
    """Return an error on one line."""
    return " ".join(str(error).split())[:300]


# ---------------------------------------------------------------- deletion marks

OBEYED_S: Final = 600.0
"""Lifetime of a mark: longer than any request in flight can take."""

Instant = datetime
"""A time on the bucket's clock, never on the local clock."""

_PAUSE_S: Final = 0.2


class DeletionMarks:
    """The deletion marks of one bucket, and its clock."""

    def __init__(self, store: Any, retries: int) -> None:
        self._store, self._retries = store, retries

    async def now(self) -> Instant:
        """Return the time on the bucket's clock, read from an object written for this purpose."""
        await obstore.put_async(self._store, "clock", b"")
        return (await obstore.head_async(self._store, "clock"))["last_modified"]

    async def is_old(self, modified: Instant) -> bool:
        """Return True for a mark that is so old that its collector must have died."""
        return (await self.now() - modified).total_seconds() > OBEYED_S

    async def mark(self, hash: str) -> str:
        """Mark an object as about to be deleted. Returns the mark's path."""
        path = f"condemned/{hash}/{uuid.uuid4().hex}"
        await obstore.put_async(self._store, path, b"")
        return path

    async def clear(self, mark: str) -> None:
        """Remove a mark, after the deletion was done or given up."""
        await obstore.delete_async(self._store, mark)

    async def waited(self, hash: str) -> bool:
        """Wait until the object has no deletion mark. Returns False if it had none."""
        waited = False
        while marks := await listed(self._store, f"condemned/{hash}/", self._retries):
            waited = True
            for mark in marks:
                if await self.is_old(mark["last_modified"]):
                    await self.clear(mark["path"])
            await asyncio.sleep(_PAUSE_S)
        return waited
