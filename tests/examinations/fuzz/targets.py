"""The fuzz targets: each runs one case, returns how it ended, and raises Finding if a promise is broken."""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ostinato.core.errors import BadRequest, Corrupt, NotFound
from ostinato.core.records import PolicyVersion
from ostinato.testing.store import MemoryStore
from ostinato.weights.delta import codec as delta
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.version.content import hash_of, weights_root
from ostinato.weights.version.manifest import MAX_MANIFEST_BYTES, parse, plain, to_bytes

MAX_WEIGHTS = 1 << 24  # bytes; the follower under attack refuses versions that declare more


class Finding(Exception):
    """A promise was broken."""


@dataclass(frozen=True)
class Case:
    """One input. `about` holds everything but bytes; its `declared` is the memory that the result may take."""

    kind: str
    about: dict[str, Any]
    blobs: list[bytes] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        head = {"kind": self.kind, "about": self.about, "lengths": [len(blob) for blob in self.blobs]}
        return json.dumps(head).encode() + b"\n" + b"".join(self.blobs)

    @classmethod
    def from_bytes(cls, data: bytes) -> Case:
        line, _, rest = data.partition(b"\n")
        head, blobs, at = json.loads(line), [], 0
        for length in head["lengths"]:
            blobs.append(rest[at : at + length])
            at += length
        return cls(head["kind"], head["about"], blobs)


class Guarded:
    """Memory between two guard pages: a write or read beyond either end kills the process."""

    def __init__(self, room: int) -> None:
        page = mmap.PAGESIZE
        self._room = -(-room // page) * page
        self._map = mmap.mmap(-1, self._room + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for wall in (start, start + page + self._room):
            if libc.mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._inside = np.frombuffer(self._map, np.uint8, self._room, page)

    def place(self, data: bytes, *, at_end: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A writable copy placed against one of the guard pages."""
        start = self._room - len(data) if at_end else 0
        self._inside[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return self._inside[start : start + len(data)]


_ROOM = Guarded(1 << 20)
_PAYLOAD = Guarded(1 << 20)


def run(case: Case) -> str:
    """Run a case. Returns its outcome as a class: the target, and the message without its numbers."""
    return _TARGETS[case.kind](case)


def _decode(case: Case) -> str:
    """Decode into a target that ends or begins at a guard page. The payload is between guard pages too."""
    about, (payload, old) = case.about, case.blobs
    target = _ROOM.place(old, at_end=about["at_end"])
    given = (
        _PAYLOAD.place(payload, at_end=not about["at_end"])
        if len(payload) <= 1 << 20
        else np.frombuffer(payload, np.uint8)
    )
    name = f"decode {about['codec'] or 'nothing'} {about['dtype']}"
    try:
        delta.decode(about["codec"], target, given.data, dtype=about["dtype"], old=about["old"])
    except Corrupt as error:
        return f"{name}: refused: {_class(error)}"
    if given.tobytes() != payload:
        raise Finding("decode wrote to its payload")
    if about["result"] is None:
        return f"{name}: decoded"
    return f"{name}: decoded, {'as promised' if hash_of(target) == about['result'] else 'the hash refuses it'}"


def _manifest(case: Case) -> str:
    """Run `plain` and `parse`. A parsed manifest must serialise to its own bytes and have possible lengths."""
    data = case.blobs[0] * case.about.get("repeat", 1)
    try:
        document = plain(data)
        if len(document) > max(MAX_MANIFEST_BYTES, len(data)):
            raise Finding(f"plain gave {len(document)} bytes")
        manifest = parse(document)
    except Corrupt as error:
        return f"manifest: refused: {_class(error)}"
    if to_bytes(manifest) != document:
        raise Finding("parsed, but spells other bytes")
    if any(not 0 < need <= 1 << 54 for need in manifest.objects().values()) or manifest.full_bytes < 0:
        raise Finding("parsed with lengths that cannot be")
    return f"manifest: parsed, {manifest.kind}, {len(manifest.routes)} routes"


class Careless(MemoryStore):
    """A store that returns its objects unchecked, so that only the reader's own checks protect."""

    async def get(self, hash: str) -> bytes:
        if hash not in self.objects:
            raise NotFound(f"object {hash} is not in the weight store", field="hash")
        return self.objects[hash]


def _follow(case: Case) -> str:
    """Resolve and fetch. Delivered weights must have the requested root, whatever is in the store."""
    store = Careless()
    store.objects = dict(zip(case.about["names"], case.blobs, strict=True))
    store.links = dict(case.about["links"])
    return asyncio.run(_fetches(Follower(store, FollowerConfig(max_bytes=MAX_WEIGHTS)), case))


async def _fetches(follower: Follower, case: Case) -> str:
    """Fetch the ref's version with a follower that may already have another: by delta, squashed delta or full snapshot."""
    before = "" if case.about["before"] is None else await _fetch(follower, case.about["before"])
    found = await _fetch(follower, case.about["ref"])
    return f"{found}, after another" if "delivered" in before else found


async def _fetch(follower: Follower, ref: str) -> str:
    try:
        policy = await follower.resolve(ref)
        if policy is None:
            return "follow: no ref"
        weights = await follower.fetch(policy)
    except (Corrupt, NotFound) as error:
        return f"follow: refused: {type(error).__name__}: {_class(error)}"
    except BadRequest as error:
        return f"follow: refused: BadRequest {error.field}: {_class(error)}"
    if weights_root(weights) != policy.hash:
        raise Finding(f"delivered weights of root {weights_root(weights)} as {policy}")
    return f"follow: delivered {PolicyVersion(number=policy.number, hash='').number % 4}"


_TARGETS: dict[str, Callable[[Case], str]] = {"decode": _decode, "manifest": _manifest, "follow": _follow}


def _class(error: Exception) -> str:
    """A message without hashes, numbers and quoted text."""
    text = re.sub(r"[0-9a-f]{32,64}|'[^']*'|\"[^\"]*\"", "_", str(error))
    return re.sub(r"-?\d+", "N", text)[:160]
