"""Chooses what one round of the gate draws: the items, the sealed ones among them, and the seed. Pure; the same in every process.

No state is kept: a killed worker that starts again draws the same numbers for the same candidate and round, so a restart gives no extra
look, and every other candidate or round gets numbers of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.suites import Item, Suite


@dataclass(frozen=True, slots=True)
class Selection:
    """The items of a round in the suite's order, and the ids of those among them that are sealed.

    Example: ``Selection((item_a, item_b), frozenset({"b"}))``
    """

    items: tuple[Item, ...]
    sealed: frozenset[str]


def seed_of(suite: Suite, candidate_hash: str, round: int) -> int:
    """The seed of all draws of a suite for one candidate in one round; 63 bits."""
    return _number(f"draws\0{suite.hash}\0{candidate_hash}\0{round}") >> 1


def sealed_ids(suite: Suite, share: float) -> frozenset[str]:
    """The items that are kept sealed: those whose id hashes below `share`, so that editing the others changes nothing.

    At least one item stays open.
    """
    found = frozenset(item.id for item in suite.items if _number(f"sealed\0{item.id}") < share * 2**64)
    return frozenset() if len(found) == len(suite.items) else found


def select(suite: Suite, gate: GateConfig, candidate_hash: str, round: int) -> Selection:
    """The round's items: `items_per_round` of the open items, picked by the seed so that rounds differ, and in every
    `sealed_every`-th round the sealed items as well.
    """
    sealed = sealed_ids(suite, gate.sealed_share)
    opened = [item for item in suite.items if item.id not in sealed]
    if 0 < gate.items_per_round < len(opened):
        seed = seed_of(suite, candidate_hash, round)
        opened = sorted(opened, key=lambda item: _number(f"{seed}\0{item.id}"))[: gate.items_per_round]
    chosen = {item.id for item in opened}
    shown = sealed if (round + 1) % gate.sealed_every == 0 else frozenset[str]()
    return Selection(tuple(item for item in suite.items if item.id in chosen or item.id in shown), shown)


def items_in_round(suite: Suite, gate: GateConfig) -> int:
    """The least number of items that a round has."""
    opened = len(suite.items) - len(sealed_ids(suite, gate.sealed_share))
    return min(opened, gate.items_per_round or opened)


def _number(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest(length=8), "big")
