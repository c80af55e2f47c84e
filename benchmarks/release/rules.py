"""Ways to release, driven by the same simulated product: Ostinato's own class, and others as they are published.

The others are re-made from their descriptions and defaults; neither vendor intends windows of three hours. `Doubling` is what
Ostinato did until November 2026: looks at doubling numbers of outcomes, live before and after, and against a control arm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from benchmarks.release.world import SLOT_S, SLOTS_A_DAY, Floats, Product, Seen, Version
from numpy.typing import NDArray
from scipy import stats

from ostinato.release.trial.contrast import Slot
from ostinato.release.trial.path import PathConfig, ReleasePath

CADENCE = 6
"""Slots between two candidates: eight a day."""

Plan = Callable[[int], float]
"""The true effect, against what is live, of the trial of this number."""


@dataclass(slots=True)
class Record:
    """What became of one candidate; times in slots. Example: ``Record(effect=-0.05, start=12)``"""

    effect: float
    start: int
    turns: float = 0.0
    shipped: int | None = None
    stopped: int | None = None
    timed_out: bool = False
    better: int | None = None


@dataclass(slots=True)
class History:
    """All candidates of a run, and the effect of what is live at its end."""

    records: list[Record] = field(default_factory=list[Record])
    rollbacks: list[int] = field(default_factory=list[int])
    live: float = 0.0
    lowest: float = 0.0


class Rule(ABC):
    """A product with a rule behind it: one candidate at a time, each `plan(k)` better or worse than live when its trial begins."""

    def __init__(self, product: Product, plan: Plan) -> None:
        self.product, self.plan = product, plan
        self.history = History()
        self.live = product.version(0.0)
        self.candidate: Version | None = None
        self.record: Record | None = None

    def run(self, slots: int) -> History:
        """So many slots of half an hour."""
        for _ in range(slots):
            self.step(self.product.slot)
            self.history.live = self.live.effect
            self.history.lowest = min(self.history.lowest, self.live.effect)
        return self.history

    @abstractmethod
    def step(self, slot: int) -> None:
        """One slot."""

    def propose(self, slot: int, inherited: float = 0.0) -> Version:
        """The next candidate; `inherited` is what it took over from a version that was refused."""
        effect = self.plan(len(self.history.records)) + inherited
        self.record = Record(effect=effect, start=slot)
        self.history.records.append(self.record)
        self.candidate = self.product.version(self.live.effect + effect)
        return self.candidate


class Ostinato(Rule):
    """`ReleasePath` as it ships."""

    def __init__(self, product: Product, plan: Plan, config: PathConfig) -> None:
        super().__init__(product, plan)
        self.config = config
        self._path = ReleasePath(config, self.live, active=product.habits.active)
        self._place_U = product.rng.random(product.users)
        self._trial_U = product.rng.random(product.users)

    def step(self, slot: int) -> None:
        if slot % CADENCE == 0 and self._path.ready(slot * SLOT_S):
            self._trial_U = self.product.rng.random(self.product.users)
            self._path.begin(self.propose(slot), slot * SLOT_S)
        deal = self._path.deal()
        stays_U = self._place_U < deal.standing
        treated_U = ~stays_U & (self._trial_U < deal.share)
        effect_U = np.where(
            stays_U, deal.best.effect_U, np.where(treated_U, deal.treated.effect_U, deal.other.effect_U)
        )
        seen = self.product.serve(effect_U)
        if self.record is not None and self.record.stopped is None and not self.record.timed_out:
            self.record.turns += float(seen.turns_R[treated_U[seen.people_R]].sum())
        takes_part_R = ~stays_U[seen.people_R]
        trial, standing = (
            self._slot(seen, treated_U, takes_part_R),
            self._slot(seen, ~stays_U, np.ones_like(takes_part_R)),
        )
        for step in self._path.observe(trial, standing, (slot + 1) * SLOT_S):
            self._note(step.what, step.reason, slot + 1)
        self.live = self._path.live

    def _slot(self, seen: Seen, treated_U: NDArray[np.bool_], rows: NDArray[np.bool_]) -> Slot:
        people_R = seen.people_R[rows]
        return Slot(
            day=seen.slot // SLOTS_A_DAY,
            people_R=people_R,
            turns_R=seen.turns_R[rows],
            good_R=seen.good_R[rows],
            expected_R=self.product.expected_U[people_R],
            treated_R=treated_U[people_R],
        )

    def _note(self, what: str, reason: str, at: int) -> None:
        assert self.record is not None
        if what == "ship":
            self.record.shipped = at
        elif what == "block" and reason.startswith("not enough evidence"):
            self.record.timed_out = True
        elif what in ("block", "roll_back"):
            self.record.stopped = at
        elif what == "better":
            self.record.better = at
        if what in ("roll_back", "return_to_best"):
            self.history.rollbacks.append(at)
        if what == "return_to_best" and self.record.stopped is None:
            self.record.stopped = at


@dataclass(slots=True)
class Tally:
    """Turns and accepted turns of each user."""

    turns_U: Floats
    good_U: Floats

    @classmethod
    def of(cls, users: int) -> Tally:
        """Nothing yet."""
        return cls(np.zeros(users), np.zeros(users))

    def add(self, seen: Seen, rows: NDArray[np.bool_]) -> None:
        """The rows of a slot."""
        self.turns_U[seen.people_R[rows]] += seen.turns_R[rows]
        self.good_U[seen.people_R[rows]] += seen.good_R[rows]


def difference(treated: Tally, other: Tally) -> tuple[float, float, int] | None:
    """Ratio difference, its user-clustered variance, users on the smaller side; None with fewer than five of them."""
    people = min(int((treated.turns_U > 0).sum()), int((other.turns_U > 0).sum()))
    if people < 5:
        return None
    totals = treated.turns_U.sum(), other.turns_U.sum()
    means = treated.good_U.sum() / totals[0], other.good_U.sum() / totals[1]
    influence_U = (treated.good_U - means[0] * treated.turns_U) / totals[0]
    influence_U = influence_U - (other.good_U - means[1] * other.turns_U) / totals[1]
    return float(means[0] - means[1]), float((influence_U**2).sum()), people


class Doubling(Rule):
    """Ostinato until November 2026: 10% canary to 200 outcomes or an hour, then live against before and against a 10% control."""

    def __init__(self, product: Product, plan: Plan) -> None:
        super().__init__(product, plan)
        place_U = product.rng.random(product.users)
        self._control_U, self._canary_U = place_U < 0.1, place_U >= 0.9
        self._first = self.live
        self._chain: list[Version] = []
        self._inherited = 0.0
        self._looks: dict[str, int] = {}
        self._on_trial = False
        self._now = self._before = self._control = self._canary = self._beside = Tally.of(product.users)
        self._anew()

    def step(self, slot: int) -> None:
        if slot % CADENCE == 0 and not self._on_trial:
            self.propose(slot, self._inherited)
            self._on_trial, self._canary, self._beside = True, self._none(), self._none()
            self._looks = {key: look for key, look in self._looks.items() if key != "canary"}
        effect_U = np.where(self._control_U, self._first.effect_U, self.live.effect_U)
        if self._on_trial and self.candidate is not None:
            effect_U = np.where(self._canary_U, self.candidate.effect_U, effect_U)
        seen = self.product.serve(effect_U)
        control_R, canary_R = self._control_U[seen.people_R], self._canary_U[seen.people_R] & self._on_trial
        self._now.add(seen, ~control_R & ~canary_R)
        self._control.add(seen, control_R)
        if self._on_trial:
            self._canary.add(seen, canary_R)
            self._beside.add(seen, ~control_R & ~canary_R)
        self._count(seen, canary_R if self._on_trial else ~control_R)
        self._judge_canary(slot + 1) if self._on_trial else self._judge_live(slot + 1)

    def _count(self, seen: Seen, rows: NDArray[np.bool_]) -> None:
        if self.record is not None and self.record.stopped is None:
            self.record.turns += float(seen.turns_R[rows].sum())

    def _judge_canary(self, at: int) -> None:
        assert self.record is not None
        assert self.candidate is not None
        if self._harm("canary", self._canary, self._beside, 0.01):
            self.record.stopped, self._on_trial, self._inherited = at, False, self.record.effect
        elif self._canary.turns_U.sum() >= 200 or at - self.record.start >= 2:
            self.record.shipped, self._on_trial, self._inherited = at, False, 0.0
            self._chain.append(self.live)
            self._before, self.live = self._now, self.candidate
            self._anew()

    def _judge_live(self, at: int) -> None:
        if not self._chain:
            return
        seen = self._now.turns_U.sum() < 50_000  # a full window has lost what was before
        harm = seen and self._harm("before", self._now, self._before, 0.02 / 3)
        if harm or self._harm("control", self._now, self._control, 0.02 / 3):
            if self.record is not None and self.record.stopped is None:
                self.record.stopped, self._inherited = at, self.record.effect
            self.history.rollbacks.append(at)
            self.live, self._before = self._chain.pop(), self._none()
            self._anew()

    def _harm(self, name: str, watched: Tally, baseline: Tally, alpha: float) -> bool:
        outcomes = watched.turns_U.sum()
        look = int(outcomes // 60).bit_length() - 1
        if look <= self._looks.get(name, -1):
            return False
        self._looks[name] = look
        found = difference(watched, baseline)
        if found is None:
            return False
        mean, variance, people = found
        level = 1 - alpha / 2 ** (look + 1)
        return bool(mean + float(stats.t.ppf(level, people - 1)) * math.sqrt(variance) < -0.02)

    def _anew(self) -> None:
        self._now, self._control, self._looks = self._none(), self._none(), {}

    def _none(self) -> Tally:
        return Tally.of(self.product.users)


class Window(Rule, ABC):
    """A rule that gives each candidate three hours, and ships it at their end unless it was stopped."""

    shares: tuple[float, ...] = ()

    def step(self, slot: int) -> None:
        since = slot % CADENCE
        if since == 0:
            self.propose(slot)
            self._place_U = self.product.rng.random(self.product.users)
            self.open()
        assert self.record is not None
        assert self.candidate is not None
        share = 0.0 if self.record.stopped is not None else self.shares[since]
        treated_U = self._place_U < share
        seen = self.product.serve(np.where(treated_U, self.candidate.effect_U, self.live.effect_U))
        if self.record.stopped is not None:
            return
        treated_R = treated_U[seen.people_R]
        self.record.turns += float(seen.turns_R[treated_R].sum())
        if self.worse(seen, treated_R, self._place_U[seen.people_R] > 1.0 - share, since):
            self.record.stopped = slot + 1
        elif since == CADENCE - 1:
            self.record.shipped, self.live = slot + 1, self.candidate

    @abstractmethod
    def open(self) -> None:
        """A new candidate."""

    @abstractmethod
    def worse(self, seen: Seen, treated_R: NDArray[np.bool_], other_R: NDArray[np.bool_], since: int) -> bool:
        """Take in a slot; True stops the candidate."""


class GrowthBookLike(Window):
    """Safe rollouts: an asymptotic confidence sequence tuned to N* = 5,000 users, one-sided 0.05, ramped to 50/50."""

    shares = (0.125, 0.375, 0.5, 0.5, 0.5, 0.5)

    def open(self) -> None:
        self._treated, self._other = Tally.of(self.product.users), Tally.of(self.product.users)

    def worse(self, seen: Seen, treated_R: NDArray[np.bool_], other_R: NDArray[np.bool_], since: int) -> bool:
        self._treated.add(seen, treated_R)
        self._other.add(seen, other_R & ~treated_R)
        found = difference(self._treated, self._other)
        if found is None or found[2] < 25:
            return False
        mean, variance, _ = found
        users = int(((self._treated.turns_U > 0) | (self._other.turns_U > 0)).sum())
        return mean + _half_width(variance, users, 0.10) < 0.0


def _half_width(variance: float, users: int, alpha: float, tuned: int = 5000) -> float:
    """docs.growthbook.io/statistics/sequential."""
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / tuned
    inner = 2 * (users * rho2 + 1) / (users**2 * rho2) * math.log(math.sqrt(users * rho2 + 1) / alpha)
    return math.sqrt(users * variance * inner)


class KayentaLike(Window):
    """Kayenta: Mann-Whitney on shares of five-minute buckets, 10% against 10%, confidence 0.98, tolerance a quarter of the shift."""

    shares = (0.1,) * CADENCE
    buckets = 6

    def open(self) -> None:
        self._shares: tuple[list[float], list[float]] = ([], [])

    def worse(self, seen: Seen, treated_R: NDArray[np.bool_], other_R: NDArray[np.bool_], since: int) -> bool:
        for rows, shares in zip((treated_R, other_R), self._shares, strict=True):
            shares += self._cut(int(seen.turns_R[rows].sum()), int(seen.good_R[rows].sum()))
        if since < CADENCE - 1 or min(len(side) for side in self._shares) < 3:
            return False
        sizes = [len(side) for side in self._shares]
        gaps = np.sort(np.subtract.outer(*map(np.array, self._shares)).ravel())
        spread = math.sqrt(sizes[0] * sizes[1] * (sum(sizes) + 1) / 12)
        cut = max(0, int(sizes[0] * sizes[1] / 2 - stats.norm.ppf(0.99) * spread))
        return bool(gaps[-1 - cut] < -0.25 * abs(float(np.median(gaps))))

    def _cut(self, turns: int, good: int) -> list[float]:
        if not turns:
            return []
        turns_B = self.product.rng.multinomial(turns, [1 / self.buckets] * self.buckets)
        good_B = self.product.rng.multivariate_hypergeometric(turns_B, good)
        return [float(g / n) for g, n in zip(good_B, turns_B, strict=True) if n]
