"""However sequences are cut into calls, mixed with others, laid into blocks and divided among threads: the bits are those of one call."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examinations.exactness.sweeps import QKV, attend, differing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS = [("fp32", 16), ("fp32", 32), ("bf16", 32), ("bf16", 64)]  # each compiled by itself, which takes seconds


@st.composite
def cuttings(draw, length):
    marks = draw(st.lists(st.integers(1, max(1, length - 1)), max_size=6, unique=True)) if length > 1 else []
    marks = [0, *sorted(marks), length]
    return list(pairwise(marks))


@settings(max_examples=40)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    kernel=st.sampled_from(KERNELS),
    window=st.sampled_from([0, 0, 1, 16, 33]),
    spare=st.integers(0, 2),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_no_cutting_changes_a_bit(data, lengths, kernel, window, spare, threads, seed):
    dtype, block = kernel
    sequences = [QKV(n, DTYPES[dtype], seed + i, 4, 2, 16) for i, n in enumerate(lengths)]
    pieces = [data.draw(cuttings(n)) for n in lengths]
    torch.set_num_threads(threads)
    try:
        mixed = attend(sequences, pieces, block=block, window=window, spare=spare, seed=seed)
    finally:
        torch.set_num_threads(1)
    for sequence, got in zip(sequences, mixed, strict=True):
        (alone,) = attend([sequence], [[(0, len(sequence.q))]], block=32, window=window)
        assert differing(got, alone) == 0
