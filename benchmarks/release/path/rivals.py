"""Other release rules on the same simulated users and candidates, reimplemented from their descriptions and defaults.

Neither vendor intends windows of three hours. `Doubling` is Ostinato's rule until November 2026: looks at doubling numbers of
outcomes, comparing live with the previous version and with a control arm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from benchmarks.release.path.rules import CADENCE, Plan, Rule
from benchmarks.release.path.world import Flags, Floats, Product, Seen, Stream, Version
from scipy import stats


@dataclass(slots=True)
class Tally:
    """Turns and accepted turns of each user."""

    turns_U: Floats
    good_U: Floats

    @classmethod
    def of(cls, users: int) -> Tally:
        """An empty tally."""
        return cls(np.zeros(users), np.zeros(users))

    def add(self, seen: Seen, rows: Flags) -> None:
        """Add the chosen rows of a slot."""
        self.turns_U[seen.people_R[rows]] += seen.turns_R[rows]
        self.good_U[seen.people_R[rows]] += seen.good_R[rows]


def difference(treated: Tally, other: Tally) -> tuple[float, float, int] | None:
    """Ratio difference, its user-clustered variance, and the users on the smaller side; None if these are fewer than five."""
    people = min(int((treated.turns_U > 0).sum()), int((other.turns_U > 0).sum()))
    if people < 5:
        return None
    totals = treated.turns_U.sum(), other.turns_U.sum()
    means = treated.good_U.sum() / totals[0], other.good_U.sum() / totals[1]
    influence_U = (treated.good_U - means[0] * treated.turns_U) / totals[0]
    influence_U = influence_U - (other.good_U - means[1] * other.turns_U) / totals[1]
    return float(means[0] - means[1]), float((influence_U**2).sum()), people


class Doubling(Rule):
    """Ostinato until November 2026: a 10% canary for 200 outcomes or an hour, then live against the version before and a 10% control."""

    def __init__(self, product: Product, plan: Plan) -> None:
        super().__init__(product, plan)
        place_U = product.places(0)
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
        visits = self.product.visits()
        people_R = visits.people_R
        control_R, canary_R = self._control_U[people_R], self._canary_U[people_R] & self._on_trial
        worth_R = np.where(control_R, self._first.worth(people_R, slot), self.live.worth(people_R, slot))
        if self._on_trial and self.candidate is not None:
            worth_R = np.where(canary_R, self.candidate.worth(people_R, slot), worth_R)
        seen = self.product.answer(visits, worth_R)
        self._now.add(seen, ~control_R & ~canary_R)
        self._control.add(seen, control_R)
        if self._on_trial:
            self._canary.add(seen, canary_R)
            self._beside.add(seen, ~control_R & ~canary_R)
        self._count(seen, canary_R if self._on_trial else ~control_R)
        self._judge_canary(slot + 1) if self._on_trial else self._judge_live(slot + 1)

    def _count(self, seen: Seen, rows: Flags) -> None:
        if self.record is not None and self.record.stopped is None:
            self.record.turns += float(seen.turns_R[rows].sum())

    def _judge_canary(self, at: int) -> None:
        assert self.record is not None
        assert self.candidate is not None
        if self._harm("canary", self._canary, self._beside, 0.01):
            self.record.stopped, self._on_trial, self._inherited = at, False, self.record.change.effect
        elif self._canary.turns_U.sum() >= 200 or at - self.record.start >= 2:
            self.record.shipped, self._on_trial, self._inherited = at, False, 0.0
            self._chain.append(self.live)
            self._before, self.live = self._now, self.candidate
            self._anew()

    def _judge_live(self, at: int) -> None:
        if not self._chain:
            return
        seen = self._now.turns_U.sum() < 50_000  # a full window no longer holds earlier outcomes
        harm = seen and self._harm("before", self._now, self._before, 0.02 / 3)
        if harm or self._harm("control", self._now, self._control, 0.02 / 3):
            if self.record is not None and self.record.stopped is None:
                self.record.stopped, self._inherited = at, self.record.change.effect
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
    """A rule that gives each candidate three hours, and ships it after them unless it was stopped."""

    shares: tuple[float, ...] = ()

    def step(self, slot: int) -> None:
        since = slot % CADENCE
        if since == 0:
            self.propose(slot)
            self._place_U = self.product.places(len(self.history.records))
            self.open()
        assert self.record is not None
        assert self.candidate is not None
        share = 0.0 if self.record.stopped is not None else self.shares[since]
        visits = self.product.visits()
        people_R = visits.people_R
        treated_R = self._place_U[people_R] < share
        worth_R = np.where(treated_R, self.candidate.worth(people_R, slot), self.live.worth(people_R, slot))
        seen = self.product.answer(visits, worth_R)
        if self.record.stopped is not None:
            return
        self.record.turns += float(seen.turns_R[treated_R].sum())
        if self.worse(seen, treated_R, self._place_U[seen.people_R] > 1.0 - share, since):
            self.record.stopped = slot + 1
        elif since == CADENCE - 1:
            self.record.shipped, self.live = slot + 1, self.candidate

    @abstractmethod
    def open(self) -> None:
        """Start with a new candidate."""

    @abstractmethod
    def worse(self, seen: Seen, treated_R: Flags, other_R: Flags, since: int) -> bool:
        """Take in a slot; True stops the candidate."""


class GrowthBookLike(Window):
    """Safe rollouts: an asymptotic confidence sequence tuned to N* = 5,000 users, one-sided 0.05, ramped to 50/50."""

    shares = (0.125, 0.375, 0.5, 0.5, 0.5, 0.5)

    def open(self) -> None:
        self._treated, self._other = Tally.of(self.product.users), Tally.of(self.product.users)

    def worse(self, seen: Seen, treated_R: Flags, other_R: Flags, since: int) -> bool:
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

    def worse(self, seen: Seen, treated_R: Flags, other_R: Flags, since: int) -> bool:
        rng = self.product.stream(Stream.BUCKETS, seen.slot)
        for rows, shares in zip((treated_R, other_R), self._shares, strict=True):
            shares += self._cut(rng, int(seen.turns_R[rows].sum()), int(seen.good_R[rows].sum()))
        if since < CADENCE - 1 or min(len(side) for side in self._shares) < 3:
            return False
        sizes = [len(side) for side in self._shares]
        gaps = np.sort(np.subtract.outer(*map(np.array, self._shares)).ravel())
        spread = math.sqrt(sizes[0] * sizes[1] * (sum(sizes) + 1) / 12)
        cut = max(0, int(sizes[0] * sizes[1] / 2 - stats.norm.ppf(0.99) * spread))
        return bool(gaps[-1 - cut] < -0.25 * abs(float(np.median(gaps))))

    def _cut(self, rng: np.random.Generator, turns: int, good: int) -> list[float]:
        if not turns:
            return []
        turns_B = rng.multinomial(turns, [1 / self.buckets] * self.buckets)
        good_B = rng.multivariate_hypergeometric(turns_B, good)
        return [float(g / n) for g, n in zip(good_B, turns_B, strict=True) if n]
