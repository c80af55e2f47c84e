"""OpenAI's responses dialect, inbound: JSON bodies of `/v1/responses` to typed requests.

Every field is taken, refused by name, or known to be harmless; none is silently ignored. Field list: openai-python 3.52,
`types/responses/response_create_params.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.demands import ANY_OBJECT, AUTO, NONE, REQUIRED, demanded
from ostinato.serve.dialects.fields import MAX_MESSAGES, STRICT, Name, OneAnswer, User, take
from ostinato.serve.dialects.joining import joined
from ostinato.serve.dialects.responses_items import Read, read_items, read_tools

# Known fields that do not affect sampling here.
_HARMLESS = frozenset(
    [
        "client_metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",  # the model decides by itself how long to think
        "service_tier",
        "stream_options",  # padding against traffic analysis; never sent, requested or not
    ]
)
# Known fields that would change the answer: refused unless they hold one of these values.
_INERT: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_WHY_NOT = {"conversation": "is not supported; send previous_response_id, or the whole input"}
_LOGPROBS = "message.output_text.logprobs"


class TextFormat(BaseModel):
    """The required format of the answer's text."""

    model_config = STRICT
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None  # a schema is always enforced

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("takes a schema with the type 'json_schema', and with no other")
        return self


class NamedTool(BaseModel):
    """The tool that must be called."""

    model_config = STRICT
    type: Literal["function", "custom"]
    name: Name


class Text(BaseModel):
    """Options of the answer's text."""

    model_config = STRICT
    format: TextFormat | None = None
    verbosity: str | None = None  # ignored: the model decides by itself


class ResponsesRequest(OneAnswer):
    """`POST /v1/responses`."""

    model: Name
    input: str | list[Any] = Field(min_length=1, max_length=50_000_000)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    user: User | None = None
    safety_identifier: User | None = None

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        if _LOGPROBS in (include or []):
            raise ValueError(f"{_LOGPROBS} is not supported; leave it out")
        return include

    @cached_property
    def read(self) -> Read:
        """The parsed input and tools. Raises BadRequest."""
        read = Read()
        read_tools(self.tools or [], read)
        if isinstance(self.input, str):
            read.parts.append(Message(role=Role.USER, text=self.input))
        else:
            if len(self.input) > MAX_MESSAGES:
                raise BadRequest(f"input holds {len(self.input)} items; send at most {MAX_MESSAGES}.", field="input")
            read_items(self.input, read)
        return read

    @cached_property
    def conversation(self) -> Conversation:
        """This call's messages, the tools, and the constraint on the answer. Raises BadRequest."""
        return self.after(())

    def after(self, earlier: Sequence[Message]) -> Conversation:
        """The conversation with `earlier` messages before this call's input. Instructions come first; only this call's count.

        Raises BadRequest.
        """
        if not self.read.parts:
            raise BadRequest("input holds nothing to answer; send a message.", field="input")
        told = [Message(role=Role.SYSTEM, text=self.instructions)] if self.instructions else []
        messages = tuple(joined([*told, *earlier, *self.read.parts]))
        choice, form = self.tool_choice or AUTO, self.text.format if self.text else None
        tools = () if choice == NONE else tuple(self.read.tools)
        demand = demanded(
            tools,
            choice=choice if isinstance(choice, str) else REQUIRED,
            named=None if isinstance(choice, str) else choice.name,
            several=self.parallel_tool_calls is not False,
            schema=ANY_OBJECT if form and form.type == "json_object" else form.schema_ if form else None,
        )
        return Conversation(messages=messages, tools=tools, demand=demand)

    @property
    def echo(self) -> dict[str, Any]:
        """The fields of the request that the response repeats."""
        choice, asked = (
            self.tool_choice or AUTO,
            self.text.model_dump(by_alias=True, exclude_none=True) if self.text else {},
        )
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"}} | asked,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": self.tools or [],
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    @property
    def custom(self) -> frozenset[str]:
        """The names of the tools whose input is plain text."""
        return frozenset(self.read.custom)

    @property
    def asker(self) -> str | None:
        """The user, if the body names one."""
        return self.user or self.safety_identifier or None

    @property
    def budget(self) -> int | None:
        """The most tokens that the client wants."""
        return self.max_output_tokens


def parse_responses(body: Any) -> ResponsesRequest:
    """A request for an answer. Raises BadRequest naming the field."""
    request = take(ResponsesRequest, body, inert=_INERT, harmless=_HARMLESS, reasons=_WHY_NOT)
    _ = request.conversation  # so that errors in items are raised here
    return request
