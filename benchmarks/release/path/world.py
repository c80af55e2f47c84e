"""A simulated product: users who differ far more than versions do, come back, sleep at night, and like each version a little differently.

Acceptance is beta-binomial (mean 0.6, between-user correlation 0.15), activity log-normal (sigma 1.2, a mean of ten turns a day), a
version's effect varies between users by 3 points, and everything swings by 2 points a day and a week. Time goes in slots of half an
hour. Nobody here is a person.

Each thing that is left to chance has a stream of its own: who comes in a slot and how lucky each turn is, what each version suits whom,
who is dealt what. So two rules, or one rule with and without an outage, meet the same users, turns and candidates for one seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

SLOTS_A_DAY = 48
SLOT_S = 86_400.0 / SLOTS_A_DAY
HISTORY_DAYS = 7

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What the simulated users are like. Example: ``Habits(active=10_000)``"""

    active: int
    turns_a_day: float = 10.0
    spread: float = 1.2
    mean: float = 0.6
    correlation: float = 0.15
    between: float = 0.03
    swing: float = 0.02
    shrink: float = 6.0
    known_per_active: float = 1.13


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a candidate is against live, or against the first version of all. `effect` on users and `suite` on the held-out items, in shares
    (0.01 is a point); `novelty` is what it pleases more at first, and loses with a time constant of a day.

    Example: ``Change(effect=-0.01, novelty=0.04)``
    """

    effect: float = 0.0
    novelty: float = 0.0
    suite: float = 0.0
    against_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Version:
    """A checkpoint: `effect` in share of accepted turns against the first one, and what each user makes of it; `born` is a slot."""

    effect: float
    effect_U: Floats
    novelty: float = 0.0
    born: int = 0

    def worth(self, people_R: NDArray[np.int64], slot: int) -> Floats:
        """What it adds to the acceptance of these users in a slot."""
        fresh = self.novelty * np.exp((self.born - slot) / SLOTS_A_DAY) if self.novelty else 0.0
        return self.effect_U[people_R] + fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Who comes in a slot: rows of users, their turns, and a uniform number for each turn, which is good where it lies below its chance."""

    slot: int
    people_R: NDArray[np.int64]
    turns_R: NDArray[np.int64]
    luck_N: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One slot: rows of users who came, their turns and accepted turns."""

    slot: int
    people_R: NDArray[np.int64]
    turns_R: Floats
    good_R: Floats


class Stream(IntEnum):
    """What is left to chance."""

    USERS = 0
    VISITS = 1
    VERSIONS = 2
    DEALING = 3
    SUITE = 4
    BUCKETS = 5


Shock = Callable[[int], float]
"""The share of acceptance that an outage takes in a slot, whatever the version."""


class Product:
    """Users and their turns. `expected_U` is what a week before the trial says of each user, shrunk to the mean."""

    def __init__(self, habits: Habits, seed: int, shock: Shock = lambda slot: 0.0) -> None:
        self.habits, self._seed, self._shock = habits, seed, shock
        self.users = int(habits.active * habits.known_per_active)
        self.slot = 0
        self._versions = 0
        rng = self.stream(Stream.USERS)
        log_mean = np.log(habits.turns_a_day) - habits.spread**2 / 2
        # who comes most often has the smallest number: a slot's users then lie close together in memory
        rate_U = np.sort(rng.lognormal(log_mean, habits.spread, self.users))[::-1].clip(0.05, 400.0)
        self._turns_a_slot = rate_U.sum() / SLOTS_A_DAY
        self._reach_U = np.cumsum(rate_U) / rate_U.sum()
        more = (1.0 - habits.correlation) / habits.correlation
        self._taste_U = rng.beta(habits.mean * more, (1.0 - habits.mean) * more, self.users)
        before_U = rng.poisson(rate_U * HISTORY_DAYS * rng.beta(2.0, 1.0, self.users))
        good_U = rng.binomial(before_U, self._taste_U)
        self.expected_U: Floats = (good_U + habits.shrink * habits.mean) / (before_U + habits.shrink)

    def stream(self, what: Stream, number: int = 0) -> np.random.Generator:
        """The chance of one thing; the same for the same seed and number."""
        return np.random.default_rng((self._seed, what, number))

    def places(self, deal: int) -> Floats:
        """A uniform number for each user by which a deal puts them into arms; deal 0 is for what stays for good."""
        return self.stream(Stream.DEALING, deal).random(self.users)

    def version(self, effect: float, novelty: float = 0.0) -> Version:
        """A new checkpoint of this effect, with its own way of suiting some users better than others."""
        rng = self.stream(Stream.VERSIONS, self._versions)
        self._versions += 1
        effect_U = effect + rng.normal(0.0, self.habits.between, self.users)
        return Version(effect=effect, effect_U=effect_U, novelty=novelty, born=self.slot)

    def visits(self) -> Visits:
        """Who comes next. It ends the slot before."""
        slot, rng = self.slot, self.stream(Stream.VISITS, self.slot)
        self.slot += 1
        total = rng.poisson(self._turns_a_slot * (1.0 + 0.5 * np.sin(2 * np.pi * slot / SLOTS_A_DAY)))
        # sorted first: the search then walks through memory, and is several times as fast
        who_N = np.searchsorted(self._reach_U, np.sort(rng.random(total)), side="right")
        people_R, turns_R = np.unique(np.minimum(who_N, self.users - 1), return_counts=True)
        return Visits(slot=slot, people_R=people_R, turns_R=turns_R, luck_N=rng.random(total))

    def answer(self, visits: Visits, worth_R: Floats) -> Seen:
        """What the users make of versions that are worth so much to them."""
        day = visits.slot / SLOTS_A_DAY
        swing = self.habits.swing * (np.sin(2 * np.pi * day) + np.sin(2 * np.pi * day / 7))
        chance_R = (self._taste_U[visits.people_R] + worth_R + swing) * (1.0 - self._shock(visits.slot))
        rows_N = np.repeat(np.arange(len(visits.people_R)), visits.turns_R)
        good_N = visits.luck_N < chance_R[rows_N]
        good_R = np.bincount(rows_N, good_N, minlength=len(visits.people_R)).astype(np.float64)
        return Seen(
            slot=visits.slot, people_R=visits.people_R, turns_R=visits.turns_R.astype(np.float64), good_R=good_R
        )
