"""Sameness across users: what the hashes estimate, that equal arms are not called alike, and that a collapse and a drift are."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ostinato.core.notices import AlarmState, Forgotten
from ostinato.core.records import Arm, Pick, PolicyVersion, ReleaseEvent
from ostinato.release.monitors.config import DAY, MonitorsConfig
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.sameness import TOLERATED, USERS_ALIKE, answer_hash, sameness
from ostinato.release.monitors.watcher import MonitorWatcher, acceptable, acceptance
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn

CONFIG = MonitorsConfig()


def shared(a, b):
    return np.mean([x == y for x, y in zip(bytes.fromhex(a), bytes.fromhex(b), strict=True)])


def test_equal_bytes_of_two_hashes_estimate_the_share_of_runs_in_common():
    """Answers of 100 tokens of which the first 50 are the same: 48 runs of 148."""
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        begin, one, other = rng.integers(0, 50_000, (3, 50)).tolist()
        found.append(shared(answer_hash(begin + one), answer_hash(begin + other)))
    assert np.mean(found) == pytest.approx(48 / 148 + 0.003, abs=0.025)
    assert answer_hash([5]) == answer_hash([5]) != answer_hash([6])
    assert len({answer_hash(ids) for ids in ([0], [0, 0], [1, 0], [0, 1], [0, 1, 2], [2, 1, 0])}) == 6
    words = rng.integers(0, 50_000, 5_000).tolist()
    assert answer_hash(words) == answer_hash(words[:1_024])


def answers(rng, people, alike, kinds=400, tenant="t", opening="o"):
    """One answer of 40 tokens each; with probability `alike` the one that everybody gets."""
    same = list(range(40))
    return [
        (tenant, opening, answer_hash(same if rng.random() < alike else rng.integers(0, kinds, 40).tolist()))
        for _ in range(people)
    ]


def test_the_interval_of_equal_arms_holds_zero_as_often_as_it_should():
    rng, told = np.random.default_rng(1), 0
    everybody = answers(rng, 3_000, 0.3)
    for _ in range(300):
        drawn = [everybody[n] for n in rng.permutation(3_000)[:120]]
        read = sameness(drawn[:80], drawn[80:])
        told += abs(read.difference) > 1.96 * read.variance**0.5
    assert told <= 30, "5% are wanted"


def test_people_are_compared_where_their_prompts_begin_alike_and_pooled_where_few_do():
    rng = np.random.default_rng(2)
    mixed = [each for k in range(2) for each in answers(rng, 60, 1.0, opening=f"o{k}")]
    mixed = [(tenant, opening, hashed if opening == "o0" else "00" * 16) for tenant, opening, hashed in mixed]
    assert sameness(mixed, mixed).similarity == 1.0, "two features, each with the one answer that it always gets"
    alone = [(tenant, f"{number}", hashed) for number, (tenant, _, hashed) in enumerate(mixed)]
    assert sameness(alone, alone).similarity == pytest.approx(0.5, abs=0.02)
    assert sameness(mixed[:19], mixed) is None
    assert sameness(answers(rng, 50, 1, tenant="a"), answers(rng, 50, 1, tenant="b")) is None


# ------------------------------------------------------------------------------------------------ the watch


def turns(rng, alike, *, people=400, at=0.0, arms=(Arm.LIVE, Arm.CONTROL)):
    """Everybody's turn within a day."""
    for n in range(people):
        arm = arms[n % 5 == 0]
        common = arm is Arm.LIVE and rng.random() < alike
        ids = tuple(range(40)) if common else tuple(rng.integers(100, 50_000, 40).tolist())
        made = a_turn(f"{at}-{n}:0", user=f"u{n}", arm=arm, ended_at=at + n * DAY / people)
        yield replace(made, propensity=0.8, prompt_ids=(1, 2), sampled_ids=ids)


def fed(watch, rng, alike, **how):
    """The alarms that `turns` raise."""
    rows = [row for n, turn in enumerate(turns(rng, alike, **how)) for row in watch.apply(n, turn)]
    return [row for row in rows if row.name == USERS_ALIKE]


def went_live(number, at, action="shipped"):
    policy = PolicyVersion(number=number, hash=f"{number:02}" * 16)
    return ReleaseEvent(id=f"s{number}", action=action, policy=policy, previous=None, reason="", detail={}, at=at)


def test_a_collapse_is_told_with_its_interval_and_pauses_nothing():
    watch, rng = Monitors(CONFIG, ()), np.random.default_rng(3)
    watch.apply(1, went_live(7, 0.0))
    (row,) = fed(watch, rng, 0.5)
    assert (row.state, row.detail["pauses"], row.detail["policy"]) == (AlarmState.RAISED, False, "v7@070707070707")
    assert row.detail["difference"] > 0.1
    assert "on control" in row.reason
    assert not watch.paused
    assert watch.standing == [USERS_ALIKE]
    again = Monitors(CONFIG, ())
    assert again.restore(json.loads(json.dumps(watch.snapshot())))
    assert again.snapshot() == watch.snapshot()


def test_one_answer_for_everybody_is_told_though_nothing_varies():
    watch = Monitors(CONFIG, ())
    (row,) = fed(watch, np.random.default_rng(10), 1.0, people=200)
    assert row.detail["similarity"] == 1.0


def test_a_drift_of_many_releases_is_told_and_every_release_has_its_reading():
    """Each release gives five more in a hundred the same answer: a pair is alike with the square of the share."""
    watch, rng, told = Monitors(CONFIG, ()), np.random.default_rng(4), []
    for number in range(1, 11):
        watch.apply(number, went_live(number, DAY * number))
        told += [(number, row.state) for row in fed(watch, rng, 0.05 * number, people=200, at=DAY * number)]
    assert len(told) == 1
    assert told[0][1] is AlarmState.RAISED
    assert 4 <= told[0][0] <= 8
    watch.apply(99, went_live(11, DAY * 11))
    readings = watch.readings
    assert [read.policy.partition("@")[0] for read in readings] == [f"v{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)][
        -len(readings) :
    ]
    assert readings[-1].difference > readings[0].difference + 0.1


def test_equal_arms_raise_nothing_over_twenty_releases():
    watch, rng = Monitors(CONFIG, ()), np.random.default_rng(5)
    for number in range(1, 21):
        watch.apply(number, went_live(number, DAY * number))
        assert fed(watch, rng, 0.0, people=130, at=DAY * number) == []
    assert len(watch.readings) >= 18
    assert max(abs(read.difference) for read in watch.readings) < TOLERATED


def test_a_release_that_few_were_served_is_read_together_with_the_next():
    watch, rng = Monitors(CONFIG, ()), np.random.default_rng(6)
    fed(watch, rng, 0.0, people=100)
    watch.apply(1, went_live(2, DAY))
    assert watch.readings == []
    fed(watch, rng, 0.0, people=200, at=DAY)
    watch.apply(2, went_live(3, 2 * DAY))
    assert len(watch.readings) == 1


def on_topics(rng, topics, people, at):
    """A day on which each answer's first half is the one text of one of the day's topics, on live and control alike."""
    for n, turn in enumerate(turns(rng, 0.0, people=people, at=at)):
        common = tuple(topics[rng.integers(len(topics))].tolist())
        yield replace(turn, user=f"{at}-{n}", sampled_ids=(*common, *turn.sampled_ids[:20]))


@pytest.mark.parametrize(
    ("most", "erased"),
    [(20_000, False), (150, False), (150, True)],
    ids=["room for all", "no room", "no room, and some erased"],
)
def test_what_people_ask_may_change_from_day_to_day(most, erased):
    """A release goes live on the sixth day, after which its answers are all on one day's topics; or its first day fills all places."""
    watch, rng, seq = Monitors(MonitorsConfig(most_people=most), ()), np.random.default_rng(11), 0
    for day in range(7):
        if day == (1 if most < 1_000 else 5):
            assert watch.apply(seq, went_live(day, DAY * day)) == []
        for turn in on_topics(rng, rng.integers(100, 50_000, (2, 20)), 200, DAY * day):
            seq += 1
            assert watch.apply(seq, turn) == []
        for n in (10 * day + 1, 10 * day + 2) if erased else ():  # on live; makes room for two of the next day
            watch.apply(seq, Forgotten(id="f", tenant="default", user=f"{DAY}-{n}", key=1, at=1.0))
        saved = json.loads(json.dumps(watch.snapshot()))
        watch = Monitors(MonitorsConfig(most_people=most), ())
        assert watch.restore(saved)
    watch.apply(seq + 1, went_live(8, DAY * 7))
    assert watch.readings[-1].similarity > 0.05
    assert abs(watch.readings[-1].difference) < 0.02


def test_a_release_during_which_few_were_on_control_is_read_together_with_the_next():
    watch, rng = Monitors(CONFIG, ()), np.random.default_rng(12)
    for day, readings in ((1, 0), (2, 1)):
        for n, turn in enumerate(turns(rng, 0.0, people=150, at=DAY * day)):
            if turn.arm is Arm.LIVE or n < 75:  # fifteen on control a day
                watch.apply(n, replace(turn, user=f"{day}-{n}"))
        watch.apply(day, went_live(day, DAY * (day + 1)))
        assert len(watch.readings) == readings
    assert (watch.readings[0].live, watch.readings[0].control) == (240, 30)


async def test_the_workers_log_has_the_reading_of_each_release_once(caplog):
    caplog.set_level("INFO")
    log, rng = MemoryLog(), np.random.default_rng(9)
    watch = MonitorWatcher(log, CONFIG)
    for number in (1, 2, 3):
        await log.append(went_live(number, DAY * number))
        await log.append(*turns(rng, 0.0, people=130, at=DAY * number))
        await watch.refresh()
        await watch.refresh()
    said = [line.message for line in caplog.records if "two answers to different people" in line.message]
    assert len(said) == 2
    assert "among 104 people on v2@020202020202" in said[1]
    assert "among 26 on control: -0.2 pp [-" in said[1]


def test_it_ends_with_a_release_that_does_not_show_it_or_with_a_persons_acceptance():
    watch, rng = Monitors(CONFIG, ()), np.random.default_rng(7)
    (row,) = fed(watch, rng, 0.6)
    taken_back = went_live(1, DAY, "rolled_back")
    assert watch.apply(9, taken_back) == [], "that count showed it"
    assert watch.standing == [USERS_ALIKE]
    fed(watch, rng, 0.0, at=DAY)
    (cleared,) = watch.apply(10, went_live(3, 2 * DAY))
    assert (cleared.name, cleared.state) == (USERS_ALIKE, AlarmState.CLEARED)
    assert acceptable(USERS_ALIKE)
    watch = Monitors(CONFIG, ())
    (row,) = fed(watch, rng, 0.6)
    watch.apply(11, acceptance(row, "ann", 5.0))
    assert watch.standing == []
    assert fed(watch, rng, 0.6, at=DAY) == []


def test_who_was_forgotten_or_not_dealt_by_chance_does_not_count():
    watch, rng = Monitors(CONFIG, ()), np.random.default_rng(8)
    fed(watch, rng, 0.0, people=50)
    kept = watch.snapshot()["sameness"]["sides"]
    assert [len(side) for side in kept] == [40, 10]
    assert {len(hashed) for side in kept for *_, hashed, _ in side} == {32}
    watch.apply(1, Forgotten(id="f", tenant="default", user="u1", key=1, at=1.0))
    assert [len(side) for side in watch.snapshot()["sameness"]["sides"]] == [39, 10]
    fed(watch, rng, 0.0, people=50, arms=(Arm.CANARY, Arm.PREVIOUS))
    assert [len(side) for side in watch.snapshot()["sameness"]["sides"]] == [39, 10]
    picked = Pick(arm="live", odds={"live": 0.8, "control": 0.2})
    for n, turn in enumerate(turns(rng, 0.0, people=50)):
        watch.apply(2 + n, replace(turn, user=f"by auto {n}", auto=picked))
    assert [len(side) for side in watch.snapshot()["sameness"]["sides"]] == [39, 10]
