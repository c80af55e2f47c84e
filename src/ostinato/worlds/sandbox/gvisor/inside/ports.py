"""Ports of the sandbox's loopback that the host answers: a connection is carried to a socket of the host's that lies in `/.box/ports`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import NoReturn

from place import PORTS


def open_port(port: int) -> socket.socket:
    """Listen. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            sink.sendall(part)
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def _serve(near: socket.socket, path: str) -> None:
    with near, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as far, contextlib.suppress(OSError):
        far.connect(path)
        back = threading.Thread(target=_carry, args=(far, near), daemon=True)
        back.start()
        _carry(near, far)
        back.join()


def serve_port(listener: socket.socket, port: int) -> NoReturn:
    """The rest of a fork's life: threads, and none of them in pid 1."""
    try:
        while True:
            near, _ = listener.accept()
            threading.Thread(target=_serve, args=(near, f"{PORTS}/{port}"), daemon=True).start()
    finally:
        os._exit(1)
