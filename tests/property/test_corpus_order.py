"""Reading token shards: every resume point gives the same rest, every prediction is made once an epoch, the mixture holds."""

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.corpus.order import EndlessOrder, Phase, ReadingOrder, held_out


def a_row(corpus, sizes, seed, per_shard=3, longest=16):
    sizes_D = np.array(sizes, np.int64)
    digests_D = np.arange(len(sizes)) * 7919 + corpus
    shards_D = np.arange(len(sizes)) // per_shard
    return EndlessOrder(corpus, sizes_D, digests_D, shards_D, np.arange(len(sizes)), longest=longest, seed=seed)


sizes = st.lists(st.integers(2, 40), min_size=1, max_size=12)


@st.composite
def readings(draw):
    corpora = draw(st.lists(sizes, min_size=1, max_size=3))
    weights = [draw(st.floats(0.1, 5)) for _ in corpora]
    phases = tuple(
        Phase(length=length, share=draw(st.floats(0.1, 3))) for length in draw(st.permutations([4, 8, 16]))[:2]
    )
    steps, seed = draw(st.integers(1, 9)), draw(st.integers(0, 5))
    return lambda: ReadingOrder(
        [a_row(n, each, seed) for n, each in enumerate(corpora)], weights, phases, batch_tokens=32, steps=steps
    ), steps


@given(readings(), st.data())
@settings(max_examples=60, deadline=None)
def test_any_resume_point_gives_the_same_rest(reading, data):
    make, steps = reading
    straight = make()
    whole = [straight.pieces(step) for step in range(steps)]
    start = data.draw(st.integers(0, steps - 1))
    resumed = make()
    assert [resumed.pieces(step) for step in range(start, steps)] == whole[start:]
    assert resumed.pieces(0) == whole[0], "going back is as good as going on"


@given(readings())
@settings(max_examples=60, deadline=None)
def test_steps_are_full_and_no_piece_is_longer_than_its_phases_window(reading):
    make, steps = reading
    order = make()
    for step in range(steps):
        lengths = [piece.stop - piece.start for piece in order.pieces(step)]
        assert sum(lengths) == 32
        assert 0 < min(lengths) <= max(lengths) <= order.length(step)


@given(sizes, st.integers(0, 3), st.sampled_from([4, 8, 16]))
@settings(max_examples=60, deadline=None)
def test_a_document_is_cut_at_windows_and_where_a_step_begins_or_ends(sizes, seed, length):
    row, cuts = a_row(0, sizes, seed), 0
    for first in range(0, row.length, 32):
        pieces = row.pieces(first, min(32, row.length - first), length)
        cuts += sum(piece.start % length != 0 for piece in pieces)
        assert sum(piece.stop % length != 0 and piece.stop != sizes[piece.document] - 1 for piece in pieces) <= 1
    assert cuts <= row.length // 32, "each step goes on with at most one piece of the step before"


def test_a_long_file_does_not_fill_a_step():
    row = a_row(0, [1601] + [41] * 40, 0, per_shard=100)
    order = ReadingOrder([row], [1.0], (Phase(length=16),), batch_tokens=160, steps=20)
    for step in range(20):
        told = Counter()
        for piece in order.pieces(step):
            told[piece.document] += piece.stop - piece.start
        assert told[0] < 160
        assert len(told) >= 3


@given(sizes, st.integers(0, 3), st.lists(st.integers(1, 50), min_size=1))
@settings(max_examples=60, deadline=None)
def test_every_prediction_is_made_once_an_epoch_however_it_is_cut(sizes, seed, cuts):
    lengths = [4, 16, 8]
    row = a_row(0, sizes, seed)
    epochs, position, seen = 2, 0, Counter()
    while position < epochs * row.length:
        count = min(cuts[position % len(cuts)], epochs * row.length - position)
        for piece in row.pieces(position, count, lengths[position % 3]):
            seen.update((piece.document, at) for at in range(piece.start, piece.stop))
        position += count
    assert seen == {(document, at): epochs for document, size in enumerate(sizes) for at in range(size - 1)}


@given(sizes, st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_shard_is_read_to_its_end_before_the_next(sizes, seed):
    row = a_row(0, sizes, seed)
    shards = [piece.document // 3 for piece in row.pieces(0, row.length, 16)]
    changes = sum(a != b for a, b in pairwise(shards))
    assert changes == len(set(shards)) - 1


@given(st.lists(st.floats(0.1, 5), min_size=2, max_size=4))
@settings(max_examples=40, deadline=None)
def test_the_mixture_is_never_off_by_more_than_a_few_windows(weights):
    order = ReadingOrder(
        [a_row(n, [30] * 5, 0) for n in range(len(weights))], weights, (Phase(length=8),), batch_tokens=64, steps=20
    )
    drawn = Counter()
    for step in range(20):
        for piece in order.pieces(step):
            drawn[piece.corpus] += piece.stop - piece.start
    total = sum(drawn.values())
    for number, weight in enumerate(weights):
        assert abs(drawn[number] - total * weight / sum(weights)) <= 8 * len(weights)


def test_epochs_and_seeds_have_orders_of_their_own():
    row, other = a_row(0, [9] * 30, 0), a_row(0, [9] * 30, 1)
    first, second, elsewhere = (
        row.pieces(0, row.length, 16),
        row.pieces(row.length, row.length, 16),
        other.pieces(0, row.length, 16),
    )
    assert first != second
    assert first != elsewhere
    assert row.pieces(0, row.length, 16) == first


def test_what_is_held_out_depends_on_the_document_alone():
    digests = np.random.default_rng(0).integers(0, 2**63, 20_000)
    apart = held_out(digests, 0.1)
    assert 0.09 < apart.mean() < 0.11
    assert (held_out(digests[::-1], 0.1) == apart[::-1]).all()
    assert not held_out(digests, 0.0).any()
    assert (held_out(digests, 0.2) >= apart).all(), "a larger share only adds"
