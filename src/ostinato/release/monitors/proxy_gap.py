"""The gap between proxy and gold reward: are people whose feedback is learned from pleased more than people whose feedback never is?

A reward is a proxy for what people want. If the model learns to please only the people who teach it, their reward rises and that of
*gold* people does not. Gold people are chosen by a hash, so without such learning both groups are the same on average, at any time and
whatever happens to the product: the difference between them needs no reference and no past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.core.arm_assignment import dealing_key, place_of
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Person, Reward
from ostinato.release.monitors.active_alarms import ACCEPTED
from ostinato.release.monitors.config import DAY, MonitorsConfig
from ostinato.release.monitors.influence import Owner
from ostinato.release.trial.contrast import Contrast, TimeSlot, lower_bound

NAME = "proxy_gap"
"""The name of the alarm that people who teach are pleased more than gold people."""

LEAST_PEOPLE = 20  # effective people on each side
LOOK_S = 3_600.0
_SALT = "gold"


def is_gold(tenant: str, user: str, *, share: float, salt: str) -> bool:
    """True if this person's feedback is never learned from. The same answer for ever for the same salt; raising `share` only adds people.

    Example: ``is_gold("default", "ann", share=0.1, salt="gold")``
    """
    return place_of(dealing_key(salt), tenant, user) < share


def gold_people(config: MonitorsConfig) -> Callable[[str, str], bool]:
    """Tenant and user -> whether they are gold, by the settings.

    Example: ``gold_people(MonitorsConfig(gold=0.05))("default", "ann")``
    """
    share = config.gold if config.enabled else 0.0
    return lambda tenant, user: share > 0.0 and is_gold(tenant, user, share=share, salt=_SALT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyGap:
    """The share of turns with a positive reward among people who teach minus that among gold people, in [-1, 1].

    `lower` is above the truth at any look with probability at most `alpha` (`proxy_gap`). `taught_by` and `gold` count people.

    Example: ``ProxyGap(taught_by=412, gold=41, mean=0.041, lower=0.022)``
    """

    taught_by: int
    gold: int
    mean: float
    lower: float


def proxy_gap(
    outcomes: Mapping[Person, tuple[float, float]], gold: Callable[[str, str], bool], alpha: float
) -> ProxyGap | None:
    """The gap among people who were served the same versions at the same time; None with fewer than 20 effective people on a side.

    `outcomes` has each person's number of turns with a positive reward, and of all turns with a reward. Clustered by person; the bound
    is that of a confidence sequence (`release.trial.evidence`), which allows repeated looks.
    """
    people = [person for person, (_, turns) in outcomes.items() if turns > 0]
    treated_R = np.array([not gold(*person) for person in people], dtype=np.bool_)
    contrast = Contrast(most_turns_a_day=float("inf"))
    contrast.add(
        TimeSlot(
            day=0,
            people_R=np.arange(len(people), dtype=np.int64),
            turns_R=np.array([outcomes[person][1] for person in people], dtype=np.float64),
            good_R=np.array([outcomes[person][0] for person in people], dtype=np.float64),
            expected_R=np.zeros(len(people)),
            treated_R=treated_R,
        )
    )
    effect, taught = contrast.effect(), int(treated_R.sum())
    if effect.people < LEAST_PEOPLE:
        return None
    lower = lower_bound(effect.difference, effect.variance, alpha)
    return ProxyGap(taught_by=taught, gold=len(people) - taught, mean=effect.difference, lower=lower)


@dataclass(slots=True)
class _Counted:
    good: float
    turns: float
    day: int
    today: int


class _Crowd:
    """At most `most` people, by tenant. When it is full, the newest person of the largest tenant is dropped for one of a smaller tenant:
    a tenant that invents names takes places from nobody else.

    `full`: a person was left out since the last `clear`.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._tenants: dict[str, dict[str, _Counted]] = {}
        self.full = False

    def __iter__(self) -> Iterator[tuple[Person, _Counted]]:
        return (((tenant, user), each) for tenant, users in self._tenants.items() for user, each in users.items())

    def get(self, person: Person, day: int) -> _Counted | None:
        """The counts of a person, added if they are new; None if there is no room for them."""
        tenant, user = person
        users = self._tenants.get(tenant, {})
        known = users.get(user)
        if known is None and self._has_room(len(users)):
            known = _Counted(0.0, 0.0, day, 0)
            self.put(person, known)
        return known

    def put(self, person: Person, counted: _Counted) -> None:
        """Add a person who is not there yet, without checking for room."""
        tenant, user = person
        self._tenants.setdefault(tenant, {})[user] = counted
        self._size += 1

    def clear(self) -> None:
        """Drop everybody."""
        self._tenants.clear()
        self._size, self.full = 0, False

    def _has_room(self, own: int) -> bool:
        if self._size < self._most:
            return True
        self.full = True
        _, largest = max(self._tenants.items(), key=lambda each: (len(each[1]), each[0]))
        if len(largest) <= own + 1:
            return False
        largest.popitem()
        self._size -= 1
        return True


class GoldWatch:
    """Rewards in, alarms about the gap out.

    Both sides are counted for a week (`gold_s`), looked at hourly, and then counted anew; an alarm stands until a whole such period has
    passed in which the gap was not found again, or until a person accepts it. After that only a gap larger than the accepted one raises it.
    """

    def __init__(self, config: MonitorsConfig) -> None:
        self._config = config
        self._gold = gold_people(config)
        self._tolerated = config.gold_gap
        self._people = _Crowd(config.most_people)
        self._since: float | None = None
        self._looked = 0.0
        self._found = False
        self._last_gap = 0.0
        self._stands = False

    @property
    def full(self) -> bool:
        """True if a person was left out for want of room since the present count began."""
        return self._people.full

    @property
    def standing(self) -> list[str]:
        """The alarm's name while it stands."""
        return [NAME] if self._stands else []

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a state: the alarm stands if it stands in the log."""
        self._stands = NAME in alarms and alarms[NAME].state is AlarmState.RAISED

    def reward(self, row: Reward, owner: Owner | None) -> Iterator[Alarm]:
        """Take in a reward, with the owner of its turn; yields alarms."""
        if self._config.gold <= 0.0 or not self._config.enabled:
            if self._stands:
                yield self._row(AlarmState.CLEARED, "there are no gold people any more (release.monitors.gold)", row.at)
            return
        if self._since is None:
            self._since = self._looked = row.at
        if row.at - self._since >= self._config.gold_s:
            if self._stands and not self._found:
                yield self._row(AlarmState.CLEARED, "it was not found again since both sides were counted anew", row.at)
            self._people.clear()
            self._since, self._found = row.at, False
        if owner is not None and owner.live:
            self._count(owner.person, row)
        if row.at - self._looked >= LOOK_S:
            self._looked = row.at
            yield from self._look(row.at)

    def alarm(self, row: Alarm) -> None:
        """Take in a person's acceptance of the gap that was found last. Other rows are ignored."""
        if row.name == NAME and row.detail.get(ACCEPTED) is True:
            self._stands = False
            self._tolerated = max(self._tolerated, self._last_gap)

    def _count(self, person: Person, row: Reward) -> None:
        day = int(row.at // DAY)
        known = self._people.get(person, day)
        if known is None:
            return
        if known.day != day:
            known.day, known.today = day, 0
        if known.today < self._config.turns_a_day:
            known.today += 1
            known.turns += 1.0
            known.good += row.value > 0.0

    def _look(self, at: float) -> Iterator[Alarm]:
        outcomes = {person: (each.good, each.turns) for person, each in self._people}
        gap = proxy_gap(outcomes, self._gold, self._config.gold_alpha)
        if gap is None or gap.lower <= self._tolerated:
            return
        self._found, self._last_gap = True, gap.mean
        if self._stands:
            return
        reason = (
            f"{gap.taught_by} people whose feedback is learned from are pleased more often than {gap.gold} gold people: by "
            f"{100 * gap.mean:.1f} pp, at least {100 * gap.lower:.1f} pp, where {100 * self._tolerated:.1f} pp are tolerated"
            + ("; not all people are counted (release.monitors.most_people)" if self.full else "")
        )
        detail = {
            "gap": gap.mean,
            "lower": gap.lower,
            "taught_by": gap.taught_by,
            "gold": gap.gold,
            "full": self.full,
            "pauses": True,
        }
        yield self._row(AlarmState.RAISED, reason, at, detail)

    def _row(self, state: AlarmState, reason: str, at: float, detail: Mapping[str, Any] | None = None) -> Alarm:
        self._stands = state is AlarmState.RAISED
        return Alarm(id="", name=NAME, state=state, reason=reason, at=at, detail=detail or {})

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        return {
            "people": [[*person, c.good, c.turns, c.day, c.today] for person, c in self._people],
            "full": self._people.full,
            "since": self._since,
            "looked": self._looked,
            "found": self._found,
            "last_gap": self._last_gap,
            "tolerated": self._tolerated,
            "stands": self._stands,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._people.clear()
        for tenant, user, good, turns, day, today in state["people"]:
            self._people.put((str(tenant), str(user)), _Counted(float(good), float(turns), int(day), int(today)))
        self._people.full = bool(state["full"])
        self._since = None if state["since"] is None else float(state["since"])
        self._looked, self._found, self._stands = float(state["looked"]), bool(state["found"]), bool(state["stands"])
        self._last_gap = float(state["last_gap"])
        self._tolerated = max(self._config.gold_gap, float(state["tolerated"]))
