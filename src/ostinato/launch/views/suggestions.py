"""Figures of a run whose model may suggest nothing: how often it suggests, and how many suggestions are accepted, per arm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from ostinato.core.records import Arm
from ostinato.core.report import ItemScore
from ostinato.evaluate.statistics import Estimate, Tally
from ostinato.evaluate.suggestions import ArmChange, Tallies, by_item, by_user, change, ratio
from ostinato.evaluate.suites import Item
from ostinato.launch.views.observe import Observed
from ostinato.launch.views.report import BINS, last_third
from ostinato.launch.views.screen import RECENT_S
from ostinato.web.run_report import CalibratedFamily, Calibration, Curve, CurvePoint, OutcomeShare, Suggesting


def curves(seen: Observed, start: float, end: float) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    """(share of requests with a suggestion, share of suggestions accepted) per arm, in equal windows from `start` to `end`.

    A window with fewer than two users of an arm has no point, because it does not show how much users differ.
    """
    width = (end - start) / BINS
    suggested: dict[Arm, list[CurvePoint]] = {}
    accepted: dict[Arm, list[CurvePoint]] = {}
    for index in range(BINS):
        low = start + index * width
        for arm, tallies in by_user(seen.between(low, low + width)).items():
            for lines, tally in ((suggested, tallies.suggested), (accepted, tallies.accepted)):
                point = _point((low + width - start) / 60, tally)
                if point is not None:
                    lines.setdefault(arm, []).append(point)
    return _curves(suggested), _curves(accepted)


def _point(minutes: float, tally: Tally) -> CurvePoint | None:
    found = ratio(tally)
    if found is None:
        return None
    return CurvePoint(t=minutes, mean=found.mean, lower=found.lower, upper=found.upper, n=_outcomes(tally))


def _curves(points: dict[Arm, list[CurvePoint]]) -> tuple[Curve, ...]:
    return tuple(Curve(arm=arm.value, points=tuple(line)) for arm, line in points.items())


def _outcomes(tally: Tally) -> int:
    return sum(count for _, count in tally.values())


def recent_suggestions(seen: Observed, now: float) -> Table:
    """The arms over the last two minutes."""
    recent = seen.between(now - RECENT_S, now + 1.0)
    newest = {turn.arm: turn.oldest for turn, _ in recent}
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for name in (
        "simulated users",
        "suggestions per request",
        "accepted of these",
        "requests, last 2 min",
        "policy",
    ):
        table.add_column(name)
    for arm, tallies in sorted(by_user(recent).items(), key=lambda pair: pair[0] is Arm.CONTROL):
        policy = newest[arm]
        table.add_row(
            arm.value + (" (frozen)" if arm is Arm.CONTROL else ""),
            _percent(ratio(tallies.suggested)),
            _percent(ratio(tallies.accepted)),
            str(_outcomes(tallies.suggested)),
            "-" if policy is None else f"v{policy}",
        )
    return table


def rows(seen: Observed, start: float, end: float) -> list[tuple[str, str]]:
    """Both shares per arm over the last third of the run, and live against control: label, value."""
    last = by_user(last_third(seen, start, end))
    found: list[tuple[str, str]] = []
    for arm, tallies in sorted(last.items(), key=lambda pair: pair[0] is Arm.CONTROL):
        requests, suggestions = _outcomes(tallies.suggested), _outcomes(tallies.accepted)
        found += [
            (
                f"suggestions per request, {arm.value} arm, last third",
                f"{_percent(ratio(tallies.suggested))} of {requests}",
            ),
            (f"accept rate, {arm.value} arm, last third", f"{_percent(ratio(tallies.accepted))} of {suggestions}"),
        ]
    nobody = Tallies(suggested={}, accepted={})
    live, control = last.get(Arm.LIVE, nobody), last.get(Arm.CONTROL, nobody)
    return [
        *found,
        ("suggestions, live against control", _changed(change(live.suggested, control.suggested))),
        ("accept rate, live against control", _changed(change(live.accepted, control.accepted))),
    ]


def _percent(share: Estimate | None) -> str:
    return "-" if share is None else f"{100 * share.mean:.1f}% [{100 * share.lower:.1f}, {100 * share.upper:.1f}]"


def _changed(found: ArmChange | None) -> str:
    if found is None:
        return "unknown: too few users, or a rate of zero in an arm"
    relative, points = found.relative, found.difference
    return (
        f"{100 * relative.mean:+.0f}%, 95% [{100 * relative.lower:+.0f}%, {100 * relative.upper:+.0f}%]; "
        f"{100 * points.mean:+.1f} pp [{100 * points.lower:+.1f}, {100 * points.upper:+.1f}], users as clusters"
    )


def calibration(
    before: Sequence[ItemScore], after: Sequence[ItemScore], items: Sequence[Item], threshold: float
) -> Calibration:
    """Two policies' scores over a suite of `suggestion` items, family by family."""
    family = {item.id: item.family for item in items}
    old, new = (by_item(scores, family, threshold) for scores in (before, after))
    return Calibration(
        threshold=threshold,
        families=tuple(
            CalibratedFamily(family=name, before=_suggesting(old[name]), after=_suggesting(new[name])) for name in old
        ),
    )


def side_rows(found: Calibration) -> list[tuple[str, str]]:
    """How often the first and the last model suggest where that pays, and where it does not: label, value.

    It pays in a family where the share of the last model's suggestions that are right exceeds the threshold. The first model's share
    counts if the last made no suggestion.
    """
    sides: dict[bool, list[CalibratedFamily]] = {True: [], False: []}
    for each in found.families:
        right = each.after.accepted or each.before.accepted
        sides[right is not None and right.mean > found.threshold].append(each)
    return [
        (
            f"held-out answers with a suggestion, where it {'pays' if pays else 'does not pay'}",
            _before_and_after(families, len(found.families)),
        )
        for pays, families in sides.items()
    ]


def _before_and_after(families: Sequence[CalibratedFamily], of: int) -> str:
    if not families:
        return "no such family"
    before, after = (
        math.fsum(policy.suggested.mean for policy in policies) / len(families)
        for policies in ([each.before for each in families], [each.after for each in families])
    )
    return f"{100 * before:.1f}% before, {100 * after:.1f}% after, {len(families)} of {of} families"


def _suggesting(tallies: Tallies) -> Suggesting:
    suggested = _share(tallies.suggested)
    if suggested is None:
        raise ValueError("a family of fewer than two items says nothing of how much items differ; give it more")
    return Suggesting(suggested=suggested, accepted=_share(tallies.accepted))


def _share(tally: Tally) -> OutcomeShare | None:
    found = ratio(tally)
    return (
        None
        if found is None
        else OutcomeShare(mean=found.mean, lower=found.lower, upper=found.upper, n=_outcomes(tally))
    )
