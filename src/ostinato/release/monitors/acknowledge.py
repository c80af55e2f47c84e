"""A person accepts what a monitor found: its alarm ends, and is not raised again for a finding of that size."""

from __future__ import annotations

from ostinato.core.errors import BadRequest, Conflict, NotFound
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.seams import Log
from ostinato.release.monitors import pass_at_k, proxy_gap
from ostinato.release.monitors.behaviour import REFERENCE
from ostinato.release.monitors.detection.active_alarms import ACCEPTED, is_about_a_rate
from ostinato.release.monitors.influence import BY_PERSON, BY_TENANT

_OTHERS = frozenset({proxy_gap.NAME, pass_at_k.NAME, BY_PERSON, BY_TENANT})


def acceptable(name: str) -> bool:
    """True for alarms that a person may end. All others end with their cause."""
    return (is_about_a_rate(name) and name != REFERENCE) or name in _OTHERS


def acceptance(raised: Alarm, by: str, at: float, why: str = "") -> Alarm:
    """The row that makes what an alarm found the expected state from now on.

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
    """The alarms that stand, by name, the one raised last at the end. Reads all alarms of the log, so do not call it often."""
    found: dict[str, Alarm] = {}
    async for _, row in log.read(await log.horizon(), {Alarm}):
        assert isinstance(row, Alarm)
        found.pop(row.name, None)
        if row.state is AlarmState.RAISED:
            found[row.name] = row
    return found


async def accept(log: Log, name: str, why: str, by: str, at: float, expected: str | None = None) -> Alarm:
    """End an active alarm because a person accepts it. If `expected` is given, it must be the alarm raised with that id.

    Raises:
        Conflict: it ended, and was raised anew for something else.
        NotFound: no such alarm is active.
        BadRequest: it is about a fault, and ends when that does.
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
