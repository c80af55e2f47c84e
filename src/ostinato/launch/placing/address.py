"""The gateway's address: the file with its URL, and its listening socket.

The file also names the process that wrote it, so that a stale file is ignored. The supervisor binds the socket before any model is loaded
and hands it down to the serving worker, so that it survives the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import urllib.parse
from pathlib import Path

from ostinato.core.errors import BadConfig
from ostinato.core.files import write_atomic
from ostinato.launch.placing.heartbeat import LISTEN_FD
from ostinato.run_directory import Home
from ostinato.status.gateway_address import process_mark, read_address

_ANY = {"0.0.0.0", "::", "[::]"}


def write_address(path: Path, url: str) -> None:
    """Record that this process serves at `url`. The file is written atomically."""
    write_atomic(path, f"{url}\n{process_mark(os.getpid())}\n", durable=False)


def reachable(url: str, node: str) -> str:
    """Return the URL by which other machines reach a gateway on `node`: a wildcard address is replaced by the node's own.

    Example: ``reachable("http://0.0.0.0:8321", "10.0.0.7") == "http://10.0.0.7:8321"``
    """
    parts = urllib.parse.urlsplit(url)
    host = f"[{node}]" if ":" in node else node
    return f"{parts.scheme}://{host}:{parts.port}" if parts.hostname in _ANY and node else url


async def await_gateway(place: Home) -> str:
    """Wait until the run's gateway listens, and return its URL."""
    while (url := read_address(place.address)) is None:
        await asyncio.sleep(0.2)
    return url


def remove_address(path: Path) -> None:
    """Remove the file, once nobody serves there any more."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------- listening sockets


_BACKLOG = 512


def bind(host: str, port: int, remedy: str = "set listen.host and listen.port") -> socket.socket:
    """Open a listening socket; port 0 lets the system choose. Clients that connect before a worker accepts wait in its backlog.

    Raises BadConfig, with a message that ends with `remedy`, if the address is in use or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is named
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
    """Return the socket that the supervisor bound for this worker; None for a worker that was started by hand."""
    named = os.environ.pop(LISTEN_FD, None)  # subprocesses must not see it
    if named is None:
        return None
    os.set_inheritable(int(named), False)
    return socket.socket(fileno=int(named))


def url_of(listener: socket.socket) -> str:
    """Return a listening socket's URL. Example: "http://127.0.0.1:8321"."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
