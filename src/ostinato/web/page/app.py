"""The page's routes. All access is authorised here, before a view is called.

Also the security headers, the CSRF check of forms, and the rate limit per tenant. An open page receives its changed parts as server-sent
events.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from ostinato.core.audit import Audit, fingerprint, unaudited
from ostinato.core.errors import NotFound, OstinatoError, Unauthorized, Unavailable
from ostinato.core.fair_share import Bucket, InTurn
from ostinato.core.seams import Clock
from ostinato.core.visitors import Visitor, Visitors
from ostinato.status.index_queries import Threads
from ostinato.status.run_facts import RunFacts
from ostinato.status.run_state import RunNow
from ostinato.status.worlds.run_worlds import RunWorlds
from ostinato.web.page.operator_actions import OperatorActions
from ostinato.web.page.query_params import form, own_path, root, words
from ostinato.web.page.templates import StaticFiles, Templates, is_known, when
from ostinato.web.page.views import OPEN_TO_TENANTS, Views

# ---------------------------------------------------------------- live updates


logger = logging.getLogger(__name__)

EVERY_S = 2.0
MOST_VIEWERS = 64
MOST_PER_TENANT = 16
"""Limit of one tenant's streams, so that no tenant takes all places."""
RESERVED_FOR_OPERATOR = 16
"""Places reserved for the operator, so that tenants together cannot lock the operator out."""
STREAM_HEADERS: Mapping[str, str] = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}

Parts = Callable[[], Awaitable[Mapping[str, str]]]
"""Renders a page's parts as {element id: content}."""


class Live:
    """The open event streams. `close` ends all of them, so that no viewer delays a shutdown."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closing = asyncio.Event()
        self._open: Counter[Visitor] = Counter()

    def close(self) -> None:
        """End all streams and refuse new ones."""
        self._closing.set()

    def take(self, visitor: Visitor) -> ViewerPlace:
        """Take a place for one stream. Raises Unavailable if none is free; the page is then updated only by a reload."""
        if self._closing.is_set() or self._full(visitor):
            raise Unavailable("Too many pages are open; this one does not update itself.")
        return ViewerPlace(self._open, visitor)

    def _full(self, visitor: Visitor) -> bool:
        crowded = self._open.total() >= MOST_VIEWERS
        if visitor.operator:
            return crowded
        others = sum(count for who, count in self._open.items() if not who.operator)
        of_one = visitor.tenant is not None and self._open[visitor] >= MOST_PER_TENANT
        return crowded or of_one or others >= MOST_VIEWERS - RESERVED_FOR_OPERATOR

    async def events(self, parts: Parts, allowed: Callable[[], bool] = lambda: True) -> AsyncIterator[str]:
        """Yield the changed parts and a heartbeat every `EVERY_S` seconds. Silence tells the browser that the gateway is gone.

        The stream ends once `allowed` returns False, since a cookie may expire while the page is open.
        """
        sent: dict[str, str] = {}
        while not self._closing.is_set() and allowed():
            try:
                fresh = await parts()
            except OstinatoError as error:  # retried; meanwhile the page shows its age
                logger.warning("the page could not be brought up to date: %s", error)
                yield ": not now\n\n"
            else:
                changed = {name: body for name, body in fresh.items() if sent.get(name) != body}
                if changed:
                    yield message(changed)
                sent.update(changed)
                yield f"event: beat\ndata: {self._clock():.0f}\n\n"
            await self._pause()

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._closing.wait(), EVERY_S)
        except TimeoutError:
            return


class ViewerPlace:
    """One of the places for streams in `Live`, taken on construction."""

    def __init__(self, open: Counter[Visitor], visitor: Visitor) -> None:
        self._open, self._visitor, self._held = open, visitor, True
        open[visitor] += 1

    def give_back(self) -> None:
        """Release the place. Idempotent."""
        if self._held:
            self._held = False
            self._open[self._visitor] -= 1


class EventStream(StreamingResponse):
    """A response with an event stream. It releases its place however the stream ends, even if the client leaves before the first byte."""

    def __init__(self, events: AsyncIterator[str], place: ViewerPlace, headers: Mapping[str, str]) -> None:
        super().__init__(events, 200, headers)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. No await lies between taking the place and this `try`, so a cancellation cannot leak the place."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._place.give_back()


def message(parts: Mapping[str, str]) -> str:
    """Return one event that replaces elements by id without losing the focus in them."""
    lines: list[str] = []
    for name, body in parts.items():
        text = f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">{body}</hx-partial>'
        lines += [f"data: {line}" for line in text.splitlines()]
    return "\n".join(lines) + "\n\n"


# ---------------------------------------------------------------- headers and origins


CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # with "no-referrer" browsers would send forms with the origin "null", as other sites can
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "private, no-store",
}
REVALIDATED: Mapping[str, str] = {
    **HEADERS,
    "cache-control": "private, no-cache",
    "vary": "cookie, x-ostinato-key, authorization, x-api-key",
}
"""Headers of pages that a browser may cache but must revalidate, so that they are not shown after a sign-out."""


class ForeignForm(OstinatoError):
    """A form was not sent from the page (CSRF)."""

    status = 403
    code = "foreign_form"


def check_form(headers: Mapping[str, str]) -> None:
    """Raise ForeignForm unless the headers (lower-case names) prove that this page sent the form.

    Without `Sec-Fetch-Site`, `Origin` must name this host.
    """
    site = headers.get("sec-fetch-site")
    if site is None:
        origin = urlsplit(headers.get("origin", ""))
        if origin.netloc and origin.netloc.lower() == headers.get("host", "").lower():
            return
    elif site == "same-origin":
        return
    raise ForeignForm("This form was not sent from this page: nothing was done. Open the page itself and press again.")


# ---------------------------------------------------------------- rate limits


MOST_CONCURRENT = 4
"""Limit of one tenant's concurrent page requests, waiting ones included."""
PAGES_PER_S, PAGES_AT_ONCE = 2.0, 60.0
"""Token bucket per tenant: pages per second, and the burst."""


class TooManyQuestions(OstinatoError):
    """A tenant has exceeded its rate limit. `retry_after_s`: seconds until a retry may succeed."""

    status = 429
    code = "too_many_questions"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PageAdmission:
    """Admission control: tenants' pages are rendered one at a time, round-robin by tenant. Visitors who see the whole run do not wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rates = dict[Visitor, Bucket]()
        self._asked: Counter[Visitor] = Counter()
        self._answering = False
        self._waiting: InTurn[Visitor, asyncio.Future[None]] = InTurn()
        self._streams: defaultdict[Visitor, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def page(self, visitor: Visitor) -> AsyncGenerator[None]:
        """Admit one page. Raises TooManyQuestions."""
        if visitor.sees_all:
            yield
            return
        if self._asked[visitor] >= MOST_CONCURRENT:
            raise TooManyQuestions(
                f"{MOST_CONCURRENT} pages are already being loaded with this key; load this one again once they have arrived."
            )
        self._charge(visitor)
        self._asked[visitor] += 1
        try:
            async with self._turn(visitor):
                yield
        finally:
            self._asked[visitor] -= 1

    @contextlib.asynccontextmanager
    async def stream(self, visitor: Visitor) -> AsyncGenerator[None]:
        """Admit one update of an open page. It waits for the same key's other updates instead of being refused."""
        if visitor.sees_all:
            yield
            return
        async with self._streams[visitor], self._turn(visitor):
            yield

    @contextlib.asynccontextmanager
    async def _turn(self, visitor: Visitor) -> AsyncGenerator[None]:
        """Wait for this visitor's turn, and keep it inside the block."""
        if self._answering:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.put(visitor, mine)
            try:
                await mine
            except asyncio.CancelledError:
                self._waiting.discard(visitor, mine)
                if not mine.cancelled():  # the turn had just begun
                    self._next()
                raise
        self._answering = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        """End a turn and begin the next."""
        self._answering = False
        while not self._answering and (turn := self._waiting.next()) is not None:
            self._answering = not turn.done()
            if self._answering:
                turn.set_result(None)

    def _charge(self, visitor: Visitor) -> None:
        now = self._clock()
        rate = self._rates.setdefault(visitor, Bucket(rate=PAGES_PER_S, size=PAGES_AT_ONCE, now=now))
        if wait_s := rate.take(1.0, now):
            raise TooManyQuestions(
                f"More than {PAGES_PER_S:g} pages a second were loaded with this key; load this one again in a moment.",
                wait_s,
            )


# ---------------------------------------------------------------- the page


COOKIE, SECURE_COOKIE = "ostinato", "__Host-ostinato"
_LONGEST_PROMPT = 8_000
Endpoint = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Request, Visitor], Awaitable[Response]]


class Forbidden(OstinatoError):
    """The visitor is signed in, but not allowed to do or see this."""

    status = 403
    code = "forbidden"


class Pages:
    """The page of one run: call `routes` for the gateway's router, `close` before the gateway's shutdown and `end` after it."""

    def __init__(
        self, facts: RunFacts, worlds: RunWorlds, acts: OperatorActions, clock: Clock, audit: Audit = unaudited
    ) -> None:
        self._threads = Threads()
        self._views = Views(facts, worlds, self._threads)
        self._acts = acts
        self._audit = audit
        self._files = StaticFiles()
        self._templates = Templates(self._files)
        self._live = Live(clock)
        self._admission = PageAdmission(clock)
        self._visitors: Visitors  # set by `routes`

    def close(self) -> None:
        """End all viewers' streams. Pages are still answered."""
        self._live.close()

    def end(self) -> None:
        """End the page's threads."""
        self._threads.close()

    def routes(self, visitors: Visitors) -> Sequence[BaseRoute]:
        """Return all routes under `/` except the gateway's own. Call it once."""
        self._visitors = visitors
        shown = [
            ("/", "now"),
            ("/releases", "releases"),
            ("/releases/{root}", "release"),
            ("/turns", "turns"),
            ("/turns/{id:path}", "turn"),
            ("/learning", "learning"),
            ("/monitors", "monitors"),
            ("/monitors/{name:path}", "alarm"),
            ("/weights", "weights"),
            ("/worlds", "worlds"),
            ("/worlds/rollouts", "rollouts"),
            ("/worlds/rollouts/{episode:path}", "rollout"),
            ("/worlds/tasks/{id:path}", "task"),
            ("/playground", "playground"),
        ]
        acts: list[tuple[str, str, Handler]] = [
            ("/releases/{root}/ship", "ship", self._decider(self._acts.ship, "Shipped")),
            ("/releases/{root}/approve", "approve", self._decider(self._acts.approve, "Approved")),
            ("/releases/{root}/refuse", "refuse", self._decider(self._acts.refuse, "Refused")),
            ("/rollback", "roll back", self._roll_back),
            ("/monitors/{name:path}/accept", "accept alarm", self._accept),
            ("/playground", "ask in the playground", self._ask),
            ("/playground/feedback", "rate in the playground", self._rate),
        ]
        return [
            *(Route(path, self._for_visitors(self._page_handler(name), name), methods=["GET"]) for path, name in shown),
            *(Route(path, self._for_operators(act, name), methods=["POST"]) for path, name, act in acts),
            Route("/events", self._for_visitors(self._events, "turns"), methods=["GET"]),
            Route("/sign-in", self._for_anybody(self._sign_in_form), methods=["GET"]),
            Route("/sign-in", self._for_anybody(self._sign_in), methods=["POST"]),
            Route("/sign-out", self._for_anybody(self._sign_out), methods=["POST"]),
            Route("/static/{digest}/{name:path}", self._files.serve, methods=["GET"]),
            _UnknownPath("/{path:path}", self._for_visitors(self._not_found, "turns"), methods=["GET"]),
        ]

    # ------------------------------------------------------------ access

    def _for_visitors(self, handle: Handler, name: str) -> Endpoint:
        async def answer(request: Request) -> Response:
            visitor = self._visitor(request)
            if visitor is None:
                reply = RedirectResponse("/sign-in", 303, headers=HEADERS)
                self._record_nobody(request, reply)
                return reply
            if not visitor.sees_all and name not in OPEN_TO_TENANTS:
                if name == "now":
                    return RedirectResponse("/turns", 303, headers=HEADERS)
                return await self._error_page(
                    Forbidden("This page is for the operator: it shows all tenants together."), visitor
                )
            return await self._guarded(lambda: handle(request, visitor), request, visitor)

        return answer

    def _for_anybody(self, handle: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            return await self._guarded(lambda: handle(request), request, self._visitor(request))

        return answer

    def _for_operators(self, act: Handler, name: str) -> Endpoint:
        async def answer(request: Request) -> Response:
            visitor = self._visitor(request)
            reply = await admitted(request, visitor)
            if visitor is None:
                self._record_nobody(request, reply)
            else:
                self._record(request, name, reply, visitor)
            return reply

        async def admitted(request: Request, visitor: Visitor | None) -> Response:
            try:
                check_form(request.headers)
                if visitor is None:
                    raise Unauthorized("Sign in with a key first.")
                if not visitor.operator:
                    raise Forbidden("Only the operator may do this: sign in with the admin key.")
            except OstinatoError as error:
                return await self._error_page(error, visitor)
            return await self._guarded(lambda: act(request, visitor), request, visitor)

        return answer

    def _record(self, request: Request, act: str, reply: Response, visitor: Visitor) -> None:
        self._audit(
            act,
            result="done" if reply.status_code < 400 else f"refused ({reply.status_code})",
            key=visitor.key,
            tenant=visitor.tenant or "",
            address=_address(request),
            stranger=not visitor.operator,
            **{name: str(value) for name, value in request.path_params.items()},
        )

    def _record_wrong_key(self, request: Request, reply: Response, key: str = "") -> None:
        """Record a wrong key in the audit trail. `key`: its fingerprint; "" if it was typed into the form: it may be another secret."""
        told = "refused" if reply.status_code < 400 else f"refused ({reply.status_code})"
        self._audit("wrong key", result=told, key=key, tenant="", address=_address(request), stranger=True)

    def _record_nobody(self, request: Request, reply: Response) -> None:
        """Record a request without a visitor only if it carries a wrong key: others would let anybody flood the audit trail."""
        key = self._visitors.wrong_key(dict(request.scope["headers"]))
        if key is not None:
            self._record_wrong_key(request, reply, fingerprint(key))

    def _visitor(self, request: Request) -> Visitor | None:
        return self._visitors.visitor(dict(request.scope["headers"]))

    async def _guarded(
        self, handle: Callable[[], Awaitable[Response]], request: Request, visitor: Visitor | None
    ) -> Response:
        try:
            return await handle()
        except OstinatoError as error:
            return await self._error_page(error, visitor)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            logger.exception("%r failed", request.url.path)
            told = OstinatoError(f"Internal error ({type(error).__name__}); see the server's log.")
            return await self._error_page(told, visitor)

    async def _error_page(self, error: OstinatoError, visitor: Visitor | None) -> Response:
        frame = _frame(visitor)
        if visitor is not None:
            try:
                frame = await self._views.frame(visitor)
            except OstinatoError as another:
                logger.warning("the page's frame: %s", another)
        facts = {**frame, "tab": "", "title": "That did not work", "message": str(error), "status": error.status}
        reply = self._html("failed.html", facts, error.status)
        if isinstance(error, TooManyQuestions):
            reply.headers["retry-after"] = str(math.ceil(error.retry_after_s))
        return reply

    def _html(self, template: str, facts: Mapping[str, Any], status: int = 200) -> Response:
        body = self._templates.render(template, facts)
        return Response(body, status, HEADERS, media_type="text/html")

    # ------------------------------------------------------------ pages

    def _page_handler(self, name: str) -> Handler:
        template = "page.html" if name in PLAIN_PAGES else f"{name}.html"

        async def show(request: Request, visitor: Visitor) -> Response:
            fields = _fields(request)
            async with self._admission.page(visitor):
                facts = {**await self._views.frame(visitor), **await self._views.by_name[name](visitor, fields)}
                facts |= {"tab": name, "events": _events_of(name, request)}
                body = await self._threads.ask(lambda: self._templates.render(template, facts).encode())
            if name not in CACHEABLE_PAGES:
                return Response(body, 200, HEADERS, media_type="text/html")
            return _unless_known(request, body, facts["run"])

        return show

    async def _events(self, request: Request, visitor: Visitor) -> Response:
        """Answer with an open page's event stream. Tenants see only their own turns, as on the page itself."""
        name = request.query_params.get("page", "")
        if name not in LIVE_PAGES or not (visitor.sees_all or name in OPEN_TO_TENANTS):
            raise Forbidden("This page has no events.")
        fields = _fields(request)

        async def parts() -> Mapping[str, str]:
            async with self._admission.stream(visitor):
                facts = {**await self._views.frame(visitor), **await self._views.by_name[name](visitor, fields)}
                names = {"strip": "_strip.html", "part": f"_{name}.html"}
                if facts["run"] is None:
                    del names["strip"]
                facts["tab"] = name
                return await self._threads.ask(
                    lambda: {part: self._templates.render(template, facts) for part, template in names.items()}
                )

        def allowed() -> bool:
            return self._visitor(request) == visitor

        place = self._live.take(visitor)
        return EventStream(self._live.events(parts, allowed), place, {**HEADERS, **STREAM_HEADERS})

    # ------------------------------------------------------------ an operator's actions

    def _decider(self, act: Callable[[str, str, str, str], Awaitable[str]], title: str) -> Handler:
        async def decide(request: Request, visitor: Visitor) -> Response:
            said = await act(root(request.path_params["root"]), *_decision(await form(request)))
            return await self._message_page(visitor, title, said)

        return decide

    async def _roll_back(self, request: Request, visitor: Visitor) -> Response:
        said = await self._acts.roll_back(*_decision(await form(request)))
        return await self._message_page(visitor, "Rolled back", said)

    async def _accept(self, request: Request, visitor: Visitor) -> Response:
        fields, name = await form(request), str(request.path_params["name"])
        raised, reason = words(fields, "alarm", needed=True), words(fields, "reason", needed=True)
        said = await self._acts.accept(name, raised, reason, words(fields, "actor", 80, needed=True))
        return await self._message_page(visitor, "Accepted", said)

    async def _not_found(self, request: Request, visitor: Visitor) -> Response:
        raise NotFound(f"There is no page {request.url.path[:200]}.")

    async def _message_page(self, visitor: Visitor, title: str, said: str) -> Response:
        facts = {**await self._views.frame(visitor), "tab": "releases", "title": title, "message": said, "status": 200}
        return self._html("failed.html", facts)

    async def _ask(self, request: Request, visitor: Visitor) -> Response:
        prompt = words(await form(request), "prompt", _LONGEST_PROMPT, needed=True)
        facts = {**await self._views.frame(visitor), **await self._views.playground(visitor, {})}
        answers = await self._acts.ask([{"role": "user", "content": prompt}], facts["arms"])
        shown = {**facts, "tab": "playground", "prompt": prompt, "answers": answers, "events": None}
        return self._html("playground.html", shown)

    async def _rate(self, request: Request, visitor: Visitor) -> Response:
        fields = await form(request)
        turn, name = words(fields, "turn", needed=True), words(fields, "name", needed=True)
        status = await self._acts.rate(turn, name, words(fields, "correction", _LONGEST_PROMPT))
        return await self._message_page(visitor, "Feedback sent", f"{name} about {turn}: {status}")

    # ------------------------------------------------------------ keys

    async def _sign_in_form(self, request: Request) -> Response:
        back = own_path(request.headers.get("referer", ""), request.url.netloc)
        facts = {**_frame(self._visitor(request)), "tab": "", "wrong": False, "back": back}
        return self._html("sign_in.html", facts)

    async def _sign_in(self, request: Request) -> Response:
        check_form(request.headers)
        fields = await form(request)
        cookie = self._visitors.cookie(words(fields, "key"))
        back = own_path(words(fields, "back"))
        if cookie is None:
            refused = self._html("sign_in.html", {**_frame(None), "tab": "", "wrong": True, "back": back}, 401)
            self._record_wrong_key(request, refused)
            return refused
        reply = RedirectResponse(back, 303, headers=HEADERS)
        visitor = self._visitors.visitor({b"x-ostinato-key": words(fields, "key").encode()})
        if visitor is not None:
            self._record(request, "sign in", reply, visitor)
        name, lasts, secure = self._cookie_name(request), self._visitors.cookie_s, self._is_secure(request)
        reply.set_cookie(name, cookie, max_age=lasts, httponly=True, samesite="strict", secure=secure, path="/")
        return reply

    async def _sign_out(self, request: Request) -> Response:
        check_form(request.headers)
        self._visitors.leave(dict(request.scope["headers"]))
        reply = RedirectResponse("/", 303, headers=HEADERS)
        secure = self._is_secure(request)
        for name in {COOKIE, self._cookie_name(request)}:  # the insecure one may date from before the proxy used HTTPS
            reply.delete_cookie(name, path="/", httponly=True, samesite="strict", secure=secure)
        return reply

    def _is_secure(self, request: Request) -> bool:
        return self._visitors.secure or request.headers.get("x-forwarded-proto") == "https"

    def _cookie_name(self, request: Request) -> str:
        return SECURE_COOKIE if self._is_secure(request) else COOKIE


class _UnknownPath(Route):
    """The route of unknown paths for browsers. Programs get the gateway's own 404, which lists the existing paths."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        accepted = next((value for name, value in scope.get("headers", ()) if name == b"accept"), b"")
        return super().matches(scope) if b"text/html" in accepted else (Match.NONE, {})


PLAIN_PAGES = frozenset({"now", "releases", "learning", "monitors", "weights", "worlds"})
"""Pages with a heading and one part, which their events update."""
LIVE_PAGES = PLAIN_PAGES | {"turns"}
CACHEABLE_PAGES = PLAIN_PAGES | {"release"}
"""Pages that a browser may cache, since they contain no user's text."""


def _unless_known(request: Request, body: bytes, run: RunNow | None) -> Response:
    """Return the page, or 304 if the browser has it. The ETag ignores the time in the page's status strip."""
    clock = b"" if run is None else str(when(run.at)).encode()
    content = body.replace(clock, b"", 1) if clock else body
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    if is_known(request, tag):
        return Response(status_code=304, headers={**REVALIDATED, "etag": tag})
    return Response(body, 200, {**REVALIDATED, "etag": tag}, media_type="text/html")


def _frame(visitor: Visitor | None) -> Mapping[str, Any]:
    """Return the frame of a page that shows nothing of the run."""
    return {"visitor": visitor, "run": None, "tabs": (), "state": None}


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _fields(request: Request) -> Mapping[str, str]:
    return {**request.query_params, **{name: str(value) for name, value in request.path_params.items()}}


def _events_of(name: str, request: Request) -> str | None:
    """Return the URL of a page's events; None for pages that do not change: one turn, one release, older rows."""
    if name not in LIVE_PAGES or {"before", "after"} & request.query_params.keys():
        return None
    return f"/events?page={name}" + (f"&{request.url.query}" if request.url.query else "")


def _decision(fields: Mapping[str, str]) -> tuple[str, str, str]:
    """Return a decision form's fields: the version that was live on the page, the reason and the actor. The ledger keeps the last two."""
    expected, reason = words(fields, "expected_live", needed=True), words(fields, "reason", needed=True)
    return expected, reason, words(fields, "actor", 80, needed=True)
