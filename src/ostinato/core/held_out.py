"""Held-out prompts: the prompts of evaluation suites, recognised by a hash of their tokens, so that they are never learned from."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np


def prompt_hash(ids: Sequence[int]) -> str:
    """Return a hash of a prompt's token ids, 32 hex digits."""
    return hashlib.blake2b(np.asarray(ids, dtype="<u4").tobytes(), digest_size=16).hexdigest()


class HeldOutPrompts:
    """The prompts of suites, given as (number of tokens, hash).

    Example: ``HeldOutPrompts([(3, prompt_hash((1, 2, 3)))]).covers((1, 2, 3, 4))``
    """

    def __init__(self, prompts: Iterable[tuple[int, str]] = ()) -> None:
        self._hashes: defaultdict[int, set[str]] = defaultdict(set)
        for tokens, hash in prompts:
            self._hashes[tokens].add(hash)

    def __len__(self) -> int:
        return sum(map(len, self._hashes.values()))

    def covers(self, ids: Sequence[int]) -> bool:
        """Return True if these ids are a held-out prompt or begin with one, as the later prompts of its conversation do."""
        if not self._hashes:
            return False
        data = memoryview(np.asarray(ids, dtype="<u4").tobytes())
        running, done = hashlib.blake2b(digest_size=16), 0
        for tokens in sorted(self._hashes):
            if tokens > len(ids):
                break
            running.update(data[4 * done : 4 * tokens])
            done = tokens
            if running.hexdigest() in self._hashes[tokens]:
                return True
        return False
