"""The controller with fakes around it: what ships, what is blocked, what comes back, and death at every single write."""

import asyncio
import json
import re
from dataclasses import replace
from itertools import pairwise, product

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.release_world import (
    QUICK,
    V0,
    V3,
    V5,
    V8,
    Crowd,
    Disk,
    FakeJudge,
    Killed,
    Time,
    controller,
    on_trial,
    settle,
    started,
    version,
    went_back,
)
from tests.grids import first
from tests.growth import TIMES, grows_with_its_input
from tests.virtual_time import in_virtual_time

from ostinato.core.arm_assignment import Dealing
from ostinato.core.errors import BadRequest, Conflict, NotFound, Unavailable
from ostinato.core.records import Arm, Batch, Finish, PolicyVersion, ReleaseEvent, Sampling, Signal, Source, Span, Turn
from ostinato.core.report import Verdict
from ostinato.core.seams import Releases
from ostinato.release.controller import ReleaseConfig, ReleaseController
from ostinato.release.guard import GuardConfig
from ostinato.release.ledger import ReleaseLedger, State, fold
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.group_sequential import ShipPlan
from ostinato.testing.records import a_turn

ALONE = "because SHIP; on the gate alone, without a canary"


async def test_bootstrap_sets_live_and_control_once(disk):
    control = await started(disk)
    await (await started(disk)).bootstrap(V0)
    assert disk.refs["live"] == disk.refs["control"] == "m0"
    assert disk.events() == [("shipped", 0)]
    assert control.live == V0
    assert isinstance(control.ledger, ReleaseLedger)
    seam: Releases = control
    assert seam.live == V0


async def test_bootstrap_moves_nothing_that_stands(disk):
    """A store that releases elsewhere may be for reading only."""
    disk.publish(V3)
    disk.refs |= {"live": "m3", "control": "m3"}

    async def refuse(ref, old, new):
        raise AssertionError(f"{ref} was moved")

    disk.move_ref = refuse
    control = controller(disk)
    disk.known["m0"] = V0
    await control.bootstrap(V0)
    assert control.live == V3


def test_a_version_that_is_blocked_ends_its_own_trial_only():
    def event(action, policy, at=1.0, **detail):
        return ReleaseEvent(id=action, action=action, policy=policy, previous=V0, reason="", detail=detail, at=at)

    trying = fold(fold(State(), event("shipped", V0)), event("canary", V3, share=0.05, salt="a"))
    assert fold(trying, event("blocked", V5)).canary == V3
    assert fold(trying, event("blocked", V3)).canary is None
    back = fold(fold(trying, event("shipped", V3, at=5.0)), event("rolled_back", V0, at=9.0))
    assert (back.releases, back.shipped_at, back.canary) == ((V0,), 9.0, None)


def test_the_ledger_says_who_is_dealt_what_at_every_stage_of_a_trial():
    def event(action, policy, at, **detail):
        return ReleaseEvent(id=action, action=action, policy=policy, previous=V0, reason="", detail=detail, at=at)

    state = fold(fold(State(), event("shipped", V0, 0.0)), event("canary", V3, 1.0, share=0.05, salt="a"))
    assert state.dealing == Dealing(salt="a", canary=0.05)
    state = fold(state, event("ramped", V3, 2.0, share=0.25))
    assert state.dealing == Dealing(salt="a", canary=0.25)
    assert [state.trial.share(at) for at in (1.0, 1.5, 2.0, 2.5)] == [0.05, 0.05, 0.05, 0.25]
    assert fold(state, event("ramped", V5, 3.0, share=0.5)) == replace(state, events=4), "of another trial"
    live = fold(state, event("shipped", V3, 3.0, share=0.75))
    assert (live.dealing, live.canary) == (Dealing(salt="a", previous=0.25), None)
    better = fold(live, event("better", V3, 4.0))
    assert (better.trial.better_at, better.trial.better_s, better.trial.retested) == (4.0, 3.0, None)
    for action, held in (("confirmed", True), ("faded", False)):
        assert fold(better, event(action, V3, 9.0)).trial.retested is held
        assert fold(better, event(action, V5, 9.0)) == replace(better, events=better.events + 1), "of another trial"
    another = replace(event("canary", V5, 5.0, share=0.01, salt="b"), previous=V3)
    assert fold(better, another).dealing == Dealing(salt="b", canary=0.01)
    for end in (event("rolled_back", V0, 5.0), event("shipped", V8, 5.0)):
        assert fold(better, end).dealing is None
    assert fold(state, event("shipped", V3, 3.0)).dealing is None, "shipped by hand: nobody stays behind"
    assert fold(State(), event("canary", V3, 1.0)).dealing is None, "a line from before there were shares"


async def test_before_bootstrap_nothing_is_live(disk):
    control = controller(disk)
    with pytest.raises(Unavailable, match="start `ostinato up`"):
        _ = control.live
    with pytest.raises(Unavailable, match="start `ostinato up`"):
        await control.step()


async def test_good_candidate_ships_and_bad_one_does_not(disk):
    control = await started(disk, judge := FakeJudge({5: [Verdict.BLOCK]}))
    assert await control.step() is None  # the candidate is what is live
    disk.publish(V3)
    event = await control.step()
    assert (event.action, event.policy, event.previous, event.reason) == ("shipped", V3, V0, ALONE)
    assert disk.refs["live"] == "m3"
    disk.publish(V5)
    event = await control.step()
    assert (event.action, event.reason) == ("blocked", "because BLOCK")
    assert await control.step() is None
    assert (disk.refs["live"], disk.refs["control"]) == ("m3", "m0")
    assert disk.events() == [("shipped", 0), ("evaluated", 3), ("shipped", 3), ("evaluated", 5), ("blocked", 5)]
    assert judge.asked == [(3, 0), (5, 3)]
    report = disk.rows.rows[1].detail["report"]
    assert report["verdict"] == "SHIP"
    assert report["candidate"]["hash"] == V3.hash


async def test_extend_draws_more_before_it_decides(disk):
    control = await started(disk, judge := FakeJudge({3: [Verdict.EXTEND, Verdict.EXTEND, Verdict.SHIP]}))
    disk.publish(V3)
    await settle(control)
    assert judge.asked == [(3, 0)] * 3
    assert disk.events()[1:] == [("evaluated", 3)] * 3 + [("shipped", 3)]


async def test_pinned_judgement_is_ended_before_the_newest_and_the_middle_is_skipped(disk):
    judge = FakeJudge({3: [Verdict.EXTEND, Verdict.SHIP]})
    judge.on_run = lambda candidate: [disk.publish(V5), disk.publish(V8)] if candidate == V3 else None
    control = await started(disk, judge, evaluation_ref="judged")
    disk.publish(V3)
    await settle(control)
    assert judge.asked == [(3, 0), (3, 0), (8, 3)]
    assert disk.refs["judged"] == "m8"
    assert disk.events()[-1] == ("shipped", 8)


async def test_unpinned_candidate_that_is_superseded_gives_way(disk):
    judge = FakeJudge()

    def run(candidate):
        if candidate == V3:
            disk.publish(V5)
            raise Conflict("slot moved on")

    judge.on_run = run
    control = await started(disk, judge)
    disk.publish(V3)
    assert await control.step() is None
    assert (await control.step()).policy == V5


async def test_rollback_moves_the_ref_and_what_it_replaced_never_ships_again(disk):
    control = await started(disk)
    for policy in (V3, V5):
        disk.publish(policy)
        await settle(control)
    event = await control.rollback(None, "people complain", actor="ann")
    assert (event.action, event.policy, event.previous) == ("rolled_back", V3, V5)
    assert disk.refs["live"] == "m3"
    await settle(control)
    assert disk.refs["live"] == "m3"  # v5 is still the newest candidate
    await went_back(disk, V3, step=8)
    disk.publish(V8)
    await settle(control)
    assert disk.refs["live"] == "m8"
    assert (await control.rollback(V0, "start over", actor="ann")).previous == V8
    await settle(control)
    assert disk.refs["live"] == "m0"
    with pytest.raises(NotFound, match="no earlier release"):
        await control.rollback(None, "further", actor="ann")
    with pytest.raises(BadRequest, match="is live already"):
        await control.rollback(V0, "again", actor="ann")
    with pytest.raises(NotFound, match="never published"):
        await control.rollback(version(77), "where", actor="ann")
    assert (await control.rollback(V8, "a person wants it after all", actor="ann")).policy == V8


@in_virtual_time
async def test_who_saw_something_else_live_moves_nothing_even_if_the_line_comes_while_the_controller_looks(disk):
    """The ref is at v5, and whoever moved it is about to write so: what was seen is compared with what the line says."""
    worker = await started(disk)
    disk.publish(V3)
    await settle(worker)
    disk.publish(V5)
    moved, by_hand = asyncio.Event(), controller(disk, poll_s=0.2)
    append = disk.append

    async def slow(*rows):
        if any(isinstance(row, ReleaseEvent) and row.action == "shipped" for row in rows):
            moved.set()
            await asyncio.sleep(0.05)
        return await append(*rows)

    disk.append = slow
    shipping = asyncio.create_task(worker.step())
    await moved.wait()
    assert (await by_hand.ledger.refresh()).live == V3, "as the page shows it"
    with pytest.raises(Conflict, match=r"v5@.* is live now, not v3@.*nothing was done"):
        await by_hand.rollback(None, "v3 is bad", actor="ann", expected=V3)
    assert (await shipping).policy == V5
    with pytest.raises(Conflict, match=r"v5@.* is live now, not v3@"):
        await by_hand.ship(V0, "v3 is bad", actor="ann", expected=V3)
    assert disk.refs["live"] == "m5"
    assert disk.events()[-1] == ("shipped", 5)
    assert (await by_hand.rollback(None, "v5 is bad", actor="ann", expected=V5)).policy == V3


async def test_a_person_ships_what_no_gate_judged(disk):
    control = ReleaseController(disk, disk, disk, None, ReleaseConfig(), Time())
    await control.bootstrap(V0)
    disk.publish(V3)
    assert await control.step() is None, "without a judge nothing ships by itself"
    event = await control.ship(V3, "ann looked at it", actor="ann")
    assert (event.action, event.policy, event.previous, event.reason) == ("shipped", V3, V0, "ann looked at it")
    assert disk.refs["live"] == "m3"
    assert control.ledger.state.releases == (V0, V3)
    with pytest.raises(BadRequest, match="is live already"):
        await control.ship(V3, "again", actor="ann")
    with pytest.raises(NotFound, match="never published"):
        await control.ship(version(77), "where", actor="ann")


async def test_shipping_by_hand_ends_a_trial_and_forgives_a_refusal(disk):
    control = await started(disk, FakeJudge({3: [Verdict.BLOCK]}))
    disk.publish(V3)
    await settle(control)
    assert V3.hash in control.ledger.state.refused
    await control.ship(V3, "the suite is wrong", actor="ann")
    assert control.ledger.state.refused == frozenset()
    trial = controller(disk, FakeJudge(), Time(), guarded=True, canary=True)
    disk.publish(V5)
    assert (await trial.step()).action == "canary"
    disk.publish(V8)
    await control.ship(V8, "in a hurry", actor="ann")
    assert (await trial.ledger.refresh()).canary is None
    assert trial.live == V8


@in_virtual_time
async def test_the_reason_of_who_moves_live_by_hand_stands_however_soon_another_process_looks(disk):
    """The ref moves before its line is written: a look in between waits for the line."""
    control = await started(disk, poll_s=0.2)
    disk.publish(V3)
    await settle(control)
    looker, by_hand = controller(disk, poll_s=0.2), controller(disk)
    await looker.watch()
    append = disk.append
    looked = []

    async def slow(*rows):
        if rows and not looked:
            looked.append(asyncio.create_task(looker.watch()))
            await asyncio.sleep(0.05)
        return await append(*rows)

    disk.append = slow
    await by_hand.rollback(None, "people complain", actor="ann")
    await looked[0]
    told = [row.reason for row in disk.rows.rows if isinstance(row, ReleaseEvent) and row.action == "rolled_back"]
    assert told == ["people complain"]


async def test_rollback_from_another_process_during_an_evaluation_voids_it(disk):
    judge = FakeJudge()
    control = await started(disk, judge)
    disk.publish(V3)
    await settle(control)
    other = ReleaseController(disk, disk, disk, None, ReleaseConfig(), Time())
    pending = []
    judge.on_run = lambda candidate: pending.append(candidate)
    disk.publish(V5)

    run = judge.run

    async def slow(candidate, *, against):
        if against.live == V3:
            await other.rollback(None, "now", actor="ann")
        return await run(candidate, against=against)

    judge.run = slow
    with pytest.raises(Conflict, match="evaluate again"):
        await control.step()
    assert disk.refs["live"] == "m0"
    event = await control.step()
    assert (event.action, event.policy) == ("blocked", V5)  # it was learned from what was taken back
    await went_back(disk, V0, step=8)
    disk.publish(V8)
    assert (await control.step()).policy == V8
    assert judge.asked[-1] == (8, 0)


async def test_live_moved_by_hand_is_written_down(disk):
    control = await started(disk)
    disk.publish(V3)
    disk.refs["live"] = "m3"
    await settle(control)
    last = disk.rows.rows[-1]
    assert (last.action, last.policy, last.reason) == ("shipped", V3, "found the live ref moved by hand")


async def test_what_nobody_foresaw_is_said_and_ends_nothing(disk, caplog):
    control, stop = await started(disk, FakeJudge(), poll_s=0.005), asyncio.Event()

    async def broken():
        raise ZeroDivisionError("float division by zero")

    control.watch = broken
    running = asyncio.create_task(control.run(stop))
    async with asyncio.timeout(PATIENT_S):
        while control.trouble is None:
            await asyncio.sleep(0.001)
    assert control.trouble == "ZeroDivisionError: float division by zero"
    disk.publish(V3)
    async with asyncio.timeout(PATIENT_S):
        while disk.refs["live"] != "m3":
            await asyncio.sleep(0.001)
    stop.set()
    await running


async def test_two_who_read_a_ledger_at_once_fold_each_line_once(disk):
    lines = (
        ReleaseEvent(id=str(n), action="blocked", policy=V3, previous=V0, reason="", detail={}, at=1.0)
        for n in range(600)
    )
    await disk.append(*lines)
    ledger = ReleaseLedger(disk, Time())
    await asyncio.gather(*(ledger.refresh() for _ in range(3)))
    assert ledger.state.events == 600


def test_a_long_ledger_is_read_in_time_that_grows_with_it():
    """A fifth shipped, the others blocked: a copy of all before for each of them takes the square."""

    def folded(count):
        state = State()
        for number in range(count):
            policy = PolicyVersion(number=number, hash=f"{number:064x}")
            action = "blocked" if number % 5 else "shipped"
            state = fold(
                state,
                ReleaseEvent(id=str(number), action=action, policy=policy, previous=V0, reason="", detail={}, at=1.0),
            )
        assert (len(state.releases), len(state.refused), state.events) == (count // 5, count - count // 5, count)

    assert grows_with_its_input(folded, 25_000 // TIMES, 25_000)


async def test_nobody_can_guess_by_what_a_trial_deals(disk, monkeypatch):
    made = iter(("first", "second"))
    monkeypatch.setattr("ostinato.release.canary.token_hex", lambda size: next(made))
    control, _ = await on_trial(disk, {V3: 0.75})
    assert control.ledger.state.dealing.salt == "first"
    again = controller(disk, FakeJudge(), **QUICK)
    await again.bootstrap(V0)
    assert again.ledger.state.dealing.salt == "first", "it is the ledger's, not drawn anew"


async def test_run_goes_on_after_trouble_and_stops_when_told(disk):
    control = await started(disk, judge := FakeJudge(), poll_s=0.01)
    failures = [Unavailable("gateway is down"), Unavailable("gateway is down")]

    def run(candidate):
        if failures:
            raise failures.pop()

    judge.on_run = run
    stop = asyncio.Event()
    task = asyncio.create_task(control.run(stop))
    disk.publish(V3)
    said = set()
    async with asyncio.timeout(PATIENT_S):
        while disk.refs["live"] != "m3":
            await asyncio.sleep(0.001)
            said.add(control.trouble)
    assert "Unavailable: gateway is down" in said
    assert control.trouble is None
    stop.set()
    await asyncio.wait_for(task, PATIENT_S)
    assert failures == []


@in_virtual_time
async def test_a_trouble_that_step_and_watch_share_is_told_once(disk):
    control, stop = await started(disk, judge := FakeJudge(), poll_s=0.005), asyncio.Event()

    def away(*_):
        raise Unavailable("the log is away")

    async def watch():
        away()

    judge.on_run, control.watch = away, watch
    disk.publish(V3)
    task = asyncio.create_task(control.run(stop))
    said = set()
    for _ in range(40):
        await asyncio.sleep(0.005)
        said.add(control.trouble)
    assert said - {None} == {"Unavailable: the log is away"}
    stop.set()
    await asyncio.wait_for(task, PATIENT_S)


@in_virtual_time
async def test_a_watch_that_goes_well_does_not_hide_a_step_that_fails(disk):
    control = await started(disk, judge := FakeJudge(), poll_s=0.005)

    def run(candidate):
        raise Unavailable("gateway is down")

    judge.on_run = run
    stop = asyncio.Event()
    task = asyncio.create_task(control.run(stop))
    disk.publish(V3)
    async with asyncio.timeout(PATIENT_S):
        while control.trouble is None:
            await asyncio.sleep(0.001)
    said = set()
    for _ in range(20):
        await asyncio.sleep(0.005)
        said.add(control.trouble)
    assert said == {"Unavailable: gateway is down"}
    stop.set()
    await asyncio.wait_for(task, PATIENT_S)


async def test_what_holds_no_event_is_searched_once(disk):
    asked = []

    def read(after, kinds):
        asked.append(after)
        return disk.rows.read(after, kinds)

    disk.read = read
    ledger = ReleaseLedger(disk, Time())
    await disk.rows.append(*[a_turn(f"t{n}:0") for n in range(5)])
    await ledger.refresh()
    await ledger.append("shipped", V3, None, "first")
    await disk.rows.append(a_turn("t5:0"))
    await ledger.refresh()
    state = await ledger.refresh()
    assert (asked[0], asked[-1], state.live) == (0, 7, V3)


# ------------------------------------------------------------------------------------------------ kill -9 at every write


async def story(disk, control_factory):
    """Bootstrap, a release that needed an extension, a block, a rollback, one more release: one process after another."""
    deaths = 0
    script = [
        lambda c: c.bootstrap(V0),
        lambda c: (disk.publish(V3), settle(c))[1],
        lambda c: (disk.publish(V5), settle(c))[1],
        lambda c: (disk.publish(V8), settle(c))[1],
    ]
    control = control_factory()
    for act in script:
        while True:
            try:
                await act(control)
                break
            except Killed:
                deaths += 1
                disk.fuse.at = None
                control = control_factory()
    return deaths


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_every_write_the_story_ends_alike(after):
    def fresh():
        disk = Disk()
        disk.publish(V0)
        judge_state = {3: [Verdict.EXTEND, Verdict.SHIP], 5: [Verdict.BLOCK], 8: [Verdict.SHIP]}

        def factory():
            judge = FakeJudge(judge_state)
            judge.better = {3}
            return controller(disk, judge, evaluation_ref="judged", best_ref="shown")

        return disk, factory

    disk, factory = fresh()
    assert await story(disk, factory) == 0
    writes, truth = disk.fuse.writes, ReleaseLedger(disk, Time())
    expected = await truth.refresh()
    assert expected.releases == (V0, V3, V8)
    assert expected.proven == (V0, V3)
    for at in range(1, writes + 1):
        disk, factory = fresh()
        disk.fuse.at, disk.fuse.after = at, after
        assert await story(disk, factory) == 1
        state = await ReleaseLedger(disk, Time()).refresh()
        assert state.releases == expected.releases, f"killed at write {at}"
        assert state.refused == expected.refused
        assert state.proven == expected.proven, "whoever was proven better stays so, and nobody else"
        assert disk.refs["best"] == "m3"
        shipped = [number for action, number in disk.events() if action == "shipped"]
        assert shipped == [0, 3, 8], f"killed at write {at}: each release is written once"
        assert disk.refs["live"] == "m8"
        assert disk.refs["control"] == "m0"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_in_a_rollback_the_bad_version_stays_refused(disk, after):
    control = await started(disk)
    disk.publish(V3)
    await settle(control)
    for offset in (1, 2):
        disk.fuse.at, disk.fuse.after = disk.fuse.writes + offset, after
        with pytest.raises(Killed):
            await control.rollback(None, "bad", actor="ann")
        disk.fuse.at = None
        control = controller(disk)
        await settle(control)
        if disk.refs["live"] == "m0":
            break
    assert disk.refs["live"] == "m0"
    assert V3.hash in control.ledger.state.refused


async def test_restart_takes_back_the_scores_of_the_ledger(disk):
    control = await started(disk, FakeJudge({3: [Verdict.EXTEND]}))
    disk.publish(V3)
    await control.step()
    judge = FakeJudge()
    await controller(disk, judge).step()
    assert judge.restored == [{"drawn for": 3}]


async def test_the_ledger_keeps_draws_only_while_they_are_needed(disk):
    control = await started(disk, FakeJudge({3: [Verdict.EXTEND, Verdict.SHIP]}))
    disk.publish(V3)
    await settle(control)
    looks = [row for row in disk.rows.rows if isinstance(row, ReleaseEvent) and row.action == "evaluated"]
    assert ["evidence" in look.detail for look in looks] == [True, False]


# ------------------------------------------------------------------------------------------------ live, best and anchor


async def test_best_moves_only_to_what_was_proven_better_and_leaves_with_a_rollback(disk):
    judge = FakeJudge()
    judge.better = {3}
    control = await started(disk, judge, best_ref="shown")
    for policy in (V3, V5, V8):
        disk.publish(policy)
        await settle(control)
    stood = [(a.live.number, a.best.number, a.anchor.number, a.round) for a in judge.against]
    assert stood == [(0, 0, 0, 0), (3, 3, 0, 1), (5, 3, 0, 2)]
    assert control.incumbents(V3).best == V3
    await control.rollback(V3, "people complain", actor="ann")
    assert control.incumbents(V3).best == V3, "what came after it is gone, not it"
    await control.rollback(V0, "start over", actor="ann")
    assert control.incumbents(V3).best == V0, "a release that users were harmed by is the best no more"


async def test_the_best_is_kept_in_the_store_and_has_a_slot_only_while_it_is_needed(disk):
    judge = FakeJudge()
    judge.better = {3}
    control = await started(disk, judge, best_ref="shown")
    shown = []
    judge.on_run = lambda candidate: shown.append((candidate.number, disk.refs.get("shown"), disk.refs.get("best")))
    for policy in (V3, V5, V8):
        disk.publish(policy)
        await settle(control)
    assert shown == [(3, None, "m0"), (5, None, "m3"), (8, "m3", "m3")], "live and anchor have slots of their own"
    assert disk.refs["shown"] == "m0", "parked on weights that are loaded anyway"
    disk.refs["shown"] = "m3"  # killed before it was parked
    await settle(controller(disk, judge, best_ref="shown"))
    assert disk.refs["shown"] == "m0"


async def test_a_best_that_cannot_be_sampled_is_left_out_aloud(disk):
    judge = FakeJudge()
    judge.better = {3}
    control = await started(disk, judge)
    for policy in (V3, V5, V8):
        disk.publish(policy)
        await settle(control)
    assert [None if a.best is None else a.best.number for a in judge.against] == [0, 3, None]


async def test_what_a_person_ships_is_not_proven_better(disk):
    control = await started(disk)
    disk.publish(V3)
    await control.ship(V3, "a hunch", actor="ann")
    assert (control.incumbents(V3).live, control.incumbents(V3).best) == (V3, V0)


def test_a_ledger_from_before_there_was_a_best_still_folds():
    def event(action, policy, previous, detail):
        return ReleaseEvent(
            id=action, action=action, policy=policy, previous=previous, reason="", detail=detail, at=1.0
        )

    old = {"report": {"verdict": "SHIP", "difference": 0.02}, "evidence": {"suite_hash": "9f", "scores": {}}}
    state = fold(fold(State(), event("shipped", V0, None, {})), event("evaluated", V3, V0, old))
    state = fold(state, event("shipped", V3, V0, {"manifest": "m3"}))
    assert (state.live, state.best, state.judged) == (V3, V0, 1)


# ---------------------------------------------------------------------------------------------------- people's outcomes


async def serve(disk, arm, policy, rates, turns, at, start=0):
    """Simulated users: user i accepts every suggestion whose number falls under rate i."""
    for user, rate in enumerate(rates):
        for k in range(turns):
            name = f"{arm}:{policy.number}:{user}:{start + k}"
            turn = Turn(
                id=name, episode=name, parent=None, user=f"{arm}-{user}", tenant="t", arm=arm, propensity=0.5, prompt_ids=(1,),
                sampled_ids=(2,), logprobs=(-0.1,), spans=(Span(policy=policy, tokens=1),), sampling=Sampling(max_tokens=1),
                finish=Finish.STOP, text="", started_at=at, ended_at=at,
            )  # fmt: skip
            verb = "accepted" if (k * 0.618 + user * 0.37) % 1 < rate else "rejected"
            signal = Signal(
                id=name, tenant="t", turn=name, name=verb, value=1.0, source=Source.CODE, occurred_at=at, received_at=at
            )
            await disk.rows.append(turn, signal)


RATES = [0.35 + 0.02 * i for i in range(12)]
GUARDED = {
    "guard": GuardConfig(min_outcomes=60), "outcomes": OutcomeConfig(maturity_s=5.0), "trial": TrialConfig(slot_s=10.0)
}  # fmt: skip


async def guarded(disk, loss):
    time = Time()
    control = controller(disk, FakeJudge(), time, guarded=True, **GUARDED)
    await control.bootstrap(V0)
    disk.publish(V3)
    await control.step()
    time.now += 50
    await serve(disk, Arm.CONTROL, V0, RATES, 20, time.now)
    await serve(disk, Arm.LIVE, V3, [rate - loss for rate in RATES], 20, time.now)
    assert await control.watch() is None  # not one outcome is mature yet
    time.now += 20
    return control, await control.watch()


async def test_live_that_is_thirty_points_below_control_rolls_back_by_itself(disk):
    control, event = await guarded(disk, 0.30)
    assert (event.action, event.policy, event.previous) == ("rolled_back", V0, V3)
    assert "acceptance against the control arm worse by" in event.reason
    assert disk.refs["live"] == "m0"
    await settle(control)
    assert disk.refs["live"] == "m0"


async def test_live_that_is_as_good_stays(disk):
    _, event = await guarded(disk, 0.0)
    assert event is None
    assert disk.refs["live"] == "m3"


async def test_an_outage_of_the_product_rolls_nothing_back(disk):
    """Everybody accepts less from one moment on, whatever answers them: release after release stays."""
    time = Time()
    control = controller(disk, FakeJudge(), time, guarded=True, **GUARDED)
    await control.bootstrap(V0)
    await serve(disk, Arm.LIVE, V0, RATES, 20, time.now - 10)
    for policy in (V3, V5, V8):
        disk.publish(policy)
        await control.step()
        time.now += 50
        for arm, served in ((Arm.CONTROL, V0), (Arm.LIVE, policy)):
            await serve(disk, arm, served, [rate - 0.35 for rate in RATES], 20, time.now, start=100 * policy.number)
        time.now += 20
        assert await control.watch() is None
    assert disk.refs["live"] == "m8"


# ------------------------------------------------------------------------------------------------------------- trials


async def test_a_harmless_canary_becomes_live_and_some_stay_behind_until_it_is_better(disk):
    control, crowd = await on_trial(disk, {V3: 0.75})
    assert (disk.refs["canary"], disk.refs["live"]) == ("m3", "m0")
    disk.refs["canary"] = "m0"  # somebody moved it, or it was killed before it did
    await control.step()
    assert disk.refs["canary"] == "m3"
    event = await crowd.until("shipped")
    assert "canary not worse than 10.0 pp" in event.reason
    assert "by the confidence sequence" in event.reason, "the traffic of an hour was not known yet"
    assert (disk.refs["live"], disk.refs["previous"]) == ("m3", "m0")
    assert control.ledger.state.dealing.previous == pytest.approx(0.5)
    event = await crowd.until("better")
    assert (event.policy, event.previous) == (V3, V0)
    assert event.reason.startswith("better (provisional): +")
    assert event.detail["reading"]["better"]
    with pytest.raises(AssertionError, match="no "):
        await crowd.until("better", "rolled_back", slots=5)


async def test_the_gate_is_told_how_long_ago_another_candidate_was_looked_at(disk):
    judge, time = FakeJudge({3: [Verdict.BLOCK]}), Time()
    control = controller(disk, judge, time)
    await control.bootstrap(V0)
    for policy in (V3, V5):
        disk.publish(policy)
        await control.step()
        time.now += 3600.0
    assert [each.since_s for each in judge.against] == [None, 3600.0]


async def test_the_plan_of_the_looks_is_in_the_trials_first_line_and_a_restart_goes_on_with_it(disk):
    """With an hour of traffic the plan decides; an hour of the crowd's turns is what the trial's 200 seconds can expect."""
    time = Time()
    control = controller(disk, FakeJudge(), time, guarded=True, **QUICK)
    await control.bootstrap(V0)
    crowd = Crowd(disk, control, time, {V0: 0.5, V3: 0.75})
    await crowd.slot()
    time.now += 3600.0
    await crowd.slot()
    disk.publish(V3)
    event = await control.step()
    assert event.action == "canary"
    plan = control.ledger.state.trial.plan
    assert ShipPlan.read(json.loads(json.dumps(event.detail["plan"]))) == plan
    assert (plan.alpha, plan.limit_s) == (0.05, 200.0)
    assert 0.0 < plan.information["acceptance"] < 856.4, "a single test of ten points needs so much"
    await crowd.slot()
    crowd.control = controller(disk, FakeJudge(), time, guarded=True, **QUICK)
    await crowd.control.bootstrap(V0)
    assert crowd.control.ledger.state.trial.plan == plan
    event = await crowd.until("shipped")
    assert re.search(
        r"canary not worse than 10.0 pp: .*, by look \d+ of the group-sequential plan \(\d+% of", event.reason
    )
    assert event.detail["reading"]["bound"] > -0.1


@pytest.mark.parametrize(("later", "action"), [(0.75, "confirmed"), (0.5, "faded")])
async def test_what_was_called_better_is_noted_as_lasting_or_not_by_a_restarted_controller_too(disk, later, action):
    trial = QUICK["trial"].model_copy(update={"retest_s": 150.0})
    control, crowd = await on_trial(disk, {V3: 0.75}, rules=QUICK | {"trial": trial})
    await crowd.until("better")
    crowd.worth[V3] = later
    for _ in range(8):
        await crowd.slot()
    control = controller(disk, FakeJudge(), crowd.time, guarded=True, **(QUICK | {"trial": trial}))
    await control.bootstrap(V0)
    crowd.control = control
    event = await crowd.until(action, slots=12)
    assert (event.policy, event.previous) == (V3, V0)
    assert control.ledger.state.trial.retested is (action == "confirmed")
    assert disk.refs["live"] == "m3"
    with pytest.raises(AssertionError, match="no "):
        await crowd.until("better", "confirmed", "faded", "rolled_back", slots=5)


async def test_a_trial_that_goes_on_says_where_it_stands_ever_less_often(disk):
    control, crowd = await on_trial(disk, {V3: 0.75})
    await crowd.until("better", slots=40)
    crowd.people = range(20)  # how often it is told depends on its age alone
    for _ in range(60):
        await crowd.slot()
        while await control.watch():
            pass
    looks = [row.at for row in disk.rows.rows if isinstance(row, ReleaseEvent) and row.action == "looked"]
    slot_s = QUICK["trial"].slot_s
    gaps = [later - sooner for sooner, later in pairwise(looks)]
    assert min(gaps) >= 2 * slot_s
    assert gaps[-1] > 5 * slot_s, "the older it is, the rarer"
    assert len(looks) < 25
    assert control.ledger.state.trial.told_at == looks[-1]
    last = [row for row in disk.rows.rows if isinstance(row, ReleaseEvent)][-1]
    assert (last.action, last.policy, last.previous) == ("looked", V3, V0)
    assert last.detail["reading"]["effect"]["people"] > 0


async def test_a_harmful_canary_is_blocked(disk):
    control, crowd = await on_trial(disk, {V3: 0.1})
    event = await crowd.until("blocked")
    assert event.reason.startswith("canary: worse: -")
    assert event.detail["reading"]["worse"]
    assert (disk.refs["live"], disk.refs["canary"]) == ("m0", "m0")
    await settle(control)
    assert disk.events()[-1] == ("blocked", 3)


async def test_a_harmful_canary_is_blocked_at_once_though_the_log_was_away_when_that_was_found(disk):
    """It served on until the next slot was over."""
    control, crowd = await on_trial(disk, {V3: 0.1})
    append = disk.append

    async def away(*rows):
        if any(isinstance(row, ReleaseEvent) and row.action == "blocked" for row in rows):
            raise Unavailable("the log is away")
        return await append(*rows)

    disk.append = away
    with pytest.raises(Unavailable, match="the log is away"):
        await crowd.until("blocked")
    disk.append = append
    event = await control.step()
    assert event is not None, "no slot has ended since"
    assert (event.action, event.policy) == ("blocked", V3)


async def test_a_canary_that_fails_is_blocked_though_nobody_says_so(disk):
    _, crowd = await on_trial(disk, {V3: 0.5})
    crowd.fails = {V3: 0.5}
    event = await crowd.until("blocked")
    assert event.reason.startswith("canary: failed worse: +")


async def test_a_release_that_turns_bad_is_taken_back_beside_those_who_stayed(disk):
    control, crowd = await on_trial(disk, {V3: 0.55})
    await crowd.until("shipped")
    crowd.worth[V3] = 0.1
    event = await crowd.until("rolled_back")
    assert (event.policy, event.previous) == (V0, V3)
    assert event.reason.startswith(f"beside {V0}: worse: -")
    assert disk.refs["live"] == "m0"
    assert V3.hash in control.ledger.state.refused


async def test_an_outage_moves_neither_a_trial_nor_a_release(disk):
    _, crowd = await on_trial(disk, {V3: 0.5})
    await crowd.until("shipped")
    crowd.worth = dict.fromkeys(crowd.worth, 0.1)
    with pytest.raises(AssertionError, match="no "):
        await crowd.until("rolled_back", slots=12)


async def test_four_users_never_ship(disk):
    _, crowd = await on_trial(disk, {V3: 1.0}, share=0.02)
    event = await crowd.until("blocked", "shipped")
    assert event.action == "blocked"
    assert "not enough evidence" in event.reason


async def test_nothing_said_never_ships(disk):
    _, crowd = await on_trial(disk, {V3: 0.5}, said=False)
    event = await crowd.until("blocked", "shipped")
    assert event.action == "blocked"
    assert "not enough evidence: no feedback on it yet" in event.reason


async def test_a_restarted_controller_goes_on_with_the_same_numbers(disk):
    control, crowd = await on_trial(disk, {V3: 0.5})
    for _ in range(3):
        await crowd.slot()
        await control.step()
    crowd.time.now += 6.0
    again = controller(disk, FakeJudge(), crowd.time, guarded=True, **QUICK)
    await again.ledger.refresh()
    record, began = again.ledger.state.trial, again.ledger.trial_began
    readings = []
    for each in (control, again):
        await crowd_free_look(each, record, began, crowd.time.now)
        readings.append(each._trials._running._trial._contrasts["acceptance"].effect())
    assert readings[0].difference == pytest.approx(readings[1].difference, abs=1e-12)
    assert readings[0].variance == pytest.approx(readings[1].variance)


async def crowd_free_look(control, record, began, now):
    """What a look does, without acting on it."""
    await control._trials._running.look(record, began, now)


async def test_a_trial_that_is_switched_off_in_mid_air_ships_nothing_unseen(disk):
    await on_trial(disk, {V3: 0.5})
    off = controller(disk, FakeJudge(), Time(), guarded=True)
    event = await off.step()
    assert (event.action, event.policy) == ("blocked", V3)
    assert "switched off" in event.reason


async def test_where_trials_are_switched_off_nobody_stays_on_the_release_before_and_no_gateway_holds_it(disk):
    """They stayed until the next release, compared by nobody, and the arms' refs kept both versions for good."""
    control, crowd = await on_trial(disk, {V3: 0.75})
    await crowd.until("shipped")
    assert control.ledger.state.dealing.previous == pytest.approx(0.5)
    assert (disk.refs["live"], disk.refs["previous"]) == ("m3", "m0")
    off = controller(disk, FakeJudge(), crowd.time, guarded=True, idle_refs=("canary", "previous"))
    event = await off.watch()
    assert (event.action, event.policy, event.previous) == ("looked", V3, V0)
    assert "switched off" in event.reason
    await off.follow()
    assert off.ledger.state.dealing is None
    assert (disk.refs["canary"], disk.refs["previous"]) == ("m3", "m3")
    assert await off.watch() is None, "it is said once"
    assert (off.live, off.ledger.state.previous) == (V3, V0), "it is live, and can be rolled back"
    again = controller(disk, FakeJudge(), crowd.time, guarded=True, **QUICK)
    await again.bootstrap(V0)
    assert again.ledger.state.trial is None


async def test_while_an_alarm_stands_nothing_ships_and_no_share_grows(disk):
    alarm = [True]
    control = controller(disk, FakeJudge({5: [Verdict.BLOCK]}), paused=lambda: alarm[0])
    await control.bootstrap(V0)
    disk.publish(V3)
    assert (await control.step()).action == "evaluated"
    assert await control.step() is None
    assert disk.refs["live"] == "m0"
    alarm[0] = False
    assert (await control.step()).action == "shipped"
    alarm[0] = True
    disk.publish(V5)
    await settle(control)
    assert disk.events()[-1] == ("blocked", 5), "what is refused is refused at once"


async def test_a_trial_waits_at_its_share_while_an_alarm_stands(disk):
    alarm = []
    _, crowd = await on_trial(disk, {V3: 0.6}, paused=lambda: bool(alarm))
    alarm.append("repetition")
    with pytest.raises(AssertionError, match="no "):
        await crowd.until("shipped", "ramped", slots=15)
    alarm.clear()
    await crowd.until("shipped")


async def test_what_an_alarm_held_up_is_done_when_it_ends_and_not_a_slot_later(disk):
    alarm = []
    control, crowd = await on_trial(disk, {V3: 0.6}, paused=lambda: bool(alarm))
    alarm.append("repetition")
    for _ in range(15):
        await crowd.slot()
        event = await control.step()
        assert event is None or event.action == "looked"
    assert await control.step() is None
    alarm.clear()
    event = await control.step()
    assert event is not None, "no slot has ended since"
    assert event.action in {"ramped", "shipped"}


async def test_what_descends_from_a_version_that_was_taken_back_does_not_ship_until_training_went_back(disk):
    control = await started(disk)
    disk.publish(V3)
    await settle(control)
    await control.rollback(None, "people complain", actor="ann")
    disk.publish(V5)
    event = await control.step()
    assert (event.action, event.policy) == ("blocked", V5)
    assert "may descend from a version that was taken back" in event.reason
    await disk.rows.append(Batch(step=6, turns=(), credits=(), reference=V0, at=1.0))
    assert await control._ancestry.carried_on(V8, control.ledger.harmful), "an ordinary step is built on the one before"
    await went_back(disk, V0, step=7)
    disk.publish(V8)
    await settle(control)
    assert disk.refs["live"] == "m8"


async def test_a_person_may_ship_what_descends_from_it(disk):
    control = await started(disk)
    disk.publish(V3)
    await settle(control)
    await control.rollback(None, "people complain", actor="ann")
    disk.publish(V5)
    await control.ship(V5, "it was the product, not the model", actor="ann")
    disk.publish(V8)
    await settle(control)
    assert disk.refs["live"] == "m8"


async def told_with_deaths(disk):
    """A trial from its first share to the rollback, going on after each death; the lines of the ledger."""
    time = Time()

    def fresh():
        return controller(disk, FakeJudge(), time, guarded=True, **QUICK)

    control = fresh()
    crowd = Crowd(disk, control, time, {V0: 0.5, V3: 1.0}, share=0.6)
    disk.refs |= {"live": "m0", "control": "m0"}
    disk.publish(V3)
    for _ in range(90):
        if {"live", "canary", "previous"} <= disk.refs.keys():
            await crowd.slot()
        for _ in range(3):
            try:
                await control.step()
                await control.watch()
            except Killed:
                disk.fuse.at = None
                control = crowd.control = fresh()
                await control.ledger.refresh()
        if any(action == "better" for action, _ in disk.events()):
            crowd.worth[V3] = 0.1
        if disk.events()[-1][0] == "rolled_back":
            return disk.events()
    raise AssertionError(f"it never ended: {disk.events()}")


@pytest.mark.parametrize("apart", first([2, 1]))
async def test_a_trial_that_is_killed_at_every_write_ends_alike(apart):
    """Before a write and after it. Before the next one the disk is as after this one, so that every other one has all states of it."""

    def fresh():
        disk = Disk()
        disk.publish(V0)
        return disk

    whole = fresh()
    expected = await told_with_deaths(whole)
    assert [action for action, _ in expected if action not in ("ramped", "looked")] == [
        *("shipped", "evaluated", "canary", "shipped", "better", "rolled_back")
    ]
    for at, after in product(range(1, whole.fuse.writes + 1, apart), (False, True)):
        disk = fresh()
        disk.fuse.at, disk.fuse.after = at, after
        told = await told_with_deaths(disk)
        moves, same = ([line for line in lines if line[0] not in ("ramped", "looked")] for lines in (told, expected))
        assert moves == same, (at, after)
        state = await ReleaseLedger(disk, Time()).refresh()
        assert (state.live, state.refused, state.dealing) == (V0, frozenset({V3.hash}), None)
