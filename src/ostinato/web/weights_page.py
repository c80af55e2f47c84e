"""The page of `ostinato weights diff --html`: a heat map of changed elements, kinds of tensors by layers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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
    """Return the shade of a share of changed elements, 0 to 1: logarithmic over three decades below `most`, so small shares show too."""
    if share <= 0 or most <= 0:
        return 0.0
    return max(0.08, min(1.0, 1 + math.log10(share / most) / 3))


def render(title: str, lead: str, rows: Sequence[Row]) -> str:
    """Return the whole page, self-contained, without scripts."""
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
