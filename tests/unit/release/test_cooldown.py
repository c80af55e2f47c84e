"""After rollbacks: the pause, the stop that only a person ends, the alarm that says so, and death at every single write."""

import pytest
from tests.fakes.release_world import (
    QUICK,
    V0,
    V3,
    V5,
    V8,
    Disk,
    FakeJudge,
    Time,
    controller,
    lived_through,
    settle,
    version,
    went_back,
)

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.report import Verdict
from ostinato.release.controller import FREEZE_ALARM
from ostinato.release.guard import Harm
from ostinato.release.ledger import ReleaseLedger

HOUR, DAY = 3600.0, 86_400.0
RULES = {"cooldown_s": 6 * HOUR, "rollbacks_a_day": 1}
V9 = version(9)


class Complaints:
    """Stands for the guard: people are harmed by these versions."""

    def __init__(self, *about):
        self.about = about

    async def live(self, state, control, now):
        return Harm(measure="acceptance", loss=0.3, at_least=0.2, period=0) if state.live in self.about else None


def guarded(disk, time, *harmful, judge=None, **rules):
    control = controller(disk, judge, time, **RULES | rules)
    control._watch = Complaints(*harmful)
    return control


async def harmed(disk, control, policy):
    """A candidate ships, and is taken back."""
    disk.publish(policy)
    await settle(control)
    event = await control.watch()
    assert (event.action, event.previous) == ("rolled_back", policy)
    await went_back(disk, V0, step=policy.number + 1)


async def frozen(disk, time, judge=None, **rules):
    """Two were taken back within seven hours."""
    control = guarded(disk, time, V3, V5, judge=judge, **rules)
    await control.bootstrap(V0)
    await harmed(disk, control, V3)
    time.now += 7 * HOUR
    await harmed(disk, control, V5)
    time.now += 7 * HOUR
    return control


def alarms(disk):
    return [(row.name, row.state) for row in disk.rows.rows if isinstance(row, Alarm)]


async def test_after_a_rollback_nothing_is_judged_until_the_pause_is_over_and_then_the_newest(disk):
    time, judge = Time(), FakeJudge()
    control = guarded(disk, time, V3, judge=judge)
    await control.bootstrap(V0)
    await harmed(disk, control, V3)
    for policy in (V5, V8):
        disk.publish(policy)
        time.now += HOUR
        await settle(control)
        await settle(guarded(disk, time, V3, judge=judge))
    assert disk.events()[-1] == ("rolled_back", 0)
    time.now += 4 * HOUR
    assert (await control.step()).policy == V8
    assert [number for number, _ in judge.asked] == [3, 8]
    assert alarms(disk) == []


async def test_a_person_ships_at_once_and_that_ends_the_pause(disk):
    time = Time()
    control = guarded(disk, time, V3)
    await control.bootstrap(V0)
    await harmed(disk, control, V3)
    disk.publish(V5)
    assert (await control.ship(V5, "it was the product", actor="ann")).policy == V5
    disk.publish(V8)
    assert (await control.step()).policy == V8


async def test_a_persons_rollback_is_followed_by_a_pause_but_not_counted(disk):
    time = Time()
    control = guarded(disk, time)
    await control.bootstrap(V0)
    for policy in (V3, V5, V8):
        disk.publish(policy)
        await settle(control)
        await control.rollback(None, "a hunch", actor="ann")
        await went_back(disk, V0, step=policy.number + 1)
        assert await control.step() is None
        time.now += 7 * HOUR
    disk.publish(V9)
    assert (await control.step()).action == "shipped"
    assert alarms(disk) == []


async def test_after_too_many_in_a_day_what_passes_waits_for_a_person_who_ends_it_by_approving(disk):
    time, judge = Time(), FakeJudge({8: [Verdict.BLOCK]})
    control = await frozen(disk, time, judge)
    disk.publish(V8)
    await settle(control)
    assert disk.events()[-1] == ("blocked", 8), "what is refused is refused at once"
    disk.publish(V9)
    time.now += 3 * DAY
    await settle(control)
    await settle(guarded(disk, time))
    assert disk.events()[-1] == ("awaits_approval", 9)
    assert alarms(disk) == [(FREEZE_ALARM, AlarmState.RAISED)], "once, whoever starts again"
    assert disk.refs["live"] == "m0"
    await control.approve(None, "read it", actor="ann")
    assert await control.step() is None
    assert alarms(disk)[1:] == [(FREEZE_ALARM, AlarmState.CLEARED)]
    disk.publish(later := version(11))
    assert ((await control.step()).action, control.live) == ("shipped", later)


async def test_after_too_many_in_a_day_no_trial_begins_until_a_person_ships(disk):
    time = Time()
    await frozen(disk, time)
    control = controller(disk, FakeJudge(), time, guarded=True, **QUICK | RULES)
    disk.publish(V8)
    await settle(control)
    assert disk.events()[-1] == ("rolled_back", 0)
    await control.ship(V8, "read it", actor="ann")
    disk.publish(V9)
    assert (await control.step()).action == "canary"


async def told_with_deaths(disk):
    """Two rollbacks, an alarm, an approval that ends it, and a release by itself: one process after another."""
    time = Time()

    def fresh():
        return guarded(disk, time, V3, V5)

    async def published(control, policy):
        if disk.refs["candidate"] != f"m{policy.number}":
            time.now += 7 * HOUR
            await went_back(disk, V0, step=policy.number)
            disk.publish(policy)
        await settle(control)
        await control.watch()
        await settle(control)

    async def approved(control):
        await settle(control)
        if control.ledger.state.proposal is not None:
            await control.approve(V8, "yes", actor="ann")
        await settle(control)

    script = [
        lambda c: c.bootstrap(V0),
        *(lambda c, policy=policy: published(c, policy) for policy in (V3, V5, V8)),
        approved,
        lambda c: published(c, V9),
    ]
    return await lived_through(disk, fresh, script)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_every_write_the_brake_holds_alike(after):
    def fresh():
        disk = Disk()
        disk.publish(V0)
        return disk

    whole = fresh()
    expected = await told_with_deaths(whole)
    assert [line for line in expected if line[0] != "evaluated"] == [
        *[("shipped", 0), ("shipped", 3), ("rolled_back", 0), ("shipped", 5), ("rolled_back", 0)],
        *[("awaits_approval", 8), ("approved", 8), ("shipped", 8), ("shipped", 9)],
    ]
    for at in range(1, whole.fuse.writes + 1):
        disk = fresh()
        disk.fuse.at, disk.fuse.after = at, after
        assert await told_with_deaths(disk) == expected, f"killed at write {at}"
        assert alarms(disk) == [(FREEZE_ALARM, AlarmState.RAISED), (FREEZE_ALARM, AlarmState.CLEARED)], (
            f"killed at write {at}"
        )
        state = await ReleaseLedger(disk, Time()).refresh()
        assert (state.live, state.rollbacks) == (V9, ())
