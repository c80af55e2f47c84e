"""The weight store in a directory: content-addressed objects, and named refs moved by compare-and-swap.

Layout::

    objects/ab/cdef...   bytes whose BLAKE3-256 is abcdef...
    refs/live            64 hex digits
    tmp/                 files that are being written
    refs.lock, tmp.lock  locks between processes; a killed process lets go of them

Every write is: temporary file in the same file system, fsync, rename, fsync of the directory. Whoever is killed, at any
instant, leaves whole objects and whole refs. An object store behind the same seam replaces this file at scale.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final, Protocol

from ostinato.core.errors import Conflict, Corrupt, NotFound, StorageFull, TooLarge
from ostinato.core.seams import WeightStore
from ostinato.publish.content import check_hash, check_ref, hash_of, is_hash

MAX_OBJECT_BYTES: Final = 1 << 30
"""No object is larger; a reader refuses a larger file before reading it."""

_REFUSED: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS})


class RefStore(WeightStore, Protocol):
    """A weight store that can also list its refs and say whether it has an object: what checking and listing need."""

    async def has(self, hash: str) -> bool:
        """True if an object of this name is there; its bytes are not verified."""
        ...

    async def refs(self) -> dict[str, str]:
        """Every ref and the hash that it points to, sorted by name."""
        ...


class Disk:
    """The system calls of a durable write, one method each, so that a test can make any of them fail."""

    def create(self, path: Path) -> int:
        """A new file, open for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        """Write some of `data`; returns how much."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Force a file or directory to the device."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Put `source` in the place of `target`, atomically."""
        os.replace(source, target)

    def mkdir(self, path: Path) -> None:
        """Make one directory; it may exist."""
        path.mkdir(exist_ok=True)


class DirectoryStore:
    """Objects and refs under `root`, safe for many processes of one host.

    Example::

        store = DirectoryStore(Path("weights"))
        name = await store.put(b"...")
        await store.move_ref("live", None, name)

    Raises (all methods): StorageFull when the disk refuses a write (nothing of the call is kept); BadRequest for a hash or ref
    name of the wrong form.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()
        self._serial = itertools.count()
        with storage_refusals(f"making the store in {root}"):
            root.mkdir(parents=True, exist_ok=True)
            for name in ("objects", "refs", "tmp"):
                self._directory(root / name)
            self._clear_leftovers()

    async def put(self, data: bytes | memoryview) -> str:
        """Store bytes durably under their hash and return it. An object that rotted on disk is written anew."""
        return await asyncio.to_thread(self._put, data)

    async def get(self, hash: str) -> bytes:
        """The bytes with this hash, verified. Raises NotFound or Corrupt."""
        return await asyncio.to_thread(self._get, check_hash(hash))

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        """A part of an object, not verified. Raises NotFound, or Corrupt if the object is shorter."""
        return await asyncio.to_thread(self._get_range, check_hash(hash), start, length)

    async def has(self, hash: str) -> bool:
        return await asyncio.to_thread(self._object(check_hash(hash)).is_file)

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Compare-and-swap across processes; `old` None means the ref must not exist, or hold no hash. Raises Conflict.

        After StorageFull the ref is where it was, unless the disk refused even to put it back; it never points to less than
        a whole hash.
        """
        check_hash(new, "new")
        if old is not None:
            check_hash(old, "old")
        await asyncio.to_thread(self._move_ref, check_ref(ref), old, new)

    async def read_ref(self, ref: str) -> str | None:
        """The hash that a ref points to, or None. Raises Corrupt if the ref's file does not hold a hash."""
        return await asyncio.to_thread(self._read_ref, check_ref(ref))

    async def refs(self) -> dict[str, str]:
        return await asyncio.to_thread(self._refs)

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
            self._directory(path.parent)
            if not self._is_whole(path, name, size):
                self._write(path, data)
            self._sync_directory(path.parent)  # also when it was there: whoever renamed it may have died before this
        return name

    def _is_whole(self, path: Path, name: str, size: int) -> bool:
        try:
            return path.stat().st_size == size and hash_of(path.read_bytes()) == name
        except OSError:  # missing or unreadable: either way it has to be written
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
            raise Corrupt(f"object {name} cannot be read: {error}. {remedy}") from error
        if hash_of(data) != name:
            raise Corrupt(f"object {name} does not have the bytes that its name promises. {remedy}")
        return data

    def _get_range(self, name: str, start: int, length: int) -> bytes:
        try:
            with self._object(name).open("rb") as file:
                file.seek(start)
                data = file.read(length)
        except FileNotFoundError:
            raise NotFound(f"object {name} is not in the weight store", field="hash") from None
        except OSError as error:
            raise Corrupt(f"object {name} cannot be read: {error}") from error
        if len(data) != length:
            raise Corrupt(f"object {name} is shorter than {start + length} bytes")
        return data

    # ------------------------------------------------------------ refs

    def _read_ref(self, ref: str) -> str | None:
        path = self._root / "refs" / ref
        try:
            with path.open("rb") as file:
                text = file.read(100).decode("ascii", "replace").strip()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        if not is_hash(text):
            raise Corrupt(f"ref {ref}: {path} does not hold a hash. Write the hash of a good version into it")
        return text

    def _move_ref(self, ref: str, old: str | None, new: str) -> None:
        path = self._root / "refs" / ref
        with storage_refusals(f"moving ref {ref}"), self._locked("refs.lock", fcntl.LOCK_EX):
            now = self._held(ref, old)
            if now != old:
                raise Conflict(
                    f"ref {ref} is at {now or 'nothing'}, not at {old or 'nothing'}; read it again and decide anew"
                )
            try:
                self._directory(path.parent)
                if path.is_dir():
                    raise Conflict(f"ref {ref} cannot be made: other refs live under {ref}/")
                self._write(path, new.encode() + b"\n")
            except (FileExistsError, NotADirectoryError) as error:
                raise Conflict(f"ref {ref} cannot be made: a ref has the name of one of its parents") from error
            try:
                self._sync_directory(path.parent)
            except OSError:
                self._undo(path, old)
                raise

    def _held(self, ref: str, old: str | None) -> str | None:
        """What the ref holds; a damaged one holds nothing for whoever expects nothing."""
        try:
            return self._read_ref(ref)
        except Corrupt:
            if old is None:
                return None
            raise

    def _undo(self, path: Path, old: str | None) -> None:
        """Best effort on a failing disk: the caller is told that the ref did not move."""
        with contextlib.suppress(OSError):
            if old is None:
                path.unlink()
            else:
                self._write(path, old.encode() + b"\n")

    def _refs(self) -> dict[str, str]:
        base = self._root / "refs"
        found: dict[str, str] = {}
        for path in sorted(base.rglob("*")):
            if path.is_file() and (value := self._read_ref(path.relative_to(base).as_posix())) is not None:
                found[path.relative_to(base).as_posix()] = value
        return found

    # ------------------------------------------------------------ durable files

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        """Temporary file, fsync, rename. The caller syncs the directory."""
        with self._locked("tmp.lock", fcntl.LOCK_SH):
            temporary = self._root / "tmp" / f"{os.getpid()}-{id(self):x}-{next(self._serial)}"
            fd = self._disk.create(temporary)
            try:
                try:
                    rest = memoryview(data).cast("B")
                    while rest:
                        rest = rest[self._disk.write(fd, rest) :]
                    self._disk.fsync(fd)
                finally:
                    os.close(fd)
                self._disk.rename(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    def _directory(self, path: Path) -> None:
        """Make `path` and the parents that are missing; each is durable in its parent."""
        if path.is_dir():
            return
        if not path.parent.exists():
            self._directory(path.parent)
        self._disk.mkdir(path)
        self._sync_directory(path.parent)

    def _sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._disk.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Generator[None]:
        fd = os.open(self._root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)  # lets go of the lock

    def _clear_leftovers(self) -> None:
        """Delete what killed writers left in tmp/, if no writer is at work anywhere."""
        with contextlib.suppress(BlockingIOError), self._locked("tmp.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in (self._root / "tmp").iterdir():
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def storage_refusals(doing: str) -> Generator[None]:
    """A disk that refuses becomes StorageFull; other OS errors stay what they are."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED or isinstance(error, StorageFull):
            raise
        raise StorageFull(
            f"{doing}: {os.strerror(error.errno or 0)}. Nothing was acknowledged; free some space and try again"
        ) from error
