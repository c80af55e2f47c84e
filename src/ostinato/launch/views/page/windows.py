"""Rated turns -> acceptance per arm in equal windows, with the releases that fell into them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.core.records import Person
from ostinato.evaluate.acceptance import share_of
from ostinato.launch.views.summary import RatedTurn
from ostinato.web.page.sources import LedgerEvent
from ostinato.web.run_report import Curve, CurvePoint, Mark

WINDOWS = 12
FEWEST = 5
"""A window of an arm with fewer rated turns is left out: its interval would say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Curves over minutes since `start`. `start` and `end` are Unix seconds, None if the rated turns span less than two seconds."""

    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    start: float | None
    end: float | None


def windows(rated: Sequence[RatedTurn], events: Iterable[LedgerEvent]) -> Windows:
    """Each window's point is at its end. Rated turns that span less than two seconds give no curve."""
    starts = [each.served.started_at for each in rated]
    start, end = min(starts, default=0.0), max(starts, default=0.0)
    if end - start < 2.0:
        return Windows(curves=(), marks=(), start=None, end=None)
    width = (end - start) / WINDOWS
    found: defaultdict[tuple[str, int], list[tuple[Person, bool]]] = defaultdict(list)
    for each in rated:
        window = min(WINDOWS - 1, int((each.served.started_at - start) / width))
        found[each.served.arm, window].append((each.served.person, each.value > 0))
    curves: defaultdict[str, list[CurvePoint]] = defaultdict(list)
    for (arm, window), accepted in sorted(found.items(), key=lambda pair: pair[0][1]):
        if len(accepted) >= FEWEST:
            point = share_of(accepted)
            at = (window + 1) * width / 60
            curves[arm].append(
                CurvePoint(t=at, mean=point.acceptance, lower=point.lower, upper=point.upper, n=point.turns)
            )
    marks = tuple(
        Mark(t=(event.at - start) / 60, label=f"v{event.policy.number}", action=event.action)
        for event in events
        if start <= event.at <= end and event.previous is not None
    )
    return Windows(
        curves=tuple(Curve(arm=arm, points=tuple(points)) for arm, points in sorted(curves.items())),
        marks=marks,
        start=start,
        end=end,
    )
