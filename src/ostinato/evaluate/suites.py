r"""A suite: a task file (JSONL) parsed strictly into items, with the hash that goes into every report; and the graders of text.

One line is one item::

    {"id": "add-1", "family": "arithmetic", "messages": [{"role": "user", "content": "..."}], "grader": "python_tests",
     "sampling": {"max_tokens": 96, "temperature": 0.8, "stop": ["\ndef"]}, "head": "def add(a, b):", "tests": "..."}

Keys that are not fields of the item itself belong to the grader and are kept in `Item.data`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from blake3 import blake3
from pydantic import BaseModel, Field, ValidationError

from ostinato.core.errors import BadConfig

MAX_FILE_BYTES = 256 * 2**20
MAX_LINE_CHARACTERS = 2**20
MAX_ITEMS = 100_000


class ItemSampling(BaseModel, frozen=True, extra="forbid"):
    """How an item is sampled; the seed is not here because the runner gives each draw its own."""

    max_tokens: int = Field(default=256, ge=1, le=131_072, description="Longest answer, in tokens.")
    temperature: float = Field(default=1.0, ge=0.0, le=2.0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus probability.")
    stop: tuple[str, ...] = Field(default=(), max_length=16, description="Strings that end the answer.")


class ItemMessage(BaseModel, frozen=True, extra="forbid"):
    """One chat message of an item's prompt."""

    role: str = Field(pattern="^(system|user|assistant)$", description="system, user or assistant.")
    content: str = Field(description="Text of the message.")


class Item(BaseModel, frozen=True, extra="allow"):
    """One task of a suite. `data` holds what belongs to the grader.

    Example: ``Item(id="add-1", family="arithmetic", messages=(ItemMessage(role="user", content="..."),), grader="python_tests")``
    """

    id: Annotated[str, Field(min_length=1, max_length=256, description="Id, unique in the suite.")]
    family: Annotated[str, Field(min_length=1, max_length=256, description="The group that the item belongs to.")]
    messages: tuple[ItemMessage, ...] = Field(min_length=1, max_length=1024, description="The conversation so far.")
    continue_final_message: bool = Field(default=False, description="The answer continues the last message's text.")
    sampling: ItemSampling = Field(default=ItemSampling(), description="How the answer is sampled.")
    grader: str = Field(min_length=1, max_length=64, description="Name of the function that scores the answer.")

    @property
    def data(self) -> dict[str, Any]:
        """The grader's own fields of the line, such as `head` and `tests`."""
        return dict(self.model_extra or {})


@dataclass(frozen=True, slots=True)
class Suite:
    """Items under a name, and the BLAKE3 hash of their canonical content (key order and spacing do not change it).

    Example: ``Suite("held-out", "9f2c...", (item,))``
    """

    name: str
    hash: str
    items: tuple[Item, ...]


def build(name: str, items: Sequence[Item]) -> Suite:
    """Hash the items and check that their ids are unique.

    Raises:
        BadConfig: there are no items or too many, or an id is repeated.
    """
    if not 0 < len(items) <= MAX_ITEMS:
        raise BadConfig(f"suite {name!r} has {len(items)} items; it needs 1 to {MAX_ITEMS}")
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise BadConfig(f"suite {name!r}: the id {item.id!r} stands twice; ids must be unique")
        seen.add(item.id)
    digest = blake3()
    for item in items:
        digest.update(json.dumps(item.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return Suite(name, digest.hexdigest(), tuple(items))


def parse(name: str, text: str) -> Suite:
    """Parse JSONL; blank lines are skipped.

    Raises:
        BadConfig: names the line and the field.
    """
    items: list[Item] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            items.append(_item(f"suite {name!r}, line {number}", line))
    return build(name, items)


def load(path: Path) -> Suite:
    """Read a task file; the suite is named after the file.

    Raises:
        BadConfig: the file is missing, too large, not UTF-8, or a line is wrong.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadConfig(f"suite file {path} is larger than {MAX_FILE_BYTES} bytes; split it")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadConfig(f"suite file {path} cannot be read ({error.strerror}); check evaluate.suite") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"suite file {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    return parse(path.stem, text)


def _item(where: str, line: str) -> Item:
    if len(line) > MAX_LINE_CHARACTERS:
        raise BadConfig(f"{where}: longer than {MAX_LINE_CHARACTERS} characters; shorten the item")
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{where}: not JSON ({error}); one line is one JSON object") from error
    if not isinstance(value, dict):
        raise BadConfig(f"{where}: a {type(value).__name__}, not a JSON object; one line is one item")
    try:
        # JSON arrays become tuples, so the strict check is of the JSON form and not of the Python form.
        return Item.model_validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(item)"
        raise BadConfig(f"{where}, field {field!r}: {first['msg']}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


# ---------------------------------------------------------------- graders


MAX_PATTERN = 1_000
MAX_TEXT = 20_000


def pattern(item: Item, text: str) -> float:
    """1.0 if the item's regular expression `pattern` is found in the answer's first 20,000 characters, else 0.0.

    Example: an item ``{"grader": "pattern", "pattern": "^[a-z]", ...}``. Raises BadConfig if there is no usable pattern.
    """
    wanted = item.data.get("pattern")
    if not isinstance(wanted, str) or not 0 < len(wanted) <= MAX_PATTERN:
        raise BadConfig(
            f"suite item {item.id!r}: grader 'pattern' needs a string 'pattern' of 1 to {MAX_PATTERN} characters"
        )
    try:
        return float(re.search(wanted, text[:MAX_TEXT]) is not None)
    except re.error as error:
        raise BadConfig(f"suite item {item.id!r}: pattern {wanted!r} is not a regular expression: {error}") from error


def suggestion(item: Item, text: str) -> float:
    """1.0 if the answer is the item's `meant`, 0.0 if it is anything else, and the item's `t` if it is empty or `nothing`.

    That is the reward of `ostinato.reward.functions.tab` plus t: a policy's mean score is t plus its mean reward.

    Example: an item ``{"grader": "suggestion", "meant": "Friday", "nothing": "-", "t": 0.25, ...}``. Raises BadConfig for other fields.
    """
    meant, nothing, t = (item.data.get(name) for name in ("meant", "nothing", "t"))
    if not (isinstance(meant, str) and isinstance(nothing, str) and isinstance(t, float) and 0.0 < t < 1.0):
        raise BadConfig(
            f"suite item {item.id!r}: grader 'suggestion' needs the strings 'meant' and 'nothing' and a 't' between 0 and 1"
        )
    answer = text.strip()
    return t if answer in ("", nothing) else float(answer == meant)
