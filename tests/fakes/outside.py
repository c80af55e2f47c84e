"""`FakeOutside`: an outside model that serves OpenAI's chat completions over a real socket and can misbehave."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web


class FakeOutside:
    """Answers `text` in pieces of three characters, with the usage that OpenAI sends at the end.

    Controls: a `status` other than 200 refuses; `finish` is the finish reason; `raw` are bytes sent instead of events; `stall` stops for a
    minute after each piece; `cut` breaks the connection after the first piece; `kind` is the content type; `gate` holds each call
    until it is set, `pace` each piece but the first until it is released. Observations: `bodies`, `headers` of all calls, `left` (clients
    that left before the end).
    """

    def __init__(self):
        self.text = "from afar"
        self.status, self.finish, self.kind = 200, "stop", "text/event-stream"
        self.raw = None
        self.stall = self.cut = self.usage_missing = False
        self.gate = self.pace = None
        self.bodies, self.headers = [], []
        self.left = 0
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator["FakeOutside"]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/elsewhere", self._elsewhere)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _elsewhere(self, request):
        raise AssertionError("a redirect was followed")

    async def _answer(self, request):
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.gate is not None:
            await self.gate.wait()
        if 300 <= self.status < 400:
            raise web.HTTPTemporaryRedirect("/elsewhere")
        if self.status != 200:
            return web.json_response({"error": {"message": "the key sk-secret is wrong"}}, status=self.status)
        reply = web.StreamResponse(headers={"content-type": self.kind})
        await reply.prepare(request)
        try:
            await self._stream(request, reply)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        return reply

    async def _stream(self, request, reply):
        if self.raw is not None:
            await reply.write(self.raw)
            return
        n = self.bodies[-1].get("n", 1)
        for start in range(0, len(self.text), 3):
            if start and self.pace is not None:
                await self.pace.acquire()
            piece = {"content": self.text[start : start + 3]}
            choices = [{"index": i, "delta": piece, "finish_reason": None} for i in range(n)]
            await self._event(reply, {"choices": choices})
            if self.cut:
                request.transport.abort()
                return
            if self.stall:
                await asyncio.sleep(60)
        for i in range(n):
            await self._event(reply, {"choices": [{"index": i, "delta": {}, "finish_reason": self.finish}]})
        if not self.usage_missing:
            usage = {"prompt_tokens": 40, "completion_tokens": 10 * n, "total_tokens": 40 + 10 * n}
            await self._event(reply, {"choices": [], "usage": usage})
        await reply.write(b"data: [DONE]\n\n")

    async def _event(self, reply, event):
        await reply.write(b": a comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")
