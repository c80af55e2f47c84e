"""`report.html`: a self-contained file without scripts, with a demo's measurements and the facts that the page shows of a run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

from ostinato.core.visitors import Visitor
from ostinato.status.index_queries import AlarmList
from ostinato.status.releases import ReleaseDetail, ReleaseList
from ostinato.status.run_report import Calibration, Curve, OutcomeShare, RunReport, Suggesting
from ostinato.status.run_state import RunNow
from ostinato.status.training_state import LearningNow, WeightsNow
from ostinato.web.chart import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, ChartAxis, Scale, bars, frame, lines, svg
from ostinato.web.page.templates import StaticFiles, Templates, percent
from ostinato.web.page.views import learning_shown, now_shown, release_shown, releases_shown, state_of

# ---------------------------------------------------------------- calibration


RIGHT = 20.0
LETTER, ROW = 7.2, 15.0  # width of a letter and height of a line of text, in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    """One policy in one family, with its position. `x`: its share of right suggestions, or the other policy's if that is unknown."""

    family: str
    arm: str
    x: float
    y: float
    shares: Suggesting


def calibration(title: str, description: str, found: Calibration) -> str:
    """Draw the calibration: dots with intervals on both axes, the threshold as a vertical line, and shading where dots should be."""
    shares = ChartAxis(ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    x, y = shares.scale(LEFT, WIDTH - RIGHT), shares.scale(HEIGHT - BOTTOM, TOP)
    dots = list(_dots(found, x, y))
    at = x(found.threshold)
    parts = [
        *frame(shares, shares, x, y, right=RIGHT, below="share of suggestions that are right"),
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
    """Yield the dots. A policy with too few suggestions is placed at the other policy's share of right ones."""
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


def in_percent(share: OutcomeShare | None) -> str:
    """Format a share with its interval. Example: ``"41.2% (30.1 to 53.0)"``"""
    return "-" if share is None else f"{100 * share.mean:.1f}% ({100 * share.lower:.1f} to {100 * share.upper:.1f})"


def _names(dots: Sequence[_Dot]) -> list[str]:
    """Draw each family's name below its dot, or above it in the lower half, as near as possible without overlaps."""
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


# ---------------------------------------------------------------- the report


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """The facts that the page shows of a run, at one moment. `details`: the newest releases with their evidence."""

    run: RunNow
    releases: ReleaseList
    details: tuple[ReleaseDetail, ...]
    learning: LearningNow
    alarms: AlarmList
    weights: WeightsNow


def render(measured: Mapping[str, Any] | RunReport | None, recorded: ReportFacts | None = None) -> str:
    """Render the whole file: a demo's measurements, if there are any, and the facts that the page shows of the run.

    Raises:
        pydantic.ValidationError: the mapping does not have the shape of `RunReport`.
    """
    demo = RunReport.model_validate(measured) if isinstance(measured, Mapping) else measured
    files = StaticFiles()
    facts: dict[str, Any] = {
        "style": Markup(files.text("page.css")),
        "demo": demo,
        "measured": Markup("" if demo is None else _demo_sections(demo)),
        "recorded": recorded,
        "visitor": Visitor(tenant=None, operator=False),
    }
    if recorded is not None:
        facts |= _context(recorded)
    page = Templates(files).render("report.html", facts)
    return _without_links(
        page, frozenset() if recorded is None else frozenset(_anchor(each) for each in recorded.details)
    )


def _context(recorded: ReportFacts) -> Mapping[str, Any]:
    """Return the context of each part, under the names that its template uses."""
    return {
        "now": {"run": recorded.run, "state": state_of(recorded.run), **now_shown(recorded.run)},
        "releases": releases_shown(recorded.releases),
        "details": [{"place": _anchor(each), **release_shown(each)} for each in recorded.details],
        "learning": learning_shown(recorded.learning),
    }


def _anchor(found: ReleaseDetail) -> str:
    return found.line.policy.hash[:16]


_LINK = re.compile(r' href="/(releases/([0-9a-f]+))?[^"]*"')


def _without_links(page: str, places: frozenset[str]) -> str:
    """Turn the page's links into anchors of this file, or remove them. Safe, since people's text is escaped and contains no quotes."""
    return _LINK.sub(lambda found: f' href="#v-{found[2]}"' if found[2] in places else "", page)


def _demo_sections(run: RunReport) -> str:
    sections = [
        _summary(run),
        _arms_over_time(run, run.suggested, "Share of requests for which something was suggested", "Suggested")
        if run.suggested
        else "",
        _arms_over_time(run, run.curves, "Share of suggestions that the simulated users accepted", "Accepted"),
        _calibration(run),
        _gates(run),
        f'<div class="pair">{_deltas(run)}{_pauses(run)}</div>',
        f'<div class="pair">{_held_out(run) if run.calibration is None else ""}{_accounting(run)}</div>',
    ]
    return "".join(sections)


def _section(title: str, hint: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="hint">{escape(hint)}</p>{body}</section>'


def _summary(run: RunReport) -> str:
    rows = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in run.summary)
    notes = "".join(f'<p class="hint">{escape(note)}</p>' for note in run.notes)
    return f'<section aria-label="Summary"><dl class="figures">{rows}</dl>{notes}</section>' if rows or notes else ""


def _arms_over_time(run: RunReport, curves: Sequence[Curve], title: str, what: str) -> str:
    ends = ", ".join(f"{curve.arm} ends at {percent(curve.points[-1].mean)}" for curve in curves if curve.points)
    chart = lines(title, ends or "no data", curves, run.releases)
    rows = [
        (curve.arm, f"{p.t:.1f}", percent(p.mean), f"{percent(p.lower)} to {percent(p.upper)}", str(p.n))
        for curve in curves
        for p in curve.points
    ]
    table = _table(
        "Every point of the chart", ("Arm", "Minute", what, "95% interval", "Turns"), rows, numbers=(1, 2, 4)
    )
    hint = "The control arm stays on the first checkpoint for the whole run. Dashed vertical lines are releases, named above."
    return _section(title, hint, f"{chart}<details><summary>The same as a table</summary>{table}</details>")


def _calibration(run: RunReport) -> str:
    found = run.calibration
    if found is None:
        return ""
    title = "Where suggestions are made, and how often they are right"
    rows = [
        (
            each.family,
            in_percent(each.before.accepted),
            in_percent(each.before.suggested),
            in_percent(each.after.accepted),
            in_percent(each.after.suggested),
        )
        for each in found.families
    ]
    heads = ("Family", "Right, before", "Suggested, before", "Right, after", "Suggested, after")
    table = _table("Shares with their 95% intervals", heads, rows, numbers=(1, 2, 3, 4))
    hint = (
        f"Each family of held-out tasks under the starting model (hollow) and the last release (filled). A suggestion pays where more "
        f"than {percent(found.threshold)} are right: there a calibrated policy always suggests, elsewhere never (shaded). "
        "Upwards: the share of answers that suggest something."
    )
    chart = calibration(title, f"{len(found.families)} families", found)
    return _section(title, hint, f"{chart}<details><summary>The same as a table</summary>{table}</details>")


def _gates(run: RunReport) -> str:
    rows = [
        (
            f"{gate.t:.1f}",
            gate.candidate,
            gate.live,
            _points(gate.difference),
            f"{_points(gate.lower)} to {_points(gate.upper)}",
            f"{100 * gate.margin:.1f}",
            f"{gate.power:.2f}",
            f"{gate.items} x {gate.draws}",
            gate.verdict,
        )
        for gate in run.gates
    ]
    heads = (
        "Minute",
        "Candidate",
        "Against",
        "Difference, pp",
        "Bounds, pp",
        "Margin, pp",
        "Power",
        "Items x draws",
        "Verdict",
    )
    body = _table("", heads, rows, numbers=(0, 3, 4, 5, 6, 7))
    hint = (
        "A candidate ships when the lower bound of its paired difference lies above minus the margin: against live, as shown here, and, at "
        "the total margin, against the best release so far and the anchor."
    )
    return _section("Gate", hint, body)


def _deltas(run: RunReport) -> str:
    sizes = [(delta.version, delta.bytes / 2**20) for delta in run.deltas]
    hint = "No version was published."
    if run.deltas:
        share = sum(d.bytes for d in run.deltas) / sum(d.full_bytes for d in run.deltas)
        hint = f"MiB per published version; in total {percent(share)} of the bytes that full weights would take."
    return _section("Delta size", hint, bars("Delta size in MiB", hint, sizes, "MiB"))


def _pauses(run: RunReport) -> str:
    values = [1000 * pause.seconds for pause in run.pauses]
    hint = "No swap took place."
    if values:
        streams = sum(pause.streams for pause in run.pauses)
        hint = f"Milliseconds per swap; median {statistics.median(values):.0f}, longest {max(values):.0f}. {streams} streams continued."
    bars_in = [(pause.version, value) for pause, value in zip(run.pauses, values, strict=True)]
    return _section("Swap pause", hint, bars("Swap pause in milliseconds", hint, bars_in, "ms"))


def _held_out(run: RunReport) -> str:
    rows = [(h.label, percent(h.mean), f"{percent(h.lower)} to {percent(h.upper)}", str(h.items)) for h in run.held_out]
    body = _table("", ("Version", "Passed", "95% interval", "Items"), rows, numbers=(1, 2, 3))
    return _section("Held-out suite", "Families of tasks that no simulated user asks for.", body)


def _accounting(run: RunReport) -> str:
    rows = [(label, f"{count:,}") for label, count in run.accounting]
    body = _table("", ("Turns", "Count"), rows, numbers=(1,))
    return _section("Served turns by outcome", "Each ends as one reward or one recorded reason.", body)


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> str:
    if not rows:
        return '<p class="empty">None in this run.</p>'

    def cell(column: int, text: str) -> str:
        names = ["number"] if column in numbers else []
        names += [text] if text in ("SHIP", "BLOCK", "EXTEND") else []
        attribute = f' class="{" ".join(names)}"' if names else ""
        return f"<td{attribute}>{escape(text)}</td>"

    head = "".join(
        f'<th scope="col"{" class=number" if i in numbers else ""}>{escape(h)}</th>' for i, h in enumerate(heads)
    )
    body = "".join("<tr>" + "".join(cell(i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"
