import pytest
import torch
import torch.nn.functional as F

from ostinato.engine.embedded.kv import KVShape, Store
from ostinato.model.paged import PagedEntry, TokenPlaces

HEADS, KV, DIM, BLOCK = 6, 2, 16, 16


def reference(q, k, v, start):
    """Plain attention of one sequence: q [n, H, D] at positions start.., k and v [L, KV, D]."""
    k, v = (x.double().repeat_interleave(HEADS // KV, 1).transpose(0, 1) for x in (k, v))
    mask = torch.arange(k.shape[1]) <= torch.arange(start, start + len(q))[:, None]
    return F.scaled_dot_product_attention(q.double().transpose(0, 1), k, v, attn_mask=mask, scale=0.25).transpose(0, 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_any_mix_equals_plain_attention(dtype, tolerance):
    torch.manual_seed(0)
    lengths = [1, 5, 16, 17, 40, 33, 64, 70] + [55] * 20  # 20 readers of one prompt: more than one group
    shared = {6: 48, 7: 48} | dict.fromkeys(range(8, 28), 48)  # the first 3 blocks are common
    common = [torch.randn(48, KV, DIM, dtype=dtype) for _ in range(2)]
    store = Store(KVShape(layers=1, kv_heads=KV, head_dim=DIM, dtype=dtype), 200, BLOCK)
    free = torch.randperm(200).tolist()
    common_blocks = [free.pop() for _ in range(3)]
    spans = {1: (4, 5), 2: (15, 16), 3: (16, 17), 4: (0, 40), 5: (10, 33)}
    entries, queries, news, expected = [], [], ([], []), []
    order = sorted(range(len(lengths)), key=lambda row: row in (4, 5))
    for row in order:
        length, begin = lengths[row], shared.get(row, 0)
        start, end = spans.get(row, (length - 1, length))
        kv = [torch.randn(length, KV, DIM, dtype=dtype) for _ in range(2)]
        blocks = [free.pop() for _ in range(-(-length // BLOCK))]
        if begin:
            kv = [torch.cat([head, x[begin:]]) for head, x in zip(common, kv, strict=True)]
            blocks[:3] = common_blocks
        if start:
            store.layers[0].write(*kv, TokenPlaces.of([PagedEntry(start=0, end=start, blocks=blocks)], BLOCK))
        q = torch.randn(end - start, HEADS, DIM, dtype=dtype)
        entries.append(PagedEntry(start=start, end=end, blocks=blocks))
        queries.append(q)
        news[0].append(kv[0][start:end])
        news[1].append(kv[1][start:end])
        expected.append(reference(q, *kv, start))
    out = store.attend(entries)(0, torch.cat(queries), torch.cat(news[0]), torch.cat(news[1]), 0.25, 0)
    assert out.dtype == dtype
    assert float((out.double() - torch.cat(expected)).abs().max()) < tolerance


def test_copy_and_wipe():
    store = Store(KVShape(layers=2, kv_heads=KV, head_dim=DIM, dtype=torch.float32), 4, BLOCK)
    store.layers[1].keys[2] = 5.0
    store.copy(2, 0)
    assert bool((store.layers[1].keys[0] == 5.0).all())
    store.wipe([0, 2])
    assert not any(bool(t.any()) for layer in store.layers for t in (layer.keys, layer.values))
