"""The egress proxy: an HTTP CONNECT proxy, the only way out of a sandbox that may reach listed hosts.

A box has no network except its loopback. Its pid 1 opens the proxy's port there and passes the listening socket to the host, so nothing in
the box can impersonate the proxy. The proxy resolves names itself: it allows names and ports exactly as listed, and never an address that a
program chose. It also refuses the addresses in `METADATA` whatever name resolves to them, since the list may come from a third party.
`OpenSandboxes` gives each sandbox its proxy and limits how many are open at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, Protocol, TypeVar

from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.sandbox.spec_validation import ENVIRONMENT

PROXY_PORT = 3128
_HEAD_BYTES = 8192
_HEAD_S = 10.0
MAX_CONNECTIONS = 128
"""Most concurrent connections per sandbox; further ones are closed. Each takes two of the host's descriptors, which all sandboxes share."""
_REQUEST = re.compile(rb"CONNECT (\S+) HTTP/1\.[01]\r\n")
METADATA = tuple(map(ipaddress.ip_network, (
    "169.254.0.0/16", "fe80::/10",  # most clouds
    "fd00:ec2::254", "fd00:ec2::23",  # Amazon, and the identities of its pods
    "100.100.100.200", "168.63.129.16",  # Alibaba; Azure
    "fd20:ce::254", "fd00:c1::a9fe:a9fe",  # Google and Oracle, by IPv6
)))  # fmt: skip
"""Addresses of cloud metadata services, which hand out the machine's credentials."""


_VARIABLES = dict.fromkeys(
    ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
    f"http://127.0.0.1:{PROXY_PORT}",
) | {"NO_PROXY": "localhost,127.0.0.1", "no_proxy": "localhost,127.0.0.1"}


def environment_of(spec: SandboxSpec) -> dict[str, str]:
    """Return the environment variables of a box's programs, without those that a single call adds."""
    return ENVIRONMENT | (_VARIABLES if spec.hosts else {}) | dict(spec.env)


class Proxy:
    """The egress proxy of one box."""

    def __init__(self, listener: socket.socket, hosts: Collection[str]) -> None:
        self._listener = listener
        self._hosts = frozenset(host.lower() for host in hosts)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start accepting connections."""
        self._listener.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=self._listener, limit=_HEAD_BYTES)

    def close(self) -> None:
        """Stop serving and end every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._listener.close()  # in case `start` was never called
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        request = _REQUEST.match(head)
        target = request[1].decode("ascii", "replace").lower() if request else ""
        if target not in self._hosts:
            await _forbid(writer, f"this sandbox may reach {', '.join(sorted(self._hosts))}, by CONNECT")
            return
        name, _, port = target.rpartition(":")
        try:
            async with asyncio.timeout(_HEAD_S):
                far_reader, far_writer = await asyncio.open_connection(name.strip("[]"), int(port))
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return
        try:
            if (peer := far_writer.get_extra_info("peername")) is None:
                return  # the far end has closed the connection already
            if _is_metadata_service(peer[0]):
                await _forbid(writer, f"{name} leads to a cloud's metadata service, which no sandbox may reach")
                return
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            far_writer.close()


async def _forbid(writer: asyncio.StreamWriter, why: str) -> None:
    body = f"{why}\n".encode()
    writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
    await writer.drain()


def _is_metadata_service(peer: str) -> bool:
    """Return True for an address in `METADATA`. Checked on the open connection, since a name may resolve differently the next time."""
    address = ipaddress.ip_address(peer)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((mapped or address) in network for network in METADATA)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


# ---------------------------------------------------------------- open sandboxes


class ProxiedSandbox(Protocol):
    """The part of a sandbox that `OpenSandboxes` uses."""

    on_stop: list[Callable[[], object]]
    """Callbacks, each called once when the sandbox has ended."""

    async def listen(self, port: int) -> socket.socket:
        """Return a listening socket for a port of the sandbox's loopback."""
        ...

    async def stop(self) -> None:
        """End the sandbox. Idempotent."""
        ...


B = TypeVar("B", bound=ProxiedSandbox)


class OpenSandboxes(Generic[B]):
    """The open sandboxes of one backend, at most `count` at once. Further starts wait."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._open: set[B] = set()

    async def start(self, launch: Callable[[], Awaitable[B]], hosts: Collection[str]) -> B:
        """Wait for a free slot, call `launch`, and start a proxy to `hosts` if there are any. An error frees the slot.

        Raises what `launch` and the sandbox's `listen` raise.
        """
        await self._free.acquire()
        try:
            box = await launch()
        except BaseException:
            self._free.release()
            raise
        self._open.add(box)
        box.on_stop += [self._free.release, lambda: self._open.discard(box)]
        try:
            if hosts:
                proxy = Proxy(await box.listen(PROXY_PORT), hosts)
                box.on_stop.append(proxy.close)
                await proxy.start()
        except BaseException:
            await box.stop()
            raise
        return box

    async def close(self) -> None:
        """Stop all open sandboxes."""
        await asyncio.gather(*(box.stop() for box in list(self._open)))
