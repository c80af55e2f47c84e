"""The workers' status board: the supervisor's report on its workers, written atomically to a file for `ostinato status`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ostinato.core.clock import wall_clock
from ostinato.core.files import write_atomic
from ostinato.launch.placing.supervision import Watched
from ostinato.status.worker_status import WorkerStatus

EVERY_S = 2.0


class Board:
    """Writes the board of one crew."""

    def __init__(self, path: Path, crew: Sequence[Watched]) -> None:
        self._path, self._crew = path, crew

    async def keep(self) -> None:
        """Write it every `EVERY_S` seconds until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(EVERY_S)

    def write(self, ended: str | None = None) -> None:
        """Write the present state. If the disk is full only the board is lost."""
        with contextlib.suppress(OSError):
            write_atomic(self._path, board_text(self._crew, ended), durable=False)


def board_text(crew: Sequence[Watched], ended: str | None = None) -> str:
    """The present state as the text of the board's file."""
    now = wall_clock()
    workers = [asdict(_status(watched, now)) for watched in crew]
    shown: dict[str, Any] = {"at": now, "pid": os.getpid(), "ended": ended, "workers": workers}
    return json.dumps(shown, indent=1)


def _status(watched: Watched, now: float) -> WorkerStatus:
    """The present state of a watched worker."""
    sign = watched.worker.sign
    return WorkerStatus(
        name=watched.worker.name,
        pid=watched.worker.pid,
        condition=watched.condition.value,
        since=watched.since,
        doing="" if sign is None else sign.doing,
        doing_since=now if sign is None else now - sign.for_s,
        trouble=None if sign is None else sign.trouble,
        restarts=watched.restarts,
        reason=watched.reason,
        reason_at=watched.reason_at,
        node=watched.worker.node,
    )
