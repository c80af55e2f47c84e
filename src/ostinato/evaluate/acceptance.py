"""Acceptance per arm, with intervals: small pure functions over turns and their rewards.

A turn is accepted if its reward is above 0. Users are the unit of every interval, because a user stays in one arm and has a taste of
their own; all people behind one name count as one user.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.core.records import Arm, Person, Reward, Turn
from ostinato.evaluate.statistics import Estimate, Tally, clustered_difference, clustered_share

Rated = tuple[Turn, Reward]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """One group of rated turns; `acceptance` lies in [`lower`, `upper`] (95%, users as clusters).

    Example: ``Acceptance(turns=200, acceptance=0.31, lower=0.25, upper=0.38)``
    """

    turns: int
    acceptance: float
    lower: float
    upper: float


def by_arm(rated: Iterable[Rated]) -> dict[Arm, Acceptance]:
    """The acceptance of each arm."""
    groups: dict[Arm, list[tuple[Person, bool]]] = defaultdict(list)
    for turn, reward in rated:
        groups[turn.arm].append((turn.person, reward.value > 0))
    return {arm: share_of(accepted) for arm, accepted in groups.items()}


def live_minus_control(rated: Iterable[Rated]) -> Estimate:
    """Acceptance of the live arm minus the frozen control arm's, with a 95% t interval clustered by user.

    Turns that Auto assigned are left out: its shares follow the reward, so they are no random sample. Once control has turns, live's
    turns with a propensity of 1 are left out too: they are from unnamed or unverified people, who could not be assigned to control and
    may differ from those who could. If a side has fewer than two users, the variance between users is unknown and the interval [-1, 1].
    """
    compared = [(turn, reward) for turn, reward in rated if turn.auto is None]
    if any(turn.arm is Arm.CONTROL for turn, _ in compared):
        compared = [(turn, reward) for turn, reward in compared if turn.arm is Arm.CONTROL or turn.propensity < 1.0]
    live, control = (
        [(turn.person, reward.value > 0) for turn, reward in compared if turn.arm is arm]
        for arm in (Arm.LIVE, Arm.CONTROL)
    )
    return difference_of(live, control)


def difference_of(treated: Iterable[tuple[Person, bool]], control: Iterable[tuple[Person, bool]]) -> Estimate:
    """The acceptance of some turns less that of others, each given as its person and whether it was accepted, clustered by person.

    The interval is [-1, 1], with no degrees of freedom, if a side has fewer than two people.
    """
    one, other = _tally(treated), _tally(control)
    if min(len(one), len(other)) < 2:
        mean = _share(one) - _share(other)
        return Estimate(mean=mean, lower=-1.0, upper=1.0, error=1.0, df=0.0, n=len(one) + len(other))
    return clustered_difference(one, other)


def _share(tally: Tally) -> float:
    count = sum(count for _, count in tally.values())
    return sum(value for value, _ in tally.values()) / count if count else 0.0


def share_of(accepted: Iterable[tuple[Person, bool]]) -> Acceptance:
    """The acceptance of one or more turns, each given as its person and whether it was accepted."""
    tally = _tally(accepted)
    lower, upper = clustered_share(tally)
    turns = sum(count for _, count in tally.values())
    return Acceptance(turns=turns, acceptance=_share(tally), lower=lower, upper=upper)


def _tally(accepted: Iterable[tuple[Person, bool]]) -> Tally:
    tally: dict[Person, tuple[float, int]] = {}
    for person, was in accepted:
        total, count = tally.get(person, (0.0, 0))
        tally[person] = total + was, count + 1
    return tally
