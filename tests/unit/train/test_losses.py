"""The loss against TRL's own numbers, against exact gradients, and against a decision whose threshold is known."""

import json
from pathlib import Path

import pytest
import torch

from ostinato.train.losses import drift, effective_share, k3, policy_loss, rewards_to_go, token_logprobs

torch.set_num_threads(1)
ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "trl_losses.json").read_text())


def flat(name: str) -> torch.Tensor:
    """A [turns, length] oracle tensor as the M sampled tokens."""
    mask = torch.tensor(ORACLE["inputs"]["mask"]).bool()
    value = torch.tensor(ORACLE["inputs"][name])
    return (value if value.ndim == 2 else value[:, None].expand(mask.shape))[mask]


def ours(normaliser: float, behaviour: torch.Tensor) -> tuple[float, torch.Tensor]:
    mask = torch.tensor(ORACLE["inputs"]["mask"]).bool()
    logps = flat("logps").requires_grad_(True)
    result = policy_loss(
        logps,
        behaviour_M=behaviour,
        advantages_M=flat("advantages"),
        turns_M=mask.nonzero()[:, 0],
        normaliser=normaliser,
        cap=ORACLE["cap"],
    )
    (grad,) = torch.autograd.grad(result.loss, logps)
    return result.loss.item(), grad


def theirs(case: str) -> tuple[float, torch.Tensor]:
    found = ORACLE["cases"][case]
    grad, mask = torch.tensor(found["grad"]), torch.tensor(ORACLE["inputs"]["mask"]).bool()
    assert (grad[~mask] == 0).all()
    return found["loss"], grad[mask]


def test_the_oracle_truncates_some_weights_and_not_others():
    ratio = (flat("logps") - flat("behaviour")).exp()
    assert 0 < (ratio > ORACLE["cap"]).float().mean() < 0.5
    assert ORACLE["trl"] == "1.16.0"


def test_loss_and_gradient_equal_trl_cispo():
    loss, grad = ours(len(flat("logps")), flat("behaviour"))
    their_loss, their_grad = theirs("cispo")
    assert loss == pytest.approx(their_loss, abs=1e-5)
    torch.testing.assert_close(grad, their_grad, atol=1e-5, rtol=0)


def test_gradient_equals_trl_dr_grpo_with_truncated_importance_sampling():
    turns = len(ORACLE["inputs"]["mask"])
    _, grad = ours(turns * ORACLE["max_length"], flat("behaviour"))
    torch.testing.assert_close(grad, theirs("dr_grpo_tis")[1], atol=1e-5, rtol=0)


def test_gradient_equals_trl_rloo_on_policy():
    _, grad = ours(len(ORACLE["inputs"]["mask"]), flat("logps"))
    torch.testing.assert_close(grad, theirs("rloo")[1], atol=1e-5, rtol=0)


def test_k3_equals_trl():
    assert k3(flat("logps"), flat("reference")).mean().item() == pytest.approx(
        ORACLE["cases"]["kl_k3"]["metrics"]["kl"], abs=1e-5
    )


def test_token_logprobs_equal_trl():
    case = ORACLE["cases"]["logprobs"]
    logits = torch.tensor(case["logits"], requires_grad=True)
    targets = torch.tensor(case["targets"])
    found = token_logprobs(lambda x: x, logits, targets, torch.full((5,), case["temperature"]))
    torch.testing.assert_close(found, torch.tensor(case["logprobs"]), atol=1e-5, rtol=0)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(grad, torch.tensor(case["grad"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_in_chunks_equal_one_log_softmax(dtype: torch.dtype):
    torch.manual_seed(0)
    head = torch.randn(97, 16, dtype=dtype, requires_grad=True)
    hidden = torch.randn(150, 16, dtype=dtype, requires_grad=True)
    targets, heat, grad = torch.randint(0, 97, (150,)), 0.5 + torch.rand(150), torch.randn(150)
    plain = ((hidden @ head.T).float() / heat[:, None]).log_softmax(1).gather(1, targets[:, None])[:, 0]
    found = token_logprobs(lambda x: x @ head.T, hidden, targets, heat, rows=64)
    torch.testing.assert_close(found, plain)
    expected, got = (torch.autograd.grad(x, (hidden, head), grad) for x in (plain, found))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4 if dtype == torch.float32 else 0.1, rtol=0.02)


def test_the_kl_penalty_is_the_reward_to_go_of_k1():
    logps, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.7])
    result = policy_loss(
        logps,
        behaviour_M=logps,
        advantages_M=torch.ones(3),
        turns_M=torch.tensor([0, 0, 1]),
        normaliser=1.0,
        reference_M=reference,
        beta=0.1,
    )
    assert result.advantages_M.tolist() == pytest.approx([1 - 0.1 * (0.5 - 1.0), 1 + 0.1, 1 - 0.1 * 0.2])
    assert result.weights_M.tolist() == [1.0, 1.0, 1.0]


def test_rewards_to_go_stay_inside_their_turn():
    assert rewards_to_go(torch.tensor([1.0, 2, 4, 8]), torch.tensor([5, 5, 5, 9])).tolist() == [7, 6, 4, 8]


def test_effective_share_of_equal_weights_is_one_and_of_a_single_weight_one_over_n():
    assert effective_share(torch.full((8,), 0.3)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([1.0, 0, 0, 0])) == pytest.approx(0.25)
    assert effective_share(torch.zeros(4)) == 0.0


def test_drift_of_equal_logprobs_is_exactly_zero_and_of_a_shift_is_known():
    logps = torch.linspace(-3, -0.1, 50)
    same = drift(logps, logps, cap=2.0, prefix="x_")
    assert same["x_max_abs"] == same["x_k1"] == same["x_k3"] == same["x_truncated"] == 0.0
    assert same["x_ess"] == pytest.approx(1.0)
    moved = drift(logps + 1.0, logps, cap=2.0, prefix="x_")
    assert moved["x_k1"] == pytest.approx(-1.0, abs=1e-5)
    assert moved["x_k3"] == pytest.approx(torch.e - 2, abs=1e-5)
    assert moved["x_truncated"] == 1.0


# ---------------------------------------------------------------- the estimator against exact mathematics


def test_single_rollout_gradient_points_where_the_exact_gradient_does():
    """Two-token turns from softmax tables, one rollout each, sampled by an older policy than the one that learns."""
    torch.manual_seed(3)
    V, n = 5, 100_000
    first, second = torch.randn(V, requires_grad=True), torch.randn(V, V, requires_grad=True)
    reward = torch.randn(V, V)
    old_first, old_second = (first + 0.05 * torch.randn(V)).detach(), (second + 0.05 * torch.randn(V, V)).detach()
    joint = first.softmax(0)[:, None] * second.softmax(1)
    exact = torch.cat([g.flatten() for g in torch.autograd.grad((joint * reward).sum(), (first, second))])

    a = torch.multinomial(old_first.softmax(0), n, replacement=True)
    b = torch.multinomial(old_second.softmax(1)[a], 1)[:, 0]
    logps = torch.stack([first.log_softmax(0)[a], second.log_softmax(1)[a, b]], 1).flatten()
    behaviour = torch.stack([old_first.log_softmax(0)[a], old_second.log_softmax(1)[a, b]], 1).flatten()
    scores = reward[a, b]
    result = policy_loss(
        logps,
        behaviour_M=behaviour,
        advantages_M=(scores - scores.mean()).repeat_interleave(2),
        turns_M=torch.arange(n).repeat_interleave(2),
        normaliser=float(n),
    )
    found = -torch.cat([g.flatten() for g in torch.autograd.grad(result.loss, (first, second))])
    assert torch.cosine_similarity(found, exact, dim=0) >= 0.99
    assert found.norm() == pytest.approx(exact.norm().item(), rel=0.1)


@pytest.mark.parametrize(("p", "shows"), [(0.20, False), (0.23, False), (0.27, True), (0.30, True)])
def test_a_bandit_with_the_copilot_reward_shows_only_above_its_threshold(p: float, shows: bool):
    """+0.75 if a shown suggestion is accepted, -0.25 if it is not, 0 for silence: showing pays exactly if p > 0.25."""
    torch.manual_seed(int(p * 100))
    logits = torch.zeros(2, requires_grad=True)  # silence, show
    n = 4000
    for _ in range(60):
        logps = logits.log_softmax(0)
        action = torch.multinomial(logps.detach().exp(), n, replacement=True)
        accepted = torch.rand(n) < p
        reward = torch.where(action == 1, torch.where(accepted, 0.75, -0.25), 0.0)
        result = policy_loss(
            logps[action],
            behaviour_M=logps.detach()[action],
            advantages_M=reward - reward.mean(),
            turns_M=torch.arange(n),
            normaliser=float(n),
        )
        (grad,) = torch.autograd.grad(result.loss, logits)
        with torch.no_grad():
            logits -= 20.0 * grad
    assert (logits.softmax(0)[1].item() > 0.5) is shows
    assert abs(logits.softmax(0)[1].item() - 0.5) > 0.2
