"""A plain follower on a host of its own: verifies each version that the refs name, and records its arrival and the hash of its bytes.

``python -m tests.examinations.hosts.follower OUT WORD ...``

Lines of JSON in the file OUT: {"kind": "have", "at", "ref", "number", "hash", "bytes", "sound"}, {"kind": "error", "at", "ref", "what"},
and at most every half minute {"kind": "looked", "at"}; the first look after a silence is always recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.app.storage import open_store
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.weights import Snapshot, Weights
from ostinato.launch.views.progress import Progress
from ostinato.weights.follow.follower import Follower
from ostinato.weights.version.content import weights_root

REFS = ("live", "control", "previous")
_SILENCE_S, _LOOK_S = 2.5, 30.0


class Noting:
    """A weight store that records when it is reached."""

    def __init__(self, inner: Any, write: Any) -> None:
        self._inner, self._write = inner, write
        self._noted = self._last = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def read_ref(self, ref: str) -> str | None:
        value = await self._inner.read_ref(ref)
        now = wall_clock()
        if now - self._last > _SILENCE_S or now - self._noted > _LOOK_S:
            self._noted = now
            self._write("looked", after_s=round(now - self._last, 3) if self._last else 0.0)
        self._last = now
        return value


def digest(weights: Weights) -> str:
    """A hash of all names, dtypes, shapes and bytes, by another algorithm than the store's."""
    found = hashlib.sha256()
    for name, array in sorted(weights.items()):
        found.update(f"{name} {array.dtype} {tuple(array.shape)}\n".encode())
        found.update(memoryview(np.ascontiguousarray(array.data)).cast("B"))
    return found.hexdigest()


async def main(out: Path, words: list[str]) -> None:
    config, write = load(None, words), Progress(out, 1 << 30).write

    async def take(ref: str, snapshot: Snapshot) -> None:
        policy = snapshot.policy
        bytes_, root = await asyncio.to_thread(lambda: (digest(snapshot.weights), weights_root(snapshot.weights)))
        write("have", ref=ref, number=policy.number, hash=policy.hash, bytes=bytes_, sound=root == policy.hash)

    def failed(ref: str, error: Exception) -> None:
        write("error", ref=ref, what=f"{type(error).__name__}: {error}"[:300])

    await Follower(Noting(open_store(config), write), config.follow).watch(REFS, take, on_error=failed)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
