"""Scrubbing: secrets and personal data are replaced by stable placeholders before the model sees them, and restored in its answers.

A placeholder is a function of the person, the kind and the value, so a value has the same tokens in every turn of a person, even after a
restart. The values themselves come from the request, because clients send the conversation with every call; nothing is stored.
"""

from __future__ import annotations

import hmac
import json
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import re2

from ostinato.core.conversation import Conversation, Demand, Message, Piece, Tool, ToolCall
from ostinato.core.errors import BadConfig, OstinatoError
from ostinato.core.records import Finish
from ostinato.serve.config import PrivacyConfig
from ostinato.serve.dialects.dialect import Counts, Json, Tokens, Whole, Writer
from ostinato.serve.secret_detector import CONTEXTUAL_KINDS, PLACEHOLDER, SecretDetector, detector, is_named_secret

_OPEN, _CLOSE = "\u27e8", "\u27e9"
_DIGEST_CHARS = 8  # hexadecimal digits; more if two values of a request collide
_PASSES = 4  # masking a value may expose another one beside it
_LITERAL = re2.compile(rb'"(?:[^"\\]|\\.)*"')
_BATCH = 1 << 15  # bytes of known values per regular expression
_LEAST_SECRET = 16  # bytes of the operator's key
_Item = TypeVar("_Item", Conversation, Demand, Message, Tool, ToolCall)
_Words = Callable[[str], str]
_Value = Callable[[str, str], str]  # (name of the field, "" if there is none; string) -> its replacement


class Scrubbing:
    """Detects or masks secrets and personal data, as `privacy.scrub` says. `secret`: a key that all gateways of a run share.

    Raises BadConfig for a secret short enough to be guessed.

    Example: ``Scrubbing(PrivacyConfig(scrub="mask"), key).person("acme", "ann").text("I am ann@example.com")``
    """

    def __init__(self, config: PrivacyConfig, secret: bytes) -> None:
        if len(secret) < _LEAST_SECRET:
            raise BadConfig(f"privacy.scrub needs an operator's key of {_LEAST_SECRET} characters; set serve.admin_key")
        self.masks = config.scrub == "mask"
        self._secret = hmac.digest(secret, b"placeholders", "sha256")
        self._detector = detector(frozenset(config.scrub_ignored))

    def person(self, tenant: str, user: str) -> Scrubber:
        """Return the scrubber of one request, one answer or one event of this person."""
        return Scrubber(self._detector, self.key(tenant, user))

    def key(self, tenant: str, user: str) -> bytes:
        """Return the key of a person's placeholders."""
        return hmac.digest(self._secret, json.dumps([tenant, user]).encode(), "sha256")

    def finds(self, text: str) -> bool:
        """Return True if a text holds a secret or personal data."""
        return bool(self._detector.find(_bytes(text)))


def open_scrubbing(config: PrivacyConfig, secret: str) -> Scrubbing | None:
    """Return the scrubbing of a run; None if it is off. Raises BadConfig."""
    return None if config.scrub == "off" else Scrubbing(config, secret.encode())


class Scrubber:
    """Masks the values of one request, and remembers them by placeholder.

    Passwords are recognised by the words before them, and then masked wherever they occur in the conversation.

    Example::

        scrubber = scrubbing.person("acme", "ann")
        masked = scrubber.conversation(conversation)
        scrubber.values  # {"⟨EMAIL_3f2a91c4⟩": "ann@example.com"}
    """

    def __init__(self, detector: SecretDetector, key: bytes) -> None:
        self._detector = detector
        self._key = key
        self.values: dict[str, str] = {}
        self._near: dict[bytes, bytes] = {}  # values recognised only by the words before them -> placeholders
        self._known: Sequence[re2.Pattern] = ()  # expressions that find these values anywhere

    def conversation(self, conversation: Conversation) -> Conversation:
        """Return the conversation with placeholders, also in its tools and its answer's schema; unchanged if it holds no value."""
        masked = _mapped(conversation, self.text, self.json)
        if self._near:  # they may also occur before the place where they were recognised
            self._known = [_expression(batch) for batch in _batches(self._near)]
            masked = _mapped(masked, self.text, self.json)
        return masked

    def message(self, message: Message) -> Message:
        """Return a message with placeholders; unchanged if it holds no value."""
        return _message(message, self.text, self.json)

    def text(self, text: str) -> str:
        """Return a text with placeholders; unchanged if it holds no value."""
        data = _bytes(text)
        masked = self._masked(data)
        return text if masked is data else masked.decode(errors="surrogatepass")

    def json(self, text: str) -> str:
        """Return JSON text with placeholders. A number that is masked becomes a string."""
        data = _bytes(in_json(text, self._named))
        for _ in range(_PASSES):
            found = self._placeholders(data)
            if not found:
                break
            literals = [match.span() for match in _LITERAL.finditer(data)]
            quoted = ((start, end, new if _within(literals, start) else b'"' + new + b'"') for start, end, new in found)
            data = _spliced(data, quoted)
        return data.decode(errors="surrogatepass")

    def restoring(self, writer: Writer, conversation: Conversation | None) -> Writer:
        """Return a writer that restores the values in the answer to this conversation; the same writer if there are none."""
        demand = None if conversation is None else conversation.demand
        escaped = demand is not None and demand.schema is not None
        return UnmaskingWriter(writer, self.values, escaped=escaped) if self.values else writer

    def _named(self, name: str, value: str) -> str:
        if is_named_secret(name, value):
            return self._placeholder("PASSWORD", _bytes(value)).decode()
        return self.text(value)

    def _masked(self, data: bytes) -> bytes:
        for _ in range(_PASSES):
            found = self._placeholders(data)
            if not found:
                break
            data = _spliced(data, found)
        for known in self._known:
            found = [match for match in known.finditer(data) if match.end(1) < 0]
            if found:
                data = _spliced(data, [(*match.span(), self._near[match.group()]) for match in found])
        return data

    def _placeholders(self, data: bytes) -> list[tuple[int, int, bytes]]:
        return [
            (start, end, self._placeholder(kind, data[start:end])) for kind, start, end in self._detector.find(data)
        ]

    def _placeholder(self, kind: str, value: bytes) -> bytes:
        digits, text = hmac.digest(self._key, value, "sha256").hex(), value.decode(errors="surrogatepass")
        lengths = range(_DIGEST_CHARS, len(digits) + 1, _DIGEST_CHARS)
        choices = (f"{_OPEN}{kind}_{digits[:length]}{_CLOSE}" for length in lengths)
        placeholder = next(choice for choice in choices if self.values.setdefault(choice, text) == text)
        if kind in CONTEXTUAL_KINDS:
            self._near[value] = placeholder.encode()
        return placeholder.encode()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _spliced(data: bytes, replaced: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Return the bytes with the given ranges replaced; the ranges must be in order."""
    pieces, at = list[bytes](), 0
    for start, end, new in replaced:
        pieces += (data[at:start], new)
        at = end
    return b"".join([*pieces, data[at:]])


def _within(spans: Sequence[tuple[int, int]], at: int) -> bool:
    place = bisect(spans, at, key=lambda span: span[0]) - 1
    return place >= 0 and at < spans[place][1]


def _batches(values: Iterable[bytes]) -> Iterable[list[bytes]]:
    """Yield the values, longest first, in lists of about `_BATCH` bytes."""
    batch, size = list[bytes](), 0
    for value in sorted(values, key=len, reverse=True):
        batch.append(value)
        size += len(value)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _expression(values: Iterable[bytes]) -> re2.Pattern:
    """Compile an expression that matches these values at word boundaries, and placeholders as its first group."""
    options = re2.Options()
    options.max_mem, options.log_errors = 1 << 26, False
    words = [_word_end(value[:1]) + re2.escape(value) + _word_end(value[-1:]) for value in values]
    return re2.compile(b"|".join([f"({PLACEHOLDER})".encode(), *words]), options)


def _word_end(byte: bytes) -> bytes:
    return rb"\b" if byte.isalnum() or byte == b"_" else b""


# ---------------------------------------------------------------- conversations


def in_json(text: str, value: _Value) -> str:
    """Replace the strings in JSON text and leave everything else as written. Text that is not JSON is treated the same."""
    if '"' not in text:
        return text
    data = _bytes(text)
    replaced, name, end = list[tuple[int, int, bytes]](), "", 0
    for match in _LITERAL.finditer(data):
        start, between = match.start(), data[end : match.start()].strip()
        try:
            string: str = json.loads(match.group().decode(errors="surrogatepass"), strict=False)
        except ValueError:
            string = match.group()[1:-1].decode(errors="surrogatepass")
        new = value(name if between == b":" else "", string)
        if new != string:
            replaced.append((start, match.end(), _bytes(json.dumps(new, ensure_ascii=False))))
        name, end = string, match.end()
    return _spliced(data, replaced).decode(errors="surrogatepass") if replaced else text


def _with(item: _Item, **fields: Any) -> _Item:
    """Return the item with these fields; the item itself if none differs."""
    changed = {name: value for name, value in fields.items() if value != getattr(item, name)}
    return replace(item, **changed) if changed else item


def _message(message: Message, words: _Words, in_call: _Words) -> Message:
    calls = tuple(_with(call, arguments=in_call(call.arguments)) for call in message.calls)
    return _with(message, text=words(message.text), reasoning=words(message.reasoning), calls=calls)


def _mapped(conversation: Conversation, words: _Words, in_call: _Words) -> Conversation:
    demand = conversation.demand
    if demand is not None and demand.schema is not None:
        demand = _with(demand, schema=_strings(demand.schema, words))
    tools = tuple(
        _with(tool, description=words(tool.description), parameters=_strings(tool.parameters, words))
        for tool in conversation.tools
    )
    messages = tuple(_message(message, words, in_call) for message in conversation.messages)
    return _with(conversation, tools=tools, demand=demand, messages=messages)


def _strings(value: Any, words: _Words) -> Any:
    """Return a JSON value with its strings replaced, but not its field names."""
    match value:
        case str():
            return words(value)
        case list() | tuple():
            return [_strings(item, words) for item in value]
        case Mapping():
            return {name: _strings(item, words) for name, item in value.items()}
        case _:
            return value


# ---------------------------------------------------------------- answers


class Unmasker:
    """Restores values in a text that arrives in pieces; the end of a piece that may begin a placeholder is withheld.

    The output, joined, does not depend on where the text was cut. A placeholder that is not in `values` stays unchanged. `escaped`: the
    text is JSON with placeholders in its strings.

    Example: ``Unmasker({"⟨EMAIL_3f2a91c4⟩": "ann@example.com"}).feed("to ⟨EMA") == "to "``
    """

    def __init__(self, values: Mapping[str, str], *, escaped: bool = False) -> None:
        self._values = values
        self._escaped = escaped
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; return what may be shown now."""
        text = self._held + text
        shown, at = list[str](), 0
        while (start := text.find(_OPEN, at)) >= 0:
            shown.append(text[at:start])
            end = text.find(_CLOSE, start)
            again = text.find(_OPEN, start + 1)
            if end < 0 and again < 0 and self._may_begin(text[start:]):
                self._held = text[start:]
                return "".join(shown)
            at = start + 1 if end < 0 or 0 <= again < end else end + 1
            shown.append(self._value(text[start:at]))
        self._held = ""
        return "".join([*shown, text[at:]])

    def flush(self) -> str:
        """Return the withheld text, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        return any(placeholder.startswith(text) for placeholder in self._values)

    def _value(self, text: str) -> str:
        value = self._values.get(text)
        if value is None:
            return text
        return json.dumps(value, ensure_ascii=False)[1:-1] if self._escaped else value


def unmasked(text: str, values: Mapping[str, str], *, escaped: bool = False) -> str:
    """Return a complete text with its values restored."""
    stream = Unmasker(values, escaped=escaped)
    return stream.feed(text) + stream.flush()


def unmasked_json(text: str, values: Mapping[str, str]) -> str:
    """Like `unmasked`, for JSON text such as the arguments of a call."""
    return in_json(text, lambda _, said: unmasked(said, values))


def unmasked_message(message: Message, values: Mapping[str, str], *, escaped: bool = False) -> Message:
    """Return an answer with its values restored. `escaped`: its text is JSON."""
    return _message(
        message, lambda text: unmasked(text, values, escaped=escaped), lambda text: unmasked_json(text, values)
    )


class UnmaskingWriter(Writer):
    """Wraps a writer and restores the values in an answer. Tokens are reported as sampled.

    Args:
        writer: the dialect's.
        values: placeholder -> value.
        escaped: the answer's text is JSON.
    """

    def __init__(self, writer: Writer, values: Mapping[str, str], *, escaped: bool) -> None:
        self._writer = writer
        self._values = values
        self._escaped = escaped
        self._texts: dict[int, Unmasker] = {}  # by choice
        self._thoughts: dict[int, Unmasker] = {}

    def body(self, answers: Sequence[Whole], counts: Counts, ostinato: Json) -> bytes:
        restored = [
            replace(
                answer,
                message=unmasked_message(answer.message, self._values, escaped=self._escaped),
                stop=unmasked(answer.stop, self._values),
            )
            for answer in answers
        ]
        return self._writer.body(restored, counts, ostinato)

    def heartbeat(self) -> str:
        return self._writer.heartbeat()

    def opening(self) -> str:
        return self._writer.opening()

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Tokens) -> str:
        return self._writer.delta(index, [told for piece in pieces for told in self._restored(index, piece)], tokens)

    def ending(self, index: int, finish: Finish, stop: str, closing: tuple[Counts, Json] | None) -> str:
        rest = self._rest(index)
        last = self._writer.delta(index, rest, Tokens((), ())) if rest else ""
        return last + self._writer.ending(index, finish, unmasked(stop, self._values), closing)

    def failure(self, error: OstinatoError) -> str:
        return self._writer.failure(error)

    def _restored(self, index: int, piece: Piece) -> list[Piece]:
        if piece.call is not None:
            call = replace(piece.call, arguments=unmasked_json(piece.call.arguments, self._values))
            return [*self._rest(index), Piece(call=call)]
        text, thought = self._streams(index)
        before = _pieces(
            thought="" if piece.reasoning else thought.flush(), text=text.flush() if piece.reasoning else ""
        )
        return [*before, *_pieces(thought=thought.feed(piece.reasoning), text=text.feed(piece.text))]

    def _rest(self, index: int) -> list[Piece]:
        text, thought = self._streams(index)
        return _pieces(thought=thought.flush(), text=text.flush())

    def _streams(self, index: int) -> tuple[Unmasker, Unmasker]:
        text = self._texts.setdefault(index, Unmasker(self._values, escaped=self._escaped))
        return text, self._thoughts.setdefault(index, Unmasker(self._values))


def _pieces(*, thought: str, text: str) -> list[Piece]:
    return [Piece(reasoning=thought)] * bool(thought) + [Piece(text=text)] * bool(text)
