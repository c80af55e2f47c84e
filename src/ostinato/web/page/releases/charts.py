"""Charts of one release as inline SVG: the difference over the looks at users, behaviour before and after, changed layers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ostinato.web.chart import ChartAxis, Scale, axis
from ostinato.web.page.drawing import differences
from ostinato.web.page.releases.evidence import LayerChange, RateShift, TrialLook, TrialRules, WeightChange
from ostinato.web.page.rendering import count, points
from ostinato.web.weights_page import shade

LEFT, RIGHT, TOP, BOTTOM = 56.0, 620.0, 30.0, 208.0
_VOID_ODDS = 1000.0
_SHADES = 5


def void_odds(rules: TrialRules | None) -> float:
    """The odds against the set shares from which on a trial is void."""
    return _VOID_ODDS if rules is None else rules.void_odds


def sequence(looks: Sequence[TrialLook], rules: TrialRules | None) -> Markup:
    """The difference in good turns over the looks at users, with its bounds, against zero and the margin. "" without two sides.

    The horizontal axis is the number of people, because more people narrow the bounds. One bar stands for one look.
    """
    drawn = [look for look in looks if look.goal.people and look.goal.lower is not None and look.goal.upper is not None]
    if not drawn:
        return Markup("")
    margin = None if rules is None else 100 * rules.margin
    ends = [100 * end for look in drawn for end in (look.goal.lower, look.goal.upper) if end is not None]
    x_axis = axis(0.0, max(look.goal.people or 0.0 for look in drawn), 6)
    y_axis = axis(min([0.0, *ends, *([] if margin is None else [-margin])]), max([0.0, *ends]), 5)
    x, y = x_axis.scale(LEFT, RIGHT), y_axis.scale(BOTTOM, TOP)
    parts = [*_frame(x_axis, y_axis, x, y), *_margin(margin, y), _band(drawn, x, y)]
    parts += [_look(look, x, y) for look in drawn]
    last = drawn[-1]
    label = (
        f"Difference in the {last.goal.name} over {len(drawn)} looks, in percentage points, with bounds that hold at every look; "
        f"the last: {points(last.goal.difference)} between {points(last.goal.lower)} and {points(last.goal.upper)}"
    )
    return Markup('<svg class="chart" viewBox="0 0 640 252" role="img" aria-label="{}">{}</svg>').format(
        label, Markup("").join(parts)
    )


def _frame(x_axis: ChartAxis, y_axis: ChartAxis, x: Scale, y: Scale) -> list[Markup]:
    parts = [
        Markup('<line class="grid{}" x1="{:g}" x2="{:g}" y1="{:.1f}" y2="{:.1f}"/>').format(
            " zero" if tick == 0 else "", LEFT, RIGHT, y(tick), y(tick)
        )
        + Markup('<text class="axis" x="{:g}" y="{:.1f}" text-anchor="end">{}</text>').format(
            LEFT - 8, y(tick) + 4, f"{tick:+g}".replace("-", "\N{MINUS SIGN}") if tick else "0"
        )
        for tick in y_axis.ticks
    ]
    parts += [
        Markup('<text class="axis" x="{:.1f}" y="{:g}" text-anchor="middle">{}</text>').format(
            x(tick), BOTTOM + 17, count(tick)
        )
        for tick in x_axis.ticks
    ]
    below = Markup('<text class="axis" x="{:g}" y="{:g}" text-anchor="middle">{}</text>').format(
        (LEFT + RIGHT) / 2, BOTTOM + 36, "effective users on the smaller side"
    )
    above = Markup('<text class="axis" x="{:g}" y="{:g}">{}</text>').format(6, 14, "difference, pp")
    return [*parts, below, above]


def _margin(margin: float | None, y: Scale) -> list[Markup]:
    if margin is None:
        return []
    line = Markup('<line class="margin" x1="{:g}" x2="{:g}" y1="{:.1f}" y2="{:.1f}"/>').format(
        LEFT, RIGHT, y(-margin), y(-margin)
    )
    name = Markup('<text class="axis" x="{:g}" y="{:.1f}" text-anchor="end">{}</text>').format(
        RIGHT, y(-margin) + 14, f"margin {margin:g} pp"
    )
    return [line, name]


def _band(drawn: Sequence[TrialLook], x: Scale, y: Scale) -> Markup:
    upper = [f"{x(look.goal.people or 0.0):.1f},{y(100 * (look.goal.upper or 0.0)):.1f}" for look in drawn]
    lower = [f"{x(look.goal.people or 0.0):.1f},{y(100 * (look.goal.lower or 0.0)):.1f}" for look in reversed(drawn)]
    return Markup('<polygon class="band" points="{}"/>').format(" ".join(upper + lower))


def _look(look: TrialLook, x: Scale, y: Scale) -> Markup:
    goal = look.goal
    assert goal.difference is not None
    at = x(goal.people or 0.0)
    bounds = f"{points(goal.difference)} pp [{points(goal.lower)}, {points(goal.upper)}]"
    told = f"{look.action.replace('_', ' ')}, {count(goal.people)} effective users: {bounds}"
    return Markup(
        '<g class="difference {0}"><title>{1}</title><line x1="{2:.1f}" x2="{2:.1f}" y1="{3:.1f}" y2="{4:.1f}"/>'
        '<circle cx="{2:.1f}" cy="{5:.1f}" r="4.5"/></g>'
    ).format(
        "better" if look.finding == "better, confirmed" else look.finding.replace(" ", "-"),
        told,
        at,
        y(100 * (goal.lower or 0.0)),
        y(100 * (goal.upper or 0.0)),
        y(100 * goal.difference),
    )


def shifts(rates: Sequence[RateShift]) -> Markup:
    """Each rate's change with its bounds; rates without bounds are only in the table."""
    drawn = [
        (rate.name, rate.after - rate.before, rate.lower, rate.upper, "harmful" if rate.moved and rate.harmful else "")
        for rate in rates
        if rate.before is not None and rate.after is not None and rate.lower is not None and rate.upper is not None
    ]
    title = "Change of each rate, in percentage points, with bounds that hold for all of them together"
    return differences(drawn, None, title, left=130.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """Kinds of tensors by layers. A cell is the tensor and its shade, 0 to 4; None if a layer has no tensor of the kind."""

    layers: tuple[int, ...]
    rows: tuple[tuple[str, tuple[tuple[LayerChange, int] | None, ...]], ...]
    outside: tuple[LayerChange, ...]


def layers(change: WeightChange | None) -> LayerMap | None:
    """The layers of a change as a table; None if they are not known."""
    if change is None or not change.layers:
        return None
    inside = [each for each in change.layers if each.layer is not None]
    most = max((each.share for each in inside), default=0.0)
    columns = tuple(sorted({each.layer for each in inside if each.layer is not None}))
    at = {(each.kind, each.layer): each for each in inside}
    return LayerMap(
        layers=columns,
        rows=tuple(
            (kind, tuple(_cell(at.get((kind, layer)), most) for layer in columns))
            for kind in dict.fromkeys(each.kind for each in inside)
        ),
        outside=tuple(each for each in change.layers if each.layer is None),
    )


def _cell(found: LayerChange | None, most: float) -> tuple[LayerChange, int] | None:
    return None if found is None else (found, round(shade(found.share, most) * (_SHADES - 1)))
