"""Which of several replicas answers a request: the one that was sent most of its prompt before, unless its load is too high.

A replica is a server that holds the requested version. Nothing here queries a server: the contents of its prefix cache are guessed from
what was sent to it, and a wrong guess costs a prefill, never a wrong answer.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

BLOCK = 64
"""Tokens per link of a prompt's chain: the granularity of the memory."""
BOUND = 1.25
"""A request avoids replicas that would then exceed this many times the mean number of open samples, rounded up."""
_KEPT = 1 << 15  # links remembered per replica: 2M tokens


def links(key: bytes, ids: Sequence[int]) -> list[bytes]:
    """A prompt as a hash chain: link i covers `key` and the first (i + 1) * BLOCK tokens; the last link covers all tokens.

    Prompts share links exactly as far as they share whole blocks from the first token on, under the same key (`engine.prefix`).

    Example: ``links(k, range(70))[:1] == links(k, range(64))``
    """
    chain, last = list[bytes](), key
    for start in range(0, len(ids), BLOCK):
        last = blake2b(last + array("q", ids[start : start + BLOCK]).tobytes(), digest_size=8).digest()
        chain.append(last)
    return chain


class Trails:
    """The most recent links that were sent to each replica, by the replica's name.

    Example::

        trails.send("http://a", chain)
        assert trails.known("http://a", chain) == len(chain)
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._links: dict[str, OrderedDict[bytes, None]] = {}

    def known(self, name: str, chain: Sequence[bytes]) -> int:
        """How many leading links of a chain the replica was sent before."""
        sent = self._links.get(name, {})
        return next((at for at, link in enumerate(chain) if link not in sent), len(chain))

    def send(self, name: str, chain: Sequence[bytes]) -> None:
        """Record that a prompt is sent to the replica. The oldest links are forgotten, within a prompt its end before its beginning."""
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

    Replicas are ordered by known links, most first, then by rendezvous hashing (Thaler and Ravishankar 1998) of the first link that the
    best replica does not know, so that prompts with the same beginning meet even without a memory. The first replica that stays within
    BOUND times the mean is chosen (Mirrokni et al. 2018), or else the least loaded one: a request of many samples is never split.

    Args:
        known: name -> how many links of the request's prompt the replica was sent before. Not empty.
        running: name -> open samples.
        chains: name -> the prompt's chain under the replica's key; not empty.
        samples: how many samples are requested.
    """
    best = max(known.values())

    def weight(name: str) -> bytes:
        chain = chains[name]
        return blake2b(chain[min(best, len(chain) - 1)] + name.encode(), digest_size=8).digest()

    order = sorted(known, key=lambda name: (known[name], weight(name)), reverse=True)
    most = math.ceil(BOUND * (sum(running[name] for name in order) + samples) / len(order))
    return next((name for name in order if running[name] + samples <= most), min(order, key=lambda name: running[name]))
