"""What a dialect does with each field of a request: it is used, ignored because it can change nothing, or refused by name.

The pydantic models of the requests are the tables: a field marked `Ignored` is taken and never read, one marked `Only` may hold values
that change nothing, and any other is used. A null means that the field was not sent, whether or not the field is known.
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
    """Marks a field that is taken with any value and never read, because it cannot change what the caller gets; `why` says why.

    Example: ``store: Annotated[Any, Ignored("nothing is kept for the caller")] = None``
    """

    why: str


Cached = Annotated[Any, Ignored("prompts are cached in any case")]
Hidden = Annotated[Any, Ignored("saves context by hiding a tool at first; here it is offered at once")]


class Only:
    """Marks a field that may hold only these values, which change nothing, or null. Any other value is refused; `why` continues
    "top_k ...", and the remedy is to leave the field out.

    Example: ``top_k: Annotated[Any, Only(-1, 0, why="is not supported: tokens are drawn by temperature and top_p")] = None``
    """

    __slots__ = ("values", "why")

    def __init__(self, *values: Any, why: str = UNSUPPORTED) -> None:
        self.values, self.why = values, why

    def check(self, value: Any) -> Any:
        """The value. Raises ValueError for one that would change the answer."""
        if value is not None and not any(_same(value, neutral) for neutral in self.values):
            raise ValueError(f"{self.why}; leave it out")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


class Fields(BaseModel):
    """Base of all objects of a request whose fields are known. Null fields are dropped, unless the field is required.

    Lists and objects of more than `MAX_ITEMS` are refused before each of their items can be found wrong, except for lists of token ids.
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
    """The first field whose list or object is too long to be looked at item by item ("" for the body itself), and a sentence about it."""
    if len(body) > MAX_ITEMS:
        return "", f"has {len(body)} fields; at most {MAX_ITEMS} are taken"
    for name, value in body.items():
        if isinstance(value, list | dict) and len(value) > MAX_ITEMS and not (name == "prompt" and _are_ids(value)):
            return name[:100], f"holds {len(value)} values in {name[:100]!r}; at most {MAX_ITEMS} are taken"
    return None


def _are_ids(value: list[Any] | dict[str, Any]) -> bool:
    """True for a list of whole numbers and nothing else."""
    return isinstance(value, list) and set(map(type, value)) == {int}


@cache
def _required(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items() if field.is_required())


def _same(value: Any, neutral: Any) -> bool:
    """Equal, where true is not 1."""
    return value is neutral or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool))
