"""Every supported architecture through `load_model` and `hidden` is the library's own model; what cannot be is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ostinato.core.errors import BadConfig
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.experts import experts_of
from ostinato.model.load import empty_model, load_model
from ostinato.testing.tiny import REFUSED, SUPPORTED, WINDOW, tiny_of

LENGTHS = [21, 1, 30]  # two of them longer than the window


@pytest.fixture(scope="module", params=SUPPORTED)
def directory(request, tmp_path_factory):
    return tiny_of(tmp_path_factory.mktemp("zoo") / request.param, SUPPORTED[request.param]())


def batch():
    ids = torch.randint(260, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(n) for n in LENGTHS])


def test_several_sequences_in_one_call_give_the_library_s_logits(directory):
    ours = load_model(directory, torch.float32)
    ids, positions = batch()
    with torch.inference_mode():
        got = logits(ours, hidden(ours, ids, positions, CausalAttend(LENGTHS)))
    for implementation in ("eager", "sdpa"):
        stock = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=implementation).eval()
        with torch.inference_mode():
            want = torch.cat([stock(part[None], use_cache=False).logits[0] for part in ids.split(LENGTHS)])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert want.std() > 0.5  # else anything would be close


def test_gradients_are_the_library_s(directory):
    ids, positions = batch()
    ours = load_model(directory, torch.float32, train=True).eval()  # without dropout, where there is any
    logits(ours, hidden(ours, ids, positions, CausalAttend(LENGTHS))).logsumexp(-1).sum().backward()
    stock = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    sum(stock(part[None], use_cache=False).logits.logsumexp(-1).sum() for part in ids.split(LENGTHS)).backward()
    wanted = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=2e-3, atol=2e-3, msg=name)


@pytest.mark.parametrize("kind", ["gemma3", "mistral", "qwen2-window"])
def test_the_window_counts(tmp_path, kind):
    """The same weights attended to without windows are another model: the comparison above can fail."""
    model = load_model(tiny_of(tmp_path / kind, SUPPORTED[kind]()), torch.float32)
    ids, positions = torch.arange(30), torch.arange(30)
    plain, windows = CausalAttend([30]), []

    def everything(layer, q, k, v, scale, window):
        windows.append(window)
        return plain(layer, q, k, v, scale, 0)

    with torch.inference_mode():
        near, far = hidden(model, ids, positions, plain), hidden(model, ids, positions, everything)
    wanted = {"gemma3": [WINDOW, 0, WINDOW], "mistral": [WINDOW] * 3, "qwen2-window": [0, WINDOW, WINDOW]}
    assert windows == wanted[kind]
    torch.testing.assert_close(near[:WINDOW], far[:WINDOW])
    assert (near - far)[WINDOW:].abs().amax(-1).min() > 1e-3


def test_gemma3_s_own_scale_reaches_the_attention(tmp_path):
    model = load_model(tiny_of(tmp_path / "m", SUPPORTED["gemma3"]()), torch.float32)
    scales = []

    def attend(layer, q, k, v, scale, window):
        scales.append(scale)
        return q

    hidden(model, torch.arange(3), torch.arange(3), attend)
    assert scales == [24**-0.5] * 3


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_expressed_is_refused_at_load(tmp_path, kind):
    make, why = REFUSED[kind]
    path = tiny_of(tmp_path / "m", make())
    with pytest.raises(BadConfig, match=why):
        load_model(path, torch.float32)


DEPTHS = {"llama": 1, "qwen2-window": 2, "qwen3-moe": 2, "olmoe": 1, "gemma3": 2, "mistral": 1, "gpt2": 1}


@pytest.mark.parametrize("kind", DEPTHS)
def test_a_shallow_model_has_every_kind_of_layer(tmp_path, kind):
    path = tiny_of(tmp_path / "m", SUPPORTED[kind]())
    model = empty_model(path, torch.bfloat16, shallow=True)
    assert model.config.num_hidden_layers == DEPTHS[kind]
    assert len(experts_of(model)) == (kind in ("qwen3-moe", "olmoe"))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert empty_model(path, torch.bfloat16).config.num_hidden_layers == 3
