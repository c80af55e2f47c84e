"""What the ledger's lines of the last weeks say of trials and verdicts. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ostinato.core.records import ReleaseEvent

KEPT = 500
"""The newest of each kind that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnd:
    """A trial that has ended. `passed`: its users showed what was asked; otherwise it was stopped, or had not enough evidence.

    Example: ``TrialEnd(at=90_000.0, seconds=82_800.0, passed=True)``
    """

    at: float
    seconds: float
    passed: bool


class History:
    """Takes in the ledger's lines in their order."""

    def __init__(self) -> None:
        self.trials: deque[TrialEnd] = deque(maxlen=KEPT)
        self.verdicts: deque[float] = deque(maxlen=KEPT)
        """When the gate came to a verdict."""
        self._begun: tuple[str, float] | None = None

    def apply(self, event: ReleaseEvent) -> None:
        """One more line."""
        verdict = str(event.detail.get("report", {}).get("verdict", ""))
        if event.action == "evaluated" and verdict in ("SHIP", "BLOCK"):
            self.verdicts.append(event.at)
        if event.action == "canary":
            self._begun = (event.policy.hash, event.at)
        elif self._begun is not None and event.action in _ENDS and event.policy.hash == self._begun[0]:
            began, self._begun = self._begun[1], None
            # a person's word ends a trial, but says nothing of what it takes
            if "actor" not in event.detail:
                passed = event.action != "blocked"
                self.trials.append(TrialEnd(at=event.at, seconds=event.at - began, passed=passed))
        elif event.action in ("shipped", "rolled_back"):
            self._begun = None


_ENDS = ("shipped", "awaits_approval", "blocked")
