"""`ostinato up`: the three workers under one supervisor."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

from rich.console import Console

from ostinato.app.storage import home, open_run
from ostinato.config import Config, save
from ostinato.launch.placing.local import WorkerProcess, own_command, supervise
from ostinato.launch.workers.prepare import prepare

WORKERS = ("serve", "train", "release")


def workers(config: Config, names: tuple[str, ...] = WORKERS) -> list[WorkerProcess]:
    """The workers of a run, started with its resolved configuration."""
    place = home(config)
    if config.listen.port == 0:  # fixed now, so that a gateway that starts again is found where it was
        config = config.model_copy(
            update={"listen": config.listen.model_copy(update={"port": free_port(config.listen.host)})}
        )
    save(config, place.config)
    place.address.unlink(missing_ok=True)  # of an earlier start: nobody must talk to a port that is gone
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return [
        WorkerProcess(name, own_command(name, "--config", str(place.config)), place.worker_log(name), env=threads)
        for name in names
    ]


def free_port(host: str) -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


async def address(path: Path, timeout_s: float = 120.0) -> str:
    """The gateway's URL, as soon as it has written it. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not path.exists():
            await asyncio.sleep(0.1)
    return path.read_text().strip()


async def up(config: Config, console: Console) -> None:
    """Run until Ctrl-C."""
    with console.status("preparing the model and the weight store") as status, open_run(config) as run:
        await prepare(run, status.update)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)

    def say(worker: str, what: str) -> None:
        console.print(f"[bold]{worker:8}[/] {what}", highlight=False)

    async def announce() -> None:
        url = await address(home(config).address)
        console.print(
            f"\nserving [bold]{url}/v1[/]  model [bold]{config.model.served_as}[/]  (Ctrl-C stops)\n", highlight=False
        )

    async with asyncio.TaskGroup() as group:
        announcing = group.create_task(announce())
        await supervise(workers(config), stopping, say)
        announcing.cancel()
