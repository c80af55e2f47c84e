"""The contract of every store towards readers: a relay, a relay over HTTP, and the stores behind them."""

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from tests.deadlines import PATIENT_S
from tests.fakes.faults import flipped, truncated

from ostinato.core.errors import BadConfig, BadRequest, Corrupt, NotFound, Unavailable
from ostinato.core.seams import WeightStore
from ostinato.testing.serving import serving
from ostinato.testing.store import MemoryStore, WatchedStore
from ostinato.weights.relay import RelayConfig, RelayStore, relay_app
from ostinato.weights.store.bucket import BucketConfig
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.readonly import HttpStore
from ostinato.weights.version.content import hash_of

ONE, TWO = hash_of(b"1"), hash_of(b"2")
NOW = RelayConfig(fresh_s=0.0, timeout_s=PATIENT_S)


def http(url: str, **settings) -> HttpStore:
    return HttpStore(BucketConfig(url=url, retries=0, timeout_s=PATIENT_S, part_bytes=5 << 20, **settings))


@pytest.fixture
def origin():
    return WatchedStore(MemoryStore())


@pytest.fixture(params=["memory", "relay", "http", "relay of http"])
async def store(request, origin, tmp_path):
    relay = RelayStore(origin, DirectoryStore(tmp_path / "one"), NOW)
    match request.param:
        case "memory":
            yield origin
        case "relay":
            yield relay
        case how:
            async with serving(relay_app(relay), lifespan=False) as url:
                over = http(url)
                yield over if how == "http" else RelayStore(over, DirectoryStore(tmp_path / "two"), NOW)


def test_it_is_a_weight_store(store):
    assert isinstance(store, WeightStore)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096, bytes(12 << 20)], ids=len)
async def test_bytes_come_back(store, origin, data):
    name = await origin.put(data)
    assert await store.has(name)
    for _ in range(2):
        assert await store.get(name) == data


async def test_what_is_missing_is_not_found(store):
    assert not await store.has(ONE)
    with pytest.raises(NotFound, match=ONE):
        await store.get(ONE)
    assert await store.read_ref("live") is None
    assert await store.refs() == {}


async def test_refs_follow_and_are_listed(store, origin):
    for ref in ("live", "version/a.b", "runs/x/y_z-1"):
        await origin.move_ref(ref, None, ONE)
    assert await store.read_ref("live") == ONE
    assert await store.read_ref("runs/x/y_z-1") == ONE
    assert await store.read_ref("runs/x") is None
    await origin.move_ref("live", ONE, TWO)
    assert await store.read_ref("live") == TWO
    assert list((await store.refs()).items()) == [("live", TWO), ("runs/x/y_z-1", ONE), ("version/a.b", ONE)]


@pytest.mark.parametrize("bad", ["", "..", "../x", "/etc/passwd", "a/../../x", "a\0b", "LIVE", "a//b", ".hidden"])
async def test_names_that_could_leave_the_store_are_refused(store, bad):
    for call in (store.read_ref(bad), store.get(bad), store.has(bad)):
        with pytest.raises(BadRequest):
            await call


async def test_who_only_reads_refuses_writes(store, origin):
    if store is origin:
        return
    for call in (store.put(b"x"), store.move_ref("live", None, ONE)):
        with pytest.raises(BadConfig, match=r"weights\.url"):
            await call


# ---------------------------------------------------------------- over HTTP


async def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send one request with a bare socket, without our own client code."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", *(f"{k}: {v}" for k, v in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in rest), body


@pytest.fixture
async def served(origin, tmp_path):
    relay = RelayStore(origin, DirectoryStore(tmp_path), NOW, lambda: 7.0)  # no second passes between two looks
    async with serving(relay_app(relay), lifespan=False) as url:
        yield url


async def test_objects_lie_where_a_bucket_has_them_and_can_be_read_in_ranges(origin, served):
    data = bytes(range(256)) * 20_000  # more than one piece
    name = await origin.put(data)
    path = f"/objects/{name[:2]}/{name[2:]}"
    status, headers, body = await ask(served, path)
    assert (status, body, headers["content-length"]) == (200, data, str(len(data)))
    assert headers["etag"] == f'"{name}"'
    assert "immutable" in headers["cache-control"]
    status, headers, body = await ask(served, path, "HEAD")
    assert (status, body, headers["content-length"]) == (200, b"", str(len(data)))
    for start, end in ((0, 0), (1, 700), (255, (2 << 20) + 3), (len(data) - 1, len(data) + 50)):
        status, headers, body = await ask(served, path, range=f"bytes={start}-{end}")
        assert (status, body) == (206, data[start : end + 1])
        assert headers["content-range"] == f"bytes {start}-{min(end, len(data) - 1)}/{len(data)}"
    status, _, body = await ask(served, path, range="bytes=-5")
    assert (status, body) == (206, data[-5:])
    assert (await ask(served, path, range=f"bytes={len(data)}-"))[0] == 416
    assert origin.gets == {name: 1}


async def test_refs_carry_their_age_and_mistakes_are_explained(origin, served):
    await origin.move_ref("live", None, ONE)
    status, headers, body = await ask(served, "/refs/live")
    assert (status, body, headers["age"]) == (200, ONE.encode() + b"\n", "0")
    assert json.loads((await ask(served, "/refs"))[2]) == {"live": ONE}
    assert json.loads((await ask(served, "/healthz"))[2])["status"] == "ok"
    for path, want in (
        ("/refs/none", 404),
        ("/refs/../x", 400),
        ("/refs/%2e%2e/x", 400),
        (f"/objects/{ONE[:2]}/{ONE[2:]}", 404),
        ("/objects/../../x", 404),
        ("/objects/ab/%2e%2e", 400),
        ("/objects/ab/cd", 400),
        ("/", 404),
    ):
        assert (await ask(served, path))[0] == want, path
    for method in ("PUT", "POST", "DELETE"):
        assert (await ask(served, "/refs/live", method))[0] == 405
    origin.away = True
    assert (await ask(served, f"/objects/{ONE[:2]}/{ONE[2:]}"))[0] == 503
    assert (await ask(served, "/refs/live"))[2] == ONE.encode() + b"\n"
    assert json.loads((await ask(served, "/healthz"))[2])["unreachable_s"] >= 0


def lying(answer: bytes, **headers: str) -> Starlette:
    async def lie(request: Request) -> Response:
        return PlainTextResponse(answer, headers=headers)

    return Starlette(routes=[Route("/{path:path}", lie)])


async def test_a_relay_that_lies_is_not_believed():
    data = b"weights" * 100
    for answer in (flipped(data), truncated(data), b"", data + b"x"):
        async with serving(lying(answer), lifespan=False) as url:
            store = http(url)
            with pytest.raises(Corrupt, match=hash_of(data)):
                await store.get(hash_of(data))
            with pytest.raises(Corrupt, match="live"):
                await store.read_ref("live")
            with pytest.raises(Corrupt, match="listing"):
                await store.refs()


async def test_a_relay_that_promises_too_much_takes_no_memory():
    async def promise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2000000000000\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(promise, "127.0.0.1", 0)
    store = http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for call in (store.get(ONE), store.read_ref("live"), store.refs()):
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(Corrupt):
                await call
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "listing", [b"[]", b'{"live": 1}', b'{"../x": "' + ONE.encode() + b'"}', b'{"live": "x"}', b"[" * 100_000, b"\xff"]
)
async def test_a_listing_of_the_wrong_form_is_refused(listing):
    async with serving(lying(listing), lifespan=False) as url:
        with pytest.raises(Corrupt, match="not a listing"):
            await http(url).refs()


async def test_options_are_sent_as_headers_and_a_relay_that_is_gone_says_so():
    seen = []

    async def note(request: Request) -> Response:
        seen.append(request.headers.get("authorization"))
        return Response(status_code=401)

    async with serving(Starlette(routes=[Route("/{path:path}", note)]), lifespan=False) as url:
        with pytest.raises(Exception, match="denies access"):
            await http(url, options={"authorization": "Bearer x"}).read_ref("live")
    assert seen == ["Bearer x"]
    with pytest.raises(Unavailable, match="cannot be used now"):
        await http("http://127.0.0.1:9").read_ref("live")
    with pytest.raises(BadConfig, match=r"weights\.url"):
        http("http://")
