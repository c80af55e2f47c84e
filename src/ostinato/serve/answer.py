"""One model call from the engine to the client: pump chunks, store turns, and only then show the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol, runtime_checkable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.generation import Chunk
from ostinato.core.records import Finish, PolicyVersion, Turn
from ostinato.core.seams import Engine
from ostinato.serve.capture import Capture, EngineFailed
from ostinato.serve.config import ServeConfig
from ostinato.serve.dialects.openai_reply import DONE, Dialect, Json, json_bytes, usage
from ostinato.serve.endpoint import ClientGone, until_gone
from ostinato.serve.metrics import Metrics

Stored = Callable[[list[Turn]], Awaitable[None]]


@runtime_checkable
class _Closable(Protocol):
    async def aclose(self) -> None: ...


class Answer:
    """An ASGI response that samples while it is being sent.

    Args:
        capture: the call and its turns.
        engine: makes the tokens.
        dialect: shapes them.
        metrics: counts.
        config: the waits.
        stored: told of turns once they are durable.
        stream: send events as tokens come, or one body at the end.
        count_usage: a stream ends with the token counts.
    """

    def __init__(
        self,
        capture: Capture,
        *,
        engine: Engine,
        dialect: Dialect,
        metrics: Metrics,
        config: ServeConfig,
        stored: Stored,
        stream: bool,
        count_usage: bool,
    ) -> None:
        self._capture = capture
        self._engine = engine
        self._dialect = dialect
        self._metrics = metrics
        self._config = config
        self._stored = stored
        self._stream = stream
        self._extra: Json = {"usage": None} if count_usage else {}
        self._policy: PolicyVersion | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.calls(+1)
        try:
            if self._stream:
                await until_gone(receive, self._send_stream(send))
            else:
                response = await until_gone(receive, self._whole())
                await response(scope, receive, send)
        finally:
            self._metrics.calls(-1)

    # ------------------------------------------------------------ at once

    async def _whole(self) -> Response:
        capture = self._capture
        async with self._accounted(), aclosing(self._chunks()) as chunks:
            async for _ in chunks:
                pass
            await self._store(*range(len(capture.choices)))
        choices = [
            self._dialect.choice(i, "".join(choice.text), choice.ids, choice.logprobs, choice.finish or Finish.ERROR)
            for i, choice in enumerate(capture.choices)
        ]
        body = self._dialect.body(choices, self._usage(), self._ostinato())
        return Response(json_bytes(body), 200, self._headers(), "application/json")

    # ------------------------------------------------------------ as a stream

    async def _send_stream(self, send: Send) -> None:
        async with self._accounted(), aclosing(self._chunks()) as chunks:
            started = False
            async for chunk in chunks:
                if not started:
                    started = True
                    await self._start(send)
                data = await self._events(chunk)
                if data:
                    await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # a proxy that gathers events would hide the streaming
            **self._headers(),
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": raw})
        openings = [self._dialect.opening(i) for i in range(len(self._capture.choices))]
        data = b"".join(self._event(opening) for opening in openings if opening is not None)
        if data:
            await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})

    async def _events(self, chunk: Chunk) -> bytes:
        """The events that a chunk gives rise to. A choice's last text and end come after its turn is durable."""
        if chunk.finish is not None:
            await self._store(chunk.index)
        data = b""
        if chunk.text or (chunk.ids and self._dialect.reports_logprobs):
            data += self._event(self._dialect.delta(chunk.index, chunk.text, chunk.ids, chunk.logprobs))
        if chunk.finish is None:
            return data
        ending = self._dialect.ending(chunk.index, chunk.finish)
        if not self._capture.complete:
            return data + self._event(ending)
        if not self._extra:
            return data + self._event(ending, ostinato=self._ostinato()) + DONE
        data += self._event(ending)
        return data + self._dialect.event([], usage=self._usage(), ostinato=self._ostinato()) + DONE

    def _event(self, choice: Json, **more: Any) -> bytes:
        return self._dialect.event([choice], **self._extra, **more)

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._config.send_timeout_s):
                await send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None

    # ------------------------------------------------------------ both

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        """The engine's chunks until all choices have ended; closing this stops the engine's work."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        chunks = self._engine.generate(self._capture.call.request())
        try:
            while not self._capture.complete:
                chunk = await self._next(chunks)
                if self._policy is None:
                    self._policy = chunk.policy
                    self._metrics.first_token(loop.time() - began)
                self._capture.take(chunk)
                yield chunk
        finally:
            if isinstance(chunks, _Closable):
                await chunks.aclose()

    async def _next(self, chunks: AsyncIterator[Chunk]) -> Chunk:
        wait_s = self._config.chunk_timeout_s
        try:
            async with asyncio.timeout(wait_s):
                return await anext(chunks)
        except StopAsyncIteration:
            raise EngineFailed("The engine stopped before the end of the answer; send the request again.") from None
        except TimeoutError:
            raise EngineFailed(f"The engine made no token for {wait_s:g} s; send the request again.") from None

    @asynccontextmanager
    async def _accounted(self) -> AsyncGenerator[None, None]:
        """Whatever happens inside, every choice that was begun ends as a turn in the log."""
        capture = self._capture
        try:
            yield
        except (asyncio.CancelledError, ClientGone):
            await capture.close(Finish.ABORT)
            raise
        except (BadRequest, Unavailable):
            if capture.tokens:  # refused before any token: nothing was served, so there is no turn
                await capture.close(Finish.ERROR)
            raise
        except Exception:
            await capture.close(Finish.ERROR)
            raise

    async def _store(self, *indices: int) -> None:
        await self._stored(await self._capture.store(*indices))

    def _usage(self) -> Json:
        return usage(len(self._capture.call.prompt_ids), self._capture.tokens)

    def _ostinato(self) -> Json:
        """What Ostinato adds: the turns, the arm, and who made the tokens, choice after choice."""
        spans = [span for choice in self._capture.choices for span in choice.spans]
        return {
            "turns": self._capture.call.turn_ids(),
            "arm": str(self._capture.call.arm),
            "spans": [[span.policy.number, span.policy.hash, span.tokens] for span in spans],
        }

    def _headers(self) -> dict[str, str]:
        call = self._capture.call
        headers = {"x-ostinato-turn": ",".join(call.turn_ids()), "x-ostinato-arm": str(call.arm)}
        if self._policy is not None:
            headers["x-ostinato-policy"] = str(self._policy.number)
            headers["x-ostinato-weights"] = self._policy.hash
        if self._capture.numerics:
            headers["x-ostinato-numerics"] = self._capture.numerics
        return headers
