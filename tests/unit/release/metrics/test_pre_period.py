"""What is known of people before a trial."""

import math

import numpy as np
import pytest

from ostinato.release.metrics import metric as metric_module
from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.metric import Metric, Past, shrinkage

GOAL = Metric.of(MetricConfig(name="acceptance"), 0.02)
SLOW = Metric.of(MetricConfig(name="latency_p99"), 0.02)
ANN, BOB, EVE = ("acme", "ann"), ("acme", "bob"), ("bolt", "eve")


def test_a_persons_own_past_is_mixed_with_everybodys():
    past = Past((GOAL,))
    assert past.expected().of(ANN) == (0.5,), "nobody is known"
    for _ in range(6):
        past.remember(ANN, 1.0, {"accepted": 1.0})
        past.remember(BOB, 1.0, {"rejected": 1.0})
    past.remember(EVE, 1.0, {})
    expected = past.expected()
    assert expected.usual_M == (0.5,)
    assert [expected.of(who)[0] for who in (ANN, BOB, EVE, ("acme", "new"))] == pytest.approx([0.75, 0.25, 0.5, 0.5])
    past.remember(ANN, 2.0, {"rejected": 1.0})
    assert expected.of(ANN) == (0.75,), "what happens later does not change what was expected"


def test_it_is_mixed_by_turns_whatever_a_turns_denominator_is():
    words = MetricConfig(name="edited", role="goal", numerator=("edited",), denominator=("words",), most=1.0)
    ratios = []
    for size in (0.01, 1.0, 1000.0):
        past = Past((Metric.of(words, 0.02),))
        for _ in range(6):
            past.remember(ANN, 1.0, {"edited": size, "words": size})
            past.remember(BOB, 1.0, {"edited": 0.0, "words": size})
        ratios.append(past.expected().of(ANN)[0])
    assert ratios == pytest.approx([0.75] * 3)


def test_who_was_not_seen_lately_is_forgotten():
    past = Past((GOAL,))
    past.remember(ANN, 1.0, {})
    past.remember(BOB, 5.0, {})
    assert past.active(2.0) == {BOB}
    past.forget(1.0)
    assert past.active(0.0) == {BOB}


def test_tenants_with_enough_people_the_largest_first():
    past = Past((GOAL,))
    for tenant, people in (("acme", 3), ("bolt", 5), ("cone", 2)):
        for n in range(people):
            past.remember((tenant, f"u{n}"), 1.0, {})
    assert past.tenants(3) == ("bolt", "acme")


def test_a_quantile_is_known_from_five_values_beyond_it():
    past = Past((GOAL, SLOW))
    for n in range(499):
        past.remember(ANN, 1.0, {"turn.latency": float(n)})
    assert past.threshold(SLOW) is None
    past.remember(ANN, 1.0, {"turn.latency": 499.0})
    past.remember(ANN, 1.0, {})
    assert past.threshold(SLOW) == 494.0
    assert past.threshold(GOAL) is None


def draws(rho, *, groups=2_000, seed=1):
    """Turns of groups of unequal size whose chances are of a beta distribution with this correlation: (group, whether it was good)."""
    rng = np.random.default_rng(seed)
    more = (1.0 - rho) / rho
    chances, sizes = rng.beta(0.6 * more, 0.4 * more, groups), rng.integers(1, 30, groups)
    return [(group, float(rng.random() < chances[group])) for group in range(groups) for _ in range(sizes[group])]


@pytest.mark.parametrize("rho", [0.05, 0.15, 0.4])
def test_groups_are_mixed_with_as_many_turns_as_fit_how_much_they_differ(rho):
    turns = draws(rho)
    mean = np.mean([good for _, good in turns])
    sums = {}
    for group, good in turns:
        total, count = sums.get(group, (0.0, 0.0))
        sums[group] = total + good - mean, count + 1.0
    assert shrinkage(sums.values(), sum((good - mean) ** 2 for _, good in turns)) == pytest.approx(
        1 / rho - 1, rel=0.15
    )


def test_groups_that_do_not_differ_tell_nothing_and_a_few_are_not_asked():
    rng = np.random.default_rng(3)
    good = rng.random(4_000) < 0.5
    alike = [(float(chunk.sum()) - 2.0, 4.0) for chunk in good.reshape(1_000, 4)]
    assert shrinkage(alike, 1_000.0) > 50.0
    assert shrinkage([(0.0, 4.0)] * 1_000, 1_000.0) == math.inf, "more alike than chance makes them"
    assert shrinkage(alike[:99], 99.0) is None


def test_a_persons_past_counts_as_much_as_people_differ():
    for rho in (0.05, 0.4):
        past = Past((GOAL,))
        for group, good in draws(rho):
            past.remember(("acme", str(group)), 1.0, {"accepted" if good else "rejected": 1.0})
        for _ in range(10):
            past.remember(ANN, 1.0, {"accepted": 1.0})
        expected = past.expected()
        mixed, usual = 1 / rho - 1, expected.usual_M[0]
        assert expected.of(ANN)[0] == pytest.approx((10 + mixed * usual) / (10 + mixed), abs=0.015)


def asked(past, seed=5, *, hard=-0.3, people=100):
    """A past in which anybody asks any of 200 tasks, of which those with an even number are `hard`; with one that comes once."""
    rng = np.random.default_rng(seed)
    for _ in range(12_000):
        person, task = ("acme", f"u{rng.integers(people)}"), int(rng.integers(200))
        good = rng.random() < 0.6 + (hard if task % 2 == 0 else 0.0)
        past.remember(person, 1.0, {"accepted" if good else "rejected": 1.0}, [("acme", str(task))])
    return past


def test_a_hard_task_is_expected_to_do_worse_whoever_asks_it():
    expected = asked(Past((GOAL,))).expected()
    hard, easy = (
        np.mean([expected.of(("acme", "new"), [("acme", str(task))])[0] for task in range(start, 200, 2)])
        for start in (0, 1)
    )
    assert (hard, easy) == (pytest.approx(0.3, abs=0.03), pytest.approx(0.6, abs=0.03))
    assert expected.of(ANN, [("acme", "never seen")]) == expected.of(ANN)
    assert expected.of(ANN, [("bolt", "0")]) == expected.of(ANN), "another tenant's task is another task"


def test_tasks_that_do_not_differ_change_nothing_to_speak_of():
    more = asked(Past((GOAL,)), hard=0.0).expected().tasks.values()
    assert max((abs(each[0]) for each in more), default=0.0) < 0.05


def test_what_one_person_alone_asks_is_not_counted_twice():
    past = asked(Past((GOAL,)))
    for n in range(2_000):
        past.remember(("acme", f"own{n % 100}"), 1.0, {"rejected": 1.0}, [("acme", f"own{n % 100}")])
    expected = past.expected()
    own = [expected.of(("acme", f"own{n}"), [("acme", f"own{n}")])[0] for n in range(100)]
    assert min(own) > -0.1, "nobody's answers are rejected more than always"


def test_a_narrower_task_learns_only_what_the_wider_one_leaves():
    rng, past = np.random.default_rng(7), Past((GOAL,))
    for _ in range(20_000):
        feature, task = int(rng.integers(150)), int(rng.integers(2))
        good = rng.random() < (0.8 if feature % 2 else 0.3)
        tasks = [("acme", f"o{feature}"), ("acme", f"p{feature}.{task}")]
        past.remember(("acme", f"u{rng.integers(50)}"), 1.0, {"accepted" if good else "rejected": 1.0}, tasks)
    expected = past.expected()
    for feature in (0, 1):
        both = [expected.of(ANN, [("acme", f"o{feature}"), ("acme", f"p{feature}.{task}")])[0] for task in (0, 1)]
        assert np.mean(both) == pytest.approx(0.8 if feature else 0.3, abs=0.08)


def test_a_flood_of_tasks_takes_bounded_memory_and_drops_the_longest_unseen(monkeypatch):
    monkeypatch.setattr(metric_module, "_MOST_TASKS", 300)
    past = Past((GOAL,))
    for n in range(1_000):
        past.remember(ANN, 1.0, {"rejected": 1.0}, [("bolt", f"flood{n}")])
    expected = asked(past).expected()
    assert not any(task.startswith("flood0") for _, task in expected.tasks)
    assert len(expected.tasks) <= 300


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_units_of_turns_everybody_has_an_expected_value(seed):
    """Also after ratios and units moved, and for people and tasks that were seen and never measured."""
    rng = np.random.default_rng(seed)
    kept = MetricConfig(name="kept", numerator=("lines_kept",), denominator=("lines",), tolerance=0.02)
    past, at = Past((Metric.of(kept, 0.02),)), 0.0
    for phase, people in enumerate((100, 100 * int(rng.integers(1, 4)))):
        units, level, noise = 10.0 ** rng.uniform(-3, 3), rng.random(), rng.choice([0.0, 0.05])
        for turn in range(2 * people):
            at += 1.0
            lines = units * (10.0 ** rng.uniform(-1, 1) if noise else 1.0)
            share = min(1.0, max(0.0, level + rng.uniform(-noise, noise)))
            known = {"lines": lines, "lines_kept": lines * share}
            past.remember(("acme", f"{phase}-{turn % people}"), at, known, [("kind", f"{phase}-{turn % people}")])
    past.remember(ANN, at, {}, [("kind", "never measured")])
    expected = past.expected()
    values = [each for (each,) in expected.people.values()]
    assert all(0.0 <= each <= 1.0 for each in values)
    assert expected.of(ANN, [("kind", "never measured")]) == expected.usual_M


def test_how_much_people_differ_is_measured_from_the_ratio_of_all_turns():
    """The first half of turns, of many units each, has another ratio: from a ratio on the way people would seem not to vary at all."""
    kept = MetricConfig(name="kept", numerator=("lines_kept",), denominator=("lines",), tolerance=0.02)
    rng, past, rows = np.random.default_rng(4), Past((Metric.of(kept, 0.02),)), []
    for phase, (lines, level, people) in enumerate(((10.0, 0.3, 100), (1.0, 0.9, 300))):
        for turn in range(2 * people):
            share = level + rng.uniform(-0.02, 0.02)
            rows.append((("acme", f"{phase}-{turn % people}"), lines, lines * share))
            past.remember(rows[-1][0], float(len(rows)), {"lines": lines, "lines_kept": lines * share})
    usual = sum(value for _, _, value in rows) / sum(lines for _, lines, _ in rows)
    groups, squares = {}, 0.0
    for who, lines, value in rows:
        total, count = groups.get(who, (0.0, 0))
        groups[who] = total + value - usual * lines, count + 1
        squares += (value - usual * lines) ** 2
    mixed = shrinkage(groups.values(), squares) * sum(lines for _, lines, _ in rows) / len(rows)
    assert mixed > 0.0
    for who in (("acme", "0-7"), ("acme", "1-7")):
        theirs = [(lines, value) for each, lines, value in rows if each == who]
        over, under = sum(value for _, value in theirs), sum(lines for lines, _ in theirs)
        assert past.expected().of(who)[0] == pytest.approx((over + mixed * usual) / (under + mixed), rel=1e-6)
