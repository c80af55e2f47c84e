"""Publication by several ranks: each encodes and stores its own chunks. The first rank coordinates and writes the manifest.

The first rank has a socket to each other rank. A frame is a four-byte length and JSON. A request names a method of `Holder` and its
arguments; the response holds hashes, locations in the store, or an error's name. Weights are never sent over these sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from pydantic import BaseModel

from ostinato.core import errors
from ostinato.core.errors import OstinatoError, Unavailable
from ostinato.core.weights import ChunkName, WeightPart, Weights
from ostinato.weights.config import BucketConfig, PublisherConfig
from ostinato.weights.publish.chunk_source import How, PartHolder, TakenWeights
from ostinato.weights.version.manifest import StoredChunk
from ostinato.weights.version.packing import PackedChunks

_MOST_FRAME_BYTES: Final = 1 << 30
_QUEUED_PARTS: Final = 3  # one being stored, the next one, and one of a step that was never published
_HANDOVER_S: Final = 600.0  # timeout for a rank's training thread to reach the version that the first rank publishes


class RankSettings(BaseModel, frozen=True, extra="forbid"):
    """A rank's settings for its weight store and for publishing."""

    weights: BucketConfig
    publish: PublisherConfig


class Together:
    """The `Holder` of all ranks together. `own` is the first rank's holder, `lines` are the sockets to the others.

    Raises the errors that a rank raises, and Unavailable once a rank is gone.
    """

    def __init__(self, own: PartHolder, lines: Sequence[socket.socket]) -> None:
        self._own = own
        self._ranks = [_Line(rank, line) for rank, line in enumerate(lines, 1)]
        self.whole = False

    async def take(self, number: int, weights: Weights | WeightPart, *, check: bool, finite: bool) -> TakenWeights:
        own, others = await asyncio.gather(
            self._own.take(number, weights, check=check, finite=finite),
            self._ask("take", number=number, check=check, finite=finite),
        )
        hashes = dict(own.hashes)
        for answer in others:
            hashes |= {_chunk_name(at): str(result) for *at, result in answer}
        return TakenWeights(forms=own.forms, hashes=hashes)

    async def holds(self, root: str) -> bool:
        own, others = await asyncio.gather(self._own.holds(root), self._ask("holds", root=root))
        return own and all(others)

    def due(self, base: str) -> list[tuple[int, str]]:
        return self._own.due(base)

    async def pack(self, how: How) -> PackedChunks:
        own, others = await asyncio.gather(self._own.pack(how), self._ask("pack", **asdict(how)))
        chunks = dict(own.chunks)
        changed = [own.changed]
        for answer in others:
            chunks |= {_chunk_name(at): StoredChunk.model_validate(chunk) for *at, chunk in answer["chunks"]}
            changed.append(answer["changed"])
        counted = None if None in changed else sum(count for count in changed if count is not None)
        return PackedChunks(chunks=chunks, changed=counted, undo={})

    async def keep(self, root: str, parent: str | None) -> None:
        await asyncio.gather(self._own.keep(root, parent), self._ask("keep", root=root, parent=parent))

    async def _ask(self, what: str, **arguments: Any) -> list[Any]:
        """Send a request to all other ranks, and return their answers."""
        return await asyncio.gather(*(rank.ask(what, **arguments) for rank in self._ranks))

    async def close(self) -> None:
        """Close the connections to the other ranks."""
        for rank in self._ranks:
            await rank.close()


class _Line:
    """The first rank's connection to one other rank. Requests run one at a time."""

    def __init__(self, rank: int, line: socket.socket) -> None:
        self._rank, self._socket = rank, line
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, what: str, **arguments: Any) -> Any:
        async with self._lock:
            try:
                if self._streams is None:
                    self._streams = await asyncio.open_connection(sock=self._socket)
                await _send(self._streams[1], {"do": what, "with": arguments})
                response = await _receive(self._streams[0])
            except (OSError, EOFError) as error:
                raise Unavailable(
                    f"rank {self._rank} of the trainer is lost: its chunks cannot be published"
                ) from error
        if "error" in response:
            kind = getattr(errors, response["error"], Unavailable)
            raise kind(f"rank {self._rank}: {response['message']}")
        return response["answer"]

    async def close(self) -> None:
        if self._streams is None:
            self._socket.close()
            return
        self._streams[1].close()
        with contextlib.suppress(OSError):
            await self._streams[1].wait_closed()


class Handed:
    """A queue from the training thread to the publishing thread: the newest parts, keyed by version number."""

    def __init__(self) -> None:
        self._parts: OrderedDict[int, WeightPart] = OrderedDict()
        self._changed = threading.Condition()
        self._taken = -1

    def put(self, number: int, part: WeightPart) -> None:
        """Hand over the part of version `number`."""
        with self._changed:
            self._parts[number] = part
            self._parts.move_to_end(number)
            while len(self._parts) > _QUEUED_PARTS:
                self._parts.popitem(last=False)
            self._changed.notify_all()

    def take(self, number: int) -> WeightPart:
        """Wait for the part of version `number`. It can be taken again until `published` is called. Raises Unavailable."""
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._parts, _HANDOVER_S):
                raise Unavailable(f"version {number} was not handed over within {_HANDOVER_S:.0f} s")
            self._taken = number
            return self._parts[number]

    def published(self) -> None:
        """Drop the part that was last taken, and all older ones."""
        with self._changed:
            for number in [number for number in self._parts if number <= self._taken]:
                del self._parts[number]


async def publish_part(line: socket.socket, holder: PartHolder, handed: Handed) -> None:
    """Serve the first rank's requests on another rank, until the first rank is gone."""
    reader, writer = await asyncio.open_connection(sock=line)
    with contextlib.closing(writer), contextlib.suppress(OSError, EOFError):
        while True:
            request = await _receive(reader)
            try:
                response = {"answer": await _answer(request["do"], request["with"], holder, handed)}
            except OstinatoError as error:
                response = {"error": type(error).__name__, "message": str(error)}
            await _send(writer, response)


async def _answer(what: str, arguments: Mapping[str, Any], holder: PartHolder, handed: Handed) -> Any:
    match what:
        case "take":
            part = await asyncio.to_thread(handed.take, arguments["number"])
            taken = await holder.take(weights=part, **arguments)
            return [[*at, result] for at, result in taken.hashes.items()]
        case "holds":
            return await holder.holds(**arguments)
        case "pack":
            packed = await holder.pack(How(**arguments))
            return {
                "chunks": [[*at, chunk.model_dump()] for at, chunk in packed.chunks.items()],
                "changed": packed.changed,
            }
        case "keep":
            await holder.keep(**arguments)
            handed.published()
            return None
        case _:
            raise Unavailable(f"there is no request {what!r} to a rank")


def _chunk_name(at: Sequence[Any]) -> ChunkName:
    name, index = at
    return str(name), int(index)


async def _send(writer: asyncio.StreamWriter, value: Any) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MOST_FRAME_BYTES:
        raise EOFError(f"a frame of {size} bytes")
    return json.loads(await reader.readexactly(size))
