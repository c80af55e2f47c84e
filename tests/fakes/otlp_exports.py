"""Telemetry exports of coding agents: the format is theirs, and every text and id is invented."""

import base64
import copy
import gzip
import json
import math

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ANSWER = "msg-" + "3f" * 16
TURN = f"{ANSWER}:0"
CALL = f"call_{ANSWER}_0_0"
AT_NS = 1_790_000_000_250_000_000
TRACE, SPAN = "ab" * 16, "cd" * 8
JSON, PROTOBUF = "application/json", "application/x-protobuf"
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_IDS = ("traceId", "spanId", "parentSpanId")


def value(of):
    match of:
        case bool():
            return {"boolValue": of}
        case int():
            return {"intValue": str(of)}
        case float():
            return {"doubleValue": of if math.isfinite(of) else _NOT_FINITE[str(of)]}
        case list():
            return {"arrayValue": {"values": [value(each) for each in of]}}
        case _:
            return {"stringValue": of}


def attributes(of):
    return [{"key": key, "value": value(each)} for key, each in of.items()]


def record(body, /, at_ns=AT_NS, **more):
    return {
        "timeUnixNano": str(at_ns),
        "observedTimeUnixNano": str(AT_NS + 1_000_000_000),
        "body": value(body),
        "attributes": attributes(more),
        "severityNumber": 9,
        "traceId": TRACE,
        "spanId": SPAN,
    }


def claude(name, sequence=1, **more):
    common = {"session.id": "5e551011-0000-4000-8000-000000000001", "user.id": "u0", "prompt.id": "p0"}
    return record(
        f"claude_code.{name}",
        **{"event.name": name, "event.sequence": sequence, **common, "request_id": ANSWER, **more},
    )


def codex(name, **more):
    common = {"event.name": f"codex.{name}", "conversation.id": "01990000-0000-7000-8000-000000000002"}
    return {
        **record("", **common, **more),
        "eventName": "event otel/src/events.rs:7",
    }


def qwen(name, **more):
    common = {"event.name": f"qwen-code.{name}", "session.id": "s0", "prompt_id": "s0########3"}
    return record("Tool call.", **common, response_id=ANSWER, **more)


def logs(*records):
    scope = {"scope": {"name": "invented"}, "logRecords": list(records)}
    return {"resourceLogs": [{"resource": {"attributes": attributes({"service.name": "x"})}, "scopeLogs": [scope]}]}


def span(name, status=0, events=(), **more):
    return {
        "traceId": TRACE,
        "spanId": SPAN,
        "name": name,
        "kind": 3,
        "startTimeUnixNano": str(AT_NS - 5),
        "endTimeUnixNano": str(AT_NS),
        "attributes": attributes(more),
        "status": {"code": status},
        "events": list(events),
    }


def happening(name, at_ns=AT_NS, **more):
    return {"timeUnixNano": str(at_ns), "name": name, "attributes": attributes(more)}


def traces(*spans):
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def encode(body, content_type):
    """An export's bytes."""
    if content_type == JSON:
        return json.dumps(body).encode()
    message = ExportLogsServiceRequest() if "resourceLogs" in body else ExportTraceServiceRequest()
    return json_format.ParseDict(_with_ids(copy.deepcopy(body), _to_base64), message).SerializeToString()


def as_otlp_json(message):
    """A protobuf message in OTLP's JSON encoding."""
    body = json_format.MessageToDict(message, use_integers_for_enums=True)
    return json.dumps(_with_ids(body, lambda text: base64.b64decode(text).hex())).encode()


def packed(data):
    return gzip.compress(data, mtime=0)


def _to_base64(text):
    return base64.b64encode(bytes.fromhex(text)).decode()


def _with_ids(body, change):
    """Apply `change` to all ids: Protobuf's own JSON writes ids in base64, OTLP's in hexadecimal digits."""
    if isinstance(body, list):
        return [_with_ids(each, change) for each in body]
    if not isinstance(body, dict):
        return body
    return {key: change(each) if key in _IDS else _with_ids(each, change) for key, each in body.items()}
