"""The calibration plot: dots where their shares are, the threshold, names that do not cover each other, nothing invented."""

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from ostinato.status.run_report import Calibration, RunReport
from ostinato.web.chart import BOTTOM, HEIGHT, LEFT, TOP, WIDTH
from ostinato.web.report import LETTER, calibration, render


def share(mean, n=200):
    return {"mean": mean, "lower": max(0.0, mean - 0.05), "upper": min(1.0, mean + 0.05), "n": n}


def policy(suggested, accepted):
    return {"suggested": share(suggested), "accepted": None if accepted is None else share(accepted)}


def example(*families):
    chosen = families or (
        ("days", (0.8, 0.7), (1.0, 0.9)),
        ("months", (0.8, 0.68), (0.99, 0.88)),
        ("letters", (0.8, 0.7), (0.98, 0.89)),
        ("coin", (0.8, 0.4), (0.9, 0.5)),
        ("dice", (0.8, 0.1), (0.05, 0.16)),
        ("prices", (0.8, 0.0), (0.0, None)),
    )
    return Calibration.model_validate(
        {
            "threshold": 0.25,
            "families": [
                {"family": name, "before": policy(*before), "after": policy(*after)} for name, before, after in chosen
            ],
        }
    )


def drawn(found):
    return ElementTree.fromstring(calibration("title", "description", found))


def circles(tree):
    return {
        (circle.find("title").text.split(",")[0], "hollow" not in circle.attrib["class"]): (
            float(circle.attrib["cx"]),
            float(circle.attrib["cy"]),
        )
        for circle in tree.iter("circle")
    }


def test_dots_stand_where_their_shares_are():
    dots = circles(drawn(example(("coin", (1.0, 0.0), (0.0, 1.0)))))
    assert dots["coin", False] == (LEFT, TOP)
    assert dots["coin", True] == (WIDTH - 20.0, HEIGHT - BOTTOM)


def test_the_threshold_is_drawn_where_it_is():
    (line,) = [each for each in drawn(example()).iter("line") if each.attrib["class"] == "mark"]
    across = (float(line.attrib["x1"]) - LEFT) / (WIDTH - 20.0 - LEFT)
    assert across == pytest.approx(0.25, abs=1e-3)


def test_a_policy_that_suggests_nothing_stands_where_the_other_was_right_and_claims_no_rate():
    tree = drawn(example())
    dots = circles(tree)
    assert dots["prices", True][0] == dots["prices", False][0] == LEFT
    (title,) = [each.text for each in tree.iter("title") if each.text.startswith("prices, last")]
    assert title.endswith("right -")
    whiskers = [line for line in tree.iter("line") if "whisker" in line.attrib["class"]]
    assert len(whiskers) == 2 * 2 * 6 - 1


def test_a_family_without_any_suggestion_is_in_the_table_only():
    found = example(("prices", (0.0, None), (0.0, None)), ("coin", (0.8, 0.4), (0.9, 0.5)))
    assert {family for family, _ in circles(drawn(found))} == {"coin"}
    page = render(RunReport(title="t", seed=0, minutes=1, model="m", calibration=found))
    assert "<td>prices</td>" in page


def test_names_do_not_cover_each_other():
    names = [
        (float(text.attrib["x"]), float(text.attrib["y"]), len(text.text) * LETTER)
        for text in drawn(example()).iter("text")
        if text.attrib["class"].startswith("name")
    ]
    assert len(names) == 6
    for (x, y, wide), (other_x, other_y, other_wide) in combinations(names, 2):
        assert abs(y - other_y) >= 12 or abs(x - other_x) >= (wide + other_wide) / 2


def test_the_page_says_what_the_plot_shows():
    curve = {"arm": "live", "points": [{"t": 1, "mean": 0.8, "lower": 0.7, "upper": 0.9, "n": 90}]}
    page = render({"title": "t", "seed": 1, "minutes": 3, "model": "m", "suggested": [curve], "calibration": example()})
    assert len(re.findall("<svg", page)) == 2
    assert "Share of requests for which something was suggested" in page
    assert "90.0% (85.0 to 95.0)" in page
    assert "more than 25.0% are right" in page.replace("\n", " ")
    assert "Held-out suite" not in page


def test_a_run_without_silence_has_no_such_section():
    page = render({"title": "t", "seed": 1, "minutes": 3, "model": "m"})
    assert "Where suggestions are made" not in page
    assert "Held-out suite" in page


def test_text_is_escaped():
    evil = '<script>alert(1)</script>"&'
    found = example((evil, (0.8, 0.1), (0.1, None)))
    assert "<script" not in render(RunReport(title="t", seed=0, minutes=1, model="m", calibration=found))
