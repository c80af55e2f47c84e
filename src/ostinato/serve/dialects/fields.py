"""Helpers shared by the dialects' parsers: checks of JSON bodies whose errors name the field and the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar
from unicodedata import category

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from ostinato.core.errors import BadRequest
from ostinato.core.records import Sampling
from ostinato.serve.dialects.extensions import Extensions
from ostinato.serve.dialects.rules import Only, too_wide

MAX_MESSAGES = 4096
MAX_STOPS = 16
_JOINERS = "\u200c\u200d"
# pydantic puts the name of a union's branch into a path, where it is not a field of the body
_BRANCHES = ("str", "int", "float", "bool")
SHOWN = 10  # fields that one error names; further ones are counted, not put into words
_LONGEST = 200  # characters of a field's path that are shown
_Body = TypeVar("_Body", bound=BaseModel)


def printable(text: str) -> str:
    """Check a name that is shown to people: no character may move a terminal's cursor or end a line. Raises ValueError."""
    if not text.isprintable() and not all(map(_stays, text)):
        raise ValueError("holds a character that is not printable")
    return text


def _stays(character: str) -> bool:
    """True if printable, or a joiner (Persian, emoji) or space (Japanese): names contain these, but Python calls them unprintable."""
    return character.isprintable() or character in _JOINERS or category(character) == "Zs"


Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
User = Annotated[str, StringConstraints(max_length=512), AfterValidator(printable)]  # some clients send "" for no user


_OF_CHAT = "is not supported in this dialect: chat completions have it"
_OfChat0 = Annotated[Any, Only(0, why=_OF_CHAT)]


class OneAnswer(Extensions):
    """Base of the requests in dialects that return a single answer, no log-probabilities, and always the token counts."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    stream: bool | None = None
    presence_penalty: _OfChat0 = None
    frequency_penalty: _OfChat0 = None
    logit_bias: Annotated[Any, Only({}, why=_OF_CHAT)] = None
    logprobs: Annotated[Any, Only(False, why=_OF_CHAT)] = None
    seed: Annotated[Any, Only(why=_OF_CHAT)] = None
    n_: Annotated[Any, Only(1, why=_OF_CHAT), Field(alias="n")] = None

    @property
    def n(self) -> int | None:
        """How many answers: None, which means one."""
        return None

    @property
    def wants_usage(self) -> bool:
        """True: each stream ends with the token counts."""
        return True

    @property
    def wants_logprobs(self) -> bool:
        """False: these dialects return no log-probabilities."""
        return False

    @property
    def tops(self) -> int:
        """0: no likeliest tokens are returned."""
        return 0

    @property
    def stops(self) -> Sequence[str]:
        """The texts that end the answer."""
        return ()

    def sampling(self, max_tokens: int) -> Sampling:
        """The sampling parameters, with this token budget."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            stop=tuple(self.stops),
        )


def check_stops(stops: Sequence[str]) -> None:
    """Raise ValueError unless there are at most `MAX_STOPS` stop strings of 1 to 256 characters."""
    if len(stops) > MAX_STOPS or any(not 0 < len(text) <= 256 for text in stops):
        raise ValueError(f"takes at most {MAX_STOPS} strings of 1 to 256 characters")


def validate(model: type[_Body], body: Any, where: str = "") -> _Body:
    """Check a JSON object against a pydantic model. Raises BadRequest naming every bad field, the first as its `field`."""
    if not isinstance(body, dict):
        raise BadRequest(f"{where or 'The body'} must be a JSON object, not {kind(body)}.", field=where or None)
    if wide := too_wide(body):
        field = ".".join(filter(None, (where, wide[0])))
        raise BadRequest(f"{where or 'The body'} {wide[1]}.", field=field or None)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        found, fields = dict[str, str](), [field.alias or name for name, field in model.model_fields.items()]
        for each in error.errors(include_url=False, include_context=False, include_input=False):
            field = _path(each["loc"], where)
            if field not in found:  # the first of a union's reasons
                found[field] = _wrong(each, field, fields) if len(found) < SHOWN else ""
        raise refusal(found) from None


def refusal(wrong: Mapping[str, str], rest: str = "") -> BadRequest:
    """One error for several fields. `wrong`: field -> a sentence about it without a full stop; those after the first `SHOWN` are only
    counted. `rest` comes last: what was not looked at.
    """
    parts = list(wrong.values())[:SHOWN]
    if len(wrong) > len(parts):
        parts.append(f"and {len(wrong) - len(parts)} more")
    if rest:
        parts.append(rest)
    return BadRequest(f"{'; '.join(parts)}.", field=next(iter(wrong))[:_LONGEST])


def _wrong(error: ErrorDetails, field: str, valid: Sequence[str]) -> str:
    """What a pydantic error says, as a sentence."""
    field = field[:_LONGEST]
    if error["type"] == "extra_forbidden":
        return str(unknown(str(error["loc"][-1]), field, valid)).removesuffix(".")
    if error["type"] == "missing":
        return f"{field} is missing"
    if error["type"] == "value_error":  # one of our own checks
        return f"{field} {error['msg'].removeprefix('Value error, ')}"
    return f"{field}: {error['msg']}"


def unknown(name: str, field: str, valid: Sequence[str]) -> BadRequest:
    """The error for an unknown field, which names the nearest valid one."""
    name = name[:100]
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return BadRequest(f"Unknown field {name!r}; the nearest valid one is {near[0]!r}.", field=field[:_LONGEST])


def _path(loc: Sequence[int | str], where: str) -> str:
    path = where
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not (path and part in _BRANCHES):
            path += f".{part}" if path else part
    return path or "body"


def kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")  # pyright: ignore[reportArgumentType]
