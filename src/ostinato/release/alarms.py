"""Alarms in the log, raised until they are cleared. A row is written only when an alarm's state changes."""

from __future__ import annotations

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.seams import Log


async def note(log: Log, name: str, *, raised: bool, why: str, at: float) -> None:
    """Raise or clear an alarm, unless it is in that state already. It reads all alarms of the log, so do not call it often."""
    standing: Alarm | None = None
    count = 0
    async for _, row in log.read(0, {Alarm}):
        if isinstance(row, Alarm) and row.name == name:
            standing, count = row, count + 1
    state = AlarmState.RAISED if raised else AlarmState.CLEARED
    before = AlarmState.CLEARED if standing is None else standing.state
    if state is not before:
        await log.append(Alarm(id=f"{name}:{count}", name=name, state=state, reason=why, at=at))
