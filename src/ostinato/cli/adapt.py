"""`ostinato adapt`: the dials by which answers lean towards a person."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators
from rich.console import Console

from ostinato.cli.options import Common

adapt = App(name="adapt", help="Dials by which answers lean towards a person.")


@adapt.command
def fit(
    *,
    prompts: Path | None = None,
    answers: Annotated[int, Parameter(validator=validators.Number(gte=2, lte=128))] = 24,
    tokens: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 48,
    seed: int = 0,
    common: Common | None = None,
) -> None:
    """Fit the dials' directions to the live version and write them to the run's log as a basis.

    The model answers the prompts itself, in this process; nothing that people wrote is read. An attribute that its direction explains by
    less than 2% on other prompts gets no dial. A basis is for the version that it was fitted to: fit anew after a release. With
    `adapt.safety.suite` it is tried as `ostinato adapt check` does before it is written.

    For example: `ostinato adapt fit --prompts questions.txt --answers 32`

    Parameters
    ----------
    prompts
        A file with one prompt a line. Default: 44 built-in questions.
    answers
        How many answers to each prompt.
    tokens
        The longest answer, in tokens.
    seed
        Seeds the answers.
    """
    from ostinato.launch.commands.adapt import fit as run

    config = (common or Common()).of_run()
    asyncio.run(run(config, prompts, each=answers, tokens=tokens, seed=seed, console=Console()))


@adapt.command
def check(*, seed: int = 0, common: Common | None = None) -> None:
    """Red-team dials: try the live version's basis against `adapt.safety.suite` where answers lean most. Ends with 1 if one fails.

    The corners are each dial as far up and down as it goes, people drawn from the prior at twice its width, and the real people whose
    answers it moved most. Each is compared with the base model on the same prompts. A dial with more violations is dropped: a basis
    without it is written to the log. What too few prompts can show is named, with the number that it needs. The model answers in this
    process.

    For example: `ostinato adapt check --set adapt.safety.suite=safety.jsonl`

    Parameters
    ----------
    seed
        Seeds the answers and the drawn people.
    """
    from ostinato.launch.commands.adapt import check as run

    config = (common or Common()).of_run()
    if not asyncio.run(run(config, seed=seed, console=Console())):
        sys.exit(1)
