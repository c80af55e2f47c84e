"""What `ostinato adapt check` found, as tables and words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.adapt.config import MOST_DRAWS, SafetyConfig
from ostinato.app.dials import BasisCheck, CheckedCorner, Rise, Safety
from ostinato.launch.views.screen import plain, say

_FULL = 0.9  # a family's share of violations from which on a rise can hardly show


def show_check(found: BasisCheck, rules: SafetyConfig, console: Console) -> None:
    """Print what was shown of each corner and style, in all and by family, and what became of the dials."""
    margin, tried = rules.margin, (*found.corners, *found.styles)
    table = Table("corner", "violations above the base's", "bounds", "prompts", "needed", "tokens", "found")
    for each in tried:
        verdict = Text(plain(_verdict(each, margin)))
        table.add_row(Text(plain(each.corner.name)), *_cells(each.whole), f"{each.tokens:.0f}", verdict)
    console.print(table)
    say(
        console,
        f"the base model: {found.base:.1%} violations, {found.tokens:.0f} tokens an answer; margin {100 * margin:g} pp",
    )
    if len(found.families) > 1:
        _show_families(found, tried, console)
    if full := [family for family, (share, _) in found.families.items() if share >= _FULL]:
        say(
            console,
            f"in {', '.join(full)} the base model itself violates nearly always, so a rise can hardly show there",
        )
    if found.small:
        say(
            console,
            f"in {', '.join(found.small)} there are too few prompts for adapt.safety.alpha: not even a rise in all would show",
        )
    if found.basis is None:
        say(console, "the version has no basis, so only styles were tried")
    if found.dropped and found.basis is not None:
        left = "no dial is left, and nobody's answers lean" if len(found.dropped) == len(found.basis.names) else ""
        say(console, f"dropped: {', '.join(found.dropped)}{'; ' if left else ''}{left}")
    if refused := [each.style.name for each in found.styles if each.style and each.found is Safety.UNSAFE]:
        say(console, f"unsafe styles, dealt to nobody: {', '.join(refused)}")
    _show_open(tried, rules.draws, console)


def _show_families(found: BasisCheck, tried: Sequence[CheckedCorner], console: Console) -> None:
    """Print of each family the base model's share, and the corner or style with the largest rise."""
    told = ", ".join(f"{family} {share:.0%} of {count}" for family, (share, count) in found.families.items())
    say(console, f"the base model's by family: {told}")
    if not tried:
        return
    table = Table("family", "the base's", "worst corner", "above the base's", "bounds", "prompts", "needed", "found")
    for family, (share, _) in found.families.items():
        worst = max(tried, key=lambda each: each.families[family].lower)
        rise = worst.families[family]
        names = Text(plain(family)), f"{share:.0%}", Text(plain(worst.corner.name))
        table.add_row(*names, *_cells(rise), rise.found.value)
    console.print(table)


def _show_open(tried: Sequence[CheckedCorner], draws: int, console: Console) -> None:
    """Print of what nothing was shown, and what would decide it."""
    unknown = [each for each in tried if each.found is Safety.OPEN]
    if not unknown:
        return
    needed = max(each.whole.needed for each in unknown)
    names, sides = ", ".join(each.corner.name for each in unknown), len(tried) + 1
    again = math.ceil(draws * needed / min(each.whole.prompts for each in unknown))
    more = f"; with these prompts it takes adapt.safety.draws = {again} at least" if again <= MOST_DRAWS else ""
    say(
        console,
        f"not shown to be safe, and kept: {names}. Give adapt.safety.suite a file of {needed} prompts ({needed * draws * sides} answers in "
        f"all), or widen adapt.safety.margin{more}",
    )


def _cells(rise: Rise) -> tuple[str, str, str, str]:
    bounds = f"{100 * rise.lower:+.1f} to {100 * rise.upper:+.1f}"
    return f"{100 * rise.rise:+.1f} pp", bounds, str(rise.prompts), str(rise.needed)


def _verdict(each: CheckedCorner, margin: float) -> str:
    """What was found; of an unsafe one, whether its violations rise by more than the margin for certain, or in a family alone."""
    if each.found is not Safety.UNSAFE:
        return each.found.value
    if each.whole.lower > margin:
        return "unsafe, beyond the margin"
    return "unsafe" if each.whole.found is Safety.UNSAFE else f"unsafe: {where_unsafe(each)}"


def where_unsafe(each: CheckedCorner) -> str:
    """Where it has more violations than the base model."""
    families = [family for family, rise in each.families.items() if rise.found is Safety.UNSAFE]
    return f"more violations{' in ' if families else ''}{', '.join(families)}"
