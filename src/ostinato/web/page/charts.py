"""Charts of the page as inline SVG: the loop, the gate's interim analyses, training figures over steps, one release, success in worlds.

Colours are CSS classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ostinato.status.releases import GateLook, LayerChange, RateShift, ReleaseLine, TrialLook, TrialRules, WeightChange
from ostinato.status.training_state import StepSeries
from ostinato.status.worlds.tasks import SolvedCurve, SolvedShare, VersionPoint
from ostinato.web.chart import ChartAxis, Scale, axis
from ostinato.web.page.templates import count, percent, points
from ostinato.web.weights_page import shade

_CORNERS_WIDE = ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
_CORNERS_NARROW = ((0, 0), (1, 0), (1, 1), (1, 2), (0, 2), (0, 1))
MOST_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """One box of the loop. `state` is good, wait or bad. Example: ``Station(name="train", figure="step 12", note="7 of 32 turns")``"""

    name: str
    figure: str
    note: str
    state: str = "good"


def loop(stations: Sequence[Station], *, narrow: bool) -> Markup:
    """Draw six boxes in a ring, clockwise, with an arrow from each to the next. Hidden from screen readers, which get a list instead."""
    corners = _CORNERS_NARROW if narrow else _CORNERS_WIDE
    width, height, gap = (158.0, 92.0, 24.0) if narrow else (256.0, 96.0, 46.0)
    places = [(8 + x * (width + gap), 8 + y * (height + gap)) for x, y in corners]
    parts = [_box(station, x, y, width, height) for station, (x, y) in zip(stations, places, strict=True)]
    parts += [_arrow(here, there, width, height) for here, there in zip(places, [*places[1:], places[0]], strict=True)]
    right, bottom = (max(each[axis_] for each in places) for axis_ in (0, 1))
    view = f"0 0 {right + width + 8:g} {bottom + height + 8:g}"
    kind = "narrow" if narrow else "wide"
    return Markup('<svg class="loop {}" viewBox="{}" aria-hidden="true" focusable="false">{}</svg>').format(
        kind, view, Markup("").join(parts)
    )


def _box(station: Station, x: float, y: float, width: float, height: float) -> Markup:
    frame = Markup('<rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" rx="9"/>').format(x, y, width, height)
    title = _text("title", x + 14, y + 24, station.name)
    figure = _text("figure", x + 14, y + 52, _shortened(station.figure, int(width / 10.5)))
    note = _text("note", x + 14, y + 77, _shortened(station.note, int(width / 7.2)))
    return Markup('<g class="station {}">{}{}{}{}</g>').format(station.state, frame, title, figure, note)


def _arrow(here: tuple[float, float], there: tuple[float, float], width: float, height: float) -> Markup:
    (x, y), (to_x, to_y) = here, there
    if y == to_y:
        forward = 1 if to_x > x else -1
        start, end = (x + width if forward > 0 else x), (to_x if forward > 0 else to_x + width)
        at = y + height / 2
        line, head = (start + 5 * forward, at, end - 11 * forward, at), (end - 4 * forward, at, -8 * forward, 0)
    else:
        down = 1 if to_y > y else -1
        start, end = (y + height if down > 0 else y), (to_y if down > 0 else to_y + height)
        at = x + width / 2
        line, head = (at, start + 4 * down, at, end - 10 * down), (at, end - 3 * down, 0, -8 * down)
    tip_x, tip_y, back_x, back_y = head
    side_x, side_y = (0, 5) if back_x else (5, 0)
    corners = (
        f"{tip_x:g},{tip_y:g} {tip_x + back_x + side_x:g},{tip_y + back_y + side_y:g} "
        f"{tip_x + back_x - side_x:g},{tip_y + back_y - side_y:g}"
    )
    return Markup('<g class="arrow"><line x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}"/><polygon points="{}"/></g>').format(
        *line, corners
    )


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


# ---------------------------------------------------------------- chart elements


def _chart(label: str, width: float, height: float, parts: Sequence[Markup], kind: str = "chart") -> Markup:
    """Join the parts into one image. `label` is for screen readers."""
    return Markup('<svg class="{}" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">{}</svg>').format(
        kind, width, height, label, Markup("").join(parts)
    )


def _horizontal(at: float, left: float, right: float, kind: str = "grid") -> Markup:
    """Draw a horizontal line."""
    return Markup('<line class="{0}" x1="{1:g}" x2="{2:g}" y1="{3:.1f}" y2="{3:.1f}"/>').format(kind, left, right, at)


def _vertical(at: float, top: float, bottom: float, kind: str = "grid") -> Markup:
    """Draw a vertical line."""
    return Markup('<line class="{0}" x1="{1:.1f}" x2="{1:.1f}" y1="{2:g}" y2="{3:g}"/>').format(kind, at, top, bottom)


def _text(kind: str, x: float, y: float, text: str) -> Markup:
    """Draw left-aligned text: it begins at `x`."""
    return Markup('<text class="{}" x="{:g}" y="{:g}">{}</text>').format(kind, x, y, text)


def _text_before(x: float, y: float, text: str) -> Markup:
    """Draw right-aligned text: it ends at `x`."""
    return Markup('<text class="axis" x="{:g}" y="{:.1f}" text-anchor="end">{}</text>').format(x, y, text)


def _centred(x: float, y: float, text: str, kind: str = "axis") -> Markup:
    """Draw text centred at `x`."""
    return Markup('<text class="{}" x="{:.1f}" y="{:g}" text-anchor="middle">{}</text>').format(kind, x, y, text)


def _band(edges: Sequence[tuple[float, float, float]]) -> Markup:
    """Fill the area between two lines. `edges`: (x, lower, upper) from left to right."""
    upper = [f"{x:.1f},{high:.1f}" for x, _, high in edges]
    lower = [f"{x:.1f},{low:.1f}" for x, low, _ in reversed(edges)]
    return Markup('<polygon class="band" points="{}"/>').format(" ".join(upper + lower))


def _against_zero(found: ChartAxis, x: Scale, top: float, bottom: float) -> list[Markup]:
    """Draw a vertical line and a signed label for each tick."""
    return [
        _vertical(x(tick), top, bottom, "grid" if tick else "grid zero")
        + _centred(x(tick), bottom + 16, f"{tick:+g}" if tick else "0")
        for tick in found.ticks
    ]


# ---------------------------------------------------------------- differences


def differences(
    rows: Sequence[tuple[str, float, float, float, str]], margin: float | None, title: str, *, left: float = 74.0
) -> Markup:
    """Draw a forest plot: one interval per row (label, difference, lower, upper, state), in percentage points, with zero and the margin.

    `left` is the width of the labels.

    Example: ``differences([("v9", 0.02, -0.01, 0.05, "shipped")], 0.1, "Candidate minus live")``
    """
    if not rows:
        return Markup("")
    ends = [end for _, _, lower, upper, _ in rows for end in (lower, upper)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    if margin is not None:
        low = min(low, -margin)
    found = axis(100 * low, 100 * high, 6)
    right, top, pitch = 620.0, 26.0, 24.0
    x = found.scale(left, right)
    bottom = top + pitch * len(rows)
    parts = _against_zero(found, x, top - 6, bottom)
    if margin is not None:
        at = x(-100 * margin)
        parts.append(_vertical(at, top - 6, bottom, "margin") + _centred(at, top - 10, "margin"))
    parts += [_difference(row, left, top + (number + 0.5) * pitch, x) for number, row in enumerate(rows)]
    return _chart(title, 640, bottom + 24, parts)


def _difference(row: tuple[str, float, float, float, str], left: float, at: float, x: Scale) -> Markup:
    """Draw one row at the height `at`."""
    label, mean, lower, upper, state = row
    said = f"{label}: {points(mean)} pp [{points(lower)}, {points(upper)}]"
    return Markup(
        '<g class="difference {0}"><title>{1}</title>{2}<line x1="{3:.1f}" x2="{4:.1f}" y1="{5:.1f}" y2="{5:.1f}"/>'
        '<circle cx="{6:.1f}" cy="{5:.1f}" r="4.5"/></g>'
    ).format(state, said, _text_before(left - 10, at + 4, label), x(100 * lower), x(100 * upper), at, x(100 * mean))


def forest(lines: Sequence[ReleaseLine]) -> Markup:
    """Draw the gate's last result for each version, newest first."""
    drawn = [
        (f"v{line.policy.number}", line.difference, line.lower, line.upper, line.state)
        for line in lines[:20]
        if line.difference is not None and line.lower is not None and line.upper is not None
    ]
    margins = {line.margin for line in lines if line.margin is not None}
    title = (
        "Difference between each candidate and what was live, in percentage points, with the bounds that the gate used"
    )
    return differences(drawn, margins.pop() if len(margins) == 1 else None, title)


def looks(found: Sequence[GateLook]) -> Markup:
    """Draw the gate's interim analyses of one version, oldest first."""
    drawn = [
        (f"{look.items} \N{MULTIPLICATION SIGN} {look.draws}", look.difference, look.lower, look.upper, look.verdict)
        for look in found[-20:]
    ]
    title = "Difference over the gate's looks, in percentage points, with the bounds that the verdict used"
    return differences(drawn, found[-1].margin if found else None, title)


def spread(dials: Mapping[str, Sequence[float]]) -> Markup:
    """Draw a box plot, one row per dial: the interquartile range as a bar, 10 to 90% as a line, the median as a dot, with zero.

    `dials`: the 10, 25, 50, 75 and 90% quantiles of each dial over people.
    """
    if not dials:
        return Markup("")
    ends = [end for quantiles in dials.values() for end in quantiles]
    found = axis(min(0.0, *ends), max(0.0, *ends), 6)
    left, right, top, pitch = 150.0, 620.0, 10.0, 24.0
    x, bottom = found.scale(left, right), top + pitch * len(dials)
    parts = _against_zero(found, x, top, bottom)
    for number, (name, (least, low, middle, high, most)) in enumerate(dials.items()):
        at = top + (number + 0.5) * pitch
        parts.append(
            Markup(
                '<g class="difference"><title>{0}: half of people between {1:+.2f} and {2:+.2f}</title>'
                '<text class="axis" x="{3:g}" y="{4:.1f}" text-anchor="end">{0}</text>'
                '<line x1="{5:.1f}" x2="{6:.1f}" y1="{7:.1f}" y2="{7:.1f}"/>'
                '<rect class="bar" x="{8:.1f}" y="{9:.1f}" width="{10:.1f}" height="8" rx="2"/>'
                '<circle cx="{11:.1f}" cy="{7:.1f}" r="4.5"/></g>'
            ).format(
                name, low, high, left - 10, at + 4, x(least), x(most), at, x(low), at - 4, x(high) - x(low), x(middle)
            )
        )
    return _chart("How people's dials differ: median, middle half, and 10 to 90%", 640, bottom + 24, parts)


# ---------------------------------------------------------------- lines over steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinned:
    """A downsampled series: (x, minimum, maximum) of each bucket of `every` points."""

    points: tuple[tuple[float, float, float], ...]
    every: int


def thinned(series: Sequence[tuple[float, float]]) -> Thinned:
    """Downsample a series to at most `MOST_POINTS` buckets of equal size; a short series keeps its points."""
    every = max(1, -(-len(series) // MOST_POINTS))
    runs = [series[start : start + every] for start in range(0, len(series), every)]
    return Thinned(
        points=tuple((run[-1][0], min(y for _, y in run), max(y for _, y in run)) for run in runs), every=every
    )


def steps_chart(series: StepSeries, marks: Sequence[tuple[float, str]]) -> Markup:
    """Draw a figure over steps. If points were merged, a band spans the minimum and maximum of each bucket."""
    found = thinned(series.points)
    values = [end for _, low, high in found.points for end in (low, high)]
    x_axis = axis(found.points[0][0], found.points[-1][0], 6)
    y_axis = axis(min(values), max(values), 4)
    left, right, top, bottom = 62.0, 470.0, 18.0, 152.0
    x, y = x_axis.scale(left, right), y_axis.scale(bottom, top)
    parts = [_horizontal(y(t), left, right) + _text_before(left - 8, y(t) + 4, f"{t:g}") for t in y_axis.ticks]
    parts += [_centred(x(t), bottom + 17, f"{t:g}") for t in x_axis.ticks]
    parts += release_marks(marks, x, top, bottom, found.points[0][0], found.points[-1][0])
    if found.every > 1:
        parts.append(_band([(x(at), y(low), y(high)) for at, low, high in found.points]))
    middle = " ".join(f"{x(at):.1f},{y((low + high) / 2):.1f}" for at, low, high in found.points)
    parts.append(Markup('<polyline class="line arm-live" points="{}"/>').format(middle))
    if len(found.points) < 60:
        parts += [
            Markup('<circle class="arm-live" cx="{:.1f}" cy="{:.1f}" r="2.4"/>').format(x(at), y(low))
            for at, low, _ in found.points
        ]
    label = f"{series.title}, {series.unit}, over steps {found.points[0][0]:g} to {found.points[-1][0]:g}"
    return _chart(label, 480, 180, parts)


MOST_MARKS = 60


def release_marks(
    marks: Sequence[tuple[float, str]], x: Scale, top: float, bottom: float, first: float, last: float
) -> list[Markup]:
    """Draw a dashed line for each of the last `MOST_MARKS` releases. A name that would overlap another is only in the tooltip."""
    parts: list[Markup] = []
    free = 0.0
    shown = [mark for mark in sorted(marks) if first <= mark[0] <= last][-MOST_MARKS:]
    for step, name in shown:
        at = x(step)
        parts.append(
            Markup(
                '<line class="mark" x1="{0:.1f}" x2="{0:.1f}" y1="{1:g}" y2="{2:g}"><title>{3} was released</title></line>'
            ).format(at, top, bottom, name)
        )
        if at > free:
            parts.append(_centred(at, top - 5, name, "version"))
            free = at + 7.5 * len(name) + 6
    return parts


# ---------------------------------------------------------------- charts of releases


LEFT, RIGHT, TOP, BOTTOM = 56.0, 620.0, 30.0, 208.0
_SHADES = 5


def sequence(looks: Sequence[TrialLook], rules: TrialRules | None) -> Markup:
    """Draw a trial's difference in good turns over its interim analyses, with bounds, zero and the margin. "" without two sides.

    The horizontal axis is the number of people, since more people narrow the bounds. Each bar is one analysis.
    """
    drawn = [look for look in looks if look.goal.people and look.goal.lower is not None and look.goal.upper is not None]
    if not drawn:
        return Markup("")
    margin = None if rules is None else 100 * rules.margin
    ends = [100 * end for look in drawn for end in (look.goal.lower, look.goal.upper) if end is not None]
    x_axis = axis(0.0, max(look.goal.people or 0.0 for look in drawn), 6)
    y_axis = axis(min([0.0, *ends, *([] if margin is None else [-margin])]), max([0.0, *ends]), 5)
    x, y = x_axis.scale(LEFT, RIGHT), y_axis.scale(BOTTOM, TOP)
    parts = _frame(x_axis, y_axis, x, y)
    if margin is not None:
        parts += [
            _horizontal(y(-margin), LEFT, RIGHT, "margin"),
            _text_before(RIGHT, y(-margin) + 14, f"margin {margin:g} pp"),
        ]
    goals = [look.goal for look in drawn]
    edges = [(x(goal.people or 0.0), y(100 * (goal.lower or 0.0)), y(100 * (goal.upper or 0.0))) for goal in goals]
    parts += [_band(edges), *(_trial_bar(look, x, y) for look in drawn)]
    last = drawn[-1]
    label = (
        f"Difference in the {last.goal.name} over {len(drawn)} looks, in percentage points, with bounds that hold at every look; "
        f"the last: {points(last.goal.difference)} between {points(last.goal.lower)} and {points(last.goal.upper)}"
    )
    return _chart(label, 640, 252, parts)


def _frame(x_axis: ChartAxis, y_axis: ChartAxis, x: Scale, y: Scale) -> list[Markup]:
    parts = [
        _horizontal(y(tick), LEFT, RIGHT, "grid" if tick else "grid zero")
        + _text_before(LEFT - 8, y(tick) + 4, f"{tick:+g}".replace("-", "\N{MINUS SIGN}") if tick else "0")
        for tick in y_axis.ticks
    ]
    parts += [_centred(x(tick), BOTTOM + 17, count(tick)) for tick in x_axis.ticks]
    below = Markup('<text class="axis" x="{:g}" y="{:g}" text-anchor="middle">{}</text>').format(
        (LEFT + RIGHT) / 2, BOTTOM + 36, "effective users on the smaller side"
    )
    return [*parts, below, _text("axis", 6, 14, "difference, pp")]


def _trial_bar(look: TrialLook, x: Scale, y: Scale) -> Markup:
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
    """Draw each rate's change with its bounds. Rates without bounds are only in the table."""
    drawn = [
        (rate.name, rate.after - rate.before, rate.lower, rate.upper, "harmful" if rate.moved and rate.harmful else "")
        for rate in rates
        if rate.before is not None and rate.after is not None and rate.lower is not None and rate.upper is not None
    ]
    title = "Change of each rate, in percentage points, with bounds that hold for all of them together"
    return differences(drawn, None, title, left=130.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """A heat map, kinds of tensors by layers. A cell is (tensor, shade 0 to 4); None if a layer has no tensor of that kind."""

    layers: tuple[int, ...]
    rows: tuple[tuple[str, tuple[tuple[LayerChange, int] | None, ...]], ...]
    outside: tuple[LayerChange, ...]


def layers(change: WeightChange | None) -> LayerMap | None:
    """Return a weight change's layers as a heat map; None if they are not known."""
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


# ---------------------------------------------------------------- success in simulated worlds


_CLASSES = ("arm-live", "arm-other")


def success(curves: Sequence[SolvedCurve], marks: Sequence[tuple[int, str]]) -> Markup:
    """Draw the solved share over versions, with 95% intervals and a dashed line for each released version. "" without a point."""
    found = [point for curve in curves for point in curve.points]
    if not found:
        return Markup("")
    left, right, top, bottom = 52.0, 660.0, 26.0, 226.0
    first, last = min(point.first for point in found), max(point.last for point in found)
    x_axis, y_axis = axis(first, max(last, first + 1), min(8, max(last - first, 1))), axis(0.0, 1.0, 5)
    x, y = x_axis.scale(left, right), y_axis.scale(bottom, top)
    parts = [_horizontal(y(t), left, right) + _text_before(left - 8, y(t) + 4, f"{100 * t:g}%") for t in y_axis.ticks]
    parts += [_centred(x(t), bottom + 18, f"v{t:g}") for t in x_axis.ticks if t == int(t)]
    parts += release_marks(marks, x, top, bottom, first, last)
    for number, (curve, kind) in enumerate(zip(curves, _CLASSES, strict=False)):
        # shifted, so that whiskers do not overlap
        parts += _curve(curve, kind, lambda value, by=4.0 * number: x(value) + by, y)
    said = "; ".join(
        f"{curve.name} {_share(curve.points[-1].solved)} at {versions_of(curve.points[-1])}" for curve in curves
    )
    label = f"Share of rollouts that were solved, by version, with 95% intervals. Newest: {said}."
    return _chart(label, 760, 252, parts, "chart success")


def versions_of(point: VersionPoint) -> str:
    """Return the versions of a point. Example: ``v4 to v6``"""
    return f"v{point.first}" if point.first == point.last else f"v{point.first} to v{point.last}"


def _share(solved: SolvedShare) -> str:
    return f"{percent(solved.share)} [{percent(solved.lower)}, {percent(solved.upper)}]"


def _curve(curve: SolvedCurve, kind: str, x: Scale, y: Scale) -> list[Markup]:
    places = [(x((point.first + point.last) / 2), point.solved) for point in curve.points]
    parts = [
        Markup('<line class="whisker {}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
            kind, at, at, y(solved.lower), y(solved.upper)
        )
        for at, solved in places
    ]
    path = " ".join(f"{at:.1f},{y(solved.share):.1f}" for at, solved in places)
    parts.append(Markup('<polyline class="line {}" points="{}"/>').format(kind, path))
    parts += [
        Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="3.2"><title>{} {}: {}</title></circle>').format(
            kind, at, y(point.solved.share), curve.name, versions_of(point), _share(point.solved)
        )
        for (at, _), point in zip(places, curve.points, strict=True)
    ]
    at, solved = places[-1]
    parts.append(
        Markup('<text class="name {}" x="{:.1f}" y="{:.1f}">{}</text>').format(
            kind, at + 9, y(solved.share) + 4, curve.name
        )
    )
    return parts
