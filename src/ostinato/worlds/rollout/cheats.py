"""Is somebody being rewarded, or trying to be, for what is no solution? An alarm's state out of finished rollouts. Pure."""

from __future__ import annotations

from ostinato.worlds.rollout.finished import Finished

CHEATED = "worlds:cheated"
"""The name of the alarm that stands while outcomes are faked."""


class CheatWatch:
    """Finished rollouts in, the alarm's state out.

    `raised` None: nothing is known that changes what the log says. A verdict that was faked is worth nothing to the trainer; the alarm is
    for people, who close the hole.

    Args:
        quiet: graded rollouts in a row without a cheat, after which it is cleared.

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
        """One more rollout. What was not graded says nothing."""
        if record.cheated:
            self._clean, self.raised = 0, True
            turn = f", turn {record.turns[-1]}" if record.turns else ""
            policy = f" by {record.policy_last}" if record.policy_last else ""
            self.why = f"task {record.task}, rollout {record.episode}{turn}{policy}: {'; '.join(record.cheated)}"[:1000]
        elif record.value is not None:
            self._clean += 1
            if self._clean >= self._quiet:
                self.raised, self.why = False, f"nobody cheated in {self._quiet} graded rollouts"
