"""Log rows for people and for later readers: the numerics contract behind an id, alarms, and erasures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """The numerics contract behind an id, written before the first turn that names the id, so that the id can be resolved later.

    `contract` is `core.numerics.Contract.to_json()`.

    Example: ``Stamp(id=contract.id, contract=contract.to_json(), at=9.0)``
    """

    id: str
    contract: str
    at: float


class AlarmState(StrEnum):
    """Whether something is wrong now."""

    RAISED = "raised"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something that a person should look at, or that is fine again. `name` is its subject, which has one state at a time.

    Example: ``Alarm(id="coverage:acme:1", name="coverage:acme", state=AlarmState.RAISED, reason="no feedback for 212 turns", at=9.0)``
    """

    id: str
    name: str
    state: AlarmState
    reason: str
    at: float
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The erasure of a person, or with `user` None of a whole tenant: a tombstone, at which each fold of the log drops what it has under
    the name. `key`: the number of the newest key that was destroyed for it; 0 if nothing was encrypted with one.

    Example: ``Forgotten(id="forgotten-key-7", tenant="acme", user="ann", key=7, at=12.0)``
    """

    id: str
    tenant: str
    user: str | None
    key: int
    at: float

    def covers(self, person: tuple[str, str]) -> bool:
        """Return True for the tenant and user who were forgotten."""
        return person[0] == self.tenant and self.user in (None, person[1])
