"""What stands in for our kernels on other devices, tried on the CPU: it gives what they give, to rounding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from ostinato.engine.embedded.kv import KVShape, open_store
from ostinato.engine.embedded.sampler import Draw, draw, uniform
from ostinato.model.attention import hidden
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.device_attention import tree
from ostinato.model.experts import can_group, grouped
from ostinato.model.load import empty_model
from ostinato.model.logit_edits import Edit
from ostinato.model.logprobs import GREEDY, RowSoftmax, TensorSoftmax, invert_masses
from ostinato.model.paged import PagedEntry
from ostinato.testing.tiny import SUPPORTED, tiny_of
from ostinato.train.packing import TokenTurn, pack
from ostinato.train.policy import MaskedTree, token_logprobs
from ostinato.train.tree_attention import TreeAttention

TORCH = ComputeBackend(kernels="torch")
HEADS, KV, DIM, BLOCK = 6, 2, 16, 16


def branches():
    shared = tuple(range(40))
    return pack(
        [
            TokenTurn(prompt=shared, sampled=tuple(range(100, 160))),
            TokenTurn(prompt=(*shared, 7), sampled=tuple(range(60, 95))),
            TokenTurn(prompt=(3, 259), sampled=(9, 9, 1)),
        ]
    )


def drawn(count, *, grad=False):
    torch.manual_seed(0)
    return [torch.randn(count, heads, DIM, requires_grad=grad) for heads in (HEADS, KV, KV)]


@pytest.mark.parametrize("window", [0, 5])
def test_attention_over_a_tree_and_its_gradients_are_our_kernels(window):
    packed = branches()
    answers = []
    for make in (TreeAttention, lambda packed: MaskedTree(TreeAttention(packed), torch.device("cpu"))):
        q, k, v = drawn(packed.tokens, grad=True)
        out = make(packed)(0, q, k, v, 0.25, window)
        out.square().sum().backward()
        answers.append((out, q.grad, k.grad, v.grad))
    for ours, torchs in zip(*answers, strict=True):
        torch.testing.assert_close(torchs, ours, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 5])
def test_flex_attention_with_the_same_mask_gives_the_same(window):
    """What runs on CUDA, uncompiled: its blocks, its scale and its groups of heads."""
    packed = branches()
    q, k, v = drawn(packed.tokens)
    masked = tree(torch.from_numpy(packed.ends_N), torch.from_numpy(packed.positions_N))
    flex = masked.by_flex(flex_attention, q, k, v, 0.25, window)
    torch.testing.assert_close(flex, masked(q, k, v, 0.25, window), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 11])
def test_attention_over_a_cache_is_our_kernels(window):
    """Chunks, single tokens of many lengths, shared blocks and a forked one, in two steps."""
    shape = {"layers": 1, "kv_heads": KV, "head_dim": DIM, "dtype": torch.float32}
    stores = [open_store(KVShape(**shape, backend=backend), 64, BLOCK) for backend in (OWN, TORCH)]
    first = [
        PagedEntry(start=0, end=40, blocks=(5, 3, 9)),
        PagedEntry(start=0, end=17, blocks=(11, 2)),
        PagedEntry(start=0, end=1, blocks=(8,)),
    ]
    second = [
        PagedEntry(start=17, end=30, blocks=(11, 2)),
        PagedEntry(start=40, end=41, blocks=(5, 3, 9)),
        PagedEntry(start=40, end=41, blocks=(5, 3, 21)),
        PagedEntry(start=1, end=2, blocks=(8,)),
    ]  # fmt: skip
    for entries in (first, second):
        q, k, v = drawn(sum(entry.end - entry.start for entry in entries))
        ours, torchs = (store.attend(entries)(0, q, k, v, 0.25, window) for store in stores)
        torch.testing.assert_close(torchs, ours, atol=1e-5, rtol=1e-5)
        for store in stores:
            store.copy(9, 21)


def test_a_wiped_block_reads_as_zeros():
    store = open_store(KVShape(layers=1, kv_heads=KV, head_dim=DIM, dtype=torch.float32, backend=TORCH), 4, BLOCK)
    q, k, v = drawn(1)
    assert store.attend([PagedEntry(start=0, end=1, blocks=(2,))])(0, q, k * torch.nan, v, 0.25, 0).isnan().all()
    store.wipe([2])
    assert store.attend([PagedEntry(start=1, end=2, blocks=(2,))])(0, q, k, v, 0.25, 0).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_and_their_log_probabilities_are_our_kernels(dtype):
    torch.manual_seed(1)
    logits = (torch.randn(200, 3000) * 3).to(dtype)
    logits[:, 7] = -torch.inf
    temperatures = torch.linspace(0.3, 2, 200)
    u = np.array([uniform(3, 0, i) if i % 4 else GREEDY for i in range(200)])
    ours, torchs = (kind.of(logits, temperatures) for kind in (RowSoftmax, TensorSoftmax))
    tokens = ours.draw(u)
    assert (torchs.draw(u) == tokens).all()
    torch.testing.assert_close(torchs.logprobs(tokens), ours.logprobs(tokens), atol=2e-5, rtol=1e-5)
    logits[0, 0], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    assert (
        TensorSoftmax.of(logits, temperatures).sound().tolist() == RowSoftmax.of(logits, temperatures).sound().tolist()
    )


def test_every_way_to_draw_is_our_kernels():
    torch.manual_seed(2)
    logits = torch.randn(4, 300) * 2
    mask = np.full(38, 0x0F, np.uint8)
    edit = Edit(np.array([3, 9]), np.array([2.0, -1.0], np.float32), mask)
    rows = [
        Draw(temperature=0.0, top_p=1.0, u=0.5, tops=3),
        Draw(temperature=0.7, top_p=0.5, u=0.2),
        Draw(temperature=1.3, top_p=1.0, u=0.999999, edit=edit, tops=5),
        Draw(temperature=1.0, top_p=0.9, u=0.6, edit=edit),
    ]
    ours, torchs = (draw(logits.clone(), rows, kernels) for kernels in ("own", "torch"))
    assert (torchs.tokens, torchs.sound) == (ours.tokens, ours.sound)
    assert torchs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
    assert [[token for token, _ in row] for row in torchs.tops] == [[token for token, _ in row] for row in ours.tops]


def test_the_head_holds_a_chunk_of_logits_and_gives_our_gradient():
    torch.manual_seed(3)
    weight, targets = torch.randn(300, 8, requires_grad=True), torch.randint(300, (1100,))
    temperatures, coefficients = torch.rand(1100) + 0.5, torch.randn(1100)
    edit = Edit(np.array([int(targets[600])]), np.array([1.5], np.float32), None)
    seen, answers = [], []

    def head(hidden):
        seen.append(len(hidden))
        return hidden @ weight.t()

    for kernels in ("own", "torch"):
        hidden = torch.randn(1100, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
        weight.grad = None
        edits = lambda start, stop: {600: edit} if start <= 600 < stop else {}  # noqa: E731
        found = token_logprobs(head, hidden, targets, temperatures, edits, keep=False, kernels=kernels)
        (found * coefficients).sum().backward()
        answers.append((found.detach(), hidden.grad, weight.grad))
    for ours, torchs in zip(*answers, strict=True):
        torch.testing.assert_close(torchs, ours, atol=1e-4, rtol=1e-4)
    assert max(seen) <= 512


@pytest.mark.parametrize("biased", [False, True])
def test_a_grouped_product_is_that_of_each_experts_own_rows(biased):
    """What a GPU runs for a mixture of experts, on the CPU: experts without rows among them."""
    torch.manual_seed(5)
    sizes = torch.tensor([3, 0, 7, 1, 0])
    x, weights = torch.randn(11, 16).bfloat16(), torch.randn(5, 16, 24).bfloat16()
    biases = torch.randn(5, 24).bfloat16() if biased else None
    assert can_group(weights)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    found = grouped(x, weights, biases, sizes)
    coefficients = torch.randn(11, 24)
    (found * coefficients).sum().backward()
    grads = x.grad, weights.grad
    x.grad = weights.grad = None
    parts = [part @ weights[e] + (0 if biases is None else biases[e]) for e, part in enumerate(x.split(sizes.tolist()))]
    expected = torch.cat(parts)
    (expected * coefficients).sum().backward()
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(grads, (x.grad, weights.grad), atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if "moe" not in kind])
def test_a_pass_of_single_tokens_asks_the_device_for_nothing(kind, tmp_path):
    """A pass that waits for a number cannot be recorded; without memory there is no number to wait for."""
    model = empty_model(tiny_of(tmp_path, SUPPORTED[kind]()), torch.bfloat16, backend=replace(TORCH, device="meta"))
    numbers = torch.zeros(4, 8, dtype=torch.long, device="meta")
    with torch.inference_mode():
        states = hidden(model, numbers[:, 0], numbers[:, 1], lambda layer, q, k, v, scale, window: q.contiguous())
    assert (states.device.type, len(states)) == ("meta", 4)


@pytest.mark.parametrize("size", [3, 1023, 1024, 1025, 4096, 5000])
def test_the_running_sum_is_passed_at_the_same_token_whether_in_parts_or_whole(size: int):
    mass_CV = torch.rand(64, size, generator=torch.Generator().manual_seed(size)) ** 6
    mass_CV[torch.rand(64, size, generator=torch.Generator().manual_seed(1)) < 0.3] = 0
    mass_CV[:8, size // 2 :] = 0  # whole parts without a mass
    mass_CV[8:16, : size // 2] = 0
    mass_CV[:, size // 2] = 0.1
    u_C = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u_C[::8], u_C[1::8] = 0.0, 1 - 1e-16
    found_C = invert_masses(mass_CV, u_C).tolist()
    for mass_V, u, found in zip(mass_CV.double().numpy(), u_C.tolist(), found_C, strict=True):
        sums_V = mass_V.cumsum()
        assert mass_V[found] > 0
        assert sums_V[found] > u * sums_V[-1] * (1 - 1e-12) or found == np.flatnonzero(mass_V)[-1]
        assert sums_V[found] - mass_V[found] <= u * sums_V[-1] * (1 + 1e-12)


def test_a_draw_leaves_the_logits_as_they_are():
    logits_MV = torch.randn(4, 3000)
    before = logits_MV.clone()
    TensorSoftmax.of(logits_MV, torch.full((4,), 0.7)).draw(np.array([0.1, 0.5, 0.9, 0.0]))
    assert torch.equal(logits_MV, before)
