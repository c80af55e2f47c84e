import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ostinato.core.errors import BadConfig, Corrupt, StorageFull
from ostinato.core.weights import Snapshot, WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.version.content import version_ref
from ostinato.weights.version.manifest import canonical, parse, plain, to_bytes
from ostinato.weights.version.signing import Signer, check_signature


@pytest.fixture
def signer(tmp_path):
    return Signer.create(tmp_path / "key")


async def published(store, key: Path | None, number=0):
    weights = {"w": WeightArray("U8", (300,), np.arange(300, dtype=np.uint16).astype(np.uint8) + np.uint8(number))}
    publisher = VersionPublisher(store, PublisherConfig(key=key))
    return (await publisher.publish(number, weights, run="r", base=None, ref="live")).policy


async def test_a_version_is_fetched_if_one_of_the_trusted_keys_signed_it(tmp_path, signer):
    store = MemoryStore()
    policy = await published(store, tmp_path / "key")
    for trusted in ((), (signer.public,), ("0" * 64, signer.public)):
        assert await Follower(store, FollowerConfig(trusted=trusted)).fetch(policy)


@pytest.mark.parametrize("signed", [False, True])
async def test_a_version_of_nobody_or_of_somebody_else_is_refused_by_name(tmp_path, signer, signed):
    store = MemoryStore()
    other = Signer.create(tmp_path / "other")
    policy = await published(store, tmp_path / "other" if signed else None)
    with pytest.raises(
        Corrupt, match=f"{other.public[:16]}.*list it there, too" if signed else "nobody.*set before its first start"
    ):
        await Follower(store, FollowerConfig(trusted=(signer.public,))).fetch(policy)
    with pytest.raises(Corrupt, match="refused"):
        await Follower(store, FollowerConfig(trusted=(signer.public,))).resolve("live")


@pytest.mark.parametrize("field", ["number", "run", "meta", "numerics", "parent", "value", "stolen"])
async def test_whatever_is_changed_in_a_signed_manifest_its_signature_does_not_fit(tmp_path, signer, field):
    store = MemoryStore()
    policy = await published(store, tmp_path / "key")
    stolen = parse(plain(store.objects[store.links[version_ref((await published(store, tmp_path / "key", 1)).hash)]]))
    document = json.loads(plain(store.objects[store.links[version_ref(policy.hash)]]))
    if field == "value":
        document["signature"]["value"] = "0" * 128
    elif field == "stolen":
        assert stolen.signature is not None
        document["signature"]["value"] = stolen.signature.value
    else:
        document[field] = {"number": 9, "run": "s", "meta": {"a": 1}, "numerics": "x", "parent": "0" * 64}[field]
    store.links[version_ref(policy.hash)] = await store.put(canonical(document))
    with pytest.raises(Corrupt, match="is not valid"):
        await Follower(store, FollowerConfig(trusted=(signer.public,))).fetch(policy)


async def test_a_number_that_nobody_signed_is_not_delivered_for_weights_that_are_in_memory(tmp_path, signer):
    store = MemoryStore()
    policy = await published(store, tmp_path / "key")
    manifest = parse(plain(store.objects[store.links[version_ref(policy.hash)]]))
    delivered, refused = list[int](), asyncio.Event()

    async def change(ref: str, snapshot: Snapshot) -> None:
        delivered.append(snapshot.policy.number)
        forged = manifest.model_copy(update={"number": 9, "signature": None})
        store.links["live"] = await store.put(to_bytes(forged))

    follower = Follower(store, FollowerConfig(trusted=(signer.public,)))
    watching = asyncio.create_task(follower.watch(["live"], change, 0.001, lambda *_: refused.set()))
    async with asyncio.timeout(5):
        await refused.wait()
    watching.cancel()
    assert delivered == [policy.number]


async def test_the_signature_does_not_depend_on_what_is_in_its_own_place(tmp_path, signer):
    store = MemoryStore()
    policy = await published(store, tmp_path / "key")
    manifest = parse(plain(store.objects[store.links[version_ref(policy.hash)]]))
    assert signer.sign(manifest) == signer.sign(manifest.model_copy(update={"signature": None})) == manifest
    check_signature(manifest, "m", (signer.public,))


def test_a_key_file_is_made_once_and_read_by_its_owner_only(tmp_path, signer):
    assert Signer.load(tmp_path / "key").public == signer.public
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(BadConfig, match="new file"):
        Signer.create(tmp_path / "key")
    with pytest.raises(BadConfig, match="weights key"):
        Signer.load(tmp_path / "none")
    (tmp_path / "bad").write_text("secret")
    with pytest.raises(BadConfig, match="64 hex"):
        Signer.load(tmp_path / "bad")


def test_a_key_that_the_disk_refuses_is_not_in_the_way_of_the_next(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as refusing:
        refusing.setattr(os, "fsync", full)
        with pytest.raises(StorageFull, match="No space left"):
            Signer.create(tmp_path / "key")
    assert Signer.create(tmp_path / "key").public == Signer.load(tmp_path / "key").public
