"""However exports arrive, they say the same; whatever arrives, it is answered."""

import asyncio
import base64
import gzip
import json
import random

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.deadlines import PATIENT_S
from tests.fakes.otlp_exports import ANSWER, CALL, JSON, PROTOBUF, as_otlp_json, encode, logs

from ostinato.core.records import Source
from ostinato.serve.config import ServeConfig
from ostinato.serve.feedback.handlers import read_events, read_traces
from ostinato.serve.feedback.intake import MAX_VALUE
from ostinato.serve.feedback.otlp import Encoding, read_logs, read_spans
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer

LIMITS = {"depth": 64, "values": 100_000}
NAMES = ["tool_decision", "claude_code.tool_result", "codex.tool_decision", "codex.tool_result", "qwen-code.tool_call"]
NAMES += ["gen_ai.evaluation.result", "claude_code.", "x"]
WORDS = ["accept", "reject", "approved", "denied", "modify", "auto_accept", "user_reject", "User", "config", "true"]
WORDS += ["false", "pass", "cancelled", "execute_tool", "TOOL", "a" * 300, "\x00", CALL, ANSWER, *NAMES]
KEYS = ["event.name", "session.id", "event.sequence", "request_id", "response_id", "gen_ai.response.id", "call_id"]
KEYS += ["tool_use_id", "gen_ai.tool.call.id", "decision", "source", "success", "status", "decision_type", "error.type"]
KEYS += ["gen_ai.evaluation.name", "gen_ai.evaluation.score.value", "gen_ai.evaluation.score.label", "tool.id"]
KEYS += ["gen_ai.evaluation.explanation", "gen_ai.operation.name", "openinference.span.kind", ""]

TEXT = st.sampled_from(WORDS) | st.text(max_size=6)
SCALARS = TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats()
TIMES = st.sampled_from([0, 1, 1_790_000_000_000_000_000, 2**64 - 1]) | st.integers(0, 2**64 - 1)
IDS = st.binary(max_size=16)


def fill(value, of):
    """A protobuf AnyValue."""
    match of:
        case bool():
            value.bool_value = of
        case int():
            value.int_value = of
        case float():
            value.double_value = of
        case str():
            value.string_value = of
        case bytes():
            value.bytes_value = of
        case list():
            value.array_value.SetInParent()
            for each in of:
                fill(value.array_value.values.add(), each)


def add_attributes(holder, pairs):
    for key, of in pairs:
        fill(holder.attributes.add(key=key).value, of)


ANY_PAIRS = st.lists(
    st.tuples(st.sampled_from(KEYS) | st.text(max_size=3), SCALARS | IDS | st.none() | st.lists(SCALARS, max_size=2)),
    max_size=8,
)
LIKELY_PAIRS = st.fixed_dictionaries(
    {"event.name": st.sampled_from(NAMES), "gen_ai.response.id": st.just(ANSWER), "tool_use_id": st.just(CALL)},
    optional={
        "decision": st.sampled_from(["accept", "reject", "approved", "denied", "modify", "auto_accept"]) | SCALARS,
        "source": st.sampled_from(["user_reject", "User", "config"]) | SCALARS,
        "success": st.booleans() | SCALARS,
        "gen_ai.evaluation.name": TEXT,
        "gen_ai.evaluation.score.value": st.floats() | st.integers(-(2**63), 2**63 - 1),
        "gen_ai.evaluation.score.label": SCALARS,
        "gen_ai.evaluation.explanation": SCALARS,
        "gen_ai.operation.name": st.just("execute_tool"),
    },
).map(lambda pairs: list(pairs.items()))
PAIRS = LIKELY_PAIRS | ANY_PAIRS


@st.composite
def log_exports(draw):
    request = ExportLogsServiceRequest()
    for _ in range(draw(st.integers(0, 3))):
        record = (
            request.resource_logs.add()
            .scope_logs.add()
            .log_records.add(
                time_unix_nano=draw(TIMES),
                observed_time_unix_nano=draw(TIMES),
                event_name=draw(TEXT),
                severity_number=draw(st.integers(0, 24)),
                trace_id=draw(IDS),
                span_id=draw(IDS),
            )
        )
        fill(record.body, draw(SCALARS))
        add_attributes(record, draw(PAIRS))
    return request


@st.composite
def trace_exports(draw):
    request = ExportTraceServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        span = (
            request.resource_spans.add()
            .scope_spans.add()
            .spans.add(
                name=draw(TEXT), start_time_unix_nano=draw(TIMES), end_time_unix_nano=draw(TIMES), trace_id=draw(IDS)
            )
        )
        span.status.code = draw(st.integers(0, 2))
        add_attributes(span, draw(PAIRS))
        for _ in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(["gen_ai.evaluation.result", "x"]))
            event = span.events.add(name=name, time_unix_nano=draw(TIMES))
            add_attributes(event, draw(PAIRS))
    return request


def check_signals(reading):
    for signal in reading.signals:
        assert len(signal.id) <= 256
        assert len(signal.turn) <= 256
        assert signal.turn.isprintable()
        assert 0 < len(signal.name) <= 64
        assert abs(signal.value) <= MAX_VALUE
        assert signal.occurred_at > 0
        assert signal.source in (Source.HUMAN, Source.CODE)


@settings(max_examples=300)
@given(log_exports())
def test_both_encodings_of_logs_are_the_same_events(request):
    events = read_logs(request.SerializeToString(), Encoding.PROTOBUF, **LIMITS)
    assert repr(read_logs(as_otlp_json(request), Encoding.JSON, **LIMITS)) == repr(events)  # NaN is not itself
    check_signals(read_events(events, tenant="t", now=9.0))


@settings(max_examples=200)
@given(trace_exports())
def test_both_encodings_of_traces_are_the_same_spans(request):
    spans = read_spans(request.SerializeToString(), Encoding.PROTOBUF, **LIMITS)
    assert repr(read_spans(as_otlp_json(request), Encoding.JSON, **LIMITS)) == repr(spans)
    check_signals(read_traces(spans, tenant="t", now=9.0))


AGENT_EVENTS = st.builds(
    lambda name, at, session, sequence, decision, source, success, call: {
        "timeUnixNano": str(at),
        "eventName": name,
        "attributes": [
            {"key": key, "value": {"stringValue": value}}
            for key, value in {
                "session.id": session,
                "event.sequence": sequence,
                "decision": decision,
                "source": source,
                "success": success,
                "tool_use_id": call,
                "call_id": call,
                "request_id": ANSWER,
            }.items()
        ],
    },
    st.sampled_from(NAMES[:5]),
    st.sampled_from([0, 5, 6]),
    st.sampled_from(["s0", "s1"]),
    st.sampled_from(["0", "1"]),
    st.sampled_from(["accept", "reject", "approved"]),
    st.sampled_from(["user_temporary", "User", "config"]),
    st.sampled_from(["true", "false"]),
    st.sampled_from([CALL, "call_theirs"]),
)


@pytest.fixture(scope="module")
def gateways():
    """Makes a gateway, and sends it an export, each time with another clock."""
    loop = asyncio.new_event_loop()
    clients, lives = [], []

    def make():
        log, clock = MemoryLog(), iter(range(1000, 1_000_000))
        app = create_app(
            engine=FakeEngine(lambda request: "ok"),
            renderer=ByteRenderer(),
            log=log,
            config=ServeConfig(max_body_bytes=20_000),
            clock=lambda: float(next(clock)),
            model_name="m",
        )
        lives.append(app.router.lifespan_context(app))
        loop.run_until_complete(lives[-1].__aenter__())
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1")
        clients.append(http)

        def post(path, data, headers):
            return loop.run_until_complete(asyncio.wait_for(http.post(path, content=data, headers=headers), PATIENT_S))

        return post, log

    yield make
    for http in clients:
        loop.run_until_complete(http.aclose())
    for life in lives:
        loop.run_until_complete(life.__aexit__(None, None, None))
    loop.close()


def kept(log):
    """What the log holds, apart from when it came; of signals without a time of their own that is when they happened, too."""
    return {
        (s.id, s.turn, s.name, s.value, s.source, s.comment, s.occurred_at if s.occurred_at != s.received_at else 0)
        for s in log.signals()
    }


@settings(max_examples=60)
@given(st.lists(AGENT_EVENTS, max_size=12), st.randoms(use_true_random=False))
def test_repeated_split_and_shuffled_exports_leave_the_same_signals(gateways, events, chance: random.Random):
    post, once = gateways()
    assert post("/v1/logs", encode(logs(*events), JSON), {"content-type": JSON}).status_code == 200
    post, often = gateways()
    again = [*events, *chance.choices(events, k=5)] if events else []
    chance.shuffle(again)
    while again:
        size = chance.randint(1, len(again))
        batch, again = again[:size], again[size:]
        content_type = chance.choice([JSON, PROTOBUF])
        reply = post("/v1/logs", encode(logs(*batch), content_type), {"content-type": content_type})
        assert reply.status_code == 200
    assert kept(often) == kept(once)
    assert len(often.signals()) == len(once.signals())


@pytest.fixture(scope="module")
def gateway(gateways):
    return gateways()


def check(gateway, path, data, headers):
    post, log = gateway
    before = len(log.signals())
    reply = post(path, data, headers)
    assert reply.status_code in (200, 400, 413, 415), (reply.status_code, reply.text, data)
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
        assert len(log.signals()) == before


PATHS = st.sampled_from(["/v1/logs", "/v1/traces"])
TYPES = st.sampled_from([JSON, PROTOBUF, f"{JSON}; charset=utf-8"]) | st.text("abc/;", max_size=5)
PACKINGS = st.sampled_from([None, None, "gzip", "identity", "br", "gzip, gzip"])
VALUES = st.recursive(
    st.none() | SCALARS | st.integers(), lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3)
)


@st.composite
def near_valid(draw):
    """An export in JSON, of which any part may be something else."""

    def some(strategy):
        return draw(VALUES) if draw(st.integers(0, 9)) == 0 else strategy()

    def pair():
        kind = draw(st.sampled_from(["stringValue", "intValue", "doubleValue", "boolValue", "arrayValue"]))
        return {"key": some(lambda: draw(st.sampled_from(KEYS))), "value": some(lambda: {kind: draw(VALUES)})}

    def entry():
        times = {key: draw(VALUES) for key in draw(st.sets(st.sampled_from(["timeUnixNano", "traceId", "status"])))}
        ours = {"key": "request_id", "value": {"stringValue": ANSWER}}
        attributes = some(lambda: [ours, *(some(pair) for _ in range(draw(st.integers(0, 4))))])
        events = some(lambda: [{"name": draw(TEXT)}])
        return {"eventName": draw(TEXT), "name": draw(TEXT), "attributes": attributes, "events": events, **times}

    top, middle, low = draw(
        st.sampled_from([("resourceLogs", "scopeLogs", "logRecords"), ("resourceSpans", "scopeSpans", "spans")])
    )
    return {top: some(lambda: [some(lambda: {middle: some(lambda: [some(lambda: {low: [some(entry)]})])})])}


@settings(max_examples=300)
@given(path=PATHS, body=near_valid() | VALUES)
def test_any_json_is_answered(gateway, path, body):
    check(gateway, path, json.dumps(body).encode(), {"content-type": JSON})


@settings(max_examples=300)
@given(
    path=PATHS,
    data=st.binary(max_size=80) | st.sampled_from([b"", b"{}", b"\x0a\x00", base64.b64decode("CgA=") * 99]),
    content_type=TYPES,
    packing=PACKINGS,
    pack=st.booleans(),
)
def test_any_bytes_are_answered(gateway, path, data, content_type, packing, pack):
    headers = {"content-type": content_type} | ({} if packing is None else {"content-encoding": packing})
    check(gateway, path, gzip.compress(data) if pack else data, headers)


@settings(max_examples=200)
@given(path=PATHS, request=log_exports() | trace_exports(), cut=st.integers(0, 400), junk=st.binary(max_size=3))
def test_damaged_protobuf_is_answered(gateway, path, request, cut, junk):
    data = request.SerializeToString()
    check(gateway, path, data[:cut] + junk + data[cut + len(junk) :], {"content-type": PROTOBUF})


@settings(max_examples=20)
@given(size=st.integers(20_000, 5_000_000))
def test_what_unpacks_to_too_much_is_refused(gateway, size):
    post, _ = gateway
    data = gzip.compress(b'{"resourceLogs":[' + b" " * size + b"]}")
    headers = {"content-type": JSON, "content-encoding": "gzip"}
    assert post("/v1/logs", data, headers).status_code == 413
