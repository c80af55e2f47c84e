"""Workers as local subprocesses: started, watched, started again when they die, stopped together.

A worker holds no truth: everything is in the log and the weight store. So the remedy for any death is the same, start again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

Event = Callable[[str, str], None]
"""Called with (worker, what happened)."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 5.0
STEADY_S = 30.0
GRACE_S = 10.0


@dataclass(slots=True)
class WorkerProcess:
    """One subprocess and how to start it. `env` is added to the environment; output goes to `log`.

    Example: ``WorkerProcess("serve", ("ostinato", "serve"), Path("run/logs/serve.log"))``
    """

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0

    async def start(self) -> None:
        """Start the process in its own group, so that a Ctrl-C at the terminal reaches only the supervisor."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        output: IO[bytes] = self.log.open("ab")
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self.env, "OSTINATO_PARENT": str(os.getpid())},
                start_new_session=True,
            )
        finally:
            output.close()

    async def stop(self) -> None:
        """SIGTERM, a grace period, then SIGKILL to the whole group."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), GRACE_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def own_command(*words: str) -> tuple[str, ...]:
    """The argv that runs this same installation's CLI."""
    return (sys.executable, "-m", "ostinato.cli", *words)


async def watch(worker: WorkerProcess, stopping: asyncio.Event, on_event: Event) -> None:
    """Keep one worker alive until `stopping`; wait longer after each quick death."""
    wait = FIRST_WAIT_S
    while not stopping.is_set():
        loop = asyncio.get_running_loop()
        started = loop.time()
        await worker.start()
        assert worker.process is not None
        on_event(worker.name, f"started (pid {worker.process.pid})")
        ended = asyncio.ensure_future(worker.process.wait())
        stop = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if stopping.is_set():
            await worker.stop()
            await ended
            return
        wait = FIRST_WAIT_S if loop.time() - started > STEADY_S else min(wait * 2, LONGEST_WAIT_S)
        worker.restarts += 1
        on_event(worker.name, f"died with code {ended.result()}, starts again in {wait:.1f} s (see {worker.log})")
        try:
            await asyncio.wait_for(stopping.wait(), wait)
        except TimeoutError:
            continue


async def supervise(workers: Sequence[WorkerProcess], stopping: asyncio.Event, on_event: Event) -> None:
    """Run all workers until `stopping` is set; then stop all of them and return."""
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(watch(worker, stopping, on_event))


async def die_with_parent(interval_s: float = 1.0) -> None:
    """In a worker: return once the supervisor that started it is gone, so that no orphan serves or trains."""
    parent = os.environ.get("OSTINATO_PARENT")
    if parent is None:
        await asyncio.Event().wait()
    while str(os.getppid()) == parent:
        await asyncio.sleep(interval_s)
