"""Credit where each prompt was answered once: return minus a learned baseline, normalised over the batch, capped. Pure.

A_t = (G_t - b(x_t, user_t)) / RMS, with G_t the turn's return within its episode (`episodes.returns`). Any b that does not
depend on what was sampled leaves the policy gradient unbiased (Williams 1992, section 6); a good one lowers its variance. Dividing
by the root mean square rather than by the standard deviation keeps the sign of a lone reward: one turn with reward +1 gets +1, not
0. Global rather than per-prompt normalisation follows REINFORCE++ (arXiv:2501.03262).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ostinato.core.errors import NoSignal
from ostinato.core.records import Advantages
from ostinato.core.samples import Episode
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit.baseline import Baseline, Floats, context_of, counted_as
from ostinato.reward.credit.episodes import parts_of_episodes, returns
from ostinato.reward.credit.recent import RecentShares, masses_of, scales_of

LEAST_RMS = 1e-8


class SingleRollout:
    """Implements `core.seams.Credit`. All of a turn's tokens get the same advantage.

    A reward reaches the earlier turns of its episode, discounted; the reward of a turn outside the batch reaches none. The RMS
    is over episodes, whose turns share one weight, and so are the capped shares: a person's mass is the weight of their episodes. It is
    not the size of their advantages, which differs between good and bad turns: a cap that cut one kind more would bias what is learned.
    `recent` says how much each person may have, given their share of the last steps.

    `baseline` and `recent` are only read here; the fold of the log updates them.

    Example::

        credit = SingleRollout(RewardConfig(), Baseline())
        credit([Episode(id="e1", tenant="default", turns=(turn,))], {turn.id: 1.0}) == {turn.id: (1.0,) * len(turn.sampled_ids)}
    """

    def __init__(self, config: RewardConfig, baseline: Baseline, recent: RecentShares | None = None) -> None:
        self._config = config
        self._baseline = baseline
        self._recent = recent or RecentShares(config.user_steps)

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """By turn id, one advantage per sampled token.

        Raises:
            NoSignal: no turns, two or more turns that all have the same reward, or a baseline that explains every return.
            ValueError: a reward is not finite.
        """
        turns = [turn for episode in episodes for turn in episode.turns]
        _refuse_without_contrast([rewards[turn.id] for turn in turns])
        weights_N = np.array(parts_of_episodes(turns))
        residuals_N, unit = self._residuals(episodes, rewards)
        rms = math.sqrt(float(weights_N @ residuals_N**2) / len(episodes))
        if rms < LEAST_RMS / unit:
            raise NoSignal(f"the baseline explains every reward: the residuals' RMS is below {LEAST_RMS:g}")
        advantages_N = residuals_N / rms
        weights = masses_of([(counted_as(turn, self._config.users), turn.episode) for turn in turns])
        scales = scales_of(weights, self._recent, self._config)
        return {
            turn.id: (float(advantage) * scales.get(counted_as(turn, self._config.users), 1.0),) * len(turn.sampled_ids)
            for turn, advantage in zip(turns, advantages_N, strict=True)
        }

    def _residuals(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> tuple[Floats, float]:
        """Returns minus baseline, and the unit they are in: with it no square overflows, and dividing by the RMS cancels it."""
        turns = [turn for episode in episodes for turn in episode.turns]
        expected_N = np.array([self._baseline.predict(context_of(turn, self._config.users)) for turn in turns])
        largest = max(float(np.abs(expected_N).max()), *(abs(rewards[turn.id]) for turn in turns))
        unit = 2.0 ** min(1023, max(0, math.frexp(largest)[1]))  # a power of two: division by it rounds nothing
        reached = [
            value
            for episode in episodes
            for value in returns([rewards[turn.id] / unit for turn in episode.turns], self._config.discount)
        ]
        return np.array(reached) - expected_N / unit, unit


def _refuse_without_contrast(rewards: Sequence[float]) -> None:
    """Raises NoSignal where nothing can be learned, ValueError where nothing can be computed."""
    if not rewards:
        raise NoSignal("the batch is empty")
    if not all(map(math.isfinite, rewards)):
        raise ValueError("a reward is not finite")
    if len(rewards) >= 2 and len(set(rewards)) == 1:
        raise NoSignal(f"all {len(rewards)} rewards are {rewards[0]:g}: nothing tells a good turn from a bad one")
