"""Long chains and large tensors: what was published is what comes back, bit for bit."""

import numpy as np
import pytest

from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import CHUNK_ELEMENTS, weights_root

# Codes that a careless codec loses: both zeros, subnormals, the largest finite ones, infinities, NaN with payloads.
STRANGE = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF], np.uint16
)
SIZE = 4096
VERSIONS = 1000


def planted(codes, number, rng):
    """A model: few elements change by a step or become something strange; others never change, or all at once."""
    codes = codes.copy()
    at = rng.choice(SIZE, 40, replace=False)
    codes[at[:30]] ^= 1
    codes[at[30:]] = rng.choice(STRANGE, 10)
    every = rng.integers(0, 1 << 16, 512).astype(np.uint16)
    singles = rng.normal(0, 1, 64).astype("<f4")
    singles[number % 64] = np.frombuffer(np.uint32(0x7FC00001 + number).tobytes(), "<f4")[0]
    return codes, {
        "few": WeightArray("BF16", (64, 64), codes.view(np.uint8)),
        "none": WeightArray("BF16", (13,), STRANGE.view(np.uint8)),
        "all": WeightArray("F16", (512,), every.view(np.uint8)),
        "singles": WeightArray("F32", (64,), singles.view(np.uint8)),
        "empty": WeightArray("BF16", (0, 4), np.empty(0, np.uint8)),
    }


@pytest.mark.examination
async def test_1000_versions_with_planted_codes_are_bit_for_bit_by_delta_by_squashed_delta_and_by_anchor():
    rng = np.random.default_rng(5)
    store = MemoryStore()
    publisher = VersionPublisher(store, PublisherConfig(anchor_share=100.0, finite=False))
    codes, base, published = (rng.normal(0, 0.1, SIZE).astype("<f4").view(np.uint32) >> 16).astype(np.uint16), None, []
    for number in range(VERSIONS):
        codes, weights = planted(codes, number, rng)
        done = await publisher.publish(number, weights, run="r", base=base, ref="live")
        published.append((done.policy, weights))
        base = done.policy
    log = await Follower(store).log("live", limit=VERSIONS)
    assert sum(manifest.links == 0 for manifest in log) == 39  # 0, 26, 52, ...
    numbers = {policy.hash: policy.number for policy, _ in published}
    spans = [m.number - numbers[r.base] for m in log for r in m.routes if r.base is not None]
    assert (spans.count(4), spans.count(16)) == (249, 62)

    async def fetched(follower, number):
        policy, want = published[number]
        got = await follower.fetch(policy)
        assert weights_root(got) == policy.hash
        assert {n: a.data.tobytes() for n, a in got.items()} == {n: a.data.tobytes() for n, a in want.items()}

    by_delta, by_four, by_sixteen = Follower(store), Follower(store), Follower(store)
    for number in range(VERSIONS):
        await fetched(by_delta, number)
    for number in range(0, VERSIONS, 4):
        await fetched(by_four, number)
    for number in range(0, VERSIONS, 16):
        await fetched(by_sixteen, number)
    for number in (*range(0, VERSIONS, 26), *rng.choice(VERSIONS, 20).tolist()):
        await fetched(Follower(store), int(number))
    findings = await verify(store)
    assert (findings.problems, findings.manifests) == ([], VERSIONS + 38 + 249 + 62)


async def test_a_model_of_several_objects_in_a_directory(tmp_path):
    rng = np.random.default_rng(6)
    store = DirectoryStore(tmp_path)
    publisher = VersionPublisher(store, PublisherConfig(object_bytes=1 << 22))
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
