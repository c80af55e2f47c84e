"""What is said of a simulated world's turns, as signals of a program. Only an operator's key may send them.

A group's verdicts are sent once all its rollouts have ended, `CLOSED` with the last of them and about a turn that gets one with it. So the
group is whole when `CLOSED` has been read: what has no verdict then was asked by a rollout that nobody knows any more.
"""

from __future__ import annotations

GRADED = "graded"
"""Its value is what the turn earned: the rollout's grade on its last turn, 0 on those before it."""

FAILED = "rollout_failed"
"""Something other than the policy ended the turn's rollout: it was not graded."""

TORN = "rollout_torn"
"""The turn's rollout was given up and begun anew."""

MEASURED = "rollout_measured"
"""The turn's rollout only showed how well a task goes that is held out."""

CLOSED = "group_closed"
"""All rollouts of the turn's group have ended. Its value is how many of them were graded."""

VERDICTS = frozenset({GRADED, FAILED, TORN, MEASURED})
RESERVED = VERDICTS | {CLOSED}
