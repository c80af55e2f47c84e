"""A circuit breaker. Arithmetic over times that the caller gives."""

from __future__ import annotations


class Breaker:
    """Trips after `failures` failures in a row and rests; then one call at a time may retry, and each further failure doubles the rest.

    Args:
        failures: failures in a row until it trips.
        rest_s: the first rest, in seconds.
        longest_s: the longest rest, in seconds.

    Example::

        breaker = Breaker(failures=5, rest_s=15.0, longest_s=600.0)
        if breaker.allows(now):
            breaker.begin()
            ...
            breaker.end(now, well=True)  # None where it says nothing, such as when the client left
    """

    def __init__(self, *, failures: int, rest_s: float, longest_s: float) -> None:
        self._most = failures
        self._first, self._longest = rest_s, longest_s
        self._in_a_row = 0
        self._rest = rest_s
        self._until: float | None = None
        self._open = 0

    def allows(self, now: float) -> bool:
        """True if a call may be made now."""
        return self._until is None or (now >= self._until and self._open == 0)

    @property
    def resting(self) -> bool:
        """True from the failure that trips the breaker until a call succeeds."""
        return self._until is not None

    @property
    def open(self) -> int:
        """The number of calls in progress."""
        return self._open

    def begin(self) -> None:
        """A call begins."""
        self._open += 1

    def end(self, now: float, *, well: bool | None) -> None:
        """A call ended, successfully or not; None if its outcome is unknown."""
        self._open -= 1
        if well:
            self._in_a_row, self._rest, self._until = 0, self._first, None
        elif well is False:
            self._in_a_row += 1
            if self._until is not None and now >= self._until:  # a retry failed
                self._rest = min(2 * self._rest, self._longest)
                self._until = now + self._rest
            elif self._until is None and self._in_a_row >= self._most:
                self._until = now + self._rest
