"""When a worker has loaded what it needs, the collector of garbage need not look through that again."""

from __future__ import annotations

import gc


def settle() -> None:
    """Leave out of every later collection what is there by now. Call it once, when a worker is up and before anybody waits for it.

    A full collection looks through all that torch, transformers and compiled kernels have made: 0.3 s in which no token is
    sampled and no call answered. What is left out is still freed when nothing refers to it any more, weights among it.
    """
    gc.collect()
    gc.freeze()
