"""What a person sees in the terminal while a run goes on: one panel, drawn from an `Observed`."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ostinato.core.records import Arm, ReleaseEvent
from ostinato.evaluate.acceptance import Acceptance, by_arm
from ostinato.launch.views.observe import Observed

WIDTH = 30
RECENT_S = 120.0


def bar(point: Acceptance) -> Text:
    """Acceptance as a bar with its 95% interval marked."""
    text = Text()
    for cell in range(WIDTH):
        share = (cell + 0.5) / WIDTH
        inside = point.lower <= share <= point.upper
        text.append("━" if share <= point.acceptance else "╌" if inside else " ", "green" if inside else "cyan")
    return text


def arms_table(seen: Observed, now: float) -> Table:
    """Acceptance per arm over the last two minutes."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for name in ("simulated users of", "acceptance, last 2 min", "", "95%", "turns", "policy"):
        table.add_column(name)
    recent = seen.between(now - RECENT_S, now + 1.0)
    points = by_arm(recent)
    for arm in (Arm.LIVE, Arm.CANARY, Arm.CONTROL):
        if arm not in points:
            continue
        point = points[arm]
        newest = next((turn.oldest for turn, _ in reversed(recent) if turn.arm is arm), None)
        table.add_row(
            arm.value + (" (frozen)" if arm is Arm.CONTROL else ""),
            bar(point),
            f"{100 * point.acceptance:.0f}%",
            f"{100 * point.lower:.0f} to {100 * point.upper:.0f}",
            str(point.turns),
            f"v{newest}",
        )
    return table


def step_line(step: dict[str, Any]) -> str:
    """One optimizer step in one line."""
    return (
        f"step {step['step']:>3}  reward {step['reward_mean']:+.3f}  KL {step.get('kl_k1', 0.0):+.4f}  ESS {step['ess']:.2f}  "
        f"{step['tokens']:.0f} tokens ({step['tokens_saved']:.0f} shared)  {step['seconds']:.0f} s"
    )


def release_line(event: ReleaseEvent) -> Text:
    """One line of the ledger."""
    style = {"shipped": "bold green", "blocked": "yellow", "rolled_back": "bold red"}.get(event.action, "dim")
    return Text.assemble((f"{event.action:11}", style), f" v{event.policy.number}  {event.reason}")


def panel(seen: Observed, now: float, head: str) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [Text(head, "bold"), arms_table(seen, now)]
    if seen.steps:
        parts.append(Text("\n".join(step_line(step) for step in seen.steps[-3:]), "dim"))
    if seen.published:
        last = seen.published[-1]
        parts.append(
            Text(f"delta v{last['number']}: {last['bytes'] / 1e6:.2f} MB of {last['full_bytes'] / 1e6:.0f} MB", "dim")
        )
    live = [swap for swap in seen.swaps if swap["slot"] == "live"]
    if live:
        parts.append(
            Text(
                f"last swap: v{live[-1]['number']}, pause {1e3 * live[-1]['pause_s']:.2f} ms, {live[-1]['streams']} streams",
                "dim",
            )
        )
    parts.extend(release_line(event) for event in seen.releases[-6:])
    held = ", ".join(f"{count} {reason}" for reason, count in seen.held.most_common(4))
    parts.append(
        Text(f"{seen.turns} turns, {seen.tokens} tokens, {seen.signals} signals; held back: {held or 'none'}", "dim")
    )
    return Group(*parts)
