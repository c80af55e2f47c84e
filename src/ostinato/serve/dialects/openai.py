"""The OpenAI dialect, inbound: JSON bodies of `/v1/chat/completions` and `/v1/completions` to typed requests.

Every field is taken, refused by name, or known to be harmless; none is silently ignored. Field list: openai-python 3.52,
`types/chat/completion_create_params.py` and `types/completion_create_params.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar
from unicodedata import category

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
)

from ostinato.core.errors import BadRequest
from ostinato.core.records import Sampling

MAX_N = 128
MAX_STOPS = 16
MAX_MESSAGES = 4096
_JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """For names that are shown to people: nothing in them may move a terminal's cursor or end a line. Raises ValueError."""
    if not text.isprintable() and not all(map(_stays, text)):
        raise ValueError("holds a character that is not printable")
    return text


def _stays(character: str) -> bool:
    """Also what Python does not call printable and names are written with: joiners (Persian, emoji) and spaces (Japanese)."""
    return character.isprintable() or character in _JOINERS or category(character) == "Zs"


_Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
_User = Annotated[str, StringConstraints(max_length=512), AfterValidator(printable)]  # some clients send "" for nobody
_Body = TypeVar("_Body", bound=BaseModel)
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

# Known fields that change nothing in what is sampled here.
_HARMLESS = frozenset(
    [
        "store",
        "service_tier",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
    ]
)
# Known fields that would change the answer: refused unless they hold one of these values.
_INERT: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_WHY_NOT = {"top_logprobs": "is not supported: only the sampled token's own log-probability is computed"}
_MESSAGE_INERT: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("annotations", "audio", "function_call", "reasoning_content", "refusal", "tool_calls", "tool_call_id"),
    (None, []),
)
_MESSAGE_FIELDS = ("role", "content", "name")  # templates render no name: it is taken, checked and left out
_BRANCHES = ("str", "int", "float", "bool")  # pydantic names a union's branch in a path: no part of the body
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = _STRICT
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis: asked for or not, none is sent


class _Request(BaseModel):
    """The fields that both endpoints share."""

    model_config = _STRICT
    model: _Name
    max_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: _User | None = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS or any(not 0 < len(text) <= 256 for text in stops):
            raise ValueError(f"takes at most {MAX_STOPS} strings of 1 to 256 characters")
        return stop

    @property
    def budget(self) -> int | None:
        """The most tokens that the client wants."""
        return self.max_tokens

    @property
    def asker(self) -> str | None:
        """Who asks, if the body says so."""
        return self.user or None

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> Sampling:
        """How to sample, with this token budget."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            stop=tuple(stops),
            seed=self.seed,
        )


class ChatRequest(_Request):
    """`POST /v1/chat/completions`. `continue_final_message` goes on with the last (assistant) message, as in vLLM."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    logprobs: bool | None = None
    safety_identifier: _User | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def budget(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def asker(self) -> str | None:
        return self.user or self.safety_identifier or None

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's log-probability is to be returned."""
        return bool(self.logprobs)


class CompletionRequest(_Request):
    """`POST /v1/completions`. A prompt is text or token ids."""

    prompt: str | list[int]
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        """Takes the prompt out of a list of one."""
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("takes text, token ids, or a list of one of these")
        if isinstance(prompt[0], str | list) and len(prompt) > 1:
            raise ValueError("holds several prompts; send one per request")
        return prompt[0] if isinstance(prompt[0], str | list) else prompt

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's log-probability is to be returned."""
        return self.logprobs is not None


def parse_chat(body: Any) -> ChatRequest:
    """A chat request with its messages in the form the renderer takes. Raises BadRequest naming the field."""
    request = _parse(ChatRequest, body)
    request.messages[:] = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    last = len(request.messages) - 1
    if request.continue_final_message == request.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt must differ: the model either goes on or starts anew.",
            field="continue_final_message",
        )
    if request.continue_final_message and request.messages[last]["role"] != "assistant":
        raise BadRequest(
            f"continue_final_message needs an assistant's message at the end; messages[{last}] is not.",
            field=f"messages[{last}].role",
        )
    return request


def parse_completion(body: Any) -> CompletionRequest:
    """A completion request. Raises BadRequest naming the field."""
    return _parse(CompletionRequest, body)


def validate(model: type[_Body], body: Any, where: str = "") -> _Body:
    """Check a JSON object against a pydantic model. Raises BadRequest naming the first bad field."""
    if not isinstance(body, dict):
        raise BadRequest(f"{where or 'The body'} must be a JSON object, not {_kind(body)}.", field=where or None)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = _path(first["loc"], where)
        if first["type"] == "extra_forbidden":
            raise _unknown(str(first["loc"][-1]), field, list(model.model_fields)) from None
        raise BadRequest(f"{field}: {first['msg']}.", field=field) from None


def _parse(model: type[_Body], body: Any) -> _Body:
    if not isinstance(body, dict):
        return validate(model, body)
    known: dict[str, Any] = {}
    fields = model.model_fields
    for name, value in body.items():
        if name in fields:
            known[name] = value
        elif name in _INERT:
            _refuse_active(name, value, _INERT[name])
        elif name not in _HARMLESS:
            raise _unknown(name, name, [*fields, *_INERT, *_HARMLESS])
    return validate(model, known)


def _refuse_active(field: str, value: Any, inert: tuple[Any, ...]) -> None:
    if not any(value is harmless or (value == harmless and not isinstance(value, bool)) for harmless in inert):
        why = _WHY_NOT.get(field, "is not supported by this server")
        raise BadRequest(f"{field} {why}; leave it out.", field=field)


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    for name, value in message.items():
        if name in _MESSAGE_INERT:
            _refuse_active(f"{where}.{name}", value, _MESSAGE_INERT[name])
        elif name not in _MESSAGE_FIELDS:
            raise _unknown(name, f"{where}.{name}", [*_MESSAGE_FIELDS, *_MESSAGE_INERT])
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", field=f"{where}.role")
    name = message.get("name")
    if name is not None and not (isinstance(name, str) and len(name) <= 256):
        raise BadRequest(f"{where}.name must be text of at most 256 characters.", field=f"{where}.name")
    return {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where} must be text or a list of text parts.", field=where)
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}[{i}] must be {{'type': 'text', 'text': ...}}.", field=f"{where}[{i}]")
        if extra := set(part) - {"type", "text"}:
            raise BadRequest(f"{where}[{i}].{min(extra)} is not supported.", field=f"{where}[{i}].{min(extra)}")
    return "".join(part["text"] for part in content)


def _unknown(name: str, field: str, valid: Sequence[str]) -> BadRequest:
    near = difflib.get_close_matches(name[:100], valid, n=1, cutoff=0.0)
    return BadRequest(f"Unknown field {name[:100]!r}; the nearest valid one is {near[0]!r}.", field=field[:200])


def _path(loc: Sequence[int | str], where: str) -> str:
    path = where
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not (path and part in _BRANCHES):
            path += f".{part}" if path else part
    return path or "body"


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")  # pyright: ignore[reportArgumentType]
