"""All monitors as one fold of the log: rows in, alarms out. It is pure: the same rows give the same alarms, wherever a reader restarts.

- turns -> behaviour rates, in sessions: `monitor:<rate>`, `monitor:<rate>:<arm>`
- rewards -> people who are learned from against gold people: `teacher_favour`
- turns, rewards and signals -> the reward against outcomes, live and control: `outcome_gap`
- turns and rewards -> the share of turns with feedback, live and control: `feedback_gap`
- turns, rewards and releases -> session length, live and control: `session_length`; live and the previous release:
  `session_length:previous`
- turns -> how similar answers to different people are, live and control: `users_alike`
- batches -> whom most is learned from: `influence:person`, `influence:tenant`
- the release ledger -> the gate's results on best-of-k, on the diversity of answers and on sycophancy: `best_of_k`, `answers_alike`,
  `sycophancy`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ostinato.core.notices import Alarm, Forgotten
from ostinato.core.records import Batch, ReleaseEvent, Reward, Signal, Turn
from ostinato.core.seams import Cursor
from ostinato.release.monitors.behaviour import Behaviour
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.influence import InfluenceWatch, TurnOwners
from ostinato.release.monitors.pass_at_k import ANSWERS_ALIKE, BEST_OF_K, SYCOPHANCY, NarrowingWatch
from ostinato.release.monitors.proxy_gap import FeedbackGapWatch, GoldWatch, OutcomeGapWatch
from ostinato.release.monitors.rates import Rate
from ostinato.release.monitors.sameness import Sameness, SamenessWatch
from ostinato.release.monitors.session_length import SessionLengthWatch

FORMAT = "monitors@13"

Watched = Turn | Alarm | ReleaseEvent | Reward | Batch | Signal
"""The rows that can change an alarm."""

_Gap = GoldWatch | OutcomeGapWatch | FeedbackGapWatch | SamenessWatch | SessionLengthWatch
_Accepting = _Gap | InfluenceWatch | NarrowingWatch


class Monitors:
    """The state of all monitors.

    Args:
        config: the settings.
        rates: the behaviour rates to watch (`watcher.rates_of`).

    Example::

        for seq, row in rows:
            alarms += monitors.apply(seq, row)
    """

    def __init__(self, config: MonitorsConfig, rates: tuple[Rate, ...]) -> None:
        self._enabled = config.enabled
        self.behaviour = Behaviour(config, rates)
        self._owners = TurnOwners(config.most_turns)
        self._gold = GoldWatch(config)
        self._outcomes = OutcomeGapWatch(config)
        self._feedback = FeedbackGapWatch(config)
        self._sameness = SamenessWatch(config)
        self._lengths = SessionLengthWatch(config)
        self._influence = InfluenceWatch(config)
        self._gated = {name: NarrowingWatch(name) for name in (BEST_OF_K, ANSWERS_ALIKE, SYCOPHANCY)}

    @property
    def paused(self) -> bool:
        """True while an alarm is raised that pauses shipping.

        An alarm about a behaviour rate does so if its shift is harmful. `answers_alike`, `users_alike`, `feedback_gap`, `session_length`
        and `session_length:previous` never do.
        """
        return self.behaviour.paused or bool(self._others)

    @property
    def standing(self) -> list[str]:
        """The names of the raised alarms."""
        quiet = (self._gated[ANSWERS_ALIKE], self._sameness, self._feedback, self._lengths)
        return [*self.behaviour.names, *self._others, *(name for watch in quiet for name in watch.standing)]

    @property
    def readings(self) -> list[Sameness]:
        """How similar answers to different people were, in each of the last twenty periods (`SamenessWatch`)."""
        return list(self._sameness.readings)

    @property
    def crowded(self) -> bool:
        """True while people are left out of `teacher_favour` for want of room (`most_people`)."""
        return self._gold.full

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a saved state, from the newest row about each alarm in the log, by name. Alarms raised there stay raised."""
        for watch in (self.behaviour, *self._accepting):
            watch.begin(alarms)

    def apply(self, seq: Cursor, row: Watched | Forgotten) -> list[Alarm]:
        """Apply a row of the log. Return the alarms that it raises or clears.

        Their ids hold `seq`, the row's position in the log, so that reading the same rows again writes the same alarms.
        """
        if isinstance(row, Forgotten):
            for watch in (self.behaviour, self._owners, self._influence, *self._gaps):
                watch.forget(row)
            return []
        return [replace(alarm, id=f"{alarm.name}:{seq}.{n}") for n, alarm in enumerate(self._apply(row))]

    @property
    def _accepting(self) -> tuple[_Accepting, ...]:
        return (*self._gaps, self._influence, *self._gated.values())

    @property
    def _gaps(self) -> tuple[_Gap, ...]:
        return (self._gold, self._outcomes, self._feedback, self._sameness, self._lengths)

    @property
    def _others(self) -> list[str]:
        gated = [name for name, watch in self._gated.items() if name != ANSWERS_ALIKE and watch.standing]
        return [*self._gold.standing, *self._outcomes.standing, *self._influence.standing, *gated]

    def _apply(self, row: Watched) -> Iterator[Alarm]:
        match row:
            case Turn():
                yield from self._turn(row)
            case Alarm():
                self.behaviour.alarm(row)
                for watch in self._accepting:
                    watch.alarm(row)
            case ReleaseEvent():
                yield from self._release(row)
            case Reward():
                yield from self._reward(row)
            case Signal():
                self._outcomes.signal(row, self._owners.get(row.turn))
            case Batch():
                if self._enabled:
                    yield from self._influence.batch(row, self._owners)

    def _turn(self, row: Turn) -> Iterator[Alarm]:
        if not row.counts:
            return
        if row.arm.people:
            self._owners.see(row)
            self._outcomes.turn(row)
            self._feedback.turn(row)
            yield from self._lengths.turn(row)
        self._influence.turn(row)
        if row.style is not None and row.style.arm != "none":
            return  # its form follows the style, which control's and earlier answers lack, and says nothing about a drift of the weights
        if row.arm.people:
            yield from self._sameness.turn(row)
        yield from self.behaviour.turn(row)

    def _release(self, row: ReleaseEvent) -> Iterator[Alarm]:
        yield from self.behaviour.release(row)
        yield from self._sameness.release(row)
        self._lengths.release(row)
        for watch in self._gated.values() if self._enabled else ():
            yield from watch.release(row)

    def _reward(self, row: Reward) -> Iterator[Alarm]:
        owner = self._owners.get(row.turn)
        yield from self._gold.reward(row, owner)
        yield from self._outcomes.reward(row, owner)
        yield from self._feedback.reward(row, owner)
        self._lengths.reward(row, owner)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "format": FORMAT,
            "behaviour": self.behaviour.snapshot(),
            "owners": self._owners.snapshot(),
            "gold": self._gold.snapshot(),
            "outcomes": self._outcomes.snapshot(),
            "feedback": self._feedback.snapshot(),
            "sameness": self._sameness.snapshot(),
            "lengths": self._lengths.snapshot(),
            "influence": self._influence.snapshot(),
            "gated": {name: watch.snapshot() for name, watch in self._gated.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore what `snapshot` returned, under the current settings. Return false for a snapshot of another format.

        Raises AttributeError, LookupError, TypeError or ValueError if `state` is not a snapshot at all; do not use this object then.
        """
        if state.get("format") != FORMAT:
            return False
        self.behaviour.restore(state["behaviour"])
        self._owners.restore(state["owners"])
        self._gold.restore(state["gold"])
        self._outcomes.restore(state["outcomes"])
        self._feedback.restore(state["feedback"])
        self._sameness.restore(state["sameness"])
        self._lengths.restore(state["lengths"])
        self._influence.restore(state["influence"])
        for name, watch in self._gated.items():
            watch.restore(state["gated"][name])
        return True
