"""A simulated product. Its users differ far more than versions do, come back, sleep at night, and each like a version slightly differently.

Acceptance is beta-binomial (mean 0.6, between-user correlation 0.15), activity log-normal (sigma 1.2, a mean of ten turns a day), a
version's effect varies between users by 3 points, and everything swings by 2 points a day and a week. Time goes in slots of half an
hour. No real person is involved.

Each random quantity has a stream of its own: the visits of a slot and the luck of each turn, how each version suits each user, and the
dealing of users to arms. So two rules, or one rule with and without an outage, meet the same users, turns and candidates for one seed.
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
    """The simulated users' parameters. Example: ``Habits(active=10_000)``"""

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
    """A candidate's difference from live, or from the very first version. `effect` on users and `suite` on the held-out items are shares
    (0.01 is a point); `novelty` is an extra effect at first, which decays with a time constant of a day.

    Example: ``Change(effect=-0.01, novelty=0.04)``
    """

    effect: float = 0.0
    novelty: float = 0.0
    suite: float = 0.0
    against_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Version:
    """A checkpoint: `effect` in share of accepted turns against the first, `effect_U` for each user; `born` is the slot of its creation."""

    effect: float
    effect_U: Floats
    novelty: float = 0.0
    born: int = 0

    def worth(self, people_R: NDArray[np.int64], slot: int) -> Floats:
        """The version's addition to the acceptance of these users in a slot."""
        fresh = self.novelty * np.exp((self.born - slot) / SLOTS_A_DAY) if self.novelty else 0.0
        return self.effect_U[people_R] + fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """A slot's visits: rows of users, their turns, and a uniform number for each turn. A turn is good if its number is below its chance."""

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
    """The random streams."""

    USERS = 0
    VISITS = 1
    VERSIONS = 2
    DEALING = 3
    SUITE = 4
    BUCKETS = 5


Shock = Callable[[int], float]
"""The share of acceptance that an outage takes in a slot, whatever the version."""


class Product:
    """Users and their turns. `expected_U` is each user's acceptance in the week before the trial, shrunk to the mean."""

    def __init__(self, habits: Habits, seed: int, shock: Shock = lambda slot: 0.0) -> None:
        self.habits, self._seed, self._shock = habits, seed, shock
        self.users = int(habits.active * habits.known_per_active)
        self.slot = 0
        self._versions = 0
        rng = self.stream(Stream.USERS)
        log_mean = np.log(habits.turns_a_day) - habits.spread**2 / 2
        # the most active users get the smallest numbers, so that a slot's users lie close together in memory
        rate_U = np.sort(rng.lognormal(log_mean, habits.spread, self.users))[::-1].clip(0.05, 400.0)
        self._turns_a_slot = rate_U.sum() / SLOTS_A_DAY
        self._reach_U = np.cumsum(rate_U) / rate_U.sum()
        more = (1.0 - habits.correlation) / habits.correlation
        self._taste_U = rng.beta(habits.mean * more, (1.0 - habits.mean) * more, self.users)
        before_U = rng.poisson(rate_U * HISTORY_DAYS * rng.beta(2.0, 1.0, self.users))
        good_U = rng.binomial(before_U, self._taste_U)
        self.expected_U: Floats = (good_U + habits.shrink * habits.mean) / (before_U + habits.shrink)

    def stream(self, what: Stream, number: int = 0) -> np.random.Generator:
        """The random generator of a stream. It depends only on the seed, the stream and the number."""
        return np.random.default_rng((self._seed, what, number))

    def places(self, deal: int) -> Floats:
        """A uniform number for each user, by which a deal assigns users to arms. Deal 0 is for permanent assignments."""
        return self.stream(Stream.DEALING, deal).random(self.users)

    def version(self, effect: float, novelty: float = 0.0) -> Version:
        """A new checkpoint with this mean effect, which suits some users better than others."""
        rng = self.stream(Stream.VERSIONS, self._versions)
        self._versions += 1
        effect_U = effect + rng.normal(0.0, self.habits.between, self.users)
        return Version(effect=effect, effect_U=effect_U, novelty=novelty, born=self.slot)

    def visits(self) -> Visits:
        """The visits of the next slot; the current slot ends."""
        slot, rng = self.slot, self.stream(Stream.VISITS, self.slot)
        self.slot += 1
        total = rng.poisson(self._turns_a_slot * (1.0 + 0.5 * np.sin(2 * np.pi * slot / SLOTS_A_DAY)))
        # sorted first, so that the search walks through memory and is several times as fast
        who_N = np.searchsorted(self._reach_U, np.sort(rng.random(total)), side="right")
        people_R, turns_R = np.unique(np.minimum(who_N, self.users - 1), return_counts=True)
        return Visits(slot=slot, people_R=people_R, turns_R=turns_R, luck_N=rng.random(total))

    def answer(self, visits: Visits, worth_R: Floats) -> Seen:
        """The users' outcomes for versions that add `worth_R` to their acceptance."""
        day = visits.slot / SLOTS_A_DAY
        swing = self.habits.swing * (np.sin(2 * np.pi * day) + np.sin(2 * np.pi * day / 7))
        chance_R = (self._taste_U[visits.people_R] + worth_R + swing) * (1.0 - self._shock(visits.slot))
        rows_N = np.repeat(np.arange(len(visits.people_R)), visits.turns_R)
        good_N = visits.luck_N < chance_R[rows_N]
        good_R = np.bincount(rows_N, good_N, minlength=len(visits.people_R)).astype(np.float64)
        return Seen(
            slot=visits.slot, people_R=visits.people_R, turns_R=visits.turns_R.astype(np.float64), good_R=good_R
        )
