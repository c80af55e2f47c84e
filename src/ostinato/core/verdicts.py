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

VERDICTS = frozenset({GRADED, FAILED, TORN, MEASURED})
RESERVED = VERDICTS | {CLOSED}
