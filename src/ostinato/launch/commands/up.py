"""`ostinato up`: the workers under one supervisor, from the first check to the last worker's end."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Literal

from rich.console import Console
from rich.text import Text

from ostinato.app.storage import home
from ostinato.config import Config
from ostinato.launch.commands.checks import check_same_model, check_start, network_warning
from ostinato.launch.commands.compute import check_sharing
from ostinato.launch.commands.crew import Launched, launch
from ostinato.launch.placing.heartbeat import SERVING
from ostinato.launch.placing.supervision import Event
from ostinato.launch.workers.shutdown import until_stopped
from ostinato.record.lock import hold
from ostinato.record.restore import sweep_restorations
from ostinato.serve.auth import Keyring, client_keys
from ostinato.serve.quotas import in_force
from ostinato.status.config_warnings import config_warnings
from ostinato.status.progress_lines import last_lines, numerics_line


async def up(config: Config, console: Console, on: Literal["here", "ray"] = "here") -> None:
    """Run until Ctrl-C, SIGTERM or SIGHUP, with the workers on this machine or on the nodes of a Ray cluster.

    Raises Conflict if the run is up already, BadConfig for workers that cannot be placed, WorkerFailed if the serving worker fails for
    good.
    """
    await check_start(config, on_ray=on == "ray")
    check_same_model(config)
    check_sharing(config, on_ray=on == "ray")

    def say(worker: str, what: str) -> None:
        _show(console, Text.assemble((f"{worker:12}", "bold"), " ", what))

    with hold(home(config).root, "up"):
        with contextlib.suppress(OSError):  # housekeeping tries again
            sweep_restorations(home(config).log, math.inf)  # no restoration is going on: it would hold the lock
        if not config.record.url and (words := network_warning(config.run.directory)):
            say("log", words)
        if not config.evaluate.suite:
            say(
                "release",
                "no suite (evaluate.suite): it learns, and nothing ships by itself; `ostinato ship` does it by hand",
            )
        for worker, words in config_warnings(config).items():
            _show(console, Text.assemble((f"{worker:12}", "bold"), " ", (words, "bold yellow")))
        async with _launching(config, say, on) as launched:
            stopping = until_stopped()  # after the launch: Ray sets handlers, too
            if launched.url:
                _show(console, f"reserved {launched.url}; it answers once the model is loaded")
            announcing = asyncio.create_task(_announce(launched, config, console))
            try:
                await launched.during(_set(stopping))
            finally:
                announcing.cancel()


def _launching(
    config: Config, say: Event, on: Literal["here", "ray"]
) -> contextlib.AbstractAsyncContextManager[Launched]:
    if on == "here":
        return launch(config, say, front="serve")
    from ostinato.launch.commands.up_on_ray import launch_on_ray

    return launch_on_ray(config, say)


def _show(console: Console, line: str | Text) -> None:
    """Print one line for people. If it cannot be written, as on a full disk, the workers go on all the same."""
    with contextlib.suppress(OSError):
        console.print(line, highlight=False, soft_wrap=True)


def _limits(config: Config) -> str:
    """What each tenant may take, in words; "" for a server that all who may ask have to themselves."""
    tenants = Keyring(client_keys(config.serve.api_keys, config.serve.api_keys_file)).tenants
    return f"limits: {in_force(config.serve, tenants)}" if len(tenants) > 1 else ""


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _announce(launched: Launched, config: Config, console: Console) -> None:
    """Show what the serving worker does until it can answer, however long that takes, and from then on what it cannot do."""
    troubled, shown, started, url = "", "", asyncio.get_running_loop().time(), None
    with contextlib.suppress(OSError), console.status("starting") as status:
        while (url := launched.address()) is None or not launched.doing("serve").startswith(SERVING):
            doing = launched.doing("serve")
            waited = asyncio.get_running_loop().time() - started
            status.update(f"serve: {doing} ({waited:.0f} s)")
            if doing != shown and not console.is_terminal:
                _show(console, Text.assemble((f"{'serve':12}", "bold"), " ", doing))
            shown = doing
            troubled = _show_trouble(launched, console, troubled)
            await asyncio.sleep(0.2)
    if url is not None:
        _show(console, f"\nserving [bold]{url}/v1[/]  model [bold]{config.model.served_as}[/]  (Ctrl-C stops)")
        page = f"; so does the page at [bold]{url}/[/]" if config.serve.page else ""
        _show(console, f"`ostinato status`, with the same options, says how it learns{page}\n")
        if words := _limits(config):
            _show(console, Text.assemble((f"{'serve':12}", "bold"), " ", words))
        if words := numerics_line(last_lines(launched.home.progress("serve"))):
            _show(console, Text.assemble((f"{'serve':12}", "bold"), " ", (words, "yellow")))
    while True:
        troubled = _show_trouble(launched, console, troubled)
        await asyncio.sleep(1.0)


def _show_trouble(launched: Launched, console: Console, known: str) -> str:
    """Show what the serving worker cannot do, unless that is known. Returns it."""
    trouble = launched.trouble("serve")
    if trouble and trouble != known:
        _show(console, Text.assemble((f"{'serve':12}", "bold"), " ", (trouble, "red")))
    return trouble
