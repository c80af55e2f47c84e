"""The loss against TRL's own numbers, against exact gradients, and against a decision whose threshold is known."""

import json
from pathlib import Path

import pytest
import torch

from ostinato.train import policy as head_module
from ostinato.train.losses import importance_weights, k3, policy_loss, rewards_to_go, turn_ess
from ostinato.train.policy import token_logprobs

torch.set_num_threads(1)
ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "trl_losses.json").read_text())


def credit(loss: torch.Tensor, logps: torch.Tensor) -> list[float]:
    """Weight times advantage of each token: what the loss, with a normaliser of 1, moves its log-probability by."""
    return (-torch.autograd.grad(loss, logps)[0]).tolist()


def flat(name: str) -> torch.Tensor:
    """A [turns, length] oracle tensor as the M sampled tokens."""
    mask = torch.tensor(ORACLE["inputs"]["mask"]).bool()
    value = torch.tensor(ORACLE["inputs"][name])
    return (value if value.ndim == 2 else value[:, None].expand(mask.shape))[mask]


def ours(normaliser: float, behaviour: torch.Tensor) -> tuple[float, torch.Tensor]:
    mask = torch.tensor(ORACLE["inputs"]["mask"]).bool()
    logps = flat("logps").requires_grad_(True)
    loss = policy_loss(
        logps,
        behaviour_M=behaviour,
        advantages_M=flat("advantages"),
        turns_M=mask.nonzero()[:, 0],
        normaliser=normaliser,
        cap=ORACLE["cap"],
    )
    (grad,) = torch.autograd.grad(loss, logps)
    return loss.item(), grad


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
    found = token_logprobs(lambda x: x.clone(), logits, targets, torch.full((5,), case["temperature"]))
    torch.testing.assert_close(found, torch.tensor(case["logprobs"]), atol=1e-5, rtol=0)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(grad, torch.tensor(case["grad"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("vocabulary", [97, 112])  # with and without a rest after the last 16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_in_chunks_equal_one_log_softmax(
    dtype: torch.dtype, vocabulary: int, keep: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(head_module, "_CHUNK", 64)
    torch.manual_seed(0)
    head = torch.randn(vocabulary, 16, dtype=dtype, requires_grad=True)
    hidden = torch.randn(150, 16, dtype=dtype, requires_grad=True)
    targets, heat, grad = torch.randint(0, vocabulary, (150,)), 0.5 + torch.rand(150), torch.randn(150)
    plain = ((hidden @ head.T).float() / heat[:, None]).log_softmax(1).gather(1, targets[:, None])[:, 0]
    found = token_logprobs(lambda x: x @ head.T, hidden, targets, heat, keep=keep)
    torch.testing.assert_close(found, plain)
    expected, got = (torch.autograd.grad(x, (hidden, head), grad) for x in (plain, found))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4 if dtype == torch.float32 else 0.1, rtol=0.02)


def test_the_kl_penalty_is_the_reward_to_go_of_k1():
    logps, reference = torch.tensor([-1.0, -2.0, -0.5]).requires_grad_(), torch.tensor([-1.5, -1.0, -0.7])
    loss = policy_loss(
        logps,
        behaviour_M=logps.detach(),
        advantages_M=torch.ones(3),
        turns_M=torch.tensor([0, 0, 1]),
        normaliser=1.0,
        penalties=[(reference, 0.1)],
    )
    assert credit(loss, logps) == pytest.approx([1 - 0.1 * (0.5 - 1.0), 1 + 0.1, 1 - 0.1 * 0.2])


def test_rewards_to_go_stay_inside_their_turn():
    assert rewards_to_go(torch.tensor([1.0, 2, 4, 8]), torch.tensor([5, 5, 5, 9])).tolist() == [7, 6, 4, 8]
    found = rewards_to_go(torch.tensor([1.0, 2, 4, 8, 16]), torch.tensor([0, 0, 1, 1, 2]))
    assert (found.tolist(), found.dtype) == ([3, 2, 12, 8, 16], torch.float32)


def test_weights_are_truncated_at_two_unless_told_otherwise():
    behaviour, turns = torch.full((3,), -2.0), torch.tensor([0, 0, 0])
    now = (behaviour + torch.tensor([1.5, 1.9, 2.5]).log()).requires_grad_()
    rest = {"behaviour_M": behaviour, "advantages_M": torch.ones(3), "turns_M": turns, "normaliser": 1.0}
    assert credit(policy_loss(now, **rest), now) == pytest.approx([1.5, 1.9, 2.0])
    assert credit(policy_loss(now, cap=1.6, **rest), now) == pytest.approx([1.5, 1.6, 1.6])


# ---------------------------------------------------------------- the estimator against exact mathematics


NOISE = 0.8  # of the older policy's logits: enough that leaving its weights out, or turning them round, shows


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Same direction and, within a tenth, the same length."""
    cosine = torch.cosine_similarity(found, exact, dim=0)
    return bool(cosine >= 0.99) and abs(found.norm() / exact.norm() - 1).item() < 0.1


def as_recorded(now: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    return behaviour


def without_weights(now: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """As if all were 1."""
    return now


def inverted(now: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """As if each were mu / pi."""
    return 2 * now - behaviour


def gradient(
    logps: torch.Tensor, behaviour: torch.Tensor, scores: torch.Tensor, into: tuple, **settings
) -> torch.Tensor:
    """-dL with one advantage per turn, less the mean; turns have as many tokens as `logps` has columns."""
    n, length = logps.shape
    loss = policy_loss(
        logps.flatten(),
        behaviour_M=behaviour.flatten(),
        advantages_M=(scores - scores.mean()).repeat_interleave(length),
        turns_M=torch.arange(n).repeat_interleave(length),
        normaliser=float(n),
        **settings,
    )
    return -torch.cat([g.flatten() for g in torch.autograd.grad(loss, into)])


@pytest.mark.parametrize(("recorded", "right"), [(as_recorded, True), (without_weights, False), (inverted, False)])
def test_turns_of_one_token_give_the_exact_gradient_from_an_older_policys_samples(recorded, right: bool):
    """Here a token's weight is its whole turn's, so without truncation the estimator is unbiased. Eight contexts, six tokens."""
    torch.manual_seed(3)
    contexts, V, n = 8, 6, 100_000
    policy, reward = torch.randn(contexts, V, requires_grad=True), torch.randn(contexts, V)
    old = (policy + NOISE * torch.randn(contexts, V)).detach().log_softmax(1)
    exact = torch.autograd.grad((policy.softmax(1) * reward).sum() / contexts, policy)[0].flatten()
    x = torch.randint(0, contexts, (n,))
    y = torch.multinomial(old.exp()[x], 1)[:, 0]
    logps = policy.log_softmax(1)[x, y][:, None]
    behaviour = recorded(logps.detach(), old[x, y][:, None])
    found = gradient(logps, behaviour, reward[x, y], (policy,), cap=1e9)
    assert close(found, exact) is right


@pytest.mark.parametrize(("recorded", "right"), [(as_recorded, True), (without_weights, False), (inverted, False)])
def test_turns_of_two_tokens_give_the_expectation_that_the_docstring_writes(recorded, right: bool):
    """Two-token turns, one rollout each, weights truncated at 2; the expectation over the older policy is a sum over all 25 turns.

    Truncated token weights are biased off-policy: the expectation is near the exact gradient's direction and not it.
    """
    torch.manual_seed(5)
    V, n, cap = 5, 200_000, 2.0
    tables = (torch.randn(V, requires_grad=True), torch.randn(V, V, requires_grad=True))
    reward = torch.randn(V, V)
    first, second = (table.log_softmax(-1) for table in tables)
    old_first, old_second = ((table + NOISE * torch.randn_like(table)).detach().log_softmax(-1) for table in tables)
    drawn = old_first.exp()[:, None] * old_second.exp()
    w1, w2 = ((one - other).detach().exp().clamp(max=cap) for one, other in ((first, old_first), (second, old_second)))
    advantage = reward - (drawn * reward).sum()
    surrogate = (drawn * advantage * (w1[:, None] * first[:, None] + w2 * second)).sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(surrogate, tables, retain_graph=True)])
    joint = first.exp()[:, None] * second.exp()
    exact = torch.cat([g.flatten() for g in torch.autograd.grad((joint * reward).sum(), tables, retain_graph=True)])
    assert not close(expected, exact)
    assert torch.cosine_similarity(expected, exact, dim=0) > 0.8

    a = torch.multinomial(old_first.exp(), n, replacement=True)
    b = torch.multinomial(old_second.exp()[a], 1)[:, 0]
    logps = torch.stack([first[a], second[a, b]], 1)
    behaviour = recorded(logps.detach(), torch.stack([old_first[a], old_second[a, b]], 1))
    assert close(gradient(logps, behaviour, reward[a, b], tables, cap=cap), expected) is right


LENGTH = 16


def sixteen(scale: float):
    """All 65,536 turns of 16 bits under a policy that remembers the whole turn and under an older one: the policy's tables, both
    policies' log-probabilities [N, 16], and each turn's reward."""
    noise = torch.Generator().manual_seed(2)
    n = torch.arange(1 << LENGTH)
    before = [n >> (LENGTH - t) for t in range(LENGTH)]
    bit = [(n >> (LENGTH - 1 - t)) & 1 for t in range(LENGTH)]
    old = [torch.randn(1 << t, 2, generator=noise) for t in range(LENGTH)]
    moved = [torch.randn(1 << t, 2, generator=noise) for t in range(LENGTH)]
    tables = [(x + scale * y).requires_grad_() for x, y in zip(old, moved, strict=True)]

    def chosen(tables):
        return torch.stack([x.log_softmax(-1)[i, j] for x, i, j in zip(tables, before, bit, strict=True)], 1)

    return tables, chosen(tables), chosen(old), torch.randn(1 << LENGTH, generator=noise)


@pytest.mark.parametrize("least", [None, 0.3])
def test_on_the_policys_own_turns_the_gradient_is_exact(least):
    tables, now_NT, _, reward_N = sixteen(0.0)
    chance_N = now_NT.sum(1).exp()
    exact = torch.autograd.grad((chance_N * reward_N).sum(), tables, retain_graph=True)
    loss = policy_loss(
        now_NT.flatten(),
        behaviour_M=now_NT.detach().flatten(),
        advantages_M=(reward_N - 0.3).repeat_interleave(LENGTH),
        turns_M=torch.arange(1 << LENGTH).repeat_interleave(LENGTH),
        normaliser=1.0,
        shares_M=chance_N.detach().repeat_interleave(LENGTH),
        least_ess=least,
    )
    for found, wanted in zip(torch.autograd.grad(loss, tables), exact, strict=True):
        torch.testing.assert_close(-found, wanted, atol=1e-6, rtol=1e-3)


def test_turns_that_are_weighted_as_a_whole_give_the_exact_gradients_direction():
    tables, now_NT, old_NT, reward_N = sixteen(0.315)
    drawn_N = old_NT.sum(1).exp()
    advantage_N = reward_N - (drawn_N * reward_N).sum()
    drift = (drawn_N[:, None] * k3(torch.zeros_like(old_NT), (now_NT - old_NT).detach())).sum() / LENGTH
    assert 0.019 < drift < 0.025, "nats per token, from the samples' policy to the trainer's"
    turns_M = torch.arange(1 << LENGTH).repeat_interleave(LENGTH)

    def flat(gradients):
        return torch.cat([each.flatten() for each in gradients])

    exact = flat(torch.autograd.grad((now_NT.sum(1).exp() * advantage_N).sum(), tables, retain_graph=True))
    cosines = {}
    for least in (None, 0.3):
        loss = policy_loss(
            now_NT.flatten(),
            behaviour_M=old_NT.flatten(),
            advantages_M=advantage_N.repeat_interleave(LENGTH),
            turns_M=turns_M,
            normaliser=1.0,
            shares_M=drawn_N.repeat_interleave(LENGTH),
            least_ess=least,
        )
        found = -flat(torch.autograd.grad(loss, tables, retain_graph=True))
        cosines[least] = float(torch.cosine_similarity(found, exact, dim=0))
    assert cosines[0.3] > 0.97
    assert cosines[None] < 0.9, "with weights per token"
    weighted = (turn_ess((now_NT - old_NT).detach().flatten(), turns_M) >= 0.3).double()
    assert (drawn_N * weighted).sum() > 0.8, "of the turns"


def test_a_turn_is_weighted_as_a_whole_only_where_its_own_ess_allows_it():
    d_M, turns_M = torch.tensor([0.5, 0.4, -0.2, 1.2, -1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 2, 2, 3, 3])
    expected = torch.tensor([0.5**2 + 0.4**2, 0.2**2, 1.2**2 + 1, 0.0]).neg().exp()
    torch.testing.assert_close(turn_ess(d_M, turns_M), expected.double(), rtol=1e-6, atol=0)
    found = importance_weights(d_M, turns_M, cap=2.0, turn_cap=2.2, least_ess=0.3)
    wanted = [2.2, 2.2, torch.tensor(-0.2).exp(), 2.0, torch.tensor(-1.0).exp(), 1.0, 1.0]
    assert found.tolist() == pytest.approx([float(x) for x in wanted])
    per_token = importance_weights(d_M, turns_M, cap=2.0, turn_cap=2.2, least_ess=None)
    assert per_token.tolist() == pytest.approx(d_M.exp().clamp(max=2.0).tolist())
    assert found[5:].tolist() == per_token[5:].tolist() == [1.0, 1.0], "on the policy's own samples no bit differs"


def test_the_price_of_a_turn_is_the_kl_where_it_was():
    """Two one-token turns of one episode, the second's context chosen by the first: the expected gradient is that of the sum of both
    turns' KL with the way to the second one held fixed, and not that of the KL of the whole episode."""
    torch.manual_seed(1)
    V, beta = 4, 0.7
    tables = (torch.randn(V, requires_grad=True), torch.randn(V, V, requires_grad=True))
    references = (torch.randn(V).log_softmax(0), torch.randn(V, V).log_softmax(1))
    first, second = (table.log_softmax(-1) for table in tables)
    joint = (first[:, None] + second).detach().exp().flatten()
    a, b = (index.flatten() for index in torch.meshgrid(torch.arange(V), torch.arange(V), indexing="ij"))
    logps = torch.stack([first[a], second[a, b]], 1).flatten()
    loss = policy_loss(
        logps,
        behaviour_M=logps.detach(),
        advantages_M=torch.zeros(2 * V * V),
        turns_M=torch.arange(2 * V * V),
        normaliser=1.0,
        shares_M=joint.repeat_interleave(2),  # the expectation: each way counts with its probability
        penalties=[(torch.stack([references[0][a], references[1][a, b]], 1).flatten(), beta)],
    )
    found = torch.cat([g.flatten() for g in torch.autograd.grad(loss, tables, retain_graph=True)])
    kl_first = (first.exp() * (first - references[0])).sum()
    kl_second = (second.exp() * (second - references[1])).sum(1)
    of_turns = beta * (kl_first + first.exp().detach() @ kl_second)
    of_episode = beta * (kl_first + first.exp() @ kl_second)
    expected, other = (
        torch.cat([g.flatten() for g in torch.autograd.grad(kl, tables, retain_graph=True)])
        for kl in (of_turns, of_episode)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert (found - other).abs().max() > 0.01


def test_several_penalties_add_up():
    logps = torch.tensor([-1.0, -2.0]).requires_grad_()
    one, other = torch.tensor([-1.5, -1.0]), torch.tensor([-0.5, -2.5])
    loss = policy_loss(
        logps,
        behaviour_M=logps.detach(),
        advantages_M=torch.zeros(2),
        turns_M=torch.tensor([0, 0]),
        normaliser=1.0,
        penalties=[(one, 0.1), (other, 0.2)],
    )
    assert credit(loss, logps) == pytest.approx([-(0.05 - 0.1) - (-0.1 + 0.1), 0.1 - 0.1], abs=1e-7)


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
        loss = policy_loss(
            logps[action],
            behaviour_M=logps.detach()[action],
            advantages_M=reward - reward.mean(),
            turns_M=torch.arange(n),
            normaliser=float(n),
        )
        (grad,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= 20.0 * grad
    assert (logits.softmax(0)[1].item() > 0.5) is shows
    assert abs(logits.softmax(0)[1].item() - 0.5) > 0.2
