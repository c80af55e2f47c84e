"""The client of the gateway, over HTTP: a model for each episode, whose calls it captures as turns; answers to a prompt; and verdicts."""

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
"""How long to wait for the gateway after an answer's deadline: it ends the answer itself, and takes a while to say so if it is busy."""

LEFT = "X-Ostinato-Left-Ms"
PURPOSE = "X-Ostinato-Purpose"
_MOST_MS = 999_999_999  # the largest value that the gateway accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedAnswer:
    """An answer while it arrives. `parts` raises Unavailable if the answer is cut off.

    Example: ``b"".join([part async for part in passed.parts])``
    """

    status: int
    headers: Mapping[str, str]
    parts: AsyncIterator[bytes]


class EpisodeModel:
    """Implements `Model` over chat completions, not streamed, and passes on an agent's calls in any dialect. `turns` holds the ids of
    the turns captured for `Model`, `policies` the policy versions that sampled tokens, to which an agent's relay adds.

    A call that fails on its way is retried under its idempotency key: an answer that was sampled by then is returned, not sampled again.

    Args:
        gateway: where calls go.
        episode, group, harness: those of the turns; `harness` is its hash.
        pause_s: seconds before the second try; doubled before each further one.
        slot: the slot whose weights answer.
        seed: the seed of the first call, incremented by one for each further call; None: the engine draws one.
        temperature: the sampling temperature; None: the gateway's.
        top_p: the nucleus probability.
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
        """The next message of the assistant."""
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
        if not answered.tokens:  # the grade of a rollout that ends with it would go to a turn with nothing to train on
            raise Unavailable(f"turn {answered.turn} holds no token")
        self.turns.append(answered.turn)
        self.policies |= set(answer.policies)
        return answered

    @property
    def temperature(self) -> float:
        """The temperature at which answers are sampled."""
        return self._gateway.temperature if self._temperature is None else self._temperature

    async def named(self) -> str:
        """The gateway's name for its model. Raises Unavailable."""
        return await self._gateway.named()

    @contextlib.asynccontextmanager
    async def passed(
        self, path: str, body: bytes, headers: Mapping[str, str], *, left_s: float | None = None
    ) -> AsyncGenerator[PassedAnswer]:
        """One call's answer as it arrives, whatever its status, or as much of it as comes within `left_s` seconds. It is a turn of the
        episode, and retried only until it begins. Raises Unavailable, of which OutOfTime is a kind.
        """
        timing = _Timing(left_s)
        told = {**headers, **self._headers, "Idempotency-Key": self._fresh_key()}
        async with contextlib.AsyncExitStack() as stack:

            async def begin() -> PassedAnswer:
                streamed = self._gateway.streamed(path, body, told | timing.headers())
                async with timing.guard():
                    return await stack.enter_async_context(streamed)

            yield await self._again(begin, timing)

    def _fresh_key(self) -> str:
        # drawn anew for each call: an episode's name may be used again after a restart, with other messages
        return f"{self._episode}:{len(self.turns)}:{secrets.token_hex(8)}"

    async def _answer(self, body: dict[str, Any], timing: _Timing, purpose: Purpose) -> Mapping[str, Any]:
        """The gateway's answer; a failed call is retried under the same key. Raises BadRequest, Unavailable."""
        headers = self._headers | {"Idempotency-Key": self._fresh_key()}
        if purpose is not Purpose.TASK:
            headers[PURPOSE] = purpose.value

        async def ask() -> Mapping[str, Any]:
            async with timing.guard():
                return await self._gateway.call("POST", CHAT, body, headers | timing.headers())

        return await self._again(ask, timing)

    async def _again(self, ask: Callable[[], Awaitable[_T]], timing: _Timing) -> _T:
        """Ask `TRIES` times at most, while there is time. Raises BadRequest, Unavailable."""
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
                logger.info("episode %s is asked again in %.1f s: %s", self._episode, pause, error)
            await asyncio.sleep(min(pause, timing.left_s))


class _Timing:
    """The seconds that an answer may take, counted from the construction of this object by the loop's clock."""

    def __init__(self, seconds: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = math.inf if seconds is None else self._clock() + seconds

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    def check(self, why: str) -> None:
        """Raise OutOfTime once no time is left; `why` is what went wrong last."""
        if self.left_s <= 0:
            raise OutOfTime(
                f"no answer had begun when the rollout's time was over; {why or 'it was not asked for in time'}"
            )

    def headers(self) -> dict[str, str]:
        """The header that tells the gateway how much time is left."""
        if math.isinf(self._end):
            return {}
        return {LEFT: str(min(_MOST_MS, max(0, math.ceil(1000 * self.left_s))))}

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncGenerator[None]:
        """Give up on a gateway that does not end an answer within `GRACE_S` of its deadline."""
        try:
            async with asyncio.timeout(None if math.isinf(self._end) else max(0.0, self.left_s) + GRACE_S):
                yield
        except TimeoutError as error:
            raise OutOfTime(f"the gateway said nothing in time, nor in {GRACE_S:g} s after it") from error


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
    """A chat completion's body. If the last message is the assistant's, the answer continues it."""
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
    found: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.role is Role.TOOL:
        found["tool_call_id"] = message.answers
    return found


def _tool(tool: Tool) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": about}


# ---------------------------------------------------------------- the gateway, over HTTP


_LOADING = 503
_MOST_BYTES = 64 * 2**20
_REFUSALS = (400, 413, 422)  # HTTP statuses that a retry would get again
_NOT_SERVED = ("not_found", "model_not_found", "method_not_allowed")
_PASSED = (*_REFUSALS, 429)  # an agent that sends too many requests must not be able to end its rollout as torn


class NotServed(BadRequest):
    """The gateway has no such route, method or model: it answers, and no other try would be answered otherwise."""

    code = "not_served"


class KeyRefused(Unavailable):
    """The gateway does not take the key. It may be that of another run, whose restart under the right key rollouts wait for."""


class WorldGateway:
    """One gateway, over HTTP. An async context manager.

    Args:
        url: its address, without a path.
        key: the run's admin key, which is needed to name a slot and to speak for a world. Empty: a certificate identifies the caller.
        temperature: the sampling temperature.
        timeout_s: longest wait for an answer, for a call that does not itself say how much time is left for it.
        context: TLS with a client certificate, for `https`.
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
        """The model of one episode. `sampling`: `seed`, `temperature` and `top_p` as `EpisodeModel` has them."""
        return EpisodeModel(self, episode, group, harness, slot=self._slot, **sampling)

    async def sample(self, task: Task, *, n: int, seed: int, user: str, harness: str) -> ChatAnswer:
        """`n` answers to a task's messages from one call, so that its prompt is computed once. No answer is cut when the task's time is
        over: how busy the machine is says nothing about a policy.

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
        """The probability, from 0 to 1, that the slot's weights give to a token of the known answer if they are asked for it behind these
        messages: the geometric mean over its tokens, so that long answers are not less believed. No tools are offered.

        Raises Unavailable, BadRequest (the context is too small), Corrupt.
        """
        asked = Message(role=Role.USER, text=known.question)
        if messages and messages[-1].role is Role.USER:  # templates may want the roles to alternate
            asked, messages = replace(asked, text=f"{messages[-1].text}\n\n{known.question}"), messages[:-1]
        logprobs = await self.scored([*messages, asked], known.answer)
        return math.exp(min(0.0, math.fsum(logprobs) / len(logprobs)))

    async def scored(self, messages: Sequence[Message], answer: str) -> list[float]:
        """The log-probabilities that the slot's weights give to an answer's tokens behind these messages, without tools.

        Raises Unavailable, BadRequest (the context is too small), Corrupt.
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
        """The policy version in the slot; None if there is none, or the gateway does not answer."""
        try:
            return await self.served()
        except (Unavailable, BadRequest, Unauthorized):
            return None

    async def served(self) -> PolicyVersion | None:
        """The policy version in the slot; None if there is none. Raises Unavailable, BadRequest, Unauthorized, Corrupt."""
        health = read_health(await self.call("GET", "/health", accepted=(_LOADING,)))
        self._model = health.model
        return health.slots.get(self._slot)

    async def say(self, events: Sequence[dict[str, Any]]) -> None:
        """Send events, all in one call; they are in the log on return. Raises Unavailable, BadRequest."""
        await self.call("POST", "/v1/feedback", list(events))

    async def named(self) -> str:
        """The gateway's name for its model. Raises Unavailable."""
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
        """One call's answer. Raises Unavailable if another try may succeed, BadRequest if none will.

        `accepted`: statuses beside 2xx whose body is an answer.
        """
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        try:
            timeout = self._timeout(headers or {})
            asked = self._session.request(method, self._url + path, json=body, headers=headers, timeout=timeout)
            async with asked as response:
                answer = json.loads(await _bounded(response))
                status, told = response.status, response.headers
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if status < 300 or (status in accepted and isinstance(answer, dict) and "slots" in answer):
            return answer
        said = f"{method} {path}: HTTP {status}: {answer}"
        if status in _REFUSALS:
            raise BadRequest(said)
        if status in (401, 403):
            raise KeyRefused(said)
        if _is_not_served(status, answer):
            self._model = ""  # asked for again: the gateway may have been started with another one
            raise NotServed(f"{said}; start the gateway and its workers with the same version and settings")
        raise unavailable(said, told)  # an empty slot, too, can be cured by a restart

    @contextlib.asynccontextmanager
    async def streamed(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[PassedAnswer]:
        """The answer to a POST while it arrives, also if it says "too many requests". Raises Unavailable if another try may succeed."""
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        told = {**headers, "Content-Type": "application/json"}
        async with contextlib.AsyncExitStack() as stack:
            try:
                timeout = self._timeout(headers)
                posted = self._session.post(self._url + path, data=body, headers=told, timeout=timeout)
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
        """The timeout of a call with these headers. It is later than the deadline stated there, which the gateway itself enforces."""
        left = headers.get(LEFT, "")
        return aiohttp.ClientTimeout(total=int(left) / 1000 + 2 * GRACE_S if left.isdecimal() else self._timeout_s)


def _is_not_served(status: int, answer: Any) -> bool:
    """True if an answer is an Ostinato server's own word that it lacks the route, the method or the model. An empty slot, which a restart
    may fill, is none of these, and neither is what a proxy says while its server restarts.
    """
    error = answer.get("error") if isinstance(answer, dict) else None
    if status not in (404, 405) or not isinstance(error, dict):
        return False
    return error.get("code") in _NOT_SERVED and error.get("param") != "slot"


def _json(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


async def _whole(data: bytes) -> AsyncGenerator[bytes]:
    yield data


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """A response's body. Raises ValueError if it is longer than any gateway sends."""
    found = bytearray()
    async for part in response.content.iter_any():
        found += part
        if len(found) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes; is it an Ostinato gateway?")
    return bytes(found)


async def _parts(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    try:
        async for part in response.content.iter_any():
            yield part
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"an answer was cut: {type(error).__name__}: {error}") from error
