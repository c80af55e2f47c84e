"""What one person may teach over many batches: an equal share, whatever their traffic and however many names somebody invents."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ostinato.core.records import Batch, PolicyVersion
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit.baseline import Baseline, context_of
from ostinato.reward.credit.episodes import by_episode
from ostinato.reward.credit.recent import RecentShares, masses_of, scales_of
from ostinato.reward.credit.single import SingleRollout
from ostinato.testing.records import a_turn

V0 = PolicyVersion(number=0, hash="00")


def person(name):
    return ("t", name)


def crowd(count, mass=1.0):
    return {person(f"u{n}"): mass for n in range(count)}


def test_before_the_first_step_everything_is_allowed_and_with_a_memory_of_0_always():
    assert RecentShares(50).allowed(person("ann")) == float("inf")
    off = RecentShares(0)
    off.observe(crowd(3))
    assert off.allowed(person("u0")) == float("inf")
    assert off.share(person("u0")) == 0.0


def test_equal_people_may_have_equal_shares():
    recent = RecentShares(50)
    for _ in range(10):
        recent.observe(crowd(100))
    assert recent.level == pytest.approx(0.01)
    assert recent.share(person("u7")) == pytest.approx(0.01)
    assert recent.allowed(person("u7")) == pytest.approx(0.01)
    assert recent.allowed(person("new")) == pytest.approx(0.11), "who was not there may catch up with the steps so far"
    for _ in range(90):
        recent.observe(crowd(100))
    assert recent.allowed(person("new")) == pytest.approx(0.5), "and with as many as are remembered"
    assert sum(recent.share(each) for each in crowd(100)) == pytest.approx(1.0)


def test_the_first_steps_give_nobody_more_than_the_level_either():
    recent = RecentShares(50)
    recent.observe(crowd(100))
    for _ in range(60):
        total = 100.0 / (1.0 - recent.allowed(person("keen")))
        recent.observe({**crowd(100), person("keen"): recent.allowed(person("keen")) * total})
        assert recent.share(person("keen")) <= 1.05 * recent.level


def test_who_is_always_there_comes_to_the_level_and_no_further():
    """Everybody else comes once in ten steps; one person would be a third of every batch."""
    recent = RecentShares(50)
    for step in range(600):
        others = {person(f"u{n}"): 1.0 for n in range(step % 10, 1_000, 10)}
        wanted = 50.0
        total = wanted + 100.0
        recent.observe({**others, person("keen"): min(wanted, recent.allowed(person("keen")) * total)})
    assert recent.level < 0.003
    assert recent.share(person("keen")) <= 1.6 * recent.level, "the level is of all before it is taken off"


def test_invented_names_do_not_shrink_what_others_may_have():
    """A third of each batch is by names that never come again: a count of names would be thirty times as many people."""
    honest, flooded = RecentShares(50), RecentShares(50)
    for step in range(200):
        mine = {person(f"u{n}"): 1.0 for n in range(step % 5, 500, 5)}
        honest.observe(mine)
        flooded.observe(mine | {person(f"s{step}-{n}"): 1.0 for n in range(50)})
    assert honest.level == pytest.approx(0.002, rel=0.1)
    assert flooded.level > 0.35 * honest.level


def test_a_saving_gives_the_same_answers_and_what_is_gone_is_forgotten():
    recent = RecentShares(5)
    recent.observe({person("ann"): 3.0, person("bob"): 1.0})
    again = RecentShares(5)
    again.restore(json.loads(json.dumps(recent.snapshot())))
    for name in ("ann", "bob", "eve"):
        assert again.allowed(person(name)) == recent.allowed(person(name))
    for _ in range(100):
        recent.observe({person("bob"): 1.0})
    assert [row[1] for row in recent.snapshot()["shares"]] == ["bob"]
    recent.observe({})
    assert recent.share(person("bob")) == pytest.approx(1.0)


def test_an_episode_counts_once():
    ann, bob = person("ann"), person("bob")
    assert masses_of([(ann, "e1"), (ann, "e1"), (ann, "e2"), (bob, "e3")]) == {ann: 2.0, bob: 1.0}


@pytest.mark.parametrize("users", [50, 500])
@pytest.mark.parametrize(("accepted", "sign"), [(0.20, -1), (0.30, +1)])
def test_caps_do_not_turn_what_is_learned(users, accepted, sign):
    """Suggesting pays where more than a quarter is accepted: 0.75 if it is, -0.25 if not, 0 for saying nothing, which is short."""
    rng, config = np.random.default_rng(1), RewardConfig()
    baseline, recent, steps = Baseline(config.baseline), RecentShares(config.user_steps), []
    for step in range(160):
        turns, rewards, suggested = [], {}, {}
        for i in range(144):
            suggests = bool(rng.random() < 0.5)
            tokens = range(8 if suggests else 2)
            turn = a_turn(f"{step}-{i}:0", user=f"u{rng.integers(users)}", prompt=(1, 2, i), sampled=tokens)
            turns.append(replace(turn, episode=turn.id))
            suggested[turn.id] = suggests
            rewards[turn.id] = (0.75 if rng.random() < accepted else -0.25) if suggests else 0.0
        found = SingleRollout(config, baseline, recent)(by_episode(turns), rewards)
        if step >= 40:
            steps.append(np.mean([found[id][0] * (0.5 if suggests else -0.5) for id, suggests in suggested.items()]))
        for turn in turns:
            baseline.observe(context_of(turn), rewards[turn.id])
        masses = masses_of([(turn.person, turn.episode) for turn in turns])
        scales = scales_of(masses, recent, config)
        recent.observe({person: mass * scales[person] for person, mass in masses.items()})
    assert sign * np.mean(steps) > 2.0 * np.std(steps) / len(steps) ** 0.5


def test_credit_keeps_to_what_is_allowed():
    recent = RecentShares(50)
    for _ in range(50):
        recent.observe({("default", f"u{n}"): 1.0 for n in range(100)} | {("default", "keen"): 2.0})
    names = [f"new{n}" for n in range(20)] + ["keen"] * 20
    turns = [replace(a_turn(f"{n}:0", user=name), episode=f"e{n}") for n, name in enumerate(names)]
    rewards = {turn.id: float(n % 2) for n, turn in enumerate(turns)}
    config = RewardConfig(user_cap=1.0, tenant_cap=1.0)
    free = SingleRollout(config, Baseline())(by_episode(turns), rewards)
    held = SingleRollout(config, Baseline(), recent)(by_episode(turns), rewards)
    mass = {
        name: [sum(map(abs, found[t.id])) for t in turns if t.user == name]
        for found in (held,)
        for name in ("new3", "keen")
    }
    whole = sum(sum(map(abs, credit)) for credit in free.values())
    assert sum(mass["keen"]) == pytest.approx(recent.allowed(("default", "keen")) * whole)
    assert mass["new3"] == [pytest.approx(sum(map(abs, free["3:0"])))]
    assert np.sign([held[t.id][0] for t in turns]).tolist() == np.sign([free[t.id][0] for t in turns]).tolist()


async def test_the_desk_learns_it_from_the_batches_that_the_log_holds(log, now, open_desk, turn):
    from ostinato.reward.reading import Reading
    from ostinato.testing.records import a_delivery, a_signal

    turns = [turn(i) for i in range(20)]
    await log.append(
        *turns,
        a_delivery(*turns),
        *(a_signal(each, "accepted" if i % 3 else "rejected") for i, each in enumerate(turns)),
    )
    desk = open_desk(log)
    now.at = 100.0
    await desk.batch(1, 20, V0)
    assert len(log.of(Batch)) == 1
    reading = Reading(log, RewardConfig())
    await reading.catch_up()
    shares = [reading.ledger.recent.share(("default", f"u{n}")) for n in range(5)]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0.0
