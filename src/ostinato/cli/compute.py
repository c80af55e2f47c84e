"""`ostinato plan`: a cycle on paper. `ostinato compute`: what a run's operations were spent on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from ostinato.cli.options import Common


def plan(
    description: Path | None = None,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name=["--set"], negative="")] = (),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """A cycle on paper: machines, bytes, seconds and money by phase, the first bottleneck, and the source of every value.

    Without a description: a trillion parameters, ten billion tokens a cycle, four regions. `ostinato weights plan` looks closer at
    what the weight store moves and keeps.

    Parameters
    ----------
    description
        TOML file with the values that are not the defaults: [model], [turns], [training], [evaluation], [publication], [reached],
        [regions.NAME], [hardware.NAME]. Regions or classes that are named replace the default ones.
    overrides
        One value of the description, as turns.tokens=1e9; may be repeated.
    json
        As JSON, for programs.
    """
    from ostinato.launch.commands.computing.plan import show_plan

    show_plan(description, overrides, Console(), machine=json)


def compute(*, json: Annotated[bool, Parameter(negative="")] = False, common: Common | None = None) -> None:
    """What a run's operations were spent on, by phase: sampling's share of all, and for each operation of training.

    Parameters
    ----------
    json
        As JSON, for programs.
    """
    from ostinato.launch.commands.computing.ledger import show_compute

    asyncio.run(show_compute((common or Common()).of_run(), Console(), machine=json))
