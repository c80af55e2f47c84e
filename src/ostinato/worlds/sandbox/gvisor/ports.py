"""Ports of a sandbox's loopback that the host serves: for each connection, a connected socket is passed into the sandbox.

So no socket of the host needs a name inside, and the sandbox can be forbidden to connect to any that happens to be visible there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from ostinato.worlds.sandbox.gvisor.inside.ports import CONNECTED, REFUSED


class Ports:
    """The host's end. `theirs` becomes the sandbox's descriptor 1; call `sent` once it has.

    Args:
        place: a private directory of the host for the sockets' names.

    Example::

        listener = ports.open(8000)          # then have the sandbox's pid 1 take it up
        server = await asyncio.start_server(answer, sock=listener)
    """

    def __init__(self, place: Path) -> None:
        self._place = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._open: dict[int, Callable[[], None]] = {}

    def sent(self) -> None:
        """Close our copy of the sandbox's end."""
        self.theirs.close()

    def open(self, port: int) -> socket.socket:
        """Make a listener and send pid 1 a line for the port. Pid 1 must be told of the port before the next is opened.

        Raises OSError.
        """
        name = f"/proc/self/fd/{self._place}/{port}"  # a socket's path has at most 107 bytes
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = socket.socketpair()
        try:
            listener.bind(name)
            listener.listen(128)
            for each in (listener, ours):
                each.setblocking(False)
            socket.send_fds(self._ours, [CONNECTED], [theirs.fileno()])
        except OSError:
            listener.close()
            ours.close()
            raise
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()

        def close() -> None:
            loop.remove_reader(ours)
            ours.close()
            with contextlib.suppress(OSError):
                os.unlink(name)

        loop.add_reader(ours, lambda: _connect(ours, name) or self.close_port(port))
        self._open[port] = close
        return listener

    def close_port(self, port: int) -> None:
        """Accept no more connections to a port. Idempotent."""
        if (close := self._open.pop(port, None)) is not None:
            close()

    def close(self) -> None:
        """Close all ports. Idempotent."""
        for port in list(self._open):
            self.close_port(port)
        for end in (self._ours, self.theirs):
            end.close()
        if self._place >= 0:
            os.close(self._place)
            self._place = -1


def _connect(line: socket.socket, name: str) -> bool:
    """Answer the sandbox's request for one more connection. False once the sandbox is gone."""
    try:
        if not line.recv(1):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
            made.setblocking(False)  # also refused if too many are waiting
            try:
                made.connect(name)
            except OSError:
                line.send(REFUSED)
            else:
                made.setblocking(True)  # the sandbox gets the socket in the mode it has here
                socket.send_fds(line, [CONNECTED], [made.fileno()])
    except BlockingIOError:
        return True  # there was no request after all
    except OSError:
        return False
    return True
