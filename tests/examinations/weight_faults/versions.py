"""Versions that are a function of their number alone, so that any process can check any of them bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from tests.examinations.weight_faults.outcome import must

from ostinato.core.records import PolicyVersion
from ostinato.core.seams import WeightStore
from ostinato.core.weights import WeightArray, Weights
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.interface import RefStore
from ostinato.weights.version.content import version_ref, weights_root

SIZE = 12_000
SHORT = PublisherConfig(object_bytes=8192, anchor_every=3, skips=(2, 4), anchor_share=100.0)
"""The fourth version after the first has every kind of route: a delta, a full snapshot, and deltas over two and four versions."""
LONG = PublisherConfig(anchor_every=25, anchor_share=100.0)


@cache
def model(number: int) -> Weights:
    """Version `number` of a small model: each differs from the one before in about 50 elements."""
    rng = np.random.default_rng(0)
    codes = (rng.normal(0, 0.1, SIZE).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes[: 50 * number] ^= 1
    codes[(7 * number) % SIZE] ^= 2
    return {
        "a": WeightArray("BF16", (SIZE // 2,), codes[: SIZE // 2].view(np.uint8)),
        "b": WeightArray("BF16", (60, 100), codes[SIZE // 2 :].view(np.uint8)),
    }


@cache
def policy(number: int) -> PolicyVersion:
    """The name of version `number`."""
    return PolicyVersion(number=number, hash=weights_root(model(number)))


async def publish(publisher: VersionPublisher, number: int, ref: str = "live") -> PolicyVersion:
    """Publish version `number` as the one after `number - 1`."""
    base = policy(number - 1) if number else None
    return (await publisher.publish(number, model(number), run="r", base=base, ref=ref)).policy


async def chain(store: WeightStore, length: int, config: PublisherConfig) -> VersionPublisher:
    """Publish versions 0 to `length` - 1 to ref live. Returns the publisher, ready for the next."""
    publisher = VersionPublisher(store, config)
    for number in range(length):
        await publish(publisher, number)
    return publisher


async def check_sound(store: RefStore) -> int:
    """Check that everything reachable from a ref exists and verifies, and live bit for bit. Returns live's number. Raises Broken."""
    findings = await verify(store, every=True)
    must(not findings.problems, f"fsck: {findings.problems}")
    for ref, value in (await store.refs()).items():
        must(ref != version_ref(value), f"ref {ref} leads to itself")
    live = await Follower(store).resolve("live")
    must(live is not None, "there is no live version")
    assert live is not None
    must(live == policy(live.number), f"{live} is not version {live.number}")
    got = await Follower(store).fetch(live)
    want = model(live.number)
    must({n: a.data.tobytes() for n, a in got.items()} == {n: a.data.tobytes() for n, a in want.items()}, "other bytes")
    return live.number


def objects_of(root: Path, name: str) -> Path:
    """The path of an object in a directory store."""
    return root / "objects" / name[:2] / name[2:]
