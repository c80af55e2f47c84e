"""The OpenAI dialect, inbound: JSON bodies of `/v1/chat/completions` and `/v1/completions` to typed requests.

Every field is taken, refused by name, or known to be harmless; none is silently ignored. Field list: openai-python 3.52,
`types/chat/completion_create_params.py` and `types/completion_create_params.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, field_validator, model_validator

from ostinato.core.conversation import Conversation, Role
from ostinato.core.errors import BadRequest
from ostinato.core.records import Sampling
from ostinato.serve.dialects.demands import ANY_OBJECT, AUTO, NONE, REQUIRED, demanded
from ostinato.serve.dialects.fields import MAX_MESSAGES, STRICT, Name, User, check_stops, take
from ostinato.serve.dialects.openai_messages import read_messages, read_tools

MAX_N = 128
_Body = TypeVar("_Body", bound=BaseModel)

# Known fields that do not affect sampling here.
_HARMLESS = frozenset(
    [
        "store",
        "service_tier",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    ]
)
# Known fields that would change the answer: refused unless they hold one of these values.
_INERT: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "suffix": (None, ""),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none"),
    "tools": (None, []),
}


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = STRICT
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; never sent, requested or not


class _Request(BaseModel):
    """The fields that both endpoints share."""

    model_config = STRICT
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
        """The most tokens that the client wants."""
        return self.max_tokens

    @property
    def asker(self) -> str | None:
        """The user, if the body names one."""
        return self.user or None

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> Sampling:
        """The sampling parameters, with this token budget."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            stop=tuple(stops),
            seed=self.seed,
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            logit_bias=tuple((int(token), float(value)) for token, value in (self.logit_bias or {}).items() if value),
        )


class _Named(BaseModel):
    model_config = STRICT
    name: Name


class NamedTool(BaseModel):
    """The tool that must be called."""

    model_config = STRICT
    type: Literal["function"]
    function: _Named


class _JsonSchema(BaseModel):
    model_config = STRICT
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict[str, Any], alias="schema")
    strict: bool | None = None  # the schema is always enforced


class ResponseFormat(BaseModel):
    """The required format of the answer's text."""

    model_config = STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("takes json_schema with the type 'json_schema', and with no other")
        return self

    @property
    def schema_of_text(self) -> Mapping[str, Any] | None:
        """The schema of its JSON; None for free text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class ChatRequest(_Request):
    """`POST /v1/chat/completions`. `continue_final_message` continues the last (assistant) message, as in vLLM."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
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

    @cached_property
    def conversation(self) -> Conversation:
        """The messages so far, the tools, and the constraint on the answer. Raises BadRequest."""
        choice, form = self.tool_choice or AUTO, self.response_format
        tools = () if choice == NONE else read_tools(self.tools or [])
        demand = demanded(
            tools,
            choice=choice if isinstance(choice, str) else REQUIRED,
            named=None if isinstance(choice, str) else choice.function.name,
            several=self.parallel_tool_calls is not False,
            schema=None if form is None else form.schema_of_text,
        )
        continued = self.continue_final_message
        return Conversation(messages=read_messages(self.messages), tools=tools, continued=continued, demand=demand)

    @property
    def budget(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def asker(self) -> str | None:
        return self.user or self.safety_identifier or None

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's log-probability is to be returned."""
        return bool(self.logprobs)

    @property
    def tops(self) -> int:
        """How many of the likeliest tokens to return at each sampled token's place."""
        return self.top_logprobs or 0


class CompletionRequest(_Request):
    """`POST /v1/completions`. A prompt is text or token ids."""

    prompt: str | list[int]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        """Unwraps a prompt in a list of one."""
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("takes text, token ids, or a list of one of these")
        if isinstance(prompt[0], str | list) and len(prompt) > 1:
            raise ValueError("holds several prompts; send one per request")
        return prompt[0] if isinstance(prompt[0], str | list) else prompt

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's log-probability is to be returned."""
        return self.logprobs is not None

    @property
    def tops(self) -> int:
        """How many of the likeliest tokens to return at each sampled token's place."""
        return self.logprobs or 0


def parse_chat(body: Any) -> ChatRequest:
    """A chat request. Raises BadRequest naming the field."""
    request = _parse(ChatRequest, body)
    last = len(request.messages) - 1
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", field="top_logprobs")
    if request.continue_final_message == request.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt must differ: the model either goes on or starts anew.",
            field="continue_final_message",
        )
    final = request.conversation.messages[last]
    if request.continue_final_message and (final.role is not Role.ASSISTANT or final.calls):
        raise BadRequest(
            f"continue_final_message needs an assistant's text at the end; messages[{last}] is none.",
            field=f"messages[{last}].role",
        )
    return request


def parse_completion(body: Any) -> CompletionRequest:
    """A completion request. Raises BadRequest naming the field."""
    return _parse(CompletionRequest, body)


def _parse(model: type[_Body], body: Any) -> _Body:
    inert = _INERT if model is ChatRequest else _INERT | _CHAT_ONLY
    return take(model, body, inert=inert, harmless=_HARMLESS)
