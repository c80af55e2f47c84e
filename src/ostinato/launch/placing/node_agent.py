"""The keeper of one worker on a node: puts the run's files in place, starts the worker as a subprocess, and relays its signs of life."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ostinato import __version__
from ostinato.app.storage import Home
from ostinato.config import write_private
from ostinato.core.errors import BadConfig
from ostinato.core.files import write_atomic
from ostinato.launch.placing.address import reachable, write_address
from ostinato.launch.placing.process import THREADS, WorkerProcess, own_command
from ostinato.status.gateway_address import read_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a node needs to start a worker. `command`: the CLI command; `settings`: the configuration as JSON, with the secrets that this
    worker needs; `home`: the run's directory on the node; `admin_key`: the run's own, empty for a worker that does not need it; `cwd`: the
    base of relative paths, if the node has it; `version`: the version of Ostinato, the same on all nodes.

    Example: ``Order(name="rollout-2", command="rollout", settings="{}", home="/runs/a/rollout-2", admin_key="...", cwd="/srv")``
    """

    name: str
    command: str
    settings: str
    home: str
    admin_key: str
    cwd: str
    version: str = __version__

    def plain(self) -> dict[str, str]:
        """The order as a plain dict, to be sent."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteState:
    """A worker's state. `line`: its last sign, as sent; `silent_s`: seconds since that sign, or since its start; `ready`: it has been ready
    since this start; `code`: its exit code, None while it runs; `url`: where it answers, if it is the run's gateway.

    Example: ``RemoteState(line=None, silent_s=0.1, ready=False, code=None, last_line="", url=None)``
    """

    line: str | None
    silent_s: float
    ready: bool
    code: int | None
    last_line: str
    url: str | None


class Keeper(Protocol):
    """The node's side of one worker. The supervisor calls it across machines, so all values are plain."""

    async def here(self) -> str:
        """The node's address."""
        ...

    async def start(self, order: dict[str, str]) -> int:
        """Start the worker; returns its pid. Raises OSError, StorageFull, and BadConfig if the node has another version of Ostinato."""
        ...

    async def look(self) -> dict[str, Any]:
        """A `RemoteState`."""
        ...

    async def tell(self, url: str) -> None:
        """Tell a worker that calls the run's gateway at which URL it answers. Raises OSError."""
        ...

    async def put(self, name: str, text: str) -> None:
        """Write a file of the run that comes from the machine of `ostinato up` and that the gateway reads. Raises OSError."""
        ...

    async def stop(self, grace_s: float) -> bool:
        """As `Worker.stop`."""
        ...

    async def kill(self) -> None:
        """As `Worker.kill`."""
        ...


class NodeKeeper:
    """A `Keeper` that runs the worker as its own subprocess, which dies with it. `host`: this node's address."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._worker: WorkerProcess | None = None
        self._ending: asyncio.Future[int] | None = None
        self._home = Home(Path())
        self._serves: str | None = None
        self._told: str | None = None

    async def here(self) -> str:
        return self._host

    async def start(self, order: dict[str, str]) -> int:
        if (version := order.get("version")) != __version__:  # checked before anything else in the order is used
            raise BadConfig(
                f"{self._host} has ostinato {__version__}, `ostinato up` is {version}: install one version on all nodes"
            )
        wanted = Order(**order)
        self._home = Home(Path(wanted.home))
        self._home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if wanted.admin_key:
            write_private(self._home.root / "admin.key", wanted.admin_key)
        settings = self._home.config
        if wanted.command != "serve":  # workers that share a directory have different secrets
            settings = settings.with_name(f"config-{wanted.name}.json")
        write_private(settings, wanted.settings)
        here = Path(wanted.cwd)
        self._worker = WorkerProcess(
            wanted.name,
            own_command(wanted.command, "--config", str(settings)),
            self._home.worker_log(wanted.command),
            env=THREADS,
            directory=here if here.is_dir() else None,
        )
        await self._worker.start()
        self._ending = asyncio.ensure_future(self._worker.ended())
        return self._worker.pid

    async def look(self) -> dict[str, Any]:
        worker, ending = self._started()
        if self._serves is None:  # once read it is kept, whatever other processes write there
            self._serves = read_address(self._home.address, worker.pid)
        if self._told is not None and read_address(self._home.address) is None:  # the process that wrote it is gone
            with contextlib.suppress(OSError):
                write_address(self._home.address, self._told)
        code = ending.result() if ending.done() else None
        sign = worker.sign
        return asdict(
            RemoteState(
                line=None if sign is None else sign.line().decode(),
                silent_s=asyncio.get_running_loop().time() - worker.heard,
                ready=worker.was_ready,
                code=code,
                last_line=worker.last_line() if code is not None else "",
                url=self._serves,
            )
        )

    async def tell(self, url: str) -> None:
        self._told = url
        known = read_address(self._home.address)
        if known is None or reachable(known, self._host) != url:
            # a file that already has this URL may be the gateway's own, which is valid for the gateway's life and not for this keeper's
            write_address(self._home.address, url)

    async def put(self, name: str, text: str) -> None:
        if name not in (self._home.workers.name, self._home.draining.name):
            raise ValueError(f"{name} is no file that the gateway reads")
        write_atomic(self._home.root / name, text, durable=False)

    async def stop(self, grace_s: float) -> bool:
        return await self._started()[0].stop(grace_s)

    async def kill(self) -> None:
        await self._started()[0].kill()

    def _started(self) -> tuple[WorkerProcess, asyncio.Future[int]]:
        if self._worker is None or self._ending is None:
            raise RuntimeError("the worker was not started")
        return self._worker, self._ending
