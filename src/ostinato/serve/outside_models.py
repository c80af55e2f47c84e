"""Outside models as a source of chunks: an API's text is streamed through, without token ids, log-probabilities or known weights.

Also the records that the responses are parsed into, in the format of OpenAI's chat completions (openai-python 3.52,
`types/chat/chat_completion_chunk.py`; all other fields are ignored), and a circuit breaker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError

from ostinato.core.conversation import Conversation
from ostinato.core.errors import BadConfig, OstinatoError
from ostinato.core.generation import Chunk, Usage
from ostinato.core.records import Finish, Sampling
from ostinato.serve.config import AutoArm

if TYPE_CHECKING:  # only gateways with outside models need it
    import aiohttp

# ---------------------------------------------------------------- the circuit breaker


class Breaker:
    """A circuit breaker over times that the caller gives. It trips after `failures` consecutive failures; after `rest_s` one call at a
    time may probe the service. Success resets it; each further failure doubles the pause.

    Args:
        failures: consecutive failures until it trips.
        rest_s: the first pause, in seconds.
        longest_s: the longest pause, in seconds.

    Example::

        breaker = Breaker(failures=5, rest_s=15.0, longest_s=600.0)
        if breaker.allows(now):
            breaker.begin()
            ...
            breaker.end(now, well=True)  # None if the outcome says nothing, such as after a disconnect
    """

    def __init__(self, *, failures: int, rest_s: float, longest_s: float) -> None:
        self._most = failures
        self._first, self._longest = rest_s, longest_s
        self._in_a_row = 0
        self._rest = rest_s
        self._until: float | None = None
        self._open = 0

    def allows(self, now: float) -> bool:
        """Return True if a call may be made now."""
        return self._until is None or (now >= self._until and self._open == 0)

    @property
    def resting(self) -> bool:
        """True from the failure that trips the breaker until a call succeeds."""
        return self._until is not None

    @property
    def open(self) -> int:
        """The number of calls in progress."""
        return self._open

    def begin(self) -> None:
        """Count a call that begins."""
        self._open += 1

    def end(self, now: float, *, well: bool | None) -> None:
        """Record the end of a call, successful or not; None if its outcome says nothing about the service."""
        self._open -= 1
        if well:
            self._in_a_row, self._rest, self._until = 0, self._first, None
        elif well is False:
            self._in_a_row += 1
            if self._until is not None and now >= self._until:  # a probe failed
                self._rest = min(2 * self._rest, self._longest)
                self._until = now + self._rest
            elif self._until is None and self._in_a_row >= self._most:
                self._until = now + self._rest


# ---------------------------------------------------------------- the format of responses


_MOST_COUNTED = 1_000_000_000  # tokens; a larger count is rejected as implausible


class OutsideFailure(Exception):
    """An outside model did not answer correctly. `blame`: the fault lies with the service, not with this request."""

    def __init__(self, message: str, *, blame: bool = True) -> None:
        super().__init__(message)
        self.blame = blame


class OutsideDelta(BaseModel):
    """New text of a choice."""

    content: str | None = None


class OutsideChoice(BaseModel):
    """An update to a choice."""

    index: int = Field(ge=0)
    delta: OutsideDelta = Field(default_factory=OutsideDelta)
    finish_reason: str | None = None


class OutsideUsage(BaseModel):
    """Token counts as reported by the outside model, over all choices."""

    prompt_tokens: int = Field(ge=0, le=_MOST_COUNTED)
    completion_tokens: int = Field(ge=0, le=_MOST_COUNTED)


class OutsideEvent(BaseModel):
    """One event of a stream."""

    choices: list[OutsideChoice] = Field(default_factory=list[OutsideChoice])
    usage: OutsideUsage | None = None
    error: object = None


def read_outside(line: bytes) -> OutsideEvent | None:
    """Parse one line of a stream; return None for a line without an event. Raises OutsideFailure."""
    field, _, data = line.strip().partition(b":")
    if field != b"data" or data.strip() == b"[DONE]":
        return None
    try:
        event = OutsideEvent.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "its JSON"
        raise OutsideFailure(f"its answer is not understood: {where}: {first['msg']}") from None
    if event.error is not None:
        raise OutsideFailure("it ended the answer with an error")
    return event


# ---------------------------------------------------------------- the model


_LOG = logging.getLogger(__name__)
_CONNECT_S = 10.0
_CHARS_PER_TOKEN = 64  # an answer longer than its token limit times this is refused
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
_OTHER_ENDS = frozenset({"content_filter", "tool_calls", "function_call"})
# statuses below 500 that are still the service's fault: the key, the URL, its limits
_OWN_FAULTS = frozenset({401, 403, 404, 408, 429})


class OutsideFailed(OstinatoError):
    """An outside model could not answer."""

    status = 502
    code = "outside_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideQuery:
    """A request to an outside model. It holds nothing that identifies the caller.

    Example: ``OutsideQuery(conversation=Conversation(messages=(hi,)), sampling=Sampling(max_tokens=64), n=1)``
    """

    conversation: Conversation
    sampling: Sampling
    n: int


class OutsideModel:
    """The client of one outside model. `start` it on the event loop that uses it; `close` it when done.

    Args:
        arm: its URL, limits and prices.
        key: the API key; None: no key is sent.
        breaker: records the outcome of each call.
        who: the model's name in log messages.
    """

    def __init__(self, arm: AutoArm, key: str | None, breaker: Breaker, *, who: str) -> None:
        self._arm = arm
        self._who = who
        self._breaker = breaker
        self._headers = {"accept": "text/event-stream"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._session: aiohttp.ClientSession | None = None

    @property
    def available(self) -> bool:
        """True if the model may be called now."""
        return self._breaker.allows(_now()) and self._breaker.open < self._arm.max_open

    async def start(self) -> None:
        """Open the HTTP session."""
        import aiohttp

        arm = self._arm
        waits = aiohttp.ClientTimeout(total=arm.longest_s, sock_connect=_CONNECT_S, sock_read=arm.silence_s)
        self._session = aiohttp.ClientSession(
            timeout=waits,
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),  # a cookie would let the service link a user's calls
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def chunks(self, asked: OutsideQuery) -> AsyncGenerator[Chunk]:
        """Yield the answer as it arrives; the final chunks of all choices come last, with the token usage. Raises OutsideFailed.

        It is read as fast as it arrives, so a client that reads slowly neither stalls the service nor occupies one of the open calls. The
        answer's token limit bounds what is buffered.
        """
        queue = asyncio.Queue[Chunk | None]()
        reading = asyncio.create_task(self._read(asked, queue))
        try:
            while (chunk := await queue.get()) is not None:
                yield chunk
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, asked: OutsideQuery, queue: asyncio.Queue[Chunk | None]) -> None:
        """Put the chunks of an answer into `queue`, and None at its end, successful or not. Raises OutsideFailed."""
        import aiohttp

        self._breaker.begin()
        well: bool | None = None
        was_resting = self._breaker.resting
        try:
            async for chunk in self._chunks(asked):
                queue.put_nowait(chunk)
            well = True
        except (OutsideFailure, aiohttp.ClientError, TimeoutError, ValueError) as error:
            well = False if not isinstance(error, OutsideFailure) or error.blame else None
            reason = str(error) if isinstance(error, OutsideFailure) else type(error).__name__
            _LOG.warning("%s failed: %s", self._who, reason)
            raise OutsideFailed(
                f"The model behind arm {self._arm.name!r} could not answer; send the request again."
            ) from error
        finally:
            queue.put_nowait(None)
            self._breaker.end(_now(), well=well)
            if self._breaker.resting != was_resting:
                _LOG.warning("%s %s", self._who, "answers again" if was_resting else "is not called for a while")

    async def _chunks(self, asked: OutsideQuery) -> AsyncGenerator[Chunk]:
        answer = _OutsideAnswer(asked)
        async for event in self._events(asked):
            for index, text in answer.take(event):
                yield Chunk(index=index, ids=(), logprobs=(), policy=None, text=text)
        for chunk in answer.ends():
            yield chunk

    async def _events(self, asked: OutsideQuery) -> AsyncGenerator[OutsideEvent]:
        assert self._session is not None, "start the model before it is asked"
        url = f"{self._arm.url.rstrip('/')}/chat/completions"
        body = self._body(asked)
        async with self._session.post(url, json=body, headers=self._headers, allow_redirects=False) as reply:
            if reply.status != 200:
                blame = reply.status >= 500 or reply.status < 400 or reply.status in _OWN_FAULTS
                raise OutsideFailure(f"it answered with status {reply.status}", blame=blame)
            if reply.content_type != "text/event-stream":
                raise OutsideFailure("what it sent is not an event stream")
            async for line in reply.content:
                event = read_outside(line)
                if event is not None:
                    yield event

    def _body(self, asked: OutsideQuery) -> dict[str, Any]:
        sampling = asked.sampling
        body: dict[str, Any] = {
            "model": self._arm.model,
            "messages": [{"role": message.role, "content": message.text} for message in asked.conversation.messages],
            self._arm.budget_field: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if asked.n > 1:
            body["n"] = asked.n
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        demand = asked.conversation.demand
        if demand is not None and demand.schema is not None:
            form = {"name": "answer", "schema": demand.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


def key_of(arm: AutoArm, environment: Mapping[str, str], whose: str) -> str | None:
    """Return an arm's API key, or None if it needs none. Raises BadConfig if its variable is not set."""
    if not arm.key_env:
        return None
    key = environment.get(arm.key_env, "").strip()
    if not key:
        raise BadConfig(
            f"{whose} takes its key from the variable {arm.key_env}, which is not set: export it where this is started"
        )
    return key


class _OutsideAnswer:
    """An answer so far, checked for plausibility: only requested choices, and no more text than the token limit allows."""

    def __init__(self, asked: OutsideQuery) -> None:
        self._finishes: list[Finish | None] = [None] * asked.n
        self._left = asked.n * _CHARS_PER_TOKEN * max(16, asked.sampling.max_tokens)
        self._usage: OutsideUsage | None = None

    def take(self, event: OutsideEvent) -> list[tuple[int, str]]:
        """Return the new text of each choice. Raises OutsideFailure."""
        self._usage = event.usage or self._usage
        new: list[tuple[int, str]] = []
        for choice in event.choices:
            if choice.index >= len(self._finishes):
                raise OutsideFailure("it sent a choice that was not asked for")
            if choice.delta.content:
                self._left -= len(choice.delta.content)
                new.append((choice.index, choice.delta.content))
            if choice.finish_reason:  # some servers send "" until a choice ends
                self._finishes[choice.index] = _finish(choice.finish_reason)
        if self._left < 0:
            raise OutsideFailure("its answer is far longer than was asked for")
        return new

    def ends(self) -> list[Chunk]:
        """Return the final chunk of every choice. Raises OutsideFailure."""
        n = len(self._finishes)
        usage = self._usage
        counted = None if usage is None else Usage(prompt=usage.prompt_tokens, answer=usage.completion_tokens / n)
        ends: list[Chunk] = []
        for index, finish in enumerate(self._finishes):
            if finish is None:
                raise OutsideFailure("it stopped before the end of the answer")
            ends.append(Chunk(index=index, ids=(), logprobs=(), policy=None, text="", finish=finish, usage=counted))
        return ends


def _finish(reason: str) -> Finish:
    finish = _FINISHES.get(reason)
    if finish is None:  # a content filter, or a call of a tool that was not offered
        # unknown reasons are not logged verbatim, since they are text from outside
        known = reason if reason in _OTHER_ENDS else "something unknown"
        raise OutsideFailure(f"it ended the answer because of {known}", blame=False)
    return finish


def _now() -> float:
    return asyncio.get_running_loop().time()
