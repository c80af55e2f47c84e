"""How users are dealt to the arms of a trial."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """The users of a trial: a share of them gets the canary, or stays on the previous release; the others get live.

    Who is on the control arm takes no part. Each trial has a salt of its own, so that it is never the same users who try what is new. A
    share that grows keeps the users that it has.

    Example: ``Dealing(salt="9f2c41", canary=0.05)``
    """

    salt: str
    canary: float = 0.0
    previous: float = 0.0
