"""Line and bar charts as inline SVG. Colours are CSS classes, so that light and dark themes both apply. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ostinato.status.run_report import Curve, Mark

WIDTH, HEIGHT = 860.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 84.0, 34.0, 44.0
Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartAxis:
    """Tick positions in data units; the first and last are the axis' ends. Example: ``ChartAxis(ticks=(0.0, 0.2, 0.4))``"""

    ticks: tuple[float, ...]

    def scale(self, start: float, end: float) -> Scale:
        """Return the function from data units to pixels, with the axis' ends at `start` and `end`."""
        low, high = self.ticks[0], self.ticks[-1]
        return lambda value: start + (value - low) / (high - low) * (end - start)


def axis(low: float, high: float, count: int = 5) -> ChartAxis:
    """Return an axis of about `count` round steps (1, 2 or 5 times a power of ten) that covers [low, high].

    Example: ``axis(0, 0.53).ticks`` is ``(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)``.
    """
    span = max(high - low, 1e-9 * max(abs(low), abs(high))) or 1.0  # smaller steps would round to the same number
    rough = span / count
    digits = -math.floor(math.log10(rough))
    unit = 10.0**-digits
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return ChartAxis(ticks=tuple(round(i * step, digits + 3) for i in range(first, max(last, first + 1) + 1)))


def lines(title: str, description: str, curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    """Draw shares over minutes: a line with its interval per curve, and a dashed vertical line with a name per release."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return '<p class="empty">No outcomes were recorded.</p>'
    x_axis = axis(0.0, max([point.t for point in points] + [mark.t for mark in marks]), 8)
    y_axis = axis(0.0, min(1.0, max(point.upper for point in points)))
    x, y = x_axis.scale(LEFT, WIDTH - RIGHT), y_axis.scale(HEIGHT - BOTTOM, TOP)
    drawn = [curve for curve in curves if curve.points]
    parts = [
        *(_grid(y(tick), f"{100 * tick:g}%") for tick in y_axis.ticks),
        *(_tick(x(tick), HEIGHT - BOTTOM + 18, f"{tick:g}") for tick in x_axis.ticks if x(tick) <= WIDTH - RIGHT + 0.5),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 6:.1f}" text-anchor="middle">minutes</text>',
        *_marks(marks, x),
        *(_band(curve, x, y) for curve in drawn),
        *(_line(curve, x, y) for curve in drawn),
        *_names(drawn, x, y),
    ]
    return svg(title, description, WIDTH, HEIGHT, parts)


def bars(title: str, description: str, values: Sequence[tuple[str, float]], unit: str) -> str:
    """Draw one bar per (label, value >= 0), in order. If there are many, only some are labelled."""
    if not values:
        return '<p class="empty">None in this run.</p>'
    width, height, left, bottom = 420.0, 210.0, 52.0, 30.0
    y_axis = axis(0.0, max(max(value for _, value in values), 1e-9), 4)
    y = y_axis.scale(height - bottom, 14.0)
    pitch = (width - left - 8.0) / len(values)
    every = max(1, math.ceil(34.0 / pitch))
    parts = [_grid(y(tick), f"{tick:g}", left=left, right=width - 8.0) for tick in y_axis.ticks]
    for i, (label, value) in enumerate(values):
        start, middle = left + i * pitch, left + (i + 0.5) * pitch
        bar = min(0.72 * pitch, 30.0)
        parts.append(
            f'<rect class="bar" x="{middle - bar / 2:.1f}" y="{y(value):.1f}" width="{bar:.1f}" '
            f'height="{max(0.0, y(0.0) - y(value)):.1f}" rx="1.5"><title>{escape(label)}: {value:.3g} {escape(unit)}</title></rect>'
        )
        if i % every == 0 and start < width:
            parts.append(_tick(middle, height - bottom + 17, label))
    return svg(title, description, width, height, parts)


def svg(title: str, description: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Join the parts into one image, with its text for screen readers."""
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}. {escape(description)}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>\n{body}\n</svg>"
    )


def frame(x_axis: ChartAxis, y_axis: ChartAxis, x: Scale, y: Scale, *, right: float, below: str) -> list[str]:
    """Draw grid and ticks of a chart of shares by shares. `right`: its right margin; `below`: the label of the horizontal axis."""
    return [
        *(_grid(y(tick), f"{100 * tick:g}%", right=WIDTH - right) for tick in y_axis.ticks),
        *(_tick(x(tick), HEIGHT - BOTTOM + 18, f"{100 * tick:g}%") for tick in x_axis.ticks),
        f'<text class="axis" x="{(LEFT + WIDTH - right) / 2:.1f}" y="{HEIGHT - 6:.1f}" text-anchor="middle">{escape(below)}</text>',
    ]


def _grid(at: float, label: str, *, left: float = LEFT, right: float = WIDTH - RIGHT) -> str:
    return (
        f'<line class="grid" x1="{left:g}" x2="{right:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="axis" x="{left - 8:g}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>'
    )


def _tick(at: float, baseline: float, label: str) -> str:
    return f'<text class="axis" x="{at:.1f}" y="{baseline:.1f}" text-anchor="middle">{escape(label)}</text>'


def _marks(marks: Sequence[Mark], x: Scale) -> list[str]:
    """Draw a dashed line per release. A name that would overlap the one before it is only in the tooltip."""
    parts: list[str] = []
    free = 0.0
    for mark in sorted(marks, key=lambda mark: mark.t):
        at, back = x(mark.t), mark.action == "rolled_back"
        parts.append(
            f'<line class="mark{" back" if back else ""}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}">'
            f"<title>{escape(mark.action.replace('_', ' '))} {escape(mark.label)} at {mark.t:.1f} min</title></line>"
        )
        text = ("↩ " if back else "") + mark.label
        half = 3.6 * len(text)
        if at - half > free:
            parts.append(
                f'<text class="version" x="{at:.1f}" y="{TOP - 9:g}" text-anchor="middle">{escape(text)}</text>'
            )
            free = at + half + 4
    return parts


def _band(curve: Curve, x: Scale, y: Scale) -> str:
    upper = [f"{x(p.t):.1f},{y(min(p.upper, 1.0)):.1f}" for p in curve.points]
    lower = [f"{x(p.t):.1f},{y(max(p.lower, 0.0)):.1f}" for p in reversed(curve.points)]
    return f'<polygon class="band {_class(curve)}" points="{" ".join(upper + lower)}"/>'


def _line(curve: Curve, x: Scale, y: Scale) -> str:
    path = " ".join(f"{x(p.t):.1f},{y(p.mean):.1f}" for p in curve.points)
    dots = "".join(
        f'<circle class="dot {_class(curve)}" cx="{x(p.t):.1f}" cy="{y(p.mean):.1f}" r="3">'
        f"<title>{escape(curve.arm)} at {p.t:.1f} min: {100 * p.mean:.1f}% "
        f"({100 * p.lower:.1f} to {100 * p.upper:.1f}), {p.n} turns</title></circle>"
        for p in curve.points
    )
    return f'<polyline class="line {_class(curve)}" points="{path}"/>{dots}'


def _names(curves: Sequence[Curve], x: Scale, y: Scale) -> list[str]:
    """Draw each curve's name at its end. Names that would overlap are moved down."""
    parts: list[str] = []
    free = -math.inf
    for curve in sorted(curves, key=lambda curve: y(curve.points[-1].mean)):
        last = curve.points[-1]
        at = max(y(last.mean) + 4, free)
        free = at + 16
        parts.append(
            f'<text class="name {_class(curve)}" x="{x(last.t) + 9:.1f}" y="{at:.1f}">{escape(curve.arm)}</text>'
        )
    return parts


def _class(curve: Curve) -> str:
    kind = _COMPARED.get(curve.arm, curve.arm)
    return f"arm-{kind}" if kind in ("live", "control", "canary") else "arm-other"


_COMPARED = {"dials": "live", "holdout": "control"}  # drawn in the colours of these arms
