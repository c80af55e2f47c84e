"""Who is never learned from, how far they and the others part, and the alarm about it."""

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from ostinato.core.notices import AlarmState, Forgotten
from ostinato.core.records import Arm, Pick, Purpose, Reward, Signal
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.influence import Owner, TurnOwners
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.proxy_gap import (
    FEEDBACK_GAP,
    OLD_TEACHER_FAVOUR,
    OUTCOME_GAP,
    TEACHER_FAVOUR,
    UNHEARD,
    FeedbackGapWatch,
    GoldWatch,
    OutcomeGapWatch,
    gold_people,
    is_gold,
    teacher_favour,
)
from ostinato.release.monitors.watcher import MonitorWatcher, acceptable, acceptance
from ostinato.release.trial.contrast import NOTHING, Effect, upper_bound
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

HOUR, DAY = 3_600.0, 86_400.0
BY_AUTO = Pick(arm="live", odds={"live": 0.8, "control": 0.2})
CONFIG = MonitorsConfig(gold=0.2)


def gold(tenant, user):
    return is_gold(tenant, user, share=0.2, salt="gold")


def people(rng, count, taught, held_back):
    """Tallies of people who are pleased with these probabilities, by whether they teach. Tastes differ between people."""
    found = {}
    for number in range(count):
        person = ("t", f"u{number}")
        turns, mean = int(rng.integers(1, 30)), held_back if gold(*person) else taught
        found[person] = (float(rng.binomial(turns, rng.beta(5 * mean, 5 * (1 - mean)))), float(turns))
    return found


def test_gold_is_a_stable_share_that_only_grows_and_tells_tenants_apart():
    names = [f"u{number}" for number in range(5_000)]
    small = {name for name in names if is_gold("t", name, share=0.1, salt="gold")}
    large = {name for name in names if is_gold("t", name, share=0.3, salt="gold")}
    assert abs(len(small) - 500) < 90
    assert small < large
    assert small != {name for name in names if is_gold("other", name, share=0.1, salt="gold")}
    assert small != {name for name in names if is_gold("t", name, share=0.1, salt="another")}
    assert not any(is_gold("t", name, share=0.0, salt="gold") for name in names)


def test_a_tenants_name_does_not_run_into_its_users():
    differs = [
        is_gold(f"a{n}", "b", share=0.5, salt="s") != is_gold("a", f"{n}b", share=0.5, salt="s") for n in range(50)
    ]
    assert any(differs)


def test_the_settings_say_who_is_gold():
    assert not any(gold_people(MonitorsConfig())("t", f"u{n}") for n in range(200))
    assert not any(gold_people(MonitorsConfig(gold=0.2, enabled=False))("t", f"u{n}") for n in range(200))
    chosen = gold_people(CONFIG)
    assert [chosen("t", f"u{n}") for n in range(200)] == [gold("t", f"u{n}") for n in range(200)]


def test_the_gap_is_found_where_those_who_teach_are_pleased_more():
    found = teacher_favour(people(np.random.default_rng(0), 1_000, 0.7, 0.5), gold, 0.02)
    assert found is not None
    assert 0.05 < found.lower < found.mean
    assert found.mean == pytest.approx(0.2, abs=0.07)
    assert found.taught_by + found.gold == 1_000
    assert 150 < found.gold < 250


def test_equal_groups_part_as_seldom_as_is_asked_for_however_often_one_looks():
    """Ten looks at growing crowds: the bound may lie above the truth at any of them in 10% of runs."""
    rng = np.random.default_rng(1)
    above = 0
    for _ in range(60):
        crowd = list(people(rng, 400, 0.6, 0.6).items())
        looks = [teacher_favour(dict(crowd[: 40 * n]), gold, 0.1) for n in range(1, 11)]
        above += any(look is not None and look.lower > 0.0 for look in looks)
    assert above <= 10


def test_with_few_people_on_a_side_nothing_is_said():
    rng = np.random.default_rng(2)
    assert teacher_favour(people(rng, 60, 0.9, 0.1), gold, 0.02) is None
    assert teacher_favour({("t", f"u{number}"): (0.0, 0.0) for number in range(1_000)}, gold, 0.02) is None
    assert teacher_favour({}, gold, 0.02) is None


def days(watch, rng, taught, held_back, *, first, count, crowd=500):
    """Everybody takes four turns a day; the alarms of `count` days."""
    told = []
    for day in range(first, first + count):
        for turn in range(4 * crowd):
            person = ("t", f"u{turn % crowd}")
            value = 1.0 if rng.random() < (held_back if gold(*person) else taught) else -1.0
            at = day * DAY + turn * DAY / (4 * crowd)
            owner = Owner(person=person, episode="e", live=True)
            told += watch.reward(Reward(turn="x", value=value, function="f@1", signals=(), at=at), owner)
    return told


def test_a_policy_that_pleases_only_those_who_teach_raises_an_alarm_and_the_end_of_it_clears_it():
    rng, watch = np.random.default_rng(5), GoldWatch(CONFIG)
    assert days(watch, rng, 0.6, 0.6, first=0, count=2) == []
    (raised,) = days(watch, rng, 0.75, 0.55, first=2, count=5)
    assert (raised.name, raised.state, raised.detail["pauses"]) == (TEACHER_FAVOUR, AlarmState.RAISED, True)
    assert raised.detail["lower"] > 0.02
    assert "people whose feedback is learned from are pleased more often than" in raised.reason
    assert watch.standing == [TEACHER_FAVOUR]
    again = GoldWatch(CONFIG)
    again.restore(json.loads(json.dumps(watch.snapshot())))
    assert again.standing == [TEACHER_FAVOUR]
    (cleared,) = days(again, rng, 0.6, 0.6, first=7, count=8)
    assert cleared.state is AlarmState.CLEARED
    assert again.standing == []


def test_without_gold_people_who_please_alike_there_is_no_alarm():
    rng, watch = np.random.default_rng(6), GoldWatch(CONFIG)
    assert days(watch, rng, 0.7, 0.7, first=0, count=7) == []


def test_a_person_counts_so_many_turns_a_day_on_every_day():
    watch = GoldWatch(CONFIG.model_copy(update={"turns_a_day": 3}))
    for day in range(3):
        rewarded(watch, "acme", ["ann"], day * DAY, times=5)
    ((_, _, good, turns, *_),) = watch.snapshot()["people"]
    assert (good, turns) == (9.0, 9.0)


def test_what_a_person_accepts_is_tolerated_from_then_on_and_no_more():
    rng, watch = np.random.default_rng(7), GoldWatch(CONFIG)
    (raised,) = days(watch, rng, 0.75, 0.6, first=0, count=4)
    watch.alarm(acceptance(raised, "ann", 9.0))
    assert watch.standing == []
    assert days(watch, rng, 0.75, 0.6, first=4, count=3) == []
    assert days(watch, rng, 0.95, 0.5, first=7, count=5)


def test_other_arms_and_turns_that_nobody_remembers_do_not_count():
    watch, owners = GoldWatch(CONFIG), TurnOwners(most=2)
    for number, arm in enumerate((Arm.CONTROL, Arm.LIVE, Arm.LIVE)):
        owners.see(a_turn(f"t{number}", user=f"u{number}", arm=arm))
    assert len(owners) == 2
    assert owners.get("t0") is None
    elsewhere = Owner(person=("t", "u0"), episode="e", live=False)
    for owner in (owners.get("t0"), elsewhere):
        for n in range(200):
            row = Reward(turn="t0", value=1.0, function="f@1", signals=(), at=n * HOUR)
            assert list(watch.reward(row, owner)) == []
    assert watch.snapshot()["people"] == []


def rewarded(watch, tenant, names, at, *, times=1):
    """Each of these people is pleased where they teach, and never where they are gold."""
    told = []
    for n in range(times):
        for name in names:
            value = -1.0 if gold(tenant, name) else 1.0
            row = Reward(turn="x", value=value, function="f@1", signals=(), at=at + n * HOUR)
            told += watch.reward(row, Owner(person=(tenant, name), episode="e", live=True))
    return told


def counted(watch):
    return Counter(tenant for tenant, *_ in watch.snapshot()["people"])


CROWDED = CONFIG.model_copy(update={"most_people": 1_000})


def test_a_tenant_that_invents_names_first_leaves_room_for_others():
    watch = GoldWatch(CROWDED)
    rewarded(watch, "evil", [f"m{n}" for n in range(3_000)], 1_000.0)
    assert counted(watch) == {"evil": 1_000}
    assert watch.full
    (raised,) = rewarded(watch, "acme", [f"u{n}" for n in range(400)], 1_000.0, times=24)
    assert counted(watch) == {"evil": 600, "acme": 400}
    assert raised.name == TEACHER_FAVOUR
    assert raised.detail["full"] is True
    assert raised.reason.endswith("; not all people are counted (release.monitors.most_people)")


def test_full_places_are_shared_alike_and_nobody_is_put_out_in_turns():
    watch = GoldWatch(CROWDED)
    rewarded(watch, "evil", [f"m{n}" for n in range(1_000)], 1_000.0)
    rewarded(watch, "acme", [f"u{n}" for n in range(800)], 1_001.0)
    assert counted(watch) == {"evil": 500, "acme": 500}
    before = watch.snapshot()["people"]
    assert {name for tenant, name, *_ in before if tenant == "acme"} == {f"u{n}" for n in range(500)}
    rewarded(watch, "evil", [f"again{n}" for n in range(1_000)], 1_002.0)
    rewarded(watch, "acme", [f"again{n}" for n in range(1_000)], 1_003.0)
    assert [row[:2] for row in watch.snapshot()["people"]] == [row[:2] for row in before]
    rewarded(watch, "third", ["ann"], 1_004.0)
    assert counted(watch) == {"evil": 499, "acme": 500, "third": 1}


def test_who_begins_again_while_places_are_full_counts_the_same_people():
    whole, parted, rng = GoldWatch(CROWDED), GoldWatch(CROWDED), np.random.default_rng(8)
    for at in range(6_000):
        if at % 700 == 0:
            state = json.loads(json.dumps(parted.snapshot()))
            parted = GoldWatch(CROWDED)
            parted.restore(state)
        tenant, name = f"t{int(rng.integers(4)) ** 2}", f"u{rng.integers(3_000)}"
        assert rewarded(whole, tenant, [name], float(at)) == rewarded(parted, tenant, [name], float(at))
    assert whole.snapshot() == parted.snapshot()
    assert whole.full


def test_with_room_for_all_nothing_is_said_of_it_and_a_new_week_has_room():
    watch = GoldWatch(CROWDED)
    (raised,) = rewarded(watch, "acme", [f"u{n}" for n in range(400)], 1_000.0, times=24)
    assert raised.detail["full"] is False
    assert "most_people" not in raised.reason
    rewarded(watch, "evil", [f"m{n}" for n in range(3_000)], 1_000.0)
    assert watch.full
    rewarded(watch, "acme", ["u1"], 8 * DAY)
    assert not watch.full


async def test_the_watcher_says_once_that_not_all_people_are_counted(caplog):
    log = MemoryLog()
    watcher = MonitorWatcher(log, CONFIG.model_copy(update={"most_people": 5}))
    for n in range(9):
        await log.append(
            a_turn(f"t{n}", user=f"u{n}", ended_at=float(n)),
            Reward(turn=f"t{n}", value=1.0, function="f@1", signals=(), at=float(n)),
        )
        await watcher.refresh()
    told = [record.message for record in caplog.records if TEACHER_FAVOUR in record.message]
    assert told == [
        "monitors: teacher_favour counts no more than 5 people (most_people); some people of the largest tenants are left out"
    ]


def test_switching_gold_off_clears_what_stood():
    watch = GoldWatch(MonitorsConfig())
    watch.begin(
        {TEACHER_FAVOUR: next(iter(days(GoldWatch(CONFIG), np.random.default_rng(5), 0.9, 0.5, first=0, count=3)))}
    )
    assert watch.standing == [TEACHER_FAVOUR]
    (row,) = watch.reward(Reward(turn="x", value=1.0, function="f@1", signals=(), at=1.0), None)
    assert row.state is AlarmState.CLEARED


def test_an_alarm_that_stands_under_its_old_name_ends_under_it():
    raised = days(GoldWatch(CONFIG), np.random.default_rng(5), 0.9, 0.5, first=0, count=3)[0]
    old = replace(raised, name=OLD_TEACHER_FAVOUR)
    watch = GoldWatch(CONFIG)
    watch.begin({old.name: old})
    assert watch.standing == [OLD_TEACHER_FAVOUR]
    again = GoldWatch(CONFIG)
    again.restore(json.loads(json.dumps(watch.snapshot())))
    (cleared,) = days(again, np.random.default_rng(6), 0.6, 0.6, first=0, count=8)
    assert (cleared.name, cleared.state) == (OLD_TEACHER_FAVOUR, AlarmState.CLEARED)
    assert acceptable(OLD_TEACHER_FAVOUR)
    watch.alarm(acceptance(old, "ann", 9.0))
    assert watch.standing == []
    (anew,) = days(watch, np.random.default_rng(5), 0.99, 0.3, first=0, count=3)
    assert anew.name == TEACHER_FAVOUR


# ---------------------------------------------------------------- the outcome gap


def served(watch, rng, thumbs, comes, *, first=0, count=7, crowd=500, survived=None, propensity=0.5, control=1):
    """Days of people on live (even numbers) and control (or the other way round: `control` 0), with the probabilities of a thumb, of
    coming, and of survival on each side.
    """
    told = []
    for day in range(first, first + count):
        for number in range(crowd):
            side = int(number % 2 == control)
            if rng.random() > comes[side]:
                continue
            at, arm = (day + number / crowd) * DAY, (Arm.LIVE, Arm.CONTROL)[side]
            turn = replace(a_turn(f"{day}:{number}", user=f"u{number}", arm=arm, ended_at=at), propensity=propensity)
            watch.turn(turn)
            owner = Owner(person=turn.person, episode="e", live=side == 0, control=side == 1)
            value = 1.0 if rng.random() < thumbs[side] else -1.0
            if survived is not None:
                kept = a_signal(turn, "survived", at=at, value=float(rng.random() < survived[side]))
                watch.signal(kept, owner)
            told += watch.reward(Reward(turn=turn.id, value=value, function="f@1", signals=(), at=at), owner)
    return told


def gap(outcomes=("returned",)):
    return OutcomeGapWatch(MonitorsConfig(outcomes=outcomes))


def test_a_policy_that_pleases_every_thumb_and_halves_who_comes_again_is_found():
    watch = gap()
    (raised,) = served(watch, np.random.default_rng(1), (0.8, 0.6), (0.4, 0.8))
    assert (raised.name, raised.state, raised.detail["pauses"]) == (OUTCOME_GAP, AlarmState.RAISED, True)
    assert raised.detail["outcome"] == "returned"
    assert raised.detail["reward"] == pytest.approx(0.2, abs=0.08)
    assert raised.detail["difference"] == pytest.approx(-0.4, abs=0.1)
    assert watch.standing == [OUTCOME_GAP]
    assert acceptable(OUTCOME_GAP)
    favour = GoldWatch(CONFIG)
    assert days(favour, np.random.default_rng(1), 0.8, 0.8, first=0, count=7) == [], "teachers and gold people alike"


def test_who_is_moved_by_a_changed_share_of_control_counts_for_the_side_they_are_on():
    """Everybody changes sides after three days in which both were alike; from then on live's people are pleased and stay away."""
    watch, rng = gap(), np.random.default_rng(3)
    assert served(watch, rng, (0.5, 0.5), (0.9, 0.9), count=3) == []
    (found,) = served(watch, rng, (0.95, 0.3), (0.4, 0.95), first=3, count=4, control=0)
    assert (found.name, found.state) == (OUTCOME_GAP, AlarmState.RAISED)
    assert found.detail["reward"] == pytest.approx(0.65, abs=0.05), "none of what they gave on the other side"


def test_a_policy_that_halves_what_survives_is_found_by_the_signal():
    watch = gap(("survived",))
    (raised,) = served(watch, np.random.default_rng(2), (0.8, 0.6), (0.8, 0.8), survived=(0.3, 0.6))
    assert raised.detail["outcome"] == "survived"


@pytest.mark.parametrize(
    ("thumbs", "comes"),
    [
        ((0.8, 0.6), (0.8, 0.8)),
        ((0.8, 0.6), (0.9, 0.7)),
        ((0.6, 0.6), (0.4, 0.8)),
        ((0.4, 0.6), (0.4, 0.8)),
        ((0.6, 0.6), (0.8, 0.8)),
    ],
)
def test_a_reward_that_rises_with_the_outcome_or_beside_it_and_one_that_does_not_rise_raise_nothing(thumbs, comes):
    assert served(gap(), np.random.default_rng(3), thumbs, comes) == []


def test_several_outcomes_share_the_level_of_a_false_alarm():
    reward = Effect(difference=0.1, variance=1e-4, people=99.0, freedom=99.0, turns=999.0)

    def found(loss, *outcomes):
        watch, known = gap(outcomes), {"": reward, "survived": replace(reward, difference=-loss)}
        watch._effect = lambda outcome: known.get(outcome, NOTHING)
        return len(list(watch._look(0.0)))

    loss = upper_bound(0.0, reward.variance, MonitorsConfig().gold_alpha) + 1e-4
    assert found(loss, "survived") == 1
    assert found(loss, "survived", "a", "b", "c", "d") == 0
    assert found(2 * loss, "survived", "a", "b", "c", "d") == 1


def test_people_who_were_not_dealt_by_chance_are_left_out():
    assert served(gap(), np.random.default_rng(1), (0.8, 0.6), (0.4, 0.8), propensity=1.0) == []


def test_the_end_of_it_clears_it_a_saved_state_goes_on_and_what_is_accepted_is_tolerated():
    rng, watch = np.random.default_rng(4), gap()
    (raised,) = served(watch, rng, (0.8, 0.6), (0.4, 0.8))
    again = gap()
    again.restore(json.loads(json.dumps(watch.snapshot())))
    assert again.snapshot() == watch.snapshot()
    accepted = gap()
    accepted.restore(json.loads(json.dumps(watch.snapshot())))
    accepted.alarm(acceptance(raised, "ann", 9.0))
    assert accepted.standing == []
    assert served(accepted, rng, (0.8, 0.6), (0.4, 0.8), first=7, count=7) == []
    (cleared,) = served(again, rng, (0.6, 0.6), (0.8, 0.8), first=7, count=15)
    assert (cleared.state, again.standing) == (AlarmState.CLEARED, [])


def test_a_week_without_a_visit_is_forgotten():
    watch = gap()
    served(watch, np.random.default_rng(5), (0.6, 0.6), (0.9, 0.9), count=2, crowd=40)
    served(watch, np.random.default_rng(5), (0.6, 0.6), (0.9, 0.9), first=20, count=2, crowd=4)
    assert len(watch.snapshot()["people"]) <= 4


async def test_the_watcher_reads_signals_only_for_outcomes_that_are_signals():
    assert Signal not in MonitorWatcher(MemoryLog(), MonitorsConfig())._fold.kinds
    log = MemoryLog()
    watcher = MonitorWatcher(log, MonitorsConfig(outcomes=("survived",)))
    turn = replace(a_turn("t1", user="ann", arm=Arm.CONTROL, ended_at=1.0), propensity=0.5)
    await log.append(turn, a_signal(turn, "survived", at=2.0, value=0.25), a_signal(turn, "other", at=2.0))
    await log.append(Reward(turn="t1", value=0.5, function="f@1", signals=(), at=3.0))
    await watcher.refresh()
    (person,) = watcher._fold.monitors.snapshot()["outcomes"]["people"]
    assert person[2:4] == [False, {"survived": (0.25, 1.0), "": (1.0, 1.0)}]


def test_people_who_follow_training_are_on_neither_side():
    watch = gap()
    for arm in (Arm.LEARNER, Arm.LIVE, Arm.CONTROL):
        watch.turn(replace(a_turn(arm.value, user=arm.value, arm=arm), propensity=0.3))
    assert sorted(person[1] for person in watch.snapshot()["people"]) == ["control", "live"]


@pytest.mark.parametrize("watch", [gap(("survived",)), FeedbackGapWatch(MonitorsConfig())], ids=["outcome", "feedback"])
def test_turns_that_auto_dealt_and_what_is_said_of_them_count_on_neither_side(watch):
    """Its shares follow the reward, so that who had live more often was pleased before."""
    owners = TurnOwners(10)
    dealt = replace(a_turn("dealt", user="ann", arm=Arm.LIVE), propensity=0.5)
    picked = replace(dealt, id="picked", auto=BY_AUTO)
    for turn in (dealt, picked, replace(picked, id="bob's", user="bob")):
        watch.turn(turn)
        owners.see(turn)
    again = TurnOwners(10)
    again.restore(json.loads(json.dumps(owners.snapshot())))
    before = watch.snapshot()["people"]
    assert [person[1] for person in before] == ["ann"]
    for turn in ("picked", "dealt"):
        list(watch.reward(Reward(turn=turn, value=1.0, function="f@1", signals=("s",), at=1.0), again.get(turn)))
        assert (watch.snapshot()["people"] == before) is (turn == "picked")


@pytest.mark.parametrize("watch", [gap(("survived",)), FeedbackGapWatch(MonitorsConfig())], ids=["outcome", "feedback"])
def test_late_feedback_on_a_turn_of_the_other_side_does_not_count_after_a_person_changed_sides(watch):
    """Control's share was changed between the turn and its feedback."""
    owners, turns = TurnOwners(10), {}
    for arm in (Arm.LIVE, Arm.CONTROL):
        turns[arm] = replace(a_turn(arm.value, user="ann", arm=arm, ended_at=1.0), propensity=0.5)
        watch.turn(turns[arm])
        owners.see(turns[arm])
    before = deepcopy(watch.snapshot()["people"])
    for arm in (Arm.LIVE, Arm.CONTROL):
        owner = owners.get(arm.value)
        if isinstance(watch, OutcomeGapWatch):
            watch.signal(a_signal(turns[arm], "survived", at=2.0, value=1.0), owner)
            assert (watch.snapshot()["people"] == before) is (arm is Arm.LIVE)
        list(watch.reward(Reward(turn=arm.value, value=1.0, function="f@1", signals=("s",), at=2.0), owner))
        assert (watch.snapshot()["people"] == before) is (arm is Arm.LIVE)


# ---------------------------------------------------------------- the feedback gap


def spoken(watch, rng, heard, *, first=0, count=7, crowd=300, purpose=Purpose.TASK, turns=(3, 3)):
    """Days of so many turns for each person on live (even numbers) and control, who say something of one with these probabilities."""
    told = []
    for day in range(first, first + count):
        for number in range(crowd):
            side = number % 2
            for part in range(turns[side]):
                at, arm = (day + number / crowd) * DAY, (Arm.LIVE, Arm.CONTROL)[side]
                turn = a_turn(f"{day}:{number}:{part}", user=f"u{number}", arm=arm, ended_at=at)
                turn = replace(turn, propensity=0.5, purpose=purpose)
                watch.turn(turn)
                said = ("s",) if rng.random() < heard[side] else ()
                owner = Owner(person=turn.person, episode="e", live=side == 0, control=side == 1)
                told += watch.reward(Reward(turn=turn.id, value=0.0, function="f@1", signals=said, at=at), owner)
    return told


def test_feedback_gap_is_told_where_people_on_live_fall_silent_and_pauses_nothing():
    watch, rng = FeedbackGapWatch(MonitorsConfig()), np.random.default_rng(0)
    assert spoken(watch, rng, (0.6, 0.6), count=6) == []
    (raised,) = spoken(watch, rng, (0.4, 0.6), first=7, count=6)
    assert (raised.name, raised.state, raised.detail["pauses"]) == (FEEDBACK_GAP, AlarmState.RAISED, False)
    assert raised.detail["difference"] < -UNHEARD
    assert "people on live give feedback on" in raised.reason
    again = FeedbackGapWatch(MonitorsConfig())
    again.restore(json.loads(json.dumps(watch.snapshot())))
    assert again.standing == watch.standing == [FEEDBACK_GAP]
    assert again.snapshot() == watch.snapshot()
    (cleared,) = spoken(watch, rng, (0.6, 0.6), first=14, count=16)
    assert cleared.state is AlarmState.CLEARED
    again.alarm(acceptance(raised, "ann", 14 * DAY))
    assert spoken(again, rng, (0.4, 0.6), first=14, count=6) == [], "what was accepted is expected"
    assert acceptable(FEEDBACK_GAP)


def test_feedback_gap_is_not_told_of_a_tolerated_difference_of_silence_everywhere_or_of_other_turns():
    for heard in ((0.59, 0.6), (0.0, 0.0), (1.0, 0.2)):
        assert spoken(FeedbackGapWatch(MonitorsConfig()), np.random.default_rng(1), heard, count=13) == []
    side_calls = FeedbackGapWatch(MonitorsConfig())
    assert spoken(side_calls, np.random.default_rng(1), (0.0, 0.6), purpose=Purpose.SIDE) == []
    off = FeedbackGapWatch(MonitorsConfig(enabled=False))
    assert spoken(off, np.random.default_rng(1), (0.0, 0.6)) == []


def test_feedback_on_turns_of_another_purpose_does_not_raise_the_share_of_tasks_with_feedback():
    watch, owners = FeedbackGapWatch(MonitorsConfig()), TurnOwners(10)
    for purpose in Purpose:
        turn = replace(a_turn(purpose.value, user="ann", arm=Arm.LIVE), propensity=0.5, purpose=purpose)
        watch.turn(turn)
        owners.see(turn)
    again = TurnOwners(10)
    again.restore(json.loads(json.dumps(owners.snapshot())))
    for purpose in sorted(Purpose, key=lambda each: each is Purpose.TASK):
        reward = Reward(turn=purpose.value, value=1.0, function="f@1", signals=("s",), at=1.0)
        list(watch.reward(reward, again.get(purpose.value)))
        ((_, counts),) = watch._people
        assert (counts.turns, counts.heard) == (1.0, float(purpose is Purpose.TASK)), purpose


def test_feedback_gap_of_a_busy_minority_is_not_everybodys_and_who_is_forgotten_is_dropped():
    watch, rng = FeedbackGapWatch(MonitorsConfig(turns_a_day=2)), np.random.default_rng(2)
    spoken(watch, rng, (0.6, 0.6), count=1, crowd=40)
    assert {each.weight for _, each in watch._people} == {2.0}, "a person's further turns of a day weigh nothing"
    assert all(each.heard <= each.turns for _, each in watch._people)
    watch.forget(Forgotten(id="f", tenant="default", user="u0", key=1, at=0.0))
    assert ("default", "u0") not in {person for person, _ in watch._people}


def test_feedback_gap_of_people_with_more_turns_a_day_than_count_is_that_of_all_their_turns():
    config = MonitorsConfig(turns_a_day=4)
    for turns in ((12, 12), (6, 18)):
        equal = spoken(FeedbackGapWatch(config), np.random.default_rng(3), (0.5, 0.5), crowd=200, count=4, turns=turns)
        assert equal == [], f"{turns} turns a day"
    (raised,) = spoken(
        FeedbackGapWatch(config), np.random.default_rng(4), (0.4, 0.6), crowd=200, count=4, turns=(12, 12)
    )
    assert raised.detail["difference"] == pytest.approx(-0.2, abs=0.05)


def test_feedback_gap_goes_through_the_monitors_which_ship_on():
    monitors, rng, rows = Monitors(MonitorsConfig(outcomes=()), ()), np.random.default_rng(0), []
    for number in range(1_200):
        arm = (Arm.LIVE, Arm.CONTROL)[number % 2]
        turn = replace(a_turn(f"t{number}", user=f"u{number % 300}", arm=arm, ended_at=60.0 * number), propensity=0.5)
        said = ("s",) if rng.random() < (0.2, 0.7)[number % 2] else ()
        rows += [turn, Reward(turn=turn.id, value=0.0, function="f@1", signals=said, at=60.0 * number)]
    told = [alarm.name for seq, row in enumerate(rows) for alarm in monitors.apply(seq, row)]
    assert told == monitors.standing == [FEEDBACK_GAP]
    assert not monitors.paused
    again = Monitors(MonitorsConfig(outcomes=()), ())
    assert again.restore(json.loads(json.dumps(monitors.snapshot())))
    assert again.standing == [FEEDBACK_GAP]
