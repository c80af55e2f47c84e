"""What `--world FILE` stands for."""

from __future__ import annotations

from pathlib import Path


def world_overrides(file: Path) -> tuple[str, ...]:
    """The settings of a run that learns from a taskset, as `--set` words; the command line's own come after and win.

    Example: ``world_overrides(Path("tasks.jsonl")) == ('learn.source="worlds"', "worlds.file='/home/ann/tasks.jsonl'")``
    """
    return ('learn.source="worlds"', f"worlds.file='{file.expanduser().absolute()}'")
