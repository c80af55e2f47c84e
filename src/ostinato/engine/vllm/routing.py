"""Which of several replicas answers a request: the one that was sent most of its prompt before, unless it has too much to do.

A replica is a server that holds the version that is wanted. Nothing here asks a server anything: what a prefix cache holds is guessed
from what was sent, and a wrong guess costs a prefill, never a wrong answer.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

BLOCK = 64
"""Tokens per link of a prompt's chain: the grain of what is remembered."""
BOUND = 1.25
"""No replica is given more than this many times the mean of the open samples, rounded up."""
_KEPT = 1 << 15  # links remembered of each replica: 2M tokens


def links(key: bytes, ids: Sequence[int]) -> list[bytes]:
    """A prompt as a chain: link i stands for `key` and the first (i + 1) * BLOCK tokens, the last one for all of them.

    Prompts share links exactly as far as they share whole blocks from the first token on, under the same key (`engine.prefix`).

    Example: ``links(k, range(70))[:1] == links(k, range(64))``
    """
    chain, last = list[bytes](), key
    for start in range(0, len(ids), BLOCK):
        last = blake2b(last + array("q", ids[start : start + BLOCK]).tobytes(), digest_size=8).digest()
        chain.append(last)
    return chain


class Trails:
    """The newest links that were sent to each replica, by its name.

    Example::

        trails.send("http://a", chain)
        assert trails.known("http://a", chain) == len(chain)
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._links: dict[str, OrderedDict[bytes, None]] = {}

    def known(self, name: str, chain: Sequence[bytes]) -> int:
        """How many links from the first on it was sent before."""
        sent = self._links.get(name, {})
        return next((at for at, link in enumerate(chain) if link not in sent), len(chain))

    def send(self, name: str, chain: Sequence[bytes]) -> None:
        """A prompt goes there. The oldest links are forgotten; of a prompt its end before its beginning."""
        sent = self._links.setdefault(name, OrderedDict())
        for link in reversed(chain):
            sent[link] = None
            sent.move_to_end(link)
        while len(sent) > self._kept:
            sent.popitem(last=False)


def route(
    known: Mapping[str, int], running: Mapping[str, int], chains: Mapping[str, Sequence[bytes]], samples: int
) -> str:
    """The name of the replica that a request goes to.

    In this order: more known links first, then rendezvous hashing (Thaler and Ravishankar 1998) of the first link that the best does
    not know, so that prompts that begin alike meet without a memory too. The first in order that stays within BOUND times the mean
    takes it (Mirrokni et al. 2018), or else the one with the least to do: a request of many samples is never split.

    Args:
        known: name -> how many links of the request's prompt it was sent before. Not empty.
        running: name -> open samples.
        chains: name -> the prompt's chain under the key that holds there; not empty.
        samples: how many samples are asked for.
    """
    best = max(known.values())

    def weight(name: str) -> bytes:
        chain = chains[name]
        return blake2b(chain[min(best, len(chain) - 1)] + name.encode(), digest_size=8).digest()

    order = sorted(known, key=lambda name: (known[name], weight(name)), reverse=True)
    most = math.ceil(BOUND * (sum(running[name] for name in order) + samples) / len(order))
    return next((name for name in order if running[name] + samples <= most), min(order, key=lambda name: running[name]))
