"""Credit assignment: the advantage of each turn, from single rollouts or from groups of rollouts.

**Single rollouts**, where each prompt was answered once: return minus a learned baseline, normalised over the batch, capped.

A_t = (G_t - b(x_t, user_t)) / RMS, with G_t the turn's return within its episode (`returns`). Any b that does not
depend on what was sampled leaves the policy gradient unbiased (Williams 1992, section 6); a good one lowers its variance. Dividing
by the root mean square rather than by the standard deviation keeps the sign of a lone reward: one turn with reward +1 gets +1, not
0. Global rather than per-prompt normalisation follows REINFORCE++ (arXiv:2501.03262).

**Groups**, where each prompt was answered many times: an episode's return minus the mean of its group's.

Dr. GRPO (arXiv:2503.20783), as in Composer 2's report (arXiv:2603.24477, section 4.1): the advantage is divided neither by the group's
standard deviation, which would make the easiest and the hardest tasks count most, nor by any length. Every token of every turn of an
episode gets the episode's advantage, and the loss sums over them (`Sample.summed`): sum A grad log p(token) over all tokens of an episode
is A grad log p(episode), the policy gradient itself. With a weight of 1 / turns instead, each turn of a failure of twenty turns would be
penalised less than each turn of a failure of two, and a policy that fails would learn to fail slowly.

The mean includes the episode itself, so the expected gradient is (n - 1) / n of the exact one in a group of n.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ostinato.core.errors import NoSignal
from ostinato.core.records import Advantages, Arm, Person, Turn
from ostinato.core.samples import Episode, EpisodeKey, LaterReturns, call_of
from ostinato.core.seams import Credit
from ostinato.core.verdicts import is_continuation
from ostinato.reward.baseline import Baseline, BaselineInputs, Floats, context_of, counted_as
from ostinato.reward.config import RewardConfig
from ostinato.reward.line_credit import NO_LINES, TurnLines
from ostinato.reward.recent_shares import RecentShares, masses_of, scales_of

# ---------------------------------------------------------------- episodes


def by_episode(turns: Iterable[Turn], after: Mapping[EpisodeKey, LaterReturns] | None = None) -> list[Episode]:
    """Group turns, given oldest first, into episodes, in order of their first turns. `after`: the returns of episodes that continue."""
    after = after or {}
    found: dict[tuple[str, str], list[Turn]] = {}
    for turn in turns:
        found.setdefault((turn.tenant, turn.episode), []).append(turn)
    return [
        Episode(
            id=episode, tenant=tenant, turns=tuple(members), group=members[0].group, after=after.get((tenant, episode))
        )
        for (tenant, episode), members in found.items()
    ]


def returns(turns: Sequence[str], rewards: Sequence[float], discount: float, after: float = 0.0) -> list[float]:
    """Return the return of each turn of an episode: its own reward plus the discounted later ones. G_t = r_t + discount * G_t+1.

    The choices of one call do not follow each other: each of them is followed by the next call, and the previous call by their mean.
    `turns` are ids; `after` is the return at the call that follows the last one here.

    Example: ``returns(["a:0", "b:0", "c:0"], [0.0, 0.0, 1.0], 0.5) == [0.25, 0.5, 1.0]``
    """
    later, found = after, list[float]()
    for _, choices in groupby(zip(reversed(turns), reversed(rewards), strict=True), key=lambda pair: call_of(pair[0])):
        values = [reward + discount * later for _, reward in choices]
        later = math.fsum(values) / len(values)
        found += values
    return found[::-1]


class TurnReturn(NamedTuple):
    """The return of a turn, and the parts of it that come from values of lines and from outcomes of the episode.

    Example: ``TurnReturn(total=0.75, lines=0.0, outcomes=0.75)``
    """

    total: float
    lines: float
    outcomes: float


class EpisodeReturns(NamedTuple):
    """The return of each turn of an episode, in order, and the return at its first call, by parts."""

    turns: list[TurnReturn]
    first: LaterReturns


def episode_returns(
    turns: Sequence[str],
    rewards: Sequence[tuple[float, float, int]],
    discount: float,
    *,
    outcomes: Container[str] = (),
    after: LaterReturns | None = None,
) -> EpisodeReturns:
    """Compute `returns` of an episode in which rewards may have values of single lines, or be about the whole episode.

    Values of lines are averaged: a turn's part is the mean over its own lines and those of later turns, where a line n turns later counts
    discount^n. With a sum, an edit in ten pieces would be paid ten times. Before the first turn with lines the part is discounted, as a
    single later reward would be. The rewards of `outcomes` are averaged likewise, each counting as one, but reach all earlier turns
    undiscounted: an outcome is worth the same at the first turn of any episode, and reporting it ten times is worth no more than once. All
    other rewards add up, discounted, as in `returns`. Without lines and outcomes, the result is exactly that of `returns`.

    Args:
        turns: ids.
        rewards: for each turn its reward, the mean value of its lines, which is a part of the reward, and the number of lines.
        discount: the factor by which a reward counts for the turn before.
        outcomes: the turns whose reward, apart from lines, reaches the whole episode.
        after: the return at the call that follows the last one here; None: nothing follows.

    Example: ``episode_returns(["a:0", "b:0"], [(0.0, 0.0, 0), (1.0, 0.0, 0)], 0.5, outcomes=["b:0"]).turns[0].total == 1.0``
    """
    later = after or LaterReturns()
    rest = [reward - mean if lines else reward for reward, mean, lines in rewards]
    fading = [0.0 if turn in outcomes else reward for turn, reward in zip(turns, rest, strict=True)]
    plain = returns(turns, fading, discount, later.fading)
    lines, lines_first = _mean_returns(
        turns,
        [(mean, count) for _, mean, count in rewards],
        discount,
        (later.lines_sum, later.lines_weight, later.lines_mean),
    )
    ends, ends_first = _mean_returns(
        turns,
        [(reward, int(turn in outcomes)) for turn, reward in zip(turns, rest, strict=True)],
        1.0,
        (later.outcomes_sum, later.outcomes_weight, later.outcomes_mean),
    )
    found = [
        TurnReturn(_plus(_plus(value, of_lines), of_ends), of_lines, of_ends)
        for value, of_lines, of_ends in zip(plain, lines, ends, strict=True)
    ]
    call = call_of(turns[0])
    choices = [value for turn, value in zip(turns, plain, strict=True) if call_of(turn) == call]
    return EpisodeReturns(found, LaterReturns(math.fsum(choices) / len(choices), *lines_first, *ends_first))


_MeanReturn = tuple[float, float, float]
"""For averaged values: their discounted sum, their total weight, and their mean as a part of the return."""


def _mean_returns(
    turns: Sequence[str], values: Sequence[tuple[float, int]], discount: float, after: _MeanReturn
) -> tuple[list[float], _MeanReturn]:
    """Return each turn's mean over its own and later values, given as (mean, count), and the state before the first call."""
    if not any(after) and not any(count for _, count in values):
        return [0.0] * len(values), after
    total, weight, part = after
    parts: list[float] = []
    for _, choices in groupby(zip(reversed(turns), reversed(values), strict=True), key=lambda pair: call_of(pair[0])):
        own = [(count * mean + discount * total, count + discount * weight, count) for _, (mean, count) in choices]
        found = [value / weight_then if count else discount * part for value, weight_then, count in own]
        total, weight = math.fsum(each[0] for each in own) / len(own), math.fsum(each[1] for each in own) / len(own)
        part = math.fsum(found) / len(found)
        parts += found
    return parts[::-1], (total, weight, part)


def _plus(value: float, part: float) -> float:
    return value + part if part else value


# ---------------------------------------------------------------- single rollouts


LEAST_RMS = 1e-8


class SingleRollout:
    """Implements `core.seams.Credit`. All tokens of a turn get the same advantage, unless `lines` has values of its lines: then the tokens
    of such a line get the line's own value instead of the lines' mean (`reward.line_credit`).

    A reward reaches the earlier turns of its episode, discounted, or undiscounted if its turn is among `outcomes`. Returns of turns
    outside the batch come from `Episode.after`. All turns weigh the same (`turn_weights`), in the RMS and in the capped shares: a person's
    mass is the weight of their turns. It is not the size of their advantages, which differs between good and bad turns: a cap that cut one
    kind more would bias the gradient.

    `recent` says how much each person may have, given their share of the last steps. `weights`, by turn id, are those of turns that were
    drawn with unequal chances (`Batch.weights`); None: all weigh the same. `masses` are then those of all turns that it was drawn from.

    Turns with the same prompt in a batch are compared with each other: the returns of the others, weighted as the baseline weighs evidence,
    go into the baseline like that many more turns of the prompt (leave one out: Kool et al., 2019). The others are those of other people,
    whose rewards do not depend on this answer, so that the gradient stays unbiased, and the other choices of one call if no turn follows
    it. Choices that a person saw side by side compete for acceptance: for these it is the gradient of being preferred. A turn that its
    person asked for again is not among the others, since it exists because of the first answer.

    `baseline` and `recent` are only read here; the fold of the log updates them.

    Example::

        credit = SingleRollout(RewardConfig(), Baseline())
        credit([Episode(id="e1", tenant="default", turns=(turn,))], {turn.id: 1.0}) == {turn.id: (1.0,) * len(turn.sampled_ids)}
    """

    def __init__(
        self,
        config: RewardConfig,
        baseline: Baseline,
        recent: RecentShares | None = None,
        weights: Mapping[str, float] | None = None,
        *,
        masses: Mapping[Person, float] | None = None,
        lines: Mapping[str, TurnLines] | None = None,
        outcomes: Container[str] = (),
    ) -> None:
        self._config = config
        self._baseline = baseline
        self._weights, self._masses = weights, masses
        self._lines, self._outcomes = lines or {}, outcomes
        self._recent = recent or RecentShares(config.user_steps)

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """Return by turn id one advantage per sampled token.

        Raises:
            NoSignal: no turns, two or more turns that all have the same reward, or a baseline that explains every return.
            ValueError: a reward is not finite.
        """
        turns = [turn for episode in episodes for turn in episode.turns]
        lines_differ = any(lines.differ for turn in turns if (lines := self._lines.get(turn.id)))
        later = [episode.after.decided for episode in episodes if episode.after and episode.after.decided]
        _refuse_without_contrast([rewards[turn.id] for turn in turns], later, lines_differ=lines_differ)
        residuals_N, shares_N, unit = self._residuals(episodes, rewards)
        squares_N = residuals_N**2
        by_line = {
            i: residuals_N[i] + lines.deviations(len(turn.sampled_ids), shares_N[i], unit)
            for i, turn in enumerate(turns)
            if (lines := self._lines.get(turn.id)) and lines.known
        }
        for i, residuals_T in by_line.items():
            squares_N[i] = np.mean(residuals_T**2)
        weights = [] if self._weights is None else [self._weights[turn.id] for turn in turns]
        rms = math.sqrt(float(np.average(squares_N, weights=weights or None)))
        if rms < LEAST_RMS / unit:
            raise NoSignal(f"the baseline explains every reward: the residuals' RMS is below {LEAST_RMS:g}")
        advantages_N = residuals_N / rms
        people = [(counted_as(turn, self._config.users), turn.episode) for turn in turns]
        scales = scales_of(self._masses or masses_of(people, even=True), self._recent, self._config)
        cuts = [scales.get(person, 1.0) for person, _ in people]
        found = {
            turn.id: (float(advantage) * cut,) * len(turn.sampled_ids)
            for turn, advantage, cut in zip(turns, advantages_N, cuts, strict=True)
        }
        for i, residuals_T in by_line.items():
            found[turns[i].id] = tuple((residuals_T / rms * cuts[i]).tolist())
        return found

    def _residuals(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> tuple[Floats, Floats, float]:
        """Return the returns minus the baseline, the part of each return that comes from lines, and the unit of both. The unit is chosen so
        that no square overflows; it cancels on division by the RMS.
        """
        turns = [turn for episode in episodes for turn in episode.turns]
        contexts = [context_of(turn, self._config.users) for turn in turns]
        expected_N = np.array([self._baseline.predict(context) for context in contexts])
        after = [abs(value) for episode in episodes for value in episode.after or ()]
        largest = max(float(np.abs(expected_N).max()), *(abs(rewards[turn.id]) for turn in turns), *after)
        unit = 2.0 ** min(1023, max(0, math.frexp(largest)[1]))  # a power of two: division by it rounds nothing
        lines = {turn.id: self._lines.get(turn.id, NO_LINES) for turn in turns}
        reached = [
            value
            for episode in episodes
            for value in episode_returns(
                [turn.id for turn in episode.turns],
                [(rewards[turn.id] / unit, lines[turn.id].mean / unit, lines[turn.id].lines) for turn in episode.turns],
                self._config.discount,
                outcomes=self._outcomes,
                after=episode.after and episode.after.divided(unit),
            ).turns
        ]
        reached_N = np.array([value.total for value in reached])
        evidence_N = np.array([self._baseline.evidence(context) for context in contexts])
        # choices of a call that later turns follow are not compared: those turns followed one choice, and say nothing about the others
        last = {call_of(episode.turns[-1].id) for episode in episodes if episode.after is None}
        calls = [call if (call := call_of(turn.id)) in last else turn.id for turn in turns]
        weights_N = np.array([self._baseline.weight_of(len(turn.sampled_ids)) for turn in turns])
        if self._weights is not None:
            drawn_N = np.array([self._weights[turn.id] for turn in turns])
            weights_N *= drawn_N / drawn_N.mean()
        expected_N = leave_one_out(contexts, calls, reached_N, weights_N, expected_N / unit, evidence_N)
        return reached_N - expected_N, np.array([value.lines for value in reached]), unit


def leave_one_out(
    contexts: Sequence[BaselineInputs],
    calls: Sequence[str],
    reached_N: Floats,
    weights_N: Floats,
    expected_N: Floats,
    evidence_N: Floats,
) -> Floats:
    """Return each turn's expected return, with the returns of other turns of its prompt as further evidence. See `SingleRollout`.

    Args:
        contexts: of the batch's turns.
        calls: choices with the same value are compared, as those of one call.
        reached_N: the turns' returns.
        weights_N: the number of turns that each counts for.
        expected_N: the baseline's predictions.
        evidence_N: the number of turns that each prediction is worth.
    """
    keys = [
        (
            (context.person[0], context.prompt),
            (context.person, context.prompt),
            (context.person, context.prompt, call),
        )
        for context, call in zip(contexts, calls, strict=True)
    ]
    sums: defaultdict[Hashable, Floats] = defaultdict(lambda: np.zeros(3))  # of turns, weights and weighted returns
    own_N3 = np.stack([np.ones_like(reached_N), weights_N, weights_N * reached_N], axis=1)
    for of_turn, own_3 in zip(keys, own_N3, strict=True):
        for key in of_turn:
            sums[key] += own_3
    found_N = expected_N.copy()
    for i, (prompt, person, call) in enumerate(keys):
        others, weight, reached = sums[prompt] - sums[person] + sums[call] - own_N3[i]
        if others:
            found_N[i] += (reached - weight * expected_N[i]) / (evidence_N[i] + weight)
    return found_N


def _refuse_without_contrast(rewards: Sequence[float], later: Sequence[float], *, lines_differ: bool) -> None:
    """Raise NoSignal if nothing can be learned, ValueError if nothing can be computed. `later`: the returns of the turns that follow, as
    far as they come from rewards; the baseline's predictions for them are no contrast, only noise.
    """
    if not rewards:
        raise NoSignal("the batch is empty")
    if not all(map(math.isfinite, rewards)):
        raise ValueError("a reward is not finite")
    if len(rewards) >= 2 and len({*rewards, *later}) == 1 and not lines_differ:
        raise NoSignal(f"all {len(rewards)} rewards are {rewards[0]:g}: nothing tells a good turn from a bad one")


# ---------------------------------------------------------------- groups of rollouts


class GroupRelative:
    """Implements `core.seams.Credit`. An episode without a group is a group of one.

    Nothing is learned from a group of one, nor from a group whose returns are all equal: its advantages are exactly 0.

    `equal_states`: compare each turn at its state, which is its whole prompt (step-level groups, GiGPO, arXiv:2505.10978). Its advantage is
    its return minus the mean return of the group's episodes that reached the same prompt, itself included. A turn at a prompt that no other
    episode reached keeps the advantage of its episode's last compared state, or of the whole group if there is none. Bias: none in
    direction at any turn, since what is expected of a state does not depend on what is answered there. But with n episodes at a state
    its gradient is (n - 1) / n of the exact one, so states where few meet count less. What a prompt does not show, such as a file that
    nobody read, may still differ.

    Continuations (`core.verdicts.is_continuation`) were sampled anew from one turn of an episode that failed (Monte Carlo from
    intermediate states, VinePPO, arXiv:2410.01679). They are compared with each other, those of one prompt together, and only their
    first turns get credit: what follows measures how good these were. Bias: none for that state, up to the (n - 1) / n; but states
    from which episodes fail count more often than they are visited. All other turns learn as without continuations.

    Example::

        GroupRelative()([right, wrong], {"right:0": 1.0, "wrong:0": 0.0}) == {"right:0": (0.5, 0.5), "wrong:0": (-0.5,)}
    """

    def __init__(self, *, equal_states: bool = False) -> None:
        self._equal_states = equal_states

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """Return by turn id one advantage per sampled token.

        Raises:
            NoSignal: no episodes, or no group whose returns differ.
            ValueError: a reward is not finite.
        """
        groups: dict[tuple[str, str], list[Episode]] = defaultdict(list)
        for episode in episodes:
            groups[episode.tenant, episode.group or f"\0{episode.id}"].append(episode)
        found: dict[str, Advantages] = {}
        flat = 0
        for members in groups.values():
            by_turn = self._of_group(members, rewards)
            flat += not any(by_turn.values())
            found |= {turn.id: (by_turn[turn.id],) * len(turn.sampled_ids) for each in members for turn in each.turns}
        if flat == len(groups):
            raise NoSignal(
                f"in none of {flat} groups did one rollout do better than another" if flat else "the batch is empty"
            )
        return found

    def _of_group(self, members: Sequence[Episode], rewards: Mapping[str, float]) -> dict[str, float]:
        """Return the advantage of each turn of a group, by id."""
        compared: dict[tuple[int, ...], list[Episode]] = defaultdict(list)
        for member in members:
            compared[member.turns[0].prompt_ids if is_continuation(member.id) else ()].append(member)
        found: dict[str, float] = {}
        for prompt, some in compared.items():
            returns = [math.fsum(rewards[turn.id] for turn in member.turns) for member in some]
            advantages = relative(returns)
            at_state = _at_states(some, returns) if self._equal_states and not prompt else {}
            for i, (member, advantage) in enumerate(zip(some, advantages, strict=True)):
                for number, turn in enumerate(member.turns):
                    advantage = at_state.get((turn.prompt_ids, i), advantage)
                    found[turn.id] = 0.0 if prompt and number else advantage
        return found


def _at_states(members: Sequence[Episode], returns: Sequence[float]) -> dict[tuple[tuple[int, ...], int], float]:
    """Return, for each prompt that several episodes reached, each one's return minus their mean, by prompt and number of the episode."""
    there: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for i, member in enumerate(members):
        for turn in member.turns:
            there[turn.prompt_ids][i] = returns[i]
    return {
        (prompt, i): advantage
        for prompt, some in there.items()
        if len(some) > 1
        for i, advantage in zip(some, relative(list(some.values())), strict=True)
    }


def relative(returns: Sequence[float]) -> list[float]:
    """Return each return minus the mean of all; exactly 0 where all are equal. Raises ValueError if one is not finite.

    Example: ``relative([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]``
    """
    if not all(map(math.isfinite, returns)):
        raise ValueError("a return is not finite")
    if min(returns) == max(returns):
        return [0.0] * len(returns)
    mean = math.fsum(returns) / len(returns)
    return [value - mean for value in returns]


# ---------------------------------------------------------------- belief change


class BeliefWeighted:
    """Implements `core.seams.Credit`: redistributes another rule's credit towards the turns that changed the belief in the right answer.

    The belief is the probability that the policy itself gives to a task's known answer after each turn. Its change at a turn says how much
    closer the turn came to the answer (information gain, IGPO, arXiv:2510.14967). Here it only decides how an episode's credit is divided
    among its turns, never whether the credit is positive or negative (magnitude from one source and direction from the outcome, as RLSD,
    arXiv:2604.03128): in a success the turns that raised the belief get more, in a failure those that lowered it.

    A turn's factor is 1 + w (c / mean(c) - 1), with c the size of its change in the outcome's direction, 0 if it went the other way, and
    the mean over the episode's tokens. w is `strength`, or less where a factor would exceed `most`. So factors average to 1 over an
    episode's tokens, lie between 1 - `strength` and `most`, and are all 1 if no turn changed the belief in the outcome's direction. An
    episode with a turn whose change is unknown keeps its credit.

    Bias: a factor depends on what was sampled, so it is no baseline, and this is not the gradient of the mean outcome. Of two ways to
    succeed, the one that leaves the policy surer of the answer is learned faster. Turns whose use does not show in the answer's
    probability, such as a test run, are learned more slowly (with a factor of at least 1 - `strength`). No outcome's sign is ever flipped,
    so what lowers the chance of success is never praised in the mean of equal changes. Wrong beliefs of the policy misplace credit.

    Args:
        credit: gives the direction, and the sum over an episode's tokens.
        changes: by turn id, the belief after the turn minus that before it.
        strength: from 0, where nothing changes, to 1, where turns that did not move the belief in the outcome's direction learn nothing.
        most: the largest factor.

    Example::

        BeliefWeighted(GroupRelative(), {"a:0": 0.0, "a:1": -0.6, ...}, strength=1.0, most=8.0)
    """

    def __init__(self, credit: Credit, changes: Mapping[str, float], *, strength: float, most: float) -> None:
        self._credit, self._changes = credit, changes
        self._strength, self._most = strength, most

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """Return by turn id one advantage per sampled token. Raises as `credit`."""
        found = dict(self._credit(episodes, rewards))
        for episode in episodes:
            turns = [turn for turn in episode.turns if any(found[turn.id])]
            if not turns or not all(turn.id in self._changes for turn in turns):
                continue
            factors = belief_factors(
                [self._changes[turn.id] * math.copysign(1.0, math.fsum(found[turn.id])) for turn in turns],
                [len(turn.sampled_ids) for turn in turns],
                strength=self._strength,
                most=self._most,
            )
            for turn, factor in zip(turns, factors, strict=True):
                found[turn.id] = tuple(factor * value for value in found[turn.id])
        return found


def belief_factors(changes: Sequence[float], tokens: Sequence[int], *, strength: float, most: float) -> list[float]:
    """Return the factors of an episode's turns (`BeliefWeighted`). `changes` are positive in the outcome's direction.

    Example: ``belief_factors([0.0, 0.6, -0.2], [1, 1, 1], strength=1.0, most=8.0) == [0.0, 3.0, 0.0]``
    """
    sizes = [max(0.0, change) for change in changes]
    mean = math.fsum(size * count for size, count in zip(sizes, tokens, strict=True)) / sum(tokens)
    if not mean:
        return [1.0] * len(sizes)
    largest = max(sizes) / mean
    weight = min(strength, (most - 1.0) / (largest - 1.0)) if largest > 1.0 else strength
    return [1.0 + weight * (size / mean - 1.0) for size in sizes]


# ---------------------------------------------------------------- credit by origin


def of_world(turn: Turn) -> bool:
    """Return True if the turn is part of a rollout in a simulated world."""
    return turn.arm is Arm.WORLD


class ByOrigin:
    """Implements `core.seams.Credit`: one rule for worlds' episodes, another for people's.

    A group that a client names itself is credited like people's episodes, so that it cannot bypass the caps. If one of the two rules
    finds nothing to learn, its advantages are 0 and the other's are learned from.

    `worlds_weight`: the RMS of worlds' advantages in a batch with both, relative to that of people's, each as it enters the loss and
    without zeros. The gradient's norm grows with this RMS, and with the square root of the tokens. Worlds' advantages are multiplied or
    divided by at most 4: where rollouts hardly differ there is little to learn. None: they stay as they are. `weights` are the loss weights
    of people's turns, by id, if they are not all equal.

    Example: ``ByOrigin(people=SingleRollout(config, baseline), worlds=GroupRelative(), worlds_weight=0.4)``
    """

    def __init__(
        self,
        *,
        people: Credit,
        worlds: Credit,
        worlds_weight: float | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._people, self._worlds = people, worlds
        self._worlds_weight, self._weights = worlds_weight, weights

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """Return by turn id one advantage per sampled token. Raises NoSignal if neither rule finds anything to learn, and ValueError."""
        simulated = [episode for episode in episodes if of_world(episode.turns[0])]
        served = [episode for episode in episodes if not of_world(episode.turns[0])]
        if not simulated or not served:
            return (self._worlds if simulated else self._people)(episodes, rewards)
        found: dict[str, Advantages] = {}
        reasons: list[str] = []
        for credit, theirs in ((self._people, served), (self._worlds, simulated)):
            try:
                found |= credit(theirs, rewards)
            except NoSignal as error:
                reasons.append(str(error))
                found |= {turn.id: (0.0,) * len(turn.sampled_ids) for episode in theirs for turn in episode.turns}
        if len(reasons) == 2:
            raise NoSignal("; ".join(reasons))
        if self._worlds_weight is None:
            return found
        theirs, ours = ([turn.id for episode in some for turn in episode.turns] for some in (simulated, served))
        # the loss weights of people's turns; a world's tokens weigh 1
        weights = self._weights or dict.fromkeys(ours, len(served) / len(ours))
        wanted = self._worlds_weight * _rms_of(found, {turn: weights[turn] for turn in ours})
        present = _rms_of(found, dict.fromkeys(theirs, 1.0))
        if not wanted or not present:  # one side teaches nothing
            return found
        factor = min(_MAX_RESCALING, max(1 / _MAX_RESCALING, wanted / present))
        return found | {turn: tuple(factor * value for value in found[turn]) for turn in theirs}


_MAX_RESCALING = 4.0


def _rms_of(credits: Mapping[str, Advantages], weights: Mapping[str, float]) -> float:
    """Return the root mean square of these turns' weighted advantages over their tokens, without those that are 0."""
    values = np.concatenate([weight * np.array(credits[turn]) for turn, weight in weights.items()])
    return math.sqrt(float(np.sum(values**2)) / max(1, np.count_nonzero(values)))
