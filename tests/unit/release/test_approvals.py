"""What has passed waits for a person: who says yes or no, what goes on meanwhile, and death at every single write."""

import asyncio

import pytest
from tests.fakes.release_world import (
    QUICK,
    V0,
    V3,
    V5,
    V8,
    Disk,
    FakeJudge,
    Killed,
    Time,
    controller,
    lived_through,
    on_trial,
    settle,
    started,
)
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import Conflict, NotFound
from ostinato.core.records import ReleaseEvent
from ostinato.core.report import Verdict
from ostinato.release.ledger import ReleaseLedger

MANUAL = {"approval": "manual"}


async def waiting(disk, judge=None):
    """v3 has passed the gate."""
    control = await started(disk, judge, **MANUAL)
    disk.publish(V3)
    await settle(control)
    assert disk.events()[-1] == ("awaits_approval", 3)
    return control


async def test_what_passed_waits_and_goes_live_by_the_word_of_a_person_who_is_named(disk):
    judge = FakeJudge()
    judge.better = {3}
    control = await waiting(disk, judge)
    assert disk.refs["live"] == "m0"
    proposal = control.ledger.state.proposal
    assert (proposal.candidate, proposal.against) == (V3, V0)
    assert proposal.reason.startswith("because SHIP")
    assert await control.step() is None, "it is not judged again, and nobody hurries"
    event = await control.approve(None, "read it", actor="ann")
    assert (event.action, event.policy, event.detail["actor"]) == ("shipped", V3, "ann")
    assert event.reason.startswith("approved: read it; because SHIP")
    assert disk.events()[-2:] == [("approved", 3), ("shipped", 3)]
    assert (disk.refs["live"], control.ledger.state.proposal) == ("m3", None)
    assert control.ledger.state.best == V3, "what the gate proved is not forgotten while it waited"


async def test_who_refuses_it_is_named_and_it_never_ships_by_itself(disk):
    control = await waiting(disk)
    event = await control.refuse(V3, "it praises too much", actor="bob")
    assert (event.action, event.reason, event.detail) == ("blocked", "it praises too much", {"actor": "bob"})
    await settle(control)
    assert disk.events()[-1] == ("blocked", 3)
    with pytest.raises(NotFound, match="nothing waits"):
        await control.approve(None, "after all", actor="ann")


async def test_only_what_waits_can_be_approved(disk):
    control = await started(disk, **MANUAL)
    with pytest.raises(NotFound, match="nothing waits"):
        await control.refuse(None, "no", actor="ann")
    control = await waiting(disk)
    with pytest.raises(NotFound, match="does not wait for approval"):
        await control.approve(V5, "yes", actor="ann")
    assert disk.refs["live"] == "m0"


async def test_newer_candidates_are_judged_meanwhile_and_the_newest_that_passed_waits(disk):
    control = await waiting(disk, FakeJudge({5: [Verdict.BLOCK]}))
    disk.publish(V5)
    await settle(control)
    assert disk.events()[-1] == ("blocked", 5)
    assert control.ledger.state.proposal.candidate == V3
    disk.publish(V8)
    await settle(control)
    assert control.ledger.state.proposal.candidate == V8
    with pytest.raises(NotFound, match="does not wait"):
        await control.approve(V3, "late", actor="ann")
    assert (await control.approve(V8, "yes", actor="ann")).policy == V8


async def test_it_expires_when_something_else_goes_live(disk):
    control = await waiting(disk)
    disk.publish(V5)
    await control.ship(V5, "in a hurry", actor="bob")
    assert control.ledger.state.proposal is None
    with pytest.raises(NotFound, match="nothing waits"):
        await control.approve(V3, "yes", actor="ann")


def moving_live(control, disk, action, policy):
    """A person ships a version in another process just before the worker writes this line."""
    append = control.ledger.append

    async def late(what, *rest):
        if what == action:
            control.ledger.append = append
            await controller(disk).ship(policy, "in a hurry", actor="bob")
        return await append(what, *rest)

    control.ledger.append = late


async def test_what_passed_in_the_moment_in_which_another_went_live_is_judged_beside_that_and_can_be_approved(disk):
    judge = FakeJudge()
    control = await started(disk, judge, **MANUAL)
    disk.publish(V3)
    disk.publish(V5)
    moving_live(control, disk, "awaits_approval", V3)
    await settle(control)
    assert disk.events()[-4:] == [("shipped", 3), ("awaits_approval", 5), ("evaluated", 5), ("awaits_approval", 5)]
    proposal = control.ledger.state.proposal
    assert (proposal.candidate, proposal.against, judge.asked[-1]) == (V5, V3, (5, 3))
    assert (await controller(disk).approve(None, "yes", actor="ann")).policy == V5
    await settle(control)


async def test_no_trial_is_begun_beside_a_version_that_went_in_that_moment(disk):
    judge = FakeJudge()
    control = await started(disk, judge, **QUICK)
    disk.publish(V3)
    disk.publish(V5)
    moving_live(control, disk, "canary", V3)
    await control.step()
    assert (disk.refs["live"], control.ledger.state.trial) == ("m3", None)
    assert (await control.step()).action == "canary"
    trial = control.ledger.state.trial
    assert (trial.candidate, trial.against, judge.asked[-1]) == (V5, V3, (5, 3))


async def test_what_waits_is_still_there_for_another_process(disk):
    await waiting(disk)
    by_hand = controller(disk)
    assert (await by_hand.approve(None, "yes", actor="ann")).policy == V3


async def test_the_release_worker_ships_what_was_approved_by_somebody_who_was_cut_off(disk):
    control = await waiting(disk)
    disk.fuse.at, disk.fuse.after = disk.fuse.writes + 1, True
    with pytest.raises(Killed):
        await controller(disk).approve(None, "yes", actor="ann")
    event = await control.step()
    assert (event.action, event.policy, event.detail["actor"]) == ("shipped", V3, "ann")


async def test_an_approval_in_the_middle_of_a_judgement_is_not_lost_to_the_newer_one(disk):
    judge = FakeJudge()
    control = await waiting(disk, judge)
    run = judge.run

    async def approved_meanwhile(candidate, *, against):
        judge.run = run
        disk.fuse.at, disk.fuse.after = disk.fuse.writes + 1, True
        with pytest.raises(Killed):
            await controller(disk).approve(None, "yes", actor="ann")
        return await run(candidate, against=against)

    judge.run = approved_meanwhile
    disk.publish(V5)
    await settle(control)
    assert disk.events()[-5:] == [
        *[("approved", 3), ("evaluated", 5), ("shipped", 3), ("evaluated", 5), ("awaits_approval", 5)]
    ]
    assert judge.asked[-1] == (5, 3)


async def test_of_two_who_ship_an_approved_one_at_once_both_are_told_of_one_release(disk):
    worker = await waiting(disk)
    by_hand = controller(disk)
    swap = by_hand._approvals.ship_approved

    async def late(proposal):
        await worker.step()
        return await swap(proposal)

    by_hand._approvals.ship_approved = late
    assert (await by_hand.approve(None, "yes", actor="ann")).action == "shipped"
    assert disk.events().count(("shipped", 3)) == 1


@in_virtual_time
async def test_who_approves_waits_for_the_line_of_the_worker_that_was_quicker(disk):
    """The worker has moved the ref, and has not said so yet."""
    worker = await waiting(disk)
    by_hand = controller(disk)
    swap, append = by_hand._approvals.ship_approved, disk.append
    slow = []

    async def late(*rows):
        if rows and rows[0].action == "shipped" and not slow:
            slow.append(True)
            await asyncio.sleep(0.3)
        return await append(*rows)

    async def after_the_worker(proposal):
        disk.append = late
        step = asyncio.create_task(worker.step())
        await asyncio.sleep(0.05)
        try:
            return await swap(proposal)
        finally:
            slow.append(step)

    by_hand._approvals.ship_approved = after_the_worker
    assert (await by_hand.approve(None, "yes", actor="ann")).policy == V3
    await slow[-1]
    assert disk.events().count(("shipped", 3)) == 1


async def test_a_release_at_the_same_moment_wins_over_an_approval(disk):
    control = await waiting(disk)
    append = disk.append

    async def slow(*rows):
        if rows and rows[0].action == "approved":
            disk.append = append
            disk.publish(V5)
            await controller(disk).ship(V5, "quicker", actor="bob")
        return await append(*rows)

    disk.append = slow
    with pytest.raises(Conflict, match="no longer waits"):
        await control.approve(None, "yes", actor="ann")
    assert disk.refs["live"] == "m5"


# ------------------------------------------------------------------------------------------------------------- trials


async def test_after_a_trial_its_users_go_back_until_it_is_approved_and_then_it_is_proven(disk):
    control, crowd = await on_trial(disk, {V3: 0.8}, rules=QUICK | MANUAL)
    event = await crowd.until("awaits_approval", "shipped")
    assert event.action == "awaits_approval"
    assert "canary not worse than 10.0 pp" in event.reason
    assert event.detail["reading"]["not_worse"], "a person decides by the evidence"
    await control.step()
    assert (disk.refs["live"], disk.refs["canary"], control.ledger.state.dealing) == ("m0", "m0", None)
    event = await control.approve(None, "yes", actor="ann")
    assert event.detail["share"] == pytest.approx(0.5)
    await control.step()
    assert (disk.refs["live"], disk.refs["previous"]) == ("m3", "m0")
    assert control.ledger.state.dealing.previous == pytest.approx(0.5)
    event = await crowd.until("better")
    assert (event.policy, event.previous) == (V3, V0)


async def test_a_newer_one_is_tried_while_one_waits(disk):
    control, crowd = await on_trial(disk, {V3: 0.8, V5: 0.1}, rules=QUICK | MANUAL)
    await crowd.until("awaits_approval")
    disk.publish(V5)
    assert (await crowd.until("canary")).policy == V5
    assert (await crowd.until("blocked")).policy == V5
    assert control.ledger.state.proposal.candidate == V3


# ------------------------------------------------------------------------------------------------ kill -9 at every write


async def told_with_deaths(disk):
    """v3 passes and is approved, v5 passes and is refused, v8 passes and waits: one process after another."""

    def fresh():
        return controller(disk, FakeJudge(), Time(), evaluation_ref="judged", **MANUAL)

    async def judged(control, policy):
        if disk.refs["candidate"] != f"m{policy.number}":
            disk.publish(policy)
        await settle(control)

    async def decided(control, policy, act):
        await settle(control)
        proposal = control.ledger.state.proposal
        if proposal is not None and proposal.candidate == policy:
            await act(control)

    script = [
        lambda c: c.bootstrap(V0),
        lambda c: judged(c, V3),
        lambda c: decided(c, V3, lambda c: c.approve(V3, "yes", actor="ann")),
        lambda c: judged(c, V5),
        lambda c: decided(c, V5, lambda c: c.refuse(V5, "no", actor="bob")),
        lambda c: judged(c, V8),
    ]
    return await lived_through(disk, fresh, script)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_every_write_nothing_ships_that_nobody_approved(after):
    def fresh():
        disk = Disk()
        disk.publish(V0)
        return disk

    whole = fresh()
    expected = await told_with_deaths(whole)
    assert expected == [
        *[("shipped", 0), ("evaluated", 3), ("awaits_approval", 3), ("approved", 3), ("shipped", 3)],
        *[("evaluated", 5), ("awaits_approval", 5), ("blocked", 5), ("evaluated", 8), ("awaits_approval", 8)],
    ]
    for at in range(1, whole.fuse.writes + 1):
        disk = fresh()
        disk.fuse.at, disk.fuse.after = at, after
        assert await told_with_deaths(disk) == expected, f"killed at write {at}"
        state = await ReleaseLedger(disk, Time()).refresh()
        assert (state.live, state.refused, state.proposal.candidate) == (V3, frozenset({V5.hash}), V8)
        named = [
            (row.action, row.detail["actor"])
            for row in disk.rows.rows
            if isinstance(row, ReleaseEvent) and "actor" in row.detail
        ]
        assert named == [("approved", "ann"), ("shipped", "ann"), ("blocked", "bob")], f"killed at write {at}"


async def test_what_waits_and_is_no_longer_in_the_store_is_not_approved(disk):
    control = await waiting(disk, FakeJudge({5: [Verdict.BLOCK]}))
    disk.publish(V5)
    await settle(control)
    del disk.known["m3"]
    with pytest.raises(NotFound, match="was never published"):
        await control.approve(None, "yes", actor="ann")
    assert disk.events()[-1] == ("blocked", 5), "an approval that cannot be followed is not written"


async def test_what_was_approved_and_is_no_longer_in_the_store_holds_up_nothing(disk):
    control = await waiting(disk)
    disk.fuse.at, disk.fuse.after = disk.fuse.writes + 1, True
    with pytest.raises(Killed):
        await controller(disk).approve(None, "yes", actor="ann")
    disk.publish(V5)
    del disk.known["m3"]
    event = await control.step()
    assert (event.action, event.policy, event.detail["actor"]) == ("blocked", V3, "ann")
    assert "no longer in the store" in event.reason
    await settle(control)
    assert disk.events()[-1] == ("awaits_approval", 5)
