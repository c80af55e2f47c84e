"""Alarms from the gate's measurements: loss of diversity (pass@1 rose and best-of-k fell, or answers became alike) and sycophancy.

Reinforcement learning can improve the first try at the expense of the others, and lost coverage does not come back with further training.
An earlier sign is that two answers to one prompt are the same more often than the anchor's. That also happens where the model has learned
the one right answer, so it is reported and pauses nothing. Sycophancy helps nobody, so it pauses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import ReleaseEvent
from ostinato.core.report import Verdict
from ostinato.release.monitors.active_alarms import ACCEPTED

BEST_OF_K = "best_of_k"
"""Name of the alarm that best-of-k fell while pass@1 rose."""

ANSWERS_ALIKE = "answers_alike"
"""Name of the alarm that a candidate's answers to one prompt differ less often than the anchor's, by more than a third."""

SYCOPHANCY = "sycophancy"
"""Name of the alarm that a candidate agrees with a user's stated opinion more often than live, the best release or the anchor."""

_MEASURED = {BEST_OF_K: "sharpening", ANSWERS_ALIKE: "diversity", SYCOPHANCY: "opinions"}
_WITHDRAWN = frozenset({"blocked", "rolled_back"})


class NarrowingWatch:
    """The monitor of one such measurement: lines of the release ledger in, alarms out.

    The alarm is about a candidate that the gate lets pass. During a trial, the candidate stays at its share. Without trials it is live
    before the alarm is read, and nothing ships on top of it. The alarm stays raised until that candidate is rolled back or blocked, a later
    one is measured and found in order, or a person accepts it.

    Args:
        name: the alarm, `BEST_OF_K`, `ANSWERS_ALIKE` or `SYCOPHANCY`.
    """

    def __init__(self, name: str = BEST_OF_K) -> None:
        self._name = name
        self._candidate = ""
        self._stands = False
        self._known_at: float | None = (
            None  # time of the log's alarm that this began from: it covers all rows up to then
        )

    @property
    def standing(self) -> list[str]:
        """The alarm's name while it is raised."""
        return [self._name] if self._stands else []

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a saved state: the alarm is raised if the log says so, whatever earlier lines are read again."""
        row = alarms.get(self._name)
        if row is None:
            return
        self._known_at = row.at
        if row.state is AlarmState.RAISED:
            self._stands, self._candidate = True, str(row.detail.get("candidate", ""))

    def release(self, event: ReleaseEvent) -> Iterator[Alarm]:
        """Process a line of the ledger."""
        if self._is_known(event.at):
            return
        if event.action in _WITHDRAWN and self._stands and self._is_about(event):
            yield self._clear(f"{event.policy} is {event.action.replace('_', ' ')}", event.at)
        report = event.detail.get("report")
        if event.action != "evaluated" or not isinstance(report, Mapping):
            return
        found = cast("Mapping[str, Any]", report)
        if found.get("verdict") != Verdict.SHIP or not found.get(_MEASURED[self._name]):
            return  # an evaluation without the measurement clears no alarm
        told = {BEST_OF_K: _lost_coverage, ANSWERS_ALIKE: _grew_alike, SYCOPHANCY: _sides_with_users}[self._name](found)
        if told is not None and not self._stands:
            yield self._raise(event, *told)
        elif told is None and self._stands:
            yield self._clear(f"{event.policy} does not show it", event.at)

    def alarm(self, row: Alarm) -> None:
        """Apply a person's acceptance of the loss."""
        if row.name == self._name and row.detail.get(ACCEPTED) is True and not self._is_known(row.at):
            self._stands, self._candidate = False, ""

    def _is_known(self, at: float) -> bool:
        """Return true for rows up to the time of the log's alarm; from the first later row on false, even if the clock was set back."""
        if self._known_at is not None and at > self._known_at:
            self._known_at = None
        return self._known_at is not None

    def _is_about(self, event: ReleaseEvent) -> bool:
        refused = event.policy if event.action == "blocked" else event.previous
        return refused is not None and self._candidate in ("", refused.hash)

    def _raise(self, event: ReleaseEvent, reason: str, figures: Mapping[str, Any]) -> Alarm:
        self._stands, self._candidate = True, event.policy.hash
        detail = {"candidate": event.policy.hash, **figures, "pauses": self._name != ANSWERS_ALIKE}
        reason = f"{event.policy} {reason}"
        return Alarm(id="", name=self._name, state=AlarmState.RAISED, reason=reason, at=event.at, detail=detail)

    def _clear(self, why: str, at: float) -> Alarm:
        self._stands, self._candidate = False, ""
        return Alarm(id="", name=self._name, state=AlarmState.CLEARED, reason=why, at=at)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {"stands": self._stands, "candidate": self._candidate, "known_at": self._known_at}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError or TypeError for an invalid state."""
        self._stands, self._candidate = bool(state["stands"]), str(state["candidate"])
        self._known_at = None if state["known_at"] is None else float(state["known_at"])


def _lost_coverage(report: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the reason and figures of a loss of best-of-k (`core.report.Sharpening.narrowed`, as the ledger stores it), or None."""
    for told in report["sharpening"]:
        first, best = told["first"], told["best"]
        if float(first["lower"]) > 0.0 > float(best["upper"]):
            reason = (
                f"against {told['against']} on {best['items']} items: pass@1 {_points(first)}, best of {told['k']} "
                f"{_points(best)}; lost coverage does not come back with further training"
            )
            return reason, {"against": told["against"], "k": told["k"]}
    return None


def _grew_alike(report: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the reason and figures if answers differ less often (`core.report.AnswerDiversity`) by more than a third; else None."""
    told = report["diversity"]
    if float(told["excess"]["upper"]) >= 0.0:
        return None
    reason = (
        f"on {told['excess']['items']} items: two answers to one prompt differ in {told['candidate']:.0%}, the anchor's in "
        f"{told['anchor']:.0%}; that is a fall by more than a third"
    )
    return reason, {"diversity": told["candidate"], "anchor": told["anchor"]}


def _sides_with_users(report: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the reason and figures if sycophancy exceeds an incumbent's beyond the tolerance (`core.report.OpinionShift`); else None."""
    for told in report["opinions"]:
        if float(told["excess"]["lower"]) > 0.0:
            reason = (
                f"against {told['against']}, on {told['excess']['items']} pairs of prompts: it agrees with the user's opinion in "
                f"{told['candidate']:.0%}, before in {told['incumbent']:.0%}; the excess over the tolerance is {_points(told['excess'])}"
            )
            return reason, {"against": told["against"], "agreement": told["candidate"], "before": told["incumbent"]}
    return None


def _points(mean: Mapping[str, Any]) -> str:
    return f"{100 * mean['mean']:+.1f} pp [{100 * mean['lower']:+.1f}, {100 * mean['upper']:+.1f}]"
