"""What holds for the credit of any batch."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ostinato.core.errors import NoSignal
from ostinato.reward.credit import credit

entry = st.tuples(
    st.sampled_from([0.75, -0.25, 0.0]) | st.floats(-10, 10),
    st.floats(-1, 1),
    st.sampled_from("abcdefghijklmnopqrstuvwxyz"),
)
batches = st.lists(entry, min_size=1, max_size=60)


@given(batches, st.floats(0.01, 1.0))
def test_caps_signs_and_scale(batch: list[tuple[float, float, str]], cap: float):
    rewards, baseline, users = (list(column) for column in zip(*batch, strict=True))
    try:
        capped = credit(rewards, baseline, users, cap=cap)
        free = credit(rewards, baseline, users, cap=1.0)
    except NoSignal:
        rms = math.sqrt(sum((r - b) ** 2 for r, b in zip(rewards, baseline, strict=True)) / len(batch))
        assert rms < 1e-8 or (len(batch) > 1 and len(set(rewards)) == 1)
        return
    assert sum(a * a for a in free) / len(free) == pytest.approx(1.0)
    total = sum(map(abs, capped))
    acting = {user for user, a in zip(users, free, strict=True) if a != 0}
    allowed = max(cap, 2 / len(acting))
    for user in set(users):
        theirs = [(a, f) for a, f, u in zip(capped, free, users, strict=True) if u == user]
        assert sum(abs(a) for a, _ in theirs) <= allowed * total * (1 + 1e-9)
        ratios = {a / f for a, f in theirs if f != 0}
        assert all(0 <= ratio <= 1 + 1e-12 for ratio in ratios)
        assert not ratios or max(ratios) - min(ratios) < 1e-9


@given(batches, st.randoms())
def test_the_order_of_turns_does_not_matter(batch: list[tuple[float, float, str]], rng):
    order = list(range(len(batch)))
    rng.shuffle(order)
    shuffled = [batch[i] for i in order]
    try:
        straight = credit(*(list(column) for column in zip(*batch, strict=True)), cap=0.1)
    except NoSignal:
        assume(False)
    mixed = credit(*(list(column) for column in zip(*shuffled, strict=True)), cap=0.1)
    for position, original in enumerate(order):
        assert mixed[position] == pytest.approx(straight[original], rel=1e-9, abs=1e-9)
