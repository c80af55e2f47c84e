"""The server for remote rollout workers (the door), on the trainer's side: the few requests that a worker may make under the name in its
certificate.

Data flow: worker --mutual TLS--> door --the run's key--> gateway. The outcomes of a worker's turns are read from the log. Workers are not
trusted: each may report rewards only for its own rollouts, and each reward once. All names that a worker sends are prefixed with its own
name, so that it cannot use another worker's names. Each stage of a connection (TCP, TLS handshake, admission) has its own limit, and the
handshake has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
import ssl
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from ostinato.core.errors import BadRequest, OstinatoError, TooLarge, Unauthorized
from ostinato.core.json_shape import LONG_BYTES, check_json
from ostinato.core.records import Arm, Batch, Holdback, PolicyVersion, Purpose, Row, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.core.verdicts import CLOSED, FAILED, GRADED, MEASURED, TORN
from ostinato.worlds.harness.gateway import LEFT, PURPOSE, WorldGateway
from ostinato.worlds.harness.relay import COUNTING, DIALECTS, pass_on, passed_headers, ruled_request
from ostinato.worlds.rollout.config import DoorConfig
from ostinato.worlds.rollout.groups import MOST_EVENTS
from ostinato.worlds.rollout.mutual_tls import RefusedSerials, common_name, serial_of

# ---------------------------------------------------------------- what a worker may send


_MOST_TOKENS = 10_000_000  # of an answer: the gateway's own bound
_PREFIXED = ("X-Ostinato-Episode", "X-Ostinato-Group", "Idempotency-Key")
_NAME_CHARS = 300
_VERDICTS = {GRADED: (0.0, 1.0), FAILED: (1.0, 1.0), TORN: (1.0, 1.0), MEASURED: (1.0, 1.0), CLOSED: (0.0, 128.0)}


def call_headers(worker: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a call to the gateway: the slot for worlds, and names prefixed with the worker's. Raises BadRequest."""
    sent = {**passed_headers(headers), "X-Ostinato-Slot": Arm.WORLD.value}
    for name in (*_PREFIXED, "X-Ostinato-Harness", LEFT):
        value = headers.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isprintable() and 0 < len(value) <= _NAME_CHARS):
            raise BadRequest(f"{name} must hold 1 to {_NAME_CHARS} printable ASCII characters", field=name)
        sent[name] = f"{worker}/{value}" if name in _PREFIXED else value
    if headers.get(PURPOSE) == Purpose.COMPACTION:  # no other purpose, so that a worker cannot have turns held back
        sent[PURPOSE] = Purpose.COMPACTION.value
    if "X-Ostinato-Episode" not in sent:
        raise BadRequest(
            "X-Ostinato-Episode is missing: a rollout's calls name their episode", field="X-Ostinato-Episode"
        )
    return sent


def call_body(worker: str, path: str, body: Any, *, model: str, temperature: float) -> dict[str, Any]:
    """Return the body of a call to the gateway: one answer of the run's model, with the run's sampling settings. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if body.get("previous_response_id") is not None:
        raise BadRequest(
            "previous_response_id is not supported for remote workers; send the whole input",
            field="previous_response_id",
        )
    if path == COUNTING:
        return {**body, "model": model}
    return ruled_request(
        DIALECTS[path], body, model=model, temperature=temperature, tokens=_MOST_TOKENS, user=f"world/{worker}"
    )


def targets(body: Any) -> list[str]:
    """Return the turns that events are about. Raises BadRequest if the body is not a list of events."""
    if not isinstance(body, list) or not 0 < len(body) <= MOST_EVENTS:
        raise BadRequest(f"send a list of 1 to {MOST_EVENTS} events")
    turns = [event.get("target") if isinstance(event, dict) else None for event in body]
    if not all(isinstance(turn, str) and 0 < len(turn) <= 256 for turn in turns):
        raise BadRequest("each event must name a turn as its target", field="target")
    return [str(turn) for turn in turns]


def own_verdicts(
    body: list[dict[str, Any]], groups: Mapping[str, str | None], episode_of: Callable[[str], str | None]
) -> list[dict[str, Any]]:
    """Validate a worker's events, and return those for the gateway.

    Each gets an id derived from its name and subject, so that no worker can use another's ids. The id of a non-zero grade is derived from
    its rollout: the log stores each id once, so it holds at most one such grade per rollout, even after a restart of the door.

    `groups`: the worker's own turns among the targets, each with its group; `episode_of`: returns the episode of one of them.

    Raises:
        Unauthorized: a turn is not the worker's, or an event is not a verdict.
        BadRequest: a value is outside the verdict's range, or a turn has no group to close.
    """
    events: list[dict[str, Any]] = []
    for event in body:
        name, turn = event.get("name"), event["target"]
        if not isinstance(name, str) or name not in _VERDICTS:
            raise Unauthorized(
                f"{str(name)[:80]!r} is no verdict; a remote worker may only send {', '.join(sorted(_VERDICTS))}"
            )
        if turn not in groups:
            raise Unauthorized(f"turn {turn!r} does not belong to this worker")
        value, (least, most) = event.get("value"), _VERDICTS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise BadRequest(f"the value of {name} must lie between {least:g} and {most:g}", field="value")
        subject = turn if name != CLOSED else groups[turn]
        if subject is None:
            raise BadRequest(f"turn {turn!r} belongs to no group that could be closed", field="target")
        if name == GRADED and value:
            subject = hashlib.sha256((episode_of(turn) or turn).encode()).hexdigest()[:40]
        events.append(
            {"id": f"{name}:{subject}", "target": turn, "name": name, "value": float(value), "source": "code"}
        )
    return events


# ---------------------------------------------------------------- the owners of turns


_CACHED_TURNS = 200_000
_PAGE_ROWS = 500


class OwnTurns:
    """Looks up in the run's log which turns are a worker's own, and what became of them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._cache: OrderedDict[str, tuple[Arm, str, str | None]] = OrderedDict()  # turn -> arm, episode, group

    async def groups(self, worker: str, turns: Iterable[str]) -> dict[str, str | None]:
        """Return the worker's own turns among `turns`, each with its group's name in the log. Raises Unavailable."""
        asked = list(dict.fromkeys(turns))
        # copied, because entries may be evicted during the lookup
        known = {turn: self._cache[turn] for turn in asked if turn in self._cache}
        unknown = [turn for turn in asked if turn not in known]
        for turn in await self._log.find(Turn, [(turn,) for turn in unknown]) if unknown else ():
            known[turn.id] = (turn.arm, turn.episode, turn.group)
        self._cache |= known
        own = dict[str, str | None]()
        for turn in asked:
            arm, episode, group = known.get(turn, (None, "", None))
            if arm is Arm.WORLD and episode.startswith(f"{worker}/"):
                own[turn] = group
        while len(self._cache) > _CACHED_TURNS:
            self._cache.popitem(last=False)
        return own

    def episode(self, turn: str) -> str | None:
        """Return the episode of a turn that `groups` looked up recently, or None."""
        known = self._cache.get(turn)
        return None if known is None else known[1]

    async def end(self) -> Cursor:
        """Return the cursor of the log's current end. Raises Unavailable."""
        return await self._log.append()

    async def outcomes(self, worker: str, after: Cursor) -> dict[str, Any]:
        """Return one page of the outcomes of the worker's turns, from the log's rows after a cursor. Raises Unavailable.

        `taken`: turns that the trainer has taken; `held`: turns that were held back, with the reason; `cursor`: where to continue; `step`:
        the highest step in these rows.
        """
        cursor, step, seen = after, 0, 0
        taken, held = list[str](), list[tuple[str, str]]()
        async for place, row in self._log.read(after, {Batch, Holdback}):
            cursor, seen = place, seen + 1
            if isinstance(row, Batch):
                step = max(step, row.step)
                taken += row.turns
            elif isinstance(row, Holdback):
                held.append((row.turn, row.reason))
            if seen >= _PAGE_ROWS:
                break
        own = await self.groups(worker, [*taken, *(turn for turn, _ in held)])
        return {
            "cursor": cursor,
            "step": step,
            "taken": [turn for turn in taken if turn in own],
            "held": [[turn, reason] for turn, reason in held if turn in own],
        }


# ---------------------------------------------------------------- incoming connections


logger = logging.getLogger(__name__)

HANDSHAKES = 128
"""Most concurrent handshakes. One more aborts the oldest: an honest handshake takes milliseconds, so the oldest is likely a stalled one."""
HANDSHAKE_S = 10.0
CONNECTIONS = 1024

Certificate = Mapping[str, Any] | None


class Arrivals:
    """The protocol factory of the TCP listener: performs the TLS handshake, limits connections, and hands admitted ones to the HTTP server.

    `name_of` gives the name under which a certificate's connections are counted, at most `per_name` at once, or None to refuse them.
    """

    def __init__(
        self,
        server: web.Server,
        context: ssl.SSLContext,
        name_of: Callable[[Certificate], str | None],
        *,
        per_name: int,
    ) -> None:
        self._server, self._context, self._name_of, self._per_name = server, context, name_of, per_name
        self._handshakes: dict[asyncio.Transport, asyncio.Task[None]] = {}  # oldest first
        self._names: dict[object, str] = {}  # by connection of the server, open or closed since the last admission

    def __call__(self) -> asyncio.Protocol:
        return _Plain(self)

    async def close(self) -> None:
        """Abort the handshakes in progress."""
        for transport, task in list(self._handshakes.items()):
            transport.abort()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def begin(self, transport: asyncio.Transport) -> None:
        """Start the TLS handshake of a new TCP connection."""
        if len(self._handshakes) >= HANDSHAKES:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]  # now, because many more connections may arrive before its task ends
            oldest.abort()
        self._handshakes[transport] = asyncio.get_running_loop().create_task(self._shake(transport))

    async def _shake(self, transport: asyncio.Transport) -> None:
        guest = _Guest()
        try:
            tls = await asyncio.get_running_loop().start_tls(
                transport, guest, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:  # includes TLS errors and timeouts
            return
        finally:
            self._handshakes.pop(transport, None)
        if tls is not None and not tls.is_closing():
            self._admit(tls, guest)

    def _admit(self, tls: asyncio.Transport, guest: _Guest) -> None:
        """Hand a connection to the HTTP server, or close it if it is refused or over a limit."""
        name = self._name_of(tls.get_extra_info("peercert"))
        self._names = {each: self._names[each] for each in self._server.connections}
        total, own = len(self._names), Counter(self._names.values())[name or ""]
        if name is None or total >= CONNECTIONS or own >= self._per_name:
            if name is not None:
                logger.info("worker %r: %d connections are open, %d of its own; one more is closed", name, total, own)
            tls.close()
            return
        handler = self._server()
        self._names[handler] = name
        tls.set_protocol(handler)
        handler.connection_made(tls)
        for part in guest.early:
            handler.data_received(part)
        if guest.ended:
            handler.eof_received()


class _Plain(asyncio.Protocol):
    """The protocol of a connection before its TLS handshake."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._arrivals.begin(transport)


class _Guest(asyncio.Protocol):
    """The protocol of a connection between its handshake and its admission, which follows at once: buffers what arrives meanwhile."""

    def __init__(self) -> None:
        self.early: list[bytes] = []
        self.ended = False

    def data_received(self, data: bytes) -> None:
        self.early.append(data)

    def eof_received(self) -> None:
        self.ended = True


# ---------------------------------------------------------------- the door


_T = TypeVar("_T")
_Input = TypeVar("_Input")

OUTCOMES = "/v1/worlds/outcomes"
_REMEMBERED_GRADES = 100_000
_MOST_MEMBERS, _COUNTED_GROUPS = 512, 2_000  # rollouts per group; groups whose members are counted
_BODY_S = 30.0
_DEPTH, _VALUES = 64, 100_000  # limits on a body's JSON, the gateway's defaults
_FORWARDED = (
    "Content-Type",
    "request-id",
    "x-request-id",
    "x-ostinato-turn",
    "x-ostinato-purpose",
    "idempotent-replayed",
)


class WorkerBusy(OstinatoError):
    """A worker has too many concurrent requests."""

    status = 429
    code = "too_many_requests"


class NoSuchPath(OstinatoError):
    """The path is not served to workers."""

    status = 404
    code = "not_found"


class Door:
    """The server for remote workers. An async context manager that serves while it is entered.

    `gateway` receives the calls, with the run's own key; `listener` is a bound socket; `context` comes from `door_context`. Raises
    BadConfig if the file of refused certificates cannot be used.
    """

    def __init__(
        self,
        gateway: WorldGateway,
        turns: OwnTurns,
        listener: socket.socket,
        context: ssl.SSLContext,
        config: DoorConfig,
    ) -> None:
        self._gateway, self._turns = gateway, turns
        self._listener, self._context = listener, context
        self._config, self._refused = config, RefusedSerials(config.refused)
        self._open = Counter[str]()
        self._members: OrderedDict[str, set[int]] = OrderedDict()  # group -> hashes of its episodes' names
        self._graded: OrderedDict[str, str] = OrderedDict()  # episode -> its turn with a non-zero grade
        self._feedback_locks: dict[str, asyncio.Lock] = {}
        self._cleanup = AsyncExitStack()

    async def __aenter__(self) -> Door:
        server = web.Server(self._handle, access_log=None)
        arrivals = Arrivals(server, self._context, self._connection_name, per_name=self._config.connections)
        listening = await asyncio.get_running_loop().create_server(arrivals, sock=self._listener)
        watching = asyncio.create_task(self._refused.watch())
        self._cleanup.callback(watching.cancel)
        self._cleanup.push_async_callback(server.shutdown, 1.0)
        self._cleanup.push_async_callback(arrivals.close)
        self._cleanup.callback(listening.close)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._cleanup.aclose()

    def _connection_name(self, certificate: Certificate) -> str | None:
        """Return the name under which a connection is counted, or None to close it. A name that may not connect still gets a connection, so
        that its requests get an error that says so.
        """
        if (serial := serial_of(certificate)) in self._refused:
            logger.warning(
                "the certificate %s of %r is refused (worlds.door.refused)", serial, common_name(certificate)
            )
            return None
        return common_name(certificate) or ""

    # ------------------------------------------------------------ one request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        worker = ""
        try:
            worker = self._worker(request)
            if self._open[worker] >= self._config.calls:
                raise WorkerBusy(f"more than {self._config.calls} requests at once (worlds.door.calls)")
            self._open[worker] += 1
            try:
                return await self._answer(worker, request)
            finally:
                self._open[worker] -= 1
        except OstinatoError as error:
            logger.info("worker %r: %s %r: %s", worker, request.method, request.path[:100], error)
            return web.json_response({"error": {"message": str(error), "code": error.code}}, status=error.status)
        except (aiohttp.ClientError, web.RequestPayloadError, ConnectionError, TimeoutError):
            return web.json_response({"error": {"message": "the connection was lost", "code": "gone"}}, status=400)

    def _worker(self, request: web.BaseRequest) -> str:
        """Return the worker's name from its certificate. Raises Unauthorized."""
        certificate = None if request.transport is None else request.transport.get_extra_info("peercert")
        name = common_name(certificate)
        if serial_of(certificate) in self._refused:  # revoked after the connection was made
            raise Unauthorized(f"the certificate of {name!r} is refused; see worlds.door.refused")
        if name is None or (self._config.names and name not in self._config.names):
            raise Unauthorized(f"the worker {name!r} may not connect; see worlds.door.names")
        return name

    async def _answer(self, worker: str, request: web.BaseRequest) -> web.StreamResponse:
        where = (request.method, request.path)
        if where == ("GET", "/health"):
            return web.json_response(await self._health())
        if where == ("GET", OUTCOMES):
            return web.json_response(await self._outcomes(worker, request.query.get("after", "")))
        if where == ("POST", "/v1/feedback"):
            return web.json_response(await self._feedback(worker, await self._body(request)), status=202)
        if request.method == "POST" and request.path in DIALECTS:
            return await self._call(worker, request)
        raise NoSuchPath(f"there is nothing at {request.path[:200]!r} for workers")

    async def _body(self, request: web.BaseRequest) -> Any:
        data = bytearray()
        async with asyncio.timeout(_BODY_S):
            async for part in request.content.iter_any():
                data += part
                if len(data) > (most := self._config.body_bytes):
                    raise TooLarge(f"a request may have at most {most} bytes (worlds.door.body_bytes)")
        return await _off_loop(len(data), _parsed, bytes(data))

    async def _health(self) -> dict[str, Any]:
        health = await self._gateway.call("GET", "/health")
        slots = {name: told for name, told in health.get("slots", {}).items() if name == Arm.WORLD.value}
        return {"model": health.get("model", ""), "slots": slots}

    async def _outcomes(self, worker: str, after: str) -> dict[str, Any]:
        if after == "end":
            return {"cursor": await self._turns.end(), "step": 0, "taken": [], "held": []}
        if not after.isdecimal() or len(after) > 18:
            raise BadRequest("after must be a cursor from an earlier response, or 'end'", field="after")
        return await self._turns.outcomes(worker, int(after))

    async def _feedback(self, worker: str, body: Any) -> Any:
        async with self._feedback_locks.setdefault(worker, asyncio.Lock()):  # one at a time, in order of arrival
            own = await self._turns.groups(worker, targets(body))
            verdicts = own_verdicts(body, own, self._turns.episode)
            self._grade_once(verdicts)
            return await self._gateway.call("POST", "/v1/feedback", verdicts)

    def _grade_once(self, verdicts: Sequence[dict[str, Any]]) -> None:
        """Raise BadRequest for a non-zero grade at a second turn of a rollout, because the values of a rollout's turns are summed.

        Grades from before this door started are not remembered here, but the log stores no second verdict with the same id.
        """
        for verdict in verdicts:
            if verdict["name"] != GRADED or not verdict["value"]:
                continue
            turn = verdict["target"]
            episode = self._turns.episode(turn) or turn
            if self._graded.setdefault(episode, turn) != turn:
                raise BadRequest(
                    f"rollout {episode!r} was graded at another turn; grade its last turn only", field="value"
                )
            self._graded.move_to_end(episode)
            if len(self._graded) > _REMEMBERED_GRADES:
                self._graded.popitem(last=False)

    def _count_member(self, group: str, episode: int) -> None:
        """Count an episode as a member of its group. Raises BadRequest if the group would be too large for one optimizer step."""
        if not group:
            return
        members = self._members.setdefault(group, set())
        if episode not in members and len(members) >= _MOST_MEMBERS:
            raise BadRequest(
                f"group {group!r} already has {_MOST_MEMBERS} rollouts, torn ones included; begin another",
                field="X-Ostinato-Group",
            )
        members.add(episode)
        self._members.move_to_end(group)
        if len(self._members) > _COUNTED_GROUPS:
            self._members.popitem(last=False)

    async def _call(self, worker: str, request: web.BaseRequest) -> web.StreamResponse:
        headers = call_headers(worker, request.headers)
        named, temperature = await self._gateway.named(), self._gateway.temperature
        asked = call_body(worker, request.path, await self._body(request), model=named, temperature=temperature)
        self._count_member(headers.get("X-Ostinato-Group", ""), hash(headers["X-Ostinato-Episode"]))
        body = await _off_loop(request.content.total_bytes, msgspec.json.encode, asked)
        async with self._gateway.streamed(request.path, body, headers) as answer:
            return await pass_on(request, answer, _FORWARDED)


def _parsed(data: bytes) -> Any:
    """Parse a body. Raises BadRequest, TooLarge."""
    check_json(data, depth=_DEPTH, values=_VALUES)
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"the body must be JSON: {error}") from None


async def _off_loop(size: int, work: Callable[[_Input], _T], value: _Input) -> _T:
    """Return `work(value)`, computed on a thread if the body's size in bytes is so large that it would block the event loop."""
    return work(value) if size <= LONG_BYTES else await asyncio.to_thread(work, value)


# ---------------------------------------------------------------- the worker's side


_UNKNOWN = PolicyVersion(number=0, hash="")


class FarOutcomes:
    """Implements `OutcomeRows` on a remote worker, through the door. Its batches hold only the step and this worker's own turns."""

    def __init__(self, gateway: WorldGateway) -> None:
        self._gateway = gateway

    async def end(self) -> Cursor:
        """Return the cursor of the log's current end. Raises Unavailable."""
        return int((await self._gateway.call("GET", f"{OUTCOMES}?after=end"))["cursor"])

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """Yield the rows after a cursor, page by page. Only the last row of a page moves the cursor. Raises Unavailable."""
        while True:
            page = await self._gateway.call("GET", f"{OUTCOMES}?after={after}")
            if page["cursor"] == after:
                return
            for turn, reason in page["held"]:
                yield after, Holdback(turn=str(turn), reason=str(reason), at=0.0)
            after = int(page["cursor"])
            taken = tuple(map(str, page["taken"]))
            yield after, Batch(step=int(page["step"]), turns=taken, credits=(), reference=_UNKNOWN, at=0.0)
