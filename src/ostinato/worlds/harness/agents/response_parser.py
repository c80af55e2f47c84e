"""Parses the gateway's answers, in any dialect, whole or streamed, and the tool results in requests. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.records import PolicyVersion
from ostinato.worlds.harness.agents.config import Dialect

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """One complete answer.

    `turn`: the id under which the gateway captured it; `tokens`: how many were sampled; `cut`: it reached its token limit; `policies`: the
    policy versions that sampled it; `overran`: it was cut at its deadline.

    Example: ``AgentAnswer(turn="chatcmpl-3f:0", tokens=7, cut=False, message=Message(role=Role.ASSISTANT, text="Done."))``
    """

    turn: str
    tokens: int
    cut: bool
    message: Message
    policies: frozenset[PolicyVersion] = frozenset()
    overran: bool = False


def read_agent_answer(dialect: Dialect, data: bytes) -> AgentAnswer | None:
    """Parse an answer; None if it is incomplete or malformed."""
    try:
        events = _events(data)
        last = next((event for event in reversed(events) if "ostinato" in event or "ostinato" in _inner(event)), None)
        if last is None:
            return None
        told = last.get("ostinato") or _inner(last)["ostinato"]
        message, cut = _READERS[dialect](events)
        tokens = sum(int(span[2]) for span in told["spans"])
        policies = frozenset(PolicyVersion(number=int(span[0]), hash=str(span[1])) for span in told["spans"])
        return AgentAnswer(
            turn=str(told["turns"][0]),
            tokens=tokens,
            cut=cut,
            message=message,
            policies=policies,
            overran=bool(told.get("deadline")),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def tool_results(dialect: Dialect, body: Json) -> dict[str, Message]:
    """The tool results in a request, by call id."""
    found: dict[str, Message] = {}
    for id, content, failed in _told(dialect, body):
        found[str(id)] = Message(role=Role.TOOL, text=_text(content), answers=str(id), failed=failed)
    return found


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
