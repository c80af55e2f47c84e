"""The HTTP calls of a simulated user's editor plugin: ask for an answer as a stream, and send feedback.

In the data flow: `users.py` calls these; they speak only the public OpenAI dialect and `POST /v1/feedback`, like any product.
Every way in which a call can fail becomes a `Failed` with a short kind that can be counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ostinato.demo.prompt import TaskPrompt

MAX_ANSWER_CHARS = 20_000


class Failed(Exception):
    """A failed call. `kind` is for counting: "http 503", "connection", "no [DONE]", ..."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(slots=True, kw_only=True)
class Suggestion:
    r"""A streamed completion as the user saw it.

    `turn` is the id that feedback names; `arm` and `policy` say what answered; times are seconds since the request.

    Example: ``Suggestion(turn="chatcmpl-1:0", arm="live", policy=3, text="\n    return a + b", first_s=0.3, total_s=0.9, done=True)``
    """

    turn: str = ""
    arm: str = ""
    policy: int = -1
    text: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    done: bool = False
    started: float = field(default_factory=time.perf_counter)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the stream. Raises Failed for an error event or too long an answer."""
        if "error" in event:
            error: Any = event["error"]
            code: Any = (error.get("code") or error.get("type")) if isinstance(error, dict) else error
            raise Failed(f"stream error {code}")
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                self.first_s = self.first_s or time.perf_counter() - self.started
                self.text += text
        extra = event.get("ostinato")
        if extra:
            self.turn = extra["turns"][0]
            self.arm = extra["arm"]
            if extra["spans"]:
                self.policy = extra["spans"][-1][0]
        self.turn = self.turn or f"{event['id']}:0"
        if len(self.text) > MAX_ANSWER_CHARS:
            raise Failed("answer too long")


def body(prompt: TaskPrompt, user: str, model: str) -> dict[str, Any]:
    """The chat completion request for a prompt."""
    return {
        "model": model,
        "user": user,
        "messages": list(prompt.messages),
        "stream": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": prompt.max_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop": list(prompt.stop),
    }


async def ask(http: aiohttp.ClientSession, request: Mapping[str, Any]) -> Suggestion:
    """Stream one completion to its end. Cancelling this closes the connection, as a person who walks away does. Raises Failed."""
    answer = Suggestion()
    try:
        async with http.post("/v1/chat/completions", json=request) as response:
            if response.status != 200:
                raise Failed(f"http {response.status}")
            answer.turn = response.headers.get("X-Ostinato-Turn", "").split(",")[0]
            answer.arm = response.headers.get("X-Ostinato-Arm", "")
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    answer.done = True
                    break
                answer.take(json.loads(data))
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise Failed(f"connection {type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Failed("malformed stream") from error
    if not answer.done:
        raise Failed("no [DONE]")
    answer.total_s = time.perf_counter() - answer.started
    return answer


async def send_feedback(http: aiohttp.ClientSession, event: Mapping[str, Any]) -> None:
    """Post one feedback event. Raises Failed; sending the same id again is harmless."""
    try:
        async with http.post("/v1/feedback", json=event) as response:
            if response.status not in (200, 202):
                raise Failed(f"feedback http {response.status}")
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise Failed(f"feedback connection {type(error).__name__}") from error
