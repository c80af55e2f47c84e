"""Verdicts on the turns of simulated worlds, sent as signals of a program. Only an operator's key may send them.

A group's verdicts are sent once all its rollouts have ended. `CLOSED` comes with the last of them, about a turn that gets a verdict with
it. So the group is complete when `CLOSED` has been read: a turn without a verdict then belongs to a rollout that is no longer known.
"""

from __future__ import annotations

GRADED = "graded"
"""Its value is the turn's reward: the rollout's grade on its last turn, 0 on earlier turns."""

FAILED = "rollout_failed"
"""Something other than the policy ended the turn's rollout: it was not graded."""

TORN = "rollout_torn"
"""The turn's rollout was abandoned and restarted."""

MEASURED = "rollout_measured"
"""The turn's rollout only measured performance on a held-out task."""

CLOSED = "group_closed"
"""All rollouts of the turn's group have ended. Its value is how many of them were graded."""

BELIEF = "belief_change"
"""How much the turn changed the probability that the policy gives to the known answer, from -1 to 1. No verdict: it divides credit."""

VERDICTS = frozenset({GRADED, FAILED, TORN, MEASURED})
RESERVED = VERDICTS | {CLOSED, BELIEF}


def belief_id(turn: str) -> str:
    """The id of the one event that says a turn's change of belief."""
    return f"{BELIEF}:{turn}"


def continuation_name(episode: str, turn: int, number: int) -> str:
    """The name of an episode that is sampled anew from a turn of another one, counted from 0: the same messages, another answer.

    Example: ``continuation_name("w3f.0.2.0", 5, 1) == "w3f.0.2.0~5.1"``
    """
    return f"{episode}~{turn}.{number}"


def is_continuation(episode: str) -> bool:
    """True if a rollout's episode has such a name."""
    return "~" in episode
