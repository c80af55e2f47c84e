"""Simulated users for Auto: each user has an individual probability of liking an arm's answer.

A user has one taste u in [0, 1), and likes arm a with the u-quantile of a beta distribution whose mean is the arm's quality and whose
spread makes two of a user's verdicts on one arm correlate by rho = 0.15 (beta-binomial: rho = 1 / (alpha + beta + 1)): a user who is easily
pleased is pleased by every arm. Activity is drawn from a gamma distribution of shape 1/2: a fifth of the users ask two thirds of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy import special

from ostinato.core.records import Arm, Pick, PolicyVersion, Reward, Turn
from ostinato.release.auto.posterior import drawn
from ostinato.release.auto.router import Router
from ostinato.testing.records import a_turn

RHO = 0.15
TURNS = 4  # per episode, at most; 1 to 4 are equally likely


@dataclass(frozen=True)
class Served:
    """One simulated turn: the user, the episode, the arm and its odds, and the probability that each arm's answer would be liked."""

    number: int
    user: int
    episode: int
    arm: str
    odds: Mapping[str, float]
    chances: Mapping[str, float]
    liked: float

    def turn(self, clustered: bool = True) -> Turn:
        """The turn's row of the log. If `clustered` is False, every turn has a user of its own."""
        id = f"t{self.number}:0"
        user, episode = f"u{self.user}" if clustered else id, f"e{self.episode}"
        return replace(_answer_of(self.arm), id=id, user=user, episode=episode, auto=Pick(arm=self.arm, odds=self.odds))

    def reward(self) -> Reward:
        """The reward's row of the log."""
        return Reward(
            turn=f"t{self.number}:0", value=self.liked, function="simulated@1", signals=(), at=float(self.number)
        )


class Crowd:
    """Simulated users. Their tastes and activities are drawn once."""

    def __init__(self, users: int, rng: np.random.Generator) -> None:
        self.tastes_U = rng.random(users)
        weights_U = rng.gamma(0.5, 1.0, users)
        self._edges_U = np.cumsum(weights_U / weights_U.sum())

    def asking(self, place: float) -> int:
        """The user who asks next, for a uniform number `place`."""
        return min(int(np.searchsorted(self._edges_U, place)), self.tastes_U.size - 1)

    def chances(self, quality: float) -> np.ndarray:
        """The probability that each user likes an arm of this quality."""
        return np.interp(self.tastes_U, *_quantiles(quality))


@cache
def _answer_of(arm: str) -> Turn:
    """A turn with the weights of this arm only. All arms but `live` and `canary` are outside arms."""
    turn = a_turn(arm=Arm(arm) if arm in ("live", "canary") else Arm.OUTSIDE)
    weights = PolicyVersion(number=0, hash=arm)
    return replace(turn, spans=tuple(replace(span, policy=weights) for span in turn.spans))


@cache
def _quantiles(quality: float) -> tuple[np.ndarray, np.ndarray]:
    """The beta distribution's inverse on a fine grid. The exact inverse is slow, and its mean differs by less than 0.0001."""
    spread, grid_X = 1.0 / RHO - 1.0, (np.arange(4_000) + 0.5) / 4_000
    return grid_X, special.betaincinv(quality * spread, (1.0 - quality) * spread, grid_X)


def traffic(
    crowd: Crowd,
    qualities: Mapping[str, float],
    router: Router,
    turns: int,
    rng: np.random.Generator,
    *,
    start: int = 0,
) -> Iterator[Served]:
    """Yield turns that the router deals, episode by episode. The caller feeds their outcomes to the router."""
    chances = {arm: crowd.chances(quality) for arm, quality in qualities.items()}
    number, episode = start, start
    while number < start + turns:
        user, episode = crowd.asking(rng.random()), episode + 1
        own = {arm: float(values[user]) for arm, values in chances.items()}
        odds = router.odds(list(qualities))
        arm = drawn(odds, float(rng.random()))
        for _ in range(min(int(rng.integers(1, TURNS + 1)), start + turns - number)):
            number += 1
            yield Served(number, user, episode, arm, odds, own, float(rng.random() < own[arm]))


class Feed:
    """Feeds a router turns and, `late` turns later, their rewards, in batches of `every` turns, like a periodic reader of the log."""

    def __init__(self, router: Router, *, late: int, every: int, clustered: bool = True) -> None:
        self._router, self._late, self._every, self._clustered = router, late, every, clustered
        self._rows: list[Turn | Reward] = []
        self._waiting: deque[Reward] = deque()
        self._turns = 0

    def take(self, served: Served) -> None:
        """Add the next turn."""
        self._rows.append(served.turn(self._clustered))
        self._waiting.append(served.reward())
        if len(self._waiting) > self._late:
            self._rows.append(self._waiting.popleft())
        self._turns += 1
        if self._turns % self._every == 0:
            for row in self._rows:
                self._router.apply(row)
            self._rows.clear()
