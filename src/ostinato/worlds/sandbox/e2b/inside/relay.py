"""The relay process in an E2B machine: unpacks the host's uploads, forks pid 1, and connects the host's streams to pid 1 and to ports.

Its stdin and stdout are the connection to the host. It keeps packets that the host has not acknowledged and retransmits them on request.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import signal
import socket
import tarfile
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NoReturn

from guest import Guest
from kernel import CLONE_NEWPID, PR_SET_PDEATHSIG, call
from packets import (
    AGAIN,
    DATA,
    END,
    GONE,
    LISTEN,
    NUMBER,
    OPEN,
    PART,
    REFUSED,
    SEEN,
    TOOK,
    WINDOW,
    Packets,
    encode_line,
)

MAX_CHANNELS = 256


@dataclass(slots=True)
class Channel:
    """One stream to a local socket.

    `unseen`: bytes sent to the host and not yet consumed there. `waiting`: bytes still to be written to the socket. `said_all`: the socket
    reached end of file. `heard_all`: the host ended the stream.
    """

    number: int
    end: socket.socket
    unseen: int = 0
    waiting: bytearray = field(default_factory=bytearray)
    said_all: bool = False
    heard_all: bool = False


class Relay:
    """The multiplexer. Serves until the host disconnects or pid 1 ends. `ports` is the directory of the sockets that pid 1 connects to."""

    def __init__(self, pid_one: socket.socket, ports: str) -> None:
        self._ports = ports
        self._selector = selectors.DefaultSelector()
        self._inbox = Packets()
        self._received = 0
        self._number = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()  # sent packets that the host has not acknowledged
        self._lines: deque[bytes] = deque()  # encoded packets still to be written
        self._at = 0  # bytes of the first line that are already written
        self._last_channel = 0
        self._channels = {0: Channel(0, pid_one)}
        pid_one.setblocking(False)
        for fd in (0, 1):
            os.set_blocking(fd, False)
        self._selector.register(0, selectors.EVENT_READ, self._receive)
        self._selector.register(pid_one, selectors.EVENT_READ, lambda: self._pump(self._channels[0]))

    def run(self) -> NoReturn:
        """Serve until one side is gone."""
        while True:
            for key, _ in self._selector.select():
                key.data()

    # ------------------------------------------------------------ packets

    def _send(self, channel: int, kind: int, data: bytes = b"") -> None:
        self._number += 1
        line = encode_line(self._number, channel, kind, data)
        self._unacknowledged.append((self._number, line))
        if not self._lines:
            self._selector.register(1, selectors.EVENT_WRITE, self._write)
        self._lines.append(line)

    def _write(self) -> None:
        try:
            while self._lines:
                self._at += os.write(1, self._lines[0][self._at :])
                if self._at == len(self._lines[0]):
                    self._lines.popleft()
                    self._at = 0
        except BlockingIOError:
            return
        self._selector.unregister(1)

    def _retransmit(self, number: int) -> None:
        """Retransmit the packets after a number. A partly written line is completed first."""
        half = [self._lines[0]] if self._at else []
        had = bool(self._lines)
        self._drop_acknowledged(number)
        self._lines = deque([*half, *(line for _, line in self._unacknowledged)])
        if had and not self._lines:
            self._selector.unregister(1)
        elif self._lines and not had:
            self._selector.register(1, selectors.EVENT_WRITE, self._write)

    def _drop_acknowledged(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(0, 1 << 20)
            if not part:
                os._exit(0)
            for number, channel, kind, data in self._inbox.feed(part):
                if number and number <= self._received:
                    continue  # a duplicate
                self._received = max(self._received, number)
                self._do(channel, kind, data)

    def _do(self, number: int, kind: int, data: bytes) -> None:
        if kind == AGAIN:
            self._retransmit(NUMBER.unpack(data)[0])
        elif kind == SEEN:
            self._drop_acknowledged(NUMBER.unpack(data)[0])
        elif kind == LISTEN:
            self._listen(NUMBER.unpack(data)[0])
        elif (channel := self._channels.get(number)) is None:
            return
        elif kind == GONE:
            self._drop(channel)
        elif kind == TOOK:
            channel.unseen -= NUMBER.unpack(data)[0]
            self._watch(channel)
        else:
            channel.waiting += data
            channel.heard_all = channel.heard_all or kind == END
            self._pump(channel)

    # ------------------------------------------------------------ channels

    def _listen(self, port: int) -> None:
        path = f"{self._ports}/{port}"
        if os.path.exists(path):
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(128)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener, port))

    def _accept(self, listener: socket.socket, port: int) -> None:
        try:
            end, _ = listener.accept()
        except OSError:
            return
        if len(self._channels) > MAX_CHANNELS:
            end.close()
            return
        end.setblocking(False)
        self._last_channel += 1
        self._channels[self._last_channel] = channel = Channel(self._last_channel, end)
        self._selector.register(end, selectors.EVENT_READ, lambda: self._pump(channel))
        self._send(channel.number, OPEN, NUMBER.pack(port))

    def _pump(self, channel: Channel) -> None:
        """Move as many bytes of one channel as possible without blocking, in both directions."""
        try:
            self._write_local(channel)
            self._read_local(channel)
        except BlockingIOError:
            pass
        except OSError:
            self._send(channel.number, GONE)
            self._drop(channel)
            return
        self._watch(channel)

    def _write_local(self, channel: Channel) -> None:
        if channel.waiting:
            try:
                sent = channel.end.send(channel.waiting)
            except BlockingIOError:
                return
            del channel.waiting[:sent]
            self._send(channel.number, TOOK, NUMBER.pack(sent))
        if channel.heard_all and not channel.waiting:
            channel.end.shutdown(socket.SHUT_WR)

    def _read_local(self, channel: Channel) -> None:
        if channel.said_all or channel.unseen >= WINDOW:
            return
        part = channel.end.recv(min(PART, WINDOW - channel.unseen))
        channel.said_all = not part
        channel.unseen += len(part)
        self._send(channel.number, DATA if part else END, part)

    def _watch(self, channel: Channel) -> None:
        """Register for the events that the channel still needs, and drop it once it is finished."""
        if channel.number not in self._channels:
            return
        if channel.said_all and (channel.heard_all or not channel.number) and not channel.waiting:
            self._drop(channel)
            return
        events = 0 if channel.said_all or channel.unseen >= WINDOW else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if channel.waiting else 0
        registered = channel.end in self._selector.get_map()
        if registered and not events:
            self._selector.unregister(channel.end)
        elif registered:
            self._selector.modify(channel.end, events, lambda: self._pump(channel))
        elif events:
            self._selector.register(channel.end, events, lambda: self._pump(channel))

    def _drop(self, channel: Channel) -> None:
        if channel.number == 0:
            self._exit()
        del self._channels[channel.number]
        if channel.end in self._selector.get_map():
            self._selector.unregister(channel.end)
        channel.end.close()

    def _exit(self) -> NoReturn:
        """Write the remaining lines and exit, after pid 1 has ended."""
        os.set_blocking(1, True)
        if self._lines:
            self._write()
        os._exit(0)


# ---------------------------------------------------------------- the start


class PartFiles(io.RawIOBase):
    """A stream that concatenates the files `part.0`, `part.1`, ... of a directory. Each is removed as it is opened."""

    def __init__(self, place: str) -> None:
        self._place, self._next = place, 0
        self._file: io.FileIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            if self._file is None:
                try:
                    self._file = io.FileIO(f"{self._place}/part.{self._next}")
                except FileNotFoundError:
                    return 0
                os.unlink(f"{self._place}/part.{self._next}")
                self._next += 1
            if count := self._file.readinto(buffer):
                return count
            self._file.close()
            self._file = None


def unpack(place: str) -> None:
    """Extract the uploaded archive into `place`. Raises OSError, TarError."""
    os.umask(0o022)
    os.chmod(place, 0o700)
    for name in ("layers", "mounts", "ports"):
        os.mkdir(f"{place}/{name}")
    if not os.path.exists(f"{place}/part.0"):
        return
    with tarfile.open(
        fileobj=io.BufferedReader(PartFiles(place), 1 << 20), mode="r|gz", encoding="utf-8", errors="surrogateescape"
    ) as tar:
        tar.extraction_filter = lambda member, path: member  # trusted: our host made the archive
        tar.extractall(place, numeric_owner=True)


def _refuse(why: str) -> NoReturn:
    os.write(1, f"{REFUSED}{why}\n".encode("utf-8", "replace"))
    os._exit(3)


def main(place: str) -> NoReturn:
    """Unpack the uploaded archive, fork pid 1 and run the relay. Never returns."""
    try:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("-900")
        unpack(place)
    except (OSError, tarfile.TarError) as error:
        _refuse(f"the layers, mounts and files cannot be unpacked: {error}")
    theirs, ours = socket.socketpair()
    try:
        call("unshare", CLONE_NEWPID)
    except OSError as error:
        _refuse(f"the helper may not create a namespace ({error.strerror}): it must be started as root")
    if os.fork() == 0:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            theirs.close()
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1):
                os.dup2(null, fd)
            Guest(ours, place).run()
        except BaseException:  # noqa: BLE001 - the host reads it if the sandbox did not start
            traceback.print_exc()
        finally:
            os._exit(1)
    ours.close()
    try:
        Relay(theirs, f"{place}/ports").run()
    finally:
        os._exit(1)
