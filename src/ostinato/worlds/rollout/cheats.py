"""Raises an alarm if finished rollouts were rewarded, or tried to be, for something that is no solution. Pure."""

from __future__ import annotations

from ostinato.worlds.rollout.finished import Finished

CHEATED = "worlds:cheated"
"""The name of the alarm that is raised while outcomes are faked."""


class CheatWatch:
    """Follows finished rollouts and keeps the alarm's state.

    `raised` None: nothing is known that changes the state in the log. A faked outcome is graded 0 for the trainer anyway; the alarm is for
    people, who close the hole.

    Args:
        quiet: the number of graded rollouts in a row without a cheat after which the alarm is cleared.

    Example::

        watch = CheatWatch(quiet=500)
        watch.take(finished)
        if watch.raised is not None: await note(log, CHEATED, raised=watch.raised, why=watch.why, at=now)
    """

    def __init__(self, quiet: int) -> None:
        self._quiet, self._clean = quiet, 0
        self.raised: bool | None = None
        self.why = ""

    def take(self, record: Finished) -> None:
        """Take in one more rollout. One that was not graded changes nothing."""
        if record.cheated:
            self._clean, self.raised = 0, True
            turn = f", turn {record.turns[-1]}" if record.turns else ""
            policy = f" by {record.policy_last}" if record.policy_last else ""
            self.why = f"task {record.task}, rollout {record.episode}{turn}{policy}: {'; '.join(record.cheated)}"[:1000]
        elif record.value is not None:
            self._clean += 1
            if self._clean >= self._quiet:
                self.raised, self.why = False, f"nobody cheated in {self._quiet} graded rollouts"
