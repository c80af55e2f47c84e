"""Object storage: obstore's client for a bucket, its errors in our words, retries where it gives up too early, and deletion marks.

Buckets have no conditional delete. So that a deletion and a new write of the same name never cross, a collector writes a mark, checks the
object's age again, deletes the object, and removes the mark. A writer looks for marks after it has written; if there is one, it waits until
the mark is gone and writes again if the object was deleted. One of the two always sees the other. The mark of a killed collector is obeyed
for `OBEYED_S`.
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

_AGAIN_S: Final = 0.1
_T = TypeVar("_T")


def connect(config: BucketConfig) -> Any:
    """Obstore's client for the bucket or directory at `weights.url`. Raises BadConfig."""
    if in_directory(config.url):
        with contextlib.suppress(OSError):  # the client says what is wrong
            directory_of(config.url).mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalStore(directory_of(config.url), mkdir=True, automatic_cleanup=True)
    # naming an http:// endpoint allows it
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
    """True if the URL names a directory."""
    return "://" not in url or url.startswith("file://")


def is_relay(url: str) -> bool:
    """True if the URL names a relay, which can only be read."""
    return url.startswith(("http://", "https://"))


def directory_of(url: str) -> Path:
    """The directory that the URL names."""
    return Path(url.removeprefix("file://")).expanduser()


@contextlib.contextmanager
def refusals(url: str, doing: str, missing: str = "") -> Generator[None]:
    """Turn obstore's errors into NotFound, Unauthorized or Unavailable."""
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
        return Unauthorized(f"{doing}: {url} refuses us; check its credentials ({short(error)})")
    return Unavailable(f"{doing}: {url} cannot be used now ({short(error)}); nothing was acknowledged")


async def again(retries: int, read: Callable[[], Awaitable[_T]]) -> _T:
    """Retry reads that obstore does not: a listing or a 404 that was cut off, a ref that moved before the rest of it was read."""
    for _ in range(retries):
        try:
            return await read()
        except errors.GenericError as error:
            if "body error" not in str(error):
                raise
        await asyncio.sleep(_AGAIN_S)
    return await read()


async def listed(store: Any, prefix: str, retries: int) -> list[Any]:
    """What lies under a prefix, as obstore describes it."""

    async def pages() -> list[Any]:
        return [item async for page in obstore.list(store, prefix=prefix) for item in page]

    return await again(retries, pages)


def short(error: BaseException) -> str:
    """An error on one line."""
    return " ".join(str(error).split())[:300]


# ---------------------------------------------------------------- deletion marks

OBEYED_S: Final = 600.0
"""How long a mark is obeyed: longer than any request that is still under way can last."""

Instant = datetime
"""A time on the bucket's clock, never on the local clock."""

_PAUSE_S: Final = 0.2


class DeletionMarks:
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
        waited = False
        while marks := await listed(self._store, f"condemned/{hash}/", self._retries):
            waited = True
            for mark in marks:
                if await self.is_old(mark["last_modified"]):
                    await self.clear(mark["path"])
            await asyncio.sleep(_PAUSE_S)
        return waited
