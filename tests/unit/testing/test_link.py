"""The distant line is as far, as wide and as bad as it says: what is measured behind it means something."""

import asyncio
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from tests.fakes import link as link_module
from tests.fakes.link import Line, Link
from yarl import URL

BODY = bytes(range(256)) * 400  # 100 KB
FAST = 1e9


@asynccontextmanager
async def behind(line: Line, body: bytes = BODY):
    """A server that answers `body` to everything, seen through a line."""

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=body, headers={"x-path": request.raw_path})

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with (
            Link(f"http://127.0.0.1:{runner.addresses[0][1]}", line) as link,
            aiohttp.ClientSession() as client,
        ):
            yield link, client
    finally:
        await runner.cleanup()


class LineTime:
    """The line's clock, which only its own waits advance: what a busy machine adds is not the line's."""

    def __init__(self):
        self._now = 1000.0

    def monotonic(self):
        return self._now

    async def sleep(self, seconds):
        self._now += seconds
        await asyncio.sleep(0)

    async def of(self, work):
        began = self._now
        await work
        return self._now - began


@pytest.fixture
def line_time(monkeypatch):
    clock = LineTime()
    for name in ("time", "asyncio"):
        monkeypatch.setattr(link_module, name, clock)
    return clock


async def fetch(client: aiohttp.ClientSession, link: Link) -> tuple[float, bytes]:
    began = time.monotonic()
    async with client.get(link.url) as answer:
        answer.raise_for_status()
        data = await answer.read()
    return time.monotonic() - began, data


async def test_bytes_and_paths_pass_unchanged_and_are_counted():
    async with behind(Line(round_trip_s=0.0, bytes_s=FAST)) as (link, client):
        async with client.get(URL(link.url + "/bucket/a%2Bb?x=%2F", encoded=True)) as answer:
            assert answer.headers["x-path"] == "/bucket/a%2Bb?x=%2F"
            assert await answer.read() == BODY
        assert [(one.fate, one.bytes, one.status) for one in link.passed] == [("whole", len(BODY), 200)]


async def test_a_new_connection_costs_three_round_trips_and_a_known_one_costs_one(line_time):
    async with behind(Line(round_trip_s=0.03, bytes_s=FAST), b"x") as (link, client):
        first, second = await line_time.of(fetch(client, link)), await line_time.of(fetch(client, link))
    assert (first, second) == (pytest.approx(0.09), pytest.approx(0.03))
    assert [one.fresh for one in link.passed] == [True, False]


async def test_all_connections_share_one_cap():
    async with behind(Line(round_trip_s=0.0, bytes_s=2e6)) as (link, client):
        began = time.monotonic()
        await asyncio.gather(*(fetch(client, link) for _ in range(4)))
        took = time.monotonic() - began
    assert took >= 4 * len(BODY) / 2e6 - 0.025  # what a late sender may catch up


async def test_a_connection_starts_slowly(line_time):
    async with behind(Line(round_trip_s=0.02, bytes_s=FAST)) as (link, client):
        fresh, warm = await line_time.of(fetch(client, link)), await line_time.of(fetch(client, link))
    assert fresh >= (3 + 2) * 0.02 - 1e-6  # 14.6, 29 and 58 KB in three flights
    assert warm < fresh - 2 * 0.02  # no handshakes, and a window that has grown


async def test_a_narrow_window_bounds_one_connection():
    line = Line(round_trip_s=0.02, bytes_s=FAST, window=20_000)
    async with behind(line) as (link, client):
        assert (await fetch(client, link))[0] >= (3 + 4) * 0.02


async def fates(seed: int) -> list[str]:
    async with behind(Line(round_trip_s=0.0, bytes_s=FAST, fail=0.3, seed=seed)) as (link, client):
        for _ in range(60):
            try:
                assert (await fetch(client, link))[1] == BODY
                said = "whole"
            except aiohttp.ClientResponseError as error:
                said = "refused" if error.status == 503 else "?"
            except aiohttp.ClientError:
                said = "cut"
            assert (
                link.passed[-1].fate == said
            )  # a client sees each failure, and never takes a cut body for a whole one
        return [one.fate for one in link.passed]


async def test_failures_are_seeded_and_of_both_kinds():
    first = await fates(1)
    assert first == await fates(1) != await fates(2)
    assert 8 <= sum(fate != "whole" for fate in first) <= 28
    assert set(first) == {"whole", "refused", "cut"}


@pytest.mark.parametrize("body", [b"", b"x"])
async def test_even_a_body_without_a_middle_can_be_cut(body):
    async with behind(Line(round_trip_s=0.0, bytes_s=FAST, fail=1.0), body) as (link, client):
        for _ in range(8):
            with pytest.raises(aiohttp.ClientError):
                await fetch(client, link)
        assert {one.fate for one in link.passed} == {"refused", "cut"}


async def test_a_damaged_body_differs_in_one_bit():
    async with behind(Line(round_trip_s=0.0, bytes_s=FAST, damage=1.0)) as (link, client):
        data = (await fetch(client, link))[1]
        assert [one.fate for one in link.passed] == ["damaged"]
    assert (int.from_bytes(data) ^ int.from_bytes(BODY)).bit_count() == 1


async def test_a_client_that_leaves_is_noted():
    async with behind(Line(round_trip_s=0.0, bytes_s=1e6), BODY * 50) as (link, client):
        answer = await client.get(link.url + "/")
        answer.close()
        while not link.passed[0].ended:
            await asyncio.sleep(0.01)
        assert link.passed[0].fate == "left"
        assert link.passed[0].bytes < len(BODY) * 50
