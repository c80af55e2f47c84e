"""Anthropic's messages dialect: parses JSON bodies of `/v1/messages` and `/v1/messages/count_tokens` into typed requests.

Every field is used, ignored because it changes nothing, or refused by name (`field_rules`). Field list: anthropic-python 2.12,
`types/message_create_params.py` and `types/beta/message_create_params.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ostinato.core.conversation import CompactionBlock, Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.compaction_blocks import (
    BlockMessage,
    CompactionRefused,
    InCallCompaction,
    block_message,
    check_alone,
    from_last_block,
    misplaced,
    with_summary_request,
)
from ostinato.serve.dialects.context_edits import ContextManagement
from ostinato.serve.dialects.dialect import (
    AUTO,
    MAX_MESSAGES,
    MAX_TOOLS,
    NONE,
    REQUIRED,
    Name,
    Omissions,
    OneAnswer,
    User,
    build_demand,
    check_stops,
    printable,
    validate,
)
from ostinato.serve.dialects.field_rules import Cached, Fields, Hidden, Ignored, Only
from ostinato.serve.dialects.items import ItemCache, WithItems, joined

# ---------------------------------------------------------------- parsing


_MEDIA = ("image", "document", "search_result", "container_upload")
# blocks of Anthropic's hosted tools in an earlier answer, which only Anthropic's servers can use
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
_ALLOWED_TYPES = {
    Role.SYSTEM: ("text",),
    Role.USER: ("text", "tool_result", *_MEDIA),
    Role.ASSISTANT: ("text", "thinking", "redacted_thinking", "tool_use", *_MEDIA),
}


def read_messages(
    messages: Sequence[Mapping[str, Any]],
    system: str | list[dict[str, Any]] | None,
    omissions: Omissions,
    items: ItemCache | None = None,
) -> tuple[tuple[Message, ...], CompactionBlock | None]:
    """Parse messages. Return them, preceded by the system prompt, and the compaction block with which they begin. `omissions` collects what
    is omitted.

    Raises BadRequest naming the field.
    """
    known = items or ItemCache()
    parts = [part for i, said in enumerate(messages) for part in known.read(_read, said, f"messages[{i}]", omissions)]
    if not parts:
        raise BadRequest("messages contains nothing to answer; send a user's message.", field="messages")
    blocks = [place for place, part in enumerate(parts) if isinstance(part, BlockMessage) and part.alone]
    if len(blocks) > 1:
        message = "messages contains several compaction blocks; keep the newest, and leave out what comes before it."
        raise CompactionRefused("block_ambiguous", message, "messages")
    if blocks not in ([], [0]):
        raise misplaced("messages")
    parts, block = from_last_block(parts)
    if text := "" if system is None else _texts(system, "system", ("text",), omissions):
        parts.insert(0, Message(role=Role.SYSTEM, text=text))
    return tuple(joined(parts, items)), block


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Parse tools. Raises BadRequest naming the field."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


# ---------------------------------------------------------------- content blocks


class AnthropicMessage(Fields):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Any
    id: Annotated[Any, Ignored("a note of the client for its own use")] = None


class _Block(Fields):
    """The fields that all content blocks share."""

    type: str
    cache_control: Cached = None


class TextBlock(_Block):
    """A text."""

    text: str
    citations: Annotated[Any, Ignored("citations of an earlier answer are not part of its text")] = None


class ThinkingBlock(_Block):
    """The thinking before an answer; the chat template gets it."""

    thinking: str
    signature: Annotated[Any, Ignored("proves to Anthropic's servers that the thinking is theirs")] = None


class RedactedThinkingBlock(_Block):
    """Thinking that only Anthropic's servers can read; it is omitted."""

    data: Annotated[Any, Ignored("is encrypted")] = None


class CompactionContentBlock(_Block):
    """A summary that this server made of the messages before it. A block without content is a failed summary and is omitted."""

    content: str | None = Field(default=None, min_length=1)
    signature: str | None = None
    encrypted_content: str | None = None
    tool_changes: list[Any] | None = None


class _Direct(Fields):
    type: Literal["direct"]


class ToolUseBlock(_Block):
    """A tool call."""

    id: Name
    name: Name
    input: dict[str, Any]
    caller: _Direct | None = None
    toolset_name: Annotated[Any, Only()] = None


class ToolResultBlock(_Block):
    """The result of a call. The model learns of a failure from its text, since chat templates have no place for `is_error`."""

    tool_use_id: Name
    content: Any = None
    is_error: bool | None = None
    toolset_name: Annotated[Any, Only()] = None


class ToolReferenceBlock(_Block):
    """The name of a tool found by a search for deferred tools. Here all tools are offered from the start."""

    tool_name: Name


class SearchResultBlock(_Block):
    """A search result: a text with its title and source."""

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
    """A document. Its text is read, if it has one; a PDF or a stored file is replaced by a placeholder."""

    source: _Source = _Source()
    title: str = ""
    context: str = ""
    citations: Annotated[Any, Ignored("answers hold no citations")] = None


def _read(message: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    return joined(_parts_of(message, where, omissions))


def _parts_of(message: Mapping[str, Any], where: str, omissions: Omissions) -> Iterator[Message]:
    """Yield a message's parts in order; empty parts of an assistant are dropped."""
    parsed = validate(AnthropicMessage, message, where)
    role, content, where = Role(parsed.role), parsed.content, f"{where}.content"
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
    """Return the message of one content block; None if the block contributes nothing."""
    if role is not Role.SYSTEM and _type_of(block, where) in _HOSTED:
        omissions.add("hosted-tools")
        return None
    if role is not Role.SYSTEM and _type_of(block, where) == "compaction":
        return _compacted(validate(CompactionContentBlock, block, where))
    match _type(block, where, _ALLOWED_TYPES[role], f"a message of role {role}"):
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
            allowed = ("text", "tool_reference", *_MEDIA)
            text = "" if result.content is None else _texts(result.content, f"{where}.content", allowed, omissions)
            return Message(role=Role.TOOL, text=text, answers=result.tool_use_id, failed=bool(result.is_error))
        case type:
            text = _text(type, block, where, omissions)
            return Message(role=role, text=text) if text or role is not Role.ASSISTANT else None


def _compacted(block: CompactionContentBlock) -> Message | None:
    if block.content is None:
        return None
    if block.tool_changes:
        message = "The compaction block's tool_changes are not those that this server returned; send the block back as it was returned."
        raise CompactionRefused("tool_changes_mismatch", message, "messages")
    token = block.signature or block.encrypted_content or ""
    kept = CompactionBlock(content=block.content, token=token, field="messages")
    return block_message(kept, alone=block.signature is not None)


def _text(type: str, block: Any, where: str, omissions: Omissions) -> str:
    """Return the text of a block, or the placeholder for its medium."""
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
    """Return a document's text, or the placeholder for one without readable text, such as a PDF."""
    if source.type == "text" and isinstance(source.data, str):
        return source.data
    if source.type == "content":
        return _texts(source.content, f"{where}.source.content", ("text", "image"), omissions)
    return omissions.media("document")


def _texts(content: Any, where: str, allowed: tuple[str, ...], omissions: Omissions) -> str:
    """Return a text, or the texts of blocks whose types are in `allowed`, joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of text blocks.", field=where)
    kinds = [_type(block, f"{where}[{i}]", allowed, where) for i, block in enumerate(content)]
    return "\n".join(
        _text(kind, block, f"{where}[{i}]", omissions)
        for i, (kind, block) in enumerate(zip(kinds, content, strict=True))
    )


def _type(block: Any, where: str, allowed: tuple[str, ...], place: str) -> str:
    """Return a block's type. Raises BadRequest unless it is in `allowed`."""
    given = _type_of(block, where)
    if given == "compaction":
        raise misplaced(where)
    if given not in allowed:
        raise BadRequest(
            f"{where}: a block of type {given[:100]!r} is not supported in {place}; send {' or '.join(allowed)}.",
            field=f"{where}.type",
        )
    return given


def _type_of(block: Any, where: str) -> str:
    given = block.get("type") if isinstance(block, dict) else None
    if not isinstance(given, str):
        raise BadRequest(f"{where} must be a content block: an object with a type.", field=where)
    return given


# ---------------------------------------------------------------- tools


class AnthropicTool(Fields):
    """A tool that the model may call. Its input examples are added to its description."""

    name: Name
    input_schema: dict[str, Any]
    description: str = ""
    input_examples: list[Any] = Field(default_factory=list[Any])
    strict: bool = False
    type: Literal["custom"] | None = None
    cache_control: Cached = None
    defer_loading: Hidden = None
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


# ---------------------------------------------------------------- requests


_Decided = Annotated[Any, Ignored("the model decides by itself whether and how long to think")]
_Billing = Annotated[Any, Ignored("all calls are served alike")]
_CountOnly = Annotated[Any, Ignored("a prompt's length does not depend on it")]

_CHOICES = {"auto": AUTO, "none": NONE, "any": REQUIRED, "tool": REQUIRED}
# `session_id` identifies no user, but it shows that Claude Code wrote the text
_IDENTITIES = ("account_uuid", "device_id", "session_id")


class Metadata(Fields):
    """The user's identity. Claude Code writes a JSON object into `user_id`."""

    user_id: User | None = None

    @field_validator("user_id")
    @classmethod
    def _check_identities(cls, user_id: str | None) -> str | None:
        for value in _identities(user_id).values():
            printable(value)
        return user_id


class JsonFormat(Fields):
    """The required JSON format of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """Options for the answer."""

    format: JsonFormat | None = None
    effort: _Decided = None
    task_budget: Annotated[Any, Only(why="is not supported: the model does not see budgets")] = None


class ToolChoice(Fields):
    """Whether the model may call tools, must call one, or must call the named one."""

    type: Literal["auto", "none", "any", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("needs a name with the type 'tool', and takes none with another type")
        return self


class CompactionConfig(Fields):
    """Requests a summary of the conversation and nothing else."""

    type: Literal["summarize"]
    instructions: str | None = None


class _PromptRequest(WithItems):
    """The fields that determine the prompt, and those that change nothing."""

    model: Name
    messages: list[Any] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of `output_config.format`
    thinking: _Decided = None
    betas: Annotated[Any, Ignored("the fields of each feature decide")] = None
    billing_policy: _Billing = None
    cache_control: Cached = None
    context_management: ContextManagement | None = None
    diagnostics: Annotated[Any, Ignored("the metrics are the operator's")] = None
    fallback_credit_token: _Billing = None
    fallbacks: Annotated[Any, Ignored("for when a model declines, which this server never does")] = None
    service_tier: _Billing = None
    speed: _Billing = None
    user_profile_id: _Billing = None
    workspace_id: _Billing = None
    compaction: CompactionConfig | None = None
    container: Annotated[Any, Only()] = None
    inference_geo: Annotated[Any, Only()] = None
    mcp_servers: Annotated[
        Any, Only([], why="is not supported: connect to MCP servers yourself and offer their tools under tools")
    ] = None
    thread: Annotated[Any, Only(why="is not supported: send all messages with each request")] = None

    @cached_property
    def _read(self) -> tuple[Conversation, Sequence[str]]:
        """The conversation, and the omissions from it."""
        omissions = Omissions()
        messages, block = read_messages(self.messages, self.system, omissions, self._items)
        continued = messages[-1].role is Role.ASSISTANT and not self.compacts
        if continued and (messages[-1].calls or messages[-1].reasoning):
            where = f"messages[{len(self.messages) - 1}]"
            raise BadRequest(
                f"{where}: in a final assistant message only text can be continued, not thinking or tool_use; "
                "add the results of its calls, or a user's message.",
                field=f"{where}.content",
            )
        if continued and self.in_call is not None:
            raise BadRequest(
                "context_management: a conversation whose last message is to be continued cannot be summarised; end it with a user's.",
                field="context_management",
            )
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = read_tools(self.tools or [])
        form = (self.output_config.format if self.output_config else None) or self.output_format
        demand = build_demand(
            tools,
            choice=_CHOICES[choice.type],
            named=choice.name,
            several=not choice.disable_parallel_tool_use,
            schema=None if form is None else form.schema_,
            omissions=omissions,
        )
        conversation = Conversation(
            messages=messages,
            tools=tools,
            continued=continued,
            demand=demand,
            one_call=bool(choice.disable_parallel_tool_use),
            block=block,
        )
        if self.compacts and self.compaction is not None:
            check_alone(
                {
                    "context_management": self.context_management,
                    "stop_sequences": getattr(self, "stop_sequences", None),
                    "tool_choice": choice.type in ("any", "tool"),
                    "output_config.format": form,
                }
            )
            conversation = with_summary_request(conversation, self.compaction.instructions, "messages")
        return conversation, omissions.words

    @property
    def compacts(self) -> bool:
        """True if the request asks for a summary of the conversation and nothing else."""
        return self.compaction is not None

    @property
    def in_call(self) -> InCallCompaction | None:
        """The wish for compaction within the call once the prompt is long."""
        return None if self.context_management is None else self.context_management.compaction

    @property
    def conversation(self) -> Conversation:
        """The messages so far, the tools, and the constraint on the answer. Raises BadRequest."""
        return self._read[0]

    @property
    def omitted(self) -> Sequence[str]:
        """The parts of the request that are omitted from the prompt, as words of a header."""
        return self._read[1]


class CountRequest(_PromptRequest):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: _CountOnly = None
    metadata: _CountOnly = None
    stop_sequences: _CountOnly = None
    stream: _CountOnly = None
    temperature: _CountOnly = None
    top_p: _CountOnly = None
    presence_penalty: _CountOnly = None
    frequency_penalty: _CountOnly = None
    logit_bias: _CountOnly = None
    logprobs: _CountOnly = None
    seed: _CountOnly = None
    n_: Annotated[_CountOnly, Field(alias="n")] = None

    @property
    def compacts(self) -> bool:
        """False: the conversation is counted as sent."""
        return False


class MessagesRequest(_PromptRequest, OneAnswer):
    """`POST /v1/messages`. A final assistant message is continued by the answer."""

    max_tokens: int = Field(ge=1, le=10_000_000)
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None

    @field_validator("stop_sequences")
    @classmethod
    def _check_stops(cls, stops: list[str] | None) -> list[str] | None:
        check_stops(stops or [])
        return stops

    @property
    def asker(self) -> str | None:
        """The user: Claude Code's account or device, or another client's `user_id`; None if the body names none."""
        named = _identities(self._user_id)
        return named.get("account_uuid") or named.get("device_id") if named else self._user_id or None

    @property
    def budget(self) -> int | None:
        """The client's token limit for the answer."""
        return self.max_tokens

    @property
    def stops(self) -> Sequence[str]:
        return self.stop_sequences or ()

    @property
    def store(self) -> None:
        """None: this dialect has no such field."""
        return None

    @property
    def _user_id(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id


def parse_messages(body: Any, items: ItemCache | None = None) -> MessagesRequest:
    """Parse a request for an answer. `items`: cache of parsed items. Raises BadRequest naming the field."""
    request = validate(MessagesRequest, body).reading(items)
    _ = request.conversation  # so that errors in messages are raised here
    return request


def parse_count(body: Any, items: ItemCache | None = None) -> CountRequest:
    """Parse a request to count a conversation's tokens. `items`: cache of parsed items. Raises BadRequest naming the field."""
    request = validate(CountRequest, body).reading(items)
    _ = request.conversation  # so that errors in messages are raised here
    return request


def _identities(user_id: str | None) -> dict[str, str]:
    """Return the identities that Claude Code puts into `metadata.user_id`; {} for other clients' text."""
    try:
        named = json.loads(user_id or "")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(named, dict):
        return {}
    return {name: named[name] for name in _IDENTITIES if isinstance(named.get(name), str) and named[name]}
