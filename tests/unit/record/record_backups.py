"""Backups and restorations of a run's log, as tests make them, and a kill at any point of a restoration."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from record_rows import collect

from ostinato.core.records import Row
from ostinato.record.backup import KEYS, BackupManifest, back_up
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.restore import restore
from ostinato.record.segment_directory import LogDirectory

SMALL = RecordConfig(segment_rows=7, retain_days=1.0)


def saved(run: Path, target: Path, on_bytes: Callable[[int, int], object] = lambda done, total: None) -> BackupManifest:
    return back_up(LogDirectory(run / "log"), run / KEYS, target, "0.0.0", lambda: 5.0, on_bytes)


def put_back(
    source: Path,
    run: Path,
    *others: Path,
    master: Path | None = None,
    on_bytes: Any = lambda done, total: None,
    old_master: Path | None = None,
) -> tuple[BackupManifest, int]:
    run.mkdir(exist_ok=True)
    return restore(source, LogDirectory(run / "log"), run / KEYS, others, master, on_bytes, old_master=old_master)


@contextmanager
def opened(run: Path, config: RecordConfig = SMALL) -> Iterator[SqlLog]:
    with SqlLog.open(run / "log", lambda: 1.0, config) as log:
        yield log


async def rows_of(run: Path, config: RecordConfig = SMALL) -> list[tuple[int, Row]]:
    with opened(run, config) as log:
        return await collect(log)


class Killed(BaseException):
    """Stands for kill -9."""


def killed_at(point: int, kept: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    calls = 0

    def dying(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > point:  # nothing that would clean up works any more
                raise Killed
            return act(*args, **named)

        return call

    with monkeypatch.context() as patched:
        for place, name in ((os, "open"), (os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
            patched.setattr(place, name, dying(getattr(place, name)))
        with suppress(Killed):
            put_back(kept, new)
            return False
    return True
