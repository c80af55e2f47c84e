"""Messages and tools of `/v1/chat/completions` as the parts of a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.fields import validate
from ostinato.serve.dialects.items import ReadItems
from ostinato.serve.dialects.omissions import MEDIA_TYPES, Omissions
from ostinato.serve.dialects.rules import Fields, Ignored, Only

MAX_TOOLS = 1024
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_ONLY = {
    "tool_calls": Role.ASSISTANT,
    "reasoning_content": Role.ASSISTANT,
    "refusal": Role.ASSISTANT,
    "tool_call_id": Role.TOOL,
}
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # parts of other providers' answers
_Text = Annotated[str, Field(max_length=512)]
_Note = Annotated[Any, Ignored("a note of another provider or a client library for its own use")]
_Thought = Annotated[Any, Ignored("another provider's reasoning is kept out of the prompt")]


class ChatMessage(Fields):
    """A message. Its text, calls and reasoning are what the template gets."""

    role: Any
    content: Any = None
    refusal: str = ""
    tool_calls: Any = None
    tool_call_id: _Text = ""
    reasoning_content: str = ""
    name: Annotated[str, Field(max_length=256), Ignored("chat templates have no place for it")] = ""
    reasoning: _Thought = None
    reasoning_details: _Thought = None
    reasoning_text: _Thought = None
    reasoning_opaque: _Thought = None
    reasoning_items: _Thought = None
    encrypted_content: _Thought = None
    thinking: _Thought = None
    thinking_blocks: _Thought = None
    thought: _Thought = None
    thought_signature: _Thought = None
    signature: _Thought = None
    id: _Note = None
    annotations: _Note = None
    cache_control: _Note = None
    citations: _Note = None
    created_at: _Note = None
    extra_content: _Note = None
    finish_reason: _Note = None
    images: Annotated[Any, Only([], why="is not supported: put images into content")] = None
    index: _Note = None
    is_error: Annotated[Any, Ignored("chat templates have no place for it: the result's text tells")] = None
    metadata: _Note = None
    model: _Note = None
    object: _Note = None
    parsed: _Note = None
    partial: Annotated[Any, Only(False, why="is not supported: send continue_final_message")] = None
    prefix: Annotated[Any, Only(False, why="is not supported: send continue_final_message")] = None
    provider_specific_fields: _Note = None
    stop_reason: _Note = None
    timestamp: _Note = None
    usage: _Note = None
    audio: Annotated[Any, Only(why="is not supported: send the answer's text as content")] = None
    function_call: Annotated[Any, Only(why="is not supported: send tool_calls")] = None


class ChatPart(BaseModel):
    """A part of a message's content. Other fields are notes of its producer."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatFunction(Fields):
    """A function that the model may call."""

    name: _Text = ""
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict[str, Any])
    strict: bool = False
    cache_control: _Note = None
    defer_loading: Annotated[Any, Ignored("saves context by hiding a tool at first; here it is offered at once")] = None
    output_schema: Annotated[Any, Ignored("describes what the tool returns, which only the client sees")] = None


def read_messages(
    messages: Sequence[Mapping[str, Any]], omissions: Omissions | None = None, items: ReadItems | None = None
) -> tuple[Message, ...]:
    """The messages; `omissions` is told what is left out. `items`: those of earlier requests. Raises BadRequest naming the field."""
    told, known = omissions or Omissions(), items or ReadItems()
    return tuple(
        part for i, message in enumerate(messages) for part in known.read(_read, message, f"messages[{i}]", told)
    )


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The tools. Raises BadRequest naming the field."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools holds {len(tools)} tools; send at most {MAX_TOOLS}.", field="tools")
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _read(given: Mapping[str, Any], where: str, omissions: Omissions) -> tuple[Message]:
    return (_message(given, where, omissions),)


def _message(given: Mapping[str, Any], where: str, omissions: Omissions) -> Message:
    message = validate(ChatMessage, given, where)
    role = _ROLES.get(message.role) if isinstance(message.role, str) else None
    if role is None:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", field=f"{where}.role")
    for name, owner in _ONLY.items():
        if getattr(message, name) and role is not owner:
            raise BadRequest(f"{where}.{name} belongs to role {owner}, not {role}.", field=f"{where}.{name}")
    if role is Role.TOOL and not message.tool_call_id:
        raise BadRequest(f"{where}.tool_call_id must name the call that this answers.", field=f"{where}.tool_call_id")
    calls = tuple(_calls(message.tool_calls or [], f"{where}.tool_calls"))
    # a turn that was stopped before its first word, and a tool that returned nothing, stay in a client's history
    empty = message.content in (None, []) and role is not Role.USER
    text = message.refusal if empty else _content(message.content, f"{where}.content", omissions)
    return Message(role=role, text=text, reasoning=message.reasoning_content, calls=calls, answers=message.tool_call_id)


def _content(content: Any, where: str, omissions: Omissions) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where} must be text or a list of parts.", field=where)
    return "".join(_part(part, f"{where}[{i}]", omissions) for i, part in enumerate(content))


def _part(given: Any, where: str, omissions: Omissions) -> str:
    part = validate(ChatPart, given, where)
    if part.type in MEDIA_TYPES:
        return omissions.media(part.type)
    if part.type in _THOUGHTS:
        return ""
    text = part.refusal if part.type == "refusal" else part.text if part.type == "text" else None
    if text is None:
        raise BadRequest(f"{where} must be {{'type': 'text', 'text': ...}}.", field=where)
    return text


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
    at = f"{where}.function"
    function = validate(ChatFunction, _function(tool, where), at)
    if not function.name:
        raise BadRequest(f"{at}.name is missing.", field=f"{at}.name")
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=function.strict,
    )


def _function(holder: Any, where: str) -> Mapping[str, Any]:
    """The "function" object of a tool or a call. The holder's other fields are notes of its producer."""
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
