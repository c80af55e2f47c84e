"""HTTP client of the gateway: models for episodes (the gateway captures their calls as turns), sampling, scoring, and feedback events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
from blake3 import blake3

from ostinato.core.chat_answer import ChatAnswer, read_chat_answer, read_health
from ostinato.core.conversation import Message, Role, Tool
from ostinato.core.errors import BadRequest, Corrupt, Unauthorized, Unavailable
from ostinato.core.records import Arm, PolicyVersion, Purpose
from ostinato.core.retry import Backoff, RetryPolicy, unavailable
from ostinato.worlds.harness.rollout import OVERRAN, ModelAnswer, OutOfTime
from ostinato.worlds.tasks.task import KnownAnswer, Task

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

CHAT, SCORE = "/v1/chat/completions", "/v1/worlds/score"
USER = "world"
TRIES = 3
GRACE_S = 60.0
"""How long to wait for the gateway after an answer's deadline. The gateway enforces the deadline itself, but may be slow to respond when
it is busy.
"""

LEFT = "X-Ostinato-Left-Ms"
PURPOSE = "X-Ostinato-Purpose"
_MOST_MS = 999_999_999  # the largest value that the gateway accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedAnswer:
    """A streamed answer. `parts` raises Unavailable if the stream is cut off.

    Example: ``b"".join([part async for part in passed.parts])``
    """

    status: int
    headers: Mapping[str, str]
    parts: AsyncIterator[bytes]


class EpisodeModel:
    """Implements `Model` over chat completions (not streamed), and forwards an agent's calls in any API dialect.

    `turns` holds the ids of the turns captured for `Model`, `policies` the policy versions that sampled tokens; an agent's relay adds to
    the latter. A failed call is retried under the same idempotency key, so that an answer already sampled is returned, not sampled again.

    Args:
        gateway: the gateway that answers the calls.
        episode, group: recorded with the turns.
        harness: the harness's hash, recorded with the turns.
        pause_s: seconds before the first retry; doubled before each further one.
        slot: the slot whose weights answer.
        seed: the seed of the first call, incremented by one for each further call; None: the engine draws one.
        temperature: the sampling temperature; None: the gateway's.
        top_p: the probability mass of nucleus sampling.
    """

    def __init__(
        self,
        gateway: WorldGateway,
        episode: str,
        group: str | None,
        harness: str,
        *,
        pause_s: float = 0.5,
        slot: str = Arm.WORLD.value,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
    ) -> None:
        self._gateway, self._episode, self._seed = gateway, episode, seed
        self._temperature, self._top_p = temperature, top_p
        drawn = int.from_bytes(blake3(episode.encode()).digest(8)) / 2**64
        self.draw = None if group is None else drawn
        self._policy = RetryPolicy(pause_s=pause_s, attempts=TRIES, jitter=0.25)
        self._headers = {
            "X-Ostinato-Slot": slot,
            "X-Ostinato-Episode": episode,
            "X-Ostinato-Harness": harness,
            **({} if group is None else {"X-Ostinato-Group": group}),
        }
        self.turns: list[str] = []
        self.policies: set[PolicyVersion] = set()

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        left_s: float | None = None,
        purpose: Purpose = Purpose.TASK,
    ) -> ModelAnswer:
        """Return the assistant's next message. Implements `Model.ask`."""
        timing = _Timing(left_s)
        body = chat_body(await self._gateway.named(), messages, max_tokens=max_tokens, stop=stop) | {
            "user": USER,
            "temperature": self.temperature,
        }
        if self._top_p < 1.0:
            body["top_p"] = self._top_p
        if self._seed is not None:
            body["seed"] = self._seed + len(self.turns)
        if tools:
            body["tools"] = [_tool(tool) for tool in tools]
            if purpose is not Purpose.TASK:
                body["tool_choice"] = "none"
        answer = read_chat_answer(await self._answer(body, timing, purpose))
        answered = _answered(answer)
        if not answered.tokens:  # as the last turn it would get the rollout's grade, without a token to train on
            raise Unavailable(f"turn {answered.turn} holds no token")
        self.turns.append(answered.turn)
        self.policies |= set(answer.policies)
        return answered

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self._gateway.temperature if self._temperature is None else self._temperature

    async def named(self) -> str:
        """Return the gateway's name for its model. Raises Unavailable."""
        return await self._gateway.named()

    @contextlib.asynccontextmanager
    async def passed(
        self, path: str, body: bytes, headers: Mapping[str, str], *, left_s: float | None = None
    ) -> AsyncGenerator[PassedAnswer]:
        """Forward one call, and yield its answer as a stream, which the gateway ends after at most `left_s` seconds (None: no limit).

        The call is a turn of the episode. It is retried only until the answer begins. An error that a retry would get again, or HTTP 429,
        counts as an answer, too. Raises Unavailable, and its subclass OutOfTime.
        """
        timing = _Timing(left_s)
        sent = {**headers, **self._headers, "Idempotency-Key": self._fresh_key()}
        async with contextlib.AsyncExitStack() as stack:

            async def begin() -> PassedAnswer:
                streamed = self._gateway.streamed(path, body, sent | timing.headers())
                async with timing.guard():
                    return await stack.enter_async_context(streamed)

            yield await self._with_retries(begin, timing)

    def _fresh_key(self) -> str:
        # random, because after a restart an episode's name may be used again with other messages
        return f"{self._episode}:{len(self.turns)}:{secrets.token_hex(8)}"

    async def _answer(self, body: dict[str, Any], timing: _Timing, purpose: Purpose) -> Mapping[str, Any]:
        """Return the gateway's answer. Failed calls are retried under the same idempotency key. Raises BadRequest, Unavailable."""
        headers = self._headers | {"Idempotency-Key": self._fresh_key()}
        if purpose is not Purpose.TASK:
            headers[PURPOSE] = purpose.value

        async def ask() -> Mapping[str, Any]:
            async with timing.guard():
                return await self._gateway.call("POST", CHAT, body, headers | timing.headers())

        return await self._with_retries(ask, timing)

    async def _with_retries(self, ask: Callable[[], Awaitable[_T]], timing: _Timing) -> _T:
        """Call `ask` at most `TRIES` times, while there is time. Raises BadRequest, Unavailable."""
        backoff, last = Backoff(self._policy, rng=random.Random()), ""
        while True:
            timing.check(last)
            try:
                return await ask()
            except OutOfTime:
                raise
            except Unavailable as error:
                pause, last = backoff.failed(error), str(error)
                if pause is None:
                    timing.check(last)
                    raise
                logger.info("episode %s: a call failed and is retried in %.1f s: %s", self._episode, pause, error)
            await asyncio.sleep(min(pause, timing.left_s))


class _Timing:
    """The deadline of an answer, `seconds` after this object is constructed, by the event loop's clock."""

    def __init__(self, seconds: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = math.inf if seconds is None else self._clock() + seconds

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    def check(self, why: str) -> None:
        """Raise OutOfTime if no time is left. `why` is the last failure."""
        if self.left_s <= 0:
            raise OutOfTime(
                f"no answer had begun when the rollout's time was over; {why or 'it was not asked for in time'}"
            )

    def headers(self) -> dict[str, str]:
        """Return the header that tells the gateway how much time is left."""
        if math.isinf(self._end):
            return {}
        return {LEFT: str(min(_MOST_MS, max(0, math.ceil(1000 * self.left_s))))}

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncGenerator[None]:
        """Raise OutOfTime if the gateway does not end an answer within `GRACE_S` of its deadline."""
        try:
            async with asyncio.timeout(None if math.isinf(self._end) else max(0.0, self.left_s) + GRACE_S):
                yield
        except TimeoutError as error:
            raise OutOfTime(
                f"the gateway did not respond by the deadline, nor within {GRACE_S:g} s after it"
            ) from error


def _answered(answer: ChatAnswer) -> ModelAnswer:
    if not answer.turns:
        raise Corrupt(
            "an answer of the gateway names no turn; does the URL point to an Ostinato gateway of this version?"
        )
    (choice,) = answer.choices
    return ModelAnswer(
        turn=answer.turns[0],
        message=choice.message,
        finish=OVERRAN if answer.overran else choice.finish,
        prompt_tokens=answer.prompt_tokens,
        tokens=answer.tokens,
    )


def chat_body(model: str, messages: Sequence[Message], *, max_tokens: int, stop: Sequence[str] = ()) -> dict[str, Any]:
    """Return the body of a chat completion request. If the last message is the assistant's, the answer continues it (prefill)."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in messages],
        "max_tokens": max_tokens,
    }
    if stop:
        body["stop"] = list(stop)
    if messages and messages[-1].role is Role.ASSISTANT:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.role is Role.TOOL:
        body["tool_call_id"] = message.answers
    return body


def _tool(tool: Tool) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": about}


# ---------------------------------------------------------------- the gateway, over HTTP


_LOADING = 503
_MOST_BYTES = 64 * 2**20
_CLIENT_ERRORS = (400, 413, 422)  # HTTP statuses that a retry would get again
_NOT_SERVED = ("not_found", "model_not_found", "method_not_allowed")
_PASSED = (*_CLIENT_ERRORS, 429)  # or an agent could end its rollout as torn by sending too many requests


class NotServed(BadRequest):
    """The gateway works but has no such route, method or model. A retry would get the same answer."""

    code = "not_served"


class KeyRefused(Unavailable):
    """The gateway rejects the key. It is Unavailable, since the gateway may be restarted with the right key while rollouts wait."""


class WorldGateway:
    """HTTP client of one gateway. An async context manager.

    Args:
        url: the gateway's address, without a path.
        key: the run's admin key, which a caller needs to name a slot and to report for a world. Empty: a certificate identifies the caller.
        temperature: the sampling temperature.
        timeout_s: timeout of calls that do not state how much time is left.
        context: TLS context with a client certificate, for `https`.
        slot: the slot whose weights answer.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        slot: str = Arm.WORLD.value,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._url, self._key, self.temperature, self._slot = url.rstrip("/"), key, temperature, slot
        self._context = context
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._model = ""

    async def __aenter__(self) -> WorldGateway:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._context or True)
        headers = {"X-Ostinato-Key": self._key} if self._key else {}
        self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    def model(self, episode: str, *, group: str | None, harness: str, **sampling: Any) -> EpisodeModel:
        """Return the model of one episode. `sampling`: `seed`, `temperature` and `top_p` of `EpisodeModel`."""
        return EpisodeModel(self, episode, group, harness, slot=self._slot, **sampling)

    async def sample(self, task: Task, *, n: int, seed: int, user: str, harness: str) -> ChatAnswer:
        """Sample `n` answers to a task's messages in one call, so that the prompt is prefilled once. The task's time limit does not apply,
        because the load of the machine says nothing about the policy.

        Raises Unavailable, BadRequest, Unauthorized, Corrupt.
        """
        body = chat_body(await self.named(), task.messages, max_tokens=task.tokens, stop=task.stop) | {
            "temperature": self.temperature if task.temperature is None else task.temperature,
            "top_p": task.top_p,
            "n": n,
            "seed": seed,
            "user": user,
        }
        headers = {"X-Ostinato-Slot": self._slot, "X-Ostinato-Harness": harness}
        try:
            return read_chat_answer(await self.call("POST", CHAT, body, headers), n)
        except KeyRefused as error:
            raise Unauthorized(f"{error}; the evaluation's admin key must equal serve.admin_key") from error

    async def belief(self, messages: Sequence[Message], known: KnownAnswer) -> float:
        """Return the policy's belief in a known answer: the geometric mean, in [0, 1], of the probabilities that the slot's weights give to
        the answer's tokens when its question follows these messages. The mean keeps long answers comparable with short ones. No tools are
        offered.

        Raises Unavailable, BadRequest (the prompt exceeds the context), Corrupt.
        """
        asked = Message(role=Role.USER, text=known.question)
        if messages and messages[-1].role is Role.USER:  # templates may want the roles to alternate
            asked, messages = replace(asked, text=f"{messages[-1].text}\n\n{known.question}"), messages[:-1]
        logprobs = await self.scored([*messages, asked], known.answer)
        return math.exp(min(0.0, math.fsum(logprobs) / len(logprobs)))

    async def scored(self, messages: Sequence[Message], answer: str) -> list[float]:
        """Return the log-probabilities that the slot's weights give to the tokens of an answer after these messages, without tools.

        Raises Unavailable, BadRequest (the prompt exceeds the context), Corrupt.
        """
        body = chat_body(await self.named(), messages, max_tokens=1) | {"answer": answer, "user": USER}
        scored = await self.call("POST", SCORE, body, {"X-Ostinato-Slot": self._slot})
        logprobs = scored.get("logprobs") if isinstance(scored, dict) else None
        if not isinstance(logprobs, list) or not logprobs or not all(isinstance(one, float | int) for one in logprobs):
            raise Corrupt(
                "the gateway gave no log-probabilities; does the URL point to an Ostinato gateway of this version?"
            )
        return [float(one) for one in logprobs]

    async def holds(self) -> PolicyVersion | None:
        """Return the policy version in the slot, or None if there is none or the gateway does not respond."""
        try:
            return await self.served()
        except (Unavailable, BadRequest, Unauthorized):
            return None

    async def served(self) -> PolicyVersion | None:
        """Return the policy version in the slot, or None if there is none. Raises Unavailable, BadRequest, Unauthorized, Corrupt."""
        health = read_health(await self.call("GET", "/health", accepted=(_LOADING,)))
        self._model = health.model
        return health.slots.get(self._slot)

    async def say(self, events: Sequence[dict[str, Any]]) -> None:
        """Send feedback events in one call. On return they are in the log. Raises Unavailable, BadRequest."""
        await self.call("POST", "/v1/feedback", list(events))

    async def named(self) -> str:
        """Return the gateway's name for its model. Raises Unavailable."""
        if not self._model and await self.holds() is None:
            raise Unavailable(f"the gateway has no weights in the slot {self._slot!r} yet")
        return self._model

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        accepted: Sequence[int] = (),
    ) -> Any:
        """Make one call and return its answer. Raises Unavailable if a retry may succeed, BadRequest if none will.

        `accepted`: further statuses whose body is an answer, beside 2xx.
        """
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        try:
            timeout = self._timeout(headers or {})
            asked = self._session.request(method, self._url + path, json=body, headers=headers, timeout=timeout)
            async with asked as response:
                answer = json.loads(await _bounded(response))
                status, answer_headers = response.status, response.headers
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if status < 300 or (status in accepted and isinstance(answer, dict) and "slots" in answer):
            return answer
        why = f"{method} {path}: HTTP {status}: {answer}"
        if status in _CLIENT_ERRORS:
            raise BadRequest(why)
        if status in (401, 403):
            raise KeyRefused(why)
        if _is_not_served(status, answer):
            self._model = ""  # ask for its name again: the gateway may have been restarted with another model
            raise NotServed(f"{why}; start the gateway and its workers with the same version and settings")
        raise unavailable(why, answer_headers)  # also for an empty slot, which a restart can fill

    @contextlib.asynccontextmanager
    async def streamed(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[PassedAnswer]:
        """Yield the answer to a POST as a stream, also if it is HTTP 429 or an error that a retry would get again.

        Raises Unavailable for all other errors.
        """
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        sent = {**headers, "Content-Type": "application/json"}
        async with contextlib.AsyncExitStack() as stack:
            try:
                timeout = self._timeout(headers)
                posted = self._session.post(self._url + path, data=body, headers=sent, timeout=timeout)
                response = await stack.enter_async_context(posted)
                if response.status >= 300 and response.status not in _PASSED:
                    why = await response.text()
                    if not _is_not_served(response.status, _json(why)):
                        raise unavailable(f"POST {path}: HTTP {response.status}: {why[:500]}", response.headers)
                    parts = _whole(why.encode())
                else:
                    parts = _parts(response)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Unavailable(f"POST {path}: {type(error).__name__}: {error}") from error
            yield PassedAnswer(status=response.status, headers=response.headers, parts=parts)

    def _timeout(self, headers: Mapping[str, str]) -> aiohttp.ClientTimeout:
        """Return the client-side timeout of a call: `timeout_s`, or later than the deadline in its headers, which the gateway meets."""
        left = headers.get(LEFT, "")
        return aiohttp.ClientTimeout(total=int(left) / 1000 + 2 * GRACE_S if left.isdecimal() else self._timeout_s)


def _is_not_served(status: int, answer: Any) -> bool:
    """Return True if an Ostinato server itself says that it lacks the route, the method or the model. An empty slot does not count, since a
    restart may fill it, nor does an error of a proxy whose server is restarting.
    """
    error = answer.get("error") if isinstance(answer, dict) else None
    if status not in (404, 405) or not isinstance(error, dict):
        return False
    return error.get("code") in _NOT_SERVED and error.get("param") != "slot"


def _json(text: str) -> Any:
    """Parse a JSON text. Returns None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


async def _whole(data: bytes) -> AsyncGenerator[bytes]:
    yield data


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return a response's body. Raises ValueError if it is longer than any gateway sends."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes; is it an Ostinato gateway?")
    return bytes(body)


async def _parts(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    try:
        async for part in response.content.iter_any():
            yield part
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"an answer was cut: {type(error).__name__}: {error}") from error
