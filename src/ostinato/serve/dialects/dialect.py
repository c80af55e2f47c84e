"""The interface of every dialect: a typed request, and a writer that shapes its answer. The rest of `serve/` knows dialects only by it.

Also what all dialects share: the form that an answer must have, and the table of their fields.

Parts of a request that the model does not get although the request is taken, each told to the caller in a response header.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar
from unicodedata import category

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from ostinato.core.conversation import CompactionBlock, Conversation, Demand, Message, Piece, Tool
from ostinato.core.errors import BadRequest, OstinatoError
from ostinato.core.generation import Tops
from ostinato.core.records import Finish, Sampling
from ostinato.serve.dialects.extensions import Extensions
from ostinato.serve.dialects.field_rules import Only, too_wide

# ---------------------------------------------------------------- fields that are left out


_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "document",
    "input_file": "document",
    "container_upload": "document",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
"""What the parts of these types are, in all dialects."""

MEDIA_TYPES = frozenset(_MEDIA)


class Omissions:
    """Collects what is left out of one request, as words of the header `X-Ostinato-Omitted`, each once.

    Example: ``omissions.media("image_url") == "[image omitted: this model reads text only]"``
    """

    def __init__(self) -> None:
        self._words: dict[str, None] = {}

    @property
    def words(self) -> Sequence[str]:
        """What was left out, in the order in which it was met."""
        return [*self._words]

    def add(self, word: str) -> None:
        """Note an omission: a word of ASCII letters, digits and hyphens."""
        self._words[word] = None

    def media(self, type: str) -> str:
        """Note a part that is no text, of one of `MEDIA_TYPES`; returns the text that the model gets in its place."""
        kind = _MEDIA[type]
        self.add(kind)
        return f"[{kind} omitted: this model reads text only]"


# ---------------------------------------------------------------- the interface


Json = dict[str, Any]


def told_finish(finish: Finish) -> Finish:
    """The finish to report in a dialect. No dialect has a word for a deadline, so such a cut is reported as `LENGTH`, which all have."""
    return Finish.LENGTH if finish.cut else finish


class Request(Protocol):
    """A model call as a client requested it, validated."""

    @property
    def model(self) -> str:
        """The model's name as the client gave it."""
        ...

    @property
    def asker(self) -> str | None:
        """The user, if the body names one."""
        ...

    @property
    def n(self) -> int | None:
        """How many answers; None means one."""
        ...

    @property
    def budget(self) -> int | None:
        """The most tokens that the client wants."""
        ...

    @property
    def stream(self) -> bool | None:
        """True if the answer is to be streamed as events."""
        ...

    @property
    def store(self) -> bool | None:
        """False if the client wants nothing of the call to be kept (`privacy.store_false`)."""
        ...

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        ...

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's log-probability is to be returned."""
        ...

    @property
    def tops(self) -> int:
        """How many of the likeliest tokens to return at each sampled token's place."""
        ...

    @property
    def omitted(self) -> Sequence[str]:
        """What the model does not get of the request although it is taken, as words of a header."""
        ...

    def sampling(self, max_tokens: int) -> Sampling:
        """The sampling parameters, with this token budget."""
        ...


class ConversationRequest(Request, Protocol):
    """A request whose prompt is a conversation."""

    @property
    def conversation(self) -> Conversation:
        """The messages so far, and the tools."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of the prompt and of all answers."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """The summary that a call began with, and its tokens; both are None if none could be used and the prompt stayed as it was."""

    block: CompactionBlock | None
    counts: Counts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """Everything known about an answer before its first token. `created` is in Unix seconds; `choices` is the number of answers.

    `count_usage`: a stream ends with the token counts, in dialects that leave this to the client. `compacted`: what the call began with,
    if its client wished so and the prompt was long; `edits`: what was cleared of the prompt, as the dialect tells it.
    """

    id: str
    created: float
    model: str
    choices: int
    prompt_tokens: int
    count_usage: bool
    compacted: Compacted | None = None
    edits: Sequence[Json] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens in order, with their log-probabilities; `tops` has the same length if it was requested, else it is empty."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[Tops] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One complete answer with all its tokens. `stop` is the stop string that ended it, "" if none did."""

    message: Message
    tokens: Tokens
    finish: Finish
    stop: str = ""


class Writer(ABC):
    """Shapes the answer to one request: call `body`, or `opening`, then `delta` and `ending` for every choice. Use it once.

    The streaming methods return whole server-sent events, possibly none.
    """

    @abstractmethod
    def body(self, answers: Sequence[Whole], counts: Counts, ostinato: Json) -> bytes:
        """The whole answer at once, as JSON. `ostinato` holds Ostinato's own fields, which are added under that name."""

    def heartbeat(self) -> str:
        """What keeps a silent stream alive, at any place between events: a comment, unless the dialect has an event for it."""
        return ": waiting\n\n"

    @abstractmethod
    def opening(self) -> str:
        """The events that begin a stream."""

    @abstractmethod
    def delta(self, index: int, pieces: Sequence[Piece], tokens: Tokens) -> str:
        """The events for new tokens of a choice and the pieces of its answer that they complete, possibly none."""

    @abstractmethod
    def ending(self, index: int, finish: Finish, stop: str, closing: tuple[Counts, Json] | None) -> str:
        """The end of a choice; `stop` is the stop string that ended it, "" if none did. The last one comes with `closing`, the counts and
        Ostinato's fields, and ends the stream.
        """

    @abstractmethod
    def failure(self, error: OstinatoError) -> str:
        """The last events of a stream that cannot be completed, whatever was sent of it before."""


class ContextExceeded(BadRequest):
    """A prompt leaves no room in the model's context for the answer. Each dialect says so in its protocol's words, by which agents
    recognise that they must shorten the conversation.

    Args:
        prompt: the prompt's tokens.
        answer: the tokens that the answer needs at least; 0 for a prompt that is too long in itself.
        context: the most tokens of prompt and answer together.
        field: the request's field that holds the prompt.
        chars: the prompt's characters, if it is too long to be tokenised: `prompt` is then an estimate from below.
    """

    code = "context_length_exceeded"

    def __init__(self, *, prompt: int, answer: int, context: int, field: str, chars: int = 0) -> None:
        self.prompt, self.answer, self.context = prompt, answer, context
        self.size = (
            f"at least {prompt} tokens, for its {chars} characters (serve.max_chars_per_token)"
            if chars
            else f"{prompt} tokens"
        )
        needs = f", and the answer needs {answer} at least" if answer else ""
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, your {field} resulted in {self.size}{needs}. "
            f"Please reduce the length of the {field}.",
            field=field,
        )


def status_of(error: OstinatoError) -> int:
    """The HTTP status of an error, where its dialect has no other."""
    return error.status


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How a dialect reports an error that is all of an answer: as a body with an HTTP status.

    Example: ``ErrorShape(body=error_body)``
    """

    body: Callable[[OstinatoError], Json]
    status: Callable[[OstinatoError], int] = status_of


# ---------------------------------------------------------------- the form that an answer must have


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
AUTO, NONE, REQUIRED = "auto", "none", "required"
_STRICT = "strict-tools"


def demanded(
    tools: Sequence[Tool],
    *,
    choice: str,
    named: str | None,
    several: bool,
    schema: Mapping[str, Any] | None,
    omissions: Omissions,
) -> Demand | None:
    """The constraint on the answer; None if it is free.

    Args:
        tools: the offered tools.
        choice: one of `AUTO`, `NONE` and `REQUIRED`.
        named: the single tool that must be called, if any.
        several: whether more than one call may be made.
        schema: JSON schema of the answer's text, if it is not a call.
        omissions: is told if tools are strict although the answer may be free text, where nothing is enforced.

    Raises:
        BadRequest: a call is required of a tool that is not offered.
    """
    names = tuple(tool.name for tool in tools)
    if named is not None:
        if named not in names:
            raise BadRequest(f"tool_choice names {named[:100]!r}, which is not among the tools.", field="tool_choice")
        return Demand(calls=(named,), several=False)
    if choice == REQUIRED:
        if not names:
            raise BadRequest("tool_choice requires a call, but there are no tools.", field="tool_choice")
        return Demand(calls=names, several=several)
    callable_names = names if choice == AUTO else ()
    forbidden = choice == NONE and bool(names)
    if schema is not None:
        return Demand(schema=schema, calls=callable_names, several=several, forbidden=forbidden)
    if forbidden:
        return Demand(forbidden=True)
    if any(tool.strict for tool in tools) and callable_names:
        omissions.add(_STRICT)
    return None


# ---------------------------------------------------------------- the table of fields


MAX_MESSAGES, MAX_TOOLS = 4096, 1024
MAX_STOPS = 16
_JOINERS = "\u200c\u200d"
# pydantic puts the name of a union's branch into a path, where it is not a field of the body
_BRANCHES = ("str", "int", "float", "bool")
SHOWN = 10  # fields that one error names; further ones are counted, not put into words
_LONGEST = 200  # characters of a field's path that are shown
_Body = TypeVar("_Body", bound=BaseModel)


def printable(text: str) -> str:
    """Check a name that is shown to people: no character may move a terminal's cursor or end a line. Raises ValueError."""
    if not text.isprintable() and not all(map(_stays, text)):
        raise ValueError("contains a character that is not printable")
    return text


def _stays(character: str) -> bool:
    """True if printable, or a joiner (Persian, emoji) or space (Japanese): names contain these, but Python calls them unprintable."""
    return character.isprintable() or character in _JOINERS or category(character) == "Zs"


Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
User = Annotated[str, StringConstraints(max_length=512), AfterValidator(printable)]  # some clients send "" for no user


_OF_CHAT = "is not supported in this dialect: chat completions have it"
_OfChat0 = Annotated[Any, Only(0, why=_OF_CHAT)]


class OneAnswer(Extensions):
    """Base of the requests in dialects that return a single answer, no log-probabilities, and always the token counts."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    stream: bool | None = None
    presence_penalty: _OfChat0 = None
    frequency_penalty: _OfChat0 = None
    logit_bias: Annotated[Any, Only({}, why=_OF_CHAT)] = None
    logprobs: Annotated[Any, Only(False, why=_OF_CHAT)] = None
    seed: Annotated[Any, Only(why=_OF_CHAT)] = None
    n_: Annotated[Any, Only(1, why=_OF_CHAT), Field(alias="n")] = None

    @property
    def n(self) -> int | None:
        """How many answers: None, which means one."""
        return None

    @property
    def wants_usage(self) -> bool:
        """True: each stream ends with the token counts."""
        return True

    @property
    def wants_logprobs(self) -> bool:
        """False: these dialects return no log-probabilities."""
        return False

    @property
    def tops(self) -> int:
        """0: no likeliest tokens are returned."""
        return 0

    @property
    def stops(self) -> Sequence[str]:
        """The texts that end the answer."""
        return ()

    def sampling(self, max_tokens: int) -> Sampling:
        """The sampling parameters, with this token budget."""
        return sampling_of(max_tokens, self.temperature, self.top_p, self.stops)


def sampling_of(max_tokens: int, temperature: float | None, top_p: float | None, stops: Sequence[str]) -> Sampling:
    """The sampling parameters that all dialects have; None is the dialects' default, 1."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        stop=tuple(stops),
    )


def check_stops(stops: Sequence[str]) -> None:
    """Raise ValueError unless there are at most `MAX_STOPS` stop strings of 1 to 256 characters."""
    if len(stops) > MAX_STOPS or any(not 0 < len(text) <= 256 for text in stops):
        raise ValueError(f"takes at most {MAX_STOPS} strings of 1 to 256 characters")


def validate(model: type[_Body], body: Any, where: str = "") -> _Body:
    """Check a JSON object against a pydantic model. Raises BadRequest naming every bad field, the first as its `field`."""
    if not isinstance(body, dict):
        raise BadRequest(f"{where or 'The body'} must be a JSON object, not {kind(body)}.", field=where or None)
    if wide := too_wide(body):
        field = ".".join(filter(None, (where, wide[0])))
        raise BadRequest(f"{where or 'The body'} {wide[1]}.", field=field or None)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        found, fields = dict[str, str](), [field.alias or name for name, field in model.model_fields.items()]
        for each in error.errors(include_url=False, include_context=False, include_input=False):
            field = _path(each["loc"], where)
            if field not in found:  # the first of a union's reasons
                found[field] = _wrong(each, field, fields) if len(found) < SHOWN else ""
        raise refusal(found) from None


def refusal(wrong: Mapping[str, str], rest: str = "") -> BadRequest:
    """One error for several fields. `wrong`: field -> a sentence about it without a full stop; those after the first `SHOWN` are only
    counted. `rest` comes last: what was not looked at.
    """
    parts = list(wrong.values())[:SHOWN]
    if len(wrong) > len(parts):
        parts.append(f"and {len(wrong) - len(parts)} more")
    if rest:
        parts.append(rest)
    return BadRequest(f"{'; '.join(parts)}.", field=next(iter(wrong))[:_LONGEST])


def _wrong(error: ErrorDetails, field: str, valid: Sequence[str]) -> str:
    """What a pydantic error says, as a sentence."""
    field = field[:_LONGEST]
    if error["type"] == "extra_forbidden":
        return str(unknown(str(error["loc"][-1]), field, valid)).removesuffix(".")
    if error["type"] == "missing":
        return f"{field} is missing"
    if error["type"] == "value_error":  # one of our own checks
        return f"{field} {error['msg'].removeprefix('Value error, ')}"
    return f"{field}: {error['msg']}"


def unknown(name: str, field: str, valid: Sequence[str]) -> BadRequest:
    """The error for an unknown field, which names the nearest valid one."""
    name = name[:100]
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return BadRequest(f"Unknown field {name!r}; the nearest valid one is {near[0]!r}.", field=field[:_LONGEST])


def _path(loc: Sequence[int | str], where: str) -> str:
    path = where
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not (path and part in _BRANCHES):
            path += f".{part}" if path else part
    return path or "body"


def kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {
        dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean",
    }  # fmt: skip
    return names.get(type(value), "null")  # pyright: ignore[reportArgumentType]
