"""The model of one episode: every call goes through the gateway, which captures it as a turn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.errors import Unavailable
from ostinato.core.records import Arm, PolicyVersion
from ostinato.worlds.harness.rollout import OVERRAN, Answered, OutOfTime

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

USER = "world"
TRIES = 3
GRACE_S = 60.0
"""So long after the time for an answer the gateway is still listened to: it ends the answer, and a busy one takes a while to say so."""

LEFT = "X-Ostinato-Left-Ms"
_MOST_MS = 999_999_999  # as the gateway takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedAnswer:
    """An answer while it arrives. `parts` raises Unavailable where it is cut.

    Example: ``b"".join([part async for part in passed.parts])``
    """

    status: int
    headers: Mapping[str, str]
    parts: AsyncIterator[bytes]


@runtime_checkable
class Passage(Protocol):
    """A model that takes calls as they are, in any dialect: what an agent that is not ours works with. Who calls adds to `policies`."""

    policies: set[PolicyVersion]

    @property
    def temperature(self) -> float:
        """At which answers are sampled."""
        ...

    async def named(self) -> str:
        """What the gateway calls its model. Raises Unavailable."""
        ...

    def passed(
        self, path: str, body: bytes, headers: Mapping[str, str], *, left_s: float | None = None
    ) -> AbstractAsyncContextManager[PassedAnswer]:
        """One call's answer, whatever it is but a failure, or as much of it as there was in the seconds that are left.

        Raises Unavailable, and as one of its kind OutOfTime.
        """
        ...


class Calls(Protocol):
    """What a model needs of the gateway."""

    @property
    def temperature(self) -> float:
        """At which answers are sampled."""
        ...

    async def named(self) -> str:
        """What the gateway calls its model. Raises Unavailable."""
        ...

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """One call's answer. Raises Unavailable where another try may succeed, BadRequest where none will."""
        ...

    def streamed(self, path: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[PassedAnswer]:
        """One posted call's answer while it arrives. Raises Unavailable where another try may succeed."""
        ...


class EpisodeModel:
    """Implements `Model` over chat completions, not streamed, and `Passage`. `turns` are the ids of what was captured of the former,
    `policies` the weights that made its tokens.

    A call that fails on its way is made again under its idempotency key: what was sampled by then is the answer, and is not sampled twice.

    Args:
        gateway: where calls go.
        episode, group: whose turns they are.
        harness: the harness's hash, which goes onto every turn.
        pause_s: before the second try; twice as long before each further one.
        slot: whose weights answer.
        seed: of the first call's samples, counted up by one for each further call; None: the engine draws one.
    """

    def __init__(
        self,
        gateway: Calls,
        episode: str,
        group: str | None,
        harness: str,
        *,
        pause_s: float = 0.5,
        slot: str = Arm.WORLD.value,
        seed: int | None = None,
    ) -> None:
        self._gateway, self._episode, self._pause_s, self._seed = gateway, episode, pause_s, seed
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
    ) -> Answered:
        """The next message of the assistant."""
        timing = _Timing(left_s)
        body: dict[str, Any] = {
            "model": await self._gateway.named(),
            "user": USER,
            "messages": [_message(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": self._gateway.temperature,
        }
        if self._seed is not None:
            body["seed"] = self._seed + len(self.turns)
        if stop:
            body["stop"] = list(stop)
        if tools:
            body["tools"] = [_tool(tool) for tool in tools]
        if messages and messages[-1].role is Role.ASSISTANT:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        answer = await self._answer(body, timing)
        answered = _answered(answer)
        if not answered.tokens:  # the grade of a rollout that ends with it would go to a turn that nobody learns from
            raise Unavailable(f"turn {answered.turn} holds no token")
        self.turns.append(answered.turn)
        self.policies |= {PolicyVersion(number=span[0], hash=span[1]) for span in answer["ostinato"].get("spans", ())}
        return answered

    @property
    def temperature(self) -> float:
        """At which answers are sampled."""
        return self._gateway.temperature

    async def named(self) -> str:
        """What the gateway calls its model. Raises Unavailable."""
        return await self._gateway.named()

    @contextlib.asynccontextmanager
    async def passed(
        self, path: str, body: bytes, headers: Mapping[str, str], *, left_s: float | None = None
    ) -> AsyncGenerator[PassedAnswer]:
        """One call's answer as it comes, as a turn of the episode. It is asked for again only until it begins. Raises Unavailable."""
        timing = _Timing(left_s)
        told = {**headers, **self._headers, "Idempotency-Key": self._fresh_key()}
        async with contextlib.AsyncExitStack() as stack:

            async def begin() -> PassedAnswer:
                streamed = self._gateway.streamed(path, body, told | timing.headers())
                async with timing.guard():
                    return await stack.enter_async_context(streamed)

            yield await self._again(begin, timing)

    def _fresh_key(self) -> str:
        # drawn anew for each call: an episode's name may come again after a restart, with other messages
        return f"{self._episode}:{len(self.turns)}:{secrets.token_hex(8)}"

    async def _answer(self, body: dict[str, Any], timing: _Timing) -> Mapping[str, Any]:
        """The gateway's answer, asked for again under the same key where a call fails. Raises BadRequest, Unavailable."""
        headers = self._headers | {"Idempotency-Key": self._fresh_key()}

        async def ask() -> Mapping[str, Any]:
            async with timing.guard():
                return await self._gateway.call("POST", "/v1/chat/completions", body, headers | timing.headers())

        return await self._again(ask, timing)

    async def _again(self, ask: Callable[[], Awaitable[_T]], timing: _Timing) -> _T:
        """Ask `TRIES` times at most, while there is time. Raises BadRequest, Unavailable."""
        pause, last = self._pause_s, ""
        for left in reversed(range(TRIES)):
            timing.check(last)
            try:
                return await ask()
            except OutOfTime:
                raise
            except Unavailable as error:
                if not left:
                    timing.check(str(error))
                    raise
                last = str(error)
                logger.info("episode %s is asked again in %.1f s: %s", self._episode, pause, error)
            await asyncio.sleep(min(pause, timing.left_s))
            pause *= 2
        raise AssertionError("the last try raises")


class _Timing:
    """The seconds that an answer may take, counted from here on by the loop's clock."""

    def __init__(self, seconds: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = math.inf if seconds is None else self._clock() + seconds

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    def check(self, why: str) -> None:
        """Raise OutOfTime once nothing is left; `why` is what went wrong last."""
        if self.left_s <= 0:
            raise OutOfTime(
                f"no answer had begun when the rollout's time was over; {why or 'it was not asked for in time'}"
            )

    def headers(self) -> dict[str, str]:
        """What the gateway is told."""
        if math.isinf(self._end):
            return {}
        return {LEFT: str(min(_MOST_MS, max(0, math.ceil(1000 * self.left_s))))}

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncGenerator[None]:
        """Give up on a gateway that does not even end an answer when its time is over."""
        try:
            async with asyncio.timeout(None if math.isinf(self._end) else max(0.0, self.left_s) + GRACE_S):
                yield
        except TimeoutError as error:
            raise OutOfTime(f"the gateway said nothing in time, nor in {GRACE_S:g} s after it") from error


def _answered(answer: Mapping[str, Any]) -> Answered:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    said = choice["message"]
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in said.get("tool_calls") or ()
    )
    told = answer["ostinato"]
    return Answered(
        turn=str(told["turns"][0]),
        message=Message(
            role=Role.ASSISTANT,
            text=said.get("content") or "",
            reasoning=said.get("reasoning_content") or "",
            calls=calls,
        ),
        finish=OVERRAN if told.get("deadline") else str(choice["finish_reason"]),
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        tokens=int(usage.get("completion_tokens", 0)),
    )


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
