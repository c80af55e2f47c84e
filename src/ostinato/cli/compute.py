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
    from ostinato.launch.commands.computing.plan import show_plan

    show_plan(description, overrides, Console(), machine=json)


def compute(*, json: Annotated[bool, Parameter(negative="")] = False, common: Common | None = None) -> None:
    """Show what a run's operations were spent on, by phase: sampling's share of all, and its operations for each one of training.

    Parameters
    ----------
    json
        Print JSON, for programs.
    """
    from ostinato.launch.commands.computing.ledger import show_compute

    asyncio.run(show_compute((common or Common()).of_run(), Console(), machine=json))
