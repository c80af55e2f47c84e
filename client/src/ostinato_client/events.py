"""The events that are sent and the receipts that come back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Event:
    """Something that happened to an answer.

    `target`: a response's id (its first choice) or a turn "response:choice". `name`: accepted, rejected, undone, ... `value`: true,
    false or a finite number; may be left out of an event that `retracts` another. `id`: an event counts once, however often it is sent.
    `source`: human, implicit, code or llm. `occurred_at`: Unix seconds or ISO 8601; the moment of arrival if None. `lines`: which lines of
    the answer survive (names `lines_kept_...`), in numbers from 1, one entry for each argument of the call that `target` names; of the
    answer's own text, if it names an answer, without "argument".

    Example: ``Event("chatcmpl-3f:0", "accepted", True)``, ``Event(call, "lines_kept_1h", 0.5, lines=[{"argument": "new_string", "of": 12,
    "followed": "1-12", "kept": "1-5, 9"}])``
    """

    target: str
    name: str
    value: bool | float | None = None
    source: str = "human"
    correction: str | None = None
    comment: str | None = None
    occurred_at: float | str | None = None
    retracts: str | None = None
    id: str = field(default_factory=_new_id)
    lines: Sequence[Mapping[str, Any]] | None = None

    def to_json(self) -> dict[str, Any]:
        """The event in the server's format."""
        fields: dict[str, Any] = {"id": self.id, **vars(self)}
        return {name: value for name, value in fields.items() if value is not None}


class Receipt(NamedTuple):
    """The outcome of an event, which the server has on disk.

    `status`: "accepted"; "early": no such answer so far; "repeated": the event was known already; "changed": another event has this id,
    and stays; "late": the answer's reward was already decided; "retracted": the event that it names no longer counts.
    """

    id: str
    status: str


def receipt(answer: Mapping[str, Any]) -> Receipt:
    """A receipt from the server's JSON."""
    return Receipt(str(answer["id"]), str(answer["status"]))
