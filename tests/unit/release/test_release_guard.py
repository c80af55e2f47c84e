"""The guard's error rates, under repeated looks at correlated users, and the joining of turns with signals."""

import itertools

import numpy as np
import pytest

from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Signal, Source, Span, Turn
from ostinato.evaluate.statistics import clustered_difference
from ostinato.release.guard import GuardConfig, judge, look_at, total
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.watch import Outcomes
from ostinato.testing.log import MemoryLog

V3, V5 = PolicyVersion(number=3, hash="aa"), PolicyVersion(number=5, hash="bb")


def alarm(rng, loss, *, users=40, looks=6, same_people=True):
    """Watch one release while its outcomes double `looks` times; the first look that condemns it, or None."""
    config = GuardConfig()
    rates_U = rng.beta(2, 2, users)
    names = [f"u{i}" for i in range(users)]
    others_U = rates_U if same_people else rng.beta(2, 2, users)
    baseline = {
        n if same_people else f"x{n}": (float(rng.binomial(20, r)), 20) for n, r in zip(names, others_U, strict=True)
    }
    good_U, count_U = np.zeros(users), np.zeros(users, dtype=int)
    for look in range(looks):
        share_U = rng.dirichlet(np.ones(users))
        new_U = rng.multinomial(config.min_outcomes * 2**look - count_U.sum(), share_U)
        good_U += rng.binomial(new_U, np.clip(rates_U - loss, 0, 1))
        count_U += new_U
        watched = {n: (float(g), int(c)) for n, g, c in zip(names, good_U, count_U, strict=True)}
        assert look_at(total(watched), config) == look
        if judge("acceptance", watched, baseline, look, config, clustered_difference):
            return look
    return None


@pytest.mark.parametrize("same_people", [True, False])
def test_equal_version_is_condemned_in_at_most_five_percent_of_releases(same_people):
    rng = np.random.default_rng(0)
    alarms = sum(alarm(rng, 0.0, same_people=same_people) is not None for _ in range(150))
    assert alarms / 150 <= 0.05


def test_loss_of_twenty_points_is_caught():
    rng = np.random.default_rng(1)
    caught = [alarm(rng, 0.20) for _ in range(60)]
    assert sum(look is not None for look in caught) >= 57
    assert np.median([look for look in caught if look is not None]) <= 3  # within 480 outcomes


def test_all_looks_together_spend_no_more_than_alpha():
    """Bonferroni, weighted: a half, a sixth, a twelfth, and so on."""
    config, asked = GuardConfig(alpha=0.04), []

    def compare(watched, baseline, confidence):
        asked.append((1 - confidence) / 2)  # one-sided
        return clustered_difference(watched, baseline, confidence)

    tally = {f"u{n}": (float(n % 2), 3) for n in range(40)}
    for look in range(3):
        judge("acceptance", tally, tally, look, config, compare)
    assert asked == pytest.approx([0.02, 0.04 / 6, 0.04 / 12])


def test_looks_come_at_doublings():
    config = GuardConfig(min_outcomes=60)
    assert [look_at(n, config) for n in (0, 59, 60, 119, 120, 239, 240, 960)] == [None, None, 0, 0, 1, 1, 2, 4]


def test_too_few_users_are_never_judged():
    few, many = {f"u{i}": (0.0, 100) for i in range(4)}, {f"u{i}": (100.0, 100) for i in range(40)}
    assert judge("acceptance", few, many, 0, GuardConfig(min_users=5), clustered_difference) is None
    harm = judge("acceptance", few, many, 0, GuardConfig(min_users=4), clustered_difference)
    assert str(harm).startswith("acceptance worse by 100.0 pp, at least ")


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
