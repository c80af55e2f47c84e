"""`ostinato train --world FILE`: gateway, trainer and rollouts under one supervisor, with a line per step."""

from __future__ import annotations

import asyncio
import contextlib

from rich.console import Console

from ostinato.app.storage import Home, home
from ostinato.app.worlds_rollouts import check_steps, open_taskset
from ostinato.config import Config
from ostinato.launch.commands.checks import check_same_model, check_start
from ostinato.launch.commands.up import Launched, launch
from ostinato.launch.views.progress import Lines
from ostinato.launch.views.training import WorldScreen
from ostinato.launch.workers.stopping import until_stopped
from ostinato.record.lock import hold

CREW = ("serve", "train", "rollout")
_LOOK_S = 0.5


async def train_in_world(config: Config, steps: int, console: Console) -> None:
    """Train until `steps` steps were taken, every task was drawn as often as it may be, or Ctrl-C.

    Raises BadConfig, Conflict if the run is up already, WorkerFailed if a worker fails for good.
    """
    await check_start(config)
    check_same_model(config)
    tasks = open_taskset(config)
    check_steps(config, tasks)
    stopping = until_stopped()

    def say(worker: str, what: str) -> None:
        _show(console, f"{worker:10} {what}")

    with hold(home(config).root, "up"):
        _show(
            console, f"{tasks.name}: {len(tasks.tasks)} tasks ({tasks.hash[:12]}); the run is in {config.run.directory}"
        )
        async with launch(config, say, names=CREW) as launched:
            _show(console, f"{launched.url}/worlds shows it once the model is loaded")
            await launched.during(follow(launched, steps, stopping, console))


async def follow(launched: Launched, steps: int, stopping: asyncio.Event, console: Console) -> None:
    """Show the workers' progress until enough was learned and stored, nothing more is left to learn from, or `stopping` is set."""
    screen, sources = WorldScreen(), _lines(launched.home)
    for lines in sources:  # of an earlier start
        for line in lines.new():
            screen.take(line)
    begun = screen.step
    if begun:
        _show(console, f"going on after step {begun}")
    while not stopping.is_set():
        for lines in sources:
            for line in lines.new():
                for text in screen.take(line):
                    _show(console, text)
        done = launched.doing("rollout").startswith("done")
        stored = screen.step == begun or screen.stored >= (screen.step if done else steps)
        if steps and screen.step >= steps and stored:
            return
        if done and stored:
            _show(
                console,
                f"ended at step {screen.step}{f' of {steps}' if steps else ''}: every task was drawn worlds.epochs times",
            )
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _LOOK_S)


def _lines(place: Home) -> list[Lines]:
    return [Lines(place.progress("rollout")), Lines(place.progress("train"))]


def _show(console: Console, line: str) -> None:
    """Print one line for people. If it cannot be written, as on a full disk, the workers go on all the same."""
    with contextlib.suppress(OSError):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
