"""The shape of `report.json`, a demo run's measurements, which `report.render` draws, and the page of `ostinato weights diff --html`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pydantic import BaseModel, Field, ValidationError

from ostinato.core.errors import BadConfig


class _Part(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of the report's parts: unknown fields and NaN are refused."""


class CurvePoint(_Part, frozen=True):
    """A share of turns (accepted, unless the chart says otherwise) in a window that ends `t` minutes into the run, and its 95% interval."""

    t: float = Field(ge=0.0, description="Minutes since the start.")
    mean: float = Field(ge=0.0, le=1.0, description="The share.")
    lower: float = Field(description="Lower end of the interval.")
    upper: float = Field(description="Upper end of the interval.")
    n: int = Field(ge=0, description="Turns in the window.")


class Curve(_Part, frozen=True):
    """One arm over time."""

    arm: str = Field(description="live, control or canary.")
    points: tuple[CurvePoint, ...] = Field(description="In order of time.")


class Mark(_Part, frozen=True):
    """A release or a rollback."""

    t: float = Field(ge=0.0, description="Minutes since the start.")
    label: str = Field(description="The policy version that became live, such as v12.")
    action: str = Field(default="shipped", description="shipped or rolled_back.")


class Gate(_Part, frozen=True):
    """One look of the gate. Differences are shares in [-1, 1], candidate minus live."""

    t: float = Field(ge=0.0, description="Minutes since the start.")
    candidate: str = Field(description="Version that was judged.")
    live: str = Field(description="Version it was compared with.")
    difference: float = Field(description="Mean paired difference.")
    lower: float = Field(description="One-sided lower bound.")
    upper: float = Field(description="Upper bound.")
    margin: float = Field(description="Tolerated loss.")
    power: float = Field(description="Probability that an equal candidate passes.")
    items: int = Field(ge=0, description="Suite items.")
    draws: int = Field(ge=0, description="Samples per item.")
    verdict: str = Field(description="SHIP, BLOCK or EXTEND.")


class Delta(_Part, frozen=True):
    """The bytes sent to publish one version."""

    version: str = Field(description="Policy version.")
    bytes: int = Field(ge=0, description="Size of the delta, in bytes.")
    full_bytes: int = Field(gt=0, description="Size of the full weights, in bytes.")


class Pause(_Part, frozen=True):
    """One hot swap."""

    version: str = Field(description="Policy version swapped in.")
    slot: str = Field(default="live", description="Engine slot.")
    seconds: float = Field(ge=0.0, description="Seconds during which no token could be made.")
    streams: int = Field(default=0, ge=0, description="Streams that continued across the swap.")


class HeldOut(_Part, frozen=True):
    """Score of one version on the held-out suite."""

    label: str = Field(description="Such as base or final.")
    mean: float = Field(ge=0.0, le=1.0, description="Mean score.")
    lower: float = Field(description="Lower end of the 95% interval.")
    upper: float = Field(description="Upper end.")
    items: int = Field(ge=0, description="Suite items.")


class OutcomeShare(_Part, frozen=True):
    """A share of `n` outcomes and its 95% interval."""

    mean: float = Field(ge=0.0, le=1.0, description="The share.")
    lower: float = Field(ge=0.0, le=1.0, description="Lower end of the interval.")
    upper: float = Field(ge=0.0, le=1.0, description="Upper end.")
    n: int = Field(ge=0, description="Number of outcomes.")


class Suggesting(_Part, frozen=True):
    """How one policy treats one family of tasks."""

    suggested: OutcomeShare = Field(description="Share of answers that suggest something.")
    accepted: OutcomeShare | None = Field(
        description="Share of suggestions that are right; null if there were too few to say."
    )


class CalibratedFamily(_Part, frozen=True):
    """One family of tasks under the starting model and under the last release."""

    family: str = Field(description="The family's name.")
    before: Suggesting = Field(description="The starting model.")
    after: Suggesting = Field(description="The last release.")


class Calibration(_Part, frozen=True):
    """Whether suggestions are made where they pay: in families where more than `threshold` of them are right."""

    threshold: float = Field(gt=0.0, lt=1.0, description="The share above which a suggestion pays.")
    families: tuple[CalibratedFamily, ...] = Field(description="All families of the suite.")


class RunReport(_Part, frozen=True):
    """Everything that `report.json` holds.

    Example::

        RunReport(title="Inline copilot", seed=0, minutes=12.0, model="SmolLM2-135M-Instruct", users=50,
                  curves=(Curve(arm="live", points=(CurvePoint(t=1.0, mean=0.25, lower=0.2, upper=0.3, n=200),)),),
                  summary=(("Releases", "5"),), accounting=(("turns", 3000), ("trained", 2400), ("held back", 600)))
    """

    title: str = Field(description="Headline of the page.")
    seed: int = Field(description="Seed of the run.")
    minutes: float = Field(ge=0.0, description="Length of the run, in minutes.")
    model: str = Field(description="The starting model.")
    users: int = Field(default=0, ge=0, description="Number of simulated users.")
    curves: tuple[Curve, ...] = Field(default=(), description="Acceptance per arm.")
    suggested: tuple[Curve, ...] = Field(default=(), description="Share of requests with a suggestion, per arm.")
    calibration: Calibration | None = Field(default=None, description="Present for a model that may suggest nothing.")
    releases: tuple[Mark, ...] = Field(default=(), description="Releases and rollbacks.")
    gates: tuple[Gate, ...] = Field(default=(), description="Looks of the gate, in order.")
    deltas: tuple[Delta, ...] = Field(default=(), description="Published deltas, in order.")
    pauses: tuple[Pause, ...] = Field(default=(), description="Hot swaps, in order.")
    held_out: tuple[HeldOut, ...] = Field(default=(), description="Held-out scores.")
    accounting: tuple[tuple[str, int], ...] = Field(default=(), description="How every served turn ended.")
    summary: tuple[tuple[str, str], ...] = Field(default=(), description="The terminal's summary table: label, value.")
    notes: tuple[str, ...] = Field(default=(), description="Remarks shown under the summary.")

    def to_json(self) -> str:
        """The text of `report.json`."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> RunReport:
        """Read `report.json`. Raises BadConfig naming the field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "(file)"
            raise BadConfig(
                f"report.json, field {field!r}: {first['msg']}; write it again with this version"
            ) from error


# ---------------------------------------------------------------- weights


_STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #fff; --ink: #1b1b1a; --soft: #5d5c58; --line: #dedcd5; --fill: 42, 111, 208; }
@media (prefers-color-scheme: dark) { :root { --page: #151514; --card: #1f1f1d; --ink: #f0efeb; --soft: #a9a79f; --line: #383733;
  --fill: 106, 165, 245; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 36px 20px 60px; }
h1 { font-size: 25px; margin: 0 0 6px; } p { color: var(--soft); max-width: 74ch; margin: 0 0 12px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin-top: 18px; }
section { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--soft); text-align: left; padding: 2px 10px 2px 0; white-space: nowrap; }
.map td { width: 24px; height: 20px; min-width: 14px; border: 1px solid var(--line); } .map thead th { padding: 0 2px; text-align: center; }
.list td, .list th { padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); } .number { text-align: right; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor on the page. Example: ``Row(name="model.norm.weight", layer=None, kind="norm", share=0.01, elements=576, moved=2e-4)``"""

    name: str
    layer: int | None
    kind: str
    share: float
    elements: int
    moved: float | None


def shade(share: float, most: float) -> float:
    """How dark a share of changed elements is drawn, 0 to 1: logarithmic over three decades below `most`, so that small ones show, too."""
    if share <= 0 or most <= 0:
        return 0.0
    return max(0.08, min(1.0, 1 + math.log10(share / most) / 3))


def render(title: str, lead: str, rows: Sequence[Row]) -> str:
    """The whole page, self-contained: no script, no network."""
    layers = sorted({row.layer for row in rows if row.layer is not None})
    inside, outside = [row for row in rows if row.layer is not None], [row for row in rows if row.layer is None]
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(lead)}</p>",
        _section("By layer", _map(inside, layers)) if inside else "",
        _section("Outside the layers", _list(outside)) if outside else "",
        _section("Every tensor, most changed first", _list(sorted(rows, key=lambda row: -row.share))),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _map(rows: Sequence[Row], layers: Sequence[int]) -> str:
    most = max(row.share for row in rows)
    at = {(row.kind, row.layer): row for row in rows}
    head = "".join(f"<th>{layer}</th>" for layer in layers)
    lines = [
        f"<tr><th>{escape(kind)}</th>{''.join(_cell(at.get((kind, layer)), most) for layer in layers)}</tr>"
        for kind in dict.fromkeys(row.kind for row in rows)
    ]
    return f'<table class="map"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _cell(row: Row | None, most: float) -> str:
    if row is None:
        return "<td></td>"
    note = escape(f"{row.name}: {row.share:.3%} of {row.elements:,} changed", quote=True)
    return f'<td title="{note}" style="background: rgba(var(--fill), {shade(row.share, most):.2f})"></td>'


def _list(rows: Sequence[Row]) -> str:
    lines = [
        f'<tr><td>{escape(row.name)}</td><td class="number">{row.elements:,}</td><td class="number">{row.share:.3%}</td>'
        f'<td class="number">{"" if row.moved is None else f"{row.moved:.2e}"}</td></tr>'
        for row in rows
    ]
    head = '<tr><th>tensor</th><th class="number">elements</th><th class="number">changed</th><th class="number">moved</th></tr>'
    return f'<table class="list"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>'
