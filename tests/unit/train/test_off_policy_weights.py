"""A policy that has left its samples gets no trust, in whatever way it left; one that is a few steps ahead keeps most of it."""

import math

import pytest
import torch

from ostinato.train.losses import effective_share, trust

torch.set_num_threads(1)
TURNS, LENGTH = 64, 36
TURNS_M = torch.arange(TURNS).repeat_interleave(LENGTH)
ONES = torch.ones(TURNS * LENGTH)


def of(d: torch.Tensor, shares: torch.Tensor = ONES, turns: torch.Tensor = TURNS_M):
    return trust(d, turns, shares, cap=2.0, horizon=64)


def normal(mean: float, deviation: float) -> torch.Tensor:
    return mean + deviation * torch.randn(TURNS * LENGTH, generator=torch.Generator().manual_seed(0))


def test_equal_log_probabilities_are_worth_exactly_one():
    found = of(torch.zeros(TURNS * LENGTH), torch.rand(TURNS, generator=torch.Generator().manual_seed(1))[TURNS_M])
    assert (found.mean_weight, found.k3, found.ess, found.ess_turns, found.scale) == (1, 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("d", "least_seen"),
    [
        (normal(-12.0, 0.0), "mean_weight"),  # a uniform shift: all weights are equal, and none is near 1
        (normal(12.0, 0.0), "mean_weight"),
        (normal(-1.0, 0.0), "mean_weight"),
        (normal(0.0, 3.0), "k3"),  # heavy tails around 1
        (normal(-4.5, 3.0), "k3"),  # heavy tails whose mean is 1
        (-normal(0.0, 1.0).abs(), "ess_turns"),  # all to one side
        (torch.where(TURNS_M < 60, -0.8, 0.0), "ess_turns"),  # four turns of 64 are still where they were
    ],
)
def test_a_policy_that_left_its_samples_has_no_trust(d: torch.Tensor, least_seen: str):
    found = of(d)
    seen = {
        "mean_weight": not 0.5 <= found.mean_weight <= 2.0,
        "k3": found.k3 > 1.0,
        "ess_turns": found.ess_turns < 0.1,
    }
    assert seen[least_seen], found
    assert found.scale < 0.4, found


def test_the_tokens_ess_alone_sees_none_of_it():
    """What the guard looked at before: 1.0 for a shift, above a tenth for tails of 3 nats, and for turns of which four are left."""
    assert of(normal(-12.0, 0.0)).ess == pytest.approx(1.0)
    assert of(normal(0.0, 3.0)).ess > 0.1
    assert of(torch.where(TURNS_M < 60, -0.8, 0.0)).ess > 0.8


def test_a_few_steps_of_drift_keep_most_of_it():
    """Weights whose mean is 1: d ~ N(-s^2/2, s^2) has KL = s^2/2 nats per token."""
    for kl, least in ((0.0005, 0.9), (0.002, 0.8), (0.01, 0.5)):
        found = of(normal(-kl, math.sqrt(2 * kl)))
        assert found.k3 == pytest.approx(kl, rel=0.15)
        assert found.scale > least, (kl, found)


def test_trust_falls_with_the_distance_whatever_its_shape():
    for shape in (
        lambda x: normal(-x, 0.0),
        lambda x: normal(0.0, x),
        lambda x: -normal(0.0, x).abs(),
        lambda x: torch.where(TURNS_M < 60, -x, 0.0),
    ):
        scales = [of(shape(x)).scale for x in (0.0, 0.05, 0.2, 0.8, 3.0)]
        assert scales == sorted(scales, reverse=True), scales
        assert scales[0] == 1.0
        assert scales[-1] < 0.3


def test_turns_count_with_their_parts_of_their_episodes():
    """Twenty turns of one episode that moved away together are one episode in 45, and not a third of the batch."""
    d = torch.where(TURNS_M < 20, -3.0, 0.0)
    shares = torch.where(TURNS_M < 20, 1 / 20, 1.0)
    assert of(d).ess_turns == pytest.approx(44 / 64, abs=0.01)
    assert of(d, shares).ess_turns == pytest.approx(44 / 45, abs=0.01)
    w = math.exp(-3)
    assert of(d, shares).ess == pytest.approx((44 + w) ** 2 / (45 * (44 + w * w)), rel=1e-3)
    assert of(d, shares).mean_weight == pytest.approx((44 + math.exp(-3)) / 45, rel=1e-3)


def test_a_long_turn_weighs_like_its_average_stretch():
    long = torch.full((1000,), -0.01)
    ours = trust(long, torch.zeros(1000, dtype=torch.long), torch.ones(1000), cap=2.0, horizon=64)
    assert ours.ess_turns == pytest.approx(1.0)  # one turn is always as large as itself
    d = torch.cat([long, torch.zeros(1000)])
    turns = torch.arange(2).repeat_interleave(1000)
    pair = trust(d, turns, torch.ones(2000), cap=2.0, horizon=64)
    w = math.exp(-0.64)
    assert pair.ess_turns == pytest.approx((1 + w) ** 2 / (2 * (1 + w * w)), rel=1e-4)


def test_effective_share_of_equal_weights_is_one_and_of_a_single_weight_one_over_n():
    assert effective_share(torch.full((8,), 0.3)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([1.0, 0, 0, 0])) == pytest.approx(0.25)
    assert effective_share(torch.zeros(4)) == 0.0
    assert effective_share(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 1.0])) == pytest.approx(0.75)
