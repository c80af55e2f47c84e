"""What one person may teach over many batches: an equal share, whatever their traffic and however many names somebody invents."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tests.grids import covering

from ostinato.core.records import Batch, PolicyVersion
from ostinato.reward.baseline import Baseline, context_of
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode
from ostinato.reward.recent_shares import RecentShares, masses_of, scales_of
from ostinato.testing.records import a_turn

V0 = PolicyVersion(number=0, hash="00")


def person(name):
    return ("t", name)


def crowd(count, mass=1.0):
    return {person(f"u{n}"): mass for n in range(count)}


def step(recent, wanted):
    """A batch of what each person wants, cut, and what was kept of it."""
    kept = recent.cut(wanted)
    recent.observe(wanted, {each: kept[each] / wanted[each] for each in wanted})
    return kept


def allowed(recent, name, others=99.0):
    """The most that somebody who wants all may have of a batch with so many episodes of others."""
    keen = 1_000.0 * others
    return recent.cut({person(name): keen, person("others"): others})[person(name)] / (keen + others)


def test_with_a_memory_of_0_nothing_is_cut():
    off = RecentShares(0)
    off.observe(crowd(3))
    assert off.cut({person("u0"): 9.0, person("u1"): 1.0}) == {person("u0"): 9.0, person("u1"): 1.0}
    assert off.share(person("u0")) == 0.0


def test_the_first_batch_cuts_to_twice_an_equal_share_of_it_and_neither_one_person_nor_two():
    """It was learned from as it came: 14 of 144 turns, which were a third of what that person had of a hundred steps."""
    recent = RecentShares(50)
    kept = recent.cut(crowd(130) | {person("keen"): 14.0})
    assert kept[person("keen")] == pytest.approx(2 * (130 + 14**2) / 144)
    assert kept[person("u3")] == 1.0
    for alone in ({person("ann"): 7.0}, {person("ann"): 7.0, person("bob"): 1.0}):
        assert recent.cut(alone) == alone


def test_equal_people_may_have_equal_shares():
    recent = RecentShares(50)
    for _ in range(100):
        assert step(recent, crowd(100)) == pytest.approx(crowd(100))
    assert recent.level == pytest.approx(0.01)
    assert recent.share(person("u7")) == pytest.approx(0.01)
    assert allowed(recent, "u7") == pytest.approx(0.01)
    assert sum(recent.share(each) for each in crowd(100)) == pytest.approx(1.0)


def test_to_come_late_buys_nothing():
    """Who came after a hundred steps had fifty steps' worth in the first batch; it is ten, and then one a step."""
    recent, had = RecentShares(50), []
    for _ in range(100):
        step(recent, crowd(100))
    assert allowed(recent, "late") == pytest.approx(0.10, rel=0.01)
    for _ in range(150):
        kept = step(recent, {**crowd(100), person("late"): 50.0})
        had.append(kept[person("late")] / 150.0)
    assert had[0] == pytest.approx(10 * 0.01)
    for steps in (5, 25, 50, 100):
        assert sum(had[:steps]) < (10 + steps) * 0.0125
    assert np.mean(had[-50:]) == pytest.approx(recent.level, rel=0.1)


def test_one_episode_of_somebody_new_is_whole_however_small_the_batches():
    recent = RecentShares(50)
    for number in range(200):
        step(recent, {person(f"u{n % 500}"): 1.0 for n in range(16 * number, 16 * number + 16)})
    kept = recent.cut({person("new"): 1.0, **{person(f"u{n}"): 1.0 for n in range(15)}})
    assert kept[person("new")] == pytest.approx(1.0)


def test_the_first_steps_give_nobody_more_than_the_level_either():
    recent = RecentShares(50)
    recent.observe(crowd(100))
    for _ in range(60):
        step(recent, {**crowd(100), person("keen"): 50.0})
        assert recent.share(person("keen")) <= 1.05 * recent.level


def test_who_is_always_there_comes_to_the_level_and_no_further():
    """Everybody else comes once in ten steps; one person would be a third of every batch."""
    recent = RecentShares(50)
    for number in range(600):
        step(recent, {person(f"u{n}"): 1.0 for n in range(number % 10, 1_000, 10)} | {person("keen"): 50.0})
    assert recent.level < 0.003
    assert recent.share(person("keen")) <= 1.05 * recent.level


def test_what_is_cut_of_the_busy_does_not_cut_the_others():
    """People as people are, log-normal: nobody below an equal share of what comes is cut, although half of it is cut in all.

    Shares of what was left made everybody's larger than that, so that 62% was cut here, of people below an equal share, too; and the
    busiest, who were then beyond it in each batch, had three of them.
    """
    rng, recent = np.random.default_rng(3), RecentShares(50)
    odds = rng.lognormal(0.0, 1.2, 1_000)
    odds /= odds.sum()
    odds[np.argmax(odds)] = 0.075
    odds /= odds.sum()
    came, kept = np.zeros(1_000), np.zeros(1_000)
    for number in range(300):
        wanted = Counter(int(user) for user in rng.choice(1_000, size=144, p=odds))
        left = step(recent, {person(str(user)): float(count) for user, count in wanted.items()})
        if number >= 100:
            for user, count in wanted.items():
                came[user] += count
                kept[user] += left[person(str(user))]
    few = odds < 0.5 * recent.level
    assert kept[few].sum() > 0.97 * came[few].sum()
    assert kept.sum() > 0.55 * came.sum()
    assert kept[np.argmax(odds)] < 2.0 * recent.level * kept.sum()


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
    recent.observe({person("eve"): 5.0, person("bob"): 1.0}, {person("eve"): 0.5, person("bob"): 1.0})
    again.observe({person("eve"): 5.0, person("bob"): 1.0}, {person("eve"): 0.5, person("bob"): 1.0})
    again.restore(json.loads(json.dumps(again.snapshot())))
    wanted = {person(name): 9.0 for name in ("ann", "bob", "eve", "new")}
    assert again.cut(wanted) == recent.cut(wanted)
    for _ in range(100):
        recent.observe({person("bob"): 1.0})
    assert [row[1] for row in recent.snapshot()["shares"]] == ["bob"]
    recent.observe({})
    assert recent.share(person("bob")) == pytest.approx(1.0)


def test_an_episode_counts_once():
    ann, bob = person("ann"), person("bob")
    turns = [(ann, "e1"), (ann, "e1"), (ann, "e2"), (bob, "e3")]
    assert masses_of(turns, even=False) == {ann: 2.0, bob: 1.0}
    assert masses_of(turns, even=True) == {ann: 2.25, bob: 0.75}


@pytest.mark.parametrize(("users", "accepted", "sign"), covering([50, 500], [(0.20, -1), (0.30, +1)]))
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
            turns.append(turn)  # each is an episode of its own
            suggested[turn.id] = suggests
            rewards[turn.id] = (0.75 if rng.random() < accepted else -0.25) if suggests else 0.0
        found = SingleRollout(config, baseline, recent)(by_episode(turns), rewards)
        if step >= 40:
            steps.append(np.mean([found[id][0] * (0.5 if suggests else -0.5) for id, suggests in suggested.items()]))
        for turn in turns:
            baseline.observe(context_of(turn), rewards[turn.id], len(turn.sampled_ids))
        masses = masses_of([(turn.person, turn.episode) for turn in turns], even=True)
        scales = scales_of(masses, recent, config)
        recent.observe(masses, scales)
    assert sign * np.mean(steps) > 2.0 * np.std(steps) / len(steps) ** 0.5


def test_credit_keeps_to_what_is_allowed():
    recent = RecentShares(50)
    for _ in range(50):
        recent.observe({("default", f"u{n}"): 1.0 for n in range(100)} | {("default", "keen"): 2.0})
    names = [f"new{n}" for n in range(20)] + ["keen"] * 20
    turns = [replace(a_turn(f"{n}:0", user=name, prompt=(n, 1)), episode=f"e{n}") for n, name in enumerate(names)]
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
    kept = recent.cut({("default", f"new{n}"): 1.0 for n in range(20)} | {("default", "keen"): 20.0})
    assert sum(mass["keen"]) == pytest.approx(kept["default", "keen"] / 40.0 * whole)
    assert mass["new3"] == [pytest.approx(sum(map(abs, free["3:0"])))]
    assert np.sign([held[t.id][0] for t in turns]).tolist() == np.sign([free[t.id][0] for t in turns]).tolist()


async def test_the_desk_learns_it_from_the_batches_that_the_log_holds(log, now, open_desk, turn):
    from ostinato.reward.log_fold import LedgerFollower
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
    reading = LedgerFollower(log, RewardConfig())
    await reading.catch_up()
    shares = [reading.ledger.recent.share(("default", f"u{n}")) for n in range(5)]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0.0
