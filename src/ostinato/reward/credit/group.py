"""Credit where each prompt was answered many times: an episode's return minus the mean of its group's. Pure.

Dr. GRPO (arXiv:2503.20783), as in Composer 2's report (arXiv:2603.24477, section 4.1): not divided by the group's standard
deviation, which would make the easiest and the hardest tasks count most, nor by any length. Every token of every turn of an episode
gets the episode's advantage, and the loss adds them up (`Sample.summed`): sum A grad log p(token) over all tokens of an episode is
A grad log p(episode), the policy gradient itself. With a weight of 1 / turns instead, each turn of a failure of twenty turns would be
penalised less than each turn of a failure of two, and a policy that fails would learn to fail slowly.

The mean includes the episode itself, so that the expected gradient is (n - 1) / n of the exact one in a group of n.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ostinato.core.errors import NoSignal
from ostinato.core.records import Advantages
from ostinato.core.samples import Episode


class GroupRelative:
    """Implements `core.seams.Credit`. An episode without a group is a group of one.

    Nothing is learned from a group of one, nor from a group whose returns are all equal: its advantages are exactly 0.

    Example::

        GroupRelative()([right, wrong], {"right:0": 1.0, "wrong:0": 0.0}) == {"right:0": (0.5, 0.5), "wrong:0": (-0.5,)}
    """

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """By turn id, one advantage per sampled token.

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
            advantages = relative([math.fsum(rewards[turn.id] for turn in member.turns) for member in members])
            flat += not any(advantages)
            for member, advantage in zip(members, advantages, strict=True):
                found |= {turn.id: (advantage,) * len(turn.sampled_ids) for turn in member.turns}
        if flat == len(groups):
            raise NoSignal(
                f"in none of {flat} groups did one rollout do better than another" if flat else "the batch is empty"
            )
        return found


def relative(returns: Sequence[float]) -> list[float]:
    """Each return minus the mean of all; exactly 0 where all are equal. Raises ValueError for one that is not finite.

    Example: ``relative([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]``
    """
    if not all(map(math.isfinite, returns)):
        raise ValueError("a return is not finite")
    if min(returns) == max(returns):
        return [0.0] * len(returns)
    mean = math.fsum(returns) / len(returns)
    return [value - mean for value in returns]
