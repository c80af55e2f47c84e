"""The posterior against an oracle that keeps every reward, and against users who say too much."""

import json
import math

import numpy as np
import pytest

from ostinato.release.auto.posterior import Posterior


def oracle(said, rho):
    """Mean and cluster-robust deviation of rewards in [0, 1], by loops over users; two made-up users stand at the ends."""
    users = [(1.0, 0.0), (1.0, 1.0)]
    for rewards in said.values():
        n = len(rewards)
        users.append((n / (1 + (n - 1) * rho), sum(rewards) / n))
    total = sum(w for w, _ in users)
    mean = sum(w * y for w, y in users) / total
    squares = sum(w * w * (y - mean) ** 2 for w, y in users)
    return mean, math.sqrt(len(users) / (len(users) - 1) * squares) / total


def filled(said, **options):
    posterior = Posterior(low=0.0, high=1.0, **options)
    for user, rewards in said.items():
        for reward in rewards:
            posterior.add(("acme", user), reward)
    return posterior


def crowd(rng, users, chance=0.6):
    return {f"u{i}": rng.binomial(1, chance, rng.integers(1, 9)).astype(float).tolist() for i in range(users)}


@pytest.mark.parametrize("rho", [0.15, 0.5, 1.0])
def test_sums_say_what_every_reward_says(rho):
    said = crowd(np.random.default_rng(1), 60)
    belief = filled(said, rho=rho).belief()
    assert (belief.mean, belief.deviation) == pytest.approx(oracle(said, rho), rel=1e-9)
    assert belief.users == 60


def test_with_nobody_it_is_half_of_the_range_either_way():
    belief = Posterior(low=-1.0, high=3.0).belief()
    assert (belief.mean, belief.deviation, belief.users) == (1.0, 2.0, 0.0)


def test_users_who_all_agree_leave_a_doubt():
    """The made-up users keep the deviation above 0, where the users' own would be 0."""
    belief = filled({f"u{i}": [1.0] for i in range(20)}).belief()
    assert belief.deviation > 0.04
    assert 0.9 < belief.mean < 1.0


def test_the_order_of_rewards_does_not_matter():
    said = crowd(np.random.default_rng(2), 30)
    turns = [(user, reward) for user, rewards in said.items() for reward in rewards]
    posterior = Posterior(low=0.0, high=1.0)
    for i in np.random.default_rng(3).permutation(len(turns)):
        posterior.add(("acme", turns[i][0]), turns[i][1])
    assert posterior.belief().mean == pytest.approx(filled(said).belief().mean, rel=1e-12)
    assert posterior.belief().deviation == pytest.approx(filled(said).belief().deviation, rel=1e-12)


def test_a_thousand_upvotes_of_one_user_move_the_mean_by_less_than_half_a_point():
    said = crowd(np.random.default_rng(4), 200, chance=0.5)
    quiet, loud = filled(said), filled(said)
    for _ in range(1000):
        loud.add(("acme", "mallory"), 1.0)
    assert 0.0 < loud.belief().mean - quiet.belief().mean <= 0.005
    assert loud.belief().deviation == pytest.approx(quiet.belief().deviation, rel=0.02)


def test_a_reward_beyond_the_range_counts_as_its_end():
    assert filled({"u": [1e9]}).belief() == filled({"u": [1.0]}).belief()


def test_coverage_over_users_who_differ():
    """Rewards that correlate by 0.15 within users, 1 to 8 turns each: about 95% of intervals of 1.96 deviations hold the truth."""
    rng, held = np.random.default_rng(5), 0
    for _ in range(400):
        tastes = rng.beta(0.6 * (1 / 0.15 - 1), 0.4 * (1 / 0.15 - 1), 80)
        said = {f"u{i}": rng.binomial(1, p, rng.integers(1, 9)).astype(float).tolist() for i, p in enumerate(tastes)}
        belief = filled(said).belief()
        held += abs(belief.mean - 0.6) < 1.96 * belief.deviation
    assert 0.92 <= held / 400 <= 0.98


def test_the_state_goes_through_json_and_on():
    said = crowd(np.random.default_rng(6), 25)
    posterior, again = filled(said), Posterior(low=0.0, high=1.0)
    again.restore(json.loads(json.dumps(posterior.state())))
    for each in (posterior, again):
        each.add(("acme", "u3"), 1.0)
    assert again.belief() == posterior.belief()


@pytest.mark.parametrize(
    "state",
    [{}, {"sums": [1.0], "users": []}, {"sums": [0.0] * 5 + [float("nan")], "users": []}, {"sums": 1, "users": 2}],
)
def test_a_state_of_something_else_is_refused(state):
    posterior = filled({"u": [1.0]})
    before = posterior.belief()
    with pytest.raises((ValueError, TypeError, LookupError)):
        posterior.restore(state)
    assert posterior.belief() == before


def test_fading_keeps_the_mean_and_widens_the_doubt():
    posterior = filled(crowd(np.random.default_rng(7), 400))
    before = posterior.belief()
    posterior.fade(0.25)
    after = posterior.belief()
    assert after.mean == pytest.approx(before.mean, abs=0.005)
    assert after.deviation == pytest.approx(2 * before.deviation, rel=0.05)
    posterior.fade(0.0)
    assert posterior.belief().deviation == 0.5


def test_users_who_are_forgotten_stay_in_the_sums():
    said = crowd(np.random.default_rng(8), 50)
    assert filled(said, most_users=5).belief().mean == pytest.approx(filled(said).belief().mean)
    assert len(filled(said, most_users=5).state()["users"]) == 5


def test_what_is_no_range_or_no_number_is_refused():
    with pytest.raises(ValueError, match="range"):
        Posterior(low=1.0, high=1.0)
    with pytest.raises(ValueError, match="rho"):
        Posterior(low=0.0, high=1.0, rho=0.0)
    with pytest.raises(ValueError, match="not a number"):
        Posterior(low=0.0, high=1.0).add(("acme", "u"), float("nan"))
    with pytest.raises(ValueError, match="share"):
        Posterior(low=0.0, high=1.0).fade(1.5)


def test_a_little_doubt_lets_a_few_users_speak_for_themselves():
    firm, soft = Posterior(low=0.0, high=1.0), Posterior(low=0.0, high=1.0, doubt=0.1)
    assert soft.belief() == firm.belief(), "with nobody yet it is the same"
    for user in range(20):
        firm.add(("acme", f"u{user}"), 0.0)
        soft.add(("acme", f"u{user}"), 0.0)
    assert firm.belief().mean == pytest.approx(1 / 22)
    assert soft.belief().mean == pytest.approx(0.1 / 20.2)
    with pytest.raises(ValueError, match="doubt"):
        Posterior(low=0.0, high=1.0, doubt=0.0)
