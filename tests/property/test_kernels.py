"""The kernels do what their docstrings say, operation by operation: a slow numpy oracle must give the same bits."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from numba import njit

from ostinato.model.experts import gated
from ostinato.model.kernels import arithmetic
from ostinato.model.kernels import attention as attention_kernel
from ostinato.model.kernels.attention import LANES, QUERIES
from ostinato.model.kernels.softmax import TILE
from ostinato.model.logprobs import GREEDY, RowSoftmax
from ostinato.model.norms import rms_normed
from ostinato.model.paged import Blocks, PagedEntry, Reads, TokenPlaces

torch.set_num_threads(1)
F32 = np.float32
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")


# ---------------------------------------------------------------- the oracle's arithmetic


def fma(a, b, c):
    """float32 a * b + c with one rounding.

    The product of two float32 is exact in float64. Their sum with c is rounded to odd there (Boldo and Melquiond 2008), after
    which rounding to float32 is as if it had been done at once; rounding to nearest twice would not be.
    """
    p, c = np.float64(a) * np.float64(b), np.float64(c)
    s = p + c
    shadow = s - p
    error = (p - (s - shadow)) + (c - shadow)  # exact: Knuth's two-sum
    even = (np.asarray(s).view(np.uint64) & np.uint64(1)) == 0
    return np.where((error != 0) & even, np.nextafter(s, np.sign(error) * np.inf), s).astype(F32)


def exp(x):
    """The polynomial of `arithmetic.exp`, written out for arrays."""
    x = np.asarray(x, F32)
    shifted = fma(x, arithmetic.LOG2E, arithmetic.ROUND)
    n = shifted - arithmetic.ROUND
    r = fma(n, -arithmetic.LN2_LOW, fma(n, -arithmetic.LN2_HIGH, x))
    p = np.full_like(x, arithmetic.INVERSE_FACTORIALS[0])
    for c in arithmetic.INVERSE_FACTORIALS[1:]:
        p = fma(p, r, c)
    scaled = (p.view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))).view(F32)
    return np.where(x > arithmetic.LOWEST, scaled, np.where(np.isnan(x), x, F32(0)))


def lane_sum(values, first=0):
    """The sum in 16 lanes by position, each ascending, folded 8, 4, 2, 1."""
    lanes = [F32(0)] * LANES
    for at, value in enumerate(values, first):
        lanes[at % LANES] = F32(lanes[at % LANES] + value)
    fold = LANES // 2
    while fold:
        lanes = [F32(lanes[k] + lanes[k + fold]) for k in range(fold)]
        fold //= 2
    return lanes[0]


def attention(q_HD, k_TKD, v_TKD, scale, window):
    """One query that sees all T keys, or the last `window`; [H, D] in fp32 and the weights' sums [H]."""
    heads, dim = q_HD.shape
    share = heads // k_TKD.shape[1]
    first = max(0, len(k_TKD) - window) if window else 0
    out, sums = np.zeros((heads, dim), F32), np.zeros(heads, F32)
    for head in range(heads):
        keys, values = k_TKD[first:, head // share], v_TKD[first:, head // share]
        scores = np.zeros(len(keys), F32)
        for d in range(dim):
            scores = fma(F32(q_HD[head, d] * scale), keys[:, d], scores)
        weights = exp(scores - scores.max())
        sums[head] = lane_sum(weights, first)
        for weight, value in zip(weights, values, strict=True):
            out[head] = fma(weight, value, out[head])
        out[head] /= sums[head]
    return out, sums


def numbers(*shape, seed, dtype=torch.float32, scale=1.0):
    """Values as torch holds them in the dtype, and the same ones in fp32 numpy."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    return x, x.float().numpy()


def bits(x):
    x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


# ---------------------------------------------------------------- the oracle itself


def test_the_oracles_fma_rounds_once():
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(400).astype(F32) * F32(2) ** rng.integers(-30, 30, 400) for _ in range(3))
    c[:200] = -(a[:200] * b[:200]) * F32(1 + 2**-23)  # cancellation
    more = 1 + 2**-23  # products that lie a hair beside the middle of two float32, and one far below the smallest
    a = np.append(a, [2**-24 * more, -(2**-24) * more, 2.0**-75]).astype(F32)
    b = np.append(b, [1 - 2**-23, 1 - 2**-23, 2.0**-75]).astype(F32)
    c = np.append(c, [more, -more, 2.0**-149]).astype(F32)
    twice = (np.float64(a) * np.float64(b) + np.float64(c)).astype(F32)
    ours = fma(a, b, c)
    for i in range(len(a)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        around = [twice[i], *(np.nextafter(twice[i], F32(way * np.inf), dtype=F32) for way in (-1, 1))]
        distance = {float(value): abs(Fraction(float(value)) - exact) for value in around}
        least = min(distance.values())
        best = [value for value, d in distance.items() if d == least]
        even = [value for value in best if not F32(value).view(np.uint32) & 1]
        assert ours[i] == F32((even or best)[0])


def test_a_second_rounding_would_show():
    """The trap that the oracle must not fall into: a sum just below the middle of two float32, and the upper one is even."""
    a, b, c = F32(2**-24 * (1 + 2**-23)), F32(1 - 2**-23), F32(1 + 2**-23)
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == F32(1 + 2**-22)
    assert fma(a, b, c) == F32(1 + 2**-23)
    assert arithmetic.exp(F32(-1.5)) == exp(F32(-1.5))


@njit
def round_all(x_N, like_N):
    for i in range(len(x_N)):
        like_N[i] = arithmetic.store(like_N[i], x_N[i])


def test_the_kernels_bf16_rounding_is_torchs():
    x = torch.cat([torch.randn(2000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, 3.4e38, 1 + 2**-8])])
    ours = np.zeros(len(x), np.uint16)
    round_all(x.numpy(), ours)
    assert ours.tolist() == (x.bfloat16().view(torch.int16).int() & 0xFFFF).tolist()


def test_exp_is_the_stated_polynomial_and_good_to_an_ulp():
    x = -np.concatenate([np.linspace(0, 87, 3000), np.geomspace(1e-30, 120, 500), [np.inf, 87.0]]).astype(F32)
    kernel = np.array([arithmetic.exp(value) for value in x], F32)
    assert (kernel.view(np.uint32) == exp(x).view(np.uint32)).all()
    true = np.exp(x.astype(np.float64))
    near = x > -87
    assert (np.abs(kernel[near] - true[near]) <= 1.01 * np.spacing(true[near].astype(F32))).all()
    assert not kernel[~near].any()
    assert np.isnan(arithmetic.exp(F32(np.nan)))


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("window", [0, 7, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_the_stated_order_of_operations(dtype, window):
    length, heads, kv, dim, block = 45, 6, 2, 16, 16
    (q, q_np), (k, k_np), (v, v_np) = (
        numbers(length, n, dim, seed=n + i, dtype=dtype, scale=3.0) for i, n in enumerate((heads, kv, kv))
    )
    entry = [PagedEntry(start=0, end=length, blocks=(4, 1, 0))]
    held = Blocks(5, kv, block, dim, dtype)
    held.write(k, v, TokenPlaces.of(entry, block))
    out, lse = Reads(entry, block).attend(q, held, 0.25, window)
    for p in range(length):
        want, sums = attention(q_np[p], k_np[: p + 1], v_np[: p + 1], F32(0.25), window)
        assert torch.equal(bits(out[p]), bits(torch.from_numpy(want).to(dtype))), f"position {p}"
        low = max(0, p + 1 - window) if window else 0
        scores = np.einsum("hd,thd->ht", q_np[p] / 4, k_np[low : p + 1].repeat(heads // kv, 1))
        np.testing.assert_allclose(lse[p].numpy(), scores.max(1) + np.log(sums), rtol=1e-5, atol=1e-5)


def test_the_oracle_can_tell_orders_apart():
    """Descending d, or one sum instead of lanes, gives other bits: the comparison above is not empty."""
    _, q = numbers(1, 64, seed=1)
    _, k = numbers(50, 64, seed=2)
    up, down = np.zeros(50, F32), np.zeros(50, F32)
    for d in range(64):
        up, down = fma(q[0, d], k[:, d], up), fma(q[0, 63 - d], k[:, 63 - d], down)
    assert (up != down).any()
    weights = exp(up - up.max())
    assert lane_sum(weights) != lane_sum(weights, first=3) or lane_sum(weights) != np.add.accumulate(weights)[-1]


def test_a_cached_kernel_is_found_again_by_the_next_process():
    """Numba names the cached kernel by what it captures; a captured function would make each start compile and keep it anew."""
    kernel = attention_kernel.attention(16, 16, 3).py_func
    assert all(isinstance(cell.cell_contents, int) for cell in kernel.__closure__)


# ---------------------------------------------------------------- gates


GELU_SLOPE = 2 * np.sqrt(2 / np.pi)


def gelu(g):
    """The kernel's GELU of fp32 numbers, written out for arrays."""
    square = g * g
    t = g * np.where(np.isinf(square), square, fma(square, F32(GELU_SLOPE * 0.044715), F32(GELU_SLOPE)))
    e = exp(-abs(t))
    return g * np.where(t < 0, e, F32(1)) / (F32(1) + e)


def gates(dtype):
    """Gates of every size, infinities and NaN among them; 50 in a row, so that some are computed one by one."""
    sizes = 10 ** np.random.default_rng(0).uniform(-20, 3, 4000)
    ends = [0.0, -0.0, 1e19, -1e19, 1e30, -1e30, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-40, -1e-40]
    each = np.concatenate([np.linspace(-12, 12, 4987), sizes, -sizes, ends])
    return torch.from_numpy(each.astype(F32)).to(dtype).view(-1, 50)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_the_stated_order_of_operations(dtype):
    gate, up = gates(dtype), numbers(260, 50, seed=1, dtype=dtype)[0]
    with torch.no_grad():
        got = gated(gate, up, "gelu_tanh")
    rounded = torch.from_numpy(gelu(gate.float().numpy())).to(dtype)
    want = (rounded.float() * up.float()).to(dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits(got)[~got.isnan()], bits(want)[~got.isnan()])


def test_gelu_is_within_two_ulps_of_its_formula():
    """In ulps of the result for positive gates and of the gate for all. Of a negative one's result, which vanishes, in
    2.5 (1 + |t|), since exp makes an error in t a relative one; torch's, by a tanh that is rounded near -1, loses all digits there."""
    gate = gates(torch.float32)
    gate = gate[gate.isfinite()]
    with torch.no_grad():
        ours = gated(gate[:, None], torch.ones(len(gate), 1), "gelu_tanh")[:, 0].double().numpy()
    g = gate.double().numpy()
    with np.errstate(over="ignore"):
        t = GELU_SLOPE * (g + 0.044715 * g**3)
        true = g / (1 + np.exp(-t))
    error, whole = np.abs(ours - true), t > arithmetic.LOWEST  # below, exp is 0
    ulp, ulp_of_gate = (np.spacing(np.abs(x).astype(F32)).astype(np.float64) for x in (true, g))
    assert (error <= 2 * ulp)[g >= 0].all()
    assert (error <= 2 * ulp_of_gate).all()
    assert (error <= 2.5 * (1 + np.abs(t)) * ulp)[whole].all()
    assert not ours[~whole].any()
    for x in (-11.0, -3.0, -0.5, 1e-3, 0.7, 5.0):  # the formula as it is written with tanh, in fifty digits
        with mpmath.workdps(50):
            c = mpmath.sqrt(2 / mpmath.pi)
            written = mpmath.mpf(x) / 2 * (1 + mpmath.tanh(c * (x + mpmath.mpf("0.044715") * mpmath.mpf(x) ** 3)))
        slope = GELU_SLOPE * (x + 0.044715 * x**3)
        assert x / (1 + np.exp(-slope)) == pytest.approx(float(written), rel=1e-13)


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_the_stated_order_of_operations(dtype, zero_centered):
    (x, x_np), (weight, w) = numbers(9, 80, seed=1, dtype=dtype, scale=3.0), numbers(80, seed=2, dtype=dtype)
    with torch.no_grad():
        got = rms_normed(x, weight, 1e-6, zero_centered=zero_centered)
    for row, values in enumerate(x_np):
        lanes = np.zeros(LANES, F32)
        for some in values.reshape(-1, LANES):
            lanes = fma(some, some, lanes)
        mean = F32(lane_sum(lanes) / F32(80)) + F32(1e-6)
        y = values * F32(F32(1) / np.sqrt(mean))
        want = y * (F32(1) + w) if zero_centered else torch.from_numpy(y).to(dtype).float().numpy() * w
        assert torch.equal(bits(got[row]), bits(torch.from_numpy(want).to(dtype))), row


# ---------------------------------------------------------------- softmax


@pytest.mark.parametrize("vocab", [5, 16, 260, 512, 513, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_softmax_is_the_stated_order_of_operations(dtype, vocab):
    temperatures = [1.0, 0.7, 1.3]
    x, x_np = numbers(len(temperatures), vocab, seed=vocab, dtype=dtype, scale=4.0)
    normal = RowSoftmax.of(x, torch.tensor(temperatures))
    every = np.arange(vocab)
    for row, temperature in enumerate(temperatures):
        s = (x_np[row] / F32(temperature)).astype(F32)
        top, total = s.max(), np.float64(0)
        for start in range(0, vocab, TILE):
            total += lane_sum(exp(s[start : start + TILE] - top))
        want = (np.float64(s - top) - np.log(total)).astype(F32)
        one = RowSoftmax.of(x[row].expand(vocab, -1), torch.full((vocab,), temperature)).logprobs(every)
        assert torch.equal(bits(one), bits(want))
        token = int(every[row % vocab])
        assert normal.logprobs(np.full(len(temperatures), token))[row] == want[token]
        np.testing.assert_allclose(want, torch.log_softmax(torch.from_numpy(s).double(), -1), atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_log_softmax_is_the_same_alone_and_in_any_batch(dtype, threads):
    x, _ = numbers(37, 1003, seed=3, dtype=dtype, scale=5.0)
    tokens, temperatures = np.arange(37) * 27, torch.linspace(0.5, 1.5, 37)
    torch.set_num_threads(threads)
    try:
        batch = RowSoftmax.of(x, temperatures)
        reverse = RowSoftmax.of(x.flip(0), temperatures.flip(0))
        drawn = batch.draw(np.linspace(0, 0.999, 37))
        for i in range(37):
            alone = RowSoftmax.of(x[i : i + 1], temperatures[i : i + 1])
            assert alone.logprobs(tokens[i : i + 1])[0] == batch.logprobs(tokens)[i]
            assert alone.logprobs(tokens[i : i + 1])[0] == reverse.logprobs(tokens[::-1].copy())[36 - i]
            assert alone.draw(np.linspace(0, 0.999, 37)[i : i + 1])[0] == drawn[i]
    finally:
        torch.set_num_threads(1)


def test_draws_follow_the_distribution_and_greedy_is_the_maximum():
    x, x_np = numbers(1, 700, seed=5)
    u = np.linspace(0, 1, 20_001)[:-1]
    tokens = RowSoftmax.of(x.expand(len(u), -1).contiguous(), torch.ones(len(u))).draw(u)
    assert (np.diff(tokens) >= 0).all()  # the running sum is inverted
    p = torch.softmax(x[0].double(), 0).numpy()
    np.testing.assert_allclose(np.bincount(tokens, minlength=700) / len(u), p, atol=1.01 / len(u))
    assert RowSoftmax.of(x, torch.ones(1)).draw(np.array([GREEDY]))[0] == x_np[0].argmax()


def test_queries_of_a_tile_do_not_see_each_other():
    """A tile has up to 8 queries; one of them alone gives its bits, whatever the others are."""
    (q, _), (k, _), (v, _) = (numbers(40, n, 16, seed=n) for n in (3, 1, 1))
    blocks = Blocks(3, 1, 16, 16, torch.float32)
    blocks.write(k, v, TokenPlaces.of([PagedEntry(start=0, end=40, blocks=(0, 1, 2))], 16))
    whole, _ = Reads([PagedEntry(start=0, end=40, blocks=(0, 1, 2))], 16).attend(q, blocks, 0.25, 0)
    for start in range(0, 40 - QUERIES, 5):
        for count in range(1, QUERIES + 1):
            reads = Reads([PagedEntry(start=start, end=start + count, blocks=(0, 1, 2))], 16)
            part, _ = reads.attend(q[start : start + count], blocks, 0.25, 0)
            assert torch.equal(bits(part), bits(whole[start : start + count]))


@pytest.mark.parametrize(
    ("dtype", "share"),  # each pair is a kernel of its own to compile
    [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 3), (torch.bfloat16, 4)],
)
def test_queries_that_share_a_prompt_get_the_bits_that_each_gets_alone(dtype, share):
    """Neighbours with the same first blocks are one tile: 0 to 3 common blocks, own blocks of other lengths, groups longer than a tile."""
    rng = np.random.default_rng(share)
    blocks = Blocks(64, 2, 16, 16, dtype)
    blocks.keys.copy_(numbers(64, 2, 16, 16, seed=1, dtype=dtype)[0])
    blocks.values.copy_(numbers(64, 2, 16, 16, seed=2, dtype=dtype)[0])
    entries: list[PagedEntry] = []
    for prefix in ([], [5], [5, 9], [7, 9, 11]):
        for _ in range(int(rng.integers(1, 2 * QUERIES + 2))):
            end = 16 * len(prefix) + int(rng.integers(1, 40))
            own = rng.choice(np.arange(20, 64), size=4, replace=False).tolist()
            entries.append(PagedEntry(start=end - 1, end=end, blocks=[*prefix, *own][: -(-end // 16)]))
    entries.insert(7, PagedEntry(start=3, end=30, blocks=[5, 9]))
    tokens = sum(entry.end - entry.start for entry in entries)
    q = numbers(tokens, 2 * share, 16, seed=3, dtype=dtype)[0]
    for window in (0, 21):
        together, lse = Reads(entries, 16).attend(q, blocks, 0.2, window)
        at = 0
        for entry in entries:
            rows = slice(at, at := at + entry.end - entry.start)
            alone, alone_lse = Reads([entry], 16).attend(q[rows], blocks, 0.2, window)
            assert torch.equal(bits(together[rows]), bits(alone))
            assert torch.equal(bits(lse[rows]), bits(alone_lse))


def test_neighbours_with_the_same_first_blocks_are_one_tile():
    entries = [PagedEntry(start=40, end=41, blocks=[1, 2, 3 + i]) for i in range(QUERIES + 1)]
    tiles = Reads([*entries, PagedEntry(start=0, end=20, blocks=[1, 2])], 16).queries[0]
    assert tiles.tolist() == [[0, 8, 2], [8, 1, 3], [9, 8, 1], [17, 8, 1], [25, 4, 2]]
