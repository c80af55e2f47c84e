"""`ostinato weights plan`: what a deployment will move, keep and wait for, as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ostinato.weights.plan import SKIPS, Cores, Deployment, DeploymentPlan, Link, Moved, plan


def print_plan(deployment: Deployment, link: Link, console: Console, cores: int | None = None) -> None:
    """The plan, and what does not fit. `cores` are per shard; None takes the default."""
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
    """Bytes for people, in powers of ten: 10.1 GB."""
    for unit, power in (("PB", 15), ("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:,.1f} {unit}"
    return f"{count:.0f} B"


def ways(found: DeploymentPlan) -> Table:
    """One row per kind of transfer."""
    table = Table("what", "payload", "objects", "PUT class", "GET class", "line", "cores", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"

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
    """The figures that are not about a transfer."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("weights", f"{size(found.full_bytes)}, {deployment.parameters:,.0f} parameters of 16 bits")
    table.add_row(
        "a delta",
        f"{found.ratio:,.0f} times smaller at {deployment.changed:.2%} changed, {found.bits_per_change:.2f} bits per change",
    )
    table.add_row("full snapshots", f"one after {found.chain} deltas")
    table.add_row(
        "kept",
        f"{size(found.kept)} for {deployment.keep} versions, {size(found.skips)} of it to skip 4 and 16 versions",
    )
    table.add_row(
        "line",
        f"{link.gbit_s:g} Gbit/s, {link.rtt_s * 1e3:g} ms: {size(link.product)} under way when full; {link.streams} streams "
        f"of {size(link.window)} carry {link.bytes_s * 8 / 1e9:.1f} Gbit/s",
    )
    for limit in found.limits:
        table.add_row(limit.name, f"{size(limit.need)} of {size(limit.limit)} per shard")
    return table
