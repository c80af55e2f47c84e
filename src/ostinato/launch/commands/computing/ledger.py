"""`ostinato compute`: what a run's operations were spent on, from its log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.app.storage import home, model_path, open_log
from ostinato.compute.ledger import OperationLedger
from ostinato.compute.work import TokenWork, decoder_of
from ostinato.config import Config
from ostinato.core.seams import Log
from ostinato.launch.commands.computing.filling import Filling
from ostinato.launch.views.progress import Lines

RESTS_ON = (
    "counted from lengths in the log, not measured: matrix products and attention, forward once and backward twice",
    "a turn that goes on from another is taken to find that one's tokens in the cache, in serving and, within a step, in training",
    "what else was computed is not in the log: prompts that others share, recomputation, drift and reference passes, steps taken again",
)


async def show_compute(config: Config, console: Console, *, machine: bool) -> None:
    """Print the ledger. Raises NotFound if the run does not exist, BadConfig for a model whose operations cannot be counted."""
    shape = json.loads((model_path(config) / "config.json").read_text(encoding="utf-8"))
    with open_log(config) as log:
        found = await fill(log, decoder_of(shape).token_work())
    lent = lent_of(Lines(home(config).progress("serve")).new())
    if machine:
        said = {**asdict(found), "sampling_of_all": found.of_all, "sampling_per_training": found.per_training}
        console.out(json.dumps({**said, "lent": lent, "rests_on": RESTS_ON}), highlight=False)
        return
    table = Table("phase", "operations", "share", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, count in asdict(found).items():
        table.add_row(name, f"{count:.3e}", f"{100 * count / found.total if found.total else 0:.1f}%")
    console.print(table)
    per = "no step yet" if found.per_training is None else f"{found.per_training:.3f} for each operation of training"
    console.print(f"on sampling: {100 * found.of_all:.1f}% of all; {per}", highlight=False)
    if lent["seconds"]:
        console.print(
            f"of it on servers that people lent: {lent['tokens']:.0f} tokens in {lent['seconds'] / 3600:.2f} server-hours; "
            f"{lent['cut']:.0f} answers were cut off",
            highlight=False,
        )
    for line in RESTS_ON:
        console.print(Text(line, "dim"), soft_wrap=True)


def lent_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What rollouts used of servers that people lent, summed over the gateway's starts, from its progress lines."""
    last = {line["since"]: line for line in lines if line["kind"] == "lent"}
    return {name: sum(line[name] for line in last.values()) for name in ("seconds", "tokens", "cut")}


async def fill(log: Log, work: TokenWork) -> OperationLedger:
    """The ledger of a whole log. Turns of an outside model cost us no operations, and erased turns have no lengths: neither is counted."""
    filling = Filling(work)
    await filling.catch_up(log)
    return filling.ledger
