"""Why the price of drift is k1 and not k3: the variance of both, as the policy moves away (Composer 2 report, figure 4)."""

import math

import pytest
import torch

from ostinato.train.losses import k1, k3, policy_loss

SAMPLES = 400_000


def estimates(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Both estimates of KL(N(0, 1) || N(distance, 1)) = distance^2 / 2, from samples of the first."""
    x = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy, reference = -(x**2) / 2, -((x - distance) ** 2) / 2
    return k1(policy, reference), k3(policy, reference)


@pytest.mark.parametrize("distance", [0.1, 0.5, 1.0])
def test_both_are_unbiased(distance: float):
    for found in estimates(distance):
        error = float(found.std()) / SAMPLES**0.5
        assert abs(float(found.mean()) - distance**2 / 2) < 5 * error


def test_near_the_reference_k3_varies_less_and_far_from_it_its_variance_blows_up():
    ratio = {}
    for distance in (0.1, 0.5, 1.0, 1.5, 2.0):
        of_k1, of_k3 = estimates(distance)
        exact = math.expm1(distance**2) - distance**2  # of k3; k1's is distance^2
        assert float(of_k1.var()) == pytest.approx(distance**2, rel=0.02)
        if distance <= 1.0:  # beyond, a sample of any size misses a part of k3's tail
            assert float(of_k3.var()) == pytest.approx(exact, rel=0.1)
        ratio[distance] = float(of_k3.var() / of_k1.var())
    assert ratio[0.1] < 0.01
    assert ratio[0.5] < ratio[1.0] < 1 < ratio[1.5] < ratio[2.0]
    assert ratio[2.0] > 5


def test_a_rollouts_tokens_pay_k1_in_full_whatever_the_number_of_its_turns():
    """Two turns of an episode in a group: the price is that of the tokens, not divided by the turns."""
    now = torch.log(torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64)).requires_grad_()
    reference = torch.log(torch.tensor([0.25, 0.25, 0.25], dtype=torch.float64))
    loss = policy_loss(
        now,
        behaviour_M=now.detach(),
        advantages_M=torch.zeros(3, dtype=torch.float64),
        turns_M=torch.tensor([0, 0, 1]),
        normaliser=1.0,
        penalties=[(reference, 0.1)],
        shares_M=torch.ones(3),
    )
    (found,) = torch.autograd.grad(loss, now)
    price = 0.1 * torch.log(torch.tensor(2.0, dtype=torch.float64))
    assert torch.allclose(found, torch.stack([price, torch.zeros_like(price), price]))


def test_a_token_is_weighed_by_the_version_that_drew_it_where_a_turn_has_several():
    """A stream that met a swap: each token's weight is the trainer's probability over that of its own version, cut at the cap."""
    now = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64)).requires_grad_()
    drawn = torch.log(torch.tensor([0.4, 0.4, 0.1, 0.5], dtype=torch.float64))  # v3, v3, v5, v6
    loss = policy_loss(
        now,
        behaviour_M=drawn,
        advantages_M=torch.full((4,), 0.5, dtype=torch.float64),
        turns_M=torch.zeros(4, dtype=torch.long),
        normaliser=1.0,
        cap=2.0,
    )
    (found,) = torch.autograd.grad(loss, now)
    assert torch.allclose(-found / 0.5, torch.tensor([1.25, 1.25, 2.0, 1.0], dtype=torch.float64))
