"""Live beside the users who stay on the best release that users proved: a staircase of small losses ends there."""

from dataclasses import replace

import pytest
from pydantic import ValidationError
from tests.fakes.release_world import (
    V0,
    V3,
    V5,
    V8,
    Crowd,
    Disk,
    FakeJudge,
    Time,
    controller,
    lived_through,
    settle,
)

from ostinato.release.config import ReleaseConfig
from ostinato.release.controller import RunningIncumbentTest
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import Effect
from ostinato.release.trial.incumbent_test import BestComparison, StandingConfig
from ostinato.testing.records import a_turn

SHARE = 0.4
RULES = {
    "best_arm": True,
    "standing": StandingConfig(share=SHARE, period_s=300.0, better_after_s=60.0),
    "trial": TrialConfig(slot_s=10.0, most_turns_a_day=1e4),
    "outcomes": OutcomeConfig(maturity_s=5.0),
}


async def standing(disk, worth, **settings):
    time = Time()
    control = controller(disk, FakeJudge(), time, guarded=True, **RULES)
    await control.bootstrap(V0)
    crowd = Crowd(disk, control, time, {V0: 0.5} | worth, **settings)
    crowd.loaded, crowd.verified = {"live", "verified"}, SHARE
    return control, crowd


async def test_small_losses_add_up_beside_those_who_stayed_and_live_goes_back_to_them(disk):
    control, crowd = await standing(disk, {V3: 0.47, V5: 0.43, V8: 0.36})
    for policy in (V3, V5, V8):
        disk.publish(policy)
        await settle(control)
        await crowd.slot()
        assert await control.watch() is None, "no single step is large enough to be seen so soon"
    crowd.each = 4
    event = await crowd.until("rolled_back")
    assert (event.policy, event.previous) == (V0, V8), "not to the one before it"
    assert event.reason.startswith(f"worse beside {V0}, the best that users proved: -")
    assert control.ledger.state.refused == {V3.hash, V5.hash, V8.hash}
    assert disk.refs["live"] == disk.refs["verified"] == "m0"


async def test_what_users_prove_better_takes_its_place_and_other_users_stay_on_it(disk):
    control, crowd = await standing(disk, {V3: 0.75})
    disk.publish(V3)
    await settle(control)
    salt = control.ledger.state.dealt(SHARE).verified_salt
    event = await crowd.until("verified")
    assert (event.policy, event.previous) == (V3, V0)
    assert event.reason.startswith(f"better beside {V0}, the best that users proved: +")
    await control.step()
    assert disk.refs["verified"] == "m3"
    assert control.ledger.state.verified == (V0, V3)
    assert control.ledger.state.dealt(SHARE).verified_salt != salt
    with pytest.raises(AssertionError, match="no "):
        await crowd.until("verified", "rolled_back", slots=5)
    await control.rollback(None, "people complain", actor="ann")
    assert control.ledger.state.verified == (V0,)


async def test_on_what_a_person_took_back_in_the_moment_of_its_proof_nobody_stays(disk):
    control, crowd = await standing(disk, {V3: 0.75})
    disk.publish(V3)
    await settle(control)
    append = control.ledger.append

    async def late(action, *rest):
        if action == "verified":  # the person does it in another process
            control.ledger.append = append
            await controller(disk, time=crowd.time, **RULES).rollback(None, "people complain", actor="ann")
        return await append(action, *rest)

    control.ledger.append = late
    await crowd.until("verified")
    await control.step()
    assert control.ledger.state.verified == (V0,)
    assert disk.refs["live"] == disk.refs["verified"] == "m0"


async def test_a_version_is_not_proven_by_what_the_one_before_it_was_worth(disk):
    control, crowd = await standing(disk, {V3: 0.8, V5: 0.5})
    disk.publish(V3)
    await settle(control)
    for _ in range(4):  # V3 is better by far, but has not been live for long enough
        await crowd.slot()
        assert await control.watch() is None
    disk.publish(V5)
    await settle(control)
    with pytest.raises(AssertionError, match="no "):
        await crowd.until("verified", slots=10)


async def test_an_outage_and_equal_versions_move_nothing(disk):
    control, crowd = await standing(disk, {V3: 0.5})
    disk.publish(V3)
    await settle(control)
    with pytest.raises(AssertionError, match="no "):
        await crowd.until("verified", "rolled_back", slots=10)
    crowd.worth = dict.fromkeys(crowd.worth, 0.1)
    with pytest.raises(AssertionError, match="no "):
        await crowd.until("verified", "rolled_back", slots=10)


@pytest.mark.parametrize("slots", [7, 33], ids=["first period", "second period"])
async def test_a_restarted_watch_comes_to_the_same_numbers(disk, slots):
    control, crowd = await standing(disk, {V3: 0.48})
    disk.publish(V3)
    await settle(control)
    state, found = control.ledger.state, []
    whole = RunningIncumbentTest(disk, control._config)
    for _ in range(slots):
        await crowd.slot()
        crowd.time.now += 6.0
        await whole.look(state, control.ledger.verified_from, crowd.time.now)
        crowd.time.now -= 6.0
    crowd.time.now += 6.0
    for each in (whole, RunningIncumbentTest(disk, control._config)):
        if each is not whole:
            await each.look(state, control.ledger.verified_from, crowd.time.now)
        found.append((each._watch._all.effect(), each._watch._own.effect()))
    for one, other in zip(*found, strict=True):
        assert one.difference == pytest.approx(other.difference, abs=1e-12)
        assert one.variance == pytest.approx(other.variance)
        assert one.turns == other.turns > 0


async def test_what_was_found_is_told_until_it_is_acted_on_but_of_another_version_it_says_nothing(disk):
    control, crowd = await standing(disk, {V3: 0.48})
    disk.publish(V3)
    await settle(control)
    state, after, watch = (
        control.ledger.state,
        control.ledger.verified_from,
        RunningIncumbentTest(disk, control._config),
    )
    await crowd.slot()
    now = crowd.time.now + 5.0
    found = await watch.look(state, after, now)
    assert found is not None
    assert await watch.look(state, after, now) == found
    assert await watch.look(replace(state, shipped_at=now), after, now) is None


async def test_in_the_slot_in_which_another_version_ships_nothing_better_is_told_of_it(disk):
    """It was told of that version what the one before it was worth, if that came of age in the slot."""
    control, crowd = await standing(disk, {V3: 0.8})
    disk.publish(V3)
    await settle(control)
    state, after = control.ledger.state, control.ledger.verified_from
    stays, ships = (RunningIncumbentTest(disk, control._config) for _ in range(2))
    for _ in range(20):
        await crowd.slot()
        now = crowd.time.now + 5.0
        found = await stays.look(state, after, now)
        if found.better:
            break
        assert await ships.look(state, after, now) == found
    assert found.better, "V3 has come of age"
    shipped = replace(state, releases=(*state.releases, V5), shipped_at=ships._upto + 1.0)
    told = await ships.look(shipped, after, now)
    assert told.gain.people >= control._config.standing.min_people
    assert not told.better, "V5 has served nobody"


async def test_a_clock_that_was_ahead_blinds_nobody(disk):
    control, crowd = await standing(disk, {V3: 0.48})
    disk.publish(V3)
    await settle(control)
    state, after = control.ledger.state, control.ledger.verified_from
    watches = [RunningIncumbentTest(disk, control._config) for _ in range(2)]
    await watches[0].look(state, after, crowd.time.now + 5_000.0)
    for _ in range(5):
        await crowd.slot()
    for watch in watches:
        await watch.look(state, after, crowd.time.now + 5.0)
    ahead, fresh = (watch._watch._all.effect() for watch in watches)
    assert ahead == fresh
    assert fresh.turns > 0


async def test_turns_of_a_clock_that_was_ahead_hold_up_no_comparison(disk):
    """They lie before everybody's next turns in the log."""
    control, crowd = await standing(disk, {V3: 0.48})
    disk.publish(V3)
    await settle(control)
    state, watch = control.ledger.state, RunningIncumbentTest(disk, control._config)
    await disk.append(*(a_turn(f"ahead{i}", ended_at=crowd.time.now + 5_000.0) for i in range(20)))
    for _ in range(5):
        await crowd.slot()
    await watch.look(state, control.ledger.verified_from, crowd.time.now + 5.0)
    assert watch._watch._all.effect().turns > 0


async def test_who_came_in_a_period_that_is_over_is_not_remembered(disk):
    control, crowd = await standing(disk, {V3: 0.5})
    disk.publish(V3)
    await settle(control)
    state, watch = control.ledger.state, RunningIncumbentTest(disk, control._config)
    for first in (0, 1_000):
        crowd.people = range(first, first + 50)
        for _ in range(33):
            await crowd.slot()
            await watch.look(state, control.ledger.verified_from, crowd.time.now)
    assert {person[1] for person in watch._people} <= {f"u{i}" for i in crowd.people}


async def test_without_the_arm_nobody_stays_and_no_ref_moves(disk):
    control = controller(disk)
    await control.bootstrap(V0)
    await settle(control)
    assert "verified" not in disk.refs
    assert control.ledger.state.dealt(0.0) is None


class Watched:
    """Stands for the watch: users prove v3 better, and v5 worse."""

    def __init__(self, ledger):
        self.ledger = ledger

    async def look(self, state, after, now):
        live = self.ledger.state.live
        effect = Effect(difference=0.1, variance=1e-4, people=40.0, freedom=40.0, turns=400.0)
        return BestComparison(effect=effect, gain=effect, worse=live == V5, better=live == V3)


async def told_with_deaths(disk):
    """v3 is proven better, v5 is worse than it: one process after another."""

    def fresh():
        control = controller(disk, FakeJudge(), Time(), **RULES)
        control._verified._standing = Watched(control.ledger)
        return control

    async def published(control, policy):
        if disk.refs["candidate"] != f"m{policy.number}":
            disk.publish(policy)
        await settle(control)
        await control.watch()
        await settle(control)

    script = [lambda c: c.bootstrap(V0), lambda c: published(c, V3), lambda c: published(c, V5)]
    return await lived_through(disk, fresh, script)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_every_write_live_goes_back_to_the_same_release(after):
    def fresh():
        disk = Disk()
        disk.publish(V0)
        return disk

    whole = fresh()
    expected = await told_with_deaths(whole)
    assert [line for line in expected if line[0] != "evaluated"] == [
        *[("shipped", 0), ("shipped", 3), ("verified", 3), ("shipped", 5), ("rolled_back", 3)]
    ]
    for at in range(1, whole.fuse.writes + 1):
        disk = fresh()
        disk.fuse.at, disk.fuse.after = at, after
        assert await told_with_deaths(disk) == expected, f"killed at write {at}"
        assert (disk.refs["live"], disk.refs["verified"]) == ("m3", "m3")


@pytest.mark.parametrize("goal", [{"name": "returned", "role": "goal"}, {"name": "latency_p50", "role": "goal"}])
def test_a_goal_that_the_arm_cannot_be_compared_by_is_refused(goal):
    assert ReleaseConfig(metrics=(goal,)).best_arm is False
    with pytest.raises(ValidationError, match="declare another goal before it"):
        ReleaseConfig(metrics=(goal,), best_arm=True)
    ReleaseConfig(metrics=({"name": "acceptance"}, goal), best_arm=True)
