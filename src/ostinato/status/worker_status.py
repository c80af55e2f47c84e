"""The workers' status, read from the board file that the supervisor writes. A stale board is ignored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ostinato.core.clock import wall_clock

STALE_S = 15.0
"""A board older than this was left by a supervisor that was killed or hangs; one that far in the future, before the clock was set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker's state. Times are Unix seconds: `since` is when it entered its `condition`, `doing_since` when it began its activity,
    `reason_at` when it last ended. `node`: the machine on which it runs; "" for the supervisor's.
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

    @property
    def activity(self) -> str:
        """What the worker is doing; "" unless it is running."""
        return (self.doing or "starting") if self.condition == "running" else ""

    @property
    def activity_since(self) -> float:
        """When the worker began its activity or, if it is not running, entered its condition."""
        return self.doing_since if self.condition == "running" else self.since


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBoard:
    """The content of the board file. `ended`: why `up` ended; None while it runs. `at`: when the board was written."""

    at: float
    pid: int
    ended: str | None
    workers: tuple[WorkerStatus, ...]

    def alive(self, now: float) -> bool:
        """Return True if the supervisor is running: it has not ended, was not killed and does not hang."""
        return self.ended is None and abs(now - self.at) <= STALE_S


def read_board(path: Path) -> WorkerBoard | None:
    """Return the last board; None if there is none or it is damaged."""
    try:
        found = json.loads(path.read_text(errors="replace"))
        workers = tuple(WorkerStatus(**each) for each in found["workers"])
        return WorkerBoard(at=float(found["at"]), pid=int(found["pid"]), ended=found["ended"], workers=workers)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def placed_from_elsewhere(board: Path, scale: Path) -> bool:
    """Return True on a node of a run whose `up --on ray` is on another machine: the board was copied here, but not the `scale` file."""
    shown = read_board(board)
    if shown is None or not shown.alive(wall_clock()):
        return False
    return any(worker.node for worker in shown.workers) and not scale.exists()
