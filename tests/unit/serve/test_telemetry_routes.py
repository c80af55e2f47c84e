"""`POST /v1/logs` and `POST /v1/traces` as exporters see them."""

import gzip

import pytest
from gateway_world import world
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from tests.fakes.otlp_exports import (
    ANSWER,
    CALL,
    JSON,
    PROTOBUF,
    claude,
    encode,
    happening,
    logs,
    packed,
    span,
    traces,
)

from ostinato.serve.config import QuotaConfig

KEYS = {"acme": "key-of-acme-0123456789", "other": "key-of-other-012345678"}
TYPES = pytest.mark.parametrize("content_type", [JSON, PROTOBUF])


class Wired:
    def __init__(self, w):
        self.http = w.http

    async def send(self, body, content_type=JSON, path="/v1/logs", **headers):
        data = body if isinstance(body, bytes) else encode(body, content_type)
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        return await self.http.post(path, content=data, headers={"content-type": content_type, **headers})


RESULTS = logs(*(claude("tool_result", i, success=True, tool_use_id=CALL) for i in range(3)))


@TYPES
async def test_an_export_is_durable_once_and_answered_in_its_encoding(content_type):
    async with world() as w:
        wired = Wired(w)
        for _ in range(2):
            reply = await wired.send(RESULTS, content_type)
            assert (reply.status_code, reply.headers["content-type"]) == (200, content_type)
            assert reply.content == (b"{}" if content_type == JSON else b"")
            w.now += 1
        await wired.send(RESULTS, JSON)
        reply = await wired.send(packed(encode(RESULTS, content_type)), content_type, content_encoding="gzip")
        assert reply.status_code == 200
        assert [signal.name for signal in w.log.signals()] == ["tool_ok"] * 3
        assert {signal.received_at for signal in w.log.signals()} == {1000.0}


@TYPES
async def test_partial_success_counts_what_was_not_understood(content_type):
    unclear = logs(claude("tool_result"), claude("tool_result", success=True))
    failed = span("s", 0, [happening("gen_ai.evaluation.result", **{"gen_ai.response.id": ANSWER})])
    async with world() as w:
        wired = Wired(w)
        replies = [
            await wired.send(unclear, content_type),
            await wired.send(traces(failed), content_type, path="/v1/traces"),
        ]
        assert [reply.status_code for reply in replies] == [200, 200]
        if content_type == JSON:
            partial = [reply.json()["partialSuccess"] for reply in replies]
            assert partial[0]["rejectedLogRecords"] == partial[1]["rejectedSpans"] == "1"
            assert partial[0]["errorMessage"]
        else:
            told = ExportLogsServiceResponse.FromString(replies[0].content).partial_success
            assert (told.rejected_log_records, bool(told.error_message)) == (1, True)
            assert ExportTraceServiceResponse.FromString(replies[1].content).partial_success.rejected_spans == 1
        assert len(w.log.signals()) == 1


async def test_what_is_sent_in_another_form_is_refused():
    async with world(max_body_bytes=10_000) as w:
        wired = Wired(w)
        refused = [
            (await wired.send(b"{}", "text/plain"), 415),
            (await wired.send(b"{}", ""), 415),
            (await wired.send(b"{}", content_encoding="br"), 415),
            (await wired.send(b"{}", content_encoding="gzip"), 400),
            (await wired.send(b"{"), 400),
            (await wired.send(b"{}", PROTOBUF), 400),
            (await wired.send(b" " * 10_001), 413),
            (await wired.send(gzip.compress(b" " * 50_000_000), content_encoding="gzip"), 413),
        ]
        for reply, status in refused:
            assert reply.status_code == status, reply.content
            assert reply.json()["error"]["message"]
        assert (await wired.send(b"{}", f"{JSON}; charset=utf-8")).status_code == 200
        assert w.log.signals() == []


async def test_an_export_needs_a_key_and_counts_against_the_quota():
    quota = QuotaConfig(events_per_s=1.0)
    async with world(api_keys=[f"{name}:{key}" for name, key in KEYS.items()], quota=quota) as w:
        wired = Wired(w)
        assert (await wired.send(RESULTS)).status_code == 401
        many = logs(*(claude("user_prompt", i) for i in range(999)))
        assert (await wired.send(many, x_api_key=KEYS["acme"])).status_code == 200
        assert (await wired.send(RESULTS, x_api_key=KEYS["acme"])).status_code == 429
        assert (await wired.send(RESULTS, x_api_key=KEYS["other"])).status_code == 200


async def test_unpacked_bytes_count_against_the_quota():
    quota = QuotaConfig(bytes_per_s=1000.0)
    async with world(quota=quota) as w:
        wired = Wired(w)
        assert (await wired.send(packed(b"{" + b" " * 2000 + b"}"), content_encoding="gzip")).status_code == 200
        assert (await wired.send(packed(b"{" + b" " * 2000 + b"}"), content_encoding="gzip")).status_code == 429


async def test_another_tenants_turn_is_answered_like_an_unknown_one():
    async with world(api_keys=[f"{name}:{key}" for name, key in KEYS.items()]) as w:
        wired = Wired(w)
        _, _, body = await w.chat(headers=w.key(KEYS["other"]))
        answer = body["ostinato"]["turns"][0].removesuffix(":0")
        replies = [
            await wired.send(logs(claude("tool_result", 1, success=True, request_id=id)), x_api_key=KEYS["acme"])
            for id in (answer, ANSWER)
        ]
        assert replies[0].content == replies[1].content == b"{}"
        assert [signal.tenant for signal in w.log.signals()] == ["acme", "acme"]


async def test_a_served_turn_is_told_of_by_its_request_id():
    async with world() as w:
        wired = Wired(w)
        _, headers, body = await w.chat()
        decision = claude("tool_decision", decision="accept", source="user_temporary", request_id=headers["request-id"])
        assert (await wired.send(logs(decision))).status_code == 200
        (signal,) = w.log.signals()
        assert signal.turn == body["ostinato"]["turns"][0]
        _, page = await w.get("/metrics")
        assert 'ostinato_feedback_total{status="accepted",tenant="default"} 1.0' in page


async def test_many_signals_are_written_in_pieces_and_a_full_log_is_told():
    many = logs(*(claude("tool_result", i, success=True, tool_use_id=CALL) for i in range(2500)))
    async with world() as w:
        wired = Wired(w)
        before = w.log.appends
        assert (await wired.send(many, PROTOBUF)).status_code == 200
        assert (w.log.appends - before, len(w.log.signals())) == (3, 2500)
        w.log.full = True
        assert (await wired.send(RESULTS)).status_code == 507
