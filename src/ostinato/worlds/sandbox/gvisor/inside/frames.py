"""The messages between the host and pid 1 of a gVisor sandbox: a JSON object followed by bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

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
