"""Fetches and verifies versions in the background of a third-party engine, so that the engine need not stop for a download.

The fetch runs in a thread with its own event loop. The engine's thread only polls its status and finally takes the weights, which are
handed over only when every hash matches.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Literal

from ostinato.core.records import PolicyVersion
from ostinato.core.seams import WeightStore
from ostinato.core.weights import Weights
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.version.content import check_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The status of a version. `error`: why it was refused; `seconds`: the time since `stage` was called, or until the fetch was done.

    Example: ``Staged(root="9f2c...", state="ready", error="", seconds=0.41)``
    """

    root: str
    state: Literal["nothing", "fetching", "ready", "refused"]
    error: str
    seconds: float


class Staging:
    """Fetches one version at a time with a `Follower` in a background thread. All methods must be called from the same thread.

    `check` is called with the verified weights before they count as ready, and raises if the engine cannot use them.

    Example::

        staging = Staging(DirectoryStore(Path("weights")))
        staging.stage(root)
        while staging.status().state == "fetching":
            engine.step()
        weights = staging.take(root)
    """

    def __init__(self, store: WeightStore, check: Callable[[Weights], None] | None = None) -> None:
        # two versions: the one being served, which the next delta needs, and one that was refused after it
        self._follower = Follower(store, FollowerConfig(keep=2))
        self._check = check
        self._root, self._asked, self._took = "", 0.0, 0.0
        self._work: Future[Weights] | None = None
        self._closing = asyncio.Event()
        # with a factory the runner leaves this thread's loop alone
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="ostinato-staging", daemon=True)
        self._thread.start()

    def stage(self, root: str) -> Staged:
        """Start to fetch a version, and drop any other one. Does nothing if it is being fetched or ready; retries a refused one.

        Raises: BadRequest for a root of the wrong form.
        """
        check_hash(root, "root")
        if self._work is None or root != self._root or self.status().state == "refused":
            if self._work is not None:
                self._work.cancel()
            self._root, self._asked = root, time.perf_counter()
            self._work = asyncio.run_coroutine_threadsafe(self._fetch(root), self._loop)
        return self.status()

    def status(self) -> Staged:
        """Return the status of the version that was staged last."""
        work = self._work
        if work is None:
            return Staged(root="", state="nothing", error="", seconds=0.0)
        if not work.done():
            return Staged(root=self._root, state="fetching", error="", seconds=time.perf_counter() - self._asked)
        error = CancelledError("it was given up") if work.cancelled() else work.exception()
        if error is not None:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            return Staged(root=self._root, state="refused", error=why, seconds=self._took)
        return Staged(root=self._root, state="ready", error="", seconds=self._took)

    def take(self, root: str) -> Weights:
        """Return the verified weights of a version. Waits if they are not ready.

        Raises: NotFound, Corrupt or BadWeights, which name the object or tensor; BadRequest for a root of the wrong form.
        """
        self.stage(root)
        assert self._work is not None
        return self._work.result()

    def resolve(self, ref: str) -> str | None:
        """Return the root of the version that a ref points to now, or None. Raises BadRequest, NotFound or Corrupt."""
        policy = asyncio.run_coroutine_threadsafe(self._follower.resolve(ref), self._loop).result()
        return None if policy is None else policy.hash

    def close(self) -> None:
        """Cancel the current fetch and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._closing.wait())

    async def _fetch(self, root: str) -> Weights:
        try:
            weights = await self._follower.fetch(PolicyVersion(number=0, hash=root))  # the root alone names a version
            if self._check is not None:
                await asyncio.to_thread(self._check, weights)
            return weights
        finally:
            self._took = time.perf_counter() - self._asked


def part_of(name: str) -> str:
    """Return the part of a model that a tensor belongs to: its outermost numbered block, or else the module that holds it.

    No engine fuses tensors across these: ``model.layers.3.self_attn.q_proj.weight`` -> ``model.layers.3``,
    ``model.norm.weight`` -> ``model.norm``.
    """
    pieces = name.split(".")
    for at, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: at + 1])
    return ".".join(pieces[:-1])


def changed_parts(old: Weights | None, new: Weights) -> dict[str, list[str]]:
    """Return the parts in which a tensor changed, each with the names of all its tensors, sorted.

    A tensor counts as unchanged if both versions share its memory, as a follower ensures. Without `old` all tensors count as changed.
    """
    parts: dict[str, list[str]] = {}
    for name in sorted(new):
        parts.setdefault(part_of(name), []).append(name)
    if old is None:
        return parts
    return {
        part: names
        for part, names in parts.items()
        if any(name not in old or old[name].data is not new[name].data for name in names)
    }
