"""The weight store in a bucket: S3, Google Cloud Storage or Azure Blob Storage by URL, through obstore.

The layout is the directory store's: ``objects/ab/cdef...`` and ``refs/live``. Refs move by conditional writes (If-Match, If-None-Match),
so publishers on different continents need no lock. A ref holds its hash and a random nonce, so that no two writes are equal. Objects are
marked before they are deleted (`DeletionMarks`). The bucket is not trusted: bytes are hashed after every read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import obstore
from obstore import exceptions as errors

from ostinato.core.errors import Conflict, Corrupt, TooLarge
from ostinato.core.parallel import for_each
from ostinato.weights.config import BucketConfig
from ostinato.weights.store.interface import DamagedRefs, Fence, ListedObject, ListedRef, check_range, unfenced
from ostinato.weights.store.object_storage import OBEYED_S, DeletionMarks, Instant, again, connect, listed, refusals
from ostinato.weights.version.content import MAX_OBJECT_BYTES, check_hash, check_ref, hash_of, is_hash

_REF_BYTES: Final = 200
_DELETED: Final = "deleted"
_REF: Final = re.compile(rf"([0-9a-f]{{64}}|{_DELETED})(?: [0-9a-f]{{32}})?")
_CONDITION_FAILED: Final = (errors.PreconditionError, errors.AlreadyExistsError, FileExistsError)


class _Ref(NamedTuple):
    """A ref as it was read: its hash (None if it is missing or being deleted), its text, and its ETag for conditional writes."""

    value: str | None
    text: str
    tag: str | None
    modified: Instant | None


class BucketStore:
    """Objects and refs under a URL, safe for many processes on many hosts.

    Credentials come from the environment or the machine's identity, as the provider's own tools find them.

    Example::

        store = BucketStore(BucketConfig(url="s3://weights/run-7", options={"aws_region": "eu-west-1"}))
        name = await store.put(b"...")
        await store.move_ref("live", None, name)

    Raises (all methods): Unavailable if the bucket cannot be reached, Unauthorized if it denies access, BadRequest for a hash or ref name
    of the wrong form.
    """

    def __init__(self, config: BucketConfig, *, inside: Any = None, fence: Fence = unfenced) -> None:
        self.url, self._config, self._fence = config.url, config, fence
        self._store = inside if inside is not None else connect(config)
        # limits the concurrent reads of parts of all objects together, first come, first served
        self._gate = asyncio.Semaphore(config.parallel)
        self._marks = DeletionMarks(self._store, config.retries)

    @property
    def renews_s(self) -> float:
        return self._config.renew_s

    async def put(self, data: bytes | memoryview) -> str:
        """Store bytes under their hash, and return the hash. An existing object that is whole and not old is not uploaded again."""
        view = memoryview(data).cast("B")
        if view.nbytes > MAX_OBJECT_BYTES:
            raise TooLarge(f"an object of {view.nbytes} bytes; the limit is {MAX_OBJECT_BYTES}: split it", field="data")
        name = await asyncio.to_thread(hash_of, view)
        path = _object(name)
        with self._refusals(f"writing object {name}"):
            while True:
                if not await self._is_whole_and_young(path, view):
                    await self._send(path, view)
                if not await self._marks.waited(name):
                    return name

    async def get(self, hash: str) -> bytes:
        """Return the bytes with this hash, verified. Large objects are read in parts. Raises NotFound or Corrupt."""
        path = _object(check_hash(hash))
        with self._refusals(f"reading object {hash}", missing=f"object {hash} is not in the weight store"):
            data = await self._read(path, hash)
        if await asyncio.to_thread(hash_of, data) != hash:
            raise Corrupt(f"object {hash} does not match its hash. Restore it, or publish again")
        return data

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = _object(check_hash(hash))
        with self._refusals(f"reading object {hash}", missing=f"object {hash} is not in the weight store"):
            try:
                if not length:  # a range request cannot be empty
                    if (await obstore.head_async(self._store, path))["size"] >= start:
                        return b""
                elif len(data := await self._read_range(path, start, length)) == length:
                    return data
            except (errors.GenericError, BaseExceptionGroup):  # how some buckets answer beyond the end
                if (await obstore.head_async(self._store, path))["size"] >= start + length:
                    raise
        raise Corrupt(f"object {hash} ends before byte {start + length}. Restore it, or publish again")

    async def has(self, hash: str) -> bool:
        path = _object(check_hash(hash))
        with self._refusals(f"looking for object {hash}"):
            return await self._head(path) is not None

    async def delete(self, hash: str, stamp: str | None = None) -> bool:
        path = _object(check_hash(hash))
        clock = asyncio.get_running_loop().time
        with self._refusals(f"deleting object {hash}"):
            started, mark = clock(), await self._marks.mark(hash)
            # after marking, because a writer that puts the object from now on sees the mark and waits
            meta = await self._head(path)
            wanted = meta is not None and stamp in (None, _stamp(meta["last_modified"]))
            if wanted and clock() - started < OBEYED_S / 2:
                await obstore.delete_async(self._store, path)
            else:
                wanted = False
            await self._marks.clear(mark)  # not after an error, because the deletion may still be in flight
        return wanted

    async def list_objects(self) -> AsyncIterator[ListedObject]:
        with self._refusals("listing objects/"):
            now = await self._marks.now()
            async for page in obstore.list(self._store, prefix="objects/", chunk_size=1000):
                for item in page:
                    name = str(item["path"]).removeprefix("objects/").replace("/", "")
                    if is_hash(name):
                        modified = item["last_modified"]
                        yield ListedObject(name, item["size"], _age(modified, now), _stamp(modified))

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Move a ref by compare-and-swap (a conditional write). `old` None: the ref must not exist or must not hold a hash. Raises
        Conflict.
        """
        check_hash(new, "new")
        if old is not None:
            check_hash(old, "old")
        check_ref(ref)
        if old is None and (taken := await self._parent_or_child(ref)):
            raise Conflict(f"ref {ref} cannot be made: there is a ref {taken}")
        at = await self._at(ref, damaged_ok=old is None)
        if at.value != old:
            raise Conflict(
                f"ref {ref} is at {at.value or 'nothing'}, not at {old or 'nothing'}: another publisher moved it"
            )
        if at.text.startswith(_DELETED):
            at = await self._after_deletion(ref)
        await self._exchange(ref, at, new)

    async def read_ref(self, ref: str) -> str | None:
        """Return the hash that a ref points to, or None. Raises Corrupt if the ref does not hold a hash."""
        return (await self._at(check_ref(ref))).value

    async def refs(self) -> dict[str, str]:
        """Return every ref and the hash that it points to, sorted by name."""
        return {ref: at.value for ref, at in (await self._all_refs()).items() if at.value is not None}

    async def list_refs(self) -> dict[str, ListedRef]:
        with self._refusals("reading the bucket's clock"):
            now = await self._marks.now()
        found: dict[str, ListedRef] = {}
        for ref, at in (await self._all_refs()).items():
            if at.value is not None and at.modified is not None:
                found[ref] = ListedRef(at.value, _age(at.modified, now), str(at.tag))
        return found

    async def delete_ref(self, ref: str, old: str, stamp: str | None = None) -> None:
        check_hash(old, "old")
        at = await self._at(check_ref(ref))
        if at.value != old or stamp not in (None, at.tag):
            raise Conflict(
                f"ref {ref} is at {at.value or 'nothing'}, not at {old}, or was moved again since it was listed"
            )
        await self._exchange(ref, at, _DELETED)
        with self._refusals(f"deleting ref {ref}"):  # writers wait until the ref is gone and do not overwrite it
            await obstore.delete_async(self._store, f"refs/{ref}")

    # ------------------------------------------------------------ internals

    async def _at(self, ref: str, *, damaged_ok: bool = False) -> _Ref:
        """Read a ref. With `damaged_ok` a damaged ref counts as holding no hash; otherwise Corrupt is raised."""
        with self._refusals(f"reading ref {ref}"):
            try:
                response = await again(self._config.retries, lambda: self._small(f"refs/{ref}"))
            except FileNotFoundError:
                return _Ref(None, "", None, None)
        data, meta = response
        text = data.decode("ascii", "replace").strip()
        match = _REF.fullmatch(text)
        if match is None and not damaged_ok:
            raise Corrupt(f"ref {ref} holds {text[:80]!r}, which is not a hash. Delete it, or move it by hand")
        value = match[1] if match is not None and is_hash(match[1]) else None
        return _Ref(value, text, meta["e_tag"], meta["last_modified"])

    async def _exchange(self, ref: str, at: _Ref, word: str) -> None:
        """Overwrite the ref with `word`. Raises Conflict if the ref has changed since it was read.

        The fence is called after the ref was read. A process that takes over this role later first writes each ref again (`app.roles`), so
        that the condition of this write fails.
        """
        await asyncio.to_thread(self._fence)
        mode: Any = "create" if at.tag is None else {"e_tag": at.tag}
        text = f"{word} {uuid.uuid4().hex}"
        with self._refusals(f"moving ref {ref}"):
            try:
                await obstore.put_async(self._store, f"refs/{ref}", text.encode() + b"\n", mode=mode)
            except _CONDITION_FAILED as error:
                # obstore retries a write whose response was lost, and the retry fails although the write has happened
                if (await self._at(ref)).text != text:
                    raise Conflict(f"ref {ref} moved meanwhile: another publisher was faster") from error

    async def _after_deletion(self, ref: str) -> _Ref:
        """Wait until the ref's deletion is complete, or its process must have died, and return the ref, which may then be overwritten."""
        while True:
            at = await self._at(ref)
            if at.value is not None or at.modified is None:
                return at
            with self._refusals(f"waiting for ref {ref} to be deleted"):
                if await self._marks.is_old(at.modified):
                    return at
            await asyncio.sleep(0.2)

    async def _all_refs(self) -> dict[str, _Ref]:
        """Return every ref, including those that are being deleted. Raises DamagedRefs."""
        refs: dict[str, _Ref] = {}
        damaged: dict[str, Corrupt] = {}

        async def read(name: str) -> None:
            try:
                refs[name] = await self._at(name)
            except Corrupt as error:
                damaged[name] = error

        names = await self._list("refs/")
        # bounded, since a store may have thousands of refs, and a process about a thousand sockets
        await for_each(names, self._config.parallel, read)
        if damaged:
            raise DamagedRefs(damaged, {name: at.value for name, at in refs.items() if at.value is not None})
        return {name: refs[name] for name in names}

    async def _small(self, path: str) -> tuple[bytes, Any]:
        found = await obstore.get_async(self._store, path)
        data = bytes(await found.bytes_async()) if found.meta["size"] <= _REF_BYTES else b""
        return data, found.meta

    async def _list(self, prefix: str) -> list[str]:
        with self._refusals(f"listing {prefix}"):
            found = await listed(self._store, prefix, self._config.retries)
        return sorted(str(item["path"]).removeprefix(prefix) for item in found)

    async def _parent_or_child(self, ref: str) -> str | None:
        parts = ref.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        for name in above:
            if await self.read_ref(name) is not None:
                return name
        below = await self._list(f"refs/{ref}/")
        return f"{ref}/{below[0]}" if below else None

    async def _read(self, path: str, hash: str) -> bytes:
        """Read a whole object. The response for the first part gives the object's length; the other parts are read in parallel."""
        part = self._config.part_bytes
        try:
            first = await again(
                self._config.retries, lambda: obstore.get_async(self._store, path, options={"range": (0, part)})
            )
        except errors.GenericError as error:  # a range request for an empty object fails
            if "range" not in str(error).lower() or (await obstore.head_async(self._store, path))["size"]:
                raise
            return b""
        size = int(first.meta["size"])
        if size > MAX_OBJECT_BYTES:
            raise Corrupt(f"object {hash} has {size} bytes; no object has more than {MAX_OBJECT_BYTES}")
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(_body(first))]
            parts += [group.create_task(self._part(path, at, min(part, size - at))) for at in range(part, size, part)]
        return b"".join(done.result() for done in parts)

    async def _read_range(self, path: str, start: int, length: int) -> bytes:
        """Read bytes of an object in parallel parts. Returns fewer than `length`, or raises, if the object is shorter."""
        part = self._config.part_bytes
        async with asyncio.TaskGroup() as group:
            places = range(start, start + length, part)
            parts = [group.create_task(self._part(path, at, min(part, start + length - at))) for at in places]
        return b"".join(done.result() for done in parts)

    async def _part(self, path: str, start: int, length: int) -> Any:
        async with self._gate:
            return await obstore.get_range_async(self._store, path, start=start, length=length)

    async def _send(self, path: str, data: memoryview) -> None:
        part = self._config.part_bytes
        try:
            await obstore.put_async(
                self._store,
                path,
                bytes(data),
                use_multipart=data.nbytes > part,
                chunk_size=part,
                max_concurrency=self._config.parallel,
            )
        # obstore retried the completion of an upload whose response was lost, although the upload was complete
        except FileNotFoundError:
            if not await self._is_whole(await self._head(path), data):
                raise

    async def _head(self, path: str) -> Any:
        try:
            return await obstore.head_async(self._store, path)
        except FileNotFoundError:
            return None

    async def _is_whole(self, meta: Any, data: memoryview) -> bool:
        """Return True if the object's size and MD5 ETag match `data`. Always False where ETags are not MD5."""
        tag = (meta["e_tag"] or "").strip('"') if meta else ""
        if meta is None or meta["size"] != data.nbytes or len(tag) < 32:
            return False
        return tag == await asyncio.to_thread(_s3_etag, data, self._config.part_bytes)

    async def _is_whole_and_young(self, path: str, data: memoryview) -> bool:
        meta = await self._head(path)
        if not await self._is_whole(meta, data):
            return False
        return _age(meta["last_modified"], await self._marks.now()) < self._config.renew_s

    def _refusals(self, doing: str, missing: str = "") -> contextlib.AbstractContextManager[None]:
        return refusals(self.url, doing, missing)


def _object(hash: str) -> str:
    return f"objects/{hash[:2]}/{hash[2:]}"


def _age(modified: Instant, now: Instant) -> float:
    return max(0.0, (now - modified).total_seconds())


def _stamp(modified: Instant) -> str:
    return modified.isoformat()


def _s3_etag(data: memoryview, part: int) -> str:
    """Return the ETag that S3 gives: the MD5 of the bytes, or the MD5 of the parts' MD5s and the number of parts."""
    if data.nbytes <= part:
        return hashlib.md5(data, usedforsecurity=False).hexdigest()
    parts = [hashlib.md5(data[i : i + part], usedforsecurity=False).digest() for i in range(0, data.nbytes, part)]
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


async def _body(found: Any) -> Any:
    return await found.bytes_async()
