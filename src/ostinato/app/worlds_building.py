"""The place where packages are built into tasks."""

from __future__ import annotations

from pathlib import Path

from ostinato.worlds.building.package_build import BuildPlace
from ostinato.worlds.building.runs import ONE_SHOT_WORKDIR, OneShotBackend
from ostinato.worlds.sandbox import python_inside


def open_build_place(out: Path, cache: Path) -> BuildPlace:
    """Sandboxes of this machine, with layers beside the taskset file so that it can be moved together with them."""
    return BuildPlace(
        backend=OneShotBackend(),
        python=python_inside(),
        workdir=ONE_SHOT_WORKDIR,
        layers=out.with_name(f"{out.stem}.layers"),
        cache=cache,
    )
