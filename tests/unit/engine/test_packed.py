import pytest
import torch
from torch import nn

from ostinato.engine.embedded.form import prepack
from ostinato.engine.embedded.forms.packed import PackedLinear
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.linear import Linear
from ostinato.model.load import load_model
from ostinato.testing.tiny import tiny_model

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN to pack for"
)


@torch.inference_mode()
def forward(model):
    ids = torch.arange(50)
    return logits(model, hidden(model, ids, ids, CausalAttend([50])))


@needs_onednn
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_model_gives_the_same_bits(tmp_path, dtype):
    kind = getattr(torch, dtype)
    if kind is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bf16 kernels to pack for")
    model = load_model(tiny_model(tmp_path / "tiny", dtype=dtype), kind)
    before = forward(model)
    assert prepack(model) == 2 * 7 + 1
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert torch.equal(forward(model), before)


@needs_onednn
def test_a_layer_whose_bits_would_change_is_left_alone():
    """One whose product is not oneDNN's, here by a planted difference of one unit in the last place."""

    class Other(Linear):
        def forward(self, input):
            y = super().forward(input)
            return torch.nextafter(y, y + 1)

    assert prepack(nn.Sequential(Other(nn.Linear(32, 48)))) == 0
    assert prepack(nn.Sequential(Linear(nn.Linear(32, 48)))) == 1
