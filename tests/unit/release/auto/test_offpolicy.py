"""Off-policy estimates against sums by hand, against each other, and against what they promise: coverage."""

from itertools import product

import numpy as np
import pytest

from ostinato.release.auto.offpolicy import (
    LoggedTurns,
    cross_fitted,
    difference,
    doubly_robust,
    earned,
    evaluation_weights,
    ips,
    snips,
)


def by_hand(turns, odds, target, predicted):
    """The three estimators as loops over (arm, reward), as the papers write them."""
    n, arms = len(turns), range(len(odds[0]))
    squares = [sum(target[i][a] ** 2 for i in range(n)) / n for a in arms]
    h = [sum(squares[a] / odds[i][a] for a in arms) ** -0.5 for i in range(n)]
    weights = [target[i][arm] / odds[i][arm] for i, (arm, _) in enumerate(turns)]
    values = [w * r for w, (_, r) in zip(weights, turns, strict=True)]
    direct = [sum(t * q for t, q in zip(target[i], predicted[i], strict=True)) for i in range(n)]
    shifts = [w * (r - predicted[i][arm]) for i, (w, (arm, r)) in enumerate(zip(weights, turns, strict=True))]

    def total(numbers):
        return sum(each * number for each, number in zip(h, numbers, strict=True))

    scores = [a + b for a, b in zip(direct, shifts, strict=True)]
    return total(values) / sum(h), total(values) / total(weights), total(scores) / sum(h)


def logged_of(turns, users, odds=None):
    """Turns as (arm, propensity, reward), of two arms; or with their odds given."""
    arms, propensities, rewards = (np.array(column) for column in zip(*turns, strict=True))
    if odds is None:
        odds = np.stack([np.where(arms == a, propensities, 1.0 - propensities) for a in (0, 1)], axis=1)
    return LoggedTurns(users_N=np.array(users), arms_N=arms, odds_NA=np.array(odds), rewards_N=rewards)


def test_the_formulas_are_the_sums_by_hand():
    turns = [(0, 1.0), (1, 0.0), (2, 0.5), (0, 0.2), (1, 1.0)]
    odds = [[0.5, 0.3, 0.2], [0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.7, 0.2, 0.1], [0.8, 0.1, 0.1]]
    target = [[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.0, 1.0, 0.0], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]]
    predicted = [[0.5, 0.4, 0.3], [0.2, 0.9, 0.1], [0.6, 0.5, 0.4], [0.1, 0.2, 0.3], [0.7, 0.8, 0.9]]
    logged = LoggedTurns(
        users_N=np.array([0, 0, 1, 1, 2]),
        arms_N=np.array([arm for arm, _ in turns]),
        odds_NA=np.array(odds),
        rewards_N=np.array([reward for _, reward in turns]),
    )
    target_NA, predicted_NA = np.array(target), np.array(predicted)
    found = (ips(logged, target_NA), snips(logged, target_NA), doubly_robust(logged, target_NA, predicted_NA))
    assert [each.mean for each in found] == pytest.approx(by_hand(turns, odds, target, predicted), rel=1e-12)
    assert all(each.users == 3 and each.lower < each.mean < each.upper for each in found)


def test_the_right_mean_over_every_draw_that_could_have_been():
    """All outcomes of two draws from known odds, weighed by their probability: IPS and DR have no bias, with a bad model too."""
    p = [(0.8, 0.2), (0.8, 0.2)]
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
    logged = LoggedTurns(users_N=rng.integers(0, 20, 50), arms_N=arms, odds_NA=odds_NA, rewards_N=rng.random(50))
    value = ips(logged, odds_NA)
    assert value.mean == pytest.approx(earned(logged).mean) == pytest.approx(logged.rewards_N.mean())
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


def test_turns_count_as_the_root_of_the_odds_and_none_for_more_because_fewer_arms_were_there():
    odds_NA = np.array([[0.5, 0.5], [0.9, 0.1], [0.98, 0.02], [1.0, 0.0], [1.0, 0.0]])
    target_NA = np.array([[0.0, 1.0]] * 3 + [[1.0, 0.0]] * 2)
    logged = LoggedTurns(users_N=np.arange(5), arms_N=np.zeros(5, dtype=int), odds_NA=odds_NA, rewards_N=np.ones(5))
    found = evaluation_weights(logged, target_NA)
    assert found[1] / found[0] == pytest.approx((0.1 / 0.5) ** 0.5)
    assert found[2] / found[0] == pytest.approx((0.02 / 0.5) ** 0.5)
    assert found[:3].mean() == pytest.approx(1.0)
    assert found[3:] == pytest.approx([1.0, 1.0])


def test_a_router_that_learned_is_estimated_without_the_bias_of_giving_up_early():
    """Two arms, alike; whoever disappoints in the first 20 turns keeps 2%: intervals for the loser alone hold about what they say."""
    rng, target_NA = np.random.default_rng(5), np.tile([0.0, 1.0], (220, 1))
    held, plain = 0, 0
    for _ in range(300):
        arms_N, odds_NA = np.empty(220, dtype=int), np.full((220, 2), 0.5)
        rewards_N = (rng.random(220) < 0.5).astype(float)
        arms_N[:20] = rng.random(20) < 0.5
        second = rewards_N[:20][arms_N[:20] == 1]
        odds_NA[20:] = [0.95, 0.05] if second.size and second.mean() < 0.5 else [0.05, 0.95]
        arms_N[20:] = rng.random(200) < odds_NA[20:, 1]
        logged = LoggedTurns(users_N=np.arange(220), arms_N=arms_N, odds_NA=odds_NA, rewards_N=rewards_N)
        value = snips(logged, target_NA)
        held += value.lower <= 0.5 <= value.upper
        weights_N = arms_N / odds_NA[:, 1]
        mean = weights_N @ rewards_N / weights_N.sum()
        error = np.sqrt(((weights_N * (rewards_N - mean)) ** 2).sum()) / weights_N.sum()
        plain += abs(mean - 0.5) <= 1.96 * error
    assert held / 300 > 0.92
    assert held > plain


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
    logged = LoggedTurns(users_N=users_N, arms_N=arms_N, odds_NA=np.full((40, 2), 0.5), rewards_N=rewards_N)
    predicted_NA = cross_fitted(logged, np.zeros(40, dtype=int), arms=2)
    assert predicted_NA[users_N == 3] == pytest.approx(0.5)
    assert predicted_NA[users_N == 4].min() > 1.0


def test_a_context_or_an_arm_that_was_not_seen_falls_back():
    users_N, arms_N = np.arange(8), np.array([0, 1, 0, 1, 0, 1, 0, 1])
    rewards_N = np.array([0.0, 1.0] * 4)
    logged = LoggedTurns(users_N=users_N, arms_N=arms_N, odds_NA=np.full((8, 2), 0.5), rewards_N=rewards_N)
    contexts_N = np.array([0, 0, 0, 0, 0, 0, 0, 1])
    predicted_NA = cross_fitted(logged, contexts_N, arms=3, folds=8)
    assert predicted_NA[7] == pytest.approx([0.0, 1.0, 3 / 7])
    assert predicted_NA[0] == pytest.approx([0.0, 1.0, 4 / 7])


def test_what_does_not_fit_is_refused():
    one, even = np.array([0, 1]), np.full((2, 2), 0.5)
    for odds_NA, users_N, said in (
        (np.full((3, 2), 0.5), one, "one length"),
        (even, one * 0, "2 users"),
        (np.array([[0.0, 1.0], [0.5, 0.5]]), one, "propensity"),
        (np.full((2, 2), 0.7), one, "sum to 1"),
    ):
        with pytest.raises(ValueError, match=said):
            LoggedTurns(users_N=users_N, arms_N=one, odds_NA=odds_NA, rewards_N=np.ones(2))
    logged = LoggedTurns(users_N=one, arms_N=one, odds_NA=even, rewards_N=np.ones(2))
    with pytest.raises(ValueError, match="was not available"):
        ips(
            LoggedTurns(users_N=one, arms_N=one, odds_NA=np.eye(2), rewards_N=np.ones(2)),
            np.full((2, 2), 0.5),
        )
    with pytest.raises(ValueError, match="shape"):
        ips(logged, np.ones((2, 1)))
    with pytest.raises(ValueError, match="sum to 1"):
        ips(logged, np.full((2, 2), 0.7))
    with pytest.raises(ValueError, match="none of these turns"):
        snips(logged, np.array([[0.0, 1.0], [1.0, 0.0]]))
    with pytest.raises(ValueError, match="predictions"):
        doubly_robust(logged, np.full((2, 2), 0.5), np.full((2, 2), np.nan))


def test_a_difference_of_arms_is_that_of_their_self_normalised_means_with_users_as_clusters():
    rng, rows = np.random.default_rng(2), []
    for user in range(12):
        for _ in range(6):
            odds = rng.dirichlet([2.0, 2.0, 2.0])
            arm = int(rng.choice(3, p=odds))
            rows.append((user, arm, odds, float(rng.random() < (0.7, 0.4, 0.5)[arm])))
    users, arms, odds, rewards = (np.array(column) for column in zip(*rows, strict=True))
    logged = LoggedTurns(users_N=users, arms_N=arms, odds_NA=odds, rewards_N=rewards)
    means, errors = [], np.zeros(12)
    for sign, each in ((1.0, 0), (-1.0, 2)):
        weights = [(user, 1.0 / odd[each], reward) for user, arm, odd, reward in rows if arm == each]
        total = sum(weight for _, weight, _ in weights)
        means.append(sum(weight * reward for _, weight, reward in weights) / total)
        for user, weight, reward in weights:
            errors[user] += sign * weight * (reward - means[-1]) / total
    found = difference(logged, 0, 2)
    assert found.mean == pytest.approx(means[0] - means[1], rel=1e-12)
    assert found.error == pytest.approx((12 / 11 * float(errors @ errors)) ** 0.5, rel=1e-12)
    assert found.upper - found.mean == pytest.approx(2.200985 * found.error, rel=1e-5)  # Student's t with 11
    with pytest.raises(ValueError, match="never drawn"):
        difference(LoggedTurns(users_N=users, arms_N=0 * arms, odds_NA=odds, rewards_N=rewards), 0, 2)
