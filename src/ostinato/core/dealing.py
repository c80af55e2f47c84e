"""How people are dealt: to the arms of a trial, or to those whose feedback is never learned from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """The users of a trial: a share of them gets the canary, or stays on the previous release; the others get live.

    Who is on the control arm takes no part, nor who stays on the verified release: a share `verified` of the users who are not on
    control, by a salt of their own. Each trial has its own salt, so that it is never the same users who try what is new. A share that
    grows keeps the users that it has.

    Example: ``Dealing(salt="9f2c41", canary=0.05)``
    """

    salt: str
    canary: float = 0.0
    previous: float = 0.0
    verified: float = 0.0
    verified_salt: str = ""


def dealing_key(salt: str) -> bytes:
    """The key of `place_of` that a salt stands for. Places under two salts have nothing to do with each other."""
    return blake2b(salt.encode(), digest_size=32).digest()


def place_of(key: bytes, tenant: str, user: str) -> float:
    """A person's place in [0, 1), the same for ever under the same key: who stands below a share belongs to it, and stays if it grows.

    Example: ``place_of(dealing_key("gold"), "default", "ann") < 0.1``
    """
    name = tenant.encode()
    digest = blake2b(len(name).to_bytes(4, "big") + name + user.encode(), key=key, digest_size=7).digest()
    # 53 bits: exact in a float, so never 1.0
    return (int.from_bytes(digest, "big") >> 3) / 2.0**53
