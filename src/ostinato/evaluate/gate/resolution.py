"""A suite's resolution: the smallest loss that it can rule out, and checks that refuse margins below it. Pure maths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from ostinato.core.errors import BadConfig
from ostinato.evaluate.config import BarConfig, GateConfig
from ostinato.evaluate.gate.bars import BAR_ALPHA

PASSING = 0.94
"""The share of equally good candidates whose bound must hold at the smallest margin. A few more are blocked because they look worse than
live by chance, and live was itself chosen on these items: nine in ten ship in the simulation of benchmarks/release/gate.py."""


def assumed_error(items: int, gate: GateConfig) -> float:
    """Standard error of a difference at the last look, from the assumed spreads: sqrt(2 (item^2 + draw^2 / draws) / items).

    Example: ``assumed_error(1000, GateConfig())`` is 0.0067.
    """
    return math.sqrt(2.0 * (gate.item_spread**2 + gate.draw_spread**2 / gate.max_draws) / items)


def smallest_margin(error: float, level: float) -> float:
    """The margin at which an equally good candidate's bound holds with probability `PASSING`: (z(1 - level) + z(0.94)) standard errors.

    It is the power formula of a non-inferiority test (Chow, Shao and Wang 2008, section 4.2), solved for the margin.
    """
    normal = NormalDist()
    return (normal.inv_cdf(1.0 - level) + normal.inv_cdf(PASSING)) * error


def smallest_total_margin(items: int, gate: GateConfig) -> float:
    """The smallest total margin for a suite with `items` items in a round, by the assumed spreads.

    Example: ``smallest_total_margin(500, GateConfig())`` is 0.044.
    """
    return smallest_margin(assumed_error(items, gate), gate.total_alpha_at(gate.max_draws))


def items_for(margin: float, level: float, gate: GateConfig) -> int:
    """Items in a round that a margin needs at a level: the inverse of `smallest_margin` over `assumed_error`."""
    return math.ceil((smallest_margin(assumed_error(1, gate), level) / margin) ** 2)


def check_margins(suite: str, items: int, gate: GateConfig) -> None:
    """Raise BadConfig if a margin is below `smallest_margin`: the suite is too small, and too many equally good candidates are blocked."""
    looks = {"margin": gate.alpha_at(gate.max_draws), "total_margin": gate.total_alpha_at(gate.max_draws)}
    for name, level in looks.items():
        margin, smallest = getattr(gate, name), smallest_margin(assumed_error(items, gate), level)
        if margin < smallest:
            enough = math.ceil(1000.0 * smallest) / 1000.0
            raise BadConfig(
                f"suite {suite!r} draws {items} items x {gate.max_draws} for a candidate: the smallest evaluate.gate.{name} that "
                f"it can hold is {100 * smallest:.1f} pp, and {100 * margin:.1f} pp is set. Give it "
                f"{items_for(margin, level, gate)} items in a round, or set evaluate.gate.{name}={enough:g} and live with that "
                f"resolution (assumed: a version's effect on an item varies by {gate.item_spread:g} and a draw by "
                f"{gate.draw_spread:g}; evaluate.gate.item_spread and draw_spread say so)"
            )


def check_bars(bars: Sequence[tuple[BarConfig, str, int]]) -> None:
    """Raise BadConfig for a bar that not even faultless answers could clear. Each bar comes with its suite's name and items in a round."""
    for bar, suite, items in bars:
        if BAR_ALPHA ** (1.0 / items) < bar.wanted:
            needed = math.ceil(math.log(BAR_ALPHA) / math.log(bar.wanted))
            raise BadConfig(
                f"evaluate.bars: no candidate can clear the bar on {bar.axis} of suite {suite!r}: with {items} items even faultless "
                f"answers prove no more than {BAR_ALPHA ** (1.0 / items):.4f} of the {bar.wanted:g} that is wanted; give it {needed} "
                "items or lower the bar"
            )
