"""`ostinato drain`: one of the engine's servers gets no new requests, so that it can be stopped without cutting off an answer."""

from __future__ import annotations

from rich.console import Console

from ostinato.app.draining import write_draining
from ostinato.app.storage import home
from ostinato.config import Config
from ostinato.core.errors import BadRequest
from ostinato.launch.placing.worker_status import placed_from_elsewhere


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
