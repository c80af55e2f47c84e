"""OpenAI's chat and completion requests: parses JSON bodies of `/v1/chat/completions` and `/v1/completions` into typed requests.

Every field is used, ignored because it changes nothing, or refused by name (`field_rules`). Field list: openai-python 3.52,
`types/chat/completion_create_params.py` and `types/completion_create_params.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.core.records import Sampling
from ostinato.serve.dialects.dialect import (
    ANY_OBJECT,
    AUTO,
    MAX_MESSAGES,
    MAX_TOOLS,
    MEDIA_TYPES,
    REQUIRED,
    Name,
    Omissions,
    User,
    build_demand,
    check_stops,
    sampling_of,
    validate,
)
from ostinato.serve.dialects.extensions import Extensions
from ostinato.serve.dialects.field_rules import Cached, Fields, Hidden, Ignored, Only, too_wide
from ostinato.serve.dialects.items import ItemCache, WithItems

# ---------------------------------------------------------------- messages


_C = TypeVar("_C", bound="ChatRequest")
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
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # types of parts in other providers' answers
_Text = Annotated[str, Field(max_length=512)]
_Note = Annotated[Any, Ignored("a note of another provider or a client library for its own use")]
_Thought = Annotated[Any, Ignored("another provider's reasoning is kept out of the prompt")]


class ChatMessage(Fields):
    """A message. The chat template gets its text, calls and reasoning."""

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
    """A part of a message's content. Other fields are metadata and are ignored."""

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
    defer_loading: Hidden = None
    output_schema: Annotated[Any, Ignored("describes what the tool returns, which only the client sees")] = None


def read_messages(
    messages: Sequence[Mapping[str, Any]], omissions: Omissions | None = None, items: ItemCache | None = None
) -> tuple[Message, ...]:
    """Parse messages. `omissions` collects what is omitted; `items`: cache of parsed items. Raises BadRequest naming the field."""
    told, known = omissions or Omissions(), items or ItemCache()
    return tuple(
        part for i, message in enumerate(messages) for part in known.read(_read, message, f"messages[{i}]", told)
    )


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Parse tools. Raises BadRequest naming the field."""
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
    # histories contain answers that were stopped before their first word, and tool results without output
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
    """Return the "function" object of a tool or a call. The holder's other fields are metadata and are ignored."""
    if not isinstance(holder, dict) or holder.get("type") not in (None, "function"):
        raise BadRequest(f"{where}.type must be 'function': other tools are not supported.", field=f"{where}.type")
    function = holder.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{where}.function must be an object.", field=f"{where}.function")
    return function


def _text_of(holder: Mapping[str, Any], name: str, where: str, longest: int | None = None) -> str:
    """Return a field's text; "" if it is null or missing."""
    text = holder.get(name)
    if text is None:
        return ""
    if not isinstance(text, str) or (longest is not None and len(text) > longest):
        limit = "" if longest is None else f" of at most {longest} characters"
        raise BadRequest(f"{where}.{name} must be text{limit}.", field=f"{where}.{name}")
    return text


# ---------------------------------------------------------------- requests


MAX_N = 128

_CHAT = "is for chat completions only"


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, Ignored("padding against traffic analysis is never sent")] = None
    continuous_usage_stats: Annotated[Any, Ignored("the counts come once, with the last event")] = None


class _Request(Extensions):
    """The fields that both endpoints share."""

    model: Name
    max_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: User | None = None
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024)
    store: bool | None = None
    metadata: Annotated[Any, Ignored("a note of the client for its own use")] = None
    service_tier: Annotated[Any, Ignored("all calls are served alike")] = None
    prompt_cache_key: Cached = None
    prompt_cache_options: Cached = None
    prompt_cache_retention: Cached = None
    suffix: Annotated[Any, Only("")] = None

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token, value in (bias or {}).items():
            plain = token.isascii() and token.isdigit() and len(token) < 10 and str(int(token)) == token
            if not plain or not -100 <= value <= 100:
                raise ValueError("takes token ids as text, each once, and values in [-100, 100]")
        return bias

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        check_stops([stop] if isinstance(stop, str) else stop or [])
        return stop

    @property
    def budget(self) -> int | None:
        """The client's token limit for the answer."""
        return self.max_tokens

    @property
    def asker(self) -> str | None:
        """The user, if the body names one."""
        return self.user or None

    @property
    def wants_usage(self) -> bool:
        """True if a stream must end with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the sampling parameters with this token limit."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return replace(
            sampling_of(max_tokens, self.temperature, self.top_p, stops),
            seed=self.seed,
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            logit_bias=tuple((int(token), float(value)) for token, value in (self.logit_bias or {}).items() if value),
        )


class _Named(Fields):
    name: Name


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: _Named


class JsonSchema(Fields):
    """A schema that the answer's text must follow."""

    schema_: dict[str, Any] = Field(default_factory=dict[str, Any], alias="schema")
    name: Annotated[Name, Ignored("the model is not told it")]
    description: Annotated[Any, Ignored("the model is not told it")] = None
    strict: Annotated[Any, Ignored("a schema is always enforced")] = None


class ResponseFormat(Fields):
    """The required format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("needs json_schema with the type 'json_schema', and takes none with another type")
        return self

    @property
    def schema_of_text(self) -> Mapping[str, Any] | None:
        """The schema of the answer's JSON; None for free text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class ChatRequest(_Request, WithItems):
    """`POST /v1/chat/completions`. `continue_final_message` continues the last (assistant) message, as in vLLM."""

    messages: list[Any] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    safety_identifier: User | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: Annotated[Any, Ignored("a hint that may make an answer faster but does not change it")] = None
    reasoning: Annotated[Any, Ignored("the model decides by itself how long to think")] = None
    thinking: Annotated[Any, Ignored("the model decides by itself how long to think")] = None
    functions: Annotated[Any, Only([], why="is not supported: send tools")] = None
    function_call: Annotated[Any, Only("none", "auto", why="is not supported: send tool_choice")] = None
    audio: Annotated[Any, Only(why="is not supported: answers are text")] = None
    modalities: Annotated[Any, Only(["text"], why="is not supported: answers are text")] = None
    moderation: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only(why="is not supported: offer a search of your own under tools")] = None

    @cached_property
    def _read(self) -> tuple[Conversation, Sequence[str]]:
        """The conversation, and the omissions from it."""
        omissions = Omissions()
        choice, form = self.tool_choice or AUTO, self.response_format
        tools = read_tools(self.tools or [])
        demand = build_demand(
            tools,
            choice=choice if isinstance(choice, str) else REQUIRED,
            named=None if isinstance(choice, str) else choice.function.name,
            several=self.parallel_tool_calls is not False,
            schema=None if form is None else form.schema_of_text,
            omissions=omissions,
        )
        conversation = Conversation(
            messages=read_messages(self.messages, omissions, self._items),
            tools=tools,
            continued=self.continue_final_message,
            demand=demand,
            one_call=self.parallel_tool_calls is False,
        )
        return conversation, omissions.words

    @property
    def conversation(self) -> Conversation:
        """The messages so far, the tools, and the constraint on the answer. Raises BadRequest."""
        return self._read[0]

    @property
    def omitted(self) -> Sequence[str]:
        """The parts of the request that are omitted from the prompt, as words of a header."""
        return self._read[1]

    @property
    def budget(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def asker(self) -> str | None:
        return self.user or self.safety_identifier or None

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's log-probability must be returned."""
        return bool(self.logprobs)

    @property
    def tops(self) -> int:
        """The number of top log-probabilities to return at each sampled position."""
        return self.top_logprobs or 0


class CompletionRequest(_Request):
    """`POST /v1/completions`. A prompt is text or token ids."""

    prompt: str | list[int]
    logprobs: int | None = Field(default=None, ge=0, le=5)
    tools: Annotated[Any, Only([], why=_CHAT)] = None
    tool_choice: Annotated[Any, Only("none", "auto", why=_CHAT)] = None
    parallel_tool_calls: Annotated[Any, Ignored("there are no tools")] = None
    response_format: Annotated[Any, Only({"type": "text"}, why=_CHAT)] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        """Unwrap a prompt in a list of one."""
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("takes text, token ids, or a list of one of these")
        if isinstance(prompt[0], str | list) and len(prompt) > 1:
            raise ValueError("contains several prompts; send one per request")
        one = prompt[0] if isinstance(prompt[0], str | list) else prompt
        if wide := too_wide({"prompt": one}):
            raise ValueError(wide[1])
        return one

    @property
    def omitted(self) -> Sequence[str]:
        """Nothing is ever omitted from a prompt."""
        return ()

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's log-probability must be returned."""
        return self.logprobs is not None

    @property
    def tops(self) -> int:
        """The number of top log-probabilities to return at each sampled position."""
        return self.logprobs or 0


class _ScoreRequest(ChatRequest):
    """`POST /v1/worlds/score`, an operator's route: a chat request, and the answer to be scored."""

    answer: str = Field(min_length=1, max_length=65_536)


def parse_chat(body: Any, items: ItemCache | None = None) -> ChatRequest:
    """Parse a chat request. `items`: cache of parsed items. Raises BadRequest naming the field."""
    return _checked(validate(ChatRequest, body).reading(items))


def parse_score(body: Any, items: ItemCache | None = None) -> _ScoreRequest:
    """Parse a chat request with an answer to be scored. `items`: cache of parsed items. Raises BadRequest naming the field."""
    return _checked(validate(_ScoreRequest, body).reading(items))


def _checked(request: _C) -> _C:
    last = len(request.messages) - 1
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", field="top_logprobs")
    if request.continue_final_message == request.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt must differ: the model either continues the message or begins a new one.",
            field="continue_final_message",
        )
    final = request.conversation.messages[last]
    if request.continue_final_message and (final.role is not Role.ASSISTANT or final.calls):
        raise BadRequest(
            f"continue_final_message needs an assistant's text at the end; messages[{last}] is none.",
            field=f"messages[{last}].role",
        )
    return request


def parse_completion(body: Any, items: ItemCache | None = None) -> CompletionRequest:
    """Parse a completion request. Raises BadRequest naming the field."""
    return validate(CompletionRequest, body)


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """Raise BadRequest for an empty prompt, or for a token id that the model does not have."""
    if not prompt:
        raise BadRequest("prompt is empty; send at least one token.", field="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise BadRequest(f"prompt contains a token id outside [0, {vocab_size}).", field="prompt")
