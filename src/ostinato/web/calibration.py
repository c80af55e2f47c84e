"""The calibration plot as inline SVG: how often suggestions are right against how often they are made, before and after. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ostinato.web.chart import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Axis, Scale, frame, svg
from ostinato.web.run_report import Calibration, Share, Suggesting

RIGHT = 20.0
LETTER, ROW = 7.2, 15.0  # width of a letter and height of a row of names, in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    """One policy in one family, with its place. `x` shows its share of right suggestions, or the other policy's if that is unknown."""

    family: str
    arm: str
    x: float
    y: float
    shares: Suggesting


def calibration(title: str, description: str, found: Calibration) -> str:
    """Dots with intervals on both axes, the threshold as a vertical line, and shading where a calibrated policy would be."""
    percent = Axis(ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    x, y = percent.scale(LEFT, WIDTH - RIGHT), percent.scale(HEIGHT - BOTTOM, TOP)
    dots = list(_dots(found, x, y))
    at = x(found.threshold)
    parts = [
        *frame(percent, percent, x, y, right=RIGHT, below="share of suggestions that are right"),
        f'<rect class="wanted" x="{LEFT:g}" y="{y(0.1):.1f}" width="{at - LEFT:.1f}" height="{y(0.0) - y(0.1):.1f}"/>',
        f'<rect class="wanted" x="{at:.1f}" y="{y(1.0):.1f}" width="{WIDTH - RIGHT - at:.1f}" height="{y(0.9) - y(1.0):.1f}"/>',
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/>',
        f'<text class="version" x="{at:.1f}" y="{TOP - 9:g}" text-anchor="middle">t = {found.threshold:g}</text>',
        *(_whiskers(dot, x, y) for dot in dots),
        *(_circle(dot) for dot in dots),
        *_names([dot for dot in dots if dot.arm == "live"]),
    ]
    return svg(title, description, WIDTH, HEIGHT, parts)


def _dots(found: Calibration, x: Scale, y: Scale) -> Iterator[_Dot]:
    """A policy with too few suggestions is placed at the other policy's share of right ones."""
    for family in found.families:
        for arm, shares, other in (("control", family.before, family.after), ("live", family.after, family.before)):
            right = shares.accepted or other.accepted
            if right is not None:
                yield _Dot(family=family.family, arm=arm, x=x(right.mean), y=y(shares.suggested.mean), shares=shares)


def _whiskers(dot: _Dot, x: Scale, y: Scale) -> str:
    suggested, right = dot.shares.suggested, dot.shares.accepted
    across = (
        f'<line class="whisker arm-{dot.arm}" x1="{x(right.lower):.1f}" x2="{x(right.upper):.1f}" y1="{dot.y:.1f}" y2="{dot.y:.1f}"/>'
        if right is not None
        else ""
    )
    return (
        f'{across}<line class="whisker arm-{dot.arm}" x1="{dot.x:.1f}" x2="{dot.x:.1f}" '
        f'y1="{y(suggested.lower):.1f}" y2="{y(suggested.upper):.1f}"/>'
    )


def _circle(dot: _Dot) -> str:
    name = {"control": "starting model", "live": "last release"}[dot.arm]
    suggested, right = dot.shares.suggested, dot.shares.accepted
    said = f"{dot.family}, {name}: suggests in {in_percent(suggested)}, right {in_percent(right)}"
    hollow = " hollow" if dot.arm == "control" else ""
    return f'<circle class="dot{hollow} arm-{dot.arm}" cx="{dot.x:.1f}" cy="{dot.y:.1f}" r="5"><title>{escape(said)}</title></circle>'


def in_percent(share: Share | None) -> str:
    """A share with its interval. Example: ``"41.2% (30.1 to 53.0)"``"""
    return "-" if share is None else f"{100 * share.mean:.1f}% ({100 * share.lower:.1f} to {100 * share.upper:.1f})"


def _names(dots: Sequence[_Dot]) -> list[str]:
    """Each family is named under its dot, or above a dot in the lower half, as near as the other names allow."""
    placed: list[tuple[float, float, float]] = []  # middle, baseline, half the width
    for dot in sorted(dots, key=lambda dot: dot.x):
        half = LETTER * len(dot.family) / 2
        middle = min(max(dot.x, LEFT + half), WIDTH - half)
        first, step = (dot.y - 12, -ROW) if dot.y > (TOP + HEIGHT - BOTTOM) / 2 else (dot.y + 20, ROW)
        baseline = next(
            at
            for at in (first + step * row for row in range(2 * len(dots)))
            if all(abs(at - y) >= ROW or abs(middle - x) >= half + other + LETTER for x, y, other in placed)
        )
        placed.append((middle, baseline, half))
    return [
        f'<text class="name arm-live" x="{middle:.1f}" y="{baseline:.1f}" text-anchor="middle">{escape(dot.family)}</text>'
        for dot, (middle, baseline, _) in zip(sorted(dots, key=lambda dot: dot.x), placed, strict=True)
    ]
