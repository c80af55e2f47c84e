"""`ostinato scale`: how many rollout workers a run on Ray should have, in a file that `ostinato up --on ray` reads.

`ostinato drain`: one of the engine's servers gets no new requests, so that it can be stopped without cutting off an answer.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from ostinato.app.server_loans import write_draining
from ostinato.app.storage import home
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadRequest, NotFound
from ostinato.core.files import write_atomic
from ostinato.status.worker_status import placed_from_elsewhere, read_board

MOST = 1000


def scale_rollouts(config: Config, number: int, console: Console) -> None:
    """Record how many rollout workers are wanted. Raises NotFound if the run is not up, BadRequest if it is up without Ray, is up from
    another machine, or learns from people only.
    """
    place = home(config)
    board = read_board(place.workers)
    if board is None or not board.alive(wall_clock()):
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
    write_atomic(path, json.dumps({"rollout": number}) + "\n", durable=True)


def read_wish(path: Path) -> int | None:
    """How many rollout workers are wanted; None if the file is missing or invalid."""
    try:
        number = json.loads(path.read_text())["rollout"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and 0 <= number <= MOST else None


# ---------------------------------------------------------------- draining


def drain_server(config: Config, url: str, back: bool, console: Console) -> None:
    """Record for the run's gateway that a server drains, or with `back` that it is used again, and print what to wait for.

    Raises BadRequest for a server that the engine does not have, or on a node that `ostinato up` on another machine tells what drains.
    """
    place = home(config)
    if placed_from_elsewhere(place.workers, place.scale):
        raise BadRequest(
            "`ostinato up` runs on another machine and tells this one what drains; drain it there", field="url"
        )
    left = write_draining(place.draining, config.engine, url, back=back)
    if back:
        console.print(f"{url} is used again", highlight=False)
    else:
        console.print(
            f"{url} gets nothing new within a few seconds. Once the gateway's /metrics counts it in ostinato_engine_servers_draining and "
            "ostinato_engine_draining_open is 0, no answer of that gateway is open there. Where several hosts have an `ostinato up`, "
            "drain it on each and look at each gateway; then stop it.",
            highlight=False,
        )
    console.print(f"draining: {', '.join(sorted(left)) or 'none'}", highlight=False)
