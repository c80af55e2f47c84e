"""The model of one episode: every call goes through the gateway, which captures it as a turn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from blake3 import blake3

from ostinato.core.chat_answer import ChatAnswer, read_chat_answer
from ostinato.core.conversation import Message, Role, Tool
from ostinato.core.errors import Corrupt, Unavailable
from ostinato.core.records import Arm, PolicyVersion, Purpose
from ostinato.core.retry import Backoff, RetryPolicy
from ostinato.worlds.harness.rollout import OVERRAN, ModelAnswer, OutOfTime

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

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


@runtime_checkable
class Passage(Protocol):
    """A model that takes calls unchanged, in any dialect, for third-party agents. The caller adds to `policies`."""

    policies: set[PolicyVersion]

    @property
    def temperature(self) -> float:
        """The temperature at which answers are sampled."""
        ...

    async def named(self) -> str:
        """The gateway's name for its model. Raises Unavailable."""
        ...

    def passed(
        self, path: str, body: bytes, headers: Mapping[str, str], *, left_s: float | None = None
    ) -> AbstractAsyncContextManager[PassedAnswer]:
        """One call's answer, whatever its status unless the call failed, or as much of it as came within `left_s` seconds.

        Raises Unavailable, of which OutOfTime is a kind.
        """
        ...


class GatewayCalls(Protocol):
    """The part of the gateway that a model needs."""

    @property
    def temperature(self) -> float:
        """The temperature at which answers are sampled."""
        ...

    async def named(self) -> str:
        """The gateway's name for its model. Raises Unavailable."""
        ...

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """One call's answer. Raises Unavailable if another try may succeed, BadRequest if none will."""
        ...

    def streamed(self, path: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[PassedAnswer]:
        """The answer to a POST while it arrives. Raises Unavailable if another try may succeed."""
        ...


class EpisodeModel:
    """Implements `Model` over chat completions, not streamed, and `Passage`. `turns` are the ids of the turns captured for `Model`,
    `policies` the policy versions that sampled its tokens.

    A call that fails on its way is retried under its idempotency key: an answer that was sampled by then is returned, not sampled again.

    Args:
        gateway: where calls go.
        episode, group: those of the turns.
        harness: the harness's hash, recorded with every turn.
        pause_s: seconds before the second try; doubled before each further one.
        slot: the slot whose weights answer.
        seed: the seed of the first call, incremented by one for each further call; None: the engine draws one.
        temperature: the temperature at which answers are sampled; None: the gateway's.
        top_p: their nucleus probability.
    """

    def __init__(
        self,
        gateway: GatewayCalls,
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
        """One call's answer as it arrives, as a turn of the episode. It is retried only until it begins. Raises Unavailable."""
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
                return await self._gateway.call("POST", "/v1/chat/completions", body, headers | timing.headers())

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
