"""The seam for the operator's actions from the page's forms and its playground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundAnswer:
    """One arm's answer in the playground. `turn`: its id for feedback; `version`: the version that sampled its first token."""

    arm: str
    turn: str
    version: int | None
    text: str
    error: str | None = None


class OperatorActions(Protocol):
    """The operator's actions from the page. They call the same functions as the commands."""

    async def ship(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Ship a version. Return a sentence on what is live now. Raises Conflict if `expected_live` is not live, NotFound, BadRequest."""
        ...

    async def approve(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Ship a version that has passed and waits for approval. Raises as `ship`; NotFound too if it does not wait."""
        ...

    async def refuse(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Block a version that waits for approval. Raises as `approve`."""
        ...

    async def roll_back(self, expected_live: str, reason: str, actor: str) -> str:
        """Roll back the live version. Return a sentence on what is live now. Raises as `ship`."""
        ...

    async def accept(self, alarm: str, id: str, reason: str, actor: str) -> str:
        """End the alarm that was raised with this id. Raises NotFound, Conflict, BadRequest."""
        ...

    async def ask(self, messages: Sequence[Mapping[str, str]], arms: Sequence[str]) -> tuple[PlaygroundAnswer, ...]:
        """Return one answer per arm. A failure is reported in the answer."""
        ...

    async def rate(self, turn: str, name: str, correction: str) -> str:
        """Send feedback about an answer. Return its status."""
        ...
