"""Off-policy estimates against sums by hand, against each other, and against what they promise: coverage."""

from itertools import product

import numpy as np
import pytest

from ostinato.release.auto.offpolicy import LoggedTurns, cross_fitted, doubly_robust, ips, snips


def by_hand(turns, target, predicted):
    """The three estimators as loops over (arm, propensity, reward), as `obp` writes them."""
    n = len(turns)
    weights = [target[i][arm] / p for i, (arm, p, _) in enumerate(turns)]
    values = [w * r for w, (_, _, r) in zip(weights, turns, strict=True)]
    direct = [sum(t * q for t, q in zip(target[i], predicted[i], strict=True)) for i in range(n)]
    shifts = [w * (r - predicted[i][arm]) for i, (w, (arm, _, r)) in enumerate(zip(weights, turns, strict=True))]
    return sum(values) / n, sum(values) / sum(weights), (sum(direct) + sum(shifts)) / n


def logged_of(turns, users):
    arms, propensities, rewards = (np.array(column) for column in zip(*turns, strict=True))
    return LoggedTurns(users_N=np.array(users), arms_N=arms, propensities_N=propensities, rewards_N=rewards)


def test_the_formulas_are_the_sums_by_hand():
    turns = [(0, 0.5, 1.0), (1, 0.25, 0.0), (2, 0.25, 0.5), (0, 0.7, 0.2), (1, 0.1, 1.0)]
    target = [[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.0, 1.0, 0.0], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]]
    predicted = [[0.5, 0.4, 0.3], [0.2, 0.9, 0.1], [0.6, 0.5, 0.4], [0.1, 0.2, 0.3], [0.7, 0.8, 0.9]]
    logged, target_NA, predicted_NA = logged_of(turns, [0, 0, 1, 1, 2]), np.array(target), np.array(predicted)
    found = (ips(logged, target_NA), snips(logged, target_NA), doubly_robust(logged, target_NA, predicted_NA))
    assert [each.mean for each in found] == pytest.approx(by_hand(turns, target, predicted), rel=1e-12)
    assert all(each.users == 3 and each.lower < each.mean < each.upper for each in found)


def test_the_right_mean_over_every_draw_that_could_have_been():
    """All outcomes of two draws from known propensities, weighed by their probability: IPS and DR have no bias, with a bad model too."""
    p = [(0.8, 0.2), (0.3, 0.7)]
    rewards, target_NA = [(0.3, 0.9), (0.5, 0.1)], np.array([[0.4, 0.6], [0.9, 0.1]])
    wrong_NA = np.array([[5.0, -3.0], [2.0, 2.0]])
    truth = float((target_NA * np.array(rewards)).sum() / 2)
    means = np.zeros(2)
    for arms in product((0, 1), repeat=2):
        chance = p[0][arms[0]] * p[1][arms[1]]
        logged = logged_of([(a, p[i][a], rewards[i][a]) for i, a in enumerate(arms)], [0, 1])
        means += chance * np.array([ips(logged, target_NA).mean, doubly_robust(logged, target_NA, wrong_NA).mean])
    assert means == pytest.approx([truth, truth], rel=1e-12)


def test_the_logging_router_itself_is_its_own_mean():
    rng = np.random.default_rng(1)
    arms = rng.choice(2, 50, p=[0.7, 0.3])
    odds_NA = np.tile([0.7, 0.3], (50, 1))
    logged = LoggedTurns(
        users_N=rng.integers(0, 20, 50), arms_N=arms, propensities_N=odds_NA[0][arms], rewards_N=rng.random(50)
    )
    value = ips(logged, odds_NA)
    assert value.mean == pytest.approx(logged.rewards_N.mean())
    assert value.turns == pytest.approx(50.0)
    assert snips(logged, odds_NA).mean == pytest.approx(value.mean)


def test_the_error_is_that_of_leaving_out_one_user_at_a_time():
    rng = np.random.default_rng(3)
    users, odds_NA = rng.integers(0, 12, 40), np.tile([0.3, 0.7], (40, 1))
    turns = [(int(rng.integers(2)), float(rng.uniform(0.2, 1.0)), float(rng.random())) for _ in range(40)]
    logged = logged_of(turns, users)
    for estimate in (ips, snips):
        left_out = []
        for user in np.unique(users):
            kept = users != user
            rest = logged_of([turn for turn, keep in zip(turns, kept, strict=True) if keep], users[kept])
            left_out.append(estimate(rest, odds_NA[kept]).mean)
        k = len(left_out)
        squares = sum((mean - estimate(logged, odds_NA).mean) ** 2 for mean in left_out)
        assert estimate(logged, odds_NA).error == pytest.approx(((k - 1) / k * squares) ** 0.5, rel=1e-9)


def test_what_rests_on_one_user_has_no_bounds():
    logged = logged_of([(0, 0.5, 1.0), (1, 0.5, 0.0), (1, 0.5, 0.5)], [0, 1, 2])
    assert snips(logged, np.tile([1.0, 0.0], (3, 1))).upper == float("inf")


def test_turns_of_one_user_are_one_piece_of_evidence():
    """A user's turns said twice over must not narrow the interval."""
    rng = np.random.default_rng(2)
    turns = [(int(rng.integers(2)), 0.5, float(rng.random())) for _ in range(60)]
    once = logged_of(turns, range(60))
    twice = logged_of(turns * 2, [*range(60)] * 2)
    for estimate in (ips, snips):
        narrow = estimate(twice, np.full((120, 2), 0.5)).error
        assert narrow == pytest.approx(estimate(once, np.full((60, 2), 0.5)).error, rel=1e-9)


def test_a_model_is_made_of_other_users_only():
    """A user whose rewards are all odd leaves no trace in what is predicted for their own turns."""
    users_N = np.repeat(np.arange(10), 4)
    arms_N = np.tile([0, 1, 0, 1], 10)
    rewards_N = np.where(users_N == 3, 100.0, 0.5)
    logged = LoggedTurns(users_N=users_N, arms_N=arms_N, propensities_N=np.full(40, 0.5), rewards_N=rewards_N)
    predicted_NA = cross_fitted(logged, np.zeros(40, dtype=int), arms=2)
    assert predicted_NA[users_N == 3] == pytest.approx(0.5)
    assert predicted_NA[users_N == 4].min() > 1.0


def test_a_context_or_an_arm_that_was_not_seen_falls_back():
    users_N, arms_N = np.arange(8), np.array([0, 1, 0, 1, 0, 1, 0, 1])
    rewards_N = np.array([0.0, 1.0] * 4)
    logged = LoggedTurns(users_N=users_N, arms_N=arms_N, propensities_N=np.full(8, 0.5), rewards_N=rewards_N)
    contexts_N = np.array([0, 0, 0, 0, 0, 0, 0, 1])
    predicted_NA = cross_fitted(logged, contexts_N, arms=3, folds=8)
    assert predicted_NA[7] == pytest.approx([0.0, 1.0, 3 / 7])
    assert predicted_NA[0] == pytest.approx([0.0, 1.0, 4 / 7])


def test_what_does_not_fit_is_refused():
    one = np.array([0, 1])
    with pytest.raises(ValueError, match="one length"):
        LoggedTurns(users_N=one, arms_N=one, propensities_N=np.ones(3), rewards_N=np.ones(2))
    with pytest.raises(ValueError, match="2 users"):
        LoggedTurns(users_N=one * 0, arms_N=one, propensities_N=np.ones(2), rewards_N=np.ones(2))
    with pytest.raises(ValueError, match="propensity"):
        LoggedTurns(users_N=one, arms_N=one, propensities_N=np.array([0.0, 1.0]), rewards_N=np.ones(2))
    logged = LoggedTurns(users_N=one, arms_N=one, propensities_N=np.ones(2), rewards_N=np.ones(2))
    with pytest.raises(ValueError, match="shape"):
        ips(logged, np.ones((2, 1)))
    with pytest.raises(ValueError, match="sum to 1"):
        ips(logged, np.full((2, 2), 0.7))
    with pytest.raises(ValueError, match="none of these turns"):
        snips(logged, np.array([[0.0, 1.0], [1.0, 0.0]]))
    with pytest.raises(ValueError, match="predictions"):
        doubly_robust(logged, np.full((2, 2), 0.5), np.full((2, 2), np.nan))
