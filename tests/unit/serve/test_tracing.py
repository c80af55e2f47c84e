"""Spans of answered calls, as a collector receives them."""

import time

import pytest
from gateway_world import world
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from ostinato.serve.config import OtlpConfig
from ostinato.testing.engine import FakeEngine
from ostinato.testing.serving import serving

TRACE, PARENT = "5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174"


class Collector:
    """Keeps what is exported to it."""

    def __init__(self):
        self.requests, self.keys = [], []
        self.app = Starlette(routes=[Route("/v1/traces", self._take, methods=["POST"])])

    async def _take(self, request):
        self.keys.append(request.headers.get("x-key"))
        self.requests.append(ExportTraceServiceRequest.FromString(await request.body()))
        return Response(b"", media_type="application/x-protobuf")

    def spans(self):
        return [
            span
            for each in self.requests
            for part in each.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]


def attributes(span):
    kinds = {"string_value": str, "int_value": int, "double_value": float}
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        if kind == "array_value":
            found[each.key] = [getattr(value, value.WhichOneof("value")) for value in each.value.array_value.values]
        else:
            found[each.key] = kinds[kind](getattr(each.value, kind))
    return found


async def traced(engine, *calls, **config):
    """What the collector has when the gateway has ended, and the gateway's world."""
    collector = Collector()
    async with serving(collector.app) as url:
        otlp = {"endpoint": f"{url}/v1/traces", "headers": {"x-key": "k"}}
        async with world(engine=engine, otlp=otlp, **config) as w:
            for call in calls:
                await call(w)
    return collector, w


async def test_a_call_is_a_span_in_its_callers_trace():
    async def call(w):
        w.now = 1000.0
        await w.chat(user="ann", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})

    collector, w = await traced(FakeEngine(lambda _: "hello"), call)
    (span,), (turn,) = collector.spans(), w.log.turns()
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("chat m", TRACE, PARENT)
    assert span.start_time_unix_nano == 1_000_000_000_000
    told = attributes(span)
    assert told["ostinato.turns"] == [turn.id]
    assert told["gen_ai.response.id"] == turn.id.removesuffix(":0")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (
        len(turn.prompt_ids),
        len(turn.sampled_ids),
    )
    assert told["ostinato.weights"] == ["fake0"]
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert collector.keys == ["k"]
    assert b"hello" not in collector.requests[0].SerializeToString()
    assert b"ann" not in collector.requests[0].SerializeToString()


async def test_a_call_that_fails_is_a_span_that_failed_and_a_refused_one_is_none():
    async def fails(w):
        w.engine.fail_after = 2
        await w.chat()

    async def refused(w):
        await w.chat(temprature=1)

    collector, _ = await traced(FakeEngine(lambda _: "hello"), fails, refused)
    (span,) = collector.spans()
    assert span.status.code == 2
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["error"]


@pytest.mark.parametrize("header", ["", "00-zz-yy-01", "x" * 400])
async def test_a_header_that_is_no_trace_begins_one(header):
    async def call(w):
        assert (await w.chat(headers={"traceparent": header}))[0] == 200

    collector, _ = await traced(FakeEngine(lambda _: "hello"), call)
    (span,) = collector.spans()
    assert span.parent_span_id == b""


async def test_a_collector_that_is_away_delays_no_call():
    async with world(otlp={"endpoint": "http://127.0.0.1:9/v1/traces", "timeout_s": 0.2}) as w:
        took = []
        for _ in range(20):
            began = time.monotonic()
            assert (await w.chat())[0] == 200
            took.append(time.monotonic() - began)
        assert min(took) < 0.2, "each one would wait, and a busy machine delays some"


def test_an_address_must_be_one():
    with pytest.raises(ValidationError, match="endpoint"):
        OtlpConfig(endpoint="localhost:4318")
