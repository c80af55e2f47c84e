"""The interface that the supervisor needs of a worker, wherever it runs."""

from __future__ import annotations

from typing import Protocol

from ostinato.launch.placing.sign import Sign


class Worker(Protocol):
    """A worker that can be started, heard and stopped again and again: a subprocess here, or an actor on a node of a cluster.

    `sign` is its last sign of life, received at `heard` on the event loop's clock. `was_ready`: it has been ready at least once since the
    supervisor began.
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
        """The process id of the last start; 0 before the first."""
        ...

    @property
    def node(self) -> str:
        """The machine that it runs on; empty for this machine."""
        ...

    async def start(self) -> None:
        """Start it. Raises OSError or StorageFull if this machine is short of something."""
        ...

    async def ended(self) -> int:
        """Wait for the end; returns the exit code, or minus the signal number. By then all of its signs have been received."""
        ...

    async def stop(self, grace_s: float) -> bool:
        """Tell it to end, and kill it if it has not after `grace_s` seconds. True if it ended by itself."""
        ...

    async def kill(self) -> None:
        """Kill it at once, with everything that it started."""
        ...

    def last_line(self) -> str:
        """The last line of its output, for a worker that could not say why it ended."""
        ...
