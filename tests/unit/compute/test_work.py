"""Counted operations: by hand, against torch's own count of what really runs, and in a ledger."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from ostinato.compute.ledger import Decoder, OperationLedger, TokenWork, causal_pairs, decoder_of
from ostinato.core.errors import BadConfig
from ostinato.testing.tiny import tiny_model, tiny_moe

WORK = TokenWork(body=6, head=2, pair=4)


def test_a_dense_layer_by_hand():
    work = Decoder(layers=2, hidden=10, heads=4, kv_heads=2, head_size=5, mlp=30, vocabulary=100).token_work()
    projections = 10 * 20 + 10 * 10 + 10 * 10 + 20 * 10  # queries, keys, values, output
    assert work.body == 2 * 2 * (projections + 3 * 10 * 30)
    assert work.head == 2 * 10 * 100
    assert work.pair == 2 * 2 * 2 * 4 * 5  # a product and a sum, in two layers, of four heads


def test_a_layer_of_experts_counts_those_that_are_used_and_the_router():
    shape = {"layers": 1, "hidden": 10, "heads": 1, "kv_heads": 1, "head_size": 10, "mlp": 7, "vocabulary": 1}
    experts = Decoder(**shape, experts=8, experts_per_token=3, shared=5).token_work()
    assert experts.body == 2 * (4 * 10 * 10 + 3 * 10 * (3 * 7 + 5) + 10 * 8)


def test_pairs_by_hand():
    assert causal_pairs(4) == 1 + 2 + 3 + 4
    assert causal_pairs(3, 5) == 6 + 7 + 8


@pytest.mark.parametrize("kind", ["dense", "qwen3_moe", "olmoe", "mixtral"])
def test_torch_counts_the_same(tmp_path, kind):
    """Eager attention computes every pair, seen or not, so the count is given all of them."""
    path = tiny_model(tmp_path / "m") if kind == "dense" else tiny_moe(tmp_path / "m", kind)
    work = decoder_of(json.loads((path / "config.json").read_text())).token_work()
    chosen = {} if kind == "dense" else {"experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32, **chosen)
    ids = torch.randint(0, 256, (1, 24))
    with FlopCounterMode(display=False) as forward:
        logits = model(ids, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    # Angles of the rotations are an outer product in torch: not a part of the model's work.
    angles = 2 * 24 * model.config.hidden_size // model.config.num_attention_heads // 2
    assert forward.get_total_flops() - work.forward(24, 24 * 24, 24) in (0, angles)
    assert backward.get_total_flops() == 2 * work.forward(24, 24 * 24, 24)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"model_type": "llama", "num_attention_heads": 4, "hidden_size": 8}, "num_hidden_layers"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_what_cannot_be_counted_is_named(config, names):
    with pytest.raises(BadConfig, match=names):
        decoder_of(config)


def test_a_turn_by_hand():
    found = OperationLedger().served(WORK, prompt=5, cached=2, answer=3, evaluation=False)
    assert found.prefill == 3 * 6 + (3 + 4 + 5) * 4 + 2
    assert found.decode == 2 * 6 + (6 + 7) * 4 + 2 * 2
    assert OperationLedger().served(WORK, 5, 2, 3, evaluation=True) == OperationLedger(evaluation=found.sampling)


def test_a_step_by_hand():
    found = OperationLedger().stepped(WORK, [(5, 2, 3), (1, 0, 1)])
    forward = (6 * 6 + (3 + 4 + 5 + 6 + 7 + 8) * 4 + 3 * 2) + (2 * 6 + 3 * 4 + 2)
    assert (found.forward, found.backward) == (forward, 2 * forward)


def test_the_two_senses_of_a_third():
    """One forward to sample against three to train is a third in the one sense and a quarter in the other."""
    literal = OperationLedger(decode=1, forward=1, backward=2)
    assert literal.per_training == pytest.approx(1 / 3)
    assert literal.of_all == 0.25
    third = OperationLedger(prefill=0.5, decode=1, forward=1, backward=2)
    assert third.of_all == pytest.approx(1 / 3)
    assert third.per_training == 0.5
    assert OperationLedger(decode=1).per_training is None
