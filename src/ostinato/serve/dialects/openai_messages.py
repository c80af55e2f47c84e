"""Messages and tools of `/v1/chat/completions` as a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.fields import refuse_active, unknown

MAX_TOOLS = 1024
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_INERT: dict[str, tuple[Any, ...]] = dict.fromkeys(("annotations", "audio", "function_call", "refusal"), (None, []))
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_HARMLESS = ("parsed", "provider_specific_fields")  # notes of a client library for its own use
_ONLY = {"tool_calls": Role.ASSISTANT, "reasoning_content": Role.ASSISTANT, "tool_call_id": Role.TOOL}


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages. Raises BadRequest naming the field."""
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The tools. Raises BadRequest naming the field."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools holds {len(tools)} tools; send at most {MAX_TOOLS}.", field="tools")
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _message(message: Mapping[str, Any], where: str) -> Message:
    for name, value in message.items():
        if name in _INERT:
            refuse_active(f"{where}.{name}", value, _INERT[name])
        elif name not in _FIELDS and name not in _HARMLESS:
            raise unknown(name, f"{where}.{name}", [*_FIELDS, *_INERT])
    given = message.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", field=f"{where}.role")
    for name, owner in _ONLY.items():
        if message.get(name) and role is not owner:
            raise BadRequest(f"{where}.{name} belongs to role {owner}, not {role}.", field=f"{where}.{name}")
    _text_of(message, "name", where, longest=256)  # templates render no name, so it is checked and dropped
    calls = tuple(_calls(message.get("tool_calls") or [], f"{where}.tool_calls"))
    content, reasoning = message.get("content"), _text_of(message, "reasoning_content", where)
    return Message(
        role=role,
        text="" if content is None and (calls or reasoning) else _content(content, f"{where}.content"),
        reasoning=reasoning,
        calls=calls,
        answers=_answered(message, where) if role is Role.TOOL else "",
    )


def _answered(message: Mapping[str, Any], where: str) -> str:
    answers = _text_of(message, "tool_call_id", where, longest=512)
    if not answers:
        raise BadRequest(f"{where}.tool_call_id must name the call that this answers.", field=f"{where}.tool_call_id")
    return answers


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where} must be text or a list of text parts.", field=where)
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}[{i}] must be {{'type': 'text', 'text': ...}}.", field=f"{where}[{i}]")
        if extra := set(part) - {"type", "text", "cache_control"}:
            raise BadRequest(f"{where}[{i}].{min(extra)} is not supported.", field=f"{where}[{i}].{min(extra)}")
    return "".join(part["text"] for part in content)


def _calls(calls: Any, where: str) -> list[ToolCall]:
    if not isinstance(calls, list):
        raise BadRequest(f"{where} must be a list.", field=where)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> ToolCall:
    function = _function(call, where)
    id, name = _text_of(call, "id", where, longest=512), _text_of(function, "name", f"{where}.function", longest=512)
    if not id or not name:
        lacks = "id" if not id else "function.name"
        raise BadRequest(f"{where}.{lacks} is missing.", field=f"{where}.{lacks}")
    return ToolCall(id=id, name=name, arguments=_text_of(function, "arguments", f"{where}.function"))


def _tool(tool: Any, where: str) -> Tool:
    function = _function(tool, where)
    at = f"{where}.function"
    if extra := set(function) - {"name", "description", "parameters", "strict"}:
        raise unknown(min(extra), f"{at}.{min(extra)}", ["name", "description", "parameters", "strict"])
    name = _text_of(function, "name", at, longest=512)
    if not name:
        raise BadRequest(f"{at}.name is missing.", field=f"{at}.name")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise BadRequest(f"{at}.parameters must be a JSON schema.", field=f"{at}.parameters")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise BadRequest(f"{at}.strict must be true or false.", field=f"{at}.strict")
    description = _text_of(function, "description", at)
    return Tool(name=name, description=description, parameters=parameters or {}, strict=bool(strict))


def _function(holder: Any, where: str) -> Mapping[str, Any]:
    """The "function" object of a tool or a call."""
    if not isinstance(holder, dict) or holder.get("type", "function") != "function":
        raise BadRequest(f"{where}.type must be 'function': other tools are not supported.", field=f"{where}.type")
    function = holder.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{where}.function must be an object.", field=f"{where}.function")
    return function


def _text_of(holder: Mapping[str, Any], name: str, where: str, longest: int | None = None) -> str:
    """A field's text; "" if it is null or missing."""
    text = holder.get(name)
    if text is None:
        return ""
    if not isinstance(text, str) or (longest is not None and len(text) > longest):
        limit = "" if longest is None else f" of at most {longest} characters"
        raise BadRequest(f"{where}.{name} must be text{limit}.", field=f"{where}.{name}")
    return text
