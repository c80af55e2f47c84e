"""The rules for request fields: each is used, ignored because it changes nothing, or refused by name.

The pydantic models of the requests declare the rules: a field marked `Ignored` is accepted and never read, one marked `Only` accepts just
the values that change nothing, and any other is used. Null means that the field was not sent, whether or not the field is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
MAX_ITEMS = 4096
UNSUPPORTED = "is not supported by this server"


@dataclass(frozen=True, slots=True)
class Ignored:
    """Marks a field that is accepted with any value and never read, because it cannot change the result; `why` gives the reason.

    Example: ``store: Annotated[Any, Ignored("nothing is kept for the caller")] = None``
    """

    why: str


Cached = Annotated[Any, Ignored("prompts are cached in any case")]
Hidden = Annotated[Any, Ignored("saves context by hiding a tool at first; here it is offered at once")]


class Only:
    """Marks a field that accepts only null and these values, which change nothing. Any other is refused with an error that begins with the
    field's name, continues with `why`, and ends with the remedy: to leave the field out.

    Example: ``top_k: Annotated[Any, Only(-1, 0, why="is not supported: tokens are drawn by temperature and top_p")] = None``
    """

    __slots__ = ("values", "why")

    def __init__(self, *values: Any, why: str = UNSUPPORTED) -> None:
        self.values, self.why = values, why

    def check(self, value: Any) -> Any:
        """Return the value. Raises ValueError for a value that would change the answer."""
        if value is not None and not any(_same(value, neutral) for neutral in self.values):
            raise ValueError(f"{self.why}; leave it out")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


class Fields(BaseModel):
    """Base of all objects in a request whose fields are declared. Null fields are dropped, unless the field is required.

    Lists and objects with more than `MAX_ITEMS` entries are refused before their entries are validated, except lists of token ids.
    """

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if found := too_wide(body):
            raise ValueError(found[1])
        if None not in body.values():
            return body
        required = _required(cls)
        return {name: value for name, value in body.items() if value is not None or name in required}


def too_wide(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first field whose list or object is too long ("" for the body itself), and the error; None if there is none."""
    if len(body) > MAX_ITEMS:
        return "", f"has {len(body)} fields; at most {MAX_ITEMS} are taken"
    for name, value in body.items():
        if isinstance(value, list | dict) and len(value) > MAX_ITEMS and not (name == "prompt" and _are_ids(value)):
            return name[:100], f"holds {len(value)} values in {name[:100]!r}; at most {MAX_ITEMS} are taken"
    return None


def _are_ids(value: list[Any] | dict[str, Any]) -> bool:
    """True for a list of integers only."""
    return isinstance(value, list) and set(map(type, value)) == {int}


@cache
def _required(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items() if field.is_required())


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells true from 1."""
    return value is neutral or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool))
