"""Serves the model to an agent in a sandbox: a few paths at a loopback port, relayed to the gateway outside.

The sandbox holds nothing that identifies a caller to the gateway. The relay adds the run's key, the episode and the rest to each call,
removes whatever the agent says about them, and lets through no other path. A request is rewritten before the gateway sees it, with another
model, another user and our sampling: an agent's own temperature of 0, which one of the common agents sends, would make all rollouts of a
group the same. Answers are read in any dialect, whole or streamed.
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

# ---------------------------------------------------------------- reading answers, and the tool results in requests


Json = Mapping[str, Any]
Dialect = Literal["chat", "messages", "responses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """One complete answer.

    `turn`: the id under which the gateway captured it; `tokens`: how many were sampled; `cut`: it reached its token limit; `policies`: the
    policy versions that sampled it; `overran`: it was cut at its deadline; `window`: how many summaries have replaced what was before it.

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
        told = last.get("ostinato") or _inner(last)["ostinato"]
        message, cut = _READERS[dialect](events)
        return AgentAnswer(
            turn=str(told["turns"][0]),
            tokens=sum(int(span[2]) for span in told["spans"]),
            cut=cut,
            message=message,
            policies=frozenset(PolicyVersion(number=int(span[0]), hash=str(span[1])) for span in told["spans"]),
            overran=bool(told.get("deadline")),
            window=int(told.get("window", {}).get("number", 0)),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def tool_results(dialect: Dialect, body: Json) -> dict[str, Message]:
    """The tool results in a request, by call id."""
    return {
        str(id): Message(role=Role.TOOL, text=_text(content), answers=str(id), failed=failed)
        for id, content, failed in _told(dialect, body)
    }


def _told(dialect: Dialect, body: Json) -> Iterable[tuple[Any, Any, bool]]:
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
    """A stream's events, or the single object of an answer that was not streamed."""
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
            said = choice.get("message") or choice.get("delta") or {}
            text += said.get("content") or ""
            reasoning += said.get("reasoning_content") or ""
            for call in said.get("tool_calls") or ():
                named = call["function"]
                calls.append(ToolCall(id=call["id"], name=named["name"], arguments=named["arguments"]))
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
                given = json.dumps(block["input"], ensure_ascii=False) if block["input"] else ""
                calls.append([block["id"], block["name"], given])
        delta = event.get("delta") or {}
        text += delta.get("text") or ""
        reasoning += delta.get("thinking") or ""
        if "partial_json" in delta:
            calls[-1][2] += delta["partial_json"]
        cut = cut or "max_tokens" in (delta.get("stop_reason"), event.get("stop_reason"))
    made = tuple(ToolCall(id=id, name=name, arguments=given or "{}") for id, name, given in calls)
    return Message(role=Role.ASSISTANT, text=text, reasoning=reasoning, calls=made), cut


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
                pass  # its summary is a turn of its own
            case _:
                given = item["arguments"] if "arguments" in item else json.dumps({"input": item["input"]})
                calls.append(ToolCall(id=item["call_id"], name=item["name"], arguments=given))
    said = Message(role=Role.ASSISTANT, text=text, reasoning=reasoning, calls=tuple(calls))
    return said, whole["status"] == "incomplete"


_READERS = {"chat": _chat, "messages": _messages, "responses": _responses}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(content: Any) -> str:
    """The text of a string or of a list of parts."""
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
"""Headers, in lower case, by which the gateway tells an agent's side calls from its work. No other header of an agent is passed on."""


def ruled_request(
    dialect: Dialect, body: Mapping[str, Any], *, model: str, temperature: float, tokens: int, user: str = USER
) -> dict[str, Any]:
    """The request for the gateway, with at most `tokens` per answer. Other faults in it are left for the gateway to report."""
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
    """The agent's headers that the gateway may see."""
    plain = {name.lower(): value for name, value in headers.items() if value.isascii() and value.isprintable()}
    return {name: value for name, value in plain.items() if name in PASSED and len(value) <= _HEADER_CHARS}


logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- the relay


_END_S = 0.01  # for calls in progress at the end; to aiohttp, 0 means no limit
_MODELS, COUNTING = "/v1/models", "/v1/messages/count_tokens"
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "messages",
    COUNTING: "messages",
    "/v1/responses": "responses",
}
"""The paths that an agent may call, and which API each belongs to."""
_TOO_LONG = ("context_length_exceeded", "prompt is too long")
_CONNECTIONS = 64  # at once; further ones are closed
_BODY_BYTES = 2 << 20  # the gateway's default limit
_ANSWER_BYTES = 64 << 20
_READ_S = 20.0  # to read a piece of an answer: less than the gateway waits for us
_SHOWN = ("Content-Type", "request-id", "x-request-id")
_IDLE_REQUESTS = 50  # requests in all, for each turn that is allowed


class _Refused(Exception):
    """An error for the agent, with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelRelay:
    """Serves one rollout's agent.

    `heard` holds every complete answer with its purpose, in the order in which they ended; `told` the tool results that the agent sent,
    by call id; `outgrown` the gateway's error if the last prompt was too long; `over` is resolved when the agent may not go on, with the
    reason or Unavailable.

    `turns` is the most calls; `tokens` and `answer_tokens` are the most of one answer, and of all together; `sent_bytes` of all requests.
    At `deadline`, by the loop's clock, answers end and calls are no longer accepted.
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
        """Accept connections at this socket. Returns the model's name. Raises Unavailable."""
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
        await self._server.shutdown(_END_S)
        if self.over.done() and not self.over.cancelled():
            self.over.exception()  # marked as retrieved, in case nobody awaits it
        self.over.cancel()

    def _connection(self) -> asyncio.Protocol:
        return HangsUp() if len(self._server.connections) >= _CONNECTIONS else self._server()

    # ------------------------------------------------------------ one request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._requests += 1
            if self._requests > _IDLE_REQUESTS * (self._turns + 1):
                raise self._end(Ended.TURNS, "it sends request after request")
            if request.method in ("GET", "HEAD") and request.path == _MODELS:
                return web.json_response({"object": "list", "data": [{"id": self._named, "object": "model"}]})
            if request.method != "POST" or DIALECTS.get(request.path) != self._dialect:
                raise _Refused(404, f"there is nothing at {request.path[:200]!r}")
            return await self._call(request)
        except _Refused as refused:
            return _said(refused.status, str(refused))
        except OutOfTime as error:
            return _said(403, str(self._end(Ended.TIMEOUT, str(error))))
        except Unavailable as error:
            self._fail(error)
            return _said(503, "the model cannot be reached")
        except (aiohttp.ClientError, web.RequestPayloadError, ConnectionError, TimeoutError):  # the agent's connection
            return _said(400, "the request or its reader went away")

    async def _call(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = await self._read(request)
        counting = request.path == COUNTING
        if not counting:
            self.told |= tool_results(self._dialect, asked)
            self._check_budgets()
        body = self._ruled(asked, counting)
        self._begun += not counting
        came = False
        self._open += 1
        self._idle.clear()
        left_s = self._deadline - asyncio.get_running_loop().time()
        try:
            async with self._model.passed(request.path, body, passed_headers(request.headers), left_s=left_s) as answer:
                came = not counting and answer.status == 200  # hanging up in the middle still uses up the turn
                data = bytearray()
                response = await pass_on(request, answer, _SHOWN, data)
            if not counting:
                came = self._note(answer, bytes(data))
            return response
        finally:
            self._begun -= not counting and not came  # a failed call is no turn
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

    def _note(self, answer: PassedAnswer, data: bytes) -> bool:
        """Keep an answer that came whole. True if it is a turn."""
        said = read_agent_answer(self._dialect, data) if answer.status == 200 else None
        said_no = "" if said is not None else data.decode("utf-8", "replace")  # a stream tells errors, too
        outgrown = (line for line in said_no.split("\n") if any(words in line for words in _TOO_LONG))
        self.outgrown = next(outgrown, "")[:500]
        if said is None or not said.tokens:  # a grade must not go to a turn that has nothing to train on
            return False
        self._left -= said.tokens
        self._model.policies |= said.policies
        self.heard.append((said, _purpose(answer.headers)))
        if said.overran:
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
    """Pass an answer on as it arrives, with the headers named in `shown`, and add its bytes to `data`. A reader has 20 s for each part."""
    headers = {name: answer.headers[name] for name in shown if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    try:
        async for part in answer.parts:
            if data is not None:
                data += part
                if len(data) > _ANSWER_BYTES:
                    raise Unavailable(f"an answer of more than {_ANSWER_BYTES} bytes")
            async with asyncio.timeout(_READ_S):
                await response.write(part)
        await response.write_eof()
    except BaseException:
        if request.transport is not None:
            request.transport.abort()  # no error can be sent in the middle of an answer
        raise
    return response


class HangsUp(asyncio.Protocol):
    """Closes a connection that exceeds the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _purpose(headers: Mapping[str, str]) -> Purpose:
    try:
        return Purpose(headers.get("x-ostinato-purpose", Purpose.TASK))
    except ValueError:
        return Purpose.SIDE


def _said(status: int, message: str) -> web.Response:
    """An error response that clients of all three dialects can read."""
    error = {"type": "invalid_request_error" if status < 500 else "api_error", "message": message, "code": None}
    return web.json_response({"type": "error", "error": error}, status=status)
