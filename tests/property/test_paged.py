"""Attention in every shape that engine and trainer use it in, and linear layers at every row count: the same bits as in one call."""

import pytest
import torch
from tests.examinations.exactness import sweeps

from ostinato.model.linear import Linear
from ostinato.model.paged import Blocks, PagedEntry, Reads, TokenPlaces, WholeAttend
from ostinato.train.packing import TokenTurn, pack
from ostinato.train.tree_attention import TreeAttention

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [64, 576, 1536, 4096]
needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="which rows are unsafe was measured on MKL"
)


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize(("length", "window"), [(1, 0), (17, 0), (150, 0), (150, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_the_same_however_it_is_cut_and_kept(dtype, length, window, threads):
    cases = list(sweeps.attention(dtype, length, window=window, heads=4, kv=2, dim=16))
    assert len(cases) >= 10
    assert [case for case in cases if case[2]] == []
    assert all(compared >= 64 * (length - length // 2) for _, compared, _ in cases)


def test_threads_divide_long_work_and_change_no_bit():
    sequence = sweeps.QKV(600, torch.float32, 1, 4, 2, 16)
    one = sweeps.attend([sequence], [[(0, 600)]], block=32, window=0)[0]
    torch.set_num_threads(2)
    try:
        assert len(Reads([PagedEntry(start=0, end=600, blocks=range(19))], 32)._cuts()) == 3
        assert torch.equal(sweeps.attend([sequence], [[(0, 600)]], block=32, window=0)[0], one)
    finally:
        torch.set_num_threads(1)


def test_a_sweep_sees_a_difference_of_one_bit(monkeypatch):
    """Keys of the last position moved by one unit in the last place, as a cache that was written wrongly would have them."""
    real = Blocks.write

    def wrong(self, k, v, places):
        k = k.clone()
        k[-1:] *= 1 + 2**-22
        real(self, k, v, places)

    assert not any(case[2] for case in sweeps.attention(torch.float32, 33, heads=4, kv=2, dim=16))
    monkeypatch.setattr(Blocks, "write", wrong)  # one call writes one wrong key, chunks and decoding many
    assert all(
        wrong > 0 for name, _, wrong in sweeps.attention(torch.float32, 33, heads=4, kv=2, dim=16) if name == "decode"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 20])
def test_a_packed_tree_is_each_of_its_sequences_alone(dtype, window):
    """Shared prefixes that end inside a block, at its end, and at no branch at all."""
    source = torch.Generator().manual_seed(0)
    trunk = torch.randint(0, 9, (70,), generator=source).tolist()
    turns = [
        TokenTurn(
            prompt=tuple(trunk[:n]), sampled=tuple(torch.randint(10 * i, 10 * i + 9, (m,), generator=source).tolist())
        )
        for i, (n, m) in enumerate([(70, 5), (70, 40), (64, 3), (32, 9), (33, 1), (1, 20)], 1)
    ]
    packed = pack(turns)
    assert packed.saved > 150
    draw = sweeps.numbers(3)
    q, k, v = (draw(packed.tokens, n, 16).to(dtype) for n in (4, 2, 2))
    tree = TreeAttention(packed)(0, q, k, v, 0.25, window)
    for index, turn in enumerate(turns):
        last = int(packed.rows_M[packed.turns_M == index][-1])
        path = torch.tensor([n for n in range(last + 1) if packed.ends_N[n] > last])
        assert len(path) == len(turn.prompt) + len(turn.sampled) - 1
        alone = WholeAttend([len(path)])(0, q[path], k[path], v[path], 0.25, window)
        assert sweeps.differing(tree[path], alone) == 0


def test_places_put_tokens_where_the_table_says_and_nowhere_else():
    blocks = Blocks(4, 1, 16, 2, torch.float32)
    entries = [PagedEntry(start=14, end=18, blocks=(3, 1)), PagedEntry(start=0, end=1, blocks=(0,))]
    places = TokenPlaces.of(entries, 16)
    assert (places.blocks.tolist(), places.offsets.tolist()) == ([3, 3, 1, 1, 0], [14, 15, 0, 1, 0])
    k = torch.arange(1.0, 11.0).view(5, 1, 2)
    blocks.write(k, -k, places)
    assert blocks.keys[3, 0, :, 14:].tolist() == [[1, 3], [2, 4]]
    assert blocks.values[1, 0, :2].tolist() == [[-5, -6], [-7, -8]]
    assert int((blocks.keys != 0).sum()) == int((blocks.values != 0).sum()) == 10


# ---------------------------------------------------------------- linear layers


FEW = {"outputs": 256, "elements": 2 * 256 * 12}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_linear_layers_do_not_depend_on_the_row_count(dtype, packed):
    counts = (1, 2, 3, 5, 7, 12, 17, 33, 64, 255, 256)
    assert bad_rows(dtype, 576, packed, counts) == []


def test_nor_do_they_with_two_threads():
    torch.set_num_threads(2)
    try:
        for dtype, packed in ((torch.float32, False), (torch.bfloat16, True)):
            assert bad_rows(dtype, 576, packed, (1, 5, 6, 7, 64)) == []
    finally:
        torch.set_num_threads(1)


def bad_rows(dtype, inputs, packed, counts):
    return [case for case in sweeps.linear(dtype, inputs, packed=packed, counts=counts, **FEW) if case[2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_depends_on_its_rows_is_seen(monkeypatch, dtype):
    """Planted on any machine: one unit in the last place more wherever the row count is odd."""
    honest = Linear.forward

    def odd(self, x):
        y = honest(self, x)
        return y + y.abs() * torch.finfo(dtype).eps if len(x) % 2 else y

    monkeypatch.setattr(Linear, "forward", odd)
    assert [name for name, _, _ in bad_rows(dtype, 64, False, (1, 2, 3, 64))] == ["1 rows", "3 rows"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 260, 513, 1003])
def test_log_softmax_of_a_row_does_not_depend_on_the_batch(dtype, vocab):
    assert [case for case in sweeps.log_softmax(dtype, vocab) if case[2]] == []
