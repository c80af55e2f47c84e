"""A model whose files hold another head than the embedding that it is tied to is refused, with the remedies, which work."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.core.errors import BadWeights
from ostinato.model.load import build, load_model, weights_of
from ostinato.testing.tiny import tiny_model


@pytest.fixture
def path(tmp_path):
    return tiny_model(tmp_path / "m", layers=1, tied=True)


def with_head(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    head = change(next(value for name, value in tensors.items() if "embed_tokens" in name)).contiguous()
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    return head


def used(path):
    """The head that a trainer and an engine compute with: the engine's model is built from the trainer's weights."""
    loaded = load_model(path, torch.float32)
    served = build(path, torch.float32)(weights_of(loaded))
    heads = [model.get_output_embeddings().weight.detach() for model in (loaded, served)]
    assert torch.equal(*heads)
    return heads[0]


def test_an_equal_head_is_taken(path):
    head = with_head(path, torch.clone)
    assert torch.equal(used(path), head.float())


@pytest.mark.parametrize("change", [lambda head: head.flip(0), lambda head: head * 2, lambda head: head + 1])
def test_another_head_is_refused_with_the_remedy(path, change):
    with_head(path, change)
    with pytest.raises(BadWeights, match=r"tie_word_embeddings.: false.*take .lm_head\.weight. out"):
        load_model(path, torch.float32)


def test_the_remedy_keeps_both(path):
    head = with_head(path, lambda head: head.flip(0))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert torch.equal(used(path), head.float())
