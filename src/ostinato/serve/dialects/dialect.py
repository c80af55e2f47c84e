"""What every dialect offers: a typed request, and a writer that shapes its answer. The rest of `serve/` knows no more of dialects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.core.conversation import Conversation, Message, Piece
from ostinato.core.errors import OstinatoError
from ostinato.core.generation import Tops
from ostinato.core.records import Finish, Sampling

Json = dict[str, Any]


def told_finish(finish: Finish) -> Finish:
    """How an answer's end reads in a dialect: none has a word for a deadline, and all have one for an answer that a budget cut."""
    return Finish.LENGTH if finish.cut else finish


class Request(Protocol):
    """A model call as a client asked for it, checked."""

    @property
    def model(self) -> str:
        """The model's name as the client says it."""
        ...

    @property
    def asker(self) -> str | None:
        """Who asks, if the body says so."""
        ...

    @property
    def n(self) -> int | None:
        """How many answers; None is one."""
        ...

    @property
    def budget(self) -> int | None:
        """The most tokens that the client wants."""
        ...

    @property
    def stream(self) -> bool | None:
        """True if the answer is to come as events."""
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
        """With how many of the likeliest tokens in its place."""
        ...

    def sampling(self, max_tokens: int) -> Sampling:
        """How to sample, with this token budget."""
        ...


class ConversationRequest(Request, Protocol):
    """A request whose prompt is a conversation."""

    @property
    def conversation(self) -> Conversation:
        """What was said so far, and the tools."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What is known of an answer before its first token. `created` is in Unix seconds; `choices` is how many answers there are.

    `count_usage`: a stream is to end with the token counts, where the dialect leaves that to the client.
    """

    id: str
    created: float
    model: str
    choices: int
    prompt_tokens: int
    count_usage: bool


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens in order, with their log-probabilities; `tops` is as long, where it was asked for, or empty."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[Tops] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One complete answer, and all its tokens."""

    message: Message
    tokens: Tokens
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of the prompt and of all answers."""

    prompt: int
    answer: int


class Writer(ABC):
    """Shapes the answer to one request: `body`, or `opening`, then `delta` and `ending` for every choice. Use once.

    Text is returned as whole server-sent events, which may be none.
    """

    @abstractmethod
    def body(self, answers: Sequence[Whole], counts: Counts, ostinato: Json) -> bytes:
        """The whole answer at once, as JSON. `ostinato` is what Ostinato adds, under that name."""

    @abstractmethod
    def opening(self) -> str:
        """What a stream begins with."""

    @abstractmethod
    def delta(self, index: int, pieces: Sequence[Piece], tokens: Tokens) -> str:
        """New tokens of a choice, and the parts of its answer that they settle, which may be none."""

    @abstractmethod
    def ending(self, index: int, finish: Finish, closing: tuple[Counts, Json] | None) -> str:
        """The end of a choice; `closing` comes with the last one: the counts and what Ostinato adds. The stream ends with it."""


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How a dialect tells an error: as a body, and as the last event of a stream that has begun.

    Example: ``ErrorShape(body=error_body, event=error_event)``
    """

    body: Callable[[OstinatoError], Json]
    event: Callable[[OstinatoError], str]
