"""The line between the host and a remote sandbox: several byte streams over one connection, which may break and be resumed.

Packets go to the sandbox as bytes and come back as lines of text, since the carrier delivers output as text. Packets are numbered
consecutively, so that a resent one is recognised. Packets about the line itself have number 0.

Channel 0 is the line to pid 1, and each other channel is a connection to a port. A sender pauses a channel at `WINDOW` bytes in flight.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

HEAD = struct.Struct("<QIB")  # number, channel, kind
LENGTH = struct.Struct("<I")
NUMBER = struct.Struct("<Q")
OPEN, DATA, END, GONE, TOOK, LISTEN, SEEN, AGAIN = range(8)
"""Kinds of packet: new connection (its port), bytes, end of stream, connection broken off, number of bytes passed on, listen on a
port. About the line itself: received up to this number, and resend what comes after this number."""

PART = 48 << 10  # most bytes of one DATA packet
WINDOW = 1 << 20  # a channel pauses when so many bytes were sent and not yet passed on
MOST_PACKET = HEAD.size + PART + 16
MOST_LINE = 2 * MOST_PACKET
MARK, REFUSED = "@", "!"

Packet = tuple[int, int, int, bytes]


def as_bytes(number: int, channel: int, kind: int, data: bytes = b"") -> bytes:
    """Encode a packet to the sandbox."""
    return LENGTH.pack(HEAD.size + len(data)) + HEAD.pack(number, channel, kind) + data


def as_line(number: int, channel: int, kind: int, data: bytes = b"") -> bytes:
    """Encode a packet to the host."""
    return MARK.encode() + base64.b64encode(HEAD.pack(number, channel, kind) + data) + b"\n"


def read_line(text: str) -> Packet:
    """Decode a packet from a line without its mark and newline. Raises ValueError for anything else."""
    found = base64.b64decode(text, validate=True)
    if not HEAD.size <= len(found) <= MOST_PACKET:
        raise ValueError(f"a packet of {len(found)} bytes")
    return (*HEAD.unpack_from(found), found[HEAD.size :])


class Packets:
    """Assembles whole packets from bytes that arrive in parts of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> Iterator[Packet]:
        """The packets that these bytes complete."""
        self._rest += part
        while len(self._rest) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                return
            head, data = HEAD.unpack_from(self._rest, LENGTH.size), bytes(self._rest[LENGTH.size + HEAD.size : end])
            del self._rest[:end]
            yield (*head, data)
