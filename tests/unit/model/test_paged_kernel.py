"""The Triton kernel of a decoding step in Triton's interpreter, and the numbers of a recorded step."""

import numpy as np
import pytest
import torch
from tests.grids import covering

from ostinato.engine.embedded.kv import KVShape, open_store
from ostinato.model.backend import ComputeBackend
from ostinato.model.device_attention import CacheAttend
from ostinato.model.device_step import DecodingStep, StepAttend, numbers_of, rounded_rows
from ostinato.model.paged import PagedEntry

pytest.importorskip("triton", reason="Triton is not installed here: torch's CUDA builds bring it, and the CPU's do not")
BLOCK, SPARE = 16, 63
SHARED = (5, 3, 9, 30, 31, 32, 33)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"), covering([(6, 2, 16), (4, 4, 64), (14, 2, 80)], [0, 11, 70])
)
def test_a_recorded_step_computes_what_a_step_by_torch_does(heads, kv_heads, dim, window):
    """Sequences of one token and of many blocks, a shared prompt, and rows of padding, which touch no block but their own."""
    entries = [
        PagedEntry(start=100, end=101, blocks=SHARED),
        PagedEntry(start=0, end=1, blocks=(8,)),
        PagedEntry(start=47, end=48, blocks=(5, 3, 21)),
        PagedEntry(start=16, end=17, blocks=(11, 2)),
        PagedEntry(start=63, end=64, blocks=(5, 3, 9, 12)),
    ]
    shape = KVShape(
        layers=1, kv_heads=kv_heads, head_dim=dim, dtype=torch.float32, backend=ComputeBackend(kernels="torch")
    )
    torch.manual_seed(0)
    rows, outs, kept = rounded_rows(len(entries)), [], []
    q, k, v = (torch.randn(rows, count, dim) for count in (heads, kv_heads, kv_heads))
    for recorded in (True, False):
        store = open_store(shape, SPARE, BLOCK)
        layer = store._layers[0]
        torch.manual_seed(1)
        for held in (layer.keys, layer.values):
            held.copy_(torch.randn(held.shape))
        if recorded:
            numbers = torch.from_numpy(numbers_of([1] * len(entries), entries, BLOCK, rows, 8, SPARE))
            attend, given = StepAttend(store._layers, BLOCK, DecodingStep(numbers)), (q, k, v)
        else:
            attend = CacheAttend(store._layers, BLOCK, entries, torch.device("cpu"))
            given = tuple(x[: len(entries)] for x in (q, k, v))
        outs.append(attend(0, *given, 0.2, window)[: len(entries)])
        kept.append(torch.stack([layer.keys, layer.values])[:, : SPARE * BLOCK])
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(*kept)


def test_a_row_of_a_recorded_step_does_not_depend_on_the_rows_beside_it():
    store = open_store(
        KVShape(layers=1, kv_heads=2, head_dim=32, dtype=torch.float32, backend=ComputeBackend(kernels="torch")),
        SPARE,
        BLOCK,
    )
    layer = store._layers[0]
    torch.manual_seed(2)
    for held in (layer.keys, layer.values):
        held.copy_(torch.randn(held.shape))
    entries = [PagedEntry(start=9 * i, end=9 * i + 1, blocks=range(i, i + 6)) for i in range(8)]
    q, k, v = (torch.randn(8, count, 32) for count in (4, 2, 2))

    def out(chosen, blocks):
        numbers = numbers_of([0] * len(chosen), [entries[i] for i in chosen], BLOCK, len(chosen), blocks, SPARE)
        attend = StepAttend(store._layers, BLOCK, DecodingStep(torch.from_numpy(numbers)))
        return attend(0, q[chosen], k[chosen], v[chosen], 0.2, 0)

    together = out([*range(8)], 8)
    for i in range(8):
        assert torch.equal(out([i], 6)[0], together[i])


def test_spare_rows_are_tokens_of_the_spare_block():
    made = numbers_of([7], [PagedEntry(start=17, end=18, blocks=(4, 2, 9))], BLOCK, 3, 5, SPARE)
    spare = [0, 0, SPARE * BLOCK, 1, SPARE, 0, 0, 0, 0]
    assert made.tolist() == [[7, 17, 2 * BLOCK + 1, 18, 4, 2, 0, 0, 0], spare, spare]
    assert [rounded_rows(rows) for rows in (1, 3, 9, 100, 129, 300)] == [1, 4, 12, 128, 256, 384]
    assert made.dtype == np.int64
