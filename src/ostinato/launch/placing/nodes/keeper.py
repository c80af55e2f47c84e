"""What runs on a node for one worker: it puts the run's files in place, starts the worker as a subprocess, and passes on what it says."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ostinato.app.storage import Home
from ostinato.config import write_private
from ostinato.launch.placing.address import read_address, write_address
from ostinato.launch.placing.process import THREADS, WorkerProcess, own_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a node is told about a worker. `command`: of the CLI; `settings`: the configuration as JSON, secrets included; `home`: the run's
    directory on the node; `admin_key`: the run's own; `cwd`: where relative paths begin, if the node has it.

    Example: ``Order(name="rollout-2", command="rollout", settings="{}", home="/runs/a/rollout-2", admin_key="...", cwd="/srv")``
    """

    name: str
    command: str
    settings: str
    home: str
    admin_key: str
    cwd: str

    def plain(self) -> dict[str, str]:
        """As sent."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a worker stands. `line`: its last sign, as it sent it; `silent_s`: since then, or since its start; `ready`: it has been, in this
    life; `code`: how it ended; `url`: where the run's gateway answers, as the node knows.

    Example: ``Look(line=None, silent_s=0.1, ready=False, code=None, last_line="", url=None)``
    """

    line: str | None
    silent_s: float
    ready: bool
    code: int | None
    last_line: str
    url: str | None


class Keeper(Protocol):
    """A node's side of one worker, as the supervisor's side calls it: across machines, in plain values."""

    async def start(self, order: dict[str, str]) -> tuple[int, str]:
        """Start the worker; returns its pid and the node's address. Raises OSError, StorageFull."""
        ...

    async def look(self) -> dict[str, Any]:
        """A `Look`."""
        ...

    async def tell(self, url: str) -> None:
        """Where the run's gateway answers, for a worker that asks it."""
        ...

    async def stop(self, grace_s: float) -> bool:
        """As `Worker.stop`."""
        ...

    async def kill(self) -> None:
        """As `Worker.kill`."""
        ...


class NodeKeeper:
    """A `Keeper` that starts a subprocess of its own; the process dies with it. `host`: this node's address."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._worker: WorkerProcess | None = None
        self._ending: asyncio.Future[int] | None = None
        self._home = Home(Path())

    async def start(self, order: dict[str, str]) -> tuple[int, str]:
        wanted = Order(**order)
        self._home = Home(Path(wanted.home))
        self._home.root.mkdir(parents=True, exist_ok=True)
        write_private(self._home.root / "admin.key", wanted.admin_key)
        write_private(self._home.config, wanted.settings)
        here = Path(wanted.cwd)
        self._worker = WorkerProcess(
            wanted.name,
            own_command(wanted.command, "--config", str(self._home.config)),
            self._home.worker_log(wanted.command),
            env=THREADS,
            directory=here if here.is_dir() else None,
        )
        await self._worker.start()
        self._ending = asyncio.ensure_future(self._worker.ended())
        return self._worker.pid, self._host

    async def look(self) -> dict[str, Any]:
        worker, ending = self._started()
        code = ending.result() if ending.done() else None
        sign = worker.sign
        return asdict(
            Look(
                line=None if sign is None else sign.line().decode(),
                silent_s=asyncio.get_running_loop().time() - worker.heard,
                ready=worker.was_ready,
                code=code,
                last_line=worker.last_line() if code is not None else "",
                url=read_address(self._home.address),
            )
        )

    async def tell(self, url: str) -> None:
        if read_address(self._home.address) != url:
            write_address(self._home.address, url)

    async def stop(self, grace_s: float) -> bool:
        return await self._started()[0].stop(grace_s)

    async def kill(self) -> None:
        await self._started()[0].kill()

    def _started(self) -> tuple[WorkerProcess, asyncio.Future[int]]:
        if self._worker is None or self._ending is None:
            raise RuntimeError("the worker was not started")
        return self._worker, self._ending
