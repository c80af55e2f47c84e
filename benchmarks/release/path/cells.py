"""The table's cells: the runs behind each cell, and its figures.

A cell is many seeded runs of one rule in one world. Its kind:

- aa: nothing is wrong with any candidate. swing: likewise, where everything swings by 6 points a day instead of 2.
- fourth: one candidate of four has the named effect against the first version, the others none. A bad candidate that went live is
  repaired by the next, so that every candidate meets a sound live.
- every: each of a hundred candidates has the effect against the version that is live by then: a staircase.
- better: each candidate has the effect, a fifth of the users stay behind, and no other trial begins for a day, so that "better" can be
  shown.
- novelty: one candidate has the effect in the end, and pleases by four points more at first. It is followed for six days.
- outage: nothing is wrong with any candidate. Each seed runs twice, with and without a twelve-hour outage that takes 30% of acceptance.
- disagree: one candidate of four has the effect on users and the opposite effect on the suite, which it must pass first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from benchmarks.release.path.release_path import PathConfig
from benchmarks.release.path.rivals import Doubling, GrowthBookLike, KayentaLike
from benchmarks.release.path.rules import History, Ostinato, Plan, Record, Rule, Screen
from benchmarks.release.path.world import SLOTS_A_DAY, Change, Habits, Product

from ostinato.release.trial.config import HOUR, TrialConfig
from ostinato.release.trial.incumbent_test import StandingConfig

SIZES = {"1k": 1_000, "10k": 10_000, "100k": 100_000}
SETTINGS = {
    "1k": PathConfig(trial=TrialConfig(margin=0.04, trials_a_week=7), standing=StandingConfig(share=0.20)),
    "10k": PathConfig(trial=TrialConfig(margin=0.02, trials_a_week=20)),
    "100k": PathConfig(trial=TrialConfig(margin=0.01, trials_a_week=56)),
}
"""For each size, the margin that its traffic can resolve and the trials per week that it can carry."""

RIVALS = {"doubling": Doubling, "growthbook-like": GrowthBookLike, "kayenta-like": KayentaLike}
DAYS = {"1k": 14.0, "10k": 5.0, "100k": 4.0}
DAYS_OF_KIND = {"every": 12.5, "better": 5.0, "novelty": 6.0, "outage": 3.5}
OUTAGE = (2 * SLOTS_A_DAY + 4, 2 * SLOTS_A_DAY + 28)
AFTER_OUTAGE = 60
"""Slots after an outage's beginning in which it may cause stops and rollbacks: thirty hours."""
NOVELTY = 0.04
ITEMS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell. Example: ``Cell(size="1k", rule="ostinato", kind="aa")``"""

    size: str
    rule: str
    kind: str
    effect: float = 0.0
    runs: int = 100

    def __str__(self) -> str:
        effect = f" {100 * self.effect:+.1f}" if self.effect else ""
        return f"{self.size} {self.rule} {self.kind}{effect}"

    @property
    def slots(self) -> int:
        """The length of each run, in slots."""
        return int(SLOTS_A_DAY * DAYS_OF_KIND.get(self.kind, DAYS[self.size]))


def settings_of(cell: Cell) -> PathConfig:
    """The settings of Ostinato's rule in a cell."""
    settings = SETTINGS[cell.size]
    if cell.kind not in ("better", "novelty"):
        return settings
    trial = settings.trial.model_copy(update={"holdback": 0.20, "better_evidence": 20.0})
    proving = (24 if cell.kind == "better" else 144) * HOUR
    return settings.model_copy(update={"trial": trial, "proving_s": proving})


def plan_of(cell: Cell) -> Plan:
    """The plan of a run's candidates."""
    novelty = NOVELTY if cell.kind == "novelty" else 0.0
    suite = -cell.effect if cell.kind == "disagree" else 0.0
    change = Change(effect=cell.effect, novelty=novelty, suite=suite)
    if cell.kind in ("fourth", "disagree"):
        sound = Change(against_first=True)
        changed = replace(change, against_first=True)
        return lambda trial: changed if trial % 4 == 1 else sound
    return lambda trial: change


def histories(cell: Cell, seed: int) -> list[History]:
    """One run. An outage cell has two, the second without the outage."""
    habits = Habits(active=SIZES[cell.size], swing=0.06 if cell.kind == "swing" else 0.02)
    products = [Product(habits, seed)]
    if cell.kind == "outage":
        products.insert(0, Product(habits, seed, lambda slot: 0.3 if OUTAGE[0] <= slot < OUTAGE[1] else 0.0))
    return [_rule(cell, product).run(cell.slots) for product in products]


def _rule(cell: Cell, product: Product) -> Rule:
    if cell.rule != "ostinato":
        return RIVALS[cell.rule](product, plan_of(cell))
    screen = Screen(product, ITEMS) if cell.kind == "disagree" else None
    return Ostinato(product, plan_of(cell), settings_of(cell), screen)


def figures(cell: Cell, runs: Sequence[Sequence[History]]) -> dict[str, Any]:
    """The figures of a cell. Hours and turns are medians over the candidates that were stopped."""
    found = _rates(cell, [run[0] for run in runs])
    changed = [record for run in runs for record in run[0].records if _differs(record)]
    # a candidate that began on the last day had no day to be judged in
    judged = [record for record in changed if record.start <= cell.slots - SLOTS_A_DAY]
    if cell.kind in ("fourth", "disagree") and judged:
        found |= _fates(judged)
    if cell.kind in ("better", "novelty"):
        found |= _said_better(judged or [record for run in runs for record in run[0].records])
    if cell.kind == "outage":
        found |= _outage(runs)
    return found


def _differs(record: Record) -> bool:
    change = record.change
    return bool(change.effect or change.novelty or change.suite)


def _rates(cell: Cell, runs: Sequence[History]) -> dict[str, Any]:
    weeks = len(runs) * cell.slots / SLOTS_A_DAY / 7
    records = [record for run in runs for record in run.records]
    null = [record for record in records if not _differs(record)]
    return {
        "weeks": weeks,
        "trials_a_week": sum(not record.refused for record in records) / weeks,
        "ships_a_week": sum(record.shipped is not None for record in records) / weeks,
        "false_stops_a_week": sum(record.stopped is not None for record in null) / weeks,
        "false_better_a_week": sum(record.better is not None for record in null) / weeks,
        "rollbacks_a_run": fmean(len(run.rollbacks) for run in runs),
        "live_at_the_end_pp": 100 * fmean(run.live for run in runs),
        "lowest_pp": 100 * fmean(run.lowest for run in runs),
        "lowest_in_95_percent_pp": 100 * sorted(run.lowest for run in runs)[int(0.05 * len(runs))],
        "lowest_of_all_pp": 100 * min(run.lowest for run in runs),
    }


def _fates(changed: Sequence[Record]) -> dict[str, Any]:
    stopped = [record for record in changed if record.stopped is not None]
    count = len(changed)
    return {
        "candidates": count,
        "refused": sum(record.refused for record in changed) / count,
        "stopped": len(stopped) / count,
        "shipped_for_good": sum(r.shipped is not None and r.stopped is None for r in changed) / count,
        "timed_out": sum(record.timed_out for record in changed) / count,
        "hours": median([(r.stopped - r.start) / 2 for r in stopped if r.stopped is not None]) if stopped else None,
        "turns": median([record.turns for record in stopped]) if stopped else None,
    }


def _said_better(records: Sequence[Record]) -> dict[str, Any]:
    """Shares of the candidates called better within 24 and 72 hours of their start, and the candidates' fates."""
    count = len(records)
    hours = [(r.better - r.start) / 2 for r in records if r.better is not None]
    return {
        "candidates": count,
        "better_in_24_h": sum(each <= 24 for each in hours) / count,
        "better_in_72_h": sum(each <= 72 for each in hours) / count,
        "stopped": sum(record.stopped is not None for record in records) / count,
        "confirmed": sum(r.lasted is True for r in records) / count,
        "faded": sum(r.lasted is False for r in records) / count,
        "stopped_after_better": sum(r.better is not None and r.stopped is not None for r in records) / count,
        "shipped_for_good": sum(r.shipped is not None and r.stopped is None for r in records) / count,
    }


def _outage(runs: Sequence[Sequence[History]]) -> dict[str, Any]:
    """Rollbacks and stops in the thirty hours after an outage's beginning, and in the same hours of the same seeds without it."""
    first, last = OUTAGE[0], OUTAGE[0] + AFTER_OUTAGE
    rollbacks = [[sum(first < at <= last for at in history.rollbacks) for history in run] for run in runs]
    stops = [
        [sum(r.stopped is not None and first < r.stopped <= last for r in history.records) for history in run]
        for run in runs
    ]
    return {
        "outages": len(runs),
        "rollbacks_with": sum(pair[0] for pair in rollbacks),
        "rollbacks_without": sum(pair[1] for pair in rollbacks),
        "seeds_with_more_rollbacks": sum(pair[0] > pair[1] for pair in rollbacks),
        "seeds_with_fewer_rollbacks": sum(pair[0] < pair[1] for pair in rollbacks),
        "stops_with": sum(pair[0] for pair in stops),
        "stops_without": sum(pair[1] for pair in stops),
    }


EFFECTS = {
    "1k": (-0.10, -0.05, -0.03, -0.02),
    "10k": (-0.10, -0.05, -0.03, -0.02, -0.01),
    "100k": (-0.10, -0.05, -0.03, -0.02, -0.01),
}
GAINS = (0.0, 0.01, 0.02, 0.05)
RUNS: dict[str, tuple[int, int, int]] = {
    "aa": (60, 100, 40),
    "fourth": (48, 40, 20),
    "better": (30, 25, 12),
    "every": (20, 20, 8),
    "outage": (200, 200, 40),
    "swing": (30, 50, 20),
    "novelty": (60, 50, 20),
    "disagree": (20, 20, 10),
}
"""Runs of an Ostinato cell by kind and size: some hundred candidates per cell; for 100,000 users, as many as fit in a core-hour."""

OF_RIVALS = 0.25


def cells(scale: float = 1.0) -> list[Cell]:
    """All cells, with `scale` times the number of runs. The main demands on a release come first, the costliest cells last."""
    made: list[Cell] = []
    for size in SIZES:
        made += [_own(size, "aa"), *(_own(size, "fourth", effect) for effect in EFFECTS[size])]
    made += [_own(size, "better", effect) for size in SIZES for effect in GAINS]
    for effect in (0.0, -0.10, -0.05, -0.02):
        made += [_rival(rule, size, "fourth" if effect else "aa", effect) for size in SIZES for rule in RIVALS]
    for size in ("1k", "10k"):
        made += [_own(size, "every", effect) for effect in (-0.005, -0.01)]
        made += [_own(size, "outage"), _own(size, "swing"), _own(size, "novelty", -0.01)]
        made += [_own(size, "disagree", effect) for effect in (0.02, -0.02)]
    made += [_rival(rule, size, "every", -0.005) for size in SIZES for rule in RIVALS]
    made += [_rival(rule, size, "outage") for size in SIZES for rule in RIVALS]
    made += [_own("100k", "every", effect) for effect in (-0.005, -0.01)]
    made += [_own("100k", "novelty", -0.01), *(_own("100k", "disagree", effect) for effect in (0.02, -0.02))]
    made += [_own("100k", "swing"), _own("100k", "outage")]
    return [replace(cell, runs=max(2, round(cell.runs * scale))) for cell in made]


def _own(size: str, kind: str, effect: float = 0.0) -> Cell:
    runs = RUNS[kind][list(SIZES).index(size)]
    return Cell(size=size, rule="ostinato", kind=kind, effect=effect, runs=runs)


def _rival(rule: str, size: str, kind: str, effect: float = 0.0) -> Cell:
    own = _own(size, kind, effect)
    return replace(own, rule=rule, runs=max(4, round(OF_RIVALS * own.runs)))
