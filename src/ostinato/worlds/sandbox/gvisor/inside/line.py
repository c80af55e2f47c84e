"""The sandbox's end of its connections to the host: message framing (a JSON object followed by bytes), and port forwarding.

Each forwarded port has its own socket to the host, over which the host passes in one connected socket per connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NoReturn

# ---------------------------------------------------------------- messages


HEAD = struct.Struct("<IQ")  # length of the object, length of the bytes after it
MAX_OBJECT = 1 << 20

Frame = tuple[dict[str, Any], bytes]


def pack(message: Mapping[str, Any], data: bytes | bytearray = b"") -> bytes:
    """Encode one message."""
    text = json.dumps(message).encode()
    return HEAD.pack(len(text), len(data)) + text + data


class Unpacker:
    """Incremental decoder: assembles whole messages from bytes that arrive in parts of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> Iterator[Frame]:
        """Yield the messages that these bytes complete."""
        self._rest += part
        while len(self._rest) >= HEAD.size:
            first, second = HEAD.unpack_from(self._rest)
            middle, end = HEAD.size + first, HEAD.size + first + second
            if len(self._rest) < end:
                return
            message, data = json.loads(bytes(self._rest[HEAD.size : middle])), bytes(self._rest[middle:end])
            del self._rest[:end]
            yield message, data


# ---------------------------------------------------------------- ports


CONNECTED, REFUSED = b"c", b"n"
# concurrent connections per port; more wait, or evict a connection whose program has finished sending
_MAX_CONNECTIONS = 64
_PAUSE_S = 0.1  # pause after a connection that failed
_EVICTION_POLL_S = 0.05  # interval between checks for a connection that can be evicted


def open_port(port: int) -> socket.socket:
    """Listen on a port of the loopback. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def receive_port_socket(ports: socket.socket) -> socket.socket:
    """Receive the host's socket for the port that is opened next. Raises OSError."""
    _, fds, _, _ = socket.recv_fds(ports, 1, 1)
    if not fds:
        raise ConnectionError("the host sent no socket for the port")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fds[0])


def _copy_stream(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            sink.sendall(part)
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


class _ConnectionSlots:
    """A semaphore for a port's concurrent connections, with eviction of half-closed ones."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        self._evictable = list[socket.socket]()
        self.release = self._free.release

    def acquire(self) -> None:
        """Wait for a free slot; evict the oldest half-closed connection if there is none."""
        while not self._free.acquire(timeout=_EVICTION_POLL_S if not self._evictable else 0):
            if self._evictable:
                with contextlib.suppress(OSError, IndexError):  # it may have ended meanwhile
                    self._evictable.pop(0).shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def evictable(self, far: socket.socket) -> Generator[None]:
        """Allow eviction of a connection while only the host can still send on it."""
        self._evictable.append(far)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                self._evictable.remove(far)


def _both_ways(near: socket.socket, far: socket.socket, slots: _ConnectionSlots) -> None:
    try:
        back = threading.Thread(target=_copy_stream, args=(far, near), daemon=True)
        back.start()
        _copy_stream(near, far)
        with slots.evictable(far):
            back.join()
    except RuntimeError:
        pass  # no thread could be started: the program sees its connection end
    finally:
        near.close()
        far.close()
        slots.release()


def request_socket(line: socket.socket) -> socket.socket | None:
    """Request a connected socket from the host. Return None if nobody listens. Raises OSError."""
    line.sendall(CONNECTED)
    answer, fds, _, _ = socket.recv_fds(line, 1, 1)
    if not answer:
        os._exit(0)  # the host closed the port
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fds[0]) if fds else None


def _serve(listener: socket.socket, reach: Callable[[], socket.socket | None], slots: _ConnectionSlots) -> None:
    """Accept and serve one connection. Raises OSError, RuntimeError."""
    slots.acquire()
    ends = list[socket.socket]()
    try:
        ends.append(listener.accept()[0])
        if (far := reach()) is None:
            raise ConnectionRefusedError
        ends.append(far)
        threading.Thread(target=_both_ways, args=(*ends, slots), daemon=True).start()
    except BaseException:
        for end in ends:
            end.close()
        slots.release()
        raise


def serve_port(listener: socket.socket, reach: Callable[[], socket.socket | None]) -> NoReturn:
    """Serve a port with threads for the rest of this process's life. Call it in a fork, since pid 1 must stay single-threaded.

    `reach` returns the other end of a connection, or None if nobody listens. A failure costs one connection only.
    """
    slots = _ConnectionSlots()
    try:
        while True:
            try:
                _serve(listener, reach, slots)
            except ConnectionRefusedError:
                continue
            except (OSError, RuntimeError):
                time.sleep(_PAUSE_S)
    finally:
        os._exit(1)
