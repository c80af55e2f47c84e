"""One model call from the engine to the client: takes chunks, stores the turns, and only then sends the client the end.

It also records which answers were delivered in full: noted in memory and written to the log in batches, without delaying calls. If the
process is killed, at most the last quarter of a second of notes is lost; those turns count as not delivered.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import closing, suppress
from typing import Any

from ostinato.core.conversation import Piece
from ostinato.core.errors import BadRequest, GrammarTooComplex, OstinatoError, Unavailable
from ostinato.core.generation import Chunk
from ostinato.core.records import Consent, Delivered, Finish, PolicyVersion, Purpose
from ostinato.core.seams import Clock, Log
from ostinato.serve.calls.capture import Capture, Choice, EngineFailed, StoreSlow, stop_string
from ostinato.serve.calls.context import CallContext, EnginePrompt
from ostinato.serve.calls.conversations import AnswerParser
from ostinato.serve.dialects.dialect import Counts, Json, Tokens, Whole, Writer
from ostinato.serve.parts import Parts
from ostinato.serve.priority import Person
from ostinato.serve.wire.exchange import Headers
from ostinato.serve.wire.watch import ClientGone
from ostinato.serve.writes import Writes

# ---------------------------------------------------------------- heartbeats


class StreamHeartbeat:
    """Calls `beat` after every `every_s` seconds of silence in a stream. One timer serves all silences; `silence` only notes the time.

    Example::

        pulse.silence()
        chunk = await anext(chunks)
        await pulse.over()  # a heartbeat in flight has been sent
    """

    def __init__(self, every_s: float, beat: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._every_s = every_s
        self._beat = beat
        self._silent = False
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    def silence(self) -> None:
        """Mark the start of a silence."""
        self._silent = True
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._since + self._every_s, self._look)

    async def over(self) -> None:
        """Mark the end of the silence, and wait for a heartbeat in flight."""
        self._silent = False
        if self._beating is not None:
            beating, self._beating = self._beating, None
            await beating

    def close(self) -> None:
        """Stop the heartbeats, and cancel one in flight."""
        self._silent = False
        if self._timer is not None:
            self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()

    def _look(self) -> None:
        self._timer = None
        if not self._silent:
            return
        now = self._loop.time()
        if now >= self._since + self._every_s:
            self._since = now
            if self._beating is None or self._beating.done():
                self._beating = self._loop.create_task(self._beat())
        self._timer = self._loop.call_at(self._since + self._every_s, self._look)


# ---------------------------------------------------------------- the answer


# tokens with log-probabilities in a body; larger bodies are serialised on a thread, so that they block no other stream
_AT_ONCE_TOKENS = 1_000
STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers events would defeat the streaming
]


class Answer:
    """The answer to one call, sent while it is being sampled.

    Args:
        parts: the gateway's.
        asked: the call in progress, with the exchange to answer.
        question: the call's prompt; its callbacks get each durable turn, and a disconnect during the stream of a single choice.
        capture: the call and its turns.
        chunks: the sampled chunks, from the engine or replayed from the log.
        writer: formats the answer in the client's dialect.
        readings: parsers that separate text, reasoning and tool calls, one per choice.
        person: notified of the first and the last token.
        headers: sent in addition to the answer's own.
    """

    def __init__(
        self,
        parts: Parts,
        asked: CallContext,
        question: EnginePrompt,
        capture: Capture,
        chunks: AsyncIterator[Chunk],
        *,
        writer: Writer,
        readings: Sequence[AnswerParser],
        person: Person,
        headers: Headers,
    ) -> None:
        self._parts, self._config = parts, parts.config
        self._question = question
        self._capture = capture
        self._chunks = chunks
        self._writer = writer
        self._readings = readings
        for choice, reading in zip(capture.choices, readings, strict=True):
            choice.reading = reading
        self._exchange, self._watch = asked.exchange, asked.watch
        self._exchange.failure = writer.failure
        self._person = person
        self._more_headers = headers
        self._policy: PolicyVersion | None = None
        self._opened = False
        self._named = True
        self._began = asyncio.get_running_loop().time()

    async def send(self, *, stream: bool) -> None:
        """Send the whole answer, as events or as one body. Every choice that was begun becomes a turn in the log.

        Raises:
            ClientGone: the client disconnected; sampling is stopped.
            EngineFailed, StoreSlow, StorageFull: the answer cannot be completed.
            GrammarTooComplex: the answer's format cannot be enforced to its end.
        """
        await self._run_and_store(self._events() if stream else self._whole(), stream=stream)

    async def sample(self, *, stream: bool) -> None:
        """Sample the whole answer and store its turns, but send only a stream's heartbeats. The response head then names no turn, because
        the client may get another one. Raises like `send`.
        """
        self._named = False
        await self._run_and_store(self._beating() if stream else self._sampled(), stream=False)

    async def deliver(self, data: bytes, *, stream: bool) -> None:
        """Send `data`, made from a sampled answer, as the body or as all events of the stream."""
        if not stream:
            await self._exchange.reply(200, data, self._headers())
            return
        if not self._exchange.status:
            await self._exchange.start(200, STREAM + self._headers())
        await self._exchange.write(data, last=True)

    async def _run_and_store(self, work: Coroutine[Any, Any, None], *, stream: bool) -> None:
        """Run `work`; however it ends, write the turns of everything sampled."""
        capture = self._capture
        try:
            try:
                await work
            finally:
                close = getattr(self._chunks, "aclose", None)
                if close is not None:
                    await close()
        except (asyncio.CancelledError, ClientGone):
            finish = self._cancelled_finish(stream=stream)
            if finish is Finish.LEFT and self._question.left is not None and capture.call.n == 1:
                self._question.left(capture.call.turn_ids()[0], self._readings[0].message())
            await capture.close(finish, self._config.store_timeout_s)
            raise
        except (BadRequest, Unavailable) as error:
            finish = Finish.ERROR
            if isinstance(error, GrammarTooComplex):  # this ends the call's other choices, too
                finish = Finish.GRAMMAR
                self._parts.metrics.refused(capture.call.tenant, error.code)
            # no token, so nothing was served and there is no turn; but a draw of Auto is always logged
            if capture.tokens or capture.call.auto is not None:
                await capture.close(finish, self._config.store_timeout_s)
            raise
        except Exception:
            await capture.close(Finish.ERROR, self._config.store_timeout_s)
            raise

    def _cancelled_finish(self, *, stream: bool) -> Finish:
        """Why the call was cancelled. `LEFT` requires a person who has seen some of the answer: a stream that had begun."""
        if isinstance(self._watch.reason, EngineFailed):
            return Finish.ERROR
        saw = stream and self._opened and self._exchange.status
        return Finish.LEFT if saw and self._watch.left and self._capture.call.arm.people else Finish.ABORT

    # ------------------------------------------------------------ as one body

    async def _sampled(self) -> None:
        while not self._capture.complete:
            await self._next()
        await self._store(*range(len(self._capture.choices)))

    async def _whole(self) -> None:
        await self._sampled()
        capture = self._capture
        few = capture.tokens * (1 + capture.call.tops) <= _AT_ONCE_TOKENS
        body = self._body() if few else await asyncio.to_thread(self._body)
        await self._exchange.reply(200, body, self._headers())

    def _body(self) -> bytes:
        answers = [
            Whole(
                message=reading.message(),
                tokens=Tokens(choice.ids, choice.logprobs, choice.tops),
                finish=choice.finish or Finish.ERROR,
                stop=self._stop_of(choice),
            )
            for choice, reading in zip(self._capture.choices, self._readings, strict=True)
        ]
        return self._writer.body(answers, self.counts(), self.ostinato())

    # ------------------------------------------------------------ as a stream

    async def _events(self) -> None:
        with closing(StreamHeartbeat(self._config.heartbeat_s, self._beat)) as pulse:
            opened = False
            while not self._capture.complete:
                pulse.silence()
                chunk, pieces = await self._next()
                if self._capture.choices[chunk.index].finish is not None:
                    await self._store(chunk.index)
                await pulse.over()
                data = "" if opened else self._writer.opening()
                opened = True
                data += self._event_of(chunk, pieces)
                if not self._exchange.status:
                    await self._exchange.start(200, STREAM + self._headers())
                if data:
                    await self._exchange.write(data.encode(), last=self._capture.complete)

    async def _beating(self) -> None:
        """Sample the whole answer while heartbeats keep the stream alive."""
        with closing(StreamHeartbeat(self._config.heartbeat_s, self._beat)) as pulse:
            pulse.silence()
            await self._sampled()
            await pulse.over()

    async def _beat(self) -> None:
        """Send a heartbeat, after the response head if that is not sent yet. While another arm of Auto may still take over, the head
        names no arm; the end of the answer does.
        """
        named = self._named and (self._opened or self._capture.call.auto is None)
        headers = self._headers() if named else self._more_headers
        try:
            await self._exchange.aside(STREAM + headers, self._writer.heartbeat().encode())
        except OSError:
            self._watch.end(ClientGone())

    def _event_of(self, chunk: Chunk, pieces: Sequence[Piece]) -> str:
        """The stream events for a chunk."""
        data = self._writer.delta(chunk.index, pieces, Tokens(chunk.ids, chunk.logprobs, chunk.tops))
        choice = self._capture.choices[chunk.index]
        if choice.finish is None:
            return data
        closing = (self.counts(), self.ostinato()) if self._capture.complete else None
        return data + self._writer.ending(chunk.index, choice.finish, self._stop_of(choice), closing)

    # ------------------------------------------------------------ sampling and storing

    async def _next(self) -> tuple[Chunk, list[Piece]]:
        """Add the next chunk to the capture; return it and the pieces of the answer that it completes. Raises EngineFailed."""
        chunk = await self._chunk()
        while self._ended_by_gateway(chunk.index):  # the engine continues an ended choice while others are open
            self._capture.drop(chunk)
            chunk = await self._chunk()
        if not self._opened:
            self._opened, self._policy = True, chunk.policy
            self._person.first()
            self._parts.metrics.first_token(asyncio.get_running_loop().time() - self._began)
        self._capture.take(chunk)
        reading = self._readings[chunk.index]
        pieces = reading.take(chunk.text, last=chunk.finish is not None)
        if reading.over and self._capture.end(chunk.index):
            await self._fetch_routes(chunk.index)
        if chunk.finish is not None and reading.message().calls:
            self._capture.called(chunk.index)
        if self._capture.complete:
            self._person.last(self._capture.tokens // self._capture.call.n)
        return chunk, pieces

    async def _fetch_routes(self, index: int) -> None:
        """Fetch the expert routes of a choice that the gateway ended, since the engine's last chunk will not bring them."""
        choice = self._capture.choices[index]
        self._watch.allow(self._config.chunk_timeout_s, self._silent)
        with suppress(Unavailable):  # the answer itself is complete
            choice.routes = await self._parts.engine.end_sample(self._capture.call.id, index, len(choice.ids))

    async def _chunk(self) -> Chunk:
        self._watch.allow(self._config.chunk_timeout_s, self._silent)
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            raise EngineFailed("The engine stopped before the end of the answer; send the request again.") from None

    def _ended_by_gateway(self, index: int) -> bool:
        """True if the gateway ended this choice, while the engine continues it because other choices are open."""
        return index < len(self._readings) and self._readings[index].over

    def _stop_of(self, choice: Choice) -> str:
        """The stop string that ended a choice, or ""."""
        stops = self._capture.call.sampling.stop
        return stop_string(self._parts.renderer.decode(choice.ids), "".join(choice.text), stops) if stops else ""

    def _silent(self) -> EngineFailed:
        wait_s = self._config.chunk_timeout_s
        return EngineFailed(f"The engine generated no token for {wait_s:g} s; send the request again.")

    async def _store(self, *indices: int) -> None:
        self._watch.allow(self._config.store_timeout_s, self._unconfirmed)
        turns = await self._capture.store(*indices)
        if self._question.remember is not None:
            for turn in turns:
                reading = self._readings[int(turn.id.rpartition(":")[2])]
                self._question.remember(turn, reading.message(), not reading.over)

    def _unconfirmed(self) -> StoreSlow:
        self._parts.metrics.store_error()
        return StoreSlow(
            f"The answer was generated, but the log did not confirm it within {self._config.store_timeout_s:g} s: turn "
            f"{self._capture.call.id}:0 may or may not be stored, and is not learned from. Send the request again."
        )

    def counts(self) -> Counts:
        """Return the token counts of the prompt and of all answers."""
        return Counts(prompt=self._capture.prompt_tokens, answer=self._capture.tokens)

    def ostinato(self) -> Json:
        """Return Ostinato's own fields: turns, episode, arm, policy spans (choice by choice), Auto's arm, the window after a summary, and
        the turns that a deadline ended.
        """
        call = self._capture.call
        spans: list[Any] = [
            [span.policy.number, span.policy.hash, span.tokens]
            for choice in self._capture.choices
            for span in choice.spans
        ]
        fields: Json = {"turns": call.turn_ids(), "episode": call.episode, "arm": call.arm.value, "spans": spans}
        if call.auto is not None:
            fields["auto"] = call.auto.arm
        if call.window is not None:
            fields["window"] = {"number": call.window.number, "begins_with": call.window.begins_with}
        late = [choice.finish is Finish.DEADLINE for choice in self._capture.choices]
        if any(late):  # dialects have no finish reason for it
            fields["deadline"] = [turn for turn, is_late in zip(call.turn_ids(), late, strict=True) if is_late]
        return fields

    def _headers(self) -> Headers:
        call, policy = self._capture.call, self._policy
        optional: dict[bytes, str | None] = {
            b"x-ostinato-purpose": None if call.purpose is Purpose.TASK else call.purpose.value,
            b"x-ostinato-train": None if call.consent is Consent.YES else call.consent.value,
            b"x-ostinato-sampling": call.overridden or None,
            b"x-ostinato-adapted": None if call.steering is None else self._adapted(call.steering.basis.hash),
            b"x-ostinato-style": None if call.style is None else call.style.arm.partition("@")[0],
            b"x-ostinato-auto": None if call.auto is None else call.auto.arm,
            b"x-ostinato-policy": None if policy is None else str(policy.number),
            b"x-ostinato-weights": None if policy is None else policy.hash,
            b"x-ostinato-numerics": call.numerics or None,
        }
        id = call.id.encode()
        return [
            (b"request-id", id),  # Anthropic's and OpenAI's clients expose it, and agents report it in their telemetry
            (b"x-request-id", id),
            (b"x-ostinato-turn", ",".join(call.turn_ids()).encode()),
            (b"x-ostinato-arm", call.arm.value.encode()),
            *self._more_headers,
            *((name, value.encode()) for name, value in optional.items() if value is not None),
        ]

    def _adapted(self, basis: str) -> str:
        """The steering basis, and, once the answer is complete, the KL divergence of each choice in nats."""
        steered = [choice.steered for choice in self._capture.choices]
        spent = ",".join(f"{0.0 if each is None else each.kl:.3g}" for each in steered)
        return f"{basis}; kl={spent}" if self._capture.complete else basis


# ---------------------------------------------------------------- delivered answers


_LOG = logging.getLogger(__name__)
EVERY_S = 0.25
MAX_TURNS_PER_ROW = 256  # turns per row
_RETRY_S = 2.0
_MAX_HELD = 100_000  # turns held in memory while the log accepts no writes


class Deliveries:
    """Collects delivered turns and writes them as `Delivered` rows.

    Example: ``deliveries.note(["chatcmpl-3f:0"])``, and at the end ``await deliveries.close()``
    """

    def __init__(self, log: Log, clock: Clock, writes: Writes) -> None:
        self._log = log
        self._clock = clock
        self._writes = writes
        self._noted: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def note(self, turns: Sequence[str]) -> None:
        """Record that these turns' answers were handed to the connection, to the last byte."""
        self._noted += turns
        if len(self._noted) >= MAX_TURNS_PER_ROW:
            self._begin()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._begin)

    async def close(self) -> None:
        """Write everything noted, without retries."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await self._writing
        await self._write()

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
            self._writing.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._writing = None
        if self._noted and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self._begin)

    async def _write(self) -> None:
        while self._noted:
            turns, self._noted = self._noted[:MAX_TURNS_PER_ROW], self._noted[MAX_TURNS_PER_ROW:]
            row = Delivered(id=secrets.token_hex(8), turns=tuple(turns), at=self._clock())
            try:
                await self._writes.begin(self._log.append(row))
            except OstinatoError as error:
                _LOG.warning("%d deliveries could not be written and will be retried: %s", len(turns), error)
                self._noted = [*turns, *self._noted][:_MAX_HELD]
                return
