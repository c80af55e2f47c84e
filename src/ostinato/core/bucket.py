"""A token bucket: how much of something may be used per second, and at once after a pause. Arithmetic over a given clock."""

from __future__ import annotations


class Bucket:
    """A token bucket: fills at `rate` per second up to `size`.

    Example: ``Bucket(rate=2.0, size=10.0, now=0.0).take(1.0, now=0.0) == 0.0``
    """

    __slots__ = ("_at", "_level", "_rate", "_size")

    def __init__(self, *, rate: float, size: float, now: float) -> None:
        self._rate, self._size = rate, size
        self._level, self._at = size, now

    def take(self, amount: float, now: float) -> float:
        """Take `amount` and return 0, or take nothing and return the seconds until it can be taken.

        More than `size` can be taken when the bucket is full; the bucket then goes into debt and refills from there.
        """
        wait_s = self.wait(amount, now)
        if not wait_s:
            self._level -= amount
        return wait_s

    def wait(self, amount: float, now: float) -> float:
        """The seconds until `amount` can be taken."""
        self._level = min(self._size, self._level + self._rate * max(0.0, now - self._at))
        self._at = now
        return max(0.0, min(amount, self._size) - self._level) / self._rate

    def give_back(self, amount: float) -> None:
        """Put back an amount that was taken and not used."""
        self._level = min(self._size, self._level + amount)
