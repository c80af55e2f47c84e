"""The host's end of the line to pid 1 of a gVisor sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ostinato.core.errors import Unavailable
from ostinato.worlds.sandbox.gvisor.inside.frames import HEAD, MOST_OBJECT, Frame, pack

_MOST_BYTES = 128 << 20  # of one answer; our pid 1 never sends more


class GvisorConnection:
    """Requests and answers, any number at once. `theirs` becomes the sandbox's descriptor 0; call `sent` once it has.

    Example::

        line = GvisorConnection()
        ...                                     # start a process with line.theirs as its standard input
        await line.sent()
        told, data = await line.ask({"do": "read", "most": 100}, b"a.txt", within=5.0)
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self.open = True
        self.at_end: Callable[[], Unavailable | None] = lambda: None
        """Called for the reason when the sandbox closed the line and we did not. Returns None if the reason is unknown."""
        self._why = Unavailable("the sandbox is gone")

    async def sent(self) -> None:
        """Close our copy of the sandbox's end and begin to listen."""
        self.theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        self._listening = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                first, second = HEAD.unpack(await reader.readexactly(HEAD.size))
                if first > MOST_OBJECT or second > _MOST_BYTES:
                    break
                told = json.loads(await reader.readexactly(first))
                waiting = self._waiting.pop(told["id"], None)
                data = await reader.readexactly(second)
                if waiting is not None and not waiting.done():
                    waiting.set_result((told, data))
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass
        finally:
            self.close(self.at_end() if self.open else None)

    def ask(self, told: Mapping[str, Any], data: bytes = b"") -> tuple[int, asyncio.Future[Frame]]:
        """Send a request. Returns its number and a future of the answer. Both raise Unavailable if the sandbox has ended."""
        if not self.open or self._writer is None:
            raise self._gone()
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        self._writer.write(pack({**told, "id": number}, data))
        return number, answer

    async def answer(self, told: Mapping[str, Any], data: bytes = b"", *, within: float) -> Frame:
        """Send a request and wait for the answer. Raises Unavailable."""
        number, answer = self.ask(told, data)
        try:
            async with asyncio.timeout(within):
                return await answer
        except TimeoutError as error:
            raise Unavailable("the sandbox does not answer") from error
        finally:
            self._waiting.pop(number, None)

    def _gone(self) -> Unavailable:
        return type(self._why)(str(self._why))

    def close(self, why: Unavailable | None = None) -> None:
        """Hang up, which ends the sandbox. Later and waiting requests raise `why`. Idempotent."""
        self._why = why or self._why
        self.open = False
        if self._writer is not None:
            self._writer.close()
        else:
            self._ours.close()
        with contextlib.suppress(OSError):
            self.theirs.close()
        if self._listening is not None and self._listening is not asyncio.current_task():
            self._listening.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._gone())
                waiting.exception()  # nobody may be waiting any more
        self._waiting.clear()
