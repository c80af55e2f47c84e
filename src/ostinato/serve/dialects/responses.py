"""OpenAI's responses dialect: parses JSON bodies of `/v1/responses` into typed requests, and formats answers.

Every field is used, ignored because it changes nothing, or refused by name (`field_rules`). Field list: openai-python 3.52,
`types/responses/response_create_params.py`.

A response is a list of items, each completed before the next is added. Agents run a tool call as soon as its item is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from ostinato.core.conversation import CompactionBlock, Conversation, Message, Piece, Role, ToolCall
from ostinato.core.errors import BadRequest, GrammarTooComplex, OstinatoError
from ostinato.core.lines import json_line
from ostinato.core.records import Finish
from ostinato.serve.dialects.compaction_blocks import (
    InCallCompaction,
    TriggerMessage,
    check_alone,
    from_last_block,
    with_summary_request,
)
from ostinato.serve.dialects.dialect import (
    ANY_OBJECT,
    AUTO,
    MAX_MESSAGES,
    NONE,
    REQUIRED,
    ContextExceeded,
    Counts,
    ErrorShape,
    Heading,
    Json,
    Name,
    OneAnswer,
    Tokens,
    User,
    Whole,
    Writer,
    build_demand,
    validate,
)
from ostinato.serve.dialects.field_rules import Cached, Fields, Ignored, Only
from ostinato.serve.dialects.items import ItemCache, WithItems, joined
from ostinato.serve.dialects.openai_reply import error_body as openai_error
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.dialects.responses_items import Offered, Read, ReferenceMessage, read_items, read_tools

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
            raise ValueError("needs a schema with the type 'json_schema', and takes none with another type")
        return self


class ResponsesNamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    name: Name


class Text(Fields):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, Ignored("the model decides by itself how much to write")] = None


class ContextEntry(Fields):
    """Requests a summary at the beginning of the answer once the prompt has this many tokens."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(default=None, ge=1, le=10_000_000)


class PromptCacheOptions(BaseModel):
    """Options of the prompt cache. Its other fields are hints that change nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    prewarm: Annotated[Any, Only(False, why="is not supported: each call samples an answer")] = None


def _if_object(value: Any) -> Any:
    return value if isinstance(value, dict) else None


class ResponsesRequest(OneAnswer, WithItems):
    """`POST /v1/responses`."""

    model: Name
    input: str | list[Any] = Field(min_length=1, max_length=50_000_000)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
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
    prompt_cache_key: Cached = None
    prompt_cache_options: Annotated[
        PromptCacheOptions | None,
        BeforeValidator(_if_object),
        Ignored("prompts are cached in any case; of its fields, `prewarm` alone is looked at"),
    ] = None
    prompt_cache_retention: Cached = None
    reasoning: Annotated[Any, Ignored("the model decides by itself how long to think")] = None
    stream_options: Annotated[Any, Ignored("padding against traffic analysis is never sent")] = None
    truncation: Annotated[
        Any, Ignored("allows parts of a long prompt to be dropped; here it is refused if it is too long")
    ] = None
    context_management: list[ContextEntry] | None = Field(default=None, max_length=1)
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
    _told: dict[str, list[Json]] = PrivateAttr(default_factory=dict[str, list[Json]])

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
        if any(isinstance(part, TriggerMessage) for part in read.parts[:-1]):
            raise BadRequest("input: a compaction_trigger must be the last item.", field="input")
        return read

    @property
    def compacts(self) -> bool:
        """True if the request asks for a summary of the conversation and nothing else."""
        return bool(self.read.parts) and isinstance(self.read.parts[-1], TriggerMessage)

    @property
    def in_call(self) -> InCallCompaction | None:
        """The wish for compaction within the call once the prompt is long."""
        if not self.context_management:
            return None
        field = "context_management[0].compact_threshold"
        return InCallCompaction(field=field, trigger=self.context_management[0].compact_threshold)

    @cached_property
    def refers(self) -> bool:
        """True if the conversation continues earlier answers, by `previous_response_id` or by references to their items."""
        return self.previous_response_id is not None or any(
            isinstance(part, ReferenceMessage) for part in self.read.parts
        )

    @cached_property
    def conversation(self) -> Conversation:
        """The messages, the tools and the constraint on the answer, without what the call `refers` to. Raises BadRequest."""
        own = [part for part in self.read.parts if not isinstance(part, ReferenceMessage)]
        return self._conversation(own, whole=not self.refers)

    def going_on(self, parts: Sequence[Message]) -> Conversation:
        """Return the whole conversation of a call that `refers`. `parts`: all messages except the instructions, this call's last.

        Raises BadRequest.
        """
        return self._conversation(parts, whole=True)

    def _conversation(self, parts: Sequence[Message], *, whole: bool) -> Conversation:
        if not self.read.parts or (whole and not parts):
            raise BadRequest("input contains nothing to answer; send a message.", field="input")
        told = [Message(role=Role.SYSTEM, text=self.instructions)] if self.instructions else []
        said, block = from_last_block([*told, *(parts[:-1] if self.compacts else parts)])
        messages = tuple(joined(said, self._items))
        choice, form = self.tool_choice or AUTO, self.text.format if self.text else None
        tools = tuple(self.read.tools)
        demand = build_demand(
            tools,
            choice=choice if isinstance(choice, str) else REQUIRED,
            named=None if isinstance(choice, str) else self.read.model_name_of(choice.name),
            several=self.parallel_tool_calls is not False,
            schema=ANY_OBJECT if form and form.type == "json_object" else form.schema_ if form else None,
            omissions=self.read.omissions,
        )
        one_call = self.parallel_tool_calls is False
        conversation = Conversation(messages=messages, tools=tools, demand=demand, one_call=one_call, block=block)
        if not self.compacts:
            return conversation
        check_alone(
            {
                "context_management": self.context_management,
                "tool_choice": self.tool_choice not in (None, AUTO, NONE),
                "text.format": form is not None and form.type != "text",
            }
        )
        return with_summary_request(conversation, None, "input") if whole else replace(conversation, summarises=True)

    @property
    def omitted(self) -> Sequence[str]:
        """The parts of the request that are omitted from the prompt, as words of a header."""
        return self.read.omissions.words

    @property
    def repeated(self) -> dict[str, Any]:
        """The fields of the request that the response echoes."""
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
    def told(self) -> dict[str, list[Json]]:
        """The items of the answers to this request, by the answer's id. The writer adds each when it is done."""
        return self._told

    @property
    def offered(self) -> Mapping[str, Offered]:
        """The client's tools, by the names that the model sees."""
        return self.read.offered

    @property
    def asker(self) -> str | None:
        """The user, if the body names one."""
        return self.user or self.safety_identifier or None

    @property
    def budget(self) -> int | None:
        """The client's token limit for the answer."""
        return self.max_output_tokens


class CompactRequest(ResponsesRequest):
    """`POST /v1/responses/compact`: returns the user's messages, followed by one item with a summary of the conversation."""

    input: str | list[Any] = Field(default_factory=list[Any], max_length=50_000_000)
    stream: Annotated[Any, Only(why="is not supported here: send a compaction_trigger to /v1/responses")] = None
    image: Annotated[Any, Ignored("the model reads text only")] = None

    @cached_property
    def read(self) -> Read:
        """The parsed input and tools, with the compaction trigger that the path implies. Raises BadRequest."""
        read = super().read
        if not (read.parts and isinstance(read.parts[-1], TriggerMessage)):
            read.parts.append(TriggerMessage(role=Role.USER))
        return read


def parse_compact(body: Any, items: ItemCache | None = None) -> CompactRequest:
    """Parse a request for a summary. `items`: cache of parsed items. Raises BadRequest naming the field."""
    request = validate(CompactRequest, body).reading(items)
    _ = request.conversation  # so that errors in items are raised here
    return request


def parse_responses(body: Any, items: ItemCache | None = None) -> ResponsesRequest:
    """Parse a request for an answer. `items`: cache of parsed items. Raises BadRequest naming the field."""
    request = validate(ResponsesRequest, body).reading(items)
    _ = request.conversation  # so that errors in items are raised here
    return request


# ---------------------------------------------------------------- the reply


_CODES = {429: "rate_limit_exceeded"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}

_NOTHING_ASKED: Json = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}
"""Fields that the official clients expect in every response."""


@dataclass(slots=True)
class _OpenItem:
    """The item being streamed: text or reasoning."""

    item: Json
    type: str
    texts: list[str] = field(default_factory=list[str])


class Responses(Writer):
    """Formats answers of `/v1/responses`. A stream sends a tool call in one delta, once it is complete.

    Args:
        heading: the answer's metadata.
        offered: the client's tools, by the names that the model sees.
        echo: the request's fields to repeat.
        told: the answer's items are added here under its id, each when it is done.
    """

    def __init__(
        self,
        heading: Heading,
        offered: Mapping[str, Offered] | None = None,
        echo: Json = _NOTHING_ASKED,
        told: dict[str, list[Json]] | None = None,
    ) -> None:
        self._heading = heading
        self._offered = offered or {}
        self._echo = echo
        self._events = 0
        self._items: list[Json] = [] if told is None else told.setdefault(heading.id, [])  # completed items
        self._open: _OpenItem | None = None

    def body(self, answers: Sequence[Whole], counts: Counts, ostinato: Json) -> bytes:
        (answer,) = answers
        message = answer.message
        self._items += self._compacted()
        if message.reasoning:
            self._items.append(self._written("reasoning", message.reasoning))
        if message.text or not message.calls:
            self._items.append(self._written("message", message.text))
        for call in message.calls:
            self._items.append(self._call(call))
        return json_bytes({**self._response(_status(answer.finish), counts), "ostinato": ostinato})

    def opening(self) -> str:
        begun = self._response("in_progress", None)
        data = self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        return data + "".join(map(self._compacting, self._compacted()))

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Tokens) -> str:
        return "".join(map(self._piece, pieces))

    def ending(self, index: int, finish: Finish, stop: str, closing: tuple[Counts, Json] | None) -> str:
        has_output = len(self._items) > len(self._compacted()) or self._open
        data = "" if has_output else self._begin("message")
        data += self._close()
        if closing is None:  # cannot happen: there is one answer, and the last one gets it
            return data
        counts, ostinato = closing
        status = _status(finish)
        response = {**self._response(status, counts), "ostinato": ostinato}
        return data + self._event(f"response.{status}", response=response)

    def failure(self, error: OstinatoError) -> str:
        code = error.code if isinstance(error, GrammarTooComplex) else _CODES.get(error.status, "server_error")
        begun = "" if self._events else self.opening()  # clients accept no other event first
        return begun + self._failed({"code": code, "message": str(error)})

    def refused(self, error: ContextExceeded) -> str:
        """Return the stream of a call whose prompt is too long: OpenAI's clients look for this error in the stream, not the status."""
        fields = _error(error)
        described: Json = {name: fields[name] for name in ("code", "message", "param")}
        begun = self.opening() + self._event("error", error=fields, **described)
        return begun + self._failed({name: fields[name] for name in ("code", "message")})

    def compacted(self, item: Json, counts: Counts, ostinato: Json, *, stream: bool) -> bytes:
        """Return the whole answer that consists of a compaction item, as a body or as a stream."""
        if not stream:
            self._items.append(item)
            return json_bytes({**self._response("completed", counts), "ostinato": ostinato})
        data = self.opening() + self._compacting(item)
        response = {**self._response("completed", counts), "ostinato": ostinato}
        return (data + self._event("response.completed", response=response)).encode()

    # ------------------------------------------------------------ events

    def _failed(self, error: Json) -> str:
        return self._event("response.failed", response=self._response("failed", None) | {"error": error})

    def _compacting(self, item: Json) -> str:
        """The events of a compaction item, which is sent in one piece."""
        data = self._event("response.output_item.added", output_index=0, item=item)
        data += self._event("response.compaction.compacting", output_index=0, item_id=item["id"])
        return data + self._done(item)

    def _compacted(self) -> list[Json]:
        """The item of the summary that the call began with, as a list; empty if there is none."""
        compacted = self._heading.compacted
        return [] if compacted is None or compacted.block is None else [_item(self._heading, compacted.block)]

    def _event(self, type: str, **fields: object) -> str:
        data = json_line({"type": type, "sequence_number": self._events, **fields})
        self._events += 1
        return f"event: {type}\ndata: {data}\n\n"

    def _piece(self, piece: Piece) -> str:
        if piece.call is not None:
            return self._close() + self._called(piece.call)
        type, text = ("reasoning", piece.reasoning) if piece.reasoning else ("message", piece.text)
        if not text:
            return ""
        data = "" if self._open is not None and self._open.type == type else self._close() + self._begin(type)
        assert self._open is not None, "it was begun"
        self._open.texts.append(text)
        more: Json = {"logprobs": []} if type == "message" else {}
        return data + self._event(f"response.{_DELTAS[type]}.delta", **self._place(), delta=text, **more)

    def _begin(self, type: str) -> str:
        item = self._written(type, "", status="in_progress") | {"content": []}
        self._open = _OpenItem(item, type)
        added = self._event("response.output_item.added", output_index=len(self._items), item=item)
        return added + self._event("response.content_part.added", **self._place(), part=_part(type, ""))

    def _close(self) -> str:
        """The events that end the open item, if there is one."""
        if self._open is None:
            return ""
        type, text, place = self._open.type, "".join(self._open.texts), self._place()
        more: Json = {"logprobs": []} if type == "message" else {}
        data = self._event(f"response.{_DELTAS[type]}.done", **place, text=text, **more)
        data += self._event("response.content_part.done", **place, part=_part(type, text))
        self._open = None
        return data + self._done(self._written(type, text))

    def _called(self, call: ToolCall) -> str:
        item = self._call(call)
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        name = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        place: Json = {"item_id": item["id"], "output_index": len(self._items)}
        begun = item | {field: "", "status": "in_progress"}
        data = self._event("response.output_item.added", output_index=len(self._items), item=begun)
        data += self._event(f"response.{name}.delta", **place, delta=item[field])
        named: Json = {"name": item["name"]} if field == "arguments" else {}
        return data + self._event(f"response.{name}.done", **place, **named, **{field: item[field]}) + self._done(item)

    def _done(self, item: Json) -> str:
        data = self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        return data

    def _place(self) -> Json:
        assert self._open is not None, "only an open item has a place"
        return {"item_id": self._open.item["id"], "output_index": len(self._items), "content_index": 0}

    # ------------------------------------------------------------ objects

    def _id(self, type: str) -> str:
        return f"{_PREFIXES[type]}_{self._heading.id}_{len(self._items)}"

    def _written(self, type: str, text: str, status: str = "completed") -> Json:
        item: Json = {"type": type, "id": self._id(type), "status": status, "content": [_part(type, text)]}
        return item | ({"role": "assistant"} if type == "message" else {"summary": []})

    def _call(self, call: ToolCall) -> Json:
        known = self._offered.get(call.name, Offered(call.name))
        if not known.custom:
            item: Json = {"type": "function_call", "id": self._id("function_call"), "arguments": call.arguments}
        else:
            given = (call.values() or {}).get("input")
            text = given if isinstance(given, str) else call.arguments
            item = {"type": "custom_tool_call", "id": self._id("custom_tool_call"), "input": text}
        within: Json = {"namespace": known.namespace} if known.namespace else {}
        return item | {"call_id": call.id, "name": known.name, **within, "status": "completed"}

    def _response(self, status: str, counts: Counts | None) -> Json:
        heading = self._heading
        return {
            "id": heading.id,
            "object": "response",
            "created_at": int(heading.created),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": heading.model,
            "output": list(self._items),
            **self._echo,
            "usage": None if counts is None else _usage(counts),
        }


def compaction_answer(
    request: ResponsesRequest, heading: Heading, block: CompactionBlock, counts: Counts, ostinato: Json
) -> bytes:
    """Return the whole answer to a request for a summary: one item, after the user's messages if the path is `/v1/responses/compact`."""
    item = _item(heading, block)
    if isinstance(request, CompactRequest):
        texts = [part.text for part in request.read.parts if part.role is Role.USER and type(part) is Message]
        echoed: list[Json] = [
            {
                "id": f"msg_{heading.id}_{place}",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": text}],
            }
            for place, text in enumerate(texts)
        ]
        head: Json = {"id": heading.id, "object": "response.compaction", "created_at": int(heading.created)}
        # not the messages, which the client has and which may be long
        request.told.setdefault(heading.id, []).append(item)
        return json_bytes({**head, "output": [*echoed, item], "usage": _usage(counts), "ostinato": ostinato})
    return Responses(heading, request.offered, request.repeated, request.told).compacted(
        item, counts, ostinato, stream=bool(request.stream)
    )


def _item(heading: Heading, block: CompactionBlock) -> Json:
    return {"id": f"cmp_{heading.id}", "type": "compaction", "encrypted_content": block.token}


_DELTAS = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(type: str, text: str) -> Json:
    if type == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(finish: Finish) -> str:
    return "incomplete" if finish.cut else "completed"


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts.answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.answer,
    }


def _error(error: OstinatoError) -> Json:
    """An error in OpenAI's wording for this dialect."""
    fields: Json = openai_error(error)["error"]
    if isinstance(error, ContextExceeded):
        needs = f", and the answer needs {error.answer} at least" if error.answer else ""
        fields["message"] = (
            "Your input exceeds the context window of this model. Please adjust your input and try again. "
            f"It has {error.size}{needs}; this model's maximum context length is {error.context} tokens."
        )
    return fields


def error_body(error: OstinatoError) -> Json:
    """Return an error in OpenAI's format."""
    return {"error": _error(error)}


ERRORS = ErrorShape(body=error_body)
