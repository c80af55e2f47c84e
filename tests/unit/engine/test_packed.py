import pytest
import torch

from ostinato.engine.embedded.packed import PackedLinear, prepack
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.load import load_model
from ostinato.testing.tiny import tiny_model


@torch.inference_mode()
def forward(model):
    ids = torch.arange(50)
    return logits(model, hidden(model, ids, ids, CausalAttend([50])))


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 kernels to pack for")
def test_a_packed_model_gives_the_same_bits(tmp_path):
    model = load_model(tiny_model(tmp_path / "tiny", dtype="bfloat16"), torch.bfloat16)
    before = forward(model)
    assert prepack(model) == 2 * 7 + 1
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert torch.equal(forward(model), before)


def test_float32_is_left_alone(tmp_path):
    assert prepack(load_model(tiny_model(tmp_path / "tiny"), torch.float32)) == 0
