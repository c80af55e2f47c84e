"""A person's state is a function of the set of ratings: any order, repeated and retracted ones included, gives the same bits."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.adapt.learner import (
    MOST_BYTES,
    MOST_DIALS,
    Evidence,
    PersonState,
    Prior,
    Regression,
    names_hash,
    window,
)
from ostinato.adapt.prior import flat_prior
from ostinato.core.errors import Corrupt

DIALS = 3
NAMES = names_hash(("brief", "lists", "you"))
PRIOR = Prior.of(np.array([0.05, -0.02, 0.0]), 0.003 * np.eye(DIALS))
REGRESSION = Regression()


def features(place: int, dials: int = DIALS) -> list[float]:
    return (3.0 * np.random.default_rng(place).normal(size=dials)).tolist()


def fold(told: list[tuple[int, int, float]], state: PersonState | None = None) -> PersonState:
    """`told`: place, signal and reward of each rating, in the order in which they come; a negative reward retracts."""
    state = state or PersonState.new(NAMES, DIALS)
    for place, signal, reward in told:
        told = None if reward < 0 else reward
        state = state.rate(place, features(place), signal, told, PRIOR, REGRESSION)
    return state


def bits(state: PersonState) -> bytes:
    evidence = state.evidence(PRIOR, REGRESSION)
    numbers = (evidence.ratings, evidence.cusum, evidence.resets, evidence.reset_at)
    return evidence.precision_DD.tobytes() + evidence.shift_D.tobytes() + repr(numbers).encode()


RATINGS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0])),
    min_size=1,
    max_size=30,
    unique_by=lambda each: each[:2],
)


@given(told=RATINGS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_of_ratings_gives_the_same_bits(told: list[tuple[int, int, float]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(told))
    repeated = data.draw(st.lists(st.sampled_from(told), max_size=5))
    one, other = fold(shuffled + repeated), fold(sorted(told))
    assert bits(one) == bits(other)
    assert one.pack() == other.pack()


@given(told=RATINGS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_retracted_rating_leaves_no_trace(told: list[tuple[int, int, float]], data: st.DataObject) -> None:
    gone = data.draw(st.lists(st.sampled_from(told), unique=True))
    retracted = [(place, signal, -1.0) for place, signal, _ in gone]
    left = [each for each in told if each not in gone]
    assert bits(fold(told + retracted + retracted)) == bits(fold(left))
    assert bits(fold(data.draw(st.permutations(told + retracted)))) == bits(fold(left))


@given(late=st.integers(1, 8), data=st.data())
@settings(max_examples=20, deadline=None)
def test_ratings_later_than_answers_that_came_after_give_the_same_bits(late: int, data: st.DataObject) -> None:
    """Over many more answers than the window holds, each rating may be `late` answers late."""
    told = [(place, 1, float(data.draw(st.booleans()))) for place in range(1, 3 * window(DIALS))]
    keys = [place + data.draw(st.integers(0, late)) for place, _, _ in told]
    delayed = [each for _, each in sorted(zip(keys, told, strict=True), key=lambda pair: pair[0])]
    assert bits(fold(delayed)) == bits(fold(told))


EASY = Regression(drift=0.02, limit=0.7)
"""Returns people to the prior every few ratings."""
ACTS = st.one_of(
    st.tuples(st.just("rate"), st.integers(-6, 3), st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0, -1.25, None])),
    st.tuples(st.just("hold"), st.integers(0, DIALS - 1), st.just(0), st.sampled_from([-0.5, 0.25])),
    st.tuples(st.just("clear"), st.integers(0, DIALS - 1), st.just(0), st.just(0.0)),
    st.tuples(st.just("reset"), st.just(0), st.just(0), st.just(0.0)),
    st.tuples(st.just("struck"), st.integers(3, 6), st.just(0), st.just(0.0)),
)


@given(seed=st.integers(0, 1000), acts=st.lists(ACTS, max_size=25))
@settings(max_examples=80, deadline=None)
def test_what_is_read_has_the_bits_of_the_ratings_folded_one_by_one(
    seed: int, acts: list[tuple[str, int, int, float | None]]
) -> None:
    """Whatever was done to a state, and by whatever prior it is read afterwards."""
    rng, state, place = np.random.default_rng(seed), PersonState.new(NAMES, DIALS), 10
    for step in range(40):  # more than are kept one by one, of which acts lie between some
        what, number, signal, value = acts[step] if step < len(acts) else ("rate", 1, 1, float(rng.random() < 0.5))
        if what == "rate":
            place += max(0, number)
            state = state.rate(place + min(0, number), features(place), signal, value, PRIOR, EASY)
        elif what == "hold":
            state = state.hold({number: value or 0.0}, PRIOR, EASY)
        elif what == "clear":
            state = state.clear({number}, place, PRIOR, EASY)
        else:
            state = state.reset(place) if what == "reset" else state.struck(number)
        read = PersonState.unpack(state.pack(), EASY)
        one_by_one = replace(state, latest=None).ready(state.prior(PRIOR, EASY), EASY)
        assert bits(read) == bits(one_by_one) == bits(state)
        assert read.pack() == state.pack()
        newer = flat_prior(DIALS, variance=0.01)
        assert read.posterior(newer, EASY).mean_D.tobytes() == one_by_one.posterior(newer, EASY).mean_D.tobytes()


def test_reading_a_state_solves_nothing_where_the_cusum_returned_its_person_and_where_it_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for limit in (0.7, 3.6):
        regression = replace(EASY, limit=limit)
        state = PersonState.new(NAMES, DIALS)
        for place in range(1, 3 * window(DIALS)):
            state = state.rate(place, features(place), 1, float(place % 3 == 0), PRIOR, regression)
        inside = state.evidence(PRIOR, regression).reset_at > state.settled_at
        found[limit] = state, inside, bits(state)
    assert [inside for _, inside, _ in found.values()] == [True, False]

    def never(*_: object) -> None:
        raise AssertionError("an equation was solved")

    monkeypatch.setattr(np.linalg, "solve", never)
    monkeypatch.setattr(np.linalg, "inv", never)
    for limit, (state, _, expected) in found.items():
        assert bits(PersonState.unpack(state.pack(), replace(EASY, limit=limit))) == expected


def test_only_a_state_whose_evidence_is_known_is_packed() -> None:
    state = fold([(1, 1, 1.0), (2, 1, 0.0)])
    with pytest.raises(ValueError, match="call `ready` first"):
        replace(state, latest=None).pack()
    assert replace(state, latest=None).ready(PRIOR, REGRESSION).pack() == state.pack()


KEPT = [26, 24, 22, 20, 19, 17, 15, 14, 12, 11, 9, 8, 7, 5, 4, 3]
"""How many rated answers are kept one by one, by the number of dials, from 1."""


@pytest.mark.parametrize("dials", range(1, MOST_DIALS + 1))
def test_a_state_keeps_its_bits_in_at_most_a_kilobyte(dials: int) -> None:
    prior, state = flat_prior(dials), PersonState.new(NAMES, dials)
    for place in range(1, 4 * window(dials)):
        for signal in range(6):
            state = state.rate(place, features(place, dials), signal, signal / 5, prior, REGRESSION)
    state = state.hold(dict.fromkeys(range(dials), 0.3), prior, REGRESSION).spend(0.7)
    state = replace(state, cursor=1 << 40, private=bool(dials % 2))
    packed = state.pack()
    assert len(packed) <= MOST_BYTES
    assert len(state.recent) == window(dials) == KEPT[dials - 1]
    again = PersonState.unpack(packed, REGRESSION)
    assert again.pack() == packed
    assert (again.held, again.nats, again.cursor) == (state.held, state.nats, state.cursor)
    assert again.private is state.private
    kept, whole = again.posterior(prior, REGRESSION), state.posterior(prior, REGRESSION)
    assert kept.mean_D.tobytes() == whole.mean_D.tobytes()


@given(place=st.integers(0, 10_000), data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_bytes_are_refused(place: int, data: st.DataObject) -> None:
    packed = bytearray(fold([(1, 1, 1.0), (2, 1, 0.0)]).pack())
    packed[place % len(packed)] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        PersonState.unpack(bytes(packed), REGRESSION)
    with pytest.raises(Corrupt):
        PersonState.unpack(bytes(packed[: place % len(packed)]), REGRESSION)


def test_a_state_whose_counts_are_not_those_of_its_contents_is_corrupt() -> None:
    """Even if its check fits."""
    state = PersonState.new(NAMES, DIALS)
    for place in range(1, 3 * window(DIALS)):
        state = state.rate(place, features(place), 1, float(place % 3 == 0), PRIOR, EASY)
    packed, count = state.pack()[:-4], len(state.recent)
    returns, last = packed[65:67]
    first = 67 + 4 * (10 + 4) + 8 * count  # the number of the first answer's signals
    assert (packed[1:3], packed[first], 0 < last < count, returns > 0) == (bytes([DIALS, count]), 1, True, True)
    wrong = {place: {*range(256)} - {packed[place]} for place in (1, 2, first)}
    wrong |= {65: {0}, 66: set(range(count, 256))}  # no return, which has an answer; a return at no answer
    for place, values in wrong.items():
        for value in values:
            changed = packed[:place] + bytes([value]) + packed[place + 1 :]
            with pytest.raises(Corrupt):
                PersonState.unpack(changed + zlib.crc32(changed).to_bytes(4, "little"), EASY)


def test_an_answer_older_than_those_kept_changes_nothing() -> None:
    state = fold([(place, 1, 1.0) for place in range(10, 12 + window(DIALS))])
    assert state.settled_at == 11
    for place in (1, 10, 11):
        assert state.rate(place, features(place), 9, 0.0, PRIOR, REGRESSION) is state
        assert state.rate(place, features(place), 1, None, PRIOR, REGRESSION) is state


def test_forgetting_goes_towards_the_population_and_counts_ratings_only() -> None:
    """Ratings of answers without features tell nothing about the slopes, so after many of them the prior is back."""
    state = fold([(place, 1, float(features(place)[0] > 0)) for place in range(1, 60)])
    slopes = state.posterior(PRIOR, REGRESSION).mean_D[:DIALS]
    assert slopes[0] > PRIOR.mean_D[0] + 0.02
    assert bits(state) == bits(fold([], state))
    for place in range(60, 1200):
        state = state.rate(place, [0.0] * DIALS, 1, 0.5, PRIOR, REGRESSION)
    later = state.posterior(PRIOR, REGRESSION)
    assert np.abs(later.mean_D[:DIALS] - PRIOR.mean_D[:DIALS]).max() < 1e-3
    assert np.abs(later.covariance_DD[:DIALS, :DIALS] - PRIOR.covariance_DD[:DIALS, :DIALS]).max() < 1e-5


def test_the_mean_is_that_of_the_textbook_regression() -> None:
    """Weights decay ** (later ratings), and the prior with the weight one at all times."""
    count = 2 * window(DIALS)
    rows = np.array([[*np.float16(features(place)).tolist(), 1.0] for place in range(1, count + 1)])
    rewards = np.array([float(row[0] + row[1] > 0) for row in rows])
    state = fold([(place, 1, reward) for place, reward in enumerate(rewards.tolist(), 1)])
    weights = REGRESSION.decay ** np.arange(count - 1, -1, -1)
    precision = PRIOR.precision_DD + (rows * weights[:, None]).T @ rows / REGRESSION.noise
    mean = np.linalg.solve(precision, PRIOR.shift_D + rows.T @ (weights * rewards) / REGRESSION.noise)
    assert state.evidence(PRIOR, REGRESSION).resets == 0
    np.testing.assert_allclose(state.posterior(PRIOR, REGRESSION).mean_D, mean, rtol=0, atol=1e-5)


def test_a_person_whose_wishes_turn_is_returned_to_the_prior() -> None:
    """Steered answers lean to what the person wished, so after the turn they disappoint."""
    state = fold([(place, 1, float(features(place)[0] > 0)) for place in range(1, 50)])
    before = state.posterior(PRIOR, REGRESSION).mean_D[0]
    assert state.evidence(PRIOR, REGRESSION).resets == 0
    for place in range(50, 80):
        leaning = [abs(features(place)[0]), *features(place)[1:]]
        state = state.rate(place, leaning, 1, 0.0, PRIOR, REGRESSION)
    evidence = state.evidence(PRIOR, REGRESSION)
    assert evidence.resets >= 1
    assert 50 < evidence.reset_at < 80
    assert evidence.ratings <= 80 - evidence.reset_at
    assert state.posterior(PRIOR, REGRESSION).mean_D[0] < 0 < before
    assert PersonState.unpack(state.pack(), REGRESSION).evidence(PRIOR, REGRESSION).reset_at == evidence.reset_at


def test_a_dial_set_by_hand_is_what_it_was_set_to_and_moves_little() -> None:
    state = PersonState.new(NAMES, DIALS).hold({1: 0.5}, PRIOR, REGRESSION)
    how = {"tokens": 1000.0, "nats": 10.0, "strength": REGRESSION.strength}
    dials = state.posterior(PRIOR, REGRESSION).dials(np.eye(DIALS), **how)
    assert dials[1] == pytest.approx(0.5)
    rated = fold([(place, 1, float(features(place)[1] < 0)) for place in range(1, 6)], state)
    moved = rated.posterior(PRIOR, REGRESSION).dials(np.eye(DIALS), **how)
    free = fold([(place, 1, float(features(place)[1] < 0)) for place in range(1, 6)])
    assert moved[1] == pytest.approx(0.5, abs=0.02)
    assert free.posterior(PRIOR, REGRESSION).dials(np.eye(DIALS), **how)[1] < 0.0
    back = rated.reset(5)
    none = replace(Evidence.none(DIALS), reset_at=5)
    assert bits(back) == bits(replace(PersonState.new(NAMES, DIALS), settled=none, settled_at=5))
    assert fold([(3, 2, 1.0)], back) is back


def test_a_dial_that_is_cleared_is_as_if_nothing_had_been_said_of_it() -> None:
    """The others keep what was said of them, and answers of before are not taken in again."""
    state = fold([(place, 1, float(features(place)[1] < 0)) for place in range(1, 9)]).hold({0: 0.5}, PRIOR, REGRESSION)
    cleared = state.clear({0, 1}, 20, PRIOR, REGRESSION)
    blind = PersonState.new(NAMES, DIALS)
    for place in range(1, 9):
        seen = [0.0, 0.0, *features(place)[2:]]
        blind = blind.rate(place, seen, 1, float(features(place)[1] < 0), PRIOR, REGRESSION)
    for found, expected in zip(
        (cleared.posterior(PRIOR, REGRESSION).mean_D, cleared.posterior(PRIOR, REGRESSION).covariance_DD),
        (blind.posterior(PRIOR, REGRESSION).mean_D, blind.posterior(PRIOR, REGRESSION).covariance_DD),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
    assert cleared.held == ()
    assert fold([(3, 2, 0.0), (20, 1, 0.0)], cleared) is cleared
    assert fold([(21, 1, 0.0)], cleared) is not cleared
    assert bits(PersonState.unpack(cleared.pack(), REGRESSION)) == bits(cleared)
    assert bits(state.clear({0, 1}, 3, PRIOR, REGRESSION)) == bits(state.clear({0, 1}, 8, PRIOR, REGRESSION)), (
        "an answer that was taken in is never taken in twice"
    )


def test_dials_stay_within_the_quadratic_budget() -> None:
    state = fold([(place, 1, float(features(place)[0] > 0)) for place in range(1, 60)])
    posterior, fisher = state.posterior(PRIOR, REGRESSION), 9.0 * np.eye(DIALS)
    dials = np.array(posterior.dials(fisher, tokens=24.0, nats=0.1, strength=REGRESSION.strength))
    assert dials @ fisher @ dials / 2 == pytest.approx(24.0 * 0.1, rel=1e-5)
    free = posterior.dials(fisher, tokens=1e9, nats=0.1, strength=REGRESSION.strength)
    np.testing.assert_allclose(free, posterior.mean_D[:DIALS] / REGRESSION.strength, rtol=1e-6)
    assert Evidence.none(DIALS).ratings == 0


def test_what_cannot_be_a_learner_or_a_prior_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"decay is 1\.5; set more than 0 and at most 1"):
        Regression(decay=1.5)
    with pytest.raises(ValueError, match="positive definite"):
        Prior.of(np.zeros(2), -np.eye(2))
    with pytest.raises(ValueError, match="17 dials; a person has 1 to 16"):
        PersonState.new(NAMES, 17)
