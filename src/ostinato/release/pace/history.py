"""The newest trials and verdicts, from the ledger's lines. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ostinato.core.records import ReleaseEvent

KEPT = 500
"""The number of newest entries kept of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnd:
    """A trial that has ended. `passed`: its users showed what was required; otherwise it was stopped, or had too little evidence.

    Example: ``TrialEnd(at=90_000.0, seconds=82_800.0, passed=True)``
    """

    at: float
    seconds: float
    passed: bool


class Spans:
    """Stretches of time, one after the other; the last may still be open."""

    def __init__(self) -> None:
        self.over: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self.open: float | None = None

    def begin(self, at: float) -> None:
        """End the open stretch, if any, and begin another."""
        self.end(at)
        self.open = at

    def end(self, at: float) -> None:
        """End the open stretch, if any."""
        if self.open is not None:
            self.over.append((self.open, at))
        self.open = None

    def periods(self, seconds: float, since: float, now: float) -> int:
        """How many periods of length `seconds`, counted from each stretch's beginning, were under way after `since`; begun ones count."""
        spans = [*self.over, *([] if self.open is None else [(self.open, now)])]
        return sum(
            int((end - began) // seconds) - int((max(began, since) - began) // seconds) + 1
            for began, end in spans
            if end >= since
        )


class PaceHistory:
    """Takes in the ledger's lines in their order."""

    def __init__(self) -> None:
        self.trials: deque[TrialEnd] = deque(maxlen=KEPT)
        self.verdicts: deque[float] = deque(maxlen=KEPT)
        """When the gate came to a verdict."""
        self.moved: deque[float] = deque(maxlen=KEPT)
        """When a version other than the starting model was put live for the first time, or a version was put live again."""
        self.trying = Spans()
        """Comparisons of a candidate with live, and of live with the version it replaced."""
        self.standing = Spans()
        """Comparisons of live with the verified release, if there is an arm of it."""
        self._begun: tuple[str, float] | None = None
        self._tried: str | None = None

    def apply(self, event: ReleaseEvent) -> None:
        """Take in one more line."""
        self._compared(event)
        verdict = str(event.detail.get("report", {}).get("verdict", ""))
        if event.action == "evaluated" and verdict in ("SHIP", "BLOCK"):
            self.verdicts.append(event.at)
        if event.action == "canary":
            self._begun = (event.policy.hash, event.at)
        elif self._begun is not None and event.action in _ENDS and event.policy.hash == self._begun[0]:
            began, self._begun = self._begun[1], None
            # a trial that a person ended does not tell how long trials take
            if "actor" not in event.detail:
                passed = event.action != "blocked"
                self.trials.append(TrialEnd(at=event.at, seconds=event.at - began, passed=passed))
        elif event.action in ("shipped", "rolled_back"):
            self._begun = None

    def _compared(self, event: ReleaseEvent) -> None:
        moves = event.action in ("shipped", "rolled_back")
        if moves and event.previous is not None:
            self.moved.append(event.at)
        if event.action in ("rolled_back", "verified") or (moves and self.standing.open is None):
            self.standing.begin(event.at)
        own = event.policy.hash == self._tried
        goes_on = event.action == "shipped" and own and "share" in event.detail
        if event.action == "canary" or (event.action == "shipped" and not goes_on and "salt" in event.detail):
            self.trying.begin(event.at)
            self._tried = event.policy.hash
        elif (moves and not goes_on) or (own and event.action in ("blocked", "awaits_approval")):
            self.trying.end(event.at)
            self._tried = None


_ENDS = ("shipped", "awaits_approval", "blocked")
