"""Mask and drift against numbers worked out by hand: three turns, d = trainer - sampler."""

import math

import pytest
import torch

from ostinato.train.losses import drift, policy_loss, sequence_mask, turn_means

torch.set_num_threads(1)
LN2 = math.log(2)
# turn 0: ratios 2 and 8, geometric mean 4; turn 1: 2 and 1/2, mean 1; turn 2: one token at 1/3
D = torch.tensor([LN2, 3 * LN2, LN2, -LN2, -math.log(3)])
TURNS = torch.tensor([0, 0, 1, 1, 2])
BEHAVIOUR = torch.full((5,), -2.0)
NOW = BEHAVIOUR + D


def test_means_are_per_turn():
    assert turn_means(D, TURNS).tolist() == pytest.approx([2 * LN2, 0.0, -math.log(3)])


@pytest.mark.parametrize(
    ("bound", "kept"),
    [
        (1.01, [False, False, True, True, False]),
        (2.0, [False, False, True, True, False]),
        (3.5, [False, False, True, True, True]),
        (4.5, [True] * 5),
    ],
)
def test_a_turn_goes_as_a_whole_when_its_geometric_mean_ratio_leaves_the_bound(bound, kept):
    assert sequence_mask(NOW, BEHAVIOUR, TURNS, bound=bound).tolist() == kept


def test_no_difference_masks_nothing_and_weighs_exactly_one():
    keep = sequence_mask(BEHAVIOUR, BEHAVIOUR, TURNS, bound=1.0 + 1e-9)
    assert keep.all()
    result = policy_loss(
        BEHAVIOUR.clone().requires_grad_(True),
        behaviour_M=BEHAVIOUR,
        advantages_M=torch.ones(5),
        turns_M=TURNS,
        normaliser=3.0,
        keep_M=keep,
    )
    assert result.weights_M.tolist() == [1.0] * 5


def test_masked_turns_leave_the_loss_and_the_denominator():
    """With bound 2 only turn 1 stays: weights min(2, 2) = 2 and 1/2, advantage 0.5, two tokens of budget per turn."""
    logps = NOW.clone().requires_grad_(True)
    keep = sequence_mask(NOW, BEHAVIOUR, TURNS, bound=2.0)
    result = policy_loss(
        logps,
        behaviour_M=BEHAVIOUR,
        advantages_M=torch.tensor([3.0, 3.0, 0.5, 0.5, -1.0]),
        turns_M=TURNS,
        normaliser=1 * 2.0,  # one turn is left
        keep_M=keep,
    )
    assert result.weights_M.tolist() == pytest.approx([0, 0, 2.0, 0.5, 0])
    expected = -(2.0 * 0.5 * (-2 + LN2) + 0.5 * 0.5 * (-2 - LN2)) / 2
    assert result.loss.item() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(result.loss, logps)
    assert grad.tolist() == pytest.approx([0, 0, -0.5, -0.125, 0])


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
    ).loss
    assert loss.isnan()


def test_drift_in_full():
    found = drift(NOW, BEHAVIOUR, cap=2.0, prefix="x_", turns_M=TURNS)
    ratios = [2, 8, 2, 0.5, 1 / 3]
    logs = [math.log(r) for r in ratios]
    cut = [min(r, 2.0) for r in ratios]
    assert found == pytest.approx(
        {
            "x_tokens": 5.0,
            "x_differing": 5.0,
            "x_k1": -sum(logs) / 5,
            "x_k3": sum(r - 1 - d for r, d in zip(ratios, logs, strict=True)) / 5,
            "x_chi2": sum(r * r for r in ratios) / 5 - 1,
            "x_max_abs": 3 * LN2,
            "x_p99.9_abs": 3 * LN2,
            "x_over_ln2": found["x_over_ln2"],
            "x_truncated": found["x_truncated"],
            "x_ess": sum(cut) ** 2 / (5 * sum(w * w for w in cut)),
            "x_log_ppl_abs_diff": (2 * LN2 + 0.0 + math.log(3)) / 3,
        },
        abs=1e-6,
    )
    assert drift(NOW, BEHAVIOUR, cap=2.5, prefix="")["truncated"] == 0.2
    assert (
        drift(BEHAVIOUR + torch.tensor([0.7, -0.7, 0.6, 0.0, -5.0]), BEHAVIOUR, cap=2.0, prefix="")["over_ln2"] == 0.6
    )


def test_drift_of_equal_bits_is_zero_and_one_bit_is_one_difference():
    same = drift(NOW, NOW, cap=2.0, prefix="", turns_M=TURNS)
    assert (same["differing"], same["k1"], same["k3"], same["chi2"], same["max_abs"], same["ess"]) == (0, 0, 0, 0, 0, 1)
    one_bit = NOW.clone()
    one_bit[3] = torch.nextafter(one_bit[3], torch.tensor(0.0))
    assert drift(one_bit, NOW, cap=2.0, prefix="")["differing"] == 1
    assert drift(NOW[:0], NOW[:0], cap=2.0, prefix="") == {"tokens": 0.0, "differing": 0.0}


def test_turns_of_a_group_need_not_be_numbered_from_zero():
    found = drift(NOW[2:], BEHAVIOUR[2:], cap=2.0, prefix="", turns_M=torch.tensor([7, 7, 90]))
    assert found["log_ppl_abs_diff"] == pytest.approx(math.log(3) / 2)
