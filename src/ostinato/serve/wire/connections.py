"""How many connections may be open at once: in all, and from one address. Counting only; whoever is refused is closed at once."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address


class Connections:
    """The connections that are open.

    Args:
        most: how many there may be in all; 0: any number.
        per_address: how many one address may have, or one /64 network, of which an IPv6 host has all addresses; 0: any number.

    Example: ``Connections(most=800, per_address=100).enter("10.0.0.7")``
    """

    def __init__(self, *, most: int = 0, per_address: int = 0) -> None:
        self._most = most
        self._per_address = per_address
        self._all = 0
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count one more from this address; False, and it is not counted, if there are too many."""
        where = _network(address)
        if 0 < self._most <= self._all or 0 < self._per_address <= self._open[where]:
            return False
        self._all += 1
        self._open[where] += 1
        return True

    def leave(self, address: str) -> None:
        """One that entered has ended."""
        where = _network(address)
        self._all -= 1
        self._open[where] -= 1
        if not self._open[where]:
            del self._open[where]


def _network(address: str) -> str:
    if ":" not in address:
        return address
    try:
        full = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(full.ipv4_mapped or full.exploded[:19])
