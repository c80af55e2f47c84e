"""The interface of a release rule on a simulated product, and Ostinato's own rule, which uses the real classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from benchmarks.release.gate import Gate, Simulated, Suite
from benchmarks.release.path.release_path import PathConfig, PathStep, ReleasePath
from benchmarks.release.path.world import SLOT_S, SLOTS_A_DAY, Change, Flags, Product, Seen, Stream, Version, Visits

from ostinato.core.report import Incumbent
from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.gate import smallest_total_margin
from ostinato.release.trial.contrast import TimeSlot

CADENCE = 6
"""Slots between two candidates: eight a day."""

Plan = Callable[[int], Change]
"""The change that the candidate of this number brings."""


@dataclass(slots=True)
class Record:
    """The fate of one candidate; times in slots. Example: ``Record(change=Change(effect=-0.05), start=12)``"""

    change: Change
    start: int
    turns: float = 0.0
    refused: bool = False
    shipped: int | None = None
    stopped: int | None = None
    timed_out: bool = False
    better: int | None = None
    lasted: bool | None = None


@dataclass(slots=True)
class History:
    """All candidates of a run, the slots of its rollbacks, and the effect of the live version at the end and at its lowest."""

    records: list[Record] = field(default_factory=list[Record])
    rollbacks: list[int] = field(default_factory=list[int])
    live: float = 0.0
    lowest: float = 0.0


class Rule(ABC):
    """A product released by a rule: one candidate at a time, the k-th changed by `plan(k)`."""

    def __init__(self, product: Product, plan: Plan) -> None:
        self.product, self.plan = product, plan
        self.history = History()
        self.live = product.version(0.0)
        self.candidate: Version | None = None
        self.record: Record | None = None

    def run(self, slots: int) -> History:
        """Run `slots` slots of half an hour."""
        for _ in range(slots):
            self.step(self.product.slot)
            self.history.live = self.live.effect
            self.history.lowest = min(self.history.lowest, self.live.effect)
        return self.history

    @abstractmethod
    def step(self, slot: int) -> None:
        """Run one slot."""

    def propose(self, slot: int, inherited: float = 0.0) -> Version:
        """The next candidate; `inherited` is the effect that it takes over from a refused version."""
        change = self.plan(len(self.history.records))
        change = replace(change, effect=change.effect + inherited)
        self.record = Record(change=change, start=slot)
        self.history.records.append(self.record)
        base = 0.0 if change.against_first else self.live.effect
        self.candidate = self.product.version(base + change.effect, change.novelty)
        return self.candidate


class Screen:
    """Ostinato's gate before users: it judges each candidate on a simulated suite, at the smallest margins that the suite can hold."""

    def __init__(self, product: Product, items: int) -> None:
        defaults = GateConfig(candidates_per_week=56)
        total = smallest_total_margin(items, defaults)
        config = defaults.model_copy(update={"margin": max(defaults.margin, total), "total_margin": total})
        self._gate, self._suite = Gate(config), Suite(product.stream(Stream.SUITE), items, config)
        self._stand = dict.fromkeys((Incumbent.LIVE, Incumbent.BEST, Incumbent.ANCHOR), self._suite.version(0.0))
        self._candidate: Simulated = self._stand[Incumbent.LIVE]
        self._before = self._candidate

    def passes(self, change: Change) -> bool:
        """True if this candidate may be shown to users."""
        base = Incumbent.ANCHOR if change.against_first else Incumbent.LIVE
        self._candidate = self._suite.version(self._stand[base].mean + change.suite)
        passed, better = self._gate.judge(self._suite, self._candidate, self._stand)
        if passed and better:
            self._stand[Incumbent.BEST] = self._candidate
        return passed

    def follow(self, what: str) -> None:
        """Take note of a step that may have changed live."""
        if what == "ship":
            self._before, self._stand[Incumbent.LIVE] = self._stand[Incumbent.LIVE], self._candidate
        elif what == "roll_back":
            self._stand[Incumbent.LIVE] = self._before


class Ostinato(Rule):
    """`ReleasePath` as it ships, behind a gate if there is a screen."""

    def __init__(self, product: Product, plan: Plan, config: PathConfig, screen: Screen | None = None) -> None:
        super().__init__(product, plan)
        self._screen = screen
        habits = product.habits
        self._path = ReleasePath(config, self.live, active=habits.active, each=habits.turns_a_day, good=habits.mean)
        self._stays_U: Flags = product.places(0) < config.standing.share
        self._trial_U = product.places(0)

    def step(self, slot: int) -> None:
        if slot % CADENCE == 0 and self._path.ready(slot * SLOT_S):
            self._next(slot)
        deal, visits = self._path.deal(), self.product.visits()
        people_R = visits.people_R
        stays_R = self._stays_U[people_R] if deal.standing else np.zeros(len(people_R), dtype=np.bool_)
        treated_R = ~stays_R & (self._trial_U[people_R] < deal.share)
        worth_R = np.where(treated_R, _worth(deal.treated, visits), _worth(deal.other, visits))
        seen = self.product.answer(visits, np.where(stays_R, _worth(deal.best, visits), worth_R))
        record = self.record
        if record is not None and record.stopped is None and not (record.timed_out or record.refused):
            record.turns += float(seen.turns_R[treated_R].sum())
        trial, standing = self._slot(seen, treated_R, ~stays_R), self._slot(seen, ~stays_R, np.ones_like(stays_R))
        for step in self._path.observe(trial, standing, (slot + 1) * SLOT_S):
            self._note(step, slot + 1)
        self.live = self._path.live

    def _next(self, slot: int) -> None:
        candidate = self.propose(slot)
        assert self.record is not None
        if self._screen is not None and not self._screen.passes(self.record.change):
            self.record.refused = True
            return
        self._trial_U = self.product.places(len(self.history.records))
        self._path.begin(candidate, slot * SLOT_S)

    def _slot(self, seen: Seen, treated_R: Flags, rows: Flags) -> TimeSlot:
        people_R = seen.people_R[rows]
        return TimeSlot(
            day=seen.slot // SLOTS_A_DAY,
            people_R=people_R,
            turns_R=seen.turns_R[rows],
            good_R=seen.good_R[rows],
            expected_R=self.product.expected_U[people_R],
            treated_R=treated_R[rows],
        )

    def _note(self, step: PathStep[Version], at: int) -> None:
        assert self.record is not None
        if step.what == "ship":
            self.record.shipped = at
        elif step.what == "block" and step.reason.startswith("not enough evidence"):
            self.record.timed_out = True
        elif step.what in ("block", "roll_back"):
            self.record.stopped = at
        elif step.what == "better":
            self.record.better = at
        elif step.what in ("confirmed", "faded"):
            self.record.lasted = step.what == "confirmed"
        if step.what in ("roll_back", "return_to_best"):
            self.history.rollbacks.append(at)
        if step.what == "return_to_best" and self.record.stopped is None:
            self.record.stopped = at
        if self._screen is not None:
            self._screen.follow(step.what)


def _worth(version: Version, visits: Visits) -> np.ndarray:
    return version.worth(visits.people_R, visits.slot)
