"""`ostinato suite`: held-out suites from a run's log, and their contamination by training turns."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators
from rich.console import Console

from ostinato.cli.options import DEFAULTS, Common, Flag, Positive, Share, Words

suite = App(
    name="suite",
    help="Suites that candidates are measured on: make them from a run's log, and check them against what was trained on.",
)


@suite.command
def make(
    file: Path,
    *,
    items: Positive = 200,
    since: str | None = None,
    grade: str = "judge",
    per_user: Positive = 3,
    tenant: Words = (),
    near: Share = 0.7,
    seed: int = 0,
    common: Common = DEFAULTS,
) -> None:
    """Draw a held-out suite from the prompts in a run's log and write it as a task file for `evaluate.suite`. The log is only read.

    Prompts are drawn in proportion from strata of tenant, length and outcome. Left out are prompts that were trained on, near copies of
    those and of each other, and turns that were forgotten or cut short. Once the file is named in `evaluate` and the trainer was started
    anew, turns whose prompt is, or begins with, an item's are held back as held_out; a reworded prompt is not recognised. The log does not
    record whether people agreed: name the tenants who did. The file holds people's words in plain text, which `forget` does not reach.

    For example: `ostinato suite make answers.jsonl --items 300 --since 30d --grade exact`

    Parameters
    ----------
    file
        The task file to write, which must not exist. Only its owner may read it.
    items
        How many items. Fewer resolve less: the settings that are printed say what they can hold.
    since
        Only turns that ended in the last 90min, 12h, 7d or 2w.
    grade
        How answers are graded. judge: by the model of [worlds.judge] alone. exact: 1 for the answer that was rewarded, else 0.
        module:function: by yours, which finds the answer that was given and its reward in task.grading.data.
    per_user
        Most items of one person, or of one session of people without names.
    tenant
        Only this tenant's people; may be repeated. Default: everybody's.
    near
        Jaccard similarity of 5-word shingles from which a prompt counts as a copy. 1: exact copies only, which needs no `ostinato[corpus]`.
    seed
        Seeds the draw.
    """
    import math

    from ostinato.app.log_suites import SuiteDraw
    from ostinato.core.clock import wall_clock
    from ostinato.core.durations import seconds_in
    from ostinato.launch.commands.suite import make_suite

    config = common.of_run()
    draw = SuiteDraw(
        items=items,
        since=-math.inf if since is None else wall_clock() - seconds_in(since),
        per_user=per_user,
        near=near,
        tenants=tenant,
        grade=grade,
        seed=seed,
    )
    asyncio.run(make_suite(config, file, draw, Console()))


@suite.command
def check(
    *files: str,
    gram: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 13,
    json: Flag = False,
    common: Common = DEFAULTS,
) -> None:
    """List the items of suites that share 13 words in a row with turns that were trained on. Exits with 1 if any do.

    This is GPT-3's rule for contamination. System prompts, and words that a tenth of a suite's items share, do not count. A text with 8
    to 12 words of its own counts as a whole; a shorter one, or a run of fewer than five different words, does not.

    Parameters
    ----------
    files
        Task files, or demo, demo-tab. Default: all of `evaluate`.
    gram
        Number of words in a row.
    json
        Print one JSON object, with all items, instead of the first twenty.
    """
    from ostinato.launch.commands.suite import check_suites

    if not asyncio.run(check_suites(common.of_run(), files, gram, json, Console())):
        sys.exit(1)
