"""Roles of a run, such as its trainer, each held by one process at a time, on one machine or on many.

Two implementations: operating-system locks in the run's directory (here), and leases in Postgres (`postgres/leases.py`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

from ostinato.record.lock import hold


@dataclass(frozen=True, slots=True, kw_only=True)
class FencingToken:
    """Carried by every write of a role; only writes with the newest holder's token are accepted.

    `number` rises with each holder. `mark` is unique to the holder, because a failover may lose a number and assign it again.

    Example: ``FencingToken(role="train", number=7, mark=uuid4())``
    """

    role: str
    number: int
    mark: UUID


class Tenure(Protocol):
    """One process's right to act in a role, until `close`."""

    @property
    def token(self) -> FencingToken | None:
        """The token that its writes carry; None where nobody can take the role while this process lives."""
        ...

    @property
    def lost(self) -> bool:
        """True once it is known that another process has the role. Makes no request."""
        ...

    def check(self) -> None:
        """Ask, and wait for the answer. Raises LeaseLost if another process now has the role, Unavailable if there is no answer."""
        ...

    def close(self) -> None:
        """Release the role, so that another process can take it at once."""
        ...


class Roles(Protocol):
    """The roles of one run."""

    @property
    def pass_on(self) -> bool:
        """True if a waiting process takes a role over when its holder dies or pauses, so that a second process is a standby."""
        ...

    def take(self, role: str) -> Tenure:
        """Take a role. Raises Conflict, naming the holder, if another process has it; BadConfig unless it is a plain lower-case name."""
        ...


class FileRoles:
    """Roles in a run's directory, for the processes of one machine. A holder that pauses keeps its role.

    Example: ``with closing(FileRoles(run).take("train")): ...``
    """

    pass_on = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take(self, role: str) -> FileTenure:
        """Take a role. Raises like `hold`."""
        return FileTenure(self._directory, role)


class FileTenure:
    """A role held by an operating-system lock, which no other process can get while this one lives."""

    token = None
    lost = False

    def __init__(self, directory: Path, role: str) -> None:
        self._held = ExitStack()
        self._held.enter_context(hold(directory, role))

    def check(self) -> None:
        """Always passes, because the role cannot be lost."""

    def close(self) -> None:
        """Release the lock. May be called twice."""
        self._held.close()
