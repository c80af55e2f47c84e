"""`ostinato adapt`: dials and styles, which adapt answers to each person."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators
from rich.console import Console

from ostinato.cli.options import DEFAULTS, Common, Flag, Positive

adapt = App(name="adapt", help="Dials and styles by which answers suit a person.")


@adapt.command
def fit(
    *,
    prompts: Path | None = None,
    version: str = "live",
    answers: Annotated[int, Parameter(validator=validators.Number(gte=2, lte=128))] = 64,
    tokens: Positive = 32,
    seed: int = 0,
    common: Common = DEFAULTS,
) -> None:
    """Fit the dials' directions to the live version and write them to the run's log as a basis.

    The model answers the prompts itself, in this process; nothing that people wrote is read. An attribute gets no dial if its direction
    explains less than 2% of it on other prompts, in either half of them. A basis is for the version that it was fitted to, so run this
    again after a release. With `adapt.safety.suite`, the basis is tested as `ostinato adapt check` does before it is written.

    For example: `ostinato adapt fit --prompts questions.txt`

    Parameters
    ----------
    prompts
        A file with one prompt per line. Default: 44 built-in questions.
    version
        The version to fit to: a ref, a number such as v12, or a root's first digits. Any other than live gets the dials of the live
        version's basis. Once a canary has a basis, too, answers lean on both sides of the trial; without one, on neither.
    answers
        How many answers to each prompt. With 16 instead of 64, half as much of the attributes was explained, and dials had no visible
        effect.
    tokens
        The longest answer, in tokens.
    seed
        Seeds the answers.
    """
    from ostinato.launch.commands.adapt import fit as run

    config = common.of_run()
    asyncio.run(run(config, prompts, each=answers, tokens=tokens, seed=seed, console=Console(), version=version))


@adapt.command
def show(tenant: str, user: str, *, json: Flag = False, common: Common = DEFAULTS) -> None:
    """Show a person's dials, each with a 95% interval and in words, and whether their answers lean.

    It reads the log from the gateway's last saved states on, in this process, and changes nothing.

    Parameters
    ----------
    tenant
        The person's tenant; `default` if there is only one.
    user
        The person's name with that tenant.
    json
        Print one JSON object, the same as `GET /v1/adaptation` returns.
    """
    from ostinato.launch.commands.adapt import show as run

    asyncio.run(run(common.of_run(), tenant, user, Console(), machine=json))


@adapt.command
def reset(tenant: str, user: str, *, common: Common = DEFAULTS) -> None:
    """Reset a person's dials to the prior: no earlier rating counts any more.

    This writes a row to the log; a running gateway applies it within a second.

    Parameters
    ----------
    tenant
        The person's tenant; `default` if there is only one.
    user
        The person's name with that tenant.
    """
    from ostinato.launch.commands.adapt import reset as run

    asyncio.run(run(common.of_run(), tenant, user, Console()))


@adapt.command
def status(*, json: Flag = False, common: Common = DEFAULTS) -> None:
    """Show whether answers lean, by which bases, and for how many people.

    Parameters
    ----------
    json
        Print one JSON object.
    """
    from ostinato.launch.commands.adapt import status as run

    asyncio.run(run(common.of_run(), Console(), machine=json))


@adapt.command
def check(*, seed: int = 0, common: Common = DEFAULTS) -> None:
    """Red-team dials: run the live version's basis on `adapt.safety.suite` where answers lean most. Exits with 1 unless all are safe.

    Tested are each dial as far up and down as it goes, all dials at once, people drawn from the prior at twice its width, the real people
    whose answers the basis moved most, and each style of `adapt.styles.prompts`. Each is compared with the base model on the same prompts,
    overall and by family. A dial with more violations is dropped: a basis without it is written to the log. A style with more violations
    loses its approval. If there are too few prompts for a decision, the command says how many it needs. The model answers in this process.

    For example: `ostinato adapt check --set adapt.safety.suite=safety`, with the shipped suite of 182 prompts.

    Parameters
    ----------
    seed
        Seeds the answers and the drawn people.
    """
    from ostinato.launch.commands.adapt import check as run

    config = common.of_run()
    if not asyncio.run(run(config, seed=seed, console=Console())):
        sys.exit(1)


@adapt.command
def approve(*, version: str = "live", seed: int = 0, common: Common = DEFAULTS) -> None:
    """Evaluate each style of `adapt.styles.prompts` on `adapt.styles.suite`, and approve those that cost no quality. Exits with 1
    unless all pass.

    A style passes if the lower bound of its score minus the score without a style, on the same tasks with the same seeds, is above minus
    `adapt.styles.margin`. Only approved styles are dealt to people, and only by the version that they were evaluated with. Run this again
    after a release, or set `adapt.styles.versions`. The model answers in this process.

    For example: `ostinato adapt approve --set adapt.styles.suite=tasks.jsonl`

    Parameters
    ----------
    version
        The version to evaluate them with: a ref, a number such as v12, or a root's first digits.
    seed
        Seeds the answers.
    """
    from ostinato.launch.commands.adapt import approve as run

    config = common.of_run()
    if not asyncio.run(run(config, seed=seed, console=Console(), version=version)):
        sys.exit(1)
