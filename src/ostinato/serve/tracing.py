"""Exports each answered call as an OpenTelemetry span, by OTLP: turn ids, weights and token counts, never any text.

Attribute names follow OpenTelemetry's semantic conventions for generative AI. If the caller sends a `traceparent`, the span joins its
trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ostinato.core.seams import Clock
from ostinato.serve.calls.capture import Capture
from ostinato.serve.config import OtlpConfig

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Records spans. While the collector is unreachable, up to 2,048 spans wait; further ones are dropped. Calls are never affected.

    Example: ``tracing.answered(capture, "m", headers)``, and at the end ``await tracing.close()``
    """

    def __init__(self, config: OtlpConfig, clock: Clock) -> None:
        headers = {name: value.get_secret_value() for name, value in config.headers.items()}
        exporter = OTLPSpanExporter(endpoint=config.endpoint, headers=headers, timeout=config.timeout_s)
        self._clock = clock
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: config.service}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ostinato")

    def answered(self, capture: Capture, model: str, headers: Mapping[bytes, bytes]) -> None:
        """Record a call that has ended, successfully or not. `headers`: the request's, with lower-case names."""
        call = capture.call
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        span = self._tracer.start_span(
            f"chat {model}",
            context=_PROPAGATOR.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(call.started_at),
            attributes=_attributes(capture, model),
        )
        if any(choice.finish is None or not choice.finish.complete for choice in capture.choices):
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(self._clock()))

    async def close(self) -> None:
        """Send the waiting spans and stop the exporting thread."""
        await asyncio.to_thread(self._provider.shutdown)


def _attributes(capture: Capture, model: str) -> dict[str, str | int | float | list[str] | list[int]]:
    call = capture.call
    versions = list(dict.fromkeys(span.policy for choice in capture.choices for span in choice.spans))
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ostinato",
        "gen_ai.request.model": model,
        "gen_ai.response.id": call.id,
        "gen_ai.conversation.id": call.episode,
        "gen_ai.request.temperature": call.sampling.temperature,
        "gen_ai.request.max_tokens": call.sampling.max_tokens,
        "gen_ai.usage.input_tokens": capture.prompt_tokens,
        "gen_ai.usage.output_tokens": capture.tokens,
        "gen_ai.response.finish_reasons": [
            choice.finish.value if choice.finish else "none" for choice in capture.choices
        ],
        "ostinato.turns": call.turn_ids(),
        "ostinato.tenant": call.tenant,
        "ostinato.arm": call.arm.value,
        "ostinato.purpose": call.purpose.value,
        "ostinato.branch": call.branch.value,
        "ostinato.versions": [version.number for version in versions],
        "ostinato.weights": [version.hash for version in versions],
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
