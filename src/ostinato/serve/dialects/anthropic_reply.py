"""Formats answers, compaction blocks and errors of `/v1/messages`, the Anthropic dialect.

A stream is a sequence of content blocks, each closed before the next begins. Every answer has at least one, because clients retry an
empty one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from ostinato.core.conversation import CompactionBlock, Piece, ToolCall
from ostinato.core.errors import BadRequest, OstinatoError, Overloaded
from ostinato.core.lines import json_line, one_line
from ostinato.core.records import Finish
from ostinato.serve.dialects.dialect import (
    ContextExceeded,
    Counts,
    ErrorShape,
    Heading,
    Json,
    Request,
    Tokens,
    Whole,
    Writer,
)

SIGNATURE = "ostinato"  # clients send thinking back only if it is signed; this server does not check the signature
_REASONS = {Finish.STOP: "end_turn", Finish.TOOL_CALLS: "tool_use", Finish.LENGTH: "max_tokens"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OVERLOADED = 529


class Messages(Writer):
    """Formats answers of `/v1/messages`. A stream sends a tool call in one delta, once it is complete."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._head: Json = {"id": heading.id, "type": "message", "role": "assistant", "model": heading.model}
        self._open = ""  # the type of the open block
        self._blocks = 0  # blocks begun so far

    def body(self, answers: Sequence[Whole], counts: Counts, ostinato: Json) -> bytes:
        (answer,) = answers
        message, compacted = answer.message, self._heading.compacted
        blocks = [_tool_use(call, _input(call)) for call in message.calls]
        if message.text or not (blocks or message.reasoning):
            blocks.insert(0, json_line({"type": "text", "text": message.text}))
        if message.reasoning:
            blocks.insert(0, json_line({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE}))
        if compacted is not None:
            blocks.insert(0, json_line(_compaction_block(compacted.block)))
        rest: Json = {**_stop_fields(answer.finish, answer.stop), **self._closing(counts), "ostinato": ostinato}
        return f'{json_line(self._head)[:-1]},"content":[{",".join(blocks)}],{json_line(rest)[1:]}'.encode()

    def heartbeat(self) -> str:
        return _event("ping")

    def opening(self) -> str:
        counts = Counts(prompt=self._heading.prompt_tokens, answer=0)
        begun: Json = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(counts)}
        data = _event("message_start", f'"message":{json_line(begun)}') + _event("ping")
        if self._heading.compacted is None:
            return data
        self._blocks = 1
        return data + _compaction_events(_compaction_block(self._heading.compacted.block))

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Tokens) -> str:
        return "".join(map(self._piece, pieces))

    def ending(self, index: int, finish: Finish, stop: str, closing: tuple[Counts, Json] | None) -> str:
        has_output = self._blocks > (self._heading.compacted is not None)
        data = self._close() if has_output else self._begin("text", '"text":""') + self._close()
        if closing is None:  # cannot happen: there is one answer, and the last one gets it
            return data
        counts, ostinato = closing
        last = {"delta": _stop_fields(finish, stop), **self._closing(counts), "ostinato": ostinato}
        return data + _event("message_delta", json_line(last)[1:-1]) + _event("message_stop")

    def failure(self, error: OstinatoError) -> str:
        return f"event: error\ndata: {json_line(error_body(error))}\n\n"

    def _closing(self, counts: Counts) -> Json:
        """The final fields of an answer: its usage, with the summary's listed separately, and the context edits applied to the prompt."""
        edits, compacted = self._heading.edits, self._heading.compacted
        fields: Json = {} if edits is None else {"context_management": {"applied_edits": edits}}
        usage = _usage(counts)
        if compacted is not None:
            parts = [("compaction", compacted.counts), ("message", counts)]
            usage["iterations"] = [{"type": type, **_usage(part)} for type, part in parts if part is not None]
        return fields | {"usage": usage}

    # ------------------------------------------------------------ blocks

    def _piece(self, piece: Piece) -> str:
        if piece.call is not None:
            return self._call(piece.call)
        if piece.reasoning:
            data = self._switch("thinking", '"thinking":"","signature":""')
            return data + self._delta("thinking_delta", "thinking", piece.reasoning)
        if piece.text:
            return self._switch("text", '"text":""') + self._delta("text_delta", "text", piece.text)
        return ""

    def _call(self, call: ToolCall) -> str:
        start = _event("content_block_start", f'"index":{self._blocks},"content_block":{_tool_use(call, "{}")}')
        data = self._close() + start
        self._open = "tool_use"
        self._blocks += 1
        return data + self._delta("input_json_delta", "partial_json", _input(call)) + self._close()

    def _switch(self, type: str, fields: str) -> str:
        """The events that make a block of this type the open one; "" if it already is."""
        return "" if self._open == type else self._close() + self._begin(type, fields)

    def _begin(self, type: str, fields: str) -> str:
        data = f'"index":{self._blocks},"content_block":{{"type":"{type}",{fields}}}'
        self._open = type
        self._blocks += 1
        return _event("content_block_start", data)

    def _delta(self, type: str, field: str, text: str) -> str:
        data = f'"index":{self._blocks - 1},"delta":{{"type":"{type}","{field}":{json_line(text)}}}'
        return _event("content_block_delta", data)

    def _close(self) -> str:
        """The events that end the open block, if there is one."""
        if not self._open:
            return ""
        signed = self._delta("signature_delta", "signature", SIGNATURE) if self._open == "thinking" else ""
        self._open = ""
        return signed + _event("content_block_stop", f'"index":{self._blocks - 1}')


def compaction_answer(
    request: Request, heading: Heading, block: CompactionBlock, counts: Counts, ostinato: Json
) -> bytes:
    """Return the whole answer that consists of a summary (requested, or made by a call that then pauses), as a body or as a stream."""
    usage, closing = (
        _usage(counts),
        {} if heading.edits is None else {"context_management": {"applied_edits": heading.edits}},
    )
    if heading.compacted is None:
        told: Json = {"type": "compaction", "content": block.content, "signature": block.token, "tool_changes": []}
    else:
        told = _compaction_block(block)
        usage = _usage(Counts(prompt=0, answer=0)) | {"iterations": [{"type": "compaction", **usage}]}
    stopped: Json = {"stop_reason": "compaction", "stop_sequence": None}
    rest: Json = {**stopped, **closing, "usage": usage, "ostinato": ostinato}
    if not request.stream:
        head = {"id": heading.id, "type": "message", "role": "assistant", "model": heading.model}
        return json_line({**head, "content": [told], **rest}).encode()
    last = {"delta": stopped, **closing, "usage": usage, "ostinato": ostinato}
    begun = Messages(replace(heading, compacted=None)).opening() + _compaction_events(told)
    return (begun + _event("message_delta", json_line(last)[1:-1]) + _event("message_stop")).encode()


def _compaction_block(block: CompactionBlock | None) -> Json:
    """The compaction block with which an answer begins; without content if there is no usable summary."""
    if block is None:
        return {"type": "compaction", "content": None}
    return {"type": "compaction", "content": block.content, "encrypted_content": block.token}


def _compaction_events(block: Json) -> str:
    """The events of a compaction block, which is sent in one piece. Streams have no delta for its signature, which is therefore sent with
    the block's start, and again as `encrypted_content` in the delta.
    """
    token = block.get("signature") or block.get("encrypted_content")
    delta: Json = {"type": "compaction_delta", "content": block["content"], "encrypted_content": token}
    begun = f'"index":0,"content_block":{json_line(block | {"content": None})}'
    return "".join(
        [
            _event("content_block_start", begun),
            _event("content_block_delta", f'"index":0,"delta":{json_line(delta)}'),
            _event("content_block_stop", '"index":0'),
        ]
    )


def _event(type: str, fields: str = "") -> str:
    """One event; `fields`: its JSON fields besides the type."""
    return f'event: {type}\ndata: {{"type":"{type}"{"," if fields else ""}{fields}}}\n\n'


def _tool_use(call: ToolCall, input: str) -> str:
    name = json.dumps(call.name)  # ASCII, since a name written by a model may hold an escaped lone surrogate
    return f'{{"type":"tool_use","id":{json_line(call.id)},"name":{name},"input":{one_line(input)}}}'


def _input(call: ToolCall) -> str:
    """Return a call's arguments as written; {} if they are not a valid JSON object, so that the tool reports what is missing."""
    try:
        values = json.loads(call.arguments, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return "{}"
    return call.arguments if isinstance(values, dict) else "{}"


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _stop_fields(finish: Finish, stop: str) -> Json:
    """Why an answer ended. Clients look for `tool_use`, so a call takes precedence over a stop string; any other cut is `max_tokens`."""
    if finish is Finish.STOP and stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _REASONS.get(finish, "max_tokens"), "stop_sequence": None}


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": counts.answer,
    }


def error_body(error: OstinatoError) -> Json:
    """Return an error in Anthropic's format."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if isinstance(error, ContextExceeded):
        message = f"prompt is too long: {error.prompt} tokens > {error.context - error.answer} maximum. {message}"
    fields: Json = {"type": _ERROR_TYPES.get(error.status, other), "message": message}
    if error.code.startswith("compaction_"):
        fields["details"] = {"error_code": error.code}  # Anthropic's clients choose the exception by it
    elif isinstance(error, BadRequest) and error.field == "thread":  # this makes clients continue without a thread
        fields["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": fields}


def _status(error: OstinatoError) -> int:
    return _OVERLOADED if isinstance(error, Overloaded) else error.status


ERRORS = ErrorShape(body=error_body, status=_status)
