"""The weight store in a bucket: S3, Google Cloud Storage or Azure Blob Storage by URL, through obstore.

The layout is the directory's: ``objects/ab/cdef...`` and ``refs/live``. Refs move by conditional writes (If-Match, If-None-Match), so
publishers on different continents need no lock. Nothing here trusts the bucket: bytes are hashed after every read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Generator
from typing import Any, Final

import obstore
from obstore import exceptions as errors
from obstore.store import from_url
from pydantic import BaseModel, Field

from ostinato.core.errors import BadConfig, Conflict, Corrupt, NotFound, TooLarge, Unauthorized, Unavailable
from ostinato.publish.content import check_hash, check_ref, hash_of, is_hash
from ostinato.publish.store import MAX_OBJECT_BYTES

_REF_BYTES: Final = 200


class BucketConfig(BaseModel, frozen=True, extra="forbid"):
    """Where weights are kept, and how a bucket is talked to."""

    url: str = Field(
        default="",
        description="s3://bucket/path, gs://bucket/path, az://container/path or a directory; empty: inside the run's directory.",
    )
    part_bytes: int = Field(
        default=1 << 24, ge=5 << 20, le=1 << 28, description="Larger objects travel in parts of this size, in parallel."
    )
    parallel: int = Field(default=8, ge=1, le=64, description="Parts under way at once.")
    timeout_s: float = Field(default=60.0, gt=0, description="Longest wait for one request.")
    retries: int = Field(default=10, ge=0, description="Attempts after a failed request, further and further apart.")
    options: dict[str, str] = Field(
        default_factory=dict, description="obstore's own settings, such as aws_region or aws_endpoint."
    )


class BucketStore:
    """Objects and refs under a URL, safe for many processes on many hosts.

    Credentials come from the environment or the machine's identity, as the provider's own tools find them.

    Example::

        store = BucketStore(BucketConfig(url="s3://weights/run-7", options={"aws_region": "eu-west-1"}))
        name = await store.put(b"...")
        await store.move_ref("live", None, name)

    Raises (all methods): Unavailable when the bucket cannot be reached, Unauthorized when it refuses us, BadRequest for a hash or
    ref name of the wrong form.
    """

    def __init__(self, config: BucketConfig, *, inside: Any = None) -> None:
        self.url, self._config = config.url, config
        self._store = inside if inside is not None else _open(config)

    async def put(self, data: bytes | memoryview) -> str:
        """Store bytes under their hash and return it; what is there whole is not sent again."""
        view = memoryview(data).cast("B")
        if view.nbytes > MAX_OBJECT_BYTES:
            raise TooLarge(f"an object of {view.nbytes} bytes; the limit is {MAX_OBJECT_BYTES}: split it", field="data")
        name = await asyncio.to_thread(hash_of, view)
        path = _object(name)
        with self._refusals(f"writing object {name}"):
            if await self._is_whole(path, view):
                return name
            part = self._config.part_bytes
            await obstore.put_async(
                self._store,
                path,
                bytes(view),
                use_multipart=view.nbytes > part,
                chunk_size=part,
                max_concurrency=self._config.parallel,
            )
        return name

    async def get(self, hash: str) -> bytes:
        """The bytes with this hash, verified; large ones are read in parts. Raises NotFound or Corrupt."""
        path = _object(check_hash(hash))
        with self._refusals(f"reading object {hash}", missing=f"object {hash} is not in the weight store"):
            found = await obstore.get_async(self._store, path)  # one round trip for small objects
            size = int(found.meta["size"])
            if size > MAX_OBJECT_BYTES:
                raise Corrupt(f"object {hash} has {size} bytes; no object has more than {MAX_OBJECT_BYTES}")
            small = size <= self._config.part_bytes
            data = bytes(await found.bytes_async()) if small else await self._read_parts(path, 0, size)
        if await asyncio.to_thread(hash_of, data) != hash:
            raise Corrupt(f"object {hash} does not have the bytes that its name promises. Restore it, or publish again")
        return data

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        """A part of an object, not verified; large ones are read in parts. Raises NotFound, or Corrupt if the object is shorter."""
        path = _object(check_hash(hash))
        with self._refusals(f"reading object {hash}", missing=f"object {hash} is not in the weight store"):
            try:
                data = await self._read_parts(path, start, length)
            except (errors.BaseError, BaseExceptionGroup):  # a bucket refuses a range that starts behind the end
                if int((await obstore.head_async(self._store, path))["size"]) >= start + length:
                    raise
                data = b""
        if len(data) != length:
            raise Corrupt(f"object {hash} is shorter than {start + length} bytes")
        return data

    async def has(self, hash: str) -> bool:
        """True if an object of this name is there; its bytes are not verified."""
        path = _object(check_hash(hash))
        with self._refusals(f"looking for object {hash}"):
            try:
                await obstore.head_async(self._store, path)
            except FileNotFoundError:
                return False
        return True

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Compare-and-swap by a conditional write; `old` None means the ref must not exist, or hold no hash. Raises Conflict."""
        check_hash(new, "new")
        if old is not None:
            check_hash(old, "old")
        check_ref(ref)
        if old is None and (taken := await self._parent_or_child(ref)):
            raise Conflict(f"ref {ref} cannot be made: there is a ref {taken}")
        value, tag = await self._at(ref)
        now = value if old is not None or is_hash(value or "") else None
        if now != old:
            raise Conflict(f"ref {ref} is at {now or 'nothing'}, not at {old or 'nothing'}: another publisher moved it")
        mode: Any = "create" if tag is None else {"e_tag": tag}
        with self._refusals(f"moving ref {ref}"):
            try:
                await obstore.put_async(self._store, f"refs/{ref}", new.encode() + b"\n", mode=mode)
            except (errors.PreconditionError, errors.AlreadyExistsError, FileExistsError) as error:
                # a write whose answer got lost is repeated below us and then refused: it has happened all the same
                if await self.read_ref(ref) != new:
                    raise Conflict(f"ref {ref} moved meanwhile: another publisher was faster") from error

    async def read_ref(self, ref: str) -> str | None:
        """The hash that a ref points to, or None. Raises Corrupt if the ref does not hold a hash."""
        value, _ = await self._at(check_ref(ref))
        if value is not None and not is_hash(value):
            raise Corrupt(f"ref {ref} holds {value[:80]!r}, which is not a hash. Delete it, or move it by hand")
        return value

    async def refs(self) -> dict[str, str]:
        """Every ref and the hash that it points to, sorted by name."""
        names = await self._list("refs/")
        values = await asyncio.gather(*(self.read_ref(name) for name in names))
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    # ------------------------------------------------------------ within

    async def _at(self, ref: str) -> tuple[str | None, str | None]:
        """What the ref holds, not checked, and the tag that a conditional write names; None and None without it."""
        with self._refusals(f"reading ref {ref}"):
            try:
                found = await obstore.get_async(self._store, f"refs/{ref}")
            except FileNotFoundError:
                return None, None
            data = bytes(await found.bytes_async()) if found.meta["size"] <= _REF_BYTES else b""
        return data.decode("ascii", "replace").strip(), found.meta["e_tag"]

    async def _list(self, prefix: str) -> list[str]:
        with self._refusals(f"listing {prefix}"):
            pages = [page async for page in obstore.list(self._store, prefix=prefix)]
        return sorted(str(item["path"]).removeprefix(prefix) for page in pages for item in page)

    async def _parent_or_child(self, ref: str) -> str | None:
        parts = ref.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        for name in above:
            if await self.read_ref(name) is not None:
                return name
        below = await self._list(f"refs/{ref}/")
        return f"{ref}/{below[0]}" if below else None

    async def _read_parts(self, path: str, start: int, size: int) -> bytes:
        part = self._config.part_bytes
        if size <= part:
            return bytes(await obstore.get_range_async(self._store, path, start=start, length=size))
        room, gate = bytearray(size), asyncio.Semaphore(self._config.parallel)

        async def fetch(at: int) -> None:
            async with gate:
                length = min(part, size - at)
                data = await obstore.get_range_async(self._store, path, start=start + at, length=length)
                if len(data) != length:
                    raise Corrupt(f"object {path} is shorter than {start + size} bytes")
                room[at : at + length] = bytes(data)

        async with asyncio.TaskGroup() as group:
            for at in range(0, size, part):
                group.create_task(fetch(at))
        return bytes(room)

    async def _is_whole(self, path: str, data: memoryview) -> bool:
        """True if the bucket says, by size and MD5 tag, that it holds just this. Where tags are no MD5 the object is sent again."""
        try:
            meta = await obstore.head_async(self._store, path)
        except FileNotFoundError:
            return False
        tag = (meta["e_tag"] or "").strip('"')
        if meta["size"] != data.nbytes or len(tag) < 32:
            return False
        return tag == await asyncio.to_thread(_tag, data, self._config.part_bytes)

    @contextlib.contextmanager
    def _refusals(self, doing: str, missing: str = "") -> Generator[None]:
        try:
            yield
        except BaseExceptionGroup as group:
            raise self._explained(group.exceptions[0], doing, missing) from group
        except (errors.BaseError, OSError) as error:
            raise self._explained(error, doing, missing) from error

    def _explained(self, error: BaseException, doing: str, missing: str) -> Exception:
        if isinstance(error, Corrupt):
            return error
        if isinstance(error, FileNotFoundError):
            return NotFound(missing or f"{doing}: there is nothing at {self.url}", field="hash")
        if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)):
            return Unauthorized(f"{doing}: {self.url} refuses us; check its credentials ({_short(error)})")
        return Unavailable(f"{doing}: {self.url} cannot be used now ({_short(error)}); nothing was acknowledged")


def _open(config: BucketConfig) -> Any:
    plain = any(value.startswith("http://") for value in config.options.values())  # whoever names it wants it
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
            f"weights.url {config.url!r}: {_short(error)}; give s3://bucket/path, gs://..., az://... or a directory"
        ) from error


def _object(hash: str) -> str:
    return f"objects/{hash[:2]}/{hash[2:]}"


def _tag(data: memoryview, part: int) -> str:
    """The entity tag that S3 gives: MD5 of the bytes, or of the parts' MD5s and how many."""
    if data.nbytes <= part:
        return hashlib.md5(data, usedforsecurity=False).hexdigest()
    parts = [hashlib.md5(data[i : i + part], usedforsecurity=False).digest() for i in range(0, data.nbytes, part)]
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
