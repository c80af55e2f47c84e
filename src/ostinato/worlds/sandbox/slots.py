"""Limits how many sandboxes are open at once and gives each its proxy, for the backends with a kernel per sandbox."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, Protocol, TypeVar

from ostinato.worlds.sandbox.proxy import PROXY_PORT, Proxy


class PlacedSandbox(Protocol):
    """What `SandboxPlaces` needs of a sandbox."""

    on_stop: list[Callable[[], object]]
    """Called once, when it has ended."""

    async def listen(self, port: int) -> socket.socket:
        """Listen on a port of its loopback."""
        ...

    async def stop(self) -> None:
        """End it. Idempotent."""
        ...


B = TypeVar("B", bound=PlacedSandbox)


class SandboxPlaces(Generic[B]):
    """The places of one backend, and the sandboxes in them.

    Example::

        places = SandboxPlaces[Box](config.boxes)
        box = await places.start(lambda: launch(spec), spec.hosts)   # waits for a place; box.stop() gives it back
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._taken: set[B] = set()

    async def start(self, launch: Callable[[], Awaitable[B]], hosts: Collection[str]) -> B:
        """Call `launch` once there is a place, and add a proxy to `hosts` if there are any. On an error the place is freed again.

        Raises what `launch` and the sandbox's `listen` raise.
        """
        await self._free.acquire()
        try:
            box = await launch()
        except BaseException:
            self._free.release()
            raise
        self._taken.add(box)
        box.on_stop += [self._free.release, lambda: self._taken.discard(box)]
        try:
            if hosts:
                proxy = Proxy(await box.listen(PROXY_PORT), hosts)
                box.on_stop.append(proxy.close)
                await proxy.start()
        except BaseException:
            await box.stop()
            raise
        return box

    async def close(self) -> None:
        """Stop all open sandboxes."""
        await asyncio.gather(*(box.stop() for box in list(self._taken)))
