"""What agents export by themselves becomes signals about the turns that it names."""

import json
import zlib

import pytest
from tests.fakes.otlp_exports import (
    ANSWER,
    AT_NS,
    CALL,
    JSON,
    PROTOBUF,
    SPAN,
    TRACE,
    TURN,
    attributes,
    claude,
    codex,
    encode,
    happening,
    logs,
    packed,
    qwen,
    record,
    span,
    traces,
)

from ostinato.core.errors import BadRequest, TooLarge
from ostinato.core.records import Source
from ostinato.serve.feedback.handlers import read_events, read_traces
from ostinato.serve.feedback.otlp import MAX_RECORDS, Encoding, read_logs, read_spans
from ostinato.serve.wire.body import unpacking

LIMITS = {"depth": 64, "values": 100_000}
NOW = 2_000_000_000.0
HUMAN, CODE = Source.HUMAN, Source.CODE

TYPES = pytest.mark.parametrize("content_type", [JSON, PROTOBUF])


def heard(*records, content_type=JSON):
    """The reading of log records."""
    events = read_logs(encode(logs(*records), content_type), Encoding(content_type), **LIMITS)
    return read_events(events, tenant="default", now=NOW)


def traced(*spans, content_type=JSON):
    found = read_spans(encode(traces(*spans), content_type), Encoding(content_type), **LIMITS)
    return read_traces(found, tenant="default", now=NOW)


def told(reading):
    return [(signal.name, signal.value, signal.source) for signal in reading.signals]


@TYPES
def test_claude_code_tells_decisions_and_results(content_type):
    reading = heard(
        claude("user_prompt", 0, prompt_length=3),
        claude("tool_decision", 1, decision="accept", source="user_temporary", tool_name="Edit", tool_use_id=CALL),
        claude("tool_result", 2, success="true", tool_name="Edit", tool_use_id=CALL),
        claude("tool_decision", 3, decision="reject", source="user_reject", tool_name="Bash", tool_use_id=CALL),
        claude("tool_decision", 4, decision="accept", source="config", tool_name="Read"),
        claude("tool_result", 5, success="false", tool_name="Read", error="invented"),
        claude("api_error", 6, error="invented"),
        content_type=content_type,
    )
    assert told(reading) == [
        ("tool_accepted", 1.0, HUMAN),
        ("tool_ok", 1.0, CODE),
        ("tool_rejected", 1.0, HUMAN),
        ("tool_auto_accepted", 1.0, CODE),
        ("tool_error", 1.0, CODE),
    ]
    assert {signal.turn for signal in reading.signals} == {TURN}
    assert {signal.occurred_at for signal in reading.signals} == {AT_NS / 1e9}
    assert reading.unclear == 0


@TYPES
def test_codex_tells_decisions_and_results_of_its_calls(content_type):
    reading = heard(
        codex("conversation_starts"),
        codex("tool_decision", call_id=CALL, decision="approved", source="Config", tool_name="exec_command"),
        codex("tool_decision", call_id=CALL, decision="approvedforsession", source="User", tool_name="exec_command"),
        codex("tool_decision", call_id=CALL, decision="denied", source="User", tool_name="exec_command"),
        codex("tool_decision", call_id=CALL, decision="denied", source="AutomatedReviewer", tool_name="exec_command"),
        codex("tool_result", call_id=CALL, success="false", output="invented"),
        codex("sse_event"),
        content_type=content_type,
    )
    assert told(reading) == [
        ("tool_auto_accepted", 1.0, CODE),
        ("tool_accepted", 1.0, HUMAN),
        ("tool_rejected", 1.0, HUMAN),
        ("tool_auto_rejected", 1.0, CODE),
        ("tool_error", 1.0, CODE),
    ]


@TYPES
@pytest.mark.parametrize(
    ("fields", "signals"),
    [
        ({"success": True, "status": "success", "decision": "accept"}, [("tool_accepted", HUMAN), ("tool_ok", CODE)]),
        ({"success": True, "decision": "auto_accept"}, [("tool_auto_accepted", CODE), ("tool_ok", CODE)]),
        ({"success": True, "decision": "modify"}, [("tool_modified", HUMAN), ("tool_ok", CODE)]),
        ({"success": False, "status": "cancelled", "decision": "reject"}, [("tool_rejected", HUMAN)]),
        ({"success": False, "decision": "reject"}, [("tool_rejected", HUMAN)]),
        ({"success": False, "status": "error", "decision": "accept"}, [("tool_accepted", HUMAN), ("tool_error", CODE)]),
        ({"success": False, "status": "cancelled"}, []),
        ({"success": True, "decision": "reject"}, [("tool_ok", CODE)]),
        ({"success": True}, [("tool_ok", CODE)]),
    ],
)
def test_qwen_tells_both_in_one_event(content_type, fields, signals):
    reading = heard(qwen("tool_call", function_name="edit", call_id="by-client-7", **fields), content_type=content_type)
    assert told(reading) == [(name, 1.0, source) for name, source in signals]
    assert {signal.turn for signal in reading.signals} <= {TURN}


@TYPES
def test_spans_tell_tool_runs_failed_answers_and_evaluations(content_type):
    evaluation = "gen_ai.evaluation.result"
    score = {"gen_ai.evaluation.name": "Answer Relevance", "gen_ai.evaluation.score.value": 0.85}
    reading = traced(
        span("execute_tool read", **{"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.id": CALL}),
        span("read", 2, **{"openinference.span.kind": "TOOL", "tool.id": CALL}),
        span("execute_tool bash", **{"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.id": "call_theirs"}),
        span("chat m", 2, **{"gen_ai.operation.name": "chat", "gen_ai.response.id": ANSWER}),
        span(
            "chat m",
            1,
            [
                happening("gen_ai.client.operation.exception"),
                happening(evaluation, **score, **{"gen_ai.evaluation.explanation": "because"}),
                happening(evaluation, **{"gen_ai.evaluation.name": "judge", "gen_ai.evaluation.score.label": "Fail"}),
            ],
            **{"gen_ai.response.id": ANSWER},
        ),
        content_type=content_type,
    )
    assert told(reading) == [
        ("tool_ok", 1.0, CODE),
        ("tool_error", 1.0, CODE),
        ("response_error", 1.0, CODE),
        ("eval.Answer_Relevance", 0.85, CODE),
        ("eval.judge", 0.0, CODE),
    ]
    assert {signal.turn for signal in reading.signals} == {TURN}
    assert [signal.comment for signal in reading.signals if signal.comment] == ["because"]


@TYPES
def test_an_evaluation_may_also_be_a_log_record(content_type):
    fields = {"gen_ai.evaluation.name": "unit.tests", "gen_ai.evaluation.score.value": 3, "gen_ai.response.id": ANSWER}
    named = record("", **fields) | {"eventName": "gen_ai.evaluation.result"}
    assert told(heard(named, content_type=content_type)) == [("eval.unit.tests", 3.0, CODE)]


def test_claude_codes_names_may_have_a_prefix():
    fields = {"decision": "accept", "source": "user_permanent", "tool_use_id": CALL}
    plain, prefixed = claude("tool_decision", **fields), record("claude_code.tool_decision", **fields)
    assert told(heard(plain)) == told(heard(prefixed)) == [("tool_accepted", 1.0, HUMAN)]


def test_a_rejected_call_did_not_fail():
    assert told(heard(claude("tool_result", success="false", decision_type="reject", tool_use_id=CALL))) == []
    assert told(heard(claude("tool_result", success="false", decision_type="accept", tool_use_id=CALL)))


def test_the_call_names_the_turn_before_the_request_does():
    other = "chatcmpl-" + "0a" * 16
    (signal,) = heard(claude("tool_result", success=True, tool_use_id=f"call_{other}_2_5")).signals
    assert signal.turn == f"{other}:2"
    (signal,) = heard(claude("tool_result", success=True, tool_use_id="toolu_01AbCd")).signals
    assert signal.turn == TURN
    for theirs in ("req_011AbC", "", "msg-XYZ", f"{ANSWER}\n", "msg-" + "a" * 300):
        assert heard(claude("tool_result", success=True, request_id=theirs)).signals == []


def test_what_is_known_and_not_understood_is_counted():
    score = {"gen_ai.response.id": ANSWER, "gen_ai.evaluation.name": "x"}
    evaluations = [
        {"gen_ai.evaluation.score.value": float("nan")},
        {"gen_ai.evaluation.score.value": float("inf")},
        {"gen_ai.evaluation.score.value": 1e200},
        {"gen_ai.evaluation.score.value": True},
        {"gen_ai.evaluation.score.value": "0.5"},
        {"gen_ai.evaluation.score.label": "so-so"},
        {"gen_ai.evaluation.name": "日本", "gen_ai.evaluation.score.value": 1.0},
        {"gen_ai.evaluation.name": "n" * 60, "gen_ai.evaluation.score.value": 1.0},
        {"gen_ai.evaluation.name": 5, "gen_ai.evaluation.score.value": 1.0},
    ]
    spans = [span("s", 0, [happening("gen_ai.evaluation.result", **(score | each))]) for each in evaluations]
    for content_type in (PROTOBUF, JSON):
        reading = traced(*spans, content_type=content_type)
        assert (reading.signals, reading.unclear) == ([], len(spans))
    failed = {"error.type": "timeout", **score}
    assert heard(record("gen_ai.evaluation.result", **failed)).unclear == 0
    records = [
        claude("tool_decision", decision="maybe"),
        claude("tool_decision", decision=7),
        claude("tool_result"),
        claude("tool_result", success="yes"),
        codex("tool_decision", call_id=CALL, decision="timedout"),
        qwen("tool_call", success=1),
        claude("tool_decision", decision="maybe", request_id="req_theirs"),
    ]
    assert (heard(*records).signals, heard(*records).unclear) == ([], 6)


def test_when_it_happened_is_what_the_record_says_then_when_it_was_seen_then_now():
    def at(**changes):
        (signal,) = heard(claude("tool_result", success=True) | changes).signals
        return signal.occurred_at

    assert at() == AT_NS / 1e9
    assert at(timeUnixNano="0") == at(timeUnixNano=0) == AT_NS / 1e9 + 1
    for unreadable in ("-5", -5, "1e9", 1.5, None, [], "9" * 30, True):
        assert at(timeUnixNano=unreadable, observedTimeUnixNano="0") == NOW
    assert at(timeUnixNano=str(2**64 - 1)) == pytest.approx(1.8446744e10)


def test_hostile_records_are_read_as_far_as_they_can_be():
    deep = [1]
    for _ in range(10):
        deep = [deep]
    fields = {"decision": "accept", "source": deep, "tool_use_id": CALL, "junk": "x" * 200_000, "": "nameless"}
    for content_type in (JSON, PROTOBUF):
        assert told(heard(claude("tool_decision", **fields), content_type=content_type)) == [
            ("tool_auto_accepted", 1.0, CODE)
        ]
    odd = claude("tool_result", success=True)
    odd["attributes"] += [5, None, {}, {"key": 5}, {"key": "a"}, {"key": "b", "value": 5}, {"key": "c", "value": {}}]
    odd["attributes"] += [{"key": k, "value": {"intValue": v}} for k, v in (("d", "x"), ("e", 2**80), ("f", None))]
    odd["attributes"] += [{"key": "g", "value": {"doubleValue": 10**400}}, {"key": "h", "value": {"boolValue": "x"}}]
    assert told(heard(odd | {"traceId": 5, "spanId": "zz", "body": [], "severityNumber": {}})) == [
        ("tool_ok", 1.0, CODE)
    ]
    for attributes_ in (None, 5, {}, "x"):
        assert heard(odd | {"attributes": attributes_}).signals == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"resourceLogs": 5}, "resourceLogs"),
        ({"resourceLogs": [5]}, "resourceLogs"),
        ({"resourceLogs": [{"scopeLogs": {}}]}, "scopeLogs"),
        ({"resourceLogs": [{"scopeLogs": [{"logRecords": [[]]}]}]}, "logRecords"),
        ([], None),
    ],
)
def test_json_of_another_form_is_refused_by_field(body, field):
    with pytest.raises(BadRequest) as caught:
        read_logs(json.dumps(body).encode(), Encoding.JSON, **LIMITS)
    assert caught.value.field == field
    with pytest.raises(BadRequest, match="ExportLogsServiceRequest"):
        read_logs(b"\xff\xff", Encoding.PROTOBUF, **LIMITS)


@TYPES
def test_an_export_without_records_is_an_export(content_type):
    assert read_logs(encode(logs(), content_type), Encoding(content_type), **LIMITS) == []
    assert read_spans(encode(traces(), content_type), Encoding(content_type), **LIMITS) == []


@TYPES
def test_a_batch_is_bounded(content_type):
    limits = {"depth": 64, "values": 1_000_000}
    full = encode(logs(*[{"severityNumber": 9}] * MAX_RECORDS), content_type)
    assert len(read_logs(full, Encoding(content_type), **limits)) == MAX_RECORDS
    with pytest.raises(TooLarge, match="10000"):
        read_logs(
            encode(logs(*[{"severityNumber": 9}] * (MAX_RECORDS + 1)), content_type), Encoding(content_type), **limits
        )
    events = [{"name": "x"}] * (MAX_RECORDS // 2)
    for spans in ([{"events": events}] * 2, [{}] * (MAX_RECORDS + 1)):
        with pytest.raises(TooLarge):
            read_spans(encode(traces(*spans), content_type), Encoding(content_type), **limits)
    with pytest.raises(TooLarge):
        read_logs(encode({"resourceLogs": [{}] * (MAX_RECORDS + 1)}, content_type), Encoding(content_type), **limits)
    crowded = logs({"attributes": attributes({f"k{i}": 1 for i in range(200)})})
    with pytest.raises(TooLarge):
        read_logs(encode(crowded, content_type), Encoding(content_type), depth=64, values=100)


def test_unpacking_is_bounded():
    unpack = unpacking({b"content-encoding": b"gzip"}, 1000)
    assert unpack(packed(b"x" * 1000)) == b"x" * 1000
    with pytest.raises(TooLarge):
        unpack(packed(b"x" * 1001))
    for broken in (b"", b"x", packed(b"x")[:-1], packed(b"x") + b"y", packed(b"x") * 2, zlib.compress(b"x")):
        with pytest.raises(BadRequest):
            unpack(broken)


def test_ids_of_traces_are_read_alike():
    spans = [
        read_spans(encode(traces(span("s")), content_type), Encoding(content_type), **LIMITS)
        for content_type in (JSON, PROTOBUF)
    ]
    assert spans[0] == spans[1]
    assert (spans[0][0].trace_id, spans[0][0].span_id) == (TRACE, SPAN)
