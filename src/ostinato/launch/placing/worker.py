"""What the supervisor needs of a worker, wherever it runs."""

from __future__ import annotations

from typing import Protocol

from ostinato.launch.placing.sign import Sign


class Worker(Protocol):
    """A worker that can be started, heard and stopped again and again: a subprocess here, or an actor on a node of a cluster.

    `sign` is its last sign of life, heard at `heard` on the event loop's clock. `was_ready`: it has been ready since the supervisor began.
    """

    name: str
    sign: Sign | None
    heard: float
    was_ready: bool

    @property
    def running(self) -> bool:
        """True between its start and its end."""
        ...

    @property
    def pid(self) -> int:
        """Of the last start; 0 before the first."""
        ...

    @property
    def node(self) -> str:
        """The machine that it runs on; empty: this one."""
        ...

    async def start(self) -> None:
        """Start it. Raises OSError or StorageFull where this machine is short of something."""
        ...

    async def ended(self) -> int:
        """Wait for the end; returns the exit code, or minus the signal. All that it said has been heard then."""
        ...

    async def stop(self, grace_s: float) -> bool:
        """Tell it to end, and kill it if it has not after `grace_s` seconds. True if it ended by itself."""
        ...

    async def kill(self) -> None:
        """End it and all that it started at once."""
        ...

    def last_line(self) -> str:
        """The last line that it wrote, for one that could not say why it ended."""
        ...
