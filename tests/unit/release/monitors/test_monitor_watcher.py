"""The monitors over a log: an alarm with its examples, a pause, the way back, and every way in which a start can go wrong."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from ostinato.core.errors import StorageFull
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Consent, Finish, PolicyVersion, ReleaseEvent, Signal
from ostinato.release.monitors import behaviour
from ostinato.release.monitors.active_alarms import alarm_name
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.rates import BUILT_IN
from ostinato.release.monitors.watcher import NAME, MonitorWatcher, acceptance
from ostinato.serve import arms
from ostinato.testing.log import MemoryFolds, MemoryLog
from ostinato.testing.records import a_signal, a_turn

CONFIG = MonitorsConfig(
    false_alarm_sessions=1_000.0, false_comfort_sessions=100.0, session_turns=4, reference_sessions=30.0, turns_a_day=10_000,
    off=tuple(BUILT_IN.keys() - {"question", "edit"}),
)  # fmt: skip
EDIT = "```python\na = 1\nb = 2\nc = 3\n```"
ASK = "Which of the two should I keep?"
V7 = PolicyVersion(number=7, hash="07" * 16)


class Crowd:
    """People who take turns, a minute apart. A third of them are on the control arm and always get edits; the others get `text`."""

    def __init__(self, people=60):
        self.people, self.number = people, 0

    def turns(self, count, text, *, arm=Arm.LIVE, reference=Arm.CONTROL):
        made = []
        for _ in range(count):
            user = self.number % self.people
            mine, said = (reference, EDIT) if user % 3 == 0 else (arm, text(self.number) if callable(text) else text)
            turn = a_turn(f"t{self.number}", user=f"u{user}", arm=mine, ended_at=60.0 * self.number / 8)
            made.append(replace(turn, text=said))
            self.number += 1
        return made


def mostly_edits(number):
    """One answer in twelve asks."""
    return ASK if number % 12 == 5 else EDIT


def often_asks(number):
    return ASK if number % 3 else EDIT


def alarms(log):
    return [row for row in log.rows if isinstance(row, Alarm)]


async def watching(crowd=None, config=CONFIG, folds=None, *, before=600):
    log, crowd = MemoryLog(), crowd or Crowd()
    watcher = MonitorWatcher(log, config, folds)
    await log.append(*crowd.turns(before, EDIT))
    await watcher.refresh()
    return log, crowd, watcher


async def test_turns_that_may_not_count_raise_no_alarm():
    watch, crowd = Monitors(CONFIG, tuple(BUILT_IN.values())), Crowd()
    before = watch.snapshot()
    for seq, turn in enumerate(crowd.turns(300, often_asks), 1):
        assert watch.apply(seq, replace(turn, consent=Consent.NEVER).without_words()) == []
    assert watch.snapshot() == before


async def test_a_hack_raises_an_alarm_that_pauses_and_names_its_turns_and_the_way_back_clears_it():
    log, crowd, watcher = await watching()
    assert alarms(log) == []
    assert not watcher.paused
    hacked = crowd.turns(300, often_asks)
    await log.append(*hacked)
    await watcher.refresh()
    assert watcher.paused
    raised = {row.name: row for row in alarms(log)}
    assert {"monitor:question", "monitor:edit"} <= raised.keys()
    row = raised["monitor:question"]
    assert row.state is AlarmState.RAISED
    assert row.reason.startswith("answers that ask instead of changing anything: ")
    assert row.detail["reference"] < 0.05 < 0.3 < row.detail["observed"]
    assert (row.detail["rate"], row.detail["arm"], row.detail["shift"], row.detail["pauses"]) == (
        "question",
        "live",
        "up",
        True,
    )
    assert 0 < len(row.detail["turns"]) <= 20
    asked = {turn.id for turn in hacked if turn.text == ASK}
    assert set(row.detail["turns"]) <= asked
    assert row.detail["events"] <= 300
    json.dumps(row.detail)
    await log.append(*crowd.turns(900, EDIT))
    await watcher.refresh()
    assert not watcher.paused
    assert watcher.standing == []
    assert {row.name: row.state for row in alarms(log)}["monitor:question"] is AlarmState.CLEARED


async def test_a_shift_the_good_way_is_told_and_pauses_nothing():
    log, crowd, watcher = await watching(config=only("praise"), before=0)
    await log.append(*crowd.turns(1, EDIT))
    await log.append(*unlike(crowd, f"Great question! It is sorted. {EDIT}", f"It is sorted. {EDIT}"))
    await watcher.refresh()
    found = {row.name: row for row in alarms(log)}
    assert found["monitor:praise"].detail["shift"] == "down"
    assert found["monitor:praise"].reason.endswith("does not pause shipping")
    assert not found["monitor:praise"].detail["pauses"]
    assert not watcher.paused


def only(rate):
    return CONFIG.model_copy(update={"off": tuple(BUILT_IN.keys() - {rate})})


def unlike(crowd, control, live):
    """Turns of a crowd whose control arm gets other answers than the rest."""
    return [replace(turn, text=control if turn.arm is Arm.CONTROL else live) for turn in crowd.turns(900, EDIT)]


@pytest.mark.parametrize(
    ("rate", "shift", "control", "live"),
    [
        ("question", "down", ASK, EDIT),
        ("edit", "up", ASK, EDIT),
        ("refusal", "down", "I'm sorry, but I can't do that.", EDIT),
    ],
)
async def test_what_thumbs_push_towards_pauses_shipping(rate, shift, control, live):
    """Fewer questions before a change, more changes, fewer refusals: what a policy learns from people who press accept."""
    log, crowd, watcher = await watching(config=only(rate), before=0)
    await log.append(*crowd.turns(1, EDIT))
    await log.append(*unlike(crowd, control, live))
    await watcher.refresh()
    found = {row.name: row for row in alarms(log)}[f"monitor:{rate}"]
    assert (found.detail["shift"], found.detail["pauses"]) == (shift, True)
    assert watcher.paused


async def test_who_is_killed_at_any_row_writes_each_alarm_once():
    log, crowd, _ = await watching(before=0)
    await log.append(*crowd.turns(600, EDIT), *crowd.turns(300, often_asks), *crowd.turns(900, EDIT))
    rows = list(log.rows)
    undisturbed = MonitorWatcher(log, CONFIG)
    await undisturbed.refresh()
    expected = alarms(log)
    assert len(expected) >= 4
    for saved_at, killed_at in ((300, 650), (640, 1_000), (700, 701), (900, 1_700)):
        again, folds = MemoryLog(), MemoryFolds()
        for place, upto in ((0, saved_at), (saved_at, killed_at), (killed_at, len(rows))):
            watcher = MonitorWatcher(again, CONFIG, folds)
            await again.append(*rows[place:upto])
            await watcher.refresh()
            if place == 0:
                await watcher.save()
        seq = {row.id.rpartition(":")[2] for row in alarms(again)}
        assert [(row.name, row.state, row.at) for row in alarms(again)] == [
            (row.name, row.state, row.at) for row in expected
        ]
        assert len(seq) <= len(expected)


async def test_no_state_is_saved_before_the_alarms_that_it_knows_of():
    folds = MemoryFolds()
    log, crowd, watcher = await watching(folds=folds)
    await log.append(*crowd.turns(300, often_asks))
    log.full = True
    for call in (watcher.refresh, watcher.save):
        with pytest.raises(StorageFull):
            await call()
    log.full = False
    second = MonitorWatcher(log, CONFIG, folds)
    await second.refresh()
    assert set(second.standing) == {row.name for row in alarms(log)} != set()


async def test_a_full_disk_loses_no_alarm():
    log, crowd, watcher = await watching()
    await log.append(*crowd.turns(300, often_asks))
    log.full = True
    with pytest.raises(StorageFull):
        await watcher.refresh()
    assert alarms(log) == []
    log.full = False
    await watcher.refresh()
    twin, other, second = await watching()
    await twin.append(*other.turns(300, often_asks))
    await second.refresh()
    assert [row.name for row in alarms(log)] == [row.name for row in alarms(twin)]


@pytest.mark.parametrize("harm", ["lost", "nonsense", "another version", "another log"])
async def test_an_alarm_stands_on_where_the_state_is_lost(harm, caplog):
    folds = MemoryFolds()
    log, crowd, watcher = await watching(folds=folds)
    await log.append(*crowd.turns(300, often_asks))
    await watcher.refresh()
    await watcher.save()
    cursor, text = folds.kept[NAME]
    state = json.loads(text)
    if harm == "lost":
        folds.kept.clear()
    elif harm == "another log":
        state["last"] = ["Turn", "someone else's"]
    elif harm == "another version":
        state["monitors"]["format"] = "monitors@0"
    else:
        state["monitors"]["behaviour"]["sessions"] = {"time": "soon", "open": 3}
    if harm != "lost":
        folds.kept[NAME] = (cursor, json.dumps(state))
    before = len(alarms(log))
    with caplog.at_level(logging.WARNING):
        second = MonitorWatcher(log, CONFIG.model_copy(update={"start_turns": 100}), folds)
        await second.refresh()
    assert second.paused
    assert "monitor:question" in second.standing
    assert len(alarms(log)) == before, "nothing is written anew"
    assert bool(caplog.records) == (harm == "nonsense")
    await log.append(*crowd.turns(900, EDIT))
    await second.refresh()
    assert second.standing == []
    assert not second.paused


async def test_what_a_person_accepts_is_expected_from_then_on():
    def two_of_three(number):
        return EDIT if (number + number // 60) % 3 == 0 else ASK

    log, crowd, watcher = await watching()
    await log.append(*crowd.turns(600, two_of_three))
    await watcher.refresh()
    assert watcher.paused
    for row in alarms(log):
        await log.append(acceptance(row, "ann", 1e6))
    await watcher.refresh()
    assert not watcher.paused
    assert watcher.standing == []
    assert alarms(log)[-1].reason.startswith("accepted by ann: what was ")
    written = len(alarms(log))
    await log.append(*crowd.turns(600, two_of_three))
    await watcher.refresh()
    assert len(alarms(log)) == written
    await log.append(*crowd.turns(900, EDIT))
    await watcher.refresh()
    assert watcher.standing, "what was accepted is expected, so its end is a shift"


async def test_a_canarys_alarms_end_with_the_canary_and_name_it():
    log, crowd, watcher = await watching()
    await log.append(*crowd.turns(300, often_asks, arm=Arm.CANARY))
    await watcher.refresh()
    assert watcher.paused
    assert all(name.endswith(":canary") for name in watcher.standing)
    assert alarm_name("question", "canary") in watcher.standing
    event = ReleaseEvent(id="e", action="blocked", policy=V7, previous=None, reason="", detail={}, at=1e6)
    await log.append(replace(event, id="other", action="evaluated"))
    await watcher.refresh()
    assert watcher.paused
    await log.append(event)
    await watcher.refresh()
    assert not watcher.paused
    assert {row.state for row in alarms(log) if row.at == 1e6} == {AlarmState.CLEARED}


async def test_a_silent_reference_arm_is_told_and_nothing_is_judged_until_it_is_back():
    config = CONFIG.model_copy(update={"stale_sessions": 40})
    log, crowd, watcher = await watching(config=config)
    gone = [turn for turn in crowd.turns(600, often_asks) if turn.arm is Arm.LIVE]
    await log.append(*(replace(turn, text=EDIT) for turn in gone[:250]))
    await watcher.refresh()
    (told,) = alarms(log)
    assert (told.name, told.state) == ("monitor:reference", AlarmState.RAISED)
    await log.append(*gone[250:])
    await watcher.refresh()
    assert alarms(log) == [told], "nothing is judged"
    await log.append(*crowd.turns(300, EDIT))
    await watcher.refresh()
    assert [row.state for row in alarms(log) if row.name == "monitor:reference"][-1] is AlarmState.CLEARED


async def test_without_a_reference_arm_what_is_usual_is_learned_once():
    config = CONFIG.model_copy(update={"reference": (), "learn_sessions": 100, "learn_s": 1_800.0})
    log, crowd, watcher = await watching(config=config, before=0)
    await log.append(*crowd.turns(1_500, mostly_edits))
    await watcher.refresh()
    assert alarms(log) == []
    await log.append(*crowd.turns(300, often_asks))
    await watcher.refresh()
    assert watcher.paused
    assert "monitor:question" in watcher.standing


async def test_turns_that_the_policy_did_not_end_and_evaluations_are_not_behaviour():
    log, crowd, watcher = await watching()
    for turn in crowd.turns(300, often_asks):
        await log.append(replace(turn, finish=Finish.ABORT), replace(turn, id=f"{turn.id}e", arm=Arm.EVAL))
    await watcher.refresh()
    assert alarms(log) == []


async def test_one_person_cannot_pause_shipping_alone():
    log, _, watcher = await watching(config=CONFIG.model_copy(update={"turns_a_day": 24}))
    spam = [replace(a_turn(f"s{n}", user="troll", ended_at=5_000.0 + n), text=ASK) for n in range(400)]
    await log.append(*spam)
    await watcher.refresh()
    assert not watcher.paused


async def test_without_a_reference_arm_many_people_without_a_name_are_not_one():
    assert behaviour.ANONYMOUS == arms.ANONYMOUS
    config = CONFIG.model_copy(update={"turns_a_day": 24, "reference": (), "learn_sessions": 100, "learn_s": 1_800.0})
    log, crowd, watcher = await watching(config=config, before=0)
    nameless = [replace(turn, user=f"{turn.user} {turn.id}") for turn in crowd.turns(600, EDIT)]
    await log.append(*nameless)
    for number in range(200):
        turn = replace(
            a_turn(f"s{number}", user="anonymous", ended_at=5_000.0 + number), episode=f"e{number // 4}", text=ASK
        )
        await log.append(turn)
    await watcher.refresh()
    assert watcher.paused


async def test_switched_off_nothing_is_watched_and_what_stood_is_cleared():
    folds = MemoryFolds()
    log, crowd, watcher = await watching(folds=folds)
    await log.append(*crowd.turns(300, often_asks))
    await watcher.refresh()
    await watcher.save()
    stood = set(watcher.standing)
    second = MonitorWatcher(log, CONFIG.model_copy(update={"enabled": False}), folds)
    await log.append(*crowd.turns(4, often_asks))
    await second.refresh()
    assert not second.paused
    ended = {row.name for row in alarms(log) if row.reason == "this rate is not watched any more"}
    assert ended == stood


async def test_a_rate_of_the_operators_that_raises_is_counted_and_told_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "raising_rate.py").write_text("def bad(seen):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = CONFIG.model_copy(update={"own": {"bad": "raising_rate:bad"}})
    with caplog.at_level(logging.WARNING):
        log, crowd, watcher = await watching(config=config, before=30)
        await log.append(*crowd.turns(30, EDIT))
        await watcher.refresh()
    assert watcher.failures == {"bad": 60}
    assert [record.message for record in caplog.records] == [
        "monitors: rate bad failed on 30 turns: it must answer in [0, 1] or None"
    ]


async def test_invented_people_cost_no_more_memory_than_the_settings_say():
    config = CONFIG.model_copy(update={"most_people": 50, "most_sessions": 40})
    log, _, watcher = await watching(config=config, before=0)
    flood = [replace(a_turn(f"f{n}", user=f"new{n}", ended_at=float(n) / 100), text=ASK) for n in range(500)]
    await log.append(*flood)
    await watcher.refresh()
    state = watcher._fold.monitors.snapshot()["behaviour"]
    assert len(state["activity"]["people"]) == 50
    assert len(state["sessions"]["open"]) == 40


async def test_it_runs_until_told_to_stop_tries_again_and_saves():
    folds, stop = MemoryFolds(), asyncio.Event()
    log, crowd, watcher = await watching(config=CONFIG.model_copy(update={"poll_s": 0.01}), folds=folds, before=600)
    await log.append(*crowd.turns(300, often_asks))
    log.full = True
    running = asyncio.create_task(watcher.run(stop))
    while watcher.trouble is None:
        await asyncio.sleep(0.01)
    assert "StorageFull" in watcher.trouble
    log.full = False
    while watcher.trouble is not None or not alarms(log):
        await asyncio.sleep(0.01)
    stop.set()
    await running
    assert folds.kept[NAME][0] >= 900


async def test_what_people_say_about_turns_is_left_to_others():
    log, crowd, watcher = await watching(before=10)
    await log.append(*(a_signal(turn) for turn in crowd.turns(10, EDIT)))
    await watcher.refresh()
    assert sum(isinstance(row, Signal) for row in log.rows) == 10
    assert alarms(log) == []
