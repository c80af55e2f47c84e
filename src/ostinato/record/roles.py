"""Who acts in a role of a run, such as its trainer: one process at a time, on one machine or on many.

Two implementations: locks of the operating system in the run's directory (here), and leases in Postgres (`postgres/leases.py`).
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
    """What every write of a role carries: only those of the newest holder are let through.

    `number` rises with each holder. `mark` is a word of the holder's own: a failover may forget a number, and give it again.

    Example: ``FencingToken(role="train", number=7, mark=uuid4())``
    """

    role: str
    number: int
    mark: UUID


class Tenure(Protocol):
    """One process's right to act in a role, until `close`."""

    @property
    def token(self) -> FencingToken | None:
        """What its writes carry; None where nobody can take the role while this process lives."""
        ...

    @property
    def lost(self) -> bool:
        """True once it is known that another process has the role. Asks nobody."""
        ...

    def check(self) -> None:
        """Asks, and may wait for the answer. Raises LeaseLost if another process has the role by now, Unavailable if nobody answers."""
        ...

    def close(self) -> None:
        """Let another process have it at once."""
        ...


class Roles(Protocol):
    """The roles of one run."""

    @property
    def pass_on(self) -> bool:
        """True if a role goes on to whoever waits for it when its holder dies or pauses, so that a second process is a reserve."""
        ...

    def take(self, role: str) -> Tenure:
        """Raises Conflict, naming the holder, if another process has the role; BadConfig for what is no plain lower-case name."""
        ...


class FileRoles:
    """Roles in a run's directory, for the processes of one machine. A holder that pauses keeps its role.

    Example: ``with closing(FileRoles(run).take("train")): ...``
    """

    pass_on = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take(self, role: str) -> FileTenure:
        """Raises as `hold`."""
        return FileTenure(self._directory, role)


class FileTenure:
    """A role by a lock of the operating system, which nobody else gets while this process lives."""

    token = None
    lost = False

    def __init__(self, directory: Path, role: str) -> None:
        self._held = ExitStack()
        self._held.enter_context(hold(directory, role))

    def check(self) -> None:
        """Nothing to ask: see above."""

    def close(self) -> None:
        """Let go of the lock. May be called twice."""
        self._held.close()
