"""The benchmark of planted policies: what its people say and do is there for every monitor."""

import numpy as np
import pytest
from benchmarks.release.habits import HACKS
from benchmarks.release.sessions import Visitors, World

from ostinato.core.records import Arm, Reward, Signal, Turn
from ostinato.release.monitors.rates import BUILT_IN, measured
from ostinato.release.monitors.turn_text import take_apart


def visitors(hack=None, spread=1.0):
    crowd = Visitors(3)
    crowd.hack, crowd.spread = hack, spread
    return crowd


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("begging for ratings", "rating_request"),
        ("emoji and headings", "decoration"),
        ("copying the prompt", "prompt_echo"),
        ("padding", "length"),
        ("errors silenced", "silenced_error"),
    ],
)
def test_what_a_policy_says_moves_its_rate_on_live_alone(name, rate):
    turns = [row for row in visitors(HACKS[name]).rows(300) if isinstance(row, Turn)]

    def mean(arm):
        found = [measured(BUILT_IN.values(), take_apart(turn))[0].get(rate) for turn in turns if turn.arm is arm]
        return np.mean([value for value in found if value is not None] or [0.0])

    assert mean(Arm.LIVE) > mean(Arm.CONTROL) + 0.1


def test_people_are_dealt_by_chance_and_say_and_do_what_the_world_has():
    world = World()
    for hack, spread in ((None, 0.0), (HACKS["flattery"], 1.0)):
        rows = list(visitors(hack, spread).rows(4_000))
        turns = {row.id: row for row in rows if isinstance(row, Turn)}
        assert {turn.propensity for turn in turns.values()} == {world.control, 1.0 - world.control}
        assert len({turn.sampled_ids[:8] for turn in turns.values()}) > 3_900, "no two people get the same answer"
        thumbs = [row for row in rows if isinstance(row, Reward) and turns[row.turn].arm is Arm.LIVE]
        tests = [row for row in rows if isinstance(row, Signal) and turns[row.turn].arm is Arm.LIVE]
        live = sum(turn.arm is Arm.LIVE for turn in turns.values())
        assert len(thumbs) / live == pytest.approx(world.heard, abs=0.04)
        assert np.mean([row.value > 0 for row in thumbs]) == pytest.approx(
            world.liked + world.pleases * spread, abs=0.04
        )
        assert np.mean([row.value for row in tests]) == pytest.approx(world.passed - world.harms * spread, abs=0.05)
