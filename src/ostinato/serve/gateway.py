"""The gateway: OpenAI-compatible HTTP in front of an engine, every call captured, feedback taken, arms dealt.

Data flow of a call: key -> body -> typed request -> arm -> prompt ids (reusing a stored turn's) -> engine -> turn in the log -> end of
the answer. The rest of this file is routes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ostinato.core.errors import BadRequest, NotFound, OstinatoError, Unauthorized, Unavailable
from ostinato.core.records import Arm, PolicyVersion, Turn
from ostinato.core.seams import Clock, Engine, Log, Renderer
from ostinato.serve.answer import Answer
from ostinato.serve.arms import ANONYMOUS, Arms, Assignment
from ostinato.serve.auth import Keyring, Principal
from ostinato.serve.body import read_json
from ostinato.serve.capture import Call, Capture, Writes
from ostinato.serve.config import ServeConfig
from ostinato.serve.dialects.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from ostinato.serve.dialects.openai_reply import Chat, Completion, Dialect, json_bytes
from ostinato.serve.endpoint import ClientGone, Endpoint, on_http_exception
from ostinato.serve.feedback import parse_feedback
from ostinato.serve.metrics import Metrics
from ostinato.serve.sessions import Prompt, Scope, Sessions

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_T = TypeVar("_T")


class ContextExceeded(BadRequest):
    """The prompt and the wanted answer do not fit into the model's context."""

    code = "context_length_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sender:
    """Who a model call is for, and where it goes."""

    scope: Scope
    assignment: Assignment
    slot: str
    episode: str | None


def create_app(
    *,
    engine: Engine,
    renderer: Renderer,
    log: Log,
    config: ServeConfig,
    clock: Clock,
    model_name: str,
    metrics: Metrics | None = None,
) -> Starlette:
    """The gateway as an ASGI app. `app.state.metrics` is where swaps are reported (`metrics.swapped`).

    Args:
        engine: makes tokens; started and stopped by the caller.
        renderer: messages <-> ids of the same model.
        log: where turns and signals go; opened and closed by the caller.
        config: limits, keys, arms.
        clock: Unix seconds.
        model_name: the name that clients send as `model`.
        metrics: where to count; a new `Metrics(engine)` if None.

    Raises:
        BadConfig: weak or repeated keys, shares above 1.
    """
    gateway = Gateway(
        engine=engine,
        renderer=renderer,
        log=log,
        config=config,
        clock=clock,
        model_name=model_name,
        metrics=metrics or Metrics(engine),
    )
    routes: list[tuple[str, str, Callable[[Request], Any]]] = [
        ("POST", "/v1/chat/completions", gateway.chat),
        ("POST", "/v1/completions", gateway.complete),
        ("GET", "/v1/models", gateway.models),
        ("GET", "/v1/models/{model:path}", gateway.model),
        ("POST", "/v1/feedback", gateway.feedback),
        ("GET", "/health", gateway.health),
        ("GET", "/metrics", gateway.numbers),
    ]
    app = Starlette(
        routes=[
            Route(path, Endpoint(path, handle, gateway.metrics), methods=[method]) for method, path, handle in routes
        ],
        exception_handlers={HTTPException: on_http_exception},
        lifespan=gateway.lifespan,
    )
    app.state.metrics = gateway.metrics
    return app


class Gateway:
    """The handlers of all routes. Built by `create_app`."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        log: Log,
        config: ServeConfig,
        clock: Clock,
        model_name: str,
        metrics: Metrics,
    ) -> None:
        self.metrics = metrics
        self._engine = engine
        self._renderer = renderer
        self._log = log
        self._config = config
        self._clock = clock
        self._model = model_name
        self._created = int(clock())
        self._context = min(renderer.context, engine.capabilities().context)
        self._keys = Keyring(config.api_keys, config.admin_key)
        self._arms = Arms(control=config.control_share, canary=config.canary_share, salt=config.arm_salt)
        self._sessions = Sessions(renderer, budget=config.session_tokens)
        # One thread for all rendering: a long prompt must not hold up streams, and `Sessions` has one owner.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._writes = Writes()
        self._inflight = 0

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None, None]:
        """Find past sessions again at the start; finish writes at the end."""
        newest = await self._log.append()
        after = max(0, newest - self._config.session_rebuild_rows)
        async for _, row in self._log.read(after, {Turn}):
            if isinstance(row, Turn):
                await self._rendering(self._sessions.restore, row)
        yield
        await self._writes.drain()
        self._thread.shutdown()

    # ------------------------------------------------------------ model calls

    async def chat(self, request: Request) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        who, body = await self._open(request)
        asked = parse_chat(body)
        sender = self._sender(request, who, asked, asked.user or asked.safety_identifier)
        prompt = await self._rendering(
            self._sessions.prompt, sender.scope, asked.messages, continue_final=asked.continue_final_message
        )
        call = self._call("chatcmpl", asked, sender, prompt, self._config.default_max_tokens)

        async def stored(turns: list[Turn]) -> None:
            for turn in turns:
                await self._rendering(self._sessions.remember, sender.scope, asked.messages, turn)

        return self._answer(call, asked, Chat, stored)

    async def complete(self, request: Request) -> ASGIApp:
        """`POST /v1/completions`."""
        who, body = await self._open(request)
        asked = parse_completion(body)
        sender = self._sender(request, who, asked, asked.user)
        text = asked.one_prompt()
        ids = text if isinstance(text, list) else await self._rendering(self._renderer.encode, text)
        if not ids:
            raise BadRequest("prompt is empty; send at least one token.", field="prompt")
        if min(ids) < 0 or max(ids) >= self._renderer.vocab_size:
            raise BadRequest(f"prompt holds a token id outside [0, {self._renderer.vocab_size}).", field="prompt")
        call = self._call("cmpl", asked, sender, Prompt(ids=tuple(ids)), _COMPLETION_TOKENS)

        async def stored(turns: list[Turn]) -> None:
            del turns  # a completion has no messages to be followed up

        return self._answer(call, asked, Completion, stored)

    def _sender(
        self, request: Request, who: Principal, asked: ChatRequest | CompletionRequest, user: str | None
    ) -> _Sender:
        if asked.model != self._model:
            raise NotFound(f"There is no model {asked.model!r}; this server has {self._model!r}.", field="model")
        user = user or _header(request, "X-Ostinato-User") or ANONYMOUS
        loaded = self._engine.slots()
        slot = _header(request, "X-Ostinato-Slot")
        if slot is not None:
            if not who.admin:
                raise Unauthorized(
                    "X-Ostinato-Slot needs the admin key; send it as X-Ostinato-Key or leave the header out."
                )
            if slot not in loaded:
                raise NotFound(
                    f"No weights are loaded in slot {slot!r}; loaded: {', '.join(sorted(loaded))}.", field="slot"
                )
            assignment = Assignment(arm=Arm.EVAL, propensity=1.0)
        else:
            assignment = self._arms.assign(user, loaded)
            slot = str(assignment.arm)
            if slot not in loaded:
                raise Unavailable("The model's weights are still being loaded; try again in a moment.")
        scope = Scope(tenant=who.tenant, user=user, arm=str(assignment.arm))
        return _Sender(scope=scope, assignment=assignment, slot=slot, episode=_header(request, "X-Ostinato-Episode"))

    def _call(
        self, kind: str, asked: ChatRequest | CompletionRequest, sender: _Sender, prompt: Prompt, default_tokens: int
    ) -> Call:
        id = f"{kind}-{uuid.uuid4().hex}"
        room = self._context - len(prompt.ids)
        wanted = asked.budget
        if room < 1 or (wanted is not None and wanted > room):
            raise ContextExceeded(
                f"The prompt has {len(prompt.ids)} tokens and {wanted or 1} are wanted for the answer; "
                f"this model's context holds {self._context}. Shorten the prompt or ask for less.",
                field="messages" if isinstance(asked, ChatRequest) else "prompt",
            )
        return Call(
            id=id,
            episode=prompt.episode or sender.episode or f"ep-{uuid.uuid4().hex}",
            parent=prompt.parent,
            user=sender.scope.user,
            tenant=sender.scope.tenant,
            arm=sender.assignment.arm,
            propensity=sender.assignment.propensity,
            slot=sender.slot,
            prompt_ids=prompt.ids,
            sampling=asked.sampling(wanted or min(default_tokens, room)),
            n=asked.n or 1,
            started_at=self._clock(),
        )

    def _answer(
        self, call: Call, asked: ChatRequest | CompletionRequest, dialect: type[Dialect], stored: Callable[..., Any]
    ) -> ASGIApp:
        shape = dialect(
            id=call.id,
            created=call.started_at,
            model=self._model,
            decode=self._renderer.decode if asked.wants_logprobs else None,
        )
        capture = Capture(
            call,
            log=self._log,
            clock=self._clock,
            writes=self._writes,
            observer=self.metrics,
            numerics=self._engine.numerics(),
        )
        answer = Answer(
            capture,
            engine=self._engine,
            dialect=shape,
            metrics=self.metrics,
            config=self._config,
            stored=stored,
            stream=bool(asked.stream),
            count_usage=asked.wants_usage,
        )
        return self._counted(answer)

    def _counted(self, answer: Answer) -> ASGIApp:
        if self._inflight >= self._config.max_inflight:
            raise Unavailable(
                f"{self._inflight} model calls are being served, the most allowed; try again in a moment."
            )

        async def run(scope: Any, receive: Any, send: Any) -> None:
            self._inflight += 1
            try:
                await answer(scope, receive, send)
            finally:
                self._inflight -= 1

        return run

    # ------------------------------------------------------------ everything else

    async def feedback(self, request: Request) -> Response:
        """`POST /v1/feedback`: durable when the 202 is sent."""
        who, body = await self._open(request)
        signals = parse_feedback(body, tenant=who.tenant, now=self._clock())
        try:
            await self._log.append(*signals)
        except OstinatoError:
            self.metrics.store_error()
            raise
        self.metrics.feedback(signals)
        if isinstance(body, list):
            return _json([{"id": event["id"], "status": "accepted"} for event in body], 202)
        return _json({"id": body["id"], "status": "accepted"}, 202)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        self._keys.identify(request.headers)
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        self._keys.identify(request.headers)
        name = request.path_params["model"]
        if name != self._model:
            raise NotFound(f"There is no model {name[:200]!r}; this server has {self._model!r}.", field="model")
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 when the live slot is loaded, else 503; open to all, says nothing about users."""
        slots = {name: {"number": policy.number, "hash": policy.hash} for name, policy in self._slots().items()}
        ready = str(Arm.LIVE) in slots
        body = {"status": "ready" if ready else "loading", "model": self._model, "slots": slots}
        return _json(body, 200 if ready else 503)

    async def numbers(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus; needs a key where the API does."""
        self._keys.identify(request.headers)
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _open(self, request: Request) -> tuple[Principal, Any]:
        """The sender and the JSON of a request; the key is checked before the body is read."""
        who = self._keys.identify(request.headers)
        config = self._config
        try:
            body = await read_json(
                request.stream(),
                request.headers,
                limit=config.max_body_bytes,
                depth=config.max_depth,
                timeout_s=config.body_timeout_s,
            )
        except ClientDisconnect:
            raise ClientGone from None
        return who, body

    async def _rendering(self, work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **kwargs))

    def _slots(self) -> dict[str, PolicyVersion]:
        return self._engine.slots()

    def _card(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "ostinato"}


def _header(request: Request, name: str) -> str | None:
    value = request.headers.get(name)
    if value is not None and not (0 < len(value) <= 256 and value.isprintable()):
        raise BadRequest(f"{name} must hold 1 to 256 printable characters.", field=name)
    return value


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")
