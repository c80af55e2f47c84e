"""How long after a rollback nothing ships by itself. Pure: the ledger's times alone decide, so a restarted worker decides alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """One rollback, as the ledger has it. `by_itself`: no person asked for it.

    Example: ``RolledBack(at=60.0, by_itself=True)``
    """

    at: float
    by_itself: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    """Why nothing ships by itself. `until`: when that ends by itself; None where only a person's ship or approval ends it.

    Example: ``Brake(until=21_660.0, reason="v9 was rolled back: ...")``
    """

    until: float | None
    reason: str


def brake(rollbacks: Sequence[RolledBack], *, cooldown_s: float, a_day: int, now: float) -> Brake | None:
    """The brake that holds now, given the rollbacks since a person last shipped or approved a version, oldest first; None if none does.

    Once there were more than `a_day` rollbacks without a person within 24 hours, only a person ends the brake, however long ago that was.
    """
    own = [each.at for each in rollbacks if each.by_itself]
    for first, last in zip(own, own[a_day:], strict=False):
        if last - first < DAY:
            return Brake(
                until=None,
                reason=f"more rollbacks without a person within a day than release.rollbacks_a_day = {a_day} allows: nothing ships by "
                "itself until somebody ships or approves a version (`ostinato ship`, `ostinato approve`)",
            )
    if rollbacks and now < (until := rollbacks[-1].at + cooldown_s):
        return Brake(until=until, reason="after a rollback nothing ships by itself for a while (release.cooldown_s)")
    return None
