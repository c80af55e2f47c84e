"""Off-policy estimates of what other shares of Auto's arms would have earned, to be read before a changed router is used.

A failure is known at once, but the reward of an answer often never, and for one arm more often than for another. So no turn is left out.
With m_a the mean reward of arm a's rated answers, c_a the share of its answers that are rated, and l the least reward, turn i counts as

    s_i + l                                  if it failed; s_i: the value of its time and money
    s_i + m_a + (1 / c_a) (r_i - m_a)        if it has the reward r_i
    s_i + m_a                                if it has none

(augmented inverse probability weighting, Robins, Rotnitzky and Zhao 1994, with the arm as the only covariate). The estimates are then means
over all turns, which were drawn with the logged odds, and the middle line carries the uncertainty of m_a into their intervals.
This assumes that an arm's rated answers are like its others: a bias in which answers get rated remains.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.core.arm_assignment import holdout_place
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.records import Finish, Person, Pick, Reward, Turn
from ostinato.core.seams import Log
from ostinato.release.auto import offpolicy
from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.offpolicy import Floats, Ints, LoggedTurns, PolicyValue

_LEAST_EFFECTIVE = 0.01  # of the turns: with a smaller effective sample size, the estimates rest on hardly anything
# largest ratio between arms' turns per episode: beyond it, other draws would have led to another number of turns
_MOST_RATIO = 1.1
_DRIFT = 0.02  # false-positive rate of the advice about drift, shared by the arms
_DRIFT_USERS = 10  # least number of users with a reward in each half for judging an arm's drift
# of the highest rating rate among the arms: an arm below it may be rated by other people, or differently
_LEAST_RATED = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The mean utility per turn under other shares, estimated three ways, beside what was `earned` under the actual ones.

    `ips` and `dr` are None if arms differ in turns per episode: the odds are those of an episode's draw, and other draws would have led to
    another number of turns. `snips` divides by that number. Of `turns`, `rated` have a reward or failed. `advice`: the reasons to doubt the
    estimates, "" if there are none.

    Example: ``Prospect(shares={"live": 1.0}, turns=4000, rated=900, earned=PolicyValue(...), ips=..., snips=..., dr=..., advice="")``
    """

    shares: Mapping[str, float]
    turns: int
    rated: int
    earned: PolicyValue
    ips: PolicyValue | None
    snips: PolicyValue
    dr: PolicyValue | None
    advice: str


@dataclass(slots=True, kw_only=True)
class _Dealt:
    """A turn that Auto routed. `reward`: None if it is not known. `spent`: the value of its time and money."""

    person: Person
    episode: tuple[str, str]
    pick: Pick
    spent: float
    failed: bool
    reward: float | None


async def prospect(log: Log, shares: Mapping[str, float], config: RouterConfig) -> Prospect:
    """Estimate what `shares` would have earned per turn, from every turn in the log that Auto routed.

    If an arm was not available at a turn, its share goes to the others in proportion, as it would have. A failed answer counts as the least
    reward, an unknown cost as 0. An arm counts as one policy, whatever weights it had at the time; the advice names an arm whose rewards
    changed between the two halves of the log, as those of an arm that learns do. The intervals hold for one look at the log, not for
    repeated looks.

    Raises:
        BadConfig: shares that are negative, do not sum to 1, or name an arm that never existed.
        NotFound: fewer than two users with a reward, or an arm with a share but without any known reward.
    """
    if any(share < 0.0 for share in shares.values()) or abs(sum(shares.values()) - 1.0) > 1e-6:
        raise BadConfig(f"the shares {dict(shares)} must be at least 0 and sum to 1")
    dealt = await _dealt(log, config)
    if len({each.person for each in dealt if each.reward is not None}) < 2:
        raise NotFound("Auto has routed rated turns of fewer than two users; an estimate needs two")
    arms = sorted({arm for each in dealt for arm in each.pick.odds})
    if unknown := sorted(shares.keys() - set(arms)):
        raise BadConfig(
            f"there was never an arm {unknown[0]!r}: nothing is known about it; the log has {', '.join(arms)}"
        )
    known = {each.pick.arm for each in dealt if each.reward is not None}
    if unrated := sorted(arm for arm, share in shares.items() if share > 0.0 and arm not in known):
        raise NotFound(f"no reward of {unrated[0]!r} is known: an estimate with a share for it needs some")
    return _estimated(dealt, arms, shares)


async def _dealt(log: Log, config: RouterConfig) -> list[_Dealt]:
    dealt: list[_Dealt] = []
    waiting: dict[str, _Dealt] = {}
    weight, slowness = config.weights.get("reward", 0.0), config.weights.get("seconds", 0.0)
    async for _, row in log.read(await log.horizon(), {Turn, Reward}):
        if isinstance(row, Turn) and row.auto is not None and row.counts:
            named = row.verified or config.users == "declared"
            seconds = min(config.longest_s, max(0.0, row.ended_at - row.started_at))
            failed = row.finish == Finish.ERROR
            found = _Dealt(
                person=row.person if named else (row.tenant, ""),
                episode=(row.tenant, row.episode),
                pick=row.auto,
                spent=slowness * seconds - config.price * (row.auto.cost or 0.0),
                failed=failed,
                reward=weight * config.low if failed else None,
            )
            dealt.append(found)
            if not failed:
                waiting[row.id] = found
        elif isinstance(row, Reward) and row.turn in waiting:
            waiting.pop(row.turn).reward = weight * min(config.high, max(config.low, row.value))
    return dealt


def _estimated(dealt: Sequence[_Dealt], arms: Sequence[str], shares: Mapping[str, float]) -> Prospect:
    people = {person: number for number, person in enumerate(dict.fromkeys(each.person for each in dealt))}
    odds_NA = np.array([[each.pick.odds.get(arm, 0.0) for arm in arms] for each in dealt])
    arms_N = np.array([arms.index(each.pick.arm) for each in dealt])
    logged = LoggedTurns(
        users_N=np.array([people[each.person] for each in dealt]),
        arms_N=arms_N,
        odds_NA=odds_NA,
        rewards_N=_utilities(dealt, arms_N),
    )
    wanted_NA = np.where(odds_NA > 0.0, np.array([shares.get(arm, 0.0) for arm in arms]), 0.0)
    total_N1 = wanted_NA.sum(axis=1, keepdims=True)
    target_NA = np.where(total_N1 > 0.0, wanted_NA / np.where(total_N1 > 0.0, total_N1, 1.0), odds_NA)
    predicted_NA = offpolicy.cross_fitted(logged, np.zeros(len(dealt), dtype=np.int64), len(arms))
    value, lengths = offpolicy.snips(logged, target_NA), _turns_per_episode(dealt)
    even = max(lengths.values()) <= _MOST_RATIO * min(lengths.values())
    return Prospect(
        shares=dict(shares),
        turns=len(dealt),
        rated=sum(each.reward is not None for each in dealt),
        earned=offpolicy.earned(logged),
        ips=offpolicy.ips(logged, target_NA) if even else None,
        snips=value,
        dr=offpolicy.doubly_robust(logged, target_NA, predicted_NA) if even else None,
        advice=_advice(dealt, value.turns, {} if even else lengths),
    )


def _utilities(dealt: Sequence[_Dealt], arms_N: Ints) -> Floats:
    """Return the utility of each turn by the module's formulas. Answers of an arm without any reward count as the mean over all arms."""
    failed_N = np.array([each.failed for each in dealt])
    rated_N = np.array([each.reward is not None for each in dealt]) & ~failed_N
    rewards_N = np.array([each.reward or 0.0 for each in dealt])
    everybody = float(rewards_N[rated_N].mean()) if rated_N.any() else 0.0
    utilities_N = rewards_N.copy()
    for arm in np.unique(arms_N):
        answers_N = (arms_N == arm) & ~failed_N
        known_N = answers_N & rated_N
        mean = float(rewards_N[known_N].mean()) if known_N.any() else everybody
        utilities_N[answers_N] = mean
        utilities_N[known_N] += (rewards_N[known_N] - mean) * answers_N.sum() / max(1, known_N.sum())
    return utilities_N + np.array([each.spent for each in dealt])


def _turns_per_episode(dealt: Sequence[_Dealt]) -> dict[str, float]:
    """Return the mean number of turns per episode, by arm."""
    turns = Counter(each.pick.arm for each in dealt)
    episodes = Counter(arm for arm, _ in {(each.pick.arm, each.episode) for each in dealt})
    return {arm: count / episodes[arm] for arm, count in sorted(turns.items())}


def _advice(dealt: Sequence[_Dealt], effective: float, uneven: Mapping[str, float]) -> str:
    reasons: list[str] = []
    if uneven:
        told = ", ".join(f"{arm} {turns:.1f}" for arm, turns in uneven.items())
        reasons.append(f"arms differ in turns per episode ({told}): only SNIPS is a mean per turn")
    if effective < _LEAST_EFFECTIVE * len(dealt):
        reasons.append(f"these turns are worth only {effective:.0f} turns routed with these shares")
    answers = Counter(each.pick.arm for each in dealt if not each.failed)
    rated = Counter(each.pick.arm for each in dealt if not each.failed and each.reward is not None)
    parts = {arm: rated[arm] / answers[arm] for arm in sorted(answers)}
    if parts and min(parts.values()) < _LEAST_RATED * max(parts.values()):
        named = ", ".join(f"{part:.0%} of {arm}'s" for arm, part in parts.items())
        reasons.append(f"rewards are known for {named} answers: each arm's other answers are assumed to be like those")
    drifting = {arm: means for arm in sorted(answers) if (means := _drift(dealt, arm, _DRIFT / len(answers)))}
    reasons += [
        f"{arm}'s mean reward went from {before:.3g} to {after:.3g} between the halves of these turns, while the "
        f"estimate treats an arm as unchanged: estimate again from turns after its last release"
        for arm, (before, after) in drifting.items()
    ]
    return "; ".join(reasons)


def _drift(dealt: Sequence[_Dealt], arm: str, level: float) -> tuple[float, float] | None:
    """Return the mean rewards of an arm's answers in the log's two halves if they differ significantly (Student's t, clustered by user)."""
    from scipy import special  # takes a quarter of a second to import

    rated = [
        (place >= len(dealt) / 2, each.person, each.reward)
        for place, each in enumerate(dealt)
        if each.pick.arm == arm and not each.failed and each.reward is not None
    ]
    halves = [[row for row in rated if row[0] == late] for late in (False, True)]
    fewest = min(len({person for _, person, _ in half}) for half in halves)
    if fewest < _DRIFT_USERS:
        return None
    means = [sum(reward for _, _, reward in half) / len(half) for half in halves]
    influence: defaultdict[Person, float] = defaultdict(float)
    for late, person, reward in rated:
        influence[person] += (1.0 if late else -1.0) * (reward - means[late]) / len(halves[late])
    error = math.sqrt(sum(each**2 for each in influence.values()) * fewest / (fewest - 1))
    beyond = abs(means[1] - means[0]) > -float(special.stdtrit(fewest - 1, level / 2.0)) * error
    return (means[0], means[1]) if beyond else None


# ---------------------------------------------------------------- styles


@dataclass(frozen=True, slots=True, kw_only=True)
class StyleEffect:
    """The effect of a style on the reward.

    `turns`: the turns with the style; `rated`: those whose reward is known. `gain`: how much more reward per turn all people would have
    given with the style than without any, by the odds of the draws; None while it cannot be estimated.

    Example: ``StyleEffect(arm="concise@a60d30c4", turns=812, rated=310, gain=PolicyValue(...))``
    """

    arm: str
    turns: int
    rated: int
    gain: PolicyValue | None


async def style_effects(log: Log, none: str) -> list[StyleEffect]:
    """Return the effect of each style that was drawn, compared with the arm `none`, over all conversations that could have drawn either.

    A style that a person set by hand is no draw. Turns without a reward are left out: if a style changes who gives feedback, the estimate
    is about those who do. The intervals hold for one look at the log.
    """
    turns, styled, rewards = list[tuple[str, Person, Pick]](), set[str](), dict[str, float]()
    async for _, row in log.read(await log.horizon(), {Turn, Reward}):
        if isinstance(row, Turn) and row.style is not None and row.counts:
            turns.append((row.id, row.person, row.style))
            styled.add(row.id)
        elif isinstance(row, Reward) and row.turn in styled:
            rewards[row.turn] = row.value
    arms = sorted({pick.arm for _, _, pick in turns} - {none})
    return [_effect(arm, none, turns, rewards) for arm in arms]


def _effect(
    arm: str, none: str, turns: Sequence[tuple[str, Person, Pick]], rewards: Mapping[str, float]
) -> StyleEffect:
    mine = [id for id, _, pick in turns if pick.arm == arm]
    both = [
        each for each in turns if each[0] in rewards and min(each[2].odds.get(arm, 0), each[2].odds.get(none, 0)) > 0
    ]
    people = {person: number for number, person in enumerate(dict.fromkeys(person for _, person, _ in both))}
    gain = None
    if len(people) >= 2 and {arm, none} <= {pick.arm for _, _, pick in both}:
        names = sorted({name for _, _, pick in both for name in pick.odds})
        odds_NA = np.array([[pick.odds.get(name, 0.0) for name in names] for _, _, pick in both])
        logged = LoggedTurns(
            users_N=np.array([people[person] for _, person, _ in both]),
            arms_N=np.array([names.index(pick.arm) for _, _, pick in both]),
            odds_NA=odds_NA,
            rewards_N=np.array([rewards[id] for id, _, _ in both]),
        )
        gain = offpolicy.difference(logged, names.index(arm), names.index(none))
    return StyleEffect(arm=arm, turns=len(mine), rated=sum(id in rewards for id in mine), gain=gain)


_GROUPS = 64  # groups of people by a hash of their name: the clusters of a tally that stores no names
_MOST_STYLES = 50


class StyleTally:
    """The estimate of `style_effects` from running sums that name nobody. Turns and rewards are added one at a time; the log is not needed.

    For each pair of a style and no style, it keeps the sums of 1 / odds and of reward / odds, by arm and by 64 groups of people. The groups
    are the clusters, so an interval equals that of `style_effects`, or is about as wide if a group holds several people. What a forgotten
    person added stays in the sums. After fifty arms no further one is counted.

    Example::

        tally = StyleTally("none")
        drawn = tally.turn(turn.style)
        tally.reward(turn.person, drawn, 1.0)
        tally.effects()
    """

    def __init__(self, none: str) -> None:
        self._none = none
        self.answers, self._rated = Counter[str](), Counter[str]()
        self._sums: dict[str, Floats] = {}  # by arm, [arm or none, group, (1 / odds, reward / odds, 1 / odds^2)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StyleTally) and self.state() == other.state()

    def turn(self, pick: Pick) -> list[Any]:
        """Count an answer. Return, as JSON types, what `reward` needs: its arm, the arms that could be drawn, its odds."""
        if pick.arm in self.answers or len(self.answers) < _MOST_STYLES:
            self.answers[pick.arm] += 1
        return [pick.arm, sorted(arm for arm, odds in pick.odds.items() if odds > 0.0), pick.odds.get(pick.arm, 0.0)]

    def reward(self, person: Person, drawn: Sequence[Any], value: float) -> None:
        """Count the reward of an answer for which `turn` returned `drawn`."""
        arm, possible, odds = drawn
        if arm in self.answers:
            self._rated[arm] += 1
        if arm not in possible or self._none not in possible:
            return
        for other in possible if arm == self._none else (arm,):
            if other != self._none and (other in self._sums or len(self._sums) < _MOST_STYLES):
                sums = self._sums.setdefault(other, np.zeros((2, _GROUPS, 3)))
                group = int(_GROUPS * holdout_place(person))
                sums[int(arm == self._none), group] += (1.0 / odds, value / odds, 1.0 / odds**2)

    def effects(self) -> list[StyleEffect]:
        """Return the effects by name: first the arm without a style, which has no gain, then every arm that was drawn."""
        return [
            StyleEffect(arm=arm, turns=turns, rated=self._rated[arm], gain=self._gain(arm))
            for arm, turns in sorted(self.answers.items(), key=lambda each: (each[0] != self._none, each[0]))
        ]

    def _gain(self, arm: str) -> PolicyValue | None:
        if arm not in self._sums:
            return None
        sums, totals = self._sums[arm], self._sums[arm].sum(1)
        groups = int((sums[..., 0].sum(0) > 0.0).sum())
        if groups < 2 or not totals[:, 0].all():
            return None
        means = totals[:, 1] / totals[:, 0]
        residuals_G = ((sums[..., 1] - means[:, None] * sums[..., 0]) / totals[:, :1]).T @ np.array([1.0, -1.0])
        error = math.sqrt(groups / (groups - 1) * float(residuals_G @ residuals_G))
        half = offpolicy.half_width(groups - 1, error)
        mean = float(means[0] - means[1])
        turns = float((totals[:, 0] ** 2 / totals[:, 2]).min())
        return PolicyValue(mean=mean, lower=mean - half, upper=mean + half, error=error, users=groups, turns=turns)

    def state(self) -> list[Any]:
        """Return the whole state as JSON types."""
        return [dict(self.answers), dict(self._rated), {arm: sums.tolist() for arm, sums in self._sums.items()}]

    def restore(self, state: Sequence[Any]) -> None:
        """Restore what `state` returned. Raises ValueError for a state of another shape."""
        answers, rated, sums = state
        self.answers, self._rated = Counter(answers), Counter(rated)
        self._sums = {arm: np.array(each, np.float64).reshape(2, _GROUPS, 3) for arm, each in sums.items()}
