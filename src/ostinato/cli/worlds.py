"""`ostinato worlds`: simulated worlds and the tasks in them."""

from __future__ import annotations

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
        A taskset file (JSONL), or a directory of Harbor's task folders.
    """
    from ostinato.launch.commands.worlds.show import show_taskset

    show_taskset(file, Console())
