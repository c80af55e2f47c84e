"""Turns as episodes: which turns belong together, and each turn's weight and return within its episode. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ostinato.core.records import Turn
from ostinato.core.samples import Episode


def by_episode(turns: Iterable[Turn]) -> list[Episode]:
    """The episodes of these turns, which are given oldest first, in order of their first turns."""
    found: dict[tuple[str, str], list[Turn]] = {}
    for turn in turns:
        found.setdefault((turn.tenant, turn.episode), []).append(turn)
    return [
        Episode(id=episode, tenant=tenant, turns=tuple(members), group=members[0].group)
        for (tenant, episode), members in found.items()
    ]


def parts_of_episodes(turns: Sequence[Turn]) -> list[float]:
    """The weight of each turn in a batch of these: an episode's weights sum to 1, so that twenty turns count no more than one.

    The price: where the policy decides how many turns there are, a turn of a bad long episode is penalised less than one of a short one.

    Example: two turns of one episode and one of another: ``[0.5, 0.5, 1.0]``
    """
    sizes = Counter((turn.tenant, turn.episode) for turn in turns)
    return [1.0 / sizes[turn.tenant, turn.episode] for turn in turns]


def returns(rewards: Sequence[float], discount: float) -> list[float]:
    """The return of each turn of an episode: its own reward plus the discounted later ones. G_t = r_t + discount * G_t+1.

    Example: ``returns([0.0, 0.0, 1.0], 0.5) == [0.25, 0.5, 1.0]``
    """
    value, found = 0.0, list[float]()
    for reward in reversed(rewards):
        value = reward + discount * value
        found.append(value)
    return found[::-1]
