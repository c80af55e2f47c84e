"""The learner arm: some users follow training, a step at a time, and go back to live where a step must not answer them."""

import asyncio

import pytest
from tests.fakes.release_world import (
    V0,
    V3,
    V5,
    V8,
    FakeJudge,
    Fuse,
    Killed,
    Time,
    controller,
    settle,
    version,
    went_back,
)
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import Conflict, StorageFull, Unavailable
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.report import Verdict
from ostinato.release.learner_arm import STEP_ALARM

V4, V6, V9 = version(4), version(6), version(9)
BLOCKS = FakeJudge({number: [Verdict.BLOCK] for number in range(10)})


class Steps:
    """Tests steps; those in `bad` fail."""

    def __init__(self, *bad):
        self.bad, self.asked = dict.fromkeys(bad, "it says nothing"), []
        self.meanwhile = None

    async def run(self, step, live):
        self.asked.append((step.number, live.number))
        if self.meanwhile is not None:
            await self.meanwhile()
        return self.bad.get(step, "")


def trained(disk, *policies):
    """The trainer stores these steps: a candidate is none of them."""
    for policy in policies:
        disk.known[f"m{policy.number}"] = policy
        disk.refs["newest"] = f"m{policy.number}"


async def following(disk, *, steps=None, judge=None, paused=lambda: False, **config):
    settings = {"steps": Steps() if steps is None else steps, "paused": paused}
    control = controller(disk, judge or BLOCKS, Time(), **settings, **config)
    await control.bootstrap(V0)
    return control


def served(disk):
    return disk.refs.get("learner")


async def alarms(disk):
    return [row.state for row in disk.rows.rows if isinstance(row, Alarm) and row.name == STEP_ALARM]


async def test_its_users_are_served_each_step_once_it_has_passed_and_live_until_there_is_one(disk):
    steps = Steps()
    control = await following(disk, steps=steps)
    await control.follow()
    assert served(disk) == disk.refs["learner-test"] == "m0"
    for step, before in ((V3, "m0"), (V4, "m3")):

        async def not_yet(step=step, before=before):
            assert (served(disk), disk.refs["learner-test"]) == (before, f"m{step.number}")

        steps.meanwhile = not_yet
        trained(disk, step)
        await control.follow()
        assert served(disk) == f"m{step.number}"
    await control.follow()
    assert steps.asked == [(3, 0), (4, 0)], "once each"
    assert disk.refs["live"] == disk.refs["control"] == "m0"
    assert disk.events() == [("shipped", 0)], "the ledger tells of releases alone"
    assert await alarms(disk) == []


async def test_a_step_that_fails_puts_its_users_on_live_at_once_until_a_later_one_passes(disk):
    steps = Steps(V4, V5)
    control = await following(disk, steps=steps)
    trained(disk, V3)
    await control.follow()
    for step in (V4, V5):
        trained(disk, step)
        await control.follow()
        assert served(disk) == disk.refs["learner-test"] == "m0", "not the step before: it is as good as the same"
    (raised,) = [row for row in disk.rows.rows if isinstance(row, Alarm) and row.name == STEP_ALARM]
    assert raised.reason.endswith("it says nothing")
    await control.follow()
    assert steps.asked[-1] == (5, 0), "a step that failed is not tried again and again"
    trained(disk, V6)
    await control.follow()
    assert served(disk) == "m6"
    assert await alarms(disk) == [AlarmState.RAISED, AlarmState.CLEARED]


async def test_a_test_that_cannot_be_made_says_nothing_about_the_step(disk):
    steps = Steps()
    control = await following(disk, steps=steps)
    trained(disk, V3)
    await control.follow()

    async def away():
        raise Unavailable("the gateway is away")

    steps.meanwhile = away
    trained(disk, V4)
    with pytest.raises(Unavailable):
        await control.follow()
    assert served(disk) == "m3"
    assert await alarms(disk) == []
    steps.meanwhile = None
    await control.follow()
    assert served(disk) == "m4"


async def test_while_a_monitor_or_a_brake_holds_releases_its_users_have_live(disk):
    paused, time = [False], Time()
    control = controller(
        disk, BLOCKS, time, steps=Steps(), paused=lambda: paused[0], cooldown_s=600.0, rollbacks_a_day=1
    )
    await control.bootstrap(V0)
    trained(disk, V3)
    await control.follow()
    paused[0] = True
    await control.follow()
    assert served(disk) == "m0"
    paused[0] = False
    await control.follow()
    assert served(disk) == "m3", "it had passed"
    disk.publish(V5)
    trained(disk, V5)
    await control.ship(V5, "by hand", actor="ann")
    trained(disk, V6)
    await control.follow()
    assert served(disk) == "m6"
    await control._moves.take_back(V0, V5, "guard: harm", {})
    await control.follow()
    assert served(disk) == "m0"


async def test_an_alarm_during_the_test_of_a_step_keeps_it_from_users(disk):
    paused, steps = [False], Steps()
    control = await following(disk, steps=steps, paused=lambda: paused[0])

    async def alarm():
        paused[0] = True

    steps.meanwhile = alarm
    trained(disk, V3)
    await control.follow()
    assert served(disk) == "m0"


@pytest.mark.parametrize("cause", ["guard", "monitor"])
@in_virtual_time
async def test_a_rollback_or_an_alarm_takes_its_users_back_while_a_step_is_tested_and_ends_that_test(disk, cause):
    paused, steps, looks = [False], Steps(), []
    control = await following(disk, steps=steps, paused=lambda: paused[0])
    disk.publish(V3)
    await control.ship(V3, "by hand", actor="ann")
    trained(disk, V5)
    await control.follow()

    async def harm():
        trained(disk, V8)
        if cause == "guard":
            await control._moves.take_back(V0, V3, "guard: harm", {})
        else:
            paused[0] = True
        for _ in range(2_000):
            looks.append(served(disk))
            await asyncio.sleep(0.001)

    steps.meanwhile = harm
    trained(disk, V6)
    await control.follow()
    assert set(looks) <= {"m5", "m0" if cause == "guard" else "m3"}
    assert len(looks) < 2_000, "the test was ended"
    assert served(disk) == disk.refs["learner-test"] == disk.refs["live"]
    assert await alarms(disk) == [], "nothing is known of the step"


async def test_a_step_that_passed_is_served_though_a_newer_one_is_stored_during_each_test(disk):
    steps = Steps(V6)
    control = await following(disk, steps=steps)

    async def quick_trainer():
        assert disk.refs["learner-test"] == f"m{steps.asked[-1][0]}"
        trained(disk, version(steps.asked[-1][0] + 1))
        for _ in range(5):
            await control._place_learner()
        assert disk.refs["learner-test"] == f"m{steps.asked[-1][0]}", "the slot keeps what is tested in it"

    steps.meanwhile = quick_trainer
    trained(disk, V3)
    found = []
    for _ in range(6):
        await control.follow()
        found.append(served(disk))
    assert found == ["m3", "m4", "m5", "m0", "m7", "m8"], "and live's weights after the step that failed"


async def test_a_rollback_by_hand_takes_its_users_back_even_without_a_release_worker(disk):
    control = await following(disk)
    disk.publish(V3)
    await control.ship(V3, "by hand", actor="ann")
    trained(disk, V5)
    await control.follow()
    assert served(disk) == "m5"
    await controller(disk, BLOCKS, Time()).rollback(None, "people complain", actor="ann")
    assert (served(disk), disk.refs["live"]) == ("m0", "m0")
    await control.follow()
    assert served(disk) == "m0", "the newest step may carry on the harm"
    await went_back(disk, V0, step=8)
    trained(disk, V8)
    await control.follow()
    assert served(disk) == "m8", "trained from what stands"


@pytest.mark.parametrize("error", [Conflict, StorageFull, Unavailable])
async def test_a_rollback_by_hand_is_done_even_if_the_worker_moves_its_users_at_the_same_moment(
    disk, monkeypatch, caplog, error
):
    worker, move = await following(disk), disk.move_ref
    for policy in (V3, V5):
        disk.publish(policy)
        await worker.ship(policy, "by hand", actor="ann")
    trained(disk, V8)
    await worker.follow()

    async def at_the_same_moment(ref, old, new):
        if ref == "learner":
            raise error("not now")
        await move(ref, old, new)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "move_ref", at_the_same_moment)
        event = await controller(disk, BLOCKS, Time()).rollback(None, "people complain", actor="ann")
    assert (event.action, event.policy, disk.refs["live"]) == ("rolled_back", V3, "m3")
    assert "users who follow training on live at its next look: not now" in caplog.text
    await worker.follow()
    assert served(disk) == "m3"


async def test_what_the_gate_blocks_and_what_live_has_passed_is_not_followed(disk):
    control = await following(disk)
    trained(disk, V3)
    await control.follow()
    disk.publish(V3)
    await settle(control)
    assert disk.events()[-1] == ("blocked", 3)
    await control.follow()
    assert served(disk) == "m0"
    trained(disk, V4)
    await control.follow()
    assert served(disk) == "m4", "a later step was not judged yet"
    disk.publish(V9)
    await control.ship(V9, "by hand", actor="ann")
    await control.follow()
    assert served(disk) == "m9" == disk.refs["live"], "nothing is newer than live"


async def test_a_trial_under_way_is_not_touched(disk):
    control = await following(disk, judge=FakeJudge(), canary=True)
    disk.publish(V3)
    await settle(control)
    trained(disk, V4)
    await control.follow()
    assert {ref: disk.refs[ref] for ref in ("live", "canary", "previous", "learner")} == {
        "live": "m0",
        "canary": "m3",
        "previous": "m0",
        "learner": "m4",
    }


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after it"])
@pytest.mark.parametrize("write", range(1, 7))
async def test_a_worker_killed_at_any_write_comes_to_the_same_end(disk, write, after):
    control = await following(disk, steps=Steps(V5))
    disk.fuse = Fuse()
    disk.fuse.at, disk.fuse.after = write, after
    for step, wanted in ((V3, "m3"), (V4, "m4"), (V5, "m0")):
        trained(disk, step)
        for _ in range(3):
            try:
                await control.follow()
                break
            except Killed:
                assert served(disk) in (None, "m0", "m3", "m4"), "what failed never answers anybody"
                disk.fuse.at = None
                control = controller(disk, BLOCKS, Time(), steps=Steps(V5))
        assert served(disk) == wanted
    assert await alarms(disk) == [AlarmState.RAISED]
    again = controller(disk, BLOCKS, Time(), steps=Steps(V5))
    await again.follow()
    assert (served(disk), await alarms(disk)) == ("m0", [AlarmState.RAISED]), "after a restart, too"


async def test_an_alarm_that_a_full_disk_refuses_is_written_later_and_users_do_not_wait(disk, monkeypatch):
    control = await following(disk, steps=Steps(V3))

    async def full(*rows):
        if rows:
            raise StorageFull("the disk is full")
        return await disk.rows.append()

    with monkeypatch.context() as patch:
        patch.setattr(disk, "append", full)
        trained(disk, V3)
        with pytest.raises(StorageFull):
            await control.follow()
        assert served(disk) == "m0"
    await control.follow()
    assert await alarms(disk) == [AlarmState.RAISED]


async def test_where_nobody_follows_any_more_its_refs_hold_live_and_keep_no_step_in_the_store(disk):
    control = await following(disk)
    trained(disk, V3)
    await control.follow()
    off = controller(disk, BLOCKS, Time(), idle_refs=("learner", "learner-test", "newest", "never-there"))
    await off.bootstrap(V0)
    await off.follow()
    assert {disk.refs[ref] for ref in ("learner", "learner-test", "newest")} == {"m0"}
    disk.publish(V5)
    await off.ship(V5, "by hand", actor="ann")
    await off.follow()
    assert {disk.refs[ref] for ref in ("learner", "learner-test", "newest")} == {"m5"}
    assert "never-there" not in disk.refs


async def test_the_alarm_ends_where_nobody_follows_training_any_more(disk):
    control = await following(disk, steps=Steps(V3))
    trained(disk, V3)
    await control.follow()
    off = controller(disk, BLOCKS, Time())
    for _ in range(3):
        await off.follow()
    assert await alarms(disk) == [AlarmState.RAISED, AlarmState.CLEARED]
    assert disk.rows.rows[-1].reason == "nobody follows training any more"
