"""OpenAI's responses dialect, inbound: JSON bodies of `/v1/responses` to typed requests.

Every field is taken, refused by name, or known to be harmless; none is silently ignored. Field list: openai-python 3.52,
`types/responses/response_create_params.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pydantic import BaseModel, Field, field_validator

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadRequest
from ostinato.core.records import Sampling
from ostinato.serve.dialects.fields import MAX_MESSAGES, STRICT, Name, User, take
from ostinato.serve.dialects.responses_items import Read, read_items, read_tools

# Known fields that change nothing in what is sampled here.
_HARMLESS = frozenset(
    [
        "client_metadata",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",  # how long the model thinks is its own affair
        "service_tier",
        "store",
        "stream_options",  # padding against traffic analysis: asked for or not, none is sent
    ]
)
# Known fields that would change the answer: refused unless they hold one of these values.
_INERT: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_WHY_NOT = {
    "conversation": "is not supported: nothing is kept for the next call; send the whole input",
    "previous_response_id": "is not supported: nothing is kept for the next call; send the whole input",
}
_LOGPROBS = "message.output_text.logprobs"


class Text(BaseModel):
    """How the answer's text is to be."""

    model_config = STRICT
    format: dict[str, Any] | None = None
    verbosity: str | None = None  # is the model's own affair

    @field_validator("format")
    @classmethod
    def _check_format(cls, format: dict[str, Any] | None) -> dict[str, Any] | None:
        if format is not None and format.get("type") != "text":
            raise ValueError(
                "takes {'type': 'text'} only: anything else needs constrained decoding, which is not supported yet"
            )
        return format


class ResponsesRequest(BaseModel):
    """`POST /v1/responses`."""

    model_config = STRICT
    model: Name
    input: str | list[Any] = Field(min_length=1, max_length=50_000_000)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: Text | None = None
    include: list[str] | None = None
    user: User | None = None
    safety_identifier: User | None = None

    @field_validator("tool_choice")
    @classmethod
    def _check_choice(cls, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if choice not in (None, "none", "auto"):
            raise ValueError("takes 'auto' or 'none': the model cannot be made to call a tool yet")
        return choice

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        if _LOGPROBS in (include or []):
            raise ValueError(f"{_LOGPROBS} is not supported; leave it out")
        return include

    @cached_property
    def read(self) -> Read:
        """What the input and the tools say. Raises BadRequest."""
        read = Read()
        if self.instructions:
            read.parts.append(Message(role=Role.SYSTEM, text=self.instructions))
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
        """What was said so far, and the tools that the model may call. Raises BadRequest."""
        messages = self.read.messages()
        if not messages:
            raise BadRequest("input holds nothing to answer; send a message.", field="input")
        return Conversation(messages=messages, tools=() if self.tool_choice == "none" else tuple(self.read.tools))

    @property
    def custom(self) -> frozenset[str]:
        """The tools whose input is plain text."""
        return frozenset(self.read.custom)

    @property
    def asker(self) -> str | None:
        """Who asks, if the body says so."""
        return self.user or self.safety_identifier or None

    @property
    def n(self) -> int | None:
        """How many answers: this dialect knows one only."""
        return None

    @property
    def budget(self) -> int | None:
        """The most tokens that the client wants."""
        return self.max_output_tokens

    @property
    def wants_usage(self) -> bool:
        """True: each stream ends with the token counts."""
        return True

    @property
    def wants_logprobs(self) -> bool:
        """False: they are refused."""
        return False

    def sampling(self, max_tokens: int) -> Sampling:
        """How to sample, with this token budget."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
        )


def parse_responses(body: Any) -> ResponsesRequest:
    """A request for an answer. Raises BadRequest naming the field."""
    request = take(ResponsesRequest, body, inert=_INERT, harmless=_HARMLESS, reasons=_WHY_NOT)
    _ = request.conversation  # so that what is wrong in an item is refused here
    return request
