"""The gateway: an OpenAI- and Anthropic-compatible HTTP server in front of an engine. It captures every call, takes feedback and assigns
users to arms.

This module builds the parts and maps paths to handlers: model calls are in `calls/`, feedback in `feedback/`, HTTP in `wire/`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ostinato.core.arm_assignment import BRANCH_REFS, BRANCHES, Dealing, branch_of
from ostinato.core.audit import Audit, unaudited
from ostinato.core.errors import BadConfig, NotFound, OstinatoError
from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, Turn
from ostinato.core.seams import Adaptation, Clock, Dealer, Engine, Log, Renderer, StyleDealer
from ostinato.core.visitors import Visitors
from ostinato.serve.auth import KeyAudit, KeyFile, Keyring, check_tenants
from ostinato.serve.auto_deals import Deals
from ostinato.serve.calls.caller import ROUTES
from ostinato.serve.calls.compaction import BlockSigner
from ostinato.serve.calls.generate import CallHandlers
from ostinato.serve.config import PrivacyConfig, ServeConfig
from ostinato.serve.consent import ConsentChoices, ConsentHandlers
from ostinato.serve.dialects import anthropic_reply, openai_reply
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.feedback.followups import FollowUps
from ostinato.serve.feedback.handlers import Feedback, Telemetry
from ostinato.serve.feedback.intake import Intake
from ostinato.serve.message_judge import Judge
from ostinato.serve.parts import Parts
from ostinato.serve.person_dials import PersonDialHandlers
from ostinato.serve.quotas import in_force
from ostinato.serve.reader import RequestReader
from ostinato.serve.scrub import open_scrubbing
from ostinato.serve.session_cookies import OriginCheckedRoute, SessionCookies
from ostinato.serve.wire.exchange import (
    Endpoint,
    Exchange,
    Handler,
    normalised_path,
    on_http_exception,
    preflight,
    strip_session,
)
from ostinato.serve.wire.origins import Origins

# ---------------------------------------------------------------- health, models, metrics


# the names of the field in vLLM, OpenRouter, Groq, Mistral and Anthropic
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
_PROMETHEUS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class ServerInfo:
    """Handlers of the read-only routes: models, health and metrics."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        names = [parts.model] + ([] if parts.deals is None else [parts.deals.name])
        engine = parts.engine.capabilities()
        context = min(parts.renderer.context, engine.context)
        capabilities = _capabilities(forms=engine.follows_grammars)
        self._cards = {name: _card(name, parts.clock(), context) | {"capabilities": capabilities} for name in names}

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        self._parts.keys.identify(exchange.headers)
        names = list(self._cards)
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
        await exchange.reply(200, json_bytes({"object": "list", "data": list(self._cards.values()), **pages}))

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/{model}`."""
        self._parts.keys.identify(exchange.headers)
        name = exchange.path.removeprefix("/v1/models/")
        card = self._cards.get(name)
        if card is None:
            known = " and ".join(map(repr, self._cards))
            raise NotFound(f"There is no model {name[:200]!r}; this server has {known}.", field="model")
        await exchange.reply(200, json_bytes(card))

    async def health(self, exchange: Exchange) -> None:
        """`GET /health`: 200 when calls can be answered, else 503. With keys configured, details (model, slots, reason) need a key.

        A tenant does not see the branches of other tenants.
        """
        loaded = self._parts.engine.slots()
        who = self._parts.keys.known(exchange.headers)
        slots = {
            name: {"number": policy.number, "hash": policy.hash}
            for name, policy in loaded.items()
            if not name.startswith((BRANCHES, BRANCH_REFS))
            or (who is not None and (who.admin or name == branch_of(who.tenant)))
        }
        status, body = "ready", {"model": self._parts.model, "slots": slots}
        if Arm.LIVE not in slots:
            status = "loading"
        elif failure := self._parts.writes.failing():
            status = "failing"
            body["reason"] = (
                f"The log accepted no write ({failure}), so no call can be answered; the server's output says why."
            )
        details = body if who is not None else {}
        await exchange.reply(200 if status == "ready" else 503, json_bytes({"status": status, **details}))

    async def metrics_page(self, exchange: Exchange) -> None:
        """`GET /metrics` in Prometheus' text format: only the tenant's own metrics, but all of them for an operator's key, for the metrics
        key, and if no keys are configured.
        """
        keys = self._parts.keys
        tenant = None
        if not keys.may_scrape(exchange.headers):
            who = keys.identify(exchange.headers)
            tenant = None if who.admin or keys.open else who.tenant
        if tenant is not None:
            self._parts.quotas.count_scrape(tenant)
        page = self._parts.metrics.page(tenant)
        await exchange.reply(200, page, kind=_PROMETHEUS_TYPE)


def _card(name: str, made: float, context: int) -> dict[str, Any]:
    """A model as OpenAI's and Anthropic's model lists describe it, with its context length under every name that agents look for."""
    return {
        "id": name,
        "object": "model",
        "created": int(made),
        "owned_by": "ostinato",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(made), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "lifecycle": "active",
        "max_tokens": context,
        **dict.fromkeys(_CONTEXT_FIELDS, context),
    }


def _capabilities(*, forms: bool) -> dict[str, Any]:
    """The model's capabilities, as in Anthropic's model list. `forms`: answers can be constrained to a JSON schema."""
    no, yes = {"supported": False}, {"supported": True}
    edits = dict.fromkeys(("clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"), yes)
    return {
        **dict.fromkeys(("batch", "citations", "code_execution", "image_input", "pdf_input"), no),
        "compaction": yes | {"summarize": yes},
        "context_management": yes | edits,
        "effort": no | dict.fromkeys(("low", "medium", "high", "max"), no),
        "server_tools": no | {"code_execution": no, "web_search": no},
        "structured_outputs": {"supported": forms},
        "thinking": no | {"types": dict.fromkeys(("adaptive", "between_tools", "disabled", "enabled"), no)},
    }


# ---------------------------------------------------------------- the app


_LOG = logging.getLogger(__name__)

COUNT_PATH = "/v1/messages/count_tokens"
SCORE_PATH = "/v1/worlds/score"

Page = Callable[[Visitors], Sequence[BaseRoute]]
"""Makes the routes of the web page, given the `Visitors` that identify who is looking at it."""


BackgroundTask = Callable[[], Coroutine[None, None, None]]
"""A background task that runs beside the requests until it is cancelled."""


def create_app(
    *,
    engine: Engine,
    renderer: Renderer,
    log: Log,
    config: ServeConfig,
    clock: Clock,
    model_name: str,
    admin_keys: Sequence[SecretStr] = (),
    dealer: Dealer | None = None,
    page: Page | None = None,
    room: Callable[[], int] | None = None,
    adaptation: Adaptation | None = None,
    styles: StyleDealer | None = None,
    audit: Audit = unaudited,
    privacy: PrivacyConfig | None = None,
    trained: Collection[str] = (),
    reader: RequestReader | None = None,
) -> GatewayApp:
    """Build the gateway as an ASGI app. Report weight swaps to `app.state.metrics.swapped`; `app.state.waits` measures people's waits.

    Args:
        engine: samples tokens; started and stopped by the caller.
        renderer: converts messages to token ids and back, for the same model.
        log: stores turns and signals; opened and closed by the caller.
        config: limits, keys, arms.
        clock: Unix seconds.
        model_name: the name that clients send as `model`.
        admin_keys: operators' keys besides `config.admin_key`.
        dealer: draws among the arms of `config.auto`; required if there are any.
        page: makes the routes of the web page, which get the same key and origin checks; None: no page.
        room: returns the free bytes on the log's disk; None if that is unknown.
        adaptation: personalises answers (steering); started and closed with the app.
        styles: assigns styles to people's conversations; started and closed with the app.
        audit: records wrong keys, and weights chosen with an operator's key.
        privacy: what may be done with people's turns; None: everything that a request does not refuse.
        trained: the tenants of `config.branches` whose branches are trained; a share of their users stays on live as a holdout.
        reader: parses long requests in another process; closed with the app. None: they are parsed in this process.
    Raises BadConfig: unusable keys, a tenant without one, a bad control share, Auto without key or dealer, or under the model's name.
    """
    keys, visits, task, operators = _authentication(config, privacy := privacy or PrivacyConfig(), admin_keys, clock)
    parts = Parts(
        engine=engine,
        renderer=renderer,
        log=log,
        config=config,
        clock=clock,
        model=model_name,
        keys=keys,
        blocks=BlockSigner(operators or [secrets.token_hex(32)], model_name),  # without a key, for this process only
        privacy=privacy,
        room=room,
        deals=_deals(config, model_name, dealer),
        adaptation=adaptation,
        styles=styles,
        scrubbing=open_scrubbing(privacy, operators[0] if operators else ""),  # the same key in all gateways of a run
        trained=trained,
        reader=reader,
    )
    return GatewayApp(parts, () if page is None else page(visits), task, audit)


def _authentication(
    config: ServeConfig, privacy: PrivacyConfig, admin_keys: Sequence[SecretStr], clock: Clock
) -> tuple[Keyring, SessionCookies, BackgroundTask | None, list[str]]:
    """The keys, the page's visitors, the task that updates both from the key file (None without one), and the operators' keys."""
    admins = [*([] if config.admin_key is None else [config.admin_key]), *admin_keys]
    file = KeyFile(config)
    keys = Keyring(file.keys, admins, len(config.api_keys), config.metrics_key)
    check_tenants(config, privacy, keys.tenants)
    _LOG.info("Limits of each tenant: %s.", in_force(config, keys.tenants))
    visits = SessionCookies(keys, file.keys, admins, clock, secure=config.secure_cookie)

    def renew(clients: Sequence[SecretStr]) -> frozenset[str]:
        new_tenants = keys.renew(clients, len(config.api_keys))
        visits.renew(clients)
        return new_tenants

    background = None if config.api_keys_file is None else partial(file.watch, renew)
    return keys, visits, background, [key.get_secret_value() for key in admins]


def _deals(config: ServeConfig, model_name: str, dealer: Dealer | None) -> Deals | None:
    if not config.auto.arms:
        return None
    if dealer is None:
        raise BadConfig("serve.auto has arms, but no dealer draws among them; pass a dealer to create_app")
    if config.auto.name == model_name:
        raise BadConfig(f"serve.auto.name {model_name!r} is the served model's own; give Auto another name")
    return Deals(config.auto, dealer)


class GatewayApp(Starlette):
    """A Starlette app whose own endpoints bypass middleware and routing: each endpoint turns every error into a response itself."""

    def __init__(
        self,
        parts: Parts,
        pages: Sequence[BaseRoute] = (),
        background: BackgroundTask | None = None,
        audit: Audit = unaudited,
    ) -> None:
        self._parts = parts
        self._audit = KeyAudit(audit, parts.keys, parts.clock)
        self._background = background
        self._origins = Origins(checked=parts.keys.open, allowed=parts.config.allowed_hosts)
        self._intake = Intake(parts)
        self._judge = Judge(parts.config.judge, parts.metrics) if parts.config.judge.url else None
        self._choices = ConsentChoices(parts.log, self._forget)
        follow_ups = FollowUps(parts, self._intake, self._judge)
        self._calls = CallHandlers(parts, self._intake, follow_ups, self._choices)
        self._endpoints = self._all_endpoints(
            ServerInfo(parts), Feedback(parts, self._intake), Telemetry(parts, self._intake)
        )
        super().__init__(
            routes=[
                *(Route(path, endpoint, methods=[method]) for (method, path), endpoint in self._endpoints.items()),
                *(OriginCheckedRoute(route, self._origins) for route in pages),
            ],
            exception_handlers={HTTPException: partial(on_http_exception, self._origins)},
            lifespan=self._life,
        )
        self.state.metrics = parts.metrics
        self.state.waits = parts.people.waits

    def deal(self, dealing: Dealing | None) -> None:
        """Assign users to the arms of a trial from now on; None ends the trial."""
        self._parts.arms.deal(dealing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = strip_session(scope)
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
            if endpoint is None:
                scope = normalised_path(scope)
                endpoint = self._endpoints.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _all_endpoints(
        self, about: ServerInfo, feedback: Feedback, telemetry: Telemetry
    ) -> Mapping[tuple[str, str], Endpoint]:
        consent, dials = ConsentHandlers(self._parts, self._choices), PersonDialHandlers(self._parts, self._choices)
        handlers: dict[tuple[str, str], Handler] = {
            ("POST", COUNT_PATH): self._calls.count,
            ("POST", SCORE_PATH): self._calls.score,
            ("POST", "/v1/feedback"): feedback.take,
            ("POST", "/v1/logs"): telemetry.logs,
            ("POST", "/v1/traces"): telemetry.traces,
            ("GET", "/v1/consent"): consent.tell,
            ("PUT", "/v1/consent"): consent.record,
            ("GET", "/v1/adaptation"): dials.show,
            ("PUT", "/v1/adaptation"): dials.set,
            ("DELETE", "/v1/adaptation"): dials.reset,
            ("GET", "/v1/models"): about.models,
            ("GET", "/v1/models/{model:path}"): about.model,
            ("GET", "/health"): about.health,
            ("GET", "/metrics"): about.metrics_page,
        }
        errors = {("POST", route.path): route.errors for route in ROUTES} | {
            ("POST", COUNT_PATH): anthropic_reply.ERRORS
        }
        handlers |= {("POST", route.path): partial(self._calls.serve, route) for route in ROUTES}
        methods: dict[str, list[str]] = {}
        for method, path in handlers:
            methods.setdefault(path, []).append(method)
        handlers |= {("OPTIONS", path): partial(preflight, taken, self._origins) for path, taken in methods.items()}
        return {
            where: Endpoint(
                route=where[1],
                handle=handle,
                errors=errors.get(where, openai_reply.ERRORS),
                origins=self._origins,
                metrics=self._parts.metrics,
                config=self._parts.config,
                answered=self._audit.answered,
            )
            for where, handle in handlers.items()
        }

    @asynccontextmanager
    async def _life(self, app: Any) -> AsyncGenerator[None]:
        """Restore past sessions at startup and finish writes at shutdown. A log that hangs or cannot be read blocks neither."""
        longest_s = self._parts.config.store_timeout_s
        try:
            async with asyncio.timeout(longest_s):
                await self._restore()
        except TimeoutError:
            _LOG.warning(
                "The log's last turns could not all be read within %g s; some conversations start over.", longest_s
            )
        except OstinatoError as error:
            _LOG.error("The log's last turns cannot be read: %s; some conversations start over.", error)
        parts = self._parts
        services = [each for each in (self._judge, parts.deals, parts.adaptation, parts.styles) if each is not None]
        for each in services:
            await each.start()
        tasks = [asyncio.create_task(self._choices.follow())]
        if self._background is not None:
            tasks.append(asyncio.create_task(self._background()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if self._judge is not None:
                await self._judge.close()
            await self._calls.close()
            parts.thread.close()
            for each in (parts.deals, parts.adaptation, parts.styles, parts.reader, parts.tracing):
                if each is not None:
                    await each.close()

    def _forget(self, row: Forgotten) -> None:
        """Drop everything held in memory about a forgotten user."""
        self._calls.forget(row)
        self._intake.forget(row)

    async def _restore(self) -> None:
        log = self._parts.log
        await self._choices.refresh()
        after = max(0, await log.append() - self._parts.config.session_rebuild_rows)
        async for _, row in log.read(after, {Turn}):
            if isinstance(row, Turn):
                self._calls.restore(row)
                self._intake.turn(row)
