"""The guard's error rates, under repeated looks at correlated users, and the joining of turns with signals."""

import gc
import itertools
import weakref

import numpy as np
import pytest

from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Signal, Source, Span, Turn
from ostinato.release import guard
from ostinato.release.guard import GuardConfig, GuardTest
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.pace import DAY
from ostinato.release.trial.contrast import TimeSlot
from ostinato.release.watch import Outcomes
from ostinato.testing.log import MemoryLog

V3, V5 = PolicyVersion(number=3, hash="aa"), PolicyVersion(number=5, hash="bb")


def slot(rng, rates, turns, live, number=0, expected=0.5):
    """Everybody's turns of one slot; the first of the users are on control."""
    came = np.flatnonzero(turns)
    return TimeSlot(
        day=number // 48,
        people_R=came,
        turns_R=turns[came].astype(float),
        good_R=rng.binomial(turns, rates)[came].astype(float),
        expected_R=np.broadcast_to(expected, len(turns))[came],
        treated_R=live[came],
    )


def alarm(rng, loss, *, users=80, looks=40, alike=False, known=False):
    """Watch one release for `looks` slots; the first look that condemns it, or None. `known`: each person's rate before it."""
    test = GuardTest(GuardConfig(), 0.0, most_turns_a_day=1e9)
    live = np.arange(users) >= users // 2
    rates = np.full(users, 0.5) if alike else rng.beta(2, 2, users)
    for look in range(looks):
        turns = rng.poisson(0.5, users)
        expected = rates if known else 0.5
        came = slot(rng, np.clip(rates - loss * live, 0, 1), turns, live, look, expected)
        test.add({"acceptance": came}, look * 1800.0)
        if test.harm():
            return look
    return None


@pytest.mark.parametrize("alike", [True, False])
def test_equal_version_is_condemned_in_at_most_five_percent_of_releases(alike):
    rng = np.random.default_rng(0)
    alarms = sum(alarm(rng, 0.0, alike=alike) is not None for _ in range(60))
    assert alarms / 60 <= 0.05


def test_loss_of_twenty_points_is_caught():
    rng = np.random.default_rng(1)
    caught = [alarm(rng, 0.20, known=True) for _ in range(30)]
    assert sum(look is not None for look in caught) >= 28
    assert np.median([look for look in caught if look is not None]) <= 24  # within 480 outcomes


def test_all_periods_together_spend_no_more_than_alpha(monkeypatch):
    """A half, a sixth, a twelfth, and so on, shared by the measures."""
    config, asked, rng = GuardConfig(alpha=0.04, period_s=10.0), [], np.random.default_rng(2)
    known = guard.upper_bound
    monkeypatch.setattr(guard, "upper_bound", lambda *told: asked.append(told[2]) or known(*told))
    test, live = GuardTest(config, 0.0, most_turns_a_day=1e9), np.arange(80) >= 40
    for period in range(3):
        worse = slot(rng, 0.8 - 0.7 * live, np.full(80, 4), live)
        test.add({"acceptance": worse, "success": worse}, 10.0 * period)
        assert test.harm().period == period
    assert asked == pytest.approx([0.01, 0.01 / 3, 0.01 / 6])


def test_too_few_users_or_outcomes_are_never_judged():
    rng, live = np.random.default_rng(3), np.arange(80) >= 40

    def found(**rules):
        test = GuardTest(GuardConfig(**rules), 0.0, most_turns_a_day=1e9)
        test.add({"acceptance": slot(rng, 0.8 - 0.7 * live, np.full(80, 4), live)}, 0.0)
        return test.harm()

    assert found(min_users=41) is None
    assert found(min_outcomes=161) is None
    assert str(found(min_outcomes=160)).startswith("acceptance worse by ")
    assert GuardTest(GuardConfig(), 0.0).harm() is None


def turn(name, *, user="u", tenant="t", arm=Arm.LIVE, policies=(V3,), finish=Finish.STOP, at=0.0):
    return Turn(
        id=name, episode=name, parent=None, user=user, tenant=tenant, arm=arm, propensity=0.5, prompt_ids=(1,),
        sampled_ids=(2,) * len(policies), logprobs=(-0.1,) * len(policies), spans=tuple(Span(policy=p, tokens=1) for p in policies),
        sampling=Sampling(max_tokens=9), finish=finish, text="", started_at=at, ended_at=at,
    )  # fmt: skip


def signal(name, turn_id, verb, retracts=None, *, tenant="t", value=1.0):
    return Signal(
        id=name,
        tenant=tenant,
        turn=turn_id,
        name=verb,
        value=value,
        source=Source.HUMAN,
        occurred_at=0.0,
        received_at=0.0,
        retracts=retracts,
    )


ROWS = (
    turn("a", user="u1"), signal("s1", "a", "accepted"),
    turn("b", user="u1"), signal("s2", "b", "accepted"), signal("s3", "b", "undone"),
    turn("c", user="u2"), signal("s4", "c", "rejected"), signal("s5", "c", "whatever", retracts="s4"), signal("s6", "c", "accepted"),
    turn("d", user="u2"),  # nothing said
    turn("e", user="u2", policies=(V3, V5)), signal("s7", "e", "rejected"),  # a swap in its middle
    turn("f", user="u3", arm=Arm.EVAL), signal("s8", "f", "rejected"),
    turn("g", user="u3", arm=Arm.CONTROL), signal("s9", "g", "rejected"),
    turn("h", user="u3", policies=(V5,)), signal("s10", "h", "accepted"),
)  # fmt: skip


async def tallies(rows, **config):
    log = MemoryLog()
    outcomes = Outcomes(log, OutcomeConfig(maturity_s=5.0, **config))
    for row in rows:
        await log.append(row)
        await outcomes.refresh()
    return outcomes


async def test_outcomes_join_signals_in_any_order():
    for seed in range(20):
        rows = list(np.random.default_rng(seed).permutation(np.array(ROWS, dtype=object)))
        outcomes = await tallies(rows if seed else ROWS)
        assert outcomes.acceptance(Arm.LIVE, V3, 0.0, 5.0) == {("t", "u1"): (1.0, 2), ("t", "u2"): (1.0, 1)}
        assert outcomes.acceptance(Arm.LIVE, V5, 0.0, 5.0) == {("t", "u3"): (1.0, 1)}
        assert outcomes.acceptance(Arm.CONTROL, V3, 0.0, 5.0) == {("t", "u3"): (0.0, 1)}


async def test_outcomes_keep_to_their_time_and_their_window():
    rows = list(
        itertools.chain.from_iterable(
            (turn(f"t{i}", at=float(i)), signal(f"s{i}", f"t{i}", "accepted")) for i in range(150)
        )
    )
    outcomes = await tallies(rows, window=100)
    assert outcomes.acceptance(Arm.LIVE, V3, 0.0, 500.0) == {("t", "u"): (100.0, 100)}
    assert outcomes.acceptance(Arm.LIVE, V3, 60.0, 105.0) == {
        ("t", "u"): (41.0, 41)
    }  # those from 101 on are not mature


async def test_engine_errors_count_even_before_their_first_token():
    rows = (
        turn("a"),
        turn("b", finish=Finish.ERROR),
        turn("c", finish=Finish.ERROR, policies=()),
        turn("d", finish=Finish.ABORT),
    )
    outcomes = await tallies(rows)
    assert outcomes.success_by_slot(Arm.LIVE, V3, 0.0, 0.0, 60.0) == {(0, ("t", "u")): (2.0, 4)}


@pytest.mark.parametrize("policies", [(V3,), ()])
async def test_a_turn_that_somebody_stopped_was_not_good_though_nothing_was_said(policies):
    outcomes = await tallies((turn("a", finish=Finish.ABORT, policies=policies),))
    assert outcomes.acceptance(Arm.LIVE, V3, 0.0, 5.0) == {("t", "u"): (0.0, 1)}


async def test_what_another_tenant_says_is_not_heard_early_or_late():
    rows = (
        signal("s1", "a", "rejected", tenant="rival"),
        turn("a"),
        signal("s1", "a", "accepted"),
        signal("s2", "a", "undone", tenant="rival"),
        signal("s3", "a", "sorry", retracts="s1", tenant="rival"),
        turn("b"),
        signal("s4", "b", "accepted", tenant="rival"),
    )
    outcomes = await tallies(rows)
    assert outcomes.acceptance(Arm.LIVE, V3, 0.0, 5.0) == {("t", "u"): (1.0, 1)}


async def test_people_of_one_name_with_two_tenants_are_two_people():
    rows = (
        turn("a", user="ann"),
        turn("b", user="ann", tenant="acme"),
        signal("s1", "a", "accepted"),
        signal("s1", "b", "rejected", tenant="acme"),
    )
    outcomes = await tallies(rows)
    assert outcomes.acceptance(Arm.LIVE, V3, 0.0, 5.0) == {("t", "ann"): (1.0, 1), ("acme", "ann"): (0.0, 1)}


@pytest.mark.parametrize(
    ("verb", "value", "expected"),
    [("accepted", 0.0, {("t", "u"): (0.0, 1)}), ("accepted", -1.0, {("t", "u"): (0.0, 1)}), ("undone", 0.0, {})],
)
async def test_a_signal_that_says_no_is_not_read_as_yes(verb, value, expected):
    outcomes = await tallies((turn("a"), signal("s1", "a", verb, value=value)))
    assert outcomes.acceptance(Arm.LIVE, V3, 0.0, 5.0) == expected


async def test_a_flood_about_turns_to_come_costs_no_other_tenant_its_own_and_is_not_kept():
    log = MemoryLog()
    outcomes = Outcomes(log, OutcomeConfig(maturity_s=5.0, window=100))
    flood = [signal(f"f{n}", f"guess{n}", "rejected", tenant="rival") for n in range(300)]
    flood += [signal(f"g{n}", "a", "rejected", tenant="rival") for n in range(300)]
    await log.append(signal("s1", "a", "accepted"), *flood, turn("a"))
    await outcomes.refresh()
    assert outcomes.acceptance(Arm.LIVE, V3, 0.0, 5.0) == {("t", "u"): (1.0, 1)}
    assert outcomes._early.count <= 100


async def test_a_signal_does_not_wait_for_its_turn_for_ever():
    for waited, heard in ((3600.0, {("t", "u"): (1.0, 1)}), (3601.0, {})):
        outcomes = await tallies((signal("s1", "a", "accepted"), turn("b", at=waited), turn("a", at=waited)))
        assert outcomes.acceptance(Arm.LIVE, V3, 0.0, waited + 5.0) == heard
        assert outcomes._early.count == 0


async def test_so_many_signals_of_one_turn_count_and_those_can_be_taken_back():
    rows = [turn("a"), *(signal(f"s{n}", "a", "rejected") for n in range(150))]
    outcomes = await tallies([*rows, *(signal(f"r{n}", "a", "sorry", retracts=f"s{n}") for n in range(150))])
    assert outcomes.acceptance(Arm.LIVE, V3, 0.0, 5.0) == {}
    assert len(outcomes._window[0].said) == 100


async def test_a_start_reads_as_far_back_as_the_window_reaches_however_long_the_log_is():
    log, begun = MemoryLog(), []
    read = log.read
    log.read = lambda after, kinds: begun.append(after) or read(after, kinds)
    await log.append(*(turn(f"t{n}") for n in range(5_000)))
    outcomes = Outcomes(log, OutcomeConfig(maturity_s=5.0, window=100))
    await outcomes.refresh()
    await log.append(turn("new"))
    await outcomes.refresh()
    assert begun == [5_000 - 100, 5_000]
    assert outcomes.success_by_slot(Arm.LIVE, V3, 0.0, 5.0, 60.0) == {(0, ("t", "u")): (100.0, 100)}


async def test_the_versions_that_people_met_are_forgotten_with_their_day():
    log = MemoryLog()
    outcomes = Outcomes(log, OutcomeConfig(maturity_s=5.0))
    await log.append(turn("a"))
    await outcomes.refresh()
    met = weakref.ref(next(iter(outcomes._came[0].values())))
    await log.append(*(turn(f"t{day}", at=day * DAY, policies=(V5,)) for day in range(1, 11)))
    await outcomes.refresh()
    gc.collect()
    assert met() is None
