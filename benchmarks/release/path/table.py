"""Prints the result of `benchmarks.release.path` as tables, beside the aims.

    python -m benchmarks.release.path.table

The figure itself decides between "met" and "missed". "unsure" marks a share or count whose 95% interval (Wilson; exact Poisson) holds
the aim.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.release.path.__main__ import RESULT
from benchmarks.release.path.cells import SIZES, Cell
from scipy import stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A bound on a figure of a cell. Example: ``Aim(cell="1k ostinato aa", figure="false_stops_a_week", most=0.2)``"""

    cell: str
    figure: str
    least: float = -math.inf
    most: float = math.inf


def _aims() -> list[Aim]:
    made = [
        Aim(cell=f"{size} ostinato aa", figure="false_stops_a_week", most=most)
        for size, most in (("1k", 0.2), ("10k", 0.2), ("100k", 0.5))
    ]
    stopped = {
        "1k": {-10.0: (0.95, 12, 800), -5.0: (0.90, 24, None)},
        "10k": {-10.0: (0.98, 6, 1_200), -5.0: (0.98, 8, 2_500), -3.0: (0.95, 12, None)},
        "100k": {
            -10.0: (0.98, 2, 5_000),
            -5.0: (0.98, 2, None),
            -3.0: (0.98, 3, None),
            -2.0: (0.95, 4, None),
            -1.0: (0.80, 8, None),
        },
    }
    for size, effects in stopped.items():
        for effect, (share, hours, turns) in effects.items():
            cell = f"{size} ostinato fourth {effect:+.1f}"
            made += [Aim(cell=cell, figure="stopped", least=share), Aim(cell=cell, figure="hours", most=hours)]
            made += [Aim(cell=cell, figure="turns", most=turns)] if turns else []
    for size, effect, most in (("1k", -3.0, 0.15), ("10k", -2.0, 0.05), ("10k", -1.0, 0.60)):
        made.append(Aim(cell=f"{size} ostinato fourth {effect:+.1f}", figure="shipped_for_good", most=most))
    for size, effect, least in (("1k", 5.0, 0.5), ("10k", 2.0, 0.8), ("100k", 1.0, 0.9)):
        made.append(Aim(cell=f"{size} ostinato better {effect:+.1f}", figure="better_in_24_h", least=least))
    for size, least in (("1k", -6.0), ("10k", -4.0), ("100k", -2.0)):
        made += [
            Aim(cell=f"{size} ostinato every {effect:+.1f}", figure="lowest_pp", least=least) for effect in (-0.5, -1.0)
        ]
        made.append(Aim(cell=f"{size} ostinato outage", figure="rollbacks_with", most=0))
    return made


AIMS = _aims()
SHARES = ("stopped", "shipped_for_good", "better_in_24_h", "confirmed", "faded")
SHOWN = {
    "aa": ("weeks", "trials_a_week", "ships_a_week", "false_stops_a_week", "rollbacks_a_week", "lowest_pp"),
    "fourth": ("candidates", "stopped", "hours", "turns", "shipped_for_good", "timed_out"),
    "better": ("candidates", "better_in_24_h", "better_in_72_h", "stopped"),
    "every": ("trials_a_week", "lowest_pp", "lowest_in_95_percent_pp", "lowest_of_all_pp", "live_at_the_end_pp"),
    "outage": ("outages", "rollbacks_with", "rollbacks_without", "stops_with", "stops_without"),
    "novelty": (
        "candidates",
        "better_in_24_h",
        "better_in_72_h",
        "confirmed",
        "faded",
        "stopped",
        "stopped_after_better",
    ),
    "disagree": ("candidates", "refused", "stopped", "shipped_for_good", "live_at_the_end_pp"),
}
SHOWN["swing"] = SHOWN["aa"]


def interval(figures: dict[str, Any], name: str) -> tuple[float, float]:
    """A 95% interval of a figure that is a share or a count; for other figures, the figure itself."""
    value = figures[name]
    if name in SHARES:
        count = figures["candidates"]
        low, high = stats.binomtest(round(value * count), count).proportion_ci(0.95, method="wilson")
        return float(low), float(high)
    if name in ("false_stops_a_week", "rollbacks_with"):
        weeks = figures["weeks"] if name == "false_stops_a_week" else 1.0
        events = round(value * weeks)
        low = stats.chi2.ppf(0.025, 2 * events) / 2 if events else 0.0
        return float(low / weeks), float(stats.chi2.ppf(0.975, 2 * events + 2) / 2 / weeks)
    return value, value


def judged(figures: dict[str, Any], aim: Aim) -> str:
    """Whether a figure reaches an aim: met, met (unsure), missed (unsure) or missed."""
    value = figures.get(aim.figure)
    if value is None:
        return "missed"
    low, high = interval(figures, aim.figure)
    met = aim.least <= value <= aim.most
    sure = (aim.least <= low and high <= aim.most) if met else (high < aim.least or low > aim.most)
    return ("met" if met else "missed") + ("" if sure else " (unsure)")


def lines(result: dict[str, Any]) -> list[str]:
    """The lines of the tables: every finished cell, kind by kind."""
    cells = [(Cell(**each["cell"]), each["figures"]) for each in result["cells"]]
    said: list[str] = []
    for kind, shown in SHOWN.items():
        chosen = [(cell, figures) for cell, figures in cells if cell.kind == kind]
        chosen.sort(key=lambda pair: (pair[0].rule != "ostinato", list(SIZES).index(pair[0].size), pair[0].effect))
        if chosen:
            said += ["", f"| {kind} | runs | {' | '.join(name.replace('_', ' ') for name in shown)} | aims |"]
            said.append("|---" * (len(shown) + 3) + "|")
        said += [_row(cell, figures, shown) for cell, figures in chosen]
    return said


def _row(cell: Cell, figures: dict[str, Any], shown: tuple[str, ...]) -> str:
    figures = figures | {"rollbacks_a_week": figures["rollbacks_a_run"] / (figures["weeks"] / cell.runs)}
    numbers = [
        _number(figures.get(name), percent=name in (*SHARES, "better_in_72_h", "refused", "timed_out"))
        for name in shown
    ]
    aims = [f"{aim.figure.replace('_', ' ')}: {judged(figures, aim)}" for aim in AIMS if aim.cell == str(cell)]
    return f"| {cell} | {cell.runs} | {' | '.join(numbers)} | {', '.join(aims) or '-'} |"


def _number(value: float | None, *, percent: bool) -> str:
    if value is None:
        return "-"
    if percent:
        return f"{100 * value:.0f}%"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Print the tables."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT
    result = json.loads(path.read_text(encoding="utf-8"))
    for row in result["shares"]:
        print(f"{row['case']}: {100 * row['found']:.1f}% of {row['runs']}, median {row['median_users']}")
    print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
