"""Capacity plans: `ostinato plan` for a cycle of learning and releasing, and `ostinato weights plan` for a deployment's transfers and
storage.

The plans come from `compute.plan` and `weights.plan`, and are shown as tables or JSON with all assumptions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.compute.plan import NOT_COUNTED, CyclePlan, Delivery, Description, Lane, learned_turns, plan_cycle
from ostinato.config import read_file, validated
from ostinato.core.errors import BadConfig
from ostinato.launch.views.screen import BOLD, bare_table, say
from ostinato.weights.plan import SKIPS, Cores, Deployment, DeploymentPlan, Link, Moved, plan

# ---------------------------------------------------------------- a deployment of weights


def print_plan(deployment: Deployment, link: Link, console: Console, cores: int | None) -> None:
    """Print the plan, and which limits it exceeds. `cores` are per shard; None: the default."""
    found = plan(deployment, link, Cores() if cores is None else Cores(count=cores))
    for table in (ways(found), totals(deployment, link, found)):
        console.print(table)
        console.print()
    for limit in found.limits:
        if not limit.fits:
            console.print(
                f"[bold red]does not fit[/] {limit.name}: {size(limit.need)} of {size(limit.limit)} per shard; "
                f"{found.least_shards} shards fit",
                highlight=False,
            )


def size(count: float) -> str:
    """Format bytes with decimal units. Example: "10.1 GB"."""
    for unit, power in (("PB", 15), ("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:,.1f} {unit}"
    return f"{count:.0f} B"


def ways(found: DeploymentPlan) -> Table:
    """Return a table with a row per kind of transfer."""
    names = ("what", "payload", "objects", "PUT class", "GET class", "line", "cores")
    table = bare_table(*names, right=range(1, len(names)), header_style=BOLD)

    def row(name: str, moved: Moved) -> None:
        counts = (f"{count:,}" for count in (moved.objects, moved.puts, moved.gets))
        table.add_row(name, size(moved.bytes), *counts, f"{moved.line_s:,.1f} s", f"{moved.cores_s:,.1f} s")

    row("publish a delta", found.publish)
    row("publish a full snapshot", found.publish_full)
    for span, moved in zip(SKIPS, found.publish_skips, strict=False):
        row(f"publish a delta over {span}", moved)
    row("follow by one version", found.follow)
    row(f"start cold, full and {found.cold_hops} deltas", found.cold)
    row(f"start cold, full and {found.chain} deltas", found.cold_slow)
    return table


def totals(deployment: Deployment, link: Link, found: DeploymentPlan) -> Table:
    """Return a table of the figures that do not belong to a transfer."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("weights", f"{size(found.full_bytes)}, {deployment.parameters:,.0f} parameters of 16 bits")
    smaller = f"{found.ratio:,.0f} times smaller at {deployment.changed:.2%} changed"
    table.add_row("a delta", f"{smaller}, {found.bits_per_change:.2f} bits per change")
    table.add_row("full snapshots", f"one after {found.chain} deltas")
    kept = f"{size(found.kept)} for {deployment.keep} versions"
    table.add_row("kept", f"{kept}, {size(found.skips)} of it to skip 4 and 16 versions")
    full = f"{link.gbit_s:g} Gbit/s, {link.rtt_s * 1e3:g} ms: {size(link.product)} under way when full"
    streams = f"{link.streams} streams of {size(link.window)} carry {link.bytes_s * 8 / 1e9:.1f} Gbit/s"
    table.add_row("line", f"{full}; {streams}")
    for limit in found.limits:
        table.add_row(limit.name, f"{size(limit.need)} of {size(limit.limit)} per shard")
    return table


# ---------------------------------------------------------------- a cycle


def deliveries(told: Description) -> Delivery:
    """Plan the delivery of one version to every region. Weights of other widths count as 16-bit weights of the same total size.

    Raises BadConfig, which names the field, if a shard exceeds a limit.
    """
    sent = told.publication
    parameters = told.model.parameters * told.model.weight_bytes / 2
    deployment = Deployment(parameters=parameters, changed=sent.changed, shards=sent.shards, factor=sent.factor)
    cores = Cores(count=sent.cores, encode=sent.encode, decode=sent.decode)
    lines = {"": Link(gbit_s=sent.gbit, rtt_s=sent.rtt_ms / 1e3, streams=sent.streams)}
    for name, region in told.regions.items():
        lines[name] = Link(gbit_s=region.gbit, rtt_s=region.rtt_ms / 1e3, streams=sent.streams)
    ways = {name: plan(deployment, line, cores) for name, line in lines.items()}
    here = ways.pop("")
    for limit in here.limits:
        if not limit.fits:
            raise BadConfig(f"publication.shards: {limit.name} does not fit in {sent.shards}; {here.least_shards} do")
    return Delivery(
        bytes=here.publish.bytes,
        encode_s=here.publish.cores_s,
        upload_s=here.publish.line_s,
        regions={name: (way.follow.line_s, way.follow.cores_s) for name, way in ways.items()},
    )


# ---------------------------------------------------------------- the command


def load_description(path: Path | None, overrides: Sequence[str]) -> Description:
    """Merge the defaults, the file and the overrides, in this order, and validate. Raises BadConfig that names every wrong field."""
    return validated(Description, read_file(path), path, overrides)


def show_plan(path: Path | None, overrides: Sequence[str], console: Console, *, machine: bool) -> None:
    """Print the plan. Raises BadConfig if the description is invalid or exceeds a limit."""
    told = load_description(path, overrides)
    moved = deliveries(told)
    found = plan_cycle(told, moved)
    if machine:
        console.out(json.dumps(as_tree(told, found)), highlight=False)
        return
    for part in (phases_table(found), lanes_table(found)):
        console.print(part)
        console.print()
    for line in conclusions(told, found, moved):
        say(console, line)
    say(console, "\nOn paper, not a measurement. It rests on:", "dim")
    for line in assumptions(told):
        say(console, line, "dim")
    say(console, "Not counted:", "dim")
    for line in NOT_COUNTED:
        say(console, f"  {line}", "dim")


def as_tree(told: Description, found: CyclePlan) -> dict[str, object]:
    """Return the plan as a JSON tree: seconds, bytes, operations, and money in the description's currency, per cycle."""
    first = found.bottleneck
    return {
        "lanes": [asdict(lane) for lane in found.lanes],
        "lag_s": dict(found.lag),
        "machines": found.machines,
        "money": found.money,
        "bottleneck": {"lane": first.name, "phase": first.widest.name, "load": first.load},
        "assumptions": [dict(zip(("key", "value", "source", "means"), row, strict=True)) for row in told.assumptions()],
        "not_counted": NOT_COUNTED,
    }


def phases_table(found: CyclePlan) -> Table:
    """Return a table with a row per phase, in totals per cycle."""
    names = ("a cycle's phases", "operations", "bytes", "seconds", "limited by", "money")
    table = bare_table("", *names, right=(2, 3, 4, 6), header_style=BOLD)
    for lane in found.lanes:
        for at, phase in enumerate(lane.phases):
            flops = f"{phase.flops:.2e}" if phase.flops else ""
            counts = (flops, size(phase.bytes) if phase.bytes else "", f"{phase.seconds:,.1f}")
            table.add_row(lane.name if at == 0 else "", phase.name, *counts, phase.by, f"{phase.money:,.0f}")
    return table


def lanes_table(found: CyclePlan) -> Table:
    """Return a table with a row per lane: its utilisation, and the cost of its idle machines."""
    table = bare_table("side by side", "machines", "load", "", "idle, money", right=(1, 2, 4), header_style=BOLD)
    for lane in found.lanes:
        machines, idle = (f"{lane.machines:,}", f"{lane.idle:,.0f}") if lane.machines else ("", "")
        table.add_row(lane.name, machines, f"{100 * lane.load:.1f}%", _standing(lane), idle)
    return table


def _standing(lane: Lane) -> str:
    if lane.load > 1:
        return "does not keep up"
    return "machines as many as needed" if lane.open else ""


def conclusions(told: Description, found: CyclePlan, moved: Delivery) -> list[str]:
    """Return the conclusions from the tables, in sentences."""
    first = found.bottleneck
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
    """Return lines with every assumed value, grouped by source. A value shared by all regions or classes is listed once."""
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
    """Replace the name in a key: regions.europe.gbit -> regions.*.gbit."""
    section, *_, leaf = key.split(".")
    return f"{section}.*.{leaf}" if key.count(".") > 1 else key
