"""Limits on open connections, in total and per address. It only counts; the caller closes refused connections at once."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address


class Connections:
    """Counts open connections.

    Args:
        most: most connections in total; 0: no limit.
        per_address: most connections per address (for IPv6 per /64 network, since one host owns all its addresses); 0: no limit.

    Example: ``Connections(most=800, per_address=100).enter("10.0.0.7")``
    """

    def __init__(self, *, most: int = 0, per_address: int = 0) -> None:
        self._most = most
        self._per_address = per_address
        self._all = 0
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count a connection from this address. Return False, without counting it, if there are too many."""
        where = _network(address)
        if 0 < self._most <= self._all or 0 < self._per_address <= self._open[where]:
            return False
        self._all += 1
        self._open[where] += 1
        return True

    def leave(self, address: str) -> None:
        """Count the end of a connection that `enter` admitted."""
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
