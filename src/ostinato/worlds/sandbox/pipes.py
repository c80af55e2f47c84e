"""A program's output, collected up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
import os


class Pipe:
    """The read end of a pipe, drained into memory up to `cap` bytes.

    `ended` becomes True at the end of the output, or False as soon as there is more than `cap`.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.data = b""
        self.read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read, False)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[bool] = self._loop.create_future()
        self._open = True
        self._loop.add_reader(self.read, self._drain)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self.read, 65536)
            self.data += part[: self.cap + 1 - len(self.data)]
            if not part:
                self.close()
            elif len(self.data) > self.cap and not self.ended.done():
                self.ended.set_result(False)

    @property
    def flooded(self) -> bool:
        """True if there was more than the limit."""
        return len(self.data) > self.cap

    def sent(self) -> None:
        """Close our copy of the write end, which the other process now has."""
        os.close(self.write)
        self.write = -1

    def take_rest(self) -> bytes:
        """All output up to now. A background program may go on printing, but that is read and discarded."""
        while self._open and not self.flooded:
            before = len(self.data)
            self._drain()
            if len(self.data) == before:
                break
        return self.data[: self.cap]

    def close(self) -> None:
        """Stop reading."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self.read)
            os.close(self.read)
            if self.write >= 0:
                os.close(self.write)
            if not self.ended.done():
                self.ended.set_result(True)
