"""Recent outcomes, apart from all outcomes since a trial began. Pure.

A new version may please for a day and harm afterwards: over the whole trial the first days would hide the later ones. So every metric is
also added up in successive periods, and a release that was called better is tested again on the period that follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ostinato.release.trial.contrast import Contrast, Effect, Slot


class Lately:
    """Periods of `period_s`, in seconds since the trial began; another one begins once the release is called better.

    Args:
        metrics: the names of the metrics.
    """

    def __init__(self, metrics: Sequence[str], period_s: float, most_turns_a_day: float) -> None:
        self._period_s = period_s
        self._most = most_turns_a_day
        self._upto_s = 0.0
        self.since_s = 0.0
        self._contrasts = {name: Contrast(most_turns_a_day) for name in metrics}
        self.afterwards: Mapping[str, Effect] | None = None
        """The effects of the first whole period after the release was called better."""

    def add(self, outcomes: Mapping[str, Mapping[str, Slot]], ended_s: float, better_s: float | None) -> None:
        """Add a slot that ended at `ended_s`; `better_s` is when the release was called better, if it was."""
        began_s, self._upto_s = self._upto_s, max(ended_s, self._upto_s)
        anew = -math.inf if better_s is None or began_s < better_s else better_s
        if self.since_s < anew or began_s - self.since_s >= self._period_s:
            self.since_s = began_s
            self._contrasts = {name: Contrast(self._most) for name in self._contrasts}
        for name, slots in outcomes.items():
            for slot in slots.values():
                self._contrasts[name].add(slot)
        whole = self._upto_s - self.since_s >= self._period_s
        if whole and self.since_s >= anew > -math.inf and self.afterwards is None:
            self.afterwards = self.effects()

    def effects(self) -> dict[str, Effect]:
        """The effects of the present period so far."""
        return {name: contrast.effect() for name, contrast in self._contrasts.items()}
