"""Packing loses nothing, invents nothing, and computes each shared prefix once."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.train import tree_attention
from ostinato.train.packing import PackedBatch, TokenTurn, microbatches, pack
from ostinato.train.tree_attention import Layout, TreeAttention

torch.set_num_threads(1)
# two token ids make shared prefixes, and turns that are prefixes of others, common
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
TURN = st.builds(lambda prompt, sampled: TokenTurn(prompt=prompt, sampled=sampled), IDS, IDS)
TURNS = st.lists(TURN, min_size=1, max_size=12)


def allowed(packed: PackedBatch) -> np.ndarray:
    """[N, N]: token i reads token j."""
    i, j = np.arange(packed.tokens)[:, None], np.arange(packed.tokens)[None]
    return (j <= i) & (i < packed.ends_N[None])


@given(TURNS)
def test_what_a_prediction_may_read_is_exactly_the_turns_own_tokens(turns: list[TokenTurn]):
    packed = pack(turns)
    reads = allowed(packed)
    at = 0
    for index, turn in enumerate(turns):
        for step, target in enumerate(turn.sampled):
            assert packed.targets_M[at] == target
            assert packed.turns_M[at] == index
            seen = np.flatnonzero(reads[packed.rows_M[at]])
            assert tuple(packed.ids_N[seen]) == turn.prompt + turn.sampled[:step]
            assert packed.positions_N[seen].tolist() == list(range(len(turn.prompt) + step))
            at += 1
    assert at == len(packed.targets_M)


@given(TURNS)
def test_each_distinct_prefix_is_computed_once(turns: list[TokenTurn]):
    packed = pack(turns)
    prefixes = {turn.path[:end] for turn in turns for end in range(1, len(turn.path) + 1)}
    assert packed.tokens == len(prefixes)
    assert packed.saved == sum(len(turn.path) for turn in turns) - len(prefixes)


@given(TURNS, st.integers(1, 40), st.integers(1, 60))
def test_micro_batches_hold_every_turn_once_and_their_size_is_bounded(
    turns: list[TokenTurn], budget: int, largest: int
):
    batches = microbatches(turns, budget, largest=largest)
    assert sorted(index for batch in batches for index in batch) == list(range(len(turns)))
    longest = max(len(turn.path) for turn in turns)
    assert all(pack([turns[i] for i in batch]).tokens <= max(budget, largest, 2 * longest) for batch in batches)


@given(TURNS, st.integers(1, 40), st.sampled_from([0.0, 0.09, 0.3]))
def test_what_is_computed_again_is_bounded(turns: list[TokenTurn], budget: int, waste: float):
    batches = [[turns[i] for i in batch] for batch in microbatches(turns, budget, waste=waste)]
    assert sum(pack(batch).tokens for batch in batches) <= pack(turns).tokens / (1 - waste)
    for one, other in pairwise(batches):  # no cut comes before the budget is used up
        first = min(other, key=lambda turn: turn.path)
        assert pack([*one, first]).tokens > budget


@given(st.lists(IDS, min_size=1, max_size=12), st.integers(1, 40))
def test_turns_without_a_common_prefix_keep_to_the_budget(paths: list[tuple[int, ...]], budget: int):
    turns = [TokenTurn(prompt=(100 + i, *path), sampled=path) for i, path in enumerate(paths)]
    for batch in microbatches(turns, budget):
        assert len(batch) == 1 or pack([turns[i] for i in batch]).tokens <= budget


@given(st.lists(TURN, min_size=2, max_size=8, unique_by=lambda turn: turn.path), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_arrival(turns: list[TokenTurn], random):
    shuffled = random.sample(turns, len(turns))
    one = [[turns[i] for i in batch] for batch in microbatches(turns, 20)]
    assert one == [[shuffled[i] for i in batch] for batch in microbatches(shuffled, 20)]


@given(TURNS)
def test_a_layout_gives_each_token_the_blocks_of_its_path(turns: list[TokenTurn]):
    """With blocks of 4 tokens, so that paths end inside blocks, at their ends and after several."""
    packed = pack(turns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "BLOCK", 4)
        layout = Layout(packed)
    held = [[] for _ in range(layout.blocks)]
    for token, block, offset in zip(layout.places.tokens, layout.places.blocks, layout.places.offsets, strict=True):
        assert offset == len(held[block])
        held[block].append(int(token))
    for token in range(packed.tokens):
        position, where = int(layout.reads.positions_N[token]), int(layout.reads.where_N[token])
        path = [held[layout.reads.table[where + p // 4]][p % 4] for p in range(position + 1)]
        assert position == packed.positions_N[token]
        assert path == np.flatnonzero(allowed(packed)[token]).tolist()


def masked_softmax(q, k, v, mask, scale, window, positions):
    near = (positions[:, None] - positions[None] < window) if window else torch.ones_like(mask)
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(share, 1)) * scale
    weights = scores.masked_fill(~(mask & near), float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(share, 1))


def trunk(length: int, tails: list[tuple[int, int]]) -> list[TokenTurn]:
    """Turns that leave a common trunk: (after how many tokens, how many of their own)."""
    return [
        TokenTurn(prompt=tuple(range(at)), sampled=tuple(range(1000 * i, 1000 * i + own + 1)))
        for i, (at, own) in enumerate([(length, 1), *tails], 1)
    ]


@settings(max_examples=40)
@given(
    st.one_of(
        TURNS,
        st.lists(st.tuples(st.integers(1, 100), st.integers(0, 70)), min_size=1, max_size=6).map(
            lambda t: trunk(100, t)
        ),
    ),
    st.sampled_from([0, 1, 5, 40]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 3),
)
def test_tree_attention_and_its_gradient_equal_masked_softmax(turns: list[TokenTurn], window: int, dtype, padding: int):
    packed = pack(turns)
    torch.manual_seed(packed.tokens)
    rows = packed.tokens + padding
    q, grad = torch.randn(2, rows, 4, 16).to(dtype)
    k, v = torch.randn(2, rows, 2, 16).to(dtype)
    inputs = [x.requires_grad_(True) for x in (q, k, v)]
    wide = [x.detach().double()[: packed.tokens].requires_grad_(True) for x in inputs]
    plain = masked_softmax(*wide, torch.from_numpy(allowed(packed)), 0.3, window, torch.from_numpy(packed.positions_N))
    found = TreeAttention(packed)(0, q, k, v, 0.3, window)
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(found[: packed.tokens].double(), plain, **close)
    expected = torch.autograd.grad(plain, wide, grad.double()[: packed.tokens])
    for one, other in zip(expected, torch.autograd.grad(found, inputs, grad), strict=True):
        torch.testing.assert_close(one, other[: packed.tokens].double(), **close)
        assert not other[packed.tokens :].any()


def test_the_gradients_bits_do_not_depend_on_the_number_of_threads():
    packed = pack(trunk(300, [(200, 90), (250, 40), (17, 200), (300, 60)]))
    torch.manual_seed(0)
    q, grad = torch.randn(2, packed.tokens, 4, 16)
    k, v = torch.randn(2, packed.tokens, 2, 16)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            inputs = [x.clone().requires_grad_(True) for x in (q, k, v)]
            found.append(torch.autograd.grad(TreeAttention(packed)(0, *inputs, 0.25, 0), inputs, grad))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))
