"""The handlers of feedback: `POST /v1/feedback`, and OTLP over HTTP from exporters that know nothing of Ostinato."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from ostinato.core.errors import BadRequest, TooLarge, Unauthorized
from ostinato.core.records import Signal
from ostinato.core.verdicts import RESERVED
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.fair_thread import PER_PARSED
from ostinato.serve.feedback.events import MAX_EVENTS, count_events, parse_feedback
from ostinato.serve.feedback.intake import Intake
from ostinato.serve.feedback.otlp import Encoding, read_logs, read_spans
from ostinato.serve.feedback.telemetry import Heard, read_events, read_traces
from ostinato.serve.parts import Parts
from ostinato.serve.wire.content_encoding import UnsupportedMedia, unpacking
from ostinato.serve.wire.exchange import Exchange
from ostinato.serve.wire.watch import ClientGone

_DRAIN_FACTOR = 16  # how far beyond the limit a refused body is read, so that the client can see the refusal
_LENGTH_DIGITS = 20


class Telemetry:
    """The handlers of both routes. An export is answered when its signals are durable.

    Records of an unknown kind are accepted and ignored; the number of records of a known kind that were not understood is reported as
    OTLP's partial success.
    """

    def __init__(self, parts: Parts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def logs(self, exchange: Exchange) -> None:
        """Take an `ExportLogsServiceRequest`."""
        tenant, encoding, data = await self._receive(exchange)
        config = self._parts.config
        read = partial(read_logs, data, encoding, depth=config.max_depth, values=config.max_values)
        events = await self._parts.thread.run(tenant, len(data), read)
        self._parts.quotas.count_events(tenant, max(1, len(events)))
        understand = partial(read_events, events, tenant=tenant, now=self._parts.clock())
        reading = await self._parts.thread.run(tenant, len(data), understand)
        await self._store(reading.signals)
        await exchange.reply(200, _logs_answer(reading, encoding), kind=encoding.encode())

    async def traces(self, exchange: Exchange) -> None:
        """Take an `ExportTraceServiceRequest`."""
        tenant, encoding, data = await self._receive(exchange)
        config = self._parts.config
        read = partial(read_spans, data, encoding, depth=config.max_depth, values=config.max_values)
        spans = await self._parts.thread.run(tenant, len(data), read)
        self._parts.quotas.count_events(tenant, max(1, sum(1 + len(span.events) for span in spans)))
        understand = partial(read_traces, spans, tenant=tenant, now=self._parts.clock())
        reading = await self._parts.thread.run(tenant, len(data), understand)
        await self._store(reading.signals)
        await exchange.reply(200, _traces_answer(reading, encoding), kind=encoding.encode())

    async def _receive(self, exchange: Exchange) -> tuple[str, Encoding, bytes]:
        """The sending tenant, the encoding, and the decompressed body."""
        tenant = self._parts.keys.identify(exchange.headers).tenant
        quotas, config = self._parts.quotas, self._parts.config
        quotas.expect_events(tenant)  # before the body is read
        charge = partial(quotas.count_bytes, tenant)
        limit, wait_s = config.max_body_bytes, config.body_timeout_s
        encoding, unpack = _encoding(exchange.headers), unpacking(exchange.headers, limit)
        try:
            async with asyncio.timeout(wait_s):
                data = await _read(exchange, limit, charge)
        except TimeoutError:
            raise BadRequest(f"The body did not arrive within {wait_s:g} s; send it in one piece.") from None
        if unpack is not None:
            unpacked = await asyncio.to_thread(unpack, data)
            charge(max(0, len(unpacked) - len(data)))
            data = unpacked
        return tenant, encoding, data

    async def _store(self, signals: list[Signal]) -> None:
        for start in range(0, len(signals), MAX_EVENTS):
            await self._intake.take(signals[start : start + MAX_EVENTS])


def _encoding(headers: Mapping[bytes, bytes]) -> Encoding:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    try:
        return Encoding(kind)  # this also keeps a web page from posting here without a CORS preflight
    except ValueError:
        raise UnsupportedMedia(
            f"Content-Type is {kind[:200] or 'missing'!r}; send '{Encoding.PROTOBUF}' or '{Encoding.JSON}'."
        ) from None


async def _read(exchange: Exchange, limit: int, charge: Callable[[int], None]) -> bytes:
    """The body as it was sent; at most `limit` bytes are held. Raises TooLarge, ClientGone, and whatever `charge` raises."""
    length = exchange.headers.get(b"content-length", b"")
    declared = int(length) if length.isdigit() and len(length) <= _LENGTH_DIGITS else 0
    charged = min(declared, limit * _DRAIN_FACTOR)  # more is not read
    charge(charged)
    held, size, more = bytearray(), 0, True
    while more and size <= limit * _DRAIN_FACTOR:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        more, chunk = message.get("more_body", False), message.get("body", b"")
        size += len(chunk)
        if size > charged:
            charge(size - charged)
            charged = size
        if size <= limit:
            held += chunk
    if size > limit:
        raise TooLarge(f"The body is longer than {limit} bytes; export smaller batches.")
    return bytes(held)


def _unclear(reading: Heard) -> str:
    return f"{reading.unclear} records of a known kind lack a decision, a result, or a name and finite score."


def _logs_answer(reading: Heard, encoding: Encoding) -> bytes:
    if encoding is Encoding.JSON:
        return _json_answer(reading, "rejectedLogRecords")
    answer = ExportLogsServiceResponse()
    if reading.unclear:
        answer.partial_success.rejected_log_records = reading.unclear
        answer.partial_success.error_message = _unclear(reading)
    return answer.SerializeToString()


def _traces_answer(reading: Heard, encoding: Encoding) -> bytes:
    if encoding is Encoding.JSON:
        return _json_answer(reading, "rejectedSpans")
    answer = ExportTraceServiceResponse()
    if reading.unclear:
        answer.partial_success.rejected_spans = reading.unclear
        answer.partial_success.error_message = _unclear(reading)
    return answer.SerializeToString()


def _json_answer(reading: Heard, rejected: str) -> bytes:
    if not reading.unclear:
        return json_bytes({})
    return json_bytes({"partialSuccess": {rejected: str(reading.unclear), "errorMessage": _unclear(reading)}})


# ---------------------------------------------------------------- feedback


_EVENT = 100  # characters that a tokenizer takes in the time in which an event is checked


def _refuse_reserved(signals: Sequence[Signal]) -> None:
    """Raise Unauthorized for event names that only the rollout worker may use."""
    for signal in signals:
        if signal.name in RESERVED:
            raise Unauthorized(
                f"The event name {signal.name!r} is a simulated world's and needs an admin key; send another name."
            )


class Feedback:
    """The handler of the route."""

    def __init__(self, parts: Parts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def take(self, exchange: Exchange) -> None:
        """Take one event or a list. All are durable when the 202 is sent, which holds the status of each."""
        who = self._parts.keys.identify(exchange.headers)
        tenant = who.tenant
        quotas = self._parts.quotas
        quotas.expect_events(tenant)  # before the body is read
        body = await exchange.json(partial(quotas.count_bytes, tenant))
        quotas.count_events(tenant, count_events(body))  # before any is looked at
        parse = partial(parse_feedback, body, tenant=tenant, now=self._parts.clock())
        signals = await self._parts.thread.run(
            tenant, max(exchange.received // PER_PARSED, _EVENT * count_events(body)), parse
        )
        if not who.admin:
            _refuse_reserved(signals)
        statuses = await self._intake.take(signals)
        answers = [{"id": signal.id, "status": status.value} for signal, status in zip(signals, statuses, strict=True)]
        await exchange.reply(202, json_bytes(answers if isinstance(body, list) else answers[0]))
