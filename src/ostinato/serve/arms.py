"""Which release a user is served: a stable hash of tenant and user against the configured shares. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b

from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm

ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A user's arm and the probability with which a random user gets that arm.

    Example: ``Assignment(arm=Arm.LIVE, propensity=0.8)``
    """

    arm: Arm
    propensity: float


class Arms:
    """Deals users to arms.

    A user's place u in [0, 1) is the hash of salt, tenant and name. Control takes u below its share, canary takes u from the top,
    live has what is between: changing one share moves only the users whose arm must change.

    Raises:
        BadConfig: the shares exceed 1 together.
    """

    def __init__(self, *, control: float = 0.0, canary: float = 0.0, salt: str = "ostinato") -> None:
        if control < 0 or canary < 0 or control + canary > 1:
            raise BadConfig(
                f"serve.control_share {control} and serve.canary_share {canary} must each lie in [0, 1] and sum to at most 1."
            )
        self._control = control
        self._canary = canary
        self._key = blake2b(salt.encode(), digest_size=32).digest()

    def assign(self, tenant: str, user: str, loaded: Collection[str]) -> Assignment:
        """The arm of a tenant's user, given the slots that are loaded: an arm without weights gives its share to live."""
        if user == ANONYMOUS:  # many people behind one name: hashing it would move them all together
            return Assignment(arm=Arm.LIVE, propensity=1.0)
        control = self._control if Arm.CONTROL in loaded else 0.0
        canary = self._canary if Arm.CANARY in loaded else 0.0
        if not control and not canary:
            return Assignment(arm=Arm.LIVE, propensity=1.0)
        place = self._place(tenant, user)
        if place < control:
            return Assignment(arm=Arm.CONTROL, propensity=control)
        if place >= 1.0 - canary:
            return Assignment(arm=Arm.CANARY, propensity=canary)
        return Assignment(arm=Arm.LIVE, propensity=1.0 - control - canary)

    def _place(self, tenant: str, user: str) -> float:
        name = tenant.encode()
        digest = blake2b(len(name).to_bytes(4, "big") + name + user.encode(), key=self._key, digest_size=7).digest()
        return (int.from_bytes(digest, "big") >> 3) / 2.0**53  # 53 bits: exact in a float, so never 1.0
