"""The tokens of one micro-batch over ranks: each once, as many and as costly for each rank, and attention over them as over all."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.test_train_packing import trunk

from ostinato.train.packing import TokenTurn, pack
from ostinato.train.sharding.balance import dealt
from ostinato.train.sharding.context import ContextShare
from ostinato.train.tree_attention import Layout

torch.set_num_threads(1)

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple)
TREES = st.lists(st.builds(TokenTurn, prompt=IDS, sampled=IDS), min_size=1, max_size=8)
RANKS = st.integers(1, 6)
STRETCHES = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 900)), min_size=1, max_size=12)


def costs(stretches: list[tuple[int, int]]) -> np.ndarray:
    """Of tokens that go on from some position each, as branches of trees do."""
    return np.concatenate([np.arange(first, first + size) + 1 for first, size in stretches])


@given(STRETCHES, RANKS)
def test_every_token_has_one_rank_and_the_ranks_have_as_much_to_do(stretches: list[tuple[int, int]], ranks: int):
    costs_N = costs(stretches)
    shares = dealt(costs_N, ranks)
    assert len(shares) == ranks
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(costs_N)))
    assert all((np.diff(share) > 0).all() for share in shares)
    runs = max(2, round(len(costs_N) / (64 * ranks)))  # of each rank
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= runs
    longest = -(-len(costs_N) // (runs * ranks))
    work = [int(costs_N[share].sum()) for share in shares]
    assert max(work) - min(work) <= longest * int(costs_N.max())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_long_episode_is_shared_to_within_a_percent(ranks: int):
    plain = dealt(np.arange(1, 8193), ranks)
    branched = costs([(0, 4000), (4000, 2000), (4000, 1000), (100, 1500)])
    for costs_N, shares in ((np.arange(1, 8193), plain), (branched, dealt(branched, ranks))):
        work = [costs_N[share].sum() for share in shares]
        assert max(work) < 1.01 * np.mean(work)
        assert max(map(len, shares)) < 1.01 * len(costs_N) / ranks


def test_two_runs_for_each_rank_of_a_plain_sequence_are_a_zigzag():
    assert [share.tolist() for share in dealt(np.arange(1, 9), 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@given(TREES, RANKS)
def test_the_parts_of_a_micro_batch_are_all_of_it(turns: list[TokenTurn], ranks: int):
    packed = pack(turns)
    shares = [ContextShare.of(packed, rank, ranks) for rank in range(ranks)]
    parts = [share.part(packed) for share in shares]
    assert {len(part.ids_N) for part in parts} == {shares[0].rows}
    together = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("ids_N", "positions_N")}
    for name, found in together.items():
        assert (found[shares[0].places_N] == getattr(packed, name)).all()
    told = np.full(ranks * shares[0].predictions, -1)
    for rank, (share, part) in enumerate(zip(shares, parts, strict=True)):
        assert (share.places_N == shares[0].places_N).all()
        assert len(part.targets_M) == len(part.rows_M) == max(1, len(share.own_M))
        assert (part.rows_M < shares[0].rows).all()
        told[rank * share.predictions :][: len(share.own_M)] = share.own_M
        # each prediction is made from the token that it is made from in the whole
        assert (share.own_N[part.rows_M[: len(share.own_M)]] == packed.rows_M[share.own_M]).all()
        assert (part.targets_M[: len(share.own_M)] == packed.targets_M[share.own_M]).all()
    assert (told[shares[0].places_M] == np.arange(len(packed.targets_M))).all()


@given(TREES, st.integers(1, 4), st.integers(0, 20), st.integers(1, 20))
def test_edits_follow_their_predictions(turns: list[TokenTurn], ranks: int, start: int, size: int):
    packed = pack(turns)
    edits: dict[int, Any] = {at: object() for at in range(0, len(packed.targets_M), 3)}
    for rank in range(ranks):
        share = ContextShare.of(packed, rank, ranks)
        found = share.edits(lambda a, b: {at: edit for at, edit in edits.items() if a <= at < b})(start, start + size)
        places = range(start, min(start + size, len(share.own_M)))
        assert found == {at: edits[share.own_M[at]] for at in places if share.own_M[at] in edits}


@settings(max_examples=40)
@given(
    st.one_of(
        TREES,
        st.lists(st.tuples(st.integers(1, 100), st.integers(0, 70)), min_size=1, max_size=6).map(
            lambda tails: trunk(100, tails)
        ),
    ),
    st.sampled_from([0, 1, 5, 40]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 4),
)
def test_queries_of_some_tokens_over_the_keys_of_all_are_those_of_the_whole(
    turns: list[TokenTurn], window: int, dtype: torch.dtype, ranks: int
):
    packed = pack(turns)
    torch.manual_seed(packed.tokens)
    whole = Layout(packed)
    q, grad = torch.randn(2, packed.tokens, 4, 16).to(dtype)
    k, v = torch.randn(2, packed.tokens, 2, 16).to(dtype)
    out, lse = whole.forward(q, k, v, 0.3, window)
    expected = whole.backward(q, k, v, out, lse, grad, 0.3, window, torch.float32)
    sums = [torch.zeros(packed.tokens, 2, 16) for _ in range(2)]
    for rank in range(ranks):
        share = ContextShare.of(packed, rank, ranks)
        own_N, places_N = torch.from_numpy(share.own_N), torch.from_numpy(share.places_N)
        rows = ranks * share.rows

        def padded(x: torch.Tensor, size: int, at: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(size, *x.shape[1:]).index_copy_(0, at, x)

        layout, mine = whole.part(share.own_N, share.places_N), torch.arange(len(own_N))
        own_q, own_grad = (padded(x[own_N], share.rows, mine) for x in (q, grad))
        all_k, all_v = (padded(x, rows, places_N) for x in (k, v))
        found, found_lse = layout.forward(own_q, all_k, all_v, 0.3, window)
        assert torch.equal(found[mine], out[own_N])  # to the bit
        assert torch.equal(found_lse[mine], lse[own_N])
        dq, *others = layout.backward(own_q, all_k, all_v, found, found_lse, own_grad, 0.3, window, torch.float32)
        torch.testing.assert_close(dq[mine].float(), expected[0][own_N].float(), atol=1e-5, rtol=1e-2)
        for total, part in zip(sums, others, strict=True):
            total += part[places_N]
            assert not part[np.setdiff1d(np.arange(rows), share.places_N)].any()
    for total, one in zip(sums, expected[1:], strict=True):
        torch.testing.assert_close(total, one, atol=1e-4, rtol=1e-4)
