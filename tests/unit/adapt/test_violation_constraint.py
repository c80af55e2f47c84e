"""Constrained learning: what people report of their own answers keeps their dials from making violations likelier; over the real fold."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError
from tests.unit.adapt.people import about, cache_at, folded, log_of, packed, set_dials, steered_turn

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.adapt.learner import PersonState, Regression, violation
from ostinato.adapt.prior import flat_prior
from ostinato.adapt.safety import ViolationConstraint, ViolationRules
from ostinato.adapt.state_fold import StateRules
from ostinato.core.arm_assignment import holdout_place
from ostinato.core.records import Arm, Consent, ConsentGiven, SteeringBasis, Turn
from ostinato.core.steering import Basis, Steered
from ostinato.testing.log import MemoryLog

HOLDOUT = 0.5
VIOLATIONS = ViolationRules(signals=frozenset({"reported"}), step=1.0, most=4.0, strikes=0, holdout=HOLDOUT)
NAMES = ("risky", "plain")
BASIS = Basis(names=NAMES, tokens_M=np.arange(4), directions_KM=np.ones((2, 4), np.float32), weights="0" * 64)
RULES = StateRules(
    names=NAMES,
    signals={"accepted": 1.0},
    regression=Regression(),
    prior=flat_prior(2),
    violations=VIOLATIONS,
)
TOKENS, CAP = 12, 0.1
LEANING = [("acme", f"u{k}") for k in range(60) if holdout_place(("acme", f"u{k}")) >= HOLDOUT][:14]
HELD_OUT = [("acme", f"u{k}") for k in range(60) if holdout_place(("acme", f"u{k}")) < HOLDOUT][:7]


def likelihoods(dials):
    """Of the two tokens, at each place of an answer."""
    return 1 / (1 + np.exp(1.0 - np.asarray(dials)))


def expected_violations(dials):
    """The probability that an answer is reported: 1.2 times the mean square of its share of the first token."""
    p = likelihoods(dials)[0]
    return 1.2 * (p**2 + p * (1 - p) / TOKENS)


def an_answer(id, person, at, dials, rng):
    """A simulated policy: each of two tokens' counts in an answer is binomial, and a dial is added to its token's log-odds."""
    p_K = likelihoods(dials)
    counts_K = rng.binomial(TOKENS, p_K)
    turn = replace(steered_turn(id, person, at, basis=BASIS), arm=Arm.LIVE)
    steered = Steered(
        basis=BASIS.hash,
        dials=tuple(dials),
        cap=CAP,
        budget=3.0,
        tokens=TOKENS,
        kl=0.1,
        features=tuple((counts_K - TOKENS * p_K).tolist()),
    )
    return replace(turn, steered=steered if person in LEANING else None), counts_K / TOKENS


async def simulated(tmp_path, rules, rounds=60):
    """People who like what the first dial makes likelier, which is reported more often too. The fold, the log, and how likely the
    answers of leaning people were to be reported over the last third.
    """
    rng = np.random.default_rng(5)
    log = await log_of([SteeringBasis.of(BASIS, at=1.0)])
    fold = await folded(log, cache_at(tmp_path), rules)
    expected = []
    for round in range(rounds):
        for number, person in enumerate([*LEANING, *HELD_OUT]):
            dials, state = (0.0, 0.0), fold.state(person)
            if state is not None:
                posterior, moments = state.posterior(rules.prior, rules.regression), fold.moments
                dials = posterior.dials(moments.fisher_KK, tokens=moments.tokens, nats=CAP, strength=0.05)
            turn, shares_K = an_answer(f"t{round}x{number}:0", person, 10.0 + round, dials, rng)
            liked, bad = rng.random() < 0.1 + shares_K[0], rng.random() < 1.2 * shares_K[0] ** 2
            await log.append(turn, about(turn, f"a{round}x{number}", value=float(liked)))
            if bad:
                await log.append(about(turn, f"v{round}x{number}", "reported"))
            if person in LEANING and round >= 2 * rounds // 3:
                expected.append(expected_violations(dials))
        await fold.catch_up()
    return fold, log, float(np.mean(expected))


def nameless(constraint):
    """A constraint's state but for the pseudonyms, which are each cache's own."""
    *told, busy, count = constraint.state()
    return [*told, [each[1:] for each in busy], count]


async def test_reports_bring_leaning_people_back_to_the_holdouts_rate_and_without_the_constraint_they_stay_above(
    tmp_path,
):
    held = expected_violations((0.0, 0.0))
    fold, log, bound = await simulated(tmp_path / "a", RULES)
    _, _, free = await simulated(tmp_path / "b", replace(RULES, violations=ViolationRules()))
    assert free > held + 0.1
    assert abs(bound - held) < 0.03
    assert 0.5 < fold.constraint("acme").multiplier <= 4.0
    people = [row for row in log.rows if isinstance(row, Turn)]
    again = await folded(log, cache_at(tmp_path / "c"), RULES)
    assert nameless(again.constraint("acme")) == nameless(fold.constraint("acme"))
    assert packed(again, people) == packed(fold, people)


def test_the_multiplier_follows_the_difference_between_its_bounds_and_an_answer_counts_once():
    constraint = ViolationConstraint(ViolationRules(signals=frozenset({"reported"}), step=1.0, most=0.25))
    for number in range(64):
        constraint.answer(f"p{number}", leans=True)
        if number < 8:
            constraint.tell(f"p{number}", number, 1, leans=True, violates=True)
            constraint.tell(f"p{number}", number, 2, leans=True, violates=True)
    assert constraint.multiplier == 0.0, "nothing to compare with"
    assert constraint.rate(leans=True) == pytest.approx(8 / 64, abs=0.01)
    for number in range(32):
        constraint.answer(f"h{number}", leans=False)
        constraint.answer(f"p{number}", leans=True)
    told = constraint.multiplier
    assert 0.0 < told <= 0.25
    for number in range(8):
        constraint.tell(f"p{number}", number, 1, leans=True, violates=False)
        assert constraint.rate(leans=True) > 0.0, "the other signal stands"
        constraint.tell(f"p{number}", number, 2, leans=True, violates=False)
        constraint.tell(f"p{number}", number, 2, leans=True, violates=False)
    assert constraint.rate(leans=True) == pytest.approx(0.0, abs=0.01)
    for number in range(100, 130):
        constraint.tell(f"p{number}", number, 1, leans=True, violates=True)
    for number in range(300):
        constraint.answer(f"p{number % 90}", leans=True)
    assert constraint.multiplier == 0.25
    again = ViolationConstraint(ViolationRules(signals=frozenset({"reported"}), step=1.0, most=0.25))
    again.restore(json.loads(json.dumps(constraint.state())))
    assert again.state() == constraint.state()
    for number in range(1000):
        constraint.answer(f"h{number % 90}", leans=False)
        constraint.tell(f"h{number % 90}", 10_000 + number, 1, leans=False, violates=True)
        constraint.answer(f"p{number % 90}", leans=True)
    assert constraint.multiplier == 0.0
    assert len(json.dumps(constraint.state())) < 8_000, "it is written with every save"


SIDES = [pytest.param(True, id="leaning"), pytest.param(False, id="held out")]


def share_of(busy: int, others: int, *, leans: bool, reports: bool) -> float:
    """The share of reported answers on a side where one person has `busy` answers for each of `others` people's one, of whose answers each
    tenth is reported; and every answer of the busy one, or none.
    """
    constraint = ViolationConstraint(VIOLATIONS)
    for number in range(40):
        for place in range(busy):
            constraint.answer("busy", leans=leans)
            if reports:
                constraint.tell("busy", -1 - number * busy - place, 1, leans=leans, violates=True)
        for other in range(others):
            constraint.answer(f"p{other}", leans=leans)
            if (number + other) % 10 == 0:
                constraint.tell(f"p{other}", 1000 * number + other, 1, leans=leans, violates=True)
    return constraint.rate(leans=leans)


@pytest.mark.parametrize("leans", SIDES)
def test_one_person_who_reports_every_answer_or_floods_a_side_with_others_moves_its_rate_by_a_capped_part(leans):
    honest = share_of(0, 20, leans=leans, reports=False)
    assert honest == pytest.approx(0.1, abs=0.01)
    # three of five answers are the busy person's: with all of them counted the rate would be 0.64, or 0.04
    assert 0.1 < share_of(30, 20, leans=leans, reports=True) < 0.16
    assert 0.09 < share_of(30, 20, leans=leans, reports=False) < 0.1


def test_of_a_busy_person_what_is_over_the_limit_is_left_out_at_their_own_rate_and_taken_back_whole():
    constraint = ViolationConstraint(VIOLATIONS)
    for number in range(400):
        constraint.answer("busy", leans=True)
        constraint.answer(f"p{number % 100}", leans=True)
        if number % 4 == 0:
            constraint.tell("busy", number, 1, leans=True, violates=True)
    told = constraint.rate(leans=True)
    assert told == pytest.approx(0.25 * 0.05, rel=0.1), "a twentieth of all that is weighed, at the busy one's rate"
    for number in range(0, 400, 4):
        constraint.tell("busy", number, 1, leans=True, violates=False)
    assert constraint.rate(leans=True) < told / 20


def test_who_is_forgotten_is_counted_no_longer():
    constraint = ViolationConstraint(VIOLATIONS)
    for number in range(400):
        constraint.answer(f"p{number}", leans=True)
    assert len(constraint.state()[5]) == 128, "bounded, whoever comes"
    constraint.forget("p399")
    assert "p399" not in json.dumps(constraint.state())
    constraint.forget(None)
    assert constraint.state()[5] == []
    assert constraint.state()[1:3] == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("leans", SIDES)
def test_whoever_is_forgotten_weighs_nothing_from_then_on(leans):
    """Without their counts no cap is left: half of a side's answers, all of them reported, would weigh in full."""
    constraint = ViolationConstraint(VIOLATIONS)
    for number in range(600):
        constraint.answer("reporter", leans=leans)
        constraint.tell("reporter", -1 - number, 1, leans=leans, violates=True)
        constraint.answer(f"p{number % 40}", leans=leans)
        if number % 100 == 0:
            constraint.tell(f"p{number % 40}", number, 1, leans=leans, violates=True)
    assert constraint.rate(leans=leans) < 0.08
    constraint.forget("reporter")
    assert constraint.rate(leans=leans) == pytest.approx(0.01, abs=0.01)
    again = ViolationConstraint(VIOLATIONS)
    again.restore(json.loads(json.dumps(constraint.state())))
    assert again.state() == constraint.state()


@pytest.mark.parametrize("every", [100, 60, 40])
def test_nobody_is_past_the_cap_who_comes_between_a_thousand_others(every):
    """Somebody with 1% of a tenant's answers has 10 of the last thousand, and is the holdout's only one who reports."""
    constraint, others = ViolationConstraint(VIOLATIONS), 0.0
    for number in range(6000):
        person, leans = ("reporter", False) if number % every == 0 else (f"p{number % 997}", number % 997 > 50)
        constraint.answer(person, leans=leans)
        others = 0.999 * others + (not leans and person != "reporter")
        if person == "reporter":
            constraint.tell(person, number, 1, leans=leans, violates=True)
    assert constraint.rate(leans=False) <= 1.02 * 8.0 / (8.0 + others)
    assert constraint.rate(leans=True) == 0.0


def test_of_many_people_who_answer_alike_none_is_taken_for_a_busy_one():
    constraint = ViolationConstraint(VIOLATIONS)
    for number in range(6000):
        constraint.answer(f"p{number % 997}", leans=True)
        if number % 10 == 0:
            constraint.tell(f"p{number % 997}", number, 1, leans=True, violates=True)
    assert constraint.rate(leans=True) == pytest.approx(0.1, abs=0.005)


def a_state():
    return PersonState.new("0" * 32, 2)


def test_a_violation_costs_reward_until_it_is_retracted_and_alone_it_stands_for_a_middling_answer():
    prior, rules = flat_prior(2), Regression()
    rated = a_state().rate(1, (1.0, 0.0), 7, 1.0, prior, rules)
    bad = rated.rate(1, (1.0, 0.0), 8, violation(1.5), prior, rules)
    assert bad.recent[0].reward == pytest.approx(1.0 - 1.5, abs=1e-3)
    assert bad.posterior(prior, rules).mean_D[0] < 0 < rated.posterior(prior, rules).mean_D[0]
    back = bad.rate(1, (1.0, 0.0), 8, None, prior, rules)
    assert (back.recent[0].reward, back.recent[0].violates) == (1.0, False)
    alone = a_state().rate(1, (1.0, 0.0), 8, violation(0.0), prior, rules)
    assert (alone.recent[0].reward, alone.recent[0].violates) == (0.5, True)


async def test_two_violations_return_a_person_to_the_prior_with_half_the_cap_and_no_other(tmp_path):
    config = AdaptConfig(mode="dials", users="declared", holdout=0.03, violations={"signals": ["reported"]})
    log = await log_of([SteeringBasis.of(BASIS, at=1.0)])
    adaptation = DialAdaptation(log, cache_at(tmp_path), config)
    ann, bob, rng = ("acme", "ann"), ("bolt", "ann"), np.random.default_rng(0)

    def asked(person):
        return adaptation.steering(person, weights=BASIS.weights, verified=False)

    for number in range(6):
        for person in (ann, bob):
            turn = steered_turn(f"{person[0]}{number}:0", person, 10.0 + number, basis=BASIS)
            await log.append(turn, about(turn, f"{person[0]} a{number}", value=float(rng.random() < 0.5)))
            if person == ann and number in (1, 4):
                await adaptation.follow()
                assert (asked(ann).cap, any(asked(ann).dials)) == (0.1, True)
                await log.append(
                    about(turn, f"v{number}", "reported", value=0.4), about(turn, f"w{number}", "reported")
                )
        await adaptation.follow()
        if number == 4:
            assert asked(ann).dials == (0.0, 0.0), "the prior's"
    assert (asked(ann).cap, asked(bob).cap) == (0.05, 0.1)
    assert any(asked(ann).dials), "and learns anew"
    state = adaptation.fold.state(ann)
    assert (state.strikes, len(state.recent), adaptation.fold.state(bob).strikes) == (1, 1, 0)
    assert PersonState.unpack(state.pack(), RULES.regression).strikes == 1
    assert state.reset(99).strikes == 1, "clearing one's dials clears no strike"
    assert adaptation.fold.constraint("bolt").rate(leans=True) == 0.0


@pytest.mark.parametrize("strikes", [1, 2], ids=["struck", "reported once"])
async def test_withdrawing_consent_takes_the_dials_and_no_strike(tmp_path, strikes):
    rules = replace(RULES, violations=replace(VIOLATIONS, strikes=strikes, holdout=0.0))
    ann, bob = ("acme", "ann"), ("acme", "bob")
    turns = [steered_turn(f"{who[1]}{k}:0", who, 10.0 + k, basis=BASIS) for k in range(4) for who in (ann, bob)]
    rows = [SteeringBasis.of(BASIS, at=1.0), *turns[:4], *(about(turn, f"a{turn.id}") for turn in turns[:4])]
    rows += [about(turns[0], "r", "reported"), *(choice(who, Consent.NEVER) for who in (ann, bob))]
    log, cache = await log_of(rows), cache_at(tmp_path / "a")
    fold = await folded(log, cache, rules)
    assert (fold.state(ann), fold.state(bob)) == (None, None)
    await fold.save()
    assert cache.count("acme") == 1, "of who has nothing against them no value is kept"
    await log.append(*(choice(who, Consent.YES) for who in (ann, bob)))
    again = await folded(log, cache, rules)  # from what was saved
    await fold.catch_up()
    state = fold.state(ann)
    assert (state.strikes, state.reported, fold.state(bob)) == ((1, 0, None) if strikes == 1 else (0, 1, None))
    assert (state.latest or state.settled).ratings == 0
    assert (state.recent, state.held, state.nats) == ((), (), 0.0)
    assert (
        packed(again, turns) == packed(fold, turns) == packed(await folded(log, cache_at(tmp_path / "b"), rules), turns)
    )
    await log.append(about(turns[0], "late", "reported"))  # of before: it is known
    await fold.catch_up()
    assert fold.state(ann).reported == state.reported
    await log.append(*turns[4:], about(turns[4], "next", "reported"))
    await fold.catch_up()
    assert (fold.state(ann).strikes, fold.state(ann).reported) == (3 - strikes, 0)


def choice(person, level):
    return ConsentGiven(id=f"{person[1]} {level}", tenant=person[0], user=person[1], level=level, at=50.0)


async def test_reports_of_answers_whose_ratings_teach_nothing_count_as_any(tmp_path):
    """By a static bias, which tells no features, or sampled at temperature 0."""
    rows, ann = [SteeringBasis.of(BASIS, at=1.0)], ("acme", "ann")
    rules = replace(RULES, violations=replace(VIOLATIONS, strikes=2, holdout=0.0))
    for number in range(3):
        turn = steered_turn(f"t{number}:0", ann, 10.0 + number, basis=BASIS)
        if number < 2:
            turn = replace(turn, steered=replace(turn.steered, features=()))
        else:
            turn = replace(turn, sampling=replace(turn.sampling, temperature=0.0))
        rows += [turn, about(turn, f"a{number}"), about(turn, f"v{number}", "reported")]
    fold = await folded(await log_of(rows), cache_at(tmp_path), rules)
    state = fold.state(ann)
    assert (state.strikes, len(state.recent)) == (1, 1)
    assert state.recent[0].signals[0][1] < 0.0, "the report alone, no rating"
    assert state.nats == pytest.approx(0.5), "of what was known of them"
    assert fold.constraint("acme").rate(leans=True) == pytest.approx(1.0, abs=0.01)


async def test_both_sides_are_decided_by_hash_and_kind_alone(tmp_path):
    """Whether an answer leaned says nothing of its side; and people whom nobody proved are on neither, if only proven ones have dials."""
    away, here = replace(BASIS, weights="f" * 64), [LEANING[0], HELD_OUT[0]]
    plain = [replace(steered_turn(f"p{k}:0", who, 10.0 + k), steered=None, arm=Arm.LIVE) for k, who in enumerate(here)]
    for case, (rules, fitted, counted) in enumerate(
        ((RULES, BASIS, 1.0), (RULES, away, 0.0), (proven(RULES), BASIS, 0.0))
    ):
        cache = cache_at(tmp_path / str(case))
        log = MemoryLog()
        await log.append(SteeringBasis.of(fitted, at=1.0), *plain)
        fold = await folded(log, cache, rules)
        sides = fold.constraint("acme").state()[1]
        assert sides == pytest.approx([counted, counted], abs=0.01)


def proven(rules):
    return replace(rules, violations=replace(rules.violations, verified=True))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"holdout": 0.02, "violations": {"signals": ["reported"]}}, "adapt.holdout is 0.02"),
        ({"violations": {"signals": ["accepted"]}}, "both name 'accepted'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, match):
    with pytest.raises(ValidationError, match=match):
        AdaptConfig(**settings)


@pytest.mark.parametrize("by_hand", [{}, {"plain": None}, {"plain": 0.5}], ids=["all", "one", "set"])
async def test_nobody_escapes_a_strike_by_returning_a_dial_between_two_reports(tmp_path, by_hand):
    rules, ann = replace(RULES, violations=replace(VIOLATIONS, strikes=2, holdout=0.0)), ("acme", "ann")
    turns = [steered_turn(f"t{k}:0", ann, 10.0 + 10 * k, basis=BASIS) for k in range(3)]
    first, second, _ = (about(turn, f"r{turn.id}", "reported") for turn in turns)
    rows = [turns[0], first, set_dials("d", ann, 19.0, **by_hand), turns[1]]
    log, cache = await log_of([SteeringBasis.of(BASIS, at=1.0), *rows]), cache_at(tmp_path)
    fold = await folded(log, cache, rules)
    assert fold.state(ann).strikes == 0
    await fold.save()
    await log.append(second)
    again = await folded(log, cache, rules)  # from what was saved
    await fold.catch_up()
    assert again.state(ann).strikes == fold.state(ann).strikes == 1
    assert (fold.state(ann).held, fold.state(ann).reported) == ((), 0)
    assert packed(again, turns) == packed(fold, turns)
