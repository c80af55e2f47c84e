"""How often the guard rolls back an equally good release, and how soon a worse one: live against control, through the real `ReleaseWatch`.

    python -m benchmarks.release.guard [--runs 1.0] [--out FILE]

Simulated people have individual rates and activities, and a share of them is on control. The cells are equal versions, equal versions
with an outage (everything rejected) before a candidate takes half of live's people, and versions that are worse by a given amount. Of the
week before, each person's own outcomes are known. The guard looks every half hour of a day. --runs scales the number of runs of each cell;
the whole takes five minutes of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from benchmarks.contender import RESULTS, machine
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ostinato.core.records import Arm, Person, PolicyVersion
from ostinato.release.guard import GuardConfig
from ostinato.release.ledger import State
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.watch import Outcomes, ReleaseWatch
from ostinato.testing.log import MemoryLog

HOUR = 3600.0
LIVE, CONTROL = PolicyVersion(number=5, hash="aa"), PolicyVersion(number=0, hash="bb")
RAMP = ((6.5, 0.01), (7.0, 0.05), (7.5, 0.1), (8.0, 0.25), (8.5, 0.5))
ACTIVITY_SPREAD, TURNS_A_DAY = 1.2, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A product: `alike` is the correlation of one person's outcomes, `swing` that of the day, `outage` in hours, `harm` live's loss."""

    name: str
    runs: int
    people: int
    control: float = 0.1
    good: float = 0.6
    alike: float = 0.15
    swing: float = 0.0
    outage: tuple[float, float] = (0.0, 0.0)
    candidate: bool = False
    harm: float = 0.0


CELLS = (
    Cell(name="equal, 100 people", runs=400, people=100, alike=0.3),
    Cell(name="equal, 60 people", runs=400, people=60, control=0.12, alike=0.3, good=0.8),
    Cell(name="equal, 200 people, daily swing", runs=400, people=200, swing=0.3),
    Cell(name="equal, outage, then a candidate", runs=20, people=5000, control=0.2, outage=(0.0, 6.0), candidate=True),
    Cell(name="10 points worse, 200 people", runs=200, people=200, harm=0.1),
    Cell(name="20 points worse, 200 people", runs=200, people=200, harm=0.2),
    Cell(name="20 points worse, 60 people", runs=200, people=60, control=0.15, harm=0.2),
    Cell(name="10 points worse, 1,000 people, daily swing", runs=40, people=1000, harm=0.1, swing=0.3),
)


class Simulated(Outcomes):
    """Outcomes of one simulated day, and what was known of the people before it."""

    def __init__(self, cell: Cell, seed: int) -> None:
        super().__init__(MemoryLog(), OutcomeConfig(window=50_000))
        rng = np.random.default_rng(seed)
        spread = (1.0 - cell.alike) / cell.alike
        own_U = rng.beta(cell.good * spread, (1.0 - cell.good) * spread, cell.people)
        activity_U = rng.lognormal(-(ACTIVITY_SPREAD**2) / 2, ACTIVITY_SPREAD, cell.people) * TURNS_A_DAY
        turns_U = rng.poisson(activity_U)
        control_U, place_U = rng.random(cell.people) < cell.control, rng.random(cell.people)
        self.hours_T = np.sort(rng.random(int(turns_U.sum())) * 24.0)
        self.who_T = rng.permutation(np.repeat(np.arange(cell.people), turns_U))
        rate_T = own_U[self.who_T] + cell.swing * np.sin(2 * np.pi * self.hours_T / 24.0)
        down_T = (self.hours_T >= cell.outage[0]) & (self.hours_T < cell.outage[1])
        self.control_T: NDArray[np.bool_] = control_U[self.who_T]
        rate_T = np.where(down_T, 0.0, rate_T - cell.harm * ~self.control_T)
        self.good_T = (rng.random(len(rate_T)) < rate_T).astype(float)
        share_T = np.zeros(len(rate_T))
        for hour, share in RAMP if cell.candidate else ():
            share_T[self.hours_T >= hour] = share
        self.live_T: NDArray[np.bool_] = ~self.control_T & (place_U[self.who_T] >= share_T)
        before_U = rng.poisson(7.0 * activity_U)
        good_U = rng.binomial(before_U, own_U)
        more_U = (good_U - before_U * good_U.sum() / before_U.sum()) / (before_U + 6.0)
        self.before = {("t", str(user)): float(more) for user, more in enumerate(more_U)}

    async def refresh(self) -> None:
        """Do nothing: there is no log to read."""

    @property
    def maturity_s(self) -> float:
        """All is said at once."""
        return 0.0

    def expected(self, before: float, slot_s: float) -> tuple[Mapping[Person, float], Mapping[Person, float]]:
        """How much better than everybody each person did in the week before; nobody had errors."""
        return self.before, {}

    def acceptance_by_slot(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """As in `Outcomes`."""
        newest = slice(*(int(np.searchsorted(self.hours_T, at / HOUR)) for at in (since, until)))
        own_T = (self.live_T if arm is Arm.LIVE else self.control_T)[newest]
        slots_T = (self.hours_T[newest][own_T] * HOUR // slot_s).astype(int)
        tally: dict[tuple[int, Person], tuple[float, int]] = {}
        for slot, who, good in zip(slots_T, self.who_T[newest][own_T], self.good_T[newest][own_T], strict=True):
            key = int(slot), ("t", str(who))
            value, count = tally.get(key, (0.0, 0))
            tally[key] = value + float(good), count + 1
        return tally

    def success_by_slot(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """Every turn succeeds: there are no engine errors."""
        tally = self.acceptance_by_slot(arm, policy, since, until, slot_s)
        return {key: (float(count), count) for key, (_, count) in tally.items()}


async def taken_back(cell: Cell, seed: int) -> float | None:
    """The hour in which live was rolled back, or None."""
    watch = ReleaseWatch(Simulated(cell, seed), GuardConfig(), HOUR / 2)
    state = State(releases=(CONTROL, LIVE), shipped_at=0.0)
    for hour in np.arange(0.5, 24.5, 0.5):
        if await watch.live(state, CONTROL, float(hour) * HOUR):
            return float(hour)
    return None


def main() -> None:
    """Run the cells and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=float, default=1.0, help="times the runs of each cell")
    parser.add_argument("--out", type=Path, default=RESULTS / "release_guard.json")
    args = parser.parse_args()
    console, rows = Console(), list[dict[str, object]]()
    table = Table("cell", "taken back", "runs", "hour, median", title="The guard over a day")
    for cell in CELLS:
        seeds = range(max(1, round(cell.runs * args.runs)))
        hours = [asyncio.run(taken_back(cell, seed)) for seed in track(seeds, cell.name, console=console)]
        found = [hour for hour in hours if hour is not None]
        median = statistics.median(found) if found else None
        rows.append({**asdict(cell), "runs": len(seeds), "taken_back": len(found), "hour": median})
        table.add_row(cell.name, str(len(found)), str(len(seeds)), "" if median is None else f"{median:g}")
    console.print(table)
    args.out.write_text(json.dumps({"machine": machine(), "cells": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
