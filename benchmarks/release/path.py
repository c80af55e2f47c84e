"""The release path through its real class, in a simulated product: what is stopped, how soon, and what gets past.

    python -m benchmarks.release.path                 # every cell, about half an hour on two cores
    python -m benchmarks.release.path --only 1k aa    # cells whose name holds both

Each cell is many seeded runs. In "every fourth" one candidate of four has the effect named and the others none; "every" is a staircase.
Beside Ostinato's rule stand others (`benchmarks.release.rules`) on the same users and the same candidates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from benchmarks.contender import RESULTS, machine
from benchmarks.release.rules import Doubling, GrowthBookLike, History, KayentaLike, Ostinato, Plan, Rule
from benchmarks.release.world import SLOTS_A_DAY, Habits, Product

from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.path import PathConfig
from ostinato.release.trial.standing import StandingConfig

RESULT = RESULTS / "release_path.json"
SIZES = {"1k": 1_000, "10k": 10_000, "100k": 100_000}
SETTINGS = {
    "1k": PathConfig(trial=TrialConfig(margin=0.04, trials_a_week=7), standing=StandingConfig(share=0.20)),
    "10k": PathConfig(trial=TrialConfig(margin=0.02, trials_a_week=20)),
    "100k": PathConfig(trial=TrialConfig(margin=0.01, trials_a_week=56)),
}
"""What the controller advises for this traffic."""

DAYS = {"1k": 14, "10k": 5, "100k": 4}
RULES = {"doubling": Doubling, "growthbook-like": GrowthBookLike, "kayenta-like": KayentaLike}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One line of the table. `kind`: aa | fourth | every | outage | swing. Example: ``Cell(size="1k", rule="ostinato", kind="aa")``"""

    size: str
    rule: str
    kind: str
    effect: float = 0.0
    runs: int = 50

    def __str__(self) -> str:
        effect = f" {100 * self.effect:+.1f}" if self.effect else ""
        return f"{self.size} {self.rule} {self.kind}{effect}"


def plan_of(cell: Cell) -> Plan:
    """The true effects of a run's candidates."""
    if cell.kind == "fourth":
        return lambda trial: cell.effect if trial % 4 == 1 else 0.0
    return lambda trial: cell.effect if cell.kind == "every" else 0.0


def product_of(cell: Cell, seed: int) -> Product:
    """The simulated users of a run."""
    habits = Habits(active=SIZES[cell.size], swing=0.06 if cell.kind == "swing" else 0.02)
    if cell.kind != "outage":
        return Product(habits, seed)
    first, last = 2 * SLOTS_A_DAY + 4, 2 * SLOTS_A_DAY + 28
    return Product(habits, seed, lambda slot: 0.3 if first <= slot < last else 0.0)


def one(cell: Cell, seed: int) -> History:
    """One run."""
    product, plan = product_of(cell, seed), plan_of(cell)
    ours = cell.rule == "ostinato"
    rule: Rule = Ostinato(product, plan, SETTINGS[cell.size]) if ours else RULES[cell.rule](product, plan)
    days = DAYS[cell.size] if cell.kind != "every" else 12.5
    return rule.run(int(SLOTS_A_DAY * days))


def summary(cell: Cell, runs: Sequence[History], slots: int) -> dict[str, Any]:
    """The figures of a cell. Hours and turns are medians over the candidates that were stopped."""
    weeks = len(runs) * slots / SLOTS_A_DAY / 7
    records = [record for run in runs for record in run.records]
    null = [record for record in records if record.effect == 0.0]
    found: dict[str, Any] = {
        "trials_a_week": len(records) / weeks,
        "ships_a_week": sum(record.shipped is not None for record in records) / weeks,
        "false_stops_a_week": sum(record.stopped is not None for record in null) / weeks,
        "false_better_a_week": sum(record.better is not None for record in null) / weeks,
        "rollbacks_a_run": fmean(len(run.rollbacks) for run in runs),
        "live_at_the_end_pp": 100 * fmean(run.live for run in runs),
        "lowest_pp": 100 * fmean(run.lowest for run in runs),
        "worst_run_pp": 100 * min(run.lowest for run in runs),
    }
    # a candidate that began on the last day had no day to be judged in
    changed = [record for record in records if record.effect and record.start < slots - SLOTS_A_DAY]
    if cell.kind == "fourth" and changed:
        stopped = [record for record in changed if record.stopped is not None]
        found |= {
            "candidates": len(changed),
            "stopped": len(stopped) / len(changed),
            "shipped_for_good": sum(r.shipped is not None and r.stopped is None for r in changed) / len(changed),
            "timed_out": sum(record.timed_out for record in changed) / len(changed),
            "better_in_a_day": sum(r.better is not None and r.better - r.start <= SLOTS_A_DAY for r in changed)
            / len(changed),
            "hours": median([(r.stopped - r.start) / 2 for r in stopped if r.stopped is not None]) if stopped else None,
            "turns": median([record.turns for record in stopped]) if stopped else None,
        }
    return found


def cells(scale: float) -> list[Cell]:
    """The whole table; `scale` of the number of runs."""
    made: list[Cell] = []
    runs = {"1k": 60, "10k": 60, "100k": 30}
    effects = {
        "1k": (-0.10, -0.05, -0.03, -0.02, 0.05),
        "10k": (-0.10, -0.05, -0.03, -0.02, -0.01, 0.02, 0.05),
        "100k": (-0.10, -0.05, -0.03, -0.02, -0.01, 0.01, 0.02),
    }
    for size in SIZES:
        for kind, effect in [
            ("aa", 0.0),
            *(("fourth", each) for each in effects[size]),
            ("outage", 0.0),
            ("swing", 0.0),
        ]:
            made.append(Cell(size=size, rule="ostinato", kind=kind, effect=effect, runs=runs[size]))
        for effect in (-0.005, -0.01):
            made.append(Cell(size=size, rule="ostinato", kind="every", effect=effect, runs=runs[size] // 3))
        for rule in RULES:
            for kind, effect in (("aa", 0.0), ("fourth", -0.10), ("fourth", -0.05), ("fourth", -0.02), ("outage", 0.0)):
                made.append(Cell(size=size, rule=rule, kind=kind, effect=effect, runs=runs[size] // 3))
            made.append(Cell(size=size, rule=rule, kind="every", effect=-0.005, runs=max(4, runs[size] // 10)))
    return [replace(cell, runs=max(2, round(cell.runs * scale))) for cell in made]


def main() -> None:
    """Run the cells, print a line for each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="run cells whose name holds each of these words")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many runs of each cell")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", default=str(RESULT), help="where the figures go")
    asked = parser.parse_args()
    chosen = [cell for cell in cells(asked.scale) if all(word in str(cell).split() for word in asked.only)]
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(asked.processes) as pool:
        for cell in chosen:
            begun = time.monotonic()
            runs = list(pool.map(partial(one, cell), range(1000, 1000 + cell.runs)))
            slots = int(SLOTS_A_DAY * (DAYS[cell.size] if cell.kind != "every" else 12.5))
            found = summary(cell, runs, slots)
            results.append({"cell": asdict(cell), **found})
            shown = " ".join(f"{key}={value:.3g}" for key, value in found.items() if value is not None)
            print(f"{cell} ({cell.runs} runs, {time.monotonic() - begun:.0f} s): {shown}", flush=True)
    with open(asked.out, "w", encoding="utf-8") as file:
        json.dump({"machine": machine(), "cells": results}, file, indent=1)
    print(f"written to {asked.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
