"""What people accepted, per arm: small pure functions over turns and their rewards, with intervals.

A turn is accepted if its reward is above 0. A single arm's interval is Wilson's, which treats turns as independent; where arms are
compared, users are the unit, because a user stays in one arm and has a taste of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.core.records import Arm, Person, Reward, Turn
from ostinato.evaluate.statistics import Estimate, Tally, clustered_difference, wilson

Rated = tuple[Turn, Reward]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """One group of rated turns; `acceptance` lies in [`lower`, `upper`] (95%).

    Example: ``Acceptance(turns=200, acceptance=0.31, lower=0.25, upper=0.38)``
    """

    turns: int
    acceptance: float
    lower: float
    upper: float


def by_arm(rated: Iterable[Rated]) -> dict[Arm, Acceptance]:
    """One point per arm."""
    groups: dict[Arm, list[bool]] = defaultdict(list)
    for turn, reward in rated:
        groups[turn.arm].append(reward.value > 0)
    return {arm: share_of(accepted) for arm, accepted in groups.items()}


def live_minus_control(rated: Iterable[Rated]) -> Estimate:
    """Acceptance of the live arm minus the frozen control arm's, with a 95% t interval clustered by user.

    Turns that Auto dealt are left out: its shares follow the reward, so they are no random sample. Where a side has fewer than two
    users nothing can be said of how much users differ: the interval is then [-1, 1].
    """
    tallies: dict[Arm, dict[Person, tuple[float, int]]] = {Arm.LIVE: {}, Arm.CONTROL: {}}
    for turn, reward in rated:
        if turn.arm in tallies and turn.auto is None:
            accepted, count = tallies[turn.arm].get(turn.person, (0.0, 0))
            tallies[turn.arm][turn.person] = accepted + (reward.value > 0), count + 1
    if min(len(tally) for tally in tallies.values()) < 2:
        mean = _share(tallies[Arm.LIVE]) - _share(tallies[Arm.CONTROL])
        return Estimate(mean=mean, lower=-1.0, upper=1.0, error=1.0, df=0.0, n=sum(map(len, tallies.values())))
    return clustered_difference(tallies[Arm.LIVE], tallies[Arm.CONTROL])


def _share(tally: Tally) -> float:
    count = sum(count for _, count in tally.values())
    return sum(value for value, _ in tally.values()) / count if count else 0.0


def share_of(accepted: Sequence[bool]) -> Acceptance:
    """Of turns, at least one, which were accepted."""
    lower, upper = wilson(sum(accepted), len(accepted))
    return Acceptance(turns=len(accepted), acceptance=sum(accepted) / len(accepted), lower=lower, upper=upper)
