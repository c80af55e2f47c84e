import hashlib

import torch

from ostinato.model.load import load_model
from ostinato.model.renderer import HFRenderer
from ostinato.testing import tiny
from ostinato.testing.tiny import tiny_model


def digest(path):
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


def test_same_arguments_same_bytes_and_the_global_generator_is_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = (tiny_model(tmp_path / n, seed=s) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    tiny._files.cache_clear()
    anew = tiny_model(tmp_path / "d", seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert digest(one) == digest(two) == digest(anew) != digest(other)


def test_arguments_reach_the_model(tmp_path):
    path = tiny_model(
        tmp_path / "m", hidden=32, layers=3, heads=8, kv_heads=4, context=99, dtype="bfloat16", tied=False
    )
    config = load_model(path, torch.bfloat16).config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 3, 8)
    assert (config.num_key_value_heads, config.max_position_embeddings, config.dtype) == (4, 99, torch.bfloat16)
    assert HFRenderer(path).context == 99


def test_every_byte_is_one_token(tmp_path):
    renderer = HFRenderer(tiny_model(tmp_path / "m"))
    text = "".join(map(chr, range(0x20, 0x250))) + "\t\n 😀"
    assert len(renderer.encode(text)) == len(text.encode())
    assert renderer.decode(renderer.encode(text)) == text
