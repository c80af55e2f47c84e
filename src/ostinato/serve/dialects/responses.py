"""OpenAI's responses dialect, inbound: JSON bodies of `/v1/responses` to typed requests.

Every field is used, known to change nothing, or refused by name (`rules`). Field list: openai-python 3.52,
`types/responses/response_create_params.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.demands import ANY_OBJECT, AUTO, NONE, REQUIRED, demanded
from ostinato.serve.dialects.fields import MAX_MESSAGES, Name, OneAnswer, User, validate
from ostinato.serve.dialects.items import ReadItems, WithItems
from ostinato.serve.dialects.joining import joined
from ostinato.serve.dialects.responses_items import Offered, Read, read_items, read_tools
from ostinato.serve.dialects.rules import Fields, Ignored, Only

_Cached = Annotated[Any, Ignored("prompts are cached in any case")]
_Served = Annotated[Any, Ignored("all calls are served alike")]
_LOGPROBS = "message.output_text.logprobs"


class TextFormat(Fields):
    """The required format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    name: Annotated[Name | None, Ignored("the model is not told it")] = None
    description: Annotated[str | None, Ignored("the model is not told it")] = None
    strict: Annotated[bool | None, Ignored("a schema is always enforced")] = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("takes a schema with the type 'json_schema', and with no other")
        return self


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    name: Name


class Text(Fields):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, Ignored("the model decides by itself how much to write")] = None


class ResponsesRequest(OneAnswer, WithItems):
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
    access_programs: _Served = None
    service_tier: _Served = None
    client_metadata: Annotated[Any, Ignored("a note of the client for its own use")] = None
    prompt_cache_key: _Cached = None
    prompt_cache_options: _Cached = None
    prompt_cache_retention: _Cached = None
    reasoning: Annotated[Any, Ignored("the model decides by itself how long to think")] = None
    stream_options: Annotated[Any, Ignored("padding against traffic analysis is never sent")] = None
    truncation: Annotated[
        Any, Ignored("allows parts of a long prompt to be dropped; here it is refused if it is too long")
    ] = None
    context_management: Annotated[
        Any, Ignored("allows parts of a long prompt to be dropped; here it is refused if it is too long")
    ] = None
    max_tool_calls: Annotated[Any, Ignored("limits the tools of OpenAI's own, of which there are none here")] = None
    background: Annotated[Any, Only(False, why="is not supported: answers are sent at once")] = None
    conversation_: Annotated[
        Any,
        Only(why="is not supported: send previous_response_id or the whole input"),
        Field(alias="conversation"),
    ] = None
    image: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only(why="is not supported: send instructions and input")] = None
    top_logprobs: Annotated[Any, Only(0, why="is not supported: ask for logprobs in chat completions")] = None

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
            read_items(self.input, read, self._items)
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
            named=None if isinstance(choice, str) else self.read.called(choice.name),
            several=self.parallel_tool_calls is not False,
            schema=ANY_OBJECT if form and form.type == "json_object" else form.schema_ if form else None,
            omissions=self.read.omissions,
        )
        one_call = self.parallel_tool_calls is False
        return Conversation(messages=messages, tools=tools, demand=demand, one_call=one_call)

    @property
    def omitted(self) -> Sequence[str]:
        """What the model does not get of the request, as words of a header."""
        return self.read.omissions.words

    @property
    def repeated(self) -> dict[str, Any]:
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
    def offered(self) -> Mapping[str, Offered]:
        """How the client knows the offered tools, by the names that the model knows them by."""
        return self.read.offered

    @property
    def asker(self) -> str | None:
        """The user, if the body names one."""
        return self.user or self.safety_identifier or None

    @property
    def budget(self) -> int | None:
        """The most tokens that the client wants."""
        return self.max_output_tokens


def parse_responses(body: Any, items: ReadItems | None = None) -> ResponsesRequest:
    """A request for an answer. `items`: those of earlier requests. Raises BadRequest naming the field."""
    request = validate(ResponsesRequest, body).reading(items)
    _ = request.conversation  # so that errors in items are raised here
    return request
