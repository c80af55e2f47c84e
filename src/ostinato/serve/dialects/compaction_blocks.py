"""Compaction blocks: summaries that a client asks for, keeps, and sends back in place of the messages that they summarise.

A block is all that there is of a compaction: the gateway keeps no table of them. Its token names the turn that wrote the summary, and is
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
_TOLD = "The conversation so far was replaced by this summary of it:"
_TAG = re.compile(r"<(?=\s*(?:/\s*)?summary\b)", re.IGNORECASE)


class CompactionRefused(BadRequest):
    """A compaction block or a request for one that cannot be used. `code` is one of Anthropic's, by which its clients tell the reason."""

    def __init__(self, code: str, message: str, field: str | None) -> None:
        super().__init__(message, field=field)
        self.code = f"compaction_{code}"


class CompactionUnavailable(Overloaded):
    """No summary came about; the same request may succeed later."""

    code = "compaction_unavailable"


def signature_invalid(field: str | None) -> CompactionRefused:
    """The error for a block that this server has not signed for this caller. It never repeats the content."""
    message = "The compaction block was not signed by this server for you and this model; send it back as it was returned, or leave it out."
    return CompactionRefused("signature_invalid", message, field)


def misplaced(field: str) -> CompactionRefused:
    """The error for a block that does not stand first."""
    message = f"{field}: a compaction block must be the first block of the first message, and in no system message; move it there."
    return CompactionRefused("block_misplaced", message, field)


@dataclass(frozen=True, slots=True, kw_only=True)
class InCallCompaction:
    """A client's wish that a call which reaches `trigger` tokens of prompt begins with a summary of it; None: the operator's share of the
    context. `instructions` replace the request for the summary; `pause`: the summary is all of the answer. `field` names the trigger.
    """

    field: str
    trigger: int | None = None
    instructions: str | None = None
    pause: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMessage(Message):
    """The place of a compaction block among messages; its text is what the model is shown. `alone`: it was asked for by itself, so its
    client put it in the place of all that was before it.
    """

    block: CompactionBlock
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerMessage(Message):
    """The place of an item that asks for a summary of everything before it."""


def block_message(block: CompactionBlock, *, alone: bool = False) -> BlockMessage:
    """What a model is shown of a block: a user's message with the summary between fixed lines, which the summary cannot contain."""
    shown = _TAG.sub("&lt;", block.content)
    text = f"{_TOLD}\n{_OPENING}\n{shown}\n{_CLOSING}"
    return BlockMessage(role=Role.USER, text=text, block=block, alone=alone)


def replaced(parts: Sequence[Message]) -> tuple[list[Message], CompactionBlock | None]:
    """The messages from the last block on, and the block. System messages before it stay.

    Example: ``replaced([user, answer, block_message(block), more]) == ([block_message(block) as a plain message, more], block)``
    """
    places = [i for i, part in enumerate(parts) if isinstance(part, BlockMessage)]
    if not places:
        return list(parts), None
    found = parts[places[-1]]
    assert isinstance(found, BlockMessage)
    system = [part for part in parts[: places[-1]] if part.role is Role.SYSTEM]
    return [*system, Message(role=found.role, text=found.text), *parts[places[-1] + 1 :]], found.block


def summarised(conversation: Conversation, instructions: str | None, field: str) -> Conversation:
    """The conversation that asks for its own summary: its prompt begins with the same tokens, tools included, and no call may be made.

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
    """The conversation as its client will send it after an answer that began with this block: system messages, then the summary."""
    parts, _ = replaced([*conversation.messages, block_message(block)])
    return replace(conversation, messages=tuple(joined(parts)), block=block)


def check_alone(others: Mapping[str, Any]) -> None:
    """Raise BadRequest for the first of these fields of a request for a summary that is set."""
    for name, given in others.items():
        if given:
            raise BadRequest(
                f"{name} cannot be combined with a request for a summary; leave one of them out.", field=name
            )


# ---------------------------------------------------------------- tokens


_MOST = 20_000_000  # characters of a token that are looked at
_FIELDS = {"turn", "episode", "number", "place", "content"}


def packed_token(fields: Mapping[str, Any], mac: bytes) -> str:
    """A block's token: its fields and their signature."""
    payload = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode(
        "utf-8", "surrogatepass"
    )
    return ".".join(urlsafe_b64encode(part).decode().rstrip("=") for part in (payload, mac))


def unpacked_token(token: str, field: str | None) -> tuple[dict[str, Any], bytes]:
    """The inverse of `packed_token`; nothing of it is verified. Raises CompactionRefused."""
    try:
        payload, mac = token.split(".") if len(token) < _MOST else ("", "")
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
