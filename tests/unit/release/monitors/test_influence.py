"""Who teaches most: the share of each person and tenant over many steps, and the alarm about it."""

import json
from dataclasses import replace

import pytest

from ostinato.core.notices import AlarmState
from ostinato.core.records import Arm, Batch, PolicyVersion
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.influence import BY_PERSON, BY_TENANT, InfluenceWatch, Shares, TurnOwners
from ostinato.release.monitors.watcher import acceptance
from ostinato.testing.records import a_turn

V0 = PolicyVersion(number=0, hash="00")
CONFIG = MonitorsConfig(influence_steps=5)


class Steps:
    """Batches of one turn of each of a crowd, and of as many more of one person."""

    def __init__(self, watch=None, crowd=100):
        self.watch, self.owners, self.crowd, self.step = watch or InfluenceWatch(CONFIG), TurnOwners(100_000), crowd, 0

    def take(self, count, more=0, tenant="default", episode=None, even=True):
        told = []
        for _ in range(count):
            self.step += 1
            names = [f"u{n}" for n in range(self.crowd)] + ["keen"] * more
            ids = tuple(f"s{self.step}-{n}" for n in range(len(names)))
            for id, name in zip(ids, names, strict=True):
                turn = replace(a_turn(id, user=name), tenant=tenant if name == "keen" else "default")
                self.owners.see(turn if episode is None or name != "keen" else replace(turn, episode=episode))
            batch = Batch(
                step=self.step,
                turns=ids,
                credits=((0.5, -0.5),) * len(ids),
                reference=V0,
                at=float(self.step),
                even=even,
            )
            told += self.watch.batch(batch, self.owners)
        return told


def test_a_share_is_that_of_absolute_advantage_weighted_as_in_the_loss_and_the_unknown_count_to_the_whole():
    owners, watch = TurnOwners(10), InfluenceWatch(MonitorsConfig(influence_steps=1))
    for name, user, episode in (("a", "ann", "e1"), ("b", "ann", "e1"), ("c", "bob", "e2")):
        owners.see(replace(a_turn(name, user=user), episode=episode))
    credits = {"a": (1.0, -1.0), "b": (2.0,), "c": (0.5,), "gone": (-0.5,)}
    batch = Batch(step=1, turns=tuple(credits), credits=tuple(credits.values()), reference=V0, at=0.0)
    list(watch.batch(batch, owners))
    steps, by_name = watch.snapshot()["shares"][BY_PERSON]
    assert steps == 1
    assert by_name == pytest.approx({"7 default ann": 2 / 3, "7 default bob": 1 / 6})
    assert watch.snapshot()["shares"][BY_TENANT][1] == pytest.approx({"default": 5 / 6})
    list(watch.batch(replace(batch, step=2, even=True), owners))
    assert watch.snapshot()["shares"][BY_PERSON][1] == pytest.approx({"7 default ann": 4 / 5, "7 default bob": 1 / 10})


@pytest.mark.parametrize("recorded", [False, True])
def test_a_rollouts_turns_count_in_full_beside_peoples_as_in_the_loss(recorded):
    """Ten people with a session of ten turns each: in the loss a turn of theirs weighs a tenth of a rollout's."""
    owners, watch = TurnOwners(1000), InfluenceWatch(MonitorsConfig(influence_steps=1))
    served = [replace(a_turn(f"p{n}", user=f"u{n % 10}"), episode=f"e{n % 10}") for n in range(100)]
    simulated = [replace(a_turn(f"w{n}", arm=Arm.WORLD), episode=f"r{n % 2}") for n in range(20)]
    for turn in served:
        owners.see(turn)
    for turn in (*served, *simulated):
        watch.turn(turn)
    batch = Batch(
        step=1,
        turns=tuple(turn.id for turn in (*served, *simulated)),
        credits=((1.0,),) * 100 + ((0.25,),) * 20,
        reference=V0,
        at=0.0,
        even=True,
        weights=(0.1,) * 120 if recorded else (),
    )
    again = InfluenceWatch(MonitorsConfig(influence_steps=1))
    again.restore(json.loads(json.dumps(watch.snapshot())))
    list(again.batch(batch, owners))
    shares = again.snapshot()["shares"][BY_PERSON][1]
    assert shares == pytest.approx({f"7 default u{n}": 1.0 / (10 + 20 * 0.25) for n in range(10)})


def test_one_person_in_batch_after_batch_raises_an_alarm_that_names_turns_and_nobody():
    steps = Steps()
    assert steps.take(10) == []
    (raised,) = steps.take(10, more=20)
    assert (raised.name, raised.state, raised.detail["pauses"]) == (BY_PERSON, AlarmState.RAISED, True)
    assert raised.detail["share"] > raised.detail["level"] == 0.08
    assert len(raised.detail["turns"]) == 20
    assert {steps.owners.get(turn).person[1] for turn in raised.detail["turns"]} == {"keen"}
    assert "keen" not in str(raised)
    (cleared,) = steps.take(20)
    assert (cleared.name, cleared.state) == (BY_PERSON, AlarmState.CLEARED)


def test_a_single_batch_is_no_news_and_a_small_crowd_no_attack():
    steps = Steps()
    assert steps.take(1, more=40) == []
    small = Steps(crowd=10)
    assert small.take(20, more=4) == [], "four of fourteen, where four equal shares are four of eleven"


def test_one_long_talk_counts_by_its_turns_and_in_earlier_batches_as_one():
    assert Steps().take(10, more=40, episode="one talk", even=False) == []
    (raised,) = Steps().take(10, more=40, episode="one talk")
    assert raised.name == BY_PERSON


def test_one_tenant_that_teaches_most_is_told_where_there_are_many():
    steps = Steps(crowd=10)
    crowd = [f"t{n}" for n in range(20)]
    told = []
    for _ in range(8):
        steps.step += 1
        names = [(tenant, "u") for tenant in crowd] + [("big", f"v{n}") for n in range(40)]
        ids = tuple(f"s{steps.step}-{n}" for n in range(len(names)))
        for id, (tenant, user) in zip(ids, names, strict=True):
            steps.owners.see(replace(a_turn(id, user=user), tenant=tenant))
        batch = Batch(step=steps.step, turns=ids, credits=((1.0,),) * len(ids), reference=V0, at=0.0)
        told += steps.watch.batch(batch, steps.owners)
    (raised,) = told
    assert raised.name == BY_TENANT
    assert raised.detail["share"] == pytest.approx(2 / 3)


def test_who_begins_from_a_saving_goes_on_and_an_accepted_share_is_told_again_only_if_it_grows():
    steps = Steps()
    steps.take(6)
    (raised,) = steps.take(10, more=20)
    again = Steps(InfluenceWatch(CONFIG))
    again.watch.restore(json.loads(json.dumps(steps.watch.snapshot())))
    assert again.watch.standing == [BY_PERSON]
    again.watch.alarm(acceptance(raised, "ann", 9.0))
    assert again.watch.standing == []
    assert again.take(10, more=20) == []
    assert [row.state for row in again.take(20, more=80)] == [AlarmState.RAISED]


def test_without_a_saving_what_stands_in_the_log_stands_until_the_steps_say_otherwise():
    (raised,) = Steps().take(10, more=20)
    fresh = Steps()
    fresh.watch.begin({BY_PERSON: raised})
    assert fresh.watch.standing == [BY_PERSON]
    (cleared,) = fresh.take(6)
    assert cleared.state is AlarmState.CLEARED


def test_a_share_fades_once_it_is_gone_and_is_forgotten():
    shares = Shares(memory=2)
    shares.observe({"a": 1.0})
    assert shares.largest() == ("", 0.0), "one step of two"
    shares.observe({"a": 0.5, "b": 0.5})
    assert shares.largest() == ("a", 0.75)
    for _ in range(40):
        shares.observe({"b": 1.0})
    assert shares.by_name.keys() == {"b"}
