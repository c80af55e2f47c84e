"""The way out of a sandbox: where it leads, whatever the list of hosts says."""

import asyncio
import socket

import pytest

from ostinato.worlds.sandbox import proxy
from ostinato.worlds.sandbox.proxy import Proxy


async def asked(port: int, host: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"CONNECT {host} HTTP/1.1\r\n\r\n".encode())
    said = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return said


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("127.0.0.1", True),
        ("10.0.0.7", True),
        ("2001:db8::1", True),
        ("169.254.169.254", False),
        ("::ffff:169.254.169.254", False),
        ("fe80::a9fe:a9fe%eth0", False),
        ("fd00:ec2::254", False),
        ("fd00:ec2::23", False),
        ("fd00:ec2::1", True),
        ("100.100.100.200", False),
        ("100.100.100.201", True),
        ("168.63.129.16", False),
        ("fd20:ce::254", False),
        ("fd00:c1::a9fe:a9fe", False),
        (None, None),
    ],
)
async def test_no_name_leads_to_a_known_address_of_a_clouds_metadata(monkeypatch, caplog, address, reached):
    left = asyncio.Event()

    async def far(reader, writer):
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    class Peer:
        """The far end of a connection, which has this address; None once it has ended the connection."""

        def __init__(self, writer):
            self._writer = writer

        def get_extra_info(self, name):
            return address and (address, 80)

        def __getattr__(self, name):
            return getattr(self._writer, name)

    open_connection = asyncio.open_connection

    async def resolved(host, port):
        if host != "harmless.example":
            return await open_connection(host, port)
        reader, writer = await open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        return reader, Peer(writer)

    monkeypatch.setattr(proxy.asyncio, "open_connection", resolved)
    async with await asyncio.start_server(far, "127.0.0.1", 0) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        way_out = Proxy(listener, ["harmless.example:80"])
        await way_out.start()
        told = {True: b"HTTP/1.1 200 Connection established\r\n", False: b"HTTP/1.1 403 Forbidden\r\n", None: b""}
        assert await asked(port, "harmless.example:80") == told[reached]
        await left.wait()
        assert "Unhandled exception" not in caplog.text
        way_out.close()
