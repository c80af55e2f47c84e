"""The gate saw that a candidate is surer of less: an alarm until that is over, or somebody accepts it."""

import json
from dataclasses import asdict, replace

import pytest

from ostinato.core.notices import AlarmState
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.report import AnswerDiversity, Incumbent, ItemMean, OpinionShift, Sharpening
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.pass_at_k import ANSWERS_ALIKE, BEST_OF_K, SYCOPHANCY, NarrowingWatch
from ostinato.release.monitors.watcher import MonitorWatcher, acceptable, acceptance, standing
from ostinato.testing.log import MemoryLog

V1, V2, V3 = (PolicyVersion(number=n, hash=f"{n:02d}" * 16) for n in (1, 2, 3))


def mean(value):
    return ItemMean(mean=value, lower=value - 0.02, upper=value + 0.02, items=100)


def line(action, policy, *, best=None, verdict="SHIP", previous=V1):
    detail = {}
    if best is not None:
        change = Sharpening(against=Incumbent.ANCHOR, policy=V1, k=8, first=mean(0.1), best=mean(best))
        detail = json.loads(json.dumps({"report": {"verdict": verdict, "sharpening": [asdict(change)]}}))
    id = f"{action}{policy.number}"
    return ReleaseEvent(id=id, action=action, policy=policy, previous=previous, reason="", detail=detail, at=9.0)


def test_a_candidate_that_lost_coverage_is_told_with_its_figures():
    watch = NarrowingWatch()
    (row,) = watch.release(line("evaluated", V2, best=-0.1))
    assert (row.name, row.state, row.detail["candidate"]) == (BEST_OF_K, AlarmState.RAISED, V2.hash)
    assert "against anchor on 100 items: pass@1 +10.0 pp [+8.0, +12.0], best of 8 -10.0 pp [-12.0, -8.0]" in row.reason
    assert watch.standing == [BEST_OF_K]


def test_what_will_not_ship_or_lost_nothing_is_not_told():
    watch = NarrowingWatch()
    for event in (
        line("evaluated", V2, best=0.1), line("evaluated", V2, best=-0.1, verdict="BLOCK"), line("shipped", V2), line("evaluated", V2),
        line("evaluated", V2, best=-0.1, verdict="EXTEND"),
    ):  # fmt: skip
        assert list(watch.release(event)) == []
    assert watch.standing == []


def test_it_ends_with_the_candidate_or_with_a_later_one_that_is_not_narrower():
    for over in (line("blocked", V2), line("rolled_back", V1, previous=V2), line("evaluated", V3, best=0.0)):
        watch = NarrowingWatch()
        list(watch.release(line("evaluated", V2, best=-0.1)))
        assert list(watch.release(line("blocked", V3))) == []
        (row,) = watch.release(over)
        assert row.state is AlarmState.CLEARED
        assert watch.standing == []


def test_a_person_may_accept_it_and_a_saving_or_the_log_keeps_it():
    watch, restored, begun = NarrowingWatch(), NarrowingWatch(), NarrowingWatch()
    (row,) = watch.release(line("evaluated", V2, best=-0.1))
    restored.restore(json.loads(json.dumps(watch.snapshot())))
    begun.begin({BEST_OF_K: row})
    for each in (watch, restored, begun):
        assert each.standing == [BEST_OF_K]
        each.alarm(acceptance(row, "ann", 10.0))
        assert each.standing == []


def alike(policy, excess, verdict="SHIP"):
    found = AnswerDiversity(draws=8, candidate=0.3, anchor=0.6, excess=mean(excess))
    detail = json.loads(json.dumps({"report": {"verdict": verdict, "diversity": asdict(found)}}))
    return ReleaseEvent(id="a", action="evaluated", policy=policy, previous=V1, reason="", detail=detail, at=9.0)


def test_answers_that_became_alike_are_told_and_pause_nothing():
    watch = Monitors(MonitorsConfig(), ())
    (row,) = watch.apply(7, alike(V2, -0.1))
    assert (row.name, row.state, row.detail["pauses"]) == (ANSWERS_ALIKE, AlarmState.RAISED, False)
    assert "differ in 30%, the anchor's in 60%" in row.reason
    assert watch.standing == [ANSWERS_ALIKE]
    assert not watch.paused
    assert acceptable(ANSWERS_ALIKE)
    again = Monitors(MonitorsConfig(), ())
    assert again.restore(json.loads(json.dumps(watch.snapshot())))
    (row,) = again.apply(8, alike(V3, 0.1))
    assert (row.name, row.state) == (ANSWERS_ALIKE, AlarmState.CLEARED)


def test_answers_that_differ_nearly_as_often_or_will_not_ship_are_not_told():
    watch = NarrowingWatch(ANSWERS_ALIKE)
    for event in (alike(V2, 0.01), alike(V2, -0.01), alike(V2, -0.1, "BLOCK"), line("evaluated", V2, best=-0.1)):
        assert list(watch.release(event)) == []


def opinions(policy, *excess, verdict="SHIP"):
    shifts = [
        OpinionShift(against=against, policy=V1, candidate=0.81, incumbent=0.62, excess=mean(each))
        for against, each in zip((Incumbent.LIVE, Incumbent.ANCHOR), excess, strict=False)
    ]
    detail = json.loads(json.dumps({"report": {"verdict": verdict, "opinions": [asdict(each) for each in shifts]}}))
    return ReleaseEvent(id="o", action="evaluated", policy=policy, previous=V1, reason="", detail=detail, at=9.0)


def test_a_candidate_that_sides_with_users_more_than_any_incumbent_did_pauses_shipping():
    for excess in ((0.1, 0.0), (0.0, 0.1)):
        watch = Monitors(MonitorsConfig(), ())
        (row,) = watch.apply(7, opinions(V2, *excess))
        assert (row.name, row.state, row.detail["candidate"]) == (SYCOPHANCY, AlarmState.RAISED, V2.hash)
        assert row.detail["pauses"]
        assert "agrees with the user's opinion in 81%, before in 62%" in row.reason
        assert watch.paused
        assert acceptable(SYCOPHANCY)
        again = Monitors(MonitorsConfig(), ())
        assert again.restore(json.loads(json.dumps(watch.snapshot())))
        assert again.standing == watch.standing == [SYCOPHANCY]


def test_what_is_tolerated_or_will_not_ship_is_no_sycophancy_and_what_was_not_measured_ends_nothing():
    watch = Monitors(MonitorsConfig(), ())
    assert watch.apply(1, opinions(V2, 0.01, 0.01)) == []
    assert watch.apply(2, opinions(V2, 0.1, 0.1, verdict="BLOCK")) == []
    assert len(watch.apply(3, opinions(V2, 0.1))) == 1
    assert watch.apply(4, opinions(V3)) == []
    assert watch.standing == [SYCOPHANCY]
    (row,) = watch.apply(5, opinions(V3, 0.0, -0.2))
    assert (row.name, row.state) == (SYCOPHANCY, AlarmState.CLEARED)


@pytest.mark.parametrize("accepted", [False, True], ids=["measured before", "accepted before"])
async def test_a_reader_without_a_state_reads_old_lines_again_and_the_alarm_stands_in_the_log_as_in_its_memory(
    accepted,
):
    log, settings = MemoryLog(), MonitorsConfig(pauses=True)
    for at, event in enumerate([opinions(V2, 0.1 if accepted else 0.0), opinions(V3, 0.1)]):
        await log.append(replace(event, id=f"o{at}", at=10.0 * at))
        await MonitorWatcher(log, settings).refresh()
        if accepted and at == 0:
            await log.append(acceptance((await standing(log))[SYCOPHANCY], "ann", 5.0))
    for _ in range(2):  # restarts
        watcher = MonitorWatcher(log, settings)
        await watcher.refresh()
        assert watcher.pauses_shipping
        assert list(await standing(log)) == watcher.standing == [SYCOPHANCY]
    await log.append(replace(opinions(V3, 0.0), id="later", at=50.0))
    await watcher.refresh()
    assert list(await standing(log)) == watcher.standing == []


def test_a_state_saved_while_old_lines_are_read_again_knows_that_they_are_old():
    (row,) = Monitors(MonitorsConfig(), ()).apply(1, opinions(V3, 0.1))
    begun, again = Monitors(MonitorsConfig(), ()), Monitors(MonitorsConfig(), ())
    begun.begin({SYCOPHANCY: row})
    assert again.restore(json.loads(json.dumps(begun.snapshot())))
    assert again.apply(0, replace(opinions(V2, 0.0), at=row.at - 1.0)) == []
    assert again.standing == [SYCOPHANCY]
