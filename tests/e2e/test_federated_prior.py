"""examples/federated: organisations as processes, two aggregators that log everything, and what becomes of it."""

import asyncio
import importlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.deadlines import WHOLE_PROGRAM_S

FEDERATED = Path(__file__).parents[2] / "examples" / "federated"


@pytest.fixture
def example(monkeypatch):
    """The example's modules by name."""
    monkeypatch.syspath_prepend(FEDERATED)
    return {name: importlib.import_module(name) for name in ("aggregator", "organisation", "federated_prior")}


@dataclass
class Aggregator:
    """A running aggregator and all bytes that it was sent; it kills the processes in `victims`, by name, when their share arrives."""

    server: TestServer
    seen: dict[str, bytes] = field(default_factory=dict)
    victims: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


@pytest.fixture
async def aggregators(example):
    found = []
    for _ in range(2):
        app = example["aggregator"].aggregator(0.0)
        each = Aggregator(TestServer(app))

        @web.middleware
        async def log(request, handler, each=each):
            name = request.match_info.get("name", request.path)
            if name in each.victims:
                each.victims[name].kill()
                raise web.HTTPServiceUnavailable
            each.seen[name] = await request.read()
            return await handler(request)

        app.middlewares.append(log)
        await each.server.start_server()
        found.append(each)
    yield found
    for each in found:
        await each.server.close()


async def start(program, *arguments):
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, FEDERATED / program, *map(str, arguments), stdout=pipe, stderr=pipe
    )


async def output(process):
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


def central(example, *seeds):
    """The sum that one place with everybody's data would have."""
    organisation = example["organisation"]
    people = [person for seed in seeds for person in organisation.people(seed)]
    return organisation.total_contribution(people, organisation.DIALS, organisation.CLIP)


async def test_the_aggregate_is_the_central_sum_without_whoever_disappeared_and_shares_tell_nothing(
    example, aggregators
):
    urls = [each.url for each in aggregators]
    for name, seed in (("one", 1), ("three", 3)):
        await output(await start("organisation.py", name, seed, *urls))
    gone = aggregators[1].victims["gone"] = await start("organisation.py", "gone", 2, *urls)
    await gone.communicate()
    assert gone.returncode == -signal.SIGKILL
    assert set(aggregators[0].seen) == {"one", "gone", "three"}, "one aggregator has the share of the one that is gone"

    told = await output(await start("federated_prior.py", *urls))
    assert told.startswith("one, three: about 200 people\n")
    named, total = await example["federated_prior"].total(*urls)
    assert named == ["one", "three"]
    assert total.tobytes() == central(example, 1, 3).tobytes(), "to the bit"

    vectors = [central(example, seed).view(np.uint64) for seed in (1, 2, 3)]
    for each in aggregators:
        logged = [np.frombuffer(body, "<u8") for name, body in each.seen.items() if not name.startswith("/")]
        assert len(logged) >= 2
        combined = [*logged, *(a + b for a in logged for b in logged), *(a - b for a in logged for b in logged)]
        for vector in vectors:
            assert not any(np.array_equal(guess, vector) or np.array_equal(-guess, vector) for guess in combined)
        top = np.concatenate(logged) >> np.uint64(56)  # of a plain vector's numbers: 0 or 255
        assert np.isin(top, (0, 255)).mean() < 0.5


def test_a_share_is_uniform_whatever_it_is_a_share_of(example):
    """Both shares of a vector of zeros, 2,000 times: every bit is set half of the time, within seven deviations."""
    pairs = [example["organisation"].shares(np.zeros(4, np.int64)) for _ in range(2000)]
    for at in (0, 1):
        bits = np.unpackbits(np.frombuffer(b"".join(pair[at] for pair in pairs), np.uint8).reshape(2000, -1), axis=1)
        assert np.abs(bits.mean(0) - 0.5).max() < 0.08
    assert all(not (np.frombuffer(a, "<u8") + np.frombuffer(b, "<u8")).any() for a, b in pairs)


async def test_one_organisations_sum_is_never_told_nor_a_second_one_nor_a_share_taken_twice(aggregators):
    url = aggregators[0].url
    async with aiohttp.ClientSession(url) as http:

        async def put(name, share):
            return (await http.put(f"/shares/{name}", data=share)).status

        async def total(*names):
            return (await http.post("/sum", json=names)).status

        assert [await put(name, os.urandom(24)) for name in "abc"] == [200] * 3
        assert await put("a", bytes(24)) == 409
        assert await put("d", bytes(16)) == 409, "of another length"
        assert await total("a") == 400
        assert await total("a", "a") == 400
        assert await total("a", "x") == 400
        assert await total("a", "b", "c") == 200
        assert await total("c", "b", "a") == 200
        assert await total("a", "b") == 409, "the difference would be c's share"
        assert await put("d", bytes(24)) == 409, "the round is over"


async def test_each_aggregator_adds_the_noise_that_it_was_started_with(example):
    shares = [np.arange(10, dtype=np.int64) * (n + 1) for n in range(2)]
    sums = []
    for sigma in (0.0, 2.0, 2.0):
        async with TestServer(example["aggregator"].aggregator(sigma)) as server, aiohttp.ClientSession() as http:
            for name, share in zip("ab", shares, strict=True):
                await http.put(server.make_url(f"/shares/{name}"), data=share.tobytes())
            reply = await http.post(server.make_url("/sum"), json=["a", "b"])
            sums.append(np.frombuffer(await reply.read(), "<i8"))
    assert (sums[0] == shares[0] + shares[1]).all()
    assert (sums[1] != sums[2]).any()
    assert np.abs(sums[1]).max() > 100_000
