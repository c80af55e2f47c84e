"""Estimates of other shares from a log, where the truth is known."""

import numpy as np
import pytest
from tests.unit.release.auto.test_router import a_dealt_turn, a_reward

from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.records import Finish
from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.estimating import prospect
from ostinato.release.auto.posterior import drawn
from ostinato.testing.log import MemoryLog

LIKES = {"live": 0.8, "large": 0.4}
CONFIG = RouterConfig(low=0.0, high=1.0)


async def a_log(turns=1200, odds=(("live", 0.3), ("large", 0.7)), **options):
    rng, log = np.random.default_rng(1), MemoryLog()
    for i in range(turns):
        arm = drawn(dict(odds), float(rng.random()))
        turn = a_dealt_turn(f"t{i}:0", arm, user=f"u{i % 300}", odds=dict(odds), episode=f"e{i}", **options)
        await log.append(turn, a_reward(turn, float(rng.random() < LIKES[arm])))
    return log


async def a_partly_rated_log(rated, failing, turns=2000, seed=1):
    """`rated` and `failing` are shares by arm: of the answers that have a reward, and of the turns that end in an error."""
    rng, log, odds = np.random.default_rng(seed), MemoryLog(), {"live": 0.5, "large": 0.5}
    for i in range(turns):
        arm = drawn(odds, float(rng.random()))
        failed = rng.random() < failing.get(arm, 0.0)
        options = {"finish": Finish.ERROR, "sampled": ()} if failed else {}
        turn = a_dealt_turn(f"t{i}:0", arm, user=f"u{i % 300}", odds=odds, episode=f"e{i}", **options)
        await log.append(turn)
        if not failed and rng.random() < rated[arm]:
            await log.append(a_reward(turn, float(rng.random() < LIKES[arm])))
    return log


async def test_all_three_find_what_other_shares_would_have_earned():
    found = await prospect(await a_log(), {"live": 0.9, "large": 0.1}, CONFIG)
    for value in (found.ips, found.snips, found.dr):
        assert value.lower < 0.9 * 0.8 + 0.1 * 0.4 < value.upper
        assert value.upper - value.lower < 0.2
    assert found.earned.lower < 0.3 * 0.8 + 0.7 * 0.4 < found.earned.upper
    assert (found.turns, found.earned.users, found.advice) == (1200, 300, "")


async def test_arms_whose_episodes_differ_in_turns_are_compared_by_the_mean_per_turn_alone():
    """An episode is dealt once. Of twice as many turns half as good each, the odds of the draw say neither how many there would be."""
    rng, log, odds = np.random.default_rng(1), MemoryLog(), {"live": 0.5, "large": 0.5}
    for i in range(600):
        arm = drawn(odds, float(rng.random()))
        for k in range({"live": 2, "large": 6}[arm]):
            turn = a_dealt_turn(f"t{i}-{k}:0", arm, user=f"u{i}", odds=odds, episode=f"e{i}")
            await log.append(turn, a_reward(turn, float(rng.random() < LIKES[arm])))
    found = await prospect(log, {"live": 1.0}, CONFIG)
    assert (found.ips, found.dr) == (None, None)
    assert found.snips.lower < 0.8 < found.snips.upper
    assert found.advice.startswith("arms differ in turns per episode (large 6.0, live 2.0)")
    mixed = await prospect(log, {"live": 0.8, "large": 0.2}, CONFIG)
    assert mixed.snips.lower < (0.8 * 2 * 0.8 + 0.2 * 6 * 0.4) / (0.8 * 2 + 0.2 * 6) < mixed.snips.upper


async def test_an_answer_that_failed_counts_as_the_least_reward():
    log = await a_log(600)
    for i in range(300):
        await log.append(
            a_dealt_turn(
                f"f{i}:0", "live", user=f"u{i}", odds={"live": 0.3, "large": 0.7}, finish=Finish.ERROR, sampled=()
            )
        )
    sound, broken = await prospect(await a_log(600), {"live": 1.0}, CONFIG), await prospect(log, {"live": 1.0}, CONFIG)
    assert broken.turns == 900
    assert broken.snips.mean < 0.5 * sound.snips.mean


async def test_money_is_taken_off():
    log = await a_log(cost=0.1)
    dear = await prospect(log, {"live": 1.0}, RouterConfig(low=0.0, high=1.0, price=2.0))
    cheap = await prospect(log, {"live": 1.0}, CONFIG)
    assert cheap.snips.mean - dear.snips.mean == pytest.approx(0.2)


async def test_an_arm_that_could_not_be_had_leaves_its_share_to_the_others():
    found = await prospect(await a_log(400, odds=(("large", 1.0),)), {"large": 1.0}, CONFIG)
    log = await a_log(400, odds=(("large", 1.0),))
    turn = a_dealt_turn("x:0", "live", odds={"live": 0.5, "large": 0.5})
    await log.append(turn, a_reward(turn, 1.0))
    shifted = await prospect(log, {"live": 0.5, "large": 0.5}, CONFIG)
    assert shifted.snips.mean == pytest.approx(found.snips.mean, abs=0.01)


async def test_what_hardly_happened_comes_with_advice():
    found = await prospect(await a_log(1200, odds=(("live", 0.003), ("large", 0.997))), {"live": 1.0}, CONFIG)
    assert "turns are worth only" in found.advice


async def test_an_arm_whose_answers_are_rated_more_often_is_worth_no_more_for_it():
    found = await prospect(await a_partly_rated_log({"live": 0.4, "large": 0.1}, {}), {"live": 1.0}, CONFIG)
    for value in (found.ips, found.snips, found.dr):
        assert value.lower < 0.8 < value.upper
        assert value.mean == pytest.approx(0.8, abs=0.06)
    assert found.earned.lower < 0.6 < found.earned.upper
    assert found.rated < 0.3 * found.turns
    assert "rewards are known for" in found.advice
    assert "large" in found.advice


async def test_arms_that_are_rated_alike_need_no_warning():
    found = await prospect(await a_partly_rated_log({"live": 0.4, "large": 0.4}, {}), {"live": 1.0}, CONFIG)
    assert found.advice == ""


async def test_a_failure_counts_once_however_few_answers_are_rated():
    log = await a_partly_rated_log({"live": 0.2, "large": 0.2}, {"live": 0.2})
    found = await prospect(log, {"live": 1.0}, CONFIG)
    for value in (found.ips, found.snips, found.dr):
        assert value.lower < 0.8 * 0.8 < value.upper
        assert value.mean == pytest.approx(0.8 * 0.8, abs=0.06)


async def test_an_arm_none_of_whose_rewards_is_known_has_no_estimate():
    log = await a_partly_rated_log({"live": 0.4, "large": 0.0}, {}, turns=100)
    with pytest.raises(NotFound, match="no reward of 'large'"):
        await prospect(log, {"live": 0.5, "large": 0.5}, CONFIG)
    assert (await prospect(log, {"live": 1.0}, CONFIG)).snips.mean > 0.5


async def test_what_cannot_be_estimated_is_said():
    log = await a_log(20)
    with pytest.raises(BadConfig, match="sum to 1"):
        await prospect(log, {"live": 0.5}, CONFIG)
    with pytest.raises(BadConfig, match="never an arm 'new'"):
        await prospect(log, {"new": 1.0}, CONFIG)
    with pytest.raises(NotFound, match="two users"):
        await prospect(MemoryLog(), {"live": 1.0}, CONFIG)


async def a_log_of_an_arm_that_learns(gain, turns=1500, seed=1):
    """Live gains so much over the log, while the router leaves it more and more."""
    rng, log = np.random.default_rng(seed), MemoryLog()
    taste = rng.uniform(-0.2, 0.2, 300)
    for i in range(turns):
        past = i / turns
        odds = {"live": 0.7 - 0.5 * past, "large": 0.3 + 0.5 * past}
        arm, user = drawn(odds, float(rng.random())), int(rng.integers(300))
        turn = a_dealt_turn(f"t{i}:0", arm, user=f"u{user}", odds=odds, episode=f"e{i}")
        worth = 0.4 + taste[user] + (gain * past if arm == "live" else 0.0)
        await log.append(turn, a_reward(turn, float(rng.random() < worth)))
    return log


async def test_an_arm_that_learns_while_the_router_leaves_it_ends_in_advice():
    found = await prospect(await a_log_of_an_arm_that_learns(0.3), {"live": 1.0}, CONFIG)
    assert found.advice.startswith("live's mean reward went from 0.4")
    assert "large's" not in found.advice
    told = 0
    for seed in range(12):
        still = await prospect(await a_log_of_an_arm_that_learns(0.0, 600, seed), {"live": 1.0}, CONFIG)
        told += still.advice != ""
    assert told <= 1, "told by chance in one log of fifty"


async def test_of_few_users_no_drift_is_told():
    log, odds = MemoryLog(), {"live": 0.5, "large": 0.5}
    for i in range(200):
        turn = a_dealt_turn(f"t{i}:0", ("live", "large")[i % 2], user=f"u{i % 9}", odds=odds, episode=f"e{i}")
        await log.append(turn, a_reward(turn, float(i >= 100)))
    assert (await prospect(log, {"live": 1.0}, CONFIG)).advice == ""
