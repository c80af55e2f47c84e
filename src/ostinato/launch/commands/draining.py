"""`ostinato drain`: one of the engine's servers gets nothing new, so that it can be stopped without ending an answer."""

from __future__ import annotations

from rich.console import Console

from ostinato.app.draining import write_draining
from ostinato.app.storage import home
from ostinato.config import Config


def drain_server(config: Config, url: str, back: bool, console: Console) -> None:
    """Write it down for the gateway of the run, and say what to wait for. Raises BadRequest for a server that the engine does not have."""
    left = write_draining(home(config).draining, config.engine, url, back=back)
    if back:
        console.print(f"{url} is used again", highlight=False)
    else:
        console.print(
            f"{url} gets nothing new within a second or two. Once ostinato_engine_draining_open is 0 at the gateway's /metrics, no answer "
            "is open there: stop it then.",
            highlight=False,
        )
    console.print(f"draining: {', '.join(sorted(left)) or 'none'}", highlight=False)
