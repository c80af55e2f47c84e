"""`ostinato up`: the workers under one supervisor, from the first check to the last worker's end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.text import Text

from ostinato.app.storage import Home, home
from ostinato.config import Config, save
from ostinato.launch.commands.checks import check_same_model, check_start, network_warning
from ostinato.launch.commands.computing.sharing import check_sharing
from ostinato.launch.placing.address import read_address, remove_address
from ostinato.launch.placing.heartbeat import LISTEN_FD, SERVING
from ostinato.launch.placing.port import bind, url_of
from ostinato.launch.placing.process import THREADS, WorkerProcess, own_command
from ostinato.launch.placing.restart_policy import SupervisorLimits
from ostinato.launch.placing.supervision import Event, Supervisor
from ostinato.launch.placing.worker_status import Board
from ostinato.launch.views.progress import last_lines, numerics_line
from ostinato.launch.views.tenants import unproven_users
from ostinato.launch.workers.stopping import until_stopped
from ostinato.record.lock import hold
from ostinato.record.restore import sweep_restorations
from ostinato.serve.auth import Keyring, client_keys
from ostinato.serve.quotas import in_force

WORKERS = ("serve", "train", "release", "housekeeping")
HEAD_START_S = 15.0
"""Of the serving worker before the others: on two cores they would start twice as slowly side by side."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A running crew. `url` is where the gateway will answer, empty if that depends on its node; `running` ends when the crew does;
    `address` returns where the gateway answers now, None while it does not.
    """

    home: Home
    url: str
    supervisor: Supervisor
    running: asyncio.Task[None]
    address: Callable[[], str | None]

    async def during(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` and return its result. Raises WorkerFailed if the front, or without one any worker, fails for good first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.running}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self.running  # raises why it ended
        finally:
            task.cancel()
        return await task

    def doing(self, worker: str) -> str:
        """What a worker does now, in words."""
        watched = next(each for each in self.supervisor.watched if each.worker.name == worker)
        sign = watched.worker.sign
        if not watched.worker.running:
            return f"down: {watched.reason}" if watched.reason else "starting"
        return "starting" if sign is None else sign.doing

    def trouble(self, worker: str) -> str:
        """What a worker is retrying, in words; "" if nothing."""
        sign = next(each for each in self.supervisor.watched if each.worker.name == worker).worker.sign
        return "" if sign is None or sign.trouble is None else sign.trouble


def workers_of(config: Config) -> tuple[str, ...]:
    """The names of a run's workers."""
    return WORKERS if config.learn.source == "people" else (*WORKERS, "rollout")


def crew(
    config: Config, listener: socket.socket, names: Sequence[str], settings: Path | None = None
) -> list[WorkerProcess]:
    """The workers of a run with these names, not started yet. The serving worker answers on `listener`. `settings`: as for `launch`."""
    place = home(config)
    fd = listener.fileno()
    return [
        WorkerProcess(
            name,
            own_command(name, "--config", str(settings or place.config)),
            place.worker_log(name),
            env=THREADS | ({LISTEN_FD: str(fd)} if name == "serve" else {}),
            fds=(fd,) if name == "serve" else (),
        )
        for name in names
    ]


@contextlib.asynccontextmanager
async def launch(
    config: Config,
    say: Event,
    *,
    front: str | None = None,
    names: Sequence[str] | None = None,
    settings: Path | None = None,
) -> AsyncGenerator[Launched]:
    """A run's workers, alive inside the block and stopped after it. The caller must hold the run's `up` lock. `front`: see `Supervisor`.
    `names`: only these workers. `settings`: the file to which their configuration is written; None: the run's own.

    The port is bound first, and stays bound while the worker that answers on it is restarted. Raises BadConfig if it is taken.
    """
    place = home(config)
    settings = settings or place.config
    with bind(config.listen.host, config.listen.port) as listener:
        workers = crew(config, listener, names or workers_of(config), settings)
        supervisor = Supervisor(
            workers, limits_of(config), say, lambda: save(config, settings), front, head_start_s=HEAD_START_S
        )
        address = partial(read_address, place.address)
        async with supervised(place, supervisor, url_of(listener), address) as launched:
            yield launched


def limits_of(config: Config) -> SupervisorLimits:
    """The supervisor's timeouts and retry limits for this run."""
    patience = config.supervise
    return SupervisorLimits(
        silence_s=patience.silence_s,
        stop_s=patience.stop_s,
        tries=patience.tries,
        window_s=patience.window_s,
        longest_wait_s=patience.longest_wait_s,
    )


@contextlib.asynccontextmanager
async def supervised(
    place: Home, supervisor: Supervisor, url: str, address: Callable[[], str | None]
) -> AsyncGenerator[Launched]:
    """A supervisor's crew, alive inside the block and stopped after it. Its state is written to the run's board."""
    remove_address(place.address)  # of an earlier start that was killed
    place.scale.unlink(missing_ok=True)
    place.admin_key()
    board = Board(place.workers, supervisor.watched)
    running = asyncio.create_task(supervisor.run())
    writing = asyncio.create_task(board.keep())
    try:
        yield Launched(home=place, url=url, supervisor=supervisor, running=running, address=address)
    finally:
        supervisor.stop()
        (end,) = await asyncio.gather(running, return_exceptions=True)
        writing.cancel()
        board.write(str(end) if isinstance(end, BaseException) else "stopped")
        remove_address(place.address)


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
        if words := unproven_users(config):
            _show(console, Text.assemble((f"{'train':12}", "bold"), " ", (words, "bold yellow")))
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
