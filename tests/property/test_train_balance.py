"""Micro-batches over ranks: each once, the busiest rank within Graham's bound, and rows as torch divides them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.train.sharding.balance import balanced, rounds, rows_of

TOKENS = st.lists(st.integers(1, 5000), max_size=40)
RANKS = st.integers(1, 9)


@given(TOKENS, RANKS)
def test_every_micro_batch_has_one_rank(tokens: list[int], ranks: int):
    shares = balanced(tokens, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    assert rounds(shares) * ranks >= len(tokens)


@given(TOKENS, RANKS)
def test_the_busiest_rank_has_little_more_than_the_best_division_could_give_it(tokens: list[int], ranks: int):
    largest = sorted(tokens, reverse=True)
    # no division is better than the mean, the largest one, or two of the ranks + 1 largest on one rank
    pair = largest[ranks - 1] + largest[ranks] if len(tokens) > ranks else 0
    best = max(sum(tokens) / ranks, max(tokens, default=0), pair)
    busiest = max(sum(tokens[index] for index in share) for share in balanced(tokens, ranks))
    assert busiest <= max(best + (largest[ranks] if len(tokens) > ranks else 0) * (1 - 1 / ranks), best) + 1e-9


@given(st.integers(1, 30), st.integers(1, 5))
def test_alike_micro_batches_are_dealt_out_evenly(count: int, ranks: int):
    sizes = [len(share) for share in balanced([7] * count, ranks)]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 200), RANKS)
def test_rows_are_divided_as_fsdp_does(size: int, ranks: int):
    chunks = list(torch.arange(size).chunk(ranks))
    chunks += [torch.empty(0)] * (ranks - len(chunks))
    assert [b - a for a, b in (rows_of(size, ranks, rank) for rank in range(ranks))] == [len(chunk) for chunk in chunks]
    assert [a for rank in range(ranks) for a in range(*rows_of(size, ranks, rank))] == list(range(size))
