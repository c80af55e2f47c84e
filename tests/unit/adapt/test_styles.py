"""The bandit of styles: its odds, what is approved, and everybody's states as a fold of the log."""

import json
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.adapt.people import about, set_dials

from ostinato.adapt.config import AdaptConfig, StylesConfig, TenantAdaptConfig
from ostinato.adapt.styles import UNSAFE, Style, StyleAdaptation, StyleApprovals, approval, styles_of, thompson_odds
from ostinato.core.arm_assignment import holdout_place
from ostinato.core.notices import Forgotten
from ostinato.core.records import Consent, ConsentGiven, Person, Pick, PolicyVersion, Reward, Row, Turn
from ostinato.core.seams import Clock
from ostinato.core.steering import NO_STYLE
from ostinato.record.config import Encrypt
from ostinato.record.keys import KeyRing
from ostinato.record.person_cache import SqlPersonCache
from ostinato.release.auto.estimating import StyleTally, style_effects
from ostinato.release.auto.posterior import Belief, best_probabilities
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn

PROMPTS = {"concise": "Answer in one sentence.", "steps": "Answer in numbered steps."}
CONFIG = AdaptConfig(users="declared", holdout=0.0, prior_people=20, styles=StylesConfig(prompts=PROMPTS))
STYLES = styles_of(CONFIG)
ARMS = (NO_STYLE, *(style.arm for style in STYLES))
EVEN = dict.fromkeys(ARMS, 1 / 3)


def adaptation(
    log: MemoryLog,
    directory: Path,
    config: AdaptConfig = CONFIG,
    *,
    ring: KeyRing | None = None,
    clock: Clock | None = None,
) -> StyleAdaptation:
    mode = Encrypt.NONE if ring is None else Encrypt.USER
    cache = SqlPersonCache(directory / "styles.sqlite", ring, mode, most=10_000)
    return StyleAdaptation(log, cache, config, clock=clock or (lambda: 5000.0))


async def followed(log: MemoryLog, directory: Path, config: AdaptConfig = CONFIG) -> StyleAdaptation:
    found = adaptation(log, directory, config)
    await found.follow()
    return found


def styled(id: str, person: Person, at: float, arm: str) -> Turn:
    return replace(a_turn(id, user=person[1], ended_at=at), tenant=person[0], style=Pick(arm=arm, odds=EVEN))


def traffic(turns: int, seed: int = 0) -> list[Row]:
    """Answers in styles to people of two tenants with equal names; ratings come late, early and twice, and are retracted at times."""
    rng, rows, waiting = np.random.default_rng(seed), list[Row](), list[Row]()
    for number in range(turns):
        person = ("acme" if number % 2 else "bolt", f"user {rng.integers(6)}")
        turn = styled(f"t{number}:0", person, 100.0 + number, ARMS[int(rng.integers(3))])
        signals = [about(turn, f"s{number}", "accepted", float(rng.random() < 0.5))]
        signals += [about(turn, f"r{number}", retracts=f"s{number}")] if number % 5 == 0 else []
        if number % 11 == 0:
            rng.shuffle(signals)
        rows += [*signals, turn] if number % 13 == 0 else [turn]
        waiting += [] if number % 13 == 0 else signals
        if number % 17 == 0:
            rows.append(set_dials(f"d{number}", person, 100.0 + number, **{ARMS[1]: 1.0, "brief": 0.5}))
        while len(waiting) > 6:
            rows.append(waiting.pop(int(rng.integers(3))))
    return [*rows, *waiting]


def everybody(found: StyleAdaptation) -> dict[Person, tuple[bytes, dict[str, float]]]:
    people = [(tenant, f"user {number}") for tenant in ("acme", "bolt") for number in range(6)]
    assert found.fold is not None
    states = {person: found.fold.state(person) for person in people}
    return {who: (state.pack(), found.odds(who, ARMS)) for who, state in states.items() if state is not None}


# ---------------------------------------------------------------- odds


def test_the_odds_are_the_probability_that_an_arm_is_the_best():
    rng = np.random.default_rng(0)
    for _ in range(40):
        arms = int(rng.integers(2, 10))
        mean_A, deviation_A = 0.1 * rng.normal(size=arms), rng.uniform(0.02, 0.2, arms)
        exact_A = best_probabilities(
            [Belief(mean=m, deviation=d, users=1.0) for m, d in zip(mean_A, deviation_A, strict=True)]
        )
        odds_A = thompson_odds(mean_A, np.diag(deviation_A**2), 0.0)
        assert np.abs(odds_A - exact_A).max() < 0.02
        assert odds_A.sum() == pytest.approx(1.0)
        floored_A = thompson_odds(mean_A, np.diag(deviation_A**2), 0.02)
        assert floored_A.min() >= 0.02
        assert floored_A == pytest.approx(0.02 + (1 - 0.02 * arms) * odds_A)


def test_what_all_arms_share_does_not_count():
    """What is not known of a person's mean reward is not known of any arm, and decides nothing between them."""
    mean_A, own_AA = np.array([0.0, 0.03]), 1e-4 * np.eye(2)
    apart, together = (thompson_odds(mean_A, own_AA + shared, 0.0)[1] for shared in (0.0, 0.02))
    assert together == pytest.approx(apart, abs=0.01)
    assert apart == pytest.approx(0.983, abs=0.01)


# ---------------------------------------------------------------- approvals


def test_an_approval_is_for_a_text_and_a_version_and_those_after_it_that_are_asked_for():
    style, v3, v5 = STYLES[0], PolicyVersion(number=3, hash="3" * 64), PolicyVersion(number=5, hash="5" * 64)
    strict, lenient = StyleApprovals(0), StyleApprovals(2)
    for approvals in (strict, lenient):
        approvals.take(approval(style, v3, passed=True, why="", at=1.0, shared=True))
        assert approvals.holds(style.arm, v3)
        assert not approvals.holds(replace(style, text="Be brief.").arm, v3)
        assert not approvals.holds(STYLES[1].arm, v3)
    assert [lenient.holds(style.arm, v5), lenient.holds(style.arm, v5, shared=False)] == [True, False]
    assert not strict.holds(style.arm, v5)
    assert not lenient.holds(style.arm, PolicyVersion(number=6, hash="6" * 64))
    assert not lenient.holds(style.arm, PolicyVersion(number=2, hash="2" * 64)), "an earlier version was not tried"
    lenient.take(approval(style, v5, passed=False, why="", at=2.0, shared=True))
    assert not lenient.holds(style.arm, v5)
    assert not lenient.holds(style.arm, PolicyVersion(number=6, hash="6" * 64))
    assert lenient.holds(style.arm, v3)


def test_an_unsafe_style_is_not_approved_whatever_its_quality_until_it_is_found_safe():
    style, v3, v4 = STYLES[0], PolicyVersion(number=3, hash="3" * 64), PolicyVersion(number=4, hash="4" * 64)
    approvals = StyleApprovals(2)
    approvals.take(approval(style, v3, passed=True, why="", at=1.0, shared=True))
    approvals.take(approval(style, v3, passed=False, why="", at=2.0, shared=True, kind=UNSAFE))
    approvals.take(approval(style, v3, passed=True, why="", at=3.0, shared=True))
    assert approvals.unsafe(style.arm, v3)
    assert not approvals.unsafe(STYLES[1].arm, v3)
    assert not approvals.holds(style.arm, v3)
    assert not approvals.holds(style.arm, v4), "nor with the next version"
    approvals.take(approval(style, v3, passed=True, why="", at=4.0, shared=True, kind=UNSAFE))
    assert approvals.holds(style.arm, v3)
    assert approvals.holds(style.arm, v4)


@pytest.mark.parametrize(
    "prompts",
    [{"none": "a"}, {"Loud": "a"}, {"a": "  "}, {f"a{number}": "a" for number in range(9)}, {"a": "a" * 2001}],
)
def test_a_wrong_style_is_refused_by_name(prompts: dict[str, str]):
    with pytest.raises(ValueError, match=r"prompts"):
        StylesConfig(prompts=prompts)


# ---------------------------------------------------------------- the fold


async def test_two_gateways_and_a_refold_have_the_same_states_and_odds_to_the_bit(tmp_path: Path):
    rows = traffic(110)
    log, again = MemoryLog(), MemoryLog()
    first = adaptation(log, tmp_path / "a")
    for place, row in enumerate(rows):
        await log.append(row)
        if place % 37 == 0:  # read in pieces, and go on from what was saved
            await first.follow()
            assert first.fold is not None
            await first.fold.save()
            first = adaptation(log, tmp_path / "a")
    await first.follow()
    await again.append(*rows)
    second = await followed(again, tmp_path / "b")
    found = everybody(first)
    assert len(found) == 12
    assert found == everybody(second)
    assert any(odds != found["acme", "user 0"][1] for _, odds in found.values())


async def test_the_order_of_ratings_of_the_last_answers_does_not_matter(tmp_path: Path):
    ann = ("acme", "ann")
    turns = [styled(f"t{number}:0", ann, 100.0 + number, ARMS[number % 3]) for number in range(9)]
    signals = [about(turn, f"s{number}", value=float(number % 3 == 1)) for number, turn in enumerate(turns)]
    odds: list[dict[str, float]] = []
    for name, rows in (
        ("a", [*turns, *signals]),
        ("b", [*signals[::-1], *turns[::-1]]),
        ("c", [*turns, *signals[::-1]]),
    ):
        log = MemoryLog()
        await log.append(*rows)
        odds.append((await followed(log, tmp_path / name)).odds(ann, ARMS))
    assert odds[0] == odds[1] == odds[2]
    assert odds[0][ARMS[1]] > 0.75


async def test_what_nobody_allows_teaches_nothing_and_a_forgotten_person_begins_anew(tmp_path: Path):
    ann, log = ("acme", "ann"), MemoryLog()
    fresh = (await followed(log, tmp_path / "fresh")).odds(ann, ARMS)
    turns = [styled(f"t{number}:0", ann, 100.0 + number, ARMS[1]) for number in range(6)]
    silent = [replace(turn, consent=Consent.AGGREGATE) for turn in turns]
    others = [replace(turn, style=Pick(arm="gone@00000000", odds=EVEN)) for turn in turns]
    for name, kept in (("silent", silent), ("gone", others), ("none", [replace(turn, style=None) for turn in turns])):
        log = MemoryLog()
        await log.append(*kept, *(about(turn, f"s {turn.id}") for turn in turns))
        assert (await followed(log, tmp_path / name)).odds(ann, ARMS) == fresh, name
    log = MemoryLog()
    await log.append(*turns, *(about(turn, f"s {turn.id}") for turn in turns))
    found = await followed(log, tmp_path / "ann")
    liked = found.odds(ann, ARMS)
    assert liked[ARMS[1]] > 0.55
    await log.append(Forgotten(id="f1", tenant="acme", user="ann", key=0, at=300.0))
    await found.follow()
    assert found.odds(ann, ARMS) == fresh
    await log.append(ConsentGiven(id="c1", tenant="acme", user="ann", level=Consent.NEVER, at=301.0))
    await found.follow()
    assert found.odds(ann, ARMS) == fresh


async def test_a_reset_by_hand_forgets_ratings_and_what_was_set(tmp_path: Path):
    ann, log = ("acme", "ann"), MemoryLog()
    fresh = (await followed(log, tmp_path / "fresh")).odds(ann, ARMS)
    turns = [styled(f"t{number}:0", ann, 100.0 + number, ARMS[2]) for number in range(6)]
    await log.append(*turns, *(about(turn, f"s {turn.id}") for turn in turns))
    found = await followed(log, tmp_path)
    learned = found.odds(ann, ARMS)
    await log.append(set_dials("d1", ann, 200.0, **{ARMS[1]: 1.0}))
    await found.follow()
    assert found.odds(ann, ARMS) == {ARMS[1]: 1.0}
    assert found.odds(ann, ARMS[:1]) == {NO_STYLE: 1.0}, "what is not approved is dealt to nobody, whoever set it"
    shown = {each.name: each for each in found.view(ann, policies=[]).styles}
    assert abs(shown["concise"].value) < 0.15, "that somebody chose it says nothing of how it pleases"
    await log.append(set_dials("d2", ann, 201.0, **{ARMS[1]: None}))
    await found.follow()
    assert found.odds(ann, ARMS)[ARMS[2]] == pytest.approx(learned[ARMS[2]], abs=0.05)
    await log.append(set_dials("d3", ann, 202.0))
    await found.follow()
    assert found.odds(ann, ARMS) == fresh


def test_another_order_of_the_styles_keeps_everybodys_states(tmp_path: Path):
    def rules(prompts: dict[str, str]) -> str:
        made = adaptation(MemoryLog(), tmp_path, CONFIG.model_copy(update={"styles": StylesConfig(prompts=prompts)}))
        return made._rules_of(made._names).hash

    assert rules(PROMPTS) == rules(dict(reversed(PROMPTS.items())))
    assert rules(PROMPTS) != rules({**PROMPTS, "warm": "Be warm."})


async def test_whose_wishes_turn_is_returned_to_the_prior(tmp_path: Path):
    ann, log = ("acme", "ann"), MemoryLog()
    for number in range(60):
        turn = styled(f"t{number}:0", ann, 100.0 + number, ARMS[1])
        await log.append(turn, about(turn, f"s{number}", value=float(number < 40)))
    found = await followed(log, tmp_path)
    assert found.fold is not None
    assert found.fold.resets >= 1
    assert found.odds(ann, ARMS)[ARMS[1]] < 0.15


async def test_new_people_begin_with_what_others_of_their_tenant_like(tmp_path: Path):
    config = CONFIG.model_copy(update={"tenants": {"acme": TenantAdaptConfig(prior="own")}})
    log, rng = MemoryLog(), np.random.default_rng(3)
    for number in range(30):
        for tenant, liked in (("acme", ARMS[1]), ("bolt", ARMS[2])):
            for turn_number in range(12):
                arm = ARMS[int(rng.integers(3))]
                turn = styled(f"{tenant}{number}-{turn_number}:0", (tenant, f"u{number}"), 100.0 + turn_number, arm)
                await log.append(
                    turn, about(turn, f"s {turn.id}", value=float(rng.random() < (0.85 if arm == liked else 0.35)))
                )
    found = await followed(log, tmp_path, config)
    assert await found.refit()
    await found.follow()
    assert found.odds(("acme", "new"), ARMS)[ARMS[1]] > 0.6
    assert found.odds(("other", "new"), ARMS)[ARMS[2]] > 0.6
    noisy = adaptation(
        log,
        tmp_path / "noisy",
        CONFIG.model_copy(update={"privacy": CONFIG.privacy.model_copy(update={"epsilon": 1.0})}),
    )
    await noisy.follow()
    assert not await noisy.refit(), "it would spend what dials' priors have"
    assert noisy.odds(("other", "new"), ARMS) == (await followed(MemoryLog(), tmp_path / "empty")).odds(
        ("other", "new"), ARMS
    )


def test_the_same_name_with_another_text_is_another_arm():
    assert Style(name="a", text="x").arm != Style(name="a", text="y").arm
    assert Style(name="a", text="x").arm == Style(name="a", text="x").arm


# ---------------------------------------------------------------- what styles did


async def test_the_recorded_odds_tell_what_each_style_is_worth_to_everybody_where_means_do_not(tmp_path: Path):
    """Two camps of opposite wishes, and a bandit that learns both: the turns that had a style are of those whom it pleases."""
    rng, log = np.random.default_rng(5), MemoryLog()
    config = CONFIG.model_copy(update={"styles": StylesConfig(prompts=PROMPTS, floor=0.1)})
    found = StyleAdaptation(
        log,
        SqlPersonCache(tmp_path / "s.sqlite", None, Encrypt.NONE, most=100),
        config,
        chance=lambda: float(rng.random()),
    )
    await found.follow()
    likes, plain = {0: (0.5, 0.9, 0.1), 1: (0.5, 0.1, 0.9)}, list[float]()
    for number in range(30):
        for person in range(24):
            pick = found.deal(("acme", f"u{person}"), ARMS[1:])
            assert pick is not None
            turn = replace(
                styled(f"t{number}-{person}:0", ("acme", f"u{person}"), 100.0 + number, pick.arm), style=pick
            )
            value = float(rng.random() < likes[person % 2][ARMS.index(pick.arm)])
            reward = Reward(turn=turn.id, value=value, function="f@1", signals=(), at=turn.ended_at)
            await log.append(turn, about(turn, f"s {turn.id}", value=value), reward)
            plain += [value] if pick.arm == ARMS[1] else []
        await found.follow()
    held = styled("held:0", ("acme", "u0"), 900.0, ARMS[1])
    await log.append(replace(held, style=Pick(arm=ARMS[1], odds={ARMS[1]: 1.0})))
    concise, steps = await style_effects(log, NO_STYLE)
    assert np.mean(plain) > 0.65, "as if it were better than none, by 15 points and more"
    for effect in (concise, steps):
        assert effect.gain is not None
        assert effect.gain.lower < 0.0 < effect.gain.upper
        assert abs(effect.gain.mean) < 0.12
    assert concise.turns == len(plain) + 1 == concise.rated + 1
    assert await style_effects(MemoryLog(), NO_STYLE) == []


@pytest.mark.parametrize("passed", [True, False])
def test_what_was_found_with_a_branchs_version_counts_for_that_version_alone(passed: bool):
    style, found = styles_of(CONFIG)[0], StyleApprovals(3)
    shared, branch, live = (PolicyVersion(number=number, hash=str(number) * 64) for number in (6, 7, 8))
    found.take(approval(style, branch, passed=passed, why="", at=1.0))
    assert found.holds(style.arm, branch, shared=False) == passed
    assert not found.holds(style.arm, live)
    found.take(approval(style, shared, passed=not passed, why="", at=2.0, shared=True))
    assert found.holds(style.arm, live) != passed, "only the shared line's own says something of it"


async def test_sums_that_name_nobody_give_the_estimates_of_all_turns_where_each_group_is_one_person():
    groups = {int(64 * holdout_place(("acme", f"u{number}"))): ("acme", f"u{number}") for number in range(200)}
    people, rng = sorted(groups.values())[:40], np.random.default_rng(1)
    log, tally = MemoryLog(), StyleTally(NO_STYLE)
    for number in range(600):
        person = people[number % len(people)]
        odds_A = rng.dirichlet(np.ones(3)) * [1.0, 1.0, number % 7 != 0]  # sometimes one of them cannot be drawn
        odds_A /= odds_A.sum()
        pick = Pick(arm=ARMS[int(rng.choice(3, p=odds_A))], odds=dict(zip(ARMS, odds_A.tolist(), strict=True)))
        if number % 11 == 0:  # set by hand
            pick = Pick(arm=ARMS[1], odds={ARMS[1]: 1.0})
        turn = replace(styled(f"t{number}:0", person, 100.0 + number, pick.arm), style=pick)
        value = float(rng.random() < 0.3 + 0.2 * ARMS.index(pick.arm))
        drawn = tally.turn(pick)
        await log.append(turn)
        if number % 5:
            await log.append(Reward(turn=turn.id, value=value, function="f@1", signals=(), at=turn.ended_at))
            tally.reward(person, drawn, value)
    again = StyleTally(NO_STYLE)
    again.restore(json.loads(json.dumps(tally.state())))
    assert again == tally
    assert not any(user in json.dumps(tally.state()) for _, user in people)
    none, *told = again.effects()
    wanted = {each.arm: each for each in await style_effects(log, NO_STYLE)}
    assert (none.arm, none.gain, [each.arm for each in told]) == (NO_STYLE, None, sorted(wanted))
    for each in told:
        same = wanted[each.arm]
        assert (each.turns, each.rated) == (same.turns, same.rated)
        assert each.gain is not None
        assert same.gain is not None
        assert astuple(each.gain) == pytest.approx(astuple(same.gain)), "with the interval's ends"


def test_a_tally_of_one_group_or_without_none_tells_no_effect_and_its_arms_are_limited():
    tally = StyleTally(NO_STYLE)
    for arm in ARMS[:2]:
        tally.reward(("acme", "ann"), tally.turn(Pick(arm=arm, odds=EVEN)), 1.0)
    assert [each.gain for each in tally.effects()] == [None, None]
    for number in range(100):
        pick = Pick(arm=f"s{number}", odds={f"s{number}": 0.5, NO_STYLE: 0.5})
        tally.reward(("acme", f"u{number}"), tally.turn(pick), 1.0)
    assert len(tally.effects()) == 50
    assert tally.effects()[0].rated == 1
