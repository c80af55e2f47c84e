"""The protocol between the host and a remote sandbox: byte streams (channels) multiplexed over one resumable connection.

Packets go to the sandbox as bytes and come back as base64 lines, since E2B delivers a command's output as text. Packets have consecutive
sequence numbers, so that a retransmitted one is recognised. Control packets of the connection itself have number 0.

Channel 0 leads to pid 1; every other channel is a connection to a port. Flow control pauses a channel at `WINDOW` bytes in flight.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

HEAD = struct.Struct("<QIB")  # number, channel, kind
LENGTH = struct.Struct("<I")
NUMBER = struct.Struct("<Q")
OPEN, DATA, END, GONE, TOOK, LISTEN, SEEN, AGAIN = range(8)
"""Kinds of packet. Of a channel: new connection (to a port), data, end of stream, reset, bytes consumed. LISTEN: accept connections to a
port. Control packets: SEEN acknowledges all packets up to a number, AGAIN requests retransmission of all packets after it."""

PART = 48 << 10  # most bytes of one DATA packet
WINDOW = 1 << 20  # flow-control window of a channel: bytes sent and not yet consumed
MAX_PACKET = HEAD.size + PART + 16
MAX_LINE = 2 * MAX_PACKET
MARK, REFUSED = "@", "!"

Packet = tuple[int, int, int, bytes]


def encode_bytes(number: int, channel: int, kind: int, data: bytes = b"") -> bytes:
    """Encode a packet for the sandbox."""
    return LENGTH.pack(HEAD.size + len(data)) + HEAD.pack(number, channel, kind) + data


def encode_line(number: int, channel: int, kind: int, data: bytes = b"") -> bytes:
    """Encode a packet for the host."""
    return MARK.encode() + base64.b64encode(HEAD.pack(number, channel, kind) + data) + b"\n"


def decode_line(text: str) -> Packet:
    """Decode a packet from a line without its mark and newline. Raises ValueError for a malformed line."""
    packet = base64.b64decode(text, validate=True)
    if not HEAD.size <= len(packet) <= MAX_PACKET:
        raise ValueError(f"a packet of {len(packet)} bytes")
    return (*HEAD.unpack_from(packet), packet[HEAD.size :])


class Packets:
    """Incremental decoder: assembles whole packets from bytes that arrive in parts of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> Iterator[Packet]:
        """Yield the packets that these bytes complete."""
        self._rest += part
        while len(self._rest) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                return
            head, data = HEAD.unpack_from(self._rest, LENGTH.size), bytes(self._rest[LENGTH.size + HEAD.size : end])
            del self._rest[:end]
            yield (*head, data)
