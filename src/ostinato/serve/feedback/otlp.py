"""Parses OTLP/HTTP exports into plain events, the same from protobuf and from JSON.

Only scalar attributes are kept (strings, booleans, numbers); lists and maps are dropped. An attribute or a time that cannot be parsed
counts as absent, so that one malformed record does not cost its whole batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1 import trace_pb2

from ostinato.core.errors import BadRequest, TooLarge
from ostinato.serve.wire.body import parse_json

MAX_RECORDS = 10_000  # log records per request, or spans and their events

_STATUS_ERROR = 2
_HEX = re.compile(r"[0-9a-fA-F]+")
_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)
_DIGITS = re.compile(r"-?[0-9]{1,20}")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Scalar = str | bool | int | float
Attributes = Mapping[str, Scalar]
_Group = TypeVar("_Group")
_Member = TypeVar("_Member")


class Encoding(StrEnum):
    """The encoding of an export; the value is its content type."""

    PROTOBUF = "application/x-protobuf"
    JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A log record, or an event of a span.

    Attributes:
        name: the event's name. The attribute `event.name` of older exporters takes precedence.
        time_ns: nanoseconds since 1970; 0 if unknown.
        attributes: the scalar ones.
        trace_id, span_id: lower-case hexadecimal digits; "" if there are none.
    """

    name: str
    time_ns: int
    attributes: Attributes
    trace_id: str = ""
    span_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A span and its events. `time_ns`: its end, or its start if it has no end; `failed`: its status is an error."""

    name: str
    time_ns: int
    attributes: Attributes
    trace_id: str
    span_id: str
    failed: bool
    events: tuple[Event, ...] = ()


def read_logs(data: bytes, encoding: Encoding, *, depth: int, values: int) -> list[Event]:
    """Return the log records of an `ExportLogsServiceRequest`.

    Args:
        data: the body, decompressed.
        encoding: its encoding.
        depth: deepest nesting accepted in JSON; protobuf has its own limit of 100 levels.
        values: most values accepted; in protobuf, most attributes.

    Raises:
        BadRequest: the body is malformed.
        TooLarge: more than `MAX_RECORDS` records, or more than `values` values.
    """
    if encoding is Encoding.JSON:
        body = _json_body(data, depth, values)
        return [_json_log(record) for record in _nested(body, "resourceLogs", "scopeLogs", "logRecords")]
    resources = _parsed(ExportLogsServiceRequest, data).resource_logs
    scopes = _flat(_limited(resources), lambda resource: resource.scope_logs)
    records: list[LogRecord] = _flat(scopes, lambda scope: scope.log_records)
    _check_values((len(record.attributes) for record in records), values)
    return [_log(record) for record in records]


def read_spans(data: bytes, encoding: Encoding, *, depth: int, values: int) -> list[TraceSpan]:
    """Return the spans of an `ExportTraceServiceRequest`. Arguments and errors as for `read_logs`."""
    if encoding is Encoding.JSON:
        body = _json_body(data, depth, values)
        found = _nested(body, "resourceSpans", "scopeSpans", "spans")
        _flat([found, *(_objects(span, "events") for span in found)], lambda members: members)
        return [_json_span(span) for span in found]
    resources = _parsed(ExportTraceServiceRequest, data).resource_spans
    scopes = _flat(_limited(resources), lambda resource: resource.scope_spans)
    spans: list[trace_pb2.Span] = _flat(scopes, lambda scope: scope.spans)
    events: list[trace_pb2.Span.Event] = _flat(spans, lambda span: span.events, taken=len(spans))
    _check_values((len(each.attributes) for each in (*spans, *events)), values)
    return [_span(span) for span in spans]


def _limited(members: Sequence[_Member], taken: int = 0) -> Sequence[_Member]:
    if taken + len(members) > MAX_RECORDS:
        raise TooLarge(f"More than {MAX_RECORDS} records in one request; export smaller batches.")
    return members


def _flat(groups: Iterable[_Group], inner: Callable[[_Group], Sequence[_Member]], *, taken: int = 0) -> list[_Member]:
    """Return the members of all groups. Raises TooLarge before more than `MAX_RECORDS` are read, counting the `taken` from before."""
    found: list[_Member] = []
    for group in groups:
        found.extend(_limited(inner(group), taken + len(found)))
    return found


def _check_values(counts: Iterable[int], most: int) -> None:
    if sum(counts) > most:
        raise TooLarge(f"The body contains more than {most} attributes; export smaller batches.")


def _event_name(name: str, attributes: Attributes, body: str) -> str:
    attribute = attributes.get("event.name")
    return attribute if isinstance(attribute, str) and attribute else name or body


# Protobuf


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise BadRequest(f"The body is not a valid {name} in protobuf; is Content-Type right?") from None


def _log(record: LogRecord) -> Event:
    attributes = _attributes(record.attributes)
    body = record.body.string_value
    return Event(
        name=_event_name(record.event_name, attributes, body),
        time_ns=record.time_unix_nano or record.observed_time_unix_nano,
        attributes=attributes,
        trace_id=record.trace_id.hex(),
        span_id=record.span_id.hex(),
    )


def _span(span: trace_pb2.Span) -> TraceSpan:
    trace_id, span_id = span.trace_id.hex(), span.span_id.hex()
    return TraceSpan(
        name=span.name,
        time_ns=span.end_time_unix_nano or span.start_time_unix_nano,
        attributes=_attributes(span.attributes),
        trace_id=trace_id,
        span_id=span_id,
        failed=span.status.code == _STATUS_ERROR,
        events=tuple(
            Event(
                name=event.name,
                time_ns=event.time_unix_nano,
                attributes=_attributes(event.attributes),
                trace_id=trace_id,
                span_id=span_id,
            )
            for event in span.events
        ),
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Scalar]:
    read = ((pair.key, _scalar(pair.value)) for pair in pairs)
    return {key: value for key, value in read if value is not None}


def _scalar(value: AnyValue) -> Scalar | None:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case _:
            return None


# JSON: ids are hexadecimal, 64-bit integers are strings, unknown fields are ignored, as OTLP specifies


def _json_body(data: bytes, depth: int, values: int) -> Mapping[str, Any]:
    body = parse_json(data, depth=depth, values=values)
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


def _nested(body: Mapping[str, Any], *path: str) -> list[Mapping[str, Any]]:
    groups = [body]
    for key in path:
        groups = _flat(groups, lambda group, key=key: _objects(group, key))
    return groups


def _objects(group: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    members = group.get(key)
    if members is None:
        return []
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise BadRequest(f"{key} must be a list of objects.", field=key)
    return members


def _json_log(record: Mapping[str, Any]) -> Event:
    attributes = _json_attributes(record)
    body = _json_scalar(record.get("body"))
    text = body if isinstance(body, str) else ""
    return Event(
        name=_event_name(_text(record.get("eventName")), attributes, text),
        time_ns=_time(record.get("timeUnixNano")) or _time(record.get("observedTimeUnixNano")),
        attributes=attributes,
        trace_id=_hex(record.get("traceId")),
        span_id=_hex(record.get("spanId")),
    )


def _json_span(span: Mapping[str, Any]) -> TraceSpan:
    status = span.get("status")
    trace_id, span_id = _hex(span.get("traceId")), _hex(span.get("spanId"))
    return TraceSpan(
        name=_text(span.get("name")),
        time_ns=_time(span.get("endTimeUnixNano")) or _time(span.get("startTimeUnixNano")),
        attributes=_json_attributes(span),
        trace_id=trace_id,
        span_id=span_id,
        failed=isinstance(status, dict) and _integer(status.get("code"), _INT64) == _STATUS_ERROR,
        events=tuple(
            Event(
                name=_text(event.get("name")),
                time_ns=_time(event.get("timeUnixNano")),
                attributes=_json_attributes(event),
                trace_id=trace_id,
                span_id=span_id,
            )
            for event in _objects(span, "events")
        ),
    )


def _json_attributes(record: Mapping[str, Any]) -> dict[str, Scalar]:
    pairs = record.get("attributes")
    found: dict[str, Scalar] = {}
    for pair in pairs if isinstance(pairs, list) else ():
        if isinstance(pair, dict):
            key, value = pair.get("key", ""), _json_scalar(pair.get("value"))
            if isinstance(key, str) and value is not None:
                found[key] = value
    return found


def _json_scalar(value: Any) -> Scalar | None:
    if not isinstance(value, dict):
        return None
    if isinstance(text := value.get("stringValue"), str):
        return text
    if isinstance(flag := value.get("boolValue"), bool):
        return flag
    if "intValue" in value:
        return _integer(value["intValue"], _INT64)
    return _double(value.get("doubleValue"))


def _double(value: Any) -> float | None:
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _integer(value: Any, span: range) -> int | None:
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value in span else None


def _time(value: Any) -> int:
    return _integer(value, _UINT64) or 0


def _hex(value: Any) -> str:
    return value.lower() if isinstance(value, str) and _HEX.fullmatch(value) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
