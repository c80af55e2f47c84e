"""Chooses the next task: each once an epoch, shuffled, those first that still have something to teach. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LEAST, MOST = 0.1, 0.9  # share of rollouts solved: outside of this, a group seldom holds both a success and a failure
KEPT = 1 - 1 / 32  # decay with each further rollout: the policy learns, so a task that was too hard may no longer be


@dataclass(slots=True, kw_only=True)
class Success:
    """The number of a task's recent rollouts, and the sum of their grades: each counts `KEPT` times as much as the one after it.

    Example: ``Success(rollouts=16, grades=4.0).teaches``
    """

    rollouts: float = 0.0
    grades: float = 0.0

    def count(self, grade: float) -> None:
        """Count one more rollout."""
        self.rollouts = KEPT * self.rollouts + 1
        self.grades = KEPT * self.grades + grade

    @property
    def teaches(self) -> bool:
        """True if its mean grade lies between `LEAST` and `MOST`, or if it has no rollouts."""
        return not self.rollouts or LEAST <= self.grades / self.rollouts <= MOST


def shuffled(tasks: Iterable[str], epoch: int, seed: int) -> list[str]:
    """The tasks in an epoch's order: the same for the same seed, whatever order they are given in.

    Example: ``shuffled(["a", "b"], epoch=0, seed=0)``
    """

    def place(task: str) -> bytes:
        return hashlib.blake2b(f"{seed}\0{epoch}\0{task}".encode(), digest_size=16).digest()

    return sorted(tasks, key=place)


def next_task(left: Sequence[str], known: Mapping[str, Success], *, curriculum: bool) -> str:
    """The next of an epoch's remaining tasks, in its order: with the curriculum, the first that teaches if any does; else the first.

    No task is left out: those that are too easy or too hard now come at the end of the epoch, and may have changed by then.
    """
    if not curriculum:
        return left[0]
    return next((task for task in left if known.get(task, Success()).teaches), left[0])
