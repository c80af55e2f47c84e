"""The treatment effect of people's dials: people who may have them against the standing holdout, by intention to treat. Pure functions.

A hash of the name decides who is held out (`core.arm_assignment.holdout_place`), so without dials both sides are the same on average. Each
turn counts whose weights have a basis and that could have been steered by what its caller asked, whether or not it was: turns before the
first basis do not count, and nobody is selected by what they have rated. People are the units, however many turns they make.

Counts restart every two weeks, and the last two periods are compared together, so that the difference is over the last 14 to 28 days. Its
interval is a confidence sequence: it holds at every look between two restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ostinato.core.arm_assignment import could_lean, holdout_place
from ostinato.core.notices import Forgotten
from ostinato.core.records import Consent, Person, SteeringBasis, Turn
from ostinato.release.monitors.config import DAY
from ostinato.release.monitors.proxy_gap import LEAST_PEOPLE, PersonCrowd, counts_today, person_difference
from ostinato.release.trial.contrast import lower_bound, upper_bound

PERIOD_S = 14 * DAY
MOST_PEOPLE = 10_000
TURNS_A_DAY = 20
"""The number of turns of one person and day that count."""
_ALPHA = 0.05
_BASES = 64  # number of newest versions with a basis that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class DialEffect:
    """Acceptance of the people who may have dials minus that of the holdout, since `since`, with bounds that hold at every look (95%).

    Attributes:
        people, holdout: the number of people on each side.
        leaning: people who had an answer that differs from the base model's.
        accepted, held: the share of each side's turns with a reward above 0; None without a turn.
        lower, upper: None with fewer than 20 effective people on a side.
        token_kl: nats per steered token.
        spent: the mean share of an answer's KL budget that was spent.
        mixed: people of the holdout who had dials because `adapt.holdout` was smaller then; they bias the difference towards 0.
        full: people were left out for want of room.

    Example: ``DialEffect(since=1e9, people=412, holdout=41, leaning=300, accepted=0.62, held=0.55, difference=0.07, lower=0.01, upper=0.13,
    token_kl=0.03, spent=0.2, mixed=0, full=False)``
    """

    since: float
    people: int
    holdout: int
    leaning: int
    accepted: float | None
    held: float | None
    difference: float
    lower: float | None
    upper: float | None
    token_kl: float
    spent: float
    mixed: int
    full: bool


@dataclass(slots=True)
class _Counted:
    """A person's turns with a reward, those of them above 0, and whether dials steered an answer (`steered`) and changed it (`leaning`)."""

    good: int = 0
    turns: int = 0
    day: int = -1
    today: int = 0
    steered: bool = False
    leaning: bool = False


@dataclass(slots=True)
class _Period:
    """Counts since `began` (None before the first turn). People are known only by their place in the hash, so that no name is kept."""

    began: float | None = None
    people: PersonCrowd[_Counted] = field(default_factory=lambda: PersonCrowd[_Counted](MOST_PEOPLE))
    answers: int = 0
    tokens: int = 0
    kl: float = 0.0
    spent: float = 0.0

    def to_json(self) -> dict[str, Any]:
        people = [[*who, *asdict(each).values()] for who, each in self.people]
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {**numbers, "people": people, "full": self.people.full}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> _Period:
        made = cls(**{name: state[name] for name in _NUMBERS})
        for tenant, place, *counts in state["people"]:
            made.people.put((str(tenant), str(place)), _Counted(*counts))
        made.people.full = bool(state["full"])
        return made


_NUMBERS = ("began", "answers", "tokens", "kl", "spent")


class DialTally:
    """Counts by person, folded from bases, turns and rewards. No setting changes it, so it never has to be folded again.

    `bases`: the dials' names of each version with a known basis, by the version's hash.
    """

    def __init__(self) -> None:
        self.bases: dict[str, tuple[str, ...]] = {}
        self._declared = False  # whether users without proof of identity have dials, too
        self._before, self._now = _Period(), _Period()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DialTally) and self.state() == other.state()

    def basis(self, row: SteeringBasis) -> None:
        """Add a basis: from now on its version's turns count."""
        self.bases.pop(row.weights, None)
        if row.moves:
            self.bases[row.weights] = row.names
        if len(self.bases) > _BASES:
            del self.bases[next(iter(self.bases))]

    def turn(self, turn: Turn) -> float | None:
        """Count a turn. Return its person's place in the hash if its reward counts, else None."""
        # a person who withdraws consent to dials still counts: the dials may be the reason
        allowed = turn.consent is not Consent.NEVER and (turn.verified or self._declared)
        counts = allowed and could_lean(turn, self.bases)
        # set after this turn was classified, or the turn would count because it was steered
        self._declared |= turn.steered is not None and not turn.verified
        if not counts:
            return None
        place = holdout_place(turn.person)
        counted = self._person(turn.tenant, place, turn.ended_at)
        if turn.steered is not None:
            self._now.answers += 1
            self._now.tokens += turn.steered.tokens
            self._now.kl += turn.steered.kl
            self._now.spent += turn.steered.kl / turn.steered.budget
            if counted is not None:
                counted.steered = True
                counted.leaning |= turn.steered.kl > 0.0
        return place

    def reward(self, tenant: str, place: float, value: float, at: float) -> None:
        """Count the reward of a turn for which `turn` returned `place`."""
        counted = self._person(tenant, place, at)
        if counted is not None and counts_today(counted, at, TURNS_A_DAY):
            counted.turns += 1
            counted.good += value > 0.0

    def forget(self, row: Forgotten) -> None:
        """Drop the counts of a person, or of all people of a tenant."""
        for people in (self._before.people, self._now.people):
            if row.user is None:
                people.forget(row)
            else:
                people.drop((row.tenant, repr(holdout_place((row.tenant, row.user)))))

    def _person(self, tenant: str, place: float, at: float) -> _Counted | None:
        if self._now.began is None:
            self._now.began = at
        elif at - self._now.began >= PERIOD_S:
            self._before, self._now = self._now, _Period(began=at)
            self._declared = False
        return self._now.people.get((tenant, repr(place)), _Counted)

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        periods = [each.to_json() for each in (self._before, self._now)]
        return {"bases": self.bases, "declared": self._declared, "periods": periods}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> DialTally:
        """Restore what `state` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        made = cls()
        made.bases = {str(weights): tuple(names) for weights, names in state["bases"].items()}
        made._declared = bool(state["declared"])
        made._before, made._now = (_Period.from_json(each) for each in state["periods"])
        return made

    def effect(self, share: float, without: Collection[str] = ()) -> DialEffect | None:
        """Return the effect for a holdout of this `share`, without the tenants in `without`; None before the first turn that counts."""
        began = self._now.began if self._before.began is None else self._before.began
        if began is None:
            return None
        periods, found = (self._before, self._now), dict[Person, _Counted]()
        for period in periods:
            for who, each in period.people:
                if who[0] not in without:
                    known = found.setdefault(who, _Counted())
                    known.good, known.turns = known.good + each.good, known.turns + each.turns
                    known.steered, known.leaning = known.steered or each.steered, known.leaning or each.leaning
        sides = {who: float(who[1]) >= share for who in found}
        outcomes = {who: (float(each.good), float(each.turns)) for who, each in found.items()}
        effect, _, _ = person_difference(outcomes, sides.__getitem__)
        enough = effect.people >= LEAST_PEOPLE
        tokens, answers = sum(each.tokens for each in periods), sum(each.answers for each in periods)
        return DialEffect(
            since=began,
            people=sum(sides.values()),
            holdout=len(sides) - sum(sides.values()),
            leaning=sum(each.leaning for who, each in found.items() if sides[who]),
            accepted=_share(each for who, each in found.items() if sides[who]),
            held=_share(each for who, each in found.items() if not sides[who]),
            difference=effect.difference,
            lower=lower_bound(effect.difference, effect.variance, _ALPHA / 2) if enough else None,
            upper=upper_bound(effect.difference, effect.variance, _ALPHA / 2) if enough else None,
            token_kl=sum(each.kl for each in periods) / tokens if tokens else 0.0,
            spent=sum(each.spent for each in periods) / answers if answers else 0.0,
            mixed=sum(each.steered for who, each in found.items() if not sides[who]),
            full=any(each.people.full for each in periods),
        )


def _share(people: Iterable[_Counted]) -> float | None:
    good, turns = 0, 0
    for each in people:
        good, turns = good + each.good, turns + each.turns
    return good / turns if turns else None
