"""The gateway as the rollout worker sees it: a model for each episode, in the slot of the newest weights, and a place to tell verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import aiohttp

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.records import Arm
from ostinato.worlds.harness.rollout import Answered

USER = "world"


class WorldGateway:
    """One gateway, over HTTP. An async context manager.

    Args:
        url: where it listens, without a path.
        key: the run's admin key: who names a slot, and speaks for a world.
        temperature: at which answers are sampled.
        timeout_s: longest answer.

    Example::

        async with WorldGateway(url, key) as gateway:
            answered = await gateway.model("w3f.0.2.0", group="w3f.0", harness="9f2c").ask(messages, max_tokens=64)
    """

    def __init__(self, url: str, key: str, *, temperature: float = 1.0, timeout_s: float = 600.0) -> None:
        self._url, self._key, self.temperature = url.rstrip("/"), key, temperature
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._model = ""

    async def __aenter__(self) -> WorldGateway:
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"X-Ostinato-Key": self._key}
        self._session = aiohttp.ClientSession(headers=headers, timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    def model(self, episode: str, *, group: str | None, harness: str) -> EpisodeModel:
        """The model of one episode."""
        return EpisodeModel(self, episode, group, harness)

    async def ready(self) -> bool:
        """True once the slot for worlds holds weights."""
        try:
            health = await self.call("GET", "/health")
        except (Unavailable, BadRequest):
            return False
        self._model = str(health.get("model", ""))
        return Arm.WORLD.value in cast("dict[str, Any]", health.get("slots", {}))

    async def say(self, events: Sequence[dict[str, Any]]) -> None:
        """Send events, all in one call; they are in the log on return. Raises Unavailable, BadRequest."""
        await self.call("POST", "/v1/feedback", list(events))

    async def named(self) -> str:
        """What the gateway calls its model. Raises Unavailable."""
        if not self._model and not await self.ready():
            raise Unavailable("the gateway has no weights for simulated worlds yet")
        return self._model

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """One call's answer. Raises Unavailable where another try may succeed, BadRequest where none will."""
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        try:
            async with self._session.request(method, self._url + path, json=body, headers=headers) as response:
                answer = await response.json(content_type=None)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if status < 300:
            return answer
        said = f"{method} {path}: HTTP {status}: {answer}"
        if status in (400, 413, 422):
            raise BadRequest(said)
        raise Unavailable(said)  # a key of another run or an empty slot passes with a restart, too


class EpisodeModel:
    """Implements `Model`: every call is captured as a turn of one episode. `turns` are their ids."""

    def __init__(self, gateway: WorldGateway, episode: str, group: str | None, harness: str) -> None:
        self._gateway = gateway
        self._headers = {
            "X-Ostinato-Slot": Arm.WORLD.value,
            "X-Ostinato-Episode": episode,
            "X-Ostinato-Harness": harness,
            **({} if group is None else {"X-Ostinato-Group": group}),
        }
        self.turns: list[str] = []

    async def ask(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, max_tokens: int, stop: Sequence[str] = ()
    ) -> Answered:
        """The next message of the assistant."""
        continued = bool(messages) and messages[-1].role is Role.ASSISTANT
        body: dict[str, Any] = {
            "model": await self._gateway.named(),
            "user": USER,
            "messages": [_message(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": self._gateway.temperature,
        }
        if stop:
            body["stop"] = list(stop)
        if tools:
            body["tools"] = [_tool(tool) for tool in tools]
        if continued:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        answer = await self._gateway.call("POST", "/v1/chat/completions", body, self._headers)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        turn = str(answer["ostinato"]["turns"][0])
        self.turns.append(turn)
        said = choice["message"]
        calls = tuple(
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in said.get("tool_calls") or ()
        )
        return Answered(
            turn=turn,
            message=Message(role=Role.ASSISTANT, text=said.get("content") or "", calls=calls),
            finish=str(choice["finish_reason"]),
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            tokens=int(usage.get("completion_tokens", 0)),
        )


async def until_ready(gateway: WorldGateway, poll_s: float) -> None:
    """Wait until the gateway answers for worlds."""
    while not await gateway.ready():
        await asyncio.sleep(poll_s)


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role.value, "content": message.text}
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
