"""`report.html`: one run as one self-contained page (no script, no network). A pure function of `report.json`'s content."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ostinato.web.calibration import calibration, in_percent
from ostinato.web.chart import bars, lines
from ostinato.web.run_report import Curve, RunReport

_STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #ffffff; --ink: #1b1b1a; --soft: #5d5c58; --line: #dedcd5;
  --live: #2a6fd0; --control: #b4560f; --canary: #12805a; --other: #7a4fc4; --good: #12724e; --bad: #b3261e; --wait: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --page: #151514; --card: #1f1f1d; --ink: #f0efeb; --soft: #a9a79f; --line: #383733;
  --live: #6aa5f5; --control: #ec9a5c; --canary: #4fc79a; --other: #b697f0; --good: #5fd0a4; --bad: #ff8f86; --wait: #e6b45a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 940px; margin: 0 auto; padding: 36px 20px 60px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; text-wrap: balance; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 10px; max-width: 74ch; }
.lead, .hint, .empty, caption { color: var(--soft); }
.hint { font-size: 13.5px; margin-bottom: 12px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin-top: 18px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 18px; }
.pair section { min-width: 0; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(195px, 1fr)); gap: 16px 20px; margin: 0; }
dt { color: var(--soft); font-size: 13px; } dd { margin: 0; font-size: 19px; font-weight: 600; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; line-height: 1.3; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
caption { text-align: left; font-size: 13.5px; padding-bottom: 6px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td, tr:last-child th { border-bottom: 0; } .number { text-align: right; }
.SHIP { color: var(--good); font-weight: 600; } .BLOCK { color: var(--bad); font-weight: 600; }
.EXTEND { color: var(--wait); font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; } .axis { fill: var(--soft); font-size: 12px; }
.version { fill: var(--soft); font-size: 12px; } .mark { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 3 4; opacity: .7; }
.mark.back { stroke: var(--bad); } .bar { fill: var(--live); }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; } .band { opacity: .14; } .name { font-size: 13px; font-weight: 600; }
.line.arm-live { stroke: var(--live); } .line.arm-control { stroke: var(--control); stroke-dasharray: 7 4; }
.line.arm-canary { stroke: var(--canary); stroke-dasharray: 2 3; } .line.arm-other { stroke: var(--other); }
.arm-live:not(.line) { fill: var(--live); } .arm-control:not(.line) { fill: var(--control); }
.arm-canary:not(.line) { fill: var(--canary); } .arm-other:not(.line) { fill: var(--other); }
.whisker { stroke-width: 1.2; opacity: .55; } .whisker.arm-live { stroke: var(--live); } .whisker.arm-control { stroke: var(--control); }
.dot.hollow { fill: var(--card); stroke: var(--control); stroke-width: 2; } .wanted { fill: var(--good); opacity: .1; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--soft); font-size: 13.5px; }
footer { color: var(--soft); font-size: 13px; margin-top: 22px; }
"""


def render(report: Mapping[str, Any] | RunReport) -> str:
    """The whole page.

    Raises:
        pydantic.ValidationError: the mapping has not the shape of `RunReport`.
    """
    run = report if isinstance(report, RunReport) else RunReport.model_validate(report)
    sections = [
        _summary(run),
        _suggested(run),
        _acceptance(run),
        _calibration(run),
        _gates(run),
        f'<div class="pair">{_deltas(run)}{_pauses(run)}</div>',
        f'<div class="pair">{_held_out(run) if run.calibration is None else ""}{_accounting(run)}</div>',
    ]
    people = f"{run.users} simulated users" if run.users else "simulated users"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(run.title)}</h1>
<p class="lead">{escape(run.model)}, {run.minutes:g} minutes, seed {run.seed}. Every request and every reaction on this page
comes from {people}: programs. No person took part.</p>
{"".join(sections)}
<footer>Drawn from report.json, which holds the same figures. Shaded areas and ranges are 95% intervals, except the gate's
bounds, which split their error over its looks.</footer>
</main>
</body>
</html>
"""


def _section(title: str, hint: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="hint">{escape(hint)}</p>{body}</section>'


def _summary(run: RunReport) -> str:
    rows = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in run.summary)
    notes = "".join(f'<p class="hint">{escape(note)}</p>' for note in run.notes)
    return f'<section aria-label="Summary"><dl>{rows}</dl>{notes}</section>' if rows or notes else ""


def _acceptance(run: RunReport) -> str:
    return _arms_over_time(run, run.curves, "Share of suggestions that the simulated users accepted", "Accepted")


def _suggested(run: RunReport) -> str:
    title = "Share of requests for which something was suggested"
    return _arms_over_time(run, run.suggested, title, "Suggested") if run.suggested else ""


def _arms_over_time(run: RunReport, curves: Sequence[Curve], title: str, what: str) -> str:
    ends = ", ".join(f"{curve.arm} ends at {_percent(curve.points[-1].mean)}" for curve in curves if curve.points)
    chart = lines(title, ends or "no data", curves, run.releases)
    rows = [
        (curve.arm, f"{p.t:.1f}", _percent(p.mean), f"{_percent(p.lower)} to {_percent(p.upper)}", str(p.n))
        for curve in curves
        for p in curve.points
    ]
    table = _table(
        "Every point of the chart", ("Arm", "Minute", what, "95% interval", "Turns"), rows, numbers=(1, 2, 4)
    )
    hint = (
        "The control arm stays on the first checkpoint for the whole run. Dashed verticals are releases, named above."
    )
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
    heads = ("Family", "Right before", "Suggested before", "Right after", "Suggested after")
    table = _table("Shares with their 95% intervals", heads, rows, numbers=(1, 2, 3, 4))
    hint = (
        f"Each family of held-out tasks under the starting model (hollow) and the last release (filled). A suggestion pays where more "
        f"than {_percent(found.threshold)} are right: there a calibrated policy always suggests, elsewhere never (shaded). "
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
        hint = f"MiB per published version; together {_percent(share)} of sending the full weights each time."
    return _section("Delta size", hint, bars("Delta size in MiB", hint, sizes, "MiB"))


def _pauses(run: RunReport) -> str:
    values = [1000 * pause.seconds for pause in run.pauses]
    hint = "No swap took place."
    if values:
        streams = sum(pause.streams for pause in run.pauses)
        hint = f"Milliseconds per swap; median {statistics.median(values):.0f}, longest {max(values):.0f}. {streams} streams went on."
    bars_in = [(pause.version, value) for pause, value in zip(run.pauses, values, strict=True)]
    return _section("Swap pause", hint, bars("Swap pause in milliseconds", hint, bars_in, "ms"))


def _held_out(run: RunReport) -> str:
    rows = [
        (h.label, _percent(h.mean), f"{_percent(h.lower)} to {_percent(h.upper)}", str(h.items)) for h in run.held_out
    ]
    body = _table("", ("Version", "Passed", "95% interval", "Items"), rows, numbers=(1, 2, 3))
    return _section("Held-out suite", "Families of tasks that no simulated user asks for.", body)


def _accounting(run: RunReport) -> str:
    rows = [(label, f"{count:,}") for label, count in run.accounting]
    body = _table("", ("Turns", "Count"), rows, numbers=(1,))
    return _section("Where every served turn went", "Each ends as one reward or one recorded reason.", body)


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


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"
