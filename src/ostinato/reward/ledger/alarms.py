"""Which of the desk's alarms stand, as the log says, and which have to be raised or cleared. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.core.notices import Alarm, AlarmState
from ostinato.reward.config import CoverageConfig
from ostinato.reward.ledger.coverage import Coverage

FUNCTION = "reward_function"
COVERAGE = "coverage:"
FAILURES = ("reward_failed", "reward_hung", "reward_nonsense")
ALL_CLEAR = 20  # rewards in a row after which a reward function that failed counts as sound


@dataclass(slots=True)
class _Alarm:
    standing: bool = False
    rows: int = 0


class Alarms:
    """Folds the events that bear on alarms. An alarm stands from its row in the log on, for every reader of the log.

    `coverages` holds each tenant's feedback; `due` yields the rows to write next. Rows are numbered from `start`, the place in the
    log that the fold began after: there were fewer alarms than rows before it, so that no number comes twice.
    """

    def __init__(self, config: CoverageConfig, start: int = 0) -> None:
        self._config = config
        self._start = start
        self._known: dict[str, _Alarm] = {}
        self._failure = ""  # the last failure since the alarm's last row
        self._sound = 0  # rewards in a row since then
        self.coverages: dict[str, Coverage] = {}

    def standing(self) -> list[str]:
        """The names of the alarms that stand."""
        return [name for name, alarm in self._known.items() if alarm.standing]

    def silenced(self, tenant: str) -> bool:
        """True while the tenant's silence is not believed."""
        alarm = self._known.get(COVERAGE + tenant)
        return alarm is not None and alarm.standing

    def decided(self, tenant: str, *, heard: bool) -> None:
        """Count a delivered turn whose reward was decided, with feedback (`heard`) or without."""
        coverage = self.coverages.setdefault(tenant, Coverage())
        coverage.see(heard, standing=self.silenced(tenant), config=self._config)

    def answered(self) -> None:
        """The reward function made a reward."""
        self._sound += 1

    def failed(self, reason: str) -> None:
        """The reward function failed."""
        self._failure, self._sound = reason, 0

    def apply(self, row: Alarm) -> None:
        """Take in a row about one of the desk's alarms; other alarms are ignored."""
        if row.name != FUNCTION and not row.name.startswith(COVERAGE):
            return
        known = self._known.setdefault(row.name, _Alarm())
        known.standing, known.rows = row.state is AlarmState.RAISED, known.rows + 1
        if row.name == FUNCTION:
            self._failure, self._sound = "", 0
        else:
            self.coverages.setdefault(row.name.removeprefix(COVERAGE), Coverage()).settle()

    def due(self, at: float) -> Iterator[Alarm]:
        """The rows that have to be written now."""
        standing = self._known.get(FUNCTION, _Alarm()).standing
        if self._failure and not standing:
            yield self.row(FUNCTION, AlarmState.RAISED, self._failure, at)
        elif standing and self._sound >= ALL_CLEAR:
            yield self.row(FUNCTION, AlarmState.CLEARED, f"{self._sound} rewards in a row", at)
        for tenant in self.coverages:
            yield from self._coverage(tenant, at)

    def row(
        self, name: str, state: AlarmState, reason: str, at: float, detail: Mapping[str, Any] | None = None
    ) -> Alarm:
        """The next row about `name`; its id is determined by the rows of the log before it."""
        number = self._start + self._known.get(name, _Alarm()).rows + 1
        return Alarm(id=f"{name}:{number}", name=name, state=state, reason=reason, at=at, detail=detail or {})

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        return {
            "known": {name: [alarm.standing, alarm.rows] for name, alarm in self._known.items()},
            "coverages": {tenant: coverage.to_json() for tenant, coverage in self.coverages.items()},
            "failure": self._failure,
            "sound": self._sound,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`."""
        self._known = {name: _Alarm(*pair) for name, pair in state["known"].items()}
        self.coverages = {tenant: Coverage.from_json(each) for tenant, each in state["coverages"].items()}
        self._failure, self._sound = str(state["failure"]), int(state["sound"])

    def _coverage(self, tenant: str, at: float) -> Iterator[Alarm]:
        coverage, standing, name = self.coverages[tenant], self.silenced(tenant), COVERAGE + tenant
        detail = {"usual": coverage.usual, "silent": coverage.silent, "turns": coverage.turns}
        if standing and not self._config.enabled:
            yield self.row(name, AlarmState.CLEARED, "reward.coverage is switched off", at, detail)
        elif standing and coverage.is_back():
            yield self.row(name, AlarmState.CLEARED, "feedback is back", at, detail)
        elif self._config.enabled and not standing and coverage.fallen_silent(self._config):
            reason = (
                f"no feedback for {coverage.silent} turns, where {100 * coverage.usual:.0f}% of turns usually have some: "
                "silence is not learned from until it is back. Look at what sends feedback to /v1/feedback"
            )
            yield self.row(name, AlarmState.RAISED, reason, at, detail)
