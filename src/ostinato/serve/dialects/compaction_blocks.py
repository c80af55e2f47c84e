"""Compaction blocks: summaries that a client requests, keeps, and sends back in place of the messages that they summarise.

The block is the only record of a compaction: the gateway keeps no table of them. Its token names the turn that wrote the summary, and is
signed by the gateway (`serve.calls.compaction`).
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.core.conversation import CompactionBlock, Conversation, Demand, Message, Role
from ostinato.core.errors import BadRequest, Overloaded
from ostinato.serve.dialects.items import joined

REQUEST = (
    "Summarise the conversation so far for yourself: what was asked, what was done and found out, and what remains to be done. "
    "It will be gone, and only your summary will be left. Answer with the summary alone."
)
_OPENING, _CLOSING = "<summary>", "</summary>"
_INTRODUCTION = "The conversation so far was replaced by this summary of it:"
_TAG = re.compile(r"<(?=\s*(?:/\s*)?summary\b)", re.IGNORECASE)


class CompactionRefused(BadRequest):
    """A compaction block, or a request for one, is invalid. `code` is one of Anthropic's, by which its clients recognise the reason."""

    def __init__(self, code: str, message: str, field: str | None) -> None:
        super().__init__(message, field=field)
        self.code = f"compaction_{code}"


class CompactionUnavailable(Overloaded):
    """No usable summary was sampled; the same request may succeed later."""

    code = "compaction_unavailable"


def signature_invalid(field: str | None) -> CompactionRefused:
    """Return the error for a block that this server did not sign for this caller. It never repeats the content."""
    message = "The compaction block was not signed by this server for you and this model; send it back as it was returned, or leave it out."
    return CompactionRefused("signature_invalid", message, field)


def misplaced(field: str) -> CompactionRefused:
    """Return the error for a block in the wrong place."""
    message = f"{field}: a compaction block must be the first block of the first message, and in no system message; move it there."
    return CompactionRefused("block_misplaced", message, field)


@dataclass(frozen=True, slots=True, kw_only=True)
class InCallCompaction:
    """A client's wish that a call begins with a summary of its prompt once that has `trigger` tokens (None: the operator's share of the
    context). `instructions` replace the default request for a summary. `pause`: the summary is the whole answer. `field`: names the
    trigger.
    """

    field: str
    trigger: int | None = None
    instructions: str | None = None
    pause: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMessage(Message):
    """A compaction block among messages. Its text is what the model sees. `alone`: the block was requested by itself, so its client has
    replaced everything before it.
    """

    block: CompactionBlock
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerMessage(Message):
    """An item that requests a summary of everything before it."""


def block_message(block: CompactionBlock, *, alone: bool = False) -> BlockMessage:
    """Return a block as a user's message: the summary between fixed tags, which are escaped within it."""
    shown = _TAG.sub("&lt;", block.content)
    text = f"{_INTRODUCTION}\n{_OPENING}\n{shown}\n{_CLOSING}"
    return BlockMessage(role=Role.USER, text=text, block=block, alone=alone)


def from_last_block(parts: Sequence[Message]) -> tuple[list[Message], CompactionBlock | None]:
    """Return the messages from the last block on, with the system messages before it, and the block.

    Example: ``from_last_block([user, answer, block_message(block), more]) == ([block_message(block) as a plain message, more], block)``
    """
    places = [i for i, part in enumerate(parts) if isinstance(part, BlockMessage)]
    if not places:
        return list(parts), None
    found = parts[places[-1]]
    assert isinstance(found, BlockMessage)
    system = [part for part in parts[: places[-1]] if part.role is Role.SYSTEM]
    return [*system, Message(role=found.role, text=found.text), *parts[places[-1] + 1 :]], found.block


def with_summary_request(conversation: Conversation, instructions: str | None, field: str) -> Conversation:
    """Append a request for a summary. The prompt keeps the conversation's tokens, tools included, as its prefix; calls are forbidden.

    Raises CompactionRefused if there is nothing to summarise, or the last turn is not finished.
    """
    messages = conversation.messages
    said = [message for message in messages if message.role is not Role.SYSTEM]
    if len(said) <= (conversation.block is not None):
        raise CompactionRefused(
            "nothing_to_summarize", f"{field} contains nothing to summarise; send the conversation.", field
        )
    answered = {message.answers for message in messages if message.role is Role.TOOL}
    if open_ := [call.name for message in messages for call in message.calls if call.id not in answered]:
        raise CompactionRefused(
            "incomplete_turn",
            f"{field}: the call of {open_[-1][:100]!r} has no result; send it, or leave the call out.",
            field,
        )
    ask = Message(role=Role.USER, text=(instructions or "").strip() or REQUEST)
    return replace(
        conversation,
        messages=(*messages, ask),
        continued=False,
        demand=Demand(forbidden=True) if conversation.tools else None,
        summarises=True,
    )


def begun_with(conversation: Conversation, block: CompactionBlock) -> Conversation:
    """Return the conversation as its client will send it after an answer that began with this block: system messages, then the summary."""
    parts, _ = from_last_block([*conversation.messages, block_message(block)])
    return replace(conversation, messages=tuple(joined(parts)), block=block)


def check_alone(others: Mapping[str, Any]) -> None:
    """Raise BadRequest if one of these fields is set, since they cannot be combined with a request for a summary."""
    for name, given in others.items():
        if given:
            raise BadRequest(
                f"{name} cannot be combined with a request for a summary; leave one of them out.", field=name
            )


# ---------------------------------------------------------------- tokens


_MAX_TOKEN_CHARS = 20_000_000  # characters; longer tokens are rejected unread
_FIELDS = {"turn", "episode", "number", "place", "content"}


def packed_token(fields: Mapping[str, Any], mac: bytes) -> str:
    """Return a block's token: its fields and their signature."""
    payload = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode(
        "utf-8", "surrogatepass"
    )
    return ".".join(urlsafe_b64encode(part).decode().rstrip("=") for part in (payload, mac))


def unpacked_token(token: str, field: str | None) -> tuple[dict[str, Any], bytes]:
    """Return the fields and the signature in a token, unverified. Raises CompactionRefused."""
    try:
        payload, mac = token.split(".") if len(token) < _MAX_TOKEN_CHARS else ("", "")
        fields = json.loads(_decoded(payload))
        if not isinstance(fields, dict) or {*fields} - {"text"} != _FIELDS:
            raise ValueError("other fields than a block's")
        if not all(isinstance(value, str | int) for value in fields.values()):
            raise ValueError("no flat object")
        return fields, _decoded(mac)
    except (ValueError, binascii.Error, RecursionError):
        raise signature_invalid(field) from None


def _decoded(part: str) -> bytes:
    return urlsafe_b64decode(part.encode("ascii") + b"=" * (-len(part) % 4))
