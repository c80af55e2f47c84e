"""Verdicts on turns as signals of a program: on those of simulated worlds, and the late rewards of people's. Only an operator's key may
send such signals.

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

LATE_REWARD = "late_reward"
"""Its value is the reward that a person's turn has at `reward.surrogate.truth_after_s`: written by the reward desk, never trained on."""

NO_LATE_REWARD = "no_late_reward"
"""The turn has no late reward."""

LATE_REWARD_FAILED = "late_reward_failed"
"""The function that gives late rewards failed on the turn."""

VERDICTS = frozenset({GRADED, FAILED, TORN, MEASURED})
LATE = frozenset({LATE_REWARD, NO_LATE_REWARD, LATE_REWARD_FAILED})
RESERVED = VERDICTS | LATE | {CLOSED, BELIEF}


def belief_id(turn: str) -> str:
    """The id of the one event that says a turn's change of belief."""
    return f"{BELIEF}:{turn}"


def late_id(turn: str) -> str:
    """The id of the one event that says a turn's late reward."""
    return f"{LATE_REWARD}:{turn}"


def continuation_name(episode: str, turn: int, number: int) -> str:
    """The name of an episode that is sampled anew from a turn of another one, counted from 0: the same messages, another answer.

    Example: ``continuation_name("w3f.0.2.0", 5, 1) == "w3f.0.2.0~5.1"``
    """
    return f"{episode}~{turn}.{number}"


def is_continuation(episode: str) -> bool:
    """True if a rollout's episode has such a name."""
    return "~" in episode
