"""`ostinato plan`: a cycle on paper as tables or JSON, with all its assumptions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.app.planning import deliveries, planned
from ostinato.compute.description import Description
from ostinato.compute.plan import NOT_COUNTED, CyclePlan, Lane, learned_turns
from ostinato.config import explain, origins, parse_override, put, read_file
from ostinato.launch.commands.weights.plan import size


def load_description(path: Path | None, overrides: Sequence[str]) -> Description:
    """Merge the defaults, the file and the overrides, in this order, and validate. Raises BadConfig that names every wrong field."""
    tree = read_file(path)
    for override in overrides:
        put(tree, *parse_override(override))
    try:
        return Description.model_validate(tree)
    except ValidationError as error:
        raise explain(Description, error, origins(path, overrides)) from None


def show_plan(path: Path | None, overrides: Sequence[str], console: Console, *, machine: bool) -> None:
    """Print the plan. Raises BadConfig if the description is invalid, or something does not fit."""
    told = load_description(path, overrides)
    found = planned(told)
    if machine:
        console.out(json.dumps(as_tree(told, found)), highlight=False)
        return
    for part in (phases_table(found), lanes_table(found)):
        console.print(part)
        console.print()
    for line in conclusions(told, found):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(Text("\nOn paper, not a measurement. It rests on:", "dim"))
    for line in assumptions(told):
        console.print(Text(line, "dim"), soft_wrap=True)
    console.print(Text("Not counted:", "dim"))
    for line in NOT_COUNTED:
        console.print(Text(f"  {line}", "dim"), soft_wrap=True)


def as_tree(told: Description, found: CyclePlan) -> dict[str, object]:
    """The plan for programs. Seconds, bytes, operations, and money in the description's currency, for a whole cycle."""
    return {
        "lanes": [asdict(lane) for lane in found.lanes],
        "lag_s": dict(found.lag),
        "machines": found.machines,
        "money": found.money,
        "bottleneck": {
            "lane": found.bottleneck.name,
            "phase": found.bottleneck.widest.name,
            "load": found.bottleneck.load,
        },
        "assumptions": [
            {"key": key, "value": value, "source": source, "means": means}
            for key, value, source, means in told.assumptions()
        ],
        "not_counted": NOT_COUNTED,
    }


def phases_table(found: CyclePlan) -> Table:
    """A row for each phase, for a whole cycle."""
    table = Table(
        "",
        "a cycle's phases",
        "operations",
        "bytes",
        "seconds",
        "limited by",
        "money",
        box=None,
        pad_edge=False,
    )
    for column in (2, 3, 4, 6):
        table.columns[column].justify = "right"
    for lane in found.lanes:
        for at, phase in enumerate(lane.phases):
            table.add_row(
                lane.name if at == 0 else "",
                phase.name,
                f"{phase.flops:.2e}" if phase.flops else "",
                size(phase.bytes) if phase.bytes else "",
                f"{phase.seconds:,.1f}",
                phase.by,
                f"{phase.money:,.0f}",
            )
    return table


def lanes_table(found: CyclePlan) -> Table:
    """A row for each lane: how much of a cycle it works, and what its machines cost while they are idle."""
    table = Table("side by side", "machines", "load", "", "idle, money", box=None, pad_edge=False)
    for column in (1, 2, 4):
        table.columns[column].justify = "right"
    for lane in found.lanes:
        table.add_row(
            lane.name,
            f"{lane.machines:,}" if lane.machines else "",
            f"{100 * lane.load:.1f}%",
            _standing(lane),
            f"{lane.idle:,.0f}" if lane.machines else "",
        )
    return table


def _standing(lane: Lane) -> str:
    if lane.load > 1:
        return "does not keep up"
    return "machines as many as needed" if lane.open else ""


def conclusions(told: Description, found: CyclePlan) -> list[str]:
    """The conclusions from the tables, in sentences."""
    first, moved = found.bottleneck, deliveries(told)
    whole = told.model.parameters * told.model.weight_bytes
    lag = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in found.lag.items())
    return [
        f"in all {found.machines:,} machines and {found.money:,.0f} in money for a cycle of {told.turns.hours:g} hours: "
        f"{learned_turns(told):,.0f} turns learned from, {1e6 * found.money / told.turns.tokens:,.2f} for a million of their tokens",
        f"a version: {size(moved.bytes)} of {size(whole)}, {whole / moved.bytes:,.0f} times smaller; from the end of a step until it "
        f"answers: {lag}",
        f"first bottleneck: {first.name}, of it {first.widest.name} (limited by {first.widest.by}): {100 * first.load:.0f}% of a cycle: "
        f"a cycle {1 / first.load:,.1f} times as short would be full",
    ]


def assumptions(told: Description) -> list[str]:
    """Every value, grouped by its source. A value that is the same for all regions, or all classes, is listed once."""
    rows = list(told.assumptions())
    alike: dict[str, set[tuple[object, str]]] = {}
    for key, value, source, _ in rows:
        alike.setdefault(_of_all(key), set()).add((value, source))
    by_source: dict[str, dict[str, str]] = {}
    for key, value, source, means in rows:
        name = _of_all(key) if len(alike[_of_all(key)]) == 1 else key
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        by_source.setdefault(source, {}).setdefault(name, f"    {name} = {shown}  {means}")
    return [line for source, values in by_source.items() for line in (f"  {source}", *values.values())]


def _of_all(key: str) -> str:
    """regions.europe.gbit -> regions.*.gbit"""
    section, *_, leaf = key.split(".")
    return f"{section}.*.{leaf}" if key.count(".") > 1 else key
