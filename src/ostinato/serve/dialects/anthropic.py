"""The Anthropic dialect, inbound: JSON bodies of `/v1/messages` and `/v1/messages/count_tokens` to typed requests.

Every field is used, known to change nothing, or refused by name (`rules`). Field list: anthropic-python 2.12,
`types/message_create_params.py` and `types/beta/message_create_params.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ostinato.core.conversation import Conversation, Role
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.anthropic_messages import read_messages, read_tools
from ostinato.serve.dialects.demands import AUTO, NONE, REQUIRED, demanded
from ostinato.serve.dialects.fields import MAX_MESSAGES, Name, OneAnswer, User, check_stops, printable, validate
from ostinato.serve.dialects.items import ReadItems, WithItems
from ostinato.serve.dialects.omissions import Omissions
from ostinato.serve.dialects.rules import Fields, Ignored, Only

MAX_TOOLS = 1024

_Decided = Annotated[Any, Ignored("the model decides by itself whether and how long to think")]
_Billing = Annotated[Any, Ignored("all calls are served alike")]
_CountOnly = Annotated[Any, Ignored("a prompt's length does not depend on it")]

_CHOICES = {"auto": AUTO, "none": NONE, "any": REQUIRED, "tool": REQUIRED}
# a session identifies no user, but it shows that the text is Claude Code's
_IDENTITIES = ("account_uuid", "device_id", "session_id")


class Metadata(Fields):
    """The user's identity. Claude Code writes a JSON object into the text of `user_id`."""

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
    """Options of the answer."""

    format: JsonFormat | None = None
    effort: _Decided = None
    task_budget: Annotated[Any, Only(why="is not supported: the model is not told of budgets")] = None


class ToolChoice(Fields):
    """Whether the model may call tools, must call one, or must call the named one."""

    type: Literal["auto", "none", "any", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("takes a name with the type 'tool', and with no other")
        return self


class _Asked(WithItems):
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
    cache_control: Annotated[Any, Ignored("prompts are cached in any case")] = None
    context_management: Annotated[
        Any, Ignored("allows parts of a long prompt to be dropped; here all of it is rendered")
    ] = None
    diagnostics: Annotated[Any, Ignored("the metrics are the operator's")] = None
    fallback_credit_token: _Billing = None
    fallbacks: Annotated[Any, Ignored("for when a model declines, which this server never does")] = None
    service_tier: _Billing = None
    speed: _Billing = None
    user_profile_id: _Billing = None
    workspace_id: _Billing = None
    compaction: Annotated[Any, Only()] = None
    container: Annotated[Any, Only()] = None
    inference_geo: Annotated[Any, Only()] = None
    mcp_servers: Annotated[
        Any, Only([], why="is not supported: connect to MCP servers yourself and offer their tools under tools")
    ] = None
    thread: Annotated[Any, Only()] = None

    @cached_property
    def _read(self) -> tuple[Conversation, Sequence[str]]:
        """The conversation, and what is left out of it."""
        omissions = Omissions()
        messages = read_messages(self.messages, self.system, omissions, self._items)
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
            omissions=omissions,
        )
        conversation = Conversation(
            messages=messages,
            tools=tools,
            continued=continued,
            demand=demand,
            one_call=bool(choice.disable_parallel_tool_use),
        )
        return conversation, omissions.words

    @property
    def conversation(self) -> Conversation:
        """The messages so far, the tools, and the constraint on the answer. Raises BadRequest."""
        return self._read[0]

    @property
    def omitted(self) -> Sequence[str]:
        """What the model does not get of the request, as words of a header."""
        return self._read[1]


class CountRequest(_Asked):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: _CountOnly = None
    metadata: _CountOnly = None
    stop_sequences: _CountOnly = None
    stream: _CountOnly = None
    temperature: _CountOnly = None
    top_p: _CountOnly = None


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


def parse_messages(body: Any, items: ReadItems | None = None) -> MessagesRequest:
    """A request for an answer. `items`: those of earlier requests. Raises BadRequest naming the field."""
    request = validate(MessagesRequest, body).reading(items)
    _ = request.conversation  # so that errors in messages are raised here
    return request


def parse_count(body: Any, items: ReadItems | None = None) -> Conversation:
    """A conversation whose tokens are to be counted. `items`: those of earlier requests. Raises BadRequest naming the field."""
    return validate(CountRequest, body).reading(items).conversation


def _identities(user_id: str | None) -> dict[str, str]:
    """The identities that Claude Code puts into `metadata.user_id`; empty for another client's text."""
    try:
        named = json.loads(user_id or "")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(named, dict):
        return {}
    return {name: named[name] for name in _IDENTITIES if isinstance(named.get(name), str) and named[name]}
