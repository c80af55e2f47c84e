"""A gateway and a client for tests: in memory, or over a socket."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import httpx2
from pydantic import SecretStr
from tests.deadlines import PATIENT_S

from ostinato.core.records import Delivered, PolicyVersion
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
V0, V1 = PolicyVersion(number=0, hash="fake0"), PolicyVersion(number=1, hash="fake1")
ADMIN = "admin-0123456789abcdef"


class World:
    def __init__(
        self,
        engine,
        log,
        config,
        renderer,
        admin_keys=(),
        dealer=None,
        privacy=None,
        adaptation=None,
        trained=(),
        styles=None,
        reader=None,
    ):
        self.audited = []
        self.engine, self.log, self.renderer = engine, log, renderer
        self.now = 1000.0
        self.room = 10**12  # bytes on the log's disk
        self._writers = []
        self.app = create_app(
            engine=engine,
            renderer=renderer,
            log=log,
            config=config,
            clock=lambda: self.now,
            model_name="m",
            admin_keys=[SecretStr(key) for key in admin_keys],
            dealer=dealer,
            room=lambda: self.room,
            adaptation=adaptation,
            styles=styles,
            audit=lambda act, **facts: self.audited.append((act, facts)),
            privacy=privacy,
            trained=trained,
            reader=reader,
        )

    async def post(self, path, body=None, *, data=None, headers=None):
        data = json.dumps(body).encode() if data is None else data
        reply = await self.http.post(
            path, content=data, headers={"content-type": "application/json", **(headers or {})}
        )
        is_json = reply.headers["content-type"] == "application/json"
        return reply.status_code, reply.headers, json.loads(reply.content) if is_json else reply.content

    async def chat(self, headers=None, **fields):
        return await self.post("/v1/chat/completions", {**ASK, **fields}, headers=headers)

    async def feedback(self, target, key=None, **fields):
        """The status that one event gets."""
        event = {"id": "s1", "target": target, "name": "accepted", "value": True, "source": "human", **fields}
        status, _, body = await self.post("/v1/feedback", event, headers=self.key(key))
        assert status == 202, body
        return body["status"]

    @staticmethod
    def key(key, **headers):
        """Headers with this API key."""
        more = {} if key is None else {"x-api-key": key}
        return {**more, **headers}

    def delivered(self):
        """The turns of all delivery rows, in order."""
        return [turn for row in self.log.rows if isinstance(row, Delivered) for turn in row.turns]

    async def get(self, path, headers=None):
        reply = await self.http.get(path, headers=headers)
        return reply.status_code, reply.text

    def address(self):
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def connect(self, body, *headers):
        """A raw connection that has sent a chat request with these header lines."""
        reader, writer = await asyncio.open_connection(*self.address(), limit=1024)
        self._writers.append(writer)
        data = json.dumps(body).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
        writer.write("\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data)
        await writer.drain()
        return reader, writer

    async def hang_up(self):
        """End the raw connections: one that ends with its event loop is a warning wherever garbage is collected next."""
        for writer in self._writers:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def world(
    script="hello",
    *,
    engine=None,
    log=None,
    renderer=None,
    real=False,
    wrap=None,
    admin_keys=(),
    dealer=None,
    adaptation=None,
    privacy=None,
    trained=(),
    styles=None,
    reader=None,
    **config,
):
    """A gateway and a client: in memory, or with `real` over a socket, there in an app that `wrap` puts around it."""
    engine = engine or FakeEngine(lambda request: script)
    w = World(
        engine,
        log or MemoryLog(),
        ServeConfig(**config),
        renderer or ByteRenderer(),
        admin_keys,
        dealer,
        privacy,
        adaptation,
        trained,
        styles,
        reader,
    )
    if real:
        async with (
            serving(wrap(w.app) if wrap else w.app) as url,
            httpx2.AsyncClient(base_url=url, timeout=PATIENT_S) as http,
        ):
            w.url, w.http = url, http
            try:
                yield w
            finally:
                await w.hang_up()
    else:
        transport = httpx2.ASGITransport(app=w.app, raise_app_exceptions=True)
        async with (
            w.app.router.lifespan_context(w.app),
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
        ):
            w.http = http
            yield w


def comments(raw):
    return [line for line in raw.split(b"\n\n") if line.startswith(b":")]


def events(raw):
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line and not line.startswith(b":")]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


async def eventually(condition, timeout_s=PATIENT_S):
    async with asyncio.timeout(timeout_s):
        while not condition():  # what is waited for has no event
            await asyncio.sleep(0.005)


class Gone:
    """Wraps an app: `left` is set once the app has been told that a client left."""

    def __init__(self):
        self.left = asyncio.Event()

    def wrap(self, app):
        async def watched(scope, receive, send):
            async def hear():
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.left.set()
                return message

            await app(scope, hear, send)

        return watched


class HeldLog(MemoryLog):
    """Takes no rows until `go` is set; `asked` is set once it was to take some."""

    def __init__(self):
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def append(self, *rows):
        if rows:
            self.asked.set()
            await self.go.wait()
        return await super().append(*rows)


async def all_sampled(w, answer="hello"):
    """The last token of the first call has been made; what follows is the durable write."""
    await eventually(lambda: w.engine.stats()["tokens"] == len(answer) + 1)
