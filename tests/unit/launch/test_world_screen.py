"""What the terminal shows of training in a simulated world."""

import pytest

from ostinato.launch.commands.worlds.train import WorldScreen, idle_share

STEP = {
    "kind": "step",
    "step": 3,
    "at": 100.0,
    "reward_mean": 0.25,
    "episodes": 64.0,
    "lag_mean": 1.5,
    "lag_max": 2.0,
    "ess": 0.9,
    "seconds": 2.0,
}


def test_the_trainers_idle_share_is_what_it_did_not_compute_between_steps():
    steps = [{"at": 0.0, "seconds": 99.0}, {"at": 10.0, "seconds": 2.0}, {"at": 20.0, "seconds": 3.0}]
    assert idle_share(steps) == pytest.approx(0.75)
    assert idle_share(steps[:1]) == 0.0
    assert idle_share([{"at": 0.0, "seconds": 1.0}, {"at": 1.0, "seconds": 1.2}]) == 0.0


def test_a_step_is_told_with_success_by_split_and_groups_without_contrast():
    screen = WorldScreen()
    group = {"kind": "group", "n": 0, "flat": True}
    assert [screen.take(line) for line in (group, group | {"flat": False})] == [[], []]
    (said,) = screen.take({"kind": "measured", "split": "held_out", "n": 0, "solved": 3, "of": 4, "cheated": 0})
    assert said == "measured   held_out: 3 of 4 solved (75%)"
    (said,) = screen.take(STEP)
    for part in ("step    3", "reward 0.250", "lag 1.5 (at most 2)", "1 of 2", "held_out 75% of 4"):
        assert part in said
    (said,) = screen.take({"kind": "refused", "step": 3, "why": "no contrast"})
    assert said == "step    4  refused: no contrast"
    assert screen.step == 3


def test_a_step_is_told_with_how_long_rollouts_were_and_how_many_were_cut():
    screen = WorldScreen()
    screen.take({"kind": "group", "n": 0, "flat": True, "tokens": []})  # a restart may have forgotten all of them
    assert "recently" not in screen.take(STEP)[0]
    group = {"kind": "group", "flat": False, "cut": 1, "timeouts": 0, "failed": 0}
    screen.take(group | {"tokens": [1, 2, 3, 4, 5], "turns": [1, 1, 1, 1, 2]})
    screen.take(group | {"tokens": [6, 7, 8, 90, 1000], "turns": [2, 2, 2, 4, 4], "timeouts": 3, "failed": 1})
    (said,) = screen.take(STEP)
    assert "recently 113 tokens (p90 90) and 2.0 turns a rollout" in said
    assert "20% cut at the length limit, 30% out of time, 10% failed" in said
