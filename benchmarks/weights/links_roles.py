"""The processes around the publisher in links.py: the bucket, the lines, and a follower. They use JSON lines on standard input and output.

python -m benchmarks.weights.links_roles bucket | lines | follower
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from benchmarks.contender import quiet_stdout
from benchmarks.weights.links_trainer import warm
from tests.fakes.faults import FaultyStore
from tests.fakes.link import Line, Link

from ostinato.core.weights import Snapshot
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.store.bucket import BucketConfig, BucketStore
from ostinato.weights.version.content import weights_root

ANSWERS: Any = None


def say(**what: Any) -> None:
    print(json.dumps(what), file=ANSWERS, flush=True)


async def questions() -> AsyncIterator[dict[str, Any]]:
    """Yield the benchmark's commands until it closes the input."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def bucket() -> None:
    """moto's server: the S3 API over HTTP, objects in memory."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    say(url=f"http://127.0.0.1:{port}" if host == "0.0.0.0" else f"http://{host}:{port}")
    async for _ in questions():
        pass
    server.stop()


async def lines() -> None:
    """Links on demand: `open` replaces the current links; `bytes` and `passed` report the traffic of each."""
    async with contextlib.AsyncExitStack() as stack:
        links: list[Link] = []
        async for asked in questions():
            match asked["do"]:
                case "open":
                    await stack.aclose()
                    links = [
                        await stack.enter_async_context(Link(asked["server"], Line(**line))) for line in asked["lines"]
                    ]
                    say(urls=[link.url for link in links])
                case "bytes":
                    say(bytes=[sum(one.bytes for one in link.passed) for link in links])
                case _:
                    say(passed=[[asdict(one) for one in link.passed] for link in links])


class Noted(FaultyStore):
    """A weight store that records the reads since the ref `live` was last looked at: [kind, name, began, ended, bytes]."""

    def __init__(self, inner: BucketStore) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str, float, float, int]] = []

    async def read_ref(self, ref: str) -> str | None:
        if ref == "live":
            self.calls = []
        began = time.monotonic()
        value = await super().read_ref(ref)
        self.calls.append((f"ref {ref.split('/')[0]}", ref, began, time.monotonic(), 65))
        return value

    async def get(self, hash: str) -> bytes:
        began = time.monotonic()
        data = await super().get(hash)
        self.calls.append(("object", hash, began, time.monotonic(), len(data)))
        return data

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        began = time.monotonic()
        data = await super().get_range(hash, start, length)
        self.calls.append(("object", hash, began, time.monotonic(), len(data)))
        return data


async def follower() -> None:
    """`Follower.watch` with a stand-in for the engine that records the time of each snapshot, then hashes its weights."""
    asked = await anext(questions())
    store = Noted(BucketStore(BucketConfig.model_validate(asked["bucket"])))
    watcher = Follower(store, FollowerConfig.model_validate(asked["follower"]))

    async def take(ref: str, snapshot: Snapshot) -> None:
        at = time.monotonic()
        calls, root = list(store.calls), await asyncio.to_thread(weights_root, snapshot.weights)
        say(number=snapshot.policy.number, hash=snapshot.policy.hash, root=root, at=at, calls=calls)

    await warm()
    say(ready=True)
    await watcher.watch(["live"], take, on_error=lambda ref, error: say(error=str(error), at=time.monotonic()))


if __name__ == "__main__":
    ANSWERS = quiet_stdout()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run({"bucket": bucket, "lines": lines, "follower": follower}[sys.argv[1]]())
