"""Behaviour before and after a release: the monitors' rates over the newest turns of two versions. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ostinato.core.records import Person, Turn
from ostinato.evaluate.statistics import clustered_difference
from ostinato.release.monitors.rates import BUILT_IN, Rate, Shift, measured
from ostinato.release.monitors.turn_text import take_apart
from ostinato.web.page.releases.evidence import RateShift

ACCEPTED = "accepted"
_TOGETHER = 0.05
Tally = dict[Person, tuple[float, int]]
Rated = Sequence[tuple[str, str, float]]
"""Tenant, user and reward of turns that have one."""


def shifts(
    before: Iterable[Turn], after: Iterable[Turn], rated_before: Rated, rated_after: Rated, off: Iterable[str] = ()
) -> tuple[RateShift, ...]:
    """Each rate with a value for some turn on either side; first the share of rated turns that people accepted.

    The bounds hold for all rates together at 95% (Bonferroni). The operator's own rates are left out, because only the release worker
    may run their code.
    """
    rates = {name: rate for name, rate in BUILT_IN.items() if name not in set(off)}
    sides = [_tallies(rates.values(), turns) for turns in (before, after)]
    for side, rated in zip(sides, (rated_before, rated_after), strict=True):
        side[ACCEPTED] = _accepted(rated)
    names = [name for name in (ACCEPTED, *rates) if sides[0].get(name) or sides[1].get(name)]
    confidence = 1.0 - _TOGETHER / max(1, len(names))
    return tuple(
        _shift(name, rates.get(name), sides[0].get(name, {}), sides[1].get(name, {}), confidence) for name in names
    )


def _tallies(rates: Iterable[Rate], turns: Iterable[Turn]) -> dict[str, Tally]:
    found: defaultdict[str, Tally] = defaultdict(dict)
    watched = tuple(rates)
    for turn in turns:
        if turn.redacted:
            continue
        values, _ = measured(watched, take_apart(turn))
        for name, value in values.items():
            _count(found[name], (turn.tenant, turn.user), value)
    return dict(found)


def _accepted(rated: Rated) -> Tally:
    tally: Tally = {}
    for tenant, user, value in rated:
        _count(tally, (tenant, user), float(value > 0))
    return tally


def _count(tally: Tally, person: Person, value: float) -> None:
    total, number = tally.get(person, (0.0, 0))
    tally[person] = (total + value, number + 1)


def _shift(name: str, rate: Rate | None, before: Tally, after: Tally, confidence: float) -> RateShift:
    lower = upper = None
    if min(len(before), len(after)) >= 2:
        bounds = clustered_difference(after, before, confidence)
        lower, upper = bounds.lower, bounds.upper
    way = None if lower is None or upper is None else Shift.UP if lower > 0 else Shift.DOWN if upper < 0 else None
    return RateShift(
        name=name,
        means="rated turns with a reward above 0" if rate is None else rate.means,
        before=_mean(before),
        after=_mean(after),
        lower=lower,
        upper=upper,
        turns_before=_turns(before),
        turns_after=_turns(after),
        people=len(before.keys() | after.keys()),
        harmful=way is not None and way in ({Shift.DOWN} if rate is None else rate.harmful),
    )


def _mean(tally: Mapping[Person, tuple[float, int]]) -> float | None:
    turns = _turns(tally)
    return sum(total for total, _ in tally.values()) / turns if turns else None


def _turns(tally: Mapping[Person, tuple[float, int]]) -> int:
    return sum(number for _, number in tally.values())
