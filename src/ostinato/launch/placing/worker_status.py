"""The supervisor's report on its workers, as a file for `ostinato status`. Written atomically; ignored once stale."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ostinato.core.clock import wall_clock
from ostinato.core.files import write_atomic
from ostinato.launch.placing.supervision import Watched

EVERY_S = 2.0
STALE_S = 15.0
"""A board older than this was left by a supervisor that was killed or that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker's state. Times are Unix seconds: `since` is when it entered its `condition`, `doing_since` when it began what it is doing,
    `reason_at` when it last ended. `node`: the machine that it runs on; empty for the supervisor's.

    Example: ``WorkerStatus(name="train", pid=711, condition="running", since=10.0, doing="taking step 12", doing_since=12.5,
    trouble=None, restarts=1, reason="was killed by SIGKILL", reason_at=9.0)``
    """

    name: str
    pid: int
    condition: str
    since: float
    doing: str
    doing_since: float
    trouble: str | None
    restarts: int
    reason: str | None
    reason_at: float | None
    node: str = ""

    @classmethod
    def of(cls, watched: Watched, now: float) -> WorkerStatus:
        """The present state of a watched worker."""
        sign = watched.worker.sign
        return cls(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A board as read from its file. `ended`: why `up` ended, None while it runs; `at`: when it was written."""

    at: float
    pid: int
    ended: str | None
    workers: tuple[WorkerStatus, ...]


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
    workers = [asdict(WorkerStatus.of(watched, now)) for watched in crew]
    shown: dict[str, Any] = {"at": now, "pid": os.getpid(), "ended": ended, "workers": workers}
    return json.dumps(shown, indent=1)


def read_board(path: Path) -> Shown | None:
    """The last board; None if there is none or it is damaged."""
    try:
        found = json.loads(path.read_text(errors="replace"))
        workers = tuple(WorkerStatus(**each) for each in found["workers"])
        return Shown(at=float(found["at"]), pid=int(found["pid"]), ended=found["ended"], workers=workers)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def placed_from_elsewhere(board: Path, scale: Path) -> bool:
    """True on a node of a run whose `ostinato up --on ray` is on another machine: the board was copied here, but not the `scale` file."""
    shown = read_board(board)
    if shown is None or shown.ended is not None or wall_clock() - shown.at > STALE_S:
        return False
    return any(worker.node for worker in shown.workers) and not scale.exists()
