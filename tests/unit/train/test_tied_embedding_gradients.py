"""The gradient of an embedding that is looked up on a sharded model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ostinato.train.linear_gradients import embedding_lookup

IDS = torch.tensor([[3, 1, 3], [3, 0, 6]])
PADDING = 6


def a_weight(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).to(dtype))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_autograd_makes(tied: bool, dtype: torch.dtype):
    found, expected = a_weight(dtype), a_weight(dtype)
    for weight, look_up in ((found, embedding_lookup), (expected, F.embedding)):
        states = look_up(IDS, weight, PADDING)
        ((states @ weight.t()).square() if tied else states.square()).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    embedding_lookup(IDS, found, PADDING).sum().backward()
    F.embedding(IDS, expected, PADDING).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, msg="a second pass adds to the first")


def test_it_is_added_to_the_gradient_of_a_head_with_the_same_weight():
    """In the same memory: each is as large as the vocabulary."""
    weight, places = a_weight(), []
    weight.register_post_accumulate_grad_hook(lambda made: places.append(made.grad.data_ptr()))
    (embedding_lookup(IDS, weight, None) @ weight.t()).sum().backward()
    assert weight.grad is not None
    assert places == [weight.grad.data_ptr()]


def test_a_frequent_token_learns_all_in_bf16():
    """A sum in bf16 of 600 equal parts would end at 256 of them."""
    weight = a_weight(torch.bfloat16)
    embedding_lookup(torch.full((600,), 2), weight, None).sum().backward()
    assert weight.grad is not None
    assert (weight.grad[2] == 600).all()


def test_a_weight_that_does_not_learn_gets_none():
    weight = a_weight().requires_grad_(False)
    assert not embedding_lookup(IDS, weight, None).requires_grad
