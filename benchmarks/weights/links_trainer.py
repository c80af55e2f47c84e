"""The stand-in for training in links.py: versions of a model that change as in training, and a thread that computes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
from numpy.typing import NDArray

from ostinato.core.weights import WeightArray, Weights
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher

Codes = NDArray[np.uint16]
_BLOCK = 1 << 22  # elements per draw
_SIDE = 320  # size of the matrices that a slice of training multiplies


class Versions:
    """The cached model's bf16 tensors, and changes to them: about `share` of all elements by one ordered ULP per version.

    The probability of a change doubles with each smaller exponent, as in training, where the same optimizer step is more ULPs of a
    smaller weight. Changes are drawn ahead of time; `next` applies one version's changes to a copy.
    """

    def __init__(self, model: Path, share: float, seed: int) -> None:
        tensors = [
            (name, found) for name, found in safetensors.deserialize(model.read_bytes()) if found["dtype"] == "BF16"
        ]
        self._forms = [(name, tuple(found["shape"])) for name, found in tensors]
        self._codes: Codes = np.concatenate([np.frombuffer(found["data"], np.uint16) for _, found in tensors])
        self._rng = np.random.default_rng(seed)
        self._chance = _chances(np.bincount((self._codes >> 7) & 255, minlength=256), share)
        self._drawn: list[tuple[NDArray[np.intp], NDArray[np.int32]]] = []

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes

    def draw(self, count: int) -> Iterator[None]:
        """Draw the changes of `count` versions, one per step of the iteration."""
        for _ in range(count):
            places = [
                start + np.flatnonzero(self._rng.random(len(part), np.float32) < self._chance[(part >> 7) & 255])
                for start in range(0, len(self._codes), _BLOCK)
                for part in (self._codes[start : start + _BLOCK],)
            ]
            found = np.concatenate(places)
            self._drawn.append((found, self._rng.choice(np.array([-1, 1], np.int32), len(found))))
            yield

    def now(self) -> Weights:
        """The current weights."""
        found: dict[str, WeightArray] = {}
        at = 0
        for name, shape in self._forms:
            size = int(np.prod(shape))
            found[name] = WeightArray("BF16", shape, self._codes[at : at + size].view(np.uint8))
            at += size
        return found

    def next(self) -> Weights:
        """The next version, in newly allocated memory."""
        places, steps = self._drawn.pop(0)
        codes = self._codes.copy()
        old = codes[places].astype(np.int32)
        line = np.where(old < 0x8000, old, 0x7FFF - old) + steps
        codes[places] = np.where(line >= 0, line, 0x7FFF - line).astype(np.uint16)
        self._codes = codes
        return self.now()


def _chances(counts: NDArray[np.int64], share: float) -> NDArray[np.float32]:
    """The probability of a change for each exponent, such that `share` of all elements change."""
    total, shape = counts.sum(), 2.0 ** -np.arange(256)
    low, high = 0.0, 1 / shape[-1]
    for _ in range(400):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * shape) @ counts < share * total else (low, middle)
    return np.minimum(1, low * shape).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Slice:
    """One unit of the training thread's constant work: its times, its seconds on a core, and its seconds waiting for a core."""

    began: float
    ended: float
    cpu_s: float
    queued_s: float


async def warm() -> None:
    """Encode and decode one small delta, so that compilation does not fall into the measurement."""
    store, codes = MemoryStore(), np.arange(1 << 14, dtype=np.uint16)
    publisher, base = VersionPublisher(store), None
    for number in range(2):
        weights = {"w": WeightArray("BF16", (1 << 14,), (codes ^ number).view(np.uint8))}
        base = (await publisher.publish(number, weights, run="warm", base=base)).policy
        await Follower(store).fetch(base)


class Training(threading.Thread):
    """A thread that repeats the same small numpy work, on one core when it gets one, and records each repetition in `slices`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.slices: list[Slice] = []
        self._ending = threading.Event()

    def run(self) -> None:
        a = np.random.default_rng(0).random((_SIDE, _SIDE), np.float32)
        b = np.empty_like(a)
        counters = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        cpu, queued = _counters(counters)
        began = time.monotonic()
        while not self._ending.is_set():
            for _ in range(4):
                np.matmul(a, a, out=b)
                np.add(b, 1.0, out=b)
            ended = time.monotonic()
            now_cpu, now_queued = _counters(counters)
            self.slices.append(Slice(began, ended, now_cpu - cpu, now_queued - queued))
            began, cpu, queued = ended, now_cpu, now_queued
        os.close(counters)

    def end(self) -> None:
        self._ending.set()
        self.join()

    def within(self, began: float, ended: float) -> list[Slice]:
        """The slices that lie wholly between two times."""
        return [one for one in self.slices if began <= one.began and one.ended <= ended]


def _counters(file: int) -> tuple[float, float]:
    """Seconds that this thread has run on a core, and has waited for one while ready to run."""
    cpu, queued, _ = os.pread(file, 100, 0).split()
    return int(cpu) / 1e9, int(queued) / 1e9


def held_up(training: Training, began: float, ended: float, quiet_s: float) -> dict[str, float]:
    """How much a thread that would need `quiet_s` per slice was delayed between two instants.

    `held_s` is the delay. `queued_s` is the time that the thread waited for a core, and `blocked_s` the time that it neither ran nor
    waited for a core, that is, waited for the GIL.
    """
    slices = training.within(began, ended)
    wall = sum(one.ended - one.began for one in slices)
    return {
        "seconds": ended - began,
        "slices": len(slices),
        "held_s": wall - quiet_s * len(slices),
        "queued_s": sum(one.queued_s for one in slices),
        "blocked_s": sum(one.ended - one.began - one.cpu_s - one.queued_s for one in slices),
        "longest_slice_s": max((one.ended - one.began for one in slices), default=0.0),
    }


class Stalls:
    """How late the event loop's timers are: a task that sleeps for `step_s` again and again. `late` holds (when, seconds late)."""

    def __init__(self, step_s: float = 0.005) -> None:
        self._step_s = step_s
        self.late: list[tuple[float, float]] = []

    async def run(self) -> None:
        while True:
            due = time.monotonic() + self._step_s
            await asyncio.sleep(self._step_s)
            now = time.monotonic()
            self.late.append((now, now - due))

    def worst(self, began: float, ended: float) -> float:
        return max((late for when, late in self.late if began <= when <= ended), default=0.0)
