"""What the backward pass computes by itself equals what autograd makes of the library's own modules, for every architecture we take."""

import math
from pathlib import Path

import pytest
import torch
from tests.devices import TORCH
from tests.grids import covering
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.norms import RMSNorm
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import SUPPORTED, tiny_moe, tiny_of
from ostinato.train.config import TrainConfig
from ostinato.train.linear_gradients import select_rows, sum_gradients_into
from ostinato.train.masters import sum_of_squares
from ostinato.train.microbatch import temperatures, token_turns
from ostinato.train.packing import pack
from ostinato.train.policy import Policy
from ostinato.train.tree_attention import TreeAttention

torch.set_num_threads(1)
FP32 = TrainConfig(compute="fp32", publish="fp32")
BACKENDS = {"own": OWN, "torch": TORCH}


def turns():
    """Two branches of one prompt and a turn of its own, with a padding token (259) among them."""
    shared = list(range(5, 45))
    return [
        a_turn("a:0", prompt=shared, sampled=range(100, 140)),
        a_turn("b:0", prompt=[*shared, 259, 7], sampled=range(60, 95)),
        a_turn("c:0", prompt=[3, 259, 4], sampled=(9, 9, 1)),
    ]


def arithmetic(config: TrainConfig) -> torch.dtype:
    return torch.bfloat16 if config.compute == "bf16" else torch.float32


def ours(
    path: Path, config: TrainConfig, coefficients: torch.Tensor, backend: ComputeBackend = OWN
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found, sums, _ = passed(path, config, coefficients, backend)
    return found, sums


def passed(path: Path, config: TrainConfig, coefficients: torch.Tensor, backend: ComputeBackend = OWN):
    """Log-probabilities, the gradient of their sum times `coefficients`, and the names of those parameters whose part autograd made."""
    policy = Policy(path, arithmetic(config), config, backend=backend)
    sums = {name: torch.zeros(p.shape, device=p.device) for name, p in policy.model.named_parameters()}
    policy.model.requires_grad_(True)
    sum_gradients_into(policy.model, sums)
    packed = pack(token_turns(turns()))
    found = policy.logprobs(packed, TreeAttention(packed), temperatures(turns()))
    (found * coefficients).sum().backward()
    by_autograd = {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    for name in by_autograd:
        sums[name] += policy.model.get_parameter(name).grad
    return found.detach(), {name: total.cpu() for name, total in sums.items()}, by_autograd


def theirs(path: Path, coefficients: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Turn by turn, in fp32, with the library's own modules, PyTorch's cross-entropy and autograd."""
    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager"), []
    for turn in turns():
        ids = torch.tensor(turn.prompt_ids + turn.sampled_ids)
        rows = model(ids[None, :-1], use_cache=False).logits[0, len(turn.prompt_ids) - 1 :]
        found.append(-F.cross_entropy(rows, torch.tensor(turn.sampled_ids), reduction="none"))
    (torch.cat(found) * coefficients).sum().backward()
    return torch.cat(found).detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def coefficients() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(sum(len(turn.sampled_ids) for turn in turns()))


@pytest.mark.parametrize(
    ("kind", "kernels", "recompute_tokens"), covering([*SUPPORTED, "moe"], [*BACKENDS], [0, 10_000], diagonals=2)
)
def test_every_gradient_is_autograds(kind: str, kernels: str, recompute_tokens: int, tmp_path: Path):
    path = tiny_moe(tmp_path / "moe", "mixtral") if kind == "moe" else tiny_of(tmp_path / "zoo", SUPPORTED[kind]())
    config = FP32.model_copy(update={"recompute_tokens": recompute_tokens})
    found, sums = ours(path, config, coefficients(), BACKENDS[kernels])
    expected, gradients = theirs(path, coefficients())
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert gradients
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(sums[name], gradient, atol=2e-4 * scale + 1e-6, rtol=1e-3, msg=name)


def llama(path: Path, **changes) -> Path:
    """Tied, with a padding token whose embedding is a constant."""
    shape = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "pad_token_id": 259,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "tie_word_embeddings": True}
    return tiny_of(path, LlamaConfig(**shape | heads | changes))


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({}, True),
        ({"mlp_bias": True, "attention_bias": True}, True),
        ({"hidden_act": "gelu_pytorch_tanh"}, True),
        ({"hidden_act": "gelu"}, False),
    ],
)
def test_gated_layers_are_fused_and_no_others(changes: dict, fused: bool, tmp_path: Path):
    path = llama(tmp_path / "model", **changes)
    found, sums = ours(path, FP32, coefficients())
    expected, gradients = theirs(path, coefficients())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(sums[name], gradient, atol=1e-4 * gradient.abs().max().item(), rtol=1e-3, msg=name)
    assert ("_GatedDown" in graph(path)) is fused


def graph(path: Path) -> set[str]:
    """Names of the functions that the backward pass goes through."""
    policy, packed = Policy(path, torch.float32, FP32), pack(token_turns(turns()))
    policy.model.requires_grad_(True)
    sum_gradients_into(policy.model, {name: torch.zeros(p.shape) for name, p in policy.model.named_parameters()})
    waiting = [policy.logprobs(packed, TreeAttention(packed), temperatures(turns())).grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [earlier for earlier, _ in node.next_functions]
    return {node.name().removesuffix("Backward") for node in seen}


@pytest.mark.parametrize("backend", [OWN, TORCH], ids=["own", "torch"])
def test_no_matrix_gets_its_gradient_as_a_tensor_of_its_own(backend: ComputeBackend, tmp_path: Path):
    """They are added where they are summed, those of the embedding and of the head that shares its weight too: only norms are left."""
    _, _, by_autograd = passed(llama(tmp_path / "model"), FP32, coefficients(), backend)
    assert by_autograd
    assert all("norm" in name for name in by_autograd), by_autograd


@pytest.mark.parametrize("backend", [OWN, TORCH], ids=["own", "torch"])
def test_a_bf16_head_that_runs_chunk_by_chunk_adds_its_gradient_up_in_fp32(backend: ComputeBackend, tmp_path: Path):
    """A sum in bf16 of 600 equal parts would end at 256 of them."""
    policy = Policy(llama(tmp_path / "model"), torch.bfloat16, TrainConfig(compute="bf16"), backend=backend)
    policy.model.requires_grad_(True)
    sums = {name: torch.zeros(p.shape, device=p.device) for name, p in policy.model.named_parameters()}
    sum_gradients_into(policy.model, sums)
    head = policy.model.get_output_embeddings()
    states_MD = torch.ones(2, 64, dtype=torch.bfloat16, device=head.weight.device)
    torch.stack([head(states_MD).sum() for _ in range(600)]).sum().backward()
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:  # what autograd made of it, in its dtype
            sums[name] += parameter.grad
    assert (sums["model.embed_tokens.weight"] == 1200).all()


@pytest.mark.parametrize("backend", [OWN, TORCH], ids=["own", "torch"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_bits_of_a_pass_with_gradients_are_those_of_one_without(
    dtype: str, backend: ComputeBackend, tmp_path: Path
):
    """And those are the engine's: modules as they were loaded, without anything of the trainer's in them. Wide enough that another
    library's products have other bits."""
    path = llama(tmp_path / "model", hidden_size=256, intermediate_size=2048)
    config = TrainConfig(compute=dtype, publish=dtype)
    found, _ = ours(path, config, coefficients(), backend)
    packed, policy = pack(token_turns(turns())), Policy(path, arithmetic(config), config, backend=backend)
    with torch.no_grad():
        assert torch.equal(policy.logprobs(packed, TreeAttention(packed), temperatures(turns())), found)


def test_the_gradients_of_bf16_are_those_of_fp32_to_its_precision(tmp_path: Path):
    path = llama(tmp_path / "model")
    _, sums = ours(path, TrainConfig(compute="bf16"), coefficients())
    _, gradients = theirs(path, coefficients())
    for name, gradient in gradients.items():
        assert torch.cosine_similarity(sums[name].flatten(), gradient.flatten(), dim=0) > 0.99, name
        assert sums[name].norm() == pytest.approx(gradient.norm().item(), rel=0.05), name


def test_several_passes_add_up(tmp_path: Path):
    path = llama(tmp_path / "model")
    once, twice = ours(path, FP32, coefficients())[1], ours(path, FP32, 2 * coefficients())[1]
    assert all(torch.allclose(2 * once[name], twice[name], rtol=1e-4, atol=1e-6) for name in once)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norms_gradient_is_that_of_its_formula(dtype: torch.dtype, zero_centered: bool):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 300, 48).to(dtype)
    weight = torch.nn.Parameter(torch.randn(48).to(dtype))
    inputs = [x.requires_grad_(True), weight]
    wide = [each.detach().double().requires_grad_(True) for each in inputs]
    plain = (wide[1] + zero_centered) * wide[0] * (wide[0].pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = torch.autograd.grad(plain, wide, grad.double())
    found = torch.autograd.grad(RMSNorm(weight, 1e-5, zero_centered=zero_centered)(x), inputs, grad)
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.double(), one, **close)


def test_the_norm_of_a_hundred_million_entries_is_theirs():
    entry = torch.full((1,), 1e-5)
    many = entry.expand(2**24 + 5)  # one fp32 sum over them is 0.5% off
    assert float(sum_of_squares([many]).sqrt()) == pytest.approx(float(entry) * (2**24 + 5) ** 0.5, rel=1e-5)
    assert float(sum_of_squares([])) == 0.0
    assert float(sum_of_squares([torch.ones(3), torch.tensor([[2.0]])])) == pytest.approx(7.0)
    assert not math.isfinite(float(sum_of_squares([torch.tensor([1.0, float("nan")])])))


def test_a_row_that_is_selected_several_times_gets_its_gradients_summed_before_they_are_rounded():
    """Of a prompt's last token, from which several answers of a batch go on."""
    draw = torch.Generator(TORCH.device).manual_seed(0)
    x_ND = torch.randn(4, 8, device=TORCH.device, dtype=torch.bfloat16, requires_grad=True)
    rows_M = torch.tensor([1] * 40 + [3], device=TORCH.device)
    grad_MD = torch.randn(41, 8, device=TORCH.device, generator=draw).bfloat16()
    found_MD = select_rows(x_ND, rows_M)
    assert torch.equal(found_MD, x_ND[rows_M])
    found_MD.backward(grad_MD)
    expected_ND = torch.zeros(4, 8, device=TORCH.device, dtype=torch.float64)
    expected_ND[1], expected_ND[3] = grad_MD[:40].double().sum(0), grad_MD[40].double()
    assert x_ND.grad is not None
    assert x_ND.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x_ND.grad.double(), expected_ND, rtol=2**-8, atol=1e-6)
