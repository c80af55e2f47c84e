"""The OpenAI dialect, outbound: sampled tokens to response bodies, stream events and error objects.

Only what was sampled is reported: log-probabilities are the sampled tokens' own, alternatives are not computed.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ostinato.core.errors import BadRequest, NotFound, OstinatoError
from ostinato.core.records import Finish
from ostinato.core.seams import Renderer

DONE = "data: [DONE]\n\n"
_FLOOR = -9999.0  # what OpenAI reports for a probability of zero: JSON has no infinity

Json = dict[str, Any]

_text = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Dialect(ABC):
    """Shapes the answer to one request.

    Args:
        id: the response's id.
        created: Unix seconds.
        model: the model's public name.
        renderer: tells the text of tokens, for log-probabilities; None when they were not asked for.
    """

    body_object: str
    chunk_object: str

    def __init__(self, *, id: str, created: float, model: str, renderer: Renderer | None) -> None:
        self._head: Json = {"id": id, "created": int(created), "model": model}
        self._renderer = renderer
        self._prefix = ""

    def body(self, choices: list[Json], usage: Json, ostinato: Json) -> bytes:
        """The whole answer at once."""
        whole = {**self._head, "object": self.body_object, "choices": choices, "usage": usage, "ostinato": ostinato}
        return json_bytes(whole)

    def event(self, choices: Sequence[str], more: str = "") -> str:
        """One event of a stream: choices as JSON texts, and what follows them, such as ',"usage":null'."""
        if not self._prefix:
            head = _text({**self._head, "object": self.chunk_object})
            self._prefix = f'data: {head[:-1]},"choices":['
        return f"{self._prefix}{','.join(choices)}]{more}}}\n\n"

    def opening(self, index: int) -> str | None:
        """What a stream says about a choice before its first token, if anything."""
        return None

    @abstractmethod
    def delta(self, index: int, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> str:
        """New text of a choice, as JSON."""

    @abstractmethod
    def ending(self, index: int, finish: Finish) -> str:
        """The end of a choice, as JSON."""

    @abstractmethod
    def choice(self, index: int, text: str, ids: Sequence[int], logprobs: Sequence[float], finish: Finish) -> Json:
        """A whole choice."""

    @property
    def reports_logprobs(self) -> bool:
        """True if an event must be sent for tokens that show no text yet."""
        return self._renderer is not None


class Chat(Dialect):
    """`/v1/chat/completions`."""

    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> str:
        return f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'

    def delta(self, index: int, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> str:
        logged = "null" if self._renderer is None else _text(self._logprobs(ids, logprobs))
        return f'{{"index":{index},"delta":{{"content":{_text(text)}}},"logprobs":{logged},"finish_reason":null}}'

    def ending(self, index: int, finish: Finish) -> str:
        return f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{finish}"}}'

    def choice(self, index: int, text: str, ids: Sequence[int], logprobs: Sequence[float], finish: Finish) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        logged = self._logprobs(ids, logprobs)
        return {"index": index, "message": message, "logprobs": logged, "finish_reason": str(finish)}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> Json | None:
        renderer = self._renderer
        if renderer is None:
            return None
        content: list[Json] = []
        for token, logprob in zip(ids, logprobs, strict=True):
            raw = renderer.token_bytes(token)  # a part of a character has bytes but no text of its own
            text = raw.decode(errors="replace")
            content.append({"token": text, "logprob": max(logprob, _FLOOR), "bytes": list(raw), "top_logprobs": []})
        return {"content": content, "refusal": None}


class Completion(Dialect):
    """`/v1/completions`."""

    body_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, *, id: str, created: float, model: str, renderer: Renderer | None) -> None:
        super().__init__(id=id, created=created, model=model, renderer=renderer)
        self._offsets: defaultdict[int, int] = defaultdict(int)  # choice -> characters of its tokens so far

    def delta(self, index: int, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> str:
        logged = _text(self._logprobs(index, ids, logprobs))
        return f'{{"index":{index},"text":{_text(text)},"logprobs":{logged},"finish_reason":null}}'

    def ending(self, index: int, finish: Finish) -> str:
        return f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"{finish}"}}'

    def choice(self, index: int, text: str, ids: Sequence[int], logprobs: Sequence[float], finish: Finish) -> Json:
        logged = self._logprobs(index, ids, logprobs)
        return {"index": index, "text": text, "logprobs": logged, "finish_reason": str(finish)}

    def _logprobs(self, index: int, ids: Sequence[int], logprobs: Sequence[float]) -> Json | None:
        renderer = self._renderer
        if renderer is None:
            return None
        tokens = [renderer.token_bytes(token).decode(errors="replace") for token in ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(logprob, _FLOOR) for logprob in logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """The token counts of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def sse(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def json_bytes(value: Any) -> bytes:
    """Compact JSON."""
    return _text(value).encode()


def error_body(error: OstinatoError) -> Json:
    """An error in OpenAI's shape."""
    kind = getattr(error, "kind", "server_error" if error.status >= 500 else "invalid_request_error")
    if error.status == 401:
        kind = "authentication_error"
    param = error.field if isinstance(error, BadRequest) else None
    code: str = error.code
    if isinstance(error, NotFound) and param == "model":
        code = "model_not_found"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
