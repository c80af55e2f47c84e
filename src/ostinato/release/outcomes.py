"""What users did with each version's turns: turns and signals of the log joined into a window of outcomes.

The controller asks it for tallies of one arm and one version, per tenant and user; the guard compares them. A tenant's signals about
another tenant's turn are ignored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from ostinato.core.records import Arm, Person, PolicyVersion, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.early import EarlySignals
from ostinato.release.metrics.config import DEFAULT_METRICS, MetricConfig
from ostinato.release.metrics.hearing import MOST_SIGNALS
from ostinato.release.metrics.metric import Metric, metrics_of, wanted
from ostinato.release.metrics.reactions import Reacted, reacted
from ostinato.release.outcome_config import OutcomeConfig

_FAILED = Metric.of(MetricConfig(name="failed"), 0.0)


class Outcomes:
    """A window over the log's turns. Turns that mixed versions across a swap count for neither.

    Args:
        metrics: the declared metrics; `acceptance` tallies the first goal, if that has no quantile.
    """

    def __init__(self, log: Log, config: OutcomeConfig, metrics: Sequence[MetricConfig] = DEFAULT_METRICS) -> None:
        self._log = log
        self._config = config
        self._goal = metrics_of(metrics, 0.0)[0]
        self._wanted = wanted((self._goal, _FAILED))
        self._cursor: Cursor | None = None
        self._window: deque[Reacted] = deque()
        self._by_turn: dict[str, Reacted] = {}
        self._early = EarlySignals(most=config.window, most_each=MOST_SIGNALS, seconds=config.early_s)

    async def refresh(self) -> None:
        """Read the log's new rows; the first time, only as far back as the window reaches, however long the log is."""
        if self._cursor is None:
            self._cursor = await self._log.before_last(self._config.window, Turn)
        async for cursor, row in self._log.read(self._cursor, {Turn, Signal}):
            self._cursor = cursor
            if isinstance(row, Turn):
                self._early.advance(row.ended_at)
                self._turn(row)
            elif isinstance(row, Signal):
                self._early.advance(row.received_at)
                self._signal(row)

    @property
    def since(self) -> float | None:
        """When the oldest turn of the window ended; None if there is none."""
        return self._window[0].ended_at if self._window else None

    @property
    def window(self) -> int:
        """How many turns it holds at most."""
        return self._config.window

    @property
    def upto(self) -> Cursor:
        """The place in the log that it was read to."""
        return self._cursor or 0

    def acceptance(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float, *, dealt: bool = False
    ) -> dict[Person, tuple[float, int]]:
        """Per person, from `since` to `until`: the goal's sum, with 1 the best for each turn, and the number of turns that have a value.

        With `dealt`, only people who were dealt to the arm by chance. Turns younger than `maturity_s` at `until` are left out: otherwise
        quick reactions would count more than slow ones.
        """
        tally: dict[Person, tuple[float, int]] = {}
        until -= self._config.maturity_s
        for (_, person), (value, count) in self._tally(
            self._goal, arm, policy, since, until, dealt=dealt, slot_s=math.inf
        ).items():
            tally[person] = value, count
        return tally

    def acceptance_by_slot(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """As `acceptance`, by time slot, for people who were dealt to the arm by chance."""
        return self._tally(self._goal, arm, policy, since, until - self._config.maturity_s, dealt=True, slot_s=slot_s)

    def success_by_slot(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """Per slot and person who was dealt to the arm: turns that did not end in an engine error, and all turns."""
        return self._tally(_FAILED, arm, policy, since, until, dealt=True, slot_s=slot_s)

    def _tally(
        self, metric: Metric, arm: Arm, policy: PolicyVersion, since: float, until: float, *, dealt: bool, slot_s: float
    ) -> dict[tuple[int, Person], tuple[float, int]]:
        """A turn that ended before its first token names no version: it counts for the version that is asked about in that time."""
        tally: dict[tuple[int, Person], tuple[float, int]] = {}
        for each in self._window:
            if each.arm != arm or each.policy not in (policy.hash, "") or not since <= each.ended_at <= until:
                continue
            if dealt and not each.dealt:
                continue
            measured = metric.measure(each.known())
            if measured is not None:
                good = measured[0] / measured[1]
                key = int(each.ended_at // slot_s), each.person
                value, count = tally.get(key, (0.0, 0))
                tally[key] = value + (good if metric.sign > 0 else 1.0 - good), count + 1
        return tally

    def _turn(self, turn: Turn) -> None:
        found = reacted(turn, self._wanted, self._config.nothing)
        if found is None:
            return
        self._window.append(found)
        self._by_turn[turn.id] = found
        for signal in self._early.claim(turn.tenant, turn.id):
            self._signal(signal)
        if len(self._window) > self._config.window:
            del self._by_turn[self._window.popleft().turn]

    def _signal(self, signal: Signal) -> None:
        found = self._by_turn.get(signal.turn)
        if found is None:
            self._early.add(signal)
        elif signal.tenant == found.person[0]:
            found.said.hear(signal)
