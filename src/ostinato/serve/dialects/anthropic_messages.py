"""Messages and tools of `/v1/messages` as the parts of a `Conversation`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.fields import Name, validate
from ostinato.serve.dialects.items import ReadItems
from ostinato.serve.dialects.joining import joined
from ostinato.serve.dialects.omissions import Omissions
from ostinato.serve.dialects.rules import Fields, Ignored, Only

_MEDIA = ("image", "document", "search_result", "container_upload")
# what Anthropic's own tools did in an earlier answer, which only its servers can use
_HOSTED = frozenset(
    [
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]
)
_TAKEN = {
    Role.SYSTEM: ("text",),
    Role.USER: ("text", "tool_result", *_MEDIA),
    Role.ASSISTANT: ("text", "thinking", "redacted_thinking", "tool_use", *_MEDIA),
}
_Cached = Annotated[Any, Ignored("prompts are cached in any case")]
_Hidden = Annotated[Any, Ignored("saves context by hiding a tool at first; here it is offered at once")]


def read_messages(
    messages: Sequence[Mapping[str, Any]],
    system: str | list[dict[str, Any]] | None,
    omissions: Omissions,
    items: ReadItems | None = None,
) -> tuple[Message, ...]:
    """The messages, preceded by the system's text. `omissions` is told what is left out of them. Raises BadRequest naming the field."""
    known = items or ReadItems()
    parts = [part for i, said in enumerate(messages) for part in known.read(_read, said, f"messages[{i}]", omissions)]
    if not parts:
        raise BadRequest("messages holds nothing to answer; send a user's message.", field="messages")
    if text := "" if system is None else _texts(system, "system", ("text",), omissions):
        parts.insert(0, Message(role=Role.SYSTEM, text=text))
    return tuple(joined(parts))


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The tools. Raises BadRequest naming the field."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


# ---------------------------------------------------------------- messages


class AnthropicMessage(Fields):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Any
    id: Annotated[Any, Ignored("a note of the client for its own use")] = None


class _Block(Fields):
    """The fields of every content block."""

    type: str
    cache_control: _Cached = None


class TextBlock(_Block):
    """A text."""

    text: str
    citations: Annotated[Any, Ignored("citations of an earlier answer are not part of its text")] = None


class ThinkingBlock(_Block):
    """The thinking before an answer, which the template gets."""

    thinking: str
    signature: Annotated[Any, Ignored("proves to Anthropic's servers that the thinking is theirs")] = None


class RedactedThinkingBlock(_Block):
    """Thinking that only Anthropic's servers can read; it is left out."""

    data: Annotated[Any, Ignored("is encrypted")] = None


class _Direct(Fields):
    type: Literal["direct"]


class ToolUseBlock(_Block):
    """A call."""

    id: Name
    name: Name
    input: dict[str, Any]
    caller: _Direct | None = None
    toolset_name: Annotated[Any, Only()] = None


class ToolResultBlock(_Block):
    """The result of a call. Models learn of a failure from its text, as templates have no place for `is_error`."""

    tool_use_id: Name
    content: Any = None
    is_error: bool | None = None
    toolset_name: Annotated[Any, Only()] = None


class ToolReferenceBlock(_Block):
    """The name of a tool that a search for deferred tools found; here all tools are offered from the start."""

    tool_name: Name


class SearchResultBlock(_Block):
    """A text that a search found."""

    title: str
    source: str
    content: list[Any]
    citations: Annotated[Any, Ignored("answers hold no citations")] = None


class _Source(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    type: str = ""
    data: Any = None
    content: Any = None


class DocumentBlock(_Block):
    """A document. The text of one that has a text is read; a PDF or a stored file is replaced by words."""

    source: _Source = _Source()
    title: str = ""
    context: str = ""
    citations: Annotated[Any, Ignored("answers hold no citations")] = None


def _read(message: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    return joined(_said(message, where, omissions))


def _said(message: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    """The parts of a message, in order, without empty ones of an assistant."""
    said = validate(AnthropicMessage, message, where)
    role, content, where = Role(said.role), said.content, f"{where}.content"
    if content is None and role is Role.ASSISTANT:
        return
    if isinstance(content, str):
        if content or role is not Role.ASSISTANT:
            yield Message(role=role, text=content)
        return
    if not isinstance(content, list) or not (content or role is Role.ASSISTANT):
        raise BadRequest(f"{where} must be text or a list of content blocks.", field=where)
    for i, block in enumerate(content):
        part = _part(role, block, f"{where}[{i}]", omissions)
        if part is not None:
            yield part


def _part(role: Role, block: Any, where: str, omissions: Omissions) -> Message | None:
    """The message of one content block; None if it has no content."""
    if role is not Role.SYSTEM and _given(block, where) in _HOSTED:
        omissions.add("hosted-tools")
        return None
    match _type(block, where, _TAKEN[role], f"a message of role {role}"):
        case "thinking":
            return Message(role=role, reasoning=validate(ThinkingBlock, block, where).thinking)
        case "redacted_thinking":
            validate(RedactedThinkingBlock, block, where)
            return None
        case "tool_use":
            use = validate(ToolUseBlock, block, where)
            arguments = json.dumps(use.input, ensure_ascii=False, separators=(",", ":"))
            return Message(role=role, calls=(ToolCall(id=use.id, name=use.name, arguments=arguments),))
        case "tool_result":
            result = validate(ToolResultBlock, block, where)
            taken = ("text", "tool_reference", *_MEDIA)
            text = "" if result.content is None else _texts(result.content, f"{where}.content", taken, omissions)
            return Message(role=Role.TOOL, text=text, answers=result.tool_use_id, failed=bool(result.is_error))
        case type:
            text = _text(type, block, where, omissions)
            return Message(role=role, text=text) if text or role is not Role.ASSISTANT else None


def _text(type: str, block: Any, where: str, omissions: Omissions) -> str:
    """The text of a block of one of the types that have a text or are replaced by one."""
    match type:
        case "text":
            return validate(TextBlock, block, where).text
        case "tool_reference":
            return validate(ToolReferenceBlock, block, where).tool_name
        case "search_result":
            found = validate(SearchResultBlock, block, where)
            texts = _texts(found.content, f"{where}.content", ("text",), omissions)
            return "\n".join([found.title, found.source, texts])
        case "document":
            document = validate(DocumentBlock, block, where)
            text = _document(document.source, where, omissions)
            return "\n".join(filter(None, [document.title, document.context, text]))
        case _:
            return omissions.media(type)


def _document(source: _Source, where: str, omissions: Omissions) -> str:
    """The text of a document that has one; that of a PDF is not read."""
    if source.type == "text" and isinstance(source.data, str):
        return source.data
    if source.type == "content":
        return _texts(source.content, f"{where}.source.content", ("text", "image"), omissions)
    return omissions.media("document")


def _texts(content: Any, where: str, taken: tuple[str, ...], omissions: Omissions) -> str:
    """Text, or the texts of blocks of the types that may be there, joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of text blocks.", field=where)
    kinds = [_type(block, f"{where}[{i}]", taken, where) for i, block in enumerate(content)]
    return "\n".join(
        _text(kind, block, f"{where}[{i}]", omissions)
        for i, (kind, block) in enumerate(zip(kinds, content, strict=True))
    )


def _type(block: Any, where: str, taken: tuple[str, ...], place: str) -> str:
    """A block's type. Raises BadRequest unless it is allowed in that place."""
    given = _given(block, where)
    if given not in taken:
        raise BadRequest(
            f"{where}: a block of type {given[:100]!r} is not supported in {place}; send {' or '.join(taken)}.",
            field=f"{where}.type",
        )
    return given


def _given(block: Any, where: str) -> str:
    given = block.get("type") if isinstance(block, dict) else None
    if not isinstance(given, str):
        raise BadRequest(f"{where} must be a content block: an object with a type.", field=where)
    return given


# ---------------------------------------------------------------- tools


class AnthropicTool(Fields):
    """A tool that the model may call. Examples of its input are put into its description."""

    name: Name
    input_schema: dict[str, Any]
    description: str = ""
    input_examples: list[Any] = Field(default_factory=list[Any])
    strict: bool = False
    type: Literal["custom"] | None = None
    cache_control: _Cached = None
    defer_loading: _Hidden = None
    eager_input_streaming: Annotated[Any, Ignored("a call is sent whole, when it is complete")] = None
    allowed_callers: list[Literal["direct"]] | None = None


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    given = tool.get("type")
    if given not in (None, "custom"):
        raise BadRequest(
            f"{where}.type: {str(given)[:100]!r} is a tool of Anthropic's own, which this server does not have; leave it out, "
            "or describe a tool of yours with name, description and input_schema.",
            field=f"{where}.type",
        )
    known = validate(AnthropicTool, tool, where)
    examples = [json.dumps(example, ensure_ascii=False) for example in known.input_examples]
    shown = ["\n".join(["Examples of its input:", *examples])] if examples else []
    return Tool(
        name=known.name,
        description="\n\n".join(filter(None, [known.description, *shown])),
        parameters=known.input_schema,
        strict=known.strict,
    )
