"""The taskset file for the page: a list of its tasks, and one task in full. Hidden parts go only to viewers who may see them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ostinato.core.errors import BadConfig
from ostinato.launch.views.page.worlds.transcript import part_of
from ostinato.web.page.worlds.sources import HiddenPart, SaidPart, TaskFacts
from ostinato.worlds.tasks.rows import EncodedBytes, MessageRow, TaskRow, parse_row

MOST_BYTES = 128 << 20
"""The largest file that is read for the page; the worker reads larger ones, too."""
WAIT_S = 0.3
_MOST_FILES = 200
_MOST_MESSAGES = 50
_HIDDEN_FILES = 20


@dataclass(frozen=True, slots=True)
class KnownTask:
    """A task's short facts, and where its line begins in the file."""

    family: str
    split: str
    harness: str
    grader: str
    at: int


class TasksetFile:
    """Reads the file on a thread of its own whenever it has changed. Call `look` first.

    Args:
        path: the file, None if none is named.
        wait_s: how long one look waits for the reading; a large file is ready at a later look.
    """

    def __init__(self, path: Path | None, wait_s: float = WAIT_S) -> None:
        self._path, self._wait_s = path, wait_s
        self._seen: tuple[int, int] | None = None
        self._reader: threading.Thread | None = None
        self.tasks: Mapping[str, KnownTask] = {}
        self.trouble = "worlds.file names no taskset" if path is None else "it is being read"
        self.revision = 0

    def look(self) -> TasksetFile:
        """Begin to read a file that changed. Until that is done, the previous tasks are kept."""
        if self._path is None:
            return self
        if self._reader is None or not self._reader.is_alive():
            try:
                found = self._path.stat()
                seen = (found.st_mtime_ns, found.st_size)
            except OSError as error:
                self._settle({}, f"{self._path} cannot be read: {error.strerror}")
                self._seen = None
                return self
            if seen != self._seen:
                self._seen = seen
                self._reader = threading.Thread(target=self._read, args=(self._path, seen[1]), daemon=True)
                self._reader.start()
        if self._reader is not None:
            self._reader.join(self._wait_s)
        return self

    def task(self, id: str, *, hidden: bool) -> TaskFacts | None:
        """One task; None if it is not there."""
        known = self.tasks.get(id)
        if known is None or self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(known.at)
                row = parse_row("taskset", file.readline().decode())
        except (OSError, UnicodeDecodeError, BadConfig):
            return None  # the file is being rewritten
        return _facts(row, hidden=hidden) if row.id == id else None

    def _read(self, path: Path, size: int) -> None:
        if size > MOST_BYTES:
            self._settle({}, f"{path} has {size >> 20} MiB; the page reads taskset files of {MOST_BYTES >> 20} MiB")
            return
        found: dict[str, KnownTask] = {}
        at = number = 0
        try:
            with path.open("rb") as file:
                for line in file:
                    number += 1
                    if line.strip():
                        row = parse_row(f"{path.name}, line {number}", line.decode())
                        found[row.id] = KnownTask(row.family, row.split.value, row.harness, row.grading.grader, at)
                    at += len(line)
        except (OSError, UnicodeDecodeError, BadConfig) as error:
            self._settle({}, str(error)[:300])
            return
        self._settle(found, "")

    def _settle(self, tasks: Mapping[str, KnownTask], trouble: str) -> None:
        if (self.tasks, self.trouble) != (tasks, trouble):
            self.tasks, self.trouble = tasks, trouble
            self.revision += 1


def _facts(row: TaskRow, *, hidden: bool) -> TaskFacts:
    paths = sorted(row.world.files)
    return TaskFacts(
        id=row.id,
        family=row.family,
        split=row.split.value,
        harness=row.harness,
        grader=row.grading.grader,
        turns=row.turns,
        tokens=row.tokens,
        timeout_s=row.timeout_s,
        messages=tuple(map(_message, row.messages[:_MOST_MESSAGES])),
        files=tuple(paths[:_MOST_FILES]),
        more_files=max(0, len(paths) - _MOST_FILES),
        layers=row.world.layers,
        hosts=row.world.hosts,
        about={name[:80]: text[:500] for name, text in row.about.items()},
        hidden_files=len(row.grading.hidden),
        hidden_facts=len(row.grading.data),
        hidden=_hidden(row) if hidden else None,
    )


def _message(row: MessageRow) -> SaidPart:
    calls = "".join(f"\n{call.name}({call.arguments})" for call in row.calls)
    return part_of(row.role.value, row.content + calls)


def _hidden(row: TaskRow) -> HiddenPart:
    files = list(row.grading.hidden.items())[:_HIDDEN_FILES]
    data = {name: part_of("", _written(value)).text for name, value in list(row.grading.data.items())[:50]}
    return HiddenPart(
        data=data,
        files=tuple(
            (path, part_of("", "(not text)" if isinstance(text, EncodedBytes) else text)) for path, text in files
        ),
    )


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
