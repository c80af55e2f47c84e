"""Mask and drift against numbers worked out by hand, three turns, d = trainer - sampler, and against distributions that are known."""

import math

import pytest
import torch

from ostinato.train.losses import drift, policy_loss, sequence_mask, turn_means

torch.set_num_threads(1)
# turn 0: ratios 1.5 and 8, geometric mean sqrt(12) = 3.46; turn 1: 1.6 and 1/1.6, mean 1; turn 2: one token at 1/3
RATIOS = (1.5, 8.0, 1.6, 1 / 1.6, 1 / 3)
D = torch.tensor([math.log(ratio) for ratio in RATIOS])
TURNS = torch.tensor([0, 0, 1, 1, 2])
BEHAVIOUR = torch.full((5,), -2.0)
NOW = BEHAVIOUR + D


def test_means_are_per_turn():
    assert turn_means(D, TURNS).tolist() == pytest.approx([math.log(12) / 2, 0.0, -math.log(3)])


@pytest.mark.parametrize(
    ("bound", "kept"),
    [
        (1.01, [False, False, True, True, False]),
        (2.0, [False, False, True, True, False]),
        (3.4, [False, False, True, True, True]),
        (4.5, [True] * 5),
    ],
)
def test_a_turn_goes_as_a_whole_when_its_geometric_mean_ratio_leaves_the_bound(bound, kept):
    assert sequence_mask(NOW, BEHAVIOUR, TURNS, bound=bound).tolist() == kept


def test_a_turn_on_the_bound_stays():
    d = torch.tensor([1.0, -1.0, 1.0 + 1e-6, -1.0 - 1e-6])
    assert sequence_mask(d, torch.zeros(4), torch.arange(4), bound=math.e).tolist() == [True, True, False, False]


def test_no_difference_masks_nothing_and_weighs_exactly_one():
    keep = sequence_mask(BEHAVIOUR, BEHAVIOUR, TURNS, bound=1.0 + 1e-9)
    assert keep.all()
    logps = BEHAVIOUR.clone().requires_grad_(True)
    loss = policy_loss(
        logps, behaviour_M=BEHAVIOUR, advantages_M=torch.ones(5), turns_M=TURNS, normaliser=1.0, keep_M=keep
    )
    (grad,) = torch.autograd.grad(loss, logps)
    assert grad.tolist() == [-1.0] * 5


def test_masked_turns_leave_the_loss_and_the_denominator():
    """With bound 2 only turn 1 stays: weights 1.6 and 1/1.6 = 0.625, advantage 0.5, two tokens of budget per turn."""
    logps = NOW.clone().requires_grad_(True)
    keep = sequence_mask(NOW, BEHAVIOUR, TURNS, bound=2.0)
    loss = policy_loss(
        logps,
        behaviour_M=BEHAVIOUR,
        advantages_M=torch.tensor([3.0, 3.0, 0.5, 0.5, -1.0]),
        turns_M=TURNS,
        normaliser=1 * 2.0,  # one turn is left
        keep_M=keep,
    )
    expected = -(1.6 * 0.5 * (-2 + math.log(1.6)) + 0.625 * 0.5 * (-2 - math.log(1.6))) / 2
    assert loss.item() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(loss, logps)
    assert grad.tolist() == pytest.approx([0, 0, -0.4, -0.15625, 0])


def test_a_nan_stays_visible_under_the_mask():
    now = torch.tensor([float("nan"), -1.0])
    keep = sequence_mask(now, torch.tensor([-1.0, -1.0]), torch.tensor([0, 1]), bound=2.0)
    assert keep.tolist() == [False, True]
    loss = policy_loss(
        now,
        behaviour_M=torch.tensor([-1.0, -1.0]),
        advantages_M=torch.ones(2),
        turns_M=torch.tensor([0, 1]),
        normaliser=1.0,
        keep_M=keep,
    )
    assert loss.isnan()


def test_drift_in_full():
    """Worked out by hand from the five ratios; weights are cut at 2."""
    found = drift(NOW, BEHAVIOUR, cap=2.0, prefix="x_", turns_M=TURNS)
    assert found == pytest.approx(
        {
            "x_tokens": 5.0,
            "x_differing": 5.0,
            "x_k1": -0.277259,  # -(ln 1.5 + ln 8 + ln 1.6 - ln 1.6 - ln 3) / 5 = -ln(4) / 5
            "x_k3": 1.134408,  # (12.058333 - 5 - ln 4) / 5
            "x_chi2": 12.862347,  # (2.25 + 64 + 2.56 + 0.390625 + 0.111111) / 5 - 1
            "x_max_abs": 2.079442,  # ln 8
            "x_p99.9_abs": 2.079442,
            "x_over_ln2": 0.4,  # 8 and 1/3
            "x_truncated": 0.2,  # 8
            "x_ess": 0.788326,  # 6.058333^2 / (5 * (2.25 + 4 + 2.56 + 0.390625 + 0.111111))
            "x_log_ppl_abs_diff": 0.780355,  # (ln(12) / 2 + 0 + ln 3) / 3
        },
        abs=2e-6,
    )


def test_drift_of_a_million_tokens_is_what_the_distributions_say():
    """Tokens from a table, against sums over the table: KL, chi2 and the shares are expectations under who drew them."""
    torch.manual_seed(0)
    sampler, trainer = torch.randn(2, 50, dtype=torch.float64).log_softmax(1)
    y = torch.multinomial(sampler.exp(), 1_000_000, replacement=True)
    found = drift(trainer[y], sampler[y], cap=2.0, prefix="")
    p, ratio = sampler.exp(), (trainer - sampler).exp()
    cut = ratio.clamp(max=2.0)
    assert found["k1"] == pytest.approx(float((p * (sampler - trainer)).sum()), rel=0.01)
    assert found["k3"] == pytest.approx(float((p * (sampler - trainer)).sum()), rel=0.01)
    assert found["chi2"] == pytest.approx(float((p * ratio**2).sum() - 1), rel=0.03)
    assert found["over_ln2"] == pytest.approx(float(p[(ratio > 2) | (ratio < 0.5)].sum()), abs=0.003)
    assert found["truncated"] == pytest.approx(float(p[ratio > 2].sum()), abs=0.003)
    assert found["ess"] == pytest.approx(float((p * cut).sum() ** 2 / (p * cut**2).sum()), rel=0.01)


def test_drift_of_equal_bits_is_zero_and_one_bit_is_one_difference():
    same = drift(NOW, NOW, cap=2.0, prefix="", turns_M=TURNS)
    assert (same["differing"], same["k1"], same["k3"], same["chi2"], same["max_abs"], same["ess"]) == (0, 0, 0, 0, 0, 1)
    one_bit = NOW.clone()
    one_bit[3] = torch.nextafter(one_bit[3], torch.tensor(0.0))
    assert drift(one_bit, NOW, cap=2.0, prefix="")["differing"] == 1
    assert drift(NOW[:0], NOW[:0], cap=2.0, prefix="") == {"tokens": 0.0, "differing": 0.0}


def test_a_weight_at_the_cap_is_not_cut():
    assert drift(NOW, NOW, cap=1.0, prefix="")["truncated"] == 0
    assert drift(NOW, BEHAVIOUR, cap=1.0, prefix="")["truncated"] == pytest.approx(3 / 5)


def test_one_token_in_a_thousand_is_further_away_than_the_last_percentile():
    found = drift(torch.arange(2000.0) / 2000, torch.zeros(2000), cap=2.0, prefix="")
    assert (found["p99.9_abs"], found["max_abs"]) == pytest.approx((0.999, 0.9995))


def test_turns_of_a_group_need_not_be_numbered_from_zero():
    found = drift(NOW[2:], BEHAVIOUR[2:], cap=2.0, prefix="", turns_M=torch.tensor([7, 7, 90]))
    assert found["log_ppl_abs_diff"] == pytest.approx(math.log(3) / 2)
