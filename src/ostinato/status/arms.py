"""Acceptance by arm: the share of the newest rated turns that people accepted, with 95% intervals, now and over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ostinato.core.records import Person
from ostinato.evaluate.acceptance import Acceptance, share_of
from ostinato.status.releases import LedgerEvent
from ostinato.status.run_report import Curve, CurvePoint, Mark
from ostinato.status.summary import RatedTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmAcceptance:
    """One arm's rated turns: the share accepted, the mean reward, and how many got a reaction from somebody (`heard`).

    `newest` is the policy number that answered the last of them.
    """

    arm: str
    newest: int | None
    point: Acceptance
    mean: float
    heard: int


def acceptance_by_arm(rated: Iterable[RatedTurn]) -> list[ArmAcceptance]:
    """Return acceptance per arm of these turns, in the order in which the arms first occur."""
    found: defaultdict[str, list[RatedTurn]] = defaultdict(list)
    for each in rated:
        found[each.served.arm].append(each)
    return [
        ArmAcceptance(
            arm=arm,
            newest=turns[-1].served.number,
            point=share_of((each.served.person, each.value > 0) for each in turns),
            mean=fmean(each.value for each in turns),
            heard=sum(each.heard for each in turns),
        )
        for arm, turns in found.items()
    ]


# ---------------------------------------------------------------- curves


WINDOWS = 12
FEWEST = 5
"""On the page, an arm's window with fewer rated turns is left out, because its interval would say nothing."""


def _arm(each: RatedTurn) -> str:
    return each.served.arm


def curves(
    rated: Iterable[RatedTurn], start: float, end: float, fewest: int = 1, name: Callable[[RatedTurn], str] = _arm
) -> tuple[Curve, ...]:
    """Return acceptance per arm in equal windows from `start` to `end`, between which all turns started; a point is at its window's end.

    `name`: returns the curve to which a turn belongs, by default its arm.
    """
    width = (end - start) / WINDOWS
    found: defaultdict[tuple[int, str], list[tuple[Person, bool]]] = defaultdict(list)
    for each in rated:
        window = min(WINDOWS - 1, int((each.served.started_at - start) / width))
        found[window, name(each)].append((each.served.person, each.value > 0))
    points: defaultdict[str, list[CurvePoint]] = defaultdict(list)
    for (window, arm), accepted in sorted(found.items(), key=lambda pair: pair[0][0]):
        if len(accepted) >= fewest:
            point, at = share_of(accepted), (window + 1) * width / 60
            points[arm].append(
                CurvePoint(t=at, mean=point.acceptance, lower=point.lower, upper=point.upper, n=point.turns)
            )
    return tuple(Curve(arm=arm, points=tuple(line)) for arm, line in points.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Curves over minutes since `start` (Unix time); None if the rated turns span less than two seconds."""

    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    start: float | None


def windows(
    rated: Sequence[RatedTurn], events: Iterable[LedgerEvent] = (), name: Callable[[RatedTurn], str] = _arm
) -> Windows:
    """Return the curves over all of these turns, with the releases and rollbacks in that time. `name` as in `curves`."""
    starts = [each.served.started_at for each in rated]
    start, end = min(starts, default=0.0), max(starts, default=0.0)
    if end - start < 2.0:
        return Windows(curves=(), marks=(), start=None)
    marks = tuple(
        Mark(t=(event.at - start) / 60, label=f"v{event.policy.number}", action=event.action)
        for event in events
        if start <= event.at <= end and event.previous is not None
    )
    drawn = sorted(curves(rated, start, end, FEWEST, name), key=lambda curve: curve.arm)
    return Windows(curves=tuple(drawn), marks=marks, start=start)
