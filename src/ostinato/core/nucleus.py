"""Nucleus sets: the token ids allowed by top_p for each sampled token, as recorded by the engine and replayed by the trainer.

Log-probabilities of such tokens are those of the distribution renormalised over their set. The set must be recorded: a trainer whose
weights have changed would compute another one, and where the two differ the gradient is biased (the sampling mask of DeepSeek-V3.2,
2512.02556).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]
_WORD = np.dtype("<u4")

MAX_BYTES = 512 << 10
"""Most bytes of one turn's sets, such as 100 ids for each of 1,200 tokens; a longer turn is stored without them, and teaches nothing."""


def encode(ids: Ids) -> bytes:
    """Encode one token's set, ascending and not empty: its size, then each id's difference from the previous one. Concatenate the results
    for several tokens.

    Example: ``encode(np.array([3, 7]))`` is the words 2, 3, 4, little-endian.
    """
    return np.concatenate([[len(ids)], np.diff(ids, prepend=0)]).astype(_WORD).tobytes()


def decode(data: bytes, tokens: int) -> list[Ids]:
    """Decode the set of each of `tokens` tokens, ascending. Raises ValueError if the bytes do not match."""
    if len(data) % _WORD.itemsize:
        raise ValueError(f"{len(data)} bytes are no nucleus sets")
    words = np.frombuffer(data, _WORD).astype(np.int64)
    found: list[Ids] = []
    at = 0
    while at < len(words):
        end = at + 1 + int(words[at])
        if words[at] == 0 or end > len(words):
            raise ValueError(f"the nucleus set of token {len(found)} is cut off or empty")
        found.append(words[at + 1 : end].cumsum())
        at = end
    if len(found) != tokens:
        raise ValueError(f"there are nucleus sets of {len(found)} of {tokens} tokens")
    return found
