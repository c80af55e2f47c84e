"""The host's end of the line to a machine: byte streams over the standard input and output of a command there.

If the connection breaks, the line resumes where it stopped: each side resends the packets that the other did not receive, and skips those
whose number it has already handled. So no packet is lost, and none is handled twice.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.errors import OstinatoError, Unavailable
from ostinato.worlds.sandbox.e2b.account import Following, Machine, MachineGone
from ostinato.worlds.sandbox.e2b.inside import packets

_BATCH = 256 << 10
_PAUSES_S = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 4.0)  # before each try to send, or to reconnect
_LONG_S = 5.0  # after connections shorter than this, the pause before reconnecting grows, up to this
_LAST_WORDS_S = 0.5
_SAY_EVERY = 64  # packets received before the next acknowledgement
_MOST_CHANNELS = 256
_COMPLAINT = 1500


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class RemoteChannel:
    """One stream between the machine and a socket here. `unseen` counts the bytes sent that the other side has not passed on yet,
    `waiting` those received that this side has not passed on yet.
    """

    unseen: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)
    inbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue[bytes | None])
    waiting: int = 0
    task: asyncio.Task[None] | None = None


class Wire:
    """Carries streams until `close`. `lost` is called once with the reason if the line cannot continue. `ports` maps a port of the machine
    to the path of the local socket that its connections reach.
    """

    def __init__(self, machine: Machine, lost: Callable[[str], None]) -> None:
        self._machine, self._lost = machine, lost
        self.ports: dict[int, str] = {}
        self._channels: dict[int, RemoteChannel] = {}
        self._out: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._numbers = itertools.count(1)
        self._heard = self._told = 0
        self._text = self._complaint = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: Following | None = None
        self._open = True
        self._catching_up = False  # packets were lost when the connection broke, and will be resent

    async def open(self, command: str, first: socket.socket) -> None:
        """Start the command and connect channel 0 to a socket, which is this object's from then on. Raises Unavailable."""
        self._carry(0, lambda: asyncio.open_connection(sock=first))
        await asyncio.sleep(0)  # the channel takes the socket before anything can fail
        self._following = await self._machine.run(command, self._hear, self._complain)
        self._begin(self._send())
        self._begin(self._follow())

    def listen(self, port: int, path: str) -> None:
        """From now on, connections to a port of the machine reach the local socket at `path`."""
        self.ports[port] = path
        self._say(0, packets.LISTEN, packets.NUMBER.pack(port))

    def close(self) -> None:
        """Stop carrying. Idempotent."""
        self._open = False
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def left(self) -> None:
        """Wait until all tasks of the line have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._following is not None:
            await self._following.leave()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _lose(self, why: str) -> None:
        if self._open:
            self.close()
            self._lost(why)

    # ------------------------------------------------------------ sending

    def _say(self, channel: int, kind: int, data: bytes = b"", *, counted: bool = True) -> None:
        self._out.append(packets.as_bytes(next(self._numbers) if counted else 0, channel, kind, data))
        self._wake.set()

    async def _send(self) -> None:
        while True:
            while not self._out:
                self._wake.clear()
                await self._wake.wait()
            batch = bytearray()
            while self._out and len(batch) < _BATCH:
                batch += self._out.popleft()
            try:
                await self._insisting(lambda batch=bytes(batch): self._machine.send(batch))
            except OstinatoError as error:
                # if the helper has ended, `_follow` closes the line with its exit code and complaint
                await asyncio.sleep(_LAST_WORDS_S)
                self._lose(str(error))
                return

    async def _insisting(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Retry a few times. A packet that arrives twice is recognised by its number. Raises Unavailable, BadConfig."""
        failed = Unavailable("E2B was not asked")
        for pause in _PAUSES_S:
            await asyncio.sleep(pause)
            try:
                return await ask()
            except MachineGone:
                raise
            except Unavailable as error:
                failed = error
        raise failed

    # ------------------------------------------------------------ receiving

    async def _follow(self) -> None:
        begun, short = asyncio.get_running_loop().time(), 0
        while self._following is not None:
            try:
                code = await self._following.ended()
            except MachineGone as error:
                self._lose(str(error))
                return
            except OstinatoError:
                now = asyncio.get_running_loop().time()
                short = short + 1 if now - begun < _LONG_S else 0
                await asyncio.sleep(min(_LONG_S, 0.05 * 2 ** min(short, 10)))
                await self._take_up()
                begun = asyncio.get_running_loop().time()
                continue
            self._lose(
                f"the sandbox is gone: its helper ended with {code}: {self._complaint.strip() or 'it said nothing'}"
            )
            return

    async def _take_up(self) -> None:
        try:
            self._text, self._catching_up = "", True
            self._following = await self._insisting(lambda: self._machine.follow(self._hear, self._complain))
        except OstinatoError as error:
            self._following = None
            self._lose(f"the connection to the sandbox broke: {error}")
            return
        self._say(0, packets.AGAIN, packets.NUMBER.pack(self._heard), counted=False)

    def _complain(self, text: str) -> None:
        self._complaint = (self._complaint + text)[-_COMPLAINT:]

    def _hear(self, text: str) -> None:
        """Take output of the command. Lines without a mark of ours come from a login shell and are ignored."""
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            if not self._open:
                return
            if line.startswith(packets.REFUSED) and not self._heard:
                self._complain(line[1:])
            elif line.startswith(packets.MARK):
                self._read(line[1:])
        if len(self._text) > packets.MOST_LINE:
            self._lose("the sandbox is gone: its helper says what is not understood")

    def _read(self, line: str) -> None:
        try:
            number, channel, kind, data = packets.read_line(line)
            if 0 < number <= self._heard or (number > self._heard + 1 and self._catching_up):
                return  # was resent, or will be
            if number != self._heard + 1:
                raise ValueError(f"packet {number} after {self._heard}")
            self._heard = number
            self._catching_up = False
            self._do(channel, kind, data)
        except (ValueError, KeyError) as error:
            self._lose(f"the sandbox is gone: its helper says what is not understood ({error})")
            return
        if self._heard - self._told >= _SAY_EVERY:
            self._told = self._heard
            self._say(0, packets.SEEN, packets.NUMBER.pack(self._heard), counted=False)

    def _do(self, number: int, kind: int, data: bytes) -> None:
        """Handle one packet. Raises ValueError or KeyError for one that our helper does not send."""
        if kind == packets.OPEN:
            if number in self._channels or len(self._channels) > _MOST_CHANNELS or len(data) != packets.NUMBER.size:
                raise ValueError(f"channel {number}")
            path = self.ports[packets.NUMBER.unpack(data)[0]]
            self._carry(number, lambda: asyncio.open_unix_connection(path))
            return
        channel = self._channels.get(number)
        if channel is None:
            return  # we dropped it, and the other side did not know yet
        if kind in (packets.DATA, packets.END):
            channel.waiting += len(data) or 1
            if channel.waiting > packets.WINDOW + 1:
                raise ValueError("more than it may say")
            channel.inbox.put_nowait(data if kind == packets.DATA else None)
        elif kind == packets.TOOK and len(data) == packets.NUMBER.size:
            channel.unseen -= packets.NUMBER.unpack(data)[0]
            if channel.unseen < 0:
                raise ValueError("more passed on than was said")
            channel.room.set()
        elif kind == packets.GONE:
            if channel.task is not None:
                channel.task.cancel()
        else:
            raise ValueError(f"kind {kind}")

    # ------------------------------------------------------------ channels

    def _carry(self, number: int, connect: Callable[[], Awaitable[Streams]]) -> None:
        self._channels[number] = channel = RemoteChannel()
        channel.task = self._begin(self._served(number, channel, connect))
        # not in `_served`, of which nothing runs if it is cancelled before it begins
        channel.task.add_done_callback(lambda _: self._channels.pop(number, None))

    async def _served(self, number: int, channel: RemoteChannel, connect: Callable[[], Awaitable[Streams]]) -> None:
        """Serve one channel from its beginning to its end."""
        try:
            reader, writer = await connect()
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._take(number, channel, reader))
                    both.create_task(self._pass_on(number, channel, writer))
            finally:
                writer.close()
        except* OSError:
            self._say(number, packets.GONE)
        if number == 0:
            self._lose("the sandbox is gone")

    async def _take(self, number: int, channel: RemoteChannel, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(min(packets.PART, packets.WINDOW - channel.unseen)):
            channel.unseen += len(data)
            self._say(number, packets.DATA, data)
            while channel.unseen >= packets.WINDOW:
                channel.room.clear()
                await channel.room.wait()
        self._say(number, packets.END)

    async def _pass_on(self, number: int, channel: RemoteChannel, writer: asyncio.StreamWriter) -> None:
        while (data := await channel.inbox.get()) is not None:
            writer.write(data)
            await writer.drain()
            channel.waiting -= len(data)
            self._say(number, packets.TOOK, packets.NUMBER.pack(len(data)))
        writer.write_eof()
