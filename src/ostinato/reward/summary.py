"""What people thought, per arm, policy version and time: small pure functions over turns and their rewards, with intervals.

Acceptance is the share of turns with a reward above 0. Its interval is Wilson's (1927), which treats turns as independent;
where arms are compared, users are the unit, because a user stays in one arm and has a taste of their own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ostinato.core.records import Arm, Reward, Turn

Z95 = 1.959963984540054
Rated = tuple[Turn, Reward]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One group of rated turns. `acceptance` lies in [`lower`, `upper`] (95%); `reward` is the mean, plus or minus `reward_pm`.

    Example: ``Point(turns=200, users=40, acceptance=0.31, lower=0.25, upper=0.38, reward=0.06, reward_pm=0.07)``
    """

    turns: int
    users: int
    acceptance: float
    lower: float
    upper: float
    reward: float
    reward_pm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Acceptance of one group minus another's, with a 95% interval; all in [-1, 1].

    Example: ``Difference(value=0.15, lower=0.04, upper=0.26)``
    """

    value: float
    lower: float
    upper: float


def join(turns: Iterable[Turn], rewards: Iterable[Reward]) -> list[Rated]:
    """Each rated turn with its reward, in the order of `turns`; turns without a reward are left out."""
    by_turn = {reward.turn: reward for reward in rewards}
    return [(turn, by_turn[turn.id]) for turn in turns if turn.id in by_turn]


def by_arm(rated: Iterable[Rated]) -> dict[Arm, Point]:
    """One point per arm."""
    return _points(rated, lambda turn: turn.arm)


def by_version(rated: Iterable[Rated]) -> dict[tuple[Arm, int], Point]:
    """One point per arm and policy number; a turn that met a swap counts for its oldest version."""
    return _points((each for each in rated if each[0].oldest is not None), lambda turn: (turn.arm, turn.oldest or 0))


def over_time(rated: Sequence[Rated], bins: int) -> dict[tuple[Arm, int], Point]:
    """One point per arm and bin 0..bins-1: equal spans of time from the first turn's start to the last one's."""
    if not rated:
        return {}
    first = min(turn.started_at for turn, _ in rated)
    span = max(turn.started_at for turn, _ in rated) - first
    return _points(
        rated,
        lambda turn: (turn.arm, min(bins - 1, int(bins * (turn.started_at - first) / span)) if span > 0 else 0),
    )


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (JASA 22:209, 1927); (0, 1) when nothing was seen."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def difference(a: Iterable[Rated], b: Iterable[Rated], z: float = Z95) -> Difference:
    """Acceptance of `a` minus that of `b`, with a normal interval whose standard errors are clustered by user.

    A group of fewer than two users cannot say how much users differ: the interval is then [-1, 1].
    """
    mean_a, se_a = _clustered([(turn.user, float(reward.value > 0)) for turn, reward in a])
    mean_b, se_b = _clustered([(turn.user, float(reward.value > 0)) for turn, reward in b])
    half = z * math.hypot(se_a, se_b)
    value = mean_a - mean_b
    return Difference(value=value, lower=max(-1.0, value - half), upper=min(1.0, value + half))


def _clustered(values: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """Mean and cluster-robust standard error (ratio estimator over users); infinite for fewer than two users."""
    if not values:
        return 0.0, math.inf
    mean = sum(value for _, value in values) / len(values)
    excess: dict[str, float] = defaultdict(float)
    for user, value in values:
        excess[user] += value - mean
    users = len(excess)
    if users < 2:
        return mean, math.inf
    return mean, math.sqrt(users / (users - 1) * sum(each * each for each in excess.values())) / len(values)


def _points(rated: Iterable[Rated], key: Callable[[Turn], Key]) -> dict[Key, Point]:
    groups: dict[Key, list[Rated]] = defaultdict(list)
    for turn, reward in rated:
        groups[key(turn)].append((turn, reward))
    return {each: _point(group) for each, group in groups.items()}


def _point(group: Sequence[Rated]) -> Point:
    accepted = sum(reward.value > 0 for _, reward in group)
    lower, upper = wilson(accepted, len(group))
    mean, error = _clustered([(turn.user, reward.value) for turn, reward in group])
    return Point(
        turns=len(group),
        users=len({turn.user for turn, _ in group}),
        acceptance=accepted / len(group),
        lower=lower,
        upper=upper,
        reward=mean,
        reward_pm=Z95 * error,
    )
