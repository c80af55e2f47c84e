"""Messages and tools of `/v1/messages` as the parts of a `Conversation`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, field_validator

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.fields import STRICT, Name, validate
from ostinato.serve.dialects.joining import joined

_TAKEN = {
    Role.SYSTEM: ("text",),
    Role.USER: ("text", "tool_result"),
    Role.ASSISTANT: ("text", "thinking", "redacted_thinking", "tool_use"),
}


def read_messages(
    messages: Sequence[Mapping[str, Any]], system: str | list[dict[str, Any]] | None
) -> tuple[Message, ...]:
    """The messages, preceded by the system's text. Raises BadRequest naming the field."""
    parts = [part for i, said in enumerate(messages) for part in _said(said, f"messages[{i}]")]
    if not parts:
        raise BadRequest("messages holds nothing to answer; send a user's message.", field="messages")
    if text := "" if system is None else _texts(system, "system"):
        parts.insert(0, Message(role=Role.SYSTEM, text=text))
    return tuple(joined(parts))


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The tools. Raises BadRequest naming the field."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


# ---------------------------------------------------------------- messages


class _Said(BaseModel):
    model_config = STRICT
    role: Literal["user", "assistant", "system"]
    content: Any


class _Block(BaseModel):
    """The fields of every content block. Prompts are cached whether or not `cache_control` requests it."""

    model_config = STRICT
    type: str
    cache_control: Any = None


class _Text(_Block):
    text: str
    citations: Any = None  # citations of an earlier answer, which are not part of its text


class _Thinking(_Block):
    thinking: str
    signature: str | None = None  # proves to Anthropic's servers that the thinking is theirs


class _Redacted(_Block):
    data: Any = None


class _Direct(BaseModel):
    model_config = STRICT
    type: Literal["direct"]


class _ToolUse(_Block):
    id: Name
    name: Name
    input: dict[str, Any]
    caller: _Direct | None = None
    toolset_name: None = None


class _ToolResult(_Block):
    tool_use_id: Name
    content: Any = None
    is_error: bool | None = None  # templates have no place for it; models learn of the failure from the result's text
    toolset_name: None = None


class _ToolReference(_Block):
    tool_name: Name


def _said(message: Mapping[str, Any], where: str) -> Iterator[Message]:
    """The parts of a message, in order, without empty ones of an assistant."""
    said = validate(_Said, message, where)
    role, content, where = Role(said.role), said.content, f"{where}.content"
    if isinstance(content, str):
        if content or role is not Role.ASSISTANT:
            yield Message(role=role, text=content)
        return
    if not isinstance(content, list) or not (content or role is Role.ASSISTANT):
        raise BadRequest(f"{where} must be text or a list of content blocks.", field=where)
    for i, block in enumerate(content):
        part = _part(role, block, f"{where}[{i}]")
        if part is not None:
            yield part


def _part(role: Role, block: Any, where: str) -> Message | None:
    """The message of one content block; None if it has no content."""
    match _type(block, where, _TAKEN[role], f"a message of role {role}"):
        case "text":
            text = validate(_Text, block, where).text
            return Message(role=role, text=text) if text or role is not Role.ASSISTANT else None
        case "thinking":
            return Message(role=role, reasoning=validate(_Thinking, block, where).thinking)
        case "tool_use":
            use = validate(_ToolUse, block, where)
            arguments = json.dumps(use.input, ensure_ascii=False, separators=(",", ":"))
            return Message(role=role, calls=(ToolCall(id=use.id, name=use.name, arguments=arguments),))
        case "tool_result":
            result = validate(_ToolResult, block, where)
            text = "" if result.content is None else _texts(result.content, f"{where}.content", in_result=True)
            return Message(role=Role.TOOL, text=text, answers=result.tool_use_id, failed=bool(result.is_error))
        case _:
            validate(_Redacted, block, where)  # encrypted for Anthropic's servers, unreadable here
            return None


def _texts(content: Any, where: str, *, in_result: bool = False) -> str:
    """Text, or the texts of blocks, joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of text blocks.", field=where)
    taken = ("text", "tool_reference") if in_result else ("text",)
    texts: list[str] = []
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        if _type(block, at, taken, "a tool_result" if in_result else where) == "text":
            texts.append(validate(_Text, block, at).text)
        else:  # the result of a search for deferred tools; here all tools are offered from the start, so the name is enough
            texts.append(validate(_ToolReference, block, at).tool_name)
    return "\n".join(texts)


def _type(block: Any, where: str, taken: tuple[str, ...], place: str) -> str:
    """A block's type. Raises BadRequest unless it is allowed in that place."""
    given = block.get("type") if isinstance(block, dict) else None
    if not isinstance(given, str):
        raise BadRequest(f"{where} must be a content block: an object with a type.", field=where)
    if given not in taken:
        raise BadRequest(
            f"{where}: a block of type {given[:100]!r} is not supported in {place}; send {' or '.join(taken)}.",
            field=f"{where}.type",
        )
    return given


# ---------------------------------------------------------------- tools


class _Tool(BaseModel):
    model_config = STRICT
    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: Any = None
    defer_loading: bool | None = (
        None  # saves context at Anthropic by hiding the tool at first; here it is offered at once
    )
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: list[Any] | None = None
    strict: bool | None = None

    @field_validator("input_examples")
    @classmethod
    def _check_examples(cls, examples: list[Any] | None) -> list[Any] | None:
        if examples:
            raise ValueError("is not supported: put the examples into the description")
        return examples


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    given = tool.get("type")
    if given not in (None, "custom"):
        raise BadRequest(
            f"{where}.type: {str(given)[:100]!r} is a tool of Anthropic's own, which this server does not have; leave it out, "
            "or describe a tool of yours with name, description and input_schema.",
            field=f"{where}.type",
        )
    known = validate(_Tool, tool, where)
    return Tool(
        name=known.name,
        description=known.description or "",
        parameters=known.input_schema,
        strict=bool(known.strict),
    )
