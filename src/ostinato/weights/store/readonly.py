"""A read-only weight store behind plain HTTP: a relay, or a web server in front of a bucket's layout."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final, cast

import obstore
from obstore import exceptions as errors
from obstore.store import HTTPStore

from ostinato.core.errors import BadConfig, Corrupt
from ostinato.weights.config import BucketConfig
from ostinato.weights.store.bucket import BucketStore
from ostinato.weights.store.interface import ListedObject, ListedRef
from ostinato.weights.version.content import MAX_OBJECT_BYTES, check_hash, check_ref

_MAX_LISTING: Final = 1 << 26


def read_only(what: str) -> BadConfig:
    """Return the error for an attempted write."""
    return BadConfig(
        f"{what} can only be read; set weights.url to the bucket or directory behind it to publish or release"
    )


class HttpStore(BucketStore):
    """A read-only store with the layout of a bucket at an http(s) URL. Responses are not trusted: bytes are hashed after every read.

    `weights.options` are sent as headers of every request.

    Example: ``store = HttpStore(BucketConfig(url="http://relay:8330"))``
    """

    def __init__(self, config: BucketConfig) -> None:
        super().__init__(config, inside=_client(config))

    async def put(self, data: bytes | memoryview) -> str:
        """Refused: raises BadConfig."""
        raise read_only(self.url)

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Refused: raises BadConfig."""
        raise read_only(self.url)

    async def delete(self, hash: str, stamp: str | None = None) -> bool:
        """Refused: raises BadConfig."""
        raise read_only(self.url)

    async def delete_ref(self, ref: str, old: str, stamp: str | None = None) -> None:
        """Refused: raises BadConfig."""
        raise read_only(self.url)

    async def list_refs(self) -> dict[str, ListedRef]:
        """Refused: raises BadConfig."""
        raise read_only(self.url)

    async def list_objects(self) -> AsyncIterator[ListedObject]:
        """Refused: raises BadConfig."""
        raise read_only(self.url)
        yield

    async def _read(self, path: str, hash: str) -> bytes:
        # in one request, because a web server may not support ranges
        found = await obstore.get_async(self._store, path)
        if int(found.meta["size"]) > MAX_OBJECT_BYTES:
            raise Corrupt(f"object {hash} has {found.meta['size']} bytes; no object has more than {MAX_OBJECT_BYTES}")
        return bytes(await found.bytes_async())

    async def _part(self, path: str, start: int, length: int) -> Any:
        try:
            return await super()._part(path, start, length)
        except errors.NotSupportedError:
            return (await self._read(path, path))[start : start + length]

    async def refs(self) -> dict[str, str]:
        """Return every ref, sorted by name, from the relay's own listing. Raises Corrupt if the response is no listing of refs."""
        with self._refusals("listing refs", missing=f"{self.url} does not list its refs; a relay does"):
            found = await obstore.get_async(self._store, "refs")
            size = int(found.meta["size"])
            data = bytes(await found.bytes_async()) if size <= _MAX_LISTING else b""
        return _listing(data, self.url)


def _listing(data: bytes, url: str) -> dict[str, str]:
    try:
        found: Any = json.loads(data)
        if not isinstance(found, dict):
            raise TypeError
        refs = cast("dict[Any, Any]", found)
        return {check_ref(ref): check_hash(refs[ref]) for ref in sorted(refs)}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Corrupt(
            f"{url}/refs: not a listing of refs (JSON, name to hash) of at most {_MAX_LISTING} bytes"
        ) from None


def _client(config: BucketConfig) -> HTTPStore:
    try:
        return HTTPStore(
            config.url,
            client_options={
                "timeout": f"{config.timeout_s}s",
                "allow_http": config.url.startswith("http://"),
                "default_headers": dict(config.options),
            },
            retry_config={"max_retries": config.retries},
        )
    except Exception as error:
        raise BadConfig(f"weights.url {config.url!r}: {error}; give http://host:port or https://host/path") from error
