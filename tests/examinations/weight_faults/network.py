"""A bucket behind a bad network: requests refused, and answers cut, late or lost, at each request of a publication and of a fetch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from datetime import timedelta
from pathlib import Path

import aiohttp
from aiohttp import web
from obstore.store import S3Store
from tests.examinations.weight_faults.outcome import REPAIRED, RIGHT, Broken, Case, must
from tests.examinations.weight_faults.process import Child, Ears, Say
from tests.examinations.weight_faults.versions import SHORT, chain, check_sound, policy, publish

from ostinato.core.errors import OstinatoError
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.bucket import BucketConfig, BucketStore
from ostinato.weights.version.content import weights_root

BUCKET = "weights"
TIMEOUT_S = 0.6
Plan = Callable[[int, str], str]
FAULTS = ("503", "cut in the body", "slow", "answer lost", "clock refused")
_KEPT = ("content-type", "etag", "last-modified", "content-range", "accept-ranges")


@contextlib.contextmanager
def bucket_server() -> Generator[str]:
    """moto's S3 server, in a process of its own. Yields its address."""
    from moto.server import ThreadedMotoServer

    async def work(say: Say, ears: Ears) -> None:
        logging.getLogger("werkzeug").disabled = True
        server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        say(url=f"http://{host}:{port}")
        await ears.line()

    with Child(work) as child:
        url = (child.hear() or {})["url"]
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request):
            yield url


def bucket_at(url: str, prefix: str, retries: int = 4) -> BucketStore:
    """A store in that bucket. Waits between attempts are a hundredth of the real ones."""
    backoff = {"init_backoff": timedelta(milliseconds=4), "max_backoff": timedelta(milliseconds=20), "base": 2}
    inside = S3Store(
        BUCKET,
        prefix=prefix,
        endpoint=url,
        region="us-east-1",
        access_key_id="test",
        secret_access_key="test",
        client_options={"allow_http": True, "timeout": timedelta(seconds=TIMEOUT_S)},
        retry_config={"max_retries": retries, "backoff": backoff, "retry_timeout": timedelta(seconds=30)},  # type: ignore[typeddict-item]
    )
    return BucketStore(BucketConfig(url=f"s3://{BUCKET}/{prefix}"), inside=inside)


class BadNetwork:
    """A proxy in front of a bucket. `plan(n, what)` names the fault of the n-th request (from 1; `what`: "PUT /path"), or "".

    Example: ``async with bad_network(url) as network: network.start(lambda nth, what: "503" if nth == 3 else "")``
    """

    def __init__(self, target: str, session: aiohttp.ClientSession) -> None:
        self.plan: Plan = _calm
        self.count = self.seen = 0
        self.struck: list[str] = []
        self.url = ""
        self._target, self._session = target, session

    def start(self, plan: Plan) -> None:
        """Restart the count at 1, with this plan."""
        self.plan, self.count, self.struck = plan, 0, []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on, or inject its fault."""
        self.count += 1
        what = f"{request.method} {request.path}"
        fault = self.plan(self.count, what)
        if fault:
            self.struck.append(what)
        if fault == "503":
            return web.Response(status=503, text="<Error><Code>SlowDown</Code></Error>")
        if fault == "clock refused":
            return web.Response(status=403, text="<Error><Code>RequestTimeTooSkewed</Code></Error>")
        if fault == "slow":
            await asyncio.sleep(2 * TIMEOUT_S)
        status, headers, body = await self._forward(request)
        if fault == "answer lost":
            assert request.transport is not None
            request.transport.abort()
        elif fault == "cut in the body":
            return await self._cut(request, status, headers, body)
        return web.Response(status=status, headers=headers, body=body)

    async def _forward(self, request: web.Request) -> tuple[int, dict[str, str], bytes]:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "transfer-encoding")}
        async with self._session.request(
            request.method,
            f"{self._target}{request.raw_path}",
            headers=headers,
            data=await request.read(),
            skip_auto_headers=("Content-Type", "Accept-Encoding"),
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() in _KEPT}
            if request.method == "HEAD":
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            return answer.status, kept, await answer.read()

    async def _cut(self, request: web.Request, status: int, headers: dict[str, str], body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers | {"Content-Length": str(max(len(body), 2))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        await asyncio.sleep(0.005)
        request.transport.abort()
        return response


@contextlib.asynccontextmanager
async def bad_network(target: str) -> AsyncGenerator[BadNetwork]:
    """A listening proxy."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        network = BadNetwork(target, session)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", network.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        network.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield network
        finally:
            await runner.cleanup()


def examine(root: Path, *, wide: bool) -> Generator[Case]:
    """Each fault at each request (only some requests unless `wide`), once; at the first request also permanently."""
    with bucket_server() as url:
        yield from asyncio.run(_examine(url, *((1, 1) if wide else (30, 6))))


async def _examine(url: str, of_publication: int, of_fetch: int) -> list[Case]:
    found: list[Case] = []
    async with bad_network(url) as network:
        for fault in FAULTS:
            for kind, act, stride in (("publication", _publication, of_publication), ("fetch", _fetch, of_fetch)):
                nth = 1
                while nth:
                    lasting = (False, True) if nth == 1 else (False,)
                    for for_good in lasting:
                        prefix = f"{kind}-{fault.replace(' ', '-')}-{nth}-{for_good}"
                        found.append(await act(network, url, fault, nth, for_good, prefix))
                    nth = nth + stride if network.seen >= nth else 0
        found += [case async for case in _lost_moves(network, url)]
    return found


def _plan(fault: str, nth: int, for_good: bool) -> Plan:
    return lambda at, what: fault if at == nth or (for_good and at > nth) else ""


def _calm(nth: int, what: str) -> str:
    return ""


async def _case(network: BadNetwork, fault: str, where: str, act: Callable[[], Awaitable[str]]) -> Case:
    try:
        return Case(fault=fault, where=where, outcome=await act())
    except (Broken, OstinatoError, OSError) as error:
        return Case(fault=fault, where=where, outcome="broken", problem=f"{network.struck[:1]}: {error!r}")
    finally:
        network.start(_calm)


async def _publication(network: BadNetwork, url: str, fault: str, nth: int, for_good: bool, prefix: str) -> Case:
    """Publish version 4 with all its routes; then, on a good network, the same publication again and the next."""
    direct = bucket_at(url, prefix)
    await chain(direct, 4, SHORT)
    publisher = VersionPublisher(bucket_at(network.url, prefix, retries=1), SHORT)
    where = f"publication to S3{', for good' if for_good else ''}"

    async def act() -> str:
        network.start(_plan(fault, nth, for_good))
        refused = ""
        try:
            await publish(publisher, 4)
        except OstinatoError as error:
            refused = str(error)
            must(prefix in refused, f"names neither place nor object: {refused}")
        seen = network.count
        network.start(_calm)
        now = await check_sound(direct)
        must(now in (3, 4) if refused else now == 4, f"live is version {now} after {refused!r}")
        for number in (4, 5):
            await publish(publisher, number)
        must(await check_sound(direct) == 5, "live is not version 5")
        network.seen = seen
        return REPAIRED if refused else RIGHT

    return await _case(network, fault, where, act)


async def _fetch(network: BadNetwork, url: str, fault: str, nth: int, for_good: bool, prefix: str) -> Case:
    """Fetch with a fresh follower, and then again with the same follower on a good network."""
    prefix = "shared"
    direct = bucket_at(url, prefix)
    if await direct.read_ref("live") is None:
        await chain(direct, 8, SHORT)
    follower = Follower(bucket_at(network.url, prefix, retries=1))
    where = f"fetch from S3{', for good' if for_good else ''}"

    async def act() -> str:
        network.start(_plan(fault, nth, for_good))
        refused = ""
        try:
            await _current(follower)
        except OstinatoError as error:
            refused = str(error)
            must("object" in refused or "ref " in refused, f"names no object: {refused}")
        seen = network.count
        network.start(_calm)
        await _current(follower)
        network.seen = seen
        return REPAIRED if refused else RIGHT

    return await _case(network, fault, where, act)


async def _lost_moves(network: BadNetwork, url: str) -> AsyncGenerator[Case]:
    """Lose the answer to each conditional write of a publication, although the refs moved."""
    prefix = "lost-moves"
    direct = bucket_at(url, prefix)
    for retries in (0, 4):
        publisher = VersionPublisher(bucket_at(network.url, prefix, retries), SHORT)
        for number in range(0 if retries == 0 else 4, 4 if retries == 0 else 8):
            struck: set[str] = set()

            def once(nth: int, what: str, struck: set[str] = struck) -> str:
                hit = what.startswith("PUT") and "/refs/" in what and what not in struck
                struck.add(what)
                return "answer lost" if hit else ""

            async def act(publisher: VersionPublisher = publisher, number: int = number, plan: Plan = once) -> str:
                network.start(plan)
                outcome, refused = RIGHT, 0
                while True:
                    try:
                        await publish(publisher, number)
                        break
                    except OstinatoError as error:
                        outcome, refused = REPAIRED, refused + 1
                        must("moving ref" in str(error) and refused < 3, f"refused {refused} times: {error}")
                must(len(network.struck) == 2, f"lost {network.struck}")
                must(await check_sound(direct) == number, f"live is not version {number}")
                return outcome

            where = f"conditional writes of a publication, {retries} retries"
            yield await _case(network, "answer lost", where, act)


async def _current(follower: Follower) -> None:
    live = await follower.resolve("live")
    must(live == policy(7), f"live is {live}")
    assert live is not None
    must(weights_root(await follower.fetch(live)) == live.hash, "other bytes")
