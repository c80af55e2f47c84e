"""The interface of every dialect: a typed request, and a writer that shapes its answer. The rest of `serve/` knows dialects only by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.core.conversation import Conversation, Message, Piece
from ostinato.core.errors import BadRequest, OstinatoError
from ostinato.core.generation import Tops
from ostinato.core.records import Finish, Sampling

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
class Heading:
    """Everything known about an answer before its first token. `created` is in Unix seconds; `choices` is the number of answers.

    `count_usage`: a stream ends with the token counts, in dialects that leave this to the client.
    """

    id: str
    created: float
    model: str
    choices: int
    prompt_tokens: int
    count_usage: bool


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of the prompt and of all answers."""

    prompt: int
    answer: int


class Writer(ABC):
    """Shapes the answer to one request: call `body`, or `opening`, then `delta` and `ending` for every choice. Use it once.

    The streaming methods return whole server-sent events, possibly none.
    """

    @abstractmethod
    def body(self, answers: Sequence[Whole], counts: Counts, ostinato: Json) -> bytes:
        """The whole answer at once, as JSON. `ostinato` holds Ostinato's own fields, which are added under that name."""

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
    """How a dialect reports an error: as a body with an HTTP status, and as the last event of a stream that has begun.

    Example: ``ErrorShape(body=error_body, event=error_event)``
    """

    body: Callable[[OstinatoError], Json]
    event: Callable[[OstinatoError], str]
    status: Callable[[OstinatoError], int] = status_of
