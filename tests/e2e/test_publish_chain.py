"""Long chains and large tensors: what was published is what comes back, bit for bit."""

import numpy as np

from ostinato.core.records import WeightArray
from ostinato.publish.checking import verify
from ostinato.publish.content import CHUNK_ELEMENTS, weights_root
from ostinato.publish.follower import Follower
from ostinato.publish.publisher import Publisher, PublisherConfig
from ostinato.publish.store import DirectoryStore
from ostinato.testing.store import MemoryStore

# Values that a careless codec loses and that training can reach: both zeros, subnormals, the largest finite codes.
FINITE = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x7F7F, 0xFF7F], np.uint16)


async def test_200_versions_with_planted_codes_are_bit_for_bit_what_was_published():
    rng = np.random.default_rng(5)
    store = MemoryStore()
    publisher = Publisher(store, PublisherConfig(anchor_share=5.0))
    codes, base, published = rng.choice(FINITE, 4096), None, []
    for number in range(200):
        weights = {"w": WeightArray("BF16", (64, 64), codes.view(np.uint8))}
        done = await publisher.publish(number, weights, run="r", base=base, ref="live")
        published.append((done.policy, codes, done.kind))
        base, codes = done.policy, codes.copy()
        codes[rng.choice(codes.size, 40, replace=False)] = rng.choice(FINITE, 40)
    assert sum(kind == "full" for _, _, kind in published) == 8  # 0, 26, 52, ...
    forward, cold = Follower(store), [published[k] for k in (199, 25, 24, 130, 0)]
    for policy, want, _ in published:
        got = await forward.fetch(policy)
        assert got["w"].data.tobytes() == want.tobytes()
        assert weights_root(got) == policy.hash
    for policy, want, _ in cold:
        assert (await Follower(store).fetch(policy))["w"].data.tobytes() == want.tobytes()
    findings = await verify(store, every=True)
    assert (findings.problems, findings.rebuilt, findings.manifests) == ([], 200, 200)
    assert [m.number for m in await forward.log("live", limit=500)] == list(range(199, -1, -1))


async def test_a_model_of_several_objects_in_a_directory(tmp_path):
    rng = np.random.default_rng(6)
    store = DirectoryStore(tmp_path)
    publisher = Publisher(store, PublisherConfig(object_bytes=1 << 22))
    size = CHUNK_ELEMENTS * 2 + 7
    old = (rng.normal(0, 0.1, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[rng.random(size) < 0.01] ^= 1

    def weights(codes):
        return {
            "embed": WeightArray("BF16", (size,), codes.view(np.uint8)),
            "same": WeightArray("U8", (9,), np.zeros(9, np.uint8)),
        }

    first = await publisher.publish(0, weights(old), run="r", base=None, ref="live")
    second = await publisher.publish(1, weights(new), run="r", base=first.policy, ref="live")
    assert second.ratio > 40
    got = await Follower(DirectoryStore(tmp_path)).fetch(second.policy)
    assert got["embed"].data.tobytes() == new.tobytes()
    assert (await verify(store, every=True)).problems == []
