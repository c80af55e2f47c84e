"""Launches a run's workers under one supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ostinato.app.branches import branch_config, branch_configs
from ostinato.app.storage import Home, home
from ostinato.config import Config, save
from ostinato.launch.placing.address import bind, remove_address, url_of
from ostinato.launch.placing.heartbeat import LISTEN_FD
from ostinato.launch.placing.process import THREADS, WorkerProcess, own_command
from ostinato.launch.placing.supervision import Board, Event, Supervisor
from ostinato.launch.placing.warm import forked_workers
from ostinato.status.gateway_address import read_address

WORKERS = ("serve", "train", "release", "housekeeping")
HEAD_START_S = 15.0
"""Head start of the serving worker in seconds: on two cores, starting all at once would delay it by a factor of two."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A run's started workers. `url`: the gateway's future URL, empty if that depends on its node; `running`: ends when the workers do;
    `address` returns the gateway's current URL, None while it does not answer.
    """

    home: Home
    url: str
    supervisor: Supervisor
    running: asyncio.Task[None]
    address: Callable[[], str | None]

    async def during(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` and return its result. Raises WorkerFailed if the front (without one: any worker) fails for good first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.running}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self.running  # raises the reason
        finally:
            task.cancel()
        return await task

    def doing(self, worker: str) -> str:
        """Return a worker's current activity in words."""
        watched = next(each for each in self.supervisor.watched if each.worker.name == worker)
        sign = watched.worker.sign
        if not watched.worker.running:
            return f"down: {watched.reason}" if watched.reason else "starting"
        return "starting" if sign is None else sign.doing

    def trouble(self, worker: str) -> str:
        """Return what a worker is retrying, in words; "" if nothing."""
        sign = next(each for each in self.supervisor.watched if each.worker.name == worker).worker.sign
        return "" if sign is None or sign.trouble is None else sign.trouble


def workers_of(config: Config) -> tuple[str, ...]:
    """Return the names of a run's workers; those of tenants' branches are named worker@tenant."""
    own = WORKERS if config.learn.source == "people" else (*WORKERS, "rollout")
    return (*own, *(f"{worker}@{tenant}" for tenant in config.learn.tenants for worker in WORKERS if worker != "serve"))


def crew(config: Config, listener: socket.socket, names: Sequence[str], settings: Path) -> list[WorkerProcess]:
    """Return a run's workers with these names, not yet started. The serving worker listens on `listener`. `settings`: as in `launch`."""
    place = home(config)
    fd = listener.fileno()

    def command(name: str) -> tuple[str, ...]:
        worker, _, tenant = name.partition("@")
        path = home(branch_config(config, tenant)).config if tenant else settings
        return own_command(worker, "--config", str(path))

    return [
        WorkerProcess(
            name,
            command(name),
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
    """Run a run's workers inside the block, and stop them after it. The caller must hold the run's `up` lock.

    `front`: see `Supervisor`; `names`: only these workers; `settings`: the file to which their configuration is written (None: the run's
    own).

    The port is bound first, and stays bound while the serving worker is restarted. Raises BadConfig if it is in use.
    """
    place = home(config)
    settings = settings or place.config
    saved = {settings: config, **{home(each).config: each for each in branch_configs(config)}}

    def save_all() -> None:
        for path, each in saved.items():
            save(each, path)

    with forked_workers(partial(say, "up")), bind(config.listen.host, config.listen.port) as listener:
        workers = crew(config, listener, names or workers_of(config), settings)
        supervisor = Supervisor(workers, config.supervise, say, save_all, front, head_start_s=HEAD_START_S)
        address = partial(read_address, place.address)
        async with supervised(place, supervisor, url_of(listener), address) as launched:
            yield launched


@contextlib.asynccontextmanager
async def supervised(
    place: Home, supervisor: Supervisor, url: str, address: Callable[[], str | None]
) -> AsyncGenerator[Launched]:
    """Run a supervisor's workers inside the block, and stop them after it. Their state is written to the run's status board."""
    remove_address(place.address)  # a killed gateway may have left it
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
