"""Input items and tools of `/v1/responses` as the parts of a `Conversation`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.fields import Name, validate

MAX_TOOLS = 1024
_TEXTS = ("input_text", "output_text", "text")
_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM, "developer": Role.SYSTEM}
# Tool types that Codex sends besides functions and that are unavailable here: they are skipped, and Codex works without them.
_NOT_OFFERED = frozenset(["namespace", "web_search", "web_search_preview", "local_shell"])
# Other fields of an item (its id, status, phase) are its producer's notes and are ignored.
_ITEM = ConfigDict(frozen=True, extra="ignore", strict=True)


@dataclass(slots=True)
class Read:
    """Parsed items and tools. `custom` holds the names of the tools whose input is plain text, not JSON."""

    parts: list[Message] = field(default_factory=list[Message])
    tools: list[Tool] = field(default_factory=list[Tool])
    custom: set[str] = field(default_factory=set[str])


def read_items(items: Sequence[Any], read: Read) -> None:
    """Add the messages of the input items, and their tools. Raises BadRequest naming the field."""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        given = _kind(item, where, default="message")
        reader = _READERS.get(given)
        if given == "additional_tools":  # where Codex puts its tools for some models
            read_tools(item.get("tools") or [], read, f"{where}.tools")
        elif reader is not None:
            read.parts += reader(item, where)
        else:
            raise BadRequest(
                f"{where}: an item of type {given[:100]!r} is not supported; send {', '.join(_READERS)}.",
                field=f"{where}.type",
            )


def read_tools(tools: Any, read: Read, where: str = "tools") -> None:
    """Add the tools that the model may call. Raises BadRequest naming the field."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise BadRequest(f"{where} must be a list of at most {MAX_TOOLS} tools.", field=where)
    for i, tool in enumerate(tools):
        at = f"{where}[{i}]"
        given = _kind(tool, at)
        if given == "function":
            read.tools.append(_function(tool, at))
        elif given == "custom":
            custom = validate(_Custom, tool, at)
            read.custom.add(custom.name)
            read.tools.append(_with_input(custom))
        elif given not in _NOT_OFFERED:
            raise BadRequest(
                f"{at}: a tool of type {given[:100]!r} is not supported; send functions or custom tools.",
                field=f"{at}.type",
            )


# ---------------------------------------------------------------- items


class _Said(BaseModel):
    model_config = _ITEM
    role: str
    content: Any


class _Call(BaseModel):
    model_config = _ITEM
    call_id: Name
    name: Name
    arguments: str


class _CustomCall(BaseModel):
    model_config = _ITEM
    call_id: Name
    name: Name
    input: str


class _Result(BaseModel):
    model_config = _ITEM
    call_id: Name
    output: Any


def _message(item: Mapping[str, Any], where: str) -> Iterator[Message]:
    said = validate(_Said, item, where)
    role = _ROLES.get(said.role)
    if role is None:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", field=f"{where}.role")
    text = _text(said.content, f"{where}.content")
    if text or role is not Role.ASSISTANT:
        yield Message(role=role, text=text)


def _call(item: Mapping[str, Any], where: str) -> Iterator[Message]:
    call = validate(_Call, item, where)
    called = ToolCall(id=call.call_id, name=call.name, arguments=call.arguments)
    yield Message(role=Role.ASSISTANT, calls=(called,))


def _custom_call(item: Mapping[str, Any], where: str) -> Iterator[Message]:
    call = validate(_CustomCall, item, where)
    called = ToolCall(id=call.call_id, name=call.name, arguments=json.dumps({"input": call.input}, ensure_ascii=False))
    yield Message(role=Role.ASSISTANT, calls=(called,))


def _result(item: Mapping[str, Any], where: str) -> Iterator[Message]:
    result = validate(_Result, item, where)
    yield Message(role=Role.TOOL, text=_text(result.output, f"{where}.output"), answers=result.call_id)


def _reasoning(item: Mapping[str, Any], where: str) -> Iterator[Message]:
    """The reasoning's text, if it has any. Encrypted reasoning is another provider's and is dropped."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise BadRequest(f"{where}.content must be a list of parts.", field=f"{where}.content")
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if texts:
        yield Message(role=Role.ASSISTANT, reasoning="\n".join(texts))


_READERS: dict[str, Callable[[Mapping[str, Any], str], Iterator[Message]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _result,
    "reasoning": _reasoning,
}


def _text(content: Any, where: str) -> str:
    """Text, or the texts of parts, concatenated."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of parts.", field=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        given = _kind(part, f"{where}[{i}]")
        text = part.get("refusal" if given == "refusal" else "text")
        if given not in (*_TEXTS, "refusal") or not isinstance(text, str):
            raise BadRequest(
                f"{where}[{i}]: a part of type {given[:100]!r} is not supported; send input_text with a text.",
                field=f"{where}[{i}].type",
            )
        texts.append(text)
    return "".join(texts)


def _kind(value: Any, where: str, default: str | None = None) -> str:
    given = value.get("type", default) if isinstance(value, dict) else None
    if not isinstance(given, str):
        raise BadRequest(f"{where} must be an object with a type.", field=where)
    return given


# ---------------------------------------------------------------- tools


class _Function(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    type: str
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # saves context by hiding the tool at first; here the tool is offered at once


class _Custom(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    type: str
    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None
    defer_loading: bool | None = None


def _function(tool: Mapping[str, Any], where: str) -> Tool:
    function = validate(_Function, tool, where)
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {},
        strict=bool(function.strict),
    )


def _with_input(custom: _Custom) -> Tool:
    """A plain-text tool as a function with one string parameter; its grammar is put into the description, not enforced."""
    grammar = (custom.format or {}).get("definition")
    told = [custom.description or "", f"The input follows this grammar:\n{grammar}" if grammar else ""]
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return Tool(name=custom.name, description="\n\n".join(filter(None, told)), parameters=parameters)
