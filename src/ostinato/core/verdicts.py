"""Reserved signals from programs: verdicts on rollouts of simulated worlds, and late rewards of people's turns. Only an operator's key may
send them.

A group's verdicts are sent once all its rollouts have ended. `CLOSED` comes with the last of them, about a turn that has a verdict. So
the group is complete when `CLOSED` has been read: a turn without a verdict then belongs to a rollout that is no longer known.
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
"""All rollouts of the turn's group have ended. Its value is the number of graded ones."""

BELIEF = "belief_change"
"""The change that the turn made to the policy's probability of the known answer, from -1 to 1. Not a verdict: it divides credit."""

LATE_REWARD = "late_reward"
"""Its value is the reward of a person's turn at `reward.surrogate.truth_after_s`; written by the reward desk, never trained on."""

NO_LATE_REWARD = "no_late_reward"
"""The turn has no late reward."""

LATE_REWARD_FAILED = "late_reward_failed"
"""The function of late rewards failed on the turn."""

VERDICTS = frozenset({GRADED, FAILED, TORN, MEASURED})
LATE = frozenset({LATE_REWARD, NO_LATE_REWARD, LATE_REWARD_FAILED})
RESERVED = VERDICTS | LATE | {CLOSED, BELIEF}


def belief_id(turn: str) -> str:
    """Return the id of the one signal with a turn's change of belief."""
    return f"{BELIEF}:{turn}"


def late_id(turn: str) -> str:
    """Return the id of the one signal with a turn's late reward."""
    return f"{LATE_REWARD}:{turn}"


def continuation_name(episode: str, turn: int, number: int) -> str:
    """Return the name of an episode that is sampled anew from a turn of another one, counted from 0: same messages, another answer.

    Example: ``continuation_name("w3f.0.2.0", 5, 1) == "w3f.0.2.0~5.1"``
    """
    return f"{episode}~{turn}.{number}"


def is_continuation(episode: str) -> bool:
    """Return True if the name of a rollout's episode is such a name."""
    return "~" in episode
