"""The rollout worker's journal: JSON lines, one event each, on disk before they are reported. It stays short however long the run is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from ostinato.core.errors import Corrupt, StorageFull
from ostinato.core.private import private

logger = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""A file beyond this is rewritten with what is still needed. The run's page reads a file that is new to it whole up to eight times this."""
# it must also be this many times its size at the last rewrite: a large state is not written again and again
TIMES_NEEDED = 4


class EventFile:
    """An append-only file of events. Only a last line that a kill cut short is ever dropped.

    The first line names the file by a random `token`; after a rewrite it also holds the number of lines that were written, and their hash.

    Args:
        path: the file.
        token: its name.
        most_bytes: the size beyond which it is `grown`.

    Example::

        file, events = EventFile.open(path)
        file.append({"kind": "told", "n": 3}, sync=True)
        if file.grown:
            file.rewrite(groups.events())
    """

    def __init__(self, path: Path, token: str, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most, self._rewrite_at = path, most_bytes, most_bytes
        self._file = _appending(path)
        self.token = token

    @classmethod
    def open(cls, path: Path, most_bytes: int = MOST_BYTES) -> tuple[EventFile, list[dict[str, Any]]]:
        """Open the file, or create it. Returns it and its events. Raises Corrupt, StorageFull."""
        path.touch(mode=0o600)
        _beside(path).unlink(missing_ok=True)  # left behind by a kill
        with path.open("r+b") as file:
            events, whole = _read(path, file)
            file.truncate(whole)
        if events:
            return cls(path, str(events[0]["token"]), most_bytes), events[1:]
        made = cls(path, f"w{secrets.token_hex(4)}", most_bytes)
        made.append({"kind": "opened", "token": made.token}, sync=True)
        return made, []

    @property
    def grown(self) -> bool:
        """True if it should be rewritten."""
        return os.fstat(self._file.fileno()).st_size > self._rewrite_at

    def append(self, event: Mapping[str, Any], *, sync: bool = False) -> None:
        """Write one event; with `sync`, it also survives a crash of the machine. Raises StorageFull, with nothing written."""
        size = os.fstat(self._file.fileno()).st_size  # not the file's position, which a failed append may have moved
        data = _line(event)
        try:
            if self._file.write(data) != len(data):
                raise OSError("cut short")
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(size)
            raise StorageFull(f"{self._path} cannot be written: {error}; free some space") from error

    def rewrite(self, events: Iterable[Mapping[str, Any]]) -> bool:
        """Replace the file's events by these, atomically. False, with a warning, if there is no room: the old file stays in use, and is
        `grown` again once it is larger by `most_bytes`.

        Raises StorageFull if the file was replaced, but may not survive a crash of the machine.
        """
        lines = b"".join(map(_line, events))
        first = {"kind": "opened", "token": self.token, "lines": lines.count(b"\n"), "hash": _hash(lines)}
        data, new = _line(first) + lines, _beside(self._path)
        try:
            made = _written(new, data)
            try:
                os.replace(new, self._path)
            except OSError:
                made.close()
                raise
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            self._rewrite_at = os.fstat(self._file.fileno()).st_size + self._most
            logger.warning("%s could not be written anew and grows on: %s; free some space", self._path, error)
            return False
        self._file.close()
        self._file, self._rewrite_at = made, max(self._most, TIMES_NEEDED * len(data))
        try:
            _sync_directory(self._path.parent)
        except OSError as error:
            raise StorageFull(f"{self._path.parent} cannot be written: {error}; see to the disk") from error
        return True

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _appending(path: Path) -> FileIO:
    return FileIO(path, "a", opener=private)


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def _hash(lines: bytes) -> str:
    return hashlib.blake2b(lines, digest_size=16).hexdigest()


def _written(path: Path, data: bytes) -> FileIO:
    """A new file that holds this, synced to disk and open for appending. Raises OSError, with nothing left open."""
    path.unlink(missing_ok=True)
    file = _appending(path)
    try:
        if file.write(data) != len(data):
            raise OSError("cut short")
        os.fsync(file.fileno())
    except OSError:
        file.close()
        raise
    return file


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, file: BinaryIO) -> tuple[list[dict[str, Any]], int]:
    """The events of the complete lines, and the offset at which they end. Raises Corrupt."""
    events, whole, begun, digest = list[dict[str, Any]](), 0, 0, hashlib.blake2b(digest_size=16)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):  # cut short by a kill
            break
        whole += len(line)
        try:
            events.append(cast("dict[str, Any]", json.loads(line)))
        except ValueError as error:
            raise Corrupt(f"{path}, line {number} is no event; move the file away to begin anew") from error
        if number == 1:
            begun = int(events[0].get("lines", 0))
        elif number <= 1 + begun:
            digest.update(line)
    if begun and (len(events) <= begun or digest.hexdigest() != events[0].get("hash")):
        raise Corrupt(f"{path}: its first {begun} events are not what was written; move the file away to begin anew")
    return events, whole
