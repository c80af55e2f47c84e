"""The handlers of feedback: `POST /v1/feedback`, and OTLP over HTTP from exporters that know nothing of Ostinato.

Telemetry that coding agents and tracing libraries send anyway becomes signals about the turns that it names.

=========================  ========================================================================================
Reported                   Signals
=========================  ========================================================================================
Claude Code and Codex:     `tool_accepted` or `tool_rejected` if a person decided, `tool_auto_accepted` or
`tool_decision`            `tool_auto_rejected` if a configuration, a hook or a reviewing program did
their `tool_result`        `tool_ok` or `tool_error`
qwen-code: `tool_call`     both of these, and `tool_modified` if a person changed the call before it ran
a span of a tool's run     `tool_ok` or `tool_error` (OpenTelemetry's `execute_tool`, OpenInference's `TOOL`)
a span of a model call     `response_error` if it failed although a response had arrived
`gen_ai.evaluation.result` `eval.<name>` with the score as value, else 1 or 0 by the label; the explanation is the comment
=========================  ========================================================================================

All other signals have the value 1. Other records (requests, prompts, token counts) give no signal, nor do records that name no turn by
the id of a tool call or of an answer. A signal's id is a hash of its content and of what identifies its event, so events may be reported
repeatedly, late and in any order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from ostinato.core.conversation import calling_turn
from ostinato.core.errors import BadRequest, Unauthorized
from ostinato.core.records import Signal, Source
from ostinato.core.verdicts import RESERVED
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.fair_thread import PARSED_PER_CHAR
from ostinato.serve.feedback.intake import MAX_EVENTS, MAX_VALUE, Intake, count_events, parse_feedback
from ostinato.serve.feedback.otlp import Attributes, Encoding, Event, Scalar, TraceSpan, read_logs, read_spans
from ostinato.serve.parts import Parts
from ostinato.serve.quotas import QuotaExceeded
from ostinato.serve.reader import LONG_CHARS, ReadEvents
from ostinato.serve.wire.body import UnsupportedMedia, content_type
from ostinato.serve.wire.exchange import Exchange

# ---------------------------------------------------------------- telemetry


_CALL_IDS = ("tool_use_id", "call_id", "gen_ai.tool.call.id", "tool.id")
_ANSWER_IDS = ("request_id", "response_id", "gen_ai.response.id")
_SESSIONS = ("session.id", "conversation.id", "gen_ai.conversation.id")
_ANSWER_ID = re.compile(r"[a-z]+-[0-9a-f-]+")
_MAX_ID = 256  # characters, as for feedback
_MAX_NAME = 64
_MAX_COMMENT = 65_536
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:-]+")
_LABELS = {
    "pass": 1.0, "passed": 1.0, "correct": 1.0, "relevant": 1.0,
    "fail": 0.0, "failed": 0.0, "incorrect": 0.0, "not_relevant": 0.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySignals:
    """The signals of a batch without duplicates, and the number of records of a known kind about our turns that were malformed (`unclear`).

    Example: ``read_events(read_logs(data, Encoding.JSON, depth=64, values=1000), tenant="acme", now=now).signals``
    """

    signals: list[Signal]
    unclear: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    name: str
    source: Source = Source.CODE
    value: float = 1.0
    comment: str | None = None


class _Unclear(ValueError):
    """An event of a known kind that lacks a required field."""


_Reader = Callable[[Attributes], Sequence[_Verdict]]
_Record = TypeVar("_Record", Event, TraceSpan)


def read_events(events: Iterable[Event], *, tenant: str, now: float) -> TelemetrySignals:
    """Return the signals of log records. `now`: their arrival time, and the event time of records without one."""
    batch = _Batch(tenant, now)
    for event in events:
        batch.take_event(event)
    return batch.result()


def read_traces(spans: Iterable[TraceSpan], *, tenant: str, now: float) -> TelemetrySignals:
    """Return the signals of spans and of their events. Arguments as for `read_events`."""
    batch = _Batch(tenant, now)
    for span in spans:
        batch.take(span, _turn(span.attributes), lambda _, span=span: _span(span))
        for event in span.events:
            if event.name == _EVALUATION:
                batch.take(event, _turn(event.attributes) or _turn(span.attributes), _evaluation)
    return batch.result()


class _Batch:
    def __init__(self, tenant: str, now: float) -> None:
        self._tenant = tenant
        self._now = now
        self._signals: dict[str, Signal] = {}
        self._unclear = 0

    def take_event(self, event: Event) -> None:
        reader = _READERS.get(event.name.removeprefix("claude_code."))
        if reader is not None:
            self.take(event, _turn(event.attributes), reader)

    def take(self, event: Event | TraceSpan, turn: str | None, reader: _Reader) -> None:
        if turn is None:
            return
        try:
            verdicts = reader(event.attributes)
        except _Unclear:
            self._unclear += 1
            return
        for each in verdicts:
            signal = self._signal(event, turn, each)
            self._signals[signal.id] = signal

    def result(self) -> TelemetrySignals:
        return TelemetrySignals(signals=list(self._signals.values()), unclear=self._unclear)

    def _signal(self, event: Event | TraceSpan, turn: str, verdict: _Verdict) -> Signal:
        return Signal(
            id=_id(event, turn, verdict),
            tenant=self._tenant,
            turn=turn,
            name=verdict.name,
            value=verdict.value,
            source=verdict.source,
            occurred_at=event.time_ns / 1e9 if event.time_ns else self._now,
            received_at=self._now,
            comment=verdict.comment,
        )


def _id(event: Event | TraceSpan, turn: str, verdict: _Verdict) -> str:
    attributes = event.attributes
    session = [attributes.get(key) for key in (*_SESSIONS, "event.sequence")]
    named = [attributes.get(key) for key in (*_CALL_IDS, *_ANSWER_IDS)]
    place = [event.name, event.time_ns, event.trace_id, event.span_id]
    content = [turn, verdict.name, verdict.value, verdict.source, verdict.comment]
    text = json.dumps([session, named, place, content])
    return f"otlp-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def _turn(attributes: Attributes) -> str | None:
    """Return the turn of ours that is named: by a tool call's id if there is one, else by an answer's id, which means its first choice."""
    for call in _texts(attributes, _CALL_IDS):
        if turn := calling_turn(call):
            return turn
    return next((f"{answer}:0" for answer in _texts(attributes, _ANSWER_IDS) if _ANSWER_ID.fullmatch(answer)), None)


def _texts(attributes: Attributes, keys: Iterable[str]) -> Iterator[str]:
    for key in keys:
        value = attributes.get(key)
        if isinstance(value, str) and len(value) < _MAX_ID - 1:  # room for ":0"
            yield value


def _decided(*, accepted: bool, by_person: bool) -> _Verdict:
    verb = "accepted" if accepted else "rejected"
    if by_person:
        return _Verdict(name=f"tool_{verb}", source=Source.HUMAN)
    return _Verdict(name=f"tool_auto_{verb}")


def _ended(*, ok: bool) -> _Verdict:
    return _Verdict(name="tool_ok" if ok else "tool_error")


def _word(attributes: Attributes, key: str) -> str:
    value = attributes.get(key)
    return value.lower() if isinstance(value, str) and len(value) <= _MAX_ID else ""


def _boolean(value: Scalar | None) -> bool | None:
    """Return a boolean, which some agents send as "true" or "false"; None for anything else."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value)
    return value if isinstance(value, bool) else None


def _claude_decision(attributes: Attributes) -> Sequence[_Verdict]:
    decision = _word(attributes, "decision")
    if decision not in ("accept", "reject"):
        raise _Unclear
    return [_decided(accepted=decision == "accept", by_person=_word(attributes, "source").startswith("user"))]


def _codex_decision(attributes: Attributes) -> Sequence[_Verdict]:
    decision = _word(attributes, "decision")
    accepted = decision.startswith("approved")  # also "approvedforsession"
    if not accepted and decision not in ("denied", "abort"):
        raise _Unclear
    return [_decided(accepted=accepted, by_person=_word(attributes, "source") == "user")]


def _result(attributes: Attributes) -> Sequence[_Verdict]:
    ok = _boolean(attributes.get("success"))
    if ok is None:
        raise _Unclear
    if not ok and _word(attributes, "decision_type") == "reject":
        return []  # it never ran; its decision is reported separately
    return [_ended(ok=ok)]


def _qwen_call(attributes: Attributes) -> Sequence[_Verdict]:
    ok, decision = _boolean(attributes.get("success")), _word(attributes, "decision")
    if ok is None:
        raise _Unclear
    verdicts: list[_Verdict] = []
    if decision == "modify":
        verdicts.append(_Verdict(name="tool_modified", source=Source.HUMAN))
    elif decision == "auto_accept":  # may be a person's "always" or a configuration
        verdicts.append(_decided(accepted=True, by_person=False))
    elif decision == "accept":
        verdicts.append(_decided(accepted=True, by_person=True))
    # the client also reports "reject" for answers that it does not know, after which the tool runs
    elif decision == "reject" and not ok:
        verdicts.append(_decided(accepted=False, by_person=True))
    if ok or (decision != "reject" and _word(attributes, "status") != "cancelled"):
        verdicts.append(_ended(ok=ok))
    return verdicts


def _evaluation(attributes: Attributes) -> Sequence[_Verdict]:
    given = attributes.get("gen_ai.evaluation.name")
    if not isinstance(given, str) or len(given) > _MAX_ID:
        raise _Unclear
    name = f"eval.{_NOT_IN_NAMES.sub('_', given)}"
    if len(name) > _MAX_NAME or not any(map(str.isalnum, name.removeprefix("eval."))):
        raise _Unclear
    score = attributes.get("gen_ai.evaluation.score.value")
    if score is None:
        if "error.type" in attributes:
            return []  # nothing was evaluated
        score = _LABELS.get(_word(attributes, "gen_ai.evaluation.score.label"))
    if not isinstance(score, int | float) or isinstance(score, bool) or not abs(score) <= MAX_VALUE:
        raise _Unclear
    why = attributes.get("gen_ai.evaluation.explanation")
    return [
        _Verdict(name=name, value=float(score), comment=why[:_MAX_COMMENT] if isinstance(why, str) and why else None)
    ]


def _span(span: TraceSpan) -> Sequence[_Verdict]:
    attributes = span.attributes
    failed = span.failed or "error.type" in attributes
    is_tool = (
        attributes.get("gen_ai.operation.name") == "execute_tool" or attributes.get("openinference.span.kind") == "TOOL"
    )
    if is_tool:
        return [_ended(ok=not failed)]
    return [_Verdict(name="response_error")] if failed and "gen_ai.response.id" in attributes else []


_EVALUATION = "gen_ai.evaluation.result"
_READERS: dict[str, _Reader] = {
    "tool_decision": _claude_decision,
    "tool_result": _result,
    "codex.tool_decision": _codex_decision,
    "codex.tool_result": _result,
    "qwen-code.tool_call": _qwen_call,
    _EVALUATION: _evaluation,
}


class Telemetry:
    """Handlers of `/v1/logs` and `/v1/traces`. An export is answered once its signals are durable.

    Records of an unknown kind are accepted and ignored. The number of malformed records of a known kind is reported as OTLP's partial
    success.
    """

    def __init__(self, parts: Parts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def logs(self, exchange: Exchange) -> None:
        """Take an `ExportLogsServiceRequest`."""
        await self._take(exchange, read_logs, len, read_events, ExportLogsServiceResponse(), "rejected_log_records")

    async def traces(self, exchange: Exchange) -> None:
        """Take an `ExportTraceServiceRequest`."""
        await self._take(exchange, read_spans, _size, read_traces, ExportTraceServiceResponse(), "rejected_spans")

    async def _take(
        self,
        exchange: Exchange,
        read: Callable[..., list[_Record]],
        size: Callable[[list[_Record]], int],
        understand: Callable[..., TelemetrySignals],
        answer: Any,
        rejected: str,
    ) -> None:
        """Store the signals of an export. `answer`: the empty response; `rejected`: its field for the number of malformed records."""
        parts, tenant = self._parts, self._parts.keys.identify(exchange.headers).tenant
        parts.quotas.expect_events(tenant)  # before the body is read
        encoding = _encoding(exchange.headers)
        data = await exchange.data(partial(parts.quotas.count_bytes, tenant))
        reading = partial(read, data, encoding, depth=parts.config.max_depth, values=parts.config.max_values)
        records = await parts.thread.run(tenant, len(data), reading)
        parts.quotas.count_events(tenant, max(1, size(records)))
        convert = partial(understand, records, tenant=tenant, now=parts.clock())
        result = await parts.thread.run(tenant, len(data), convert)
        for start in range(0, len(result.signals), MAX_EVENTS):
            await self._intake.take(result.signals[start : start + MAX_EVENTS])
        await exchange.reply(200, _answer(result, encoding, answer, rejected), kind=encoding.encode())


def _size(spans: Sequence[TraceSpan]) -> int:
    return sum(1 + len(span.events) for span in spans)


def _encoding(headers: Mapping[bytes, bytes]) -> Encoding:
    kind = content_type(headers)
    try:
        return Encoding(kind)  # this also keeps a web page from posting here without a CORS preflight
    except ValueError:
        raise UnsupportedMedia(
            f"Content-Type is {kind[:200] or 'missing'!r}; send '{Encoding.PROTOBUF}' or '{Encoding.JSON}'."
        ) from None


def _answer(result: TelemetrySignals, encoding: Encoding, answer: Any, rejected: str) -> bytes:
    if result.unclear:
        why = f"{result.unclear} records of a known kind lack a decision, a result, or a name and finite score."
        answer.partial_success.error_message = why
        setattr(answer.partial_success, rejected, result.unclear)
    return json_bytes(MessageToDict(answer)) if encoding is Encoding.JSON else answer.SerializeToString()


# ---------------------------------------------------------------- feedback


# each event's JSON holds one of these: the name of a required field, or one of its letters as an escape, which encoders do not write
_EVENT_MARKS = (b'"target"', *(b"\\u00%x" % letter for letter in sorted(set(b"target"))))
_EVENT_COST = 100  # cost of checking an event, in characters that are tokenised in the same time


def _refuse_reserved(signals: Sequence[Signal]) -> None:
    """Raise Unauthorized for event names and id prefixes that are reserved for Ostinato's own workers."""
    for signal in signals:
        if signal.name in RESERVED:
            raise Unauthorized(
                f"The event name {signal.name!r} is Ostinato's own and needs an admin key; send another name."
            )
        if signal.id.partition(":")[0] in RESERVED:
            raise Unauthorized(
                f"Event ids that begin with {signal.id.partition(':')[0]!r} are Ostinato's own and need an admin key; send another id."
            )


class Feedback:
    """Handler of `/v1/feedback`."""

    def __init__(self, parts: Parts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def take(self, exchange: Exchange) -> None:
        """Store one event or a list. All are durable when the 202 is sent, which reports each one's status."""
        who = self._parts.keys.identify(exchange.headers)
        tenant = who.tenant
        quotas = self._parts.quotas
        quotas.expect_events(tenant)  # before the body is read
        data = await exchange.body(partial(quotas.count_bytes, tenant))
        parsed = await self._read_elsewhere(tenant, data)
        if parsed is None:
            body = await exchange.value(data)
            quotas.count_events(tenant, count_events(body))  # before any is parsed
            parse = partial(parse_feedback, body, tenant=tenant, now=self._parts.clock())
            signals = await self._parts.thread.run(
                tenant, max(exchange.received // PARSED_PER_CHAR, _EVENT_COST * count_events(body)), parse
            )
            listed = isinstance(body, list)
        else:
            if parsed.refused is not None:
                raise parsed.refused
            signals, listed = parsed.signals, parsed.listed
        if not who.admin:
            _refuse_reserved(signals)
        statuses = await self._intake.take(signals)
        answers = [{"id": signal.id, "status": status.value} for signal, status in zip(signals, statuses, strict=True)]
        await exchange.reply(202, json_bytes(answers if listed else answers[0]))

    async def _read_elsewhere(self, tenant: str, data: bytes) -> ReadEvents | None:
        """Return the events of a long body, parsed in the reader process and charged; None if it must be parsed here. Raises QuotaExceeded.

        The most events that the body can hold are charged before it is parsed, so a body beyond the quota is refused without cost. The
        excess is refunded once the number of events is known, but not if the client disconnects meanwhile: the reader still parses the
        body.
        """
        reader, quotas = self._parts.reader, self._parts.quotas
        if reader is None or len(data) < LONG_CHARS:
            return None
        most = max(1, min(sum(map(data.count, _EVENT_MARKS)), MAX_EVENTS))
        quotas.count_events(tenant, most)
        read = partial(reader.feedback, data, tenant, self._parts.clock())
        try:
            parsed = await self._parts.thread.run(tenant, len(data), read)
        except (BadRequest, QuotaExceeded):  # not JSON, or the queue was full
            quotas.give_back_events(tenant, most)
            raise
        events = 0 if parsed is None else parsed.events
        if events > most:  # a list may hold values that are no events
            quotas.count_events(tenant, events - most)
        quotas.give_back_events(tenant, max(0, most - events))
        return parsed
