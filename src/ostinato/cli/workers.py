"""The commands that run a worker: `ostinato serve`, `train`, `rollout` and `housekeeping`.

Also `ostinato plan`, a capacity plan of a cycle, and `ostinato compute`, what a run's operations were spent on.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from ostinato.cli.corpus import NO_READING, ReadingOptions
from ostinato.cli.options import DEFAULTS, Common, Count, Flag, Positive
from ostinato.core.errors import BadConfig
from ostinato.core.interpreter import collecting_rarely

if TYPE_CHECKING:
    from ostinato.config import Config


def serve(common: Common = DEFAULTS) -> None:
    """Run the gateway and the embedded engine (a worker of `up`)."""
    import uvloop

    run_worker("serve", common.starting(), loop_factory=uvloop.new_event_loop)


def train(
    *,
    world: Path | None = None,
    steps: Count = 0,
    demonstrations: Path | None = None,
    out: Path | None = None,
    epochs: Positive = 2,
    batch: Positive = 16,
    reading: ReadingOptions = NO_READING,
    common: Common = DEFAULTS,
) -> None:
    """Run the trainer (a worker of `up`); with --world, train in a simulated world: gateway, trainer and rollouts until --steps or Ctrl-C;
    with --demonstrations, train a model by imitation; with --corpus, continue its pre-training.

    For example: `ostinato train --world tasks.jsonl --steps 50`

    Parameters
    ----------
    world
        A taskset file (JSONL). The model learns from tasks of the split `train`; the other splits are tried only if
        `worlds.measure_every` is set, for instance to 64, or afterwards with `ostinato worlds run`.
    steps
        With --world: number of optimizer steps. 0: until every task was drawn `worlds.epochs` times.
    demonstrations
        Conversations with good answers, one per line: {"messages": [...], "tools": [...]}, as in OpenAI's chat API.
    out
        With --demonstrations or --corpus: a new directory for the trained model; a run starts from it with `model.source`.
    epochs
        How often each demonstration is trained on.
    batch
        Demonstrations per optimizer step.
    """
    _check_options(world, steps, demonstrations, out, reading)
    if reading.corpus:
        reading.read(common.starting(), out)
        return
    if demonstrations is not None:
        if out is None:
            raise BadConfig("--demonstrations needs --out, a new directory for the model")
        from ostinato.launch.commands.supervised import imitate_file

        imitate_file(common.starting(), demonstrations, out, epochs, batch, Console())
        return
    if world is None:
        run_worker("train", common.starting(), expendable=500)
        return
    from ostinato.launch.commands.worlds.train import train_in_world, world_overrides

    asyncio.run(train_in_world(common.starting(*world_overrides(world)), steps, Console()))


def _check_options(
    world: Path | None, steps: int, demonstrations: Path | None, out: Path | None, reading: ReadingOptions
) -> None:
    """Raise BadConfig if options of several ways to train are combined, or if an option would have no effect."""
    ways = {
        "--world": world is not None,
        "--demonstrations": demonstrations is not None,
        "--corpus": bool(reading.corpus),
    }
    if sum(ways.values()) > 1:
        raise BadConfig(
            f"{' and '.join(name for name, given in ways.items() if given)} do not go together; give one of them"
        )
    if steps and world is None:
        raise BadConfig("--steps goes with --world, a taskset file")
    if out is not None and demonstrations is None and not reading.corpus:
        raise BadConfig("--out goes with --demonstrations or --corpus")
    if not reading.corpus and reading != NO_READING:
        raise BadConfig(
            "--tokens, --mixture and the other options of reading go with --corpus, a directory of `ostinato corpus build`"
        )


def rollout(
    *,
    world: Path | None = None,
    connect: str | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    ca: Path | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Make rollouts in a simulated world for the trainer to learn from (a worker of `up` and of `train --world`).

    For another machine's run: `ostinato rollout --connect https://trainer:8443 --cert me.pem --key me.key --ca ca.pem --world tasks.jsonl`

    Parameters
    ----------
    world
        A taskset file (JSONL). Default: `worlds.file`.
    connect
        URL of a run's `worlds.door` on another machine. Tasks, files and sandboxes stay on this machine.
    cert
        With --connect: this worker's certificate (PEM).
    key
        With --connect: this worker's private key (PEM).
    ca
        With --connect: the certificates that sign the door's certificate (PEM).
    """
    from ostinato.launch.commands.worlds.train import connect_overrides, world_overrides

    words = [*(world_overrides(world) if world else ()), *connect_overrides(connect, cert, key, ca)]
    config = common.starting(*words)
    door = config.worlds.connect
    if connect and not (config.worlds.file and door.certificate and door.key and door.authority):
        raise BadConfig(
            "--connect needs a taskset and this worker's certificates: add --world FILE, --cert FILE, --key FILE and --ca FILE (PEM)"
        )
    run_worker("rollout", config, expendable=400)


def housekeeping(common: Common = DEFAULTS) -> None:
    """Regularly delete weights that nothing needs and log rows past their retention (a worker of `up`)."""
    run_worker("housekeeping", common.starting(), expendable=300)


def run_worker(
    name: str,
    config: Config,
    *,
    expendable: int = 0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    """Run the worker of this name. Its heartbeat starts before its imports, which may take long on a slow disk."""
    with collecting_rarely():
        from ostinato.launch.views.progress import kept_bytes
        from ostinato.launch.workers.worker_main import WorkerContext, run_process

    async def work(context: WorkerContext) -> None:
        context.starting(config)("loading its code")
        with collecting_rarely():
            main_loop = getattr(importlib.import_module(f"ostinato.launch.workers.{name}"), name)
        await main_loop(config, context)

    run_process(work, expendable=expendable, output_bytes=kept_bytes(config), loop_factory=loop_factory)


# ---------------------------------------------------------------- compute


def plan(
    description: Path | None = None,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name=["--set"], negative="")] = (),
    json: Flag = False,
) -> None:
    """Plan a cycle on paper: machines, bytes, seconds and money by phase, the first bottleneck, and the source of every value.

    The default description has a trillion parameters, ten billion tokens a cycle and four regions. `ostinato weights plan` shows in
    more detail what the weight store moves and keeps.

    Parameters
    ----------
    description
        TOML file with the values that differ from the defaults: [model], [turns], [training], [evaluation], [publication], [reached],
        [regions.NAME], [hardware.NAME]. If any region is given, it replaces all default regions; the same holds for hardware.
    overrides
        Override one value of the description, as turns.tokens=1e9; may be repeated.
    json
        Print JSON, for programs.
    """
    from ostinato.launch.commands.plan import show_plan

    show_plan(description, overrides, Console(), machine=json)


def compute(*, json: Flag = False, common: Common = DEFAULTS) -> None:
    """Show what a run's operations were spent on, by phase: sampling's share of all, and its operations for each one of training.

    Parameters
    ----------
    json
        Print JSON, for programs.
    """
    from ostinato.launch.commands.compute import show_compute

    asyncio.run(show_compute(common.of_run(), Console(), machine=json))
