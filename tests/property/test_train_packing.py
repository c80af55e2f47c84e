"""Packing loses nothing, invents nothing, and computes each shared prefix once."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.train.batch.packing import Packed, TokenTurn, blocks, microbatches, pack
from ostinato.train.gradients.tree_attention import TreeAttention

torch.set_num_threads(1)
# two token ids make shared prefixes, and turns that are prefixes of others, common
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
TURN = st.builds(lambda prompt, sampled: TokenTurn(prompt=prompt, sampled=sampled), IDS, IDS)
TURNS = st.lists(TURN, min_size=1, max_size=12)


def allowed(packed: Packed) -> np.ndarray:
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


@given(TURNS, st.integers(1, 40))
def test_a_plan_holds_every_turn_once_within_the_budget(turns: list[TokenTurn], budget: int):
    batches = microbatches(turns, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(turns)))
    for batch in batches:
        assert pack([turns[index] for index in batch]).tokens <= budget or len({turns[i].path for i in batch}) == 1


@given(st.lists(TURN, min_size=2, max_size=8, unique_by=lambda turn: turn.path), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_arrival(turns: list[TokenTurn], random):
    shuffled = random.sample(turns, len(turns))
    one = [[turns[i] for i in batch] for batch in microbatches(turns, 20)]
    assert one == [[shuffled[i] for i in batch] for batch in microbatches(shuffled, 20)]


@given(TURNS, st.integers(1, 7), st.integers(1, 200))
def test_blocks_let_each_token_read_its_ancestors_and_nothing_else(turns: list[TokenTurn], queries: int, cells: int):
    packed = pack(turns)
    found = np.zeros((packed.tokens, packed.tokens), int)
    for bucket in blocks(packed.ends_N, queries=queries, cells=cells):
        for block, query in zip(*np.nonzero(bucket.real_BQ), strict=True):
            reads = bucket.keys_BK[block][bucket.allowed_BQK[block, query]]
            np.add.at(found[bucket.queries_BQ[block, query]], reads, 1)
    assert np.array_equal(found, allowed(packed).astype(int))


@settings(max_examples=25, deadline=None)
@given(TURNS, st.integers(1, 8))
def test_tree_attention_and_its_gradient_equal_masked_softmax(turns: list[TokenTurn], queries: int):
    packed = pack(turns)
    torch.manual_seed(packed.tokens)
    q, grad = torch.randn(2, packed.tokens, 6, 8, dtype=torch.float64).float()
    k, v = torch.randn(2, packed.tokens, 2, 8)
    inputs = [x.requires_grad_(True) for x in (q, k, v)]
    mask = torch.from_numpy(allowed(packed))
    scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(3, 1)) * 0.3
    plain = torch.einsum(
        "hnm,mhd->nhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v.repeat_interleave(3, 1)
    )
    found = TreeAttention(packed, queries=queries)(0, q, k, v, 0.3, 0)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    for one, other in zip(
        torch.autograd.grad(plain, inputs, grad), torch.autograd.grad(found, inputs, grad), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
