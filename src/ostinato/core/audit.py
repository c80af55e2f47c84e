"""The audit trail: who did what to a run."""

from __future__ import annotations

import hashlib
from typing import Protocol

_SHORTEST_KEY = 16  # a shorter text is no key, and its digest could be brute-forced


class Audit(Protocol):
    """Records operators' actions, sign-ins and wrong keys. Never raises, and is never given a key itself."""

    def __call__(
        self,
        act: str,
        *,
        result: str,
        key: str = "",
        tenant: str = "",
        address: str = "",
        stranger: bool = False,
        **facts: str,
    ) -> None:
        """Record an act. `key`: its `fingerprint`; `address`: where the request came from; `stranger`: whoever did it is no operator, and
        could repeat it without limit; `facts`: what else describes the act.
        """
        ...


def unaudited(act: str, **_: object) -> None:
    """Record nothing, as an `Audit`."""


def fingerprint(key: bytes) -> str:
    """Return eight hexadecimal digits that identify a key but do not reveal it; "" for a text too short to be a key.

    Example: ``fingerprint(b"sk-0123456789abcdef")`` is the same on all hosts and after each restart.
    """
    if len(key) < _SHORTEST_KEY:
        return ""
    return hashlib.blake2b(key, digest_size=4, person=b"ostinato audit").hexdigest()
