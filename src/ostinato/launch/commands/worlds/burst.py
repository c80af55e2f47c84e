"""`ostinato worlds plan-burst`: three ways to place a burst of sandboxes, side by side, with all assumptions."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.worlds.bursts import ASSUMPTIONS, Burst, Fleet, Packing, simulate


def show_burst(
    sandboxes: int, clusters: int, nodes: int, lose_after: float | None, seed: int, console: Console, *, machine: bool
) -> None:
    """Simulate each way and print a line for it. Raises BadRequest."""
    fleet, burst = Fleet(clusters=clusters, nodes=nodes), Burst(sandboxes=sandboxes, lose_region_at=lose_after)
    found = [simulate(fleet, burst, packing, seed) for packing in Packing]
    if machine:
        said = {"fleet": asdict(fleet), "burst": asdict(burst), "seed": seed, "assumptions": ASSUMPTIONS}
        console.out(json.dumps({**said, "placed": [asdict(each) for each in found]}), highlight=False)
        return
    table = Table(box=None, pad_edge=False)
    for name in (
        "packing",
        "placed",
        "all after",
        "p50",
        "p99",
        "failed",
        "killed",
        "lost",
        "machines",
        "cores",
        "memory",
        "cost",
    ):
        table.add_column(name, no_wrap=True)
    for each in found:
        table.add_row(
            each.packing.value,
            f"{each.placed:,}" + (f" ({each.unplaced:,} never)" if each.unplaced else ""),
            *(f"{seconds:.1f} s" for seconds in (each.all_s, each.p50_s, each.p99_s)),
            *(f"{count:,}" for count in (each.failed, each.killed, each.lost, each.machines)),
            *(f"{100 * share:.0f}%" for share in (each.cores, each.memory)),
            f"{each.cost:.2f}",
        )
    console.print(table)
    console.print(Text("A simulation, not a measurement. Assumptions:", "dim"))
    for name, value in {**asdict(fleet), **asdict(burst), "seed": seed}.items():
        console.print(Text(f"  {name} = {value}", "dim"))
    for line in ASSUMPTIONS:
        console.print(Text(f"  {line}", "dim"), soft_wrap=True)
