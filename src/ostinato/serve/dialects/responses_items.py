"""Parses input items and tools of `/v1/responses` into the parts of a `Conversation`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ostinato.core.conversation import CompactionBlock, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.compaction_blocks import TriggerMessage, block_message, signature_invalid, unpacked_token
from ostinato.serve.dialects.dialect import MAX_TOOLS, MEDIA_TYPES, Name, Omissions, validate
from ostinato.serve.dialects.field_rules import Fields, Hidden, Ignored, Only
from ostinato.serve.dialects.items import ItemCache

_TEXTS = ("input_text", "output_text", "text")
_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM, "developer": Role.SYSTEM}
# Tools that Codex sends besides functions and that are unavailable here. Codex works without them.
_NOT_OFFERED = frozenset(["web_search", "web_search_preview", "local_shell", "image_generation", "tool_search"])
# Items of OpenAI's hosted tools in an earlier answer, which only OpenAI's servers can use.
_HOSTED = frozenset(
    [
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "tool_search_call",
        "web_search_call",
    ]
)
_REFERENCE = "item_reference"
# Other fields of an item (its id, status, phase) are metadata and are ignored.
_ITEM = ConfigDict(frozen=True, extra="ignore", strict=True)


class Offered(NamedTuple):
    """A tool as the client knows it: its name, and its namespace if it has one. `custom`: its input is plain text, not JSON."""

    name: str
    namespace: str = ""
    custom: bool = False


@dataclass(slots=True)
class Read:
    """Parsed items and tools. `offered`: the client's tools by the names that the model sees; `named`: the ids of the items that replaced
    references.
    """

    parts: list[Message] = field(default_factory=list[Message])
    tools: list[Tool] = field(default_factory=list[Tool])
    offered: dict[str, Offered] = field(default_factory=dict[str, Offered])
    omissions: Omissions = field(default_factory=Omissions)
    named: list[str] = field(default_factory=list[str])

    def model_name_of(self, name: str) -> str:
        """Return the name by which the model knows a tool, given the client's name without its namespace."""
        within = [known for known, offered in self.offered.items() if offered.name == name]
        return within[0] if len(within) == 1 else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMessage(Message):
    """A reference to an item of an earlier answer; the store of answers replaces it by the item's messages."""

    id: str


def read_items(given_items: Sequence[Any], read: Read, items: ItemCache | None = None) -> None:
    """Add the messages and tools of the input items. `items`: cache of parsed items. Raises BadRequest naming the field."""
    known = items or ItemCache()
    for i, item in enumerate(given_items):
        where = f"input[{i}]"
        try:
            read.parts += known.read(_item, item, where, read.omissions)
        except _HoldsTools as found:
            read_tools(found.tools, read, f"{where}.tools")


def messages_of(item: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages of an answer's item, as if the client had sent it back."""
    return tuple(_item(item, "input", Omissions()))


class _HoldsTools(Exception):
    """Raised for an item that holds tools instead of messages; tools are not cached but parsed with each request."""

    def __init__(self, tools: Any) -> None:
        super().__init__()
        self.tools = tools


def _item(item: Any, where: str, omissions: Omissions) -> Iterator[Message]:
    """Yield the messages of an input item. Raises _HoldsTools."""
    named = isinstance(item, dict) and "id" in item and "role" not in item
    given = _kind(item, where, default=_REFERENCE if named else "message")
    if given in _TOOLS_IN_ITEMS:
        raise _HoldsTools(item.get("tools") or [])
    if given in _HOSTED:
        omissions.add("hosted-tools")
        return
    reader = _READERS.get(given)
    if reader is None:
        raise BadRequest(
            f"{where}: an item of type {given[:100]!r} is not supported; send {', '.join(_READERS)}.",
            field=f"{where}.type",
        )
    yield from reader(item, where, omissions)


def read_tools(tools: Any, read: Read, where: str = "tools") -> None:
    """Add the tools that the model may call. Raises BadRequest naming the field."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise BadRequest(f"{where} must be a list of at most {MAX_TOOLS} tools.", field=where)
    for i, tool in enumerate(tools):
        at = f"{where}[{i}]"
        given = _kind(tool, at)
        if given == "namespace":
            _add_namespace(validate(NamespaceTool, tool, at), read, at)
        elif given in ("function", "custom"):
            _add_tool(tool, read, at)
        elif given in _NOT_OFFERED:
            read.omissions.add(f"tool-{given.replace('_', '-')}")
        else:
            raise BadRequest(
                f"{at}: a tool of type {given[:100]!r} is not supported; send functions, custom tools or namespaces.",
                field=f"{at}.type",
            )


# ---------------------------------------------------------------- items


class MessageItem(BaseModel):
    """A message."""

    model_config = _ITEM
    role: str
    content: Any


class CompactionItem(BaseModel):
    """A summary that this server made of everything before the item."""

    model_config = _ITEM
    encrypted_content: str


class ReferenceItem(BaseModel):
    """A reference to an item of an earlier answer by its id. The type may be left out."""

    model_config = _ITEM
    id: Name


class CallItem(BaseModel):
    """A function call."""

    model_config = _ITEM
    call_id: Name
    name: Name
    arguments: str
    namespace: str | None = None


class CustomCallItem(BaseModel):
    """A call of a tool whose input is plain text."""

    model_config = _ITEM
    call_id: Name
    name: Name
    input: str
    namespace: str | None = None


class ClientCallItem(BaseModel):
    """A call of one of OpenAI's tools that clients run themselves, such as a shell."""

    model_config = _ITEM
    type: str
    call_id: Name
    action: dict[str, Any] = Field(default_factory=dict[str, Any])
    operation: dict[str, Any] = Field(default_factory=dict[str, Any])


class ResultItem(BaseModel):
    """The result of a call."""

    model_config = _ITEM
    call_id: Name
    output: Any = None


def _message(item: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    said = validate(MessageItem, item, where)
    role = _ROLES.get(said.role)
    if role is None:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", field=f"{where}.role")
    empty = said.content is None and role is Role.ASSISTANT
    text = "" if empty else _text(said.content, f"{where}.content", omissions)
    if text or role is not Role.ASSISTANT:
        yield Message(role=role, text=text)


def _call(item: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    call = validate(CallItem, item, where)
    yield _call_message(call.call_id, _full_name(call.namespace or "", call.name), call.arguments)


def _custom_call(item: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    call = validate(CustomCallItem, item, where)
    arguments = json.dumps({"input": call.input}, ensure_ascii=False)
    yield _call_message(call.call_id, _full_name(call.namespace or "", call.name), arguments)


def _client_call(item: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    call = validate(ClientCallItem, item, where)
    values = json.dumps(call.action or call.operation, ensure_ascii=False)
    yield _call_message(call.call_id, call.type.removesuffix("_call"), values)


def _call_message(id: str, name: str, arguments: str) -> Message:
    return Message(role=Role.ASSISTANT, calls=(ToolCall(id=id, name=name, arguments=arguments),))


def _result(item: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    result = validate(ResultItem, item, where)
    text = "" if result.output is None else _text(result.output, f"{where}.output", omissions)
    yield Message(role=Role.TOOL, text=text, answers=result.call_id)


def _client_result(item: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    result = validate(ResultItem, item, where)
    output = result.output
    text = output if isinstance(output, str) else "" if output is None else json.dumps(output, ensure_ascii=False)
    yield Message(role=Role.TOOL, text=text, answers=result.call_id)


def _reasoning(item: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    """Yield the reasoning's text, if it has any. Encrypted or summarised reasoning comes from another provider and is dropped."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise BadRequest(f"{where}.content must be a list of parts.", field=f"{where}.content")
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if texts:
        yield Message(role=Role.ASSISTANT, reasoning="\n".join(texts))


_TOOLS_IN_ITEMS = ("additional_tools", "tool_search_output")  # where Codex puts its tools for some models


def _compaction(item: Any, where: str, omissions: Omissions) -> Iterator[Message]:
    token = validate(CompactionItem, item, where).encrypted_content
    content = unpacked_token(token, "input")[0].get("text")
    if not isinstance(content, str) or not content:
        raise signature_invalid("input")
    yield block_message(CompactionBlock(content=content, token=token, field="input"))


def _trigger(item: Any, where: str, omissions: Omissions) -> Iterator[Message]:
    yield TriggerMessage(role=Role.USER)


def _reference(item: Any, where: str, omissions: Omissions) -> Iterator[Message]:
    yield ReferenceMessage(role=Role.ASSISTANT, id=validate(ReferenceItem, item, where).id)


_READERS: dict[str, Callable[[Mapping[str, Any], str, Omissions], Iterator[Message]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _result,
    "reasoning": _reasoning,
    _REFERENCE: _reference,
    "compaction": _compaction,
    "compaction_trigger": _trigger,
    "local_shell_call": _client_call,
    "local_shell_call_output": _client_result,
    "shell_call": _client_call,
    "shell_call_output": _client_result,
    "apply_patch_call": _client_call,
    "apply_patch_call_output": _client_result,
}


def _text(content: Any, where: str, omissions: Omissions) -> str:
    """Return a text, or the concatenated texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of parts.", field=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        given = _kind(part, f"{where}[{i}]")
        if given in MEDIA_TYPES:
            texts.append(omissions.media(given))
            continue
        text = part.get("refusal" if given == "refusal" else "text")
        if given not in (*_TEXTS, "refusal") or not isinstance(text, str):
            raise BadRequest(
                f"{where}[{i}]: a part of type {given[:100]!r} is not supported; send input_text with a text.",
                field=f"{where}[{i}].type",
            )
        texts.append(text)
    return "".join(texts)


def _kind(value: Any, where: str, default: str | None = None) -> str:
    given = value.get("type") if isinstance(value, dict) else ""
    given = default if given is None else given
    if not isinstance(given, str) or not given:
        raise BadRequest(f"{where} must be an object with a type.", field=where)
    return given


# ---------------------------------------------------------------- tools


class _OfferedTool(Fields):
    """The fields that functions and custom tools share."""

    type: str
    name: Name
    description: str = ""
    defer_loading: Hidden = None
    allowed_callers: Annotated[Any, Only(["direct"], why="is not supported: only the model calls tools")] = None
    async_: Annotated[Any, Only(False, why="is not supported: a call's result is waited for"), Field(alias="async")] = (
        None
    )


class FunctionTool(_OfferedTool):
    """A function that the model may call."""

    parameters: dict[str, Any] = Field(default_factory=dict[str, Any])
    strict: bool = False
    output_schema: Annotated[Any, Ignored("describes what the tool returns, which only the client sees")] = None


class CustomTool(_OfferedTool):
    """A tool whose input is plain text. Its grammar is added to the description but not enforced."""

    format: dict[str, Any] = Field(default_factory=dict[str, Any])


class NamespaceTool(Fields):
    """Functions and custom tools under a common name. The model sees each as NAMESPACE__NAME; calls are returned with both names."""

    type: Literal["namespace"]
    name: Name
    tools: list[Any]
    description: str = ""


def _add_namespace(namespace: NamespaceTool, read: Read, where: str) -> None:
    about = f"All tools of {namespace.name}: {namespace.description}" if namespace.description else ""
    for i, tool in enumerate(namespace.tools):
        at = f"{where}.tools[{i}]"
        if _kind(tool, at) not in ("function", "custom"):
            raise BadRequest(f"{at}.type must be 'function' or 'custom'.", field=f"{at}.type")
        _add_tool(tool, read, at, namespace.name, about if i == 0 else "")


def _add_tool(given: Mapping[str, Any], read: Read, where: str, namespace: str = "", about: str = "") -> None:
    """Add a function or a custom tool, unless it was added before. `about` is appended to its description."""
    custom = given["type"] == "custom"
    tool = (
        _as_function(validate(CustomTool, given, where)) if custom else _function(validate(FunctionTool, given, where))
    )
    offered = Offered(tool.name, namespace, custom)
    name = _full_name(namespace, tool.name)
    known = read.offered.get(name)
    if known not in (None, offered):
        raise BadRequest(f"{where}.name: another tool is called {name[:200]!r} already.", field=f"{where}.name")
    if known is not None and namespace:
        return  # the tool was sent both with the request and with an item
    if len(read.tools) == MAX_TOOLS:
        raise BadRequest(f"{where} is one tool too many; send at most {MAX_TOOLS} in all.", field=where)
    read.offered[name] = offered
    description = "\n\n".join(filter(None, [tool.description, about]))
    read.tools.append(replace(tool, name=name, description=description))


def _full_name(namespace: str, name: str) -> str:
    """The name by which the model knows a tool of a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _function(function: FunctionTool) -> Tool:
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=function.strict,
    )


def _as_function(custom: CustomTool) -> Tool:
    """A plain-text tool, converted to a function with one string parameter."""
    grammar = custom.format.get("definition")
    told = [custom.description, f"The input follows this grammar:\n{grammar}" if grammar else ""]
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return Tool(name=custom.name, description="\n\n".join(filter(None, told)), parameters=parameters)
