"""A simulated product: users who differ far more than versions do, come back, sleep at night, and like each version a little differently.

Acceptance is beta-binomial (mean 0.6, between-user correlation 0.15), activity log-normal (sigma 1.2, a mean of ten turns a day), a
version's effect varies between users by 3 points, and everything swings by 2 points a day and a week. Time goes in slots of half an
hour. Nobody here is a person.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLOTS_A_DAY = 48
SLOT_S = 86_400.0 / SLOTS_A_DAY
HISTORY_DAYS = 7

Floats = NDArray[np.float64]


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Version:
    """A checkpoint: `effect` in share of accepted turns against the first one, and what each user makes of it."""

    effect: float
    effect_U: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One slot: rows of users who came, their turns and accepted turns."""

    slot: int
    people_R: NDArray[np.int64]
    turns_R: Floats
    good_R: Floats


Shock = Callable[[int], float]
"""The share of acceptance that an outage takes in a slot, whatever the version."""


class Product:
    """Users and their turns. `expected_U` is what a week before the trial says of each user, shrunk to the mean."""

    def __init__(self, habits: Habits, seed: int, shock: Shock = lambda slot: 0.0) -> None:
        self.habits, self._shock = habits, shock
        self.rng = np.random.default_rng(seed)
        self.users = int(habits.active * habits.known_per_active)
        log_mean = np.log(habits.turns_a_day) - habits.spread**2 / 2
        self._rate_U = self.rng.lognormal(log_mean, habits.spread, self.users).clip(0.05, 400.0)
        self._place_U = np.cumsum(self._rate_U) / self._rate_U.sum()
        more = (1.0 - habits.correlation) / habits.correlation
        self._taste_U = self.rng.beta(habits.mean * more, (1.0 - habits.mean) * more, self.users)
        before_U = self.rng.poisson(self._rate_U * HISTORY_DAYS * self.rng.beta(2.0, 1.0, self.users))
        good_U = self.rng.binomial(before_U, self._taste_U)
        self.expected_U: Floats = (good_U + habits.shrink * habits.mean) / (before_U + habits.shrink)
        self.slot = 0

    def version(self, effect: float) -> Version:
        """A new checkpoint of this effect, with its own way of suiting some users better than others."""
        return Version(effect=effect, effect_U=effect + self.rng.normal(0.0, self.habits.between, self.users))

    def serve(self, effect_U: Floats) -> Seen:
        """One slot in which each user gets a version of this effect."""
        day = self.slot / SLOTS_A_DAY
        self.slot += 1
        swing = self.habits.swing * (np.sin(2 * np.pi * day) + np.sin(2 * np.pi * day / 7))
        busy = 1.0 + 0.5 * np.sin(2 * np.pi * day)
        total = self.rng.poisson(self._rate_U.sum() / SLOTS_A_DAY * busy)
        who = np.searchsorted(self._place_U, self.rng.random(total), side="right")
        people_R, turns_R = np.unique(np.minimum(who, self.users - 1), return_counts=True)
        chance_R = (self._taste_U[people_R] + effect_U[people_R] + swing) * (1.0 - self._shock(self.slot - 1))
        good_R = self.rng.binomial(turns_R, chance_R.clip(0.0, 1.0))
        return Seen(
            slot=self.slot - 1,
            people_R=people_R.astype(np.int64),
            turns_R=turns_R.astype(np.float64),
            good_R=good_R.astype(np.float64),
        )
