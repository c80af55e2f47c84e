"""The Anthropic dialect, inbound: JSON bodies of `/v1/messages` and `/v1/messages/count_tokens` to typed requests.

Every field is taken, refused by name, or known to be harmless; none is silently ignored. Field list: anthropic-python 2.12,
`types/message_create_params.py` and `types/beta/message_create_params.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from ostinato.core.conversation import Conversation, Role
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.anthropic_messages import read_messages, read_tools
from ostinato.serve.dialects.demands import AUTO, NONE, REQUIRED, demanded
from ostinato.serve.dialects.fields import MAX_MESSAGES, STRICT, Name, OneAnswer, User, check_stops, printable, take

MAX_TOOLS = 1024

# Known fields that do not affect sampling here.
_HARMLESS = frozenset(
    [
        "betas",
        "billing_policy",
        "cache_control",
        "context_management",  # allows parts of a long prompt to be dropped; here all of it is rendered
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",  # for when the model declines, which this server never does
        "service_tier",
        "speed",
        "thinking",  # the model decides by itself whether to think
        "user_profile_id",
        "workspace_id",
    ]
)
# Known fields that would change the answer: refused unless they hold one of these values.
_INERT: dict[str, tuple[Any, ...]] = {
    "compaction": (None,),
    "container": (None,),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "thread": (None,),
    "top_k": (None,),
}
_WHY_NOT = {
    "mcp_servers": "is not supported: connect to MCP servers yourself and offer their tools under tools",
    "top_k": "is not supported: tokens are drawn by temperature and top_p",
}
# Fields that affect only the answer and not the prompt's length.
_ANSWER_ONLY = frozenset(["max_tokens", "metadata", "stop_sequences", "stream", "temperature", "top_p"])

_CHOICES = {"auto": AUTO, "none": NONE, "any": REQUIRED, "tool": REQUIRED}
# a session identifies no user, but it shows that the text is Claude Code's
_IDENTITIES = ("account_uuid", "device_id", "session_id")


class Metadata(BaseModel):
    """The user's identity. Claude Code writes a JSON object into the text of `user_id`."""

    model_config = STRICT
    user_id: User | None = None

    @field_validator("user_id")
    @classmethod
    def _check_identities(cls, user_id: str | None) -> str | None:
        for value in _identities(user_id).values():
            printable(value)
        return user_id


class JsonFormat(BaseModel):
    """The required JSON format of the answer's text."""

    model_config = STRICT
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """Options of the answer. `effort` is ignored: the model decides by itself."""

    model_config = STRICT
    effort: str | None = None
    format: JsonFormat | None = None
    task_budget: Any = None

    @field_validator("task_budget")
    @classmethod
    def _check_budget(cls, budget: Any) -> Any:
        if budget is not None:
            raise ValueError("is not supported: the model is not told of budgets; leave it out")
        return budget


class ToolChoice(BaseModel):
    """Whether the model may call tools, must call one, or must call the named one."""

    model_config = STRICT
    type: Literal["auto", "none", "any", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("takes a name with the type 'tool', and with no other")
        return self


class _Asked(BaseModel):
    """The fields that determine the prompt."""

    model_config = STRICT
    model: Name
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of `output_config.format`

    @cached_property
    def conversation(self) -> Conversation:
        """The messages so far, the tools, and the constraint on the answer. Raises BadRequest."""
        messages = read_messages(self.messages, self.system)
        continued = messages[-1].role is Role.ASSISTANT
        if continued and (messages[-1].calls or messages[-1].reasoning):
            where = f"messages[{len(self.messages) - 1}]"
            raise BadRequest(
                f"{where}: of an assistant's message at the end only text can be continued, not thinking or tool_use; "
                "add the results of its calls, or a user's message.",
                field=f"{where}.content",
            )
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = () if choice.type == NONE else read_tools(self.tools or [])
        form = (self.output_config.format if self.output_config else None) or self.output_format
        demand = demanded(
            tools,
            choice=_CHOICES[choice.type],
            named=choice.name,
            several=not choice.disable_parallel_tool_use,
            schema=None if form is None else form.schema_,
        )
        return Conversation(messages=messages, tools=tools, continued=continued, demand=demand)


class MessagesRequest(_Asked, OneAnswer):
    """`POST /v1/messages`. A final assistant message is continued."""

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
        """The user: Claude Code's account or device, or another client's `user_id`."""
        named = _identities(self._user_id)
        return named.get("account_uuid") or named.get("device_id") if named else self._user_id or None

    @property
    def budget(self) -> int | None:
        """The most tokens that the client wants."""
        return self.max_tokens

    @property
    def stops(self) -> Sequence[str]:
        return self.stop_sequences or ()

    @property
    def _user_id(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id


def parse_messages(body: Any) -> MessagesRequest:
    """A request for an answer. Raises BadRequest naming the field."""
    request = take(MessagesRequest, body, inert=_INERT, harmless=_HARMLESS, reasons=_WHY_NOT)
    _ = request.conversation  # so that errors in messages are raised here
    return request


def parse_count(body: Any) -> Conversation:
    """A conversation whose tokens are to be counted. Raises BadRequest naming the field."""
    return take(_Asked, body, inert=_INERT, harmless=_HARMLESS | _ANSWER_ONLY, reasons=_WHY_NOT).conversation


def _identities(user_id: str | None) -> dict[str, str]:
    """The identities that Claude Code puts into `metadata.user_id`; empty for another client's text."""
    try:
        named = json.loads(user_id or "")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(named, dict):
        return {}
    return {name: named[name] for name in _IDENTITIES if isinstance(named.get(name), str) and named[name]}
