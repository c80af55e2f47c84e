"""Which task is next: each once an epoch, shuffled; those first that still have something to teach. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LEAST, MOST = 0.1, 0.9  # of the rollouts solved: outside, a group seldom holds both a success and a failure
KEPT = (
    1 - 1 / 32
)  # of what was known, with each further rollout: the policy learns, and what was too hard is so no longer


@dataclass(slots=True, kw_only=True)
class Success:
    """How many rollouts of a task there were lately, and the sum of their grades: each counts `KEPT` times as much as the one after it.

    Example: ``Success(rollouts=16, grades=4.0).teaches``
    """

    rollouts: float = 0.0
    grades: float = 0.0

    def count(self, grade: float) -> None:
        """One more rollout."""
        self.rollouts = KEPT * self.rollouts + 1
        self.grades = KEPT * self.grades + grade

    @property
    def teaches(self) -> bool:
        """True if its rollouts turned out differently, or if there was none."""
        return not self.rollouts or LEAST <= self.grades / self.rollouts <= MOST


def shuffled(tasks: Iterable[str], epoch: int, seed: int) -> list[str]:
    """The tasks in an epoch's order: the same for the same seed, whatever order they are given in.

    Example: ``shuffled(["a", "b"], epoch=0, seed=0)``
    """

    def place(task: str) -> bytes:
        return hashlib.blake2b(f"{seed}\0{epoch}\0{task}".encode(), digest_size=16).digest()

    return sorted(tasks, key=place)


def next_task(left: Sequence[str], known: Mapping[str, Success], *, curriculum: bool) -> str:
    """The next of the tasks that are left of an epoch, in its order: the first that teaches, if the curriculum is on, else the first.

    Nothing is left out: what is too easy or too hard now comes at the end of the epoch, and may have changed by then.
    """
    if not curriculum:
        return left[0]
    return next((task for task in left if known.get(task, Success()).teaches), left[0])
