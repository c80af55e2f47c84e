"""The self-test names what breaks exactness, and is not fooled by attention that depends on company."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ostinato.core.errors import BadConfig
from ostinato.engine.embedded.form import prepack
from ostinato.model import paged
from ostinato.model.load import load_model
from ostinato.model.numerics import GELU_TANH, ROTARY_BY_LAYER, ZERO_CENTERED
from ostinato.model.paged import Reads
from ostinato.model.selftest import BlockMemory, check_exact, check_layers, examine, shapes_of
from ostinato.testing.tiny import SUPPORTED, tiny_model, tiny_moe, tiny_of


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("selftest") / "dense", layers=1)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return tiny_moe(tmp_path_factory.mktemp("selftest") / "sparse", layers=2)


class Rows(nn.Module):
    """A packed layer whose bits change wherever `odd` says so of the row count."""

    def __init__(self, layer, odd):
        super().__init__()
        self.layer, self.odd = layer, odd

    def forward(self, x):
        y = self.layer(x)
        return y + y.abs().max() * 1e-5 if self.odd(x.numel() // x.shape[-1]) else y


def packing(odd, outputs=None):
    def pack(model):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and outputs in (None, child.out_features):
                    setattr(parent, name, Rows(child, odd))

    return pack


def test_every_distinct_matrix_product_is_tested(sparse):
    model = load_model(sparse, torch.float32)
    shapes = {(shape.inputs, shape.outputs) for shape in shapes_of(model)}
    dim = 2 * model.model.layers[0].self_attn.k_proj.out_features
    assert shapes == {
        (64, dim),  # queries
        (64, dim // 2),  # keys and values
        (dim, 64),
        (64, 8),  # router
        (64, 260),  # head
        (64, 64),  # experts: gate and up in one
        (32, 64),
    }


def test_a_layer_that_depends_on_the_row_count_is_found(dense):
    """Planted in the engine's form: one row count of many is enough."""
    found = examine(dense, torch.float32, (1,), packing(lambda rows: rows == 8))
    assert not found.exact
    assert "differ between one pass and passes with a KV cache" in found.reason


class OddBlocks(Reads):
    """Attention that has other bits in blocks of 64 tokens."""

    def attend(self, q, held, scale, window):
        out, lse = super().attend(q, held, scale, window)
        return out * 1.001 if self.block == 64 else out, lse


def test_attention_in_the_blocks_that_the_engine_is_set_to_is_tested(dense, monkeypatch):
    """The trainer's blocks have 32 tokens, whatever the engine's have."""
    assert examine(dense, torch.float32, block=64).exact
    monkeypatch.setattr(paged, "Reads", OddBlocks)
    assert examine(dense, torch.float32).exact
    found = examine(dense, torch.float32, block=64)
    assert not found.exact
    assert "differ between one pass and passes with a KV cache" in found.reason


class FirstBlock(Reads):
    """Attention that has other bits where a token reads more than one of the engine's blocks."""

    def attend(self, q, held, scale, window):
        out, lse = super().attend(q, held, scale, window)
        if self.block != 32:
            out[: self.tokens][torch.from_numpy(self.positions_N >= self.block)] *= 1.001
        return out, lse


@pytest.mark.parametrize("block", [80, 256])
def test_sequences_go_on_in_a_second_block_however_large_it_is(dense, monkeypatch, block):
    model = load_model(dense, torch.float32)
    check_exact(model, block=block)
    monkeypatch.setattr(paged, "Reads", FirstBlock)
    with pytest.raises(BadConfig, match=r"hidden states of tokens \d+ to \d+ differ"):
        check_exact(model, block=block)


class Averaging(nn.Module):
    """A norm that looks at the other tokens."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).mean(-2, keepdim=True))


def test_a_module_that_mixes_tokens_is_named(dense):
    model = load_model(dense, torch.float32)
    model.model.layers[0].post_attention_layernorm = Averaging()
    with pytest.raises(BadConfig, match=r"layers\.0\.post_attention_layernorm gives other bits"):
        check_layers(model, (1,))


def test_an_activation_of_the_librarys_that_depends_on_the_row_count_is_refused(tmp_path):
    """Over rows of 50 numbers: where a row's last ones are computed depends on the rows before it, on some CPUs."""
    config = SUPPORTED["llama"]()
    config.intermediate_size, config.hidden_act = 50, "gelu"
    path = tiny_of(tmp_path / "m", config)
    model = load_model(path, torch.float32)
    act, x = model.model.layers[0].mlp.act_fn, torch.randn(128, 50, generator=torch.Generator().manual_seed(2))
    depends = [m for m in range(1, 129) if not torch.equal(act(x[:m]), act(x)[:m])]
    found = examine(path, torch.float32)
    assert found.exact or depends
    assert "gelu" in found.library


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 64])
def test_a_gemma_of_any_width_computes_by_our_own_kernels_alone(tmp_path, width, dtype):
    """Also of a width that 32 does not divide: torch's GELU computes its last numbers by other arithmetic on some CPUs."""
    config = SUPPORTED["gemma3"]()
    config.intermediate_size = width
    found = examine(tiny_of(tmp_path / "m", config), dtype, (1, 2), prepack)
    assert (found.exact, found.reason, found.library) == (True, "", ())
    assert found.definitions == (GELU_TANH, ROTARY_BY_LAYER, ZERO_CENTERED)


def test_the_verdict_is_the_same_every_time(dense):
    one, two = (examine(dense, torch.float32) for _ in range(2))
    assert (one.exact, one.table, one.library) == (two.exact, two.table, two.library)
    assert one.exact
    assert one.definitions == ()
    assert one.library == (), "a dense model computes by our own kernels alone"


def test_a_verdict_that_is_not_exact_says_why(dense):
    found = examine(dense, torch.float32, (1,), packing(lambda rows: rows < 500, outputs=260))
    assert not found.exact
    assert "logits of tokens" in found.reason
    assert "fast" in found.reason


def test_threads_must_give_the_first_ones_bits_and_are_put_back(dense):
    before = torch.get_num_threads()
    alone_differs = packing(lambda rows: torch.get_num_threads() == 2)
    assert examine(dense, torch.float32, (1,), alone_differs).exact
    found = examine(dense, torch.float32, (1, 2), alone_differs)
    assert (found.exact, found.threads) == (False, 1)
    assert torch.get_num_threads() == before


def test_the_engine_s_form_of_the_whole_model_is_tested_with_every_team(dense):
    """Planted: layers by themselves are honest, but the model that the engine runs has other bits where two threads compute."""

    def pack(model):
        if isinstance(model, PreTrainedModel):
            packing(lambda rows: torch.get_num_threads() == 2)(model)

    assert examine(dense, torch.float32, (1,), pack).exact
    found = examine(dense, torch.float32, (1, 2), pack)
    assert (found.exact, found.threads) == (False, 1)
    assert "differ between one pass and passes with a KV cache" in found.reason


# ---------------------------------------------------------------- end to end


class Stock:
    """Keys and values in one tensor per sequence, and the library's attention: what exact mode must not be fooled by."""

    def __init__(self, sequences, tokens):
        self.kept = {}

    def __call__(self, pieces):
        def attend(layer, q, k, v, scale, window):
            parts, at = [], 0
            for piece in pieces:
                own = slice(at, at := at + piece.end - piece.start)
                keys, values = self.kept.get((layer, piece.sequence), (k[:0], v[:0]))
                keys, values = torch.cat([keys, k[own]]), torch.cat([values, v[own]])
                self.kept[layer, piece.sequence] = keys, values
                parts.append(self.one(q[own], keys, values, scale, window, piece.start))
            return torch.cat(parts)

        return attend

    def one(self, q, keys, values, scale, window, start):
        mask = (
            torch.ones(len(q), len(keys), dtype=torch.bool).tril(start).triu(start + 1 - window if window else -start)
        )
        q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


class OneByOne(Stock):
    """Each query by itself over just the keys it sees, so that nothing else can matter."""

    def one(self, q, keys, values, scale, window, start):
        def alone(i):
            end = start + i + 1
            seen = slice(max(0, end - window) if window else 0, end)
            return super(OneByOne, self).one(q[i : i + 1], keys[seen].clone(), values[seen].clone(), scale, 0, end)

        return torch.cat([alone(i) for i in range(len(q))])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gemma3", torch.float32),
        ("qwen3-moe", torch.bfloat16),
        pytest.param("gemma3", torch.bfloat16, marks=pytest.mark.examination),
        pytest.param("qwen3-moe", torch.float32, marks=pytest.mark.examination),
        pytest.param("olmoe", torch.float32, marks=pytest.mark.examination),
        pytest.param("olmoe", torch.bfloat16, marks=pytest.mark.examination),
    ],
)
def test_attention_that_depends_on_nothing_else_holds(tmp_path, kind, dtype):
    model = load_model(tiny_of(tmp_path / "m", SUPPORTED[kind]()), dtype)
    check_exact(model, OneByOne)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_our_kernel_holds_on_dense_and_sparse_models(dense, sparse):
    for path in (dense, sparse):
        model = load_model(path, torch.float32)
        check_exact(model, BlockMemory)


def test_the_library_s_attention_does_not(dense):
    model = load_model(dense, torch.float32)
    with pytest.raises(BadConfig, match="hidden states of tokens"):
        check_exact(model, Stock)


def test_routers_that_decide_otherwise_in_company_are_found(sparse):
    """Gates of 0 hide the first layer's choice from the hidden states: only the routes themselves can show it."""
    model = load_model(sparse, torch.float32)
    first = model.model.layers[0].mlp
    honest = first.gate.forward

    def biased(x):
        scores, gates, ids = honest(x)
        return scores, gates * 0, ids if len(x) > 40 else (ids + 1) % 8

    first.gate.forward = biased
    with pytest.raises(BadConfig, match="expert choices of tokens"):
        check_exact(model, OneByOne)
