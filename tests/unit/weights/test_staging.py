import asyncio
import copy
import time

import numpy as np
import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import BadRequest, BadWeights, Corrupt, NotFound
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.staging import Staging, changed_parts, part_of
from ostinato.weights.publish.publisher import VersionPublisher

RNG = np.random.default_rng(5)


def model(seed=0):
    codes = (np.random.default_rng(seed).normal(0, 0.1, 512).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {"w": WeightArray("BF16", (32, 16), codes.view(np.uint8))}


@pytest.fixture(scope="module")
def published():
    """A store with three versions, and their roots."""
    store = MemoryStore()

    async def publish():
        publisher, base, roots = VersionPublisher(store), None, []
        for number in range(3):
            done = await publisher.publish(number, model(number), run="r", base=base, ref="live")
            base = done.policy
            roots.append(done.policy.hash)
        return roots

    return store, asyncio.run(publish())


@pytest.fixture
def store(published):
    return copy.deepcopy(published[0])


@pytest.fixture
def versions(published):
    return published[1]


@pytest.fixture
def staging(store):
    made = Staging(store)
    yield made
    made.close()


def settled(staging):
    until = time.monotonic() + PATIENT_S
    while staging.status().state == "fetching" and time.monotonic() < until:
        time.sleep(0.002)
    return staging.status()


def test_a_version_is_fetched_beside_and_taken_whole(staging, versions):
    assert staging.status().state == "nothing"
    assert staging.stage(versions[1]).state in ("fetching", "ready")
    assert settled(staging).state == "ready"
    assert np.array_equal(staging.take(versions[1])["w"].data, model(1)["w"].data)
    assert staging.resolve("live") == versions[2]
    assert staging.resolve("canary") is None


def test_taking_what_was_not_staged_waits_for_it(staging, versions):
    staging.stage(versions[0])
    assert np.array_equal(staging.take(versions[2])["w"].data, model(2)["w"].data)


def test_damage_is_refused_by_name_and_tried_again_once_it_is_mended(staging, versions, store):
    sound = dict(store.objects)
    for name in store.objects:
        store.objects[name] = b"rotten"
    staging.stage(versions[1])
    status = settled(staging)
    assert status.state == "refused"
    assert "Corrupt" in status.error
    with pytest.raises(Corrupt):
        staging.take(versions[1])
    store.objects.update(sound)
    assert np.array_equal(staging.take(versions[1])["w"].data, model(1)["w"].data)


def test_an_unfit_version_is_refused_before_it_counts_as_ready(store, versions):
    def unfit(weights):
        raise BadWeights("the version is not of this model")

    staging = Staging(store, unfit)
    with pytest.raises(BadWeights):
        staging.take(versions[0])
    assert staging.status().error.startswith("BadWeights: the version is not of this model")
    staging.close()


def test_roots_are_checked_and_unknown_ones_named(staging, versions):
    with pytest.raises(BadRequest):
        staging.stage("../etc/passwd")
    with pytest.raises(NotFound):
        staging.take("0" * 64)


def test_close_ends_a_fetch_that_hangs(versions, store):
    class Hanging(MemoryStore):
        async def get(self, hash):
            await asyncio.Event().wait()

    hanging = Hanging()
    hanging.links = store.links
    staging = Staging(hanging)
    assert staging.stage(versions[0]).state == "fetching"
    staging.close()
    staging.close()
    assert staging.status().state == "refused"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers.3"),
        ("visual.blocks.0.attn.qkv.bias", "visual.blocks.0"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("scale", ""),
    ],
)
def test_a_part_is_the_outermost_block(name, part):
    assert part_of(name) == part


def test_changed_parts_are_whole_and_unknown_memory_counts_as_changed():
    array = model()["w"]
    names = ["lm_head.weight", "m.1.k", "m.1.q", "m.2.k"]
    old = dict.fromkeys(names, array)
    assert changed_parts(None, old) == {"lm_head": ["lm_head.weight"], "m.1": ["m.1.k", "m.1.q"], "m.2": ["m.2.k"]}
    assert changed_parts(old, old) == {}
    copied = old | {"m.1.q": WeightArray(array.dtype, array.shape, array.data.copy())}
    assert changed_parts(old, copied) == {"m.1": ["m.1.k", "m.1.q"]}
