"""The audit trail: who did what to a run, for the day when somebody has to know."""

from __future__ import annotations

import hashlib
from typing import Protocol

_SHORTEST_KEY = 16  # a shorter text is no key, and its digest could be undone


class Audit(Protocol):
    """Records acts of operators, sign-ins and wrong keys. Never raises, and is never given a key itself."""

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
        """`key`: its `fingerprint`; `address`: where the request came from; `stranger`: whoever did it is no operator, and could do it
        without end; `facts`: what else describes the act.
        """
        ...


def unaudited(act: str, **_: object) -> None:
    """An `Audit` that keeps nothing."""


def fingerprint(key: bytes) -> str:
    """Eight hexadecimal digits by which a key is recognised and from which it cannot be recovered; "" for what is too short for a key.

    Example: ``fingerprint(b"sk-0123456789abcdef")`` is the same on all hosts and after each restart.
    """
    if len(key) < _SHORTEST_KEY:
        return ""
    return hashlib.blake2b(key, digest_size=4, person=b"ostinato audit").hexdigest()
