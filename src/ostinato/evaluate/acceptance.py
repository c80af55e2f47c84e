"""Acceptance rates by arm, with confidence intervals: pure functions over turns and their rewards.

A turn is accepted if its reward is above 0. Users are the unit of every interval, because a user stays in one arm and has preferences of
their own; all people behind one name count as one user.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ostinato.core.records import Arm, Person, Reward, Turn
from ostinato.evaluate.statistics import Estimate, Tally, WeightedTally, clustered_difference, clustered_share

Rated = tuple[Turn, Reward]

_PSEUDO_TURNS = 2.0  # pseudo-count: average turns mixed into a prompt's own, as most prompts are asked once or twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The acceptance rate of a group of rated turns, in [`lower`, `upper`] (95%, users as clusters).

    Example: ``Acceptance(turns=200, acceptance=0.31, lower=0.25, upper=0.38)``
    """

    turns: int
    acceptance: float
    lower: float
    upper: float


def by_arm(rated: Iterable[Rated]) -> dict[Arm, Acceptance]:
    """Return the acceptance of each arm."""
    groups: dict[Arm, list[tuple[Person, bool]]] = defaultdict(list)
    for turn, reward in rated:
        groups[turn.arm].append((turn.person, reward.value > 0))
    return {arm: share_of(accepted) for arm, accepted in groups.items()}


def live_minus_control(rated: Iterable[Rated], before: Iterable[Rated] = ()) -> Estimate:
    """Return the live arm's acceptance minus the frozen control arm's, with a 95% t interval clustered by user.

    Turns that Auto routed are left out: its shares follow the reward, so they are no random sample. Once control has turns, live's turns
    with a propensity of 1 are left out too: they are from unnamed or unverified people, who could not be assigned to control and may differ
    from those who could. If a side has fewer than two users, the variance between users is unknown and the interval is [-1, 1].

    `before`: turns of either arm from before the arms' versions differed, none of them among `rated`. The share of a prompt's turns
    accepted there is subtracted from each outcome, for both arms alike: regression adjustment (CUPED: Deng et al., WSDM 2013). What was
    accepted before does not depend on who was assigned to which arm, so this removes the variance of who asks for what and causes no bias.
    A side whose people all gave the same outcomes keeps at least the variance that it has without adjustment.
    """
    compared = [(turn, reward) for turn, reward in rated if turn.auto is None]
    if any(turn.arm is Arm.CONTROL for turn, _ in compared):
        compared = [(turn, reward) for turn, reward in compared if turn.arm is Arm.CONTROL or turn.propensity < 1.0]
    expected = _expected_by_prompt(before)
    live, control = ([pair for pair in compared if pair[0].arm is arm] for arm in (Arm.LIVE, Arm.CONTROL))
    accepted = [tally_of((turn.person, reward.value > 0) for turn, reward in side) for side in (live, control)]
    adjusted = [
        tally_of((turn.person, (reward.value > 0) - expected(turn)) for turn, reward in side)
        for side in (live, control)
    ]
    return _difference(adjusted[0], adjusted[1], raw=(accepted[0], accepted[1]))


def _expected_by_prompt(before: Iterable[Rated]) -> Callable[[Turn], float]:
    """Return a function from a turn to its prompt's acceptance in these turns, shrunk towards that of all prompts; 0 without turns."""
    prompts: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for turn, reward in before:
        good, count = prompts.get((turn.tenant, turn.prompt_ids), (0, 0))
        prompts[turn.tenant, turn.prompt_ids] = good + (reward.value > 0), count + 1
    total, turns = (sum(pair[i] for pair in prompts.values()) for i in (0, 1))
    usual = total / turns if turns else 0.0

    def expected(turn: Turn) -> float:
        good, count = prompts.get((turn.tenant, turn.prompt_ids), (0, 0))
        return (good + _PSEUDO_TURNS * usual) / (count + _PSEUDO_TURNS)

    return expected


def difference_of(treated: Iterable[tuple[Person, float]], control: Iterable[tuple[Person, float]]) -> Estimate:
    """Return the mean outcome of the treated turns minus that of the control turns, clustered by person. A turn is a person and an outcome.

    The interval is [-1, 1], with no degrees of freedom, if a side has fewer than two people.
    """
    return _difference(tally_of(treated), tally_of(control))


def _difference(one: Tally, other: Tally, raw: tuple[Tally, Tally] | None = None) -> Estimate:
    if min(len(one), len(other)) < 2:
        mean = _share(one) - _share(other)
        return Estimate(mean=mean, lower=-1.0, upper=1.0, error=1.0, df=0.0, n=len(one) + len(other))
    return clustered_difference(one, other, raw=raw)


def _share(tally: WeightedTally) -> float:
    count = sum(count for _, count in tally.values())
    return sum(value for value, _ in tally.values()) / count if count else 0.0


def share_of(accepted: Iterable[tuple[Person, bool]]) -> Acceptance:
    """Return the acceptance of one or more turns, each given as its person and whether it was accepted."""
    tally = tally_of(accepted)
    lower, upper = clustered_share(tally)
    turns = sum(count for _, count in tally.values())
    return Acceptance(turns=turns, acceptance=_share(tally), lower=lower, upper=upper)


def tally_of(accepted: Iterable[tuple[Person, float]]) -> Tally:
    """Return by person the sum and the number of their outcomes."""
    tally: dict[Person, tuple[float, int]] = {}
    for person, was in accepted:
        total, count = tally.get(person, (0.0, 0))
        tally[person] = total + was, count + 1
    return tally
