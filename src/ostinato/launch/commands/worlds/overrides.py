"""The settings that `--world FILE` and `--connect URL` stand for."""

from __future__ import annotations

from pathlib import Path


def world_overrides(file: Path) -> tuple[str, ...]:
    """The settings of a run that learns from a taskset, as `--set` words; the command line's own settings come later and win.

    Example: ``world_overrides(Path("tasks.jsonl")) == ('learn.source="worlds"', "worlds.file='/home/ann/tasks.jsonl'")``
    """
    return ('learn.source="worlds"', f"worlds.file='{file.expanduser().absolute()}'")


def connect_overrides(url: str | None, cert: Path | None, key: Path | None, ca: Path | None) -> tuple[str, ...]:
    """The settings of a worker for another machine's run, as `--set` words.

    Example: ``connect_overrides("https://t:8443", None, None, None) == ("worlds.connect.url='https://t:8443'",)``
    """
    places = {"certificate": cert, "key": key, "authority": ca}
    files = [f"worlds.connect.{name}='{path.expanduser().absolute()}'" for name, path in places.items() if path]
    return (*([f"worlds.connect.url='{url}'"] if url else ()), *files)
