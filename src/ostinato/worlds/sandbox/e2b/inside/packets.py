"""The line between the host and a sandbox that is far away: several streams of bytes over one, which may break and be taken up again.

To the sandbox packets go as bytes; back they come as lines of text, since whoever carries them hands over text. A packet has a number
that grows by one from packet to packet, so that one sent again is known; those that concern the line itself have 0.

Channel 0 is the line to pid 1, each other one a connection to a port. Of a channel at most `WINDOW` bytes are on their way.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator

HEAD = struct.Struct("<QIB")  # number, channel, kind
LENGTH = struct.Struct("<I")
NUMBER = struct.Struct("<Q")
OPEN, DATA, END, GONE, TOOK, LISTEN, SEEN, AGAIN = range(8)
"""Kinds: a connection came (its port), bytes, no more will come, broken off, so many bytes were passed on, listen at a port;
of the line itself: heard up to this number, and say again what comes after it."""

PART = 48 << 10  # bytes of one DATA
WINDOW = 1 << 20  # bytes of a channel that were sent and not yet passed on
MOST_PACKET = HEAD.size + PART + 16
MOST_LINE = 2 * MOST_PACKET
MARK, REFUSED = "@", "!"

Packet = tuple[int, int, int, bytes]


def as_bytes(number: int, channel: int, kind: int, data: bytes = b"") -> bytes:
    """A packet on its way in."""
    return LENGTH.pack(HEAD.size + len(data)) + HEAD.pack(number, channel, kind) + data


def as_line(number: int, channel: int, kind: int, data: bytes = b"") -> bytes:
    """A packet on its way out."""
    return MARK.encode() + base64.b64encode(HEAD.pack(number, channel, kind) + data) + b"\n"


def read_line(text: str) -> Packet:
    """A packet out of a line without its mark and end. Raises ValueError for anything else."""
    try:
        found = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    if not HEAD.size <= len(found) <= MOST_PACKET:
        raise ValueError(f"a packet of {len(found)} bytes")
    return (*HEAD.unpack_from(found), found[HEAD.size :])


class Packets:
    """Bytes as they come, in parts of any size -> whole packets."""

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
