"""Formats answers of OpenAI's chat and completion dialects: response bodies, stream events and error objects.

Log-probabilities are those of the distribution that was sampled from: after temperature, penalties and grammar.
"""

from __future__ import annotations

from abc import abstractmethod
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ostinato.core.conversation import Piece, ToolCall
from ostinato.core.errors import BadRequest, NotFound, OstinatoError
from ostinato.core.lines import json_line
from ostinato.core.records import Finish
from ostinato.core.seams import Renderer
from ostinato.serve.dialects.dialect import Counts, ErrorShape, Heading, Json, Tokens, Whole, Writer, reported_finish

DONE = "data: [DONE]\n\n"
_FLOOR = -9999.0  # OpenAI's value for a probability of zero, since JSON has no infinity
_UTF_8 = partial(getincrementaldecoder("utf-8"), "replace")


class _OpenAI(Writer):
    """Base of both endpoints. `renderer` decodes tokens for log-probabilities; None if they were not requested."""

    body_object: str
    chunk_object: str

    def __init__(self, heading: Heading, renderer: Renderer | None) -> None:
        self._head: Json = {"id": heading.id, "created": int(heading.created), "model": heading.model}
        self._heading = heading
        self._tokens = None if renderer is None else _Tokens(renderer)
        self._prefix = f'data: {json_line({**self._head, "object": self.chunk_object})[:-1]},"choices":['
        self._more = ',"usage":null' if heading.count_usage else ""

    def body(self, answers: Sequence[Whole], counts: Counts, ostinato: Json) -> bytes:
        head = json_line({**self._head, "object": self.body_object})[:-1]
        choices = ",".join(self._choice(index, answer) for index, answer in enumerate(answers))
        return f'{head},"choices":[{choices}],"usage":{json_line(usage(counts))},"ostinato":{json_line(ostinato)}}}'.encode()

    def ending(self, index: int, finish: Finish, stop: str, closing: tuple[Counts, Json] | None) -> str:
        last = self._last(index, finish)
        if closing is None:
            return self._event(last, self._more)
        counts, ostinato = closing
        extra = f',"ostinato":{json_line(ostinato)}'
        if not self._heading.count_usage:
            return self._event(last, extra) + DONE
        return self._event(last, self._more) + self._event("", f',"usage":{json_line(usage(counts))}{extra}') + DONE

    def failure(self, error: OstinatoError) -> str:
        return f"data: {json_line(error_body(error))}\n\n"

    def _event(self, choice: str, more: str) -> str:
        """One event: a choice as JSON text, then `more`, the fields after the choices."""
        return f"{self._prefix}{choice}]{more}}}\n\n"

    @abstractmethod
    def _choice(self, index: int, answer: Whole) -> str:
        """A complete choice, as JSON."""

    @abstractmethod
    def _last(self, index: int, finish: Finish) -> str:
        """The final event of a choice, as JSON."""


class Chat(_OpenAI):
    """Formats answers of `/v1/chat/completions`. A stream sends a tool call in one event, once it is complete."""

    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, heading: Heading, renderer: Renderer | None) -> None:
        super().__init__(heading, renderer)
        self._calls: Counter[int] = Counter()  # choice -> number of its calls so far

    def opening(self) -> str:
        choice = '{{"index":{},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'
        return "".join(self._event(choice.format(i), self._more) for i in range(self._heading.choices))

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Tokens) -> str:
        logged = self._logprobs(tokens)
        deltas = [self._delta(index, piece) for piece in pieces]
        if not deltas and self._tokens is not None and tokens.ids:
            deltas = ['{"content":""}']  # the tokens have no visible text yet
        data = ""
        for delta in deltas:
            choice = f'{{"index":{index},"delta":{delta},"logprobs":{logged},"finish_reason":null}}'
            data += self._event(choice, self._more)
            logged = "null"
        return data

    def _delta(self, index: int, piece: Piece) -> str:
        if piece.call is not None:
            number = self._calls[index]
            self._calls[index] += 1
            return json_line({"tool_calls": [{"index": number, **_call(piece.call)}]})
        if piece.reasoning:
            return f'{{"reasoning_content":{json_line(piece.reasoning)}}}'
        return f'{{"content":{json_line(piece.text)}}}'

    def _last(self, index: int, finish: Finish) -> str:
        return f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{reported_finish(finish)}"}}'

    def _choice(self, index: int, answer: Whole) -> str:
        said = answer.message
        message: Json = {"role": "assistant", "content": said.text, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message |= {"content": said.text or None, "tool_calls": [_call(call) for call in said.calls]}
        logged = self._logprobs(answer.tokens)
        return f'{{"index":{index},"message":{json_line(message)},"logprobs":{logged},"finish_reason":"{reported_finish(answer.finish)}"}}'

    def _logprobs(self, tokens: Tokens) -> str:
        """The JSON, assembled by hand for speed: an answer may have a hundred thousand tokens, and all calls share one thread."""
        told = self._tokens
        if told is None:
            return "null"
        content: list[str] = []
        for i, (token, logprob) in enumerate(zip(tokens.ids, tokens.logprobs, strict=True)):
            tops = tokens.tops[i] if tokens.tops else ()
            others = ",".join([f"{told[top].json}{max(value, _FLOOR)!r}}}" for top, value in tops])
            content.append(f'{told[token].json}{max(logprob, _FLOOR)!r},"top_logprobs":[{others}]}}')
        return f'{{"content":[{",".join(content)}],"refusal":null}}'


class Completion(_OpenAI):
    """Formats answers of `/v1/completions`."""

    body_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, heading: Heading, renderer: Renderer | None) -> None:
        super().__init__(heading, renderer)
        self._offsets: Counter[int] = Counter()  # choice -> number of complete characters so far
        self._decoders = defaultdict[int, IncrementalDecoder](_UTF_8)

    def opening(self) -> str:
        return ""

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Tokens) -> str:
        text = "".join(piece.text for piece in pieces)
        if not text and (self._tokens is None or not tokens.ids):
            return ""
        logged = json_line(self._logprobs(index, tokens))
        choice = f'{{"index":{index},"text":{json_line(text)},"logprobs":{logged},"finish_reason":null}}'
        return self._event(choice, self._more)

    def _last(self, index: int, finish: Finish) -> str:
        return f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"{reported_finish(finish)}"}}'

    def _choice(self, index: int, answer: Whole) -> str:
        logged = self._logprobs(index, answer.tokens)
        text = answer.message.text
        return json_line(
            {"index": index, "text": text, "logprobs": logged, "finish_reason": str(reported_finish(answer.finish))}
        )

    def _logprobs(self, index: int, tokens: Tokens) -> Json | None:
        told = self._tokens
        if told is None:
            return None
        texts = [told[token].text for token in tokens.ids]
        offsets: list[int] = []
        for token in tokens.ids:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].decode(told[token].raw))
        logprobs = [max(logprob, _FLOOR) for logprob in tokens.logprobs]
        tops = [  # including the sampled token, since clients look up its entry
            {told[top].text: max(value, _FLOOR) for top, value in each} | {text: logprob}
            for each, text, logprob in zip(tokens.tops, texts, logprobs, strict=False)
        ]
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": tops or None,
            "text_offset": offsets,
        }


class _Token(NamedTuple):
    """How a token is reported: its bytes, its text, and the JSON of its entry up to the log-probability."""

    raw: bytes
    text: str
    json: str


class _Tokens(dict[int, _Token]):
    """A cache of `_Token` by id. A token that is only part of a character has bytes but a replacement character as text."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __missing__(self, token: int) -> _Token:
        raw = self._renderer.token_bytes(token)
        text = raw.decode(errors="replace")
        self[token] = made = _Token(raw, text, f'{{"token":{json_line(text)},"bytes":{json_line(list(raw))},"logprob":')
        return made


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(counts: Counts) -> Json:
    """Return the token counts of an answer."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.answer,
        "total_tokens": counts.prompt + counts.answer,
    }


def json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON."""
    return json_line(value).encode()


def error_body(error: OstinatoError) -> Json:
    """Return an error in OpenAI's format."""
    kind = getattr(error, "kind", "server_error" if error.status >= 500 else "invalid_request_error")
    if error.status == 401:
        kind = "authentication_error"
    param = error.field if isinstance(error, BadRequest) else None
    code: str = error.code
    if isinstance(error, NotFound) and param == "model":
        code = "model_not_found"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


ERRORS = ErrorShape(body=error_body)
