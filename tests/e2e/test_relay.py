"""A relay as a process of its own: followers behind it converge, upstream is asked once, and kill -9 serves nothing partial."""

import asyncio
import contextlib
import logging
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.faults import flipped
from tests.fakes.fork_server import FORK_SERVER
from tests.fakes.s3_server import s3_options, s3_server

from ostinato.core.errors import Corrupt, OstinatoError
from ostinato.core.weights import WeightArray
from ostinato.testing.serving import serving
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.keep.fsck import verify
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.bucket import BucketConfig, BucketStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.readonly import HttpStore
from ostinato.weights.version.content import hash_of, weights_root

CONFIG = PublisherConfig(object_bytes=1 << 14)


def model(number: int):
    rng = np.random.default_rng(0)
    codes = (rng.normal(0, 0.1, 40_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes[: 100 * number] ^= 1
    return {name: WeightArray("BF16", (10_000,), codes[i::4].copy().view(np.uint8)) for i, name in enumerate("abcd")}


@contextlib.asynccontextmanager
async def relaying(root: Path, url: str, *settings: str):
    """`ostinato weights relay` in front of `url`; yields the process and the address that it prints."""
    words = [f"run.directory='{root}'", f"weights.url='{url}'", "relay.fresh_s=0.05", *settings]
    command = [sys.executable, "-m", "ostinato.cli", "weights", "relay", "--listen", "127.0.0.1:0"]
    command += [word for setting in words for word in ("--set", setting)]
    process = FORK_SERVER.popen(command, stderr=subprocess.PIPE, env={"COLUMNS": "1000", "NO_COLOR": "1"})
    said = b""
    try:
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not (found := re.search(rb"relay on (http://\S+) ", said)):
                line = await asyncio.to_thread(process.stderr.readline)
                assert line, said.decode()
                said += line
        draining = asyncio.create_task(asyncio.to_thread(process.stderr.read))  # a full pipe would stop the relay
        yield process, found[1].decode()
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
    await draining
    process.stderr.close()


def behind(url: str) -> HttpStore:
    return HttpStore(BucketConfig(url=url, retries=0, timeout_s=WHOLE_PROGRAM_S))


class Requests(logging.Handler):
    """Counts the objects that moto's server was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"GET /weights/run/objects/(\S+) HTTP", record.getMessage()):
            self.gets[found[1].split("?")[0].replace("/", "")] += 1


@pytest.fixture
def s3():
    """moto's S3 server, its bucket, and what it was asked for."""
    requests, log = Requests(), logging.getLogger("werkzeug")
    log.addHandler(requests)
    before = log.level
    log.setLevel(logging.INFO)  # assigning to `level` would leave the cache of isEnabledFor stale
    try:
        with s3_server() as url:
            yield BucketStore(BucketConfig(url="s3://weights/run", options=s3_options(url), retries=2)), requests
    finally:
        log.removeHandler(requests)
        log.setLevel(before)


async def test_two_followers_behind_a_relay_converge_and_the_bucket_is_read_once(s3, tmp_path):
    bucket, requests = s3
    publisher, base = VersionPublisher(bucket, CONFIG), None
    for number in range(3):
        base = (await publisher.publish(number, model(number), run="r", base=base, ref="live")).policy
    requests.gets.clear()
    options = [f"weights.options.{key}='{value}'" for key, value in bucket._config.options.items()]
    async with relaying(tmp_path, "s3://weights/run", *options) as (_, url):
        seen: list[list[str]] = [[], []]

        def follow(number: int):
            async def note(ref, snapshot):
                assert weights_root(snapshot.weights) == snapshot.policy.hash
                seen[number].append(snapshot.policy.hash)

            return Follower(behind(url), FollowerConfig(interval_s=0.05)).watch(["live"], note)

        tasks = [asyncio.create_task(follow(number)) for number in range(2)]
        for number in range(3, 6):
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                while not all(hashes and hashes[-1] == base.hash for hashes in seen):
                    await asyncio.sleep(0.02)
            assert set(requests.gets.values()) == {1}
            if number == 5:
                break
            base = (await publisher.publish(number, model(number), run="r", base=base)).policy
            requests.gets.clear()  # the publisher reads, too
            await bucket.move_ref("live", await bucket.read_ref("live"), base.hash)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [len(hashes) for hashes in seen] == [3, 3]
        assert list(await behind(url).refs()) == list(await bucket.refs())
    assert (await verify(bucket, every=True)).problems == []


def slow(store: DirectoryStore, passed: Callable[[], None]) -> Starlette:
    """The store over HTTP, a few bytes at a time, so that a kill falls into a transfer; `passed` is called before each piece."""

    async def serve(request: Request) -> Response:
        path = store.root / request.path_params["path"]
        if not path.is_file():
            return Response(status_code=404)
        data = path.read_bytes()

        async def pieces():
            for start in range(0, len(data), 1 << 18):
                passed()
                yield data[start : start + (1 << 18)]
                await asyncio.sleep(0.005)

        return StreamingResponse(pieces(), headers={"content-length": str(len(data))})

    return Starlette(routes=[Route("/{path:path}", serve)])


@pytest.mark.parametrize(
    "instants", [(2, 25), pytest.param((1, 6, 10, 17, 33), marks=pytest.mark.examination)], ids=["two", "five"]
)
async def test_killed_in_the_middle_of_a_fetch_a_relay_serves_nothing_partial(tmp_path, instants):
    """Killed when so many of the 54 pieces were asked for."""
    origin = DirectoryStore(tmp_path / "origin")
    want = {}
    for n in range(6):
        data = bytes([n]) * ((2 << 20) + n)
        want[await origin.put(data)] = data
    kept = tmp_path / "run" / "relay" / "objects"
    left, reached = 0, asyncio.Event()

    async def read(url: str, name: str) -> None:
        with contextlib.suppress(OstinatoError):  # killed; Corrupt is one too, so:
            try:
                assert await behind(url).get(name) == want[name]
            except Corrupt as error:
                raise AssertionError("partial bytes were served as whole") from error

    def passed() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            reached.set()

    async with serving(slow(origin, passed), lifespan=False) as upstream:
        for instant in instants:
            reached.clear()
            left = instant
            shutil.rmtree(kept, ignore_errors=True)
            async with relaying(tmp_path / "run", upstream, "relay.parallel=2") as (process, url):
                asking = [asyncio.create_task(read(url, name)) for name in want for _ in range(2)]
                async with asyncio.timeout(WHOLE_PROGRAM_S):
                    await reached.wait()
                process.kill()
                await asyncio.gather(*asking)
            there = [path for path in kept.rglob("*") if path.is_file()]
            assert all(hash_of(path.read_bytes()) == path.parent.name + path.name for path in there)
            assert len(there) < len(want), "it was killed in the middle"
        async with relaying(tmp_path / "run", upstream) as (_, url):
            for name, data in want.items():
                assert await behind(url).get(name) == data
        assert not list((tmp_path / "run" / "relay" / "tmp").iterdir())


async def test_a_follower_refuses_what_a_lying_relay_serves_and_keeps_what_it_has(tmp_path):
    store = DirectoryStore(tmp_path)
    first = (await VersionPublisher(store, CONFIG).publish(0, model(0), run="r", base=None, ref="live")).policy
    second = (await VersionPublisher(store, CONFIG).publish(1, model(1), run="r", base=first)).policy
    lies = False

    async def serve(request: Request) -> Response:
        path = tmp_path / request.path_params["path"]
        if not path.is_file():
            return Response(status_code=404)
        data = path.read_bytes()
        return Response(flipped(data) if lies and "objects" in path.parts else data)

    async with serving(Starlette(routes=[Route("/{path:path}", serve)]), lifespan=False) as url:
        follower = Follower(behind(url))
        assert weights_root(await follower.fetch(first)) == first.hash
        lies = True
        with pytest.raises(Corrupt):
            await follower.fetch(second)
        with pytest.raises(Corrupt):
            await Follower(behind(url)).fetch(first)
        assert weights_root(await follower.fetch(first)) == first.hash  # from memory: what is served stays served
        lies = False
        assert weights_root(await follower.fetch(second)) == second.hash


async def test_a_second_relay_on_the_same_directory_and_a_bad_address_are_refused(tmp_path):
    async with relaying(tmp_path, str(tmp_path / "store")):
        for words, say in (([], "pid"), (["--listen", "nowhere"], "HOST:PORT")):
            command = [sys.executable, "-m", "ostinato.cli", "weights", "relay"]
            command += ["--set", f"run.directory='{tmp_path}'", *words]
            done = await asyncio.to_thread(FORK_SERVER.run, command, timeout=WHOLE_PROGRAM_S)
            assert done.returncode == 2
            assert say in done.stderr
            assert "Traceback" not in done.stderr
