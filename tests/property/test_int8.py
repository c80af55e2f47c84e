"""Numbers as whole numbers of few levels: how far off they may be, and that all between the two roundings is exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ostinato.engine.embedded.forms.int8 import Int8Linear, quantised
from ostinato.model.integers import LIBRARIES, Integers, find, is_exact
from ostinato.model.kernels.quantize import from_sums, rotate, to_levels
from ostinato.model.paged import array

torch.set_num_threads(1)
F32 = np.float32
SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.sampled_from([16, 24, 33, 64, 96, 100])
pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")


def numbers(seed, rows, columns):
    """Of very different sizes, with a few that stand out, as activations are."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, columns)) * 10.0 ** draw.integers(-6, 4, (rows, 1))
    x[:, draw.integers(columns)] *= 30
    return torch.from_numpy(x.astype(F32))


def turned(x):
    """x H in float64, the size of H's blocks, and by row what float32 may add to it: a rounding of each of log2(size) sums.

    By definition entry i, j of a block is -1 to the number of bits that i and j share.
    """
    wide = x.double().numpy()
    size = wide.shape[1] & -wide.shape[1]
    size = size if size >= 16 else 1
    signs = np.array([[1.0 - 2.0 * ((i & j).bit_count() % 2) for j in range(size)] for i in range(size)])
    rounded = np.abs(wide).sum(1, keepdims=True) * np.log2(size) * 2.0**-24 * (1 + 1e-6)
    return (wide.reshape(len(wide), -1, size) @ signs).reshape(wide.shape), size, rounded


def levels_of(x, most):
    levels, scales = np.empty(x.shape, F32), np.empty(len(x), F32)
    to_levels(array(x), F32(most), F32(0), levels, scales)
    return levels, scales


@given(seed=SEEDS, width=WIDTHS, most=st.sampled_from([63, 127]))
@settings(max_examples=60)
def test_a_row_is_within_half_a_level_and_its_largest_is_kept(seed, width, most):
    x = numbers(seed, 5, width)
    levels, scales = levels_of(x, most)
    wide, _, rounded = turned(x)
    assert (levels == np.rint(levels)).all()
    assert (np.abs(levels).max(1) == most).all()
    off = np.abs(wide - levels * scales[:, None].astype(np.float64))
    assert (off <= scales[:, None] * (0.5 + 1e-4) + rounded).all()
    alone = [levels_of(x[n : n + 1], most) for n in range(5)]
    assert all((row[0][0] == levels[n]).all() and row[1][0] == scales[n] for n, row in enumerate(alone))


def test_the_same_levels_in_bytes_and_of_bf16():
    x = numbers(3, 4, 40)
    levels, scales = levels_of(x, 63)
    raised, again = np.empty(x.shape, np.uint8), np.empty(4, F32)
    to_levels(array(x), F32(63), F32(64), raised, again)
    assert (raised.astype(int) - 64 == levels).all()
    assert (again == scales).all()
    half = x.bfloat16()
    assert all((one == two).all() for one, two in zip(levels_of(half, 63), levels_of(half.float(), 63), strict=True))


def test_nothing_that_is_no_number_gets_lost():
    x = numbers(1, 6, 33)
    x[0], x[1, 7], x[2, 32], x[3, 4] = 0, torch.nan, torch.inf, -torch.inf
    x[4] = 1e-38
    _, scales = levels_of(x, 127)
    assert np.isnan(scales[1:4]).all()
    assert (scales[[0, 4]] == 0).all()
    sums, out = np.ones((6, 33), F32), np.empty((6, 33), F32)
    from_sums(sums, scales, np.ones((1, 33), F32), np.empty((1, 0), F32), out)
    assert np.isnan(out[1:4]).all()
    assert (out[[0, 4]] == 0).all()


@given(seed=SEEDS, inputs=WIDTHS)
@settings(max_examples=40)
def test_a_weight_is_within_half_a_level(seed, inputs):
    weight = numbers(seed, 9, inputs)
    weight[4] = 0
    levels, scales = quantised(weight)
    assert levels.dtype == torch.int8
    assert int(levels.int().abs().max()) == 127
    wide, size, rounded = turned(weight)
    off = np.abs(wide / size - levels.double().numpy() * scales.double().numpy()[:, None])
    assert (off <= scales.double().numpy()[:, None] * (0.5 + 1e-4) + rounded / size).all()


@given(seed=SEEDS, width=st.sampled_from([33, 48, 64, 96, 576, 2048]), half=st.booleans())
@settings(max_examples=40)
def test_a_rotation_is_hadamards_and_leaves_products_as_they_are(seed, width, half):
    x, w = numbers(seed, 7, width), numbers(seed + 1, 5, width)
    x = x.bfloat16() if half else x
    got, back = np.empty((7, width), F32), np.empty((5, width), F32)
    rotate(array(x), got)
    rotate(array(w), back)
    want, size, rounded = turned(x)
    largest = np.abs(x.double().numpy()).sum(1, keepdims=True)
    assert (np.abs(got - want) <= rounded).all()
    products, rotated = x.double() @ w.double().t(), got.astype(np.float64) @ back.astype(np.float64).T / size
    assert (np.abs(rotated - products.numpy()) <= largest * np.abs(w.double().numpy()).sum(1)[None] * 1e-6).all()


def test_a_channel_that_stands_out_costs_the_others_less():
    """One of 576 channels is a hundred times as large as the others: rounded to 127 levels by itself it leaves them almost none."""
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(1))
    x[:, 100] = 100.0
    layer = nn.Linear(576, 32, bias=False)
    want = x @ layer.weight.detach().t()
    with torch.inference_mode():
        got = Int8Linear([layer], found(576))(x)
    levels = x.abs().amax(1, keepdim=True) / found(576).most
    unrotated = (x / levels).round() * levels @ layer.weight.detach().t()
    assert float((got - want).square().mean()) < float((unrotated - want).square().mean()) / 4


@given(seed=SEEDS, inputs=WIDTHS, rows=st.integers(1, 40), biased=st.booleans())
@settings(max_examples=40)
def test_a_layer_is_whole_numbers_between_two_roundings(seed, inputs, rows, biased):
    """Its bits are those of the sums in 64-bit integers; its error is what the two roundings allow."""
    integers = found(inputs)
    layer = nn.Linear(inputs, 20, bias=biased)
    layer.weight = nn.Parameter(numbers(seed, 20, inputs), requires_grad=False)
    x = numbers(seed + 1, rows, inputs)
    with torch.inference_mode():
        got = Int8Linear([layer], integers)(x).numpy()
    levels, scales = levels_of(x, integers.most)
    weights, outs = quantised(layer.weight)
    sums = levels.astype(np.int64) @ weights.numpy().astype(np.int64).T
    bias = layer.bias.detach().numpy() if biased else F32(0)
    want = sums.astype(F32) * (scales[:, None] * outs.numpy()[None]) + bias
    assert got.tobytes() == want.astype(F32).tobytes() or (got == want).all()  # a zero may have either sign
    exact = x.double().numpy() @ layer.weight.double().numpy().T + bias
    s, w = scales[:, None].astype(np.float64) / 2, outs.numpy()[None].astype(np.float64) / 2
    (wide, size, x_off), (deep, _, w_off) = turned(x), turned(layer.weight)
    s, w = s + x_off, w + w_off.T / size  # the roundings of the rotation
    bound = np.abs(wide).sum(1)[:, None] * w + np.abs(deep / size).sum(1)[None] * s + inputs * s * w
    assert (np.abs(got - exact) <= bound * 1.001 + np.abs(exact) * 1e-5 + np.abs(bias) * 1e-6).all()


KNOWN = {}


def found(inputs) -> Integers:
    if inputs not in KNOWN:
        KNOWN[inputs] = find([inputs])
    return KNOWN[inputs]


@pytest.mark.parametrize("most", [63, 127])
def test_whatever_sums_exactly_gives_the_same_bits(most):
    exact = [library for library in LIBRARIES if is_exact(library, most, 96)]
    if len(exact) < 2:
        pytest.skip(f"one library or none sums exactly here with {most} levels to either side: {exact}")
    layer, x = nn.Linear(96, 40), numbers(5, 17, 96)
    with torch.inference_mode():
        one, two = (Int8Linear([layer], Integers(library=library, most=most))(x) for library in exact)
    assert torch.equal(one, two)
