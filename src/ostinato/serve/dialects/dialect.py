"""The interface of every dialect: a typed request, and a writer that formats its answer. The rest of `serve/` uses dialects only through
it.

It also holds what all dialects share: omissions (parts of a request that the model does not get, reported in a response header), the
constraint on an answer's format, and the validation of fields.
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
"""The medium of a content part, by its type in any dialect."""

MEDIA_TYPES = frozenset(_MEDIA)


class Omissions:
    """Collects what is omitted from one request, as words for the header `X-Ostinato-Omitted`, each once.

    Example: ``omissions.media("image_url") == "[image omitted: this model reads text only]"``
    """

    def __init__(self) -> None:
        self._words: dict[str, None] = {}

    @property
    def words(self) -> Sequence[str]:
        """The omissions in the order in which they were added."""
        return [*self._words]

    def add(self, word: str) -> None:
        """Record an omission: a word of ASCII letters, digits and hyphens."""
        self._words[word] = None

    def media(self, type: str) -> str:
        """Record a non-text part, whose type is one of `MEDIA_TYPES`; return the placeholder text that the model gets instead."""
        kind = _MEDIA[type]
        self.add(kind)
        return f"[{kind} omitted: this model reads text only]"


# ---------------------------------------------------------------- the interface


Json = dict[str, Any]


def reported_finish(finish: Finish) -> Finish:
    """Return the finish reason to report. No dialect has a word for a deadline, so `DEADLINE` is reported as `LENGTH`, which all have."""
    return Finish.LENGTH if finish.cut else finish


class Request(Protocol):
    """A validated model call, as the client requested it."""

    @property
    def model(self) -> str:
        """The model's name as the client sent it."""
        ...

    @property
    def asker(self) -> str | None:
        """The user, if the body names one."""
        ...

    @property
    def n(self) -> int | None:
        """The number of answers; None means one."""
        ...

    @property
    def budget(self) -> int | None:
        """The client's token limit for the answer."""
        ...

    @property
    def stream(self) -> bool | None:
        """True if the answer is to be streamed as server-sent events."""
        ...

    @property
    def store(self) -> bool | None:
        """False if the client wants nothing of the call to be stored (`privacy.store_false`)."""
        ...

    @property
    def wants_usage(self) -> bool:
        """True if a stream must end with the token counts."""
        ...

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's log-probability must be returned."""
        ...

    @property
    def tops(self) -> int:
        """The number of top log-probabilities to return at each sampled position."""
        ...

    @property
    def omitted(self) -> Sequence[str]:
        """The parts of the request that are omitted from the prompt, as words of a header."""
        ...

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the sampling parameters with this token limit."""
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
    """The compaction summary with which a call began, and its token counts; both None if no summary was usable (prompt unchanged)."""

    block: CompactionBlock | None
    counts: Counts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What is known about an answer before its first token. `created` is in Unix seconds; `choices` is the number of answers.

    `count_usage`: a stream must end with the token counts, in dialects that leave this to the client. `compacted`: the summary that the
    call began with, if its client asked for compaction and the prompt was long. `edits`: the context edits that were applied, in the
    dialect's form.
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
    """Sampled tokens in order, with their log-probabilities. `tops`: the top log-probabilities per token if requested, else empty."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[Tops] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One complete answer with all its tokens. `stop` is the stop string that ended it, or ""."""

    message: Message
    tokens: Tokens
    finish: Finish
    stop: str = ""


class Writer(ABC):
    """Formats the answer to one request. Call `body`; or for a stream `opening`, then `delta` and `ending` for every choice. Use it once.

    The streaming methods return complete server-sent events, possibly none.
    """

    @abstractmethod
    def body(self, answers: Sequence[Whole], counts: Counts, ostinato: Json) -> bytes:
        """Return the whole answer as JSON. `ostinato` holds Ostinato's own fields, which are added under that name."""

    def heartbeat(self) -> str:
        """Return a keep-alive for a silent stream, valid between any two events: a comment, unless the dialect has an event for it."""
        return ": waiting\n\n"

    @abstractmethod
    def opening(self) -> str:
        """Return the events that begin a stream."""

    @abstractmethod
    def delta(self, index: int, pieces: Sequence[Piece], tokens: Tokens) -> str:
        """Return the events for new tokens of a choice and the pieces of the answer that they complete; "" if there are none."""

    @abstractmethod
    def ending(self, index: int, finish: Finish, stop: str, closing: tuple[Counts, Json] | None) -> str:
        """Return the events that end a choice. `stop` is the stop string that ended it, or "". The last choice's `closing` holds the token
        counts and Ostinato's fields, and ends the stream.
        """

    @abstractmethod
    def failure(self, error: OstinatoError) -> str:
        """Return the final events of a stream that fails, whatever was sent before."""


class ContextExceeded(BadRequest):
    """A prompt leaves no room in the model's context for the answer. Each dialect reports it in its protocol's own words, by which agents
    recognise that they must shorten the conversation.

    Args:
        prompt: tokens of the prompt.
        answer: the fewest tokens that the answer needs; 0 if the prompt alone is too long.
        context: the most tokens of prompt and answer together.
        field: the request's field that holds the prompt.
        chars: characters of the prompt if it is too long to be tokenised; `prompt` is then a lower bound.
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
    """Return the HTTP status of an error, unless its dialect defines another."""
    return error.status


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How a dialect reports an error before any answer was sent: a body with an HTTP status.

    Example: ``ErrorShape(body=error_body)``
    """

    body: Callable[[OstinatoError], Json]
    status: Callable[[OstinatoError], int] = status_of


# ---------------------------------------------------------------- constraints on the answer's format


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
AUTO, NONE, REQUIRED = "auto", "none", "required"
_STRICT = "strict-tools"


def build_demand(
    tools: Sequence[Tool],
    *,
    choice: str,
    named: str | None,
    several: bool,
    schema: Mapping[str, Any] | None,
    omissions: Omissions,
) -> Demand | None:
    """Return the constraint on the answer's format; None if it is unconstrained.

    Args:
        tools: the tools offered.
        choice: `AUTO`, `NONE` or `REQUIRED`.
        named: the one tool that must be called, if any.
        several: whether parallel calls are allowed.
        schema: JSON schema of the answer's text when it is not a call.
        omissions: gets an entry if tools are strict but the answer may be free text, where strictness is not enforced.

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


# ---------------------------------------------------------------- validation of fields


MAX_MESSAGES, MAX_TOOLS = 4096, 1024
MAX_STOPS = 16
_JOINERS = "\u200c\u200d"
# pydantic puts the type of a union's branch into an error's path, although it is no field of the body
_BRANCHES = ("str", "int", "float", "bool")
MAX_REPORTED_FIELDS = 10  # fields that one error names; further ones are only counted
_MAX_PATH_CHARS = 200  # characters of a field's path in an error
_Body = TypeVar("_Body", bound=BaseModel)


def printable(text: str) -> str:
    """Return a name for display unchanged. Raises ValueError for characters that could move a terminal's cursor or end a line."""
    if not text.isprintable() and not all(map(_is_allowed, text)):
        raise ValueError("contains a character that is not printable")
    return text


def _is_allowed(character: str) -> bool:
    """True for printable characters, and for joiners (Persian, emoji) and spaces (Japanese), which Python calls unprintable."""
    return character.isprintable() or character in _JOINERS or category(character) == "Zs"


Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
User = Annotated[str, StringConstraints(max_length=512), AfterValidator(printable)]  # some clients send "" for no user


_CHAT_ONLY = "is not supported in this dialect: chat completions have it"
_ChatOnlyZero = Annotated[Any, Only(0, why=_CHAT_ONLY)]


class OneAnswer(Extensions):
    """Base of the requests in dialects that return one answer, no log-probabilities, and always the token counts."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    stream: bool | None = None
    presence_penalty: _ChatOnlyZero = None
    frequency_penalty: _ChatOnlyZero = None
    logit_bias: Annotated[Any, Only({}, why=_CHAT_ONLY)] = None
    logprobs: Annotated[Any, Only(False, why=_CHAT_ONLY)] = None
    seed: Annotated[Any, Only(why=_CHAT_ONLY)] = None
    n_: Annotated[Any, Only(1, why=_CHAT_ONLY), Field(alias="n")] = None

    @property
    def n(self) -> int | None:
        """None: always one answer."""
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
        """0: no top log-probabilities are returned."""
        return 0

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings."""
        return ()

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the sampling parameters with this token limit."""
        return sampling_of(max_tokens, self.temperature, self.top_p, self.stops)


def sampling_of(max_tokens: int, temperature: float | None, top_p: float | None, stops: Sequence[str]) -> Sampling:
    """Return the sampling parameters that all dialects share; None stands for the default, 1."""
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
    """Validate a JSON object with a pydantic model. Raises BadRequest, which names every bad field; the first is its `field`."""
    if not isinstance(body, dict):
        raise BadRequest(f"{where or 'The body'} must be a JSON object, not {json_type(body)}.", field=where or None)
    if wide := too_wide(body):
        field = ".".join(filter(None, (where, wide[0])))
        raise BadRequest(f"{where or 'The body'} {wide[1]}.", field=field or None)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problems, fields = dict[str, str](), [field.alias or name for name, field in model.model_fields.items()]
        for each in error.errors(include_url=False, include_context=False, include_input=False):
            field = _path(each["loc"], where)
            if field not in problems:  # keep the first of a union's errors
                problems[field] = _describe_error(each, field, fields) if len(problems) < MAX_REPORTED_FIELDS else ""
        raise refusal(problems) from None


def refusal(wrong: Mapping[str, str], rest: str = "") -> BadRequest:
    """Return one error for several fields. `wrong`: field -> its problem, without a full stop; after `MAX_REPORTED_FIELDS` they are only
    counted. `rest` is appended: what was not checked.
    """
    parts = list(wrong.values())[:MAX_REPORTED_FIELDS]
    if len(wrong) > len(parts):
        parts.append(f"and {len(wrong) - len(parts)} more")
    if rest:
        parts.append(rest)
    return BadRequest(f"{'; '.join(parts)}.", field=next(iter(wrong))[:_MAX_PATH_CHARS])


def _describe_error(error: ErrorDetails, field: str, valid: Sequence[str]) -> str:
    """A pydantic error as a sentence without a full stop."""
    field = field[:_MAX_PATH_CHARS]
    if error["type"] == "extra_forbidden":
        return str(_unknown_field(str(error["loc"][-1]), field, valid)).removesuffix(".")
    if error["type"] == "missing":
        return f"{field} is missing"
    if error["type"] == "value_error":  # one of our own checks
        return f"{field} {error['msg'].removeprefix('Value error, ')}"
    return f"{field}: {error['msg']}"


def _unknown_field(name: str, field: str, valid: Sequence[str]) -> BadRequest:
    """Return the error for an unknown field; it names the closest valid field."""
    name = name[:100]
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return BadRequest(f"Unknown field {name!r}; the nearest valid one is {near[0]!r}.", field=field[:_MAX_PATH_CHARS])


def _path(loc: Sequence[int | str], where: str) -> str:
    path = where
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not (path and part in _BRANCHES):
            path += f".{part}" if path else part
    return path or "body"


def json_type(value: Any) -> str:
    """The JSON type of a value, with its article."""
    names = {
        dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean",
    }  # fmt: skip
    return names.get(type(value), "null")  # pyright: ignore[reportArgumentType]
