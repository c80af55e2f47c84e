"""The weight store in a directory: content-addressed objects, and named refs moved by compare-and-swap.

Layout::

    objects/ab/cdef...   bytes whose BLAKE3-256 is abcdef...
    refs/live            64 hex digits
    tmp/                 files that are being written
    *.lock               locks between processes; a killed process releases them

Every write is: temporary file in the same file system, fsync, rename, fsync of the directory. A process killed at any instant leaves
whole objects and whole refs. At scale, `BucketStore` replaces this store behind the same protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

from ostinato.core.errors import Conflict, Corrupt, NotFound, TooLarge, Unavailable
from ostinato.weights.store.disk import LOCK_WAIT_S, AtomicFiles, Disk, stamp_of, storage_refusals, unread
from ostinato.weights.store.interface import DamagedRefs, Fence, ListedObject, ListedRef, check_range, unfenced
from ostinato.weights.version.content import MAX_OBJECT_BYTES, check_hash, check_ref, hash_of, is_hash


class DirectoryStore:
    """Objects and refs under `root`, safe for many processes of one host.

    Example::

        store = DirectoryStore(Path("weights"))
        name = await store.put(b"...")
        await store.move_ref("live", None, name)

    `fence` is called while the refs are locked: no ref moves meanwhile, and a fence that blocks delays every other process that moves refs.

    A new store is created for its owner alone (0700). In an existing directory, new files grant other users what the directory grants them.

    Raises (all methods): StorageFull if the disk refuses a write (the call then has no effect); Unavailable if another process holds a lock
    for `lock_wait_s` seconds; BadRequest for a hash or ref name of the wrong form.
    """

    def __init__(
        self, root: Path, disk: Disk | None = None, fence: Fence = unfenced, *, lock_wait_s: float = LOCK_WAIT_S
    ) -> None:
        self._root, self._fence = root, fence
        self._files = AtomicFiles(root, disk or Disk(), lock_wait_s)
        with storage_refusals(f"making the store in {root}"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("objects", "refs", "tmp"):
                self._files.directory(root / name)
            self._files.clear_leftovers()

    @property
    def renews_s(self) -> float:
        return 0.0

    @property
    def root(self) -> Path:
        """The store's directory."""
        return self._root

    async def put(self, data: bytes | memoryview) -> str:
        """Store bytes durably under their hash, and return the hash. An object that was damaged on disk is written again."""
        return await asyncio.to_thread(self._put, data)

    async def get(self, hash: str) -> bytes:
        """Return the bytes with this hash, verified. Raises NotFound, Corrupt, or Unavailable if too many files are open."""
        return await asyncio.to_thread(self._get, check_hash(hash))

    async def has(self, hash: str) -> bool:
        return await asyncio.to_thread(self._object(check_hash(hash)).is_file)

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        check_range(start, length)
        return await asyncio.to_thread(self._get_range, check_hash(hash), start, length)

    async def delete(self, hash: str, stamp: str | None = None) -> bool:
        path = self._object(check_hash(hash))
        with storage_refusals(f"deleting object {hash}"):
            return await asyncio.to_thread(self._files.remove, path, stamp)

    async def list_objects(self) -> AsyncIterator[ListedObject]:
        with storage_refusals(f"reading the clock of {self._root}"):
            now = await asyncio.to_thread(self._files.now)
        for directory in await asyncio.to_thread(lambda: sorted((self._root / "objects").iterdir())):
            for listed in await asyncio.to_thread(self._list_directory, directory, now):
                yield listed

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Move a ref by compare-and-swap across processes. `old` None: the ref must not exist or must not hold a hash. Raises Conflict.

        After StorageFull the ref is where it was, unless the disk also refused to restore it. It always holds a whole hash.
        """
        check_hash(new, "new")
        if old is not None:
            check_hash(old, "old")
        await asyncio.to_thread(self._move_ref, check_ref(ref), old, new)

    async def read_ref(self, ref: str) -> str | None:
        """Return the hash that a ref points to, or None. Raises Corrupt if its file does not hold a hash, Unavailable if it cannot be
        read.
        """
        return await asyncio.to_thread(self._read_ref, check_ref(ref))

    async def refs(self) -> dict[str, str]:
        # needs no clock, so a read-only directory can be listed, too
        listed = await asyncio.to_thread(self._list_refs, 0)
        return {ref: at.value for ref, at in listed.items()}

    async def list_refs(self) -> dict[str, ListedRef]:
        with storage_refusals(f"reading the clock of {self._root}"):
            return await asyncio.to_thread(lambda: self._list_refs(self._files.now()))

    async def delete_ref(self, ref: str, old: str, stamp: str | None = None) -> None:
        await asyncio.to_thread(self._delete_ref, check_ref(ref), check_hash(old, "old"), stamp)

    # ------------------------------------------------------------ objects

    def _object(self, hash: str) -> Path:
        return self._root / "objects" / hash[:2] / hash[2:]

    def _put(self, data: bytes | memoryview) -> str:
        size = memoryview(data).nbytes
        if size > MAX_OBJECT_BYTES:
            raise TooLarge(f"an object of {size} bytes; the limit is {MAX_OBJECT_BYTES}: split it", field="data")
        name = hash_of(data)
        path = self._object(name)
        with storage_refusals(f"writing object {name}"):
            self._files.directory(path.parent)
            if not self._files.renew(path) or not self._is_whole(path, name, size):
                self._files.write(path, data)
            # even if the object existed: the process that renamed it may have died before its own fsync
            self._files.sync_directory(path.parent)
        return name

    def _is_whole(self, path: Path, name: str, size: int) -> bool:
        try:
            return path.stat().st_size == size and hash_of(path.read_bytes()) == name
        except OSError:  # missing or unreadable: it must be written in either case
            return False

    def _get(self, name: str) -> bytes:
        path = self._object(name)
        remedy = f"Restore {path} from a copy, or publish the version again (it rewrites damaged objects)"
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_OBJECT_BYTES:
                    raise Corrupt(f"object {name} has more than {MAX_OBJECT_BYTES} bytes. {remedy}")
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"object {name} is not in the weight store. {remedy}", field="hash") from None
        except OSError as error:
            raise unread(name, error) from error
        if hash_of(data) != name:
            raise Corrupt(f"object {name} does not match its hash. {remedy}")
        return data

    def _get_range(self, name: str, start: int, length: int) -> bytes:
        try:
            with self._object(name).open("rb") as file:
                short = os.fstat(file.fileno()).st_size < start + length
                file.seek(start)
                data = b"" if short else file.read(length)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"object {name} is not in the weight store", field="hash") from None
        except OSError as error:
            raise unread(name, error) from error
        if short or len(data) < length:
            raise Corrupt(f"object {name} ends before byte {start + length}. Restore it, or publish again")
        return data

    def _list_directory(self, directory: Path, now: int) -> list[ListedObject]:
        objects: list[ListedObject] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
            for entry in entries:
                name = directory.name + entry.name
                with contextlib.suppress(FileNotFoundError):  # another collector deleted it meanwhile
                    if is_hash(name) and entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        objects.append(ListedObject(name, stat.st_size, _age(stat, now), stamp_of(stat)))
        return objects

    # ------------------------------------------------------------ refs

    def _read_ref(self, ref: str) -> str | None:
        path = self._root / "refs" / ref
        try:
            with path.open("rb") as file:
                text = file.read(100).decode("ascii", "replace").strip()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        except OSError as error:
            raise Unavailable(f"ref {ref}: {path} cannot be read: {error.strerror}; repair the disk") from error
        if not is_hash(text):
            raise Corrupt(f"ref {ref}: {path} does not hold a hash. Write the hash of a good version into it")
        return text

    def _move_ref(self, ref: str, old: str | None, new: str) -> None:
        path = self._root / "refs" / ref
        with storage_refusals(f"moving ref {ref}"), self._files.locked("refs.lock", fcntl.LOCK_EX):
            now = self._current(ref, old)
            if now != old:
                raise Conflict(
                    f"ref {ref} is at {now or 'nothing'}, not at {old or 'nothing'}; read it again and decide again"
                )
            self._fence()
            try:
                self._files.directory(path.parent)
                if path.is_dir():
                    raise Conflict(f"ref {ref} cannot be made: other refs live under {ref}/")
                self._files.write(path, new.encode() + b"\n")
            except (FileExistsError, NotADirectoryError) as error:
                raise Conflict(f"ref {ref} cannot be made: a ref has the name of one of its parents") from error
            try:
                self._files.sync_directory(path.parent)
            except OSError:
                self._undo(path, old)
                raise

    def _delete_ref(self, ref: str, old: str, stamp: str | None) -> None:
        path = self._root / "refs" / ref
        with storage_refusals(f"deleting ref {ref}"), self._files.locked("refs.lock", fcntl.LOCK_EX):
            if (now := self._read_ref(ref)) != old:
                raise Conflict(f"ref {ref} is at {now or 'nothing'}, not at {old}; read it again and decide again")
            self._fence()
            try:
                removed = self._files.remove(path, stamp)
            except OSError:
                if not path.exists():
                    self._undo(path, old)
                raise
            if not removed:
                raise Conflict(f"ref {ref} was moved to {old} again since it was listed")
            for parent in path.parents:  # an empty directory would block a ref of its name
                if parent == self._root / "refs":
                    break
                with contextlib.suppress(OSError):
                    parent.rmdir()

    def _current(self, ref: str, old: str | None) -> str | None:
        """Return the hash that the ref holds. For a damaged ref, returns None if `old` is None, and raises Corrupt otherwise."""
        try:
            return self._read_ref(ref)
        except Corrupt:
            if old is None:
                return None
            raise

    def _undo(self, path: Path, old: str | None) -> None:
        """Restore the ref as far as a failing disk allows, because the caller gets an error that says that it did not move."""
        with contextlib.suppress(OSError):
            if old is None:
                path.unlink()
            else:
                self._files.write(path, old.encode() + b"\n")

    def _list_refs(self, now: int) -> dict[str, ListedRef]:
        base = self._root / "refs"
        walk = os.walk(base, onerror=_unless_gone)
        paths = sorted(Path(directory) / name for directory, _, names in walk for name in names)
        refs: dict[str, ListedRef] = {}
        damaged: dict[str, Corrupt] = {}
        for path in paths:
            ref = path.relative_to(base).as_posix()
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                stat = path.stat()  # before the value is read, since an outdated stamp is safe: it deletes nothing
                try:
                    value = self._read_ref(ref)
                except Corrupt as error:
                    damaged[ref] = error
                    continue
                if value is not None:
                    refs[ref] = ListedRef(value, _age(stat, now), stamp_of(stat))
        if damaged:
            raise DamagedRefs(damaged, {ref: at.value for ref, at in refs.items()})
        return refs


def _unless_gone(error: OSError) -> None:
    """Raise Unavailable for a directory that cannot be listed, because a collector would delete what its refs need. A directory that was
    removed with its last ref is ignored.
    """
    if not isinstance(error, FileNotFoundError):
        raise Unavailable(
            f"the refs in {error.filename} cannot be listed: {error.strerror}. Let this user read it, or repair the disk"
        ) from error


def _age(stat: os.stat_result, now: int) -> float:
    """Return the age in seconds, 0 for a file with a time in the future."""
    return max(0.0, (now - stat.st_mtime_ns) / 1e9)
