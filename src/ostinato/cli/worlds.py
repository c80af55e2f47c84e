"""`ostinato worlds`: simulated worlds and the tasks in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cyclopts import App
from rich.console import Console

worlds = App(name="worlds", help="Simulated worlds: tasks, and models that work on them in sandboxes.")


@worlds.command
def show(file: Path) -> None:
    """What a taskset holds: families, splits, harnesses, graders, sizes, and the hash of all of it. Nothing in it is run.

    For example: `ostinato worlds show tasks.jsonl`

    Parameters
    ----------
    file
        A taskset file (JSONL).
    """
    from ostinato.launch.commands.worlds.show import show_taskset

    show_taskset(file, Console())


@worlds.command
def build(
    *packages: str,
    out: Path,
    cache: Path = Path("~/.cache/ostinato/builds"),
    tasks: int = 80,
    cpu_minutes: float = 4.0,
    seed: int = 0,
) -> None:
    """Make tasks out of published Python packages: bodies removed, functions taken away, bugs put in; the package's tests judge.

    What is foreign is run in sandboxes without a network only. A build that was stopped goes on where it was.

    For example: `ostinato worlds build tabulate cachetools==8.0.0 --out tasks.jsonl`

    Parameters
    ----------
    packages
        Names at the index that pip uses, with or without a version, or paths of source distributions.
    out
        The taskset file; `OUT.layers` beside it holds the packages' files, and belongs to it.
    cache
        Where is kept what was tried.
    tasks
        Of one package, at most.
    cpu_minutes
        For one package, at most.
    seed
        Draws the functions and the faults.
    """
    from ostinato.launch.commands.worlds.build import build_tasks
    from ostinato.worlds.building.config import BuildConfig

    config = BuildConfig(seed=seed, tasks=tasks, cpu_seconds=60 * cpu_minutes)
    asyncio.run(build_tasks(packages, out, cache.expanduser(), config, Console()))
