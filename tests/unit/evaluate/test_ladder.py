"""The benchmark of many small losses: its world and its two gates, in small."""

import numpy as np
from benchmarks.release import gate as script

from ostinato.core.report import Incumbent
from ostinato.evaluate.config import GateConfig


def suite(items=400, seed=0):
    return script.Suite(np.random.default_rng(seed), items, GateConfig())


def test_a_version_keeps_its_effects_and_draws_add_noise():
    world = suite(items=20_000)
    version = world.version(0.3)
    first_I, second_I = world.draw(version, 8), world.draw(version, 8)
    assert abs(first_I.mean() - 0.3) < 0.01
    assert abs(np.std(first_I - second_I) - np.sqrt(2 / 8) * 0.245) < 0.01
    assert abs(np.std(first_I) - np.hypot(0.122, 0.245 / np.sqrt(8))) < 0.01


def test_the_gate_against_live_alone_keeps_the_draws_that_a_version_was_judged_by():
    world, rule = suite(), script.AgainstLive(0.05)
    live, candidate = world.version(0.0), world.version(0.0)
    stand = dict.fromkeys(Incumbent, live)
    rule.judge(world, candidate, stand)
    seen = candidate.kept[2].copy()
    rule.judge(world, world.version(0.0), stand | {Incumbent.LIVE: candidate})
    assert np.array_equal(candidate.kept[2], seen)


def test_the_smallest_suite_is_not_judged_by_the_defaults():
    assert "gate, defaults" not in dict(script.rules(164))
    assert "gate, defaults" in dict(script.rules(2000))


def test_a_run_of_small_losses_ends_within_the_total_margin_and_below_it_against_live_alone():
    rules = dict(script.rules(1000))
    held = script.measure("gate", rules["gate, defaults"], 1000, -0.01, runs=2)
    fell = script.measure("alone", rules["against live alone, 5 pp"], 1000, -0.01, runs=1)
    assert held.runs_within_total_margin == 1.0
    assert fell.total_pp < -50 < held.worst_5_percent_pp
    assert script.line(held).startswith("gate ")
