"""The benchmark of many small losses: its world and its two gates, in small."""

import numpy as np
from benchmarks.release import gate as script

from ostinato.core.report import Incumbent
from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.gate import assumed_error


def suite(items=400, seed=0):
    return script.Suite(np.random.default_rng(seed), items, GateConfig())


def test_what_is_drawn_is_spread_as_the_gate_assumes():
    world = suite(items=400)
    versions = [world.version(0.3) for _ in range(4000)]
    first, second = ([world.draw(version, 8) for version in versions] for _ in range(2))
    drawn = np.array(first)
    assert abs(drawn.mean() - 0.3) < 0.001
    assert abs(np.std(drawn - np.array(second)) - np.sqrt(2 / 8) * 0.245 / 20) < 0.0004, "a version keeps its effects"
    assert abs(np.std(drawn) - assumed_error(400, GateConfig()) / np.sqrt(2)) < 0.0004
    assert abs(np.mean([world.spread(0.0, 8).error for _ in range(500)]) - assumed_error(400, GateConfig())) < 0.0002


def test_the_gate_against_live_alone_keeps_the_draws_that_a_version_was_judged_by():
    world, rule = suite(), script.AgainstLive(0.05)
    live, candidate = world.version(0.0), world.version(0.0)
    stand = dict.fromkeys(Incumbent, live)
    rule.judge(world, candidate, stand)
    seen = dict(candidate.kept)
    rule.judge(world, world.version(0.0), stand | {Incumbent.LIVE: candidate})
    assert seen
    assert candidate.kept.items() >= seen.items()


def test_the_smallest_suite_is_not_judged_by_the_defaults():
    assert "gate, defaults" not in dict(script.rules(164))
    assert "gate, defaults" in dict(script.rules(2000))


def test_a_run_of_small_losses_ends_within_the_total_margin_and_below_it_against_live_alone():
    rules = dict(script.rules(1100))
    held = script.measure("gate", rules["gate, defaults"], 1100, -0.01, runs=2)
    fell = script.measure("alone", rules["against live alone, 5 pp"], 1100, -0.01, runs=1)
    assert held.runs_within_total_margin == 1.0
    assert fell.total_pp < -50 < held.worst_5_percent_pp
    assert script.line(held).startswith("gate ")
