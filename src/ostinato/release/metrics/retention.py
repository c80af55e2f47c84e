"""Retention: which users come back, one row per user and day, days without a visit included.

Metrics over turns cannot show who left: somebody who gives up after one bad answer adds one turn to them. Here the denominator is the users
who came before, whether or not they came again. Three rules make two arms comparable:

- *Who counts on a day*: everybody who came on one of the `REMEMBERED_DAYS` days before it. Nobody counts on the day of their first visit.
- *Days are whole.* A day's rows exist once it is over, so a user whose day is still going on is not taken for one who stayed away.
- *Any visit counts*, to whatever arm. The caller determines each user's arm at the start of the day from the assignment and not from the
  turns, since those who left have none.

Whether a user counts on a day is decided by the days before it, so a share that grows on that day causes no bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ostinato.core.records import Person
from ostinato.release.trial.config import DAY

REMEMBERED_DAYS = 7
MOST_PEOPLE = 500_000
_PAUSE_S = 1_800.0  # seconds without a turn after which another session begins


class Retention:
    """Counts turns and sessions by user and day, for the first `MOST_PEOPLE` users who came. A user takes about 1.3 kB.

    Args:
        began: Unix seconds from which days are counted: day 0 begins then, day -1 is the one before.

    Example::

        retention = Retention(began=trial.began)
        retention.see(("default", "ann"), trial.began + 60.0)
        dict(retention.rows(1))  # after day 1: {("default", "ann"): {"user": 1.0, "user.returned": 0.0, ...}}
    """

    def __init__(self, began: float) -> None:
        self._began = began
        # by day: turns, sessions, time of the last turn
        self._people: dict[Person, dict[int, tuple[int, int, float]]] = {}

    def day(self, at: float) -> int:
        """Return the day in which a time lies."""
        return math.floor((at - self._began) / DAY)

    def end(self, day: int) -> float:
        """Return when a day ends, in Unix seconds."""
        return self._began + (day + 1) * DAY

    def see(self, person: Person, at: float) -> None:
        """Count a turn that ended at `at`."""
        if person not in self._people and len(self._people) >= MOST_PEOPLE:
            return
        days, day = self._people.setdefault(person, {}), self.day(at)
        turns, sessions, last = days.get(day, (0, 0, -math.inf))
        days[day] = turns + 1, sessions + (at - last > _PAUSE_S), max(at, last)
        if len(days) > REMEMBERED_DAYS + 1:
            del days[min(days)]

    def rows(self, day: int) -> Iterator[tuple[Person, dict[str, float]]]:
        """Yield each user who counts on this day, which must be over, with the facts of their day (`facts.USER_FACTS`)."""
        for person, days in self._people.items():
            before = max((each for each in days if each < day), default=None)
            if before is None or day - before > REMEMBERED_DAYS:
                continue
            turns, sessions, _ = days.get(day, (0, 0, 0.0))
            yield (
                person,
                {
                    "user": 1.0,
                    "user.returned": float(turns > 0),
                    "user.log_turns": math.log1p(turns),
                    "user.sessions": float(sessions),
                    "user.days_away": 0.0 if turns else float(day - before),
                },
            )

    def forget(self, day: int) -> None:
        """Drop the users who no longer count on this day or later."""
        self._people = {who: days for who, days in self._people.items() if day - max(days) <= REMEMBERED_DAYS}
