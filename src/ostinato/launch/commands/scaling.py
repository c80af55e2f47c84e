"""`ostinato scale`: sets how many rollout workers a run on Ray should have, in a file that `ostinato up --on ray` reads."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from ostinato.app.storage import home
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadRequest, NotFound
from ostinato.core.private import replace_text
from ostinato.launch.placing.worker_status import STALE_S, placed_from_elsewhere, read_board

MOST = 1000


def scale_rollouts(config: Config, number: int, console: Console) -> None:
    """Record how many rollout workers are wanted. Raises NotFound if the run is not up, BadRequest if it is up without Ray, is up from
    another machine, or learns from people only.
    """
    place = home(config)
    board = read_board(place.workers)
    if board is None or board.ended is not None or wall_clock() - board.at > STALE_S:
        raise NotFound(f"the run in {place.root} is not up; start it with `ostinato up --on ray`")
    if config.learn.source == "people":
        raise BadRequest(
            'learn.source is "people": there are no rollouts; start the run with "worlds" or "both"', field="worker"
        )
    if placed_from_elsewhere(place.workers, place.scale):
        raise BadRequest("`ostinato up` runs on another machine; ask for workers there", field="worker")
    if not place.scale.exists():
        raise BadRequest(
            "the run is up on one machine, which has one rollout worker; `ostinato up --on ray` has several",
            field="worker",
        )
    write_wish(place.scale, number)
    there = sum(worker.name.startswith("rollout") for worker in board.workers)
    console.print(f"rollout workers: {there} now, {number} wanted; `ostinato status` shows them", highlight=False)


def write_wish(path: Path, number: int) -> None:
    """Record how many rollout workers are wanted from now on. Written atomically."""
    replace_text(path, json.dumps({"rollout": number}) + "\n")


def read_wish(path: Path) -> int | None:
    """How many rollout workers are wanted; None if the file is missing or invalid."""
    try:
        number = json.loads(path.read_text())["rollout"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and 0 <= number <= MOST else None
