"""Four followers far away, on bad lines: all come to the publisher's weights, and none is ever handed anything else.

`benchmarks/weights/links.py` is the same at length, with a real model and real distances.
"""

import asyncio
import logging
from contextlib import AsyncExitStack

import numpy as np
import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.link import Line, Link
from tests.fakes.s3_server import s3_options, s3_server

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.weights import WeightArray
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.bucket import BucketConfig, BucketStore
from ostinato.weights.version.content import hash_of, weights_root

ROUND_TRIPS_S = (0.004, 0.006, 0.015, 0.03)  # a tenth of real ones


@pytest.fixture(scope="module")
def s3():
    log = logging.getLogger("werkzeug")
    before = log.level
    log.setLevel(logging.ERROR)
    with s3_server() as url:
        yield url
    log.setLevel(before)


def bucket(endpoint: str, prefix: str, **settings) -> BucketStore:
    return BucketStore(BucketConfig(url=f"s3://weights/{prefix}", options=s3_options(endpoint), **settings))


async def far(stack: AsyncExitStack, s3: str, fail: float, damage: float) -> list[Link]:
    lines = [
        Line(round_trip_s=seconds, bytes_s=25e6, fail=fail, damage=damage, seed=at)
        for at, seconds in enumerate(ROUND_TRIPS_S)
    ]
    return [await stack.enter_async_context(Link(s3, line)) for line in lines]


def versions():
    """Tiny models without end, each a few ULPs from the one before."""
    rng = np.random.default_rng(3)
    codes = (rng.normal(0, 0.1, 600_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    while True:
        yield {
            "embed": WeightArray("BF16", (500, 1000), codes[:500_000].view(np.uint8)),
            "head": WeightArray("BF16", (100, 1000), codes[500_000:].view(np.uint8)),
        }
        codes = codes.copy()
        codes[rng.choice(codes.size, codes.size // 100, replace=False)] ^= 1


async def test_four_distant_followers_reach_the_same_root_and_take_nothing_unverified(s3):
    published: dict[str, int] = {}
    taken: list[list[tuple[int, str]]] = [[] for _ in ROUND_TRIPS_S]
    wrong: list[str] = []
    refusals: list[Exception] = []
    async with asyncio.timeout(WHOLE_PROGRAM_S), AsyncExitStack() as stack:
        links = await far(stack, s3, fail=0.05, damage=0.05)

        async def watch(link: Link, into: list[tuple[int, str]]) -> None:
            async def take(ref, snapshot):
                if weights_root(snapshot.weights) != snapshot.policy.hash or snapshot.policy.hash not in published:
                    wrong.append(snapshot.policy.hash)
                into.append((snapshot.policy.number, snapshot.policy.hash))

            follower = Follower(bucket(link.url, "four"), FollowerConfig(interval_s=0.05))
            await follower.watch(["live"], take, on_error=lambda ref, error: refusals.append(error))

        watching = [asyncio.create_task(watch(*pair)) for pair in zip(links, taken, strict=True)]
        near = await stack.enter_async_context(Link(s3, Line(round_trip_s=0.001, bytes_s=1e9, fail=0.1, seed=9)))
        publisher, base = VersionPublisher(bucket(near.url, "four"), PublisherConfig(object_bytes=1 << 18)), None
        for number, weights in enumerate(versions()):
            published[weights_root(weights)] = number
            base = (await publisher.publish(number, weights, run="far", base=base, ref="live")).policy
            await asyncio.sleep(0.1)
            fates = [one.fate for link in links for one in link.passed]
            # as bad as the lines were meant to be, however few versions each follower sees
            if number >= 7 and refusals and min(fates.count(fate) for fate in ("refused", "cut", "damaged")) >= 3:
                break
        while not all(into and into[-1] == (number, base.hash) for into in taken):
            assert not any(task.done() for task in watching)
            await asyncio.sleep(0.02)
        for task in watching:
            task.cancel()
    assert wrong == []
    assert all(published[root] == number for into in taken for number, root in into)
    assert all(numbers == sorted(set(numbers)) for numbers in ([number for number, _ in into] for into in taken))
    others = [error for error in refusals if not isinstance(error, Corrupt | NotFound)]
    assert others == []  # what is refused or cut is repeated, and nobody is told


async def test_refs_and_objects_are_written_and_listed_over_a_bad_line(s3):
    async with AsyncExitStack() as stack:
        bad = await stack.enter_async_context(Link(s3, Line(round_trip_s=0.0, bytes_s=1e9, fail=0.2, seed=5)))
        store, at = bucket(bad.url, "written", part_bytes=5 << 20), None
        data = [bytes([number]) * (11 << 20 if number % 8 == 0 else 3000) for number in range(10)]
        for one in data:
            name = await store.put(one)
            await store.move_ref("live", at, name)
            await store.move_ref(f"version/{name}", None, name)
            at = name
        refs = await store.refs()
        assert {hash_of(one) for one in data} | {"live"} == {ref.split("/")[-1] for ref in refs}
        assert {one.fate for one in bad.passed} == {"whole", "refused", "cut"}


async def test_a_large_object_crosses_a_bad_line_once_and_in_full(s3):
    data = np.random.default_rng(0).bytes(23 << 20)
    name = await bucket(s3, "large").put(data)
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(Link(s3, Line(round_trip_s=0.005, bytes_s=1e9)))
        bad = await stack.enter_async_context(Link(s3, Line(round_trip_s=0.005, bytes_s=1e9, fail=0.5, seed=4)))
        part = 5 << 20
        assert hash_of(await bucket(good.url, "large", part_bytes=part).get(name)) == name
        assert [one.fate for one in good.passed] == ["whole"] * 5  # no look before the read, nothing asked for twice
        assert sum(one.bytes for one in good.passed) == len(data)
        assert hash_of(await bucket(bad.url, "large", part_bytes=part).get(name)) == name
        assert sum(one.bytes for one in bad.passed) == len(data)  # what was cut goes on where it was cut
        assert {one.fate for one in bad.passed} == {"whole", "refused", "cut"}
