"""Backups of a log, and copies of a log to another database.

A backup is a consistent copy of segments and keys in a directory, made while other processes append to the log. Segments are copied
oldest first, each from one snapshot, until the copy holds every row that was in the log when the backup began. It is therefore a prefix of
the log: no row without all rows before it. Then come the permanent rows of dropped segments, then the keys, so that the key of every copied
row is included, and last the manifest. A directory without a manifest is not a backup.

`copy_log` copies the rows to another database with the same sequence numbers. It can be killed and started again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ostinato.core.errors import BadConfig, Conflict, Corrupt, NotFound, StorageFull
from ostinato.core.files import disk_use, sync_directory, write_atomic
from ostinato.core.records import Row, identity
from ostinato.core.seams import Clock, Cursor
from ostinato.record.codec.kinds import FOR_EVER, KINDS
from ostinato.record.reader import LogReader
from ostinato.record.rowlog import RowLog
from ostinato.record.segment import SegmentGone, open_segment
from ostinato.record.segment_directory import LogDirectory, SegmentFilters
from ostinato.record.sqlite import connect, copy_pages, driver, is_busy, remove, translate

FORMAT = 1
"""The format version of a backup's manifest."""

MANIFEST = "manifest.json"
KEYS = "log-keys.db"
_NAMES = re.compile(r"\d{16}\.db|kept\.db|log-keys\.db")
_WAIT_S, _RETRY_S = 5.0, 0.02  # for a locked database
_PAGES = 2048  # database pages copied between two progress reports
_MAX_MANIFEST = 64 << 20  # bytes
_CONCURRENT_BACKUP = "another backup was made into the same directory; name a new one"

OnBytes = Callable[[int, int], object]
"""Called with the bytes copied so far and the total; both are approximate while the log changes."""

MakeDirectory = Callable[[Path], object]
"""Creates a new directory inside the backup; it is deleted if the backup fails. Raises BadConfig if it exists, OSError."""


class BackedUpFile(BaseModel):
    """One file of a backup. `size` in bytes; `sha256` as 64 hex digits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class BackupManifest(BaseModel):
    """The contents of a backup: rows `first` to `last` and, if `first` is above 1, permanent rows before it. `at`: when it began.

    Example: ``BackupManifest(format=1, version="0.1.0", at=0.0, first=1, last=812, files=(segment,))``
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    version: str
    at: float
    first: int = Field(ge=1)
    last: int = Field(ge=0)
    files: tuple[BackedUpFile, ...]


def back_up(
    log: LogDirectory,
    keys: Path,
    target: Path,
    version: str,
    clock: Clock,
    on_bytes: OnBytes,
    beside: Callable[[Cursor, MakeDirectory], object] = lambda last, make: None,
) -> BackupManifest:
    """Copy a log and its file of keys into the new or empty directory `target`. `version` is the program's, for people to read.

    Safe alongside readers, writers, retention and kill -9. The master key is not copied. `beside` adds further data to the backup: it is
    called with the last copied row before the manifest is written, and may write only into directories made with its second argument.

    Raises:
        NotFound: there is no log.
        BadConfig: `target` is not empty.
        StorageFull: the copy does not fit; what was written of it is deleted.
        Corrupt: the log is damaged. Unavailable: it could not be read.
    """
    if not log.path.is_dir() or not log.listing().firsts:
        raise NotFound(f"there is no log in {log.path}; name the run in run.directory")
    _make_empty(target)
    began = clock()
    copy = _Copy(log, target, on_bytes)
    try:
        segments = copy.segments()
        copy.database(log.kept)
        copy.database(keys, KEYS)
        beside(segments[-1].last, copy.make_directory)
        files = tuple(_described(target / name) for name in sorted(copy.names))
        made = BackupManifest(
            format=FORMAT, version=version, at=began, first=segments[0].first, last=segments[-1].last, files=files
        )
        copy.names.add(MANIFEST)
        _publish(target, made)
        on_bytes(copy.done, copy.done)
    except BaseException as error:
        copy.discard()
        if isinstance(error, OSError) and not isinstance(error, StorageFull):
            raise StorageFull(f"nothing was backed up to {target}: {error}; free space, then try again") from error
        raise
    return made


def read_manifest(source: Path) -> BackupManifest:
    """Return the manifest of a backup. Raises NotFound if it has none, BadConfig for a newer format, Corrupt."""
    try:
        data = read_plain(source / MANIFEST, _MAX_MANIFEST)
    except FileNotFoundError as error:
        raise NotFound(
            f"{source} holds no {MANIFEST}: it is not a backup of a log, or the backup was interrupted; name another"
        ) from error
    try:
        found = json.loads(data)
        if isinstance(found, dict) and isinstance(at := found.get("format"), int) and at > FORMAT:  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
            raise BadConfig(
                f"the backup in {source} has format {at}, this Ostinato reads {FORMAT}; restore it with the Ostinato that made it"
            )
        manifest = BackupManifest.model_validate(found)
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadConfig):
            raise
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise Corrupt(f"{source / MANIFEST} cannot be read: {why}; name another backup") from error
    names = [file.name for file in manifest.files]
    for name in names:
        if not _NAMES.fullmatch(name):
            raise Corrupt(f"{source / MANIFEST} names {name!r}, which is not a file of a log; name another backup")
    if len(set(names)) < len(names):
        raise Corrupt(f"{source / MANIFEST} names a file twice; name another backup")
    return manifest


def read_plain(path: Path, longest: int) -> bytes:
    """Return the bytes of a regular file; links are not followed.

    Raises Corrupt for anything else and for more than `longest` bytes, OSError.
    """
    with open_plain(path) as file:
        data = file.read(longest + 1)
    if len(data) > longest:
        raise Corrupt(f"{path} has more than {longest} bytes; name another backup")
    return data


@contextlib.contextmanager
def open_plain(path: Path) -> Generator[Any]:
    """Open a regular file for reading; links are not followed. Raises Corrupt for anything else, OSError."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise Corrupt(f"{path} is a link or not a file; a backup holds plain files only: name another")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        yield file


@dataclass(frozen=True, slots=True)
class _Copied:
    """A copied segment: its first and last row, and whether it was closed."""

    first: Cursor
    last: Cursor
    closed: bool


class _Copy:
    """A backup in progress. Its methods raise Corrupt, StorageFull, Unavailable, OSError."""

    def __init__(self, log: LogDirectory, target: Path, on_bytes: OnBytes) -> None:
        self.names: set[str] = set()
        self._made: list[Path] = []
        self._log, self._target, self._on_bytes = log, target, on_bytes
        self.done = 0
        self._expected = sum(disk_use(path) for path in log.path.glob("*.db"))

    def segments(self) -> list[_Copied]:
        """Copy the segments. At least one is left if retention drops some in the meantime, because it never drops the newest."""
        until, copied = self._newest(), list[_Copied]()
        while True:
            firsts = self._log.listing().firsts
            fresh = [first for first in firsts if not copied or first > copied[-1].first]
            if not fresh:
                return copied
            for first in fresh:
                try:
                    found = self._segment(first)
                except SegmentGone:  # so the older ones, copied before, have been dropped too
                    for each in copied:
                        self._remove(self._log.segment(each.first).name)
                    self._remove(self._log.segment(first).name)  # it may have been dropped while it was being copied
                    copied = []
                    continue
                if not found.closed and found.last < first and first != firsts[-1]:
                    # empty and older than the newest: left by a killed process
                    self._remove(self._log.segment(first).name)
                    continue
                copied.append(found)
                if not found.closed or found.last >= until:
                    return copied

    def database(self, source: Path, name: str = "") -> None:
        """Copy a database that is not a segment, if it exists."""
        deadline = time.monotonic() + _WAIT_S
        while source.exists():
            try:
                with contextlib.closing(connect(source, write=False)) as connection:
                    # all pages in one step, so that no process can create a key in between
                    self._pages(connection, name or source.name, -1)
                return
            except driver.Error as error:
                if not is_busy(error) or time.monotonic() > deadline:
                    raise self._refusal(error, source) from error
            self._remove(name or source.name)
            time.sleep(_RETRY_S)  # no process can read the keys while one is being created

    def make_directory(self, path: Path) -> None:
        """Implement `MakeDirectory`."""
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError as error:
            raise BadConfig(f"{path} is there: {_CONCURRENT_BACKUP}") from error
        self._made.append(path)

    def discard(self) -> None:
        """Delete what this backup wrote, and nothing of another backup into the same directory. Suppresses OSError."""
        for name in list(self.names):
            with contextlib.suppress(OSError):
                self._remove(name)
        for path in self._made:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                if path.parent != self._target:
                    path.parent.rmdir()  # if nothing else is in it

    def _newest(self) -> Cursor:
        with contextlib.closing(LogReader(self._log, None, SegmentFilters())) as reader:
            return reader.newest()

    def _segment(self, first: Cursor) -> _Copied:
        path = self._log.segment(first)
        try:
            with open_segment(path) as segment:
                segment.db.execute("BEGIN")  # read all pages from one snapshot
                found = _Copied(first, segment.newest(), segment.seal() is not None)
                self._pages(segment.db, path.name, _PAGES)
                return found
        except driver.Error as error:
            raise self._refusal(error, path) from error

    def _pages(self, source: Any, name: str, pages: int) -> None:
        target = self._target / name
        try:
            os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError as error:
            raise BadConfig(f"{target} is there: {_CONCURRENT_BACKUP}") from error
        self.names.add(name)  # only after it was created, so that `discard` never deletes another backup's file
        (size,) = source.execute("PRAGMA page_size").fetchone()
        done = self.done

        def report(_: int, remaining: int, total: int) -> None:
            self.done = done + (total - remaining) * size
            self._expected = max(self._expected, done + total * size)
            self._on_bytes(self.done, self._expected)

        (mode,) = source.execute("PRAGMA journal_mode").fetchone()
        with contextlib.closing(connect(target, write=True)) as copy:
            copy.execute("PRAGMA synchronous=OFF")  # it is synced once, when complete
            copy_pages(source, copy, pages, report)
            copy.execute(f"PRAGMA journal_mode={mode}")

    def _remove(self, name: str) -> None:
        if name in self.names:
            self.names.discard(name)
            remove(self._target / name)

    def _refusal(self, error: Exception, source: Path) -> Exception:
        refused = translate(error, source)
        return translate(error, self._target) if isinstance(refused, StorageFull) else refused


def _make_empty(target: Path) -> None:
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        if next(target.iterdir(), None) is not None:
            raise BadConfig(
                f"{target} is not empty; name a new directory, or delete what an interrupted backup left in it"
            )
        target.chmod(0o700)
    except OSError as error:
        raise StorageFull(f"{target} cannot be created: {error}; name another directory") from error


def _described(path: Path) -> BackedUpFile:
    """Sync a complete file and return its name, size and hash."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return BackedUpFile(name=path.name, size=os.fstat(file.fileno()).st_size, sha256=digest)


def _publish(target: Path, manifest: BackupManifest) -> None:
    """Write the manifest, durably and atomically, after the files that it names are durable."""
    sync_directory(target)
    write_atomic(target / MANIFEST, manifest.model_dump_json(indent=1) + "\n", durable=True)


# ---------------------------------------------------------------- copies between databases


_ROWS_PER_APPEND = 500
_EVERYTHING: set[type] = {kind.record for kind in KINDS}

OpenTarget = Callable[[Cursor], RowLog]
"""Opens the target log; if the log has to be created, its first row gets this sequence number."""


async def copy_log(source: RowLog, open_target: OpenTarget, on_row: Callable[[Cursor, Cursor], None]) -> Cursor:
    """Copy the missing rows and return the newest sequence number. `on_row` is called with the number reached and the last one.

    Permanent rows below the source's horizon are also copied. Rows appended to the source in the meantime are not, so stop its workers
    first.

    Raises:
        Conflict: the target holds other rows, or the source has dropped rows that the target lacks.
        BadConfig: the source has encrypted rows.
        StorageFull, Unavailable: call it again; it resumes where it stopped.
    """
    if source.keys is not None:
        raise BadConfig(
            "user text in this log is encrypted with its own keys, which cannot be copied; keep the log where it is"
        )
    end, horizon = source.newest(), await source.horizon()
    with open_target(horizon + 1) as target:
        after = target.newest()
        await _compare(source, target, after, horizon)
        kinds: set[type] = {kind.record for kind in FOR_EVER}
        kept = [item async for item in source.read(0, kinds) if item[0] <= horizon] if horizon else []
        if kept and await target.horizon():
            await target.keep(kept)
        page: list[tuple[Cursor, Row]] = []
        async for item in source.read(after, _EVERYTHING):
            page.append(item)
            if len(page) == _ROWS_PER_APPEND or item[0] == end:
                await _append(target, page)
                on_row(page[-1][0], end)
                page = []
            if item[0] == end:
                break
        return target.newest()


async def _compare(source: RowLog, target: RowLog, after: Cursor, horizon: Cursor) -> None:
    """Raise Conflict unless the target's rows are the source's first rows."""
    if after < horizon:
        raise Conflict(
            f"the log to copy to ends at row {after}, and rows up to {horizon} were dropped; begin with an empty one"
        )
    theirs = target.tail(1, _EVERYTHING)
    if not theirs or theirs[0][0] <= horizon:
        return
    place, row = theirs[0]
    kind, names = type(row), [identity(row)]
    if await source.places(kind, names) != [place] or await source.find(kind, names) != [row]:
        raise Conflict(f"row {place} of the log to copy to is not a row of this one; name an empty one")


async def _append(target: RowLog, page: list[tuple[Cursor, Row]]) -> None:
    gap = any(later != earlier + 1 for (earlier, _), (later, _) in pairwise(page))
    newest = await target.append(*(row for _, row in page))
    if gap or newest != page[-1][0]:
        raise Conflict(
            f"row {page[-1][0]} got sequence number {newest}: another process writes to the log that is copied to; stop it"
        )
