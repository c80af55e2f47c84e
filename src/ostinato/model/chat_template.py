"""Renders conversations with a model's chat template: probes what it supports, adapts conversations to it, and fences control tokens.

Fences protect against forged roles: control tokens in untrusted text are put between two noncharacters before the template sees the text.
Text inside a fence in the template's output is then encoded by a tokenizer that knows no control tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple, cast

import jinja2
from transformers import PreTrainedTokenizerBase

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.model.template_repairs import REPAIRS, as_text, function_schema, needed, repaired

# Unicode noncharacters are never part of interchanged text, so dropping them from a message loses nothing.
_OPEN, _CLOSE, HOLE, _EDGE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_FENCED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_FENCE = re.compile(f"[{_OPEN}{_CLOSE}]")
_DROPPED = str.maketrans("", "", _OPEN + _CLOSE + HOLE + _EDGE)


class Fences:
    """Puts fences around the control tokens of one tokenizer, and finds them in rendered text.

    Example: ``Fences(["<|im_end|>"]).written(fences.around("a<|im_end|>") + "<|im_end|>") == ["<|im_end|>"]``
    """

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        # without tokens: a pattern that matches nothing
        any_token = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._token = re.compile(any_token)
        self._escaped = re.compile(rf"\\[uU]0*{ord(_OPEN):x}(?:{any_token})", re.IGNORECASE)

    def around(self, text: str, *, edges: bool = False) -> str:
        """Return the text with its control tokens fenced. With `edges`, it cannot form a control token with neighbouring text either."""
        bare = text if text.isascii() else text.translate(_DROPPED)
        fenced = self._token.sub(f"{_OPEN}\\g<0>{_CLOSE}", bare)
        return f"{_EDGE}{fenced}{_EDGE}" if edges else fenced

    def written(self, text: str) -> list[str]:
        """Return the control tokens outside fences, in order: those that the template wrote."""
        return [token for piece, fenced in self.pieces(text) if not fenced for token in self._token.findall(piece)]

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Split the text at the fences; yield (piece, whether it was fenced) in order, without the fences."""
        for i, piece in enumerate(_FENCED.split(text)):
            if i % 2:
                yield piece, True
            else:  # split also at unmatched fence characters, of a fence that the template tore apart
                yield from ((part, False) for part in _FENCE.split(piece))

    def first(self, text: str) -> str | None:
        """Return the control token with which the text begins, after white space; None if it begins otherwise."""
        match = self._token.match(text.lstrip())
        return None if match is None else match[0]

    def last(self, text: str, tokens: Collection[str]) -> re.Match[str] | None:
        """Return the last of these tokens outside a fence; None if there is none."""
        fenced = {match.start(1) for match in _FENCED.finditer(text)}
        matches = [match for match in self._token.finditer(text) if match[0] in tokens and match.start() not in fenced]
        return matches[-1] if matches else None

    def check_intact(self, text: str) -> None:
        """Raise BadRequest if the template wrote a fence as an escape sequence, which leaves its control token unprotected."""
        if self._escaped.search(text):
            raise BadRequest(
                "the model's chat template escapes the characters that keep this text from becoming a control token; "
                "leave the control token out",
                field="messages",
            )

    @staticmethod
    def joinable(texts: Iterable[str], tokens: Collection[str]) -> frozenset[str]:
        """Return the texts that could form one of these tokens together with what a template writes beside them."""
        heads = tuple({token[:n] for token in tokens for n in range(1, len(token))})
        tails = tuple({token[n:] for token in tokens for n in range(1, len(token))})

        def fits(text: str) -> bool:
            bare = text.strip()  # many templates strip texts
            return bool(bare) and (
                text.endswith(heads)
                or text.startswith(tails)
                or bare.endswith(heads)
                or bare.startswith(tails)
                or any(bare in token for token in tokens)
            )

        return frozenset(filter(fits, texts))


def encodable(text: str, field: str) -> str:
    """Return the text. Raises BadRequest for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{field} holds half of a surrogate pair, which is not text", field=field) from error
    return text


# ---------------------------------------------------------------- texts that a template leaves out


_CHECKED = (".content", ".function.name", ".function.arguments")
MAX_MISSING = 64
# a marker that occurs in no message and that no template looks for
_MARK = "qzv{number}vzq"


class GivenText(NamedTuple):
    """An untrusted text as it was passed to the template: the text, the same with fences, and the request's field."""

    text: str
    fenced: str
    field: str


def missing_texts(given: Iterable[GivenText], written: str) -> list[GivenText]:
    """Return the texts of messages and calls that the rendered prompt `written` lacks, verbatim or as JSON, ignoring outer white space.

    Returns at most `MAX_MISSING`, and stops once it has scanned `MAX_MISSING` times the prompt's length; a prompt with the texts in order
    is scanned once. Reasoning is not checked, because templates drop that of earlier answers on purpose.
    """
    missing: list[GivenText] = []
    place, searched = 0, 0
    for item in given:
        if searched > MAX_MISSING * len(written):
            return missing
        text = item.fenced.strip()
        if not text or not item.field.endswith(_CHECKED):
            continue
        before = place
        end = _end(text, written, place) or _end(json.dumps(text, ensure_ascii=False)[1:-1], written, place)
        searched += end - before if end is not None and end > before else 2 * len(written)
        if end is None:
            missing.append(item)
            if len(missing) == MAX_MISSING:
                return missing
        else:
            place = max(place, end)
    return missing


def dropped_texts(missing: list[GivenText], write: Callable[[dict[tuple[str, str], str]], str]) -> list[GivenText]:
    """Return the missing texts that the template drops, rather than rewrites: a marker in their place does not appear either.

    `write` renders the conversation with some texts replaced, given {(text, field): marker}.
    """
    marks = {(item.text, item.field): _MARK.format(number=i) for i, item in enumerate(missing)}
    marked = write(marks)
    return [item for item in missing if marks[item.text, item.field] not in marked]


def _end(text: str, written: str, place: int) -> int | None:
    """Return where the text ends: its first occurrence from `place` on, else its first at all; None if there is none."""
    at = written.find(text, place)
    at = written.find(text) if at < 0 else at
    return None if at < 0 else at + len(text)


# ---------------------------------------------------------------- the template


Json = dict[str, Any]
Form = Callable[[Conversation], Conversation]


def _probe(arguments: str) -> Conversation:
    """Return a probe conversation: a question, a call with these arguments, and its result."""
    call = ToolCall(id="call_probe_0_0", name="probe_name", arguments=arguments)
    return Conversation(
        messages=(
            Message(role=Role.USER, text="a"),
            Message(role=Role.ASSISTANT, calls=(call,)),
            Message(role=Role.TOOL, text="probe result", answers="call_probe_0_0"),
        ),
        tools=(
            Tool(
                name="probe_tool",
                description="A probe.",
                parameters={"type": "object", "properties": {"probe_property": {"type": "string"}}},
            ),
        ),
    )


_SHOWN = 60
_PROBE = _probe('{"probe_key": "probe value"}')
_BROKEN = _probe('{"probe_key": "probe va')


class _Unfit(BadRequest):
    """The template refuses a conversation in this form, or leaves out a part of it, `text`."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message, field="messages")
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """The form of tool calls that a template accepts: arguments as JSON text or as an object, ids as they are or as nine alphanumerics.

    `only_objects`: arguments that are not a JSON object are wrapped in one.
    """

    as_text: bool
    short_ids: bool
    only_objects: bool = False

    def arguments(self, call: ToolCall) -> Json | str:
        values = None if self.as_text else call.values()
        if values is not None:
            return values
        if not self.only_objects:
            return call.arguments
        return {"raw": call.arguments} if call.arguments.strip() else {}

    def id(self, id: str) -> str:
        kept = not self.short_ids or (len(id) == 9 and id.isascii() and id.isalnum())
        return id if kept else hashlib.sha256(id.encode(errors="surrogatepass")).hexdigest()[:9]


_STYLES = tuple(_Calls(as_text=text, short_ids=short) for text in (False, True) for short in (False, True))


class ChatTemplate:
    """A model's chat template: renders conversations to text with fences. Pure after construction.

    A conversation is tried in three forms until the template accepts it and all its texts appear in the prompt: with the repairs that
    probing at construction found necessary (often none), with all known repairs, and with its calls as plain text. Else it is refused.

    `knows_tools` is False for a template that leaves out tools, calls or results: it gets them as plain text. `opening` is the text that
    the generation prompt adds after the assistant's role, such as <think>. `ends` are the control tokens that the template writes after
    the assistant's text: first the one after the last message, then, if different, the one after an earlier message.
    """

    knows_tools: bool
    opening: str
    ends: tuple[str, ...]

    def __init__(self, library: PreTrainedTokenizerBase, fences: Fences) -> None:
        self._library, self._fences = library, fences
        style = next(filter(self._writes_tools, _STYLES), None)
        self.knows_tools = style is not None
        self._style = style or _STYLES[0]
        if self.knows_tools and not self._shows(_BROKEN):
            self._style = replace(self._style, only_objects=True)
        self._forms = self._find_forms()
        self.opening = self._find_opening()
        self.ends = self._find_ends()

    @property
    def source(self) -> str:
        """The template's source, the one for tools if there are several; "" if there is none."""
        try:
            return self._library.get_chat_template(tools=[{}])
        except ValueError:
            return ""

    def with_generation_prompt(self, conversation: Conversation) -> str:
        """Render the conversation, followed by the generation prompt. Raises BadRequest."""
        return self._first_fitting(conversation, lambda form: self._render(form(conversation), speak=True))

    def without_generation_prompt(self, conversation: Conversation) -> str:
        """Render the conversation without a generation prompt. Raises BadRequest."""
        return self._first_fitting(conversation, lambda form: self._render(form(conversation), speak=False))

    def with_open_message(self, conversation: Conversation) -> str:
        """Render the conversation with its last message open: it ends with the assistant's text, exactly as given.

        Raises BadRequest.
        """
        return self._first_fitting(conversation, lambda form: self._with_open_message(conversation, form))

    def _with_open_message(self, conversation: Conversation, form: Form) -> str:
        at = len(conversation.messages) - 1
        last = conversation.messages[at]
        if last.role is not Role.ASSISTANT:
            raise BadRequest("only an assistant message can be continued", field=f"messages[{at}].role")
        if last.calls:
            raise BadRequest(
                "a message with calls cannot be continued: leave its calls out, or add their results",
                field=f"messages[{at}].tool_calls",
            )
        fitted = form(conversation)
        head, _ = self._around(fitted, len(fitted.messages) - 1, speak=False)
        text = head + self._fences.around(encodable(fitted.messages[-1].text, f"messages[{at}].content"))
        if self._fences.written(text) != self._fences.written(head):
            raise _completed()
        return text

    def text_after(self, conversation: Conversation, known: int, ends: Collection[str]) -> str:
        """Render what follows the assistant's text in message `known - 1`: its end token (one of `ends`) and all later messages.

        Raises BadRequest, also if the template renders the first `known` messages differently once more messages follow.
        """
        if not 0 < known <= len(conversation.messages) or conversation.messages[known - 1].role is not Role.ASSISTANT:
            raise BadRequest("a stored turn can only be followed after an assistant message", field="messages")
        return self._first_fitting(conversation, lambda form: self._text_after(conversation, known, ends, form))

    def _text_after(self, conversation: Conversation, known: int, ends: Collection[str], form: Form) -> str:
        fitted = form(conversation)
        upto = form(replace(conversation, messages=conversation.messages[:known], continued=False))
        at = len(upto.messages) - 1
        if fitted.messages[: at + 1] != upto.messages:  # the answer was dropped, or merged with what follows
            raise _rewritten()
        tail = self._tail(fitted, upto, ends)
        given = [GivenText(m.text, self._fences.around(m.text), ".content") for m in fitted.messages[at + 1 :]]
        if missing_texts(given, tail):  # the template wrote them before the answer
            raise _rewritten()
        return tail

    def _tail(self, conversation: Conversation, upto: Conversation, ends: Collection[str]) -> str:
        """Render what follows the text of the last message of `upto`, a prefix of the conversation."""
        at = len(upto.messages) - 1
        if not conversation.messages[at].calls:
            return self._around(conversation, at, speak=True)[1]
        whole = self._render(conversation, speak=True)
        with suppress(BadRequest):  # some templates require a call before a result
            tail = self._around(conversation, at, speak=True)[1]
            if whole.endswith(tail):
                return tail
        known_text = self._render(upto, speak=False)
        end = self._fences.last(known_text, ends)
        if end is None or known_text[end.end() :].strip() or not whole.startswith(known_text[: end.end()]):
            raise _rewritten()
        return whole[end.start() :]

    # ------------------------------------------------------------ forms of a conversation

    def _find_forms(self) -> tuple[Form, ...]:
        """Return the forms in which a conversation is tried, in order."""

        def settled(conversation: Conversation) -> Conversation:
            return conversation if self.knows_tools else as_text(conversation)

        repairs = needed(settled, self._shows)
        return (
            lambda conversation: repaired(settled(conversation), repairs),
            lambda conversation: repaired(settled(conversation), REPAIRS),
            lambda conversation: repaired(as_text(conversation), REPAIRS),
        )

    def _first_fitting(self, conversation: Conversation, write: Callable[[Form], str]) -> str:
        """Return the result of `write` for the first form that the template accepts. Raises BadRequest."""
        if not conversation.messages:
            raise BadRequest("messages is empty: give at least one", field="messages")
        first: _Unfit | None = None
        for form in self._forms:
            try:
                return write(form)
            except _Unfit as error:
                first = first or error
        assert first is not None
        raise BadRequest(str(first), field=_field_of(conversation, first.text))

    # ------------------------------------------------------------ rendering

    def _around(self, conversation: Conversation, at: int, *, speak: bool) -> tuple[str, str]:
        """Return the template's output before and after the text of message `at`, whose calls are left out."""
        head, hole, tail = self._render(conversation, speak=speak, hole=at).rpartition(HOLE)
        if not hole:
            raise _Unfit("the model's chat template leaves out an assistant message")
        return head, tail

    def _render(self, conversation: Conversation, *, speak: bool, hole: int | None = None) -> str:
        """Render. Raises BadRequest if an untrusted text does not appear, or forms a control token together with text beside it."""
        try:
            given: list[GivenText] = []
            text = self._apply(conversation, hole, speak, given)
            self._fences.check_intact(text)
            written = self._fences.written(text)
            joinable = self._fences.joinable({item.text for item in given}, set(written))
            if joinable and self._fences.written(self._apply(conversation, hole, speak, [], joinable)) != written:
                raise _completed()
            if missing := missing_texts(given, text):
                gone = dropped_texts(missing, lambda marks: self._apply(conversation, hole, speak, [], marks=marks))
                if gone:
                    raise _Unfit(f"the model's chat template leaves out {_start(gone[0].text)}", gone[0].text)
        except RecursionError:
            raise BadRequest("tools or arguments are nested too deeply", field="messages") from None
        return text

    def _apply(
        self,
        conversation: Conversation,
        hole: int | None,
        speak: bool,
        given: list[GivenText],
        joinable: Collection[str] = (),
        marks: Mapping[tuple[str, str], str] | None = None,
    ) -> str:
        """Render with fences, unchecked. Appends the texts to `given`; texts in `joinable` get edges, those in `marks` are replaced."""

        def fence(text: str, field: str) -> str:
            if marks and (text, field) in marks:
                return marks[text, field]
            fenced = self._fences.around(encodable(text, field), edges=text in joinable)
            given.append(GivenText(text, fenced, field))
            return fenced

        tools: list[Json] = []
        for i, tool in enumerate(conversation.tools):
            parts = function_schema(tool)["function"]
            shown = {name: _fenced(part, f"tools[{i}].function.{name}", fence) for name, part in parts.items()}
            tools.append({"type": "function", "function": shown})
        return self._write(self._messages(conversation, hole, fence), tools, speak)

    def _messages(self, conversation: Conversation, hole: int | None, fence: Callable[[str, str], str]) -> list[Json]:
        names = {call.id: call.name for message in conversation.messages for call in message.calls}
        written: list[Json] = []
        for i, message in enumerate(conversation.messages):
            field = f"messages[{i}]"
            shown: Json = {"role": message.role.value, "content": HOLE}
            if i != hole:
                shown["content"] = fence(message.text, f"{field}.content")
            if message.reasoning:
                shown["reasoning_content"] = fence(message.reasoning, f"{field}.reasoning_content")
            if message.calls and i != hole:
                shown["tool_calls"] = [
                    self._call(call, f"{field}.tool_calls[{j}]", fence) for j, call in enumerate(message.calls)
                ]
            if message.role is Role.TOOL:
                shown["tool_call_id"] = fence(self._style.id(message.answers), f"{field}.tool_call_id")
                if message.answers in names:
                    shown["name"] = fence(names[message.answers], f"{field}.tool_call_id")
            written.append(shown)
        return written

    def _call(self, call: ToolCall, field: str, fence: Callable[[str, str], str]) -> Json:
        return {
            "type": "function",
            "id": fence(self._style.id(call.id), f"{field}.id"),
            "function": {
                "name": fence(call.name, f"{field}.function.name"),
                "arguments": _fenced(self._style.arguments(call), f"{field}.function.arguments", fence),
            },
        }

    def _write(self, messages: list[Json], tools: list[Any], speak: bool) -> str:
        if not self._library.chat_template:
            raise BadRequest("this model has no chat template: use /v1/completions", field="messages")
        try:
            text = self._library.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=speak
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise _Unfit(f"the model's chat template refuses these messages: {error}") from error
        return cast("str", text)

    # ------------------------------------------------------------ probing the template

    def _writes_tools(self, style: _Calls) -> bool:
        """Return whether the template writes tools, calls and results, and arguments given as an object as JSON."""
        self._style = style
        try:
            offered = self._render(replace(_PROBE, messages=_PROBE.messages[:1]), speak=True)
            used = self._render(_PROBE, speak=True)
        except BadRequest:
            return False
        shown = ("probe_name", "probe_key", "probe value", "probe result")
        return "probe_tool" in offered and all(text in used for text in shown) and "'probe_key'" not in used

    def _shows(self, conversation: Conversation) -> bool:
        """Return whether the template accepts the conversation and writes all of its texts."""
        try:
            self._render(conversation, speak=True)
        except BadRequest:
            return False
        return True

    def _find_opening(self) -> str:
        try:
            asked = self._render(_talk(1), speak=False)
            asking = self._render(_talk(1), speak=True)
            # in the middle: some templates treat the last message differently
            answered, _ = self._around(_talk(3), 1, speak=False)
        except BadRequest:  # the template requires other roles
            return ""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asking, answered, strict=False)))
        return asking[same:] if asking.startswith(asked) else ""

    def _find_ends(self) -> tuple[str, ...]:
        try:
            last = self._fences.first(self._around(_talk(2), 1, speak=False)[1])
        except BadRequest:  # the template requires other roles: only the configuration names end tokens
            return ()
        if last is None:
            return ()
        with suppress(BadRequest):
            tail = self._around(_talk(3), 1, speak=False)[1]
            inner = self._fences.first(tail)
            if inner is not None and not self._render(_talk(1), speak=False).endswith(tail):
                return (last, inner)
        return (last,)


def _talk(messages: int) -> Conversation:
    """Return a conversation of a user and an assistant taking turns."""
    roles = (Role.USER, Role.ASSISTANT, Role.USER)
    return Conversation(messages=tuple(Message(role=role, text="a") for role in roles[:messages]))


def _fenced(value: Any, field: str, fence: Callable[[str, str], str]) -> Any:
    """Return a JSON value with all its strings fenced, keys included."""
    if isinstance(value, str):
        return fence(value, field)
    if isinstance(value, Mapping):
        return {fence(str(key), field): _fenced(item, field, fence) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_fenced(item, field, fence) for item in value]
    return value


def _start(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _field_of(conversation: Conversation, text: str) -> str:
    """Return the field of the first message that holds this text."""
    for i, message in enumerate(conversation.messages):
        parts = (message.text, *(part for call in message.calls for part in (call.name, call.arguments)))
        if text and any(text in part for part in parts):
            return f"messages[{i}]"
    return "messages"


def _rewritten() -> BadRequest:
    return BadRequest(
        "the model's chat template writes these messages in another way once more follow", field="messages"
    )


def _completed() -> BadRequest:
    return BadRequest(
        "the text holds a part of a control token, which the model's chat template would make whole; leave it out",
        field="messages",
    )
