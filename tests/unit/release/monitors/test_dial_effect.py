"""People who may have dials against the standing holdout: who counts, what the interval promises, and that no name is kept."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ostinato.core.arm_assignment import holdout_place
from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, Consent, Purpose, SteeringBasis
from ostinato.core.steering import Basis, Steered
from ostinato.release.monitors.config import DAY
from ostinato.release.monitors.dial_effect import MOST_PEOPLE, PERIOD_S, TURNS_A_DAY, DialTally
from ostinato.testing.records import a_turn

TURN = replace(a_turn("t:0", arm=Arm.LIVE), verified=True, consent=Consent.YES)
WEIGHTS = TURN.versions[0].hash
BASIS = SteeringBasis.of(Basis(("brief",), np.arange(3), np.ones((1, 3), np.float32), WEIGHTS), at=0.0)
SHARE = 0.5


def steered(kl: float = 0.3) -> Steered:
    return Steered(basis=BASIS.hash, dials=(0.5,), cap=0.1, budget=3.0, tokens=10, kl=kl, features=(0.1,))


def fitted() -> DialTally:
    tally = DialTally()
    tally.basis(BASIS)
    return tally


def held_out(user: str) -> bool:
    return holdout_place((TURN.tenant, user)) < SHARE


def serve(tally: DialTally, user: str, good: bool, at: float = 10.0, lean: Steered | None = None) -> None:
    """A turn of a person, and its reward."""
    place = tally.turn(replace(TURN, user=user, ended_at=at, steered=lean))
    assert place == holdout_place((TURN.tenant, user))
    tally.reward(TURN.tenant, place, 1.0 if good else -1.0, at)


def crowd(tally: DialTally, rng: np.random.Generator, gain: float, people: int = 240, turns: int = 8) -> None:
    """People who accept as often as is their own, and `gain` more with dials."""
    for number in range(people):
        user, usual = f"u{number}", rng.uniform(0.2, 0.6)
        for _ in range(turns):
            lean = None if held_out(user) else steered()
            serve(tally, user, rng.random() < usual + (0.0 if lean is None else gain), lean=lean)


def test_a_gain_is_found_with_its_interval():
    tally = fitted()
    crowd(tally, np.random.default_rng(0), gain=0.3)
    found = tally.effect(SHARE)
    assert found.people + found.holdout == 240
    assert found.leaning == found.people
    assert found.difference == pytest.approx(0.3, abs=0.06)
    assert 0.1 < found.lower < found.difference < found.upper < 0.5
    assert found.accepted - found.held == pytest.approx(found.difference)
    assert found.token_kl == pytest.approx(0.03)
    assert found.spent == pytest.approx(0.1)
    assert found.mixed == 0


def test_without_a_gain_no_look_shows_one():
    """An interval for one look only would exclude 0 in several of these runs, each looked at forty times."""
    crossed = fixed = 0
    for seed in range(8):
        tally, rng, at_once = fitted(), np.random.default_rng(seed), False
        usual = {f"u{number}": rng.uniform(0.2, 0.6) for number in range(160)}
        for _ in range(40):
            for user in usual:
                if rng.random() < 0.25:
                    serve(tally, user, bool(rng.random() < usual[user]))
            found = tally.effect(SHARE)
            if found.lower is None:
                continue
            crossed += not found.lower <= 0.0 <= found.upper
            half = (found.upper - found.lower) / 2
            at_once |= abs(found.difference) > 0.6 * half  # about what 1.96 standard errors are of it
        fixed += at_once
    assert crossed == 0
    assert fixed >= 1


def test_who_rated_and_leans_is_not_who_is_compared():
    """People who are pleased anyway rate, and lean; dials do nothing. Those who lean look 40 points better, and are not compared."""
    tally, rng, leaning = fitted(), np.random.default_rng(1), []
    for number in range(300):
        user, pleased = f"u{number}", number % 2 == 0
        for _ in range(6):
            good = bool(rng.random() < (0.8 if pleased else 0.2))
            serve(tally, user, good, lean=steered() if pleased and not held_out(user) else None)
            leaning += [good] if pleased and not held_out(user) else []
    found = tally.effect(SHARE)
    assert np.mean(leaning) - found.held > 0.25
    assert found.lower < 0.0 < found.upper
    assert abs(found.difference) < 0.1
    assert 0.4 < found.leaning / found.people < 0.6


@pytest.mark.parametrize(
    "change",
    [
        {"arm": Arm.CONTROL},
        {"arm": Arm.EVAL},
        {"purpose": Purpose.SIDE},
        {"user": "anonymous"},
        {"verified": False},
        {"consent": Consent.NEVER},
        {"sampling": replace(TURN.sampling, grammar="start: /a/")},
        {"spans": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_turn_that_no_dial_could_have_steered_does_not_count(change):
    tally = fitted()
    assert tally.turn(replace(TURN, **change)) is None
    assert tally.effect(SHARE) is None
    assert tally.turn(TURN) is not None


def test_who_withdraws_the_consent_to_dials_stays_on_their_side():
    tally = fitted()
    assert tally.turn(replace(TURN, consent=Consent.AGGREGATE)) is not None


def test_turns_before_the_first_basis_and_of_versions_without_one_do_not_count():
    tally = DialTally()
    assert tally.turn(TURN) is None
    tally.basis(replace(BASIS, weights="f" * 64))
    assert tally.turn(TURN) is None
    tally.basis(BASIS)
    assert tally.turn(TURN) is not None


def test_users_that_nobody_proved_count_once_one_of_them_was_steered_and_not_that_turn_itself():
    tally = fitted()
    claimed = replace(TURN, verified=False)
    assert tally.turn(claimed) is None
    assert tally.turn(replace(claimed, user="bob", steered=steered())) is None
    assert tally.turn(claimed) is not None


def test_people_count_once_however_many_turns_they_make():
    tally = fitted()
    for number in range(80):
        for _ in range(3):
            serve(tally, f"u{number}", number % 3 == 0)
    before = tally.effect(SHARE)
    busy = next(f"u{number}" for number in range(80) if number % 3 and not held_out(f"u{number}"))
    for _ in range(5_000):
        serve(tally, busy, True)
    after = tally.effect(SHARE)
    assert after.people == before.people
    assert after.accepted - before.accepted < TURNS_A_DAY / 100


def test_a_holdout_that_was_raised_is_told():
    tally = fitted()
    crowd(tally, np.random.default_rng(2), gain=0.0, people=60, turns=1)
    assert tally.effect(SHARE).mixed == 0
    between = sum(SHARE <= holdout_place((TURN.tenant, f"u{number}")) < 0.8 for number in range(60))
    assert tally.effect(0.8).mixed == between > 0


def test_tenants_without_dials_are_left_out():
    tally = fitted()
    serve(tally, "ann", True)
    assert tally.effect(SHARE, [TURN.tenant]).people == 0
    assert tally.effect(SHARE, ["another"]).people + tally.effect(SHARE, ["another"]).holdout == 1


def test_counts_are_of_the_last_four_weeks_at_most():
    tally = fitted()
    serve(tally, "ann", True, at=0.0)
    serve(tally, "bob", True, at=PERIOD_S + 1)
    assert tally.effect(SHARE).since == 0.0
    assert tally.effect(SHARE).people + tally.effect(SHARE).holdout == 2
    serve(tally, "cid", True, at=2 * PERIOD_S + 2)
    found = tally.effect(SHARE)
    assert found.since == PERIOD_S + 1
    assert found.people + found.holdout == 2, "bob and cid"


def test_a_flood_of_names_takes_no_other_tenants_place_and_no_memory_without_end():
    tally = fitted()
    for number in range(MOST_PEOPLE + 50):
        tally.turn(replace(TURN, tenant="flood", user=f"u{number}"))
    serve(tally, "ann", True)
    found = tally.effect(0.0, ["flood"])
    assert found.people == 1
    assert found.accepted == 1.0
    assert found.full
    assert tally.effect(0.0).people == MOST_PEOPLE


@pytest.mark.parametrize(("user", "left"), [("ann", 1), (None, 0), ("u", 2)])
def test_who_is_forgotten_is_counted_no_longer(user, left):
    tally = fitted()
    serve(tally, "ann", True, at=0.0)
    serve(tally, "ann", True, at=PERIOD_S + 1)
    serve(tally, "bob", True, at=PERIOD_S + 2)
    tally.forget(Forgotten(id="f", tenant=TURN.tenant, user=user, key=1, at=PERIOD_S + 3))
    found = tally.effect(0.0)
    assert found.people == left


def test_a_saved_state_goes_on_as_if_it_had_not_been_and_names_nobody():
    tally = fitted()
    crowd(tally, np.random.default_rng(3), gain=0.1, people=50, turns=2)
    serve(tally, "Ann Example", True, at=PERIOD_S + 20)
    told = json.dumps(tally.state())
    assert "Ann" not in told
    again = DialTally.of(json.loads(told))
    assert again == tally
    for each in (tally, again):
        serve(each, "late", False, at=PERIOD_S + 2 * DAY, lean=steered(kl=0.0))
    assert again.effect(SHARE) == tally.effect(SHARE)
    assert again == tally
    assert math.isfinite(tally.effect(SHARE).difference)
