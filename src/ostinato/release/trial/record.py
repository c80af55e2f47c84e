"""A trial as recorded in the ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.core.dealing import Dealing
from ostinato.core.records import PolicyVersion
from ostinato.release.trial.config import Require


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial as recorded in the ledger. `shares` are the candidate's shares of the users, each with the time from which it is in force.

    `better_at` is when it was called better, and `retested` whether that held afterwards; both None before that.
    `require` is the requirement in force when it began: a rule that is changed later holds for later trials. `told_at` is when the ledger
    last got a line about its state.

    Example: ``TrialRecord(candidate=v9, against=v8, salt="9f2c", shares=((60.0, 0.05), (1860.0, 0.25)), shipped=False)``
    """

    candidate: PolicyVersion
    against: PolicyVersion
    salt: str
    shares: tuple[tuple[float, float], ...]
    shipped: bool = False
    better_at: float | None = None
    retested: bool | None = None
    require: Require = "no_loss"
    told_at: float = 0.0

    @property
    def began(self) -> float:
        """When its first users were served the candidate."""
        return self.shares[0][0]

    @property
    def better_s(self) -> float | None:
        """When it was called better, in seconds after it began."""
        return None if self.better_at is None else self.better_at - self.began

    def share(self, at: float) -> float:
        """The share in force just before `at`."""
        return max((entry for entry in self.shares if entry[0] < at), default=self.shares[0])[1]

    def then(self, at: float, share: float) -> TrialRecord:
        """The same trial with another share from `at` on."""
        return replace(self, shares=(*self.shares, (at, share)))

    def owes_a_line(self, now: float, slot_s: float) -> bool:
        """True once it is a quarter older than at its last line, and at least two slots: few lines, and none of them long out of date."""
        told_at = max(self.told_at, self.began)
        return now - told_at >= max(2.0 * slot_s, (told_at - self.began) / 4.0)

    def dealing(self) -> Dealing:
        """How users are dealt from its last share on."""
        share = self.shares[-1][1]
        return Dealing(salt=self.salt, previous=1.0 - share) if self.shipped else Dealing(salt=self.salt, canary=share)
