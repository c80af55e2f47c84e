"""The gateway: OpenAI-compatible HTTP in front of an engine, every call captured, feedback taken, arms dealt.

`create_app` builds the parts and says which path is whose: model calls are in `calls/`, feedback in `feedback/`, HTTP in `wire/`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ostinato.core.errors import NotFound
from ostinato.core.records import Arm, Turn
from ostinato.core.seams import Clock, Engine, Log, Renderer
from ostinato.serve.auth import Keyring
from ostinato.serve.calls.capture import Writes
from ostinato.serve.calls.handlers import Calls
from ostinato.serve.config import ServeConfig
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.feedback.events import parse_feedback
from ostinato.serve.feedback.intake import Intake
from ostinato.serve.metrics import Metrics
from ostinato.serve.quotas import Quotas
from ostinato.serve.wire.endpoint import Endpoint, Handler, on_http_exception
from ostinato.serve.wire.exchange import Exchange
from ostinato.serve.wire.origins import Origins

_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


def create_app(
    *,
    engine: Engine,
    renderer: Renderer,
    log: Log,
    config: ServeConfig,
    clock: Clock,
    model_name: str,
    metrics: Metrics | None = None,
    admin_keys: Sequence[SecretStr] = (),
) -> GatewayApp:
    """The gateway as an ASGI app. `app.state.metrics` is where swaps are reported (`metrics.swapped`).

    Args:
        engine: makes tokens; started and stopped by the caller.
        renderer: messages <-> ids of the same model.
        log: where turns and signals go; opened and closed by the caller.
        config: limits, keys, arms.
        clock: Unix seconds.
        model_name: the name that clients send as `model`.
        metrics: where to count; a new `Metrics(engine)` if None.
        admin_keys: keys of operators beside `config.admin_key`.

    Raises:
        BadConfig: weak or repeated keys, shares above 1.
    """
    metrics = metrics or Metrics(engine)
    own = [] if config.admin_key is None else [config.admin_key]
    keys = Keyring(config.api_keys, [*own, *admin_keys])
    quotas = Quotas(config, keys.tenants, clock, metrics.refused)
    writes = Writes()
    intake = Intake(log, writes=writes, metrics=metrics, timeout_s=config.store_timeout_s)
    calls = Calls(
        engine=engine,
        renderer=renderer,
        log=log,
        config=config,
        clock=clock,
        model=model_name,
        keys=keys,
        quotas=quotas,
        metrics=metrics,
        writes=writes,
        stored=intake.turn,
    )
    desk = FrontDesk(
        engine=engine, clock=clock, model=model_name, keys=keys, quotas=quotas, intake=intake, metrics=metrics
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        """Find past sessions again at the start; finish writes at the end."""
        after = max(0, await log.append() - config.session_rebuild_rows)
        async for _, row in log.read(after, {Turn}):
            if isinstance(row, Turn):
                calls.restore(row)
                intake.turn(row)
        yield
        await calls.close()

    routes: dict[tuple[str, str], Handler] = {
        ("POST", "/v1/chat/completions"): calls.chat,
        ("POST", "/v1/completions"): calls.complete,
        ("POST", "/v1/feedback"): desk.feedback,
        ("GET", "/v1/models"): desk.models,
        ("GET", "/v1/models/{model:path}"): desk.model,
        ("GET", "/health"): desk.health,
        ("GET", "/metrics"): desk.numbers,
    }
    origins = Origins(checked=keys.open, allowed=config.allowed_hosts)
    endpoints = {
        where: Endpoint(where[1], handle, origins=origins, metrics=metrics, config=config)
        for where, handle in routes.items()
    }
    app = GatewayApp(
        endpoints,
        routes=[Route(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()],
        exception_handlers={HTTPException: on_http_exception},
        lifespan=lifespan,
    )
    app.state.metrics = metrics
    return app


class GatewayApp(Starlette):
    """A Starlette app whose plain paths skip its middleware and routing: an endpoint answers every error by itself."""

    def __init__(self, endpoints: dict[tuple[str, str], Endpoint], **more: Any) -> None:
        super().__init__(**more)
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


class FrontDesk:
    """The handlers of everything but model calls. Built by `create_app`."""

    def __init__(
        self,
        *,
        engine: Engine,
        clock: Clock,
        model: str,
        keys: Keyring,
        quotas: Quotas,
        intake: Intake,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._keys = keys
        self._quotas = quotas
        self._intake = intake
        self._metrics = metrics
        self._card = {"id": model, "object": "model", "created": int(clock()), "owned_by": "ostinato"}

    async def feedback(self, exchange: Exchange) -> None:
        """`POST /v1/feedback`: durable when the 202 is sent, which says of each event what became of it."""
        tenant = self._keys.identify(exchange.headers).tenant
        body = await exchange.json()
        signals = parse_feedback(body, tenant=tenant, now=self._clock())
        self._quotas.count_events(tenant, len(signals))
        statuses = await self._intake.take(signals)
        answers = [{"id": signal.id, "status": status.value} for signal, status in zip(signals, statuses, strict=True)]
        await exchange.reply(202, json_bytes(answers if isinstance(body, list) else answers[0]))

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        self._keys.identify(exchange.headers)
        await exchange.reply(200, json_bytes({"object": "list", "data": [self._card]}))

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/{model}`."""
        self._keys.identify(exchange.headers)
        name = exchange.path.removeprefix("/v1/models/")
        if name != self._card["id"]:
            raise NotFound(f"There is no model {name[:200]!r}; this server has {self._card['id']!r}.", field="model")
        await exchange.reply(200, json_bytes(self._card))

    async def health(self, exchange: Exchange) -> None:
        """`GET /health`: 200 when the live slot is loaded, else 503; open to all, says nothing about users."""
        loaded = self._engine.slots()
        slots = {name: {"number": policy.number, "hash": policy.hash} for name, policy in loaded.items()}
        ready = str(Arm.LIVE) in slots
        body = {"status": "ready" if ready else "loading", "model": self._card["id"], "slots": slots}
        await exchange.reply(200 if ready else 503, json_bytes(body))

    async def numbers(self, exchange: Exchange) -> None:
        """`GET /metrics`, for Prometheus: everything for an operator or where no keys are asked for, a tenant's own for a tenant."""
        who = self._keys.identify(exchange.headers)
        everything = who.admin or self._keys.open
        await exchange.reply(200, self._metrics.page(None if everything else who.tenant), kind=_PROMETHEUS)
