"""The operator actions that the page's forms and its playground send, by the same functions as the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundAnswer:
    """One arm's answer in the playground. `turn` names it for feedback; `version` made its first token."""

    arm: str
    turn: str
    version: int | None
    text: str
    error: str | None = None


class Acts(Protocol):
    """An operator's actions from the page, by the same functions as the command line."""

    async def ship(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Ship a version; returns a sentence on what is live now. Raises Conflict if `expected_live` is not live, NotFound, BadRequest."""
        ...

    async def approve(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Ship a version that has passed and waits for approval. Raises as `ship`; NotFound too if it does not wait."""
        ...

    async def refuse(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Block a version that waits for approval. Raises as `approve`."""
        ...

    async def roll_back(self, expected_live: str, reason: str, actor: str) -> str:
        """Roll the live version back; returns a sentence on what is live now. Raises as `ship`."""
        ...

    async def accept(self, alarm: str, id: str, reason: str, actor: str) -> str:
        """End the alarm that was raised with this id. Raises NotFound, Conflict, BadRequest."""
        ...

    async def ask(self, messages: Sequence[Mapping[str, str]], arms: Sequence[str]) -> tuple[PlaygroundAnswer, ...]:
        """One answer per arm. A failure is reported in the answer."""
        ...

    async def rate(self, turn: str, name: str, correction: str) -> str:
        """Send feedback about an answer; returns its status."""
        ...
