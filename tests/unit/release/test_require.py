"""What a candidate must be shown to be before it ships: not worse, or better; by the suite, or by the users of its trial."""

import pytest
from tests.fakes.release_world import QUICK, V0, V3, FakeJudge, controller, on_trial, started

WIN = {"require": "win"}


@pytest.mark.parametrize(("require", "better", "ends"), [
    ("no_loss", False, "shipped"), ("win", False, "blocked"), ("win", True, "shipped"),
])  # fmt: skip
async def test_without_a_trial_the_suite_must_show_it(disk, require, better, ends):
    judge = FakeJudge()
    judge.better = {3} if better else set()
    control = await started(disk, judge, require=require)
    disk.publish(V3)
    event = await control.step()
    assert event.action == ends
    assert ("not proven better than the best so far (release.require)" in event.reason) == (ends == "blocked")
    assert disk.refs["live"] == ("m3" if ends == "shipped" else "m0")


async def test_in_a_trial_users_must_show_it_and_what_is_only_as_good_is_blocked(disk):
    _, crowd = await on_trial(disk, {V3: 0.5}, rules=QUICK | WIN)
    event = await crowd.until("blocked", "shipped")
    assert event.action == "blocked"
    assert event.reason.startswith("canary: not shown to be better: ")
    assert event.detail["reading"]["not_worse"], "with 'no_loss' it would have gone live"


async def test_what_users_show_to_be_better_ships_though_the_gate_did_not(disk):
    _, crowd = await on_trial(disk, {V3: 0.75}, rules=QUICK | WIN)
    event = await crowd.until("blocked", "shipped")
    assert event.action == "shipped"
    assert "canary better (provisional): +" in event.reason
    assert event.at - 1000.0 > QUICK["trial"].better_after_s, "what is new may please for a while"


async def test_a_trial_keeps_the_rule_that_it_began_under(disk):
    _, crowd = await on_trial(disk, {V3: 0.5}, rules=QUICK | WIN)
    crowd.control = controller(disk, FakeJudge(), crowd.time, guarded=True, **QUICK)
    event = await crowd.until("blocked", "shipped")
    assert (event.action, crowd.control.live) == ("blocked", V0)
