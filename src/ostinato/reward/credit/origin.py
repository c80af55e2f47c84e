"""Credit for a batch that holds both people's episodes and rollouts of simulated worlds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ostinato.core.errors import NoSignal
from ostinato.core.records import Advantages, Arm, Turn
from ostinato.core.samples import Episode
from ostinato.core.seams import Credit


def of_world(turn: Turn) -> bool:
    """True if the turn is part of a rollout in a simulated world."""
    return turn.arm is Arm.WORLD


class ByOrigin:
    """Implements `core.seams.Credit`: worlds' episodes by one rule, people's by another.

    A group that a client names itself is credited like people's episodes, so that it is no way around the caps. If one of the two rules
    finds nothing to learn, its advantages are 0 and the other's are learned from.

    Example: ``ByOrigin(people=SingleRollout(config, baseline), worlds=GroupRelative())``
    """

    def __init__(self, *, people: Credit, worlds: Credit) -> None:
        self._people, self._worlds = people, worlds

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """By turn id, one advantage per sampled token. Raises NoSignal where neither teaches anything, ValueError."""
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
        return found
