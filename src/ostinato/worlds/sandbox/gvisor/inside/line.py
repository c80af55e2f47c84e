"""The sandbox's end of its lines to the host: messages, JSON objects followed by bytes; and the ports that the host serves.

For each connection to a port the host passes in a connected socket, over the port's own line.
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
MOST_OBJECT = 1 << 20

Frame = tuple[dict[str, Any], bytes]


def pack(told: Mapping[str, Any], data: bytes | bytearray = b"") -> bytes:
    """Encode one message."""
    text = json.dumps(told).encode()
    return HEAD.pack(len(text), len(data)) + text + data


class Unpacker:
    """Assembles whole messages from bytes that arrive in parts of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> Iterator[Frame]:
        """The messages that these bytes complete."""
        self._rest += part
        while len(self._rest) >= HEAD.size:
            first, second = HEAD.unpack_from(self._rest)
            middle, end = HEAD.size + first, HEAD.size + first + second
            if len(self._rest) < end:
                return
            told, data = json.loads(bytes(self._rest[HEAD.size : middle])), bytes(self._rest[middle:end])
            del self._rest[:end]
            yield told, data


# ---------------------------------------------------------------- ports


CONNECTED, REFUSED = b"c", b"n"
_MOST = 64  # concurrent connections of a port; more wait, or replace a connection whose program has finished sending
_PAUSE_S = 0.1  # after a connection that failed
_TURN_S = 0.05  # between two checks for a connection that could give way


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


def take_line(ports: socket.socket) -> socket.socket:
    """The line of the port that the host announces next. Raises OSError."""
    _, fds, _, _ = socket.recv_fds(ports, 1, 1)
    if not fds:
        raise ConnectionError("no line came for the port")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fds[0])


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            sink.sendall(part)
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


class _Turns:
    """Limits the number of concurrent connections."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(_MOST)
        self._giving_way = list[socket.socket]()
        self.release = self._free.release

    def acquire(self) -> None:
        """Wait for a free place, ending a connection that may give way."""
        while not self._free.acquire(timeout=_TURN_S if not self._giving_way else 0):
            if self._giving_way:
                with contextlib.suppress(OSError):
                    self._giving_way.pop(0).shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def giving_way(self, far: socket.socket) -> Generator[None]:
        """While only the host can still send, the connection may be ended in favour of another."""
        self._giving_way.append(far)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                self._giving_way.remove(far)


def _both_ways(near: socket.socket, far: socket.socket, turns: _Turns) -> None:
    try:
        back = threading.Thread(target=_carry, args=(far, near), daemon=True)
        back.start()
        _carry(near, far)
        with turns.giving_way(far):
            back.join()
    except RuntimeError:
        pass  # no thread to be had: the program sees its connection end
    finally:
        near.close()
        far.close()
        turns.release()


def asked_for(line: socket.socket) -> socket.socket | None:
    """Ask the host for a connected socket. None if nobody listens. Raises OSError."""
    line.sendall(CONNECTED)
    said, fds, _, _ = socket.recv_fds(line, 1, 1)
    if not said:
        os._exit(0)  # the host closed the port
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fds[0]) if fds else None


def _serve(listener: socket.socket, reach: Callable[[], socket.socket | None], turns: _Turns) -> None:
    """Accept and serve one connection. Raises OSError, RuntimeError."""
    turns.acquire()
    ends = list[socket.socket]()
    try:
        ends.append(listener.accept()[0])
        if (far := reach()) is None:
            raise ConnectionRefusedError
        ends.append(far)
        threading.Thread(target=_both_ways, args=(*ends, turns), daemon=True).start()
    except BaseException:
        for end in ends:
            end.close()
        turns.release()
        raise


def serve_port(listener: socket.socket, reach: Callable[[], socket.socket | None]) -> NoReturn:
    """Serve a port for the rest of a fork's life, in threads, of which pid 1 must have none. `reach` returns the other end of a connection,
    or None if nobody listens. A failure costs one connection only.
    """
    turns = _Turns()
    try:
        while True:
            try:
                _serve(listener, reach, turns)
            except ConnectionRefusedError:
                continue
            except (OSError, RuntimeError):
                time.sleep(_PAUSE_S)
    finally:
        os._exit(1)
