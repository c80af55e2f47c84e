"""A conversation, the same for every API dialect: messages, tools, tool calls and their results.

Also a normal form of messages, which is the same for an answer as sampled and as agents send it back.

Agents parse an answer and serialise it again: reasoning is dropped or trimmed, a call's JSON is reformatted, with its keys in another
order, 60000.0 becomes 60000, and optional flags are filled in with their defaults. None of this changes the meaning.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec

from ostinato.core.json_shape import shape_of

# ---------------------------------------------------------------- normal form


def normal(message: Message) -> tuple[str, ...]:
    """Return the parts of a message that must be equal for two messages to count as the same."""
    if message.role == "tool":
        return (message.role, message.answers, message.text)
    if message.role != "assistant":
        return (message.role, message.text)
    if message.cleared:  # so that a whole conversation's hash shows that this is not the sampled answer
        message, role = replace(message, cleared=False), "cleared"
        return (role, *normal(message))
    calls = [part for call in message.calls for part in (call.id, call.name, _arguments(call))]
    return (message.role, message.text.strip(), *calls)


def digest(seed: bytes, *parts: str) -> bytes:
    """Return a hash of a list of parts. Lengths are hashed too, so that lists with the same concatenation differ."""
    pieces = [len(seed).to_bytes(8, "big"), seed]
    for part in parts:
        data = part.encode()
        pieces += (len(data).to_bytes(8, "big"), data)
    return blake2b(b"".join(pieces), digest_size=16).digest()


def tools_digest(tools: Sequence[Tool]) -> str:
    """Return a digest of the tools as a prompt shows them; "" without tools."""
    return digest(b"".join(tool.digest for tool in tools)).hex() if tools else ""


def _arguments(call: ToolCall) -> str:
    values = call.values()
    if values is None:
        return call.arguments
    # None and False mean the same as a missing argument
    said = {name: value for name, value in values.items() if value is not None and value is not False}
    try:
        return json.dumps(_with_integers(said), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments


def _with_integers(value: Any) -> Any:
    """Return a value with its whole numbers as integers."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: _with_integers(item) for key, item in value.items()}
        case list():
            return [_with_integers(item) for item in value]
        case _:
            return value


# ---------------------------------------------------------------- conversations


PART_CHARS = 32
MAX_VALUES, MAX_DEPTH = 20_000, 64
"""Most values and levels of a tool call's arguments that are parsed."""
_LONG_CALL_ID = re.compile(r"call_(?P<base>[a-z]+-[0-9a-f-]+)_(?P<choice>[0-9]{1,4})_[0-9]{1,6}")
_SHORT_CALL_ID = re.compile(r"call_(?P<kind>[cmrt])(?P<turn>[0-9A-Za-z]{1,40})_[0-9]{1,6}")
_SHORT_TURN = re.compile(r"(?P<kind>[a-z]+)-(?P<rest>[0-9a-f-]{1,60}:[0-9]{1,4})")
_KIND_LETTERS = {"chatcmpl": "c", "msg": "m", "resp": "r", "cmpl": "t"}  # turn id prefix -> letter in a short call id
_REST = "0123456789abcdef-:"  # alphabet of the rest of a turn's id
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Role(StrEnum):
    """The sender of a message. A tool's message is the result of a call."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool. `arguments` is the JSON text of an object, as the model or the client wrote it.

    Example: ``ToolCall(id="call_cXCg_0", name="read", arguments='{"path": "calc.py"}')``
    """

    id: str
    name: str
    arguments: str

    def values(self) -> dict[str, Any] | None:
        """Return the arguments, parsed anew; None if the text is not a JSON object, or has more than `MAX_VALUES` values or `MAX_DEPTH`
        levels. Store the text rather than the result, which takes many times its memory.
        """
        values = _parsed(self.arguments) if self._is_bounded() else None
        return values if isinstance(values, dict) else None

    def _is_bounded(self) -> bool:
        if len(self.arguments) <= MAX_VALUES and self.arguments.count("[") + self.arguments.count("{") <= MAX_DEPTH:
            return True
        shape = shape_of(self.arguments.encode(errors="replace"))
        return shape.depth <= MAX_DEPTH and shape.values < MAX_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. Only an assistant has `reasoning` and `calls`; `answers` is the id of the call whose result a tool's message is.

    `failed`: the client reports that the call failed. The model sees this only from the text. `cleared`: its reasoning was removed, at the
    client's request, so it is not the answer that was sampled.

    Example: ``Message(role=Role.TOOL, text="2 passed", answers="call_cXCg_0")``
    """

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""
    failed: bool = False
    cleared: bool = False
    _digest: bytes = field(default=b"", init=False, repr=False, compare=False)

    @property
    def chars(self) -> int:
        """The message's length in characters."""
        said = len(self.text) + len(self.reasoning)
        return said + sum(len(call.name) + len(call.arguments) for call in self.calls) if self.calls else said

    @property
    def hashed(self) -> bool:
        """True if `digest` is known."""
        return bool(self._digest)

    @property
    def digest(self) -> bytes:
        """A hash of what must be equal for two messages to count as the same (`normal`). Computed once."""
        if not self._digest:
            object.__setattr__(self, "_digest", digest(b"", *normal(self)))
        return self._digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call. `parameters` is a JSON schema; `strict`: a call whose arguments violate it is useless.

    Example: ``Tool(name="read", description="Read a file.", parameters={"type": "object", "properties": {"path": {"type": "string"}}})``
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    strict: bool = False
    _digest: bytes = field(default=b"", init=False, repr=False, compare=False)
    _chars: int = field(default=0, init=False, repr=False, compare=False)

    @property
    def chars(self) -> int:
        """The tool's length in characters, with its schema as JSON."""
        self._measure()
        return self._chars

    @property
    def hashed(self) -> bool:
        """True if `digest` and `chars` are known."""
        return bool(self._digest)

    @property
    def digest(self) -> bytes:
        """A hash of what a prompt shows of the tool. Computed once."""
        self._measure()
        return self._digest

    def _measure(self) -> None:
        if not self._digest:
            schema = json.dumps(self.parameters)
            object.__setattr__(self, "_chars", len(self.name) + len(self.description) + len(schema))
            object.__setattr__(self, "_digest", digest(b"", self.name, self.description, schema))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A constraint on the answer: JSON text that follows `schema`, or calls of the named tools; either if both are given.

    `several`: more than one call may be made. `forbidden`: no tool may be called, though the prompt shows them; without a schema the answer
    is free text otherwise.

    Example: ``Demand(calls=("read", "write"))``
    """

    schema: Mapping[str, Any] | None = None
    calls: tuple[str, ...] = ()
    several: bool = True
    forbidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionBlock:
    """A summary that a client sends back in place of the messages before it. `token`: the proof of its origin, not yet verified;
    `field`: where it is in the request, for errors.

    Example: ``CompactionBlock(content="Done so far: ...", token="eyJ2...")``
    """

    content: str
    token: str
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages so far, oldest first, and the tools that may be called. `continued`: the model continues the last message.

    `demand`: the constraint on the next answer; None allows anything. `one_call`: the next answer may make at most one call. `block`: the
    summary with which it begins, contained in the first messages. `summarises`: the last message asks for a summary of all before it.

    Example: ``Conversation(messages=(Message(role=Role.USER, text="hi"),))``
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    continued: bool = False
    demand: Demand | None = None
    one_call: bool = False
    block: CompactionBlock | None = None
    summarises: bool = False

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the next answer may call: none if the demand forbids calls."""
        return () if self.demand is not None and self.demand.forbidden else self.tools

    @property
    def answered(self) -> bool:
        """True if it contains a message of the assistant."""
        return any(message.role is Role.ASSISTANT for message in self.messages)

    @property
    def chars(self) -> int:
        """The approximate length, in characters, of a prompt that shows all of it."""
        return sum(message.chars for message in self.messages) + sum(tool.chars for tool in self.tools)

    @property
    def hashed(self) -> bool:
        """True if the digests of all messages and tools are known."""
        return all(message.hashed for message in self.messages) and all(tool.hashed for tool in self.tools)

    def compute_digests(self) -> None:
        """Compute the missing digests of all messages and tools. Call it off the event loop, since the time grows with their text."""
        for part in (*self.messages, *self.tools):
            _ = part.digest

    @property
    def parts(self) -> int:
        """The number of messages and tools. Each costs a template about as much as `PART_CHARS` characters of text."""
        return len(self.messages) + len(self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer while it is sampled: text to show, reasoning, or a complete call. Exactly one of the three is set.

    Example: ``Piece(text="Let me look.")``
    """

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


def _parsed(text: str) -> Any:
    """Parse a model's or a client's JSON; None if it is invalid. What only the standard library accepts, such as NaN, is accepted, too."""
    try:
        return msgspec.json.decode(text)
    except ValueError:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return None


def call_id(turn: str, number: int) -> str:
    """Return the id of a turn's call, counted from 0: only letters, digits and _, which every client accepts, and for the gateway's turns
    at most 40 characters, as OpenAI's API requires of ids in a history.

    Example: ``call_id("chatcmpl-3f:0", 1) == "call_cXCg_1"``
    """
    found = _SHORT_TURN.fullmatch(turn)
    if found is not None and found["kind"] in _KIND_LETTERS:
        return f"call_{_KIND_LETTERS[found['kind']]}{_encode_turn(found['rest'])}_{number}"
    base, _, choice = turn.rpartition(":")
    return f"call_{base}_{choice}_{number}"


def calling_turn(call: str) -> str | None:
    """Return the turn that a call's id names, also for the longer ids of version 0.1.0; None if the id is not one of ours.

    Example: ``calling_turn("call_cXCg_1") == "chatcmpl-3f:0"``
    """
    if found := _LONG_CALL_ID.fullmatch(call):
        return f"{found['base']}:{found['choice']}"
    found = _SHORT_CALL_ID.fullmatch(call)
    if found is None:
        return None
    kind = next(kind for kind, letter in _KIND_LETTERS.items() if letter == found["kind"])
    turn = f"{kind}-{_decode_turn(found['turn'])}"
    written = _SHORT_TURN.fullmatch(turn)
    return turn if written is not None and _encode_turn(written["rest"]) == found["turn"] else None


def call_number(call: str) -> int | None:
    """Return the number of a call in its turn, from 0, by the call's id; None if that is not one of ours.

    Example: ``call_number("call_cXCg_1") == 1``
    """
    return int(call.rpartition("_")[2]) if calling_turn(call) else None


def _encode_turn(rest: str) -> str:
    """Encode a text over `_REST` as a number over `_LETTERS`; a leading 1 keeps its leading zeros."""
    number = 1
    for character in rest:
        number = number * len(_REST) + _REST.index(character)
    return _digits(number, _LETTERS)


def _decode_turn(letters: str) -> str:
    """Decode the result of `_encode_turn`; for other letters the text over `_REST` is arbitrary."""
    number = 0
    for letter in letters:
        number = number * len(_LETTERS) + _LETTERS.index(letter)
    return _digits(number, _REST)[1:]


def _digits(number: int, alphabet: str) -> str:
    found: list[str] = []
    while number:
        number, digit = divmod(number, len(alphabet))
        found.append(alphabet[digit])
    return "".join(reversed(found))
