"""Keeps the monitors up to date with the log: reads its new rows, writes their alarms, saves their state.

A person may accept a monitor's finding: its alarm is cleared, and is not raised again for a finding of that size.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ostinato.core.errors import BadConfig, BadRequest, Conflict, NotFound, OstinatoError
from ostinato.core.fold import FoldFollower
from ostinato.core.named_function import find_function
from ostinato.core.notices import Alarm, AlarmState, Forgotten
from ostinato.core.records import Batch, ReleaseEvent, Reward, Row, Signal, Turn
from ostinato.core.seams import Cursor, Folds, Log
from ostinato.release.monitors import pass_at_k, proxy_gap, sameness
from ostinato.release.monitors.active_alarms import ACCEPTED, is_about_a_rate
from ostinato.release.monitors.behaviour import REFERENCE
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.influence import BY_PERSON, BY_TENANT
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.rates import BUILT_IN, Rate, Shift
from ostinato.release.monitors.session_length import SESSION_LENGTH, SESSION_LENGTH_PREVIOUS

# ---------------------------------------------------------------- loading


def rates_of(off: Iterable[str], own: Mapping[str, str]) -> tuple[Rate, ...]:
    """Return the rates to watch. `own` maps a name to "module:function", a function from a `TurnText` to [0, 1] or None.

    Importing runs the module's code: the name comes from the operator's configuration, never from a request. The function runs in the
    release worker for each turn and must terminate. A shift of its rate in either direction pauses shipping.

    Raises:
        BadConfig: an unknown rate is switched off, a name is taken, or the text names nothing callable.

    Example: ``rates_of(["praise"], {"emoji": "ours.rates:emoji"})``
    """
    silent = set(off)
    for name in silent - BUILT_IN.keys():
        close = get_close_matches(name, list(BUILT_IN), n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(BUILT_IN)}"
        raise BadConfig(f"release.monitors.off: there is no rate {name!r}; {hint}")
    found = [rate for name, rate in BUILT_IN.items() if name not in silent]
    for name, place in own.items():
        if name in BUILT_IN or name == "reference" or not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name):
            raise BadConfig(f"release.monitors.own.{name}: choose a plain lower-case name that no built-in rate has")
        found.append(
            Rate(
                name=name,
                measure=find_function(f"release.monitors.own.{name}", place),
                harmful=frozenset(Shift),
                means=f"the value of {place}",
            )
        )
    return tuple(found)


# ---------------------------------------------------------------- the watcher


logger = logging.getLogger(__name__)

NAME = "monitors"
KINDS: set[type] = {Turn, Alarm, ReleaseEvent, Reward, Batch, Forgotten}
_YIELD_EVERY = 128  # rows read before yielding to the event loop


class _Fold:
    """The monitors as a fold of the log. `unwritten`: the alarms that follow from the rows and are not in the log yet."""

    def __init__(self, log: Log, config: MonitorsConfig) -> None:
        self.kinds = KINDS | {Signal} if set(config.outcomes) - {proxy_gap.RETURNED} else KINDS
        self._log, self._config = log, config
        self._rates: tuple[Rate, ...] = rates_of(config.off, config.own) if config.enabled else ()
        self.monitors = Monitors(config, self._rates)
        self.unwritten: list[Alarm] = []

    async def begin(self, horizon: Cursor) -> Cursor:
        """Begin with the newest turns and the alarms that are raised in the log."""
        self.monitors = Monitors(self._config, self._rates)
        start = max(horizon, await self._log.before_last(self._config.start_turns, Turn))
        alarms: dict[str, Alarm] = {}
        async for _, row in self._log.read(0, {Alarm}):  # retention keeps them all
            if isinstance(row, Alarm):
                alarms[row.name] = row
        self.monitors.begin(alarms)
        return start

    def apply(self, seq: Cursor, row: Row) -> None:
        assert isinstance(row, Turn | Alarm | ReleaseEvent | Reward | Batch | Signal | Forgotten)
        self.unwritten += self.monitors.apply(seq, row)

    def state(self) -> dict[str, Any]:
        return {"monitors": self.monitors.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> bool:
        return self.monitors.restore(state["monitors"])


class MonitorWatcher:
    """Watches the log for reward hacking and says whether shipping must pause.

    A reader that is killed continues from its last snapshot: it reads the rows since then again, gets the same alarms with the same ids,
    and the log stores each once. Without a snapshot it reads the newest turns only; alarms raised in the log stay raised.

    Args:
        log: where turns are read and alarms are written.
        config: the settings.
        folds: where its state is saved; None: nowhere.

    Raises:
        BadConfig: a rate of the settings cannot be loaded.

    Example::

        watcher = MonitorWatcher(log, config.release.monitors, folds)
        await watcher.refresh()
        if watcher.pauses_shipping: ...
    """

    def __init__(self, log: Log, config: MonitorsConfig, folds: Folds | None = None) -> None:
        self._log = log
        self._config = config
        self._fold = _Fold(log, config)
        # rows that retention dropped after the snapshot may be missed, which does the monitors no harm
        self._follower = FoldFollower(log, self._fold, name=NAME, folds=folds, every=config.fold_rows, gaps=True)
        self._warned: set[str] = set()
        self._read: sameness.Sameness | None = None
        self.trouble: str | None = None

    @property
    def paused(self) -> bool:
        """True while an alarm that pauses shipping is raised, as of the last `refresh`."""
        return self._fold.monitors.paused

    @property
    def pauses_shipping(self) -> bool:
        """True while nothing may ship because of such an alarm; always false if the setting `pauses` is off."""
        return self._config.pauses and self.paused

    @property
    def standing(self) -> list[str]:
        """The names of the raised alarms, those that do not pause shipping included."""
        return self._fold.monitors.standing

    @property
    def readings(self) -> list[sameness.Sameness]:
        """How similar answers to different people were, compared with control, in each of the last twenty periods (`SamenessWatch`)."""
        return self._fold.monitors.readings

    @property
    def failures(self) -> Mapping[str, int]:
        """By rate, the number of turns on which its function raised or left [0, 1]."""
        return self._fold.monitors.behaviour.failures

    async def refresh(self) -> None:
        """Read the log's new rows and write the alarms that follow. Raises StorageFull; the next call writes what is missing."""
        await self._write()
        count = 0
        async for _ in self._follower.rows():
            await self._write()
            count += 1
            if count % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
        self._warn()
        found = self.readings
        for read in found[found.index(self._read) + 1 if self._read in found else 0 :]:
            logger.info("monitors: %s", sameness.described(read, self._config.gold_alpha))
        self._read = found[-1] if found else None

    async def save(self) -> None:
        """Save the monitors' state. Raises StorageFull; the previous snapshot is kept then."""
        await self._write()  # a state that knows of an alarm must not outlive the alarm
        await self._follower.save()

    async def run(self, stop: asyncio.Event) -> None:
        """Refresh until `stop` is set, then save. Failures are retried; `trouble` describes the last."""
        while not stop.is_set():
            try:
                await self.refresh()
                self.trouble = None
            except OstinatoError as error:
                self.trouble = f"{type(error).__name__}: {error}"
                logger.warning("monitors: %s; trying again in %g s", self.trouble, self._config.poll_s)
            try:
                await asyncio.wait_for(stop.wait(), self._config.poll_s)
            except TimeoutError:
                continue
        await self.save()

    async def _write(self) -> None:
        if self._fold.unwritten:
            await self._log.append(*self._fold.unwritten)
            self._fold.unwritten = []

    def _warn(self) -> None:
        if self._fold.monitors.crowded and proxy_gap.TEACHER_FAVOUR not in self._warned:
            self._warned.add(proxy_gap.TEACHER_FAVOUR)
            logger.warning(
                "monitors: %s counts no more than %d people (most_people); some people of the largest tenants are left out",
                proxy_gap.TEACHER_FAVOUR,
                self._config.most_people,
            )
        for name, count in self.failures.items():
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("monitors: rate %s failed on %d turns: it must answer in [0, 1] or None", name, count)


# ---------------------------------------------------------------- acceptance


_ACCEPTABLE = frozenset(
    {
        proxy_gap.TEACHER_FAVOUR,
        proxy_gap.OLD_TEACHER_FAVOUR,
        proxy_gap.OUTCOME_GAP,
        proxy_gap.FEEDBACK_GAP,
        pass_at_k.BEST_OF_K,
        pass_at_k.ANSWERS_ALIKE,
        pass_at_k.SYCOPHANCY,
        sameness.USERS_ALIKE,
        SESSION_LENGTH,
        SESSION_LENGTH_PREVIOUS,
        BY_PERSON,
        BY_TENANT,
    }
)


def acceptable(name: str) -> bool:
    """Return true for alarms that a person may accept. All others are cleared when their cause is gone."""
    return (is_about_a_rate(name) and name != REFERENCE) or name in _ACCEPTABLE


def acceptance(raised: Alarm, by: str, at: float, why: str = "") -> Alarm:
    """Return the row that makes an alarm's finding the expected state from now on.

    Example: ``acceptance(alarm, "ann", clock(), "the new prompt asks for short answers")``
    """
    because = f" ({why})" if why else ""
    return Alarm(
        id=f"{raised.id}:accepted",
        name=raised.name,
        state=AlarmState.CLEARED,
        reason=f"accepted by {by}{because}: what was {raised.reason}",
        at=at,
        detail={ACCEPTED: True, "actor": by},
    )


async def standing(log: Log) -> dict[str, Alarm]:
    """Return the raised alarms by name, the newest last. It reads all alarms of the log, so do not call it often."""
    found: dict[str, Alarm] = {}
    async for _, row in log.read(0, {Alarm}):
        assert isinstance(row, Alarm)
        found.pop(row.name, None)
        if row.state is AlarmState.RAISED:
            found[row.name] = row
    return found


async def accept(log: Log, name: str, why: str, by: str, at: float, expected: str | None = None) -> Alarm:
    """Clear a raised alarm because a person accepts its finding. If `expected` is given, the alarm must have been raised with that id.

    Raises:
        Conflict: the alarm was cleared and raised again for something else.
        NotFound: no such alarm is raised.
        BadRequest: it is about a fault, and is cleared when the fault is gone.
    """
    found = await standing(log)
    if name not in found:
        there = f"these are: {', '.join(found)}" if found else "no alarm is"
        raise NotFound(f"the alarm {name!r} is not active; {there}", field="name")
    if not acceptable(name):
        raise BadRequest(f"{name} cannot be accepted: it ends when its cause does", field="name")
    if expected not in (None, found[name].id):
        raise Conflict(f"{name} ended and was raised anew meanwhile; look at what it says now")
    row = acceptance(found[name], by, at, why)
    await log.append(row)
    return row
