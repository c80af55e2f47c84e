"""Reverse proxy that serves the model to an agent in a sandbox: a few API paths at a loopback port, relayed to the gateway outside.

The sandbox holds no credentials for the gateway. The relay adds the run's key, the episode and the like to each call, drops what the agent
says about them, and serves no other path. It rewrites each request with the run's model, user and sampling settings: an agent's own
temperature of 0, which one common agent sends, would make all rollouts of a group identical. Answers are parsed in any API dialect, whole
or streamed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from aiohttp import web

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import Unavailable
from ostinato.core.records import PolicyVersion, Purpose
from ostinato.worlds.harness.gateway import USER, EpisodeModel, PassedAnswer
from ostinato.worlds.harness.rollout import Ended, OutOfTime

# ---------------------------------------------------------------- parsing answers, and the tool results in requests


Json = Mapping[str, Any]
Dialect = Literal["chat", "messages", "responses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """One complete answer.

    `turn`: the id under which the gateway captured it; `tokens`: how many were sampled; `cut`: it reached its token limit; `policies`: the
    policy versions that sampled it; `overran`: it was cut at its deadline; `window`: the number of summaries that the agent has made before
    it.

    Example: ``AgentAnswer(turn="chatcmpl-3f:0", tokens=7, cut=False, message=Message(role=Role.ASSISTANT, text="Done."))``
    """

    turn: str
    tokens: int
    cut: bool
    message: Message
    policies: frozenset[PolicyVersion] = frozenset()
    overran: bool = False
    window: int = 0


def read_agent_answer(dialect: Dialect, data: bytes) -> AgentAnswer | None:
    """Parse an answer; None if it is incomplete or malformed."""
    try:
        events = _events(data)
        last = next((event for event in reversed(events) if "ostinato" in event or "ostinato" in _inner(event)), None)
        if last is None:
            return None
        extra = last.get("ostinato") or _inner(last)["ostinato"]
        message, cut = _READERS[dialect](events)
        return AgentAnswer(
            turn=str(extra["turns"][0]),
            tokens=sum(int(span[2]) for span in extra["spans"]),
            cut=cut,
            message=message,
            policies=frozenset(PolicyVersion(number=int(span[0]), hash=str(span[1])) for span in extra["spans"]),
            overran=bool(extra.get("deadline")),
            window=int(extra.get("window", {}).get("number", 0)),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def tool_results(dialect: Dialect, body: Json) -> dict[str, Message]:
    """Return the tool results in a request, by call id."""
    return {
        str(id): Message(role=Role.TOOL, text=_text(content), answers=str(id), failed=failed)
        for id, content, failed in _raw_results(dialect, body)
    }


def _raw_results(dialect: Dialect, body: Json) -> Iterable[tuple[Any, Any, bool]]:
    items = [
        item for item in _list(body.get("input" if dialect == "responses" else "messages")) if isinstance(item, dict)
    ]
    for item in items:
        if dialect == "chat" and item.get("role") == "tool":
            yield item.get("tool_call_id"), item.get("content"), False
        elif dialect == "responses" and item.get("type") in ("function_call_output", "custom_tool_call_output"):
            yield item.get("call_id"), item.get("output"), False
        elif dialect == "messages":
            for block in _list(item.get("content")):
                if isinstance(block, dict) and block.get("type") == "tool_result":
                    yield block.get("tool_use_id"), block.get("content"), bool(block.get("is_error"))


def _events(data: bytes) -> list[Json]:
    """Parse the events of a stream, or the single object of an answer that was not streamed."""
    if data.lstrip()[:1] == b"{":
        return [json.loads(data)]
    lines = (line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:"))
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def _inner(event: Json) -> Json:
    inner = event.get("response")
    return inner if isinstance(inner, dict) else {}


def _chat(events: list[Json]) -> tuple[Message, bool]:
    text, reasoning, calls, cut = "", "", list[ToolCall](), False
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("message") or choice.get("delta") or {}
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                calls.append(ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"]))
            cut = cut or choice.get("finish_reason") == "length"
    return Message(role=Role.ASSISTANT, text=text, reasoning=reasoning, calls=tuple(calls)), cut


def _messages(events: list[Json]) -> tuple[Message, bool]:
    text, reasoning, calls, cut = "", "", list[list[str]](), False
    for event in events:
        blocks = event["content"] if "content" in event else [event.get("content_block") or {}]
        for block in blocks:
            text += block.get("text") or ""
            reasoning += block.get("thinking") or ""
            if block.get("type") == "tool_use":
                arguments = json.dumps(block["input"], ensure_ascii=False) if block["input"] else ""
                calls.append([block["id"], block["name"], arguments])
        delta = event.get("delta") or {}
        text += delta.get("text") or ""
        reasoning += delta.get("thinking") or ""
        if "partial_json" in delta:
            calls[-1][2] += delta["partial_json"]
        cut = cut or "max_tokens" in (delta.get("stop_reason"), event.get("stop_reason"))
    parsed = tuple(ToolCall(id=id, name=name, arguments=arguments or "{}") for id, name, arguments in calls)
    return Message(role=Role.ASSISTANT, text=text, reasoning=reasoning, calls=parsed), cut


def _responses(events: list[Json]) -> tuple[Message, bool]:
    whole = _inner(events[-1]) or events[-1]
    text, reasoning, calls = "", "", list[ToolCall]()
    for item in whole["output"]:
        match item["type"]:
            case "message":
                text += _text(item["content"])
            case "reasoning":
                reasoning += _text(item["content"])
            case "compaction":
                pass  # its summary is a separate turn
            case _:
                arguments = item["arguments"] if "arguments" in item else json.dumps({"input": item["input"]})
                calls.append(ToolCall(id=item["call_id"], name=item["name"], arguments=arguments))
    message = Message(role=Role.ASSISTANT, text=text, reasoning=reasoning, calls=tuple(calls))
    return message, whole["status"] == "incomplete"


_READERS = {"chat": _chat, "messages": _messages, "responses": _responses}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in _list(content) if isinstance(part, dict))


# ---------------------------------------------------------------- rewriting requests


_DROPPED = {
    "top_p", "seed", "n", "presence_penalty", "frequency_penalty", "logit_bias", "safety_identifier", "metadata",
}  # fmt: skip
_BUDGETS: Mapping[Dialect, tuple[str, ...]] = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "messages": ("max_tokens",),
    "responses": ("max_output_tokens",),
}
_HEADER_CHARS = 4096
PASSED = {
    "x-claude-code-agent-id", "x-codex-parent-thread-id", "x-codex-turn-metadata", "x-openai-subagent", "x-parent-session-id",
    "x-claude-code-session-id", "session-id", "x-session-id",
}  # fmt: skip
"""Headers, in lower case, by which the gateway recognises an agent's side calls. No other header of an agent is forwarded."""


def ruled_request(
    dialect: Dialect, body: Mapping[str, Any], *, model: str, temperature: float, tokens: int, user: str = USER
) -> dict[str, Any]:
    """Rewrite a request for the gateway, with at most `tokens` per answer. Other errors in it are left for the gateway to report."""
    ruled = {name: value for name, value in body.items() if name not in _DROPPED}
    ruled |= {"model": model, "temperature": temperature}
    ruled |= {"metadata": {"user_id": user}} if dialect == "messages" else {"user": user}
    named = [name for name in _BUDGETS[dialect] if ruled.get(name) is not None]
    for name in named or _BUDGETS[dialect][:1]:
        asked = ruled.get(name)
        if asked is None or (isinstance(asked, int | float) and asked > tokens):
            ruled[name] = tokens
    return ruled


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the agent's headers that are forwarded to the gateway."""
    plain = {name.lower(): value for name, value in headers.items() if value.isascii() and value.isprintable()}
    return {name: value for name, value in plain.items() if name in PASSED and len(value) <= _HEADER_CHARS}


logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- the relay


_SHUTDOWN_S = 0.01  # grace for calls in progress at shutdown; to aiohttp, 0 means no limit
_MODELS, COUNTING = "/v1/models", "/v1/messages/count_tokens"
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "messages",
    COUNTING: "messages",
    "/v1/responses": "responses",
}
"""The paths that an agent may call, each with its API dialect."""
_TOO_LONG = ("context_length_exceeded", "prompt is too long")
_CONNECTIONS = 64  # concurrent ones; further ones are closed
_BODY_BYTES = 2 << 20  # the gateway's default limit
_ANSWER_BYTES = 64 << 20
_WRITE_S = 20.0  # for an agent to take a chunk of an answer; shorter than the gateway's own write timeout
_FORWARDED = ("Content-Type", "request-id", "x-request-id")
_REQUESTS_PER_TURN = 50  # a bound on all requests, failed and counting ones included, per allowed turn


class _Refused(Exception):
    """An error that the agent gets, with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelRelay:
    """The reverse proxy of one rollout's agent.

    `heard` holds every complete answer with its purpose, in the order in which they ended; `told` the tool results that the agent sent,
    by call id; `outgrown` the gateway's error if the last prompt was too long. `over` resolves when the agent must stop, with the reason or
    with Unavailable.

    Limits: `turns` model calls, `tokens` per answer, `answer_tokens` for all answers together, `sent_bytes` for all requests together. At
    `deadline` (event-loop time) answers in progress are cut, and further calls are refused.
    """

    def __init__(
        self,
        model: EpisodeModel,
        dialect: Dialect,
        *,
        turns: int,
        tokens: int,
        answer_tokens: int,
        sent_bytes: int,
        deadline: float,
    ) -> None:
        self._model, self._turns, self._tokens, self._deadline = model, turns, tokens, deadline
        self._dialect: Dialect = dialect
        self._answer_tokens, self._sent_bytes = answer_tokens, sent_bytes
        self._open = self._begun = self._requests = self._sent = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._named = ""
        self._left = answer_tokens
        self._server = web.Server(self._handle, access_log=None, keepalive_timeout=600.0)
        self._listening: asyncio.Server | None = None
        self.over: asyncio.Future[tuple[Ended, str]] = asyncio.get_running_loop().create_future()
        self.heard: list[tuple[AgentAnswer, Purpose]] = []
        self.told: dict[str, Message] = {}
        self.outgrown = ""

    async def start(self, listener: socket.socket) -> str:
        """Accept connections on this socket. Returns the model's name. Raises Unavailable."""
        self._named = await self._model.named()
        self._listening = await asyncio.get_running_loop().create_server(self._connection, sock=listener)
        return self._named

    async def rest(self) -> None:
        """Wait until no call is in progress."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop the relay and every call in progress. Idempotent."""
        if self._listening is not None:
            self._listening.close()
        await self._server.shutdown(_SHUTDOWN_S)
        if self.over.done() and not self.over.cancelled():
            self.over.exception()  # marked as retrieved, in case nobody awaits it
        self.over.cancel()

    def _connection(self) -> asyncio.Protocol:
        return HangsUp() if len(self._server.connections) >= _CONNECTIONS else self._server()

    # ------------------------------------------------------------ one request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._requests += 1
            if self._requests > _REQUESTS_PER_TURN * (self._turns + 1):
                raise self._end(Ended.TURNS, "it sends request after request")
            if request.method in ("GET", "HEAD") and request.path == _MODELS:
                return web.json_response({"object": "list", "data": [{"id": self._named, "object": "model"}]})
            if request.method != "POST" or DIALECTS.get(request.path) != self._dialect:
                raise _Refused(404, f"there is nothing at {request.path[:200]!r}")
            return await self._call(request)
        except _Refused as refused:
            return _error_response(refused.status, str(refused))
        except OutOfTime as error:
            return _error_response(403, str(self._end(Ended.TIMEOUT, str(error))))
        except Unavailable as error:
            self._fail(error)
            return _error_response(503, "the model cannot be reached")
        except (aiohttp.ClientError, web.RequestPayloadError, ConnectionError, TimeoutError):  # the agent's connection
            return _error_response(400, "the request or its reader went away")

    async def _call(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = await self._read(request)
        counting = request.path == COUNTING
        if not counting:
            self.told |= tool_results(self._dialect, asked)
            self._check_budgets()
        body = self._ruled(asked, counting)
        self._begun += not counting
        captured = False
        self._open += 1
        self._idle.clear()
        left_s = self._deadline - asyncio.get_running_loop().time()
        try:
            async with self._model.passed(request.path, body, passed_headers(request.headers), left_s=left_s) as answer:
                # an agent that disconnects midway has still used the turn
                captured = not counting and answer.status == 200
                data = bytearray()
                response = await pass_on(request, answer, _FORWARDED, data)
            if not counting:
                captured = self._record(answer, bytes(data))
            return response
        finally:
            self._begun -= not counting and not captured  # a failed call is no turn
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _read(self, request: web.BaseRequest) -> dict[str, Any]:
        data = bytearray()
        async for part in request.content.iter_any():
            data += part
            self._sent += len(part)
            if self._sent > self._sent_bytes:
                raise self._end(Ended.LENGTH, f"it has sent more than {self._sent_bytes} bytes (sent_bytes)")
            if len(data) > _BODY_BYTES:
                raise _Refused(413, f"a request has at most {_BODY_BYTES} bytes")
        try:
            asked = json.loads(bytes(data))
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            raise _Refused(400, "the body must be a JSON object")
        return asked

    def _check_budgets(self) -> None:
        if self._begun >= self._turns:
            raise self._end(Ended.TURNS, "")
        if self._left <= 0:
            raise self._end(Ended.LENGTH, f"it has said {self._answer_tokens} tokens (answer_tokens)")

    def _ruled(self, asked: dict[str, Any], counting: bool) -> bytes:
        ruled = {**asked, "model": self._named}
        if not counting:
            ruled = ruled_request(
                self._dialect,
                asked,
                model=self._named,
                temperature=self._model.temperature,
                tokens=max(1, min(self._tokens, self._left)),
            )
        try:
            return json.dumps(ruled).encode()
        except (ValueError, RecursionError):
            raise _Refused(400, "the body is nested too deep") from None

    def _record(self, answer: PassedAnswer, data: bytes) -> bool:
        """Record a complete answer. Returns True if it is a turn."""
        parsed = read_agent_answer(self._dialect, data) if answer.status == 200 else None
        # a stream with status 200 may hold an error, too
        error = "" if parsed is not None else data.decode("utf-8", "replace")
        outgrown = (line for line in error.split("\n") if any(words in line for words in _TOO_LONG))
        self.outgrown = next(outgrown, "")[:500]
        if parsed is None or not parsed.tokens:  # a grade must not go to a turn without tokens to train on
            return False
        self._left -= parsed.tokens
        self._model.policies |= parsed.policies
        self.heard.append((parsed, _purpose(answer.headers)))
        if parsed.overran:
            self._end(Ended.TIMEOUT, "an answer was cut")
        return True

    def _end(self, ended: Ended, why: str) -> _Refused:
        if not self.over.done():
            self.over.set_result((ended, why))
        return _Refused(403, "this rollout is over")

    def _fail(self, error: Unavailable) -> None:
        logger.info("an agent's call failed: %s", error)
        if not self.over.done():
            self.over.set_exception(error)


async def pass_on(
    request: web.BaseRequest, answer: PassedAnswer, shown: Sequence[str], data: bytearray | None = None
) -> web.StreamResponse:
    """Stream an answer to the caller, with the headers named in `shown`, and append its bytes to `data`. The caller has 20 s to read each
    chunk.
    """
    headers = {name: answer.headers[name] for name in shown if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    try:
        async for part in answer.parts:
            if data is not None:
                data += part
                if len(data) > _ANSWER_BYTES:
                    raise Unavailable(f"an answer of more than {_ANSWER_BYTES} bytes")
            async with asyncio.timeout(_WRITE_S):
                await response.write(part)
        await response.write_eof()
    except BaseException:
        if request.transport is not None:
            request.transport.abort()  # the status line is out, so no error response can be sent any more
        raise
    return response


class HangsUp(asyncio.Protocol):
    """A protocol that closes its connection at once, for connections beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _purpose(headers: Mapping[str, str]) -> Purpose:
    try:
        return Purpose(headers.get("x-ostinato-purpose", Purpose.TASK))
    except ValueError:
        return Purpose.SIDE


def _error_response(status: int, message: str) -> web.Response:
    """Return an error response that clients of all three API dialects understand."""
    error = {"type": "invalid_request_error" if status < 500 else "api_error", "message": message, "code": None}
    return web.json_response({"type": "error", "error": error}, status=status)
