"""The rollout worker's own memory: JSON lines, one event each, on disk before what they say is told to anybody."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, cast

from ostinato.core.errors import Corrupt, StorageFull


class EventFile:
    """An append-only file of events. A last line that a kill cut short is dropped; so is nothing else.

    The first line names the file by a random `token`.

    Example::

        file, events = EventFile.open(path)
        file.append({"kind": "told", "n": 3}, sync=True)
    """

    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self.token = token

    @classmethod
    def open(cls, path: Path) -> tuple[EventFile, list[dict[str, Any]]]:
        """The file, made if need be, and what it holds. Raises Corrupt, StorageFull."""
        events, whole = list[dict[str, Any]](), 0
        path.touch(mode=0o644)
        with path.open("r+b") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # cut short by a kill
                    file.truncate(whole)
                    break
                whole += len(line)
                try:
                    events.append(cast("dict[str, Any]", json.loads(line)))
                except ValueError as error:
                    raise Corrupt(f"{path}, line {number} is no event; move the file away to begin anew") from error
        if events:
            return cls(path, str(events[0]["token"])), events[1:]
        made = cls(path, f"w{secrets.token_hex(4)}")
        made.append({"kind": "opened", "token": made.token}, sync=True)
        return made, []

    def append(self, event: dict[str, Any], *, sync: bool = False) -> None:
        """Write one event; `sync`: it outlives the machine's end, too. Raises StorageFull, with nothing written."""
        size = os.fstat(
            self._file.fileno()
        ).st_size  # not where the file stands: an append that failed may have moved that
        data = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError("cut short")
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(size)
            raise StorageFull(f"{self._path} cannot be written: {error}; free some space") from error

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
