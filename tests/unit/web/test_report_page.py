"""The page says what report.json says, escapes everything, loads nothing, and is well-formed."""

import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError

from ostinato.core.errors import BadConfig
from ostinato.status.run_report import RunReport
from ostinato.web.chart import axis
from ostinato.web.report import render


def example(**changes):
    def curve(arm, start, gain):
        means = [start + gain * (1 - math.exp(-i / 4)) + 0.02 * math.sin(3 * i) for i in range(12)]
        return {
            "arm": arm,
            "points": [
                {"t": i + 1, "mean": m, "lower": m - 0.06, "upper": m + 0.06, "n": 210} for i, m in enumerate(means)
            ],
        }

    versions = [f"v{n}" for n in (3, 6, 9, 13, 16, 20)]
    gate = {"lower": -0.021, "upper": 0.09, "margin": 0.05, "power": 0.84, "items": 120, "draws": 4}
    report = {
        "title": "Ostinato demo: an inline copilot learns from its users",
        "seed": 0,
        "minutes": 12.0,
        "model": "SmolLM2-135M-Instruct",
        "users": 50,
        "curves": [curve("live", 0.25, 0.28), curve("control", 0.25, 0.0)],
        "releases": [{"t": 1.6 * i + 1.2, "label": v} for i, v in enumerate(versions)],
        "gates": [
            {"t": 1.5 * i, "candidate": v, "live": "v0", "difference": 0.034, "verdict": verdict, **gate}
            for i, (v, verdict) in enumerate(
                zip(versions, ["SHIP", "EXTEND", "SHIP", "BLOCK", "SHIP", "SHIP"], strict=True)
            )
        ],
        "deltas": [
            {"version": v, "bytes": 5_000_000 + 400_000 * i, "full_bytes": 269_000_000} for i, v in enumerate(versions)
        ],
        "pauses": [{"version": v, "seconds": 0.031 + 0.004 * i, "streams": 9} for i, v in enumerate(versions)],
        "held_out": [
            {"label": "base", "mean": 0.24, "lower": 0.19, "upper": 0.30, "items": 120},
            {"label": "final", "mean": 0.41, "lower": 0.35, "upper": 0.48, "items": 120},
        ],
        "accounting": [
            ("served", 5040),
            ("trained", 3870),
            ("held back: arm:control", 1010),
            ("held back: finish:abort", 160),
        ],
        "summary": [
            ("Live arm, last third", "52.3%"),
            ("Control arm, last third", "25.1%"),
            ("Difference", "+27.2 pp (21.0 to 33.4)"),
            ("Releases shipped", "5"),
            ("Failed user requests", "0"),
            ("Turns served", "5,040"),
        ],
    }
    return report | changes


class Tags(HTMLParser):
    VOID = frozenset({"meta", "line", "rect", "circle", "polygon", "polyline"})

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def parse(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags.seen


def test_page_is_well_formed_and_loads_nothing():
    page = render(example())
    seen = parse(page)
    assert not {"script", "img", "iframe"} & {tag for tag, _ in seen}
    assert not any(key in ("src", "href") or key.startswith("on") for _, attributes in seen for key in attributes)
    assert "http" not in page
    assert "url(" not in page


def test_charts_are_xml_with_title_and_description():
    charts = re.findall(r"<svg.*?</svg>", render(example()), flags=re.DOTALL)
    assert len(charts) == 3
    for chart in charts:
        tree = ElementTree.fromstring(chart)
        assert tree.attrib["role"] == "img"
        assert tree.find("title").text
        assert tree.find("desc").text


def test_every_figure_of_the_summary_and_the_gate_stands_on_the_page():
    report = example()
    page = render(report)
    for _, value in report["summary"]:
        assert value in page
    assert page.count('class="SHIP"') == 4
    assert page.count('class="BLOCK"') == 1
    assert "No person took part" in page
    assert "50 simulated users" in page
    assert len(re.findall(r'<line class="mark', page)) == 6


def test_line_goes_through_the_points():
    points = [{"t": t, "mean": m, "lower": m, "upper": m, "n": 1} for t, m in ((0, 0.0), (10, 1.0))]
    page = render(example(curves=[{"arm": "live", "points": points}], releases=[]))
    start, end = re.search(r'<polyline class="line arm-live" points="(\S+) (\S+)"', page).groups()
    assert start == "52.0,316.0"  # left and bottom edge of the plot
    assert end == "776.0,34.0"  # right and top edge


def test_text_is_escaped():
    evil = '<script>alert(1)</script>"&'
    report = example(title=evil, model=evil, notes=[evil], summary=[(evil, evil)], accounting=[(evil, 1)])
    report["curves"][0]["arm"] = evil
    report["releases"][0]["label"] = evil
    page = render(report)
    assert "<script" not in page
    parse(page)


def test_an_empty_run_still_renders():
    page = render({"title": "t", "seed": 1, "minutes": 0, "model": "m"})
    assert "No outcomes were recorded" in page
    parse(page)


def test_json_round_trip_and_refusals():
    report = RunReport.model_validate(example())
    assert RunReport.from_json(report.to_json()) == report
    assert render(report) == render(example())
    with pytest.raises(BadConfig, match=r"held_out\.0\.mean"):
        RunReport.from_json(
            report.to_json().replace('"mean": 0.24,\n      "lower": 0.19', '"mean": 24,\n      "lower": 0.19')
        )
    with pytest.raises(ValidationError):
        render(example(surprise=1))


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0.53), (0, 1), (0, 12), (0, 0.0003), (0, 0), (3, 1234567), (0, 2e-13), (-3e-16, 1e-15), (0, 1e-290)],
)
def test_axis_covers_its_range_in_few_steps(low, high):
    ticks = axis(low, high).ticks
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8
    steps = {round((b - a) / (ticks[1] - ticks[0]), 6) for a, b in pairwise(ticks)}
    assert steps == {1.0}


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0 + 2e-13), (-5e9, -5e9 + 1e-6), (1e16, 1e16 + 2)])
def test_what_hardly_differs_is_drawn_all_the_same(low, high):
    found = axis(low, high)
    assert found.ticks[0] <= low < high <= found.ticks[-1]
    assert 0 <= found.scale(0, 100)(low) <= found.scale(0, 100)(high) <= 100
