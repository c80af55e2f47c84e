"""A worker on another node, as the supervisor sees it: placed, heard by asking, gone with its node."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import urllib.parse
from collections.abc import Callable
from typing import Protocol

from ostinato.core.errors import StorageFull, Unavailable
from ostinato.launch.placing.nodes.keeper import Keeper, Look, Order
from ostinato.launch.placing.sign import Sign, read_sign

EVERY_S = 1.0
_FAREWELL_S = 5.0
_FAILED = 1
_ANY = {"0.0.0.0", "::", "[::]"}


class Place(Protocol):
    """A keeper on some node, or the wish for one."""

    @property
    def keeper(self) -> Keeper:
        """Its methods wait until there is a node. They raise Unavailable once the node is gone, or was away for too long."""
        ...

    def wanting(self) -> str:
        """What it waits for, in words."""
        ...

    def leave(self) -> None:
        """Give the place back, whatever still runs there."""
        ...


class PlacedWorker:
    """A `Worker` on a node that somebody else chooses. Each start asks for a place anew.

    Args:
        name: of the worker.
        order: what the node is told.
        open_place: asks for a place; returns at once.
        on_placed: told where it came, in words.

    Example: ``PlacedWorker("train", order, cluster.place_for("train"), say)``
    """

    def __init__(
        self, name: str, order: Order, open_place: Callable[[], Place], on_placed: Callable[[str, str], None]
    ) -> None:
        self.name, self.heard, self.was_ready = name, 0.0, False
        self.sign: Sign | None = None
        self.url: str | None = None
        """Where the gateway answers, if this worker is one."""
        self._order, self._open, self._say = order, open_place, on_placed
        self._place: Place | None = None
        self._life: asyncio.Task[int] | None = None
        self._at, self._last_line = (0, ""), ""
        self._told: str | None = None
        self._wanted: str | None = None
        self._left = asyncio.Event()

    @property
    def running(self) -> bool:
        return self._life is not None and not self._life.done()

    @property
    def pid(self) -> int:
        return self._at[0]

    @property
    def node(self) -> str:
        return self._at[1]

    async def start(self) -> None:
        self._place = self._open()
        self._at, self._last_line, self.url, self._told = (0, ""), "", None, None
        self._left = asyncio.Event()
        self._hear(Sign(doing="waiting for a node"))
        self._life = asyncio.create_task(self._live(self._place))

    async def ended(self) -> int:
        if self._life is None:
            raise RuntimeError(f"{self.name} was not started")
        return await asyncio.shield(self._life)

    async def stop(self, grace_s: float) -> bool:
        if not self.running or self._place is None:
            return True
        alone = not self.pid  # who waits for a node has nothing to end
        if self.pid:
            with contextlib.suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(grace_s + _FAREWELL_S):
                    alone = await self._place.keeper.stop(grace_s)
                    await self.ended()
        await self._leave()
        return alone

    async def kill(self) -> None:
        if self.running and self._place is not None and self.pid:
            with contextlib.suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._place.keeper.kill()
                    await self.ended()
        await self._leave()

    def last_line(self) -> str:
        return self._last_line

    async def tell(self, url: str, grace_s: float) -> None:
        """Where the run's gateway answers now. A worker that was told another place ends, and starts again with the new one."""
        self._wanted = url
        if self._told not in (None, url) and self.running:
            await self.stop(grace_s)

    # ------------------------------------------------------------ its life

    async def _live(self, place: Place) -> int:
        """From the wish for a place to the worker's end, or until it is left; returns its exit code."""
        hearing, left = asyncio.ensure_future(self._hear_out(place)), asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait({hearing, left}, return_when=asyncio.FIRST_COMPLETED)
            return hearing.result() if hearing.done() else -signal.SIGKILL
        finally:
            hearing.cancel()
            left.cancel()
            await asyncio.wait({hearing})
            self.url = None
            place.leave()

    async def _hear_out(self, place: Place) -> int:
        """What the node says of the worker, from its start to its end; returns its exit code."""
        try:
            await self._placed(place)
            while True:
                look = Look(**await place.keeper.look())
                self._take(look)
                if look.code is not None:
                    self._last_line = look.last_line
                    return look.code
                if self._wanted is not None and self._told is None:
                    await place.keeper.tell(self._wanted)
                    self._told = self._wanted
                await asyncio.sleep(EVERY_S)
        except (Unavailable, StorageFull) as error:
            self._hear(Sign(doing=self._doing, failed=str(error), outside=True))
            return _FAILED
        except OSError as error:
            self._hear(Sign(doing=self._doing, failed=f"could not be started on its node: {error}"))
            return _FAILED

    async def _placed(self, place: Place) -> None:
        starting = asyncio.ensure_future(place.keeper.start(self._order.plain()))
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=EVERY_S)
                if not starting.done():
                    self._hear(Sign(doing=place.wanting()))
        finally:
            starting.cancel()
        self._at = starting.result()
        self._hear(Sign(doing="starting"))
        self._say(self.name, f"placed on {self.node} (pid {self.pid})")

    def _take(self, look: Look) -> None:
        self.heard = asyncio.get_running_loop().time() - look.silent_s
        self.was_ready |= look.ready
        self.url = None if look.url is None else reachable(look.url, self.node)
        sign = None if look.line is None else read_sign(look.line.encode())
        if sign is not None:
            self.sign = sign

    @property
    def _doing(self) -> str:
        return "" if self.sign is None else self.sign.doing

    def _hear(self, sign: Sign) -> None:
        self.sign, self.heard = sign, asyncio.get_running_loop().time()

    async def _leave(self) -> None:
        self._left.set()
        await self.ended()


def reachable(url: str, node: str) -> str:
    """The URL of a gateway on `node` as other machines reach it: one that listens everywhere is at the node's own address.

    Example: ``reachable("http://0.0.0.0:8321", "10.0.0.7") == "http://10.0.0.7:8321"``
    """
    parts = urllib.parse.urlsplit(url)
    host = f"[{node}]" if ":" in node else node
    return f"{parts.scheme}://{host}:{parts.port}" if parts.hostname in _ANY and node else url
