"""The gateway's listening socket, bound before any model is loaded and handed down to the worker that answers, so that it outlives it."""

from __future__ import annotations

import errno
import os
import socket

from ostinato.core.errors import BadConfig
from ostinato.launch.placing.heartbeat import LISTEN_FD

_BACKLOG = 512


def bind(host: str, port: int, remedy: str = "set listen.host and listen.port") -> socket.socket:
    """Open a listening socket; the port may be 0. Clients that connect before a worker answers wait.

    Raises BadConfig, with a message that ends with `remedy`, if the address is taken or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol must be named, or asyncio would leave Nagle's delay on
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        why = "another program listens there" if taken else error.strerror or str(error)
        raise BadConfig(f"cannot listen on {host}:{port}: {why}; {remedy}") from error
    return listener


def handed_down() -> socket.socket | None:
    """The socket that the supervisor bound for this worker, or None for a worker that was started by hand."""
    named = os.environ.pop(LISTEN_FD, None)  # not for programs that the worker starts
    if named is None:
        return None
    os.set_inheritable(int(named), False)
    return socket.socket(fileno=int(named))


def url_of(listener: socket.socket) -> str:
    """Example: "http://127.0.0.1:8321"."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
