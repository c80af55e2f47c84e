"""What users did with each version's turns: turns and signals of the log joined into a window of outcomes.

The controller asks it for tallies of one arm and one version, per tenant and user; the guard compares them. What a tenant says about
another tenant's turn is not heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.core.records import Arm, Finish, Person, PolicyVersion, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.early import EarlySignals
from ostinato.release.hearing import MOST_SIGNALS, Said
from ostinato.release.outcome_config import OutcomeConfig


@dataclass(slots=True)
class _Watched:
    turn: str
    arm: Arm
    person: Person
    policy: str
    ended_at: float
    failed: bool
    said: Said = field(default_factory=Said)


class Outcomes:
    """A window over the log's turns. Turns that mixed versions across a swap count for neither."""

    def __init__(self, log: Log, config: OutcomeConfig) -> None:
        self._log = log
        self._config = config
        self._cursor: Cursor | None = None
        self._window: deque[_Watched] = deque()
        self._by_turn: dict[str, _Watched] = {}
        self._early = EarlySignals(most=config.window, most_each=MOST_SIGNALS, seconds=config.early_s)

    async def refresh(self) -> None:
        """Read what is new in the log; the first time, as far back as the window reaches, however long the log is."""
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

    def acceptance(
        self, arm: Arm, policy: PolicyVersion, since: float, until: float
    ) -> dict[Person, tuple[float, int]]:
        """Per person: good outcomes, and turns that have an outcome, among turns that ended from `since` to `until`.

        Turns younger than `maturity_s` at `until` are left out: quick reactions would otherwise speak for slow ones.
        """
        return self._tally(
            arm, (policy.hash,), since, until - self._config.maturity_s, lambda watched: watched.said.good
        )

    def success(self, arm: Arm, policy: PolicyVersion, since: float, until: float) -> dict[Person, tuple[float, int]]:
        """Per person: turns that did not end in an engine error, and all turns.

        A turn that failed before its first token names no version: it counts for whichever is asked for in that time.
        """
        return self._tally(arm, (policy.hash, ""), since, until, lambda watched: not watched.failed)

    def _tally(
        self,
        arm: Arm,
        hashes: tuple[str, ...],
        since: float,
        until: float,
        outcome: Callable[[_Watched], bool | None],
    ) -> dict[Person, tuple[float, int]]:
        tally: dict[Person, tuple[float, int]] = {}
        for watched in self._window:
            if watched.arm != arm or watched.policy not in hashes or not since <= watched.ended_at <= until:
                continue
            good = outcome(watched)
            if good is not None:
                value, count = tally.get(watched.person, (0.0, 0))
                tally[watched.person] = value + good, count + 1
        return tally

    def _turn(self, turn: Turn) -> None:
        hashes = {span.policy.hash for span in turn.spans}
        failed = turn.finish == Finish.ERROR
        if turn.auto is not None:  # dealt by episode, with shares that follow the reward: no random sample of the users
            return
        if turn.arm == Arm.EVAL or turn.finish == Finish.ABORT or len(hashes) > 1 or not (hashes or failed):
            return
        watched = _Watched(turn.id, turn.arm, turn.person, "".join(hashes), turn.ended_at, failed)
        self._window.append(watched)
        self._by_turn[turn.id] = watched
        for signal in self._early.claim(turn.tenant, turn.id):
            self._signal(signal)
        if len(self._window) > self._config.window:
            del self._by_turn[self._window.popleft().turn]

    def _signal(self, signal: Signal) -> None:
        watched = self._by_turn.get(signal.turn)
        if watched is None:
            self._early.add(signal)
        elif signal.tenant == watched.person[0]:
            watched.said.hear(signal, self._config)
