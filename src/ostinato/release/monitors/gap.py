"""Proxy against gold: do people whose feedback is learned from accept more than people whose feedback never is? And who teaches most? Pure.

A reward that people's feedback stands for is a proxy. Where the model learns to please those who teach it and not the others, the
two groups part, although both are served the same version.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ostinato.core.dealing import dealing_key, place_of
from ostinato.core.records import Batch, Person, Turn

Named = TypeVar("Named")

LEAST_PEOPLE = 20  # on each side


class Interval(Protocol):
    """A difference of means with a two-sided interval."""

    @property
    def mean(self) -> float: ...
    @property
    def lower(self) -> float: ...
    @property
    def upper(self) -> float: ...


OutcomesByPerson = Mapping[Person, tuple[float, int]]
"""Tenant and user -> (accepted turns, turns with an outcome)."""


class CompareGroups(Protocol):
    """User-clustered difference of two groups, the first minus the second (`evaluate.statistics.clustered_difference`)."""

    def __call__(self, treated: OutcomesByPerson, control: OutcomesByPerson, confidence: float) -> Interval: ...


def is_gold(tenant: str, user: str, *, share: float, salt: str) -> bool:
    """True if this person's feedback is never learned from. The same answer for ever for the same salt; raising `share` only adds people.

    Example: ``is_gold("default", "ann", share=0.1, salt="gold")``
    """
    return place_of(dealing_key(salt), tenant, user) < share


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyGap:
    """Acceptance of people who teach minus that of gold people, in [-1, 1], with a two-sided interval.

    Example: ``ProxyGap(taught_by=412, gold=41, mean=0.021, lower=-0.013, upper=0.055)``
    """

    taught_by: int
    gold: int
    mean: float
    lower: float
    upper: float


def proxy_gap(
    outcomes: OutcomesByPerson, gold: Callable[[str, str], bool], compare: CompareGroups, confidence: float = 0.95
) -> ProxyGap | None:
    """The gap among people who were served one version at one time; None with fewer than 20 people with an outcome on a side.

    The interval holds for one look at it. Who looks again and again spends less each time, as `looking` does.
    """
    sides: dict[bool, dict[Person, tuple[float, int]]] = {True: {}, False: {}}
    for person, outcome in outcomes.items():
        if outcome[1] > 0:
            sides[gold(*person)][person] = outcome
    if min(map(len, sides.values())) < LEAST_PEOPLE:
        return None
    found = compare(sides[False], sides[True], confidence)
    return ProxyGap(
        taught_by=len(sides[False]), gold=len(sides[True]), mean=found.mean, lower=found.lower, upper=found.upper
    )


def looking(look: int, alpha: float) -> float:
    """The two-sided confidence of the look-th look (from 0), so that all looks together err upwards with probability `alpha` at most.

    Look k spends alpha / 2**(k + 1) on its lower bound (Bonferroni, weighted): ``looking(0, 0.02) == 0.98``.
    """
    return 1.0 - 2.0 * alpha / 2 ** (look + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """Whose feedback moved one optimizer step: shares of the batch's absolute advantage, largest first, ten at most.

    `unknown` is the share of turns that were not seen.

    Example: ``Influence(step=3, people=((("default", "ann"), 0.07),), tenants=(("default", 1.0),), unknown=0.0)``
    """

    step: int
    people: tuple[tuple[Person, float], ...]
    tenants: tuple[tuple[str, float], ...]
    unknown: float


MOST_NAMED = 10


class InfluenceFold:
    """Turns and batches of the log in, one `Influence` for each batch out. Remembers whose the newest `most` turns were.

    Example: ``influence = fold.apply(batch)``
    """

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._people: OrderedDict[str, Person] = OrderedDict()

    def __len__(self) -> int:
        return len(self._people)

    def apply(self, row: Turn | Batch) -> Influence | None:
        """Take in a row; for a batch, who moved it."""
        if isinstance(row, Batch):
            return self._influence(row)
        self._people[row.id] = row.person
        if len(self._people) > self._most:
            self._people.popitem(last=False)
        return None

    def _influence(self, batch: Batch) -> Influence:
        people: dict[Person, float] = {}
        tenants: dict[str, float] = {}
        unknown = 0.0
        for turn, advantages in zip(batch.turns, batch.credits, strict=True):
            mass = math.fsum(map(abs, advantages))
            person = self._people.get(turn)
            if person is None:
                unknown += mass
            else:
                people[person] = people.get(person, 0.0) + mass
                tenants[person[0]] = tenants.get(person[0], 0.0) + mass
        total = unknown + math.fsum(people.values()) or 1.0
        return Influence(
            step=batch.step,
            people=_largest(people, total),
            tenants=_largest(tenants, total),
            unknown=unknown / total,
        )


def _largest(masses: Mapping[Named, float], total: float) -> tuple[tuple[Named, float], ...]:
    named = sorted(masses.items(), key=lambda pair: -pair[1])[:MOST_NAMED]
    return tuple((name, mass / total) for name, mass in named)
