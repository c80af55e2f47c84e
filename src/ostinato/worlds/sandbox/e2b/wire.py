"""The host's end of the connection to a machine: byte streams multiplexed over stdin and stdout of the helper command.

If the connection breaks, it resumes: each side retransmits packets that the other did not receive, and drops duplicates by their sequence
number. So every packet is handled exactly once.
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
from ostinato.worlds.sandbox.e2b.account import HelperOutput, Machine, MachineGone
from ostinato.worlds.sandbox.e2b.inside import packets

_BATCH = 256 << 10
_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 4.0)  # back-off before each attempt to send or to reconnect
_STABLE_S = 5.0  # connections shorter than this make the reconnect back-off grow; it is also the longest back-off
_EXIT_REPORT_S = 0.5
_ACK_EVERY = 64  # packets received per acknowledgement
_MAX_CHANNELS = 256
_STDERR_CHARACTERS = 1500


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class RemoteChannel:
    """One stream between the machine and a local socket.

    `unseen`: bytes sent that the machine has not consumed. `waiting`: bytes received and not yet written to the socket.
    """

    unseen: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)
    inbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue[bytes | None])
    waiting: int = 0
    task: asyncio.Task[None] | None = None


class Wire:
    """The multiplexed connection, open until `close`. `lost` is called once with the reason if the connection cannot continue.

    `ports` maps a port of the machine to the path of the local socket to which its connections are forwarded.
    """

    def __init__(self, machine: Machine, lost: Callable[[str], None]) -> None:
        self._machine, self._lost = machine, lost
        self.ports: dict[int, str] = {}
        self._channels: dict[int, RemoteChannel] = {}
        self._out: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._numbers = itertools.count(1)
        self._received = self._acknowledged = 0
        self._text = self._stderr = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._helper: HelperOutput | None = None
        self._open = True
        self._catching_up = False  # packets were lost with the connection and will be retransmitted

    async def open(self, command: str, first: socket.socket) -> None:
        """Start the helper command and connect channel 0 to the socket `first`, which this object then owns. Raises Unavailable."""
        self._carry(0, lambda: asyncio.open_connection(sock=first))
        await asyncio.sleep(0)  # let the channel take over the socket before anything can fail
        self._helper = await self._machine.run(command, self._on_stdout, self._on_stderr)
        self._begin(self._send())
        self._begin(self._follow())

    def listen(self, port: int, path: str) -> None:
        """Forward connections to a port of the machine to the local socket at `path`."""
        self.ports[port] = path
        self._queue(0, packets.LISTEN, packets.NUMBER.pack(port))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._open = False
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all tasks of the connection have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._helper is not None:
            await self._helper.leave()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _fail(self, why: str) -> None:
        if self._open:
            self.close()
            self._lost(why)

    # ------------------------------------------------------------ sending

    def _queue(self, channel: int, kind: int, data: bytes = b"", *, counted: bool = True) -> None:
        self._out.append(packets.encode_bytes(next(self._numbers) if counted else 0, channel, kind, data))
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
                await self._retry(lambda batch=bytes(batch): self._machine.send(batch))
            except OstinatoError as error:
                # if the helper has ended, `_follow` reports its exit code and stderr, which says more
                await asyncio.sleep(_EXIT_REPORT_S)
                self._fail(str(error))
                return

    async def _retry(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Retry with back-off. Duplicates are harmless: packets are recognised by their number. Raises Unavailable, BadConfig."""
        failed = Unavailable("E2B was not asked")
        for pause in _BACKOFF_S:
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
        while self._helper is not None:
            try:
                code = await self._helper.ended()
            except MachineGone as error:
                self._fail(str(error))
                return
            except OstinatoError:
                now = asyncio.get_running_loop().time()
                short = short + 1 if now - begun < _STABLE_S else 0
                await asyncio.sleep(min(_STABLE_S, 0.05 * 2 ** min(short, 10)))
                await self._reconnect()
                begun = asyncio.get_running_loop().time()
                continue
            self._fail(
                f"the sandbox is gone: its helper ended with {code}: {self._stderr.strip() or 'it said nothing'}"
            )
            return

    async def _reconnect(self) -> None:
        try:
            self._text, self._catching_up = "", True
            self._helper = await self._retry(lambda: self._machine.follow(self._on_stdout, self._on_stderr))
        except OstinatoError as error:
            self._helper = None
            self._fail(f"the connection to the sandbox broke: {error}")
            return
        self._queue(0, packets.AGAIN, packets.NUMBER.pack(self._received), counted=False)

    def _on_stderr(self, text: str) -> None:
        self._stderr = (self._stderr + text)[-_STDERR_CHARACTERS:]

    def _on_stdout(self, text: str) -> None:
        """Handle output of the helper. Lines without our mark come from a login shell and are ignored."""
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            if not self._open:
                return
            if line.startswith(packets.REFUSED) and not self._received:
                self._on_stderr(line[1:])
            elif line.startswith(packets.MARK):
                self._read(line[1:])
        if len(self._text) > packets.MAX_LINE:
            self._fail("the sandbox is gone: its helper sent an invalid packet")

    def _read(self, line: str) -> None:
        try:
            number, channel, kind, data = packets.decode_line(line)
            if 0 < number <= self._received or (number > self._received + 1 and self._catching_up):
                return  # a duplicate, or a packet that will be retransmitted
            if number != self._received + 1:
                raise ValueError(f"packet {number} after {self._received}")
            self._received = number
            self._catching_up = False
            self._do(channel, kind, data)
        except (ValueError, KeyError) as error:
            self._fail(f"the sandbox is gone: its helper sent an invalid packet ({error})")
            return
        if self._received - self._acknowledged >= _ACK_EVERY:
            self._acknowledged = self._received
            self._queue(0, packets.SEEN, packets.NUMBER.pack(self._received), counted=False)

    def _do(self, number: int, kind: int, data: bytes) -> None:
        """Handle one packet. Raises ValueError or KeyError for one that our helper does not send."""
        if kind == packets.OPEN:
            if number in self._channels or len(self._channels) > _MAX_CHANNELS or len(data) != packets.NUMBER.size:
                raise ValueError(f"channel {number}")
            path = self.ports[packets.NUMBER.unpack(data)[0]]
            self._carry(number, lambda: asyncio.open_unix_connection(path))
            return
        channel = self._channels.get(number)
        if channel is None:
            return  # already dropped here; the machine does not know yet
        if kind in (packets.DATA, packets.END):
            channel.waiting += len(data) or 1
            if channel.waiting > packets.WINDOW + 1:
                raise ValueError("more bytes than the flow-control window")
            channel.inbox.put_nowait(data if kind == packets.DATA else None)
        elif kind == packets.TOOK and len(data) == packets.NUMBER.size:
            channel.unseen -= packets.NUMBER.unpack(data)[0]
            if channel.unseen < 0:
                raise ValueError("more bytes consumed than sent")
            channel.room.set()
        elif kind == packets.GONE:
            if channel.task is not None:
                channel.task.cancel()
        else:
            raise ValueError(f"kind {kind}")

    # ------------------------------------------------------------ channels

    def _carry(self, number: int, connect: Callable[[], Awaitable[Streams]]) -> None:
        self._channels[number] = channel = RemoteChannel()
        channel.task = self._begin(self._serve_channel(number, channel, connect))
        # not in `_serve_channel`, which does not run at all if it is cancelled before it starts
        channel.task.add_done_callback(lambda _: self._channels.pop(number, None))

    async def _serve_channel(
        self, number: int, channel: RemoteChannel, connect: Callable[[], Awaitable[Streams]]
    ) -> None:
        """Serve one channel from its beginning to its end."""
        try:
            reader, writer = await connect()
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._read_local(number, channel, reader))
                    both.create_task(self._write_local(number, channel, writer))
            finally:
                writer.close()
        except* OSError:
            self._queue(number, packets.GONE)
        if number == 0:
            self._fail("the sandbox is gone")

    async def _read_local(self, number: int, channel: RemoteChannel, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(min(packets.PART, packets.WINDOW - channel.unseen)):
            channel.unseen += len(data)
            self._queue(number, packets.DATA, data)
            while channel.unseen >= packets.WINDOW:
                channel.room.clear()
                await channel.room.wait()
        self._queue(number, packets.END)

    async def _write_local(self, number: int, channel: RemoteChannel, writer: asyncio.StreamWriter) -> None:
        while (data := await channel.inbox.get()) is not None:
            writer.write(data)
            await writer.drain()
            channel.waiting -= len(data)
            self._queue(number, packets.TOOK, packets.NUMBER.pack(len(data)))
        writer.write_eof()
