"""Numbers as whole numbers of few levels: how far off they may be, and that all between the two roundings is exact."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import nn

from ostinato.engine.embedded.form import Int8Linear
from ostinato.model.kernels.int8_product import INT8, integer_sums, possible_instructions
from ostinato.model.kernels.quantize import rotate, to_levels
from ostinato.model.kernels.vector import PANEL
from ostinato.model.linear import choose_integers, int8_words, quantised, sums
from ostinato.model.paged import array

torch.set_num_threads(1)
F32 = np.float32
SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.sampled_from([16, 24, 33, 64, 96, 100])


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


def levels_of(x):
    raised, scales = np.empty(x.shape, np.uint8), np.empty(len(x), F32)
    to_levels(array(x), raised, scales)
    return raised.astype(F32) - 128, scales


@given(seed=SEEDS, width=WIDTHS)
@settings(max_examples=60)
def test_a_row_is_within_half_a_level_and_its_largest_is_kept(seed, width):
    x = numbers(seed, 5, width)
    levels, scales = levels_of(x)
    wide, _, rounded = turned(x)
    assert (np.abs(levels).max(1) == 127).all()
    off = np.abs(wide - levels * scales[:, None].astype(np.float64))
    assert (off <= scales[:, None] * (0.5 + 1e-4) + rounded).all()
    alone = [levels_of(x[n : n + 1]) for n in range(5)]
    assert all((row[0][0] == levels[n]).all() and row[1][0] == scales[n] for n, row in enumerate(alone))


@given(seed=SEEDS, width=WIDTHS)
@settings(max_examples=40)
def test_a_level_is_the_number_in_scales_rounded_to_even(seed, width):
    x = numbers(seed, 4, width)
    rotated = np.empty(x.shape, F32)
    rotate(array(x), rotated)
    largest = np.abs(rotated).max(1, keepdims=True)
    levels, scales = levels_of(x)
    assert (levels == np.rint(rotated * (F32(127) / largest))).all()
    assert (scales == largest[:, 0] / F32(127)).all()
    room = np.full((4, width + 7), 9, np.uint8)
    to_levels(array(x), room, scales)
    assert (room[:, width:] == 9).all(), "it wrote beyond the row"


def test_the_same_levels_of_bf16():
    half = numbers(3, 4, 40).bfloat16()
    assert all((one == two).all() for one, two in zip(levels_of(half), levels_of(half.float()), strict=True))


def test_nothing_that_is_no_number_gets_lost():
    x = numbers(1, 6, 33)
    x[0], x[1, 7], x[2, 32], x[3, 4] = 0, torch.nan, torch.inf, -torch.inf
    x[4] = 1e-38
    _, scales = levels_of(x)
    assert np.isnan(scales[1:4]).all()
    assert (scales[[0, 4]] == 0).all()
    layer = nn.Linear(33, 33, bias=False)
    with torch.inference_mode():
        out = Int8Linear([layer], found(33))(x)
        alone = Int8Linear([layer], found(33))(x[5:])
    assert torch.isnan(out[1:4]).all()
    assert (out[[0, 4]] == 0).all()
    assert torch.equal(out[5:], alone)


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
    levels = x.abs().amax(1, keepdim=True) / 127
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
    levels, scales = levels_of(x)
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


@cache
def found(inputs):
    return choose_integers([inputs])


# ---------------------------------------------------------------- exact sums


@cache
def kernel(rows, vectors, instructions):
    """`integer_sums`, callable from here."""
    compiled = integer_sums(rows, vectors, instructions)

    @njit
    def run(x, weight, out):
        compiled(x.ctypes.data, x.strides[0], weight.ctypes.data, len(weight), out.ctypes.data)

    return run


def integers_of(seed, shape, low, high):
    """Random ones, those of the first row the largest, of the second the smallest, of the third in turns."""
    drawn = np.random.default_rng(seed).integers(low, high, shape, endpoint=True)
    rows = drawn.reshape(shape[0], -1)
    rows[:1], rows[1:2], rows[2:3, ::2], rows[2:3, 1::2] = high, low, low, high
    return drawn


@pytest.mark.parametrize("instructions", possible_instructions())
@given(seed=SEEDS, rows=st.sampled_from([1, 4, 12]), vectors=st.sampled_from([1, 2]), words=st.integers(1, 100))
@settings(max_examples=30, deadline=None)
def test_sums_are_exact_by_every_instruction_that_this_cpu_has(instructions, seed, rows, vectors, words):
    """For all bytes, -128 too, which no level is."""
    inputs = 16 * words
    levels = integers_of(seed, (rows, inputs), 0, 255)
    weights = integers_of(seed + 1, (PANEL, inputs), -128, 127)
    x = levels.astype(np.uint8).view(np.uint32)
    if instructions.startswith("pairs"):  # the even and the odd bytes of a word, as 16-bit numbers
        x = np.stack([x & 0x00FF00FF, x >> 8 & 0x00FF00FF], -1).reshape(rows, -1)
    laid_out = np.ascontiguousarray(weights.astype(np.int8).view(np.int32).T)
    out = np.full((rows, PANEL), 7, np.int32)
    kernel(rows, vectors, instructions)(x, laid_out, out)
    assert np.array_equal(out[:, : 16 * vectors], (levels @ weights.T)[:, : 16 * vectors])
    assert (out[:, 16 * vectors :] == 7).all(), "it wrote beyond its vectors"


@given(seed=SEEDS, rows=st.integers(1, 40), inputs=st.integers(1, 400), outputs=st.integers(1, 70))
@settings(max_examples=40)
def test_sums_are_exact_at_any_number_of_rows_inputs_and_outputs(seed, rows, inputs, outputs):
    levels, weights = integers_of(seed, (rows, inputs), -127, 127), integers_of(seed + 1, (outputs, inputs), -127, 127)
    words = int8_words(torch.from_numpy(weights).to(torch.int8), torch.ones(outputs))
    got = sums(torch.from_numpy(levels), words, INT8)
    assert np.array_equal(got[:, :outputs].numpy(), (levels @ weights.T).astype(F32))
    assert (got[:, outputs:] == 0).all()


def test_sums_wrap_around_in_between_and_are_exact_at_the_end():
    """With the offset of 128 they leave 32 bits."""
    inputs = 131_072
    levels, weights = np.full((1, inputs), 127), np.full((2, inputs), 127)
    weights[1] = -127
    words = int8_words(torch.from_numpy(weights).to(torch.int8), torch.ones(2))
    got = sums(torch.from_numpy(levels), words, INT8)
    assert got[0, :2].tolist() == [F32(127 * 127 * inputs), F32(-127 * 127 * inputs)]
