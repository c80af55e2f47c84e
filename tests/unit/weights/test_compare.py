import numpy as np
import pytest

from ostinato.core.errors import BadRequest
from ostinato.core.weights import WeightArray
from ostinato.weights.version.compare import TensorChange, compare, total


def bf16(values) -> WeightArray:
    codes = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return WeightArray("BF16", codes.shape, codes.ravel().view(np.uint8))


def test_what_changed_is_counted_and_measured():
    old = {"model.layers.3.mlp.up_proj.weight": bf16([1.0, 2.0, 2.0, 4.0]), "model.norm.weight": bf16([1.0, 1.0])}
    new = old | {"model.layers.3.mlp.up_proj.weight": bf16([1.0, 2.0, 2.0, 3.5])}
    up, norm = compare(old, new)
    assert (up.changed, up.elements, up.share) == (1, 4, 0.25)
    assert up.moved == pytest.approx(0.5 / 5.0)
    assert (norm.changed, norm.moved) == (0, 0.0)
    assert total([up, norm]).share == 1 / 6


def test_minus_zero_is_a_change_that_moves_nothing():
    (change,) = compare({"a": bf16([0.0, 1.0])}, {"a": bf16([-0.0, 1.0])})
    assert (change.changed, change.moved) == (1, 0.0)


def test_integers_have_no_norm():
    one, two = (WeightArray("U8", (3,), np.array(x, np.uint8)) for x in ([1, 2, 3], [1, 9, 3]))
    (change,) = compare({"a": one}, {"a": two})
    assert (change.changed, change.moved) == (1, None)


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.layers.12.self_attn.q_proj.weight", 12, "self_attn.q_proj"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", 0, "mlp.experts.7.up_proj"),
        ("model.embed_tokens.weight", None, "embed_tokens"),
        ("lm_head.weight", None, "lm_head"),
    ],
)
def test_a_name_says_where_in_the_model_it_stands(name, layer, kind):
    change = TensorChange(name=name, elements=1, changed=0, moved=None)
    assert (change.layer, change.kind) == (layer, kind)


def test_versions_of_two_models_cannot_be_compared():
    with pytest.raises(BadRequest, match=r"b\.w"):
        compare({"a": bf16([1.0])}, {"a": bf16([1.0]), "b.w": bf16([1.0])})
    with pytest.raises(BadRequest, match="a is not"):
        compare({"a": bf16([1.0])}, {"a": bf16([1.0, 2.0])})
