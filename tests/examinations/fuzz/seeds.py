"""Seeds of cases.py: payloads written by the codec, and a store written by a publisher."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tests.examinations.fuzz.targets import Case

from ostinato.core.weights import ITEMSIZES, WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.delta import codec as delta
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.version.content import hash_of
from ostinato.weights.version.manifest import Route, canonical, parse, plain


def payloads(seed: int) -> tuple[list[Case], list[Case]]:
    """Real payloads of every codec and dtype, short and long, with few and many changes: (all, those of 16-bit floats)."""
    found = list(_payloads(seed))
    return found, [case for case in found if case.about["dtype"] in ("BF16", "F16")]


def _payloads(seed: int) -> Iterator[Case]:
    rng = np.random.default_rng(seed)
    for dtype in ITEMSIZES:
        for elements in (1, 63, 64, 65, 1000, 20_000):
            for share in (0.0, 0.01, 0.2, 1.0):
                kind = np.dtype(f"u{ITEMSIZES[dtype]}")
                old = (rng.normal(0, 0.03, elements).astype(np.float32).view(np.uint32) >> 16).astype(kind)
                new = old.copy()
                hit = rng.random(elements) < share
                new[hit] += rng.choice(np.array([1, 3, kind.type(-1 % 2 ** (8 * kind.itemsize))], kind), int(hit.sum()))
                for base in (old, None):
                    before = None if base is None else base.view(np.uint8)
                    coded = delta.encode(before, new.view(np.uint8), dtype=dtype)
                    about = {
                        "codec": coded.codec,
                        "dtype": dtype,
                        "old": base is not None,
                        "result": hash_of(new.view(np.uint8)),
                        "at_end": True,
                        "declared": 2 * new.nbytes,
                    }
                    yield Case("decode", about, [coded.payload, old.tobytes()])


async def published() -> tuple[MemoryStore, list[bytes]]:
    """A store with a chain that includes full snapshots and squashed deltas, and its manifests. The last one's routes are invalid."""
    store, rng = MemoryStore(), np.random.default_rng(5)
    publisher = VersionPublisher(store, PublisherConfig(anchor_every=4, skips=(2, 4), object_bytes=1 << 12))
    made, base = [], None
    codes = (rng.normal(0, 0.03, 6000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for number in range(10):
        codes = codes.copy()
        codes[rng.random(codes.size) < 0.02] += 1
        weights = {
            "layer.0/w": WeightArray("BF16", (60, 100), codes.view(np.uint8)),
            "b": WeightArray("F32", (3,), np.full(3, 1.0 + number // 2, np.float32).view(np.uint8)),
            "none": WeightArray("U8", (0, 4), np.zeros(0, np.uint8)),
        }
        done = await publisher.publish(number, weights, run="r", base=base, ref="live", meta={"loss": 0.5, "é": "x"})
        base = done.policy
        made.append(done.manifest)
    documents = [plain(store.objects[name]) for name in made]
    last = parse(documents[-1])
    routes = (Route(manifest=made[0], base=last.root, bytes=1000), Route(manifest=made[1], base=last.root, bytes=10))
    documents.append(canonical(last.model_copy(update={"routes": routes}).model_dump(mode="json")))
    await store.put(documents[-1])
    return store, documents
